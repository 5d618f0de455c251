"""Ctrl-C while workers start: `KeyboardInterrupt` arrives, nothing else is raised or printed, and nothing is left."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil
import pytest
from helpers.launching import linux_only
from helpers.processes import wait_for
from simulators.counting import Counting

from marl_parallel import ParallelEnv
from marl_parallel.backends import local
from marl_parallel.backends.hybrid import HybridBackend
from marl_parallel.backends.local import SerialBackend, ThreadBackend
from marl_parallel.backends.spawn import Pipes, PortableProcessBackend
from marl_parallel.core.backend import Backend

pytestmark = [
    pytest.mark.release_independent,
    pytest.mark.starts_anew,
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


def portable() -> Backend:
    return PortableProcessBackend()


def hybrid_portable() -> Backend:
    return HybridBackend(Pipes(1))


def process() -> Backend:
    from marl_parallel.backends.process import ProcessBackend

    return ProcessBackend()


def hybrid() -> Backend:
    from marl_parallel.backends.process import Queues

    return HybridBackend(Queues(1, "adaptive"))


BACKENDS = [
    SerialBackend, ThreadBackend, portable, hybrid_portable,
    pytest.param(process, marks=linux_only), pytest.param(hybrid, marks=linux_only),
]  # fmt: skip


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("end", ["stop", "abandon"])
def test_backend_that_has_not_started(make: Callable[[], Backend], end: str) -> None:
    """Everything that `close` calls works before `start`."""
    backend = make()
    backend.interrupt()
    if end == "stop":
        assert backend.stop(0.0) == []
        assert backend.stop(0.0) == []
    else:
        backend.abandon()


def interrupted_at(place: int, construct: Callable[[], ParallelEnv]) -> bool:
    """Construct with Ctrl-C before a line of `local.py`, counted in the order of execution; False if it ended first."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != local.__file__:
            return None
        if event == "line":
            count += 1
            if count > place:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        env = construct()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    env.close()
    return False


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_ctrl_c_at_any_line_of_the_start(backend: str) -> None:
    threads = {*threading.enumerate()}
    for place in range(1000):
        if not interrupted_at(place, lambda: ParallelEnv([Counting] * 2, num_workers=2, backend=backend)):  # type: ignore[arg-type]
            break
        left = {*threading.enumerate()} - threads
        wait_for(lambda left=left: not any(thread.is_alive() for thread in left))
    assert place > 30


PLACES = [
    pytest.param(process, "marl_parallel.backends.process.Launcher", "__init__", id="fork server", marks=linux_only),
    pytest.param(process, "marl_parallel.backends.process.QueuePair", "__init__", id="queues", marks=linux_only),
    pytest.param(process, "marl_parallel.backends.process.Channel", "put", id="channel", marks=linux_only),
    pytest.param(hybrid, "marl_parallel.backends.process.Launcher", "launch", id="hybrid", marks=linux_only),
    pytest.param(hybrid_portable, "marl_parallel.backends.hybrid.Worker", "__init__", id="own worker"),
    pytest.param(portable, "marl_parallel.backends.spawn._PipeHandle", "__init__", id="portable worker"),
    pytest.param(portable, "marl_parallel.backends.spawn._PipeHandle", "wait_started", id="portable start"),
]


@pytest.mark.parametrize(("make", "owner", "name"), PLACES)
def test_ctrl_c_while_processes_start(make, owner, name, monkeypatch, capfd):
    children = {*psutil.Process().children(recursive=True)}
    interrupts: list[str] = []

    def interrupted(*args: Any, **kwargs: Any) -> None:
        interrupts.append(name)
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{owner}.{name}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ParallelEnv([Counting] * 2, num_workers=2, backend=make())
    assert interrupts
    monkeypatch.undo()
    left = {*psutil.Process().children(recursive=True)} - children
    _, alive = psutil.wait_procs([one for one in left if "tracker" not in " ".join(one.cmdline())], 5.0)
    assert not alive
    assert "Traceback" not in capfd.readouterr().err
