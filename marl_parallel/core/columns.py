"""How values of a space lie in the block: one column per leaf of the space, one row per agent, one set per record.

A *column* holds the values that several agents with equal spaces have in one environment's record, side by side, so
that a batch of agents is written with one call and can be read as one array. What a value must be is in `values.py`,
which agents are where is known to `layout.py`; what the values mean, to nobody here.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.core.values import Mismatch, as_array, numbers_of

Place = Callable[[int], int]
"""Reserves so many bytes in every record and returns their offset within it."""

_FEW_ROWS = 8
"""Up to so many, copying them one by one is cheaper than copying all at once and taking views."""

_copy_of = np.ndarray.copy


class Unfit(Exception):
    """A value that does not fit its column, though nothing is wrong with it: it travels pickled instead."""


def over_records(buffer: Any, starts: Sequence[int], offset: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """One array over all records, which lie at equal distances: a view of shape `(records, *shape)`."""
    within: NDArray[Any] = np.ndarray(shape, dtype, buffer, starts[0] + offset)
    stride = starts[1] - starts[0] if len(starts) > 1 else within.nbytes
    view: NDArray[Any] = np.ndarray((len(starts), *shape), dtype, buffer, starts[0] + offset, (stride, *within.strides))
    return view


class Column(ABC):
    """The values of `rows` agents with equal spaces, in every record of a block."""

    rows: int

    @abstractmethod
    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        """Build the views into a block whose records start at these offsets."""

    @abstractmethod
    def write_all(self, record: int, values: Sequence[Any]) -> None:
        """Write one value for every row.

        Raises:
            Unfit: At least one value does not fit; some may have been written.
            Mismatch: At least one value is not what its space declares; likewise.
        """

    @abstractmethod
    def write(self, record: int, row: int, value: Any) -> None:
        """Write the value of one row; raises as `write_all` does."""

    @abstractmethod
    def read_all(self, record: int, copy: bool) -> list[Any]:
        """The values of all rows; arrays are views of the block unless `copy`."""

    @abstractmethod
    def read(self, record: int, row: int, copy: bool) -> Any:
        """The value of one row; arrays are views of the block unless `copy`."""

    @abstractmethod
    def copied(self, out: Any) -> Any:
        """The values of all rows of all records, stacked: `(records, rows, ...)`.

        Args:
            out: What this has returned before, to be written again; None for new arrays.
        """

    @abstractmethod
    def write_stacked(self, row: int | slice, values: Any) -> None:
        """Write the value of one row, or the values of several rows, in every record.

        Args:
            row: Which.
            values: Stacked as in the space's batches: `(records, ...)`; of several rows `(records, rows, ...)`.

        Raises:
            Mismatch: They are not what the space declares; some may have been written.
        """

    def write_span(self, span: range, values: Sequence[Any]) -> None:
        """Write the values of all rows of neighbouring records, one record's after the other's; as `write_all`."""
        for place, record in enumerate(span):
            self.write_all(record, values[place * self.rows : (place + 1) * self.rows])

    def read_span(self, span: range, copy: bool) -> list[Any]:
        """The values of all rows of neighbouring records, one record's after the other's; as `read_all`."""
        return [value for record in span for value in self.read_all(record, copy)]


class ArrayColumn(Column):
    """Arrays of one dtype and shape, contiguous over the rows."""

    def __init__(self, rows: int, dtype: np.dtype[Any], shape: tuple[int, ...], place: Place) -> None:
        self.rows, self.dtype, self.shape = rows, dtype, shape
        self.offset = place(rows * dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        self._lengths = [shape[0] if shape else 0] * rows
        # What `as_array` does with numbers of another dtype; integers want a look at each.
        self._casting: Literal["same_kind", "equiv"] = "same_kind" if dtype.kind in "fc" else "equiv"

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        self._all = over_records(buffer, starts, self.offset, self.dtype, (self.rows, *self.shape))
        self.records = [*self._all]
        # All rows end to end along the first axis, which is how one concatenation fills them.
        flat = (self.rows * self.shape[0], *self.shape[1:]) if self.shape else ()
        self._flat = [view.reshape(flat) for view in self.records] if self.shape else []
        self._rows = [view[row, ...] for view in self.records for row in range(self.rows)]

    def write_all(self, record: int, values: Sequence[Any]) -> None:
        try:
            # The other dimensions are compared by NumPy.
            if self._flat and [*map(len, values)] == self._lengths:
                np.concatenate(values, out=self._flat[record], casting=self._casting)
                return
        except (TypeError, ValueError):
            pass  # not arrays, or of a dtype that needs a look: one by one, which converts or says which is wrong
        for row, value in enumerate(values):
            self.write(record, row, value)

    def write(self, record: int, row: int, value: Any) -> None:
        if value is None:
            raise Unfit
        self._rows[record * self.rows + row][...] = as_array(value, self.dtype, self.shape)

    def write_span(self, span: range, values: Sequence[Any]) -> None:
        try:
            if self._flat and [*map(len, values)] == self._lengths * len(span):
                end_to_end = np.concatenate(values, casting=self._casting, dtype=self.dtype)
                if end_to_end.shape[1:] == self.shape[1:]:
                    self._all[span.start : span.stop] = end_to_end.reshape(len(span), self.rows, *self.shape)
                    return
        except (TypeError, ValueError):
            pass  # as above
        super().write_span(span, values)

    def read_all(self, record: int, copy: bool) -> list[Any]:
        return self.read_span(range(record, record + 1), copy)

    def read_span(self, span: range, copy: bool) -> list[Any]:
        if copy and self.rows > _FEW_ROWS and self.shape:
            return [*chain.from_iterable([record.copy() for record in self.records[span.start : span.stop]])]
        views = self._rows[span.start * self.rows : span.stop * self.rows]
        return [*map(_copy_of, views)] if copy else views

    def read(self, record: int, row: int, copy: bool) -> Any:
        view = self._rows[record * self.rows + row]
        return view.copy() if copy else view

    def copied(self, out: Any) -> Any:
        if out is None:
            return self._all.copy()
        np.copyto(out, self._all)
        return out

    def write_stacked(self, row: int | slice, values: Any) -> None:
        column = self._all[:, row]
        column[...] = as_array(values, self.dtype, column.shape)


SCALAR_TYPES: tuple[type, ...] = (
    int, bool, np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint16, np.uint32, np.uint64,
)  # fmt: skip
_SCALAR_TAGS = {t: tag for tag, t in enumerate(SCALAR_TYPES)}


class ScalarColumn(Column):
    """Discrete values: 64-bit integers, and a tag each that says which type the number had."""

    def __init__(self, rows: int, place: Place) -> None:
        self.rows = rows
        self._all = struct.Struct(f"={rows}q{rows}s")
        self._number, self._tag = struct.Struct("=q"), struct.Struct("=B")
        self.offset = place(self._all.size)
        self._uniform = {t: bytes((tag,)) * rows for t, tag in _SCALAR_TAGS.items()}
        self._ints = self._uniform[int]

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        self._buffer = memoryview(buffer)
        self._starts = [start + self.offset for start in starts]
        self._numbers = over_records(buffer, starts, self.offset, np.int64, (self.rows,))
        self._tags = over_records(buffer, starts, self.offset + 8 * self.rows, np.uint8, (self.rows,))

    def write_all(self, record: int, values: Sequence[Any]) -> None:
        try:
            kinds = {*map(type, values)}
            tags = self._uniform[kinds.pop()] if len(kinds) == 1 else bytes(_SCALAR_TAGS[type(v)] for v in values)
            self._all.pack_into(self._buffer, self._starts[record], *values, tags)
        except (KeyError, struct.error) as error:
            raise Unfit from error

    def write(self, record: int, row: int, value: Any) -> None:
        try:
            tag, start = _SCALAR_TAGS[type(value)], self._starts[record]
            self._number.pack_into(self._buffer, start + 8 * row, value)
            self._tag.pack_into(self._buffer, start + 8 * self.rows + row, tag)
        except (KeyError, struct.error) as error:
            raise Unfit from error

    def read_all(self, record: int, copy: bool) -> list[Any]:
        *values, tags = self._all.unpack_from(self._buffer, self._starts[record])
        if tags == self._ints:  # as unpacked
            return values
        return [SCALAR_TYPES[tag](value) for value, tag in zip(values, tags)]

    def write_span(self, span: range, values: Sequence[Any]) -> None:
        kinds = {*map(type, values)}
        tag = _SCALAR_TAGS.get(kinds.pop()) if len(kinds) == 1 else None
        if tag is None:
            super().write_span(span, values)
            return
        try:
            numbers = np.fromiter(values, np.int64, len(values))
        except OverflowError as error:
            raise Unfit from error
        self._numbers[span.start : span.stop] = numbers.reshape(len(span), self.rows)
        self._tags[span.start : span.stop] = tag

    def read_span(self, span: range, copy: bool) -> list[Any]:
        tags = self._tags[span.start : span.stop].tobytes()
        if tags != tags[:1] * len(tags):
            return super().read_span(span, copy)
        return numbers_of(self._numbers[span.start : span.stop], SCALAR_TYPES[tags[0]])

    def read(self, record: int, row: int, copy: bool) -> Any:
        start = self._starts[record]
        (value,) = self._number.unpack_from(self._buffer, start + 8 * row)
        (tag,) = self._tag.unpack_from(self._buffer, start + 8 * self.rows + row)
        return SCALAR_TYPES[tag](value)

    def copied(self, out: Any) -> Any:
        if out is None:
            return self._numbers.copy()
        np.copyto(out, self._numbers)
        return out

    def write_stacked(self, row: int | slice, values: Any) -> None:
        array = np.asarray(values)
        column = self._numbers[:, row]
        if array.shape != column.shape or array.dtype.kind not in "bui":
            count = " x ".join(map(str, column.shape))
            raise Mismatch(f"expected {count} integers, got shape {array.shape} and dtype {array.dtype}")
        column[...] = as_array(array, column.dtype, column.shape)
        self._tags[:, row] = _SCALAR_TAGS[np.int64]


class DictColumn(Column):
    """Dicts with fixed keys: a column for each key."""

    def __init__(self, rows: int, children: Mapping[Any, Column]) -> None:
        self.rows, self.children = rows, dict(children)
        self._keys = self.children.keys()
        self._picked = [(itemgetter(key), child) for key, child in self.children.items()]

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        for child in self.children.values():
            child.bind(buffer, starts)

    def _fits(self, value: Any) -> bool:
        return isinstance(value, dict) and value.keys() == self._keys

    def write_all(self, record: int, values: Sequence[Any]) -> None:
        if not all(map(self._fits, values)):
            raise Unfit
        for pick, child in self._picked:
            child.write_all(record, [*map(pick, values)])

    def write(self, record: int, row: int, value: Any) -> None:
        if not self._fits(value):
            raise Unfit
        for key, child in self.children.items():
            child.write(record, row, value[key])

    def read_all(self, record: int, copy: bool) -> list[Any]:
        if not self.children:
            return [{} for _ in range(self.rows)]
        columns = (child.read_all(record, copy) for child in self.children.values())
        return [dict(zip(self._keys, row, strict=True)) for row in zip(*columns, strict=True)]

    def read(self, record: int, row: int, copy: bool) -> Any:
        return {key: child.read(record, row, copy) for key, child in self.children.items()}

    def copied(self, out: Any) -> Any:
        return {key: child.copied(None if out is None else out[key]) for key, child in self.children.items()}

    def write_stacked(self, row: int | slice, values: Any) -> None:
        if not self._fits(values):
            raise Mismatch(f"expected a dict with the keys {[*self._keys]}, got {_form_of(values)}")
        for key, child in self.children.items():
            child.write_stacked(row, values[key])


class TupleColumn(Column):
    """Tuples of fixed length: a column for each place."""

    def __init__(self, rows: int, children: Sequence[Column]) -> None:
        self.rows, self.children = rows, list(children)

    def bind(self, buffer: Any, starts: Sequence[int]) -> None:
        for child in self.children:
            child.bind(buffer, starts)

    def _fits(self, value: Any) -> bool:
        return type(value) is tuple and len(value) == len(self.children)

    def write_all(self, record: int, values: Sequence[Any]) -> None:
        if not all(map(self._fits, values)):
            raise Unfit
        for place, child in enumerate(self.children):
            child.write_all(record, [value[place] for value in values])

    def write(self, record: int, row: int, value: Any) -> None:
        if not self._fits(value):
            raise Unfit
        for child, part in zip(self.children, value, strict=True):
            child.write(record, row, part)

    def read_all(self, record: int, copy: bool) -> list[Any]:
        if not self.children:
            return [()] * self.rows
        return [*zip(*(child.read_all(record, copy) for child in self.children), strict=True)]

    def read(self, record: int, row: int, copy: bool) -> Any:
        return tuple(child.read(record, row, copy) for child in self.children)

    def copied(self, out: Any) -> Any:
        return tuple(child.copied(None if out is None else out[place]) for place, child in enumerate(self.children))

    def write_stacked(self, row: int | slice, values: Any) -> None:
        if not isinstance(values, tuple | list) or len(values) != len(self.children):
            raise Mismatch(f"expected a tuple of {len(self.children)}, got {_form_of(values)}")
        for child, part in zip(self.children, values, strict=True):
            child.write_stacked(row, part)


def _form_of(values: Any) -> str:
    return f"a dict with the keys {[*values]}" if isinstance(values, dict) else type(values).__name__


def column_for(space: Space[Any], rows: int, place: Place) -> Column:
    """Lay out a column for the values of a space; `fits_block` says beforehand whether there is one.

    Args:
        space: The space that all the rows share.
        rows: How many agents.
        place: Reserves bytes in every record.
    """
    if isinstance(space, spaces.Discrete):
        return ScalarColumn(rows, place)
    if isinstance(space, spaces.Dict):
        # Laid out in an order that all environments have in common, read in the space's own.
        children = {key: column_for(space.spaces[key], rows, place) for key in sorted(space.spaces, key=repr)}
        return DictColumn(rows, {key: children[key] for key in space.spaces})
    if isinstance(space, spaces.Tuple):
        return TupleColumn(rows, [column_for(s, rows, place) for s in space.spaces])
    assert space.shape is not None
    return ArrayColumn(rows, np.dtype(space.dtype), space.shape, place)
