"""Worker processes on macOS and Windows, with the standard library alone.

    parent                                                     worker process
    post()  --- queue, sending thread ---> connection --->     a thread receives; end of file: the parent is gone
    wait()  <-- queue, receiving thread -- connection <---     execute: actions and transitions in shared memory

Requests and replies travel over a `multiprocessing` connection with two threads in the parent, so that a worker which
stops in the middle of a message never blocks `post` and `wait`. `subprocess` starts the process, since
`multiprocessing.Process` imports the caller's script again in the worker.

docs/faults.md says what is weaker here than in `process.py`, which needs Linux.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from marl_parallel.backends import descendants, interpreter, signals, tracker
from marl_parallel.backends.descendants import memory_of
from marl_parallel.backends.memory import Block, mapped
from marl_parallel.backends.stacks import CrashFile, answer_requests, report_to
from marl_parallel.backends.worker_processes import Handle, Link, Output, WorkerProcesses
from marl_parallel.core.messages import Lost, Message, Reply, Request
from marl_parallel.core.objects.script_names import open_script_of_worker
from marl_parallel.core.objects.sharing import CONSTRUCTING, close_all, dumps_request, loads_request
from marl_parallel.core.reports import reports
from marl_parallel.core.reports.advice import name_limit, naming_limits, summary
from marl_parallel.core.reports.log_records import Forwarding, RecordSender
from marl_parallel.core.worker.loading import cpu_seconds, is_past
from marl_parallel.core.worker.worker import Worker
from marl_parallel.core.worker_status import WorkerStatus
from marl_parallel.types import ParallelEnvError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_TICK_S = 0.02
_POLL_S = 0.002
_STARTED_WITHIN_S = 60.0
_KILLED_WITHIN_S = 5.0
_DIES_WITHIN_S = 0.5
_STARTED = "started"  # the first message of a worker
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
_UNREAD = "it could not read a request"

# The path is set first: files in the working directory must not replace modules of the standard library.
_PROGRAM = """import sys
sys.path[:] = filter(None, sys.path)
from multiprocessing import connection
try:
    link = connection.{kind}({handle})
    sys.path[:] = link.recv()  # before the arguments, which are unpickled with this package
    arguments = link.recv()
except EOFError:
    sys.exit()
from marl_parallel.backends.spawn import serve
serve(link, *arguments)
"""


class Pipes(Link["_PipeHandle"]):
    """Requests and replies travel through pipes; `subprocess` starts processes."""

    def __init__(self, threads: int | None) -> None:
        super().__init__()
        self._threads = threads
        self._looked = 0.0  # when deaths were last looked for
        self._events: SimpleQueue[bool] = SimpleQueue()  # False for each reply that has come, True for an interrupt

    def control_nbytes(self, most: int, most_requests: int) -> int:
        return most * WorkerStatus.NBYTES

    def open(self, control: Block, buffer: mmap.mmap, num_workers: int, num_processes: int) -> None:
        self._statuses = memoryview(buffer)

    def launch(self, worker: int, share: Sequence[int], fds: Sequence[int], output: Output) -> _PipeHandle:
        status = self._statuses[worker * WorkerStatus.NBYTES :][: WorkerStatus.NBYTES]
        status[:] = bytes(WorkerStatus.NBYTES)
        return _PipeHandle(worker, share, fds, output, WorkerStatus(status), self._threads, self._events)

    def wait_started(self) -> None:
        began = time.monotonic()
        for process in [*self.handles.values()]:
            process.wait_started(began)

    def post(self, requests: Mapping[int, Request], *, together: bool) -> None:
        for worker, request in requests.items():
            self.handles[worker].post(request)

    def wait(self, timeout: float | None, at_least: int) -> list[tuple[int, Reply | Lost]]:
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[tuple[int, Reply | Lost]] = []
        interrupted = False
        while True:
            # Take events before replies: later replies have later events. Otherwise events of replies that needed no
            # sleep would pile up, and each would end a later sleep.
            interrupted |= self._take_events()
            look = self.is_open and time.monotonic() - self._looked >= _TICK_S  # also while others reply all the time
            if look:
                self._looked = time.monotonic()
            for process in self.handles.values():
                # A process that the worker has forked may hold the connection open. Hanging up loses no reply.
                if look and process.expected and process.exitcode() is not None:
                    process.hang_up()
                self.receive_from(process, replies)
            if len(replies) >= at_least or interrupted or any(type(reply) is Lost for _, reply in replies):
                return replies
            self.relay.bring()
            patience = _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())
            if patience <= 0 or not self.is_open:  # a signal handler may have closed meanwhile
                return replies
            # With `contextlib.suppress`, Ctrl-C could show the traceback of `Empty` before its own.
            try:  # noqa: SIM105
                interrupted |= self._events.get(timeout=patience)
            except Empty:
                pass

    def receive_from(self, handle: _PipeHandle, replies: list[tuple[int, Reply | Lost]]) -> None:
        replies += [(handle.worker, reply) for reply in handle.received()]

    def _take_events(self) -> bool:
        """Take all events that have come; returns whether one of them is an interrupt."""
        interrupted = False
        while True:
            try:
                interrupted |= self._events.get_nowait()
            except Empty:
                return interrupted

    def interrupt(self) -> None:
        self._events.put(True)

    def alive(self, handles: Sequence[_PipeHandle], timeout: float) -> list[_PipeHandle]:
        deadline = time.monotonic() + timeout
        while (alive := [one for one in handles if one.exitcode() is None]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return alive

    def close(self, *, forked: bool = False) -> None:
        processes = [*self.handles.values()]
        if forked:
            # A worker takes a closed connection for the parent's death: `free` closes the copies in this process.
            for process in processes:
                process.forget()
            return
        try:
            for process in processes:
                process.signal(_KILL)
            self.alive(processes, _KILLED_WITHIN_S)
        finally:
            for process in processes:
                process.hang_up()

    def drop_memory(self) -> None:
        del self._statuses


class PortableProcessBackend(WorkerProcesses):
    """Worker processes on Python's standard library alone: what `backend="process"` is on macOS and Windows.

    Args:
        threads: Threads of BLAS, OpenMP and torch in each worker; None leaves them alone.
    """

    def __init__(self, *, threads: int | None = 1) -> None:
        super().__init__(Pipes(threads))


class _PipeHandle(Handle):
    """A worker of `Pipes`. `events` gets an entry for each reply."""

    @naming_limits()
    def __init__(
        self,
        worker: int,
        share: Sequence[int],
        fds: Sequence[int],
        output: Output,
        status: WorkerStatus,
        threads: int | None,
        events: SimpleQueue[bool],
    ) -> None:
        super().__init__(worker=worker, share=share, log=output.log, status=status)
        self._events = events
        self._requests: SimpleQueue[Any] = SimpleQueue()  # None ends the sending thread
        self._replies: SimpleQueue[Any] = SimpleQueue()  # None: the worker has hung up
        # Descriptors that are sent, closed after the replies: macOS loses those that are closed before they arrive.
        self._lent: list[int] = []
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._send, self._receive)]
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as in_any_case:
            self._crash_file = CrashFile()
            on_error.callback(self._crash_file.close)
            self._connection, theirs = multiprocessing.Pipe()
            in_any_case.callback(theirs.close)
            on_error.callback(self._connection.close)
            self._socket = _socket_of(self._connection)
            on_error.callback(self._close_socket)
            handle, files = theirs.fileno(), [*fds, self._crash_file.fd]
            asks = self._crash_file.theirs.fileno()
            to_tracker = [] if sys.platform == "win32" else [tracker.descriptor()]
            inheriting: dict[str, Any] = {"pass_fds": (handle, asks, *to_tracker, *files)}
            if sys.platform == "win32":  # where a child knows inherited files by other numbers
                import msvcrt

                files = [msvcrt.get_osfhandle(fd) for fd in files]
                for inherited in (handle, asks, *files):
                    os.set_handle_inheritable(inherited, True)
                startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle, asks, *files]})
                inheriting = {"startupinfo": startup}
            command = interpreter.command(_PROGRAM.format(kind=type(theirs).__name__, handle=handle))
            name, (out, err) = interpreter.worker_name(worker, share), output.descriptors
            with signals.blocked():
                self._process = subprocess.Popen(
                    [*command, name[0]],  # the name for lists of processes, where `show_name` does nothing
                    env={**os.environ, **interpreter.thread_variables(threads)},
                    stdin=subprocess.DEVNULL,
                    stdout=interpreter.output(sys.stdout, 1) if out is None else out,
                    stderr=interpreter.output(sys.stderr, 2) if err is None else err,
                    cwd=interpreter.working_directory(),
                    start_new_session=True,  # Ctrl-C must reach the parent only; and the group can be killed
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                    **inheriting,
                )
            self._crash_file.theirs.close()  # the worker has it
            on_error.callback(self._end)
            self.log.mark_start(self._process.pid)
            identity, argv = interpreter.next_identity(), list(getattr(sys, "argv", []))
            self._put(sys.path)
            self._put((worker, name, identity, files, asks, to_tracker, argv, output.forwarding))
            on_error.callback(self._requests.put, None)  # ends a thread that has started
            for thread in self._threads:
                thread.start()
            on_error.pop_all()

    def _put(self, message: Any) -> None:
        """Pickle a message here, where an error reaches the caller, and have it sent."""
        self._requests.put(_Outgoing(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), None))

    def _send(self) -> None:
        try:
            while (message := self._requests.get()) is not None:
                if message.fds is not None:
                    self._connection.send_bytes(b"%d" % len(message.fds))
                    for fd in message.fds:
                        assert self._socket is not None  # on Windows there are no descriptors
                        socket.send_fds(self._socket, [b"\0"], [fd])
                self._connection.send_bytes(message.pickled)
        except OSError:
            pass  # the receiving thread finds out that the worker has died
        except BaseException as error:
            self._report(_broken("no request could be sent to it", error))

    def _receive(self) -> None:
        try:
            while True:
                self._report(self._connection.recv())
        except (EOFError, OSError):
            pass
        except BaseException as error:
            self._report(_broken("its reply could not be read", error))
        finally:
            self._replies.put(None)
            self._events.put(False)

    def _report(self, reply: Any) -> None:
        self._replies.put(reply)
        self._events.put(False)

    def wait_started(self, began: float) -> None:
        """Wait until the worker receives requests; `RuntimeError` if it has ended, `TimeoutError` if it takes too long.

        It imports this package meanwhile: that does not count, as in `is_past`.
        """
        while True:
            with contextlib.suppress(Empty):
                reply = self._replies.get(timeout=_TICK_S)
                if reply == _STARTED:
                    return
                if type(reply) is Lost:
                    raise RuntimeError(f"worker {self.worker} could not start: {reply.reason}\n\n{reply.stack}")
                self._wait_for_end(_DIES_WITHIN_S)
            if (exitcode := self.exitcode()) is not None:
                self.lost = self._manner_of_death()
                died = f"worker {self.worker} ended with exit code {exitcode} while it started"
                raise RuntimeError(f"{died}; its stderr says why{reports.end_of_log(self.log.tail())}")
            elapsed, used = time.monotonic() - began, cpu_seconds(self._process.pid)
            if is_past(_STARTED_WITHIN_S, elapsed, elapsed if used is None else used):
                raise TimeoutError(f"worker {self.worker} did not start in time")

    def post(self, request: Request) -> None:
        self.expected += 1
        if self.lost is not None:
            return
        if request.message not in CONSTRUCTING:
            try:
                self._put(request)
            except Exception as error:
                self.expected -= 1
                env_ids = tuple(request.env_ids or self.share)
                what = f" ({reports.environments(env_ids)})" if env_ids else ""
                raise ParallelEnvError(
                    f"worker {self.worker}{what}: a request for {request.message.name} cannot be pickled: "
                    f"{summary(error)}. Pass values that can be pickled",
                    env_ids=env_ids,
                    worker=self.worker,
                ) from error
            return
        process: Any = self._process
        handle = int(process._handle) if sys.platform == "win32" else None  # that no public attribute has
        pickled, fds = dumps_request(request, handle)
        self._lent += fds
        self._requests.put(_Outgoing(pickled, fds))

    def received(self) -> list[Reply | Lost]:
        """Take the replies that have come, then the loss of the worker if it died with unanswered requests."""
        replies: list[Reply | Lost] = []
        while self.expected and self.lost is None:
            try:
                reply = self._replies.get_nowait()
            except Empty:
                break
            if reply is None:
                self.lost = self._manner_of_death()
                break
            if type(reply) is Lost:
                self._manner_of_death()  # which kills it
                self.lost = reply
                break
            if reply == _STARTED:  # of a worker that was added later: nothing waits for this message
                continue
            replies.append(reply)
            self.expected -= reply.last
        if self.expected and self.lost is not None:
            self.expected = 0
            replies.append(self.lost)
        if self._lent and not self.expected and self.lost is None:
            self._close_lent()
        return replies

    def _close_lent(self) -> None:
        lent, self._lent = self._lent, []
        close_all(lent)

    def exitcode(self) -> int | None:
        """The exit code of a worker that has ended, whose process group is killed; None while it lives."""
        process = self._process
        if process.returncode is None:
            if hasattr(os, "waitid"):
                process.returncode = descendants.reap(process.pid)
            elif process.poll() is not None and sys.platform != "win32":
                # No other group gets this number while a process is in the group.
                descendants.send(process.pid, _KILL)
        return process.returncode

    def signal(self, number: int) -> None:
        if self.exitcode() is not None:
            return
        if sys.platform == "win32":
            self._process.kill()
        else:
            descendants.send(self._process.pid, number)

    def memory(self) -> int | None:
        # It reaps nothing, since any thread may call it.
        if self._process.returncode is not None:
            return None
        nbytes = memory_of(self._process.pid)  # 0 of a process that has ended and is not reaped yet
        return nbytes if nbytes and self._process.returncode is None else None

    def _manner_of_death(self) -> Lost:
        """How a worker that has hung up died; it is killed if it does not die by itself."""
        self._wait_for_end(_DIES_WITHIN_S)
        self._end(_DIES_WITHIN_S)
        # The exit code is unknown if the kernel reaps the children of this process.
        ignored = sys.platform != "win32" and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        return Lost(None if ignored else self.exitcode(), self._crash_file.text())

    def stack(self, *, harmless: bool = False) -> str:
        if self.exitcode() is not None:
            return ""
        pid = self._process.pid
        return self._crash_file.ask(pid) if harmless else self._crash_file.stack(pid)

    def kill(self) -> None:
        self._end()
        self.hang_up()

    def _end(self, timeout: float = _KILLED_WITHIN_S) -> None:
        self.signal(_KILL)
        self._wait_for_end(timeout)

    def _wait_for_end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.exitcode() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def hang_up(self) -> None:
        """End both threads; replies that have been sent are still received."""
        self._requests.put(None)
        if sys.platform == "win32":
            self._connection.close()
        elif self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_KILLED_WITHIN_S)

    def forget(self) -> None:
        """In a forked child, count as ended: else `Popen.__del__` would wait for the process."""
        if self._process.returncode is None:
            self._process.returncode = 0

    def free(self) -> None:
        self._connection.close()
        self._close_socket()
        self._close_lent()
        self._crash_file.close()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()


class _Outgoing(NamedTuple):
    """A pickled message; one with constructors is sent after the number of its descriptors and these descriptors."""

    pickled: bytes
    fds: list[int] | None


def _socket_of(connection: Connection) -> socket.socket | None:
    """A socket for the descriptors that a connection sends, made before threads use it; None on Windows."""
    if sys.platform == "win32":
        return None
    end = socket.socket(fileno=os.dup(connection.fileno()))
    end.setblocking(True)  # for both, since they share it: `socket.setdefaulttimeout` may say otherwise
    return end


def _broken(what: str, error: BaseException) -> Lost:
    """The loss of a worker whose connection is of no use any more."""
    return Lost(None, "".join(traceback.format_exception(error)), f"{what}: {summary(error)}")


def _receive_request(link: Connection, end: socket.socket | None) -> Request | Lost:
    """The next request, or why it cannot be read; `EOFError` or `ConnectionError` if the parent is gone."""
    pickled, fds, lost = link.recv_bytes(), list[int](), None
    constructs = not pickled.startswith(pickle.PROTO)
    if constructs:  # the number of descriptors
        for _ in range(int(pickled)):
            assert end is not None
            try:
                fds.append(_receive_descriptor(end))
            except (ConnectionError, EOFError):
                raise
            except OSError as error:
                lost = _broken(_UNREAD, error)
        pickled = link.recv_bytes()
    if lost is not None:
        close_all(fds)
        return lost
    try:
        return loads_request(pickled, fds) if constructs else pickle.loads(pickled)  # type: ignore[no-any-return]
    except BaseException as error:  # which may be an `EOFError` of an object in it
        return _broken(_UNREAD, error)


def _receive_descriptor(end: socket.socket) -> int:
    data, fds, *_ = socket.recv_fds(end, 1, 1)
    if not data:
        raise EOFError
    if not fds:
        raise name_limit(OSError(errno.EMFILE, "a descriptor was lost"))
    os.set_inheritable(fds[0], False)
    return fds[0]


# -- in the worker process ---------------------------------------------------------------------------------------------


def serve(
    link: Connection,
    worker: int,
    name: tuple[str, str],
    identity: interpreter.Identity,
    handles: Sequence[int],
    asks: int,
    to_tracker: Sequence[int],
    argv: list[str],
    forwarding: Forwarding | None,
) -> None:
    """Serve until a CLOSE request, or until the parent is gone; `handles`: files of status, records, arrays, stacks.

    `asks` is the connection of `CrashFile.ask`, and `to_tracker` has the descriptor of the program's resource tracker,
    where there is one. With `forwarding`, log records go to the first file.
    """
    interpreter.show_name(*name)
    interpreter.take_identity(identity)
    fds = [*handles]
    if sys.platform == "win32":
        import msvcrt

        fds = [msvcrt.open_osfhandle(handle, os.O_RDWR) for handle in handles]
    else:
        for fd in (link.fileno(), asks, *to_tracker):
            os.set_inheritable(fd, False)
        tracker.share(*to_tracker)
    for fd in fds:
        os.set_inheritable(fd, False)
    status_fd, records_fd, arrays_fd, crash_fd = fds
    stack_signal = report_to(crash_fd)
    answer_requests(type(link)(asks))
    signals.take_signals(stack_signal, identity.parent_pid)
    requests: SimpleQueue[Request | Lost] = SimpleQueue()
    end = _socket_of(link)

    def receive() -> None:
        """Receive requests as they come, so that the parent's thread does not wait, and end when the parent is gone."""
        try:
            while True:
                requests.put(_receive_request(link, end))
        except (ConnectionError, EOFError):
            return  # the parent is gone
        except BaseException:
            traceback.print_exc()  # the death of this worker says nothing about it
        finally:
            if sys.platform != "win32":
                os.killpg(0, signal.SIGKILL)
            os._exit(1)

    with naming_limits():
        threading.Thread(target=receive, daemon=True).start()
    sys.argv[:] = argv
    open_script_of_worker()
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    statuses = mapped(status_fd)
    status = WorkerStatus(memoryview(statuses)[worker * WorkerStatus.NBYTES :])
    signals.follow(status)
    executor = Worker(status, lambda _: mapped(records_fd), own_process=True, arrays=lambda: arrays_fd)
    if forwarding is not None:
        RecordSender(statuses, forwarding, worker, status, executor.settings).install()
    link.send(_STARTED)
    while True:
        request = requests.get()
        if isinstance(request, Lost):
            link.send(request)
            return
        executor.execute(request, link.send)
        if request.message is Message.CLOSE:
            return
