"""`Backend`: a place for workers to live, and a way for requests and replies.

A backend carries; it never looks into what it carries, and knows nothing of environments. Whoever adds a place for
workers to live (another machine, another kind of process) writes one subclass.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from marl_parallel.core.columns import Layout
from marl_parallel.core.ledger import Ledger
from marl_parallel.core.messages import Lost, Reply, Request


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
    bounds = [worker * small + min(worker, larger) for worker in range(num_workers + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


class Backend(ABC):
    """Workers, numbered from 0, and the way to them. Used by one `ParallelEnv`, once.

    Attributes:
        ledgers: What each worker is doing and has done; readable at any time, after `look` where it is to be now.
        enforces_timeouts: Whether `wait` returns while a worker is busy, so that timeouts can be seen to pass.
        can_kill: Whether `stop` ends workers, and what they have started, whatever they are doing.
        side_by_side: Whether workers want a CPU each.
    """

    enforces_timeouts: ClassVar[bool] = True
    can_kill: ClassVar[bool] = True
    side_by_side: ClassVar[bool] = True
    _claimed = False

    def claim(self) -> None:
        """Take it into use, once.

        Raises:
            ValueError: Somebody has.
        """
        if self._claimed:
            raise ValueError("a backend serves one ParallelEnv, once; make a new one for each")
        self._claimed = True

    ledgers: list[Ledger]

    def capacity(self) -> int:
        """How many workers can run side by side; asked before `start`."""
        return usable_cpus()

    @abstractmethod
    def start(self, shares: Sequence[range], most_requests: int) -> None:
        """Start the workers; need not wait until they are up.

        Args:
            shares: The environments of each worker.
            most_requests: How many requests and replies there will be at most before one worker, or from it.
        """

    @abstractmethod
    def allocate(self, layout: Layout) -> Any:
        """Make the block that all workers will attach to; called once, before the first request that uses it.

        Args:
            layout: What will lie in it, and so its size.

        Returns:
            Zeroed, writable memory. It stays readable for as long as anything refers to it, also after `stop`.
        """

    @abstractmethod
    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        """Hand one request each to some of the workers; returns at once where the backend can.

        A worker may have several requests before it; it takes them in order. One that is gone gets nothing, and
        `wait` reports it as `Lost`.

        Args:
            requests: By worker.
            together: The caller will not look at any reply before it has all of these, so that it need be woken
                only once.
        """

    @abstractmethod
    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        """Wait for replies, and take all that are there.

        Args:
            timeout: In seconds; None waits for as long as it takes, or until `interrupt`.
            at_least: How many to wait for.

        Returns:
            Workers with their replies, in the order of each worker's requests; fewer than `at_least` when the time is
            over, after `interrupt`, or where somebody has died. A worker that died with requests before it is
            reported once, as `Lost`.
        """

    @abstractmethod
    def end(self, worker: int) -> Sequence[Reply]:
        """End a worker that is to be replaced, whatever it is doing: what it has written changes no more.

        For backends that `can_kill`.

        Returns:
            What it has said and `wait` has not returned.
        """

    @abstractmethod
    def replace(self, worker: int) -> None:
        """Start a fresh worker, with a ledger of its own, in the place of one that was ended or is lost.

        What had been asked of the old one is forgotten. For backends that `can_kill`.
        """

    def look(self) -> None:
        """Bring the ledgers up to date; nothing is to be done where they lie in shared memory."""
        return

    def ahead(self, worker: int) -> float:
        """Seconds that this clock is ahead of a worker's; 0 where they are the same."""
        return 0.0

    @abstractmethod
    def interrupt(self) -> None:
        """Make a `wait` in another thread return soon, with whatever is there."""

    @abstractmethod
    def stack(self, worker: int) -> str:
        """The Python stack of a worker as it is right now, empty where it cannot be had."""

    @abstractmethod
    def stop(self, timeout: float) -> list[int]:
        """End all workers and free everything but memory that is still referred to. Idempotent.

        Those that have carried out a CLOSE end by themselves; the others are made to, where the backend can.

        Args:
            timeout: Seconds that workers which are about to end are given.

        Returns:
            The workers that could not be ended.
        """

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child of the owner: forget everything, and touch nothing that the owner still uses."""
