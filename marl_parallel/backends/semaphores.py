"""A POSIX semaphore inside shared memory: the cheapest way for two processes to wake each other.

Here lives `Semaphore` and the handful of C functions it calls. Where the memory comes from is
`marl_parallel.backends.memory`; who waits for whom is the business of the backends.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import time
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

# A signal that arrives just before the call into C leaves nothing for it to be interrupted by; no wait is
# therefore longer than this, so that Ctrl-C is late by a second at worst, and never lost.
_LONGEST_WAIT = 1.0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Functions(NamedTuple):
    """The C library's functions; the first three keep the GIL, `wait_until` lets go of it.

    `clock` is what `wait_until` takes between the semaphore and the deadline, `now` reads the clock of the deadline.
    """

    init: Callable[..., int]
    post: Callable[..., int]
    try_wait: Callable[..., int]
    wait_until: Callable[..., int]
    clock: tuple[Any, ...]
    now: Callable[[], float]


def _load() -> _Functions | None:
    """Find the functions; None where the platform lacks one of them."""
    try:
        held, released = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
        init, post, try_wait = held.sem_init, held.sem_post, held.sem_trywait
        timed_wait = released.sem_timedwait
    except (AttributeError, OSError, TypeError):
        return None
    if hasattr(released, "sem_clockwait"):
        return _Functions(
            init, post, try_wait, released.sem_clockwait, (ctypes.c_int(time.CLOCK_MONOTONIC),), time.monotonic
        )
    return _Functions(init, post, try_wait, timed_wait, (), time.time)


_functions = _load()


def available() -> bool:
    """Whether this platform has process-shared semaphores (Linux has; macOS and Windows have not)."""
    return _functions is not None


class Semaphore:
    """A process-shared counter that can be waited for, at a fixed place in a shared block.

    Every process that maps the block makes an object of its own at the same offset; one of them calls
    `init` before any other touches it. Nothing needs to be freed: the semaphore is gone with the memory.

    While the object lives, `buffer.close()` raises `BufferError`.

    Attributes:
        post: Add one; wakes one that waits.
        try_wait: Take one if there is one, as the C function: 0 if it did. Never blocks.
        init: Start anew at a value; nobody may be waiting.
    """

    SIZE: ClassVar[int] = 64
    """Bytes that a semaphore occupies: a `sem_t` (32 in glibc), alone on its cache line."""

    __slots__ = ("_nap_ends", "_wait_until", "init", "post", "try_wait")

    post: Callable[[], int]
    try_wait: Callable[[], int]
    init: Callable[[int], int]

    def __init__(self, buffer: mmap.mmap, offset: int) -> None:
        """Bind to the place.

        Args:
            buffer: The shared memory.
            offset: Of the first byte; a multiple of 8.

        Raises:
            ValueError: The offset is unaligned or the semaphore would not fit.
            NotImplementedError: This platform has no such semaphores.
        """
        if _functions is None:
            raise NotImplementedError("this platform has no process-shared semaphores (sem_init)")
        if offset % 8 or not 0 <= offset <= len(buffer) - self.SIZE:
            raise ValueError(f"no room for a semaphore at offset {offset} of {len(buffer)} bytes")
        semaphore = ctypes.byref((ctypes.c_char * self.SIZE).from_buffer(buffer, offset))
        self._nap_ends = _deadline(0.0)
        # Bound in C: a method of our own would cost as much as the call.
        self.post = functools.partial(_functions.post, semaphore)
        self.try_wait = functools.partial(_functions.try_wait, semaphore)
        self.init = functools.partial(_functions.init, semaphore, 1)
        self._wait_until = functools.partial(_functions.wait_until, semaphore, *_functions.clock)

    def try_take(self) -> bool:
        """Take one if there is one; returns whether it did. Never blocks."""
        return self.try_wait() == 0

    def nap(self, tick: float) -> bool:
        """Take one, waiting for at most `tick` seconds, and often less: cheaper than `take`, to be called in a loop.

        Deadlines are drawn up ahead and serve until they have passed, since drawing one up costs as much as the call.

        Returns:
            Whether one was taken.
        """
        if self._wait_until(self._nap_ends) == 0:
            return True
        if (error := ctypes.get_errno()) not in (errno.EINTR, errno.ETIMEDOUT):
            raise OSError(error, os.strerror(error))
        self._nap_ends = _deadline(tick)
        return False

    def take(self, timeout: float | None = None) -> bool:
        """Take one, waiting for it; signal handlers run meanwhile, so Ctrl-C raises `KeyboardInterrupt`.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Returns:
            Whether one was taken.
        """
        if self.try_take():
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            patience = _LONGEST_WAIT
            if deadline is not None:
                patience = min(patience, deadline - time.monotonic())
                if patience <= 0:
                    return False
            if self._wait_until(_deadline(patience)) == 0:
                return True
            if (error := ctypes.get_errno()) not in (errno.EINTR, errno.ETIMEDOUT):
                raise OSError(error, os.strerror(error))


def _deadline(seconds: float) -> Any:
    assert _functions is not None
    whole, fraction = divmod(_functions.now() + seconds, 1)
    return ctypes.byref(_Timespec(int(whole), int(fraction * 1e9)))
