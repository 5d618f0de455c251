"""Workers in line: every request is carried out where it is posted, by the caller's own thread.

The backend to debug with: breakpoints work, and a Ctrl-C is the caller's.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

from marl_parallel.core.backend import Backend
from marl_parallel.core.columns import Layout
from marl_parallel.core.ledger import Ledger
from marl_parallel.core.messages import Lost, Reply, Request
from marl_parallel.core.worker import Worker


class SerialBackend(Backend):
    """No parallelism at all, with the same meaning as all the others."""

    enforces_timeouts = False
    can_kill = False
    side_by_side = False

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        self.ledgers = [Ledger(bytearray(Ledger.NBYTES)) for _ in shares]
        self._workers = [Worker(ledger, self._attach, in_line=True) for ledger in self.ledgers]
        self._replies: list[tuple[int, Reply | Lost]] = []

    def allocate(self, layout: Layout) -> Any:
        self._block = mmap.mmap(-1, layout.nbytes)
        return self._block

    def _attach(self, layout: Layout) -> Any:
        return self._block

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        workers, replies = self._workers, self._replies  # a signal handler may close in the middle of it
        for worker, request in requests.items():

            def send(reply: Reply, worker: int = worker) -> None:
                replies.append((worker, reply))

            workers[worker].execute(request, send)

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        replies, self._replies = self._replies, []
        return replies

    def end(self, worker: int) -> Sequence[Reply]:
        raise NotImplementedError("a worker in line is the caller itself")

    def replace(self, worker: int) -> None:
        raise NotImplementedError("a worker in line is the caller itself")

    def interrupt(self) -> None:
        """Nothing ever waits."""

    def stack(self, worker: int) -> str:
        return ""

    def stop(self, timeout: float) -> list[int]:
        self._workers = []
        return []

    def abandon(self) -> None:
        self._workers = []
