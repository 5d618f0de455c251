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
from collections.abc import Sequence

from marl_parallel.backends import child, descendants, threads
from marl_parallel.backends.own_children import OwnChildrenLauncher


class ForkLauncher(OwnChildrenLauncher):
    """Forks workers from this process."""

    def __init__(self, entry: str, threads: int | None) -> None:
        importlib.import_module(entry)  # once, rather than in each worker
        super().__init__(entry, threads)

    def _start_child(self, setting: child.Setting, guard: int, crash: int, fds: Sequence[int]) -> int:
        for stream in (sys.stdout, sys.stderr):
            # What is buffered would be written by both.
            if stream is not None:
                stream.flush()
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        pid = 0
        try:
            if pid := os.fork():
                return pid
            child.become_worker(lambda: _prepare(setting), fds, crash=crash, guards=[guard])
        finally:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            except BaseException:  # Ctrl-C has waited for this: nobody would get to know of the child
                if pid:
                    descendants.send(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                raise


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
