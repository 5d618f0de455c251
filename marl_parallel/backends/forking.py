"""Workers forked from the parent itself: the context "fork".

Here lives `ForkLauncher`. It needs no server and gives workers all that the parent has in memory. In a
process with several threads that is unsafe: what another thread held locked stays locked in the child. And of
what dead workers leave behind, it finds only what is in their process group or has executed another program.
What such a worker does is not known here, as with `marl_parallel.backends.forkserver`.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence

from marl_parallel.backends import child, descendants, threads
from marl_parallel.backends.launching import Launcher

_TICK = 0.002
_GONE_WITHIN = 5.0


class ForkLauncher(Launcher):
    """Forks workers from this process."""

    def __init__(self, entry: str, threads: int | None) -> None:
        importlib.import_module(entry)  # once, rather than in each worker
        self._guard, self._guard_end = os.pipe()
        super().__init__(entry, threads)

    def _start_worker(self, index: int, fds: Sequence[int], crash: int) -> int:
        setting = child.Setting.here(index, self._entry, self._token, self._threads)
        copies: list[int] = []
        # Copies, since in the child the objects that own the originals may close them.
        try:
            copies.extend(os.dup(fd) for fd in (self._guard, crash, *fds))
            return _fork(setting, copies)
        finally:
            for fd in copies:
                os.close(fd)

    def _collect(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._crash_files:
            codes = {pid: descendants.reap(pid) for pid in list(self._crash_files)}
            dead = {pid: code for pid, code in codes.items() if code is not None}
            for pid, code in dead.items():
                self._note_death(pid, code)
                descendants.kill_marked(descendants.marker_value(self._token, pid))
            if dead or time.monotonic() >= deadline:
                return
            time.sleep(_TICK)

    def _stop(self) -> None:
        os.close(self._guard_end)
        for pid in self._crash_files:
            descendants.send(pid, signal.SIGKILL)
        self.wait_gone(list(self._crash_files), _GONE_WITHIN)
        descendants.kill_marked(self._token)
        os.close(self._guard)

    def _let_go(self) -> None:
        os.close(self._guard_end)
        os.close(self._guard)


def _fork(setting: child.Setting, copies: Sequence[int]) -> int:
    for stream in (sys.stdout, sys.stderr):
        # What is buffered would be written by both.
        if stream is not None:
            stream.flush()
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        if pid := os.fork():
            return pid
        guard, crash, *fds = copies
        child.become_worker(lambda: _prepare(setting), fds, crash=crash, guards=[guard])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    setting.adopt()
    if setting.threads is not None:
        threads.set_loaded(setting.threads)
    return setting
