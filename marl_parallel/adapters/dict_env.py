"""Dict environments: `reset` returns two dicts, `step` five, and the environment says `__all__` itself.

Their spaces are Dicts keyed by agent. One reward or flag for all agents is given to each of them. RLlib's
environments, recognised and used without importing ray, differ only in how their spaces are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, ClassVar

import numpy as np
from gymnasium import Space

from marl_parallel.adapters.attributes import declared
from marl_parallel.adapters.protocol import (
    ALL,
    FIVE_DICTS,
    Adapter,
    AgentID,
    Dicts,
    Misfit,
    Rules,
    agent_names,
    declared_agents,
    spaces_by_agent,
    spaces_of,
    type_name,
    vector_reward_spaces,
)


class DictEnv(Adapter):
    """A simulator that speaks dicts already; actions reach it, and its results the caller, unchanged.

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

    def reset(self, **keywords: Any) -> tuple[dict[AgentID, Any], dict[Any, Any]]:
        return self._reset_dicts(self.source, keywords)

    def step(self, actions: dict[Any, Any]) -> Dicts:
        try:
            result = self.source.step(actions)
        except TypeError as error:
            self._check_call(error, "step", actions)
            raise
        if type(result) is tuple and [*map(type, result)] == FIVE_DICTS:
            return result
        return self._five_dicts(self._for_each(result))

    def _for_each(self, result: Any) -> Any:
        """Give a reward or flag that is one for all to each agent that observes something."""
        if not isinstance(result, tuple | list) or len(result) != 5 or not isinstance(result[0], dict):
            return result
        observations, *others, infos = result
        if not isinstance(infos, dict) or all(isinstance(values, dict) for values in others):
            return result
        if any(_has_several(values) for values in others):
            return result
        if not self._certain:
            raise Misfit(
                f"{type_name(self.source)} has a Dict observation space and no action space, and its `step` returned "
                'one reward or flag: pass adapter="gymnasium" if it has one agent, or adapter="dict" if the keys of '
                "its observations are agents that share it."
            )
        rewards, *flags = [values.reshape(())[()] if isinstance(values, np.ndarray) else values for values in others]
        agents = [*observations]
        return (
            observations,
            rewards if isinstance(rewards, dict) else dict.fromkeys(agents, rewards),
            *(one if isinstance(one, dict) else dict.fromkeys([*agents, ALL], one) for one in flags),
            infos,
        )

    def _agents(self) -> list[AgentID]:
        declared = declared_agents(self.source)
        if declared:
            return declared
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
        # What has a space comes first: in older releases `get_agent_ids` has only the agents present.
        return declared_agents(self.source) or self._agents_with_a_space() or agent_names(self.source)

    def _spaces(self, what: str) -> dict[AgentID, Space[Any]]:
        lookup = declared(self.source, f"get_{what}_space")
        found = spaces_of(self.possible_agents, lookup) if callable(lookup) else {}
        return found or super()._spaces(what)


def _has_several(values: Any) -> bool:
    """Whether a reward or flag that is no dict is several in one, or none at all."""
    if isinstance(values, dict):
        return False
    size = getattr(values, "size", None)
    several = size != 1 if isinstance(size, int) else isinstance(values, Mapping | Sized)
    return values is None or several
