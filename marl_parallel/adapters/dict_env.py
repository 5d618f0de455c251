"""Dict environments: `reset` gives two dicts, `step` five, and the environment says `__all__` itself.

Their spaces are Dicts keyed by agent. RLlib's environments, which find theirs otherwise, live in `rllib.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gymnasium import Space

from marl_parallel.adapters.attributes import declared
from marl_parallel.adapters.base import (
    Adapter,
    checked_reset,
    checked_step,
    declared_agents,
    spaces_by_agent,
    vector_reward_spaces,
)
from marl_parallel.adapters.protocol import AgentID, Dicts, Rules


class DictEnv(Adapter):
    """A simulator that speaks dicts already; actions reach it, and its results the caller, unchanged."""

    rules: ClassVar[Rules] = Rules.DICT
    kind: ClassVar[str] = "A dict environment"

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.possible_agents = declared_agents(source) or self._agents_with_a_space()
        self.observation_spaces = self._spaces("observation")
        self.action_spaces = self._spaces("action")
        self.reward_spaces = vector_reward_spaces(source, self.possible_agents)

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        return checked_reset(self.source.reset(**keywords), self.source)

    def step(self, actions: dict[Any, Any]) -> Dicts:
        return checked_step(self.source.step(actions), self.source)

    def _agents_with_a_space(self) -> list[AgentID]:
        return next((list(spaces) for spaces in self._declarations("observation") if spaces), [])

    def _spaces(self, what: str) -> dict[AgentID, Space[Any]]:
        for spaces in self._declarations(what):
            # One Dict may also be the space that every agent has; its keys are no agents then.
            of_agents = {agent: spaces[agent] for agent in self.possible_agents if agent in spaces}
            if of_agents:
                return of_agents
        return {}

    def _declarations(self, what: str) -> list[dict[AgentID, Space[Any]]]:
        names = (f"{what}_space", f"{what}_spaces")
        return [spaces_by_agent(declared(self.source, name)) for name in names]
