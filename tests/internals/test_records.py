"""Records of transitions: several writers, and records that need the slow path between others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same

from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.columns import Layout
from marl_parallel.core.records import TransitionRecords
from marl_parallel.core.transition import PlainForm, Transition

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
    return Transition(*dicts, alive, alive, PlainForm(AGENTS).code(*dicts))


def test_several_writers():
    """A record that another writer wrote in another form is written completely again."""
    layout, block = block_of(1)
    ours, theirs = TransitionRecords(layout, block), TransitionRecords(layout, block)
    for number, (writer, value) in enumerate(
        [(ours, {}), (theirs, {"over": True}), (ours, {}), (theirs, {"kind": int}), (ours, {})]
    ):
        expected = transition(number, **value)
        assert writer.write(0, expected) is None
        dicts, acting, alive, over = ours.read(0, None)
        assert_same(dicts, expected[:5])
        assert acting == alive == expected.alive
        assert over == bool(value.get("over"))


@pytest.mark.parametrize("place", [0, 7, RECORDS - 1])
@pytest.mark.parametrize("value", [{"over": True}, {"kind": int}, {"infos": {"a": {"x": 1}, "b": {}}}], ids=str)
def test_one_record_of_another_form(place, value):
    """Its neighbours are read in two runs."""
    records = TransitionRecords(*block_of(RECORDS))
    written = [transition(number, **(value if number == place else {})) for number in range(RECORDS)]
    extras = {record: more for record, one in enumerate(written) if (more := records.write(record, one))}
    assert extras.keys() <= {place}
    runs = records.runs(range(RECORDS))
    assert [record for span, _ in runs for record in span] == [*range(RECORDS)]
    assert sum(len(span) > 1 for span, _ in runs) == (1 if place in (0, RECORDS - 1) else 2)
    for span, code in runs:
        if code:
            for record, dicts in zip(span, zip(*records.read_span(span, code, extras))):
                assert_same(dicts, written[record][:5])
        else:
            assert span == range(place, place + 1)
            assert_same(records.read(place, None)[0], written[place][:5])


def test_skipped_records():
    records = TransitionRecords(*block_of(5))
    for record in range(5):
        records.write(record, transition(record))
    runs = records.runs(range(5), {2})
    assert [span for span, _ in runs] == [range(2), range(2, 3), range(3, 5)]
    assert runs[1][1] == 0
