"""The layout of the block of shared memory, and the values of agents in it.

Each environment has one record, contiguous and starting on a cache line:

    header of the actions | actions | header of the transition | vector rewards | observations
    | action masks | infos | final observations | global state | final state

A `RolloutBuffer` lies behind the records, with the observations of several time steps.

A `Layout` follows from a `Schema` and the number of environments alone, so that workers and parent lay out the same
block without exchanging offsets. `AgentColumns` are the values of all agents, such as their observations. Agents with
equal spaces form a group, whose values lie side by side in one column, so that they are written with one call and
read as one array. Headers are described in `records.py`. `row` is an agent's position in its group.

`codec.py` passes the forms of the columns to compiled code, which reads and writes the same bytes.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID, Schema
from marl_parallel.core.schema import alike
from marl_parallel.core.spaces import (
    Mismatch,
    as_array,
    check_form,
    fits_block,
    tree_map,
)

RECORD_ALIGNMENT, COLUMN_ALIGNMENT = 64, 16
"""Bytes. Two records never share a cache line, since two workers may write them."""

Reserve: TypeAlias = Callable[[int], int]
"""Reserves so many bytes in every record and returns their offset within it."""


def over_records(buffer: Any, starts: Sequence[int], offset: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """One array over all records, which lie at equal distances: a view of shape `(records, *shape)`."""
    within: NDArray[Any] = np.ndarray(shape, dtype, buffer, starts[0] + offset)
    stride = starts[1] - starts[0] if len(starts) > 1 else within.nbytes
    view: NDArray[Any] = np.ndarray((len(starts), *shape), dtype, buffer, starts[0] + offset, (stride, *within.strides))
    return view


def span_of(env_ids: Sequence[int]) -> range | None:
    """Environments as a range; None unless they are neighbours in ascending order."""
    span = range(env_ids[0], env_ids[0] + len(env_ids)) if env_ids else None
    return span if span is None or [*span] == [*env_ids] else None


# -- columns: the values of agents with equal spaces. All kinds have the same methods ----------------------------------


class ArrayColumn:
    """Arrays of one dtype and shape; `array` is a view of all of them, `(records, rows, *shape)`."""

    def __init__(self, rows: int, dtype: np.dtype[Any], shape: tuple[int, ...], reserve: Reserve) -> None:
        self.rows, self.dtype, self.shape = rows, dtype, shape
        self._nbytes = dtype.itemsize * math.prod(shape)  # of one value
        self.offset = reserve(rows * self._nbytes)

    def form(self, row: int) -> tuple[Any, ...]:
        return "array", self.offset + row * self._nbytes, self.dtype, self.shape, self._nbytes

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        self.array = over_records(buffer, starts, self.offset, self.dtype, (self.rows, *self.shape))
        self._views = [record[row, ...] for record in self.array for row in range(self.rows)]

    def write(self, record: int, row: int, value: Any) -> None:
        """Write one value; raises `Mismatch` if it does not match the space."""
        self._views[record * self.rows + row][...] = as_array(value, self.dtype, self.shape)

    def write_stacked(self, row: int | slice, values: Any) -> None:
        """Write the value of one row `(records, ...)`, or of several rows `(records, rows, ...)`, in all records."""
        column = self.array[:, row]
        column[...] = as_array(values, self.dtype, column.shape)

    def targets(self, row: int | slice) -> tuple[NDArray[Any], None, int]:
        """For compiled code: the values of some rows in all records, their tags, and the tag to write."""
        return self.array[:, row], None, 0

    def read(self, record: int, row: int, copy: bool) -> Any:
        view = self._views[record * self.rows + row]
        return view.copy() if copy else view


NUMBER_TYPES: tuple[type, ...] = (
    int, bool, np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.uint32, np.uint64,
)  # fmt: skip
_NUMBER_TAGS = {t: tag for tag, t in enumerate(NUMBER_TYPES)}
TYPE_OF_TAG = 15
"""A bit mask: the part of a tag that tells the type of the number."""
_NO_AXIS, _ONE_AXIS = 16, 32
_ARRAY_TAGS = {(): _NO_AXIS, (1,): _ONE_AXIS}  # by shape: added to the tag of the number in an array of one element


def number_of(types: Sequence[type], tag: int, number: Any) -> Any:
    """The number or array with a tag; `ValueError` or another error if no writer gives it this tag."""
    value = types[tag & TYPE_OF_TAG](number)
    form = tag & ~TYPE_OF_TAG
    if value != number or form not in (0, *_ARRAY_TAGS.values()):
        raise ValueError(tag)
    return value if form == 0 else np.array([value] if form == _ONE_AXIS else value)


def damaged(record: int) -> ValueError:
    """The error for a record that no writer has written. Compiled code raises the same."""
    return ValueError(
        f"the record of environment {record} is damaged: native code has overwritten shared memory. Find it with a "
        "memory checker; until then, pass shared_memory=False"
    )


class NumberColumn:
    """Discrete values: `array` has integers of the dtype of their space; each has a tag behind them, see `number_of`.

    With `one_axis`, arrays of shape `(1,)` fit, too.
    """

    def __init__(self, rows: int, dtype: np.dtype[Any], reserve: Reserve, one_axis: bool) -> None:
        self.rows, self._one_axis = rows, one_axis
        self.dtype = np.dtype(
            f"{dtype.kind}{dtype.itemsize}"
        )  # `np.longlong` is not `np.int64`, but has the same bytes
        self._tag = _NUMBER_TAGS[self.dtype.type]
        self._limits = int(np.iinfo(self.dtype).min), int(np.iinfo(self.dtype).max)
        self._nbytes = self.dtype.itemsize  # of one value
        self.offset = reserve((self._nbytes + 1) * rows)

    def form(self, row: int) -> tuple[Any, ...]:
        low, high = self._limits
        tag = self.offset + self._nbytes * self.rows + row
        return "number", self.offset + self._nbytes * row, tag, self._nbytes, low, min(high, 2**63 - 1), self._one_axis

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        self.array = over_records(buffer, starts, self.offset, self.dtype, (self.rows,))
        self._tags = over_records(buffer, starts, self.offset + self._nbytes * self.rows, np.uint8, (self.rows,))

    def write_stacked(self, row: int | slice, values: Any) -> None:
        """Write the value of one row `(records,)`, or of several rows `(records, rows)`, in all records."""
        array = np.asarray(values)
        column = self.array[:, row]
        if array.shape != column.shape or array.dtype.kind not in "bui":
            count = " x ".join(map(str, column.shape))
            raise Mismatch(f"expected {count} integers, got shape {array.shape} and dtype {array.dtype}")
        column[...] = as_array(array, column.dtype, column.shape)
        self._tags[:, row] = self._tag

    def targets(self, row: int | slice) -> tuple[NDArray[Any], NDArray[np.uint8], int]:
        """For compiled code: the values of some rows in all records, their tags, and the tag to write."""
        return self.array[:, row], self._tags[:, row], self._tag

    def read(self, record: int, row: int, copy: bool) -> Any:
        tag = int(self._tags[record, row])
        try:
            if tag & _ONE_AXIS and not self._one_axis:
                raise ValueError(tag)
            return number_of(NUMBER_TYPES, tag, self.array[record, row].item())
        except (IndexError, OverflowError, ValueError):
            raise damaged(record) from None


class TreeColumn:
    """Dicts or tuples: a column for each entry of their space; `array` has their arrays in the same form."""

    def __init__(self, rows: int, space: Any, reserve: Reserve, one_axis: bool) -> None:
        self._space = space.spaces
        entries: dict[Any, Space[Any]] = dict(space.items() if type(space) is spaces.Dict else enumerate(space))
        # Reserved in an order that is equal in all environments, read in the order of the space.
        reserved = {key: column_of(entries[key], rows, reserve, one_axis) for key in sorted(entries, key=repr)}
        self._columns = {key: reserved[key] for key in entries}
        self._is_dict = type(space) is spaces.Dict

    def form(self, row: int) -> tuple[Any, ...]:
        forms = tuple([column.form(row) for column in self._columns.values()])
        return "dict" if self._is_dict else "tuple", tuple(self._columns), forms

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        for column in self._columns.values():
            column.bind(buffer, starts)
        self.array: Any = self._tree({key: column.array for key, column in self._columns.items()})

    def _tree(self, parts: dict[Any, Any]) -> Any:
        return parts if self._is_dict else tuple(parts.values())

    def write_stacked(self, row: int | slice, values: Any) -> None:
        check_form(self._space, [values])
        for key, column in self._columns.items():
            column.write_stacked(row, values[key])

    def read(self, record: int, row: int, copy: bool) -> Any:
        return self._tree({key: column.read(record, row, copy) for key, column in self._columns.items()})


Column: TypeAlias = ArrayColumn | NumberColumn | TreeColumn


def column_of(space: Space[Any], rows: int, reserve: Reserve, one_axis: bool) -> Column:
    """The column for the values of so many agents with this space; `one_axis` as of `NumberColumn`."""
    if type(space) is spaces.Dict or type(space) is spaces.Tuple:
        return TreeColumn(rows, space, reserve, one_axis)
    if isinstance(space, spaces.Discrete):
        return NumberColumn(rows, np.dtype(space.dtype), reserve, one_axis)
    assert space.shape is not None
    return ArrayColumn(rows, np.dtype(space.dtype), space.shape, reserve)


# -- the values of all agents ------------------------------------------------------------------------------------------


class AgentColumns:
    """The values of all agents whose declared space has a fixed size; with `one_axis`, see `NumberColumn`.

    Attributes:
        agents: The agents with such a space, in the order of `possible_agents`.
        groups: The column of each group of agents with equal spaces, and the positions of these agents in `agents`.
    """

    def __init__(
        self,
        declared: Mapping[AgentID, Space[Any]],
        agents: Sequence[AgentID],
        reserve: Reserve,
        *,
        one_axis: bool = False,
    ) -> None:
        self.agents = [agent for agent in agents if agent in declared and fits_block(declared[agent])]
        self.groups = [
            (column_of(space, len(members), reserve, one_axis), members)
            for space, members in alike(declared, self.agents)
        ]
        self._rows = {
            self.agents[at]: (column, row) for column, members in self.groups for row, at in enumerate(members)
        }

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        for column, _ in self.groups:
            column.bind(buffer, starts)

    @property
    def forms(self) -> tuple[tuple[Any, ...], ...]:
        """For compiled code: the offset and the kind of each agent's value in a record."""
        return tuple([column.form(row) for column, row in [self._rows[agent] for agent in self.agents]])

    def read(self, record: int, agents: Iterable[AgentID], copy: bool) -> dict[AgentID, Any]:
        """The values of some of `agents`, in this order; arrays are views of the block unless `copy`."""
        rows = [(agent, *self._rows[agent]) for agent in agents]
        return {agent: column.read(record, row, copy) for agent, column, row in rows}

    def write_stacked(self, values: Mapping[AgentID, Any]) -> None:
        """Write the values of some of `agents` in every record; raises `Mismatch` with the name of the agent."""
        for column, positions in self.groups:
            agents = [self.agents[position] for position in positions]
            of_group: list[Any] = [values.get(agent) for agent in agents]
            same = {*map(type, of_group)} == {np.ndarray}
            for array in of_group if same else ():  # quicker than a set of dtypes and shapes
                same &= array.dtype == of_group[0].dtype and array.shape == of_group[0].shape
            if same:
                with contextlib.suppress(Mismatch):  # the loop below finds the agent
                    # `np.stack` would cost more than all the rest.
                    column.write_stacked(slice(None), np.array(of_group).swapaxes(0, 1))
                    continue
            for row, agent in enumerate(agents):
                if agent in values:
                    write_stacked(column, row, values[agent], [agent])

    def targets_of(self, together: Sequence[Sequence[AgentID]] | None) -> tuple[Any, ...] | None:
        """For compiled code: where to write, in all records, values that come for several agents `together`.

        With None, values come one agent at a time. Returns None unless these are all `agents`, and agents that come
        together have evenly spaced rows of one column, which must not be a dict or tuple.
        """
        if together is not None and Counter(chain.from_iterable(together)) != Counter(self.agents):
            return None
        targets = []
        for agents in self.agents if together is None else together:
            columns, rows = zip(*[self._rows[agent] for agent in ([agents] if together is None else agents)])
            row = rows[0] if together is None else evenly_spaced(rows)
            if row is None or isinstance(columns[0], TreeColumn) or any(one is not columns[0] for one in columns):
                return None
            targets.append(columns[0].targets(row))
        return tuple(targets)


def write_stacked(column: Column, row: int | slice, values: Any, agents: Sequence[AgentID]) -> None:
    """Write actions of one or several agents in all records; after a `Mismatch`, some may have been written."""
    try:
        column.write_stacked(row, values)
    except Mismatch as error:
        whose = f"agent {agents[0]!r}" if isinstance(row, int) else f"agents {[*agents]}"
        raise Mismatch(f"the actions of {whose}: {error}") from error


def evenly_spaced(rows: Sequence[int]) -> slice | None:
    """The slice with these rows in this order, such as 1:6:2 for 1, 3, 5; None if no slice has them."""
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if not rows or step < 1 or [*rows] != [*range(rows[0], rows[-1] + 1, step)]:
        return None
    return slice(rows[0], rows[-1] + 1, step)


# -- the block ---------------------------------------------------------------------------------------------------------


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


_NO_MASK = -1
"""The first entry of a mask that has not been reported."""


class MaskColumns(AgentColumns):
    """The action masks that `MultiAgentEnv.masks` returns: zeros and ones, int8 `(choices,)` for each agent."""

    def array_of(self, agents: Sequence[AgentID]) -> NDArray[np.int8] | None:
        """A view of all masks `(records, agents, choices)`; None unless these are all agents, with masks of one form.

        The first entry of a mask that has not been reported is negative.
        """
        if len(self.groups) != 1 or agents != self.agents:
            return None
        array: NDArray[np.int8] = self.groups[0][0].array
        return array

    def write_array(self, record: int, agents: Sequence[AgentID], masks: NDArray[np.int8]) -> bool:
        """Write the masks of all agents, one row for each; returns whether they are as declared."""
        array = self.array_of(agents)
        if array is None or masks.shape != array.shape[1:] or masks.dtype != array.dtype:
            return False
        array[record] = masks
        return True

    def write_all(self, record: int, masks: Mapping[AgentID, Any]) -> None:
        """Write the masks of all agents; an agent without a mask has none from now on."""
        for column, positions in self.groups:
            for row, at in enumerate(positions):
                mask = masks.get(self.agents[at])
                if mask is None:
                    column.array[record, row, 0] = _NO_MASK
                    continue
                try:
                    column.array[record, row] = as_array(mask, column.array.dtype, column.array.shape[2:])
                except Mismatch as error:
                    raise Mismatch(f"the action mask of agent {self.agents[at]!r}: {error}") from error

    def reported(self, record: int) -> dict[AgentID, Any]:
        """The masks of a record as views, without agents that have none."""
        masks = self.read(record, self.agents, False) if self.agents else {}
        return {agent: mask for agent, mask in masks.items() if mask[0] != _NO_MASK}

    def stacked(self) -> dict[AgentID, tuple[NDArray[Any], NDArray[np.bool_]]]:
        """By agent: the masks of all records, `(records, choices)`, and which of them have been reported."""
        found = {}
        for column, positions in self.groups:
            for row, at in enumerate(positions):
                masks = column.array[:, row]
                found[self.agents[at]] = masks, masks[:, 0] != _NO_MASK
        return found


_JOINT_DTYPES = tuple(
    np.dtype(code) for code in ("f4", "f8", "i8", "i4", "i2", "i1", "u1", "u2", "u4", "u8", "?", "f2")
)
_JOINT_CODES = {dtype: code for code, dtype in enumerate(_JOINT_DTYPES, 1)}
_JOINT_AXES, _JOINT_NBYTES = 4, 1 << 16


class JointColumn:
    """One array for all agents, which the simulator's own `step` receives: of any dtype and shape that has room.

    A header of integers says which: a code of the dtype, 0 for no array, negative for a list of the array's rows; the
    number of axes; and the shape.

    Args:
        action_spaces: The spaces of all agents. There is room for indices and one-hot vectors of 64 bits.
        reserve: Reserves bytes in every record and returns their offset within it.
    """

    def __init__(self, action_spaces: Iterable[Space[Any]], reserve: Reserve) -> None:
        widths = [spaces.flatdim(space) if space.is_np_flattenable else 0 for space in action_spaces]
        self._nbytes = min(8 * len(widths) * max([1, *widths]), _JOINT_NBYTES)
        self._header, self._offset = reserve(8 * (2 + _JOINT_AXES)), reserve(self._nbytes)

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        self._buffer, self._starts = buffer, starts
        self._headers = over_records(buffer, starts, self._header, np.int64, (2 + _JOINT_AXES,))
        self._views: dict[tuple[int, ...], NDArray[Any]] = {}  # by header

    def _view(self, header: tuple[int, ...]) -> NDArray[Any]:
        """The arrays of all records, `(records, *shape)`; `KeyError` for a header that no writer writes."""
        view = self._views.get(header)
        if view is None:
            code, axes, *shape = header
            if not (0 < code <= len(_JOINT_DTYPES) and 0 <= axes <= _JOINT_AXES and min(shape) >= 0):
                raise KeyError(header)
            dtype = _JOINT_DTYPES[code - 1]
            if dtype.itemsize * math.prod(shape[:axes]) > self._nbytes:
                raise KeyError(header)
            view = over_records(self._buffer, self._starts, self._offset, dtype, tuple(shape[:axes]))
            self._views[header] = view
        return view

    def write(self, records: slice | list[int], values: NDArray[Any], *, lists: bool) -> bool:
        """Write an array for each of some records; returns False, and writes nothing, if there is no room.

        With `lists`, `read` returns a list of the rows of each array.
        """
        shape, code = values.shape[1:], _JOINT_CODES.get(values.dtype)
        if code is None or len(shape) > _JOINT_AXES:
            return False
        header = (code, len(shape), *shape, *[0] * (_JOINT_AXES - len(shape)))
        try:
            view = self._view(header)
        except KeyError:
            return False
        view[records] = values
        self._headers[records] = (-code, *header[1:]) if lists else header
        return True

    def clear(self, records: list[int]) -> None:
        """Remove the arrays of some records."""
        self._headers[records] = 0

    def read(self, record: int) -> NDArray[Any] | list[Any] | None:
        """A copy of the array in a record, or a list of its rows; None if there is none."""
        code, *form = self._headers[record].tolist()
        if not code:
            return None
        try:
            array: NDArray[Any] = self._view((abs(code), *form))[record].copy()
            return array if code > 0 else [*array]
        except KeyError:
            raise damaged(record) from None


class RolloutBuffer:
    """The observations of all environments at several time steps, in shared memory behind the records.

    The parent sets the time of an environment before a reset or step. A worker copies the observations in the record to
    that time, and sets the time to -1; observations that the worker did not copy, the parent copies.

    Args:
        layout: The layout of the records, bound to the buffer.
        num_times: The number of time steps.
        start: Offset in the shared memory.
        more: Bytes for the parent alone, after the observations.

    Attributes:
        start, more, nbytes: Offsets in the shared memory: of the buffer, of the parent's bytes, and of the end.
        memory: The shared memory, set by `bind`.
        observations: For each group of the layout, arrays or trees `(times, records, rows, ...)`.
    """

    def __init__(self, layout: Layout, num_times: int, start: int, more: int = 0) -> None:
        self._columns = [column.array for column, _ in layout.observations.groups]
        self._num_times, self._num_records = num_times, layout.num_records
        self.start = _aligned(start, RECORD_ALIGNMENT)
        self.nbytes = self.start + 8 * layout.num_records

        def reserve(array: NDArray[Any]) -> int:
            offset = _aligned(self.nbytes, RECORD_ALIGNMENT)
            self.nbytes = offset + num_times * array.size * array.itemsize
            return offset

        self._offsets = [tree_map(reserve, array) for array in self._columns]
        self.more = _aligned(self.nbytes, RECORD_ALIGNMENT)
        self.nbytes = self.more + more

    def bind(self, buffer: Any) -> None:
        """Build the arrays in `nbytes` bytes of shared memory."""

        def view(array: NDArray[Any], offset: int) -> NDArray[Any]:
            observations: NDArray[Any] = np.ndarray((self._num_times, *array.shape), array.dtype, buffer, offset)
            return observations

        self.memory = buffer
        self._times: NDArray[np.int64] = np.ndarray(self._num_records, np.int64, buffer, self.start)
        self.observations = [tree_map(view, *pair) for pair in zip(self._columns, self._offsets)]

    def request(self, env_ids: range, time: int) -> None:
        """Set the time of the next observations."""
        self._times[env_ids.start : env_ids.stop] = time

    def is_written(self, env_ids: range) -> bool:
        """Whether workers have copied the observations since `request`."""
        return bool((self._times[env_ids.start : env_ids.stop] < 0).all())

    def write(self, env_ids: Sequence[int]) -> None:
        """Copy the observations of environments from their records, if all belong to one time."""
        span = span_of(env_ids)
        rows = [*env_ids] if span is None else slice(span.start, span.stop)
        time = self._times[env_ids[0]]
        if time < 0 or not (self._times[rows] == time).all():
            return
        for observations, column in zip(self.observations, self._columns):
            tree_map(lambda of_times, array: of_times[time].__setitem__(rows, array[rows]), observations, column)
        self._times[rows] = -1


class Layout:
    """The offsets of all parts of the block, for a number of environments with one schema.

    Without `arrays`, the block has no values of agents, which all travel pickled.

    Attributes:
        nbytes, stride, starts: Size of the block, bytes from one record to the next, offsets of the records.
        agents: The agents with an entry in the headers.
        action_header, transition_header: Offsets of the headers in a record; see `records.py`.
        step_end: Offset in a record after the parts that every step writes; infos, final observations and state follow.
        infos, infos_nbytes: Offset and size of the area for infos of simple values, which compiled code writes.
        rewards: Columns of the agents whose rewards are vectors; rewards that are numbers lie in the header.
        joint: The column of `JOINT` actions; None if simulators take none, or they travel pickled.
        masks: Columns of the action masks that `MultiAgentEnv.masks` returns.
        state, final_state: The global state, and the last state of an episode whose environment has been reset
            since; None without a state.
    """

    def __init__(self, schema: Schema, num_records: int, *, arrays: bool = True) -> None:
        self.schema, self.num_records = schema, num_records
        self.agents = list(schema.possible_agents) if arrays else []
        self._record_nbytes = 0
        reserve, n = self._reserve, len(self.agents)
        self.action_header = reserve(1 + n)
        self.actions = AgentColumns(schema.action_spaces, self.agents, reserve, one_axis=True)
        self.joint: JointColumn | None = None
        if schema.joint_actions and n:
            self.joint = JointColumn([schema.action_spaces[agent] for agent in self.agents], reserve)
        self.transition_header = reserve(8 + 13 * n + 2)
        self.rewards = AgentColumns(schema.reward_spaces, self.agents, reserve)
        self.observations = AgentColumns(schema.observation_spaces, self.agents, reserve)
        self.masks = MaskColumns(schema.mask_spaces, self.agents, reserve)
        self.step_end = _aligned(self._record_nbytes, COLUMN_ALIGNMENT)
        self.infos_nbytes = min(256 + 128 * n, 1 << 16) if n else 0
        self.infos = reserve(self.infos_nbytes)
        self.final_observations = AgentColumns(schema.observation_spaces, self.agents, reserve)
        space = schema.state_space
        self.state: ArrayColumn | None = None
        self.final_state: ArrayColumn | None = None
        if space is not None:
            dtype, shape = np.dtype(space.dtype), space.shape or ()
            self.state, self.final_state = (ArrayColumn(1, dtype, shape, reserve) for _ in range(2))
        self.stride = stride = _aligned(self._record_nbytes, RECORD_ALIGNMENT)
        self.nbytes = stride * num_records
        self.starts = [stride * record for record in range(num_records)]

    def _reserve(self, nbytes: int) -> int:
        offset = _aligned(self._record_nbytes, COLUMN_ALIGNMENT)
        self._record_nbytes = offset + nbytes
        return offset

    def part(self, records: range, buffer: Any) -> Layout:
        """A layout of some neighbouring records, with views into the block."""
        part = Layout(self.schema, len(records), arrays=bool(self.agents))
        part.starts = self.starts[records.start : records.stop]
        part.bind(buffer)
        return part

    def bind(self, buffer: Any) -> None:
        """Build all views into a block of `nbytes` zeroed bytes."""
        for columns in (self.actions, self.rewards, self.observations, self.masks, self.final_observations):
            columns.bind(buffer, self.starts)
        for column in (self.joint, self.state, self.final_state):
            if column is not None:
                column.bind(buffer, self.starts)
