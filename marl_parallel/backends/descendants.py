"""Finding and killing processes together with all that they have started; every look into `/proc` is here.

A process group is killed by `send`. What has left its group is found in two ways: a process that has called
`adopt_orphans` becomes the parent of all that its descendants leave behind (`kill_children`), and what carries
an environment variable of ours is found wherever it is (`kill_marked`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator, Set

from marl_parallel.backends.memory import lifted

MARKER = "MARL_PARALLEL_WORKER"
"""The environment variable that every worker, and what it starts, carries."""

# A process that was killed may still fork or show its environment while it ends; it is looked for again.
_SWEEPS = 20
_PAUSE = 0.005
_PR_SET_CHILD_SUBREAPER = 36


def marker_value(token: str, pid: int) -> str:
    """The value of the variable in worker `pid` of those that belong to `token`."""
    return f"{token}.{pid:010d}"


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
    """Kill what a process that led a group has left behind, though another process may have to reap it.

    Args:
        pid: Its number.
        marker: The marker of what it has started.
    """
    # The number of its group is nobody else's while somebody is in it; that of a process may be.
    if state_of(pid) in ("", "Z"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    kill_marked(marker)


def adopt_orphans() -> None:
    """Become the parent of those descendants whose own parents have ended; Linux only.

    Raises:
        OSError: The kernel refuses.
    """
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("cannot adopt the orphans of workers (PR_SET_CHILD_SUBREAPER)")


def kill_children(timeout: float, spare: Set[int] = frozenset()) -> None:
    """Kill and reap children of this process, but for those in `spare`, until none is left or the time is over.

    Where orphans are handed to this process (`adopt_orphans`), that ends all its descendants.
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
            with contextlib.suppress(PermissionError, ProcessLookupError):  # one that has changed its user
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def below(ancestor: int) -> list[int]:
    """The living processes that `ancestor` has started, and those that these have started; Linux only.

    Example:
        >>> os.getpid() in below(os.getppid())
        True
    """
    states = {pid: _state_and_parent(pid) for pid in _processes()}
    found = [ancestor]
    for one in found:  # grows while it is walked through
        found += [pid for pid, (state, parent) in states.items() if parent == one and state != "Z"]
    return found[1:]


def state_of(pid: int) -> str:
    """The state letter in `/proc/PID/stat`, "" if the process is gone."""
    return _state_and_parent(pid)[0]


def _state_and_parent(pid: int) -> tuple[str, int]:
    """The state letter and the parent of a process; "" and -1 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return "", -1
    return state.decode(), int(parent)


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal())


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    """Kill the process if it carries the mark; returns whether it does."""
    if not _is_marked(pid, mark):
        return False
    with contextlib.suppress(ProcessLookupError):
        try:
            handle = lifted(os.pidfd_open(pid))
        except ProcessLookupError:
            return True
        except OSError:  # a kernel older than 5.3
            os.kill(pid, signal.SIGKILL)
            return True
        try:
            # A second look: by now the number may be another's, and then so is the handle.
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
