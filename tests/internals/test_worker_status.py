"""`WorkerStatus`: the parent reads it while the worker writes it."""

from __future__ import annotations

import mmap
import multiprocessing
import time

from marl_parallel.core.worker_status import Activity, WorkerStatus


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
