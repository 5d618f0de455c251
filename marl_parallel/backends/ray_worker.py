"""What runs on the nodes of a Ray cluster: workers, a monitor on each node, and the monitor's child reaper.

    driver (ray_backend.py) --- execute -----------------> RayWorker       an actor per worker, with its environments
                            --- statuses, stack, ... ----> RayNodeMonitor  an actor per node
                                                                |
                                                           child reaper    a process per node, outlives both

A worker that computes, hangs or is stopped answers no call. So its state lies in files without a name (`Files`), which
the monitor opens through `/proc`. On a system without `/proc`, nothing is known of a dead worker.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from marl_parallel.backends import descendants, interpreter
from marl_parallel.backends.descendants import CrashFile
from marl_parallel.backends.memory import anonymous_file
from marl_parallel.core.columns import Layout
from marl_parallel.core.messages import Lost, Reply
from marl_parallel.core.pickling import open_script_of_worker
from marl_parallel.core.records import WITH_RESULTS, RecordSlices
from marl_parallel.core.worker import Worker
from marl_parallel.core.worker_status import WorkerStatus

_LARGE_NBYTES = 1 << 20
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


class ProcessInfo(NamedTuple):
    """Where a worker is, and the files for its monitor; `now` is `time.monotonic` on its node."""

    node: str
    now: float
    pid: int
    marker: str
    files: Files


class Result(NamedTuple):
    """The replies to an order, the bytes of the worker status, and the record slices of the results, if any."""

    replies: list[Reply]
    status: bytes
    records: NDArray[Any] | None


Packed: TypeAlias = bytes | tuple[bytes, NDArray[Any]]


def pack(result: Result) -> Packed:
    """Pickle a result in the form that Ray is fastest with: one `bytes`, and large records apart, without a copy."""
    if result.records is None or result.records.nbytes < _LARGE_NBYTES:
        return pickle.dumps(tuple(result), pickle.HIGHEST_PROTOCOL)
    return pickle.dumps((*result[:2], None), pickle.HIGHEST_PROTOCOL), result.records


def unpack(packed: Packed) -> Result:
    """Undo `pack`."""
    if isinstance(packed, bytes):
        return Result(*pickle.loads(packed))
    return Result(*pickle.loads(packed[0]))._replace(records=packed[1])


class RayWorker:
    """The actor of one worker; folders of the driver's module search path that exist here are searched last."""

    def __init__(
        self,
        share: range,
        num_threads: int | None,
        token: str,
        path: Sequence[str],
        identity: interpreter.Identity,
    ) -> None:
        interpreter.take_identity(identity)
        sys.path += [folder for folder in path if folder not in sys.path and os.path.exists(folder)]
        open_script_of_worker()
        self._share = share
        self._files = Files(*(anonymous_file(f"marl_parallel-{name}") for name in Files._fields))
        self._status = _mapped(self._files.status, WorkerStatus.NBYTES)
        self._slices: RecordSlices | None = None
        self._worker = Worker(WorkerStatus(self._status), self._attach, own_process=True)
        self._marker = os.environ[descendants.MARKER] = f"{token}.{os.getpid():010d}"
        descendants.report_to(self._files.crash)
        os.environ.update(interpreter.thread_variables(num_threads))
        if num_threads is not None:
            interpreter.limit_loaded_libraries(num_threads)

    def process_info(self) -> ProcessInfo:
        import ray

        node = ray.get_runtime_context().get_node_id()
        return ProcessInfo(node, time.monotonic(), os.getpid(), self._marker, self._files)

    def execute(self, order: bytes) -> Packed:
        """Execute an order: its number, a request, its actions or None, and whether it is the request's first part.

        The order is pickled, since Ray itself takes several times as long.
        """
        number, request, actions, first = pickle.loads(order)
        env_ids = self._share if request.env_ids is None else request.env_ids
        if actions is not None and self._slices is not None:
            self._slices.put_actions(env_ids, actions)
        replies: list[Reply] = []

        def send(reply: Reply) -> None:
            if request.each or not reply.last:  # the next environment may end this process
                save_reply(self._files.replies, number, reply, first=first and not replies)
            replies.append(reply)

        self._worker.execute(request, send)
        records = None
        if replies and self._slices is not None and request.message in WITH_RESULTS:
            records = self._slices.results(env_ids, request.message, states=self._worker.watch.states)
        return pack(Result(replies, bytes(self._status), records))

    def _attach(self, layout: Layout) -> Any:
        block = _mapped(self._files.block, layout.nbytes)
        self._slices = RecordSlices(layout, block)
        return block


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    os.ftruncate(fd, nbytes)
    return mmap.mmap(fd, nbytes)


def save_reply(file: int, number: int, reply: Reply, *, first: bool) -> None:
    """Write a reply and the number of its order to a file, in case this process dies before the reply has arrived.

    The first reply to a request replaces those to the request before.
    """
    if first:
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
    os.write(file, pickle.dumps((number, reply)))


def saved_replies(data: bytes) -> list[tuple[int, Reply]]:
    """The saved replies with the numbers of their orders; without one that is partially written."""
    replies = []
    file = io.BytesIO(data)
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            replies.append(pickle.load(file))
    return replies


class _WatchedWorker:
    """A worker's process and files, opened by its monitor."""

    def __init__(self, process: ProcessInfo) -> None:
        self.pid, self.marker = process.pid, process.marker
        files = []
        with contextlib.ExitStack() as stack:  # the worker may die half-way
            self.handle = os.pidfd_open(self.pid)
            stack.callback(os.close, self.handle)
            for fd in process.files:
                files.append(os.open(f"/proc/{self.pid}/fd/{fd}", os.O_RDWR))
                stack.callback(os.close, files[-1])
            self.files = Files(*files)
            self.status = mmap.mmap(self.files.status, WorkerStatus.NBYTES)
            self.close = stack.pop_all().close
        self.crash = CrashFile(self.files.crash)

    def reap_with(self, reaper: socket.socket) -> None:
        socket.send_fds(reaper, [f"{self.pid} {self.marker}".encode()], [self.handle])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        wait([self.handle], _DEATH_TIMEOUT_S)


def exitcode_of(handle: int) -> int | None:
    """The exit code of the dead process of a pidfd, which Linux 6.15 and later show to others than its parent."""
    import fcntl  # not on Windows, where no worker is watched

    deadline = time.monotonic() + _DEATH_TIMEOUT_S
    while True:
        info = bytearray(_PIDFD_INFO_NBYTES)
        struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(handle, _PIDFD_GET_INFO, info)
        except OSError:
            return None
        (mask,), (status,) = struct.unpack_from("=Q", info), struct.unpack_from("=i", info, _PIDFD_INFO_NBYTES - 4)
        if mask & _PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)  # it is known as soon as the parent, Ray, has reaped the process


class RayNodeMonitor:
    """The actor that watches the workers of one node, by keys that the driver chooses."""

    def __init__(self) -> None:
        self._workers: dict[int, _WatchedWorker] = {}
        self._reaper: socket.socket | None = None

    def watch(self, key: int, process: ProcessInfo) -> bool:
        """Open a worker's process and files; False if it is dead already, or if this system cannot."""
        try:
            new = self._workers[key] = _WatchedWorker(process)
        except (OSError, AttributeError):
            return False
        if self._reaper is not None:
            with contextlib.suppress(OSError):  # somebody has killed the child reaper
                new.reap_with(self._reaper)
                return True
        self._reaper = start_child_reaper()
        for worker in self._workers.values():
            worker.reap_with(self._reaper)
        return True

    def statuses(self, keys: Iterable[int]) -> tuple[float, dict[int, bytes]]:
        """`time.monotonic` on this machine, and the status of workers."""
        return time.monotonic(), {key: bytes(self._workers[key].status) for key in keys}

    def memory(self, key: int) -> int | None:
        return descendants.memory_of(self._workers[key].pid)

    def discard(self, key: int) -> None:
        """Have a worker skip what it has not begun yet."""
        WorkerStatus(self._workers[key].status).discard()

    def stack(self, key: int, *, harmless: bool) -> str:
        return self._workers[key].crash.stack(self._workers[key].pid, harmless=harmless)

    def last_state(
        self, key: int, places: Iterable[tuple[int, int]], *, kill: bool
    ) -> tuple[bytes, bytes, list[tuple[int, Reply]], Lost]:
        """The state of a worker that is dead, dying or to be killed; its records lie at these places in the block.

        Returns its status, its whole records, its saved replies with the numbers of their orders, and how it died.
        """
        worker = self._workers[key]
        if kill:
            worker.kill()
        wait([worker.handle], _DEATH_TIMEOUT_S)
        records = b"".join([os.pread(worker.files.block, stop - start, start) for start, stop in places])
        replies = os.pread(worker.files.replies, os.fstat(worker.files.replies).st_size, 0)
        lost = Lost(exitcode_of(worker.handle), worker.crash.text())
        return bytes(worker.status), records, saved_replies(replies), lost

    def end(self, keys: Iterable[int]) -> None:
        for worker in [self._workers.pop(key) for key in keys if key in self._workers]:
            worker.kill()
            descendants.kill_left_behind(worker.pid, worker.marker)
            worker.close()


# Ray ends the children of its workers, but not theirs. So the reaper has no parent to die with, and leads a session.
_CHILD_REAPER = """import os
if os.fork():
    os._exit(0)
os.setsid()
from marl_parallel.backends.ray_worker import run_child_reaper
run_child_reaper()
"""


def start_child_reaper() -> socket.socket:
    """Start the process that ends what workers leave running when they die, even if the driver was killed. Linux only.

    It receives the process id and marker of each worker, with a pidfd. It ends when the returned socket is closed and
    all these workers are dead.
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

    def reap_after(handle: int, pid: int, marker: str) -> None:
        wait([handle])
        descendants.kill_left_behind(pid, marker)
        os.close(handle)

    with socket.socket(fileno=0) as workers:
        while True:
            worker, handles, _, _ = socket.recv_fds(workers, 1024, 1)
            if not worker:
                return  # Python ends when all threads have
            pid, _, marker = worker.decode().partition(" ")
            threading.Thread(target=reap_after, args=(handles[0], int(pid), marker)).start()
