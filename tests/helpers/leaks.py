"""Resources of this process: processes, threads, descriptors, memory, files."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

import psutil


class HeldResources(NamedTuple):
    """The resources of this process, including files that others can see."""

    processes: set[int]
    threads: set[str]
    descriptors: list[str]
    mappings: int
    shared: set[str]
    temporary: set[str]

    @classmethod
    def now(cls) -> HeldResources:
        resource_tracker.ensure_running()  # the first worker starts it, and it stays
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
    """Without the descriptor that reads the list."""
    with os.scandir("/proc/self/fd") as entries:
        names = [entry.name for entry in entries]
    return [name for name in names if os.path.lexists(f"/proc/self/fd/{name}")]
