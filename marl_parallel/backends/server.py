"""The fork server: a small process of one thread that has the usual libraries loaded and forks workers.

Here lives what runs inside it, and the replies it gives. Who starts it and asks is
`marl_parallel.backends.forkserver`; what a worker does once forked is `marl_parallel.backends.child`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from marl_parallel.backends import child, descendants, threads
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


def serve(connection: int, guard: int, parent: int, token: str, entry: str, wake: tuple[int, int, int] | None) -> None:
    """Serve until the parent goes or hangs up; then end all workers and all that they have started.

    Args:
        connection: Descriptor of the socket to the parent.
        guard: Read end of a pipe of which the parent has the write end.
        parent: Its process id.
        token: Of the launcher.
        entry: The workers' module, loaded here so that they find it loaded.
        wake: The fields of a `Wake`, if a semaphore is to be posted at each death.
    """
    gc.disable()
    for module in ("numpy", "gymnasium", entry):
        importlib.import_module(module)
    # Objects that are never looked at by the collector stay in pages that all workers share.
    gc.freeze()
    server = _Server(connection, guard, parent, token, Wake(*wake) if wake else None)
    try:
        server.run()
    finally:
        server.socket.close()
        # The workers' guard kills each group; this also ends what has left its group.
        os.close(server.own_guard_end)
        descendants.kill_children(_ENDED_WITHIN)


class _Server:
    def __init__(self, connection: int, guard: int, parent: int, token: str, wake: Wake | None) -> None:
        self.token = token
        self.workers: set[int] = set()
        self.guard = guard
        # A second guard, for the case that this process is killed while the parent lives.
        self.own_guard, self.own_guard_end = os.pipe()
        self.socket = socket.socket(fileno=connection)
        self.block = Block.attach(wake.fd, wake.nbytes) if wake else None
        self.wake = Semaphore(self.block.buffer, wake.offset) if self.block and wake else None
        descendants.adopt_orphans()
        self.child_died, child_died_end = os.pipe()
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
            parent = os.pidfd_open(self.parent)
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
            if pid := os.fork():
                self.workers.add(pid)
                return pid
            payload, crash, out, err, *own = fds
            child.become_worker(
                lambda: self.prepare(payload, out, err), own, crash=crash, guards=(self.guard, self.own_guard)
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def prepare(self, payload: int, out: int, err: int) -> child.Setting:
        """In the worker: let go of what is the server's, adopt what the parent has sent."""
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
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        setting = child.Setting.read(payload)
        setting.adopt()
        wanted = threads.default(setting.environ) if setting.threads is None else setting.threads
        if wanted != 1:  # with which this server was started, so that it has a single thread
            threads.set_loaded(wanted)
        gc.enable()
        return setting

    def report_deaths(self) -> None:
        """Reap all children that ended, and tell of the workers among them."""
        while (ended := _next_ended()) is not None:
            if ended not in self.workers:
                os.waitpid(ended, 0)
                continue
            self.workers.discard(ended)
            self.socket.send(REPLY.pack(Reply.DIED, ended, descendants.reap(ended) or 0))
            if self.wake is not None:
                self.wake.post()
            # After the report, since it takes as long again; but before another worker can be forked.
            descendants.kill_marked(descendants.marker_value(self.token, ended))


def _next_ended() -> int | None:
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid
