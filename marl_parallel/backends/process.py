"""Workers in processes of their own, with all that is frequent in shared memory (Linux).

How a request goes and its reply comes::

    parent                              control block                     worker process (`main`)
    post(STEP)  --- code, semaphore --->  requests  --- semaphore, code ->  execute: actions and transitions
    wait()      <-- semaphore, code ----  replies   <-- code, semaphore --    in the block of records
       ^                                  doorbell  <-- post, by the last worker of a batch
       |
       +-- what is rare (constructors, infos, exceptions): over the worker's channel; the code says so

`launching.py` starts and ends the processes, `channel.py` has the queues and the channel.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marl_parallel.backends.channel import Channel, Code, Doorbell, Gone, QueuePair, control_nbytes
from marl_parallel.backends.launching import Launcher
from marl_parallel.backends.memory import Block, Semaphore, anonymous_file, duplicate, socket_pair
from marl_parallel.core import reports
from marl_parallel.core.backend import Backend, usable_cpus
from marl_parallel.core.columns import Layout, span_of
from marl_parallel.core.messages import STEP_ALL, STEP_ALL_PROMPTLY, STEPPED, Lost, Message, Reply, Request
from marl_parallel.core.worker import Worker

_TICK_S = 0.02
"""How often to look for deaths while waiting, for the case that the fork server is dead and reports none."""
_REST_TICK_MS = 1.0
_TERMINATED_WITHIN_S = 0.5
_SPIN_S = 100e-6
"""How long a worker tries before it sleeps: waking an idle virtual CPU costs 20 to 50 us, as much as a step."""

_STEP_PROMPTLY = Code.STEP | Code.PROMPT
_ALL_DONE = Code.DONE | Code.LAST
_ON_CHANNEL, _STEP, _DONE, _KIND, _LAST = Code.ON_CHANNEL, Code.STEP, Code.DONE, Code.KIND, Code.LAST


@dataclass
class _Process:
    """A worker, as the parent sees it; `expected` counts the requests that it has not replied to."""

    pid: int
    channel: Channel
    queues: QueuePair
    expected: int = 0
    lost: Lost | None = None


class ProcessBackend(Backend):
    """One process for each worker.

    Args:
        context: How processes start; None for the best that there is.
        threads: BLAS, OpenMP and torch threads in each; None leaves them alone.
    """

    def __init__(self, *, context: str | None = None, threads: int | None = 1) -> None:
        self._context, self._threads = context or "forkserver", threads
        self._launcher: Launcher | None = None
        self._processes: list[_Process] = []
        self._partial: dict[int, int] = {}  # by worker, the code of a message of which only a part has come
        self._wakes_once = False  # all that is awaited was posted together
        self._looked = 0.0  # when deaths were last looked for
        self._interrupted = False
        self._records_fd = -1

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        self._shares, self._capacity = shares, most_requests
        self._control = Block.create(control_nbytes(len(shares), most_requests))
        self._doorbell = Doorbell(self._control.buffer)
        self._doorbell.wake.init(0)
        self._doorbell.set_countdown(0)
        self._records_fd = anonymous_file("marl_parallel-records")
        wake = self._control, Doorbell.WAKE
        self._launcher = Launcher(self._context, entry=__name__, wake=wake, threads=self._threads)
        queues = [self._new_queues(worker) for worker in range(len(shares))]
        self.statuses = [pair.status for pair in queues]
        for worker, pair in enumerate(queues):
            self._processes.append(self._launched(self._launcher, worker, pair))

    def _new_queues(self, worker: int) -> QueuePair:
        return QueuePair(self._control.buffer, worker, self._capacity, new=True)

    def _launched(self, launcher: Launcher, worker: int, queues: QueuePair) -> _Process:
        ours, theirs = socket_pair(socket.SOCK_SEQPACKET)
        channel = Channel(ours)
        try:
            with theirs:
                pid = launcher.launch(worker, [theirs.fileno(), self._control.fd, self._records_fd])
            channel.put((len(self._shares) <= usable_cpus(), self._capacity))
        except BaseException:
            channel.close()
            raise
        return _Process(pid, channel, queues)

    def end(self, worker: int) -> list[Reply]:
        if self._launcher is None:
            return []  # closed meanwhile by a signal handler
        process = self._processes[worker]
        self._await_death(process, patience=0.0)
        return [reply for _, reply in self._received_from(worker) if type(reply) is Reply]

    def replace(self, worker: int) -> None:
        if self._launcher is None:
            return
        old = self._processes[worker]
        self._await_death(old, patience=0.0)
        old.channel.close()
        self._partial.pop(worker, None)
        self._processes[worker] = new = self._launched(self._launcher, worker, self._new_queues(worker))
        self.statuses[worker] = new.queues.status

    def allocate(self, layout: Layout) -> Any:
        os.ftruncate(self._records_fd, layout.nbytes)
        return Block(duplicate(self._records_fd), layout.nbytes).buffer

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        self._wakes_once = together
        if together:
            self._doorbell.set_countdown(len(requests) - 1)
        for worker, request in requests.items():
            process = self._processes[worker]
            process.expected += 1
            if process.lost is not None or self._launcher is None:
                self._doorbell.wake.post()
                continue
            if request is STEP_ALL:
                code = _STEP
            elif request is STEP_ALL_PROMPTLY:
                code = _STEP_PROMPTLY
            else:
                code = _code_of_request(request)
            queue = process.queues.requests  # as `Queue.put`, which would cost as much again
            place = queue.written % queue.capacity
            queue.codes[place] = code
            queue.written += 1
            queue.ready.post()
            if code == _ON_CHANNEL:
                try:
                    process.channel.put(request)
                except Gone:
                    continue  # `wait` finds out how it died

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[tuple[int, Reply | Lost]] = []
        # After a `post` of all that is waited for nothing can be there yet; until the parent sleeps, a worker lacks its
        # CPU, so on that way every microsecond counts.
        while self._wakes_once or (len(replies) < at_least and not self._complete(replies, at_least)):
            self._wakes_once = False
            if self._partial:
                if deadline is not None and time.monotonic() >= deadline:
                    break
                self._await_rest()
            elif deadline is None:
                self._doorbell.wake.nap(_TICK_S)
            elif (patience := min(_TICK_S, deadline - time.monotonic())) > 0:
                self._doorbell.wake.take(patience)
            else:
                break
            new = self._received()
            if not new:
                self._look_for_deaths()
            replies += new
        self._interrupted = False
        return replies

    def _complete(self, replies: list[tuple[int, Reply | Lost]], at_least: int) -> bool:
        """Whether there is nothing to wait for; else the doorbell is set to ring for the last reply that is missing."""
        while len(replies) < at_least and not any(type(reply) is Lost for _, reply in replies):
            self._doorbell.set_countdown(at_least - len(replies) - 1)
            self._doorbell.clear()
            if self._interrupted:
                return True
            new = self._received()  # what came before all this may not have rung
            if not new:
                return False
            replies += new
        return True

    def _received(self) -> list[tuple[int, Reply | Lost]]:
        """Take all replies that have come, and the losses of workers that will not reply any more."""
        replies: list[tuple[int, Reply | Lost]] = []
        if time.monotonic() - self._looked > _TICK_S:
            self._look_for_deaths()  # also while others reply all the time
        for worker, process in enumerate(self._processes):
            if not process.expected:
                continue
            queue = process.queues.replies
            place = queue.read % queue.capacity
            # Mostly the one reply that is expected has come, and its code says it all.
            if process.expected == 1 and worker not in self._partial and not queue.ready.try_wait():
                queue.read += 1
                if queue.codes[place] == _ALL_DONE:
                    process.expected = 0
                    replies.append((worker, STEPPED))
                    continue
                self._partial[worker] = queue.codes[place]
            replies += self._received_from(worker)
        return replies

    def _received_from(self, worker: int) -> list[tuple[int, Reply | Lost]]:
        """Take the replies of one worker; its loss is the last of them."""
        replies: list[tuple[int, Reply | Lost]] = []
        process = self._processes[worker]
        queue = process.queues.replies
        if process.channel.unsent:
            with contextlib.suppress(Gone):  # found out below
                process.channel.flush()
        while process.expected:
            if worker in self._partial:
                code = self._partial.pop(worker)
            elif not queue.ready.try_wait():
                code = queue.take()
            else:
                break
            if code == _ALL_DONE:
                replies.append((worker, STEPPED))
            elif code & _KIND == _DONE:
                last = bool(code & _LAST)
                replies.append((worker, Reply(Message.STEP, Code.env_ids(code), {}, {}, queue.moment, last)))
            else:
                try:
                    reply = process.channel.receive_now()
                except Gone:
                    self._await_death(process)
                    break
                if reply is None:  # the worker may even have stopped in the middle of it
                    self._partial[worker] = code
                    break
                replies.append((worker, reply))
            if code & _LAST:
                process.expected -= 1
        if process.expected and process.lost is not None:
            process.expected = 0
            self._partial.pop(worker, None)
            replies.append((worker, process.lost))
        return replies

    def _await_rest(self) -> None:
        """Wait a moment for more of the messages of which a part has come; the doorbell does not ring for that."""
        poller = select.poll()
        for worker in self._partial:
            poller.register(self._processes[worker].channel.fileno(), select.POLLIN)
        poller.poll(_REST_TICK_MS)

    def _look_for_deaths(self) -> None:
        self._looked = time.monotonic()
        if self._launcher is not None:
            for pid, exitcode in self._launcher.deaths():
                for process in self._processes:
                    if process.pid == pid:
                        process.lost = Lost(exitcode, self._launcher.crash_report(pid))

    def _await_death(self, process: _Process, patience: float = 1.0) -> None:
        """Make sure that a worker is dead that has hung up or is to end; it may take so long to die by itself."""
        assert self._launcher is not None
        if self._launcher.wait_gone([process.pid], patience):
            self._launcher.kill(process.pid)
            self._launcher.wait_gone([process.pid], 1.0)
        self._look_for_deaths()
        process.lost = process.lost or Lost(None, "")

    def interrupt(self) -> None:
        self._interrupted = True
        if self._launcher is not None:
            self._doorbell.wake.post()

    def stack(self, worker: int) -> str:
        return self._launcher.stack(self._processes[worker].pid) if self._launcher is not None else ""

    def stop(self, timeout: float) -> list[int]:
        launcher, self._launcher = self._launcher, None
        with contextlib.ExitStack() as at_last:  # also after a second Ctrl-C
            at_last.callback(self._release)
            if launcher is not None:
                at_last.callback(self._control.close_fd)
                at_last.callback(launcher.close)
                pids = [process.pid for process in self._processes]
                if left := launcher.wait_gone(pids, timeout):
                    for worker, pid in enumerate(pids):
                        if pid in left and timeout >= reports.WARNS_AFTER_S:
                            stack = launcher.stack(pid)
                            text = reports.still_running(worker, self._shares[worker], timeout, stack)
                            reports.logger.warning("%s", text)
                        launcher.terminate(pid)
                    launcher.wait_gone(pids, _TERMINATED_WITHIN_S)
        return []

    def _release(self) -> None:
        self._partial.clear()
        for process in self._processes:
            process.expected = 0
            process.channel.close()
        if self._records_fd >= 0:
            os.close(self._records_fd)
            self._records_fd = -1

    def abandon(self) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.abandon()
        self._release()


def _code_of_request(request: Request) -> int:
    message, env_ids, payload, each, prompt = request
    span = None if env_ids is None else span_of(env_ids)
    if message is not Message.STEP or payload is not None or (env_ids is not None and span is None):
        return _ON_CHANNEL
    return Code.of(_STEP | each * Code.EACH | prompt * Code.PROMPT, span)


# -- in the worker process ---------------------------------------------------------------------------------------------


def main(index: int, fds: Sequence[int]) -> None:
    """Serve requests until one is to close.

    Args:
        index: The worker's number.
        fds: The channel's socket, the control block, the file that the block of records will be in.
    """
    connection, control_fd, records_fd = fds
    control = Block(control_fd, os.fstat(control_fd).st_size)
    channel = Channel(socket.socket(fileno=connection))
    spin, capacity = channel.receive()
    queues, doorbell = QueuePair(control.buffer, index, capacity), Doorbell(control.buffer)
    worker = Worker(queues.status, lambda layout: Block(records_fd, layout.nbytes).buffer, own_process=True)
    send, spin_s = _sender(queues, doorbell, channel), _SPIN_S if spin else 0.0
    while True:
        _await(queues.requests.ready, spin_s)
        request = _request_of(queues.requests.take(), channel)
        worker.execute(request, send)
        if request.message is Message.CLOSE:
            channel.close()
            return


def _sender(queues: QueuePair, doorbell: Doorbell, channel: Channel) -> Callable[[Reply], None]:
    def send(reply: Reply) -> None:
        message, env_ids, results, failures, completed, last = reply
        flags = _LAST if last else 0
        if message is not Message.STEP or results or failures:
            # The code comes after the message, so that the parent is not woken for one that is not complete. A message
            # that the socket has no room for is the exception: the parent must read so that the rest can be sent.
            channel.put(reply)
            queues.replies.put(_ON_CHANNEL | flags, completed)
            doorbell.ring()
            channel.finish()
            return
        code = _DONE | flags
        queues.replies.put(code if env_ids is None else Code.of(code, span_of(env_ids)), completed)
        doorbell.ring()

    return send


def _await(ready: Semaphore, spin_s: float) -> None:
    try_wait, spin_until = ready.try_wait, time.monotonic() + spin_s
    while time.monotonic() < spin_until:
        if not try_wait():
            return
        os.sched_yield()  # the parent may be waiting for this very CPU
    ready.take()


def _request_of(code: int, channel: Channel) -> Request:
    if code == _STEP:
        return STEP_ALL
    if code == _STEP_PROMPTLY:
        return STEP_ALL_PROMPTLY
    if code & _KIND == _STEP:
        return Request(Message.STEP, Code.env_ids(code), each=bool(code & Code.EACH), prompt=bool(code & Code.PROMPT))
    request: Request = channel.receive()
    return request
