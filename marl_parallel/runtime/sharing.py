"""How many CPUs there are to share, and which environments each worker gets."""

from __future__ import annotations

import os
from collections.abc import Iterable


def usable_cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_out(num_envs: int, num_workers: int) -> list[range]:
    """Which environments each worker has: neighbours, as evenly as can be.

    Example:
        >>> share_out(5, 2)
        [range(0, 3), range(3, 5)]
    """
    small, larger = divmod(num_envs, num_workers)
    sizes: Iterable[int] = (small + (worker < larger) for worker in range(num_workers))
    shares, start = [], 0
    for size in sizes:
        shares.append(range(start, start + size))
        start += size
    return shares
