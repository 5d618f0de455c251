"""File descriptors that never take the numbers of standard input, output and error.

A program whose descriptors 0 to 2 are closed (`python train.py <&- >&- 2>&-`) gets these numbers for whatever it opens
next. What anybody prints would then be written into a socket or into shared memory of ours.
"""

from __future__ import annotations

import os
import socket
import sys

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOWEST = 3
"""The lowest number that a descriptor of ours may have."""


def lifted(fd: int) -> int:
    """Move a descriptor to a number that is not of the standard streams; the old one is closed if it has to move."""
    if fd >= LOWEST or fcntl is None:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST)
    finally:
        os.close(fd)


def duplicate(fd: int) -> int:
    """A copy of a descriptor, not inherited by other programs."""
    return lifted(os.dup(fd))


def pipe() -> tuple[int, int]:
    """The read end and the write end of a new pipe."""
    read_end, write_end = os.pipe()
    return lifted(read_end), lifted(write_end)


def socket_pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """Two connected Unix sockets."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    return _lifted_socket(ours), _lifted_socket(theirs)


def _lifted_socket(one: socket.socket) -> socket.socket:
    return one if one.fileno() >= LOWEST else socket.socket(fileno=lifted(one.detach()))


def fill_standard() -> None:
    """Open the null device at those of 0 to 2 that are closed."""
    for fd in range(LOWEST):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if null != fd:
                os.dup2(null, fd)
                os.close(null)


def standard_streams() -> None:
    """Give this process `sys.stdout` and `sys.stderr` where it has none, since simulators write to them."""
    fill_standard()
    for name, fd in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            stream = open(fd, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
