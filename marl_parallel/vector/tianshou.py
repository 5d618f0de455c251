"""`TianshouVecEnv`: a vector environment for Tianshou's collectors, with one entry for each environment."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from tianshou.env import BaseVectorEnv

from marl_parallel.adapters import AgentID
from marl_parallel.arguments import base_seed, checked_integer, checked_timeout
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Arrays, ResultDoesNotFit
from marl_parallel.core.exclusive import exclusive
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.types import ParallelEnvError
from marl_parallel.vector.forwarding import OfParallelEnv, rendered
from marl_parallel.vector.mailbox import Mailbox
from marl_parallel.vector.scalarize import Scalarize
from marl_parallel.vector.stepper import FacadeStepper
from marl_parallel.vector.tianshou_forms import Form, JointForm, TurnForm, objects, together

__doctest_requires__ = ["tianshou"]

Ids: TypeAlias = int | Iterable[int] | None
"""Ids of environments; None for all."""

StepReturn: TypeAlias = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
"""Observations, rewards, terminations, truncations and infos, one entry for each environment."""


class TianshouVecEnv(OfParallelEnv, BaseVectorEnv):
    """A vector environment for Tianshou's collectors and trainers, with one entry for each environment.

    An environment with one agent is the same as for Gymnasium. Several agents act as one: their actions are one action,
    their observations one observation, and the reward is the sum of their rewards. Actions of absent agents are
    ignored, and their observations are zeros. Collectors reset environments; nothing is reset automatically.

    With `adapter="tianshou"`, and if constructors return Tianshou's `PettingZooEnv`, agents act one after the other, as
    Tianshou's multi-agent algorithms need it. An action is that of the agent whose turn it is. An observation is a dict
    with its `"agent_id"`, its observation `"obs"` and its `"mask"` (a list of bools; True = allowed). Rewards are
    float64, `(environments, agents)`. Flags and infos are those of the agent whose turn it is.

    Args:
        env: No other facade may step it; its `auto_reset` is False.
        wait_num: How many environments `step` waits for, while the others continue (`is_async`). None for all.
        timeout: Seconds that `step` waits for `wait_num` environments; after that, for the first one. None for no
            limit.
        scalarize: Turns vector rewards into numbers, as in `FacadeStepper`.

    Attributes:
        action_space: A list with the action space of each environment: the agent's; with several agents, a
            `MultiDiscrete` or `Box` of the actions of all, one after the other. If they take turns, that of each agent.
        observation_space: A list with the observation space of each environment: the agent's; with several agents, a
            `Box` `(size,)` of all observations, one after the other, if each is a `Box`, else a `Dict` by agent. If
            they take turns, that of each agent, before it becomes `"obs"` and `"mask"`.
        agents: All agents that may appear, in the order of rewards. Tianshou's multi-agent algorithms read it.
        agent_idx: The index of each agent in `agents`.
        env_num: The number of environments, as `len(env)`.
        is_async: Whether `step` returns some environments before the others.
        ready_id: The environments that wait for a step or a reset.
        waiting_id: The environments that are being stepped.
        is_closed: Whether `close` has been called.

    Raises:
        TypeError: An agent observes tuples, which Tianshou does not support, or values without a fixed size.
        ValueError: As `FacadeStepper`; or an action is not an array of numbers; or the agents' actions do not make one
            `MultiDiscrete` or `Box`; or agents that take turns do not have equal spaces.

    Example:
        >>> from marl_parallel import make
        >>> env = make("mpe2.simple_spread_v3", num_envs=4, num_workers=2, facade="tianshou")
        >>> env.action_space[0], env.observation_space[0].shape
        (MultiDiscrete([5 5 5]), (54,))
        >>> observations, infos = env.reset()
        >>> observations, rewards, terminated, truncated, infos = env.step(np.zeros((2, 3), np.int64), [3, 1])
        >>> observations.shape, rewards.shape, [info["env_id"] for info in infos]
        ((2, 54), (2,), [3, 1])
        >>> env.close()

        One agent after the other:

        >>> game = "pettingzoo.classic.tictactoe_v3:env"
        >>> env = make(game, num_envs=4, num_workers=2, facade="tianshou", adapter="tianshou")
        >>> observations, infos = env.reset()
        >>> observations, rewards, terminated, truncated, infos = env.step(np.zeros(2, np.int64), [3, 1])
        >>> observations[0]["agent_id"], observations[0]["mask"][:3], rewards.shape
        ('player_2', [False, True, True], (2, 2))
        >>> env.close()
    """

    saved_as = "TianshouVecEnv"

    def __init__(
        self,
        env: ParallelEnv,
        wait_num: int | None = None,
        timeout: float | None = None,
        scalarize: Scalarize | None = None,
    ) -> None:
        self._stepper = FacadeStepper(
            env, self, AutoresetMode.DISABLED, copy=True, scalarize=scalarize, partial_resets=True
        )
        self._guard = self._stepper.batch.guard
        self.env, self.env_num = env, env.num_envs
        self.wait_num = env.num_envs if wait_num is None else checked_integer(wait_num, "wait_num", 1, " or None")
        if self.wait_num > self.env_num:
            raise ValueError(f"wait_num={wait_num}, but there are only {self.env_num} environments")
        self.timeout = checked_timeout(timeout, "timeout")
        self.is_async = self.wait_num < self.env_num or timeout is not None
        by_turns = self._stepper.schema.observes_turn
        self._form: Form = TurnForm(self._stepper) if by_turns else JointForm(self._stepper)
        self.agents = [*self._stepper.view.agents]
        self.agent_idx = {agent: index for index, agent in enumerate(self.agents)}
        # Collectors draw random actions from these. Each environment has its own, as in a process of its own.
        self._action_spaces = [copy.deepcopy(self._form.action_space) for _ in range(self.env_num)]
        self._observation_spaces = [self._form.observation_space] * self.env_num
        self._action_shape = self._form.action_space.shape or ()
        self._all = [*range(self.env_num)]
        self.ready_id, self.waiting_id = [*self._all], list[int]()
        self.is_closed = False
        self._over = np.zeros(self.env_num, np.bool_)
        self._mailbox = Mailbox[tuple[Any, ...]](self._stepper, self._by_env)
        # After `load_state`, until the next step or reset: its arrays, and what a `reset` returns of each environment.
        self._loaded: Arrays | None = None
        self._resumed: dict[int, tuple[Any, Any]] = {}
        self._failed: ResultDoesNotFit | None = None  # the error of a step that came while others were being reset

    # -- attributes ----------------------------------------------------------------------------------------------------

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """Get an attribute of each environment, as in `ParallelEnv.get_attr`."""
        ids = self._ids(id)
        if key == "action_space":
            return [self._action_spaces[env_id] for env_id in ids]
        if key == "observation_space":
            return [self._observation_spaces[env_id] for env_id in ids]
        return [*self.env.call(key, env_ids=ids)]

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """Set an attribute of each environment to the same value, as in `ParallelEnv.set_attr`."""
        ids = self._ids(id)
        self.env.set_attr(key, [value] * len(ids), ids)

    # -- resets and steps ----------------------------------------------------------------------------------------------

    @exclusive("reset")
    def reset(
        self,
        env_id: Ids = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begin new episodes; episodes of other environments continue.

        Args:
            env_id: Which environments, in any order.
            seed: The same seed for all of these environments, as in Tianshou; or a sequence with one for each.
            options: For the reset of each environment.

        Returns:
            Observations and infos, one entry for each of these environments.

        Raises:
            AlreadyPendingCallError: One of them is being stepped.
            ResetNeeded: The first reset is not of all environments.
        """
        ids = self._ready(env_id, "reset")
        is_latest = self._stepper.latest is self._loaded and not self.waiting_id
        resumed = {one: row for one, row in self._resumed.items() if one in ids} if is_latest else {}
        if not resumed or seed is not None or options is not None:
            return self._begin(ids, seed, options)
        others = [one for one in ids if one not in resumed]
        begun = dict(zip(others, zip(*self._begin(others, None, None)))) if others else {}
        self._loaded, self._resumed = None, {}
        observations, infos = zip(*[resumed[one] if one in resumed else begun[one] for one in ids])
        return together(observations), objects(infos)

    def _begin(
        self, ids: list[int], seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begin new episodes."""
        seeds = [seed] * len(ids) if isinstance(seed, int | np.integer) else seed
        if self.waiting_id:
            observations, infos = self._reset_beside_steps(ids, seeds, options)
        else:
            arrays = self._stepper.reset(seeds, options, None if ids == self._all else ids)
            observations, infos = self._form.observations(arrays, ids), self._form.infos(arrays, ids)
        self._over[ids] = False
        return observations, infos

    def _reset_beside_steps(
        self, ids: list[int], seeds: Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Reset environments while others are being stepped, whose results wait for the next `step`."""
        mailbox = self._mailbox
        mailbox.send_resets(ids, seeds, options)
        failed: ResultDoesNotFit | None = None
        while mailbox.resetting:
            try:
                mailbox.receive()
            except ResultDoesNotFit as error:
                if not {*ids}.isdisjoint(error.env_ids):
                    failed = failed or error
                if not {*ids}.issuperset(error.env_ids):
                    self._failed = self._failed or error  # of a step, which the next `step` raises
                self._are_ready(error.env_ids)
        first = {env_id: mailbox.begun.pop(env_id) for env_id in [*mailbox.begun]}
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # else it and this frame would refer to each other
        return together([first[env_id][0] for env_id in ids]), objects([first[env_id][1] for env_id in ids])

    @exclusive("step")
    def step(self, action: Any, id: Ids = None) -> StepReturn:
        """Step environments.

        Args:
            action: One action for each of these environments; whole numbers may be floats. With `is_async`, None only
                receives.
            id: Which environments, in any order. Without actions: environments that must be in the results.

        Returns:
            Observations, rewards, terminations, truncations and infos of these environments. With `is_async`, of all
            that are ready: at least `wait_num`, if as many are being stepped. Each info has its `env_id`.

        Raises:
            ValueError: There is not one action for each of these environments, or an action has another form; nothing
                has been stepped.
            ResetNeeded: An environment was never reset, or its episode is over.
            AlreadyPendingCallError: An environment is being stepped.
            NoAsyncCallError: No action, and no environment is being stepped.
            ResultDoesNotFit: With `is_async`, a value of some environments does not fit the arrays: a `ValueError` with
                `env_ids`, which are ready; later calls return the results of the others.
        """
        if action is None and self.is_async:
            return self._received([] if id is None else self._ids(id))
        ids = self._ready(id, "step")
        if self._over[ids].any():
            over = [env_id for env_id in ids if self._over[env_id]]
            raise ResetNeeded(f"the episodes of environments {over} are over; reset them before the next step")
        actions = self._actions(action, ids)
        if self.is_async:
            by_env = [{agent: values[row] for agent, values in actions.items()} for row in range(len(ids))]
            self._mailbox.send(by_env, ids)
            self.ready_id = [env_id for env_id in self.ready_id if env_id not in ids]
            self.waiting_id += ids
            return self._received([])
        try:
            if ids == self._all:
                arrays = self._stepper.step(actions)
            else:
                spread = {agent: self._spread(values, ids) for agent, values in actions.items()}
                arrays = self._stepper.step(spread, ids)
        except ResultDoesNotFit:  # all have been stepped
            self._resumed = {}
            raise
        return self._results(arrays, ids)

    def _received(self, ids: Sequence[int]) -> StepReturn:
        """Results of environments that are being stepped: at least of `ids`, or of `wait_num` environments."""
        arrived, failed, self._failed = self._mailbox.stepped, self._failed, None
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # else it and this frame would refer to each other
        if not self.waiting_id or not {*ids} <= {*self.waiting_id}:
            which = f"environments {[*ids]} are not all" if ids else "no environment is"
            raise NoAsyncCallError(f"step() without actions, but {which} being stepped", "step")
        if ids:
            while not arrived.keys() >= {*ids}:
                self._receive(1)
        elif (missing := min(self.wait_num, len(self.waiting_id)) - len(arrived)) > 0:
            try:
                self._receive(missing, self.timeout)
            except TimeoutError as error:
                if isinstance(error, ParallelEnvError):  # not too early, but a fault
                    raise
                self._receive(0 if arrived else 1)
        done, rows = [*arrived], [*arrived.values()]
        arrived.clear()
        self.waiting_id = [env_id for env_id in self.waiting_id if env_id not in done]
        self.ready_id += done
        observations, *flags, infos = zip(*rows)
        rewards, terminated, truncated = map(np.stack, flags)
        return together(observations), rewards, terminated, truncated, objects(infos)

    def _receive(self, at_least: int, timeout: float | None = None) -> None:
        """Receive results of steps, for the result of `step`."""
        try:
            self._mailbox.receive(at_least, timeout)
        except ResultDoesNotFit as error:
            self._are_ready(error.env_ids)
            raise

    def _are_ready(self, env_ids: Sequence[int]) -> None:
        """Environments whose results cannot be returned are no longer being stepped."""
        self._resumed = {}
        over = self._stepper.transitions.over
        for env_id in env_ids:
            self._over[env_id] = over[env_id]
            if env_id in self.waiting_id:
                self.waiting_id.remove(env_id)
                self.ready_id.append(env_id)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[list[int] | None]:
        """Reset all environments with these seeds, as Tianshou does; collectors reset them once more without seeds.

        Also seeds `action_space`, from which collectors draw random actions.

        Args:
            seed: Environment i gets `seed + i`; or a sequence with one for each environment; None for no seeds.

        Returns:
            For each environment, None or a list with its seed.
        """
        seeds: list[Any]
        if seed is None or isinstance(seed, int | np.integer):
            seeds = [None if seed is None else base_seed(seed) + env_id for env_id in self._all]
        else:
            seeds = [*seed]
        self.reset(seed=None if seed is None else seeds)
        for space, one in zip(self._action_spaces, seeds):
            if one is not None:
                space.seed(one)
        return [None if one is None else [one] for one in seeds]

    def render(self, **kwargs: Any) -> list[Any]:
        """A frame of each environment; None if `render_mode` is None.

        Keywords are for the environments' `render`; `mode` only for those without a `render_mode`.
        """
        if kwargs.keys() == {"mode"}:
            return [*rendered(self.env, kwargs["mode"])]
        if kwargs:
            return [*self.env.call("render", **kwargs)]
        frames = self.env.render()
        return [None] * self.env_num if frames is None else [*frames]

    def close(self, **keywords: Any) -> None:
        """Close the environments, with the keywords of `ParallelEnv.close`."""
        self.is_closed, self._failed = True, None
        self._stepper.close(**keywords)

    @exclusive("save_state")
    def save_state(self, id: Ids = None) -> list[bytes]:
        """Save environments, in the middle of their episodes; errors: see `ParallelEnv.save_state`.

        Args:
            id: Which environments, in any order; none of them is being stepped.

        Returns:
            The state of each of these environments.
        """
        return self._stepper.save_state(self._ready(id, "save_state"))

    @exclusive("load_state")
    def load_state(self, states: Sequence[bytes], id: Ids = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Go on from what `save_state` has returned; arguments and errors are as in `ParallelEnv.load_state`.

        Collectors begin with a reset. So the next `reset` without a seed and options, before any step, begins no new
        episode in these environments: it returns what this method returns. An episode that is over is reset.

        Returns:
            Observations and infos of the latest step or reset at that time, one entry for each of these environments.
        """
        ids = self._ready(id, "load_state")
        earlier = self._resumed if self._stepper.latest is self._loaded else {}
        arrays, _ = self._stepper.load_state(states, None if ids == self._all else ids)
        self._over[ids] = (arrays.terminated | arrays.truncated)[ids]
        observations, infos = self._form.observations(arrays, ids), self._form.infos(arrays, ids)
        # Copies, since the caller may change what this method returns.
        rows = dict(zip(ids, zip(copy.deepcopy(observations), copy.deepcopy(infos))))
        others = {one: row for one, row in earlier.items() if one not in rows}
        self._loaded, self._resumed = arrays, others | {o: row for o, row in rows.items() if not self._over[o]}
        return observations, infos

    # -- forms ---------------------------------------------------------------------------------------------------------

    def _ids(self, ids: Ids) -> list[int]:
        if ids is None:
            return self._all
        return [*self._stepper.batch.checked_ids([ids] if np.isscalar(ids) else [*ids])]  # type: ignore[misc,list-item]

    def _ready(self, ids: Ids, name: str) -> list[int]:
        """The ids of environments that are not being stepped."""
        checked = self._ids(ids)
        busy = [env_id for env_id in checked if env_id in self.waiting_id]
        if busy:
            raise AlreadyPendingCallError(
                f"{name}() of environments {busy}, which are being stepped; only {self.ready_id} are ready", name
            )
        return checked

    def _actions(self, action: Any, ids: Sequence[int]) -> dict[AgentID, NDArray[Any]]:
        """By agent, the actions `(len(ids), ...)`."""
        try:
            actions = np.asarray(action)
        except ValueError:  # rows of different lengths
            actions = np.asarray(None)
        if actions.shape != (len(ids), *self._action_shape):
            raise ValueError(
                f"expected an action for each of {len(ids)} environments, of shape {(len(ids), *self._action_shape)}; "
                f"got {actions.shape}: {action!r}"
            )
        if actions.dtype.kind == "f" and not isinstance(space := self._action_spaces[0], spaces.Box):
            actions = stacking.whole(space, actions)
            if actions.dtype.kind == "f":
                raise ValueError(f"expected whole numbers as actions in {space}, got {action!r}")
        return self._form.actions(actions)

    def _spread(self, values: NDArray[Any], ids: Sequence[int]) -> NDArray[Any]:
        """Values of some environments in an array of all; the other rows are zeros."""
        spread = np.zeros((self.env_num, *values.shape[1:]), values.dtype)
        spread[ids] = values
        return spread

    def _results(self, arrays: Arrays, ids: Sequence[int]) -> StepReturn:
        rows = [*ids]
        terminated, truncated = arrays.terminated[rows], arrays.truncated[rows]
        self._over[rows] = terminated | truncated
        infos = self._form.infos(arrays, rows)
        for env_id, info in zip(rows, infos):
            info["env_id"] = env_id
        return self._form.observations(arrays, rows), self._form.rewards(arrays)[rows], terminated, truncated, infos

    def _by_env(self, arrays: Arrays, ids: Sequence[int], of_reset: bool) -> Iterable[tuple[Any, ...]]:
        """The results of these environments, for the mailbox."""
        if of_reset:
            return zip(self._form.observations(arrays, ids), self._form.infos(arrays, ids))
        return zip(*self._results(arrays, ids))
