"""Workers forked from the parent itself: the context "fork".

Here lives `ForkLauncher`. It needs no server and gives workers all that the parent has in memory. In a process with
several threads that is unsafe: what another thread held locked stays locked in the child. Between this process and each
worker there is a keeper, which tells over a pipe how the worker died. What a worker does is not known here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from marl_parallel.backends import child, descendants, descriptors, keeper, threads
from marl_parallel.backends.launching import Launcher

_EXITCODE = struct.Struct("q")
_GONE_WITHIN_S = 2 * keeper.CLEARED_WITHIN_S


class _Kept(NamedTuple):
    """A worker and its keeper.

    Attributes:
        worker: Process id.
        keeper: Process id.
        report: Read end of the pipe that the keeper writes the exit code to, and closes when it ends.
    """

    worker: int
    keeper: int
    report: int


class ForkLauncher(Launcher):
    """Forks workers from this process."""

    def __init__(self, entry: str, threads: int | None) -> None:
        importlib.import_module(entry)  # once, rather than in each worker
        self._kept: dict[int, _Kept] = {}  # by the descriptor of the report
        self._guard, self._guard_end = descriptors.pipe()
        super().__init__(entry, threads)

    def _start_worker(self, index: int, fds: Sequence[int], crash: int) -> int:
        self._await_keepers()
        setting = child.Setting.here(index, self._entry, self._token, self._threads)
        for stream in (sys.stdout, sys.stderr):
            # What is buffered would be written by both.
            if stream is not None:
                stream.flush()
        report, report_end = descriptors.pipe()
        os.set_blocking(report, False)
        copies: list[int] = []
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        kept = None
        try:
            # Copies, since the objects that own the originals may close them, in a forked child too.
            copies.extend(descriptors.duplicate(fd) for fd in (self._guard, crash, *fds))
            work = functools.partial(_work, setting, copies, [report, report_end])
            kept = _Kept(*keeper.fork_kept(work, functools.partial(_tell, report_end), [report_end]), report)
            self._kept[report] = kept
            return kept.worker
        finally:
            for fd in (report_end, *copies):
                os.close(fd)
            if kept is None:
                os.close(report)
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            except BaseException:  # Ctrl-C has waited for this: nobody would get to know of the child
                if kept is not None:
                    descendants.send(kept.worker, signal.SIGKILL)
                    self._bury(kept)
                raise

    def _collect(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        known = len(self._dead)
        while self._kept:
            poll = select.poll()
            for fd in self._kept:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                if fd in self._kept:  # a signal handler may have closed meanwhile
                    self._take(self._kept[fd])
            if len(self._dead) > known or time.monotonic() >= deadline:
                return

    def _take(self, kept: _Kept) -> None:
        """Take what a keeper has to tell: how its worker died, then that it has ended itself."""
        try:
            told = os.read(kept.report, _EXITCODE.size)
        except OSError:  # a signal handler that closes has taken it meanwhile
            return
        if told:
            self._note_death(kept.worker, *_EXITCODE.unpack(told))
        else:
            self._bury(kept)
            if kept.worker in self._crash_files:  # the keeper was killed, which kills the worker
                self._note_death(kept.worker, -signal.SIGKILL)
                descendants.kill_marked(descendants.marker_value(self._token, kept.worker))

    def _bury(self, kept: _Kept) -> None:
        """Reap a keeper that has ended, or is just ending."""
        if self._kept.pop(kept.report, None) is None:
            return
        os.close(kept.report)
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, or somebody reaps everything
            os.waitpid(kept.keeper, 0)

    def _await_keepers(self) -> None:
        """Wait until nothing is left of the workers that have died."""
        deadline = time.monotonic() + keeper.CLEARED_WITHIN_S
        while any(kept.worker not in self._crash_files for kept in self._kept.values()):
            if time.monotonic() >= deadline:
                return
            self._collect(0.001)

    def _stop(self) -> None:
        os.close(self._guard_end)
        for kept in list(self._kept.values()):
            if kept.worker in self._crash_files:
                descendants.send(kept.worker, signal.SIGKILL)
        deadline = time.monotonic() + _GONE_WITHIN_S
        while self._kept and time.monotonic() < deadline:
            self._collect(0.01)
        for kept in list(self._kept.values()):
            os.kill(kept.keeper, signal.SIGKILL)
            self._bury(kept)
        os.close(self._guard)

    def _let_go(self) -> None:
        for fd in (self._guard_end, self._guard, *self._kept):
            os.close(fd)
        self._kept.clear()


def _tell(report_end: int, worker: int, exitcode: int) -> None:
    os.write(report_end, _EXITCODE.pack(exitcode))


def _work(setting: child.Setting, copies: Sequence[int], reports: Sequence[int], guard: int) -> NoReturn:
    """In the worker."""
    for fd in reports:
        os.close(fd)
    parents_guard, crash, *fds = copies
    child.become_worker(lambda: _prepare(setting), fds, crash=crash, guards=[parents_guard, guard])


def _prepare(setting: child.Setting) -> child.Setting:
    """Forget what only the parent has to clean up, then adopt the setting."""
    atexit._clear()
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util._finalizer_registry.clear()
        process = sys.modules["multiprocessing.process"]
        process._children = set()  # type: ignore[attr-defined]
        process._process_counter = itertools.count(1)  # type: ignore[attr-defined]
        util._run_after_forkers()
        atexit.register(util._exit_function)
    descriptors.standard_streams()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    setting.adopt()
    if setting.threads is not None:
        threads.set_loaded(setting.threads)
    return setting
