"""Other processes: their state and their memory, and how to kill them with all that they have started.

`send` kills a process group. Processes that have left their group are found in two ways: after `adopt_orphans` the
orphans among all descendants are children of this process (`kill_children`), and what a worker starts inherits an
environment variable (`kill_marked`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator

from marl_parallel.types import installed

MARKER = "MARL_PARALLEL_WORKER"  # the environment variable of every worker and of the processes that it starts

# A process that was killed may still fork, or show its environment, while it ends: search again.
_SWEEPS = 20
_PAUSE_S = 0.005
_STOPPED = ("T", "t")  # states of processes: stopped by a signal, or by a debugger
_PF_EXITING = 4  # among the kernel's flags of a process

UNKNOWN_EXITCODE = 255  # what `reap` returns for a child that someone else has reaped


def send(pid: int, number: int) -> None:
    """Send a signal to the process group that `pid` leads, and to `pid`, which may not have made the group yet."""
    for deliver in (os.killpg, os.kill):
        # macOS forbids to signal a group of which only zombies are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            deliver(pid, number)


def reap(pid: int, *, group: bool = True) -> int | None:
    """Reap a child that led a group; the exit code (negative: the signal), None while it lives.

    This kills the group, unless `group` is False.
    """
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        if group:
            send(pid, signal.SIGKILL)  # while the number of the group still belongs to it
        os.waitpid(pid, 0)
    except ChildProcessError:
        return UNKNOWN_EXITCODE
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def kill_marked(value: str) -> None:
    """Kill every process whose marker starts with `value`."""
    mark = f"{MARKER}={value}".encode()
    for _ in range(_SWEEPS):
        killed = [pid for pid in _processes() if _signal_if_marked(pid, mark, signal.SIGKILL)]
        if not killed:
            return
        time.sleep(_PAUSE_S)


def continue_marked(value: str) -> None:
    """Continue every stopped process whose marker starts with `value`, unless no descriptor is left to look for it."""
    mark = f"{MARKER}={value}".encode()
    with contextlib.suppress(OSError):
        for pid in _processes():
            if is_stopped(pid):
                _signal_if_marked(pid, mark, signal.SIGCONT)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents have ended (Linux)."""
    if ctypes.CDLL(None).prctl(36, 1, 0, 0, 0):  # PR_SET_CHILD_SUBREAPER
        raise OSError("cannot adopt the orphans of workers (PR_SET_CHILD_SUBREAPER)")


def kill_children(timeout: float, spare: Callable[[int], bool] = lambda _: False) -> None:
    """Kill and reap the children of this process except those to `spare`, until none is left or the time is over.

    After `adopt_orphans` this ends all descendants.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:  # without children there is no need to look through /proc
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        children = [pid for pid in _processes() if _state_and_parent(pid)[1] == os.getpid() and not spare(pid)]
        if not children or time.monotonic() >= deadline:
            return
        for pid in children:
            with contextlib.suppress(PermissionError, ProcessLookupError):  # it runs as another user
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def await_children(timeout: float) -> None:
    """Reap children of this process until none is left or the time is over."""
    deadline = time.monotonic() + timeout
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(_PAUSE_S)


def memory_of(pid: int) -> int | None:
    """Bytes of resident memory of a process and its descendants; None if it is gone or its memory is unknown.

    Without /proc, this uses psutil if it is installed.
    """
    if os.path.exists("/proc/self/statm"):
        resident = _resident(pid)
        return None if resident is None else resident + sum(_resident(child) or 0 for child in _descendants(pid))
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
    """The living descendants of a process, without those whose parents have ended."""
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                for child in map(int, file.read().split()):
                    yield child
                    yield from _descendants(child)


def state_of(pid: int) -> str:
    """The letter in `/proc/PID/stat`; "" if the process is gone."""
    return _state_and_parent(pid)[0]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP."""
    return state_of(pid) in _STOPPED


def stopped_children(pid: int) -> list[int]:
    """The children of a process that are stopped; none if no descriptor is left to look for them."""
    with contextlib.suppress(OSError):
        return [child for child in _processes() if _state_and_parent(child) in [(state, pid) for state in _STOPPED]]
    return []


def is_ending(pid: int) -> bool:
    """Whether a process has begun to end: the kernel closes its files before its parent can reap it."""
    fields = _stat(pid)
    return bool(fields) and bool(int(fields[6]) & _PF_EXITING)


def started_at(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None if it is gone. Pid and time identify a process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _state_and_parent(pid: int) -> tuple[str, int]:
    fields = _stat(pid)
    return (fields[0].decode(), int(fields[1])) if fields else ("", -1)


def _stat(pid: int) -> list[bytes]:
    """The fields of `/proc/PID/stat` after the name: state, parent, ...; empty if the process is gone."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # in half the time of a file object
    except OSError:
        return []
    try:
        return os.read(fd, 4096).rpartition(b")")[2].split()
    except OSError:  # it has ended meanwhile
        return []
    finally:
        os.close(fd)


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal())


def _signal_if_marked(pid: int, mark: bytes, number: int) -> bool:
    if not _is_marked(pid, mark):
        return False
    with contextlib.suppress(ProcessLookupError):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:  # a kernel older than 5.3
            os.kill(pid, number)
            return True
        try:
            # Look again: the process may have ended, and the handle be that of another one with its number.
            if _is_marked(pid, mark):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
    return True


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + mark in b"\0" + file.read()
    except OSError:  # gone, or another user's
        return False
