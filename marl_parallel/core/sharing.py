"""How many CPUs there are to share, and which environments each worker gets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence


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


def span_of(env_ids: Sequence[int]) -> range | None:
    """The same environments as a range, where they are neighbours in ascending order.

    Example:
        >>> span_of((2, 3, 4)), span_of((4, 2))
        (range(2, 5), None)
    """
    if not env_ids:
        return None
    span = range(env_ids[0], env_ids[0] + len(env_ids))
    return span if [*span] == [*env_ids] else None
