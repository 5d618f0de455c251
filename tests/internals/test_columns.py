"""Columns: writing several records at once equals writing them one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same

from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.columns import AgentColumns, Layout
from marl_parallel.core.spaces import DoesNotFit, Mismatch, numbers_of

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


def columns_of(observation_spaces: list[spaces.Space[Any]]) -> AgentColumns:
    agents = [f"agent_{place}" for place in range(len(observation_spaces))]
    layout = Layout(Schema(agents, dict(zip(agents, observation_spaces, strict=True)), {}, None), RECORDS)
    layout.bind(bytearray(layout.nbytes))
    return layout.observations


@pytest.fixture(params=SPACES)
def declared(request) -> list[spaces.Space[Any]]:
    for number, space in enumerate(SPACES[request.param]):
        space.seed(number)
    return SPACES[request.param]


def ends(span: range) -> tuple[int, int]:
    return span.start, span.stop


def samples(declared: list[spaces.Space[Any]], count: int) -> list[Any]:
    return [space.sample() for _ in range(count) for space in declared]


@pytest.mark.parametrize("span", [range(RECORDS), range(1, 3), range(3, 4)])
@pytest.mark.parametrize("copy", [True, False])
def test_write_at_once(declared, span, copy):
    columns, values, size = columns_of(declared), samples(declared, len(span)), len(declared)
    columns.write_span(*ends(span), values)
    one_by_one = [value for record in span for value in columns.read_span(record, record + 1, copy)]
    assert_same(one_by_one, values)
    assert_same(columns.read_span(*ends(span), copy), values)
    assert len(one_by_one) == size * len(span)


def test_write_one_by_one(declared):
    columns, values, size = columns_of(declared), samples(declared, RECORDS), len(declared)
    for record in range(RECORDS):
        columns.write_span(record, record + 1, values[record * size : (record + 1) * size])
    assert_same(columns.read_span(*ends(range(RECORDS)), True), values)


def test_neighbours_are_unchanged(declared):
    columns, values, size = columns_of(declared), samples(declared, RECORDS), len(declared)
    columns.write_span(*ends(range(RECORDS)), values)
    columns.write_span(*ends(range(1, 3)), samples(declared, 2))
    for record in (0, 3):
        assert_same(columns.read_span(record, record + 1, True), values[record * size : (record + 1) * size])


@pytest.mark.parametrize("kind", [int, bool, np.int64, np.int32, np.uint8, np.uint64])
def test_types_of_scalars(kind):
    columns = columns_of(SPACES["discrete"])
    values = [kind(number % 2) for number in range(3 * RECORDS)]
    columns.write_span(*ends(range(RECORDS)), values)
    assert_same(columns.read_span(*ends(range(RECORDS)), True), values)


def test_mixed_scalars():
    columns = columns_of(SPACES["discrete"])
    values = [1, np.int32(2), True] * RECORDS
    columns.write_span(*ends(range(RECORDS)), values)
    assert_same(columns.read_span(*ends(range(RECORDS)), True), values)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, np.uint64(2**63), 0.5, "1", None])
def test_scalars_that_do_not_fit(value):
    with pytest.raises(DoesNotFit):
        columns_of(SPACES["discrete"]).write_span(*ends(range(1)), [value] * 3)


@pytest.mark.parametrize(
    "values",
    [
        [np.zeros(2, np.float32), np.zeros(4, np.float32), np.zeros(3, np.float32)],  # as many numbers as there must be
        [np.zeros((3, 1), np.float32)] * 3,
        [np.zeros(3, np.complex64)] * 3,
    ],
)
def test_arrays_of_another_form(values):
    with pytest.raises(Mismatch):
        columns_of(SPACES["box"]).write_span(*ends(range(1)), values)


def test_arrays_of_another_dtype():
    columns = columns_of(SPACES["box"])
    columns.write_span(*ends(range(1)), [[0.5, 1, 0], np.ones(3), np.ones(3, np.float16)])
    ones = np.ones(3, np.float32)
    assert_same(columns.read_span(*ends(range(1)), True), [np.array([0.5, 1, 0], np.float32), ones, ones])


def write_record(columns: AgentColumns, values: list[Any]) -> None:
    columns.write_span(0, 1, values)


def write_span(columns: AgentColumns, values: list[Any]) -> None:
    columns.write_span(0, 2, values * 2)


def write_each(columns: AgentColumns, values: list[Any]) -> None:
    for agent, value in zip(columns.agents, values, strict=True):
        columns.write(0, {agent: value}, "value")


ALL_DTYPES = ["?", *np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "O", "U1", "m8[s]"]


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("write", [write_record, write_span, write_each])
@pytest.mark.parametrize("passed", ALL_DTYPES)
@pytest.mark.parametrize("declared", [np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64])
def test_casts(declared, passed, write):
    """The same rules for every way to write: integers are cast if their values fit, other dtypes by NumPy's "same
    kind".
    """
    columns = columns_of([spaces.Box(0, 1, (3,), declared)] * 2)
    values = [np.array([0, 1, 1]).astype(passed), np.array([1, 0, 1], declared)]
    integers = np.dtype(passed).kind in "bui" and np.dtype(declared).kind in "ui"
    if integers or np.can_cast(passed, declared, "same_kind"):
        write(columns, values)
        assert_same(columns.read_span(0, 0 + 1, True), [np.array([0, 1, 1], declared), np.array([1, 0, 1], declared)])
    else:
        with pytest.raises(Mismatch, match=f"expected an array of shape .* and dtype {np.dtype(declared)}, got"):
            write(columns, values)


@pytest.mark.parametrize("write", [write_record, write_span, write_each])
def test_integers_never_wrap_around(write):
    columns = columns_of([spaces.MultiBinary(2)] * 2)
    with pytest.raises(Mismatch, match="int64 values that int8 cannot hold"):
        write(columns, [np.array([0, 1]), np.array([0, 257])])


@pytest.mark.parametrize("kind", [int, bool, float, np.float32, np.int8])
def test_scalar_columns_of_spaces(kind):
    numbers = numbers_of(np.array([[0, 1], [1, 0]], np.float64), kind)
    assert_same(numbers, [kind(0), kind(1), kind(1), kind(0)])
