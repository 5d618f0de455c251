"""Fork servers and keepers that die or are stopped, also while they start a worker."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time

import pytest
from helpers.launching import (
    SERVER_DEATHS,
    LauncherHarness,
    children_of,
    inject,
    linux_only,
    send_and_wait,
    server_of,
)
from helpers.leaks import open_descriptors
from helpers.processes import alive, all_gone, wait_for
from helpers.signals import number_of

from marl_parallel.backends import launching
from marl_parallel.backends.descendants import state_of

pytestmark = [pytest.mark.release_independent, linux_only]

starts_anew = pytest.mark.starts_anew  # where processes are found by the variable that `/proc` shows
SERVER_FAULTS = [*SERVER_DEATHS, pytest.param("forked", marks=starts_anew)]
KEEPER_FAULTS = ["keeper-killed", "keeper-stopped"]


@pytest.mark.parametrize("fault", [*SERVER_FAULTS, *KEEPER_FAULTS])
@pytest.mark.parametrize("others", [0, 1])
def test_fault_inside_a_request(
    others: int, fault: str, harness: LauncherHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker is started by another server, once. Keepers of other workers hold the socket of a dead server open."""
    if not others:
        harness.kill(harness.launch("waits"))  # the server has loaded its libraries
        harness.death()
    older = [harness.launch("waits", index) for index in range(others)]
    for pid in older:
        assert harness.receive()["ready"] == pid
    gc.collect()  # what other tests have left in cycles
    first, descriptors = server_of(harness.launcher), len(open_descriptors())
    servers = inject(monkeypatch, fault)
    pid = harness.launch("waits", 7)
    while (ready := harness.receive()["ready"]) != pid:
        wait_for(lambda pid=ready: all_gone(pid))  # of the attempt that failed
    wait_for(lambda: len(children_of(server_of(harness.launcher))) == 1 + (others if fault in KEEPER_FAULTS else 0))
    assert alive(pid)
    if fault in KEEPER_FAULTS:
        assert {*servers} == {first}
        assert harness.deaths() == []
    else:
        assert all_gone(first, *older)
        wait_for(lambda: harness.all_dead(older))
        for old in older:
            assert harness.process(old).exitcode == -signal.SIGKILL
            assert harness.process(old).server == (first, -signal.SIGKILL)
    if fault not in KEEPER_FAULTS:
        assert f"fork server (process {first}) ended: SIGKILL" in caplog.text
    alive_now = 1 + (others if fault in KEEPER_FAULTS else 0)
    assert len(open_descriptors()) == descriptors + 2 * (alive_now - others)  # a file and a connection for each worker
    harness.kill(pid)
    wait_for(lambda: harness.all_dead([pid]))
    assert harness.process(pid).server is None


@pytest.mark.parametrize("fault", ["dying", "stopped-and-killed", "launched"])
def test_servers_that_die_again(fault: str, harness: LauncherHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.launch("waits")
    with monkeypatch.context() as patch:
        servers = inject(patch, fault, range(2))
        pid = harness.launch("waits")
        assert len({*servers}) == len(servers) == 3
    assert alive(pid)
    descriptors = len(open_descriptors())
    with monkeypatch.context() as patch:
        servers = inject(patch, fault, range(100))
        with pytest.raises(RuntimeError, match=r"5 attempts.* fork server \(process \d+\) ended: SIGKILL") as caught:
            harness.launch("waits")
        assert f"process {servers[-1]})" in str(caught.value)
        assert "dmesg" in str(caught.value)
    assert len({*servers}) == len(servers) == 5
    assert all_gone(pid, *servers)
    assert len(open_descriptors()) < descriptors
    fresh = harness.launch("waits")
    assert alive(fresh)


@pytest.mark.parametrize("number", [*map(number_of, ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS"])], ids=str)
@pytest.mark.parametrize("keepers", ["run", pytest.param("are stopped", marks=starts_anew)])
def test_lost_server(keepers: str, number: int, harness: LauncherHarness) -> None:
    """Its workers are reported with it, each once, however early keepers report deaths; other deaths are not."""
    pids = [harness.launch("waits", index) for index in range(3)]
    harness.kill(pids[0])
    harness.death()
    server = server_of(harness.launcher)
    if keepers == "are stopped":
        wait_for(lambda: len(children_of(server)) == 2)
        for keeper in children_of(server):
            send_and_wait(keeper, signal.SIGSTOP, "T")
    else:
        harness.wake.init(0)
        os.kill(pids[1], signal.SIGABRT)
        assert harness.wake.take(timeout=10)
    began = time.monotonic()
    os.kill(server, number)
    wait_for(lambda: harness.all_dead(pids))
    assert time.monotonic() - began < launching.server.CLEARED_WITHIN_S  # long before keepers are given up
    assert harness.process(pids[0]).server is None
    assert harness.process(pids[2]).server == (server, -number)
    assert harness.process(pids[2]).exitcode == -signal.SIGKILL
    if keepers == "run":
        assert harness.process(pids[1]).exitcode == -signal.SIGABRT
        assert harness.process(pids[1]).server is None


def test_lost_server_of_a_program_that_ignores_sigchld(harness: LauncherHarness) -> None:
    """The kernel reaps the server, so nobody knows how it ended."""
    pids = [harness.launch("waits", index) for index in range(2)]
    server = server_of(harness.launcher)
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        os.kill(server, signal.SIGKILL)
        wait_for(lambda: harness.all_dead(pids))
    finally:
        signal.signal(signal.SIGCHLD, previous)
    assert [harness.process(pid).server for pid in pids] == [(server, None)] * 2
    assert alive(harness.launch("waits"))


@pytest.mark.parametrize("server_too", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_stopped_keeper_of_a_dead_worker(
    times: int, server_too: bool, harness: LauncherHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """It is continued, however often it was stopped."""
    pids = [harness.launch("waits", index) for index in range(times)]
    server = server_of(harness.launcher)
    keepers = [*children_of(server)]
    if server_too:
        send_and_wait(server, signal.SIGSTOP, "T")
    for pid, keeper in zip(pids, sorted(keepers), strict=True):
        send_and_wait(keeper, signal.SIGSTOP, "T")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: harness.deaths() == [(pid, -signal.SIGKILL)])  # noqa: B023
        assert f"keeper (process {keeper}) was stopped" in caplog.text
    assert len(caplog.records) == times + server_too


def test_keeper_that_is_stopped_again(harness: LauncherHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = harness.launch("waits")
    (keeper,) = children_of(server_of(harness.launcher))
    continue_stopped, left = launching._Server.continue_stopped, [2]

    def stop_again(server: launching._Server) -> None:
        continue_stopped(server)
        if left[0]:
            left[0] -= 1
            with contextlib.suppress(ProcessLookupError):  # it has reported the death, and ended
                os.kill(keeper, signal.SIGSTOP)

    monkeypatch.setattr(launching._Server, "continue_stopped", stop_again)
    send_and_wait(keeper, signal.SIGSTOP, "T")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: harness.deaths() == [(pid, -signal.SIGKILL)])


@starts_anew
def test_keepers_of_living_workers_stay_stopped(
    harness: LauncherHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness.launch("waits")
    (keeper,) = children_of(server_of(harness.launcher))
    send_and_wait(keeper, signal.SIGSTOP, "T")
    monkeypatch.setattr(launching, "_CHECK_EVERY_S", 0.0)
    assert harness.deaths() == []
    assert caplog.records == []
    assert state_of(keeper) == "T"


def test_killed_keeper_of_a_stopped_server(harness: LauncherHarness, caplog: pytest.LogCaptureFixture) -> None:
    """Only the server can report it."""
    pid = harness.launch("waits")
    server = server_of(harness.launcher)
    (keeper,) = children_of(server)
    send_and_wait(server, signal.SIGSTOP, "T")
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: harness.deaths() == [(pid, -signal.SIGKILL)])
    assert f"fork server (process {server}) was stopped" in caplog.text


@starts_anew
@pytest.mark.parametrize("stopped", ["keeper", "keeper and worker", "all"])
def test_wait_and_close_with_stopped_processes(stopped: str, harness: LauncherHarness) -> None:
    pids = [harness.launch("waits", index) for index in range(2)]
    server = server_of(harness.launcher)
    keepers = [*children_of(server)]
    for pid in [*keepers, *(pids if stopped != "keeper" else []), *([server] if stopped == "all" else [])]:
        send_and_wait(pid, signal.SIGSTOP, "T")
    harness.kill(pids[0])
    assert harness.wait_gone([pids[0]], timeout=5.0) == set()
    began = time.monotonic()
    harness.launcher.close()
    assert time.monotonic() - began < launching.server.CLEARED_WITHIN_S
    wait_for(lambda: all_gone(server, *keepers, *pids))


def test_server_killed_right_after_a_launch(harness: LauncherHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server has started the worker, or the worker is reported as lost with its server."""
    first = harness.launch("waits")
    server = server_of(harness.launcher)
    inject(monkeypatch, "just-launched")
    pid = harness.launch("waits")
    wait_for(lambda: harness.all_dead([first]))
    if server_of_worker := harness.process(pid).server:
        assert server_of_worker == (server, -signal.SIGKILL)
        pid = harness.launch("waits")
    assert alive(pid)
    assert len(children_of(server_of(harness.launcher))) == 1
