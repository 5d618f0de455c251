"""Columns: what is written is read again, neighbours stay, and other dtypes are cast or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same

from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.columns import AgentColumns, Layout
from marl_parallel.core.spaces import Mismatch

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


def write(columns: AgentColumns, record: int, values: list[Any]) -> dict[Any, Any]:
    """Write the values of all agents; returns those that do not fit."""
    return columns.write(record, dict(zip(columns.agents, values, strict=True)), "value")[1]


def read(columns: AgentColumns, record: int, copy: bool = True) -> list[Any]:
    return [*columns.read(record, columns.agents, copy).values()]


def samples(declared: list[spaces.Space[Any]]) -> list[Any]:
    return [space.sample() for space in declared]


@pytest.mark.parametrize("copy", [True, False])
def test_values_are_read_again(declared, copy):
    columns, values = columns_of(declared), [samples(declared) for _ in range(RECORDS)]
    for record, of_record in enumerate(values):
        assert write(columns, record, of_record) == {}
    assert_same([read(columns, record, copy) for record in range(RECORDS)], values)
    write(columns, 1, samples(declared))
    for record in (0, 2, 3):
        assert_same(read(columns, record, copy), values[record])


@pytest.mark.parametrize("kind", [int, bool, np.int64, np.int32, np.uint8, np.uint64])
def test_types_of_scalars(kind):
    columns, values = columns_of(SPACES["discrete"]), [kind(1), np.int32(2), kind(0)]
    write(columns, 2, values)
    assert_same(read(columns, 2), values)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, np.uint64(2**63), 0.5, "1", None])
def test_scalars_that_do_not_fit(value):
    assert len(write(columns_of(SPACES["discrete"]), 0, [value] * 3)) == 3


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
        write(columns_of(SPACES["box"]), 0, values)


def test_arrays_of_another_dtype():
    columns = columns_of(SPACES["box"])
    write(columns, 0, [[0.5, 1, 0], np.ones(3), np.ones(3, np.float16)])
    ones = np.ones(3, np.float32)
    assert_same(read(columns, 0), [np.array([0.5, 1, 0], np.float32), ones, ones])


ALL_DTYPES = ["?", *np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "O", "U1", "m8[s]"]


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("passed", ALL_DTYPES)
@pytest.mark.parametrize("declared", [np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64])
def test_casts(declared, passed):
    """Integers are cast if their values fit, other dtypes by NumPy's "same kind"."""
    columns = columns_of([spaces.Box(0, 1, (3,), declared)] * 2)
    values = [np.array([0, 1, 1]).astype(passed), np.array([1, 0, 1], declared)]
    integers = np.dtype(passed).kind in "bui" and np.dtype(declared).kind in "ui"
    if integers or np.can_cast(passed, declared, "same_kind"):
        write(columns, 0, values)
        assert_same(read(columns, 0), [np.array([0, 1, 1], declared), np.array([1, 0, 1], declared)])
    else:
        with pytest.raises(Mismatch, match=f"expected an array of shape .* and dtype {np.dtype(declared)}, got"):
            write(columns, 0, values)


def test_integers_never_wrap_around():
    columns = columns_of([spaces.MultiBinary(2)] * 2)
    with pytest.raises(Mismatch, match="int64 values that int8 cannot hold"):
        write(columns, 0, [np.array([0, 1]), np.array([0, 257])])
