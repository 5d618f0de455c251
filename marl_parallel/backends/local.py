"""Workers in this process: in the caller's own thread, or each in its own thread.

    SerialBackend   post() executes each request at once; wait() returns the replies
    ThreadBackend   post() --- a queue per worker ---> thread --- one queue ---> wait()

The serial backend is for debugging: breakpoints and Ctrl-C work as in a plain loop. Threads speed up simulators that
release the GIL, and all simulators in free-threaded builds of Python. A thread cannot be killed: one that hangs stays,
as a daemon.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from marl_parallel.core.backend import Backend, Capabilities
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.messages import Lost, Message, Reply, Request
from marl_parallel.core.reports.advice import naming_limits
from marl_parallel.core.worker.neighbours import Neighbours
from marl_parallel.core.worker.worker import Worker
from marl_parallel.core.worker_status import WorkerStatus

_LONGEST_WAIT_S = 1e8  # `SimpleQueue.get` overflows at larger timeouts
_IDLE_ENDS_WITHIN_S = 0.1  # a thread that has nothing to do


class _LocalBackend(Backend):
    own_thread = True  # whether each worker has one

    def __init__(self) -> None:
        from marl_parallel.backends.memory import Block  # `import marl_parallel` alone does not need it

        self._arrays = Block()
        self.block: mmap.mmap | None = None
        # Ctrl-C may come before `start` has set the rest.
        self.workers: list[Worker] = []

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        self.statuses = [WorkerStatus(bytearray(WorkerStatus.NBYTES)) for _ in shares]
        arrays, neighbours, in_line = self._arrays, Neighbours(), not self.own_thread
        self.workers = [
            Worker(status, lambda _: self.block, in_line=in_line, arrays=lambda: arrays.fd, neighbours=neighbours)
            for status in self.statuses
        ]

    @property
    def array_file(self) -> int | None:
        return self._arrays.fd

    @naming_limits()
    def allocate(self, nbytes: int, layout: Layout | None = None) -> Any:
        self.block = mmap.mmap(-1, nbytes)
        return self.block

    def end(self, worker: int) -> Sequence[Reply]:
        raise NotImplementedError("a worker in the caller's process cannot be killed")

    def start_worker(self, worker: int, share: Sequence[int], beside: int | None = None) -> None:
        self.end(worker)

    def stop(self, timeout: float) -> list[int]:
        self.abandon()
        return []

    def abandon(self) -> None:
        self.workers = []
        self.block = None
        self._arrays.close_fd()


class SerialBackend(_LocalBackend):
    """No parallelism, for debugging."""

    capabilities = Capabilities(
        enforces_timeouts=False, can_kill=False, side_by_side=False, shares_memory=True, pickles=False
    )
    own_thread = False

    def __init__(self) -> None:
        super().__init__()
        self._replies: list[tuple[int, Reply | Lost]] = []

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        super().start(shares, most_requests)
        self.in_line = range(len(shares))

    def simulators(self) -> dict[int, Any]:
        """By environment, the object that its constructor has returned."""
        return {env_id: one for worker in self.workers for env_id, one in worker.simulators().items()}

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        workers, replies = self.workers, self._replies  # a signal handler may close in the middle of it
        for worker, request in requests.items():

            def send(reply: Reply, worker: int = worker) -> None:
                replies.append((worker, reply))

            workers[worker].execute(request, send)

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        replies, self._replies = self._replies, []
        return replies

    def interrupt(self) -> None:
        """`wait` never waits."""

    def stack(self, worker: int, *, harmless: bool = False) -> str:
        return ""


class ThreadBackend(_LocalBackend):
    """One thread for each worker, a queue to each and one queue back."""

    capabilities = Capabilities(can_kill=False, shares_memory=True, can_isolate_rng=False, pickles=False)

    def __init__(self) -> None:
        super().__init__()
        self._requests: list[SimpleQueue[Request | None]] = []  # by worker
        self._replies: SimpleQueue[tuple[int, Reply | Lost] | None] = SimpleQueue()  # None: an interrupt
        self._threads: list[threading.Thread] = []

    @naming_limits()
    def start(self, shares: Sequence[range], most_requests: int) -> None:
        super().start(shares, most_requests)
        self._requests = [SimpleQueue() for _ in shares]
        self._threads = [
            threading.Thread(target=self._run, args=(index, worker), name=f"marl_parallel-{index}", daemon=True)
            for index, worker in enumerate(self.workers)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, worker: Worker) -> None:
        while (request := self._requests[index].get()) is not None:
            worker.execute(request, lambda reply: self._replies.put((index, reply)))
            if request.message is Message.CLOSE:
                return

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        for worker, request in requests.items():
            self._requests[worker].put(request)

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[tuple[int, Reply | Lost]] = []
        with contextlib.suppress(Empty):  # after the timeout, or when no more replies are there
            while True:
                remaining = None if deadline is None else min(max(deadline - time.monotonic(), 0.0), _LONGEST_WAIT_S)
                reply = self._replies.get(block=len(replies) < at_least, timeout=remaining)
                if reply is None:
                    break
                replies.append(reply)
        return replies

    def interrupt(self) -> None:
        self._replies.put(None)

    def stack(self, worker: int, *, harmless: bool = False) -> str:
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return ""  # without the GIL the thread runs on, and reading its frames may crash the interpreter
        frame = sys._current_frames().get(self._threads[worker].ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def stop(self, timeout: float) -> list[int]:
        deadline = time.monotonic() + timeout
        super().stop(timeout)
        for requests in self._requests:
            requests.put(None)
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), _IDLE_ENDS_WITHIN_S))
        return [index for index, thread in enumerate(self._threads) if thread.is_alive()]
