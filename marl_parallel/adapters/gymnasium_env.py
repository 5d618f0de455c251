"""Gymnasium's single-agent environments, as multi-agent environments of one agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gymnasium import Space, spaces

from marl_parallel.adapters.attributes import AgentID, declared, vector_reward_spaces
from marl_parallel.adapters.protocol import Adapter, Dicts, Misfit, Rules

AGENT = "agent_0"
_NO_DICTS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Tuple)


class GymnasiumEnv(Adapter):
    """A single-agent environment; every result is wrapped in a dict of one entry."""

    rules: ClassVar[Rules] = Rules.PETTINGZOO
    kind: ClassVar[str] = "A Gymnasium environment"

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.possible_agents = [AGENT]
        self._space, action_space = declared(source, "observation_space"), declared(source, "action_space")
        self.observation_spaces = {AGENT: self._space} if isinstance(self._space, Space) else {}
        self.action_spaces = {AGENT: action_space} if isinstance(action_space, Space) else {}
        self.reward_spaces = vector_reward_spaces(source, self.possible_agents)

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        result = self._reset(keywords)
        # An observation alone, as before Gymnasium, may unpack in two as well.
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._wrong("reset", "a tuple (observation, info)", result)
        observation, info = result
        if isinstance(observation, Mapping) and isinstance(self._space, _NO_DICTS):
            raise self._wrong("reset", f"one observation of {self._space}", observation)
        return {AGENT: observation}, {AGENT: info}

    def step(self, actions: dict[Any, Any]) -> Dicts:
        action = actions[AGENT]
        try:
            result = self.source.step(action)
        except TypeError as error:
            self._check_call(error, "step", action)
            raise
        if not isinstance(result, tuple) or len(result) != 5:
            raise self._wrong("step", "a tuple (observation, reward, terminated, truncated, info)", result)
        observation, reward, terminated, truncated, info = result
        if type(reward) is dict:
            raise Misfit(
                f"the reward of agent {AGENT!r} must be a number or an array, got a dict with the keys {[*reward]}; "
                'if these keys are agents, pass adapter="dict"'
            )
        return {AGENT: observation}, {AGENT: reward}, {AGENT: terminated}, {AGENT: truncated}, {AGENT: info}
