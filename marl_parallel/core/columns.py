"""The layout of the block of shared memory, and the values of agents in it.

Each environment has one record, contiguous and starting on a cache line:

    header of the actions | actions | header of the transition | vector rewards | observations
    | final observations | global state

A `Layout` follows from a `Schema` and the number of environments alone, so that workers and parent lay out the same
block without exchanging offsets. `AgentColumns` are the values of all agents, such as their observations. Agents with
equal spaces form a `Group`, whose values lie side by side in one column, so that they are written with one call and
read as one array. Headers are described in `records.py`.

A span is the records from `start` to `stop`; its values are those of all agents (or rows) of the first record, then
those of the second, and so on. `row` is an agent's place in its group.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID, Schema
from marl_parallel.core.schema import alike
from marl_parallel.core.spaces import (
    DoesNotFit,
    Mismatch,
    as_array,
    check_form,
    check_same_form,
    conform,
    copied,
    fits_block,
    numbers_of,
    rows_builder,
)

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


def span_of(env_ids: Sequence[int]) -> range | None:
    """The same environments as a range; None unless they are neighbours in ascending order."""
    span = range(env_ids[0], env_ids[0] + len(env_ids)) if env_ids else None
    return span if span is None or [*span] == [*env_ids] else None


# -- columns: the values of agents with equal spaces. All kinds have the same methods ----------------------------------


class ArrayColumn:
    """Arrays of one dtype and shape; `array` is a view of all of them, `(records, rows, *shape)`."""

    def __init__(self, rows: int, dtype: np.dtype[Any], shape: tuple[int, ...], place: Place) -> None:
        self.rows, self.dtype, self.shape = rows, dtype, shape
        self.offset = place(rows * dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        self._lengths = [shape[0] if shape else 0] * rows
        # As `as_array` casts numbers of another dtype; it compares each integer.
        self._casting: Literal["same_kind", "equiv"] = "same_kind" if dtype.kind in "fc" else "equiv"

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        self.array = over_records(buffer, starts, self.offset, self.dtype, (self.rows, *self.shape))
        self.records = [*self.array]
        # All rows end to end along the first axis, which is how one concatenation fills them.
        flat = (self.rows * self.shape[0], *self.shape[1:]) if self.shape else ()
        self._flat = [view.reshape(flat) for view in self.records] if self.shape else []
        self._rows = [view[row, ...] for view in self.records for row in range(self.rows)]

    def write(self, record: int, row: int, value: Any) -> None:
        """Write one value; raises `Mismatch` if it is no such array, `DoesNotFit` if it is None."""
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
            pass  # not arrays, or of another dtype: one by one, which converts, or tells which is wrong
        for place, value in enumerate(values):
            self.write(start + place // self.rows, place % self.rows, value)

    def write_stacked(self, row: int | slice, values: Any) -> None:
        """Write the value of one row `(records, ...)`, or of several rows `(records, rows, ...)`, in all records."""
        column = self.array[:, row]
        column[...] = as_array(values, self.dtype, column.shape)

    def read_span(self, start: int, stop: int, copy: bool) -> list[Any]:
        if copy and self.rows > _FEW_ROWS and self.shape:
            return [*chain.from_iterable([record.copy() for record in self.records[start:stop]])]
        views = self._rows[start * self.rows : stop * self.rows]
        return [*map(_copy_of, views)] if copy else views


NUMBER_TYPES: tuple[type, ...] = (
    int, bool, np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.uint32, np.uint64,
)  # fmt: skip
_NUMBER_TAGS = {t: tag for tag, t in enumerate(NUMBER_TYPES)}


class NumberColumn:
    """Discrete values: 64-bit integers, `array`, then one tag each for the type of the number."""

    def __init__(self, rows: int, place: Place) -> None:
        self.rows = rows
        self._all = struct.Struct(f"={rows}q{rows}s")
        self.offset = place(self._all.size)
        self._ints = bytes(rows)

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        self._buffer = memoryview(buffer)
        self._starts = [start + self.offset for start in starts]
        self.array = over_records(buffer, starts, self.offset, np.int64, (self.rows,))
        self._tags = over_records(buffer, starts, self.offset + 8 * self.rows, np.uint8, (self.rows,))

    def write(self, record: int, row: int, value: Any) -> None:
        """Write one value; raises `DoesNotFit` if it has another type or more than 64 bits."""
        try:
            tag = _NUMBER_TAGS[type(value)]
            self.array[record, row] = value
        except (KeyError, OverflowError) as error:
            raise DoesNotFit from error
        self._tags[record, row] = tag

    def write_span(self, start: int, stop: int, values: Sequence[Any]) -> None:
        """Write the values of a span; raises as `write` does, when some may have been written."""
        kinds = {*map(type, values)}
        try:
            if len(kinds) == 1:
                tags = bytes((_NUMBER_TAGS[kinds.pop()],)) * len(values)
            else:
                tags = bytes([_NUMBER_TAGS[type(value)] for value in values])
            if stop - start == 1:
                self._all.pack_into(self._buffer, self._starts[start], *values, tags)
                return
            shape = stop - start, self.rows
            self.array[start:stop] = np.fromiter(values, np.int64, len(values)).reshape(shape)
            self._tags[start:stop] = np.frombuffer(tags, np.uint8).reshape(shape)
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

    def read_span(self, start: int, stop: int, copy: bool) -> list[Any]:
        if stop - start == 1:
            *values, tags = self._all.unpack_from(self._buffer, self._starts[start])
            if tags == self._ints:  # as unpacked
                return values
        else:
            tags = self._tags[start:stop].tobytes()
            if tags == tags[:1] * len(tags):
                return numbers_of(self.array[start:stop], NUMBER_TYPES[tags[0]])
            values = self.array[start:stop].ravel().tolist()
        return [NUMBER_TYPES[tag](value) for value, tag in zip(values, tags)]


class TreeColumn:
    """Dicts or tuples: a column for each entry of their space; `array` has their arrays in the same form."""

    def __init__(self, rows: int, space: Any, place: Place) -> None:
        self._rows, self._space = rows, space.spaces
        entries: dict[Any, Space[Any]] = dict(space.items() if type(space) is spaces.Dict else enumerate(space))
        # Placed in an order that all environments have in common, read in the space's own.
        placed = {key: column_of(entries[key], rows, place) for key in sorted(entries, key=repr)}
        self._columns = {key: placed[key] for key in entries}
        nested = [column.leaves if isinstance(column, TreeColumn) else [column] for column in self._columns.values()]
        self.leaves: list[ArrayColumn | NumberColumn] = [*chain.from_iterable(nested)]
        self._build_rows = rows_builder(space)

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        for column in self._columns.values():
            column.bind(buffer, starts)
        self.array: Any = self._build_rows([[leaf.array for leaf in self.leaves]])[0]

    def write(self, record: int, row: int, value: Any) -> None:
        check_same_form(self._space, [value])
        for key, column in self._columns.items():
            column.write(record, row, value[key])

    def write_span(self, start: int, stop: int, values: Sequence[Any]) -> None:
        check_same_form(self._space, values)
        for key, column in self._columns.items():
            column.write_span(start, stop, [value[key] for value in values])

    def write_stacked(self, row: int | slice, values: Any) -> None:
        check_form(self._space, [values])
        for key, column in self._columns.items():
            column.write_stacked(row, values[key])

    def read_span(self, start: int, stop: int, copy: bool) -> list[Any]:
        if not self.leaves:
            return self._build_rows([()] * (self._rows * (stop - start)))
        return self._build_rows(zip(*[leaf.read_span(start, stop, copy) for leaf in self.leaves]))


Column: TypeAlias = ArrayColumn | NumberColumn | TreeColumn


def column_of(space: Space[Any], rows: int, place: Place) -> Column:
    """The column for the values of so many agents with this space."""
    if type(space) is spaces.Dict or type(space) is spaces.Tuple:
        return TreeColumn(rows, space, place)
    if isinstance(space, spaces.Discrete):
        return NumberColumn(rows, place)
    assert space.shape is not None
    return ArrayColumn(rows, np.dtype(space.dtype), space.shape, place)


# -- the values of all agents ------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Agents with equal spaces, by their positions, and the column of their values."""

    column: Column
    positions: list[int]


class AgentColumns:
    """The values of all agents whose declared space has a fixed size; `cast` is for values that do not fit.

    Attributes:
        agents: Those agents, in the order of `possible_agents`.
        write_span: Writes the values of a span. Raises `DoesNotFit` or `Mismatch` if one has to be written alone, which
            tells which and why; some may have been written.
        read_span: Reads the values of a span; takes `start`, `stop`, and whether arrays are copied.
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
        self.groups = [Group(column_of(space, len(of), place), of) for space, of in alike(declared, self.agents)]
        self._places = {self.agents[at]: (column, row) for column, of in self.groups for row, at in enumerate(of)}
        self.write_span: Callable[[int, int, list[Any]], None] = self._write_groups
        self.read_span: Callable[[int, int, bool], list[Any]] = self._read_groups
        if len(self.groups) == 1:  # without calls in between
            self.write_span, self.read_span = self.groups[0].column.write_span, self.groups[0].column.read_span

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        for column, _ in self.groups:
            column.bind(buffer, starts)

    def _write_groups(self, start: int, stop: int, values: list[Any]) -> None:
        firsts = range(0, len(values), len(self.agents) or 1)
        for column, positions in self.groups:
            column.write_span(start, stop, [values[first + at] for first in firsts for at in positions])

    def _read_groups(self, start: int, stop: int, copy: bool) -> list[Any]:
        size = len(self.agents)
        values: list[Any] = [None] * (size * (stop - start))
        for column, positions in self.groups:
            of_group = column.read_span(start, stop, copy)
            for row, position in enumerate(positions):
                values[position::size] = of_group[row :: len(positions)]
        return values

    def write(self, record: int, values: Mapping[AgentID, Any], what: str) -> tuple[list[AgentID], dict[Any, Any]]:
        """Write what fits; returns the agents whose value was written, and the other values, cast to their space.

        Raises:
            Mismatch: A value is not what its space declares; the text names the agent, and `what` it is.
        """
        names = [*values]
        if names and names == self.agents:
            try:  # `contextlib.suppress` would take a tenth of the time of writing a record
                self.write_span(record, record + 1, [*values.values()])
                return names, {}
            except (DoesNotFit, Mismatch):
                pass  # one by one finds which
        written: list[AgentID] = []
        left: dict[Any, Any] = {}
        for agent, value in values.items():
            try:
                try:
                    if agent not in self._places:
                        raise DoesNotFit
                    column, row = self._places[agent]
                    column.write(record, row, value)
                    written.append(agent)
                except DoesNotFit:
                    left[agent] = self._cast(self._declared[agent], value) if agent in self._declared else value
            except Mismatch as error:
                raise Mismatch(f"the {what} of agent {agent!r}: {error}") from error
        return written, left

    def read(self, record: int, agents: Sequence[AgentID], copy: bool) -> dict[AgentID, Any]:
        """The values of some of `agents`, in this order; arrays are views of the block unless `copy`."""
        everybody = agents == self.agents
        values = dict(zip(self.agents, self.read_span(record, record + 1, copy and everybody)))
        return values if everybody else {agent: copied(values[agent]) if copy else values[agent] for agent in agents}

    def write_stacked(self, values: Mapping[AgentID, Any]) -> None:
        """Write the values of some of `agents` in every record; raises `Mismatch` with the name of the agent."""
        for column, positions in self.groups:
            agents = [self.agents[position] for position in positions]
            of_group: list[Any] = [values.get(agent) for agent in agents]
            if {*map(type, of_group)} == {np.ndarray} and len({(array.dtype, array.shape) for array in of_group}) == 1:
                with contextlib.suppress(Mismatch):  # one by one finds which
                    # `np.stack` would cost more than all the rest.
                    column.write_stacked(slice(None), np.array(of_group).swapaxes(0, 1))
                    continue
            for row, agent in enumerate(agents):
                if agent in values:
                    write_stacked(column, row, values[agent], [agent])

    def slices_of(self, together: Sequence[Sequence[AgentID]]) -> list[tuple[Column, slice]] | None:
        """The columns and rows of agents that come together; None unless these are all `agents`, each lot a slice."""
        if Counter(chain.from_iterable(together)) != Counter(self.agents):
            return None
        slices = []
        for agents in together:
            columns, rows = zip(*[self._places[agent] for agent in agents])
            of_rows = evenly_spaced(rows)
            if of_rows is None or any(column is not columns[0] for column in columns):
                return None
            slices.append((columns[0], of_rows))
        return slices


def write_stacked(column: Column, row: int | slice, values: Any, agents: Sequence[AgentID]) -> None:
    """Write actions of one or several agents in all records; after a `Mismatch`, some may have been written."""
    try:
        column.write_stacked(row, values)
    except Mismatch as error:
        whose = f"agent {agents[0]!r}" if isinstance(row, int) else f"agents {[*agents]}"
        raise Mismatch(f"the actions of {whose}: {error}") from error


def evenly_spaced(rows: Sequence[int]) -> slice | None:
    """The slice with these rows in this order, such as 1:6:2 for 1, 3, 5; None if there is none."""
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if not rows or step < 1 or [*rows] != [*range(rows[0], rows[-1] + 1, step)]:
        return None
    return slice(rows[0], rows[-1] + 1, step)


# -- the block ---------------------------------------------------------------------------------------------------------


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class Layout:
    """The offsets of everything, for a number of environments with one schema.

    Without `arrays`, every agent is left out, so that all values travel pickled.

    Attributes:
        nbytes, stride, starts: Size of the block, bytes from one record to the next, offsets of the records.
        agents: The agents with a place in the headers.
        action_header, transition_header: Offsets of the headers in a record; see `records.py`.
        step_end: Offset in a record after what every step writes; final observations and state follow.
        rewards: Columns of the agents whose rewards are vectors; rewards that are numbers lie in the header.
        state: The global state; None if there is none, or if it travels pickled.
    """

    def __init__(self, schema: Schema, num_records: int, *, arrays: bool = True) -> None:
        self.schema, self.num_records = schema, num_records
        self.agents = list(schema.possible_agents) if arrays else []
        self._record_nbytes = 0
        place, n = self._place, len(self.agents)
        self.action_header = place(1 + n)
        self.actions = AgentColumns(schema.action_spaces, self.agents, place, partial(conform, strict=True))
        self.transition_header = place(8 + 12 * n + 2)
        self.rewards = AgentColumns(schema.reward_spaces, self.agents, place)
        self.observations = AgentColumns(schema.observation_spaces, self.agents, place)
        self.step_end = _aligned(self._record_nbytes, COLUMN_ALIGNMENT)
        self.final_observations = AgentColumns(schema.observation_spaces, self.agents, place)
        self.state: ArrayColumn | None = None
        if arrays and schema.state_space is not None and fits_block(schema.state_space):
            column = column_of(schema.state_space, 1, place)
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
