"""How worker processes are started, watched and ended, whatever way they start.

Here lives `Launcher`, the interface that the process backend is written against; `contexts.py` opens one by name.
The ways themselves are `forkserver.py`, `spawning.py` and `forking.py`. What parent and worker say to each other is not
known here.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from marl_parallel.backends import descendants
from marl_parallel.backends.memory import anonymous_file
from marl_parallel.backends.stacks import CrashFile


class Launcher(ABC):
    """Starts workers and knows which live. Each leads a session and process group of its own.

    Whatever ends this process ends the workers and all that they have started. To be used by one thread at
    a time; `close` may be called from any. In a forked child of its owner a launcher counts as closed.
    """

    _closed = True  # until __init__ is through, for the sake of __del__

    def __init__(self, entry: str, threads: int | None) -> None:
        self._entry = entry
        self._threads = threads
        self._token = secrets.token_hex(descendants.TOKEN_NBYTES)
        self._crash_files: dict[int, CrashFile] = {}  # of those that live
        self._reports: dict[int, str] = {}  # of those that died, until they are read
        self._dead: list[tuple[int, int]] = []
        self._closed = False
        _open_launchers.add(self)

    def launch(self, index: int, fds: Sequence[int]) -> int:
        """Start worker number `index`.

        The child runs `main(index, fds)` of the entry module and exits with 0 when that returns, 1 with the
        traceback on stderr when it raises.

        Args:
            index: Handed to the worker.
            fds: Open descriptors, which stay the caller's; the worker gets copies of them, in this order.

        Returns:
            The worker's process id.

        Raises:
            RuntimeError: The launcher is closed, or the fork server does not start or answer.
            OSError: The system has no process or descriptor left to give.
        """
        if self._closed:
            raise RuntimeError("the launcher is closed")
        crash_file = CrashFile(anonymous_file("marl_parallel-stacks"))
        try:
            # The worker's descriptor is a copy of this one and shares the position, which must not matter to it.
            fcntl.fcntl(crash_file.fd, fcntl.F_SETFL, os.O_APPEND)
            pid = self._start_worker(index, fds, crash_file.fd)
        except BaseException:
            crash_file.close()
            raise
        self._reports.pop(pid, None)
        self._crash_files[pid] = crash_file
        return pid

    def deaths(self) -> list[tuple[int, int]]:
        """Who died since the last call: process ids and exit codes (negative: the signal). Never blocks.

        What those named here had started is killed as well, before another worker is started.
        """
        self._collect(0)
        dead, self._dead = self._dead, []
        return dead

    def wait_gone(self, pids: Iterable[int], timeout: float) -> set[int]:
        """Wait until these workers have died; `deaths` still tells of them.

        Returns:
            Those still alive after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while left := self._crash_files.keys() & set(pids):
            if (patience := deadline - time.monotonic()) <= 0:
                break
            self._collect(patience)
        return left

    def crash_report(self, pid: int) -> str:
        """The native stack that the worker wrote when it crashed; "" if none. After its death it can be read once."""
        crash_file = self._crash_files.get(pid)
        return self._reports.pop(pid, "") if crash_file is None else crash_file.text()

    def stack(self, pid: int, timeout: float = 1.0) -> str:
        """The Python stacks of all threads of a living worker, whatever it is doing; "" if it has died.

        Costs about 25 ms. For a worker that hangs and is to be killed: if it is stopped, it is continued; if
        it writes nothing within `timeout`, it is aborted, which yields a stack, too.
        """
        crash_file = self._crash_files.get(pid)
        return "" if crash_file is None else crash_file.stack(pid, timeout)

    def kill(self, pid: int) -> None:
        """End a worker and its process group at once; nothing happens if it has died."""
        self._send(pid, signal.SIGKILL)

    def terminate(self, pid: int) -> None:
        """Ask a worker and its process group to end (`SIGTERM`); nothing happens if it has died."""
        self._send(pid, signal.SIGTERM)

    def close(self) -> None:
        """End all workers and free everything. Can be called again."""
        if self._closed:
            return
        self._closed = True
        _open_launchers.discard(self)
        try:
            self._stop()
        finally:
            self._close_crash_files()
            self._dead.clear()

    def abandon(self) -> None:
        """In a forked child of the owner: count as closed, and touch nothing that the owner still uses. Idempotent.

        Happens by itself at a fork; to be called by whoever would drop the last reference before that.
        """
        if self._closed:
            return
        self._closed = True
        _open_launchers.discard(self)
        self._let_go()
        self._close_crash_files()

    def __del__(self) -> None:
        self.close()

    @abstractmethod
    def _start_worker(self, index: int, fds: Sequence[int], crash: int) -> int:
        """Start a worker whose `faulthandler` writes to `crash`; returns its process id."""

    @abstractmethod
    def _collect(self, timeout: float) -> None:
        """Call `_note_death` for all that died; if there is none, wait at most `timeout` seconds for one."""

    @abstractmethod
    def _stop(self) -> None:
        """End all workers and free what was opened here; called once."""

    @abstractmethod
    def _let_go(self) -> None:
        """Called in a forked child: close descriptors, which are copies here, and touch no process."""

    def _note_death(self, pid: int, exitcode: int) -> None:
        crash_file = self._crash_files.pop(pid, None)
        if crash_file is None:
            return
        if report := crash_file.text():
            self._reports[pid] = report
        crash_file.close()
        self._dead.append((pid, exitcode))

    def _send(self, pid: int, number: int) -> None:
        # The number of one that died may be another's by now: learn of deaths first.
        self._collect(0)
        if pid in self._crash_files:
            descendants.send(pid, number)

    def _close_crash_files(self) -> None:
        while self._crash_files:
            self._crash_files.popitem()[1].close()


_open_launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    """A child that kept the write end of a guard pipe would keep workers alive after their owner's death."""
    for launcher in list(_open_launchers):
        launcher.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_forked_child)
