"""Objects over a socket between two processes that may die at any moment.

The end of a stream is no sign that the other side is gone, since a simulator's own children inherit it; so whoever
waits looks at somebody who knows from time to time, and never blocks for good. What is large goes into a file without
a name, of which only the descriptor is sent: a socket holds little, and the sender is not to wait for the reader.
"""

from __future__ import annotations

import array
import errno
import mmap
import os
import pickle
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from marl_parallel.backends.memory import anonymous_file

_HEADER = struct.Struct("=Q?")  # the length, and whether it is in a file
_INLINE = 16384
_LOOK_EVERY_MS = 20
_ROOM_FOR_FD = socket.CMSG_SPACE(array.array("i").itemsize)


class Gone(EOFError):
    """The other side has died, or does not want to talk any more."""


class Channel:
    """One end.

    Args:
        connection: A connected stream socket; owned by this object from now on.
        alive: Whether the other side can still be expected to read and write.

    Attributes:
        unsent: What is left to be sent.
    """

    def __init__(self, connection: socket.socket, alive: Callable[[], bool]) -> None:
        connection.setblocking(False)
        self._socket, self._alive = connection, alive
        self._reader, self._writer = select.poll(), select.poll()
        self._reader.register(connection, select.POLLIN)
        self._writer.register(connection, select.POLLOUT)
        self.unsent: deque[_Letter] = deque()

    def send(self, message: Any) -> None:
        """Send an object that plain `pickle` can handle, and wait until all of it is on its way.

        Raises:
            Gone: The other side is.
        """
        self.put(message)
        while not self.flush():
            self._wait(self._writer)

    def put(self, message: Any) -> None:
        """Send as much of an object as can be without waiting; `flush` sends the rest.

        Raises:
            Gone: The other side is.
        """
        self.unsent.append(_Letter(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))
        self.flush()

    def flush(self) -> bool:
        """Send what can be sent without waiting; says whether that was all.

        Raises:
            Gone: The other side is.
        """
        while self.unsent:
            letter = self.unsent[0]
            rest, fd = letter.begin()
            attached = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            try:
                sent = self._socket.sendmsg([rest], attached)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise Gone from error
            except OSError as error:
                # So many files may be on their way at a time.
                if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                    return False
                raise
            if letter.went(sent):
                self.unsent.popleft()
        return True

    def receive(self) -> Any:
        """The next object.

        Raises:
            Gone: The other side is.
            OSError: It came in a file, and this process has as many open as it may have.
        """
        header, fd = bytearray(), None
        while len(header) < _HEADER.size:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    _HEADER.size - len(header), _ROOM_FOR_FD, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                self._wait(self._reader)
                continue
            except ConnectionResetError as error:  # it died with something of ours unread
                raise Gone from error
            if not data:
                raise Gone
            header += data
            for _, _, descriptor in ancillary:
                fd = array.array("i", descriptor)[0]
        length, in_file = _HEADER.unpack(header)
        if not in_file:
            return pickle.loads(self._exactly(length))
        if fd is None:
            raise OSError(
                errno.EMFILE, "a large message was lost, since this process has too many files open; raise `ulimit -n`"
            )
        try:
            with mmap.mmap(fd, length, prot=mmap.PROT_READ) as body:
                return pickle.loads(body)
        finally:
            os.close(fd)

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        rest = memoryview(data)
        while rest:
            try:
                received = self._socket.recv_into(rest)
            except BlockingIOError:
                self._wait(self._reader)
                continue
            except ConnectionResetError as error:
                raise Gone from error
            if not received:
                raise Gone
            rest = rest[received:]
        return data

    def _wait(self, poller: select.poll) -> None:
        while not poller.poll(_LOOK_EVERY_MS):
            if not self._alive():
                # What it wrote before it died is still there.
                if poller.poll(0):
                    return
                raise Gone

    def close(self) -> None:
        """Close this end; idempotent."""
        self._socket.close()
        for letter in self.unsent:
            letter.discard()
        self.unsent.clear()


class _Letter:
    """A pickled object that is to be sent, or is on its way.

    Only the first in the queue is put into a file: however many wait, they leave the process its descriptors.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._rest: memoryview | None = None
        self._fd: int | None = None

    def begin(self) -> tuple[memoryview, int | None]:
        """What is left to be sent, and a file to go with it."""
        if self._rest is None:
            length = len(self._body)
            self._fd = _file_of(self._body) if length > _INLINE else None
            header = _HEADER.pack(length, self._fd is not None)
            self._rest, self._body = memoryview(header if self._fd is not None else header + self._body), b""
        return self._rest, self._fd

    def went(self, nbytes: int) -> bool:
        """So much of it has been sent, and the file; says whether that was all."""
        assert self._rest is not None
        self.discard()
        self._rest = self._rest[nbytes:]
        return not self._rest

    def discard(self) -> None:
        """Close the file; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _file_of(body: bytes) -> int | None:
    """A file with this in it; None where no more files may be open."""
    try:
        fd = anonymous_file("marl_parallel-mail")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return None
        raise
    try:
        rest = memoryview(body)
        while rest:
            rest = rest[os.write(fd, rest) :]
    except BaseException:
        os.close(fd)
        raise
    return fd
