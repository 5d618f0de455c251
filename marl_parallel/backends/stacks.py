"""Stacks of worker processes: where a worker hangs, and where it was when it crashed.

`report_to` sets up `faulthandler` in a worker; `CrashFile` is the parent's side, which asks for stacks and reads them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from typing import IO, Any

from marl_parallel.backends.descendants import state_of
from marl_parallel.backends.memory import anonymous_file, append_only

STACK_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)
"""On this signal a worker writes the Python stacks of all its threads; None where there are no such signals."""

# A dump is many small writes without an end mark: it counts as complete when nothing is written for this long.
_COMPLETE_AFTER_S = 0.02
_ABORT_TIMEOUT_S = 0.5


def report_to(file: int | IO[Any]) -> None:
    """Have this process write its stacks to a file: at a native crash, and on `STACK_SIGNAL` where there is one."""
    faulthandler.enable(file=file, all_threads=True)
    if STACK_SIGNAL is not None and sys.platform != "win32":
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)


class CrashFile:
    """A file that one worker appends its stacks to. A pipe would not do: a full one blocks the dying process.

    Args:
        fd: The file; owned by this object from now on.

    Attributes:
        fd: The same; -1 once closed.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._start = 0

    @classmethod
    def create(cls) -> CrashFile:
        """Create an empty one."""
        # The worker's descriptor is a copy of this one and shares the position, which must not matter to it.
        return cls(append_only(anonymous_file("marl_parallel-stacks")))

    def text(self) -> str:
        """The text that was written so far, without the stacks that `stack` has returned."""
        return self._read(self._start)

    def stack(self, pid: int, timeout: float) -> str:
        """Have the living process `pid` write the stacks of its threads; "" if it cannot, even by `SIGABRT`.

        A stopped process is continued. One that blocks the signal is aborted, which ends it.
        """
        start = self._size()
        if STACK_SIGNAL is None:
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
            if state_of(pid) == "T":
                os.kill(pid, signal.SIGCONT)
            if self._wait_complete(start, timeout):
                text = self._read(start)
                self._start = start + len(text.encode(errors="surrogateescape"))
                return text
            os.kill(pid, signal.SIGABRT)
            self._wait_complete(start, _ABORT_TIMEOUT_S)
        return self._read(start)

    def close(self) -> None:
        """Close the descriptor, if it is still open."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _wait_complete(self, start: int, timeout: float) -> bool:
        """Wait until something was written after `start` and no more follows; returns whether anything was."""
        deadline = time.monotonic() + timeout
        size, changed = start, time.monotonic()
        while True:
            now = time.monotonic()
            if (current := self._size()) != size:
                size, changed = current, now
            if (size > start and now - changed >= _COMPLETE_AFTER_S) or now >= deadline:
                return size > start
            time.sleep(0.001)

    def _size(self) -> int:
        return os.fstat(self.fd).st_size

    def _read(self, start: int) -> str:
        if sys.platform != "win32":
            data = os.pread(self.fd, self._size() - start, start)
        else:  # read after the worker's death only, so that the shared position does not matter
            os.lseek(self.fd, start, os.SEEK_SET)
            data = os.read(self.fd, self._size() - start)
        return data.decode(errors="surrogateescape")
