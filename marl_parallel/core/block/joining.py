"""Joining: which agents have equal spaces, and the spaces and values of several agents as one.

Values of agents with different spaces become one array in two ways: padded to the largest, or one after the other.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID
from marl_parallel.core.block.columns import evenly_spaced
from marl_parallel.core.schema import alike

_PADDED = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)

# -- groups of agents --------------------------------------------------------------------------------------------------


def agents_alike(agents: Sequence[AgentID], *declared: Mapping[AgentID, Space[Any]]) -> list[list[AgentID]]:
    """Groups of agents whose spaces are equal, in each of the `declared`."""
    all_of = {agent: spaces.Tuple([by_agent[agent] for by_agent in declared]) for agent in agents}
    return [[agents[position] for position in positions] for _, positions in alike(all_of, agents)]


def groups_by_space(agents: Sequence[AgentID], *declared: Mapping[AgentID, Space[Any]]) -> dict[str, list[AgentID]]:
    """All agents with equal spaces as one group, by a name that their ids have in common, or after the first one.

    Example:
        >>> declared = {"cat_0": spaces.Discrete(2), "cat_1": spaces.Discrete(3), "dog_0": spaces.Discrete(3)}
        >>> groups_by_space([*declared], declared)
        {'cat': ['cat_0'], 'cat_1': ['cat_1', 'dog_0']}
    """
    groups: dict[str, list[AgentID]] = {}
    for members in agents_alike(agents, *declared):
        names, first = {_name_of(agent) for agent in members}, str(members[0])
        name = names.pop() if len(names) == 1 else first
        groups[first if name in groups else name] = members
    return groups


def groups_by_name(agents: Sequence[AgentID], *declared: Mapping[AgentID, Space[Any]]) -> dict[str, list[AgentID]]:
    """All agents of one name as one group; if their spaces differ, as several groups, each after its first agent.

    Example:
        >>> declared = {"cat_0": spaces.Discrete(2), "cat_1": spaces.Discrete(3), "dog_0": spaces.Discrete(3)}
        >>> groups_by_name([*declared], declared)
        {'cat_0': ['cat_0'], 'cat_1': ['cat_1'], 'dog': ['dog_0']}
    """
    named: dict[str, list[AgentID]] = {}
    for agent in agents:
        named.setdefault(_name_of(agent), []).append(agent)
    groups: dict[str, list[AgentID]] = {}
    for name, members in named.items():
        parts = agents_alike(members, *declared)
        groups.update({name: members} if len(parts) == 1 else {str(part[0]): part for part in parts})
    return groups


def _name_of(agent: AgentID) -> str:
    """The name of agents `name_0`, `name_1` and so on; of any other agent, its id."""
    name, _, number = str(agent).rpartition("_")
    return name if name and number.isdecimal() else str(agent)


# -- one after the other -----------------------------------------------------------------------------------------------


def flat_box(boxes: Iterable[Space[Any]]) -> spaces.Box:
    """The space of values of Boxes, one after the other."""
    all_of: list[Any] = [*boxes]
    dtype: Any = np.result_type(*[box.dtype for box in all_of])
    low, high = (np.concatenate([getattr(box, end).ravel() for box in all_of]) for end in ("low", "high"))
    return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)


def flat_values(arrays: Iterable[NDArray[Any]], axes: int = 1) -> NDArray[Any]:
    """Values of Boxes, one after the other; their arrays have the same leading axes, so many."""
    return np.concatenate([array.reshape(*array.shape[:axes], -1) for array in arrays], axis=axes)


# -- padded to the largest ---------------------------------------------------------------------------------------------


def padded_space(parts: Sequence[Any], kinds: Container[type] = _PADDED) -> Any:
    """The smallest space that holds the values of all these spaces, padded with zeros at the end of each axis.

    Boxes need the same dtype and number of axes, `Discrete` spaces the same start, dicts and tuples the same keys.

    Args:
        parts: Spaces of any kinds.
        kinds: The kinds of spaces that are padded; spaces of other kinds must be equal.

    Raises:
        ValueError: There is no such space.

    Example:
        >>> space = padded_space([spaces.Box(1, 5, (1,)), spaces.Box(2, 6, (2,))])
        >>> space.low.tolist(), space.high.tolist()
        ([1.0, 0.0], [6.0, 6.0])
    """
    first, kind = parts[0], type(parts[0])
    if all(part == first for part in parts):
        return first
    if kind in kinds and {*map(type, parts)} == {kind}:
        if kind is spaces.Dict and all(part.keys() == first.keys() for part in parts):
            return spaces.Dict([(key, padded_space([part[key] for part in parts], kinds)) for key in first])
        if kind is spaces.Tuple and len({*map(len, parts)}) == 1:
            return spaces.Tuple([padded_space(entries, kinds) for entries in zip(*parts)])
        if kind is spaces.Discrete and len({part.start for part in parts}) == 1:
            return spaces.Discrete(max(part.n for part in parts), start=first.start)
        if kind in (spaces.Box, spaces.MultiBinary) and len({(part.dtype, len(part.shape)) for part in parts}) == 1:
            shape = tuple(max(sizes) for sizes in zip(*[part.shape for part in parts]))
            if kind is spaces.MultiBinary:
                return spaces.MultiBinary(shape)
            low = np.min([padded_array(part.low, shape) for part in parts], axis=0)
            high = np.max([padded_array(part.high, shape) for part in parts], axis=0)
            return spaces.Box(low, high, dtype=first.dtype)
    raise ValueError(f"no space holds the values of {' and of '.join(dict.fromkeys(map(str, parts)))}")


def padded_array(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Pad an array with zeros at the end of each axis; an array with other axes, or a larger one, stays as it is."""
    missing = [whole - size for whole, size in zip(shape, array.shape)]
    if array.ndim != len(shape) or min(missing, default=0) < 0 or not any(missing):
        return array
    return np.pad(array, [(0, width) for width in missing])


class Parts:
    """Agents in parts with equal spaces. Arrays of parts are `(n, agents of the part, ...)`.

    Attributes:
        columns: The columns of each part's agents among all agents: a slice or a list.
        size: The number of agents.
    """

    def __init__(self, columns: Iterable[Sequence[int]]) -> None:
        lists = [[*part] for part in columns]
        self.columns: list[Any] = [evenly_spaced(part) or part for part in lists]
        self.size = sum(map(len, lists))
        self._lists = lists

    def padded(self, arrays: Sequence[NDArray[Any]], whole: NDArray[Any] | None = None) -> NDArray[Any]:
        """One array of all agents, `(n, agents, ...)`: `whole`, or zeros of the largest shape, with the parts' values.

        The array of the only part is returned as it is.
        """
        if len(arrays) == 1:
            return arrays[0]
        if whole is None:
            shape = map(max, zip(*[array.shape[2:] for array in arrays]))
            whole = np.zeros((len(arrays[0]), self.size, *shape), np.result_type(*arrays))
        for part, array in enumerate(arrays):
            whole[self._index(part, array.shape[2:])] = array
        return whole

    def unpadded(self, part: int, whole: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """The values of a part's agents, of this shape, from an array of all agents."""
        values: NDArray[Any] = whole[self._index(part, shape)]
        return values

    def objects(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """An array of objects, `(n, agents)`, with the value of each agent."""
        objects = np.empty((len(arrays[0]), self.size), object)
        for columns, array in zip(self._lists, arrays):
            for row, of_row in enumerate(array):
                for column, value in zip(columns, of_row):
                    objects[row, column] = value
        return objects

    def _index(self, part: int, shape: tuple[int, ...]) -> Any:
        return (slice(None), self.columns[part], *map(slice, shape))
