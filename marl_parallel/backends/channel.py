"""Objects over a socket between two processes that may die at any moment.

The end of a stream is no sign that the other side is gone, since a simulator's own children inherit it; so both
directions look at somebody who knows from time to time, and never block for good.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("=Q")
_LOOK_EVERY_MS = 20


class Gone(EOFError):
    """The other side has died, or does not want to talk any more."""


class Channel:
    """One end.

    Args:
        connection: A connected stream socket; owned by this object from now on.
        alive: Whether the other side can still be expected to read and write.
    """

    def __init__(self, connection: socket.socket, alive: Callable[[], bool]) -> None:
        connection.setblocking(False)
        self._socket, self._alive = connection, alive
        self._reader, self._writer = select.poll(), select.poll()
        self._reader.register(connection, select.POLLIN)
        self._writer.register(connection, select.POLLOUT)

    def send(self, message: Any) -> None:
        """Send an object that plain `pickle` can handle.

        Raises:
            Gone: The other side is.
        """
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for part in (_LENGTH.pack(len(body)), body):
            rest = memoryview(part)
            while rest:
                try:
                    rest = rest[self._socket.send(rest) :]
                except BlockingIOError:
                    self._wait(self._writer)
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise Gone from error

    def receive(self) -> Any:
        """The next object.

        Raises:
            Gone: The other side is.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return pickle.loads(self._exactly(length))

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        rest = memoryview(data)
        while rest:
            try:
                received = self._socket.recv_into(rest)
            except BlockingIOError:
                self._wait(self._reader)
                continue
            except ConnectionResetError as error:  # it died with something of ours unread
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
