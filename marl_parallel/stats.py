"""What `ParallelEnv.stats()` returns: counts and seconds, of each worker and of all together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class WorkerStats:
    """What one worker has done since it started.

    Attributes:
        steps: Environment steps.
        resets: Episodes begun, whoever asked for them.
        restarts: Environments built anew after a fault.
        simulator_s: Seconds inside the simulators.
        transport_s: Seconds spent on reading actions and writing transitions.
        waiting_s: Seconds without work.
    """

    steps: int = 0
    resets: int = 0
    restarts: int = 0
    simulator_s: float = 0.0
    transport_s: float = 0.0
    waiting_s: float = 0.0


@dataclass(frozen=True)
class Stats(WorkerStats):
    """The sums over all workers, and each worker's own.

    Attributes:
        workers: One entry per worker, in their order.
    """

    workers: tuple[WorkerStats, ...] = ()

    @classmethod
    def of(cls, workers: Iterable[WorkerStats]) -> Stats:
        """Add up what the workers have done.

        Example:
            >>> Stats.of([WorkerStats(steps=3), WorkerStats(steps=4)]).steps
            7
        """
        workers = tuple(workers)
        sums = {f.name: sum(getattr(worker, f.name) for worker in workers) for f in fields(WorkerStats)}
        return cls(**sums, workers=workers)
