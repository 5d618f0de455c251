"""What runs on the nodes of a Ray cluster: workers, a monitor on each node, and the monitor's child reaper.

    driver (ray_backend.py) --- execute -----------------> RayWorker       an actor per worker, with its environments
                            --- look, stack, remains ----> RayNodeMonitor  an actor per node
                                                                |
                                                           child reaper    a process per node, outlives both

A worker that computes, hangs or is stopped answers no call. So what others need of it lies in files without a name
(`Files`), which the monitor opens through `/proc`. On a system without `/proc`, nothing is known of a dead worker.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from marl_parallel.backends import descendants, interpreter
from marl_parallel.backends.descendants import CrashFile
from marl_parallel.backends.memory import anonymous_file
from marl_parallel.core.columns import Layout
from marl_parallel.core.messages import Lost, Reply
from marl_parallel.core.records import WITH_RESULTS, RecordSlices
from marl_parallel.core.worker import Worker
from marl_parallel.core.worker_status import WorkerStatus

_LARGE_NBYTES = 1 << 20
_STACK_TIMEOUT_S = 1.0
_DEATH_TIMEOUT_S = 2.0

# From <linux/pidfd.h>: struct pidfd_info in its first size, which ends with the exit code.
_PIDFD_INFO_NBYTES = 64
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO_NBYTES << 16 | 0xFF << 8 | 11


class Files(NamedTuple):
    """Descriptors in a worker's process: its status, its records, what `faulthandler` writes, and `saved_replies`."""

    status: int
    block: int
    crash: int
    replies: int


class Greeting(NamedTuple):
    """Where a worker is, and what its monitor opens; `now` is `time.monotonic` on its node."""

    node: str
    now: float
    pid: int
    marker: str
    files: Files


class Result(NamedTuple):
    """The replies to an order, the bytes of the worker status, and what `RecordSlices.results` gives, if anything."""

    replies: list[Reply]
    status: bytes
    records: NDArray[Any] | None


class Remains(NamedTuple):
    """What a dead worker leaves: its status, whole records, the replies it has saved by order, and how it died."""

    status: bytes
    records: bytes
    replies: list[tuple[int, Reply]]
    lost: Lost


Packed: TypeAlias = bytes | tuple[bytes, NDArray[Any]]


def pack(result: Result) -> Packed:
    """Pickle a result in the form that Ray is fastest with: one `bytes`, or large records beside it, not copied."""
    if result.records is None or result.records.nbytes < _LARGE_NBYTES:
        return pickle.dumps(tuple(result), pickle.HIGHEST_PROTOCOL)
    return pickle.dumps((result.replies, result.status), pickle.HIGHEST_PROTOCOL), result.records


def unpack(packed: Packed) -> Result:
    """Undo `pack`."""
    if isinstance(packed, bytes):
        return Result(*pickle.loads(packed))
    replies, status = pickle.loads(packed[0])
    return Result(replies, status, packed[1])


class RayWorker:
    """The actor of one worker.

    Args:
        share: Its environments.
        num_threads: BLAS, OpenMP and torch threads; None leaves them alone.
        token: The driver's part of the marker.
        path: The driver's module search path; those of its folders that exist here are searched last.
    """

    def __init__(self, share: range, num_threads: int | None, token: str, path: Sequence[str]) -> None:
        sys.path += [folder for folder in path if folder not in sys.path and os.path.exists(folder)]
        self._share = share
        self._files = Files(*(anonymous_file(f"marl_parallel-{name}") for name in Files._fields))
        self._status = _mapped(self._files.status, WorkerStatus.NBYTES)
        self._slices: RecordSlices | None = None
        self._worker = Worker(WorkerStatus(self._status), self._attach, own_process=True)
        self._marker = os.environ[descendants.MARKER] = descendants.marker_value(token, os.getpid())
        descendants.report_to(self._files.crash)
        os.environ.update(interpreter.thread_variables(num_threads))
        if num_threads is not None:
            interpreter.limit_loaded_libraries(num_threads)

    def greet(self) -> Greeting:
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Greeting(node, time.monotonic(), os.getpid(), self._marker, self._files)

    def execute(self, order: bytes) -> Packed:
        """Execute an order: its number, a request, its actions or None, and whether it is the request's first part.

        The order is pickled, since Ray itself takes several times as long over it.
        """
        number, request, actions, first = pickle.loads(order)
        env_ids = self._share if request.env_ids is None else request.env_ids
        if actions is not None and self._slices is not None:
            self._slices.put_actions(env_ids, actions)
        replies: list[Reply] = []

        def send(reply: Reply) -> None:
            if request.each or not reply.last:  # what is executed next may end this process; a plain step saves nothing
                self._save(number, reply, first=first and not replies)
            replies.append(reply)

        self._worker.execute(request, send)
        records = None
        if replies and self._slices is not None and request.message in WITH_RESULTS:
            records = self._slices.results(env_ids, request.message)
        return pack(Result(replies, bytes(self._status), records))

    def _attach(self, layout: Layout) -> Any:
        block = _mapped(self._files.block, layout.nbytes)
        self._slices = RecordSlices(layout, block)
        return block

    def _save(self, number: int, reply: Reply, *, first: bool) -> None:
        """Write a reply where the monitor finds it, should this process die before it has arrived."""
        if first:
            os.ftruncate(self._files.replies, 0)
            os.lseek(self._files.replies, 0, os.SEEK_SET)
        os.write(self._files.replies, pickle.dumps((number, reply)))


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    os.ftruncate(fd, nbytes)
    return mmap.mmap(fd, nbytes)


def saved_replies(data: bytes) -> list[tuple[int, Reply]]:
    """The replies that a worker has saved, with the numbers of their orders; not one that is partially written."""
    replies = []
    file = io.BytesIO(data)
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            replies.append(pickle.load(file))
    return replies


class _Watched:
    """A worker's process and files, opened by its monitor."""

    def __init__(self, greeting: Greeting) -> None:
        self.pid, self.marker = greeting.pid, greeting.marker
        with contextlib.ExitStack() as stack:  # the worker may die half-way
            self.handle = os.pidfd_open(self.pid)
            stack.callback(os.close, self.handle)
            opened = []
            for fd in greeting.files:
                opened.append(os.open(f"/proc/{self.pid}/fd/{fd}", os.O_RDWR))
                stack.callback(os.close, opened[-1])
            stack.pop_all()
        self.files = Files(*opened)
        self.crash = CrashFile(self.files.crash)

    def status(self) -> bytes:
        return os.pread(self.files.status, WorkerStatus.NBYTES, 0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        _await_death(self.handle, _DEATH_TIMEOUT_S)

    def exitcode(self) -> int | None:
        """The exit code of the dead process, which Linux 6.15 and later tell others than its parent."""
        import fcntl  # not on Windows, where nothing is watched

        deadline = time.monotonic() + _DEATH_TIMEOUT_S
        while True:
            info = bytearray(_PIDFD_INFO_NBYTES)
            struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
            try:
                fcntl.ioctl(self.handle, _PIDFD_GET_INFO, info)
            except OSError:
                return None
            (mask,), (status,) = struct.unpack_from("=Q", info), struct.unpack_from("=i", info, _PIDFD_INFO_NBYTES - 4)
            if mask & _PIDFD_INFO_EXIT:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.005)  # it is known from when the parent, Ray, has reaped the process

    def close(self) -> None:
        for fd in (self.handle, *self.files):
            os.close(fd)


def _await_death(handle: int, timeout: float | None = None) -> None:
    poll = select.poll()  # unlike `select.select`, it takes any number of descriptors
    poll.register(handle, select.POLLIN)
    poll.poll(None if timeout is None else timeout * 1e3)


class RayNodeMonitor:
    """The actor beside the workers of one node; it knows them by the driver's keys."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._reaper: socket.socket | None = None

    def watch(self, key: int, greeting: Greeting) -> bool:
        """Open a worker's process and files; False if it is dead already, or if this system cannot."""
        try:
            self._watched[key] = _Watched(greeting)
        except (OSError, AttributeError):
            return False
        try:
            self._reap_after([self._watched[key]])
        except OSError:  # somebody has killed the child reaper
            self._reaper = None
            self._reap_after(self._watched.values())
        return True

    def _reap_after(self, workers: Iterable[_Watched]) -> None:
        if self._reaper is None:
            self._reaper = start_child_reaper()
        for worker in workers:
            socket.send_fds(self._reaper, [f"{worker.pid} {worker.marker}".encode()], [worker.handle])

    def look(self, keys: Iterable[int]) -> tuple[float, dict[int, bytes]]:
        """`time.monotonic` on this machine, and the status of workers."""
        return time.monotonic(), {key: self._watched[key].status() for key in keys}

    def discard(self, key: int) -> None:
        """Have a worker leave out what it has not begun yet."""
        WorkerStatus(mmap.mmap(self._watched[key].files.status, WorkerStatus.NBYTES)).discard()

    def stack(self, key: int) -> str:
        return self._watched[key].crash.stack(self._watched[key].pid, _STACK_TIMEOUT_S)

    def remains(self, key: int, span: tuple[int, int], *, kill: bool) -> Remains:
        """What a worker leaves that is dead, dying or to be killed; `span` is the place of its records in the block."""
        worker, (start, stop) = self._watched[key], span
        if kill:
            worker.kill()
        _await_death(worker.handle, _DEATH_TIMEOUT_S)
        files = worker.files
        return Remains(
            worker.status(),
            os.pread(files.block, stop - start, start),
            saved_replies(os.pread(files.replies, os.fstat(files.replies).st_size, 0)),
            Lost(worker.exitcode(), worker.crash.text()),
        )

    def end(self, keys: Iterable[int]) -> None:
        for worker in [self._watched.pop(key) for key in keys if key in self._watched]:
            worker.kill()
            descendants.kill_left_behind(worker.pid, worker.marker)
            worker.close()


# Ray ends the children of its workers, but not theirs; so the reaper is nobody's child, and leads a session.
_CHILD_REAPER = """import os
if os.fork():
    os._exit(0)
os.setsid()
from marl_parallel.backends.ray_worker import run_child_reaper
run_child_reaper()
"""
_MOST_NBYTES = 1024


def start_child_reaper() -> socket.socket:
    """Start the process that ends what workers leave running when they die, even if the driver was killed. Linux only.

    The process id and marker of each worker are sent to it, with a pidfd. It ends when the socket that is returned is
    closed and all these workers are dead.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command, program = interpreter.program(_CHILD_REAPER, sys.path)
    try:
        subprocess.run(
            [*command, "marl_parallel-child-reaper"],  # a name in lists of processes
            check=True,
            pass_fds=[program],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=interpreter.output(sys.stderr, 2),
        )
    finally:
        theirs.close()
        os.close(program)
    return ours


def run_child_reaper() -> None:
    """Run the child reaper, whose standard input is the other end of the socket."""
    with socket.socket(fileno=0) as workers:
        while True:
            worker, handles, _, _ = socket.recv_fds(workers, _MOST_NBYTES, 1)
            if not worker:
                return  # Python ends when all threads have
            pid, _, marker = worker.decode().partition(" ")
            threading.Thread(target=_reap_after, args=(handles[0], int(pid), marker)).start()


def _reap_after(handle: int, pid: int, marker: str) -> None:
    _await_death(handle)
    descendants.kill_left_behind(pid, marker)
    os.close(handle)
