"""Ends processes together with all that they started, also what has left their process group.

Here live the ways to find and kill descendants, and the marker they are known by. When that happens is
decided by the launchers and the fork server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator

from marl_parallel.backends import descriptors
from marl_parallel.backends.stacks import state_of

MARKER = "MARL_PARALLEL_WORKER"
"""The environment variable that every worker, and what it starts, carries."""

TOKEN_NBYTES = 8
"""The random bytes in a launcher's token, which is hexadecimal."""

# A process that was killed may still fork or show its environment while it ends; it is looked for again.
_SWEEPS = 20
_PAUSE = 0.005
_PR_SET_CHILD_SUBREAPER = 36


def marker_value(token: str, pid: int) -> str:
    """What the variable says in worker `pid` of the launcher `token`; of the same length for all workers."""
    return f"{token}.{pid:010d}"


def show_marker(value: str) -> None:
    """Have `/proc/PID/environ` of this process show a marker, if it shows one of this length.

    That file shows the memory in which the kernel put the variables at the last exec, which is the fork server's. So
    the marker is put there beforehand, and overwritten here.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    place = getenv(MARKER.encode())
    if place is not None and len(ctypes.string_at(place)) == len(value):
        ctypes.memmove(place, value.encode(), len(value))


def send(pid: int, number: int) -> None:
    """Send a signal to the process group that `pid` leads, and to `pid` itself.

    Both, because a process just forked may not have made itself the leader of a group yet.
    """
    for deliver in (os.killpg, os.kill):
        # macOS forbids to signal a group of which only zombies are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            deliver(pid, number)


def reap(pid: int) -> int | None:
    """Reap a child of this process that led a group, if it has ended.

    Its group is killed first, while its number still belongs to it.

    Returns:
        The exit code (negative: the signal); None while it lives. 255 if someone else has reaped it.
    """
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 255
    if ended is None:
        return None
    send(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def kill_marked(value: str) -> None:
    """Kill every process whose marker starts with `value`, wherever in the tree of processes it is."""
    mark = f"{MARKER}={value}".encode()
    for _ in range(_SWEEPS):
        found = [_kill_if_marked(pid, mark) for pid in _processes()]
        if not any(found):
            return
        time.sleep(_PAUSE)


def kill_left_behind(pid: int, marker: str) -> None:
    """Kill what a process that led a group has left behind, though it may be another's to reap.

    Args:
        pid: Its number.
        marker: What it has started carries.
    """
    # The number of its group is nobody else's while somebody is in it; that of a process may be.
    if state_of(pid) in ("", "Z"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    kill_marked(marker)


def adopt_orphans() -> None:
    """Have those descendants handed to this process whose own parents have ended; Linux only.

    Raises:
        OSError: The kernel refuses.
    """
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("cannot adopt the orphans of workers (PR_SET_CHILD_SUBREAPER)")


def below(ancestor: int) -> list[int]:
    """The processes alive that `ancestor` has started, and those that these have started; Linux only.

    Example:
        >>> os.getpid() in below(os.getppid())
        True
    """
    parents = {pid: _parent(pid, but_for=b"Z") for pid in _processes()}
    found = [ancestor]
    for one in found:  # grows while it is walked through
        found += [pid for pid, parent in parents.items() if parent == one]
    return found[1:]


def kill_children(timeout: float) -> None:
    """Kill and reap children of this process until none is left.

    Where orphans are handed to this process (`adopt_orphans`), that ends all its descendants.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        if time.monotonic() >= deadline:
            return
        for pid in _processes():
            if _parent(pid) == os.getpid():
                with contextlib.suppress(PermissionError):  # one that has changed its user
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal())


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    """Kill the process if it carries the mark; whether it does."""
    if not _is_marked(pid, mark):
        return False
    try:
        handle = descriptors.lifted(os.pidfd_open(pid))
    except ProcessLookupError:
        return True
    except OSError:  # a kernel older than 5.3
        os.kill(pid, signal.SIGKILL)
        return True
    try:
        # Looked at once more: by now the number may be another's, which the handle then is, too.
        if _is_marked(pid, mark):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return True
    finally:
        os.close(handle)
    return True


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except OSError:  # gone, or another user's
        return False
    return b"\0" + mark in b"\0" + environ


def _parent(pid: int, but_for: bytes = b"") -> int | None:
    """The process that a process is a child of; None where it has gone, or is in a state that does not count."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:  # gone
        return None
    state, parent = stat.rpartition(b")")[2].split()[:2]
    return None if state == but_for else int(parent)
