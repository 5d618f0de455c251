"""Other processes: their state and their stacks, and how to kill them with all that they have started.

`send` kills a process group. Processes that have left their group are found in two ways: after `adopt_orphans` the
orphans among all descendants are children of this process (`kill_children`), and what a worker starts inherits an
environment variable (`kill_marked`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import mmap
import operator
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Set
from types import FrameType
from typing import IO, Any, NoReturn

from marl_parallel.backends.memory import anonymous_file, append_only
from marl_parallel.types import installed

MARKER = "MARL_PARALLEL_WORKER"  # the environment variable of every worker and of the processes that it starts

# A process that was killed may still fork, or show its environment, while it ends: search again.
_SWEEPS = 20
_PAUSE_S = 0.005

STACK_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)
"""On this signal a worker writes the Python stacks of all its threads; None where there are no such signals."""

# A dump is many small writes without an end mark: it counts as complete when nothing is written for this long.
_COMPLETE_AFTER_S = 0.02
_ABORT_TIMEOUT_S = 0.5
_MOST_FRAMES = 100  # of a stack, as in `faulthandler`
# `faulthandler` ends the report of a fatal signal with the names of all loaded extension modules: thousands of letters.
_EXTENSION_MODULES = re.compile(r"\n*^Extension modules: .*\n?", re.MULTILINE)


# -- killing -----------------------------------------------------------------------------------------------------------


def send(pid: int, number: int) -> None:
    """Send a signal to the process group that `pid` leads, and to `pid`, which may not have made the group yet."""
    for deliver in (os.killpg, os.kill):
        # macOS forbids to signal a group of which only zombies are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            deliver(pid, number)


def reap(pid: int) -> int | None:
    """Reap a child that led a group, and kill the group; the exit code (negative: the signal), None while it lives."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        send(pid, signal.SIGKILL)  # while the number of the group still belongs to it
        os.waitpid(pid, 0)
    except ChildProcessError:  # someone else has reaped it
        return 255
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def kill_marked(value: str) -> None:
    """Kill every process whose marker starts with `value`."""
    mark = f"{MARKER}={value}".encode()
    for _ in range(_SWEEPS):
        killed = [pid for pid in _processes() if _kill_if_marked(pid, mark)]
        if not killed:
            return
        time.sleep(_PAUSE_S)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents have ended (Linux)."""
    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0):  # PR_SET_CHILD_SUBREAPER
        raise OSError("cannot adopt the orphans of workers (PR_SET_CHILD_SUBREAPER)")


def kill_children(timeout: float, spare: Set[int] = frozenset()) -> None:
    """Kill and reap the children of this process except `spare`, until none is left or the time is over.

    After `adopt_orphans` this ends all descendants.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:  # without children there is no need to look through /proc
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        children = [pid for pid in _processes() if pid not in spare and _state_and_parent(pid)[1] == os.getpid()]
        if not children or time.monotonic() >= deadline:
            return
        for pid in children:
            with contextlib.suppress(PermissionError, ProcessLookupError):  # its user has changed
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def memory_of(pid: int) -> int | None:
    """Bytes of resident memory of a process and its descendants; None if it is gone, or that is not known here.

    Where there is no /proc, psutil is asked if it is installed.
    """
    if os.path.exists("/proc/self/statm"):
        own = _resident(pid)
        return None if own is None else own + sum(_resident(child) or 0 for child in _descendants(pid))
    if not installed("psutil"):
        return None
    import psutil

    try:
        process = psutil.Process(pid)
        nbytes: int = process.memory_info().rss
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                nbytes += child.memory_info().rss
    except psutil.Error:
        return None
    return nbytes


def _resident(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):  # it has ended
        return None


def _descendants(pid: int) -> Iterator[int]:
    """The processes that a process and its descendants have started and that have not lost their parents."""
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                for child in map(int, file.read().split()):
                    yield child
                    yield from _descendants(child)


def state_of(pid: int) -> str:
    """The letter in `/proc/PID/stat`; "" if the process is gone."""
    return _state_and_parent(pid)[0]


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return "", -1
    return state.decode(), int(parent)


def started_at(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None if it is gone. No other one has this pid and time."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal())


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    if not _is_marked(pid, mark):
        return False
    with contextlib.suppress(ProcessLookupError):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:  # a kernel older than 5.3
            os.kill(pid, signal.SIGKILL)
            return True
        try:
            # Look again: the process may have ended, and the handle be that of another one with its number.
            if _is_marked(pid, mark):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    return True


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + mark in b"\0" + file.read()
    except OSError:  # gone, or another user's
        return False


# -- stacks ------------------------------------------------------------------------------------------------------------


def report_to(file: int | IO[Any]) -> None:
    """Have this process write its stacks to a file: at a native crash, on `STACK_SIGNAL`, and in `os._exit`."""
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

        A stopped process is continued. One that blocks the signal is aborted, which ends it. With `harmless`, nothing
        is done to either, nor to a process that has no handler for the signal any more, as far as `/proc` tells.
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
