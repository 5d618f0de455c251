"""How a parent and its worker process talk: two queues in shared memory, a doorbell, and a socket for larger messages.

    parent                                                          worker
      requests: a queue of codes ------------------------------->   QueuePair, one per worker
      <------------------------------- replies: a queue of codes
      <------------------------ doorbell: one semaphore and a countdown, shared by all workers
      <---- channel: a socket, for what does not fit a code ---->

A code is one number: what to do, or what was done, and in which environments. It is written before the semaphore is
posted and read after the semaphore is taken, so that the order of stores does not matter. The countdown lets the parent
sleep until it has as many replies as it wants.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import select
import socket
import struct
from collections import deque
from typing import Any

from marl_parallel.backends.memory import Semaphore, anonymous_file, lifted
from marl_parallel.core.worker_status import WorkerStatus

# -- queues in shared memory -------------------------------------------------------------------------------------------

_SEMAPHORES = 2 * Semaphore.SIZE
_CODE_NBYTES = 16  # with its moment


class Code:
    """A message as one number: a kind, flags, and neighbouring environments (None: all of the worker's)."""

    ON_CHANNEL, STEP, DONE = 0, 1, 2  # the message is on the channel; step the environments; they have been stepped
    KIND = 3  # the mask of the kind
    LAST = EACH = 1 << 2  # no other reply to the request follows; reply for each environment
    PROMPT = 1 << 3  # reply at once for an environment that has infos

    @staticmethod
    def of(kind: int, env_ids: range | None) -> int:
        return kind if env_ids is None else kind | len(env_ids) << 8 | env_ids.start << 32

    @staticmethod
    def env_ids(code: int) -> range | None:
        count, first = code >> 8 & (1 << 24) - 1, code >> 32
        return range(first, first + count) if count else None


class Queue:
    """A queue of codes that one process writes and another reads, as a circular buffer.

    `ready` counts the codes that are written and not yet taken; `times` has a moment of `time.monotonic` for each code.
    """

    __slots__ = ("capacity", "codes", "read", "ready", "times", "written")

    def __init__(self, buffer: mmap.mmap, semaphore: int, codes: int, capacity: int) -> None:
        self.ready = Semaphore(buffer, semaphore)
        self.capacity = capacity
        view = memoryview(buffer)[codes : codes + _CODE_NBYTES * capacity]
        self.codes, self.times = view[: 8 * capacity].cast("Q"), view[8 * capacity :].cast("d")
        self.written = self.read = 0

    def put(self, code: int, moment: float = 0.0) -> None:
        """Write a code and wake the reader; the caller ensures that there is room."""
        place = self.written % self.capacity
        self.codes[place], self.times[place] = code, moment
        self.written += 1
        self.ready.post()

    def take(self) -> int:
        """The next code; only after `ready` was taken."""
        code = self.codes[self.read % self.capacity]
        self.read += 1
        return code


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


class Doorbell:
    """Wakes the parent, which waits on the semaphore `wake`, when replies have come.

    `set_countdown` sets how many of the next replies do not wake it. Replies that come during that call may wake the
    parent too early, never too late.
    """

    def __init__(self, buffer: mmap.mmap) -> None:
        self.wake = Semaphore(buffer, 0)  # where the fork server expects it
        self._countdown = Semaphore(buffer, Semaphore.SIZE)
        self.set_countdown = self._countdown.init

    def ring(self) -> None:
        if self._countdown.try_wait():
            self.wake.post()

    def clear(self) -> None:
        while self.wake.try_take():
            pass


def control_nbytes(num_workers: int, capacity: int) -> int:
    """The size of the control block, which has the doorbell and a pair for each worker."""
    return _SEMAPHORES + num_workers * (_SEMAPHORES + WorkerStatus.NBYTES + 2 * _CODE_NBYTES * capacity)


# -- the socket --------------------------------------------------------------------------------------------------------

_PART, _WHOLE, _IN_FILE = 0, 1, 2
"""First byte of a packet: a part of a message follows, or the last part; or the message is in the file sent along."""
_PACKET_NBYTES = 16384
_FD = struct.Struct("i")


class Gone(EOFError):
    """The other process has died, or has closed its end."""


class Channel:
    """One end of a socket that sends objects between two processes that may die or stop at any moment.

    A simulator's own children inherit the worker's end, so its death is no end of the stream. So the parent must not
    wait here (`receive_now`, `put`, `flush`); a worker may (`receive`, `finish`), since it dies with its parent. Of a
    message larger than a packet only the descriptor of a file is sent: a socket holds little, and the sender must not
    wait. All methods raise `Gone` if the other end is closed.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.unsent: deque[tuple[bytes, list[int]]] = deque()  # packets, with the descriptors to send along
        self._parts = bytearray()  # the received part of a message

    def fileno(self) -> int:
        return self._socket.fileno()

    def put(self, message: Any) -> None:
        """Send as much of an object as can be sent without waiting; `flush` sends the rest."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(body) > _PACKET_NBYTES and (fd := _file_of(body)) >= 0:
            self.unsent.append((bytes([_IN_FILE]), [fd]))
        else:
            for start in range(0, len(body), _PACKET_NBYTES):
                stop = start + _PACKET_NBYTES
                self.unsent.append((bytes([_PART if stop < len(body) else _WHOLE]) + body[start:stop], []))
        self.flush()

    def flush(self) -> bool:
        """Send what can be sent without waiting; returns whether that was all."""
        while self.unsent:
            packet, fds = self.unsent[0]
            try:
                socket.send_fds(self._socket, [packet], fds)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise Gone from error
            except OSError as error:
                # The kernel limits how many files are on their way at a time.
                if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                    return False
                raise
            self._drop_packet()
        return True

    def _drop_packet(self) -> None:
        for fd in self.unsent.popleft()[1]:
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
            except ConnectionResetError as error:  # it died with something of ours unread
                raise Gone from error
            if not packet:
                raise Gone
            if packet[0] == _IN_FILE:
                if not ancillary:
                    raise OSError(
                        errno.EMFILE,
                        "a large message was lost, since this process has too many files open; raise `ulimit -n`",
                    )
                fd = lifted(*_FD.unpack(ancillary[0][2]))
                with open(fd, "rb"), mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
                    return pickle.loads(mapped)
            self._parts += memoryview(packet)[1:]
            if packet[0] == _WHOLE:
                body, self._parts = self._parts, bytearray()
                return pickle.loads(body)

    def _poll(self, event: int) -> None:
        poll = select.poll()  # unlike `select.select`, it takes any number of descriptors
        poll.register(self._socket, event)
        poll.poll()

    def close(self) -> None:
        self._socket.close()
        while self.unsent:
            self._drop_packet()


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
