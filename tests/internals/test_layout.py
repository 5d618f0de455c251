"""The block: each record starts on a cache line, and writes stay inside the record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from simulators.deterministic import Hunt, Skirmish
from simulators.every_space import draw, shared

from marl_parallel.adapters import adapt
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.block.codec import open_codec
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.block.records import ActionRecords, TransitionRecords
from marl_parallel.core.transition import Transition

pytestmark = pytest.mark.release_independent

CACHE_LINE = 64
RECORDS = 3


def of_one(space: spaces.Space[Any]) -> Schema:
    return Schema(["a"], {"a": space}, {"a": space}, None)


def of_all(declared: dict[str, spaces.Space[Any]]) -> Schema:
    return Schema([*declared], declared, declared, spaces.Box(0, 255, (5,), np.uint8))


SCHEMATA = {
    "nobody": Schema([], {}, {}, None),
    "nothing declared": Schema(["a", "b"], {}, {}, None),
    "one byte": of_one(spaces.MultiBinary(1)),
    "one line": of_one(spaces.Box(0, 255, (64,), np.uint8)),
    "one byte more": of_one(spaces.Box(0, 255, (65,), np.uint8)),
    "skirmish": Schema.of(adapt(Skirmish())),
    "hunt": Schema.of(adapt(Hunt())),
    "every space": of_all(shared()),
}


@pytest.fixture(params=SCHEMATA)
def schema(request) -> Schema:
    return SCHEMATA[request.param]


@pytest.mark.parametrize("arrays", [True, False])
def test_records_begin_on_cache_lines(schema, arrays):
    layout = Layout(schema, RECORDS, arrays=arrays)
    assert layout.starts[0] == 0
    assert [start % CACHE_LINE for start in layout.starts] == [0] * RECORDS
    ends = [*layout.starts[1:], layout.nbytes]
    assert all(start + layout.transition_header < end for start, end in zip(layout.starts, ends, strict=True))


def written(schema: Schema, record: int, byte: int) -> set[int]:
    """Write every value into one record of a block filled with this byte; return the changed positions."""
    layout = Layout(schema, RECORDS)
    block = bytearray([byte]) * layout.nbytes
    layout.bind(block)
    rng = np.random.default_rng(0)
    seen, actions = (
        {agent: draw(space, rng) for agent, space in declared.items()}
        for declared in (schema.observation_spaces, schema.action_spaces)
    )
    flags, rewards = (
        dict.fromkeys([*schema.possible_agents, "__all__"], True),
        dict.fromkeys(schema.possible_agents, 0.1),
    )
    transition = Transition(seen, rewards, flags, flags, {}, [*seen], [*seen], final_observations=seen, reset_infos={})
    codec = open_codec(layout, block, infos_in_block=True)
    if codec is not None:
        codec.put_actions(record, actions)
    ActionRecords(layout, block).write_none(record)
    TransitionRecords(layout, block, codec=codec).write(record, transition)
    if layout.state is not None and schema.state_space is not None:
        layout.state.write(record, 0, draw(schema.state_space, rng))
    return {*np.flatnonzero(np.frombuffer(block, np.uint8) != byte).tolist()}


@pytest.mark.parametrize("record", range(RECORDS))
def test_records_do_not_overlap(schema, record):
    """All bytes of a record lie between its own start and the next one's."""
    layout = Layout(schema, RECORDS)
    end = [*layout.starts, layout.nbytes][record + 1]
    touched = written(schema, record, 0) | written(schema, record, 0xFF)
    assert touched
    assert touched <= {*range(layout.starts[record], end)}
