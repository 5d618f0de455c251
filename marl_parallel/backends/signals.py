"""Signals of worker processes: a worker survives a SIGTERM from outside, its simulators' processes do not.

A batch system sends SIGTERM to all processes of a job. The main program decides what to do: its handler may save
environments first, and if it has none and dies, the workers end with it. The signal is handled and not ignored, since
programs that a simulator executes would inherit an ignored signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_is_ending: Callable[[], bool] = bool  # whether the parent ends this worker


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in this thread. A process started meanwhile gets the signal when it unblocks SIGTERM."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_signals() -> None:
    """Have this process, a worker, survive SIGTERM, handle SIGINT and SIGCHLD as Python does, and block no signal.

    The program that started the parent may have had signals blocked or ignored; a simulator and its children must not.
    """
    if sys.platform == "win32":
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _on_sigterm)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_before_fork, after_in_parent=_unblock_after_fork, after_in_child=_reset_in_forked_child
        )
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def end_on_sigterm_if(is_ending: Callable[[], bool]) -> None:
    """Have SIGTERM end this worker once `is_ending` returns True: the parent then is the sender."""
    global _is_ending
    _is_ending = is_ending
    if is_ending() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        _on_sigterm(signal.SIGTERM, None)  # the signal may have come before


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    if _is_ending():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


# -- forks of simulators -----------------------------------------------------------------------------------------------


class _Fork(threading.local):
    """The fork in progress in this thread: the signals that were blocked before it; None if nothing is to be done."""

    blocked: set[int] | None = None


_fork = _Fork()


def _before_fork() -> None:
    # Block it until the child has the default handler: otherwise the child could lose a SIGTERM that comes at once.
    _fork.blocked = None
    if sys.platform != "win32" and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        _fork.blocked = {*signal.pthread_sigmask(signal.SIG_BLOCK, ())}
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _unblock_after_fork() -> None:
    if sys.platform != "win32" and _fork.blocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.blocked)


def _reset_in_forked_child() -> None:
    if _fork.blocked is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _unblock_after_fork()
