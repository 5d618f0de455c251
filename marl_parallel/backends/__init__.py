"""Backends: where workers run. `open_backend` chooses one by name."""

from __future__ import annotations

import sys

from marl_parallel.backends.local import SerialBackend, ThreadBackend
from marl_parallel.core.backend import Backend

NAMES = ("process", "serial", "thread", "ray")
CONTEXTS = ("forkserver", "spawn", "fork")
WAITS = ("adaptive", "block", "spin")


def open_backend(
    backend: str | Backend, *, context: str | None, worker_threads: int | None, wait: str = "adaptive"
) -> Backend:
    """The backend of this name, or this backend if no other environment uses it; not yet started."""
    if context is not None and context not in CONTEXTS:
        raise ValueError(f"context must be one of {', '.join(CONTEXTS)} or None, got {context!r}")
    if context is not None and backend != "process":
        raise ValueError(f'context={context!r} says how processes start, it goes with backend="process" only')
    if wait not in WAITS:
        raise ValueError(f"wait must be one of {', '.join(WAITS)}, got {wait!r}")
    if wait != "adaptive" and backend != "process":
        raise ValueError(f'wait={wait!r} says how processes wait, it goes with backend="process" only')
    if isinstance(backend, Backend):
        backend.claim()
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend must be one of {', '.join(NAMES)} or a Backend, got {backend!r}")
    if backend == "process":
        if sys.platform == "linux":  # only Linux has what `process.py` needs, and not all builds of Python expose it
            from marl_parallel.backends.memory import has_semaphores

            if has_semaphores():
                from marl_parallel.backends.process import ProcessBackend

                return ProcessBackend(context=context, threads=worker_threads, wait=wait)
        if context not in (None, "spawn"):
            raise ValueError(f'context={context!r} needs Linux; on this system workers start by "spawn" only')
        if wait == "spin":
            raise ValueError('wait="spin" needs Linux; on this system processes sleep while they wait')
        from marl_parallel.backends.spawn import PortableProcessBackend

        return PortableProcessBackend(threads=worker_threads)
    if backend == "thread":
        return ThreadBackend()
    if backend == "serial":
        return SerialBackend()
    if backend == "ray":
        from marl_parallel.backends.ray_backend import RayBackend

        return RayBackend(num_threads=worker_threads)
    raise ValueError(f"there is no backend {backend!r}; there are {', '.join((*NAMES, 'auto'))}")
