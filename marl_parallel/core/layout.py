"""Spaces -> one block of memory: which bytes of an environment's record belong to what.

Every environment has one record, contiguous and starting on a cache line: actions, then the head of the transition
(rewards, flags, presence), vector rewards, observations, final observations, global state. A `Layout` follows from a
`Schema` and the number of environments alone, so worker and parent come to the same one without telling each other
offsets. How a record is filled and read is the business of `records.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
from gymnasium import Space

from marl_parallel.adapters.protocol import AgentID
from marl_parallel.adapters.protocol import Schema as Schema
from marl_parallel.core.columns import ArrayColumn, Column, DictColumn, Place, column_for
from marl_parallel.core.large_spaces import equal
from marl_parallel.core.values import Mismatch, fits_block

RECORD_ALIGNMENT, COLUMN_ALIGNMENT = 64, 16
"""Bytes: no cache line belongs to two records, as it may be that of two workers; within one, every line counts."""


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def alike(declared: Mapping[AgentID, Space[Any]], agents: Sequence[AgentID]) -> list[tuple[Space[Any], list[int]]]:
    """Groups of agents whose spaces are equal: the space, and their positions among `agents`."""
    groups: list[tuple[Space[Any], list[int]]] = []
    group_of: dict[int, list[int]] = {}  # by the id of a space that has been looked at: most agents share one object
    for position, agent in enumerate(agents):
        own = declared[agent]
        if id(own) not in group_of:
            for space, positions in groups:
                if equal(space, own):
                    group_of[id(own)] = positions
                    break
            else:
                groups.append((own, positions := []))
                group_of[id(own)] = positions
        group_of[id(own)].append(position)
    return groups


def evenly_spaced(rows: Sequence[int]) -> slice | None:
    """The slice that takes just these rows in this order; None where there is none.

    Example:
        >>> evenly_spaced([1, 3, 5]), evenly_spaced([2, 1, 4])
        (slice(1, 6, 2), None)
    """
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if not rows or step < 1 or [*rows] != [*range(rows[0], rows[-1] + 1, step)]:
        return None
    return slice(rows[0], rows[-1] + 1, step)


class Whole(Protocol):
    """What writes and reads the values of all agents of a record, or of several records, at once; as `Column` does."""

    def write_all(self, record: int, values: Sequence[Any]) -> None: ...

    def read_all(self, record: int, copy: bool) -> list[Any]: ...

    def write_span(self, span: range, values: Sequence[Any]) -> None: ...

    def read_span(self, span: range, copy: bool) -> list[Any]: ...


class _Groups:
    """Several columns, each with the values of some of the agents."""

    def __init__(self, groups: Sequence[tuple[Column, list[int]]], size: int) -> None:
        self._groups, self._size = groups, size

    def write_all(self, record: int, values: Sequence[Any]) -> None:
        for column, positions in self._groups:
            column.write_all(record, [values[position] for position in positions])

    def read_all(self, record: int, copy: bool) -> list[Any]:
        values: list[Any] = [None] * self._size
        for column, positions in self._groups:
            for position, value in zip(positions, column.read_all(record, copy)):
                values[position] = value
        return values

    def write_span(self, span: range, values: Sequence[Any]) -> None:
        for column, positions in self._groups:
            rows = zip(*[values[position :: self._size] for position in positions])
            column.write_span(span, [*chain.from_iterable(rows)])

    def read_span(self, span: range, copy: bool) -> list[Any]:
        values: list[Any] = [None] * (self._size * len(span))
        for column, positions in self._groups:
            read = column.read_span(span, copy)
            for row, position in enumerate(positions):
                values[position :: self._size] = read[row :: len(positions)]
        return values


class AgentColumns:
    """The values of all agents whose declared space has a fixed size; agents with equal spaces share a column.

    Attributes:
        agents: Those agents, in the order of `possible_agents`.
        groups: Columns, and which of `agents` each has the values of.
        whole: Writes and reads the values of all of them at once, in their order.
    """

    def __init__(self, declared: Mapping[AgentID, Space[Any]], agents: Sequence[AgentID], place: Place) -> None:
        self.agents = [agent for agent in agents if agent in declared and fits_block(declared[agent])]
        self.groups: list[tuple[Column, list[int]]] = [
            (column_for(space, len(positions), place), positions) for space, positions in alike(declared, self.agents)
        ]
        self._row = {
            self.agents[position]: (column, row)
            for column, positions in self.groups
            for row, position in enumerate(positions)
        }
        columns = [column for column, _ in self.groups]
        self.whole: Whole = columns[0] if len(columns) == 1 else _Groups(self.groups, len(self.agents))

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        """Build the views into a block whose records start at these offsets."""
        for column, _ in self.groups:
            column.bind(buffer, starts)

    def __contains__(self, agent: object) -> bool:
        return agent in self._row

    def write(self, record: int, agent: AgentID, value: Any) -> None:
        """Write the value of one of `agents`; raises as `Column.write` does."""
        column, row = self._row[agent]
        column.write(record, row, value)

    def read(self, record: int, agent: AgentID, copy: bool) -> Any:
        """The value of one of `agents`."""
        column, row = self._row[agent]
        return column.read(record, row, copy)

    def read_part(self, record: int, agent: AgentID, key: Any) -> Any:
        """The entry of one key in the value of one of `agents`, copied; None if its space has no such key."""
        column, row = self._row[agent]
        part = column.children.get(key) if isinstance(column, DictColumn) else None
        return None if part is None else part.read(record, row, True)

    def read_some(self, record: int, agents: Sequence[AgentID], copy: bool) -> list[Any]:
        """The values of some of `agents`, in this order."""
        if agents == self.agents:
            return self.whole.read_all(record, copy)
        return [self.read(record, agent, copy) for agent in agents]

    def write_stacked(self, values: Mapping[AgentID, Any]) -> None:
        """Write the values of some of `agents` in every record.

        Raises:
            Mismatch: They are not what their agent's space declares; the text says whose.
        """
        for column, positions in self.groups:
            agents = [self.agents[position] for position in positions]
            if self._write_together(column, [values.get(agent) for agent in agents]):
                continue
            for row, agent in enumerate(agents):
                if agent in values:
                    try:
                        column.write_stacked(row, values[agent])
                    except Mismatch as error:
                        raise Mismatch(f"the actions of agent {agent!r}: {error}") from error

    @staticmethod
    def _write_together(column: Column, values: Sequence[Any]) -> bool:
        """Write all rows of a column at once; says whether it could, as it can where they are arrays of one dtype."""
        if {*map(type, values)} != {np.ndarray} or len({value.dtype for value in values}) > 1:
            return False
        try:
            # `np.stack` would cost more than all the rest.
            column.write_stacked(slice(None), np.array(values).swapaxes(0, 1))
        except (ValueError, Mismatch):
            return False  # one by one finds which
        return True

    def rows_of(self, agents: Sequence[AgentID]) -> tuple[Column, slice] | None:
        """Where the values of these of `agents` lie side by side, at equal distances; None where they do not."""
        places = [self._row[agent] for agent in agents if agent in self._row]
        columns, rows = [column for column, _ in places], [row for _, row in places]
        span = evenly_spaced(rows)
        if span is None or len(rows) < len(agents) or any(column is not columns[0] for column in columns):
            return None
        return columns[0], span


class Layout:
    """Where everything lies, for a number of environments with one schema.

    Args:
        schema: What the environments have in common.
        num_records: How many environments.
        arrays: False leaves every agent out, so that all values travel pickled.

    Attributes:
        nbytes: Size of the block.
        stride: Bytes from one record to the next.
        rare: Where, in a record, that part begins which most steps leave alone: final observations and state.
        agents: The agents with a row in the heads of the records.
        actions, observations, final_observations: Columns of the agents whose values lie in the block.
        rewards: Columns of the agents whose rewards are vectors; those that are numbers lie in the head.
        state: The global state; None where there is none, or where it travels pickled.
    """

    def __init__(self, schema: Schema, num_records: int, *, arrays: bool = True) -> None:
        self.schema, self.num_records = schema, num_records
        self.agents = list(schema.possible_agents) if arrays else []
        self._record_nbytes = 0
        place, n = self._place, len(self.agents)
        self.action_head = place(1 + n)  # see actions.py
        self.actions = AgentColumns(schema.action_spaces, self.agents, place)
        self.transition_head = place(8 + 12 * n + 2)  # see records.py
        self.rewards = AgentColumns(schema.reward_spaces, self.agents, place)
        self.observations = AgentColumns(schema.observation_spaces, self.agents, place)
        self.rare = _aligned(self._record_nbytes, COLUMN_ALIGNMENT)
        self.final_observations = AgentColumns(schema.observation_spaces, self.agents, place)
        self.state: ArrayColumn | None = None
        if arrays and schema.state_space is not None and fits_block(schema.state_space):
            column = column_for(schema.state_space, 1, place)
            self.state = column if isinstance(column, ArrayColumn) else None
        self.stride = stride = _aligned(self._record_nbytes, RECORD_ALIGNMENT)
        self.nbytes = stride * num_records
        self.starts = [stride * record for record in range(num_records)]

    def _place(self, nbytes: int) -> int:
        offset = _aligned(self._record_nbytes, COLUMN_ALIGNMENT)
        self._record_nbytes = offset + nbytes
        return offset

    def bind(self, buffer: Any) -> None:
        """Build all views into a block of `nbytes` zeroed bytes."""
        for columns in (self.actions, self.rewards, self.observations, self.final_observations):
            columns.bind(buffer, self.starts)
        if self.state is not None:
            self.state.bind(buffer, self.starts)
