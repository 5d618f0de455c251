"""Where everything lies in the block of shared memory, and the values of agents in it.

Each environment has one record, contiguous and starting on a cache line:

    header of the actions | actions | header of the transition | vector rewards | observations
    | final observations | global state

A `Layout` follows from a `Schema` and the number of environments alone, so that workers and parent lay out the same
block without exchanging offsets. Agents with equal spaces form a `Group`. A group has one column for each leaf of its
space, with the values of all its agents side by side, so that they are written with one call and read as one array.
Headers are described and records written and read in `records.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID, Schema
from marl_parallel.core.schema import alike
from marl_parallel.core.spaces import (
    ARRAY_SPACES,
    DoesNotFit,
    Mismatch,
    as_array,
    builder,
    conform,
    conform_action,
    fits_block,
    leaves,
    numbers_of,
    rows_builder,
    split,
)
from marl_parallel.core.stacking import check_form

RECORD_ALIGNMENT, COLUMN_ALIGNMENT = 64, 16
"""Bytes: no cache line belongs to two records, as it may be that of two workers; within one, every line counts."""

Place: TypeAlias = Callable[[int], int]
"""Reserves so many bytes in every record and returns their offset within it."""

_FEW_ROWS = 8
"""Up to so many arrays, copying each is cheaper than copying all at once and taking views."""

_copy_of = np.ndarray.copy


def over_records(buffer: Any, starts: Sequence[int], offset: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """One array over all records, which lie at equal distances: a view of shape `(records, *shape)`."""
    within: NDArray[Any] = np.ndarray(shape, dtype, buffer, starts[0] + offset)
    stride = starts[1] - starts[0] if len(starts) > 1 else within.nbytes
    view: NDArray[Any] = np.ndarray((len(starts), *shape), dtype, buffer, starts[0] + offset, (stride, *within.strides))
    return view


# -- columns: the values of one leaf of a space ------------------------------------------------------------------------
#
# `row` is the agent's place in its group. A span is the records from `start` to `stop`; its values are those of all
# rows of the first record, then those of the second, and so on. Both kinds of columns have the same methods.


class ArrayColumn:
    """Arrays of one dtype and shape.

    Attributes:
        array: All of them: a view of the block of shape `(records, rows, *shape)`.
    """

    def __init__(self, rows: int, dtype: np.dtype[Any], shape: tuple[int, ...], place: Place) -> None:
        self.rows, self.dtype, self.shape = rows, dtype, shape
        self.offset = place(rows * dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        self._lengths = [shape[0] if shape else 0] * rows
        # What `as_array` does with numbers of another dtype; integers want a look at each.
        self._casting: Literal["same_kind", "equiv"] = "same_kind" if dtype.kind in "fc" else "equiv"

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        """Build the views into a block whose records start at these offsets."""
        self.array = over_records(buffer, starts, self.offset, self.dtype, (self.rows, *self.shape))
        self.records = [*self.array]
        # All rows end to end along the first axis, which is how one concatenation fills them.
        flat = (self.rows * self.shape[0], *self.shape[1:]) if self.shape else ()
        self._flat = [view.reshape(flat) for view in self.records] if self.shape else []
        self._rows = [view[row, ...] for view in self.records for row in range(self.rows)]

    def write(self, record: int, row: int, value: Any) -> None:
        """Write one value; raises `Mismatch` where it is no such array, `DoesNotFit` where it is None."""
        if value is None:
            raise DoesNotFit
        self._rows[record * self.rows + row][...] = as_array(value, self.dtype, self.shape)

    def write_span(self, start: int, stop: int, values: Sequence[Any]) -> None:
        """Write the values of a span; raises as `write` does, when some may have been written."""
        try:
            # The other dimensions are compared by NumPy.
            if stop - start == 1:
                if self._flat and [*map(len, values)] == self._lengths:
                    np.concatenate(values, out=self._flat[start], casting=self._casting)
                    return
            elif self._flat and [*map(len, values)] == self._lengths * (stop - start):
                end_to_end = np.concatenate(values, casting=self._casting, dtype=self.dtype)
                if end_to_end.shape[1:] == self.shape[1:]:
                    self.array[start:stop] = end_to_end.reshape(stop - start, self.rows, *self.shape)
                    return
        except (TypeError, ValueError):
            pass  # not arrays, or of a dtype that needs a look: one by one, which converts or says which is wrong
        for place, value in enumerate(values):
            self.write(start + place // self.rows, place % self.rows, value)

    def write_stacked(self, row: int | slice, values: Any) -> None:
        """Write the value of one row `(records, ...)`, or of several rows `(records, rows, ...)`, in all records."""
        column = self.array[:, row]
        column[...] = as_array(values, self.dtype, column.shape)

    def read(self, record: int, row: int, copy: bool) -> Any:
        """One value; a view of the block unless `copy`."""
        view = self._rows[record * self.rows + row]
        return view.copy() if copy else view

    def read_span(self, start: int, stop: int, copy: bool) -> list[Any]:
        """The values of a span; views of the block unless `copy`."""
        if copy and self.rows > _FEW_ROWS and self.shape:
            return [*chain.from_iterable([record.copy() for record in self.records[start:stop]])]
        views = self._rows[start * self.rows : stop * self.rows]
        return [*map(_copy_of, views)] if copy else views


NUMBER_TYPES: tuple[type, ...] = (
    int, bool, np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.uint32, np.uint64,
)  # fmt: skip
_NUMBER_TAGS = {t: tag for tag, t in enumerate(NUMBER_TYPES)}


class NumberColumn:
    """Discrete values: 64-bit integers, then a tag each that says which type the number had.

    Attributes:
        array: The integers: a view of the block of shape `(records, rows)`.
    """

    def __init__(self, rows: int, place: Place) -> None:
        self.rows = rows
        self._all = struct.Struct(f"={rows}q{rows}s")
        self._number = struct.Struct("=q")
        self.offset = place(self._all.size)
        self._uniform = {t: bytes((tag,)) * rows for t, tag in _NUMBER_TAGS.items()}
        self._ints = self._uniform[int]

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        """Build the views into a block whose records start at these offsets."""
        self._buffer = memoryview(buffer)
        self._starts = [start + self.offset for start in starts]
        self.array = over_records(buffer, starts, self.offset, np.int64, (self.rows,))
        self._tags = over_records(buffer, starts, self.offset + 8 * self.rows, np.uint8, (self.rows,))

    def write(self, record: int, row: int, value: Any) -> None:
        """Write one value; raises `DoesNotFit` where it has another type or more than 64 bits."""
        try:
            tag, start = _NUMBER_TAGS[type(value)], self._starts[record]
            self._number.pack_into(self._buffer, start + 8 * row, value)
        except (KeyError, struct.error) as error:
            raise DoesNotFit from error
        self._buffer[start + 8 * self.rows + row] = tag

    def write_span(self, start: int, stop: int, values: Sequence[Any]) -> None:
        """Write the values of a span; raises as `write` does, when some may have been written."""
        kinds, rows = {*map(type, values)}, self.rows
        kind = kinds.pop() if len(kinds) == 1 else None
        try:
            if stop - start == 1:
                tags = bytes([_NUMBER_TAGS[type(v)] for v in values]) if kind is None else self._uniform[kind]
                self._all.pack_into(self._buffer, self._starts[start], *values, tags)
            elif kind is None:
                for record in range(start, stop):
                    place = (record - start) * rows
                    self.write_span(record, record + 1, values[place : place + rows])
            else:
                tag = _NUMBER_TAGS[kind]
                self.array[start:stop] = np.fromiter(values, np.int64, len(values)).reshape(stop - start, rows)
                self._tags[start:stop] = tag
        except (KeyError, OverflowError, struct.error) as error:
            raise DoesNotFit from error

    def write_stacked(self, row: int | slice, values: Any) -> None:
        """Write the value of one row `(records,)`, or of several rows `(records, rows)`, in all records."""
        array = np.asarray(values)
        column = self.array[:, row]
        if array.shape != column.shape or array.dtype.kind not in "bui":
            count = " x ".join(map(str, column.shape))
            raise Mismatch(f"expected {count} integers, got shape {array.shape} and dtype {array.dtype}")
        column[...] = as_array(array, column.dtype, column.shape)
        self._tags[:, row] = _NUMBER_TAGS[np.int64]

    def read(self, record: int, row: int, copy: bool) -> Any:
        """One value."""
        start = self._starts[record]
        (value,) = self._number.unpack_from(self._buffer, start + 8 * row)
        return NUMBER_TYPES[self._buffer[start + 8 * self.rows + row]](value)

    def read_span(self, start: int, stop: int, copy: bool) -> list[Any]:
        """The values of a span."""
        if stop - start == 1:
            *values, tags = self._all.unpack_from(self._buffer, self._starts[start])
            if tags == self._ints:  # as unpacked
                return values
            return [NUMBER_TYPES[tag](value) for value, tag in zip(values, tags)]
        tags = self._tags[start:stop].tobytes()
        if tags == tags[:1] * len(tags):
            return numbers_of(self.array[start:stop], NUMBER_TYPES[tags[0]])
        return [*chain.from_iterable([self.read_span(record, record + 1, copy) for record in range(start, stop)])]


Column: TypeAlias = ArrayColumn | NumberColumn


# -- the values of agents ----------------------------------------------------------------------------------------------


class Group:
    """Agents with equal spaces, and the columns of the leaves of their space.

    Attributes:
        space: Theirs.
        positions: Theirs among the agents of the `AgentColumns`.
        columns: In the order of the leaves.
    """

    def __init__(self, space: Space[Any], positions: list[int], place: Place) -> None:
        self.space, self.positions = space, positions
        parts = [*leaves(space)]
        self._paths = [path for path, _ in parts]
        self._plain = self._paths == [()]
        # Placed in an order that all environments have in common, read in the space's own.
        columns: dict[Any, Column] = {}
        for path, leaf in sorted(parts, key=lambda part: [*map(repr, part[0])]):
            if isinstance(leaf, spaces.Discrete):
                columns[path] = NumberColumn(len(positions), place)
            else:
                assert leaf.shape is not None
                columns[path] = ArrayColumn(len(positions), np.dtype(leaf.dtype), leaf.shape, place)
        self.columns = [columns[path] for path in self._paths]
        self._build, self._build_rows = builder(space), rows_builder(space)

    def write(self, record: int, row: int, value: Any) -> None:
        """Write the value of one agent; raises `DoesNotFit` or `Mismatch`."""
        parts: list[list[Any]] = []
        split(self.space, [value], parts)
        for column, (part,) in zip(self.columns, parts):
            column.write(record, row, part)

    def write_span(self, start: int, stop: int, values: list[Any]) -> None:
        """Write the values of a span; raises as `write` does, when some may have been written."""
        parts: list[list[Any]] = []
        split(self.space, values, parts)
        for column, part in zip(self.columns, parts):
            column.write_span(start, stop, part)

    def write_stacked(self, row: int | slice, values: Any) -> None:
        """Write the values of one row or several rows in all records, from arrays in the form of the space.

        Raises:
            Mismatch: They are not what the space declares; some may have been written.
        """
        check_form(self.space, values)
        for column, part in zip(self.columns, self._parts(values)):
            column.write_stacked(row, part)

    def read(self, record: int, row: int, copy: bool) -> Any:
        """The value of one agent; arrays are views of the block unless `copy`."""
        return self._build(*[column.read(record, row, copy) for column in self.columns])

    def read_part(self, record: int, row: int, key: Any) -> Any:
        """The entry of one key in the value of one agent, copied; None if the space has no such key."""
        if not isinstance(self.space, spaces.Dict) or key not in self.space.spaces:
            return None
        if (key,) in self._paths:
            return self.columns[self._paths.index((key,))].read(record, row, True)
        return self.read(record, row, True)[key]

    def read_span(self, start: int, stop: int, copy: bool) -> list[Any]:
        """The values of a span; arrays are views of the block unless `copy`."""
        if self._plain:
            return self.columns[0].read_span(start, stop, copy)
        if not self.columns:
            return self._build_rows([()] * (len(self.positions) * (stop - start)))
        return self._build_rows(zip(*[column.read_span(start, stop, copy) for column in self.columns]))

    def copied(self, out: Any) -> Any:
        """All values, in arrays `(records, agents, ...)` in the form of the space; written to `out` unless None."""
        if out is None:
            return self._build(*[column.array.copy() for column in self.columns])
        for column, array in zip(self.columns, self._parts(out)):
            np.copyto(array, column.array)
        return out

    def _parts(self, tree: Any) -> list[Any]:
        if self._plain:
            return [tree]
        parts = []
        for path in self._paths:
            part = tree
            for key in path:
                part = part[key]
            parts.append(part)
        return parts


class AgentColumns:
    """The values of all agents whose declared space has a fixed size.

    Args:
        declared: The spaces, by agent.
        agents: Those with a place in the header.
        place: Reserves bytes in every record.
        cast: Casts a value that does not fit to its space.

    Attributes:
        agents: Those agents, in the order of `possible_agents`.
        groups: Agents with equal spaces.
        write_span: Writes the values of all agents in the records from `start` to `stop`, one record's after the
            other's. Raises `DoesNotFit` or `Mismatch` where a value needs a look of its own; some may have been written
        read_span: Reads them: takes `start`, `stop`, and whether arrays are copied.
    """

    def __init__(
        self,
        declared: Mapping[AgentID, Space[Any]],
        agents: Sequence[AgentID],
        place: Place,
        cast: Callable[[Space[Any], Any], Any] = conform,
    ) -> None:
        self._declared, self._cast = declared, cast
        self.agents = [agent for agent in agents if agent in declared and fits_block(declared[agent])]
        self.groups = [Group(space, positions, place) for space, positions in alike(declared, self.agents)]
        self._row = {
            self.agents[position]: (group, row) for group in self.groups for row, position in enumerate(group.positions)
        }
        self.write_span: Callable[[int, int, list[Any]], None] = self._write_groups
        self.read_span: Callable[[int, int, bool], list[Any]] = self._read_groups
        if len(self.groups) == 1:
            (group,) = self.groups
            # Nearly always, a leaf: without calls in between.
            one = group.columns[0] if group.columns and type(group.space) not in (spaces.Dict, spaces.Tuple) else group
            self.write_span, self.read_span = one.write_span, one.read_span

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        """Build the views into a block whose records start at these offsets."""
        for group in self.groups:
            for column in group.columns:
                column.bind(buffer, starts)

    def _write_groups(self, start: int, stop: int, values: list[Any]) -> None:
        size = len(self.agents)
        for group in self.groups:
            if stop - start == 1:
                own = [values[position] for position in group.positions]
            else:
                own = [*chain.from_iterable(zip(*[values[position::size] for position in group.positions]))]
            group.write_span(start, stop, own)

    def _read_groups(self, start: int, stop: int, copy: bool) -> list[Any]:
        size = len(self.agents)
        values: list[Any] = [None] * (size * (stop - start))
        for group in self.groups:
            read, rows = group.read_span(start, stop, copy), len(group.positions)
            for row, position in enumerate(group.positions):
                values[position::size] = read[row::rows]
        return values

    def write(self, record: int, values: Mapping[AgentID, Any], what: str) -> tuple[list[AgentID], dict[Any, Any]]:
        """Write what fits.

        Args:
            record: The record.
            values: By agent.
            what: They are, for messages.

        Returns:
            The agents whose value is in the block; the other values, cast to their space.

        Raises:
            Mismatch: A value is not what its space declares; the text says whose.
        """
        names = [*values]
        if names and names == self.agents:
            try:
                self.write_span(record, record + 1, [*values.values()])
                return names, {}
            except (DoesNotFit, Mismatch):
                pass  # one by one finds which
        inside: list[AgentID] = []
        others: dict[Any, Any] = {}
        for agent, value in values.items():
            try:
                if agent in self._row:
                    group, row = self._row[agent]
                    try:
                        group.write(record, row, value)
                        inside.append(agent)
                        continue
                    except DoesNotFit:
                        pass  # of the declared space, but of another form: pickled
                space = self._declared.get(agent)
                others[agent] = value if space is None else self._cast(space, value)
            except Mismatch as error:
                raise Mismatch(f"the {what} of agent {agent!r}: {error}") from error
        return inside, others

    def read(self, record: int, agents: Sequence[AgentID], copy: bool) -> dict[AgentID, Any]:
        """The values of some of `agents`, in this order."""
        if agents == self.agents:
            return dict(zip(agents, self.read_span(record, record + 1, copy)))
        rows = [(agent, *self._row[agent]) for agent in agents]
        return {agent: group.read(record, row, copy) for agent, group, row in rows}

    def read_part(self, record: int, agent: AgentID, key: Any) -> Any:
        """The entry of one key in the value of one agent, copied; None if its space has no such key."""
        if agent not in self._row:
            return None
        group, row = self._row[agent]
        return group.read_part(record, row, key)

    def write_stacked(self, values: Mapping[AgentID, Any]) -> None:
        """Write the values of some of `agents` in every record.

        Raises:
            Mismatch: They are not what their agent's space declares; the text says whose.
        """
        for group in self.groups:
            agents = [self.agents[position] for position in group.positions]
            if _write_together(group, [values.get(agent) for agent in agents]):
                continue
            for row, agent in enumerate(agents):
                if agent in values:
                    try:
                        group.write_stacked(row, values[agent])
                    except Mismatch as error:
                        raise Mismatch(f"the actions of agent {agent!r}: {error}") from error

    def rows_of(self, agents: Sequence[AgentID]) -> tuple[Group, slice] | None:
        """Where the values of these of `agents` lie side by side, at equal distances; None where they do not."""
        places = [self._row[agent] for agent in agents if agent in self._row]
        groups, rows = [group for group, _ in places], [row for _, row in places]
        span = evenly_spaced(rows)
        if span is None or len(rows) < len(agents) or any(group is not groups[0] for group in groups):
            return None
        return groups[0], span


def _write_together(group: Group, values: Sequence[Any]) -> bool:
    """Write all rows of a group at once; returns whether that was possible, as with arrays of one dtype."""
    if {*map(type, values)} != {np.ndarray} or len({value.dtype for value in values}) > 1:
        return False
    try:
        # `np.stack` would cost more than all the rest.
        group.write_stacked(slice(None), np.array(values).swapaxes(0, 1))
    except (ValueError, Mismatch):
        return False  # one by one finds which
    return True


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


# -- the block ---------------------------------------------------------------------------------------------------------


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class Layout:
    """Where everything lies, for a number of environments with one schema.

    Args:
        schema: What the environments have in common.
        num_records: How many environments.
        arrays: False leaves every agent out, so that all values travel pickled.

    Attributes:
        nbytes: Size of the block.
        stride: Bytes from one record to the next.
        starts: Offsets of the records.
        rare: Where, in a record, the part begins which most steps leave alone: final observations and state.
        agents: The agents with a place in the headers.
        action_header, transition_header: Offsets of the headers in a record; see `records.py`.
        actions, observations, final_observations: Columns of the agents whose values lie in the block.
        rewards: Columns of the agents whose rewards are vectors; those that are numbers lie in the header.
        state: The global state; None where there is none, or where it travels pickled.
    """

    def __init__(self, schema: Schema, num_records: int, *, arrays: bool = True) -> None:
        self.schema, self.num_records = schema, num_records
        self.agents = list(schema.possible_agents) if arrays else []
        self._record_nbytes = 0
        place, n = self._place, len(self.agents)
        self.action_header = place(1 + n)
        self.actions = AgentColumns(schema.action_spaces, self.agents, place, conform_action)
        self.transition_header = place(8 + 12 * n + 2)
        self.rewards = AgentColumns(schema.reward_spaces, self.agents, place)
        self.observations = AgentColumns(schema.observation_spaces, self.agents, place)
        self.rare = _aligned(self._record_nbytes, COLUMN_ALIGNMENT)
        self.final_observations = AgentColumns(schema.observation_spaces, self.agents, place)
        self.state: ArrayColumn | None = None
        if arrays and schema.state_space is not None and fits_block(schema.state_space):
            columns = Group(schema.state_space, [0], place).columns
            if type(schema.state_space) in ARRAY_SPACES:
                self.state = columns[0]  # type: ignore[assignment]
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
