"""Workers that are children of the parent itself, with no server in between.

Here lives what the contexts "fork" and "spawn" have in common: `OwnChildrenLauncher`, which finds out who died, and
ends all. How one is started is the business of `forking.py` and `spawning.py`.

There is nobody to outlive the parent but the kernel: when the parent is killed, the workers' process groups die with
it, but what has left its group stays. And nobody posts a semaphore when a worker dies; `deaths` has to be asked.
"""

from __future__ import annotations

import os
import signal
import time
from abc import abstractmethod
from collections.abc import Sequence

from marl_parallel.backends import descendants
from marl_parallel.backends.child import Setting
from marl_parallel.backends.launching import Launcher

_TICK = 0.002
_GONE_WITHIN = 5.0


class OwnChildrenLauncher(Launcher):
    """Starts workers from this process."""

    def __init__(self, entry: str, threads: int | None) -> None:
        self._guard, self._guard_end = os.pipe()
        super().__init__(entry, threads)

    def _start_worker(self, index: int, fds: Sequence[int], crash: int) -> int:
        setting = Setting.here(index, self._entry, self._token, self._threads)
        copies: list[int] = []
        # Copies, since the objects that own the originals may close them, in a forked child too.
        try:
            copies.extend(os.dup(fd) for fd in (self._guard, crash, *fds))
            return self._start_child(setting, copies[0], copies[1], copies[2:])
        finally:
            for fd in copies:
                os.close(fd)

    @abstractmethod
    def _start_child(self, setting: Setting, guard: int, crash: int, fds: Sequence[int]) -> int:
        """Start a process that becomes a worker; returns its id. The descriptors are closed here afterwards."""

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
