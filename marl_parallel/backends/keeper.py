"""The process between a launcher and one worker: it ends all that the worker leaves behind.

A keeper adopts what the worker's simulators start, however often that forks or changes its session or environment
(`PR_SET_CHILD_SUBREAPER`). When the worker dies, for whatever reason, the keeper tells how, kills the rest and exits.
Linux only.

    launcher or fork server --- forks ---> keeper --- forks ---> worker ---> what simulators start
                                             |                     ^
                                             +---- guard pipe -----+   the kernel kills the worker when the keeper goes
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import struct
from collections.abc import Callable, Iterable
from typing import NoReturn

from marl_parallel.backends import descendants, descriptors

CLEARED_WITHIN_S = 5.0
"""How long a keeper tries to kill what is left."""
_RESULT = struct.Struct("q")  # a process id, or minus an errno
TOLD = 0
"""The exit code of a keeper that has told how its worker died."""

_NO_MARKER = "-" * len(descendants.marker_value("0" * 2 * descendants.TOKEN_NBYTES, 0))
"""Whoever kills all marked processes must not kill a keeper, which may still have to kill others."""


def fork_kept(
    work: Callable[[int], NoReturn], tell: Callable[[int, int], None], keep: Iterable[int]
) -> tuple[int, int]:
    """Fork a keeper, which forks a worker.

    The caller has blocked all signals. They stay blocked in the keeper, and the worker has to let them in.

    Args:
        work: Runs in the worker, with the read end of the keeper's guard pipe.
        tell: Runs in the keeper when the worker has died, with its process id and exit code (negative: the signal).
        keep: Descriptors that `tell` needs; the keeper closes all others.

    Returns:
        The process ids of worker and keeper.

    Raises:
        OSError: A process could not be forked.
    """
    read_end, write_end = descriptors.pipe()
    try:
        keeper = os.fork()
        if not keeper:
            _keep(work, tell, read_end, write_end, keep)
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    with open(read_end, "rb") as file:
        result = file.read(_RESULT.size)
    (worker,) = _RESULT.unpack(result) if result else (0,)
    if worker > 0:
        return worker, keeper
    with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
        os.waitpid(keeper, 0)
    raise OSError(-worker, f"cannot fork a worker: {os.strerror(-worker)}" if worker else "a worker's keeper has died")


def _keep(
    work: Callable[[int], NoReturn],
    tell: Callable[[int, int], None],
    read_end: int,
    write_end: int,
    keep: Iterable[int],
) -> NoReturn:
    exitcode = 1
    try:
        os.setsid()  # Ctrl-C and the end of a terminal are no concern of this process
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody can tell how a worker died
        try:
            descendants.adopt_orphans()
            guard, guard_end = descriptors.pipe()
            worker = os.fork()
        except OSError as error:
            os.write(write_end, _RESULT.pack(-(error.errno or errno.EPERM)))
            raise
        if not worker:
            for fd in (read_end, write_end, guard_end):
                os.close(fd)
            work(guard)
        gc.disable()  # nothing of the launching process is finalized here
        descendants.show_marker(_NO_MARKER)
        os.write(write_end, _RESULT.pack(worker))
        _close_all_but({guard_end, *keep})
        code = _wait_for(worker)
        with contextlib.suppress(OSError):  # nobody listens any more
            tell(worker, code)
        descendants.send(worker, signal.SIGKILL)  # its group, while the number belongs to it
        os.waitpid(worker, 0)
        descendants.kill_children(CLEARED_WITHIN_S)
        exitcode = TOLD
    finally:
        os._exit(exitcode)


def _wait_for(worker: int) -> int:
    """Reap what ends, until the worker has ended, which is left to be reaped; returns its exit code."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        if ended.si_pid == worker:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        os.waitpid(ended.si_pid, 0)


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the one of this listing
                os.close(int(name))
