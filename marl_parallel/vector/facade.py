"""What facades have in common: they step a `ParallelEnv` by arrays, step it alone, and hand on what it is asked.

Nothing here is about any library's shapes; what the arrays mean is in `core/arrays.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from marl_parallel.arguments import check_one_for_each, checked_patience
from marl_parallel.core import stacking
from marl_parallel.core.arrays import Actions, Arrays
from marl_parallel.core.exclusive import exclusive
from marl_parallel.parallel_env import Options, ParallelEnv
from marl_parallel.types import ParallelEnvError
from marl_parallel.vector.scalarizing import Scalarize, Scalarizer, check_numbers

_AUTO_RESET = {AutoresetMode.SAME_STEP: "True", AutoresetMode.DISABLED: "False", AutoresetMode.NEXT_STEP: '"NEXT_STEP"'}


class Holder:
    """The one facade that steps a `ParallelEnv`.

    Args:
        env: Which.
        facade: Who steps; as long as it lives and is not closed, nobody else may.
        modes: The auto-reset modes that it serves.
        at_worst: One more, for simulators that have no other.

    Attributes:
        env: As given.
        mode: The auto-reset mode.

    Raises:
        TypeError: It is no `ParallelEnv`.
        ValueError: The mode is another one.
        ClosedEnvironmentError: It has been closed.
    """

    def __init__(
        self, env: ParallelEnv, facade: object, *modes: AutoresetMode, at_worst: AutoresetMode | None = None
    ) -> None:
        self._name = type(facade).__name__
        if not isinstance(env, ParallelEnv):
            raise TypeError(f"{self._name} is made of a ParallelEnv, got {type(env).__name__}")
        env._pool.check_open()
        self.env, self._facade = env, weakref.ref(facade)
        self._guard = env._guard
        self.mode = env._batch.mode
        if self.mode not in modes and not (self.mode is at_worst and env._batch.mode_is_fixed):
            served = " or ".join(f"auto_reset={_AUTO_RESET[mode]}" for mode in modes)
            raise ValueError(f"{self._name} wants a ParallelEnv with {served}, got auto_reset={_AUTO_RESET[self.mode]}")

    def claim(self) -> None:
        """Note who steps.

        Raises:
            RuntimeError: Somebody else does.
        """
        known = self.env._stepped_by
        if known is self._facade:
            return
        other = known() if known is not None else None
        mine = self._facade()
        if other is not None and other is not mine:
            raise RuntimeError(
                f"this ParallelEnv is stepped by a {type(other).__name__} already; make a ParallelEnv for each facade"
            )
        if other is None and mine is not None:
            self.env._stepped_by = self._facade

    def close(self, **keywords: Any) -> None:
        """Close the environment; nobody steps it any more."""
        self.env._stepped_by = None
        self.env.close(**keywords)


class Stepper(Holder):
    """Steps a `ParallelEnv` by arrays, for one facade.

    Args:
        env: Whose agents all declare spaces.
        facade: Who steps; as long as it lives and is not closed, nobody else may.
        modes: The auto-reset modes that it serves.
        at_worst: One more, for simulators that have no other.
        copy: Whether observations are arrays of the caller's own; None for what the environment was made with.
        scalarize: What makes numbers of vector rewards.
        vectors: Whether the facade hands on vector rewards as they are.

    Attributes:
        env: As given.
        batch: How its arrays are written and read.
        mode: The auto-reset mode.

    Raises:
        TypeError: It is no `ParallelEnv`.
        ValueError: The mode is another one, agents are not known beforehand, one of them declares no space, results
            never come of all, or rewards are vectors that nothing makes numbers of.
        ClosedEnvironmentError: It has been closed.
    """

    def __init__(
        self,
        env: ParallelEnv,
        facade: object,
        *modes: AutoresetMode,
        at_worst: AutoresetMode | None = None,
        copy: bool | None = None,
        scalarize: Scalarize | None = None,
        vectors: bool = False,
    ) -> None:
        super().__init__(env, facade, *modes, at_worst=at_worst)
        self._check_spaces()
        self._reward_spaces = env._schema.reward_spaces
        self._scalarizer = None if scalarize is None else Scalarizer(scalarize, self._reward_spaces, self._name)
        if not vectors and self._scalarizer is None:
            check_numbers(self._name, self._reward_spaces)
        if env.num_envs % env.batch_size:
            raise ValueError(
                f"{self._name} steps all {env.num_envs} environments at a time, but these come {env.batch_size} at a "
                "time: make them with a batch_size of which num_envs is a multiple"
            )
        self.batch = env._batch.arrays(copy=env._batch.copies if copy is None else copy)
        self.latest: Arrays | None = None
        self._sent = False

    def _check_spaces(self) -> None:
        schema = self.env._schema
        if not schema.possible_agents:
            raise ValueError(f"{self._name} needs to know all agents beforehand, but possible_agents is empty")
        for kind, declared in (("observation", schema.observation_spaces), ("action", schema.action_spaces)):
            for agent in schema.possible_agents:
                if agent not in declared:
                    raise ValueError(
                        f"{self._name} needs a space for everything, but {agent!r} declares no {kind} space"
                    )

    @exclusive("reset")
    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
        env_ids: Sequence[int] | None = None,
    ) -> Arrays:
        """Begin new episodes; options may be one for each; where `env_ids` are not all, the others' observations stay.

        Raises:
            RuntimeError: Another facade steps this environment.
            ValueError: As of `ParallelEnv.reset`, or something has no place in an array.
            ResetNeeded: Some are to be reset where the others have never been.
        """
        self.claim()
        if env_ids is not None and self.latest is None and len(env_ids) < self.env.num_envs:
            raise ResetNeeded("reset all environments before resetting some of them")
        last = None if env_ids is None or self.latest is None else self.batch.last()
        ids, told = self.env._reset(seed, options, env_ids)
        return self._noted(self.batch.read(told) if last is None else self.batch.read_some(ids, told, last))

    @exclusive("step")
    def step(self, actions: Actions, env_ids: Sequence[int] | None = None) -> Arrays:
        """Step environments.

        Args:
            actions: See `Actions` in `core/arrays.py`.
            env_ids: Which; None for all of them. The others' observations stay.

        Raises:
            ValueError: As of `send` and `receive`, or `env_ids` are unknown or doubled.
            RuntimeError: As of `send`, with all its other errors.
        """
        env = self.env
        self._check_may_step("step")
        env._check_idle("step")
        ids = env._checked_ids(env_ids)
        written = self.batch.write(actions, ids)
        last = None if len(ids) == env.num_envs or self.latest is None else self.batch.last()
        told = env._step(ids, written)
        return self._noted(self.batch.read(told) if last is None else self.batch.read_some(ids, told, last))

    @exclusive("step_async")
    def send(self, actions: Actions) -> None:
        """Begin to step all environments and return.

        Args:
            actions: See `Actions` in `core/arrays.py`.

        Raises:
            RuntimeError: Another facade steps this environment.
            ValueError: Actions are missing or are not what their space declares. Nothing has been stepped.
            ResetNeeded: An environment has never been reset. Nothing has been stepped.
            AlreadyPendingCallError: A step is on its way already.
        """
        self._check_may_step("step_async")
        self.env._check_idle("step_async")
        self.env._send(self.env._all, self.batch.write(actions))
        self._sent = True

    @exclusive("step_async")
    def send_dicts(self, actions: Sequence[Mapping[Any, Any]]) -> None:
        """Begin to step all environments and return.

        Args:
            actions: For each environment a dict by agent, as of `ParallelEnv.step`.

        Raises:
            ValueError: As of `ParallelEnv.step`. Nothing has been stepped.
            RuntimeError: As of `send`, with all its other errors.
        """
        self._check_may_step("step_async")
        self.env._check_idle("step_async")
        check_one_for_each(actions, self.env._all)
        self.env._send(self.env._all, self.env._batch.write_actions(self.env._all, actions))
        self._sent = True

    @exclusive("step_wait")
    def receive(self, timeout: float | None = None) -> Arrays:
        """The result of what was sent.

        Args:
            timeout: Seconds to wait at most; None for as long as it takes.

        Raises:
            NoAsyncCallError: Nothing was.
            ValueError: Something has no place in an array. All has been stepped.
            TimeoutError: It was not there in time; nothing is lost, and this can be called again.
            ParallelEnvError: A fault, as in `ParallelEnv.step`.
        """
        self.env._pool.check_open()
        if not self._sent:
            raise NoAsyncCallError("step_wait() without a step_async() before it", "step_wait")
        patience = checked_patience(timeout)
        self._sent = False
        try:
            told = self.env._receive(self.env._all, patience)
        except TimeoutError as error:
            self._sent = not isinstance(error, ParallelEnvError)
            raise
        return self._noted(self.batch.read(told))

    def _noted(self, arrays: Arrays) -> Arrays:
        """Keep the latest transitions; vector rewards are made numbers, or are known to be vectors."""
        self.latest = arrays
        if self._reward_spaces:
            if self._scalarizer is not None:
                self._scalarizer.fill(arrays, self.batch.agents)
            else:
                self._check_vectors(arrays)
        return arrays

    def _check_vectors(self, arrays: Arrays) -> None:
        assert arrays.vectored is not None
        missing = arrays.rewarded & ~arrays.vectored
        for place, agent in enumerate(self.batch.agents):
            if agent in self._reward_spaces and missing[:, place].any():
                env_id = int(np.flatnonzero(missing[:, place])[0])
                raise ValueError(
                    f"environment {env_id}: the reward of agent {agent!r} is {arrays.rewards[env_id, place]!r}, but "
                    f"its reward_space is {self._reward_spaces[agent]}; a wrapper that returns numbers declares so by "
                    "`reward_space = None`"
                )

    def note(self, env_id: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> None:
        """Note what one environment has said that was stepped or reset without this stepper."""
        self.batch.note(env_id, observations, rewards)

    def own(self, observation: Any) -> Any:
        """One of the last observations in memory of the caller's own, also where the environment hands out views."""
        return observation if self.env._batch.copies else stacking.copied(observation)

    def _check_may_step(self, name: str) -> None:
        self.claim()
        if self.latest is None:  # else all have been reset
            self.env._check_begun(self.env._all, name)
        if self._sent:
            raise AlreadyPendingCallError(f"{name}() while a step is on its way; step_wait() first", name)

    def close(self, **keywords: Any) -> None:
        self._sent = False
        super().close(**keywords)


class Inquiries:
    """What a facade hands on to its environment as it is asked."""

    env: ParallelEnv

    def render(self) -> tuple[Any, ...] | None:
        """One frame of each copy; None where `render_mode` is None."""
        frames: tuple[Any, ...] | None = self.env.render()
        return frames

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each copy; as `ParallelEnv.call`."""
        return self.env.call(name, *args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of each copy; as `ParallelEnv.get_attr`."""
        return self.env.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each copy; as `ParallelEnv.set_attr`."""
        self.env.set_attr(name, values)
