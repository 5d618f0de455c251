"""Signals of worker processes: a worker survives what a batch system sends to all processes of a job.

Batch systems, and users, send SIGTERM, SIGUSR1, SIGHUP, SIGXCPU and others to every process of a job. The main program
decides what to do: its handler may save environments first, and if it has none and dies, its workers end with it. So
workers ignore these signals if another process sends them. A simulator's own alarm, its limit of CPU time, what it
sends to itself (except SIGTERM) and its own handlers have their usual effect, and so have signals to processes that it
starts.

Workers have handlers for this, and do not ignore signals by SIG_IGN, which programs that a simulator executes would
inherit. Compiled handlers (`_signals.c`) see who sent a signal. Without them (`MARL_PARALLEL_PURE=1`), Python's are in
their place: an alarm or a limit of CPU time without a handler has no effect then.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

from marl_parallel.core.worker_status import WorkerStatus

_survive: Any = None
if os.environ.get("MARL_PARALLEL_PURE") != "1":
    with contextlib.suppress(ImportError):
        from marl_parallel.backends import _signals  # type: ignore[attr-defined,unused-ignore]

        _survive = _signals.survive

KNOWS_SENDERS = _survive is not None
"""Whether workers know who has sent a signal. If not, a SIGINT from any process interrupts a simulator."""

_STAYS = (
    "SIGKILL SIGSTOP "  # cannot be handled
    "SIGCHLD SIGCONT SIGINFO SIGTSTP SIGTTIN SIGTTOU SIGURG SIGWINCH "  # end no process
    "SIGPIPE SIGXFSZ "  # Python turns them into exceptions
    "SIGABRT SIGBUS SIGEMT SIGFPE SIGILL SIGSEGV SIGSYS SIGTRAP"  # a process's own faults
)
_STACK_NBYTES = 1 << 20
JOB_SIGNALS: frozenset[int] = frozenset(
    set() if sys.platform == "win32" else signal.valid_signals() - {getattr(signal, name, 0) for name in _STAYS.split()}
)
"""The signals that a worker survives; each would end it by default."""


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block `JOB_SIGNALS` in this thread. A process started meanwhile gets them when it unblocks them."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:  # a handler may raise once signals are blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_signals(stack_signal: int | None, parent: int) -> None:
    """Have this process, a worker, survive `JOB_SIGNALS`, handle SIGCHLD as Python does, and block no signal.

    The program that started the parent may have had signals blocked; a simulator and its children must not. A signal
    that was ignored stays so, as in other children, but for SIGINT, which shells ignore in background jobs.
    `stack_signal`, which has a handler already, still works if the process `parent` sends it. Call this after other
    hooks of forks are registered.
    """
    if sys.platform == "win32":
        return
    global _stack_signal
    _stack_signal = stack_signal
    if not KNOWS_SENDERS:
        _enlarge_stack()
    signal.signal(signal.SIGINT, signal.default_int_handler if KNOWS_SENDERS else _on_sigint)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _on_signal)
    for number in JOB_SIGNALS - {signal.SIGTERM}:
        if number == stack_signal:
            if KNOWS_SENDERS:
                _survive(number, parent)
        elif number == signal.SIGINT or signal.getsignal(number) == signal.SIG_DFL:
            if KNOWS_SENDERS:
                _survive(number)
            elif number != signal.SIGINT:
                signal.signal(number, _on_signal)
                signal.siginterrupt(number, False)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_before_fork, after_in_parent=_unblock_after_fork, after_in_child=_reset_in_forked_child
        )
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class _Stack(ctypes.Structure):
    """`stack_t` of `signal.h`."""

    _fields_ = (
        [("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
        if sys.platform == "linux"
        else [("memory", ctypes.c_void_p), ("size", ctypes.c_size_t), ("flags", ctypes.c_int)]
    )


_handlers_stack: ctypes.Array[ctypes.c_char] | None = None


def _enlarge_stack() -> None:
    """Make room for the handlers of all signals at once, one inside of the other.

    CPython's handlers block no other signal, and run on the stack of `faulthandler`, on which only a few fit.
    """
    global _handlers_stack
    _handlers_stack = ctypes.create_string_buffer(_STACK_NBYTES)
    stack = _Stack(memory=ctypes.addressof(_handlers_stack), flags=0, size=_STACK_NBYTES)
    if ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(stack), None) != 0:
        raise OSError(ctypes.get_errno(), "sigaltstack failed")


_status: WorkerStatus | None = None  # of this worker, once it is known
_stack_signal: int | None = None


def follow(status: WorkerStatus) -> None:
    """Have SIGTERM end this worker once its status says that it is ending: the parent then is the sender."""
    global _status
    _status = status
    if status.is_ending and signal.getsignal(signal.SIGTERM) is _on_signal:
        _on_signal(signal.SIGTERM, None)  # the signal may have come before


def _on_signal(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGTERM and _status is not None and _status.is_ending:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _on_sigint(number: int, frame: FrameType | None) -> None:
    if _status is not None and _status.running is not None:
        signal.default_int_handler(number, frame)


# -- forks of simulators -----------------------------------------------------------------------------------------------


class _Fork(threading.local):
    """The fork in progress in this thread: the signals with handlers from here, and those blocked before it."""

    handled: Collection[int] = ()
    blocked: Collection[int] = ()


_fork = _Fork()


def _before_fork() -> None:
    # Until the child has the default handlers, it could lose a signal that comes at once. And what a handler of the
    # simulator raises in the hooks of a fork is lost.
    if sys.platform != "win32":
        _fork.handled = [number for number in JOB_SIGNALS if signal.getsignal(number) is _on_signal]
        _fork.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _unblock_after_fork() -> None:
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.blocked)


def _reset_in_forked_child() -> None:
    for number in _fork.handled:
        signal.signal(number, signal.SIG_DFL)
    if _stack_signal is not None and sys.platform != "win32":
        faulthandler.unregister(_stack_signal)
    is_interrupted = signal.getsignal(signal.SIGINT) in (_on_sigint, signal.default_int_handler)
    if is_interrupted:
        # What a handler raises in this hook is lost, so a SIGINT that has come since the fork ends the child.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _unblock_after_fork()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
