"""Helpers for the tests of launchers. The main functions of their workers are in `launch_targets`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import wait_for
from helpers.signals import SIGKILL
from marl_parallel.backends import launching
from marl_parallel.backends.descendants import state_of
from marl_parallel.backends.launching import Launcher, WorkerProcess
from marl_parallel.backends.memory import Block, Semaphore

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="these launchers are Linux's")


def opened_by_libffi(path: str) -> bool:
    """Whether an open file is libffi's own, which some builds of it open when ctypes is imported and keep open."""
    return os.path.basename(path).startswith("libffi")


class LauncherHarness:
    """A launcher, the semaphore it posts, and a pipe that workers write to."""

    def __init__(self, limit: int | None = 1, **arguments: Any) -> None:
        self.block = Block()
        self.wake = Semaphore(self.block.allocate(4096), 0)
        self.wake.init(0)
        self.launcher = Launcher(entry="helpers.launch_targets", wake=self.block, threads=limit, **arguments)
        self.processes: dict[int, WorkerProcess] = {}  # by process id; not those whose death was reported
        self.dead: dict[int, WorkerProcess] = {}
        read_end, self.write_end = os.pipe()
        self.pipe = os.fdopen(read_end)

    def launch(self, target: str, index: int = 0) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TARGET", target)
            process = self.launcher.launch(index, [self.write_end])
        self.dead.pop(process.pid, None)
        self.processes[process.pid] = process
        return process.pid

    def receive(self) -> Any:
        return json.loads(self.pipe.readline())

    def death(self) -> tuple[int, int]:
        """The next death, announced by the semaphore."""
        assert self.wake.take(timeout=10)
        return wait_for(self.deaths)[0]

    def deaths(self) -> list[tuple[int, int]]:
        """Process ids and exit codes of the workers that have died since the last call."""
        self.launcher.collect()
        dead = {pid: process for pid, process in self.processes.items() if process.exitcode is not None}
        self.processes = {pid: process for pid, process in self.processes.items() if pid not in dead}
        self.dead.update(dead)
        return [(pid, process.exitcode) for pid, process in dead.items() if process.exitcode is not None]

    def all_dead(self, pids: list[int]) -> bool:
        """Whether the deaths of all these workers have been reported."""
        self.deaths()
        return self.dead.keys() >= {*pids}

    def wait_gone(self, pids: list[int], timeout: float) -> set[int]:
        processes = [self.process(pid) for pid in pids]
        return {process.pid for process in self.launcher.wait_gone(processes, timeout)}

    def kill(self, pid: int, number: int = SIGKILL) -> None:
        self.launcher.kill(self.process(pid), number)

    def stack(self, pid: int, timeout: float = 1.0) -> str:
        return self.launcher.stack(self.process(pid), timeout)

    def crash_report(self, pid: int) -> str:
        return self.process(pid).crash_report

    def process(self, pid: int) -> WorkerProcess:
        return self.processes.get(pid) or self.dead[pid]

    def close(self) -> None:
        self.launcher.close()
        self.block.close_fd()
        self.pipe.close()
        os.close(self.write_end)


def server_of(launcher: Launcher) -> int:
    return launcher._server.pid  # type: ignore[union-attr]


# -- faults inside a request for a worker ------------------------------------------------------------------------------


def children_of(pid: int) -> set[int]:
    """The children that the main thread of a process has forked: of a fork server, its keepers."""
    return {*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())}


def send_and_wait(pid: int, number: int, states: str) -> None:
    """Send a signal to a process and wait until it is in one of these states."""
    os.kill(pid, number)
    wait_for(lambda: state_of(pid) in [*states, ""])


def _new_keeper(server: int, old: set[int]) -> int:
    return int(wait_for(lambda: children_of(server) - old).pop())


def _dying(server: Any, send: Callable[[], None]) -> None:
    os.kill(server.pid, signal.SIGKILL)
    send()


def _dead(server: Any, send: Callable[[], None]) -> None:
    send_and_wait(server.pid, signal.SIGKILL, "Z")
    send()


def _stopped_and_killed(server: Any, send: Callable[[], None]) -> None:
    send_and_wait(server.pid, signal.SIGSTOP, "T")
    send()
    os.kill(server.pid, signal.SIGKILL)


def _sent(server: Any, send: Callable[[], None]) -> None:
    send()
    send_and_wait(server.pid, signal.SIGKILL, "Z")


def _forked(server: Any, send: Callable[[], None]) -> None:
    """The keeper is stopped, most often before it has forked the worker."""
    old = children_of(server.pid)
    send()
    with contextlib.suppress(ProcessLookupError):
        os.kill(_new_keeper(server.pid, old), signal.SIGSTOP)
    send_and_wait(server.pid, signal.SIGKILL, "Z")


def _just_launched(server: Any, send: Callable[[], None]) -> None:
    """The launch may be read before the server has ended."""
    send()
    select.select([server._socket], [], [], 10.0)
    os.kill(server.pid, signal.SIGKILL)


def _launched(server: Any, send: Callable[[], None]) -> None:
    """The launch is reported, and not yet read."""
    send()
    select.select([server._socket], [], [], 10.0)
    send_and_wait(server.pid, signal.SIGKILL, "Z")


def _keeper_killed(server: Any, send: Callable[[], None]) -> None:
    """Only before it has forked the worker: the death of a worker is another fault."""
    old = children_of(server.pid)
    send()
    keeper = _new_keeper(server.pid, old)
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        send_and_wait(keeper, signal.SIGSTOP, "T")
        os.kill(keeper, signal.SIGCONT if children_of(keeper) else signal.SIGKILL)


def _keeper_stopped(server: Any, send: Callable[[], None]) -> None:
    old = children_of(server.pid)
    send()
    os.kill(_new_keeper(server.pid, old), signal.SIGSTOP)


SERVER_DEATHS = {
    "dying": _dying,
    "dead": _dead,
    "stopped-and-killed": _stopped_and_killed,
    "sent": _sent,
    "launched": _launched,
}
"""Moments inside a request at which the fork server is killed: always before the launch is known."""

OTHER_FAULTS = {
    "forked": _forked,
    "just-launched": _just_launched,
    "keeper-killed": _keeper_killed,
    "keeper-stopped": _keeper_stopped,
}


def inject(patch: pytest.MonkeyPatch, fault: str, requests: Collection[int] = (0,)) -> list[int]:
    """Inject one of these faults into requests, counted from now on; returns the servers of the requests so far."""
    request, numbers, servers = launching._Server.request, itertools.count(), []

    def faulty(server: Any, *arguments: Any) -> None:
        servers.append(server.pid)

        def send() -> None:
            request(server, *arguments)

        if next(numbers) in requests:
            {**SERVER_DEATHS, **OTHER_FAULTS}[fault](server, send)
        else:
            send()

    patch.setattr(launching._Server, "request", faulty)
    return servers
