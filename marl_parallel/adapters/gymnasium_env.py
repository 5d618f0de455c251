"""Gymnasium's single-agent environments, as multi-agent environments of one agent.

A `gymnasium.Env` that hosts several agents is a dict environment; which of the two one is, `adapt` decides.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gymnasium import Space

from marl_parallel.adapters.attributes import declared
from marl_parallel.adapters.base import Adapter, type_name, vector_reward_spaces
from marl_parallel.adapters.protocol import AgentID, Dicts, Rules

AGENT = "agent_0"


class GymnasiumEnv(Adapter):
    """A single-agent environment; every result is wrapped in a dict of one entry."""

    rules: ClassVar[Rules] = Rules.PETTINGZOO
    kind: ClassVar[str] = "A Gymnasium environment"

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.possible_agents = [AGENT]
        self.observation_spaces = _space_of_the_agent(declared(source, "observation_space"))
        self.action_spaces = _space_of_the_agent(declared(source, "action_space"))
        self.reward_spaces = vector_reward_spaces(source, self.possible_agents)

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        result = self.source.reset(**keywords)
        # An observation alone, as before Gymnasium, may unpack in two as well.
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"`reset` of {type_name(self.source)} must return a tuple (observation, info)")
        observation, info = result
        return {AGENT: observation}, {AGENT: info}

    def step(self, actions: dict[Any, Any]) -> Dicts:
        result = self.source.step(actions[AGENT])
        if not isinstance(result, tuple) or len(result) != 5:
            raise TypeError(
                f"`step` of {type_name(self.source)} must return a tuple "
                "(observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, info = result
        return {AGENT: observation}, {AGENT: reward}, {AGENT: terminated}, {AGENT: truncated}, {AGENT: info}


def _space_of_the_agent(space: Any) -> dict[AgentID, Space[Any]]:
    return {AGENT: space} if isinstance(space, Space) else {}
