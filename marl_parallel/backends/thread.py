"""Workers in threads of this process: worth it for simulators that release the interpreter's lock.

A thread cannot be killed: one that hangs is left behind, as a daemon, and `stop` says so.
"""

from __future__ import annotations

import mmap
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from marl_parallel.core.backend import Backend
from marl_parallel.core.columns import Layout
from marl_parallel.core.ledger import Ledger
from marl_parallel.core.messages import Lost, Message, Reply, Request
from marl_parallel.core.worker import Worker

_FOR_EVER_S = 1e8  # more than the system's clocks may take
_ENDS_WITHIN_S = 0.1  # a thread that has nothing to do


class ThreadBackend(Backend):
    """One thread for each worker, a queue to each and one queue back."""

    can_kill = False

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        self.ledgers = [Ledger(bytearray(Ledger.NBYTES)) for _ in shares]
        self._requests: list[SimpleQueue[Request | None]] = [SimpleQueue() for _ in shares]
        self._replies: SimpleQueue[tuple[int, Reply | Lost] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name=f"marl_parallel-{worker}", daemon=True)
            for worker in range(len(shares))
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        worker = Worker(self.ledgers[index], self._attach)

        def send(reply: Reply) -> None:
            self._replies.put((index, reply))

        while True:
            request = self._requests[index].get()
            if request is None:
                return
            worker.execute(request, send)
            if request.message is Message.CLOSE:
                return

    def allocate(self, layout: Layout) -> Any:
        self._block = mmap.mmap(-1, layout.nbytes)
        return self._block

    def _attach(self, layout: Layout) -> Any:
        return self._block

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        for worker, request in requests.items():
            self._requests[worker].put(request)

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[tuple[int, Reply | Lost]] = []
        try:
            while True:
                if len(replies) >= at_least:
                    reply = self._replies.get_nowait()
                else:
                    reply = self._replies.get(
                        timeout=None if deadline is None else min(max(deadline - time.monotonic(), 0.0), _FOR_EVER_S)
                    )
                if reply is None:  # an interrupt
                    return replies
                replies.append(reply)
        except Empty:
            return replies  # either the time is over or everything that was there has been taken

    def end(self, worker: int) -> Sequence[Reply]:
        raise NotImplementedError("a thread cannot be killed")

    def replace(self, worker: int) -> None:
        raise NotImplementedError("a thread cannot be killed")

    def interrupt(self) -> None:
        self._replies.put(None)

    def stack(self, worker: int) -> str:
        frame = sys._current_frames().get(self._threads[worker].ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def stop(self, timeout: float) -> list[int]:
        deadline = time.monotonic() + timeout
        for requests in self._requests:
            requests.put(None)
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), _ENDS_WITHIN_S))
        return [index for index, thread in enumerate(self._threads) if thread.is_alive()]

    def abandon(self) -> None:
        self._threads = []
