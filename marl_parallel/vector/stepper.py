"""`FacadeStepper`: a `Stepper` of a `ParallelEnv` with arrays over all environments, for one facade.

A facade has one library's shapes and names, and `FacadeStepper` the checks of all facades: who steps, and in which
order calls come. Its `ArrayView` (`core/block/array_view.py`) writes actions and reads transitions. `ArrayStepper` has
the same methods, and allows only one call at a time; an `ArrayFacade` does this itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Actions, Arrays, ArrayView, Joint, ResultDoesNotFit, Stacked
from marl_parallel.core.block.arrays import action_masks
from marl_parallel.core.exclusive import CallGuard, exclusive
from marl_parallel.core.messages import Message
from marl_parallel.core.pool.saved_states import to_bytes
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.runner import BatchRunner, deprecated_runner
from marl_parallel.stepper import Batch, Options, Seeds, Stepper
from marl_parallel.types import NoSpaceDeclared, ParallelEnvError
from marl_parallel.vector.forwarding import OfParallelEnv
from marl_parallel.vector.saving import facades_with, key_of, own_values
from marl_parallel.vector.scalarize import Scalarize, reward_rules

__all__ = ["ArrayStepper", "Arrays", "FacadeStepper", "Joint", "Stacked"]


class FacadeStepper(OfParallelEnv, Stepper[Actions, Arrays]):
    """Resets and steps all environments of a `ParallelEnv` with arrays, for one facade.

    The arrays have one row for each environment and one column for each possible agent; see `Arrays`. They are the
    facade's own, except observations with `copy=False`. The facade makes sure that only one call runs at a time, as
    `ArrayFacade` does.

    Args:
        env: The `ParallelEnv`. All its agents are known beforehand and declare both spaces.
        facade: The object that steps. While it lives and is not closed, no other facade may step `env`. The
            attribute `saved_as` of its class is the key of its own values in saved states, which must stay the same;
            without it, the key is the name of the class.
        modes: The auto-reset modes that the facade supports; none for all.
        copy: Whether observations are arrays of the facade's own; None for the `copy` of `env`.
        scalarize: Turns vector rewards into numbers, see `Scalarize`.
        vectors: Whether the facade takes vector rewards as they are, in `Arrays.vectors`.
        partial_resets: Whether the facade resets or steps some environments without the others.

    Attributes:
        env: The `ParallelEnv`.
        env_ids: The environments that it steps: all, or the range passed to `narrow`.
        schema, mode, restarts, takes_options, transitions, batch: As in `Stepper`.
        view: Its `ArrayView`: `agents` are the columns, `groups` the agents with equal observation spaces.
        latest: The arrays of the latest reset or step; None before the first reset, and after `close`.
        in_flight: Whether a step or reset is in flight, from `send` until `receive`, or `send_reset` until
            `receive_reset`.

    Raises:
        TypeError, ClosedEnvironmentError: `env` is not a `ParallelEnv`, or is closed.
        ValueError: Its auto-reset mode is not supported, agents are not known beforehand, one declares no space,
            results of all environments never come together, or `scalarize` is missing or does not fit the rewards.
    """

    def __init__(
        self,
        env: ParallelEnv,
        facade: object,
        *modes: AutoresetMode,
        copy: bool | None = None,
        scalarize: Scalarize | None = None,
        vectors: bool = False,
        partial_resets: bool = False,
    ) -> None:
        name = type(facade).__name__
        batch = open_batch(env, name, modes or tuple(AutoresetMode))
        schema = batch.schema
        if not schema.possible_agents:
            raise ValueError(f"{name} needs to know all agents beforehand, but possible_agents is empty")
        for kind, declared in (("observation", schema.observation_spaces), ("action", schema.action_spaces)):
            for agent in schema.possible_agents:
                if agent not in declared:
                    raise NoSpaceDeclared(
                        f"{name} needs both spaces of every agent, but {agent!r} declares no {kind} space", kind
                    )
        self._reward_spaces = schema.reward_spaces
        self._rules = {} if vectors and scalarize is None else reward_rules(name, scalarize, self._reward_spaces)
        batch.check_batch_size(name, partial_resets=partial_resets)
        self._copies = batch.transitions.copies if copy is None else copy
        super().__init__(batch, batch.arrays(copy=self._copies))
        self.view: ArrayView
        self.env, self._facade, self._saved_as = env, weakref.ref(facade), key_of(facade)
        self._some: tuple[int, ...] | None = None  # the range passed to `narrow`
        self.latest: Arrays | None = None
        self.in_flight = False
        self._resetting: tuple[tuple[int, ...], Arrays | None] | None = None  # the reset in flight
        # After an error in `receive_some`: environments that were stepped and reset, and the arrays with their results.
        self._read: tuple[set[int], set[int], Arrays] | None = None

    @property
    def runner(self) -> BatchRunner:
        """Deprecated: use this object."""
        return deprecated_runner(self.batch, "stepper.runner", "the stepper itself")

    def narrow(self, env_ids: range) -> None:
        """From now on, step only a range of environments, while copies of this object step the others.

        Arrays have rows of this range only. Only `send` and `receive` may be called, after the `reset` of the original.

        Raises:
            ValueError: Native simulators, which step all environments at once.
        """
        if self.workers is None:
            raise ValueError("a native simulator steps all its environments at once: it cannot step only some of them")
        self.env_ids = self._some = tuple(env_ids)
        self.view = self.batch.arrays(copy=self._copies, env_ids=env_ids)

    def reset(self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None) -> Arrays:
        """Begin new episodes.

        Args:
            seed: Environment i gets `seed + i`; or a sequence with one seed for each of `env_ids`.
            options: For the reset of every environment, or a list with one for each of `env_ids`.
            env_ids: Which environments; None for all. The others' observations stay.

        Raises:
            RuntimeError: Another facade steps this environment.
            ValueError: As `ParallelEnv.reset`, or a value does not fit its array.
            ResetNeeded: Only some are to be reset, but the others have never been reset.
        """
        last = self._last_before_reset("reset", env_ids)
        ids, leftovers = self._reset(seed, options, env_ids)
        self.batch.claim(self._facade)
        self._forget(ids)
        return self._save_latest(self.view.read(ids, leftovers, last))

    def send_reset(self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None) -> None:
        """Begin to reset and return; `receive_reset` returns the result. Arguments and errors are as in `reset`."""
        last = self._last_before_reset("reset_async", env_ids)
        self.batch.check_idle("reset_async")
        self._send_reset(seed, options, env_ids)
        self.batch.claim(self._facade)
        self._resetting = self.batch.checked_ids(env_ids), last
        self._forget(self._resetting[0])
        self.in_flight = True

    def save_state(
        self, env_ids: Sequence[int] | None = None, facade_state: Callable[[int], Any] = lambda _: None
    ) -> list[bytes]:
        """Save environments, as `ParallelEnv.save_state`, whose errors it has.

        Args:
            env_ids: Which environments; None for all.
            facade_state: Returns the facade's own state of an environment, which must be picklable.
        """
        saved = self._save(env_ids)
        return [to_bytes(one.with_facade(self._saved_as, facade_state(env_id))) for env_id, one in saved.items()]

    def load_state(
        self, states: Sequence[bytes], env_ids: Sequence[int] | None = None
    ) -> tuple[Arrays, dict[int, Any]]:
        """Load environments, as `ParallelEnv.load_state`, whose errors it has; `reset` need not be called before.

        Args:
            states: One for each of `env_ids`.
            env_ids: Which environments; None for all. The others' observations stay.

        Returns:
            The arrays of the latest reset or step at that time; and by environment what `facade_state` returned, or
            None for a state that another facade has saved.

        Raises:
            ValueError: A state has values of a facade that is not one of this package's, and has another `saved_as`.
            RuntimeError: Another facade steps this environment.
            ResetNeeded: Only some are to be loaded, but the others have never been reset.
        """
        last = self._last_before_reset("load_state", env_ids)
        loaded, leftovers = self._load(states, env_ids, facades_with(self._saved_as))
        self.batch.claim(self._facade)
        own = own_values(loaded, self._saved_as)
        arrays = self.view.read(tuple(own), leftovers, last)
        self._forget(own)
        return self._save_latest(arrays), own

    def _last_before_reset(self, name: str, env_ids: Sequence[int] | None) -> Arrays | None:
        """The arrays from which a reset takes the rows of other environments; None if all are reset."""
        self.batch.check_claim(self._facade)
        if env_ids is not None and self.latest is None and len(env_ids) < self.num_envs:
            self.batch.check_idle(name)  # the reset of all may be in flight
            raise ResetNeeded(
                "reset or load all environments before loading some of them" if name == "load_state"
                else "reset all environments before resetting some of them"
            )  # fmt: skip
        return None if env_ids is None or self.latest is None else self.view.last()

    def step(self, actions: Actions, env_ids: Sequence[int] | None = None) -> Arrays:
        """Step environments.

        Args:
            actions: A dict by agent of arrays `(num_envs, ...)`, or a list of `Stacked`; in the form of the action
                space, also dicts and tuples of arrays. Rows of agents that do not act are ignored.
            env_ids: Which environments; None for all. The others' observations stay.

        Raises:
            RuntimeError: Another facade steps this environment.
            ValueError: Actions are missing or do not fit their space, or `env_ids` are unknown or repeated; nothing has
                been stepped. Or a result does not fit its array; everything has been stepped.
            ResetNeeded, AlreadyPendingCallError: An environment was never reset, or a step is in flight.
            ParallelEnvError: A fault, as in `ParallelEnv.step`.
        """
        is_mine = self.batch.stepped_by is self._facade
        if not is_mine or self.in_flight or self.latest is None or self._read is not None:
            self._check_may_step("step")
        self.latest = arrays = super().step(actions, env_ids)
        return self._save_latest(arrays) if self._reward_spaces else arrays

    def send(self, actions: Actions) -> None:
        """Begin to step all environments and return; `receive` returns the result.

        Arguments and errors are as in `step`.
        """
        self._check_may_step("step_async")
        self._send(self.view.write(actions, self.env_ids))

    def send_some(self, actions: Sequence[Mapping[Any, Any]], env_ids: Sequence[int]) -> None:
        """Begin to step some environments, while others may be in flight; `receive_some` returns the results.

        Args:
            actions: A dict by agent for each of `env_ids`, as for `ParallelEnv.send`. Errors are as in `send`.
            env_ids: Which environments.
        """
        self.batch.claim(self._facade)
        ids = self.batch.checked_ids(env_ids)
        self.batch.check_idle("step_async", ids)
        self._check_received("step_async", ids)
        self.batch.check_has_reset(ids, "step_async")
        self.source.send(Message.STEP, ids, self.transitions.write(actions, ids, stacked=True) or None)

    def send_some_resets(self, env_ids: Sequence[int], seed: Seeds = None, options: Options = None) -> None:
        """Begin to reset some environments, while others may be in flight; `receive_some` returns the results."""
        self.batch.check_claim(self._facade)
        self._send_reset(seed, options, env_ids)
        self.batch.claim(self._facade)
        self._forget(env_ids)

    def receive_some(
        self, min_envs: int = 1, timeout: float | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...], Arrays]:
        """Wait for some results of `send_some` and `send_some_resets`.

        Arguments and errors are as in `ParallelEnv.recv`.

        Raises:
            ResultDoesNotFit: A value of some environments does not fit the arrays: a `ValueError` with `env_ids`.
                The next call returns the results of the others that have come.

        Returns:
            The environments that were stepped, those that were reset, and the arrays, of which only the rows of these
            environments are valid.
        """
        stepped, begun, last = self._read or (set[int](), set[int](), self.view.last())
        came = len(stepped) + len(begun)
        if came and (min_envs <= came or not self.source.in_flight):
            self._read = None
            return tuple(sorted(stepped)), tuple(sorted(begun)), last
        results = self._received(max(min_envs - came, 0), timeout)
        self._read = None
        begun |= {*results.resets}
        stepped |= {*results.env_ids} - begun
        try:
            arrays = self._save_latest(self.view.read(sorted(results.env_ids), results.leftovers, last))
        except ResultDoesNotFit as error:
            stepped -= {*error.env_ids}
            begun -= {*error.env_ids}
            if stepped or begun:  # the next call returns them
                self._read = stepped, begun, error.arrays
            raise
        return tuple(sorted(stepped)), tuple(sorted(begun)), arrays

    def send_dicts(self, actions: Sequence[Mapping[Any, Any]]) -> None:
        """Begin to step all environments with a dict by agent for each, and return; `receive` returns the result."""
        self._check_may_step("step_async")
        self._send(self.transitions.write(actions, self.env_ids, stacked=True))

    def _send(self, payload: Any) -> None:
        self.source.send(Message.STEP, self.env_ids, payload or None, together=True)
        self.in_flight = True

    def receive(self, timeout: float | None = None) -> Arrays:
        """Wait for the result of `send`, `timeout` seconds at most, and return it.

        Raises:
            NoAsyncCallError: No step is in flight.
            TimeoutError: The timeout has passed; nothing is lost, and this can be called again.
            ValueError, ParallelEnvError: As in `step`, when all has been stepped.
        """
        self.batch.check_open()
        if not self.in_flight or self._resetting is not None:
            raise NoAsyncCallError(
                "step_wait() was called without a step_async() before it: call step_async() first", "step_wait"
            )
        return self._save_latest(self.view.read(self.env_ids, self._take(timeout)))

    def receive_reset(self, timeout: float | None = None) -> Arrays:
        """Wait for the result of `send_reset`, and return it. Arguments and errors are as in `receive`."""
        self.batch.check_open()
        if self._resetting is None:
            raise NoAsyncCallError(
                "reset_wait() was called without a reset_async() before it: call reset_async() first", "reset_wait"
            )
        leftovers, (ids, last) = self._take(timeout), self._resetting
        self._resetting = None
        self._forget(ids)
        return self._save_latest(self.view.read(ids, leftovers, last))

    def discard(self) -> None:
        """Wait for the step or reset in flight, and drop its result; errors are as in `receive`."""
        if self._resetting is not None:
            self.receive_reset()
        elif self.in_flight:
            self.receive()

    def _take(self, timeout: float | None) -> Any:
        """The leftovers of what is in flight."""
        self.in_flight = False
        try:
            return self._received(None, timeout, self._some).leftovers
        except (TimeoutError, TypeError, ValueError) as error:  # too early, or no timeout: it can be called again
            self.in_flight = not isinstance(error, ParallelEnvError)
            raise

    def action_masks(self, agents: Sequence[AgentID]) -> NDArray[np.bool_]:
        """The action masks of some agents as one array; True = allowed.

        Masks are the last ones that the simulator reported, also for agents that do not act: PettingZoo's turn-based
        games report that these may do nothing. All entries are True where the simulator reported no mask, where an
        environment is in flight, and where a mask does not match the action space.

        Args:
            agents: Agents with equal action spaces, which are `Discrete` or `MultiDiscrete` with one axis.

        Returns:
            A new bool array `(num_envs, len(agents), num_choices)`. `num_choices` is `n` of a `Discrete` space, and
            `sum(nvec)` of a `MultiDiscrete` one: the choices of its first entry, then of its second, ...

        Raises:
            ValueError: The action spaces are other ones, an agent is unknown, or `agents` is empty.
            ClosedEnvironmentError: After `close`.

        Example:
            >>> from marl_parallel import make
            >>> class Facade:
            ...     def __init__(self, env):
            ...         self.stepper = ArrayStepper(env, self)
            >>> stepper = Facade(make("pettingzoo.classic.tictactoe_v3:env", num_envs=2, backend="serial")).stepper
            >>> arrays = stepper.reset()
            >>> masks = stepper.action_masks(["player_1", "player_2"])
            >>> masks.shape, masks.dtype
            ((2, 2, 9), dtype('bool'))
            >>> stepper.close()
        """
        self.batch.check_open()
        masks = action_masks(self.transitions, self.schema, agents)
        return masks if self._some is None else masks[self._some[0] : self._some[-1] + 1]

    def note(self, env_id: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> None:
        """Record the result of one environment that was stepped or reset by `env`, not by this stepper."""
        self.view.record_dicts(env_id, observations, rewards)

    def own(self, observation: Any) -> Any:
        """A last observation (`final_obs`) in arrays of the caller's own: a copy if `env` returns views."""
        return observation if self.transitions.copies else stacking.copied(observation)

    def close(self, **keywords: Any) -> None:
        """Close the environment, with the keywords of `ParallelEnv.close`."""
        self.in_flight = False
        self._read = None
        self.latest = None  # observations of a rollout are in memory that workers shared
        self.batch.release()
        self.env.close(**keywords)

    def _check_may_step(self, name: str) -> None:
        self.batch.claim(self._facade)
        if self.in_flight:
            what, wait = ("step", "step_wait") if self._resetting is None else ("reset", "reset_wait")
            raise AlreadyPendingCallError(f"{name}() was called while a {what} is in flight: call {wait}() first", name)
        if name == "step_async" or self.latest is None:
            self.batch.check_idle(name, self._some)
        self._check_received(name, self.env_ids)
        if self.latest is None:  # else all have been reset
            self.batch.check_has_reset(self.env_ids, name)

    def _check_received(self, name: str, env_ids: Iterable[int]) -> None:
        """Raise `AlreadyPendingCallError` if results of these environments wait for the next `receive_some`."""
        if self._read is not None and (waiting := sorted({*env_ids} & (self._read[0] | self._read[1]))):
            raise AlreadyPendingCallError(
                f"{name}() was called for environments {waiting}, whose results have not been received: call "
                "receive_some() first",
                name,
            )

    def _forget(self, env_ids: Iterable[int]) -> None:
        """Drop results that wait for the next `receive_some`, of environments that have been reset or loaded."""
        if self._read is not None:
            stepped, begun, arrays = self._read
            stepped, begun = stepped - {*env_ids}, begun - {*env_ids}
            self._read = (stepped, begun, arrays) if stepped or begun else None

    def _save_latest(self, arrays: Arrays) -> Arrays:
        """Save the latest arrays; turn vector rewards into numbers, or check that they are vectors."""
        self.latest = arrays
        if not self._reward_spaces:
            return arrays
        assert arrays.vectored is not None
        for column, agent in enumerate(self.view.agents):
            if agent not in self._reward_spaces:
                continue
            if self._rules:
                rule, vectors = self._rules[agent], arrays.vectors[agent]
                for env_id in np.flatnonzero(arrays.vectored[:, column]).tolist():
                    arrays.rewards[env_id, column] = rule(vectors[env_id])
            elif (missing := arrays.rewarded[:, column] & ~arrays.vectored[:, column]).any():
                env_id = int(np.flatnonzero(missing)[0])
                columns = [column for column, one in enumerate(self.view.agents) if one in self._reward_spaces]
                wrong = (arrays.rewarded & ~arrays.vectored)[:, columns].any(axis=1)
                raise ResultDoesNotFit(
                    f"environment {env_id}: the reward of agent {agent!r} is {arrays.rewards[env_id, column]!r}, but "
                    f"its reward_space is {self._reward_spaces[agent]}; a wrapper that returns numbers must set "
                    "`reward_space = None`",
                    np.flatnonzero(wrong).tolist(),
                    arrays,
                )
        return arrays


class ArrayStepper(FacadeStepper):
    """A `FacadeStepper` that itself makes sure that only one call runs at a time.

    A reset, step, save or load in the middle of another call of the stepper, its `ParallelEnv` or another facade raises
    `AlreadyPendingCallError`. Arguments, attributes and methods are those of `FacadeStepper`. `docs/extending.md` shows
    how to write a facade.

    Example:
        >>> from marl_parallel import make
        >>> class Facade:
        ...     def __init__(self, env):
        ...         self.stepper = ArrayStepper(env, self)
        >>> stepper = Facade(make("mpe2.simple_spread_v3", num_envs=4, num_workers=2)).stepper
        >>> stepper.reset(seed=1).observations[0].shape  # one group: all agents have the same observation space
        (4, 3, 18)
        >>> arrays = stepper.step([Stacked(tuple(stepper.view.agents), np.zeros((4, 3), np.int64))])
        >>> arrays.rewards.shape, arrays.truncated.tolist()
        ((4, 3), [False, False, False, False])
        >>> stepper.close()
    """

    # mypy takes the arguments of `step` to be those of `Stepper.step`.
    reset = exclusive("reset")(FacadeStepper.reset)
    send_reset = exclusive("reset_async")(FacadeStepper.send_reset)
    receive_reset = exclusive("reset_wait")(FacadeStepper.receive_reset)
    step = exclusive("step")(FacadeStepper.step)  # type: ignore[arg-type]
    send = exclusive("step_async")(FacadeStepper.send)
    send_dicts = exclusive("step_async")(FacadeStepper.send_dicts)
    receive = exclusive("step_wait")(FacadeStepper.receive)
    send_some = exclusive("step_async")(FacadeStepper.send_some)
    send_some_resets = exclusive("reset_async")(FacadeStepper.send_some_resets)
    receive_some = exclusive("recv")(FacadeStepper.receive_some)
    save_state = exclusive("save_state")(FacadeStepper.save_state)
    load_state = exclusive("load_state")(FacadeStepper.load_state)
    state = exclusive("state")(FacadeStepper.state)

    @property
    def _guard(self) -> CallGuard:
        return self.batch.guard


def open_batch(env: ParallelEnv, facade: str, modes: Sequence[AutoresetMode]) -> Batch:
    """The environments of a `ParallelEnv` that is open and has one of these auto-reset modes; else raises."""
    if not isinstance(env, ParallelEnv):
        raise TypeError(
            f"{facade} takes a ParallelEnv, got {type(env).__name__}: pass ParallelEnv([constructor] * num_envs), "
            "or make(...) without facade="
        )
    batch = env.stepper.batch
    batch.check_open()
    batch.check_mode(facade, modes)
    return batch
