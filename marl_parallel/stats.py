"""What `ParallelEnv.stats()` returns: counts and seconds, of each worker and of all together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

_HEADINGS = ("", "steps", "resets", "restarts", "simulator s", "transport s", "waiting s")


@dataclass(frozen=True)
class WorkerStats:
    """What one worker has done, with those in whose place it may have come.

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

    def __str__(self) -> str:
        r"""A table: a line for each worker, and one for all of them.

        Example:
            >>> busy = WorkerStats(steps=1200, resets=48, simulator_s=0.2614, transport_s=0.0121, waiting_s=0.0032)
            >>> print(Stats.of([busy, WorkerStats(steps=1200, resets=48, waiting_s=0.5)]))
                      steps  resets  restarts  simulator s  transport s  waiting s
            worker 0  1,200      48         0        0.261        0.012      0.003
            worker 1  1,200      48         0        0.000        0.000      0.500
            all       2,400      96         0        0.261        0.012      0.503
        """
        named = [*((f"worker {number}", own) for number, own in enumerate(self.workers)), ("all", self)]
        lines = [_HEADINGS, *((name, *_cells(own)) for name, own in named)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        )


def _cells(own: WorkerStats) -> list[str]:
    values = [getattr(own, field.name) for field in fields(WorkerStats)]
    return [f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" for value in values]
