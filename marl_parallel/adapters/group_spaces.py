"""Spaces of agents whose ids are not known beforehand: looked up by the group that an agent belongs to.

Which groups there are, and how an id tells its own, is the business of the adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gymnasium import Space, spaces

from marl_parallel.adapters.protocol import AgentID


class GroupSpaces(Mapping[AgentID, Space[Any]]):
    """One space for each group; its keys are the groups, and the id of an agent is looked up as its group.

    Args:
        by_group: The space that all agents of a group have.
        group_of: The group of an agent; it must pickle.

    Example:
        >>> declared = GroupSpaces({"wolf": spaces.Discrete(5)}, lambda agent: agent.partition("_")[0])
        >>> declared["wolf_7"], [*declared], "sheep_1" in declared
        (Discrete(5), ['wolf'], False)
    """

    def __init__(self, by_group: Mapping[AgentID, Space[Any]], group_of: Callable[[Any], AgentID]) -> None:
        self._by_group, self._group_of = dict(by_group), group_of

    def __getitem__(self, key: AgentID) -> Space[Any]:
        found = self._by_group.get(key)
        return self._by_group[self._group_of(key)] if found is None else found

    def __iter__(self) -> Iterator[AgentID]:
        return iter(self._by_group)

    def __len__(self) -> int:
        return len(self._by_group)

    def as_space(self) -> spaces.Dict:
        """A `Dict` keyed by group, in which an agent's id is looked up as here."""
        return _SpacesByGroup(self)


class _SpacesByGroup(spaces.Dict):
    def __init__(self, declared: GroupSpaces) -> None:
        super().__init__([*declared.items()])  # type: ignore[list-item]
        self._declared = declared

    def __getitem__(self, key: Any) -> Space[Any]:
        return self._declared[key]
