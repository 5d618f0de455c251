"""Launchers: starting, watching and ending workers, and every way in which a worker dies.

Stacks of workers are tested in `test_stacks`, processes that outlive their parent in `test_orphans`, fork servers and
keepers that die or stop in `test_launcher_faults`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.launching import LauncherHarness, linux_only, opened_by_libffi, server_of
from helpers.processes import alive, all_gone
from helpers.signals import SIGKILL

from marl_parallel.backends import descendants, launching
from marl_parallel.backends.interpreter import thread_variables
from marl_parallel.backends.launching import Launcher
from marl_parallel.backends.memory import Block

pytestmark = [pytest.mark.release_independent, pytest.mark.starts_anew, linux_only]


# The state of a worker


def test_worker_has_the_parents_environment(
    harness: LauncherHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    harness.launch("waits")  # whatever is set now, the next worker must not get by chance
    harness.receive()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_LATER", "\udcff")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(sys, "argv", ["script", "--flag"])
    monkeypatch.syspath_prepend(str(tmp_path))
    harness.launch("tells", index=3)
    reply = harness.receive()
    assert reply["index"] == 3
    assert reply["path"] == sys.path
    assert reply["argv"] == ["script", "--flag"]
    assert reply["cwd"] == str(tmp_path)
    for name in ("TARGET", descendants.MARKER, *thread_variables(1)):
        reply["environ"].pop(name)
    expected = {name: value for name, value in os.environ.items() if name not in thread_variables(1)}
    assert reply["environ"] == expected


def test_worker_leads_its_own_session(harness: LauncherHarness) -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        harness.launch("tells")
    finally:
        signal.signal(signal.SIGINT, previous)
    reply = harness.receive()
    assert reply["leads"]
    assert reply["interrupt"]
    assert reply["blocked"] == []
    assert reply["stdin"] == os.devnull
    assert reply["main"] == []
    assert reply["main_file"] is None


def test_worker_inherits_no_descriptor(harness: LauncherHarness) -> None:
    harness.launch("tells")
    files = [path for path in harness.receive()["open_files"] if not opened_by_libffi(path)]
    # stdio, the crash file, what is for its thread that sends stacks, the resource tracker, the guards (parent, server,
    # keeper) and its argument
    assert len(files) == 3 + 1 + 3 + 1 + 3 + 1, files


def test_output_goes_to_the_parents_stdout(harness: LauncherHarness, capfd: pytest.CaptureFixture[str]) -> None:
    pid = harness.launch("tells")
    assert harness.death() == (pid, 0)
    assert "printed by the worker" in capfd.readouterr().out


def test_stdout_without_descriptor(
    harness: LauncherHarness, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    harness.launch("tells")
    harness.death()
    assert "printed by the worker" in capfd.readouterr().out


def test_large_environment(harness: LauncherHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        monkeypatch.setenv(f"LARGE_{number}", "x" * 50_000)
    pid = harness.launch("returns")
    assert harness.death() == (pid, 0)


@pytest.mark.parametrize("limit", [1, 2, None])
def test_threads_of_numerical_libraries(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in thread_variables(1):
        monkeypatch.delenv(name, raising=False)
    with contextlib.closing(LauncherHarness(limit)) as harness:
        harness.launch("tells")
        reply = harness.receive()
    expected = len(os.sched_getaffinity(0)) if limit is None else limit
    assert reply["blas_threads"] == reply["threads"] - 1 == expected  # one thread sends stacks
    values = {reply["environ"].get(name) for name in thread_variables(1)}
    assert values == {None if limit is None else str(limit)}


# How it ends


def test_return_runs_exit_handlers_and_threads(harness: LauncherHarness) -> None:
    pid = harness.launch("returns", index=4)
    assert harness.receive() == {"thread": 4}
    assert harness.receive() == {"atexit": 4}
    assert harness.death() == (pid, 0)


def test_exception(harness: LauncherHarness, capfd: pytest.CaptureFixture[str]) -> None:
    pid = harness.launch("raises")
    assert harness.death() == (pid, 1)
    assert "ValueError: raised by the worker" in capfd.readouterr().err


@pytest.mark.parametrize(("target", "exitcode"), [("exits", 7), ("sys_exits", 5)])
def test_exit(harness: LauncherHarness, target: str, exitcode: int) -> None:
    pid = harness.launch(target)
    assert harness.death() == (pid, exitcode)
    assert ("in _exits\n" in harness.crash_report(pid)) == (target == "exits")  # `test_exit_stacks` has the rest
    assert bool(harness.crash_report(pid)) == (target == "exits")


def test_death_reported_with_the_launch(harness: LauncherHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent may be slow to read reports."""
    request = launching._Server.request

    def slow(*arguments: Any) -> None:
        request(*arguments)
        time.sleep(0.3)

    monkeypatch.setattr(launching._Server, "request", slow)
    pid = harness.launch("exits")
    assert harness.death() == (pid, 7)


@pytest.mark.parametrize("number", [SIGKILL, signal.SIGABRT])
def test_signal(harness: LauncherHarness, number: int) -> None:
    pid = harness.launch("waits")
    harness.receive()
    os.kill(pid, number)
    assert harness.death() == (pid, -number)
    assert harness.deaths() == []


def test_signal_that_this_process_ignores() -> None:
    """Ignored signals stay ignored in a new program, which the fork server is. A worker's children do not ignore it."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        harness = LauncherHarness()
    finally:
        signal.signal(signal.SIGTERM, previous)
    with contextlib.closing(harness):
        harness.launch("tells")
        assert harness.receive()["terminated"] == -signal.SIGTERM


def test_death_is_announced_at_once(harness: LauncherHarness) -> None:
    pid = harness.launch("waits")
    harness.receive()
    assert not harness.wake.try_take()
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert harness.wake.take(timeout=10)
    assert time.monotonic() - start < 1.0
    assert harness.deaths() == [(pid, -signal.SIGKILL)]


def test_every_death_is_reported_once(harness: LauncherHarness) -> None:
    pids = [harness.launch("waits", index) for index in range(5)]
    for pid in pids[:4]:
        harness.kill(pid)
    assert harness.wait_gone(pids, timeout=1.0) == {pids[4]}
    assert sorted(harness.deaths()) == sorted((pid, -signal.SIGKILL) for pid in pids[:4])
    assert harness.deaths() == []
    harness.kill(pids[4], signal.SIGABRT)
    assert harness.wait_gone(pids, timeout=5.0) == set()
    assert harness.deaths() == [(pids[4], -signal.SIGABRT)]
    harness.kill(pids[4])


def test_kill_right_after_launch(harness: LauncherHarness) -> None:
    for _ in range(10):
        pid = harness.launch("waits")
        harness.kill(pid)
        assert harness.death() == (pid, -signal.SIGKILL)


def test_wait_gone_timeout(harness: LauncherHarness) -> None:
    pid = harness.launch("waits")
    start = time.monotonic()
    assert harness.wait_gone([pid], timeout=0.2) == {pid}
    assert 0.2 <= time.monotonic() - start < 1.0
    assert harness.wait_gone([pid], timeout=0) == {pid}


def test_exception_of_a_signal_handler_is_not_a_server_failure(
    harness: LauncherHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's own `TimeoutError` is an OSError, too."""
    pid = harness.launch("waits")

    def interrupted(timeout: float) -> None:
        raise TimeoutError("my own")

    with monkeypatch.context() as patch:
        patch.setattr(harness.launcher._server, "reply", interrupted)
        with pytest.raises(TimeoutError, match="my own"):
            harness.deaths()
    assert harness.deaths() == []
    assert alive(pid)
    assert harness.launch("waits") != pid


# What does not start


def test_server_that_cannot_start(capfd: pytest.CaptureFixture[str]) -> None:
    block = Block()
    block.allocate(4096)
    launcher = Launcher(entry="no_such_module", wake=block, threads=1)
    with pytest.raises(RuntimeError, match=r"(?s)5 attempts.* exit code 1\n.*read the stderr of this program"):
        launcher.launch(0, [])
    launcher.close()
    assert capfd.readouterr().err.count("No module named 'no_such_module'") == 5


# Closing


def test_close_twice_and_use_afterwards(harness: LauncherHarness) -> None:
    pid = harness.launch("segfaults")
    harness.death()
    other = harness.launch("waits")
    harness.launcher.close()
    harness.launcher.close()
    assert all_gone(other)
    assert "Segmentation fault" in harness.crash_report(pid)
    assert harness.deaths() == []
    harness.kill(other)
    with pytest.raises(RuntimeError, match="closed"):
        harness.launch("waits")


def test_close_before_the_first_launch() -> None:
    block = Block()
    block.allocate(4096)
    Launcher(entry="helpers.launch_targets", wake=block, threads=1).close()


def test_close_by_another_thread_ends_a_launch(harness: LauncherHarness) -> None:
    harness.launch("waits")
    os.kill(server_of(harness.launcher), signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (server_of(harness.launcher), signal.SIGCONT))
    closer = threading.Timer(0.1, harness.launcher.close)
    timer.start()
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        harness.launch("waits")
    timer.join()
    closer.join()


@pytest.mark.parametrize("limit", [None, 1.0])
def test_stopped_server(
    limit: float | None,
    harness: LauncherHarness,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stopped fork server is continued; one that is frozen by other means raises an error that says so."""
    harness.launch("waits")
    harness.receive()
    server = server_of(harness.launcher)
    os.kill(server, signal.SIGSTOP)
    if limit is None:
        pid = harness.launch("waits")
        assert harness.receive()["ready"] == pid
        (record,) = caplog.records
        assert f"process {server}) was stopped" in record.getMessage()
        return
    monkeypatch.setattr("marl_parallel.backends.descendants.state_of", lambda pid: "D")
    monkeypatch.setattr("marl_parallel.backends.launching._ANSWERS_WITHIN_S", limit)
    with pytest.raises(RuntimeError, match=rf"fork server \(process {server}, state D\) did not answer .* within 1 s"):
        harness.launch("waits")
    os.kill(server, signal.SIGCONT)


def test_forked_child_touches_nothing(harness: LauncherHarness) -> None:
    worker = harness.launch("waits")
    harness.receive()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            harness.kill(worker)
            harness.launcher.close()
            harness.launcher.__del__()
            code = 0 if harness.deaths() == [] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert alive(worker)
    assert harness.deaths() == []
    other = harness.launch("waits")
    assert harness.receive()["ready"] == other


@pytest.mark.whole_machine
def test_nothing_leaks() -> None:
    def held() -> tuple[int, int, list[str]]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), os.listdir("/dev/shm")

    def cycle(number: int) -> None:
        harness = LauncherHarness()
        pids = [harness.launch("waits", index) for index in range(2)]
        if number % 2:
            harness.kill(pids[0])
            harness.death()
        harness.close()
        assert all_gone(*pids)

    cycle(0)
    before = held()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for number in range(6):
        cycle(number)
    assert held() == before
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children
