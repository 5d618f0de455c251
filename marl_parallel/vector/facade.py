"""What all facades have in common: they step a `ParallelEnv` by arrays, and step it alone.

Nothing here is about any library's shapes; what the arrays mean is in `runtime/arrays.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import AgentID
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.runtime.arrays import ArrayBatch, Arrays

_AUTO_RESET = {AutoresetMode.SAME_STEP: "True", AutoresetMode.DISABLED: "False", AutoresetMode.NEXT_STEP: '"NEXT_STEP"'}

_steppers: weakref.WeakKeyDictionary[ParallelEnv, weakref.ref[object]] = weakref.WeakKeyDictionary()
"""Which facade steps an environment."""


class Owner:
    """The one facade that steps a `ParallelEnv`.

    Args:
        env: Which.
        facade: Who steps; as long as it lives and is not closed, nobody else may.
        modes: The auto-reset modes that it serves.

    Attributes:
        env: As given.
        mode: The auto-reset mode.

    Raises:
        TypeError: It is no `ParallelEnv`.
        ValueError: The mode is another one.
        ClosedEnvironmentError: It has been closed.
    """

    def __init__(self, env: ParallelEnv, facade: object, *modes: AutoresetMode) -> None:
        self._name = type(facade).__name__
        if not isinstance(env, ParallelEnv):
            raise TypeError(f"{self._name} is made of a ParallelEnv, got {type(env).__name__}")
        env._crew.check_open()
        self.env, self._facade = env, weakref.ref(facade)
        self.mode = env._batch.mode
        if self.mode not in modes:
            served = " or ".join(f"auto_reset={_AUTO_RESET[mode]}" for mode in modes)
            raise ValueError(f"{self._name} wants a ParallelEnv with {served}, got auto_reset={_AUTO_RESET[self.mode]}")

    def claim(self) -> None:
        """Note who steps.

        Raises:
            RuntimeError: Somebody else does.
        """
        known = _steppers.get(self.env)
        other = known() if known is not None else None
        mine = self._facade()
        if other is not None and other is not mine:
            raise RuntimeError(
                f"this ParallelEnv is stepped by a {type(other).__name__} already; make a ParallelEnv for each facade"
            )
        if other is None and mine is not None:
            _steppers[self.env] = self._facade

    def close(self, **keywords: Any) -> None:
        """Close the environment; nobody steps it any more."""
        _steppers.pop(self.env, None)
        self.env.close(**keywords)


class Stepper(Owner):
    """Steps a `ParallelEnv` by arrays, for one facade.

    Args:
        env: Whose agents all declare spaces.
        facade: Who steps; as long as it lives and is not closed, nobody else may.
        modes: The auto-reset modes that it serves.

    Attributes:
        env: As given.
        batch: How its arrays are written and read.
        mode: The auto-reset mode.

    Raises:
        TypeError: It is no `ParallelEnv`.
        ValueError: The mode is another one, agents are not known beforehand, or one of them declares no space.
        ClosedEnvironmentError: It has been closed.
    """

    def __init__(self, env: ParallelEnv, facade: object, *modes: AutoresetMode) -> None:
        super().__init__(env, facade, *modes)
        self._check_spaces()
        self.batch = ArrayBatch(env._batch, copy=env._batch.copies)
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

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        env_ids: Sequence[int] | None = None,
    ) -> Arrays:
        """Begin new episodes; where `env_ids` are not all, the others' observations stay.

        Raises:
            RuntimeError: Another facade steps this environment.
            ValueError: As of `ParallelEnv.reset`, or something has no place in an array.
            ResetNeeded: Some are to be reset where the others have never been.
        """
        self.claim()
        if env_ids is not None and self.latest is None and len(env_ids) < self.env.num_envs:
            raise ResetNeeded("reset all environments before resetting some of them")
        ids, extras = self.env._reset(seed, options, env_ids)
        if self.latest is None or len(ids) == self.env.num_envs:
            self.latest = self.batch.read(extras)
        else:
            self.latest = self.batch.read_some(ids, extras, self.latest)
        return self.latest

    def step(self, actions: Mapping[AgentID, Any]) -> Arrays:
        """Step all environments; raises as `send`."""
        env = self.env
        self._check_may_step("step")
        env._check_idle("step")
        extras = env._step(env._all, self.batch.write(actions))
        self.latest = self.batch.read(extras)
        return self.latest

    def send(self, actions: Mapping[AgentID, Any]) -> None:
        """Begin to step all environments and return.

        Args:
            actions: By agent, arrays `(num_envs, ...)`; see `ArrayBatch.write`.

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

    def receive(self) -> Arrays:
        """The result of what was sent.

        Raises:
            NoAsyncCallError: Nothing was.
            ParallelEnvError: A fault, as in `ParallelEnv.step`.
        """
        self.env._crew.check_open()
        if not self._sent:
            raise NoAsyncCallError("step_wait() without a step_async() before it", "step_wait")
        self._sent = False
        self.latest = self.batch.read(self.env._receive(self.env._all))
        return self.latest

    def _check_may_step(self, name: str) -> None:
        self.claim()
        self.env._check_begun(self.env._all, name)
        if self._sent:
            raise AlreadyPendingCallError(f"{name}() while a step is on its way; step_wait() first", name)
