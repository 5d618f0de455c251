"""Time in which worker processes import modules or unpickle: CPU time counts only from `MOST_TIMES` `start_timeout` on.

worker    `Loading` records in its `WorkerStatus` when imports begin and end, and which modules take long
caller    `is_past` compares with the timeout; a report quotes `WorkerStatus.imports`
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_parallel.core.worker_status import WorkerStatus

MOST_TIMES = 10
"""A timeout at which imports count after all, as a multiple of the limit."""
_LONG_S = 0.1  # modules that take less are not named
_MOST_NAMED = 5


def cpu_seconds(pid: int) -> float | None:
    """Seconds in which a process used a CPU, in all its threads, or its main thread waited for one; None if unknown."""
    if sys.platform != "linux":
        return None
    try:
        used = time.clock_gettime(~pid << 3 | 2)  # as `clock_getcpuclockid` computes it
    except OSError:
        return None
    with contextlib.suppress(OSError), open(f"/proc/{pid}/schedstat") as file:
        used += int(file.read().split()[1]) * 1e-9
    return used


def is_past(limit: float, elapsed: float, loading: float) -> bool:
    """Whether `elapsed` seconds are past a limit; `loading` of them do not count, up to `MOST_TIMES` the limit."""
    return elapsed > limit and (elapsed - loading > limit or elapsed > MOST_TIMES * limit)


def imported_for_long(env: Any, least_s: float) -> dict[str, float]:
    """Modules that constructors of this process have imported, with the seconds of CPU time; called in a worker.

    The time of a module includes the modules that it imports. Parts of a package that is there itself are left out.
    """
    long = {name: used for name, used in _imported.items() if used >= least_s}
    return {name: used for name, used in long.items() if "." not in name or name.partition(".")[0] not in long}


class Loading:
    """Records in the status of a worker process when it imports or unpickles in a constructor, and what takes long.

    With `own_process=False`, for workers in the caller's process, it records nothing.
    """

    def __init__(self, status: WorkerStatus, own_process: bool = True) -> None:
        self._status, self._own_process = status, own_process
        self._wall: dict[str, float] = {}  # by module, for the present constructor
        self._thread, self._depth = 0, 0
        self._open: list[str] = []  # the modules that are being imported, each by the one before it

    def restart(self) -> None:
        """Forget earlier constructors."""
        self._wall.clear()
        self._open.clear()
        self._depth = 0
        self._status.forget_loading()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within, imports of this thread are recorded."""
        if not self._own_process:
            yield
            return
        self._thread = threading.get_ident()
        _watchers.append(self)
        _install()
        try:
            yield
        finally:
            _watchers.remove(self)
            _install()

    def is_here(self) -> bool:
        """Whether the thread that is running is the one that is watched."""
        return self._thread == threading.get_ident()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Within, this thread imports or unpickles."""
        self._depth += 1
        try:
            if self._depth > 1 or not self._own_process:
                yield
                return
            before = cpu_seconds(os.getpid())
            self._status.begin_loading(before)
            try:
                yield
            finally:
                after = cpu_seconds(os.getpid())
                self._status.end_loading(None if before is None or after is None else after - before)
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def importing(self, name: str) -> Iterator[None]:
        """Within, this thread imports a module."""
        wall, cpu = time.monotonic(), time.thread_time()
        self._open.append(name)
        if len(self._open) == 1:
            self._name_imports()
        try:
            with self.loading():
                yield
        finally:
            self._open.pop()
            took = time.monotonic() - wall
            self._wall[name] = self._wall.get(name, 0.0) + took
            _imported[name] = _imported.get(name, 0.0) + time.thread_time() - cpu
            if not self._open or took >= _LONG_S:
                self._name_imports()

    def _name_imports(self) -> None:
        long = sorted(((s, name) for name, s in self._wall.items() if s >= _LONG_S), reverse=True)
        text = ", ".join(f"{name} {s:.1f} s" for s, name in long[:_MOST_NAMED])
        self._status.name_imports(self._open[0] if self._open else "", text)


# -- the import system -------------------------------------------------------------------------------------------------

_imported: dict[str, float] = {}  # see `imported_for_long`
_watchers: list[Loading] = []
# Private, but no public function is called at the beginning and the end of each import.
_bootstrap: Any = getattr(importlib, "_bootstrap", None)
_find_and_load: Any = getattr(_bootstrap, "_find_and_load", None)


def _find_and_load_watched(name: str, import_: Any) -> Any:
    """Find and execute a module, and record the import if this thread is watched."""
    watcher = next((one for one in _watchers if one.is_here()), None)
    if watcher is None or name in sys.modules:
        return _find_and_load(name, import_)
    with watcher.importing(name):
        return _find_and_load(name, import_)


# So that Python leaves it out of tracebacks, as its own frames of imports.
_find_and_load_watched.__code__ = _find_and_load_watched.__code__.replace(co_filename="<frozen importlib._bootstrap>")


def _install() -> None:
    if _find_and_load is not None:
        _bootstrap._find_and_load = _find_and_load_watched if _watchers else _find_and_load
