"""Starting, watching and ending worker processes on Linux: the parent's end of the fork server.

`open_launcher` starts a server (`marl_parallel.backends.server`), which forks workers on request. The three contexts
differ only in what the server is: a fresh process with the usual libraries loaded ("forkserver"), a fresh process
that executes an interpreter for each worker ("spawn"), or a fork of this process ("fork"). What parent and worker say
to each other is not known here.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from marl_parallel.backends import child, descendants, interpreter, server
from marl_parallel.backends.memory import Block, duplicate, lifted, pipe, socket_pair
from marl_parallel.backends.server import REPLY, REQUEST, Reply
from marl_parallel.backends.stacks import CrashFile
from marl_parallel.core.reports import logger

_ANSWERS_WITHIN_S = 60.0
_ENDS_WITHIN_S = 6.0
_CHECK_EVERY_S = 0.5
"""Seconds between looks at a server that does not answer."""
_TOKEN_NBYTES = 8

_SERVER = """from marl_parallel.backends.server import serve
serve{arguments!r}
"""
# A server that only executes interpreters does without Gymnasium and the like, which the package's `__init__` imports.
_WITHOUT_INIT = """import types
for name, path in {packages}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
"""


def open_launcher(
    context: str, *, entry: str, wake: tuple[Block, int] | None = None, threads: int | None = None
) -> Launcher:
    """Get ready to start workers; returns at once.

    Args:
        context: "forkserver": workers are forked from a small process that has the usual libraries loaded.
            "spawn": the same, but each worker is a fresh interpreter; costs more time and memory.
            "fork": workers are forked from a copy of this process, made now, with all that it has in memory; unsafe
            if this process has other threads.
        entry: The module whose `main(index, fds)` a worker runs. It must be importable with `sys.path`.
        wake: A block and the offset of a semaphore in it, which is posted each time a worker has died and
            `deaths` can tell; the block's descriptor stays open as long as the launcher. Nobody posts when the
            server itself has died: call `deaths` from time to time.
        threads: Threads for the numerical libraries of a worker; None leaves them alone.

    Raises:
        ValueError: There is no such context.
    """
    if context not in ("forkserver", "spawn", "fork"):
        raise ValueError(f'workers are started by "forkserver", "spawn" or "fork", not by {context!r}')
    return Launcher(context, entry, wake, threads)


class Launcher:
    """Starts workers and knows which live. Each leads a session and process group of its own.

    When this process ends, however that happens, the workers and all that they have started end as well. To be used by
    one thread at a time; `close` may be called from any. In a forked child of its owner a launcher counts as closed.
    Arguments as those of `open_launcher`.
    """

    _closed = True  # until __init__ is through, for the sake of __del__

    def __init__(self, context: str, entry: str, wake: tuple[Block, int] | None, threads: int | None) -> None:
        self._context, self._entry, self._wake, self._threads = context, entry, wake, threads
        self._token = secrets.token_hex(_TOKEN_NBYTES)
        self._requests = 0
        self._starting: dict[int, CrashFile] = {}  # of the worker that is being started, by request
        self._started: int | None = None  # its process id
        self._failure: int | None = None  # the errno of its start
        self._pids: dict[int, int] = {}  # of living workers, by request
        self._crash_files: dict[int, CrashFile] = {}  # of living workers, by process id
        self._reports: dict[int, str] = {}  # of dead workers, until they are read
        self._dead: list[tuple[int, int]] = []
        self._end = "the launcher is closed"  # why there is no server
        self._server: _Server | None = self._new_server()
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
        if len(fds) > server.MOST_FDS:
            raise ValueError(f"a worker can be given {server.MOST_FDS} file descriptors, not {len(fds)}")
        self._collect(0)
        if self._server is None:
            self._server = self._new_server()
        threads = loaded_threads = self._threads
        if self._context == "forkserver" and threads is None:
            loaded_threads = interpreter.default_threads(os.environ)
        if self._context == "spawn" or loaded_threads == 1:  # which the libraries of a server have
            loaded_threads = None
        setting = child.Setting.here(index, self._entry, self._token, threads, loaded_threads)
        self._requests += 1
        self._starting[self._requests] = crash_file = CrashFile.create()
        self._started = self._failure = None
        try:
            return self._request(setting, crash_file.fd, fds)
        except BaseException:
            if self._starting.pop(self._requests, None):
                crash_file.close()
            elif self._started is not None:
                self.kill(self._started)  # the caller does not learn of it
            raise

    def deaths(self) -> list[tuple[int, int]]:
        """The workers that have died since the last call: process ids and exit codes (negative: the signal).

        Does not wait for deaths. What these workers had started has been killed as well.
        """
        self._collect(0)
        dead, self._dead = self._dead, []
        return dead

    def wait_gone(self, pids: Iterable[int], timeout: float) -> set[int]:
        """Wait until these workers have died; `deaths` still returns them.

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
        self._signal(pid, signal.SIGKILL)

    def terminate(self, pid: int) -> None:
        """Ask a worker and its process group to end (`SIGTERM`); nothing happens if it has died."""
        self._signal(pid, signal.SIGTERM)

    def close(self) -> None:
        """End all workers and free everything. Can be called again."""
        if self._closed:
            return
        self._closed = True
        _open_launchers.discard(self)
        self._end = "the launcher is closed"
        used, self._server = self._server, None
        try:
            if used is not None and used.close(lambda *_: None) != 0:
                descendants.kill_marked(self._token)
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
        if self._server is not None:
            self._server.abandon()
            self._server = None
        self._close_crash_files()

    def __del__(self) -> None:
        self.close()

    def _new_server(self) -> _Server:
        return _Server(self._context, self._entry, self._token, self._wake, self._threads)

    def _request(self, setting: child.Setting, crash: int, fds: Sequence[int]) -> int:
        """Request a worker and wait until it is launched; returns its process id."""
        request, deadline = self._requests, time.monotonic() + _ANSWERS_WITHIN_S
        try:
            assert self._server is not None
            self._server.request(request, setting, crash, fds)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                raise
            self._lose_server()
        while self._started is None:
            if self._failure is not None:
                raise OSError(self._failure, f"cannot fork a worker: {os.strerror(self._failure)}")
            if self._server is None:
                raise RuntimeError(self._end)
            if (left := deadline - time.monotonic()) <= 0:
                raise RuntimeError(self._server.silence())
            if not self._collect(min(left, _CHECK_EVERY_S)) and self._server is not None:
                self._server.continue_if_stopped()
        return self._started

    def _collect(self, timeout: float) -> bool:
        """Take the replies that are there; if there is none, wait at most `timeout` seconds for one.

        Returns:
            Whether there was any.
        """
        found = False
        try:
            while self._server is not None:
                ended = self._server.ended()
                while self._server is not None and (reply := self._server.reply(0 if found else timeout)) is not None:
                    found = True
                    self._note(*reply)
                if not ended:
                    break
                self._lose_server()  # keepers may hold the connection open for a while after the server's end
        except (OSError, EOFError) as error:
            # A `TimeoutError` that the caller's own signal handler raises is an OSError, too, but not the connection's.
            if isinstance(error, OSError) and error.errno is None:
                raise
            self._lose_server()
        return found

    def _note(self, kind: Reply, request: int, result: int) -> None:
        if kind == Reply.LAUNCHED:
            if (crash_file := self._starting.pop(request, None)) is not None:
                self._pids[request] = self._started = result
                self._crash_files[result] = crash_file
                self._reports.pop(result, None)
            else:  # the call that requested it was interrupted
                descendants.send(result, signal.SIGKILL)
        elif kind == Reply.DIED and (pid := self._pids.pop(request, None)) is not None:
            self._note_death(pid, result)
        elif request in self._starting:  # it has not been forked, or died with its keeper before
            self._failure = result if kind == Reply.FAILED else errno.ECHILD

    def _note_death(self, pid: int, exitcode: int) -> None:
        crash_file = self._crash_files.pop(pid, None)
        if crash_file is None:
            return
        if report := crash_file.text():
            self._reports[pid] = report
        crash_file.close()
        self._dead.append((pid, exitcode))

    def _lose_server(self) -> None:
        """Clean up after a server that has died, and its workers with it."""
        lost, self._server = self._server, None
        if lost is None or self._closed:
            return
        code = lost.close(self._note)
        self._end = f"the fork server has ended with exit code {code}; its stderr says why"
        descendants.kill_marked(self._token)
        for pid in list(self._crash_files):
            self._note_death(pid, -signal.SIGKILL)
        self._pids.clear()

    def _signal(self, pid: int, number: int) -> None:
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


os.register_at_fork(after_in_child=_close_in_forked_child)


class _Server:
    """One server: its process, the socket to it, and the write end of its workers' guard pipe."""

    def __init__(
        self, context: str, entry: str, token: str, wake: tuple[Block, int] | None, threads: int | None
    ) -> None:
        self._socket, theirs = socket_pair(socket.SOCK_SEQPACKET)
        guard, self._guard_end = pipe()
        wake_fd = duplicate(wake[0].fd) if wake else -1
        place = (wake_fd, wake[0].nbytes, wake[1]) if wake else None
        arguments = (theirs.fileno(), guard, os.getpid(), context, entry, place)
        with contextlib.ExitStack() as stack:
            on_error = contextlib.ExitStack()
            stack.callback(theirs.close)
            for fd in (guard, *(place[:1] if place else ())):
                stack.callback(os.close, fd)
            stack.enter_context(on_error)
            on_error.callback(os.close, self._guard_end)
            on_error.enter_context(self._socket)
            self._process: subprocess.Popen[bytes] | _Fork
            if context == "fork":
                importlib.import_module(entry)  # once, rather than in each worker
                self._process = _Fork(lambda: self._serve_in_fork(theirs.detach(), arguments, threads))
            else:
                self._process = _started(context, token, arguments, (theirs.fileno(), guard, wake_fd))
            on_error.pop_all()

    def _serve_in_fork(self, connection: int, arguments: tuple[object, ...], threads: int | None) -> None:
        """Be the server, in a fork of the parent."""
        os.setsid()
        self._socket.close()
        os.close(self._guard_end)
        child.reset_signals()
        if threads == 1:
            interpreter.limit_loaded_libraries(1)  # once, rather than in each worker
        server.serve(connection, *arguments[1:])  # type: ignore[arg-type]

    def ended(self) -> bool:
        """Whether the server's process has ended."""
        return self._process.poll() is not None

    def continue_if_stopped(self) -> None:
        """Continue the server's process, with a warning, if a signal has stopped it."""
        pid = self._process.pid
        if descendants.state_of(pid) in ("T", "t"):
            logger.warning("The fork server (process %d) was stopped by a signal, as SIGSTOP; it is continued.", pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def silence(self) -> str:
        """A sentence on a server that does not answer."""
        pid = self._process.pid
        return (
            f"The fork server (process {pid}, state {descendants.state_of(pid) or 'gone'}) did not answer a request "
            f"for a worker within {_ANSWERS_WITHIN_S:g} s. It may be frozen by its container or control group, or the "
            f"machine may be overloaded: see /proc/{pid}/status, and start again."
        )

    def request(self, number: int, setting: child.Setting, crash: int, fds: Sequence[int]) -> None:
        """Ask for a worker; replies on it have the same number."""
        with contextlib.ExitStack() as stack:
            payload = stack.enter_context(setting.written())
            null = lifted(os.open(os.devnull, os.O_WRONLY))
            stack.callback(os.close, null)
            out, err = interpreter.output(sys.stdout, 1, null), interpreter.output(sys.stderr, 2, null)
            socket.send_fds(self._socket, [REQUEST.pack(number)], [payload, crash, out, err, *fds])

    def reply(self, timeout: float) -> tuple[Reply, int, int] | None:
        """The next reply; None if there is none within `timeout` seconds.

        Raises:
            EOFError: The server and its keepers have gone, or another thread has closed this.
        """
        poll = select.poll()
        if (fd := self._socket.fileno()) < 0:
            raise EOFError
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, timeout) * 1e3):
            return None
        message = self._socket.recv(REPLY.size)
        if not message:
            raise EOFError
        kind, number, result = REPLY.unpack(message)
        return Reply(kind), number, result

    def close(self, note: Callable[[Reply, int, int], object]) -> int:
        """End the server and its workers, and wait until their keepers have ended as well.

        Args:
            note: Called with each reply that still comes.

        Returns:
            The server's exit code, which is 0 if it has cleaned up after its workers.
        """
        with contextlib.suppress(OSError):  # the other end may be gone
            self._socket.shutdown(socket.SHUT_WR)
        os.close(self._guard_end)
        try:
            try:
                code = self._process.wait(_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                code = self._process.wait()
            deadline = time.monotonic() + server.CLEARED_WITHIN_S
            with contextlib.suppress(OSError, EOFError):  # the end of the last keeper
                while reply := self.reply(deadline - time.monotonic()):
                    note(*reply)
            return code
        finally:
            self._socket.close()

    def abandon(self) -> None:
        """In a forked child, where the server is no child: close the copies of the descriptors."""
        self._socket.close()
        os.close(self._guard_end)
        self._process.returncode = 0  # else it would be waited for when this object goes


def _started(context: str, token: str, arguments: tuple[object, ...], fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a server as a fresh interpreter."""
    text = _SERVER.format(arguments=arguments)
    if context == "spawn":
        parts = __name__.split(".")[:-1]
        names = [".".join(parts[: end + 1]) for end in range(len(parts))]
        packages = [(name, list(sys.modules[name].__path__)) for name in names]
        text = _WITHOUT_INIT.format(packages=ascii(packages)) + text
    with interpreter.started_with(text) as (command, program):
        # With a single thread, because more than one does not go with forking.
        variables = {**interpreter.thread_variables(1), descendants.MARKER: token}
        return subprocess.Popen(
            command,
            env={**os.environ, **variables},
            pass_fds=(program, *(fd for fd in fds if fd >= 0)),
            cwd=interpreter.working_directory(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=interpreter.output(None, 2),
            start_new_session=True,
        )


class _Fork:
    """A fork of this process that runs a function and ends: what is used here of `subprocess.Popen`.

    Signals are blocked in the fork until the function unblocks them.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(AttributeError, ValueError):  # None, or closed
                stream.flush()  # type: ignore[union-attr]  # what is buffered would be written by both
        self.returncode: int | None = None
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        self.pid = 0
        try:
            self.pid = os.fork()
            if not self.pid:
                self._run(run)
        finally:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            except BaseException:  # Ctrl-C has waited for this: nobody would know of the fork
                if self.pid:
                    self.kill()
                    self.wait()
                raise

    @staticmethod
    def _run(run: Callable[[], object]) -> NoReturn:
        exitcode = 1
        try:
            run()
            exitcode = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(exitcode)

    def poll(self) -> int | None:
        """The exit code once it has ended, else None; 0 if somebody else has reaped it."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # where SIGCHLD is ignored
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait for its end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("the fork server", timeout)
            time.sleep(0.001)
        return code

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
