"""Liveness of processes, and waiting for their end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_gone(*pids: int) -> bool:
    return not any(alive(pid) for pid in pids)


def gone(pids: Iterable[int], seconds: float = 5.0) -> bool:
    """Whether all these processes end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all_gone(*pids):
            return True
        time.sleep(0.02)
    return False


def wait_for(condition: Callable[[], Any], timeout: float = 10.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.001)
    return value


def workers(notes: Path) -> set[int]:
    """The other processes in which environments of `failing` were started with these notes: complete files only."""
    return {int(path.read_text()) for path in notes.glob("started-*")} - {os.getpid()}
