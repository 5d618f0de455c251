"""Each long call is warned of in time, whatever its worker did before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from marl_parallel.core.messages import STEP_ALL
from marl_parallel.core.pool.long_calls import LongCalls
from marl_parallel.core.pool.slots import Pending, WorkerQueue
from marl_parallel.core.worker_status import Activity, Running


def test_warnings_begin_again_with_each_call():
    now, warned = [100.0], []
    status = SimpleNamespace(
        state=(1, 100.0), running=Running(0, Activity.STEP, 100.0, inside=True), settled=None, ready_since=0.0
    )
    backend = SimpleNamespace(statuses=[status], look=lambda: None)
    queue = WorkerQueue(range(2), 0, since=100.0)
    queue.requests.append(Pending(STEP_ALL, 1, 0.0, None, True))
    pool: Any = SimpleNamespace(clock=lambda: now[0], backend=backend, queues={0: queue}, closed=False)
    long_calls = LongCalls(pool, 10.0, {})
    long_calls._log = lambda long, to_do="": warned.append((long.running.env_id, now[0]))  # type: ignore[method-assign]

    def pass_time(until: float) -> None:
        while now[0] < until:
            now[0] += 0.5
            long_calls.look(now[0])

    pass_time(125.0)
    assert warned == [(0, 110.0), (0, 120.0)]
    status.state, status.running = (2, 125.0), Running(1, Activity.STEP, 125.0, inside=True)
    pass_time(140.0)
    assert warned[2:] == [(1, 135.0)]
