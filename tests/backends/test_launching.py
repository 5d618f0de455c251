"""Starting, watching and ending workers: each promise of the launchers, and each way of dying.

Where living workers hang and dead ones crashed is tested in `test_stacks`, that nothing outlives what it works for in
`test_orphans`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.launching import Stage, linux_only, server_of
from helpers.processes import alive, all_gone
from helpers.start_methods import CONTEXTS

from marl_parallel.backends import descendants, launching
from marl_parallel.backends.interpreter import thread_variables
from marl_parallel.backends.launching import Launcher
from marl_parallel.backends.memory import Block

pytestmark = [pytest.mark.release_independent, linux_only]


# What a worker is like


def test_worker_finds_what_its_parent_has(stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage.launch("waits")  # whatever is set now, the next worker must not get by chance
    stage.hear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_LATER", "\udcff")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(sys, "argv", ["script", "--flag"])
    monkeypatch.syspath_prepend(str(tmp_path))
    stage.launch("tells", index=3)
    told = stage.hear()
    assert told["index"] == 3
    assert told["path"] == sys.path
    assert told["argv"] == ["script", "--flag"]
    assert told["cwd"] == str(tmp_path)
    for name in ("TARGET", descendants.MARKER, *thread_variables(1)):
        told["environ"].pop(name)
    expected = {name: value for name, value in os.environ.items() if name not in thread_variables(1)}
    assert told["environ"] == expected


def test_worker_is_a_process_of_its_own(stage: Stage) -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stage.launch("tells")
    finally:
        signal.signal(signal.SIGINT, previous)
    told = stage.hear()
    assert told["leads"]
    assert told["interrupt"]
    assert told["blocked"] == []
    assert told["stdin"] == os.devnull
    assert told["main"] == []
    assert told["main_file"] is None


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_worker_inherits_no_descriptor(context: str) -> None:
    with contextlib.closing(Stage(context)) as stage:
        stage.launch("tells")
        # stdio, the crash file, the guards (parent, server, keeper), what it was given, and the listing itself
        assert len(stage.hear()["fds"]) == 3 + 1 + 3 + 1 + 1


def test_output_goes_to_the_parents(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    pid = stage.launch("tells")
    assert stage.death() == (pid, 0)
    assert "printed by the worker" in capfd.readouterr().out


def test_stdout_without_descriptor(
    served: Stage, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    served.launch("tells")
    served.death()
    assert "printed by the worker" in capfd.readouterr().out


def test_large_environment(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        monkeypatch.setenv(f"LARGE_{number}", "x" * 50_000)
    pid = stage.launch("returns")
    assert stage.death() == (pid, 0)


@pytest.mark.parametrize("limit", [1, 2, None])
@pytest.mark.parametrize("context", CONTEXTS)
def test_threads_of_numerical_libraries(context: str, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in thread_variables(1):
        monkeypatch.delenv(name, raising=False)
    with contextlib.closing(Stage(context, limit)) as stage:
        stage.launch("tells")
        told = stage.hear()
    expected = len(os.sched_getaffinity(0)) if limit is None else limit
    assert told["blas_threads"] == expected
    if context != "fork":
        assert told["threads"] == expected
    values = {told["environ"].get(name) for name in thread_variables(1)}
    assert values == {None if limit is None else str(limit)}


# How it ends


def test_return_runs_what_the_interpreter_runs(stage: Stage) -> None:
    pid = stage.launch("returns", index=4)
    assert stage.hear() == {"thread": 4}
    assert stage.hear() == {"atexit": 4}
    assert stage.death() == (pid, 0)


def test_exception(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    pid = stage.launch("raises")
    assert stage.death() == (pid, 1)
    assert "ValueError: raised by the worker" in capfd.readouterr().err


@pytest.mark.parametrize(("target", "exitcode"), [("exits", 7), ("sys_exits", 5)])
def test_exit(stage: Stage, target: str, exitcode: int) -> None:
    pid = stage.launch(target)
    assert stage.death() == (pid, exitcode)
    assert stage.crash_report(pid) == ""


def test_death_that_is_reported_with_the_launch(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent may be slow to read what is reported."""
    request = launching._Server.request

    def slow(*arguments: Any) -> None:
        request(*arguments)
        time.sleep(0.3)

    monkeypatch.setattr(launching._Server, "request", slow)
    pid = stage.launch("exits")
    assert stage.death() == (pid, 7)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_signal(stage: Stage, number: int) -> None:
    pid = stage.launch("waits")
    stage.hear()
    os.kill(pid, number)
    assert stage.death() == (pid, -number)
    assert stage.deaths() == []


def test_a_signal_that_c_code_has_laid_hands_on(stage: Stage) -> None:
    """As SDL does; Python does not know of it, and what is ignored stays so in a new program."""
    ignored = ctypes.c_void_p(1)  # SIG_IGN
    ctypes.CDLL(None).signal(signal.SIGTERM, ignored)
    try:
        pid = stage.launch("waits")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stage.hear()
    os.kill(pid, signal.SIGTERM)
    assert stage.death() == (pid, -signal.SIGTERM)


def test_death_is_announced_at_once(served: Stage) -> None:
    pid = served.launch("waits")
    served.hear()
    assert not served.wake.try_take()
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert served.wake.take(timeout=10)
    assert time.monotonic() - start < 1.0
    assert served.deaths() == [(pid, -signal.SIGKILL)]


def test_every_death_is_told_once(stage: Stage) -> None:
    pids = [stage.launch("waits", index) for index in range(5)]
    for pid in pids[:4]:
        stage.kill(pid)
    assert stage.wait_gone(pids, timeout=1.0) == {pids[4]}
    assert sorted(stage.deaths()) == sorted((pid, -signal.SIGKILL) for pid in pids[:4])
    assert stage.deaths() == []
    stage.kill(pids[4], signal.SIGTERM)
    assert stage.wait_gone(pids, timeout=5.0) == set()
    assert stage.deaths() == [(pids[4], -signal.SIGTERM)]
    stage.kill(pids[4])


def test_kill_right_after_launch(stage: Stage) -> None:
    for _ in range(10):
        pid = stage.launch("waits")
        stage.kill(pid)
        assert stage.death() == (pid, -signal.SIGKILL)


def test_wait_gone_keeps_to_its_timeout(stage: Stage) -> None:
    pid = stage.launch("waits")
    start = time.monotonic()
    assert stage.wait_gone([pid], timeout=0.2) == {pid}
    assert 0.2 <= time.monotonic() - start < 1.0
    assert stage.wait_gone([pid], timeout=0) == {pid}


def test_what_a_signal_handler_raises_is_not_the_servers_end(served: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `TimeoutError` of the caller's own is an OSError, too."""
    pid = served.launch("waits")

    def interrupted(timeout: float) -> None:
        raise TimeoutError("my own")

    with monkeypatch.context() as patch:
        patch.setattr(served.launcher._server, "reply", interrupted)
        with pytest.raises(TimeoutError, match="my own"):
            served.deaths()
    assert served.deaths() == []
    assert alive(pid)
    assert served.launch("waits") != pid


# What does not start


def test_server_that_cannot_start(capfd: pytest.CaptureFixture[str]) -> None:
    block = Block()
    block.allocate(4096)
    launcher = Launcher("forkserver", entry="no_such_module", wake=block, threads=1)
    with pytest.raises(RuntimeError, match="exit code 1"):
        launcher.launch(0, [])
    launcher.close()
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_unknown_context() -> None:
    with pytest.raises(ValueError, match='"forkserver", "spawn" or "fork"'):
        Launcher("teleport", entry="helpers.launch_targets", wake=Block(), threads=1)


# Closing


def test_close_twice_and_use_afterwards(stage: Stage) -> None:
    pid = stage.launch("segfaults")
    stage.death()
    other = stage.launch("waits")
    stage.launcher.close()
    stage.launcher.close()
    assert all_gone(other)
    assert "Segmentation fault" in stage.crash_report(pid)
    assert stage.deaths() == []
    stage.kill(other)
    with pytest.raises(RuntimeError, match="closed"):
        stage.launch("waits")


@pytest.mark.parametrize("context", CONTEXTS)
def test_close_before_anything_was_launched(context: str) -> None:
    block = Block()
    block.allocate(4096)
    Launcher(context, entry="helpers.launch_targets", wake=block, threads=1).close()


def test_close_by_another_thread_ends_a_launch(served: Stage) -> None:
    served.launch("waits")
    os.kill(server_of(served.launcher), signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (server_of(served.launcher), signal.SIGCONT))
    closer = threading.Timer(0.1, served.launcher.close)
    timer.start()
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        served.launch("waits")
    timer.join()
    closer.join()


@pytest.mark.parametrize("limit", [None, 1.0])
def test_stopped_server(
    limit: float | None, served: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped fork server is continued; one that is frozen by other means gives an error that says so."""
    served.launch("waits")
    served.hear()
    server = server_of(served.launcher)
    os.kill(server, signal.SIGSTOP)
    if limit is None:
        pid = served.launch("waits")
        assert served.hear()["ready"] == pid
        (record,) = caplog.records
        assert f"process {server}) was stopped" in record.getMessage()
        return
    monkeypatch.setattr("marl_parallel.backends.descendants.state_of", lambda pid: "D")
    monkeypatch.setattr("marl_parallel.backends.launching._ANSWERS_WITHIN_S", limit)
    with pytest.raises(RuntimeError, match=rf"fork server \(process {server}, state D\) did not answer .* within 1 s"):
        served.launch("waits")
    os.kill(server, signal.SIGCONT)


def test_forked_child_touches_nothing(stage: Stage) -> None:
    worker = stage.launch("waits")
    stage.hear()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            stage.kill(worker)
            stage.launcher.close()
            stage.launcher.__del__()
            code = 0 if stage.deaths() == [] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert alive(worker)
    assert stage.deaths() == []
    other = stage.launch("waits")
    assert stage.hear()["ready"] == other


@pytest.mark.whole_machine
@pytest.mark.parametrize("context", CONTEXTS)
def test_nothing_leaks(context: str) -> None:
    def held() -> tuple[int, int, list[str]]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), os.listdir("/dev/shm")

    def cycle(number: int) -> None:
        stage = Stage(context)
        pids = [stage.launch("waits", index) for index in range(2)]
        if number % 2:
            stage.kill(pids[0])
            stage.death()
        stage.close()
        assert all_gone(*pids)

    cycle(0)
    before = held()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for number in range(50):
        cycle(number)
    assert held() == before
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children
