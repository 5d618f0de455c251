"""Calls of simulators that need a terminal, the main thread of a process, or more than a limit of the system allows."""

from __future__ import annotations

import asyncio
import errno
import getpass
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]

# -- terminals ---------------------------------------------------------------------------------------------------------


def break_here() -> None:
    breakpoint()


def trace_here() -> None:
    import pdb

    pdb.set_trace()


def break_in_another_debugger() -> None:
    """One that cannot start here; `PYTHONBREAKPOINT` may name it."""

    def refuse() -> None:
        raise AttributeError("no server")

    used, sys.breakpointhook = sys.breakpointhook, refuse
    try:
        breakpoint()
    finally:
        sys.breakpointhook = used


def ask() -> None:
    input("Continue? ")


def ask_in_vain() -> None:
    """As libraries for dialogues do."""
    try:
        input("Continue? ")
    except EOFError:
        raise RuntimeError("aborted") from None


def ask_for_a_password() -> None:
    getpass.getpass()


def read_a_number() -> None:
    int(sys.stdin.readline())


def read_a_word() -> None:
    sys.stdin.readline().split()[0]


def measure_the_terminal() -> None:
    os.get_terminal_size(0)


def set_up_the_terminal() -> None:
    import termios

    termios.tcgetattr(0)


def open_the_terminal() -> None:
    with open("/dev/tty"):
        pass


NEED_A_TERMINAL: dict[str, Call] = {
    call.__name__: call
    for call in (
        break_here, trace_here, break_in_another_debugger, ask, ask_in_vain, ask_for_a_password, read_a_number,
        read_a_word, measure_the_terminal, set_up_the_terminal, open_the_terminal,
    )
}  # fmt: skip


def read_a_truncated_file() -> None:
    pickle.loads(b"")


def receive_from_nobody() -> None:
    import multiprocessing

    one, other = multiprocessing.Pipe()
    other.close()
    one.recv()


def read_a_bad_number() -> None:
    int("")


def call_a_missing_device() -> None:
    raise OSError(errno.ENXIO, "No such device or address", "/dev/radar")


def control_a_device() -> None:
    raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")


def start_a_missing_program() -> None:
    import subprocess

    subprocess.run(["/no/such/program"], stdin=sys.stdin, check=True)


class StrangeError(OSError):
    """Its number is none, and it has no text."""

    def __str__(self) -> str:
        raise NotImplementedError


def raise_a_strange_error() -> None:
    raise StrangeError([7], "strange")


def receive_too_early() -> None:
    """A socket that does not wait."""
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        one.recv(1)


def fill_the_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/data/log")


class Tracer:
    """Methods with names of debuggers' functions."""

    def breakpoint(self) -> None:
        raise ValueError("no such line")

    def set_trace(self, on: bool) -> None:
        raise ValueError(f"cannot set it to {on}")


def call_a_method_named_breakpoint() -> None:
    sim = Tracer()
    sim.breakpoint()


def call_a_method_named_set_trace() -> None:
    tracer = Tracer()
    tracer.set_trace(True)


def hide_a_limit() -> None:
    try:
        raise OSError(errno.EMFILE, "too many open files")
    except OSError:
        raise ValueError("unknown level 7") from None


NEED_NEITHER: dict[str, Call] = {
    call.__name__: call
    for call in (
        read_a_truncated_file, receive_from_nobody, read_a_bad_number, call_a_missing_device, control_a_device,
        start_a_missing_program, raise_a_strange_error, receive_too_early,
        fill_the_disk, call_a_method_named_breakpoint, call_a_method_named_set_trace, hide_a_limit,
    )
}  # fmt: skip
"""Their errors resemble those of the others."""

# -- threads -----------------------------------------------------------------------------------------------------------


def handle_a_signal() -> None:
    signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR2))


def wake_up_at_signals() -> None:
    signal.set_wakeup_fd(signal.set_wakeup_fd(-1))


def handle_a_signal_in_a_loop() -> None:
    loop = asyncio.new_event_loop()
    try:
        loop.add_signal_handler(signal.SIGUSR2, print)
        loop.remove_signal_handler(signal.SIGUSR2)
    finally:
        loop.close()


def handle_a_signal_in_vain() -> None:
    try:
        handle_a_signal()
    except ValueError as error:
        raise RuntimeError("no display") from error


NEED_THE_MAIN_THREAD: dict[str, Call] = {
    call.__name__: call
    for call in (handle_a_signal, wake_up_at_signals, handle_a_signal_in_a_loop, handle_a_signal_in_vain)
}

# -- limits ------------------------------------------------------------------------------------------------------------


def open_too_many_files() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "map.xml")


def write_too_large_a_file() -> None:
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def start_too_many_threads() -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    thread = threading.Thread(target=print)
    thread.start = refuse  # type: ignore[method-assign]
    thread.start()


def start_too_many_processes() -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    fork()


REACH_A_LIMIT: dict[str, tuple[Call, str]] = {
    "files": (open_too_many_files, "ulimit -n"),
    "file sizes": (write_too_large_a_file, "ulimit -f"),
    "threads": (start_too_many_threads, "ulimit -u"),
    "processes": (start_too_many_processes, "ulimit -u"),
}
