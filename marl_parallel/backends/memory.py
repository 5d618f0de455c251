"""Shared memory without a name, and file descriptors that never take the numbers of the standard streams.

Memory without a name is freed with the last process that uses it, however that ends. The layout of a block is decided
in `marl_parallel.core.columns`.

A program whose descriptors 0 to 2 are closed (`python train.py <&- >&- 2>&-`) gets these numbers for whatever it opens
next. What anybody prints would then be written into a socket or into shared memory of this package.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FIRST_FREE = 3
"""The lowest number that a descriptor of this package may have."""


def lifted(fd: int) -> int:
    """Move a descriptor above the numbers of the standard streams; if it has to move, the old one is closed."""
    if fd >= _FIRST_FREE or fcntl is None:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    finally:
        os.close(fd)


def duplicate(fd: int) -> int:
    """Copy a descriptor; the copy is not inherited by other programs."""
    return lifted(os.dup(fd))


def pipe() -> tuple[int, int]:
    """Open a pipe and return its read end and its write end."""
    read_end, write_end = os.pipe()
    return lifted(read_end), lifted(write_end)


def socket_pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """Open two connected Unix sockets."""
    ours, theirs = (
        one if one.fileno() >= _FIRST_FREE else socket.socket(fileno=lifted(one.detach()))
        for one in socket.socketpair(socket.AF_UNIX, kind)
    )
    return ours, theirs


def fill_standard() -> None:
    """Open the null device at those descriptors of 0 to 2 that are closed."""
    for fd in range(_FIRST_FREE):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if null != fd:
                os.dup2(null, fd)
                os.close(null)


def anonymous_file(name: str) -> int:
    """Open a new, empty file that is deleted when its last descriptor is closed.

    Args:
        name: The name that `/proc` shows for it.

    Returns:
        A descriptor that the caller owns, not inherited by other programs.
    """
    if hasattr(os, "memfd_create"):
        return lifted(os.memfd_create(name, os.MFD_CLOEXEC))
    with tempfile.TemporaryFile(prefix=name) as file:
        return duplicate(file.fileno())


def append_only(fd: int) -> int:
    """Have all writes to a file go to its end, whatever the position; returns the descriptor."""
    if fcntl is not None:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


class Block:
    """A piece of shared memory and, until `close_fd`, the descriptor by which other processes map it.

    The mapping itself is never closed here: views of it (arrays, semaphores) stay readable, and it is freed with the
    last of them. It does not need the descriptor to stay open.

    Args:
        fd: A file of at least `nbytes`; owned by this object from now on.
        nbytes: Size in bytes.

    Attributes:
        fd: The descriptor; -1 once closed.
        nbytes: Size in bytes.
        buffer: The memory, shared by all processes that map the file.

    Raises:
        ValueError: The file behind `fd` is smaller than `nbytes`.
    """

    __slots__ = ("buffer", "fd", "nbytes")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        fill_standard()  # the mapping keeps a descriptor of its own, which cannot be moved
        try:
            self.buffer = mmap.mmap(fd, nbytes)
        except BaseException:
            self.close_fd()
            raise

    @classmethod
    def create(cls, nbytes: int) -> Block:
        """Create a block filled with zeros.

        Raises:
            ValueError: `nbytes` is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"a block has at least one byte, not {nbytes}")
        fd = anonymous_file("marl_parallel")
        try:
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Block:
        """Map a block that another process has created; the same as `Block(fd, nbytes)`."""
        return cls(fd, nbytes)

    def close_fd(self) -> None:
        """Close the descriptor, if it is still open; the memory stays."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close_fd()
