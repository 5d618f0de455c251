"""Values of agents: what is written is read again, neighbours stay, and other dtypes are cast or refused.

With compiled code, in the columns of a record; without, as the pickled transition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same

from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.block.codec import open_codec
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.block.records import TransitionRecords, dump_leftovers
from marl_parallel.core.objects.pickling import loads
from marl_parallel.core.spaces import Mismatch
from marl_parallel.core.transition import Transition

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


class Values:
    """The observations of all agents in several records."""

    def __init__(self, observation_spaces: list[spaces.Space[Any]], *, compiled: bool, copy: bool = True) -> None:
        self.agents = [f"agent_{place}" for place in range(len(observation_spaces))]
        layout = Layout(Schema(self.agents, dict(zip(self.agents, observation_spaces, strict=True)), {}, None), RECORDS)
        block = bytearray(layout.nbytes)
        layout.bind(block)
        codec = open_codec(layout, block, infos_in_block=False) if compiled else None
        self.records = TransitionRecords(layout, block, copy=copy, codec=codec)
        self.pickled: dict[int, bytes | None] = {}

    def write(self, record: int, values: list[Any]) -> bool:
        """Write the values of all agents; returns whether they are in the record."""
        flags = {**dict.fromkeys(self.agents, False), "__all__": False}
        seen = dict(zip(self.agents, values, strict=True))
        infos: dict[Any, Any] = {agent: {} for agent in self.agents}
        transition = Transition(seen, dict.fromkeys(seen, 0.0), flags, flags, infos, self.agents, self.agents)
        leftovers = self.records.write(record, transition)
        self.pickled[record] = None if leftovers is None else dump_leftovers(leftovers)
        return leftovers is None

    def read(self, record: int) -> list[Any]:
        pickled = self.pickled[record]
        return [*self.records.read(record, None if pickled is None else loads(pickled)).observations.values()]


COMPILED = pytest.mark.parametrize("compiled", [pytest.param(True, marks=pytest.mark.needs("_codec")), False])


@pytest.fixture(params=SPACES)
def declared(request) -> list[spaces.Space[Any]]:
    for number, space in enumerate(SPACES[request.param]):
        space.seed(number)
    return SPACES[request.param]


def samples(declared: list[spaces.Space[Any]]) -> list[Any]:
    return [space.sample() for space in declared]


@COMPILED
@pytest.mark.parametrize("copy", [True, False])
def test_values_are_read_again(declared, copy, compiled):
    values, written = Values(declared, compiled=compiled, copy=copy), [samples(declared) for _ in range(RECORDS)]
    for record, of_record in enumerate(written):
        assert values.write(record, of_record) == compiled
    assert_same([values.read(record) for record in range(RECORDS)], written)
    values.write(1, samples(declared))
    for record in (0, 2, 3):
        assert_same(values.read(record), written[record])


@COMPILED
@pytest.mark.parametrize("kind", [int, bool, np.int64, np.int32, np.uint8, np.uint64])
def test_types_of_scalars(kind, compiled):
    values, written = Values(SPACES["discrete"], compiled=compiled), [kind(1), np.int32(2), kind(0)]
    values.write(2, written)
    assert_same(values.read(2), written)


@COMPILED
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, np.uint64(2**63), 0.5, "1", None])
def test_scalars_that_do_not_fit(value, compiled):
    values = Values(SPACES["discrete"], compiled=compiled)
    assert not values.write(0, [value] * 3)
    assert_same(values.read(0), [value] * 3)


@COMPILED
@pytest.mark.parametrize(
    "written",
    [
        [np.zeros(2, np.float32), np.zeros(4, np.float32), np.zeros(3, np.float32)],  # as many numbers as there must be
        [np.zeros((3, 1), np.float32)] * 3,
        [np.zeros(3, np.complex64)] * 3,
    ],
)
def test_arrays_of_another_form(written, compiled):
    with pytest.raises(Mismatch):
        Values(SPACES["box"], compiled=compiled).write(0, written)


@COMPILED
def test_arrays_of_another_dtype(compiled):
    values = Values(SPACES["box"], compiled=compiled)
    values.write(0, [[0.5, 1, 0], np.ones(3), np.ones(3, np.float16)])
    ones = np.ones(3, np.float32)
    assert_same(values.read(0), [np.array([0.5, 1, 0], np.float32), ones, ones])


@COMPILED
def test_one_array_of_several_agents(compiled):
    """Each agent gets an array of its own, which may be written to, also if the simulator's may not."""
    values, one = Values([*SPACES["box"], spaces.Text(3)], compiled=compiled), np.ones(3, np.float32)
    one.flags.writeable = False
    values.write(0, [one, one, one, "abc"])
    read = values.read(0)
    for array in read[:3]:
        array += 1
    assert_same(read, [*[np.full(3, 2, np.float32)] * 3, "abc"])


ALL_DTYPES = ["?", *np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "O", "U1", "m8[s]"]


@COMPILED
@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("passed", ALL_DTYPES)
@pytest.mark.parametrize("declared", [np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64])
def test_casts(declared, passed, compiled):
    """Integers are cast if their values fit, other dtypes by NumPy's "same kind"."""
    values = Values([spaces.Box(0, 1, (3,), declared)] * 2, compiled=compiled)
    written = [np.array([0, 1, 1]).astype(passed), np.array([1, 0, 1], declared)]
    integers = np.dtype(passed).kind in "bui" and np.dtype(declared).kind in "ui"
    if integers or np.can_cast(passed, declared, "same_kind"):
        values.write(0, written)
        assert_same(values.read(0), [np.array([0, 1, 1], declared), np.array([1, 0, 1], declared)])
    else:
        with pytest.raises(Mismatch, match=f"expected an array of shape .* and dtype {np.dtype(declared)}, got"):
            values.write(0, written)


@COMPILED
def test_integers_never_wrap_around(compiled):
    values = Values([spaces.MultiBinary(2)] * 2, compiled=compiled)
    with pytest.raises(Mismatch, match="int64 values that int8 cannot hold"):
        values.write(0, [np.array([0, 1]), np.array([0, 257])])
