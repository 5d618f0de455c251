"""Dict environments, with spaces and results keyed by agent; RLlib's differ only in how their spaces are found."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, ClassVar

import numpy as np
from gymnasium import Space

from marl_parallel.adapters.attributes import AgentID, agent_names, declared, spaces_by_agent, spaces_of, type_name
from marl_parallel.adapters.protocol import ALL, Adapter, AdapterMismatch, Dicts, Rules
from marl_parallel.adapters.tuple_env import is_true


class DictEnv(Adapter):
    """A simulator whose actions and results are dicts keyed by agent, which are passed on unchanged.

    Unless it is `certain` that there are several agents, a single reward is an error: there may be only one agent.
    """

    rules: ClassVar[Rules] = Rules.DICT
    kind: ClassVar[str] = "A dict environment"
    names: ClassVar[frozenset[str]] = frozenset({"dict"})

    def __init__(self, source: Any, certain: bool = True) -> None:
        super().__init__(source)
        self._certain = certain

    def _by_agent(self, result: Any) -> Any:
        if not isinstance(result, tuple | list) or len(result) != 5:
            return result
        observations, *values, infos = result  # rewards, terminated and truncated flags
        if not (isinstance(observations, dict) and isinstance(infos, dict)) or any(map(_has_several, values)):
            return result
        if not self._certain and not all(isinstance(value, dict) for value in values):
            raise AdapterMismatch(
                f"{type_name(self.source)} has a Dict observation space and no action space, and its `step` returned "
                'one reward or flag: pass adapter="gymnasium" if it has one agent, or adapter="dict" if the keys of '
                "its observations are agents that share it."
            )
        agents, flagged = [*observations], [*observations, ALL]
        if isinstance(values[1], dict) and not isinstance(values[2], dict) and self._all_have_terminated(values[1]):
            values[1] = {ALL: True, **values[1]}
        for index, keys in enumerate((agents, flagged, flagged)):
            value = values[index]
            if isinstance(value, np.ndarray):
                value = value.reshape(())[()]
            if not isinstance(value, dict):
                values[index] = dict.fromkeys(keys, value)
        return observations, *values, infos

    def _all_have_terminated(self, terminateds: dict[Any, Any]) -> bool:
        """Whether every possible agent has a true flag: the end of an episode whose one truncated flag is for all."""
        agents = self.possible_agents
        return bool(agents) and all(agent in terminateds and is_true(terminateds[agent]) for agent in agents)

    def _agents(self) -> list[AgentID]:
        if agents := super()._agents():
            return agents
        names, with_a_space = agent_names(self.source), self._agents_with_a_space()
        # If names miss an agent with a space, they are names of something else.
        return names if names and (not with_a_space or {*names} >= {*with_a_space}) else with_a_space

    def _agents_with_a_space(self) -> list[AgentID]:
        return next((list(spaces) for spaces in self._declarations("observation") if spaces), [])

    def _spaces(self, what: str) -> dict[AgentID, Space[Any]]:
        name = f"{what}_space"
        if callable(method := declared(self.source, name)):  # as in PettingZoo
            return spaces_of(self.possible_agents, method, name)
        for spaces in self._declarations(what):
            # One Dict may also be the space that every agent has; then its keys are not agents.
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
    """An RLlib environment; its `get_observation_space` also returns one space that all agents share."""

    kind: ClassVar[str] = "An RLlib environment"

    def _agents(self) -> list[AgentID]:
        # Spaces come first: in older releases `get_agent_ids` has only the agents present.
        return Adapter._agents(self) or self._agents_with_a_space() or agent_names(self.source)

    def _spaces(self, what: str) -> dict[AgentID, Space[Any]]:
        lookup = declared(self.source, f"get_{what}_space")
        of_agents = spaces_of(self.possible_agents, lookup) if callable(lookup) else {}
        return of_agents or super()._spaces(what)


def _has_several(values: Any) -> bool:
    """Whether a reward or flag cannot serve as one value for all agents; False for a dict."""
    if isinstance(values, dict):
        return False
    size = getattr(values, "size", None)
    return values is None or (size != 1 if isinstance(size, int) else isinstance(values, Mapping | Sized))
