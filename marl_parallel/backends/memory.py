"""Shared memory without a name, semaphores inside it, and descriptors that never take a standard stream's number.

Memory without a name is freed with the last process that uses it, however that process ends.

A program whose descriptors 0 to 2 are closed (`python train.py <&- >&- 2>&-`) gets these numbers for whatever it opens
next, and what it prints would go into sockets or shared memory of this package. So functions here that open something
open the null device at these numbers first (`fill_standard`), and other modules open descriptors only after that.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any, ClassVar

from marl_parallel.core.reports.advice import naming_limits

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# -- descriptors -------------------------------------------------------------------------------------------------------


def fill_standard() -> None:
    """Open the null device at those descriptors of 0 to 2 that are closed."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if null != fd:
                os.dup2(null, fd)
                os.close(null)


@naming_limits()
def anonymous_file(name: str) -> int:
    """Open a new, empty file that is deleted when its last descriptor is closed; `/proc` shows it by `name`."""
    fill_standard()
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


@naming_limits()
def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected Unix sockets that keep packets whole (Linux)."""
    fill_standard()
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def append_only(fd: int) -> None:
    """Have all writes to a file go to its end, regardless of the position."""
    if fcntl is not None:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)


# -- memory ------------------------------------------------------------------------------------------------------------


def mapped(fd: int) -> mmap.mmap:
    """Map a whole file. The descriptor may be closed afterwards; the last view (array, semaphore) frees the mapping."""
    fill_standard()  # the mapping keeps a descriptor of its own
    return mmap.mmap(fd, 0)


class Block:
    """Shared memory. Other processes map it by its descriptor `fd`, which is open until `close_fd`."""

    fd = -1

    def __init__(self) -> None:
        self.fd = anonymous_file("marl_parallel")

    @naming_limits()
    def allocate(self, nbytes: int) -> mmap.mmap:
        """The memory, zeroed, of this size."""
        os.ftruncate(self.fd, nbytes)
        return mapped(self.fd)

    def close_fd(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close_fd


# -- semaphores --------------------------------------------------------------------------------------------------------

# A signal that arrives just before the call into C has nothing to interrupt. So no single wait is longer than this:
# Ctrl-C is late by a second at worst, and never lost.
_LONGEST_WAIT_S = 1.0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_clock_arguments: tuple[Any, ...] = ()
_clock: Callable[[], float] = time.time
try:
    _with_gil, _without_gil = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
    _init, _post, _try_wait = _with_gil.sem_init, _with_gil.sem_post, _with_gil.sem_trywait
    _wait_until = _without_gil.sem_timedwait
    _available = True
    if hasattr(_without_gil, "sem_clockwait"):
        _wait_until, _clock = _without_gil.sem_clockwait, time.monotonic
        _clock_arguments = (ctypes.c_int(time.CLOCK_MONOTONIC),)
except (AttributeError, OSError, TypeError):  # macOS and Windows
    _available = False


def has_semaphores() -> bool:
    """Whether semaphores can be in shared memory: on Linux, not on macOS and Windows."""
    return _available


class Semaphore:
    """A POSIX semaphore at a fixed offset in a shared block: the cheapest way for two processes to wake each other.

    Each process makes an object of its own at the same offset, a multiple of 8; one of them calls `init` first.
    """

    SIZE: ClassVar[int] = 64  # bytes that it occupies: a `sem_t` (32 in glibc), alone on its cache line

    __slots__ = ("_nap_ends", "_wait_until", "address", "init", "post", "try_wait")

    address: int  # in this process's memory
    post: Callable[[], int]  # add one; wakes one process that waits
    try_wait: Callable[[], int]  # take one without blocking, as the C function: returns 0 if it did
    init: Callable[[int], int]  # set the value; nobody may be waiting

    def __init__(self, buffer: mmap.mmap, offset: int) -> None:
        if offset % 8 or not 0 <= offset <= len(buffer) - self.SIZE:
            raise ValueError(f"no room for a semaphore at offset {offset} of {len(buffer)} bytes")
        memory = (ctypes.c_char * self.SIZE).from_buffer(buffer, offset)
        self.address, semaphore = ctypes.addressof(memory), ctypes.byref(memory)
        # Bound in C: a method of our own would cost as much as the call.
        self.post = functools.partial(_post, semaphore)
        self.try_wait = functools.partial(_try_wait, semaphore)
        self.init = functools.partial(_init, semaphore, 1)
        self._wait_until = functools.partial(_wait_until, semaphore, *_clock_arguments)
        self._nap_ends = _deadline(0.0)

    def try_take(self) -> bool:
        return self.try_wait() == 0

    def nap(self, tick: float) -> bool:
        """Take one, waiting for at most `tick` seconds and often less: cheaper than `take`, for use in a loop."""
        if self._wait_until(self._nap_ends) == 0:  # serves until it has passed: making it costs as much as the call
            return True
        _check_errno()
        self._nap_ends = _deadline(tick)
        return False

    def take(self, timeout: float | None = None) -> bool:
        """Take one, waiting at most `timeout` seconds for it, while signal handlers run; returns whether it did."""
        if self.try_take():
            return True
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (patience := min(_LONGEST_WAIT_S, deadline - time.monotonic())) > 0:
            if self._wait_until(_deadline(patience)) == 0:
                return True
            _check_errno()
        return False


def _check_errno() -> None:
    if (error := ctypes.get_errno()) not in (errno.EINTR, errno.ETIMEDOUT):
        raise OSError(error, os.strerror(error))


def _deadline(seconds: float) -> Any:
    whole, fraction = divmod(_clock() + seconds, 1)
    return ctypes.byref(_Timespec(int(whole), int(fraction * 1e9)))
