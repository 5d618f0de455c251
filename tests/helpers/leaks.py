"""What a process holds and what it has left where others see it: processes, threads, descriptors, memory, files."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import psutil


class Held(NamedTuple):
    """What this process has, and what it has put where others see it."""

    processes: set[int]
    threads: set[str]
    descriptors: list[str]
    mappings: int
    shared: set[str]
    temporary: set[str]

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        me = psutil.Process()
        return cls(
            {child.pid for child in me.children(recursive=True)},
            {thread.name for thread in threading.enumerate()},
            sorted(os.readlink(f"/proc/self/fd/{name}") for name in open_descriptors()),
            Path("/proc/self/maps").read_text().count("marl_parallel"),
            set(os.listdir("/dev/shm")),
            {name for name in os.listdir(tempfile.gettempdir()) if "marl" in name},
        )


def open_descriptors() -> list[str]:
    """Without the one by which the listing is read."""
    with os.scandir("/proc/self/fd") as entries:
        names = [entry.name for entry in entries]
    return [name for name in names if os.path.lexists(f"/proc/self/fd/{name}")]
