"""From when a timeout counts; time in which the process that watches the deadlines is stopped counts at no moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from marl_parallel.core.backend import Capabilities
from marl_parallel.core.messages import STEP_ALL, Message, answer
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.pool.slots import Pending, WorkerQueue
from marl_parallel.core.pool.timeouts import Deadlines, Limits
from marl_parallel.core.worker_status import Activity, Running

pytestmark = pytest.mark.release_independent

LIMIT_S, STOPPED_S = 4.0, 6.0


class Clock:
    """A clock that a stop at the `stop`-th call of `monotonic` moves on; then it moves a little with each call."""

    def __init__(self, stop: int) -> None:
        self.now, self.calls, self.stop = 100.0, 0, stop

    def monotonic(self) -> float:
        before = self.now
        self.calls += 1
        self.now += 1e-4 + STOPPED_S * (self.calls == self.stop)
        return before  # it was read right before the stop


def in_a_step(clock: Clock) -> tuple[Deadlines, Any, WorkerQueue]:
    """The deadlines of a worker that has begun a step now, its status, and its queue."""
    status = SimpleNamespace(
        state=(1, clock.now), running=Running(0, Activity.STEP, clock.now, inside=True), ready_since=0.0
    )
    backend: Any = SimpleNamespace(
        capabilities=Capabilities(), in_line=(), in_line_until=0.0, statuses=[status], seconds_in_look=0.0,
        clock=clock.monotonic,
    )  # fmt: skip
    queue = WorkerQueue(range(1), 0, since=clock.now)
    queue.requests.append(Pending(STEP_ALL, 1, clock.now, None, True))
    return Deadlines(backend, Limits(step=LIMIT_S), {0: queue}), status, queue


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_stop_at_any_moment_does_not_count(stop):
    clock = Clock(stop)
    deadlines, _, _ = in_a_step(clock)
    deadlines.looked = clock.monotonic()
    for _ in range(60):
        patience = deadlines.patience()
        assert patience is not None
        clock.now += patience
        assert deadlines.late() == []
    late = []
    for _ in range(200):
        clock.now += deadlines.patience() or 0.0
        late += deadlines.late()
    assert late, "time that is not stopped counts"


@pytest.mark.parametrize("when", ["before the first wait", "in a wait"])
def test_time_in_which_the_callers_thread_steps_environments_counts(when):
    """The other workers run meanwhile. Those in the caller's thread are never late."""
    clock = Clock(stop=0)
    statuses = [
        SimpleNamespace(
            state=(1, clock.now), running=Running(env_id, Activity.STEP, clock.now, inside=True), ready_since=0.0
        )
        for env_id in range(2)
    ]
    backend: Any = SimpleNamespace(
        capabilities=Capabilities(), in_line={0}, in_line_until=0.0, statuses=statuses, seconds_in_look=0.0,
        clock=clock.monotonic,
    )  # fmt: skip
    queues = {worker: WorkerQueue(range(worker, worker + 1), worker, since=clock.now) for worker in range(2)}
    for queue in queues.values():
        queue.requests.append(Pending(STEP_ALL, 1, clock.now, None, True))
    deadlines = Deadlines(backend, Limits(step=LIMIT_S), queues)
    deadlines.looked = clock.monotonic()
    if when == "in a wait":
        assert deadlines.patience() is not None
    clock.now += 1.01 * LIMIT_S
    backend.in_line_until = clock.monotonic()
    late = deadlines.late() if when == "in a wait" else []
    for _ in range(4):
        clock.now += deadlines.patience() or 0.0
        late += deadlines.late()
    assert {*late} == {1}


@pytest.mark.parametrize(
    ("completed", "since"),
    [
        pytest.param(102.0, 103.0, id="the worker was free before the next request was posted"),
        pytest.param(105.0, 105.0, id="the next request waited for the first one"),
        pytest.param(0.0, 109.0, id="it is unknown when the first one was completed"),
    ],
)
def test_the_second_request_in_a_queue_counts_from_when_it_could_begin(completed, since):
    """The caller may receive the result of the first one long after that."""
    clock = Clock(stop=0)
    backend: Any = SimpleNamespace(clock=lambda: clock.now, post=lambda requests, together: None)
    pool = Pool(backend, [range(2)])
    pool.send(Message.STEP, [0])
    clock.now = 103.0
    pool.send(Message.STEP, [1])
    assert pool.queues[0].since == 100.0
    clock.now = 109.0
    pool.apply([(0, answer(Message.STEP, (0,), {}, {}, completed))])
    assert pool.queues[0].since == since


def test_a_status_that_changes_between_two_looks_is_not_late():
    """The simulator has returned, and its result is being written: the activity began at the same moment."""
    clock = Clock(stop=0)
    deadlines, status, _ = in_a_step(clock)
    clock.now = deadlines.looked = clock.now + 1.01 * LIMIT_S
    late = []
    for env in (1, -1, -1):
        status.state = env, status.state[1]
        clock.now += deadlines.patience() or 0.0
        late.append(deadlines.late())
    assert late == [[], [], [0]]
    assert not deadlines.changed(0)
    status.state = 1 << 40, status.state[1]
    assert deadlines.changed(0)
