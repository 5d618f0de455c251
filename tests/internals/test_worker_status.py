"""`WorkerStatus`: the parent reads it while the worker writes it."""

from __future__ import annotations

import math
import mmap
import multiprocessing
import struct
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_parallel.core.pool.slots import WorkerQueue
from marl_parallel.core.worker_status import Activity, Running, WorkerStatus
from marl_parallel.types import Stats

pytestmark = pytest.mark.release_independent


def carry_out_requests(buffer: mmap.mmap) -> None:
    status = WorkerStatus(buffer)
    while not status.discarded:
        status.begin_request()
        for activity in (Activity.RESET, Activity.STEP):
            status.enter(0, activity)
            status.leave()
        status.end_request()


def test_reading_while_another_process_writes():
    """No number is read half written: counts never decrease, and what runs has begun."""
    buffer = mmap.mmap(-1, WorkerStatus.NBYTES)
    status = WorkerStatus(buffer)
    started = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=carry_out_requests, args=(buffer,))
    process.start()
    try:
        last, decreased, early, ends_by = status.stats, [], [], started + 1.0
        while time.monotonic() < ends_by:
            stats, running = status.stats, status.running
            for name in ("steps", "resets", "simulator_s", "transport_s", "waiting_s"):
                if getattr(stats, name) < getattr(last, name):
                    decreased.append((name, getattr(last, name), getattr(stats, name)))
            if running is not None and running.since < started:
                early.append(running)
            last = stats
    finally:
        status.discard()
        process.join(10)
    assert process.exitcode == 0
    assert last.steps > 1000
    assert last.resets > 1000
    assert not decreased
    assert not early


def test_an_activity_within_another_one():
    """The outer one goes on when the inner one ends, and no time counts twice."""
    times = iter(range(1000))
    status = WorkerStatus(bytearray(WorkerStatus.NBYTES), lambda: float(next(times)))
    status.begin_request()
    with status.during(3, Activity.CALL):
        with status.during(3, Activity.CONSTRUCTOR):
            assert status.running is not None
            assert status.running.activity is Activity.CONSTRUCTOR
        assert status.running is not None
        assert (status.running.env_id, status.running.activity, status.running.inside) == (3, Activity.CALL, True)
    status.end_request()
    assert status.running is None
    assert status.settled == 3
    assert status.stats.simulator_s <= next(times)


NOW = 100.0
SETTLED = 1 << 40
SPECIAL = [struct.pack("=d", number) for number in (math.nan, math.inf, -1.0, 1e300)]
SPECIAL += [struct.pack("=q", number) for number in (-1, 2**63 - 1, -(2**63), SETTLED, 99)]


def status_of(numbers: dict[int, Any]) -> WorkerStatus:
    """The status of a worker that steps environment 3 since 1 s, with other numbers in some places."""
    status = WorkerStatus(bytearray(WorkerStatus.NBYTES), lambda: NOW)
    for place, number in {0: 4, 1: int(Activity.STEP), 2: NOW - 1.0, **numbers}.items():
        view = status._floats if isinstance(number, float) else status._ints
        view[place] = number
    return status


@pytest.mark.parametrize("env", [10**6, SETTLED - 1, -SETTLED, -(10**6), -(2**63), SETTLED, 2 * SETTLED, 2**63 - 1])
def test_damaged_environments_are_unknown(env):
    status = status_of({0: env})
    assert WorkerQueue([2, 3], 0).running(status) is None
    assert status.settled is None or status.settled == env - SETTLED - 1 >= 0


@pytest.mark.parametrize("activity", [-1, 9, 99, 256 + 3, 2**32 + 3, -(2**63), 2**63 - 1])
def test_damaged_activities_are_unknown(activity):
    status = status_of({1: activity})
    assert (status.running, status.latest) == (None, Activity.START)
    assert status.state == (4, NOW - 1.0)


@pytest.mark.parametrize("since", [math.nan, math.inf, -math.inf, -1.0, NOW + 61.0, 1e300])
def test_damaged_times_are_unknown(since):
    """A timeout that waited for them would never come."""
    status = status_of({2: since})
    assert status.state == (4, 0.0)
    assert status.running == Running(3, Activity.STEP, 0.0, inside=True)


@pytest.mark.parametrize(("discarded", "is_discarded", "is_ending"), [(0, 0, 0), (1, 1, 0), (2, 1, 1)])
@pytest.mark.parametrize("damage", [0, 4, 1 << 8, 1 << 62])
def test_only_the_numbers_of_the_parent_discard_requests(discarded, is_discarded, is_ending, damage):
    """A worker that discards requests does not reply."""
    status = status_of({3: discarded | damage})
    assert status.discarded == (is_discarded and not damage)
    assert status.is_ending == (is_ending and not damage)


@pytest.mark.parametrize("numbers", [{0: -(2**63)}, {0: 2**63 - 1}, {1: 99}, {2: math.nan}, {0: 0, 1: -1}], ids=str)
def test_a_worker_whose_status_is_overwritten_goes_on(numbers):
    status = status_of({})
    for _ in range(2):
        status.begin_request()
        with status.during(2, Activity.CALL), status.during(2, Activity.STEP):
            for place, number in numbers.items():
                (status._floats if isinstance(number, float) else status._ints)[place] = number
        status.end_request()
    assert status.settled == 2
    assert status.parts == 2


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 39), st.binary(min_size=8, max_size=8) | st.sampled_from(SPECIAL))))
def test_any_overwritten_numbers(numbers):
    """The parent reads every status, and what it takes for running is possible."""
    status = status_of({})
    for place, content in numbers:
        status._view[8 * place : 8 * place + 8] = content
    running, _ = status.running, (status.latest, status.settled, status.parts, status.discarded, status.is_ending)
    assert running is None or 0 <= running.env_id < SETTLED
    assert 0.0 <= status.state[1] <= NOW + 60.0
    assert str(Stats.of([status.stats]))
    status.copy_from(status_of({7: 1 << 40}).copy(), 0.5)
    assert str(Stats.of([status.stats]))
