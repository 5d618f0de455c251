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
    """A record that another writer wrote in another form is written completely again, also without compiled code."""
    layout, block = block_of(1)
    compiled = codec.open_codec(layout, block, infos_in_block=False)
    pure, theirs = TransitionRecords(layout, block), TransitionRecords(layout, block, codec=compiled)
    for number, (writer, value) in enumerate(
        [
            (pure, {}),
            (theirs, {"over": True}),
            (pure, {}),
            (theirs, {"kind": int}),
            (theirs, {}),
            (pure, {"over": True}),
        ]
    ):
        expected = transition(number, **value)
        leftovers = writer.write(0, expected)
        assert (leftovers is None) == (writer is theirs and compiled is not None)
        read = theirs.read(0, leftovers)
        assert_same(read[:5], expected[:5])
        assert read.acting == read.alive == expected.alive


@pytest.mark.parametrize("place", [0, 7, RECORDS - 1])
@pytest.mark.parametrize("value", [{"over": True}, {"kind": int}, {"infos": {"a": {"x": 1}, "b": {}}}], ids=str)
def test_one_record_of_another_form(place, value):
    """Its neighbours are read as they were written."""
    layout, block = block_of(RECORDS)
    compiled = codec.open_codec(layout, block, infos_in_block=False)
    records = TransitionRecords(layout, block, codec=compiled)
    written = [transition(number, **(value if number == place else {})) for number in range(RECORDS)]
    leftovers = {record: more for record, one in enumerate(written) if (more := records.write(record, one))}
    if compiled is not None:
        assert leftovers.keys() == ({place} if "infos" in value else set())
        columns, others = compiled.read(tuple(range(RECORDS)), leftovers, True)
        assert others is None or others[0] == []
        for record, dicts in enumerate(zip(*columns)):
            assert_same(dicts, written[record][:5])
    for record in range(RECORDS):
        assert_same(records.read(record, leftovers.get(record))[:5], written[record][:5])
