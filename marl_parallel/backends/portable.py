"""Workers in processes of their own by nothing but the standard library: for macOS, Windows and the like.

How a request goes and its reply comes::

    parent                                                     worker process
    post()  ---- pickled, over its standard input ---------->   a thread takes it in; its end is the parent's end
    wait()  <--- pickled, over a connection -----------------   execute: actions and transitions in named memory

What is weaker here than in `process.py`, which needs Linux:

- Each request and reply is pickled and sent, which costs some 200 us more a batch; nobody tries before it sleeps.
- A worker starts as a fresh interpreter, which takes some tenths of a second and memory of its own.
- That the parent has gone is noticed by a thread of the worker, which does not run while a simulator holds the
  interpreter's lock or the process is stopped. Deaths of workers are looked for every 20 ms.
- Of what a simulator has started, only its process group is ended with it; what has left the group stays. On Windows
  there is no such group: the simulator's own processes stay.
- Memory lives in an unlinked file in the folder for temporary files, except on Windows, where it has no file.
- Windows: no stack of a worker that hangs, and the folder with the crash reports stays if the parent is killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe, connection
from typing import TYPE_CHECKING, Any

from marl_parallel.backends import descriptors, portable_ends
from marl_parallel.backends.portable_process import KILL, PortableProcess, await_ends
from marl_parallel.core import reports
from marl_parallel.core.backend import Backend
from marl_parallel.core.columns import Layout
from marl_parallel.core.ledger import Ledger
from marl_parallel.core.messages import Lost, Message, Reply, Request
from marl_parallel.core.reports import logger

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_TICK_S = 0.02
_REST_TICK_S = 0.001
_STARTED_WITHIN_S = 60.0
_TERMINATED_WITHIN_S = 0.5
_KILLED_WITHIN_S = 5.0
_LONGEST_FOLDER = 80
"""Addresses of sockets may not be longer than about 100 characters."""


class PortableProcessBackend(Backend):
    """One process for each worker.

    Args:
        threads: BLAS, OpenMP and torch threads in each; None leaves them alone.
    """

    def __init__(self, *, threads: int | None = 1) -> None:
        self._threads = threads
        self._workers: list[PortableProcess] = []
        self._memory: list[portable_ends.NamedMemory] = []
        self._ears: list[Connection] = []
        self._before: list[deque[Message]] = []
        self._lost: dict[int, Lost] = {}
        self._looked = 0.0  # when deaths were last looked for
        self._folder = ""

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        self._shares = shares
        self._before = [deque() for _ in shares]
        self._lost = dict.fromkeys(range(len(shares)), Lost(None, ""))  # until they are there
        try:
            self._start(len(shares))
        except BaseException:
            self.stop(0.0)
            raise

    def _start(self, num_workers: int) -> None:
        descriptors.fill_standard()  # else what is opened here may get the numbers of closed standard streams
        self._ears = [*Pipe(duplex=False)]
        self._folder = _new_folder()
        for name in ("board", "records"):
            self._memory.append(portable_ends.NamedMemory(self._folder, name))
        self._board = board = memoryview(self._memory[0].map(num_workers * Ledger.NBYTES))
        self.ledgers = [Ledger(board[worker * Ledger.NBYTES :]) for worker in range(num_workers)]
        for worker in range(num_workers):
            self._workers.append(self._new_process(worker, num_workers))
        deadline = time.monotonic() + _STARTED_WITHIN_S
        for worker in range(num_workers):
            self._workers[worker].connect(deadline)
            del self._lost[worker]
        if sys.platform != "win32":
            self._remove_folder()  # everybody has opened what is in it

    def _new_process(self, worker: int, num_workers: int, memory: tuple[int, int] | None = None) -> PortableProcess:
        key, argv = secrets.token_bytes(32), list(getattr(sys, "argv", []))
        start = portable_ends.Start(worker, num_workers, self._folder, key, argv, memory)
        return PortableProcess(start, self._threads)

    def end(self, worker: int) -> list[Reply]:
        if not self._workers:
            return []  # closed meanwhile by a signal handler
        self._workers[worker].signal(KILL)
        await_ends([self._workers[worker]], _KILLED_WITHIN_S)
        return [reply for _, reply in self._taken_from(worker) if type(reply) is Reply]

    def replace(self, worker: int) -> None:
        if not self._workers:
            return
        descriptors.fill_standard()
        old = self._workers[worker]
        old.signal(KILL)
        await_ends([old], _KILLED_WITHIN_S)
        old.let_go()
        self._before[worker].clear()
        place = worker * Ledger.NBYTES
        self._board[place : place + Ledger.NBYTES] = bytes(Ledger.NBYTES)
        self.ledgers[worker] = Ledger(self._board[place:])
        self._lost[worker] = Lost(None, "")  # until it is there
        memory = None
        if sys.platform != "win32":
            # What had a name has none any more: it is inherited.
            self._folder = _new_folder()
            memory = self._memory[0].fd, self._memory[1].fd
        try:
            self._workers[worker] = self._new_process(worker, len(self._workers), memory)
            self._workers[worker].connect(time.monotonic() + _STARTED_WITHIN_S)
            del self._lost[worker]
        except RuntimeError:  # it has died already, as the one before
            self._lost[worker] = self._workers[worker].buried()
        finally:
            if sys.platform != "win32":
                self._remove_folder()

    def allocate(self, layout: Layout) -> Any:
        return self._memory[1].map(layout.nbytes)

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        for worker, request in requests.items():
            self._before[worker].append(request.message)
            if worker not in self._lost:
                self._workers[worker].send(request)

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        deadline = None if timeout is None else time.monotonic() + timeout
        interrupted = False
        replies: list[tuple[int, Reply | Lost]] = []
        while True:
            replies += self._taken()
            if len(replies) >= at_least or interrupted or any(type(reply) is Lost for _, reply in replies):
                return replies
            tick = _TICK_S if not any(worker.unsent for worker in self._workers) else _REST_TICK_S
            if deadline is not None:
                tick = min(tick, deadline - time.monotonic())
            if tick <= 0 or not self._ears:  # a signal handler may have closed meanwhile
                return replies
            busy = [worker for worker, before in enumerate(self._before) if before]
            ready = connection.wait([self._ears[0], *(self._workers[worker].connection for worker in busy)], tick)
            if self._ears[0] in ready:
                self._ears[0].recv_bytes()
                interrupted = True

    def _taken(self) -> list[tuple[int, Reply | Lost]]:
        """Everything that has been done, and everybody who will not do anything any more."""
        replies: list[tuple[int, Reply | Lost]] = []
        now = time.monotonic()
        look = now - self._looked >= _TICK_S  # also while others have so much to say that there is never a pause
        if look:
            self._looked = now
        for worker in range(len(self._before)):
            replies += self._taken_from(worker, look=look)
        return replies

    def _taken_from(self, worker: int, *, look: bool = False) -> list[tuple[int, Reply | Lost]]:
        """Of one worker."""
        replies: list[tuple[int, Reply | Lost]] = []
        before = self._before[worker]
        try:
            if before and worker not in self._lost and self._workers[worker].unsent:
                self._workers[worker].flush()
            while before and worker not in self._lost:
                reply: Reply | None = self._workers[worker].receive_now()
                if reply is None:
                    break
                replies.append((worker, reply))
                if reply.last:
                    before.popleft()
        except (EOFError, OSError):
            self._lost[worker] = self._workers[worker].buried()
        if look and before and worker not in self._lost:
            self._look_at(worker)
        if before and worker in self._lost:
            before.clear()
            replies.append((worker, self._lost[worker]))
        return replies

    def _look_at(self, worker: int) -> None:
        """Its connection may be held open by what it has forked; but what it said before it died comes first."""
        process = self._workers[worker]
        if process.exitcode() is not None and not process.connection.poll():
            self._lost[worker] = process.buried()

    def interrupt(self) -> None:
        if self._ears:
            self._ears[1].send_bytes(b"!")

    def stack(self, worker: int) -> str:
        return self._workers[worker].stack() if worker not in self._lost else ""

    def stop(self, timeout: float) -> list[int]:
        workers, self._workers = self._workers, []
        self._lost = dict.fromkeys(range(len(self._before)), Lost(None, ""))
        try:
            with contextlib.ExitStack() as at_last:  # also after a second Ctrl-C
                at_last.callback(_signalled, workers, KILL, _KILLED_WITHIN_S)
                await_ends(workers, timeout)
                if timeout >= reports.WARNS_AFTER_S:
                    for index, worker in enumerate(workers):
                        if worker.exitcode() is None:
                            text = reports.still_running(index, self._shares[index], timeout, worker.stack())
                            logger.warning("%s", text)
                _signalled(workers, signal.SIGTERM, _TERMINATED_WITHIN_S)
            return [index for index, worker in enumerate(workers) if worker.exitcode() is None]
        finally:
            for worker in workers:
                worker.let_go()
            self._let_go()
            self._remove_folder()

    def abandon(self) -> None:
        # The copies of the pipes are the point: a worker takes their end for its parent's.
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.let_go()
        self._let_go()

    def _let_go(self) -> None:
        for memory in self._memory:
            memory.close()
        for ear in self._ears:
            ear.close()
        self._memory, self._ears = [], []

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, ""
        if folder:
            # On Windows a file that somebody still has open cannot go; better it stays than an error in `close`.
            shutil.rmtree(folder, ignore_errors=True)


def _signalled(workers: Sequence[PortableProcess], number: int, patience: float) -> None:
    """Send all of them a signal, and give them time to end."""
    for worker in workers:
        worker.signal(number)
    await_ends(workers, patience)


def _new_folder() -> str:
    parent_folder = "/tmp" if len(tempfile.gettempdir()) > _LONGEST_FOLDER and os.path.isdir("/tmp") else None
    return tempfile.mkdtemp(prefix="marl_parallel-", dir=parent_folder)
