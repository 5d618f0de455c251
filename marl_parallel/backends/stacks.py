"""The stacks of a worker, which it writes into a file of the caller: at a crash, on a signal, and in `os._exit`."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import operator
import os
import re
import signal
import sys
import time
from types import FrameType
from typing import IO, Any, NoReturn

from marl_parallel.backends.descendants import state_of
from marl_parallel.backends.memory import anonymous_file, append_only

STACK_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)
"""On this signal a worker writes the Python stacks of all its threads; None where there are no such signals."""

# A dump is many small writes without an end mark: it counts as complete when nothing is written for this long.
_COMPLETE_AFTER_S = 0.02
_ABORT_TIMEOUT_S = 0.5
_MOST_FRAMES = 100  # of a stack, as in `faulthandler`
# `faulthandler` ends the report of a fatal signal with the names of all loaded extension modules: thousands of letters.
_EXTENSION_MODULES = re.compile(r"\n*^Extension modules: .*\n?", re.MULTILINE)


def report_to(file: int | IO[Any]) -> None:
    """Have this process write its stacks to a file: at a native crash, on `STACK_SIGNAL`, and at `os._exit`."""
    faulthandler.enable(file=file, all_threads=True)
    if STACK_SIGNAL is not None and sys.platform != "win32":
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    _report_exits(file if isinstance(file, int) else file.fileno())


def _report_exits(fd: int) -> None:
    """Have `os._exit` write the stack of its caller before it ends this process; Python has no audit event for it.

    It writes nothing in children that this process forks, and nothing where this package ends the process.
    """
    pid, end = os.getpid(), os._exit

    @functools.wraps(end)
    def _exit(status: int) -> NoReturn:
        operator.index(status)  # else it raises, and the process goes on
        caller: FrameType | None = sys._getframe(1)
        if os.getpid() == pid and caller is not None and _package_of(caller) != "marl_parallel":
            lines = ["os._exit was called here (most recent call first):"]
            while caller is not None and len(lines) <= _MOST_FRAMES:
                code = caller.f_code
                lines.append(f'  File "{code.co_filename}", line {caller.f_lineno} in {code.co_name}')
                caller = caller.f_back
            with contextlib.suppress(OSError):  # it must end the process all the same
                os.write(fd, "\n".join([*lines, ""]).encode(errors="backslashreplace"))
        end(status)

    _exit.__module__, _exit.__qualname__ = "os", "_exit"  # so that it is pickled by name
    os._exit = _exit


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _handles_stack_signal(pid: int) -> bool:
    """Whether a process, which is not stopped, handles `STACK_SIGNAL` and does not block it; False without `/proc`."""
    assert STACK_SIGNAL is not None
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        return False
    bit = 1 << STACK_SIGNAL - 1
    caught, blocked = (int(fields[name], 16) & bit for name in ("SigCgt", "SigBlk"))
    return bool(caught and not blocked and fields["State"].split()[0] not in ("T", "t"))


class CrashFile:
    """A file that one worker appends its stacks to. A full pipe would block the dying process."""

    def __init__(self) -> None:
        self.fd = anonymous_file("marl_parallel-stacks")
        append_only(self.fd)  # the worker's descriptor is a copy of this one and shares its position
        self._start = 0

    def text(self) -> str:
        """What was written so far, without the stacks that `stack` has returned."""
        return _EXTENSION_MODULES.sub("\n", self._read(self._start))

    def stack(self, pid: int, timeout: float = 1.0, *, harmless: bool = False) -> str:
        """Have the living process `pid` write the stacks of its threads; "" if it cannot, even by `SIGABRT`.

        A stopped process is continued. A process that blocks the signal is aborted, which ends it. With `harmless`,
        both are left alone, and so is a process that, according to `/proc`, does not handle the signal any more.
        """
        start = self._size()
        if STACK_SIGNAL is None or (harmless and not _handles_stack_signal(pid)):
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
            if not harmless and state_of(pid) == "T":
                os.kill(pid, signal.SIGCONT)
            if self._wait_complete(start, timeout):
                text = self._read(start)
                self._start = start + len(text.encode(errors="surrogateescape"))
                return text
            if harmless:
                return ""
            os.kill(pid, signal.SIGABRT)
            self._wait_complete(start, _ABORT_TIMEOUT_S)
        return _EXTENSION_MODULES.sub("\n", self._read(start))

    def close(self) -> None:
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
        return 0 if self.fd < 0 else os.fstat(self.fd).st_size

    def _read(self, start: int) -> str:
        if self.fd < 0:  # closed meanwhile by a signal handler
            return ""
        if sys.platform != "win32":
            data = os.pread(self.fd, self._size() - start, start)
        else:  # read after the worker's death only, so that the shared position does not matter
            os.lseek(self.fd, start, os.SEEK_SET)
            data = os.read(self.fd, self._size() - start)
        return data.decode(errors="surrogateescape")
