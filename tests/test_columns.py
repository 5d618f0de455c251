"""Columns: what is written over several records at once is what would have been written one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comparison import assert_same
from gymnasium import spaces

from marl_parallel.core.columns import Unfit
from marl_parallel.core.layout import Layout, Schema
from marl_parallel.core.values import Mismatch, numbers_of

RECORDS = 4
BOX = spaces.Box(-1, 1, (3,), np.float32)
SPACES = {
    "box": [BOX] * 3,
    "image": [spaces.Box(0, 255, (4, 5, 3), np.uint8)] * 12,
    "scalar box": [spaces.Box(-1, 1, (), np.float64)] * 2,
    "empty box": [spaces.Box(-1, 1, (0,), np.float64)] * 2,
    "discrete": [spaces.Discrete(5, start=-2)] * 3,
    "dict": [spaces.Dict(x=BOX, y=spaces.Discrete(3))] * 2,
    "dict in two orders": [spaces.Dict([("x", BOX), ("y", BOX)]), spaces.Dict([("y", BOX), ("x", BOX)])],
    "tuple": [spaces.Tuple((BOX, spaces.MultiBinary(2)))] * 2,
    "several": [BOX, spaces.Discrete(4), BOX, spaces.MultiDiscrete([2, 3])],
}


def whole(observation_spaces: list[spaces.Space[Any]]) -> Any:
    agents = [f"agent_{place}" for place in range(len(observation_spaces))]
    layout = Layout(Schema(agents, dict(zip(agents, observation_spaces, strict=True)), {}, None), RECORDS)
    layout.bind(bytearray(layout.nbytes))
    return layout.observations.whole


@pytest.fixture(params=SPACES)
def declared(request) -> list[spaces.Space[Any]]:
    for number, space in enumerate(SPACES[request.param]):
        space.seed(number)
    return SPACES[request.param]


def samples(declared: list[spaces.Space[Any]], count: int) -> list[Any]:
    return [space.sample() for _ in range(count) for space in declared]


@pytest.mark.parametrize("span", [range(RECORDS), range(1, 3), range(3, 4)])
@pytest.mark.parametrize("copy", [True, False])
def test_written_at_once(declared, span, copy):
    columns, values, size = whole(declared), samples(declared, len(span)), len(declared)
    columns.write_span(span, values)
    one_by_one = [value for record in span for value in columns.read_all(record, copy)]
    assert_same(one_by_one, values)
    assert_same(columns.read_span(span, copy), values)
    assert len(one_by_one) == size * len(span)


def test_written_one_by_one(declared):
    columns, values, size = whole(declared), samples(declared, RECORDS), len(declared)
    for record in range(RECORDS):
        columns.write_all(record, values[record * size : (record + 1) * size])
    assert_same(columns.read_span(range(RECORDS), True), values)


def test_neighbours_are_left_alone(declared):
    columns, values, size = whole(declared), samples(declared, RECORDS), len(declared)
    columns.write_span(range(RECORDS), values)
    columns.write_span(range(1, 3), samples(declared, 2))
    for record in (0, 3):
        assert_same(columns.read_all(record, True), values[record * size : (record + 1) * size])


@pytest.mark.parametrize("kind", [int, bool, np.int64, np.int32, np.uint8, np.uint64])
def test_types_of_scalars(kind):
    columns = whole(SPACES["discrete"])
    values = [kind(number % 2) for number in range(3 * RECORDS)]
    columns.write_span(range(RECORDS), values)
    assert_same(columns.read_span(range(RECORDS), True), values)


def test_mixed_scalars():
    columns = whole(SPACES["discrete"])
    values = [1, np.int32(2), True] * RECORDS
    columns.write_span(range(RECORDS), values)
    assert_same(columns.read_span(range(RECORDS), True), values)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, np.uint64(2**63), 0.5, "1", None])
def test_scalars_that_do_not_fit(value):
    with pytest.raises(Unfit):
        whole(SPACES["discrete"]).write_span(range(1), [value] * 3)


@pytest.mark.parametrize(
    "values",
    [
        [np.zeros(2, np.float32), np.zeros(4, np.float32), np.zeros(3, np.float32)],  # as many numbers as there must be
        [np.zeros((3, 1), np.float32)] * 3,
        [np.zeros(3, np.complex64)] * 3,
    ],
)
def test_arrays_that_are_not_what_is_declared(values):
    with pytest.raises(Mismatch):
        whole(SPACES["box"]).write_span(range(1), values)


def test_arrays_of_another_dtype():
    columns = whole(SPACES["box"])
    columns.write_span(range(1), [[0.5, 1, 0], np.ones(3), np.ones(3, np.float16)])
    ones = np.ones(3, np.float32)
    assert_same(columns.read_span(range(1), True), [np.array([0.5, 1, 0], np.float32), ones, ones])


def write_all(columns: Any, values: list[Any]) -> None:
    columns.write_all(0, values)


def write_span(columns: Any, values: list[Any]) -> None:
    columns.write_span(range(1), values)


def write_each(columns: Any, values: list[Any]) -> None:
    for row, value in enumerate(values):
        columns.write(0, row, value)


ALL_DTYPES = ["?", *np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "O", "U1", "m8[s]"]


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("write", [write_all, write_span, write_each])
@pytest.mark.parametrize("given", ALL_DTYPES)
@pytest.mark.parametrize("declared", [np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64])
def test_casts(declared, given, write):
    """However it is written: between integers nothing but the number counts, and else it is NumPy's "same kind"."""
    columns = whole([spaces.Box(0, 1, (3,), declared)] * 2)
    values = [np.array([0, 1, 1]).astype(given), np.array([1, 0, 1], declared)]
    integers = np.dtype(given).kind in "bui" and np.dtype(declared).kind in "ui"
    if integers or np.can_cast(given, declared, "same_kind"):
        write(columns, values)
        assert_same(columns.read_all(0, True), [np.array([0, 1, 1], declared), np.array([1, 0, 1], declared)])
    else:
        with pytest.raises(Mismatch, match=f"expected an array of shape .* and dtype {np.dtype(declared)}, got"):
            write(columns, values)


@pytest.mark.parametrize("write", [write_all, write_span, write_each])
def test_integers_are_never_wrapped_round(write):
    columns = whole([spaces.MultiBinary(2)] * 2)
    with pytest.raises(Mismatch, match="int64 values that int8 cannot hold"):
        write(columns, [np.array([0, 1]), np.array([0, 257])])


@pytest.mark.parametrize("kind", [int, bool, float, np.float32, np.int8])
def test_numbers_of(kind):
    numbers = numbers_of(np.array([[0, 1], [1, 0]], np.float64), kind)
    assert_same(numbers, [kind(0), kind(1), kind(1), kind(0)])
