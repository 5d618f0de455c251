"""Start, watch and end worker processes on Linux: the parent's end of the fork server.

A `Launcher` starts a server (`server.py`): a fresh process with the libraries loaded that workers need, which forks
workers on request and reports their deaths.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from marl_parallel.backends import descendants, interpreter, server, signals, tracker
from marl_parallel.backends.memory import Block, anonymous_file, socket_pair
from marl_parallel.backends.server import REPLY, REQUEST, InheritedState, ServerReply
from marl_parallel.backends.stacks import CrashFile
from marl_parallel.core.messages import LostServer
from marl_parallel.core.reports import reports
from marl_parallel.core.reports.advice import naming_limits
from marl_parallel.core.reports.reports import logger
from marl_parallel.core.worker.loading import cpu_seconds, is_past
from marl_parallel.core.worker.preloading import Preloaded, warn_of
from marl_parallel.core.worker_status import Activity, WorkerStatus

_ANSWERS_WITHIN_S = 60.0
_ENDS_WITHIN_S = 6.0
_TICK_S = 0.02  # how often to look whether a server lives: its end need not close the connection
_CHECK_EVERY_S = 0.5  # how often to look for servers and keepers that were stopped, and so report nothing
_CONTINUE_EVERY_S = 0.1  # the same while everything ends
_DEAD = ("Z", "")  # states of a process that has ended: not reaped yet, or gone
_CLOSED = "the launcher is closed"
_MOST_ATTEMPTS = 5  # to start a worker, while servers or keepers die

_SERVER = """from marl_parallel.backends.server import Server
Server{arguments!a}.run()
"""


@dataclass(eq=False)
class WorkerProcess:
    """A worker process, in the state that the last `Launcher.collect` found."""

    crash_file: CrashFile
    pid: int = 0  # 0 until it has been forked
    exitcode: int | None = None  # how it died (negative: the signal); None while it lives
    crash_report: str = ""  # the native stack that it wrote when it crashed
    failure: int = 0  # the errno of the fork, if that failed
    server: LostServer | None = None  # the server, if the worker ended because of its end


class Launcher:
    """Starts workers and tracks which of them live. Each worker leads its own session and process group.

    When this process ends, for whatever reason, the workers and all that they have started end as well. Only one thread
    at a time may use a launcher; any may call `close`. In a forked child of its owner, a launcher counts as closed.

    A worker runs `main(index, fds)` of the module `entry`. The server imports the modules `preload` first, for which it
    has `start_timeout` seconds (see `is_past`). Each death of a worker posts the semaphore at the start of the block
    `wake`. The death of the server posts nothing: call `collect` from time to time.
    """

    _closed = True  # until __init__ has finished: `__del__` is called even if it fails

    def __init__(
        self,
        *,
        entry: str,
        wake: Block,
        threads: int | None,
        preload: Sequence[str] = (),
        start_timeout: float | None = None,
    ) -> None:
        self._looked = 0.0  # when processes that were stopped were last looked for
        self._entry, self._threads = entry, threads
        self._token = secrets.token_hex(8)
        self._preload, self._start_timeout = tuple(preload), start_timeout
        self._new_server = functools.partial(_Server, entry, self._token, wake, self._preload)
        self._requests = 0
        self._workers: dict[int, WorkerProcess] = {}  # by request; those that are being started, or live
        self._server: _Server | None = self._new_server()
        self._closed = False
        _open_launchers.add(self)

    @naming_limits()
    def launch(
        self,
        index: int,
        fds: Sequence[int],
        share: Sequence[int] = (),
        outputs: tuple[int | None, int | None] = (None, None),
    ) -> WorkerProcess:
        """Start a worker with copies of `fds`; `RuntimeError` if the launcher is closed or no fork server answers.

        The worker's name in lists of processes has the environments of `share`. `outputs` are descriptors for stdout
        and stderr; None for this program's. If the fork server or the keeper dies meanwhile, another one starts the
        worker.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        loaded_threads = interpreter.default_threads(os.environ) if self._threads is None else self._threads
        variables = {descendants.MARKER: self._token, **interpreter.thread_variables(self._threads)}
        path, argv, environ = [*sys.path], [*getattr(sys, "argv", [])], {**os.environ, **variables}
        cwd = interpreter.working_directory()
        identity = interpreter.next_identity()
        setting = InheritedState(index, share, self._entry, loaded_threads, path, argv, environ, cwd, identity)
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            try:
                return self._launch(setting, outputs, fds)
            except _LaunchLost as lost:
                what, to_do = lost.args
            if attempt < _MOST_ATTEMPTS:
                logger.warning("While worker %d was started, %s; it is started again.", index, what)
        raise RuntimeError(
            f"worker {index} could not be started in {_MOST_ATTEMPTS} attempts; in the last one, {what}\n\n"
            f"What to do: {to_do}."
        )

    def _launch(
        self, setting: InheritedState, outputs: tuple[int | None, int | None], fds: Sequence[int]
    ) -> WorkerProcess:
        """Start a worker; `_LaunchLost` if the server or the keeper has died meanwhile."""
        self.collect()
        if self._closed:  # meanwhile, as by a handler of logs
            raise RuntimeError(_CLOSED)
        server = self._server or self._started_server()
        to_tracker = tracker.descriptor()
        self._requests += 1
        request = self._requests
        worker = self._workers[request] = WorkerProcess(CrashFile())
        self._looked = began = time.monotonic()
        try:
            try:
                server.request(request, setting, worker.crash_file, to_tracker, outputs, fds)
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                    raise
                self._lose_server()
            while not (worker.pid or worker.failure) and self._server is server:
                self._check_late(server, setting, began)
                # Keepers of other workers may hold the connection to a dead server open: do not wait for its end.
                self.collect(_TICK_S)
            if self._closed:
                raise RuntimeError(_CLOSED)
            if self._server is not server:
                preloading, lost = server.preloading, server.lost()
                was_killed = lost.exitcode in (None, -signal.SIGKILL)  # from elsewhere: the next server may live
                if preloading is not None and preloading.began is not None and not was_killed:
                    imports, stack = preloading.status.imports(), preloading.crash_file.text()
                    raise reports.preload_died(setting.worker, setting.share, self._preload, lost, imports, stack)
                raise _LaunchLost(*reports.end_of_server(lost))
            if worker.failure == errno.ECHILD:
                raise _LaunchLost("its keeper was killed", reports.SIGKILL_ADVICE)
            if worker.failure:
                raise OSError(worker.failure, f"cannot fork a worker: {os.strerror(worker.failure)}")
            worker.crash_file.theirs.close()  # the worker has it
            findings, server.findings = server.findings, ()
            warn_of(findings)  # before a constructor can fail because of it
        except BaseException:
            if worker.pid:
                self.kill(worker)  # the caller gets no reference to it
            elif self._workers.pop(request, None):
                worker.crash_file.close()
            raise
        return worker

    def _check_late(self, server: _Server, setting: InheritedState, requested: float) -> None:
        """Raise an error if the server should have answered by now; one that hangs in an import is aborted.

        Its imports have `start_timeout`, its start and the fork of the worker `_ANSWERS_WITHIN_S`.
        """
        now, used = time.monotonic(), None if server.has_answered else cpu_seconds(server.pid)
        pid, limit, preloading = server.pid, self._start_timeout, server.preloading
        if preloading is not None and (began := preloading.began) is not None:
            if limit is not None and is_past(limit, now - began, preloading.status.loading(used)):
                imports, stack = preloading.status.imports(), preloading.crash_file.stack(pid)
                raise reports.preload_timed_out(setting.worker, setting.share, self._preload, limit, imports, stack)
            return
        if preloading is not None:
            requested = max(requested, preloading.ended)
        if is_past(_ANSWERS_WITHIN_S, now - requested, used or 0.0):
            raise RuntimeError(
                f"The fork server (process {pid}, state {descendants.state_of(pid) or 'gone'}) did not answer "
                f"a request for a worker within {_ANSWERS_WITHIN_S:g} s. It may be frozen by its container or "
                f"control group, or the machine may be overloaded: see /proc/{pid}/status, and start again."
            )

    def _started_server(self) -> _Server:
        server: _Server = self._new_server()
        if self._closed:
            server.close(lambda *_: None)
            raise RuntimeError(_CLOSED)
        self._server = server
        return server

    def collect(self, timeout: float = 0.0) -> bool:
        """Update all `WorkerProcess`; returns whether any reply came within `timeout` seconds."""
        self._continue_stopped()
        any_reply, server = False, self._server
        try:
            ended = server is not None and server.ended()
            # `close`, in a signal handler or another thread, sets `self._server` to None.
            while (
                server is not None and server is self._server and (reply := server.reply(0 if any_reply else timeout))
            ):
                any_reply = True
                # Keepers may report the deaths that a server causes while it still ends.
                ended = ended or (_is_kill(*reply) and (descendants.is_ending(server.pid) or server.ended()))
                (self._handle_last_reply if ended else self._handle_reply)(*reply)
            if ended:
                self._lose_server()  # keepers may hold the connection open for a while after the server's end
        except (OSError, EOFError) as error:
            # The caller's signal handler may raise `TimeoutError`, an OSError that is not the connection's.
            if isinstance(error, OSError) and error.errno is None:
                raise
            self._lose_server()
        return any_reply

    def wait_gone(self, workers: Iterable[WorkerProcess], timeout: float) -> set[WorkerProcess]:
        """Wait until these workers have died; returns those still alive after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while alive := {*workers} & {*self._workers.values()}:
            if (patience := deadline - time.monotonic()) <= 0:
                break
            self.collect(min(patience, _TICK_S))
        return alive

    def stack(self, worker: WorkerProcess, timeout: float = 1.0, *, harmless: bool = False) -> str:
        """The Python stacks of all threads of a living worker (`CrashFile.stack`); "" if it has died."""
        self.collect()  # as in `kill`
        if worker not in self._workers.values():
            return ""
        stacks = worker.crash_file
        return stacks.ask(worker.pid, timeout) if harmless else stacks.stack(worker.pid, timeout)

    def kill(self, worker: WorkerProcess, number: int | None = None) -> None:
        """Send a signal to a worker and its process group, SIGKILL by default; nothing happens if it has died.

        SIGKILL goes to the worker alone: its keeper kills the group then, except for resource trackers.
        """
        # The process id of a dead worker may belong to another process by now: learn of deaths first.
        self.collect()
        if worker not in self._workers.values():
            return
        if number is None or number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        else:
            descendants.send(worker.pid, number)

    def close(self, *, forked: bool = False) -> None:
        """End all workers and free everything. Can be called again.

        With `forked`, in a forked child of the owner: count as closed, and touch nothing that the owner still uses.
        """
        if self._closed:
            return
        self._closed = True
        _open_launchers.discard(self)
        used, self._server = self._server, None
        while self._workers:
            self._workers.popitem()[1].crash_file.close()
        if used is not None and forked:
            used.abandon()
        elif used is not None and used.close(lambda *_: None) != 0:
            descendants.kill_marked(self._token)

    __del__ = close

    def _handle_reply(self, kind: ServerReply, request: int, result: int) -> None:
        worker = self._workers.get(request)
        if worker is None:
            if kind == ServerReply.LAUNCHED:  # the call that requested it was interrupted
                descendants.send(result, signal.SIGKILL)
        elif kind == ServerReply.LAUNCHED:
            worker.pid = result
        elif not worker.pid:  # it was not forked, or its keeper died before it reported the launch
            worker.failure = result if kind == ServerReply.FAILED else errno.ECHILD
        else:
            self._workers.pop(request, None)
            worker.crash_report = worker.crash_file.text()
            worker.crash_file.close()
            worker.exitcode = result

    def _handle_last_reply(self, kind: ServerReply, request: int, result: int) -> None:
        """Handle a reply of a server that has ended; `_lose_server` reports the workers that were killed with it."""
        if not _is_kill(kind, request, result):
            self._handle_reply(kind, request, result)

    def _lose_server(self) -> None:
        """Clean up after a server that has died, and its workers with it."""
        lost, self._server = self._server, None
        if lost is None or self._closed:
            return
        lost.close(self._handle_last_reply)
        descendants.kill_marked(self._token)
        for request, worker in [*self._workers.items()]:
            if worker.pid:
                worker.server = lost.lost()
                self._handle_reply(ServerReply.DIED, request, -signal.SIGKILL)

    def _continue_stopped(self) -> None:
        """Continue server and keepers that were stopped, if one of them owes a report about a worker.

        Waits call this in each tick. It takes 10 to 30 us for each worker every `_CHECK_EVERY_S`, else less than 1 us.
        """
        now = time.monotonic()
        if now - self._looked < _CHECK_EVERY_S:
            return
        self._looked = now
        if (server := self._server) is not None and any(
            not worker.pid or descendants.state_of(worker.pid) in _DEAD for worker in [*self._workers.values()]
        ):
            server.continue_stopped()


class _LaunchLost(Exception):
    """The server or the keeper died before it had started a worker: what happened, and what to do."""


def _is_kill(kind: ServerReply, request: int, result: int) -> bool:
    return kind == ServerReply.DIED and result == -signal.SIGKILL


_open_launchers: weakref.WeakSet[Launcher] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    # A child that holds the write end of a guard pipe would keep workers alive after their owner's death.
    for launcher in list(_open_launchers):
        launcher.close(forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_forked_child)


class _Preloading:
    """What a server writes about its imports: names and times, its stack if it crashes or hangs, and what to warn of.

    The server's status has `Activity.CONSTRUCTOR` during the imports and `Activity.START` after them.
    """

    def __init__(self) -> None:
        self.crash_file = CrashFile()
        self._block = Block()
        self.status = WorkerStatus(self._block.allocate(WorkerStatus.NBYTES))
        self._findings = anonymous_file("marl_parallel-preloaded")

    @property
    def fds(self) -> tuple[int, int, int]:
        return self.crash_file.fd, self._block.fd, self._findings

    def findings(self) -> tuple[Preloaded, ...]:
        """What workers cannot share of the modules, once all are imported."""
        found: tuple[Preloaded, ...] = pickle.loads(os.pread(self._findings, os.fstat(self._findings).st_size, 0))
        return found

    @property
    def began(self) -> float | None:
        """When the imports began, if they are running."""
        running = self.status.running
        return running.since if running is not None and running.activity is Activity.CONSTRUCTOR else None

    @property
    def ended(self) -> float:
        """When the imports ended; 0.0 before that."""
        running = self.status.running
        return running.since if running is not None and running.activity is Activity.START else 0.0

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # at the limit of open files, it has not been made
            self.crash_file.close()
            os.close(self._findings)


class _Server:
    """One server: its process, the socket to it, and the write end of its workers' guard pipe.

    Attributes:
        preloading: Where it imports the modules of `preload`, until it has answered; else None.
        has_answered: Whether it has answered a request, and so has imported all.
        findings: What workers cannot share of these modules, once it has answered, and until a warning names it.
    """

    @naming_limits()
    def __init__(self, entry: str, token: str, wake: Block, preload: Sequence[str]) -> None:
        self._exitcode: int | None = None
        self._token = token
        self.has_answered = False
        self.findings: tuple[Preloaded, ...] = ()
        self.preloading = _Preloading() if preload else None
        with contextlib.ExitStack() as in_any_case, contextlib.ExitStack() as on_error:
            self._socket, theirs = socket_pair()
            on_error.callback(self._socket.close)
            in_any_case.callback(theirs.close)
            guard, self._guard_end = os.pipe()
            on_error.callback(os.close, self._guard_end)
            in_any_case.callback(os.close, guard)
            wake_fd = os.dup(wake.fd)
            in_any_case.callback(os.close, wake_fd)
            of_preload = () if self.preloading is None else self.preloading.fds
            fds = theirs.fileno(), guard, wake_fd
            argv = tuple(map(str, getattr(sys, "argv", ())))
            text = _SERVER.format(arguments=(*fds, os.getpid(), entry, tuple(preload), of_preload, argv))
            command, program = interpreter.program(text, sys.path)
            in_any_case.callback(os.close, program)
            # Libraries get a single thread, because forking is not safe with several.
            variables = {**interpreter.thread_variables(server.LOADED_THREADS), descendants.MARKER: token}
            with signals.blocked():
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **variables},
                    pass_fds=(program, *fds, *of_preload),
                    cwd=interpreter.working_directory(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=interpreter.output(None, 2),
                    start_new_session=True,
                )
            process.returncode = 0  # `ended` reaps the process, not this object
            self.pid = process.pid
            on_error.pop_all()

    def ended(self) -> bool:
        if self._exitcode is None:
            self._exitcode = descendants.reap(self.pid)
        return self._exitcode is not None

    def lost(self) -> LostServer:
        """How it has ended."""
        return LostServer(self.pid, None if self._exitcode == descendants.UNKNOWN_EXITCODE else self._exitcode)

    def continue_stopped(self) -> None:
        """Continue the server and its keepers, where they were stopped (SIGSTOP)."""
        found = [(self.pid, "fork server")] if descendants.is_stopped(self.pid) else []
        for pid, name in [*found, *((keeper, "keeper") for keeper in descendants.stopped_children(self.pid))]:
            logger.warning("The %s (process %d) was stopped (SIGSTOP); sending SIGCONT.", name, pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def request(
        self,
        number: int,
        setting: InheritedState,
        crash_file: CrashFile,
        to_tracker: int,
        outputs: tuple[int | None, int | None],
        fds: Sequence[int],
    ) -> None:
        # The setting goes through a file, since a large environment does not fit a message.
        with open(anonymous_file("marl_parallel-setting"), "w+b") as file:
            pickle.dump(setting, file)
            file.seek(0)  # which flushes
            own = crash_file.fd, crash_file.theirs.fileno(), to_tracker
            with open(os.devnull, "wb") as null:
                out, err = outputs
                out = interpreter.output(sys.stdout, 1, null.fileno()) if out is None else out
                err = interpreter.output(sys.stderr, 2, null.fileno()) if err is None else err
                message = REQUEST.pack(number, setting.worker)
                socket.send_fds(self._socket, [message], [file.fileno(), *own, out, err, *fds])

    def reply(self, timeout: float) -> tuple[ServerReply, int, int] | None:
        """The next reply, if any; `EOFError` if server and keepers have gone, or another thread has closed this."""
        poll = select.poll()
        if (fd := self._socket.fileno()) < 0:
            raise EOFError
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, timeout) * 1e3):
            return None
        message = self._socket.recv(REPLY.size)
        if not message:
            raise EOFError
        if self.preloading is not None:
            self.findings, self.preloading = self.preloading.findings(), None
        self.has_answered = True
        kind, number, result = REPLY.unpack(message)
        return ServerReply(kind), number, result

    def close(self, handle_reply: Callable[[ServerReply, int, int], object]) -> int | None:
        """End server, workers and keepers, and handle their last replies; exit code 0: the server has cleaned up."""
        with contextlib.suppress(OSError):  # the other end may be gone
            self._socket.shutdown(socket.SHUT_WR)
        if self.preloading is not None and not self.ended():
            descendants.send(self.pid, signal.SIGKILL)  # it would read nothing before the end of its imports
        os.close(self._guard_end)
        with contextlib.closing(self._socket):
            began = looked = time.monotonic()
            while not self.ended():
                now = time.monotonic()
                if now >= began + _ENDS_WITHIN_S:
                    descendants.send(self.pid, signal.SIGKILL)
                elif now >= looked + _CONTINUE_EVERY_S:
                    looked = now
                    descendants.continue_marked(self._token)  # server and keepers, if they were stopped
                time.sleep(0.001)
            deadline = time.monotonic() + server.CLEARED_WITHIN_S
            with contextlib.suppress(OSError, EOFError):  # the end of the last keeper
                while (patience := deadline - time.monotonic()) > 0:
                    if reply := self.reply(min(patience, _CONTINUE_EVERY_S)):
                        handle_reply(*reply)
                    else:
                        descendants.continue_marked(self._token)
        return self._exitcode

    def abandon(self) -> None:
        """In a forked child, which is not the server's parent: close the copies of the descriptors."""
        self._socket.close()
        os.close(self._guard_end)
