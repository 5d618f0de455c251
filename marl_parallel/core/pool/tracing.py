"""Traces of a pool: slices of the caller's calls and of its workers."""

from __future__ import annotations

from array import array

from marl_parallel.core.messages import Reply
from marl_parallel.core.pool.extensions import Extension
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.reports.reports import logger
from marl_parallel.core.worker_status import SLICES, Tracer


class Tracing(Extension):
    """Collects the slices of a trace.

    Attributes:
        tracer: Receives the slices.
    """

    def __init__(self, pool: Pool, tracer: Tracer) -> None:
        self._pool, self.tracer = pool, tracer

    def on_replaced(self, worker: int) -> None:
        self.tracer.mark_replaced(self._pool.position(worker))

    def on_close(self, worker: int, reply: Reply) -> None:
        if SLICES in reply.results:
            self.add(worker, reply.results[SLICES])

    def add(self, worker: int, slices: array[float]) -> None:
        """Add the slices of a worker."""
        self.tracer.add(self._pool.position(worker), slices, self._pool.backend.statuses[worker].ahead)

    def after_close(self) -> None:
        try:
            self.tracer.finish()
        except OSError as unwritten:  # closing goes on
            logger.warning("the trace could not be written to %s: %s", self.tracer.path, unwritten)
