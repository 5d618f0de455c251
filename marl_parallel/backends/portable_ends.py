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


def send(pipe: int, message: Any) -> None:
    """Write an object to a pipe.

    Raises:
        OSError: Nobody reads any more.
    """
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    for part in (_LENGTH.pack(len(body)), body):
        write(pipe, part)


def write(pipe: int, data: bytes) -> None:
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
        part = os.read(pipe, min(nbytes - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return data
