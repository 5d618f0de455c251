"""The fork server: a small process of one thread that has the usual libraries loaded and forks workers.

Here lives what runs inside it, and the replies it gives. Who starts it and asks is
`marl_parallel.backends.forkserver`; what a worker does once forked is `marl_parallel.backends.child`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, NoReturn

from marl_parallel.backends import child, descendants, descriptors, keeper, spawning, threads
from marl_parallel.backends.memory import Block
from marl_parallel.backends.semaphores import Semaphore

MOST_FDS = 240
"""How many descriptors a worker can be given; the kernel takes 253 in one message."""

_ENDED_WITHIN = 5.0


class Reply(IntEnum):
    """What the server tells."""

    LAUNCHED = 1
    """Request number, process id."""
    FAILED = 2
    """Request number, errno of the fork."""
    DIED = 3
    """Process id, exit code (negative: the signal)."""


REPLY = struct.Struct("3q")
REQUEST = struct.Struct("q")


class Wake(NamedTuple):
    """Where the parent waits: a semaphore in a block."""

    fd: int
    nbytes: int
    offset: int


def serve(
    connection: int,
    guard: int,
    parent: int,
    token: str,
    entry: str,
    wake: tuple[int, int, int] | None,
    fresh: bool,
) -> None:
    """Serve until the parent goes or hangs up; then end all workers and all that they have started.

    Args:
        connection: Descriptor of the socket to the parent.
        guard: Read end of a pipe of which the parent has the write end.
        parent: Its process id.
        token: Of the launcher.
        entry: The workers' module, loaded here so that they find it loaded.
        wake: The fields of a `Wake`, if a semaphore is to be posted at each death.
        fresh: Whether workers are fresh interpreters, rather than forks of this process.
    """
    # The program that started the parent may have had signals blocked, of which SIGCHLD tells of deaths.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if not fresh:
        gc.disable()
        for module in ("numpy", "gymnasium", entry):
            importlib.import_module(module)
        # Objects that are never looked at by the collector stay in pages that all workers share.
        gc.freeze()
    server = _Server(connection, guard, parent, token, Wake(*wake) if wake else None, fresh)
    try:
        server.run()
    finally:
        server.socket.close()
        # The workers' guard kills each group; their keepers end what has left its group.
        os.close(server.own_guard_end)
        deadline = time.monotonic() + _ENDED_WITHIN
        server.await_keepers(deadline)
        descendants.kill_children(max(deadline - time.monotonic(), 1.0))


class _Server:
    def __init__(self, connection: int, guard: int, parent: int, token: str, wake: Wake | None, fresh: bool) -> None:
        self.token, self.fresh = token, fresh
        self.workers: dict[int, int] = {}  # by keeper
        self.guard = guard
        # A second guard, for the case that this process is killed while the parent lives.
        self.own_guard, self.own_guard_end = descriptors.pipe()
        self.socket = socket.socket(fileno=connection)
        self.block = Block.attach(wake.fd, wake.nbytes) if wake else None
        self.wake = Semaphore(self.block.buffer, wake.offset) if self.block and wake else None
        descendants.adopt_orphans()
        self.child_died, child_died_end = descriptors.pipe()
        for fd in (self.child_died, child_died_end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(child_died_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.parent = parent
        self.inherited = [self.own_guard_end, self.child_died, child_died_end]

    def run(self) -> None:
        poll = select.poll()
        for fd in (self.socket.fileno(), self.child_died):
            poll.register(fd, select.POLLIN)
        # A copy of the socket in a child of the parent would hide that the parent is gone.
        with contextlib.suppress(OSError):  # kernels before 5.3 lack it
            parent = descriptors.lifted(os.pidfd_open(self.parent))
            self.inherited.append(parent)
            poll.register(parent, select.POLLIN)
        while os.getppid() == self.parent:
            ready = {fd for fd, _ in poll.poll()}
            try:
                if self.child_died in ready:
                    os.read(self.child_died, 4096)
                    self.report_deaths()
                if self.socket.fileno() in ready and not self.answer():
                    return
            except (BrokenPipeError, ConnectionResetError):
                return

    def answer(self) -> bool:
        """Carry out one request; False if the parent hung up."""
        message, fds, flags, _ = socket.recv_fds(self.socket, REQUEST.size, MOST_FDS + 5, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        (request,) = REQUEST.unpack(message)
        try:
            if flags & socket.MSG_CTRUNC:
                raise OSError("no file descriptors left in the fork server")
            reply, number = Reply.LAUNCHED, self.fork(fds)
        except OSError as error:
            reply, number = Reply.FAILED, error.errno or 0
        finally:
            for fd in fds:
                os.close(fd)
        self.socket.send(REPLY.pack(reply, request, number))
        return True

    def fork(self, fds: Sequence[int]) -> int:
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        try:
            worker, keeper_pid = keeper.fork_kept(
                functools.partial(self.work, fds), self.tell, keep=[self.socket.fileno()]
            )
            self.workers[keeper_pid] = worker
            return worker
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def work(self, fds: Sequence[int], guard: int) -> NoReturn:
        """In the worker."""
        payload, crash, out, err, *own = fds
        guards = (self.guard, self.own_guard, guard)
        if self.fresh:
            self.let_go(out, err)
            spawning.execute(payload, crash, guards, own)
        child.become_worker(lambda: self.prepare(payload, out, err), own, crash=crash, guards=guards)

    def tell(self, worker: int, exitcode: int) -> None:
        """Tell the parent of a death; called by the worker's keeper."""
        self.socket.send(REPLY.pack(Reply.DIED, worker, exitcode))
        if self.wake is not None:
            self.wake.post()

    def let_go(self, out: int, err: int) -> None:
        """In the worker: close what is the server's, and take over the parent's output."""
        for fd in self.inherited:
            os.close(fd)
        self.socket.close()
        self.wake = self.block = None
        # Not the caller's stdin: a worker that reads from it takes away what was typed for the parent.
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        for fd in (null, out, err):
            os.close(fd)

    def prepare(self, payload: int, out: int, err: int) -> child.Setting:
        """In the worker: let go of what is the server's, adopt what the parent has sent."""
        self.let_go(out, err)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        setting = child.Setting.read(payload)
        setting.adopt()
        wanted = threads.default(setting.environ) if setting.threads is None else setting.threads
        if wanted != 1:  # with which this server was started, so that it has a single thread
            threads.set_loaded(wanted)
        gc.enable()
        return setting

    def report_deaths(self) -> None:
        """Reap keepers that have ended, and tell of the workers of those that could not tell themselves."""
        for ended, told in _ended():
            worker = self.workers.pop(ended, None)
            if worker is None or told:
                continue
            self.tell(worker, -signal.SIGKILL)
            descendants.kill_marked(descendants.marker_value(self.token, worker))

    def await_keepers(self, deadline: float) -> None:
        """Give keepers the time to kill what their workers have left."""
        while self.workers and time.monotonic() < deadline:
            for ended, _ in _ended():
                self.workers.pop(ended, None)
            time.sleep(0.001)


def _ended() -> Iterator[tuple[int, bool]]:
    """Reap the children that have ended; whether each was a keeper that has told how its worker died."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1]) == keeper.TOLD
