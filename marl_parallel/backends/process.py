"""Workers in processes of their own, woken by semaphores, with all that is hot in shared memory.

How a request goes and its reply comes::

    parent                          control block                     worker process
    post(STEP)  --- note, post --->  desk: asked   --- take, note --->  execute: actions and transitions
    wait()      <-- note, take ----  desk: done    <-- note, post ----    in the block of records
       ^                             bell: wake    <-- post, by the last one of a batch
       |
       +-- what is rare (constructors, infos, exceptions): over the worker's channel; the note says so

Who starts and ends the processes is `contexts.py`; what runs in them `process_worker.py`.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from marl_parallel.backends import control
from marl_parallel.backends.channel import Channel, Gone
from marl_parallel.backends.contexts import open_launcher
from marl_parallel.backends.launching import Launcher
from marl_parallel.backends.memory import Block, anonymous_file
from marl_parallel.backends.semaphores import available
from marl_parallel.runtime.backend import Backend
from marl_parallel.runtime.messages import Lost, Message, Reply, Request
from marl_parallel.runtime.sharing import usable_cpus

_TICK_S = 0.02
"""How often to look for deaths while waiting, should nobody be left to tell of them."""
_TERMINATED_WITHIN_S = 0.5
_ENTRY = "marl_parallel.backends.process_worker"


class ProcessBackend(Backend):
    """One process for each worker.

    Args:
        context: How processes start; None for the best that there is.
        threads: BLAS, OpenMP and torch threads in each; None leaves them alone.
    """

    def __init__(self, *, context: str | None = None, threads: int | None = 1) -> None:
        self._context, self._threads = context or "forkserver", threads
        self._launcher: Launcher | None = None
        self._channels: list[Channel] = []
        self._pids: list[int] = []
        self._before: list[deque[Request]] = []
        self._lost: dict[int, Lost] = {}
        self._interrupted = False
        self._records_fd = -1

    def start(self, num_workers: int) -> None:
        if not available():
            raise OSError(
                'backend="process" needs process-shared semaphores, which this platform lacks; '
                'use backend="thread" or "serial"'
            )
        self._board = Block.create(control.control_nbytes(num_workers))
        control.initialise(self._board.buffer, num_workers)
        self._desks = [control.Desk(self._board.buffer, worker) for worker in range(num_workers)]
        self._bell = control.Bell(self._board.buffer)
        self.ledgers = [desk.ledger for desk in self._desks]
        self._before = [deque() for _ in range(num_workers)]
        self._records_fd = anonymous_file("marl_parallel-records")
        self._launcher = open_launcher(
            self._context, entry=_ENTRY, wake=(self._board, control.WAKE), threads=self._threads
        )
        spin = num_workers <= usable_cpus()
        for worker in range(num_workers):
            ours, theirs = socket.socketpair()
            with theirs:
                self._channels.append(Channel(ours, alive=functools.partial(self._is_alive, worker)))
                fds = [theirs.fileno(), self._board.fd, self._records_fd]
                self._pids.append(self._launcher.launch(worker, fds))
            self._channels[worker].send(spin)

    def allocate(self, nbytes: int) -> Any:
        os.ftruncate(self._records_fd, nbytes)
        return Block(os.dup(self._records_fd), nbytes).buffer

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        alone = len(requests) == 1
        flag = control.TOGETHER if together and not alone else 0
        if flag:
            self._bell.set_countdown(len(requests) - 1)
        for worker, request in requests.items():
            self._before[worker].append(request)
            if worker in self._lost or self._launcher is None:
                self._bell.wake.post()
                continue
            note = _note_of(request)
            self._desks[worker].asked.put(note | flag)
            if note == control.MAIL:
                try:
                    self._channels[worker].send(request)
                except Gone:
                    continue  # `wait` finds out how it died

    def wait(self, timeout: float | None = None) -> list[tuple[int, Reply | Lost]]:
        if timeout is not None:
            return self._wait_until(time.monotonic() + timeout)
        # On this way every microsecond counts: until the parent sleeps, a worker lacks its CPU.
        while True:
            woken = self._bell.wake.nap(_TICK_S)
            replies = self._taken()
            if replies or self._interrupted:
                self._interrupted = False
                return replies
            if not woken:
                self._lost_now()

    def _wait_until(self, deadline: float) -> list[tuple[int, Reply | Lost]]:
        while True:
            replies = self._taken()
            patience = min(_TICK_S, deadline - time.monotonic())
            if replies or self._interrupted or patience <= 0:
                self._interrupted = False
                return replies
            if not self._bell.wake.take(patience):
                self._lost_now()

    def _taken(self) -> list[tuple[int, Reply | Lost]]:
        """Everything that has been done, and everybody who will not do anything any more."""
        replies: list[tuple[int, Reply | Lost]] = []
        for worker, before in enumerate(self._before):
            if not before:
                continue
            done = self._desks[worker].done
            while before and done.signal.try_take():
                if done.taken() == control.PLAIN:
                    replies.append((worker, Reply(*_DONE, before.popleft().env_ids, {}, {})))
                    continue
                try:
                    replies.append((worker, self._channels[worker].receive()))
                    before.popleft()
                except Gone:
                    self._await_death(worker)
                    break
            if before and worker in self._lost:
                before.clear()
                replies.append((worker, self._lost[worker]))
        return replies

    def _lost_now(self) -> Mapping[int, Lost]:
        """Who has died, brought up to date."""
        if self._launcher is not None:
            for pid, exitcode in self._launcher.deaths():
                if pid in self._pids:
                    worker = self._pids.index(pid)
                    self._lost[worker] = Lost(exitcode, self._launcher.crash_report(pid))
        return self._lost

    def _is_alive(self, worker: int) -> bool:
        return worker not in self._lost_now()

    def _await_death(self, worker: int) -> None:
        """It has hung up; give it a moment to be found dead, and see to it."""
        assert self._launcher is not None
        pid = self._pids[worker]
        if self._launcher.wait_gone([pid], 1.0):
            self._launcher.kill(pid)
            self._launcher.wait_gone([pid], 1.0)
        self._lost_now()
        self._lost.setdefault(worker, Lost(None, ""))

    def interrupt(self) -> None:
        self._interrupted = True
        if self._launcher is not None:
            self._bell.wake.post()

    def stack(self, worker: int) -> str:
        return self._launcher.stack(self._pids[worker]) if self._launcher is not None else ""

    def stop(self, timeout: float) -> list[int]:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            if launcher.wait_gone(self._pids, timeout):
                for pid in self._pids:
                    launcher.terminate(pid)
                launcher.wait_gone(self._pids, _TERMINATED_WITHIN_S)
            launcher.close()
            self._board.close_fd()
        self._forget()
        return []

    def _forget(self) -> None:
        for before in self._before:
            before.clear()
        for channel in self._channels:
            channel.close()
        self._channels = []
        if self._records_fd >= 0:
            os.close(self._records_fd)
            self._records_fd = -1

    def abandon(self) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.abandon()
        self._forget()


_DONE = (Message.RESULT, Message.STEP)


def _note_of(request: Request) -> int:
    """The note that says it all, or `MAIL`."""
    if request.message is not Message.STEP or request.payload is not None:
        return control.MAIL
    if request.env_ids is None:
        return control.STEP_ALL
    if len(request.env_ids) == 1:
        return control.STEP_ONE | request.env_ids[0] << control.ENV_SHIFT
    return control.MAIL
