"""What is asked about workers that have died, or that are ending: other programs may have got their process ids."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import Any

import pytest
from helpers.processes import gone, wait_for, workers
from helpers.start_methods import arguments
from simulators.failing import Fragile

from marl_parallel import ParallelEnv, RecyclePolicy

pytestmark = pytest.mark.release_independent


def processes_of(backend: Any) -> list[Any]:
    """The objects that have the process ids, in the order of workers."""
    return [vars(handle).get("process") or handle._process for handle in backend._handles.values()]


def test_memory_and_cpu_time_of_a_dead_worker(start_method, tmp_path):
    """While nobody waits for results, its death is not known yet."""
    with ParallelEnv([functools.partial(Fragile, {}, tmp_path)] * 2, num_workers=2, **arguments(start_method)) as env:
        env.reset()
        backend = env.stepper.source.backend
        assert backend.memory(0) > 1e6
        process = processes_of(backend)[0]
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: backend.memory(0) is None)
        assert backend.cpu_seconds(0) is None
        assert backend.memory(1) > 1e6
        if start_method != "portable":  # there, this process reaps it, and keeps the number until then
            process.pid = os.getpid()  # as if another program had got its number
            assert backend.memory(0) is None
            assert backend.cpu_seconds(0) is None


class SlowStatuses(list[Any]):
    """Statuses of workers; a thread looks at the first one until shortly after a worker has been removed."""

    def __init__(self, statuses: list[Any], thread: threading.Thread) -> None:
        super().__init__(statuses)
        self.thread, self.entered, self.removed = thread, threading.Event(), threading.Event()

    def __getitem__(self, place: Any) -> Any:
        if threading.current_thread() is self.thread and not self.entered.is_set():
            self.entered.set()
            assert self.removed.wait(30.0)
            time.sleep(0.3)
        return super().__getitem__(place)


def test_statistics_in_another_thread_while_workers_are_closed(start_method, tmp_path):
    """A standby worker is removed by `close`, in the middle of `stats`."""
    env = ParallelEnv(
        [functools.partial(Fragile, {}, tmp_path)] * 2,
        num_workers=1,
        seed=3,
        recycle=RecyclePolicy(max_episodes=1),
        **arguments(start_method),
    )
    env.reset()
    pool = env.stepper.source
    results: list[Any] = []

    def look() -> None:
        try:
            results.append(env.stats())
        except Exception as error:
            results.append(error)

    while len(pool.queues) < 2:
        env.step([{"a": 0, "b": 0}] * 2)
    thread = threading.Thread(target=look)
    statuses = pool.backend.statuses = SlowStatuses(pool.backend.statuses, thread)
    remove = pool.backend.remove

    def removed(worker: int, *, kill: bool) -> bool:
        done: bool = remove(worker, kill=kill)
        statuses.removed.set()
        return done

    pool.backend.remove = removed
    thread.start()
    assert statuses.entered.wait(10.0)
    env.close()
    thread.join()
    (stats,) = results
    assert not isinstance(stats, Exception), stats
    assert stats.steps == env.stats().steps
    assert gone(workers(tmp_path))
