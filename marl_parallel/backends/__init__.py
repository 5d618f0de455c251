"""Backends: where workers run. `open_backend` chooses one by name."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from marl_parallel.backends.local import SerialBackend, ThreadBackend
from marl_parallel.core.backend import Backend

if TYPE_CHECKING:
    from marl_parallel.backends.worker_processes import WorkerProcesses

NAMES = ("process", "hybrid", "serial", "thread", "ray")
AUTOMATIC = ("auto", "auto-hybrid")
"""Names that let `planning.py` choose the backend."""
_OF_PROCESSES = ("process", "hybrid")
WAITS = ("adaptive", "block", "spin")
PORTABLE = "MARL_PARALLEL_PORTABLE"
"""The environment variable: with "1", Linux uses the `backend="process"` of macOS and Windows; "0" is the default."""


_used: weakref.WeakSet[Backend] = weakref.WeakSet()  # by a `ParallelEnv`


def check_backend(backend: object) -> None:
    """Raise `TypeError` or `ValueError` for anything but a `Backend`, or a name of one."""
    if isinstance(backend, Backend) or backend in (*NAMES, *AUTOMATIC):
        return
    if not isinstance(backend, str):
        raise TypeError(f"backend must be one of {', '.join(NAMES)} or a Backend, got {backend!r}")
    raise ValueError(f"backend must be one of {', '.join((*NAMES, *AUTOMATIC))}, got {backend!r}")


def open_backend(
    backend: str | Backend,
    *,
    worker_threads: int | None,
    wait: str = "adaptive",
    preload: Sequence[str] = (),
    start_timeout: float | None = None,
) -> Backend:
    """The backend of this name, not yet started; or the `Backend` that was passed, if no other environment uses it."""
    check_backend(backend)
    if wait != "adaptive" and backend not in _OF_PROCESSES:
        raise ValueError(
            f'wait={wait!r} affects worker processes only: pass backend="process" or "hybrid", or leave wait out'
        )
    if isinstance(backend, Backend):
        if backend in _used:
            raise ValueError("a backend serves one ParallelEnv, once; create a new one for each")
        _used.add(backend)
        return backend
    if backend in _OF_PROCESSES:
        return _open_processes(worker_threads, wait, preload, start_timeout, hybrid=backend == "hybrid")
    if backend == "thread":
        return ThreadBackend()
    if backend == "serial":
        return SerialBackend()
    if backend in AUTOMATIC:
        raise ValueError(f"backend={backend!r} chooses a backend, and is none itself")
    from marl_parallel.backends.ray_backend import RayBackend

    return RayBackend(num_threads=worker_threads)


def _open_processes(
    threads: int | None, wait: str, preload: Sequence[str], start_timeout: float | None, *, hybrid: bool
) -> WorkerProcesses:
    """The backend of worker processes for this system."""
    from marl_parallel.backends.hybrid import HybridBackend

    value = os.environ.get(PORTABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f'the environment variable {PORTABLE} must be "1" or "0", got {value!r}')
    portable = value == "1"
    if sys.platform == "linux" and not portable:  # only Linux has what `process.py` needs, and not in all builds
        from marl_parallel.backends.memory import has_semaphores

        if has_semaphores():
            from marl_parallel.backends.process import ProcessBackend, Queues

            if hybrid:
                return HybridBackend(Queues(threads, wait, preload, start_timeout))
            return ProcessBackend(threads=threads, wait=wait, preload=preload, start_timeout=start_timeout)
    if wait == "spin":
        where = f"with {PORTABLE}=1" if portable else "on this system"
        raise ValueError(f'wait="spin" needs Linux; {where} processes sleep while they wait')
    from marl_parallel.backends.spawn import Pipes, PortableProcessBackend

    return HybridBackend(Pipes(threads)) if hybrid else PortableProcessBackend(threads=threads)
