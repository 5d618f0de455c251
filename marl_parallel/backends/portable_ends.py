"""What both ends of the portable backend know: where they meet, and how they talk.

Here live the shared memory that is found by a name, messages over a pipe, and what a worker is told first. The parent
is `portable.py`, the worker `portable_worker.py`.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import sys
from typing import Any, NamedTuple

_LENGTH = struct.Struct("=Q")
_MOST_AT_A_TIME = 1 << 20


class Start(NamedTuple):
    """The first message to a worker.

    Attributes:
        worker: Its number.
        num_workers: Of how many.
        folder: Where everything is that has a name.
        key: What the parent proves by that it is the parent, and the worker that it is the worker.
        argv: `sys.argv`.
        memory: Descriptors of the two files that are shared, inherited; None where they are found by their names.
    """

    worker: int
    num_workers: int
    folder: str
    key: bytes
    argv: list[str]
    memory: tuple[int, int] | None = None

    @property
    def address(self) -> str:
        """Where the worker listens: the one kind of address that is nobody else's business, on each system."""
        if sys.platform == "win32":
            return rf"\\.\pipe\{os.path.basename(self.folder)}-{self.worker}"
        return os.path.join(self.folder, f"socket-{self.worker}")

    @property
    def crash_path(self) -> str:
        """The file that the worker writes its stacks to."""
        return os.path.join(self.folder, f"stacks-{self.worker}")


class NamedMemory:
    """Memory that every process gets that asks for it by the same name while one that did still lives.

    Args:
        folder: A folder of the parent's own. It may be removed once all have made their object.
        name: Within the folder.
        fd: Of the file, where it is not to be found by its name any more; owned by this object from now on.

    Attributes:
        fd: Of the file; -1 where memory has a name of its own.
    """

    def __init__(self, folder: str, name: str, fd: int | None = None) -> None:
        self.fd = -1 if fd is None else fd
        if sys.platform == "win32":
            self._tag = f"{os.path.basename(folder)}-{name}"
        elif fd is None:
            self.fd = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT, 0o600)

    def map(self, nbytes: int) -> mmap.mmap:
        """The memory, zeroed when the first process maps it; it stays for as long as anything refers to it."""
        if sys.platform == "win32":
            return mmap.mmap(-1, nbytes, tagname=self._tag)
        if os.fstat(self.fd).st_size < nbytes:
            os.ftruncate(self.fd, nbytes)
        return mmap.mmap(self.fd, nbytes)

    def close(self) -> None:
        """Let go of the name; what has been mapped stays."""
        if sys.platform != "win32":
            os.close(self.fd)


def packed(message: Any) -> list[memoryview]:
    """The parts that an object is written to a pipe in."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return [memoryview(_LENGTH.pack(len(body))), memoryview(body)]


def send(pipe: int, message: Any) -> None:
    """Write an object to a pipe.

    Raises:
        OSError: Nobody reads any more.
    """
    for part in packed(message):
        write(pipe, part)


def write(pipe: int, data: bytes | memoryview) -> None:
    """Write all of it to a pipe.

    Raises:
        OSError: Nobody reads any more.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def receive(pipe: int) -> Any:
    """Read an object from a pipe.

    Raises:
        EOFError: Nobody writes any more.
    """
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return pickle.loads(_exactly(pipe, length))


def _exactly(pipe: int, nbytes: int) -> bytearray:
    data = bytearray()
    while len(data) < nbytes:
        part = os.read(pipe, min(nbytes - len(data), _MOST_AT_A_TIME))
        if not part:
            raise EOFError
        data += part
    return data


class Inbox:
    """Reads objects from a pipe or socket that does not block, as much as there is at a time.

    Args:
        fd: Its descriptor, which stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._data = bytearray()

    def receive_now(self) -> Any:
        """The next object if all of it is here, else None. What has come of it is kept for the next call.

        Raises:
            EOFError: Nobody writes any more.
            OSError: Likewise.
        """
        while (missing := self._missing()) > 0:
            try:
                part = os.read(self._fd, min(missing, _MOST_AT_A_TIME))
            except BlockingIOError:
                return None
            if not part:
                raise EOFError
            self._data += part
        data, self._data = self._data, bytearray()
        return pickle.loads(memoryview(data)[_LENGTH.size :])

    def _missing(self) -> int:
        """How many bytes are to come, as far as is known."""
        if len(self._data) < _LENGTH.size:
            return _LENGTH.size - len(self._data)
        (length,) = _LENGTH.unpack_from(self._data)
        return int(_LENGTH.size + length - len(self._data))
