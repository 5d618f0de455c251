"""RLlib's `MultiAgentEnv`, recognised and used without importing ray.

Its steps are those of a dict environment; here lives only how its spaces are found.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gymnasium import Space

from marl_parallel.adapters.attributes import declared
from marl_parallel.adapters.base import agent_names, declared_agents, spaces_of
from marl_parallel.adapters.dict_env import DictEnv
from marl_parallel.adapters.protocol import AgentID


class RLlibEnv(DictEnv):
    """An RLlib environment; its `get_observation_space` also knows of one space that all agents share."""

    kind: ClassVar[str] = "An RLlib environment"

    def _agents(self) -> list[AgentID]:
        # What has a space comes first: older releases count in `get_agent_ids` only who is there now.
        return declared_agents(self.source) or self._agents_with_a_space() or agent_names(self.source)

    def _spaces(self, what: str) -> dict[AgentID, Space[Any]]:
        lookup = declared(self.source, f"get_{what}_space")
        found = spaces_of(self.possible_agents, lookup) if callable(lookup) else {}
        return found or super()._spaces(what)


def is_rllib_env(env: Any) -> bool:
    """Whether its type descends from a class named `MultiAgentEnv` in a module below `ray.rllib`."""
    return any(
        ancestor.__name__ == "MultiAgentEnv" and ancestor.__module__.startswith("ray.rllib.")
        for ancestor in type(env).__mro__
    )
