"""How `marl-parallel check` ends before its time, and takes with it what it has started: both ends of that.

A signal becomes an exception, so that what is running is closed. Whatever ends the command without that, its probes
notice by a pipe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from marl_parallel.backends import descendants

_SWEEPS = 20
_PAUSE_S = 0.005


class _Signalled(BaseException):
    """A signal has come that would have ended this process at once; its argument is the number."""


@contextlib.contextmanager
def closed_at_signals() -> Iterator[None]:
    """Have signals that end this process raise first, so that whatever is open here is closed."""
    if threading.current_thread() is not threading.main_thread():  # handlers are the main thread's
        yield
        return
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    changed = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, _raise)
    ended_by = None
    try:
        yield
    except _Signalled as signalled:
        ended_by = signalled.args[0]
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
        if ended_by is not None:
            os.kill(os.getpid(), ended_by)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise _Signalled(number)


def end_with_the_command(pipe: int, folder: str) -> None:
    """In a probe, which leads a session: end with all that it has started, and its files, once the command has ended.

    A process beside it sees to that, which no simulator can hold up or wait for; so orphans must not be adopted yet.

    Args:
        pipe: Its end for reading; the other one is the command's only.
        folder: With its files.
    """
    probe = os.getpid()
    between = os.fork()
    if between == 0:
        try:
            if os.fork() == 0:
                _wait_and_end(probe, pipe, folder)
        finally:
            os._exit(0)
    os.waitpid(between, 0)
    os.close(pipe)


def _wait_and_end(probe: int, pipe: int, folder: str) -> None:
    os.read(pipe, 1)
    with contextlib.suppress(ProcessLookupError):
        if os.getsid(probe) == os.getsid(0):  # else its number is another's by now
            os.kill(probe, signal.SIGSTOP)  # it adopts, and begins nothing more
            for _ in range(_SWEEPS if sys.platform == "linux" else 0):
                for pid in descendants.below(probe):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(_PAUSE_S)
            os.kill(probe, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
