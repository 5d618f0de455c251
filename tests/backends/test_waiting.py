"""How long processes try before they sleep, and that it changes no results."""

from __future__ import annotations

import mmap
import threading
import time
from typing import Any

import pytest
from helpers.comparison import assert_same
from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv

pytestmark = pytest.mark.release_independent

process = pytest.importorskip("marl_parallel.backends.process")


class Clock:
    """A clock, and a semaphore that is posted `wait` seconds after `begin`; a try takes a microsecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.posted = 0.0
        self.slept = 0
        monkeypatch.setattr(process, "time", self)
        monkeypatch.setattr(process.os, "sched_yield", lambda: None)
        monkeypatch.setattr(process.codec, "try_for", None)  # it has a clock of its own

    def monotonic(self) -> float:
        return self.now

    def begin(self, wait: float) -> None:
        self.posted, self.slept = self.now + wait, 0

    def try_wait(self) -> int:
        self.now += 1e-6
        return 0 if self.now >= self.posted else -1

    def take(self, patience: float | None = None) -> bool:
        self.slept += 1
        until = self.posted if patience is None else min(self.posted, self.now + patience)
        self.now = max(self.now, until)
        return self.now >= self.posted


def test_adaptive_wait_follows_the_last_waits(monkeypatch):
    clock: Any = Clock(monkeypatch)
    spin = process.Spin("adaptive", own_cpu=True)

    def slept(wait: float) -> int:
        clock.begin(wait)
        assert spin.take(clock)
        return int(clock.slept)

    assert [slept(0.5e-3) for _ in range(10)][-1] == 0, "tries as long as short waits take"
    assert [slept(50e-3) for _ in range(20)][-1] == 1
    assert spin.seconds == 0, "sleeps at once before long waits"
    assert [slept(0.1e-3) for _ in range(20)][-1] == 0, "learns again"
    assert 0.15e-3 < spin.seconds < 0.3e-3


@pytest.mark.parametrize(("wait", "own_cpu"), [("block", True), ("adaptive", False)])
def test_processes_that_sleep_at_once(wait, own_cpu, monkeypatch):
    clock: Any = Clock(monkeypatch)
    spin = process.Spin(wait, own_cpu)
    for _ in range(10):
        clock.begin(1e-6)
        assert spin.take(clock)
        assert clock.slept == 1


@pytest.mark.parametrize("wait", ["adaptive", "spin", "block"])
def test_patience_ends_a_wait(wait, monkeypatch):
    clock: Any = Clock(monkeypatch)
    spin = process.Spin(wait, own_cpu=True)
    for _ in range(5):
        before = clock.now
        clock.begin(1.0)
        assert not spin.take(clock, 0.02)
        assert 0.0199 < clock.now - before < 0.03


@pytest.mark.parametrize("in_python", [False, True])
def test_trying_ends_when_it_is_posted_or_in_time(in_python, monkeypatch):
    if in_python:
        monkeypatch.setattr(process.codec, "try_for", None)
    semaphore = process.Semaphore(mmap.mmap(-1, mmap.PAGESIZE), 64)
    semaphore.init(1)
    spin = process.Spin("spin", own_cpu=True)
    assert spin.take(semaphore, 0.0)
    began = time.monotonic()
    assert not spin.take(semaphore, 0.05)
    assert time.monotonic() - began >= 0.05
    spin.seconds = 20.0
    poster = threading.Timer(0.05, semaphore.post)  # it needs the GIL while this thread tries
    poster.start()
    assert spin.take(semaphore)
    poster.join()
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_results_do_not_depend_on_how_processes_wait(num_workers):
    def run(**arguments: Any) -> list[Any]:
        with ParallelEnv([simple_spread_v3.parallel_env] * 3, **arguments) as env:
            results: list[Any] = [env.reset()]
            for step in range(60):
                results.append(env.step([dict.fromkeys(acting, step % 5) for acting in env.acting]))
            return results

    expected = run(backend="serial")
    for wait in ("adaptive", "block", "spin"):
        assert_same(run(num_workers=num_workers, wait=wait), expected)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"wait": "busy"}, "wait must be one of adaptive, block, spin, got 'busy'"),
        ({"wait": "spin", "backend": "thread"}, 'pass backend="process" or "hybrid", or leave wait out'),
        ({"wait": "block", "backend": "serial"}, 'pass backend="process" or "hybrid", or leave wait out'),
    ],
)
def test_arguments_that_are_refused(arguments, text):
    with pytest.raises(ValueError, match="wait") as error:
        ParallelEnv([simple_spread_v3.parallel_env], **arguments)
    assert text in str(error.value)
