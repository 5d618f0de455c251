"""Workers started by a server process: the contexts "forkserver" and "spawn".

Here lives `ForkServerLauncher`, the parent's end. What runs inside the server is
`marl_parallel.backends.server`.

    parent --- starts, asks: socket ---> fork server --- forks ---> keepers --- fork ---> worker 0, 1, ...
       ^                                                               |                     |
       +---- deaths: socket and semaphore -----------------------------+                     |
       +---- write end of the guard pipe: the kernel kills the workers when it goes ---------+
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from marl_parallel.backends import child, descendants, descriptors, threads
from marl_parallel.backends.interpreter import output, started_with, working_directory
from marl_parallel.backends.launching import Launcher
from marl_parallel.backends.memory import Block
from marl_parallel.backends.server import MOST_FDS, REPLY, REQUEST, Reply
from marl_parallel.backends.stacks import state_of
from marl_parallel.core.reports import logger

_ANSWERS_WITHIN = 60.0
_ENDS_WITHIN = 6.0
_LOOKS_EVERY = 0.5
"""Seconds between looks at a server that does not answer."""
# A server that only executes interpreters does without Gymnasium and the like, which the package's `__init__` imports.
_WITHOUT_INIT = """import types
for name, path in {packages}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
"""
_PROGRAM = """from marl_parallel.backends.server import serve
serve{arguments!r}
"""


class ForkServerLauncher(Launcher):
    """Has workers forked by a server of its own; if that dies, so do they, and `launch` starts another."""

    _server: _Connection | None = None

    def __init__(self, entry: str, threads: int | None, wake: tuple[Block, int] | None, *, fresh: bool = False) -> None:
        super().__init__(entry, threads)
        self._wake, self._fresh = wake, fresh
        self._requests = 0
        self._server = _Connection(self._token, entry, wake, fresh)

    def _start_worker(self, index: int, fds: Sequence[int], crash: int) -> int:
        if len(fds) > MOST_FDS:
            raise ValueError(f"a worker can be given {MOST_FDS} file descriptors, not {len(fds)}")
        self._collect(0)
        if self._server is None:
            self._server = _Connection(self._token, self._entry, self._wake, self._fresh)
        setting = child.Setting.here(index, self._entry, self._token, self._threads)
        self._requests += 1
        try:
            self._server.request(self._requests, setting, crash, fds)
            return self._await_launch(self._requests)
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                raise
            raise RuntimeError(self._lost_server()) from error

    def _await_launch(self, request: int) -> int:
        deadline = time.monotonic() + _ANSWERS_WITHIN
        while (left := deadline - time.monotonic()) > 0:
            reply = self._next_reply(min(left, _LOOKS_EVERY))
            if reply is None:
                if self._server is None:
                    raise EOFError
                self._server.check()
                continue
            kind, number, result = reply
            if kind == Reply.FAILED and number == request:
                raise OSError(result, f"cannot fork a worker: {os.strerror(result)}")
            if kind == Reply.LAUNCHED and number == request:
                return result
        assert self._server is not None
        raise RuntimeError(self._server.silence())

    def _collect(self, timeout: float) -> None:
        try:
            while self._next_reply(timeout) is not None:
                timeout = 0
            # Keepers may hold the connection open for a while after the server's end.
            if self._server is not None and self._server.ended():
                while self._next_reply(0) is not None:
                    pass
                self._lost_server()
        except (OSError, EOFError) as error:
            # A `TimeoutError` that the caller's own signal handler raises is an OSError, too, but not the connection's.
            if isinstance(error, OSError) and error.errno is None:
                raise
            self._lost_server()

    def _next_reply(self, timeout: float) -> tuple[Reply, int, int] | None:
        """Wait for a reply and digest what concerns nobody in particular; None if there is none in time."""
        if self._server is None:
            return None
        reply = self._server.reply(timeout)
        if reply is None:
            return None
        kind, number, result = reply
        if kind == Reply.DIED:
            self._note_death(number, result)
        elif kind == Reply.LAUNCHED and number != self._requests:
            # Whoever asked was interrupted and does not know of it.
            descendants.send(result, signal.SIGKILL)
        return reply

    def _lost_server(self) -> str:
        """The server has gone, and its workers with it; returns a sentence on it."""
        server, self._server = self._server, None
        if server is None or self._closed:
            return "the launcher is closed"
        code = server.close()
        descendants.kill_marked(self._token)
        for pid in list(self._crash_files):
            self._note_death(pid, -signal.SIGKILL)
        return f"the fork server has ended with exit code {code}; its stderr says why"

    def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None and server.close() != 0:
            descendants.kill_marked(self._token)

    def _let_go(self) -> None:
        if self._server is not None:
            self._server.let_go()
            self._server = None


class _Connection:
    """One fork server: its process, the socket to it, and the write end of its workers' guard pipe."""

    def __init__(self, token: str, entry: str, wake: tuple[Block, int] | None, fresh: bool) -> None:
        self._socket, theirs = descriptors.socket_pair(socket.SOCK_SEQPACKET)
        guard, self._guard_end = descriptors.pipe()
        place = (wake[0].fd, wake[0].nbytes, wake[1]) if wake else None
        arguments = (theirs.fileno(), guard, os.getpid(), token, entry, place, fresh)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, guard)
            stack.enter_context(theirs)
            on_error = stack.enter_context(contextlib.ExitStack())
            on_error.callback(os.close, self._guard_end)
            on_error.enter_context(self._socket)
            text = _PROGRAM.format(arguments=arguments)
            if fresh:
                packages = [(name, list(sys.modules[name].__path__)) for name in _packages(__name__)]
                text = _WITHOUT_INIT.format(packages=ascii(packages)) + text
            command, program = stack.enter_context(started_with(text))
            self._process = subprocess.Popen(
                command,
                # With a single thread, because more than one does not go with forking.
                env={
                    **os.environ,
                    **threads.variables(1),
                    descendants.MARKER: descendants.marker_value(token, 0),  # for workers to overwrite
                },
                pass_fds=(program, theirs.fileno(), guard, *(place[:1] if place else ())),
                cwd=working_directory(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output(None, 2),
                start_new_session=True,
            )
            on_error.pop_all()

    def ended(self) -> bool:
        """Whether the server's process has ended."""
        return self._process.poll() is not None

    def check(self) -> None:
        """Continue the server if it is stopped.

        Raises:
            EOFError: It has ended.
        """
        if self.ended():
            raise EOFError
        pid = self._process.pid
        state = state_of(pid)
        if state in ("T", "t"):
            logger.warning("The fork server (process %d) was stopped by a signal, as SIGSTOP; it is continued.", pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def silence(self) -> str:
        """A sentence on a server that does not answer."""
        pid = self._process.pid
        return (
            f"The fork server (process {pid}, state {state_of(pid) or 'gone'}) did not answer a request for a worker "
            f"within {_ANSWERS_WITHIN:g} s. It may be frozen by its container or control group, or the machine may be "
            f"overloaded: see /proc/{pid}/status, and start again."
        )

    def request(self, number: int, setting: child.Setting, crash: int, fds: Sequence[int]) -> None:
        """Ask for a worker; the reply bears the same number."""
        with contextlib.ExitStack() as stack:
            payload = stack.enter_context(setting.written())
            null = descriptors.lifted(os.open(os.devnull, os.O_WRONLY))
            stack.callback(os.close, null)
            own = [payload, crash, output(sys.stdout, 1, null), output(sys.stderr, 2, null)]
            socket.send_fds(self._socket, [REQUEST.pack(number)], [*own, *fds])

    def reply(self, timeout: float) -> tuple[Reply, int, int] | None:
        """The next reply; None if there is none within `timeout` seconds.

        Raises:
            EOFError: The server has gone.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(max(0.0, timeout) * 1e3):
            return None
        message = self._socket.recv(REPLY.size)
        if not message:
            raise EOFError
        kind, number, result = REPLY.unpack(message)
        return Reply(kind), number, result

    def close(self) -> int:
        """End the server and its workers; returns its exit code, which is 0 if it cleaned up after them."""
        with contextlib.suppress(OSError):  # the other end may be gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        os.close(self._guard_end)
        try:
            return self._process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def let_go(self) -> None:
        """In a forked child, where the server is no child: close the copies of the descriptors."""
        self._socket.close()
        os.close(self._guard_end)
        self._process.returncode = 0  # else it would be waited for when this object goes


def _packages(module: str) -> list[str]:
    """The packages that a module is in, outermost first."""
    parts = module.split(".")[:-1]
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
