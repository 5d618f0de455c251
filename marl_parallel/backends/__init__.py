"""Where workers live. `open_backend` chooses by name; each module here is one kind of place, or a part of one.

Which of the two kinds of process backend a system can carry is decided here, too.
"""

from __future__ import annotations

import sys

from marl_parallel.backends.local import SerialBackend, ThreadBackend
from marl_parallel.core.backend import Backend

NAMES = ("process", "serial", "thread", "ray")
CONTEXTS = ("forkserver", "spawn", "fork")


def open_backend(backend: str | Backend, *, context: str | None, worker_threads: int | None) -> Backend:
    """The backend that a name stands for, not yet started.

    Args:
        backend: A name, or a backend that no other environment uses.
        context: How worker processes start; for `"process"` only.
        worker_threads: BLAS, OpenMP and torch threads in a worker process.

    Raises:
        ValueError: There is no such backend, or `context` does not go with it.
        TypeError: It is neither a name nor a `Backend`.
    """
    if context is not None and context not in CONTEXTS:
        raise ValueError(f"context must be one of {', '.join(CONTEXTS)} or None, got {context!r}")
    if context is not None and backend != "process":
        raise ValueError(f'context={context!r} says how processes start, it goes with backend="process" only')
    if isinstance(backend, Backend):
        backend.claim()
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend must be one of {', '.join(NAMES)} or a Backend, got {backend!r}")
    if backend == "process":
        return _open_processes(context, worker_threads)
    if backend == "thread":
        return ThreadBackend()
    if backend == "serial":
        return SerialBackend()
    if backend == "ray":
        from marl_parallel.backends.ray_backend import RayBackend

        return RayBackend(num_threads=worker_threads)
    raise ValueError(f"there is no backend {backend!r}; there are {', '.join(NAMES)}")


def _open_processes(context: str | None, worker_threads: int | None) -> Backend:
    if _has_linux_means():
        from marl_parallel.backends.process import ProcessBackend

        return ProcessBackend(context=context, threads=worker_threads)
    if context not in (None, "spawn"):
        raise ValueError(f'context={context!r} needs Linux; on this system workers start by "spawn" only')
    from marl_parallel.backends.spawn import PortableProcessBackend

    return PortableProcessBackend(threads=worker_threads)


def _has_linux_means() -> bool:
    """Whether there is what `process.py` and the launchers are built on; only Linux has all of it."""
    if sys.platform != "linux":
        return False
    from marl_parallel.backends.memory import has_semaphores

    return has_semaphores()
