"""Where workers live. `open_backend` chooses by name; each module here is one kind of place."""

from __future__ import annotations

from marl_parallel.backends.serial import SerialBackend
from marl_parallel.backends.thread import ThreadBackend
from marl_parallel.runtime.backend import Backend

NAMES = ("process", "serial", "thread")


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
    if context is not None and backend != "process":
        raise ValueError(f'context={context!r} says how processes start, it goes with backend="process" only')
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend must be one of {', '.join(NAMES)} or a Backend, got {backend!r}")
    if backend == "process":
        from marl_parallel.backends.process import ProcessBackend

        return ProcessBackend(context=context, threads=worker_threads)
    if backend == "thread":
        return ThreadBackend()
    if backend == "serial":
        return SerialBackend()
    raise ValueError(f"there is no backend {backend!r}; there are {', '.join(NAMES)}")
