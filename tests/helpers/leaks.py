"""Resources of this process: processes, threads, descriptors, memory, files."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections import Counter
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
            # Installing the package beside the tests creates folders with other beginnings.
            {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("marl")},
        )

    def beyond(self, before: HeldResources) -> dict[str, object]:
        """What is held here that was not held before. What ended since then, such as a process, is no leak."""
        more: dict[str, object] = {
            "processes": self.processes - before.processes,
            "threads": self.threads - before.threads,
            "descriptors": Counter(self.descriptors) - Counter(before.descriptors),
            "mappings": max(0, self.mappings - before.mappings),
            "shared": self.shared - before.shared,
            "temporary": self.temporary - before.temporary,
        }
        return {name: what for name, what in more.items() if what}


def nothing_more(before: HeldResources, timeout: float = 10.0) -> None:
    """Fails unless everything beyond `before` is given back in time."""
    deadline = time.monotonic() + timeout
    while more := HeldResources.now().beyond(before):
        assert time.monotonic() < deadline, f"left behind: {more}"
        time.sleep(0.01)


def open_descriptors() -> list[str]:
    """Without the descriptor that reads the list."""
    with os.scandir("/proc/self/fd") as entries:
        names = [entry.name for entry in entries]
    return [name for name in names if os.path.lexists(f"/proc/self/fd/{name}")]
