"""What every part of the package and every user may import: errors, results, statistics, the restart policy.

Errors of calls out of order are Gymnasium's own (`gymnasium.error`), those of bad arguments Python's. This module
imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

_HEADINGS = ("", "steps", "resets", "restarts", "simulator s", "transport s", "waiting s")


class ParallelEnvError(RuntimeError):
    """Something went wrong in a worker.

    Attributes:
        env_ids: The environments concerned: the one that was running, or all of the worker's where that is unknown.
        worker: The worker's number, None where no worker is to blame.
    """

    def __init__(self, message: str, *, env_ids: Iterable[int] = (), worker: int | None = None) -> None:
        super().__init__(message)
        self.env_ids = tuple(env_ids)
        self.worker = worker


class EnvError(ParallelEnvError):
    """An environment raised. `__cause__` is the original exception where it could be pickled.

    Attributes:
        method: What the environment was doing: `"constructor"`, `"reset"`, `"step"`, `"render"`, `"close"`, ...;
            or `"observation_space('agent_0')"` where a method that gives a space raised.
        remote_traceback: The traceback from inside the worker, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        env_ids: Iterable[int] = (),
        worker: int | None = None,
        method: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message, env_ids=env_ids, worker=worker)
        self.method = method
        self.remote_traceback = remote_traceback


class WorkerCrashed(ParallelEnvError):
    """A worker process died: killed, crashed natively, or ended by the simulator itself.

    Attributes:
        exitcode: Its exit code; minus the signal's number where a signal ended it; None where unknown.
        stack: The stack at a native crash (segmentation fault and the like), empty where there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        env_ids: Iterable[int] = (),
        worker: int | None = None,
        exitcode: int | None = None,
        stack: str = "",
    ) -> None:
        super().__init__(message, env_ids=env_ids, worker=worker)
        self.exitcode = exitcode
        self.stack = stack


class RestartLimitExceeded(ParallelEnvError):
    """An environment failed more often than its `RestartPolicy` allows; everything is closed.

    `__cause__` is the error of the last failure.
    """


class WorkerTimeout(ParallelEnvError, TimeoutError):
    """An environment took longer than it may.

    Attributes:
        method: What the environment was doing, as in `EnvError`.
        stack: The Python stack of the hung worker, taken while it hung; empty where it could not be had.
    """

    def __init__(
        self,
        message: str,
        *,
        env_ids: Iterable[int] = (),
        worker: int | None = None,
        method: str = "",
        stack: str = "",
    ) -> None:
        super().__init__(message, env_ids=env_ids, worker=worker)
        self.method = method
        self.stack = stack


class StepBatch(NamedTuple):
    """Results of some environments, in the order in which they were completed.

    Steps and resets may be in the same batch: a reset's rewards are 0.0 and its flags False, with the same agents.

    Attributes:
        env_ids: Whose they are; the others have one dict for each of these.
        observations: By agent.
        rewards: By agent.
        terminateds: By agent and for `"__all__"`.
        truncateds: By agent and for `"__all__"`.
        infos: By agent.
    """

    env_ids: tuple[int, ...]
    observations: tuple[dict[Any, Any], ...]
    rewards: tuple[dict[Any, Any], ...]
    terminateds: tuple[dict[Any, Any], ...]
    truncateds: tuple[dict[Any, Any], ...]
    infos: tuple[dict[Any, Any], ...]


@dataclass(frozen=True)
class RestartPolicy:
    """How often an environment may be restarted; then `RestartLimitExceeded` is raised.

    Attributes:
        max_restarts: In its life; None for no limit.
        rate_limit: Within any `rate_period_s` seconds; None for no limit.
        rate_period_s: Seconds.

    Raises:
        TypeError: Something is no number.
        ValueError: A number is negative, or the period not positive.

    Example:
        >>> RestartPolicy(max_restarts=100).rate_limit
        5
    """

    max_restarts: int | None = None
    rate_limit: int | None = 5
    rate_period_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_restarts", "rate_limit"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | np.integer | None):
                raise TypeError(f"{name} must be an integer or None, got {number!r}")
            if number is not None and number < 0:
                raise ValueError(f"{name} must not be negative, got {number}; None stands for no limit")
        if isinstance(self.rate_period_s, bool) or not isinstance(self.rate_period_s, Real):
            raise TypeError(f"rate_period_s must be a number of seconds, got {self.rate_period_s!r}")
        if not self.rate_period_s > 0:
            raise ValueError(f"rate_period_s must be positive, got {self.rate_period_s}")


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
