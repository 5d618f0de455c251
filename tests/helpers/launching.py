"""Helpers for the tests of launchers. The main functions of their workers are in `launch_targets`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from helpers.processes import wait_for
from marl_parallel.backends.launching import Launcher
from marl_parallel.backends.memory import Block, Semaphore

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="these launchers are Linux's")


class LauncherHarness:
    """A launcher, the semaphore it posts, and a pipe that workers write to."""

    def __init__(self, context: str, limit: int | None = 1) -> None:
        block = Block.create(4096)
        self.wake = Semaphore(block.buffer, 64)
        self.wake.init(0)
        self.launcher = Launcher(context, entry="helpers.launch_targets", wake=(block, 64), threads=limit)
        self.block = block
        read_end, self.write_end = os.pipe()
        self.pipe = os.fdopen(read_end)

    def launch(self, target: str, index: int = 0) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TARGET", target)
            return self.launcher.launch(index, [self.write_end])

    def receive(self) -> Any:
        return json.loads(self.pipe.readline())

    def death(self) -> tuple[int, int]:
        """The next death, announced by the semaphore."""
        assert self.wake.take(timeout=10)
        return wait_for(self.launcher.deaths)[0]

    def close(self) -> None:
        self.launcher.close()
        self.block.close_fd()
        self.pipe.close()
        os.close(self.write_end)


def server_of(launcher: Launcher) -> int:
    return launcher._server._process.pid  # type: ignore[attr-defined]
