"""The program's resource tracker of `multiprocessing`, which workers share, as children of `multiprocessing` do.

A resource tracker is a process that unlinks named shared memory and named semaphores once all processes that use the
tracker have ended. A worker with a tracker of its own would unlink at its end what the program still uses, or, if both
are killed, leave behind what a simulator has made.
"""

from __future__ import annotations

import select
from multiprocessing import resource_tracker, spawn
from typing import Any

from marl_parallel.backends import interpreter, signals
from marl_parallel.backends.memory import fill_standard

_COMMAND = b"resource_tracker import main"  # in the command lines of trackers, also of joblib's and loky's


def descriptor() -> int:
    """The descriptor by which processes tell this program's tracker what to unlink; starts the tracker (POSIX)."""
    fill_standard()
    if not spawn.get_executable():
        spawn.set_executable(interpreter.executable())
    with signals.blocked():  # the tracker inherits that: it outlives signals to all processes of a job
        fd = resource_tracker.getfd()
    assert fd is not None
    return fd


def share(fd: int) -> None:
    """Have this process, a worker, use the tracker of the program, whose descriptor it has.

    It never starts another one: if the program's tracker was killed, the names of this worker are lost.
    """
    tracker: Any = resource_tracker._resource_tracker
    send = tracker._send

    def send_if_alive(command: str, name: str, kind: str) -> None:
        poll = select.poll()  # not one for all threads, of which only one may use it at a time
        poll.register(fd, 0)  # errors alone, which the death of the tracker is
        if not poll.poll(0):
            send(command, name, kind)

    tracker._fd, tracker._pid = fd, None
    tracker._send = send_if_alive
    tracker.ensure_running = resource_tracker.ensure_running = tracker._launch = _start_none


def _start_none() -> None:
    """In place of the methods of `ResourceTracker` that start a tracker."""


def is_tracker(pid: int) -> bool:
    """Whether a process is a resource tracker, of `multiprocessing`, joblib or loky (Linux)."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _COMMAND in file.read()
    except OSError:  # it has ended
        return False
