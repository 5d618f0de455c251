"""What runs in the processes of the fork server: the server, the keepers, and the start of each worker (Linux).

    parent --- requests: socket ---> fork server --- forks ---> keepers --- fork ---> workers ---> simulators' processes
       ^                                                           |            ^
       +---- launches and deaths: the socket, a semaphore ---------+            |
       +---- guard pipes of parent, server and keeper: the kernel kills a worker when one of these three dies

The server is a small process with one thread. A keeper adopts the processes that its worker's simulators start, however
often they fork or change their session or environment (`PR_SET_CHILD_SUBREAPER`). When the worker dies, for whatever
reason, the keeper kills the rest, reports the death and exits. The parent's end is `launching.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

from marl_parallel.backends import descendants, interpreter, signals, tracker
from marl_parallel.backends.memory import Semaphore, mapped
from marl_parallel.backends.stacks import answer_requests, report_exits, report_to
from marl_parallel.core.worker import preloading
from marl_parallel.core.worker.loading import Loading
from marl_parallel.core.worker_status import Activity, WorkerStatus

LOADED_THREADS = 1  # of the numerical libraries in the server
CLEARED_WITHIN_S = 5.0  # how long a keeper, or the server at its end, tries to kill what is left
_REPORTS_WITHIN_S = 1.0  # how long a keeper tries before it reports the death, even if processes are left
_TRACKERS_END_WITHIN_S = 2.0
_MOST_FDS = 16  # in one request
_REPORTED = 0  # the exit code of a keeper that has reported how its worker died


class ServerReply(IntEnum):
    """What server and keepers report, with the request's number and a result."""

    LAUNCHED = 1  # result: the worker's process id
    FAILED = 2  # result: the errno of the fork, or of what it needs
    DIED = 3  # result: the worker's exit code (negative: the signal)


REPLY = struct.Struct("3q")
REQUEST = struct.Struct("2q")
"""The numbers of a request and of its worker, sent with descriptors: the pickled `InheritedState`, the crash file, the
connection of `CrashFile.ask`, the resource tracker, stdout, stderr, the worker's."""


class InheritedState(NamedTuple):
    """The state that a worker takes over from its parent when it starts."""

    worker: int
    share: Sequence[int]  # its environments
    entry: str  # the module whose `main(worker, fds)` it runs
    loaded_threads: int  # of numerical libraries that are loaded before it starts
    path: list[str]
    argv: list[str]
    environ: dict[str, str]
    cwd: str
    identity: interpreter.Identity


# -- the server and the keepers ----------------------------------------------------------------------------------------


class Server:
    """The fork server; `guard` is the read end of a pipe of the parent, and `entry` is loaded before workers start.

    So are the modules `preload`, which see the caller's `argv`; `files` are the descriptors of `_Preloading`.
    """

    def __init__(
        self,
        connection: int,
        guard: int,
        wake: int,
        parent: int,
        entry: str,
        preload: Sequence[str] = (),
        files: Sequence[int] = (),
        argv: Sequence[str] = (),
    ) -> None:
        # The parent decides what to do at a signal to all processes of a job. The parent may have blocked SIGCHLD.
        signal.pthread_sigmask(signal.SIG_SETMASK, signals.JOB_SIGNALS)
        interpreter.show_name("marl_parallel fork server", "marl forkserver")
        gc.disable()
        for module in ("numpy", "gymnasium", entry):
            importlib.import_module(module)
        if preload:
            sys.argv[:] = argv
            _preload(preload, guard, *files)
        # Objects that the collector never visits stay in pages that all workers share.
        gc.freeze()
        self.parent, self.guard = parent, guard
        self.keepers: dict[int, int] = {}  # requests by process id
        # A second guard, for the case that this process is killed while the parent lives.
        self.own_guard, self.own_guard_end = os.pipe()
        self.socket = socket.socket(fileno=connection)
        self.wake = Semaphore(mapped(wake), 0)
        os.close(wake)
        descendants.adopt_orphans()
        self.child_died, child_died_end = os.pipe()
        for fd in (self.child_died, child_died_end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(child_died_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.inherited = [self.own_guard_end, self.child_died, child_died_end]

    def run(self) -> None:
        """Serve until the parent dies or hangs up; then end all workers and all that they have started."""
        try:
            self.serve()
        finally:
            self.socket.close()
            os.close(self.own_guard_end)  # kills the workers; their keepers end what has left their groups
            deadline = time.monotonic() + CLEARED_WITHIN_S
            while self.keepers and time.monotonic() < deadline:
                self.reap_keepers()
                time.sleep(0.001)
            descendants.kill_children(1.0)

    def serve(self) -> None:
        poll = select.poll()
        for fd in (self.socket.fileno(), self.child_died):
            poll.register(fd, select.POLLIN)
        # If a child of the parent has a copy of the socket, the socket does not close when the parent dies.
        with contextlib.suppress(OSError):  # kernels before 5.3 lack it
            parent = os.pidfd_open(self.parent)
            self.inherited.append(parent)
            poll.register(parent, select.POLLIN)
        while os.getppid() == self.parent:
            ready = {fd for fd, _ in poll.poll()}
            try:
                if self.child_died in ready:
                    os.read(self.child_died, 4096)
                    self.reap_keepers()
                if self.socket.fileno() in ready and not self.answer():
                    return
            except (BrokenPipeError, ConnectionResetError):
                return

    def answer(self) -> bool:
        """Start the worker of one request; returns False if the parent has hung up."""
        message, fds, flags, _ = socket.recv_fds(self.socket, REQUEST.size, _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        request, worker = REQUEST.unpack(message)
        try:
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, "no file descriptors left in the fork server")
            # Signals stay blocked in the keeper; the worker unblocks them.
            mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
            try:
                if not (keeper := os.fork()):
                    self.keep(request, worker, fds)
                self.keepers[keeper] = request
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except OSError as error:
            self.reply(ServerReply.FAILED, request, error.errno or errno.EPERM)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def reply(self, kind: ServerReply, request: int, result: int) -> None:
        self.socket.send(REPLY.pack(kind, request, result))
        if kind is ServerReply.DIED:
            self.wake.post()

    def reap_keepers(self) -> None:
        """Reap keepers that have ended. If a keeper was killed, kill what its worker has started, and report."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                request = self.keepers.pop(ended[0], None)
                killed = os.waitstatus_to_exitcode(ended[1]) != _REPORTED
                if request is not None and killed and self.socket.fileno() >= 0:
                    # The kernel kills its worker, whose processes become children of this one.
                    descendants.kill_children(_REPORTS_WITHIN_S, spare=self.keepers.__contains__)
                    self.reply(ServerReply.DIED, request, -signal.SIGKILL)

    def keep(self, request: int, index: int, fds: Sequence[int]) -> NoReturn:
        """Be a keeper: fork a worker, wait for its death, kill what it leaves behind, report."""
        exitcode = 1
        try:
            os.setsid()  # Ctrl-C and the end of a terminal must not end this process
            interpreter.show_name(f"marl_parallel keeper of worker {index}", f"marl keeper {index}")
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            descendants.adopt_orphans()
            try:
                guard, guard_end = os.pipe()
                worker = os.fork()
            except OSError as error:
                self.reply(ServerReply.FAILED, request, error.errno or errno.EPERM)
                os._exit(_REPORTED)
            if not worker:
                try:
                    os.close(guard_end)
                    self.work(fds, guard)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            self.reply(ServerReply.LAUNCHED, request, worker)
            os.close(guard)  # first: there may be no other descriptor for the listing
            for fd in {*map(int, os.listdir("/proc/self/fd"))} - {guard_end, self.socket.fileno()}:
                with contextlib.suppress(OSError):  # the descriptor of this listing
                    os.close(fd)
            while (code := descendants.reap(worker, group=False)) is None:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
                if ended is not None and ended.si_pid != worker:
                    os.waitpid(ended.si_pid, 0)
            # Resource trackers unlink what the dead have left behind, and end by themselves.
            descendants.kill_children(_REPORTS_WITHIN_S, spare=tracker.is_tracker)
            with contextlib.suppress(OSError):  # the parent is gone
                self.reply(ServerReply.DIED, request, code)
            exitcode = _REPORTED
            descendants.await_children(_TRACKERS_END_WITHIN_S)
            descendants.kill_children(CLEARED_WITHIN_S - _REPORTS_WITHIN_S - _TRACKERS_END_WITHIN_S)
        finally:
            os._exit(exitcode)

    def work(self, fds: Sequence[int], guard: int) -> NoReturn:
        """Be a worker: close what belongs to the server, and write to the parent's output."""
        file, crash, asks, to_tracker, out, err, *worker_fds = fds
        for fd in self.inherited:
            os.close(fd)
        self.socket.close()
        del self.wake  # and with it the mapping
        # Not the caller's stdin: a worker that reads it would take input that was typed for the parent.
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
            os.close(source)
        gc.enable()
        tracker.share(to_tracker)
        preloading.leave_exit_handlers()
        become_worker(file, worker_fds, (crash, asks), self.parent, [self.guard, self.own_guard, guard])


def _preload(names: Sequence[str], guard: int, stack_file: int, status_file: int, findings_file: int) -> None:
    """Import modules; workers, which are forked from this process, report what fails."""
    parent_gone = _arm(os.dup(guard))  # until this process watches the parent itself
    os.write(stack_file, bytes([signal.SIGABRT]))  # other signals are blocked; see `CrashFile`
    faulthandler.enable(file=stack_file)
    exit_now = os._exit
    report_exits(stack_file)
    status = WorkerStatus(mapped(status_file))
    status.enter(0, Activity.CONSTRUCTOR)
    with contextlib.suppress(preloading.PreloadFailed), Loading(status).watching():
        preloading.import_modules(names, forks=True)
    with open(findings_file, "wb") as file:
        pickle.dump(preloading.findings(), file)
    status.enter(0, Activity.START)
    faulthandler.disable()
    os._exit = exit_now
    for fd in (parent_gone, stack_file, status_file):
        os.close(fd)
    gc.collect()  # it has been disabled meanwhile


# -- the start of a worker ---------------------------------------------------------------------------------------------


def become_worker(
    file: int, fds: Sequence[int], crash_file: tuple[int, int], parent: int, guards: Sequence[int]
) -> NoReturn:
    """Turn the process just started into a worker, run its main function with `fds`, exit.

    The `InheritedState` is in `file`; `crash_file` has the descriptors of file and connection of a `CrashFile`. The
    worker is killed when the last write end of one of the pipes `guards` is closed.
    """
    exitcode = 1
    try:
        os.setsid()
        # All signals were blocked until this process can handle them.
        signal.set_wakeup_fd(-1)  # undoes what the server has installed
        stack_signal = report_to(crash_file[0])
        answer_requests(Connection(crash_file[1]))
        signals.take_signals(stack_signal, parent)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        with open(file, "rb") as setting_file:
            setting: InheritedState = pickle.load(setting_file)
        interpreter.show_name(*interpreter.worker_name(setting.worker, setting.share))
        os.chdir(setting.cwd)
        sys.path[:] = setting.path
        sys.argv[:] = setting.argv
        for name in os.environ.keys() - setting.environ.keys():
            del os.environ[name]
        os.environ.update(setting.environ)
        if setting.loaded_threads != LOADED_THREADS:
            interpreter.limit_loaded_libraries(setting.loaded_threads)
        parent_gone, *_ = [_arm(guard) for guard in guards]
        interpreter.take_identity(setting.identity, parent_gone)
        # The caller's script is not part of a worker. A simulator that starts processes by multiprocessing's spawn
        # would run the file that `__main__` came from again.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
        try:
            importlib.import_module(setting.entry).main(setting.worker, [*fds])
            exitcode = 0
        except SystemExit as exit_:
            if exit_.code is None or isinstance(exit_.code, int):
                exitcode = exit_.code or 0
            else:
                print(exit_.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        # What the interpreter does at exit, without its finalization. Simulators rely on it, and no public function
        # does it.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        exitcode = 1
        traceback.print_exc()
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                # The reader of a pipe may be gone, and the simulator may have closed or replaced the stream.
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    stream.flush()
        finally:
            os._exit(exitcode)


def _arm(guard: int) -> int:
    """Have the kernel kill this process's group when the last write end of the pipe is closed; returns its read end.

    A thread that watches would not run while the GIL is held or the process is stopped.
    """
    # Owner and signal belong to the open file, which all workers share. Opening it anew gives this worker its own.
    import fcntl  # which Windows lacks, where this module can be imported all the same

    reopened = os.open(f"/proc/self/fd/{guard}", os.O_RDONLY | os.O_NONBLOCK)
    os.close(guard)
    fcntl.fcntl(reopened, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(reopened, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reopened, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    poll = select.poll()  # unlike `select.select`, it accepts any descriptor number
    poll.register(reopened, select.POLLIN)
    if poll.poll(0):  # the other end was closed before
        os.killpg(0, signal.SIGKILL)
    return reopened
