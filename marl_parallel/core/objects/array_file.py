"""Large arrays in constructors: written once into a file in memory, and mapped by each environment.

    caller    ArrayWriter.dumps     pickles a constructor and writes each of its large arrays into the file once
    worker    loads                 unpickles the constructor, with its arrays in private mappings of the file

A write to a private mapping copies only the page that is written. So all environments share the memory of a table, and
a change that one environment makes in place stays its own. The backend owns the file (`Backend.array_file`).

The file takes NumPy arrays with any strides, and any other object that exports its memory by pickle protocol 5. Arrays
of objects, arrays of classes that pickle themselves, and arrays smaller than `LARGE` bytes stay in the pickle.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import io
import mmap
import os
import pickle
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marl_parallel.core.messages import Pickled
from marl_parallel.core.objects.pickling import ByValuePickler, dumps_by_value, dumps_shared
from marl_parallel.core.objects.sharing import Shared, available, is_shared
from marl_parallel.core.reports.advice import name_limit

LARGE = 1 << 16
"""Bytes; smaller arrays stay in the pickle."""
_CHUNK = 1 << 20  # bytes to copy at a time from an array that is not contiguous
_ALIGNMENT = 64
_MOST_PARTS = 8  # an array more than this many times larger than its part is not written as a whole
_Bytes: TypeAlias = "NDArray[np.uint8]"


class ArrayFileError(OSError):
    """The file cannot be written or mapped, such as when there is no space left."""


# -- in the caller's process -------------------------------------------------------------------------------------------


class ArrayWriter:
    """Pickles values, and writes their large arrays into the file `fd`; without a file, arrays stay in the pickle.

    Memory that several arrays share is written once, even if the arrays belong to different values. The writer keeps
    the arrays alive, so that nothing else reuses their memory.

    Args:
        fd: The file.
        local_modules: Modules that workers cannot import.
        same_machine: Whether all workers are on this machine; None if they are in this process.
    """

    def __init__(
        self, fd: int | None, local_modules: Sequence[ModuleType] = (), same_machine: bool | None = None
    ) -> None:
        self._fd, self._end = -1 if fd is None else fd, 0
        self._dumps_shared = functools.partial(dumps_shared, local_modules)
        self._same_machine = same_machine
        self._regions: dict[tuple[int, int], _Region] = {}  # by address and size
        self._with_gaps: dict[Any, _Region] = {}  # by address and form

    def dumps(self, value: Any) -> Pickled:
        """Pickle a value as `pickling.dumps_by_value` does; `CannotBeShared` if it shares what cannot reach workers."""
        parts = _Parts(self if self._fd >= 0 else None, Shared(self._dumps_shared))
        pickled = dumps_by_value(value, functools.partial(_Pickler, parts))
        if not parts.shared:
            return Pickled(pickled, parts.spans)
        if self._same_machine is not None:
            parts.shared.check(same_machine=self._same_machine)
        return Pickled(pickled, parts.spans, parts.shared)

    def offset_of(self, array: NDArray[Any]) -> int:
        """Write an array into the file and return its offset; in address order, or in C order if it has gaps."""
        flat = _flat(array)
        if flat is None:
            key = (_address(array), array.shape, array.strides, array.itemsize)
            if (region := self._with_gaps.get(key)) is None:
                region = _Region(self._end + -self._end % _ALIGNMENT, array, [])
                flags, count = ["external_loop", "buffered"], max(_CHUNK // array.itemsize, 1)
                chunks: Any = np.nditer(array, flags, order="C", buffersize=count)  # type: ignore[call-overload]
                self._write(region.offset, (np.ascontiguousarray(chunk).view(np.uint8) for chunk in chunks))
                self._with_gaps[key] = region
            return region.offset
        region = self._region_of(flat)
        first = start = _address(flat) - _address(region.array)
        stop = start + flat.nbytes
        for written_from, written_to in sorted(region.written):
            if start < written_from < stop:
                self._write(region.offset + start, [flat[start - first : written_from - first]])
            if written_from < stop:
                start = max(start, written_to)
        if start < stop:
            self._write(region.offset + start, [flat[start - first :]])
            region.written.append((first, stop))
        return region.offset + first

    def _region_of(self, flat: _Bytes) -> _Region:
        """The region of the array whose memory this one is a part of, so that overlapping parts share one region."""
        whole: Any = flat
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        inside = _address(whole) <= _address(flat) and _address(flat) + flat.nbytes <= _address(whole) + whole.nbytes
        if not inside or not whole.flags.forc:
            whole = flat
        key = (_address(whole), whole.nbytes)
        # A small part gets a region of its own: the region of the whole array would be a large hole in the file.
        if key not in self._regions and whole.nbytes > _MOST_PARTS * flat.nbytes:
            key, whole = (_address(flat), flat.nbytes), flat
        if (region := self._regions.get(key)) is None:
            offset = self._end + (key[0] - self._end) % _ALIGNMENT  # aligned as in memory
            region = self._regions[key] = _Region(offset, whole, [])
            self._end = offset + whole.nbytes
        return region

    def _write(self, offset: int, chunks: Iterable[_Bytes]) -> None:
        os.lseek(self._fd, offset, os.SEEK_SET)
        try:
            for chunk in chunks:
                rest = chunk.data
                while rest:
                    written = os.write(self._fd, rest)
                    offset, rest = offset + written, rest[written:]
        except OSError as error:
            text = (
                f"cannot write the large arrays of constructors, more than {offset / 1e6:.0f} MB, into a file in "
                f"memory: {error.strerror}. Load them inside the constructor, with np.memmap"
            )
            raise name_limit(ArrayFileError(error.errno, text)) from error
        self._end = max(self._end, offset)


class _Region(NamedTuple):
    """An array that is stored in the file."""

    offset: int
    array: NDArray[Any]
    written: list[tuple[int, int]]  # parts of it, by their first and last offsets


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class _Parts:
    """The large arrays of one value, and its shared objects; without a writer, arrays stay in the pickle.

    `spans` has the offsets and sizes of the arrays in the file, in the order of unpickling.
    """

    def __init__(self, writer: ArrayWriter | None, shared: Shared) -> None:
        self._writer, self.shared, self.spans = writer, shared, list[tuple[int, int]]()
        self._arrays: dict[int, tuple[pickle.PickleBuffer, NDArray[Any]]] = {}  # by the id of its stand-in

    @property
    def have_file(self) -> bool:
        return self._writer is not None

    def stand_in(self, array: NDArray[Any]) -> pickle.PickleBuffer:
        """An empty buffer that stands for an array, since NumPy does not export every dtype and all strides.

        The buffer is read-only if the array is.
        """
        buffer = pickle.PickleBuffer(bytearray() if array.flags.writeable else b"")
        self._arrays[id(buffer)] = buffer, array
        return buffer

    def take_out(self, buffer: pickle.PickleBuffer) -> bool:
        """Write the array that a buffer stands for, or the buffer, into the file; True if it stays in the pickle."""
        assert self._writer is not None
        _, array = self._arrays.get(id(buffer), (None, None))
        if array is None:  # the buffer is of another library
            raw = buffer.raw()
            if raw.nbytes < LARGE:
                return True
            array = np.frombuffer(raw, np.uint8)
        self.spans.append((self._writer.offset_of(array), array.nbytes))
        return False


class _Pickler(ByValuePickler):
    """Leaves large arrays and shared objects out of the pickle."""

    def __init__(self, parts: _Parts, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol, parts.take_out if parts.have_file else None)
        self._parts = parts

    def reducer_override(self, obj: Any) -> Any:
        if is_shared(obj):
            return self._parts.shared.reduce(obj)
        if not self._parts.have_file or not isinstance(obj, np.ndarray) or not _can_be_taken_out(obj):
            return super().reducer_override(obj)
        plain = obj.view(np.ndarray)
        strides = None if _flat(plain) is None else plain.strides  # else it becomes contiguous
        return _array_over, (type(obj), plain.shape, plain.dtype, strides, self._parts.stand_in(plain))


def _can_be_taken_out(array: NDArray[Any]) -> bool:
    kind, dtype = type(array), array.dtype
    return (
        array.nbytes >= LARGE
        and not dtype.hasobject
        and dtype.kind in "biufcmMSUV"  # not variable-width strings, whose elements are elsewhere
        and kind not in copyreg.dispatch_table
        and all(getattr(kind, name) is getattr(np.ndarray, name) for name in _PICKLING)
    )


_PICKLING = ("__reduce__", "__reduce_ex__", "__setstate__")
"""Methods of classes that pickle themselves, as masked arrays do."""


def _flat(array: NDArray[Any]) -> _Bytes | None:
    """The bytes of an array in the order of their addresses; None if there are gaps between them."""
    axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    dense = array.transpose(axes)
    return dense.reshape(-1).view(np.uint8) if dense.flags.c_contiguous else None


def self_contained(value: Pickled, fd: int | None) -> bytes:
    """The same value with its arrays in the pickle, for `pickling.loads` in any process."""
    if not value.spans:
        return value.pickled
    return pickle.dumps(_SelfContained(value.pickled, _private_views(-1 if fd is None else fd, value.spans)), 5)


class _SelfContained:
    """Unpickles as the value that was pickled."""

    def __init__(self, pickled: bytes, views: Sequence[memoryview]) -> None:
        self._pickled, self._views = pickled, views

    def __reduce__(self) -> Any:
        return _loads_with, (self._pickled, [pickle.PickleBuffer(view) for view in self._views])


# -- in the worker -----------------------------------------------------------------------------------------------------


def loads(value: Pickled, fd: int, arrays: ConstructorArrays | None = None) -> Any:
    """Unpickle what `ArrayWriter.dumps` has pickled, with arrays in private mappings of the file `fd`.

    `arrays` records where the large arrays are.
    """
    views = _private_views(fd, value.spans)
    if arrays is not None:
        for number, view in enumerate(views):
            arrays.set_address(number, view)
    with available(value.shared):
        return pickle.loads(value.pickled, buffers=views)


class ConstructorArrays:
    """The large arrays of one constructor in a worker, by which a saved simulator refers to them.

    Args:
        fd: Returns the descriptor of the file.
        spans: Offsets and sizes of the arrays in the file, in the order in which they were pickled.
        checksums: The checksums computed so far, by span; all environments share them.
    """

    def __init__(
        self, fd: Callable[[], int], spans: Sequence[tuple[int, int]], checksums: dict[tuple[int, int], int]
    ) -> None:
        self._fd, self._spans, self._checksums = fd, spans, checksums
        self._addresses: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by number, with the owner of the memory

    def set_address(self, number: int, view: memoryview) -> None:
        """Record where the memory of an array is."""
        if view.nbytes:
            self._addresses[number] = _address(np.frombuffer(view, np.uint8)), weakref.ref(view.obj)

    def reference_to(self, array: NDArray[Any]) -> tuple[int, int, int, int] | None:
        """A reference to an array: the number of its span, the size and checksum of that span, and an offset.

        None for an array in other memory, or in a span whose memory has been written to.
        """
        if not self._addresses or not array.nbytes:
            return None
        steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides)]
        low = _address(array) + sum(min(step, 0) for step in steps)
        high = _address(array) + sum(max(step, 0) for step in steps) + array.itemsize
        for number, (start, owner) in self._addresses.items():
            nbytes = self._spans[number][1]
            if start <= low and high <= start + nbytes and owner() is not None:
                if not self._is_unchanged(number, start):
                    return None
                return number, nbytes, self._checksum(number), _address(array) - start
        return None

    def at(self, reference: tuple[int, int, int, int]) -> tuple[Any, int]:
        """The memory that a result of `reference_to` names, and the offset; `ValueError` if another array is there."""
        number, nbytes, checksum, offset = reference
        if number >= len(self._spans) or self._spans[number][1] != nbytes or self._checksum(number) != checksum:
            raise ValueError("its constructor has other large arrays than when the state was saved")
        start, owner = self._addresses.get(number, (0, None))
        if owner is None or (memory := owner()) is None:
            view = _private_views(self._fd(), [self._spans[number]])[0]
            self.set_address(number, view)
            return view, offset
        address = _address(np.frombuffer(memory, np.uint8))
        return memoryview(memory)[start - address :][:nbytes].cast("B"), offset

    def _file(self, number: int) -> _Bytes:
        return np.frombuffer(_private_views(self._fd(), [self._spans[number]])[0], np.uint8)

    def _is_unchanged(self, number: int, start: int) -> bool:
        nbytes = self._spans[number][1]
        live: Any = (ctypes.c_ubyte * nbytes).from_address(start)
        memory, file = np.frombuffer(live, np.uint8), self._file(number)
        starts = range(0, nbytes, _CHUNK)
        return all(np.array_equal(memory[at : at + _CHUNK], file[at : at + _CHUNK]) for at in starts)

    def _checksum(self, number: int) -> int:
        span = self._spans[number]
        if span not in self._checksums:
            self._checksums[span] = zlib.crc32(self._file(number).data)
        return self._checksums[span]


def _loads_with(pickled: bytes, buffers: Sequence[Any]) -> Any:
    return pickle.loads(pickled, buffers=buffers)


def _array_over(
    kind: type[NDArray[Any]],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...] | None,
    buffer: Any,
) -> NDArray[Any]:
    """Make an array over the memory of a buffer, as NumPy does when it unpickles one."""
    array: NDArray[Any] = np.ndarray.__new__(kind, shape, dtype, buffer, 0, strides)
    return array


def _private_views(fd: int, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Writable, independent memory for each part of a file; `spans` are the offsets and sizes of the parts.

    Neighbouring parts share a mapping. A part that is listed twice is mapped twice.
    """
    views: dict[int, memoryview] = {}
    pending = sorted(range(len(spans)), key=lambda number: spans[number])
    while pending:
        start = stop = spans[pending[0]][0]
        together, rest = [], []
        for number in pending:
            offset, nbytes = spans[number]
            if stop <= offset < stop + _ALIGNMENT:
                together.append(number)
                stop = offset + nbytes
            else:
                rest.append(number)
        first = start - start % mmap.ALLOCATIONGRANULARITY
        mapped = _map_privately(fd, first, stop - first)
        for number in together:
            offset, nbytes = spans[number]
            views[number] = mapped[offset - first :][:nbytes]
        pending = rest
    return [views[number] for number in range(len(spans))]


_mmap: Any = None
try:
    _libc = ctypes.CDLL(None, use_errno=True)
    _mmap, _munmap = _libc.mmap, _libc.munmap
    _size_t, _off_t = ctypes.c_size_t, ctypes.c_long if sys.platform == "linux" else ctypes.c_int64
    _mmap.argtypes = (ctypes.c_void_p, _size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, _off_t)
    _mmap.restype, _munmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, _size_t)
except (AttributeError, OSError, TypeError):  # Windows: the module `mmap` maps the file
    _mmap = None
_FAILED = ctypes.c_void_p(-1).value


def _map_privately(fd: int, start: int, nbytes: int) -> memoryview:
    if fd < 0:
        raise ArrayFileError("the file with the arrays of the constructors is closed")
    if _mmap is None:
        return memoryview(mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY, offset=start))
    # Each mapping of the module `mmap` keeps a descriptor: hundreds of environments would use up all descriptors.
    address = _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, start)
    if address == _FAILED:
        error = ctypes.get_errno()
        text = f"cannot map {nbytes / 1e6:.0f} MB of arrays of a constructor: {os.strerror(error)}"
        raise ArrayFileError(error, text)
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _munmap, address, nbytes).atexit = False  # threads may use it until the end
    return memoryview(memory)
