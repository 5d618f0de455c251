"""What runs beside the workers of one node: looks at them from outside, and keeps what they leave behind.

A worker that computes, hangs or is stopped cannot be asked, and one that died has nothing to say; their files can be
read all the same, and what they have started can be ended. On a system without `/proc`, nothing is known of them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from marl_parallel.backends import descendants
from marl_parallel.backends.memory import Block
from marl_parallel.backends.ray_survivor import Survivor
from marl_parallel.backends.ray_worker import Files, Greeting
from marl_parallel.backends.stacks import CrashFile
from marl_parallel.core.ledger import Ledger

_STACK_WITHIN_S = 1.0
_DEAD_WITHIN_S = 2.0

# From <linux/pidfd.h>: struct pidfd_info in its first size, which ends with the exit code.
_PIDFD_INFO_NBYTES = 64
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO_NBYTES << 16 | 0xFF << 8 | 11


class Remains(NamedTuple):
    """Of a worker that has died.

    Attributes:
        ledger: Its bytes.
        records: The whole records of its environments; empty where there was no block yet.
        said: What `ray_worker.what_was_said` reads.
        stack: The stack at a native crash, empty where there is none.
        exitcode: As of `Lost`; None where the kernel does not tell.
    """

    ledger: bytes
    records: bytes
    said: bytes
    stack: str
    exitcode: int | None


class _Held:
    """One worker, seen from outside."""

    def __init__(self, greeting: Greeting) -> None:
        self.pid, self.marker = greeting.pid, greeting.marker
        with contextlib.ExitStack() as stack:  # it may be gone half-way
            self.handle = os.pidfd_open(greeting.pid)
            stack.callback(os.close, self.handle)
            opened = []
            for fd in greeting.files:
                opened.append(os.open(f"/proc/{greeting.pid}/fd/{fd}", os.O_RDWR))
                stack.callback(os.close, opened[-1])
            self.files = Files(*opened)
            self.memory = Block(os.dup(self.files.ledger), Ledger.NBYTES)
            stack.pop_all()
        self.crash = CrashFile(self.files.crash)

    def watched_by(self, survivor: Survivor) -> bool:
        return survivor.watch(self.handle, self.pid, self.marker)

    def kill(self) -> None:
        """Kill it, and wait until it has died."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            _await_death(self.handle)

    def end(self) -> None:
        """Kill it, with its process group and whatever else carries its mark."""
        self.kill()
        descendants.kill_left_behind(self.pid, self.marker)

    def exitcode(self) -> int | None:
        """How it ended, once it has: others than its parent are told by Linux 6.15 and later."""
        import fcntl  # not on Windows, where nobody comes here

        told = bytearray(_PIDFD_INFO_NBYTES)
        struct.pack_into("=Q", told, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(self.handle, _PIDFD_GET_INFO, told)
        except OSError:
            return None
        (mask,), (status,) = struct.unpack_from("=Q", told), struct.unpack_from("=i", told, _PIDFD_INFO_NBYTES - 4)
        return os.waitstatus_to_exitcode(status) if mask & _PIDFD_INFO_EXIT else None

    def let_go(self) -> None:
        for fd in (self.handle, *self.files):
            os.close(fd)


def _await_death(handle: int) -> None:
    """Wait until the process of a pidfd has died, but not for long."""
    poll = select.poll()  # unlike `select.select`, it takes any number of descriptors
    poll.register(handle, select.POLLIN)
    poll.poll(_DEAD_WITHIN_S * 1e3)


class RayWarden:
    """The actor. Workers are known to it by keys of the driver's."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._survivor: Survivor | None = None

    def hold(self, key: int, greeting: Greeting) -> bool:
        """Get hold of a worker; says whether that could be done."""
        try:
            self._held[key] = held = _Held(greeting)
        except (OSError, AttributeError):  # it is gone already, or this system has no such things
            return False
        if self._survivor is None or not held.watched_by(self._survivor):
            self._survivor = survivor = Survivor()
            for held in self._held.values():
                held.watched_by(survivor)
        return True

    def look(self, keys: Iterable[int]) -> tuple[float, dict[int, bytes]]:
        """This machine's clock, and the ledgers of workers as they are right now."""
        return time.monotonic(), {key: bytes(self._held[key].memory.buffer) for key in keys if key in self._held}

    def discard(self, key: int) -> None:
        """Tell a worker that nobody waits for what it has not begun yet."""
        if key in self._held:
            Ledger(self._held[key].memory.buffer).discard()

    def stack(self, key: int) -> str:
        """The Python stack of a worker as it is right now, empty where it cannot be had."""
        return self._held[key].crash.stack(self._held[key].pid, _STACK_WITHIN_S) if key in self._held else ""

    def remains(self, key: int, places: tuple[int, int] | None, *, kill: bool) -> Remains | None:
        """What a worker has left behind.

        Args:
            key: Which.
            places: Where the records of its environments begin and end; None where there is no block yet.
            kill: Whether it is to be ended; else it has died, or is just dying.

        Returns:
            None where nothing is known of it.
        """
        if key not in self._held:
            return None
        held, (start, stop) = self._held[key], places or (0, 0)
        if kill:
            held.kill()
        _await_death(held.handle)
        return Remains(
            bytes(held.memory.buffer),
            os.pread(held.files.block, stop - start, start),
            os.pread(held.files.said, os.fstat(held.files.said).st_size, 0),
            held.crash.text(),
            held.exitcode(),
        )

    def end(self, keys: Sequence[int]) -> None:
        """End workers with all that they have started, and forget them."""
        for held in [self._held.pop(key) for key in keys if key in self._held]:
            held.end()
            held.let_go()
