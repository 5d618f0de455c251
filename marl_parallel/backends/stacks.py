"""Where a worker process is, or was when it died: what `faulthandler` writes for those who look from outside.

Here live `CrashFile`, the outside's end, and `report_to`, which sets up the worker's; who is asked for a stack, and
when, is decided by supervision.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

STACK_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)
"""On this signal a worker writes the Python stacks of all its threads; None where there are no such signals."""

# A dump comes in many small writes, and nothing marks its end: it is over when it rests this long.
_REST = 0.02
_LAST_RESORT = 0.5


def report_to(file: int | IO[Any]) -> None:
    """Have this process write its stacks there: at a native crash, and on `STACK_SIGNAL` where there is one."""
    faulthandler.enable(file=file, all_threads=True)
    if STACK_SIGNAL is not None and sys.platform != "win32":
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)


class CrashFile:
    """A file that one worker appends its stacks to. A pipe would not do: a full one blocks the dying.

    Args:
        fd: Of the file; owned by this object from now on.

    Attributes:
        fd: The same; -1 once closed.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._start = 0

    def text(self) -> str:
        """What was written so far, without the stacks that `stack` has returned."""
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
            if self._await_rest(start, timeout):
                text = self._read(start)
                self._start = start + len(text.encode(errors="surrogateescape"))
                return text
            os.kill(pid, signal.SIGABRT)
            self._await_rest(start, _LAST_RESORT)
        return self._read(start)

    def close(self) -> None:
        """Close the descriptor, if it is still open."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _await_rest(self, start: int, timeout: float) -> bool:
        """Wait until something was written after `start` and no more comes; whether anything was."""
        deadline = time.monotonic() + timeout
        size, rested_since = start, time.monotonic()
        while True:
            now = time.monotonic()
            if (current := self._size()) != size:
                size, rested_since = current, now
            if (size > start and now - rested_since >= _REST) or now >= deadline:
                return size > start
            time.sleep(0.001)

    def _size(self) -> int:
        return os.fstat(self.fd).st_size

    def _read(self, start: int) -> str:
        if sys.platform != "win32":
            data = os.pread(self.fd, self._size() - start, start)
        else:  # where the position is not shared with the worker
            os.lseek(self.fd, start, os.SEEK_SET)
            data = os.read(self.fd, self._size() - start)
        return data.decode(errors="surrogateescape")


def state_of(pid: int) -> str:
    """The state letter in `/proc/PID/stat`, "" if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]
