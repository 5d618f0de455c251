"""Workers in processes of their own, with frequent messages in shared memory (Linux).

    parent                              control block                     worker process (`main`)
    post(STEP)  --- code, semaphore --->  requests  --- semaphore, code ->  execute: actions and transitions
    wait()      <-- semaphore, code ----  replies   <-- code, semaphore --    in the block of records
       ^                                  doorbell  <-- post, by the last worker of a batch
       |
       +-- rare messages (constructors, infos, exceptions): over the worker's channel, a socket; the code says so

A code is one number: what to do, or what was done, and in which environments. It is written before the semaphore is
posted and read after the semaphore is taken, so that the order of stores does not matter. `launching.py` starts and
ends the processes.

The doorbell is a semaphore that wakes the parent when replies have come, and a countdown: how many of the next replies
do not wake it. So the parent sleeps until it has as many replies as it wants. Replies that come while the countdown is
set may wake the parent too early, never too late.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import pickle
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_parallel.backends import signals
from marl_parallel.backends.descendants import memory_of, started_at
from marl_parallel.backends.launching import Launcher, WorkerProcess
from marl_parallel.backends.memory import Block, Semaphore, anonymous_file, mapped, socket_pair
from marl_parallel.backends.worker_processes import UNKNOWN, Handle, Link, Output, WorkerProcesses
from marl_parallel.core.backend import usable_cpus
from marl_parallel.core.block import codec
from marl_parallel.core.block.columns import span_of
from marl_parallel.core.messages import STEP_ALL, STEPPED, Lost, Message, Reply, Request, answer
from marl_parallel.core.objects import sharing
from marl_parallel.core.objects.script_names import open_script_of_worker
from marl_parallel.core.reports.advice import name_limit, naming_limits
from marl_parallel.core.reports.log_records import RecordSender
from marl_parallel.core.worker.loading import cpu_seconds
from marl_parallel.core.worker.worker import Worker
from marl_parallel.core.worker_status import WorkerStatus

_TICK_S = 0.02  # how often to look for deaths, for the case that the fork server is dead and reports none
_REST_TICK_MS = 1.0
_MOST_SPIN_S = 2e-3

# -- queues in shared memory -------------------------------------------------------------------------------------------

_SEMAPHORES = 2 * Semaphore.SIZE
_WAKE, _COUNTDOWN = 0, Semaphore.SIZE  # where the doorbell's semaphores are: the fork server expects the first there
_CODE_NBYTES = 16  # with its moment


# A code: a kind, flags, and neighbouring environments (None: all of the worker's).
_ON_CHANNEL, _STEP, _DONE = 0, 1, 2  # the message is on the channel; step the environments; they have been stepped
_KIND = 3  # the mask of the kind
_LAST = _EACH = 1 << 2  # no other reply to the request follows; reply for each environment
_ALL_DONE = _DONE | _LAST
_ONLY_WAIT, _ONLY_SEND = 0, -1.0  # for `exchange`, in place of the code to send and of its patience


def _code_of(kind: int, env_ids: range | None) -> int:
    return kind if env_ids is None else kind | len(env_ids) << 8 | env_ids.start << 32


def _env_ids_of(code: int) -> range | None:
    count, first = code >> 8 & (1 << 24) - 1, code >> 32
    return range(first, first + count) if count else None


class Queue:
    """A queue of codes that one process writes and another reads, as a circular buffer.

    `ready` counts the codes that are written and not yet taken; `times` has a moment of `time.monotonic` for each code.
    `counts` are the numbers of codes that this process has written and read. `addresses` are what `exchange` needs.
    """

    __slots__ = ("addresses", "capacity", "codes", "counts", "ready", "times")

    def __init__(self, buffer: mmap.mmap, semaphore: int, codes: int, capacity: int) -> None:
        self.ready = Semaphore(buffer, semaphore)
        self.capacity = capacity
        view = memoryview(buffer)[codes : codes + _CODE_NBYTES * capacity]
        self.codes, self.times = view[: 8 * capacity].cast("Q"), view[8 * capacity :].cast("d")
        self.counts = (ctypes.c_int64 * 2)()
        self.addresses = (
            self.ready.address - semaphore + codes, self.ready.address, ctypes.addressof(self.counts), capacity
        )  # fmt: skip

    def put(self, code: int, moment: float = 0.0) -> None:
        """Write a code and wake the reader; the caller ensures that there is room."""
        index = self.counts[0] % self.capacity
        self.codes[index], self.times[index] = code, moment
        self.counts[0] += 1
        self.ready.post()

    def take(self) -> int:
        """The next code; only after `ready` was taken."""
        code = self.codes[self.counts[1] % self.capacity]
        self.counts[1] += 1
        return code

    @property
    def moment(self) -> float:
        """The moment of the code taken last."""
        return self.times[(self.counts[1] - 1) % self.capacity]


class QueuePair:
    """The queues of one worker, and its status, in the control block; `new` clears them."""

    def __init__(self, buffer: mmap.mmap, worker: int, capacity: int, *, new: bool = False) -> None:
        start = control_nbytes(worker, capacity)
        status = start + _SEMAPHORES
        codes = status + WorkerStatus.NBYTES
        if new:
            buffer[start:codes] = bytes(codes - start)
        self.requests = Queue(buffer, start, codes, capacity)
        self.replies = Queue(buffer, start + Semaphore.SIZE, codes + _CODE_NBYTES * capacity, capacity)
        if new:
            self.requests.ready.init(0)
            self.replies.ready.init(0)
        self.status = WorkerStatus(memoryview(buffer)[status:codes])


def control_nbytes(num_workers: int, capacity: int) -> int:
    """The size of the control block, which has the doorbell and a pair for each worker."""
    return _SEMAPHORES + num_workers * (_SEMAPHORES + WorkerStatus.NBYTES + 2 * _CODE_NBYTES * capacity)


class Spin:
    """How long a process polls before it sleeps: waking an idle virtual CPU costs 20 to 50 us, as much as a step.

    With `wait="adaptive"`, twice the mean of its last waits, if these are short and it has a CPU of its own.
    """

    def __init__(self, wait: str, own_cpu: bool) -> None:
        self.adapts = wait == "adaptive" and own_cpu
        self.tries = self.adapts or wait == "spin"
        self._mean = 0.0
        self.seconds = _MOST_SPIN_S if wait == "spin" else 0.0

    def take(self, semaphore: Semaphore, patience: float | None = None) -> bool:
        """Poll for a while, then wait for a semaphore; returns whether it was taken within `patience` seconds."""
        if not self.tries:
            return semaphore.take(patience)
        began = time.monotonic()
        seconds = self.seconds if patience is None else min(self.seconds, patience)
        taken = _try_for(semaphore, seconds) or semaphore.take(patience)
        if self.adapts:
            self.adapt(time.monotonic() - began)
        return taken

    def adapt(self, seconds: float) -> None:
        """Adapt to a wait that took this long."""
        self._mean += (min(seconds, _MOST_SPIN_S) - self._mean) / 4
        self.seconds = min(2 * self._mean, _MOST_SPIN_S) if self._mean < 0.75 * _MOST_SPIN_S else 0.0


def _try_for(semaphore: Semaphore, seconds: float) -> bool:
    if codec.try_for is not None:
        taken: bool = codec.try_for(semaphore.address, seconds)
        return taken
    until = time.monotonic() + seconds
    while (missed := semaphore.try_wait()) and time.monotonic() < until:
        os.sched_yield()  # another process may need this CPU
    return not missed


# -- the socket --------------------------------------------------------------------------------------------------------

_PART, _WHOLE, _IN_FILE, _DESCRIPTOR = 0, 1, 2, 3
"""First byte of a packet: a part of a message follows, or the last part; or the message is in the file sent along; or a
descriptor is sent along, which belongs to the next message."""
_PACKET_NBYTES = 16384
_FD = struct.Struct("i")


class Gone(EOFError):
    """The other process has died, or has closed its end."""


class Channel:
    """One end of a socket that sends objects between two processes that may die or stop at any moment.

    A simulator's own children inherit the worker's end, so the worker's death does not close the stream. So the parent
    must not wait here (`receive_now`, `put`, `flush`); a worker may (`receive`, `finish`), since it dies with its
    parent. Of a message larger than a packet only the descriptor of a file is sent: a socket holds little, and the
    sender must not wait. All methods raise `Gone` if either end is closed.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        # Pickled, with their descriptors; nothing of them has been sent.
        self._messages: deque[tuple[bytes, Sequence[int]]] = deque()
        # The unsent packets of the message before these, with the descriptors to send along and to close. Only one
        # message at a time has packets: descriptors for all waiting messages could leave none to receive a reply.
        self._packets: deque[tuple[bytes, list[int]]] = deque()
        self._parts = bytearray()  # the received part of a message
        self._descriptors: list[int] = []  # the received ones of a message that has not come yet

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something is left for `flush`."""
        return bool(self._packets or self._messages)

    def put(self, message: Any) -> None:
        """Send as much of an object as can be sent without waiting; `flush` sends the rest."""
        self._messages.append((pickle.dumps(message, pickle.HIGHEST_PROTOCOL), ()))
        self.flush()

    def put_constructing(self, request: Request) -> None:
        """Send a request with constructors, after the descriptors of what these share; `flush` sends the rest."""
        self._messages.append(sharing.dumps_request(request))
        self.flush()

    def flush(self) -> bool:
        """Send what can be sent without waiting; returns whether that was all."""
        while self.unsent:
            if not self._packets:
                body, descriptors = self._messages.popleft()
                self._packets.extend([(bytes([_DESCRIPTOR]), [fd]) for fd in descriptors])
                self._packets.extend(_packets_of(body))
            packet, fds = self._packets[0]
            try:
                socket.send_fds(self._socket, [packet], fds)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise Gone from error
            except OSError as error:
                # The kernel limits how many files are on their way at a time.
                if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                    return False
                if self.fileno() < 0:  # this end has been closed meanwhile
                    raise Gone from error
                raise
            self._drop_packet()
        return True

    def _drop_packet(self) -> None:
        for fd in self._packets.popleft()[1]:
            os.close(fd)

    def finish(self) -> None:
        while not self.flush():
            self._poll(select.POLLOUT)

    def receive(self) -> Any:
        while (message := self.receive_now()) is None:
            self._poll(select.POLLIN)
        return message

    def receive_now(self) -> Any:
        """The next object if all of it has come, else None; never waits."""
        while True:
            try:
                packet, ancillary, *_ = self._socket.recvmsg(
                    1 + _PACKET_NBYTES, socket.CMSG_SPACE(_FD.size), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except ConnectionResetError as error:  # it died before it read all that was sent
                raise Gone from error
            except OSError as error:
                if self.fileno() < 0:
                    raise Gone from error
                raise
            if not packet:
                raise Gone
            if packet[0] >= _IN_FILE:
                if not ancillary:
                    raise name_limit(OSError(errno.EMFILE, "a message was lost"))
                (fd,) = _FD.unpack(ancillary[0][2])
                if packet[0] == _DESCRIPTOR:
                    self._descriptors.append(fd)
                    continue
                with open(fd, "rb"), mmap.mmap(fd, 0, prot=mmap.PROT_READ) as content:
                    return self._loads(content)
            self._parts += memoryview(packet)[1:]
            if packet[0] == _WHOLE:
                body, self._parts = self._parts, bytearray()
                return self._loads(body)

    def _loads(self, pickled: Any) -> Any:
        if not self._descriptors:
            return pickle.loads(pickled)
        descriptors, self._descriptors = self._descriptors, []
        return sharing.loads_request(pickled, descriptors)

    def _poll(self, event: int) -> None:
        poll = select.poll()  # unlike `select.select`, it takes any number of descriptors
        poll.register(self._socket, event)
        poll.poll()

    def close(self) -> None:
        self._socket.close()
        while self._packets:
            self._drop_packet()
        for _, descriptors in self._messages:
            sharing.close_all(descriptors)
        self._messages.clear()


def _packets_of(body: bytes) -> list[tuple[bytes, list[int]]]:
    """The packets of a message, each with the descriptors to send along."""
    if len(body) > _PACKET_NBYTES and (fd := _file_of(body)) >= 0:
        return [(bytes([_IN_FILE]), [fd])]
    parts = [body[start : start + _PACKET_NBYTES] for start in range(0, len(body), _PACKET_NBYTES)]
    return [*((bytes([_PART]) + part, []) for part in parts[:-1]), (bytes([_WHOLE]) + parts[-1], [])]


@naming_limits()
def _file_of(body: bytes) -> int:
    """A file with these bytes; -1 if this process has too many files open."""
    try:
        fd = anonymous_file("marl_parallel-message")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return -1
        raise
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(body)
    except BaseException:
        os.close(fd)
        raise
    return fd


# -- in the parent -----------------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class _QueueHandle(Handle):
    """A worker of `Queues`."""

    link: Queues
    process: WorkerProcess
    channel: Channel
    queues: QueuePair
    started_at: int | None  # see `descendants.started_at`

    def cpu_seconds(self) -> float | None:
        used = cpu_seconds(self.process.pid)
        return used if self._is_same_process() else None

    def memory(self) -> int | None:
        nbytes = memory_of(self.process.pid)
        return nbytes if self._is_same_process() else None

    def _is_same_process(self) -> bool:
        """Whether the process id is still its own: after its death, another process may get the same id."""
        return self.started_at is not None and started_at(self.process.pid) == self.started_at

    def stack(self, *, harmless: bool = False) -> str:
        launcher = self.link.launcher
        return "" if launcher is None else launcher.stack(self.process, harmless=harmless)

    def signal(self, number: int) -> None:
        if (launcher := self.link.launcher) is not None:
            launcher.kill(self.process, number)

    def kill(self, patience: float = 0.0) -> None:
        """Kill the process unless it ends within `patience` seconds, as after it has hung up."""
        launcher = self.link.launcher
        if launcher is not None:  # else, and if it closes below: closed meanwhile by a signal handler or another thread
            if launcher.wait_gone([self.process], patience):
                launcher.kill(self.process)
                launcher.wait_gone([self.process], 1.0)
            self.link.look_for_deaths()
        self.lost = self.lost or UNKNOWN
        self.link.exchanged = None

    def free(self) -> None:
        self.expected = 0
        self.channel.close()
        self.link.partial.pop(self, None)
        self.link.exchanged = None


class Queues(Link[_QueueHandle]):
    """Requests and replies travel through queues in shared memory; a fork server starts processes.

    Attributes:
        launcher: None before the first process, and once everything is closed.
        partial: By worker, the code of a partially received message.
        exchanged: What the latest `step_all` has sent, and to whom; None if workers have come or gone.
    """

    def __init__(
        self, threads: int | None, wait: str, preload: Sequence[str] = (), start_timeout: float | None = None
    ) -> None:
        super().__init__()
        self._threads, self._wait, self._preload, self._start_timeout = threads, wait, preload, start_timeout
        self.launcher: Launcher | None = None
        self.partial: dict[_QueueHandle, int] = {}
        self._wakes_once = False  # whether all pending requests were posted together
        self.exchanged: tuple[Mapping[int, Request], NDArray[np.int64], list[_QueueHandle]] | None = None
        self._looked = 0.0  # when deaths were last looked for
        self._interrupted = False

    def control_nbytes(self, most: int, most_requests: int) -> int:
        self._capacity = -(-most_requests // 4) * 4  # so that no two queues share a cache line
        return control_nbytes(most, self._capacity)

    def open(self, control: Block, buffer: mmap.mmap, num_workers: int, num_processes: int) -> None:
        self._control, self._buffer = control, buffer
        self._wake, self._countdown = Semaphore(buffer, _WAKE), Semaphore(buffer, _COUNTDOWN)
        self._wake.init(0)
        self._countdown.init(0)
        self._spin = Spin(self._wait, num_processes < usable_cpus())
        self._own_cpu = num_workers <= usable_cpus()

    def launch(self, worker: int, share: Sequence[int], fds: Sequence[int], output: Output) -> _QueueHandle:
        launcher = self.launcher = self.launcher or Launcher(
            entry=__name__, wake=self._control, threads=self._threads, preload=self._preload,
            start_timeout=self._start_timeout,
        )  # fmt: skip
        queues = QueuePair(self._buffer, worker, self._capacity, new=True)
        ours, theirs = socket_pair()
        channel = Channel(ours)
        try:
            with theirs:
                process = launcher.launch(worker, [theirs.fileno(), *fds], share, output.descriptors)
            output.log.mark_start(process.pid)
            with contextlib.suppress(Gone):  # `wait` finds out how it died
                channel.put((self._wait, self._own_cpu, self._capacity, output.forwarding))
        except BaseException:
            channel.close()
            raise
        self.exchanged = None
        link = weakref.proxy(self)  # without a cycle, everything is freed with the last reference
        return _QueueHandle(
            worker=worker, share=share, log=output.log, status=queues.status, link=link, process=process,
            channel=channel, queues=queues, started_at=started_at(process.pid),
        )  # fmt: skip

    def post(self, requests: Mapping[int, Request], *, together: bool) -> None:
        self._wakes_once = together
        if together:
            self._countdown.init(len(requests) - 1)
        for worker, request in requests.items():
            handle = self.handles[worker]
            handle.expected += 1
            if handle.lost is not None or not self.is_open:
                self._wake.post()
                continue
            if request is STEP_ALL:
                code = _STEP
            else:
                message, env_ids, payload, each, _ = request
                span = None if env_ids is None else span_of(env_ids)
                code = _ON_CHANNEL
                if message is Message.STEP and payload is None and (env_ids is None or span is not None):
                    code = _code_of(_STEP | each * _EACH, span)
            handle.queues.requests.put(code)
            if code == _ON_CHANNEL:
                try:
                    if message in sharing.CONSTRUCTING:
                        handle.channel.put_constructing(request)
                    else:
                        handle.channel.put(request)
                except Gone:
                    continue  # `wait` finds out how it died

    def step_all(
        self, requests: Mapping[int, Request], patience: float, meanwhile: Callable[[], bool] | None = None
    ) -> bool:
        exchanged = self.exchanged
        if exchanged is None or exchanged[0] is not requests:
            exchanged = self.exchanged = self._exchange_of(requests)
        if exchanged is None:
            return super().step_all(requests, patience, meanwhile)
        assert codec.exchange is not None
        spin, wake, countdown, request = self._spin, self._wake.address, self._countdown.address, _STEP
        if meanwhile is not None:
            codec.exchange(exchanged[1], wake, countdown, _STEP, _ALL_DONE, 0.0, _ONLY_SEND)
            request = _ONLY_WAIT
            for handle in exchanged[2]:
                handle.expected += 1
            if not meanwhile() or not self.is_open:
                return False
        seconds = codec.exchange(
            exchanged[1], wake, countdown, request, _ALL_DONE, spin.seconds, min(patience, _TICK_S)
        )
        if seconds < 0:
            if meanwhile is None and self.is_open:
                for handle in exchanged[2]:
                    handle.expected += 1
            return False
        if meanwhile is not None:
            for handle in exchanged[2]:
                handle.expected -= 1
        if spin.adapts:
            spin.adapt(seconds)
        return True

    def _exchange_of(
        self, requests: Mapping[int, Request]
    ) -> tuple[Mapping[int, Request], NDArray[np.int64], list[_QueueHandle]] | None:
        """What `exchange` needs to send these requests; None if it cannot."""
        if codec.exchange is None or not self.is_open or any(one is not STEP_ALL for one in requests.values()):
            return None
        handles = [self.handles[worker] for worker in requests]
        if any(handle.lost is not None for handle in handles):
            return None
        addresses = [handle.queues.requests.addresses + handle.queues.replies.addresses for handle in handles]
        return requests, np.array(addresses, np.int64), handles

    def wait(self, timeout: float | None, at_least: int) -> list[tuple[int, Reply | Lost]]:
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[tuple[int, Reply | Lost]] = []
        # Right after a `post`, no reply can be here yet, and a worker may need the parent's CPU: sleep at once.
        while self._wakes_once or (len(replies) < at_least and not self._complete(replies, at_least)):
            self._wakes_once = False
            if self.partial:
                if deadline is not None and time.monotonic() >= deadline:
                    break
                poller = select.poll()  # the doorbell does not ring for the rest of a message
                for handle in self.partial:
                    poller.register(handle.channel.fileno(), select.POLLIN)
                poller.poll(_REST_TICK_MS)
            elif not self._spin.tries and (deadline is None or deadline - time.monotonic() > _TICK_S):
                self._wake.nap(_TICK_S)
            elif (patience := _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())) > 0:
                self._spin.take(self._wake, patience)
            else:
                break
            replies += self._received()
            if len(replies) < at_least:  # a death posts the doorbell, too
                self.look_for_deaths()
                self.relay.bring()
        self._interrupted = False
        return replies

    def _complete(self, replies: list[tuple[int, Reply | Lost]], at_least: int) -> bool:
        """Whether there are enough replies; else the doorbell is set to ring for the last missing one."""
        while len(replies) < at_least and not any(type(reply) is Lost for _, reply in replies):
            self._countdown.init(at_least - len(replies) - 1)
            while self._wake.try_take():
                pass
            if self._interrupted:
                return True
            new = self._received()  # earlier replies may not have posted the doorbell
            if not new:
                return False
            replies += new
        return True

    def _received(self) -> list[tuple[int, Reply | Lost]]:
        """Take all replies that have come, and the losses of dead workers that will not reply any more."""
        replies: list[tuple[int, Reply | Lost]] = []
        if time.monotonic() - self._looked > _TICK_S:
            self.look_for_deaths()  # also while others reply all the time
        for handle in self.handles.values():
            if handle.expected:
                self.receive_from(handle, replies)
        return replies

    def receive_from(self, handle: _QueueHandle, replies: list[tuple[int, Reply | Lost]]) -> None:
        queue = handle.queues.replies
        if handle.channel.unsent:
            with contextlib.suppress(Gone):  # noticed below
                handle.channel.flush()
        while handle.expected:
            if handle in self.partial:
                code = self.partial.pop(handle)
            elif not queue.ready.try_wait():
                code = queue.take()
            else:
                break
            if code == _ALL_DONE:
                replies.append((handle.worker, STEPPED))
            elif code & _KIND == _DONE:
                stepped = answer(Message.STEP, _env_ids_of(code), {}, {}, queue.moment, last=bool(code & _LAST))
                replies.append((handle.worker, stepped))
            else:
                try:
                    reply = handle.channel.receive_now()
                except Gone:
                    handle.kill(patience=1.0)
                    break
                if reply is None:  # the worker may have stopped in the middle of the message
                    self.partial[handle] = code
                    break
                replies.append((handle.worker, reply))
            if code & _LAST:
                handle.expected -= 1
        if handle.expected and handle.lost is not None:
            handle.expected = 0
            self.partial.pop(handle, None)
            replies.append((handle.worker, handle.lost))

    def look_for_deaths(self) -> None:
        """Set how workers have died."""
        self._looked = time.monotonic()
        if (launcher := self.launcher) is not None and self.is_open:
            launcher.collect()
            for handle in self.handles.values():
                if (process := handle.process).exitcode is not None:
                    handle.lost = Lost(process.exitcode, process.crash_report, server=process.server)
                    self.exchanged = None

    def interrupt(self) -> None:
        self._interrupted = True
        if self.launcher is not None:
            self._wake.post()

    def alive(self, handles: Sequence[_QueueHandle], timeout: float) -> list[_QueueHandle]:
        if (launcher := self.launcher) is None:
            return []
        launcher.collect()
        alive = launcher.wait_gone([handle.process for handle in handles], timeout)
        return [handle for handle in handles if handle.process in alive]

    def close(self, *, forked: bool = False) -> None:
        launcher, self.launcher, self.exchanged = self.launcher, None, None
        if launcher is not None:
            launcher.close(forked=forked)

    def drop_memory(self) -> None:
        del self._buffer, self._wake, self._countdown


class ProcessBackend(WorkerProcesses):
    """What `backend="process"` is on Linux.

    Args:
        threads: Threads of BLAS, OpenMP and torch in each worker; None leaves them alone.
        wait: How workers and the caller wait: "adaptive", "block" or "spin".
        preload: Modules that the fork server imports.
        start_timeout: The most seconds for that; None for no limit.
    """

    def __init__(
        self,
        *,
        threads: int | None = 1,
        wait: str = "adaptive",
        preload: Sequence[str] = (),
        start_timeout: float | None = None,
    ) -> None:
        super().__init__(Queues(threads, wait, preload, start_timeout))


# -- in the worker process ---------------------------------------------------------------------------------------------


def main(index: int, fds: Sequence[int]) -> None:
    """Serve requests until a CLOSE; `fds`: the channel's socket, the control block, records, arrays."""
    connection, control_fd, records_fd, arrays_fd = fds
    open_script_of_worker()
    control = mapped(control_fd)
    channel = Channel(socket.socket(fileno=connection))
    try:
        wait, own_cpu, capacity, forwarding = channel.receive()
    except Gone:  # Ctrl-C has interrupted the start
        return
    spin = Spin(wait, own_cpu)
    wake, countdown = Semaphore(control, _WAKE), Semaphore(control, _COUNTDOWN)
    queues = QueuePair(control, index, capacity)
    signals.follow(queues.status)
    worker = Worker(queues.status, lambda _: mapped(records_fd), own_process=True, arrays=lambda: arrays_fd)
    ready = queues.requests.ready
    if forwarding is not None:
        RecordSender(control, forwarding, index, queues.status, worker.settings).install()

    def send(reply: Reply) -> None:
        message, request, env_ids, results, _, completed, last = reply
        code = _LAST if last else 0
        on_channel = request is not Message.STEP or message is not Message.RESULT or results
        if on_channel:
            # The code comes after the message, so that the parent is not woken for an incomplete one. The exception is
            # a message larger than the room in the socket: the parent must read so that the rest can be sent.
            channel.put(reply)
            code |= _ON_CHANNEL
        else:
            code |= _DONE if env_ids is None else _code_of(_DONE, span_of(env_ids))
        queues.replies.put(code, completed)
        if countdown.try_wait():
            wake.post()
        if on_channel:
            channel.finish()

    while True:
        spin.take(ready)
        code = queues.requests.take()
        if code == _STEP:
            request = STEP_ALL
        elif code & _KIND == _STEP:
            request = Request(Message.STEP, _env_ids_of(code), each=bool(code & _EACH))
        else:
            request = channel.receive()
        worker.execute(request, send)
        if request.message is Message.CLOSE:
            channel.close()
            return
