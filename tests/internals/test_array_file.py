"""Arrays that leave a pickle for a file: what comes back, and that the file has each of them once."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.leaks import open_descriptors

from marl_parallel.backends.memory import anonymous_file
from marl_parallel.core.messages import Pickled
from marl_parallel.core.objects import array_file, pickling
from marl_parallel.core.objects.array_file import LARGE, ArrayWriter, self_contained

pytestmark = pytest.mark.release_independent


class Named(np.ndarray):
    """A class that leaves pickling to NumPy."""


class PicklesItself(np.ndarray):
    def __reduce__(self) -> Any:
        return _made_again, (self.tolist(),)


def _made_again(content: list[float]) -> PicklesItself:
    return np.array(content).view(PicklesItself)


class Exporting:
    """Like an array of another library: exports its memory by pickle protocol 5."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __reduce_ex__(self, protocol: int) -> Any:
        return Exporting, (pickle.PickleBuffer(self.content),)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = anonymous_file("marl_parallel-test")
    yield fd
    os.close(fd)


@pytest.fixture(params=["by libc", "by the module mmap"])
def mapped(request, monkeypatch):
    """As on Linux and macOS, or as on Windows."""
    if request.param == "by the module mmap":
        monkeypatch.setattr(array_file, "_mmap", None)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape)


def size_of(fd: int) -> int:
    return os.fstat(fd).st_size


STRUCTURED = np.zeros(20_000, [("place", "f4", (2,)), ("name", "U4")])
STRUCTURED["place"][:, 1] = np.arange(20_000)
OUT_OF_BAND = {
    "C order": numbers(300, 100),
    "Fortran order": np.asfortranarray(numbers(300, 100)),
    "other order of axes": numbers(30, 50, 40).transpose(1, 0, 2),
    "every second column": numbers(300, 100)[:, ::2],
    "backwards": numbers(30_000)[::-1],
    "broadcast": np.broadcast_to(numbers(100), (300, 100)),
    "axes of size one": numbers(1, 30_000, 1)[:, ::3].T,
    "big-endian": numbers(30_000).astype(">f8"),
    "unaligned": np.frombuffer(bytes(1) + numbers(30_000).tobytes(), np.uint8)[1:].view(np.float64),
    "bool": numbers(300, 300) % 3 == 0,
    "complex": numbers(30_000) * 1j,
    "half": numbers(40_000).astype(np.float16),
    "dates": np.arange("2000-01-01", "2100-01-01", dtype="M8[D]"),
    "every second date": np.arange("2000-01-01", "2100-01-01", dtype="M8[D]")[::2],
    "strings": np.array(["abcd", "ä"] * 20_000),
    "structured": STRUCTURED,
    "part of structured": STRUCTURED["place"],
    "own class": numbers(300, 100).view(Named),
    "records": STRUCTURED.view(np.recarray),
}
WITH_GAPS = {
    "every second column",
    "backwards",
    "broadcast",
    "axes of size one",
    "every second date",
    "part of structured",
}


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", OUT_OF_BAND)
def test_equal_to_the_original(name, read_only, fd):
    array = OUT_OF_BAND[name].view()
    if array.flags.writeable:
        array.flags.writeable = not read_only
    else:
        read_only = True
    pickled = ArrayWriter(fd).dumps({"table": array})
    assert len(pickled.pickled) < 10_000
    assert array.nbytes <= size_of(fd) < array.nbytes + 100
    for found in (
        array_file.loads(pickled, fd)["table"],
        pickling.loads(self_contained(pickled, fd))["table"],
    ):
        assert (type(found), found.dtype, found.shape) == (type(array), array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)
        assert found.flags.writeable is not read_only
        assert found.flags.aligned >= array.flags.aligned
        assert found.strides == (np.ascontiguousarray(array).strides if name in WITH_GAPS else array.strides)


@pytest.mark.parametrize(
    "value",
    [
        numbers(LARGE // 8 - 1),
        numbers(0, 1000),
        np.array(5.0),
        np.array([{"an": "object"}] * 20_000, object),
        np.zeros(20_000, [("number", "f8"), ("thing", object)]),
        np.ma.masked_less(numbers(30_000), 5),
        numbers(30_000).view(PicklesItself),
        Exporting(b"small"),
    ],
    ids=["small", "empty", "scalar", "objects", "structured with objects", "masked", "pickles itself", "small buffer"],
)
def test_what_stays_in_the_pickle(value, fd):
    pickled = ArrayWriter(fd).dumps([value])
    assert (list(pickled.spans), size_of(fd)) == ([], 0)
    assert self_contained(pickled, None) == pickled.pickled
    (found,) = array_file.loads(pickled, fd)
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(found, value)
        assert found.flags.writeable
    else:
        assert found.content == value.content


def test_without_a_file_everything_stays_in_the_pickle():
    for fd in (None, -1):
        pickled = ArrayWriter(fd).dumps(numbers(30_000))
        assert (type(pickled), list(pickled.spans)) == (Pickled, [])
        np.testing.assert_array_equal(array_file.loads(pickled, -1), numbers(30_000))


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("content", [bytes(100_000), bytearray(100_000), numbers(30_000)])
def test_buffers_of_other_libraries(content, fd):
    pickled = ArrayWriter(fd).dumps(Exporting(content))
    assert 0 <= size_of(fd) - memoryview(content).nbytes < 64
    for found in (array_file.loads(pickled, fd), pickling.loads(self_contained(pickled, fd))):
        view = memoryview(found.content)
        assert view.cast("B") == memoryview(content).cast("B")
        assert view.readonly is isinstance(content, bytes)


@pytest.mark.usefixtures("mapped")
def test_values_share_what_the_file_has_once_and_write_to_memory_of_their_own(fd):
    writer, table = ArrayWriter(fd), numbers(1000, 100)
    columns = table[:, ::2]
    values = [[table, columns], [table], [table[100:200], columns], [table.T], [table.view(Named)]]
    pickled = [writer.dumps(value) for value in values]
    assert size_of(fd) < table.nbytes + columns.nbytes + 200
    table[:] = -1  # the file is not touched
    first, second, *others = [array_file.loads(one, fd) for one in pickled]
    first[0][:] = 7
    np.testing.assert_array_equal(second[0], numbers(1000, 100))
    np.testing.assert_array_equal(others[0][0], numbers(1000, 100)[100:200])
    np.testing.assert_array_equal(others[0][1], numbers(1000, 100)[:, ::2])
    np.testing.assert_array_equal(others[1][0], numbers(1000, 100).T)
    np.testing.assert_array_equal(array_file.loads(pickled[0], fd)[0], numbers(1000, 100))


@pytest.mark.usefixtures("mapped")
def test_overlapping_parts_share_memory_in_any_order(fd):
    table, rng = numbers(1000, 100), np.random.default_rng(0)
    writer = ArrayWriter(fd)
    parts = [slice(*sorted(rng.integers(0, 1000, 2))) for _ in range(40)] + [
        slice(300, 420),
        slice(350, 1000),
        slice(0, 400),
    ]
    arrays = [table[part] for part in parts if part.stop - part.start > 100] + [table]
    rng.shuffle(parts)
    pickled = [writer.dumps(array) for array in arrays]
    assert os.fstat(fd).st_blocks * 512 < 1.3 * table.nbytes  # of small parts, some are there twice
    for one, array in zip(pickled, arrays, strict=True):
        np.testing.assert_array_equal(array_file.loads(one, fd), array)


def test_a_small_part_of_a_large_array(fd):
    """Only the part is written."""
    table = np.zeros(50_000_000, np.uint8)  # takes no memory
    part = table[30_000_000:31_000_000]
    part[:] = 7
    pickled = ArrayWriter(fd).dumps([part, table[30_100_000:30_900_000]])
    assert size_of(fd) < 2_000_000
    assert [array.sum() for array in array_file.loads(pickled, fd)] == [7_000_000, 5_600_000]


@pytest.mark.usefixtures("mapped")
def test_arrays_of_one_value_are_as_independent_as_pickle_makes_them(fd):
    table, other = numbers(1000, 100), numbers(20_000)
    value = [table, table, table.view(), other, table[10:900]]
    found = array_file.loads(ArrayWriter(fd).dumps(value), fd)
    assert found[0] is found[1]
    found[0][:] = 7
    for got, expected in zip(found[2:], value[2:], strict=True):
        np.testing.assert_array_equal(got, expected)


def test_temporary_arrays_are_not_mistaken_for_each_other(fd):
    """Memory that is used again has another array's content."""

    class Fresh:
        def __init__(self, number: int) -> None:
            self.number = number

        def __reduce__(self) -> Any:
            return np.array, (np.full(30_000, self.number),)

    writer = ArrayWriter(fd)
    pickled = [writer.dumps(Fresh(number)) for number in range(5)]
    assert [array_file.loads(one, fd)[-1] for one in pickled] == [*range(5)]


def test_many_arrays_need_few_mappings_and_no_descriptors(fd):
    arrays = [np.full(10_000, number) for number in range(300)]
    pickled = ArrayWriter(fd).dumps(arrays)
    before = len(open_descriptors()), mappings()
    values = [array_file.loads(pickled, fd) for _ in range(10)]
    assert [array[-1] for array in values[3]] == [*range(300)]
    assert len(open_descriptors()) == before[0]
    assert mappings() - before[1] <= 10
    del values
    assert mappings() == before[1]


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return file.read().count("marl_parallel-test")


def test_a_file_that_cannot_be_written(tmp_path):
    """The error says how much is missing, and where to get it."""
    path = tmp_path / "read-only"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(array_file.ArrayFileError, match=r"more than 0 MB, .*: Bad file descriptor\. Load"):
            ArrayWriter(fd).dumps(numbers(200_000))
    finally:
        os.close(fd)
    with pytest.raises(array_file.ArrayFileError, match="is closed"):
        array_file.loads(Pickled(b"", [(0, 100_000)]), -1)
