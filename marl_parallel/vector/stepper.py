"""`ArrayStepper`: resets and steps a `ParallelEnv` with arrays over all environments; facades stand on it.

A facade has one library's shapes and names. `ArrayStepper` has the checks of all facades: who may step, the order of
calls, vector rewards as numbers. Below it, `BatchRunner` (`env.runner`) resets and steps, and an `ArrayView`
(`core/arrays.py`) writes actions and reads transitions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.arguments import check_one_for_each
from marl_parallel.core import stacking
from marl_parallel.core.arrays import Actions, Arrays, Stacked
from marl_parallel.core.exclusive import exclusive
from marl_parallel.core.spaces import is_vector
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.runner import BatchRunner, Options, Seeds
from marl_parallel.types import ParallelEnvError

__all__ = ["ArrayStepper", "Arrays", "Stacked"]

Rule: TypeAlias = Sequence[float] | NDArray[Any] | Callable[[NDArray[Any]], float]
Scalarize: TypeAlias = Rule | Mapping[AgentID, Rule]
"""Weights, one for each objective, or a function that takes one vector and returns a number; or either by agent."""


class ArrayStepper:
    """Resets and steps all environments of a `ParallelEnv` with arrays, for one facade.

    The arrays have one row for each environment and one column for each possible agent; `Arrays` says what they are.
    They are the facade's own, but for observations with `copy=False`. Methods are guarded: a call in the middle of
    another call of the stepper or its `ParallelEnv` raises `AlreadyPendingCallError`. `docs/facades.md` is about
    facades of your own.

    Args:
        env: All its agents are known beforehand and declare both spaces.
        facade: The object that steps. While it lives and is not closed, no other facade may step `env`.
        modes: The auto-reset modes that the facade serves; none for all.
        copy: Whether observations are arrays of the facade's own; None for what `env` was made with.
        scalarize: Makes numbers of vector rewards: a weight for each objective, or a function that takes one vector and
            returns a number; or a dict of these by agent.
        vectors: Whether the facade takes vector rewards as they are, in `Arrays.vectors`.
        partial_resets: Whether the facade resets or steps some environments without the others.

    Attributes:
        env: As given.
        runner: The `BatchRunner`; its `schema` has the spaces, and `batch.acting`, `batch.alive` and `batch.over` the
            state of each environment.
        view: The `ArrayView`; `view.agents` are the columns, `view.groups` the agents with equal observation spaces,
            and `view.by_agent(observations)` has the observations of each agent.
        mode: The auto-reset mode.
        latest: The arrays of the latest reset or step; None before the first reset.

    Raises:
        TypeError: `env` is no `ParallelEnv`.
        ValueError: Its auto-reset mode is not served, agents are not known beforehand, one declares no space, results
            of all environments never come together, or rewards are vectors and there is no `scalarize`.
        ClosedEnvironmentError: It has been closed.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from marl_parallel import ParallelEnv
        >>> class Facade:
        ...     def __init__(self, env):
        ...         self.stepper = ArrayStepper(env, self)
        >>> stepper = Facade(ParallelEnv([simple_spread_v3.parallel_env] * 4, num_workers=2)).stepper
        >>> stepper.reset(seed=1).observations[0].shape  # one group: all agents have the same observation space
        (4, 3, 18)
        >>> arrays = stepper.step([Stacked(tuple(stepper.view.agents), np.zeros((4, 3), np.int64))])
        >>> arrays.rewards.shape, arrays.truncated.tolist()
        ((4, 3), [False, False, False, False])
        >>> stepper.close()
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
        self.env, self.runner = env, open_runner(env, name, modes or tuple(AutoresetMode))
        self.mode = self.runner.mode
        self._facade, self._guard = weakref.ref(facade), self.runner.guard
        schema, batch = self.runner.schema, self.runner.batch
        if not schema.possible_agents:
            raise ValueError(f"{name} needs to know all agents beforehand, but possible_agents is empty")
        for kind, declared in (("observation", schema.observation_spaces), ("action", schema.action_spaces)):
            for agent in schema.possible_agents:
                if agent not in declared:
                    raise ValueError(f"{name} needs a space for everything, but {agent!r} declares no {kind} space")
        self._reward_spaces = schema.reward_spaces
        self._rules = {} if vectors and scalarize is None else reward_rules(name, scalarize, self._reward_spaces)
        self.runner.check_batch_size(name, partial_resets=partial_resets)
        self.view = batch.arrays(copy=batch.copies if copy is None else copy)
        self.latest: Arrays | None = None
        self._sent = False

    @exclusive("reset")
    def reset(self, seed: Seeds = None, options: Options = None, env_ids: Sequence[int] | None = None) -> Arrays:
        """Begin new episodes.

        Args:
            seed: The seed of environment 0, so that environment i gets `seed + i`; or one for each of `env_ids`.
            options: For the reset of every environment, or a list with one for each of `env_ids`.
            env_ids: Which environments; None for all. The others' observations stay.

        Raises:
            RuntimeError: Another facade steps this environment.
            ValueError: As of `ParallelEnv.reset`, or something has no place in an array.
            ResetNeeded: Some are to be reset where the others have never been.
        """
        self.runner.claim(self._facade)
        if env_ids is not None and self.latest is None and len(env_ids) < self.runner.num_envs:
            raise ResetNeeded("reset all environments before resetting some of them")
        last = None if env_ids is None or self.latest is None else self.view.last()
        ids, extras = self.runner.reset(seed, options, env_ids)
        return self._noted(self.view.read(extras) if last is None else self.view.read_some(ids, extras, last))

    @exclusive("step")
    def step(self, actions: Actions, env_ids: Sequence[int] | None = None) -> Arrays:
        """Step environments.

        Args:
            actions: A dict by agent of arrays `(num_envs, ...)`, or a list of `Stacked`, each for several agents: in
                the form of the action space, dicts and tuples of arrays too. Rows of agents who do not act are ignored.
            env_ids: Which environments; None for all. The others' observations stay.

        Raises:
            RuntimeError: Another facade steps this environment.
            ValueError: Actions are missing or are not what their space declares, or `env_ids` are unknown or doubled.
                Nothing has been stepped. Or something has no place in an array; all has been stepped.
            ResetNeeded: An environment has never been reset. Nothing has been stepped.
            AlreadyPendingCallError: A step is on its way. Nothing has been stepped.
            ParallelEnvError: A fault, as in `ParallelEnv.step`.
        """
        runner, view = self.runner, self.view
        self._check_may_step("step")
        ids = runner.ids_to_step(env_ids)
        written = view.write(actions, ids)
        last = None if len(ids) == runner.num_envs or self.latest is None else view.last()
        extras = runner.step(ids, written)
        return self._noted(view.read(extras) if last is None else view.read_some(ids, extras, last))

    @exclusive("step_async")
    def send(self, actions: Actions) -> None:
        """Begin to step all environments and return; `receive` has the result. Arguments and errors as of `step`."""
        self._check_may_step("step_async")
        self._send(self.view.write(actions))

    @exclusive("step_async")
    def send_dicts(self, actions: Sequence[Mapping[Any, Any]]) -> None:
        """As `send`, with a dict by agent for each environment, as of `ParallelEnv.step`."""
        self._check_may_step("step_async")
        ids = self.runner.env_ids
        check_one_for_each(actions, ids)
        self._send(self.runner.batch.write_actions(ids, actions))

    def _send(self, written: Any) -> None:
        self.runner.send(self.runner.env_ids, written, together=True)
        self._sent = True

    @exclusive("step_wait")
    def receive(self, timeout: float | None = None) -> Arrays:
        """The result of what was sent.

        Args:
            timeout: Seconds to wait at most; None for no limit.

        Raises:
            NoAsyncCallError: Nothing was sent.
            ValueError: Something has no place in an array. All has been stepped.
            TimeoutError: It was not there in time; nothing is lost, and this can be called again.
            ParallelEnvError: A fault, as in `ParallelEnv.step`.
        """
        self.runner.check_open()
        if not self._sent:
            raise NoAsyncCallError("step_wait() without a step_async() before it", "step_wait")
        self._sent = False
        try:
            results = self.runner.recv(timeout=timeout)
        except (TimeoutError, TypeError, ValueError) as error:  # too early, or no timeout: it can be called again
            self._sent = not isinstance(error, ParallelEnvError)
            raise
        return self._noted(self.view.read(results.extras))

    def note(self, env_id: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> None:
        """Note the result of one environment that was stepped or reset without this stepper."""
        self.view.note(env_id, observations, rewards)

    def own(self, observation: Any) -> Any:
        """A last observation (`final_obs`) in arrays of the caller's own, also where `env` hands out views."""
        return observation if self.runner.batch.copies else stacking.copied(observation)

    def close(self, **keywords: Any) -> None:
        """Close the environment, with the keywords of `ParallelEnv.close`; another facade may step then."""
        self._sent = False
        self.runner.release()
        self.env.close(**keywords)

    def _check_may_step(self, name: str) -> None:
        self.runner.claim(self._facade)
        if self.latest is None:  # else all have been reset
            self.runner.check_has_reset(self.runner.env_ids, name)
        if self._sent:
            raise AlreadyPendingCallError(f"{name}() while a step is on its way; step_wait() first", name)
        if name == "step_async":
            self.runner.check_idle(name)

    def _noted(self, arrays: Arrays) -> Arrays:
        """Keep the latest arrays; make numbers of vector rewards, or check that they are vectors."""
        self.latest = arrays
        if not self._reward_spaces:
            return arrays
        assert arrays.vectored is not None
        for place, agent in enumerate(self.view.agents):
            if agent not in self._reward_spaces:
                continue
            if self._rules:
                rule, vectors = self._rules[agent], arrays.vectors[agent]
                for env_id in np.flatnonzero(arrays.vectored[:, place]).tolist():
                    arrays.rewards[env_id, place] = rule(vectors[env_id])
            elif (missing := arrays.rewarded[:, place] & ~arrays.vectored[:, place]).any():
                env_id = int(np.flatnonzero(missing)[0])
                raise ValueError(
                    f"environment {env_id}: the reward of agent {agent!r} is {arrays.rewards[env_id, place]!r}, but "
                    f"its reward_space is {self._reward_spaces[agent]}; a wrapper that returns numbers declares so by "
                    "`reward_space = None`"
                )
        return arrays


def open_runner(env: ParallelEnv, facade: str, modes: Sequence[AutoresetMode]) -> BatchRunner:
    """The runner of a `ParallelEnv` for a facade of this name; raises as `ArrayStepper` for another mode."""
    if not isinstance(env, ParallelEnv):
        raise TypeError(f"{facade} is made of a ParallelEnv, got {type(env).__name__}")
    env.runner.check_open()
    env.runner.check_mode(facade, modes)
    return env.runner


class ForwardedCalls:
    """Methods of a facade that are those of its `ParallelEnv`; results have one entry for each environment."""

    env: ParallelEnv

    def render(self) -> tuple[Any, ...] | None:
        """As `ParallelEnv.render`."""
        frames: tuple[Any, ...] | None = self.env.render()
        return frames

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As `ParallelEnv.call`."""
        return self.env.call(name, *args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """As `ParallelEnv.get_attr`."""
        return self.env.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """As `ParallelEnv.set_attr`."""
        self.env.set_attr(name, values)


# -- vector rewards as numbers -----------------------------------------------------------------------------------------


def reward_rules(
    facade: str, scalarize: Scalarize | None, reward_spaces: Mapping[AgentID, Space[Any]]
) -> dict[AgentID, Callable[[NDArray[Any]], float]]:
    """By agent with vector rewards, the function that makes a number of one; raises errors about `scalarize`."""
    if scalarize is None:
        for agent, space in reward_spaces.items():
            raise ValueError(
                f"{facade} takes rewards that are numbers, but agent {agent!r} declares vectors: its reward_space is "
                f"{space}. Pass scalarize=: a weight for each objective, or a function that takes a vector and returns "
                "a number, or a dict of these by agent"
            )
        return {}
    if not reward_spaces:
        raise ValueError(f"{facade}: scalarize= was passed, but no agent declares a reward_space of vectors")
    rules = {}
    for agent, space in reward_spaces.items():
        rule = scalarize
        if isinstance(rule, Mapping):
            if agent not in rule:
                raise ValueError(f"{facade}: scalarize= has nothing for agent {agent!r}; it has {[*rule]}")
            rule = rule[agent]
        rules[agent] = _checked(facade, agent, rule) if callable(rule) else _weighted(facade, agent, rule, space)
    return rules


def as_number(rules: Mapping[AgentID, Callable[[NDArray[Any]], float]], agent: AgentID, reward: Any) -> Any:
    """A vector reward as a number, by the agent's rule; any other reward as it is."""
    return rules[agent](np.asarray(reward)) if agent in rules and is_vector(reward) else reward


def _weighted(facade: str, agent: AgentID, rule: Any, space: Space[Any]) -> Callable[[NDArray[Any]], float]:
    try:
        weights = np.asarray(rule, np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"{facade}: scalarize= must be weights or a function, or a dict of these by agent; got {rule!r}"
        ) from None
    if weights.shape != (space.shape or ()) or not np.isfinite(weights).all():
        raise ValueError(
            f"{facade}: the rewards of agent {agent!r} have shape {space.shape or ()}, so scalarize= must be finite "
            f"weights of that shape, got {rule!r}"
        )
    return lambda vector: float(np.vdot(weights, vector))


def _checked(facade: str, agent: AgentID, function: Callable[[NDArray[Any]], float]) -> Callable[[NDArray[Any]], float]:
    def number(vector: NDArray[Any]) -> float:
        result: Any = function(vector)
        if np.ndim(result) or isinstance(result, str | bytes | None.__class__):
            raise TypeError(
                f"{facade}: scalarize must return a number for the reward of agent {agent!r}, {vector!r}; it returned "
                f"{result!r}"
            )
        return float(result)

    return number
