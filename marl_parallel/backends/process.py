"""Workers in processes of their own, woken by semaphores, with all that is hot in shared memory.

How a request goes and its reply comes::

    parent                          control block                     worker process
    post(STEP)  --- note, post --->  desk: asked   --- take, note --->  execute: actions and transitions
    wait()      <-- note, take ----  desk: done    <-- note, post ----    in the block of records
       ^                             bell: wake    <-- post, by the last one of a batch
       |
       +-- what is rare (constructors, infos, exceptions): over the worker's channel; the note says so

Who starts and ends the processes is `launching.py`; what runs in them `process_worker.py`.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from marl_parallel.backends import control
from marl_parallel.backends.channel import Channel, Gone
from marl_parallel.backends.launching import Launcher, open_launcher
from marl_parallel.backends.memory import Block, anonymous_file, duplicate, socket_pair
from marl_parallel.backends.semaphores import available
from marl_parallel.core import reports
from marl_parallel.core.backend import Backend, usable_cpus
from marl_parallel.core.columns import Layout, span_of
from marl_parallel.core.messages import STEP_ALL, STEP_ALL_PROMPTLY, STEPPED, Lost, Message, Reply, Request
from marl_parallel.core.reports import logger

_TICK_S = 0.02
"""How often to look for deaths while waiting, should nobody be left to tell of them."""
_REST_TICK_MS = 1.0
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
        self._half_read: dict[int, int] = {}  # by worker, the note of a message of which only a part has come
        self._armed = False
        self._lost: dict[int, Lost] = {}
        self._looked = 0.0  # when deaths were last looked for
        self._interrupted = False
        self._records_fd = -1

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        if not available():
            raise OSError(
                'backend="process" needs process-shared semaphores, which this platform lacks; '
                'use backend="thread" or "serial"'
            )
        num_workers, self._shares = len(shares), shares
        self._board = Block.create(control.control_nbytes(num_workers, most_requests))
        control.initialise(self._board.buffer, num_workers, most_requests)
        self._capacity = most_requests
        self._desks = [control.Desk(self._board.buffer, worker, most_requests) for worker in range(num_workers)]
        self._bell = control.Bell(self._board.buffer)
        self.ledgers = [desk.ledger for desk in self._desks]
        self._before = [deque() for _ in range(num_workers)]
        self._records_fd = anonymous_file("marl_parallel-records")
        self._launcher = open_launcher(
            self._context, entry=_ENTRY, wake=(self._board, control.WAKE), threads=self._threads
        )
        self._spin = num_workers <= usable_cpus()
        for worker in range(num_workers):
            channel, pid = self._launch(worker)
            self._channels.append(channel)
            self._pids.append(pid)

    def _launch(self, worker: int) -> tuple[Channel, int]:
        assert self._launcher is not None
        ours, theirs = socket_pair()
        channel = Channel(ours)
        try:
            with theirs:
                pid = self._launcher.launch(worker, [theirs.fileno(), self._board.fd, self._records_fd])
            channel.put((self._spin, self._capacity))
        except BaseException:
            channel.close()
            raise
        return channel, pid

    def end(self, worker: int) -> list[Reply]:
        if self._launcher is None:
            return []  # closed meanwhile by a signal handler
        self._await_death(worker, patience=0.0)
        return [reply for _, reply in self._taken_from(worker) if type(reply) is Reply]

    def replace(self, worker: int) -> None:
        if self._launcher is None:
            return
        self._await_death(worker, patience=0.0)
        self._before[worker].clear()
        self._half_read.pop(worker, None)
        self._channels[worker].close()
        control.clear_desk(self._board.buffer, worker, self._capacity)
        self._desks[worker] = control.Desk(self._board.buffer, worker, self._capacity)
        self.ledgers[worker] = self._desks[worker].ledger
        del self._lost[worker]
        self._channels[worker], self._pids[worker] = self._launch(worker)

    def allocate(self, layout: Layout) -> Any:
        os.ftruncate(self._records_fd, layout.nbytes)
        return Block(duplicate(self._records_fd), layout.nbytes).buffer

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        self._armed = together
        if together:
            self._bell.set_countdown(len(requests) - 1)
        for worker, request in requests.items():
            self._before[worker].append(request)
            if worker in self._lost or self._launcher is None:
                self._bell.wake.post()
                continue
            if request is STEP_ALL:
                note = control.STEP
            elif request is STEP_ALL_PROMPTLY:
                note = _STEP_PROMPTLY
            else:
                note = _note_of(request)
            asked = self._desks[worker].asked  # as `Ring.put`, which would cost as much again
            place = asked.written % asked.capacity
            asked.notes[place] = note
            asked.written += 1
            asked.signal.post()
            if note == control.MAIL:
                try:
                    self._channels[worker].put(request)
                except Gone:
                    continue  # `wait` finds out how it died

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[tuple[int, Reply | Lost]] = []
        # After a `post` of all that is waited for nothing can be there yet; until the parent sleeps, a worker lacks its
        # CPU, so on that way every microsecond counts.
        while self._armed or (len(replies) < at_least and not self._enough(replies, at_least)):
            self._armed = False
            if self._half_read:
                if deadline is not None and time.monotonic() >= deadline:
                    break
                self._await_rest()
            elif deadline is None:
                self._bell.wake.nap(_TICK_S)
            elif (patience := min(_TICK_S, deadline - time.monotonic())) > 0:
                self._bell.wake.take(patience)
            else:
                break
            new = self._taken()
            if not new:
                self._lost_now()
            replies += new
        self._interrupted = False
        return replies

    def _enough(self, replies: list[tuple[int, Reply | Lost]], at_least: int) -> bool:
        """Whether there is nothing to wait for; else the bell has been set to ring for the last that is missing."""
        while len(replies) < at_least and not any(type(reply) is Lost for _, reply in replies):
            self._bell.set_countdown(at_least - len(replies) - 1)
            self._bell.hush()
            if self._interrupted:
                return True
            new = self._taken()  # what has come before all this may have gone unheard
            if not new:
                return False
            replies += new
        return True

    def _taken(self) -> list[tuple[int, Reply | Lost]]:
        """Everything that has been done, and everybody who will not do anything any more."""
        replies: list[tuple[int, Reply | Lost]] = []
        if time.monotonic() - self._looked > _TICK_S:
            self._lost_now()  # also while others have so much to say that there is never a pause
        for worker, before in enumerate(self._before):
            if not before:
                continue
            done = self._desks[worker].done
            place = done.read % done.capacity
            # Mostly the one reply that is expected has come, and its note says it all.
            if len(before) == 1 and worker not in self._half_read and not done.signal.try_wait():
                done.read += 1
                if done.notes[place] == _ALL_DONE:
                    before.popleft()
                    replies.append((worker, STEPPED))
                    continue
                self._half_read[worker] = done.notes[place]
            replies += self._taken_from(worker)
        return replies

    def _taken_from(self, worker: int) -> list[tuple[int, Reply | Lost]]:
        """Of one worker."""
        replies: list[tuple[int, Reply | Lost]] = []
        before, done, channel = self._before[worker], self._desks[worker].done, self._channels[worker]
        if channel.unsent:
            with contextlib.suppress(Gone):  # found out below
                channel.flush()
        while before:
            if worker in self._half_read:
                note = self._half_read.pop(worker)
            elif not done.signal.try_wait():
                note = done.taken()
            else:
                break
            if note == _ALL_DONE:
                replies.append((worker, STEPPED))
            elif note & control.KIND == control.PLAIN:
                last = bool(note & control.LAST)
                replies.append((worker, Reply(*_DONE, control.env_ids_of(note), {}, {}, done.moment, last)))
            else:
                try:
                    reply = channel.receive_now()
                except Gone:
                    self._await_death(worker)
                    break
                if reply is None:  # the worker may even have stopped in the middle of it
                    self._half_read[worker] = note
                    break
                replies.append((worker, reply))
            if note & control.LAST:
                before.popleft()
        if before and worker in self._lost:
            before.clear()
            self._half_read.pop(worker, None)
            replies.append((worker, self._lost[worker]))
        return replies

    def _await_rest(self) -> None:
        """Wait a moment for more of the messages of which a part has come; nobody rings for that."""
        poller = select.poll()
        for worker in self._half_read:
            poller.register(self._channels[worker].fileno(), select.POLLIN)
        poller.poll(_REST_TICK_MS)

    def _lost_now(self) -> Mapping[int, Lost]:
        """Who has died, brought up to date."""
        self._looked = time.monotonic()
        if self._launcher is not None:
            for pid, exitcode in self._launcher.deaths():
                if pid in self._pids:
                    worker = self._pids.index(pid)
                    self._lost[worker] = Lost(exitcode, self._launcher.crash_report(pid))
        return self._lost

    def _await_death(self, worker: int, patience: float = 1.0) -> None:
        """It has hung up, or is to end: give it a moment to be found dead, and see to it."""
        assert self._launcher is not None
        pid = self._pids[worker]
        if self._launcher.wait_gone([pid], patience):
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
        with contextlib.ExitStack() as at_last:  # also after a second Ctrl-C
            at_last.callback(self._forget)
            if launcher is not None:
                at_last.callback(self._board.close_fd)
                at_last.callback(launcher.close)
                if left := launcher.wait_gone(self._pids, timeout):
                    if timeout >= reports.WARNS_AFTER_S:
                        for worker in sorted(map(self._pids.index, left & set(self._pids))):
                            stack = launcher.stack(self._pids[worker])
                            logger.warning("%s", reports.still_running(worker, self._shares[worker], timeout, stack))
                    for pid in self._pids:
                        launcher.terminate(pid)
                    launcher.wait_gone(self._pids, _TERMINATED_WITHIN_S)
        return []

    def _forget(self) -> None:
        for before in self._before:
            before.clear()
        self._half_read.clear()
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
_STEP_PROMPTLY = control.STEP | control.PROMPT
_ALL_DONE = control.PLAIN | control.LAST


def _note_of(request: Request) -> int:
    """The note that says it all, or `MAIL`."""
    message, env_ids, payload, each, prompt = request
    span = None if env_ids is None else span_of(env_ids)
    if message is not Message.STEP or payload is not None or (env_ids is not None and span is None):
        return control.MAIL
    return control.note_of(control.STEP | each * control.EACH | prompt * control.PROMPT, span)
