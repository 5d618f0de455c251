"""Gymnasium's single-agent environments, as multi-agent environments of one agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gymnasium import Space, spaces

from marl_parallel.adapters.attributes import AgentID, declared
from marl_parallel.adapters.protocol import Adapter, AdapterMismatch, Dicts, Rules

AGENT = "agent_0"
_WITHOUT_DICTS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Tuple)


class GymnasiumEnv(Adapter):
    """A single-agent environment; every result is wrapped in a dict of one entry."""

    rules: ClassVar[Rules] = Rules.PETTINGZOO
    kind: ClassVar[str] = "A Gymnasium environment"
    names: ClassVar[frozenset[str]] = frozenset({"gymnasium"})

    def _agents(self) -> list[AgentID]:
        return [AGENT]

    def _spaces(self, what: str) -> dict[AgentID, Space[Any]]:
        space = declared(self.source, f"{what}_space")
        return {AGENT: space} if isinstance(space, Space) else {}

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        result = self._reset(keywords)
        # Before Gymnasium, `reset` returned an observation alone, which may also have two entries.
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._wrong_result("reset", "a tuple (observation, info)", result)
        observation, info = result
        space = self.observation_spaces.get(AGENT)
        if isinstance(observation, Mapping) and isinstance(space, _WITHOUT_DICTS):
            raise self._wrong_result("reset", f"one observation of {space}", observation)
        return {AGENT: observation}, {AGENT: info}

    def step(self, actions: dict[Any, Any]) -> Dicts:
        action = actions[AGENT]
        try:
            result = self.source.step(action)
        except TypeError as error:
            self._check_call(error, "step", action)
            raise
        if not isinstance(result, tuple) or len(result) != 5:
            raise self._wrong_result("step", "a tuple (observation, reward, terminated, truncated, info)", result)
        observation, reward, terminated, truncated, info = result
        if type(reward) is dict:
            raise AdapterMismatch(
                f"the reward of agent {AGENT!r} must be a number or an array, got a dict with the keys {[*reward]}; "
                'if these keys are agents, pass adapter="dict"'
            )
        return {AGENT: observation}, {AGENT: reward}, {AGENT: terminated}, {AGENT: truncated}, {AGENT: info}
