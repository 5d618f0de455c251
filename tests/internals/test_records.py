"""Records of transitions: several writers, and records that are not plain between others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same

from marl_parallel.adapters.protocol import Schema
from marl_parallel.core import codec
from marl_parallel.core.columns import Layout
from marl_parallel.core.records import TransitionRecords
from marl_parallel.core.transition import Transition

AGENTS = ["a", "b"]
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
RECORDS = 32


def block_of(records: int) -> tuple[Layout, bytearray]:
    layout = Layout(Schema(AGENTS, dict.fromkeys(AGENTS, BOX), {}, None), records)
    block = bytearray(layout.nbytes)
    layout.bind(block)
    return layout, block


def transition(number: int, *, kind: type = float, over: bool = False, infos: Any = None) -> Transition:
    """A transition with distinct numbers."""
    observations = {agent: np.full(3, number / 100, np.float32) for agent in AGENTS}
    rewards = {agent: kind(number) for agent in AGENTS}
    flags = {**dict.fromkeys(AGENTS, over), "__all__": over}
    no = {**dict.fromkeys(AGENTS, False), "__all__": False}
    dicts = observations, rewards, flags, no, infos or {agent: {} for agent in AGENTS}
    alive = [] if over else AGENTS
    return Transition(*dicts, alive, alive)


def test_several_writers():
    """A record that another writer wrote in another form is written completely again."""
    layout, block = block_of(1)
    ours, theirs = TransitionRecords(layout, block), TransitionRecords(layout, block)
    for number, (writer, value) in enumerate(
        [(ours, {}), (theirs, {"over": True}), (ours, {}), (theirs, {"kind": int}), (ours, {})]
    ):
        expected = transition(number, **value)
        assert writer.write(0, expected) is None
        dicts, acting, alive, over = ours.read(0, {})
        assert_same(dicts, expected[:5])
        assert acting == alive == expected.alive
        assert over == bool(value.get("over"))


@pytest.mark.parametrize("place", [0, 7, RECORDS - 1])
@pytest.mark.parametrize("value", [{"over": True}, {"kind": int}, {"infos": {"a": {"x": 1}, "b": {}}}], ids=str)
def test_one_record_of_another_form(place, value):
    """Its neighbours are read as they were written; by compiled code, if there is any, and so is a plain record."""
    layout, block = block_of(RECORDS)
    records = TransitionRecords(layout, block)
    written = [transition(number, **(value if number == place else {})) for number in range(RECORDS)]
    extras = {record: more for record, one in enumerate(written) if (more := records.write(record, one))}
    assert extras.keys() <= {place}
    compiled = codec.open_codec(layout, block, infos_in_block=False)
    if compiled is not None:
        columns, others = compiled.read(tuple(range(RECORDS)), extras, True)
        left = [] if others is None else others[0]
        assert left == ([place] if "over" in value else [])
        for record, dicts in enumerate(zip(*columns)):
            assert_same(dicts, (None,) * 5 if record in left else written[record][:5])
    for record in range(RECORDS):
        assert_same(records.read(record, extras.get(record, {}))[0], written[record][:5])
