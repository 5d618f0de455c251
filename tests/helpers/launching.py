"""Helpers for the tests of launchers. The main functions of their workers are in `launch_targets`."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest

from helpers.processes import wait_for
from marl_parallel.backends.launching import Launcher, WorkerProcess
from marl_parallel.backends.memory import Block, Semaphore

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="these launchers are Linux's")


def opened_by_libffi(path: str) -> bool:
    """Whether an open file is libffi's own, which some builds of it open when ctypes is imported and keep open."""
    return os.path.basename(path).startswith("libffi")


class LauncherHarness:
    """A launcher, the semaphore it posts, and a pipe that workers write to."""

    def __init__(self, limit: int | None = 1) -> None:
        self.block = Block()
        self.wake = Semaphore(self.block.allocate(4096), 0)
        self.wake.init(0)
        self.launcher = Launcher(entry="helpers.launch_targets", wake=self.block, threads=limit)
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

    def wait_gone(self, pids: list[int], timeout: float) -> set[int]:
        processes = [self.process(pid) for pid in pids]
        return {process.pid for process in self.launcher.wait_gone(processes, timeout)}

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
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
