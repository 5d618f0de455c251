"""Histories of the worker pool on simulated workers; see "Simulate the worker pool" in `docs/contributing.md`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from helpers import ROOT

from marl_parallel.core.block import codec
from marl_parallel.core.pool import replacement, slots
from simulation.mutants import MUTATIONS
from simulation.mutations import mutated
from simulation.schedule import run
from simulation.shrinking import report

pytestmark = pytest.mark.release_independent

HISTORIES, AT_ONCE, FOR_KINDS = 700, 25, 400


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, "marl_parallel"):
        yield


@pytest.mark.parametrize("first", range(FOR_KINDS, HISTORIES, AT_ONCE))
def test_histories(first, monkeypatch):
    """Every second group runs without compiled code."""
    if first // AT_ONCE % 2:
        monkeypatch.setattr(codec, "Codec", None)
    for number in range(first, first + AT_ONCE):
        result = run(number)
        assert not result.error, report(result)


def test_one_number_is_one_history():
    for number in (3, 14, 15):
        first, second = run(number), run(number)
        assert first.log == second.log
        assert first.checked == second.checked > 0


@pytest.mark.rest
def test_first_histories_have_faults_of_all_kinds():
    kinds: Counter[str] = Counter()
    for number in range(FOR_KINDS):
        result = run(number)
        assert not result.error, report(result)
        kinds += result.kinds
    for outcome in ("fails", "dies", "hangs"):
        for place in ("constructor", "reset", "step", "writing", "close", "save", "load"):
            assert kinds[f"{outcome} in {place}"], f"no environment {outcome} in {place}"
    for place in ("reply", "early", "sent", "call"):
        assert kinds[f"dies in {place}"], f"no worker dies in {place}"
    for kind in (
        "unreadable infos", "differs in constructor", "replay", "dies while idle", "hangs while idle", "goes on, late",
    ):  # fmt: skip
        assert kinds[kind], f"nothing of the kind: {kind}"
    for call in ("step", "step_some", "reset", "recv", "call", "restart"):
        closed = kinds[f"close in {call}"] + kinds[f"close by a thread in {call}"]
        assert closed, f"no close in the middle of {call}"


REACH_ALL = (0, 2, 3, 5, 9, 17, 34, 53, 74, 136, 157, 473, 810, 138)
"""Histories that reach each entry of the tables in `replacement.py`, except `RESTARTS_ON_REQUEST`."""
RESTARTS_ON_REQUEST = (replacement.Present.RESTARTS, replacement.Event.REPLACED)
"""Seen by `test_while_it_is_constructed_again` of `test_requested_restarts.py`."""


def test_each_entry_is_reached(monkeypatch):
    reached, after = set[object](), replacement.after

    def noted(present, successor, event):
        reached.update([(present, event), (successor, event)])
        return after(present, successor, event)

    monkeypatch.setattr(slots, "after", noted)
    for number in REACH_ALL:
        run(number)
    entries = {*replacement.PRESENT, *replacement.SUCCESSOR} - {RESTARTS_ON_REQUEST}
    assert not entries - reached, "change REACH_ALL, or write a test, for these"


@pytest.mark.parametrize(
    ("present", "successor", "event"),
    [
        (replacement.Present.GOES_ON, replacement.Successor.NONE, replacement.Event.BEGAN),
        (replacement.Present.MOVES, replacement.Successor.NONE, replacement.Event.DUE),
        (replacement.Present.GOES_ON, replacement.Successor.READY, replacement.Event.TAKES_OVER),
        (replacement.Present.WAITS, replacement.Successor.MISSING, replacement.Event.TAKES_OVER),
        (replacement.Present.WAITS, replacement.Successor.NONE, replacement.Event.GIVEN_UP),
    ],
)
def test_what_cannot_happen_raises(present, successor, event):
    with pytest.raises(RuntimeError, match=f"{event} cannot happen in the states {present} and {successor}"):
        replacement.after(present, successor, event)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_mutations_fit_the_code(mutation):
    """Each replaces a text that occurs once, so that `mutations.py` can put all of these faults into the pool."""
    assert mutated(mutation) != (ROOT / "marl_parallel" / "core" / mutation.file).read_text()
