"""Dict environments: `reset` returns two dicts, `step` five, and the environment says `__all__` itself.

Their spaces are Dicts keyed by agent. One reward or flag for all agents is given to each of them. RLlib's
environments, recognised and used without importing ray, differ only in how their spaces are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, ClassVar

import numpy as np
from gymnasium import Space

from marl_parallel.adapters.attributes import (
    AgentID,
    agent_names,
    declared,
    declared_agents,
    spaces_by_agent,
    spaces_of,
    type_name,
    vector_reward_spaces,
)
from marl_parallel.adapters.protocol import ALL, Adapter, Dicts, Misfit, Rules


class DictEnv(Adapter):
    """A simulator with dicts of its own; actions reach it, and its results the caller, unchanged.

    Args:
        source: The simulator.
        certain: Whether it is known to have several agents. If not, the first step decides: one reward for all is
            refused, since a single agent has the same.
    """

    rules: ClassVar[Rules] = Rules.DICT
    kind: ClassVar[str] = "A dict environment"

    def __init__(self, source: Any, certain: bool = True) -> None:
        super().__init__(source)
        self._certain = certain
        self.possible_agents = self._agents()
        self.observation_spaces = self._spaces("observation")
        self.action_spaces = self._spaces("action")
        self.reward_spaces = vector_reward_spaces(source, self.possible_agents)

    def _by_agent(self, result: Any) -> Any:
        if not isinstance(result, tuple | list) or len(result) != 5:
            return result
        observations, *others, infos = result
        if not (_is_dict(observations) and _is_dict(infos)) or any(map(_has_several, others)):
            return result
        if not self._certain and not all(map(_is_dict, others)):
            raise Misfit(
                f"{type_name(self.source)} has a Dict observation space and no action space, and its `step` returned "
                'one reward or flag: pass adapter="gymnasium" if it has one agent, or adapter="dict" if the keys of '
                "its observations are agents that share it."
            )
        agents, flagged = [*observations], [*observations, ALL]
        shared = [values.reshape(())[()] if isinstance(values, np.ndarray) else values for values in others]
        each = (one if _is_dict(one) else dict.fromkeys(to, one) for to, one in zip((agents, flagged, flagged), shared))
        return observations, *each, infos

    def _agents(self) -> list[AgentID]:
        if agents := declared_agents(self.source):
            return agents
        names, with_a_space = agent_names(self.source), self._agents_with_a_space()
        # Names that none of the spaces has are names of something else.
        return names if names and (not with_a_space or {*names} >= {*with_a_space}) else with_a_space

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
        return [spaces_by_agent(declared(self.source, name)) for name in (f"{what}_space", f"{what}_spaces")]


class ListActionsEnv(DictEnv):
    """A simulator with dict spaces that takes a list of actions in the order of its agents, as VMAS's wrappers do."""

    needs_all_actions: ClassVar[bool] = True

    def step(self, actions: dict[Any, Any]) -> Dicts:
        missing = [agent for agent in self.possible_agents if agent not in actions]
        if missing:
            raise ValueError(f"no action for agent {missing[0]!r}: expected one for each of {self.possible_agents}")
        return super().step([actions[agent] for agent in self.possible_agents])  # type: ignore[arg-type]


class RLlibEnv(DictEnv):
    """An RLlib environment; its `get_observation_space` also knows of one space that all agents share."""

    kind: ClassVar[str] = "An RLlib environment"

    def _agents(self) -> list[AgentID]:
        # Spaces come first: in older releases `get_agent_ids` has only the agents present.
        return declared_agents(self.source) or self._agents_with_a_space() or agent_names(self.source)

    def _spaces(self, what: str) -> dict[AgentID, Space[Any]]:
        lookup = declared(self.source, f"get_{what}_space")
        found = spaces_of(self.possible_agents, lookup) if callable(lookup) else {}
        return found or super()._spaces(what)


def _is_dict(values: Any) -> bool:
    return isinstance(values, dict)


def _has_several(values: Any) -> bool:
    """Whether a reward or flag that is no dict is several in one, or none at all."""
    if isinstance(values, dict):
        return False
    size = getattr(values, "size", None)
    return values is None or (size != 1 if isinstance(size, int) else isinstance(values, Mapping | Sized))
