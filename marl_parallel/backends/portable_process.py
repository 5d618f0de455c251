"""One worker process of the portable backend, as its parent sees it: started, talked to, ended.

What is said to it is the business of `portable.py`; what it does, of `portable_worker.py`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import connection
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from marl_parallel.backends import descendants, portable_ends, threads
from marl_parallel.backends.interpreter import from_stdin, output, working_directory
from marl_parallel.backends.stacks import CrashFile
from marl_parallel.core.messages import Lost

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
_GLANCE_S = 0.002
_BURIED_WITHIN_S = 0.5


class PortableProcess:
    """One worker. Its process is started at once, and can be talked to after `connect`.

    Args:
        start: What it is told first.
        limit: BLAS, OpenMP and torch threads in it; None leaves them alone.
    """

    def __init__(self, start: portable_ends.Start, limit: int | None) -> None:
        self._start = start
        self._connection: Connection | None = None
        command, program = from_stdin("from marl_parallel.backends.portable_worker import main\nmain()\n")
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._crash_file = CrashFile(os.open(start.crash_path, flags, 0o600))
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **({} if limit is None else threads.variables(limit))},
                stdin=subprocess.PIPE,
                stdout=output(sys.stdout, 1),
                stderr=output(sys.stderr, 2),
                bufsize=0,
                pass_fds=start.memory or (),
                cwd=working_directory(),
                # Ctrl-C is the parent's alone; and the group is what can be ended as a whole.
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
        except BaseException:
            self._crash_file.close()
            raise
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        with contextlib.suppress(OSError):  # it has died: found out by `connect`
            portable_ends.write(self._pipe.fileno(), program)
        self._unsent: deque[memoryview] = deque()
        self._inbox: portable_ends.Inbox | None = None
        if sys.platform != "win32":  # there, a pipe that does not block has other rules
            os.set_blocking(self._pipe.fileno(), False)
        self.send(start)

    def connect(self, deadline: float) -> None:
        """Wait until it is there, and needs nothing more of what is in the folder.

        Raises:
            RuntimeError: It has ended instead.
            TimeoutError: It is not there by `deadline`.
        """
        while self._connection is None:
            try:
                link = self._greeted(deadline)
                if sys.platform != "win32":
                    os.set_blocking(link.fileno(), False)
                    self._inbox = portable_ends.Inbox(link.fileno())
                self._connection = link
            except (EOFError, OSError) as error:  # it does not listen yet, or not any more
                if (exitcode := self.exitcode()) is not None:
                    died = f"worker {self._start.worker} ended with exit code {exitcode} while it started"
                    raise RuntimeError(f"{died}; its stderr says why") from error
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"worker {self._start.worker} did not start in time") from error
                self.flush()
                time.sleep(_GLANCE_S)

    def _greeted(self, deadline: float) -> Connection:
        """Connect and wait for the greeting; in a thread, since a worker that stops meanwhile holds up both for good.

        Raises:
            OSError: It does not listen yet, has ended, or has not greeted by `deadline`.
            EOFError: It has ended.
        """
        if sys.platform != "win32" and not os.path.exists(self._start.address):
            raise FileNotFoundError(self._start.address)
        results: SimpleQueue[Connection | Exception] = SimpleQueue()

        def greet() -> None:
            try:
                link = connection.Client(self._start.address, authkey=self._start.key)
                link.recv_bytes()
                results.put(link)
            except Exception as error:
                results.put(error)

        threading.Thread(target=greet, daemon=True).start()
        while True:
            try:
                result = results.get(timeout=_GLANCE_S)
            except Empty:
                if self.exitcode() is not None or time.monotonic() >= deadline:
                    raise TimeoutError(f"worker {self._start.worker} has not greeted") from None
                continue
            if isinstance(result, Exception):
                raise result
            return result

    @property
    def connection(self) -> Connection:
        """Where its replies come from."""
        assert self._connection is not None
        return self._connection

    def send(self, message: Any) -> None:
        """Send it something, as much as it takes now; nothing happens if it has died."""
        if sys.platform == "win32":
            with contextlib.suppress(OSError):  # found out, with its reason, by whoever waits for the reply
                portable_ends.send(self._pipe.fileno(), message)
            return
        self._unsent.extend(portable_ends.packed(message))
        self.flush()

    def flush(self) -> None:
        """Send the rest of what was to be sent, as long as the worker takes it: one that is stopped does not."""
        poller = None
        while self._unsent:
            try:
                self._unsent[0] = self._unsent[0][os.write(self._pipe.fileno(), self._unsent[0]) :]
                if not self._unsent[0]:
                    self._unsent.popleft()
            except BlockingIOError:
                if poller is None:
                    poller = select.poll()
                    poller.register(self._pipe.fileno(), select.POLLOUT)
                if not poller.poll(_GLANCE_S * 1e3):
                    return
            except OSError:  # found out, with its reason, by whoever waits for the reply
                self._unsent.clear()

    @property
    def unsent(self) -> bool:
        """Whether there is a rest to be sent."""
        return bool(self._unsent)

    def receive_now(self) -> Any:
        """The next reply if all of it is here, else None.

        Raises:
            EOFError: It has hung up.
            OSError: Likewise.
        """
        if self._inbox is not None:
            return self._inbox.receive_now()
        # On Windows, the system keeps a message together.
        return self.connection.recv() if self.connection.poll() else None

    def exitcode(self) -> int | None:
        """How it ended, and with it, its process group; None while it lives."""
        process = self._process
        if process.returncode is None:
            if hasattr(os, "waitid"):
                process.returncode = descendants.reap(process.pid)
            elif process.poll() is not None and sys.platform != "win32":
                # The number is nobody else's for as long as there is somebody in the group.
                descendants.send(process.pid, KILL)
        return process.returncode

    def signal(self, number: int) -> None:
        """Send its group a signal, or kill it where there are none; nothing happens if it has died."""
        if self.exitcode() is not None:
            return
        if sys.platform == "win32":
            self._process.kill()
        else:
            descendants.send(self._process.pid, number)

    def buried(self) -> Lost:
        """It has hung up: give it a moment to die, see to it, and tell how it was."""
        await_ends([self], _BURIED_WITHIN_S)
        self.signal(KILL)
        await_ends([self], _BURIED_WITHIN_S)
        return Lost(None if _children_are_ignored() else self.exitcode(), self._crash_file.text())

    def stack(self) -> str:
        """Where it is right now."""
        return self._crash_file.stack(self._process.pid, 1.0) if self.exitcode() is None else ""

    def let_go(self) -> None:
        """Close all that leads to it."""
        for held in (self._pipe, self._crash_file, self._connection):
            if held is not None:
                held.close()
        if self._process.returncode is None:
            self._process.returncode = 0  # in a forked child; else it would be waited for when this object goes


def _children_are_ignored() -> bool:
    """Whether the kernel reaps the children of this process, and nobody can tell how they ended."""
    return sys.platform != "win32" and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN


def await_ends(workers: Sequence[PortableProcess], timeout: float) -> None:
    """Wait until all have ended, or the time is over."""
    deadline = time.monotonic() + timeout
    while any(worker.exitcode() is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(_GLANCE_S)
