"""Objects over a socket between two processes that may die at any moment.

The end of a stream is no sign that the other side is gone, since a simulator's own children inherit it. So the parent
of a worker must not wait here (`receive_now`, `put`, `flush`); the worker may (`receive`, `send`, `finish`), since it
dies with its parent. A large message goes into a file without a name, of which only the descriptor is sent: a socket
holds little, and the sender must not wait for the reader.

The other side may stop in the middle of a message. `receive_now` and `flush` keep what has come or gone so far, and go
on from there when they are called again.
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
from typing import Any

from marl_parallel.backends.memory import anonymous_file, lifted

_HEADER = struct.Struct("=Q?")  # the length, and whether it is in a file
_INLINE = 16384
_ROOM_FOR_FD = socket.CMSG_SPACE(array.array("i").itemsize)


class Gone(EOFError):
    """The other side has died, or does not want to talk any more."""


class Channel:
    """One end.

    Args:
        connection: A connected stream socket; owned by this object from now on.

    Attributes:
        unsent: What is left to be sent.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._reader, self._writer = select.poll(), select.poll()
        self._reader.register(connection, select.POLLIN)
        self._writer.register(connection, select.POLLOUT)
        self.unsent: deque[_Letter] = deque()
        # Of the message that is being received: its header, its body, the part of that still to come, and its file.
        self._header, self._body, self._missing = bytearray(), bytearray(), memoryview(b"")
        self._received_fd: int | None = None

    def fileno(self) -> int:
        """The socket's descriptor, to wait for what comes."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send an object that plain `pickle` can handle, and wait until all of it is on its way.

        Raises:
            Gone: The other side is.
        """
        self.put(message)
        self.finish()

    def finish(self) -> None:
        """Wait until all that was `put` is on its way.

        Raises:
            Gone: The other side is.
        """
        while not self.flush():
            self._writer.poll()

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
        """Wait for the next object and return it.

        Raises:
            Gone: The other side is.
            OSError: It came in a file, and this process has as many open as it may have.
        """
        while (message := self.receive_now()) is None:
            self._reader.poll()
        return message

    def receive_now(self) -> Any:
        """The next object if all of it is here, else None; never waits. What has come of it is kept for the next call.

        Raises:
            Gone: The other side is.
            OSError: It came in a file, and this process has as many open as it may have.
        """
        if len(self._header) < _HEADER.size:
            if not self._fill_header():
                return None
            length, in_file = _HEADER.unpack(self._header)
            self._body = bytearray(0 if in_file else length)
            self._missing = memoryview(self._body)
        while self._missing:
            try:
                received = self._socket.recv_into(self._missing)
            except BlockingIOError:
                return None
            except ConnectionResetError as error:
                raise Gone from error
            if not received:
                raise Gone
            self._missing = self._missing[received:]
        length, in_file = _HEADER.unpack(self._header)
        body, fd, self._received_fd = self._body, self._received_fd, None
        self._header, self._body, self._missing = bytearray(), bytearray(), memoryview(b"")
        if not in_file:
            return pickle.loads(body)
        if fd is None:
            raise OSError(
                errno.EMFILE, "a large message was lost, since this process has too many files open; raise `ulimit -n`"
            )
        try:
            with mmap.mmap(fd, length, prot=mmap.PROT_READ) as file:
                return pickle.loads(file)
        finally:
            os.close(fd)

    def _fill_header(self) -> bool:
        """Read what is there of the header, and the file that comes with it; whether the header is complete."""
        while len(self._header) < _HEADER.size:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    _HEADER.size - len(self._header), _ROOM_FOR_FD, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return False
            except ConnectionResetError as error:  # it died with something of ours unread
                raise Gone from error
            if not data:
                raise Gone
            self._header += data
            for _, _, descriptor in ancillary:
                self._received_fd = lifted(array.array("i", descriptor)[0])
        return True

    def close(self) -> None:
        """Close this end; idempotent."""
        self._socket.close()
        if self._received_fd is not None:
            os.close(self._received_fd)
            self._received_fd = None
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
