"""Errors, results, statistics and the restart policy; this module imports nothing from the package.

Calls out of order raise errors of `gymnasium.error`; wrong arguments raise Python's own errors.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import operator
import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

BackendName: TypeAlias = Literal["process", "hybrid", "serial", "thread", "ray", "auto", "auto-hybrid"]
OnError: TypeAlias = Literal["raise", "restart"]
Wait: TypeAlias = Literal["adaptive", "block", "spin"]
AutoresetName: TypeAlias = Literal[
    "SAME_STEP", "NEXT_STEP", "DISABLED", "same_step", "next_step", "disabled", "SameStep", "NextStep", "Disabled"
]
AdapterName: TypeAlias = Literal[
    "dict",
    "pettingzoo",
    "aec",
    "aec-turn-based",
    "gymnasium",
    "tuple",
    "rllib",
    "mlagents",
    "pymarl",
    "mappo",
    "tianshou",
]
FacadeName: TypeAlias = Literal[
    "agilerl", "gymnasium", "pettingzoo", "pymarl", "rllib", "sb3", "share", "skrl", "stacked", "tianshou", "torchrl",
    "tuple",
]  # fmt: skip


def installed(library: str) -> bool:
    """Whether a library can be imported; a mere folder with its name, such as Ray's `/tmp/ray`, does not count."""
    spec = find_spec(library)
    return spec is not None and spec.origin is not None


def how_to_install(extra: str) -> str:
    """The command that installs an extra, and the one for a checkout of the repository."""
    return f'pip install "marl-parallel[{extra}]", or in a checkout: pip install -e ".[{extra}]"'


class ParallelEnvError(RuntimeError):
    """An environment or its worker failed.

    Attributes:
        env_ids: The environment that was running, or all environments of the worker if that is unknown.
        worker: The number of the worker; None if there is none.
    """

    def __init__(
        self, message: str, *, env_ids: Iterable[int] = (), worker: int | None = None, **attributes: Any
    ) -> None:
        super().__init__(message)
        self.env_ids = tuple(env_ids)
        self.worker = worker
        vars(self).update(attributes)  # those that subclasses declare


class EnvError(ParallelEnvError):
    """An environment raised an exception.

    Attributes:
        original: The exception of the simulator, which is also `__cause__`; None if it cannot be pickled.
        method: The method that was running: `"constructor"`, `"reset"`, `"step"`, `"render"`, `"close"`, ...; or
            `"observation_space('agent_0')"` if a method that returns a space raised.
        remote_traceback: The traceback from inside the worker, as text.
    """

    original: BaseException | None = None
    method: str = ""
    remote_traceback: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without `original` if it cannot be pickled, such as an exception whose class is in a function."""
        attributes = {**vars(self)}
        try:
            pickle.dumps(self.original)
        except Exception:  # its class may do anything when it is pickled
            attributes["original"] = None
        return type(self), self.args, attributes


class WorkerCrashed(ParallelEnvError):
    """A worker process died: killed, crashed natively, or ended by the simulator itself.

    Attributes:
        exitcode: Its exit code; minus the signal's number if a signal ended it; None if unknown.
        stack: The stack at a native crash (segmentation fault and the like), or where Python called `os._exit`. Empty
            if there is none: a process that is killed, or that native code ends, writes none.
    """

    exitcode: int | None = None
    stack: str = ""


class RestartLimitExceeded(ParallelEnvError):
    """An environment failed more often than its `RestartPolicy` allows; everything is closed.

    `__cause__` is the error of the last failure.
    """


class NotReadyInTime(TimeoutError, multiprocessing.TimeoutError):
    """Results were not ready within the timeout of the call that waits for them. Nothing is lost: call it again."""


class WorkerTimeout(ParallelEnvError, TimeoutError, multiprocessing.TimeoutError):
    """An environment took longer than its timeout.

    Attributes:
        method: The method that was running, as in `EnvError`.
        stack: The Python stack of the worker while it hung; empty if it was not available.
    """

    method: str = ""
    stack: str = ""


class FinishedEpisode(NamedTuple):
    """The statistics of one episode, as in `ParallelEnv.finished_episodes`.

    Attributes:
        env_id: The environment.
        returns: By agent, the sum of its rewards, over all its lives if it came back after its end; an array for vector
            rewards; NaN if the rewards cannot be added up.
        lengths: By agent, the number of steps in which it had a reward or ended.
        length: The number of steps of the episode, without steps of automatic resets.
        terminated: `terminateds["__all__"]` of its last step.
        truncated: `truncateds["__all__"]` of its last step. A restart truncates the episode.
    """

    env_id: int
    returns: dict[Any, Any]
    lengths: dict[Any, int]
    length: int
    terminated: bool
    truncated: bool


class NoSpaceDeclared(ParallelEnvError, ValueError):
    """An agent declares no space of the kind that a facade, or `sample_actions`, needs. Nothing is closed."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(
            f"{message}. Declare it as the environment's `{kind}_space`: a Dict by agent, or a method that takes an "
            "agent"
        )


class StepBatch(NamedTuple):
    """Results of some environments, in order of completion: one dict by agent for each of `env_ids`.

    The flags also have the key `"__all__"`. A batch may have results of steps and resets; a reset's rewards are 0.0 and
    its flags False.
    """

    env_ids: tuple[int, ...]
    observations: tuple[dict[Any, Any], ...]
    rewards: tuple[dict[Any, Any], ...]
    terminateds: tuple[dict[Any, Any], ...]
    truncateds: tuple[dict[Any, Any], ...]
    infos: tuple[dict[Any, Any], ...]


@dataclass(frozen=True)
class RestartPolicy:
    """Which faults restart an environment, and how often; after that, `RestartLimitExceeded` is raised.

    Attributes:
        max_restarts: The most restarts in total; None or -1 for no limit.
        rate_limit: The most restarts within any `rate_period_s` seconds; None or -1 for no limit.
        rate_period_s: The period in seconds.
        exceptions: The types of exceptions after which an environment is restarted; `EnvError` is raised for others, so
            that a bug in your own code ends the run at once. None restarts after any. Deaths and timeouts of workers
            always lead to restarts.

    Example:
        >>> RestartPolicy(max_restarts=100, exceptions=(ConnectionError, OSError)).rate_limit
        5
    """

    max_restarts: int | None = None
    rate_limit: int | None = 5
    rate_period_s: float = 60.0
    exceptions: tuple[type[BaseException], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("max_restarts", "rate_limit"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | np.integer | None):
                raise TypeError(f"{name} must be an integer or None, got {number!r}")
            if number is not None and number < -1:
                raise ValueError(f"{name} must be at least 0, got {number}; None or -1 stands for no limit")
            if number == -1:
                object.__setattr__(self, name, None)
        if isinstance(self.rate_period_s, bool) or not isinstance(self.rate_period_s, Real):
            raise TypeError(f"rate_period_s must be a number of seconds, got {self.rate_period_s!r}")
        if not self.rate_period_s > 0:
            raise ValueError(f"rate_period_s must be positive, got {self.rate_period_s}")
        if self.exceptions is None:
            return
        kinds: Any = self.exceptions if isinstance(self.exceptions, tuple | list) else (self.exceptions,)
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise TypeError(f"exceptions must be a tuple of types of exceptions, got {kind!r}")
        object.__setattr__(self, "exceptions", tuple(kinds))


@dataclass(frozen=True)
class RecyclePolicy:
    """When an environment is replaced by a new one, for simulators that leak memory or grow slow.

    It is replaced when an episode begins, by one that has been constructed in the background, in a new worker process.
    None stands for no limit; at least one limit is required.

    Attributes:
        max_memory_mb: The most memory of a worker process and the processes that its simulators have started, in MB of
            10**6 bytes. Past it, all environments of the worker are replaced.
        max_episodes: The number of episodes of each environment. It is exact, so that runs can be repeated: if the new
            environment is not ready yet, the step waits for it. An environment that reaches its limit again before all
            others of its worker have been replaced continues until they have.
        max_age_s: The most seconds since the environment was constructed, or replaced another one.
        kill_above_mb: The memory, measured as for `max_memory_mb`, above which a worker is killed at once, in the
            middle of episodes. This is one fault of the environment that was running, or that ran last. It needs
            `on_error="restart"`.

    Example:
        >>> RecyclePolicy(max_memory_mb=4000, max_episodes=1000).max_age_s is None
        True
    """

    max_memory_mb: float | None = None
    max_episodes: int | None = None
    max_age_s: float | None = None
    kill_above_mb: float | None = None

    def __post_init__(self) -> None:
        for name, unit in (("max_memory_mb", "MB"), ("max_age_s", "seconds"), ("kill_above_mb", "MB")):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, Real | None):
                raise TypeError(f"{name} must be a number of {unit} or None, got {number!r}")
            if number is not None and not float(number) > 0:
                raise ValueError(f"{name} must be positive, got {number}; None stands for no limit")
        episodes: Any = self.max_episodes
        if isinstance(episodes, bool) or not isinstance(episodes, int | np.integer | None):
            raise TypeError(f"max_episodes must be an integer or None, got {episodes!r}")
        if episodes is not None and episodes < 1:
            raise ValueError(f"max_episodes must be at least 1, got {episodes}; None stands for no limit")
        limits = [getattr(self, one.name) for one in fields(self)]
        if all(limit is None for limit in limits):
            raise ValueError("a RecyclePolicy needs a limit, such as RecyclePolicy(max_memory_mb=4000)")
        soft, hard = self.max_memory_mb, self.kill_above_mb
        if soft is not None and hard is not None and float(hard) <= float(soft):
            raise ValueError(f"kill_above_mb={hard} must be more than max_memory_mb={soft}")


@dataclass(frozen=True)
class RestartEvent:
    """An environment is rebuilt: the argument of `on_restart`, which is called in the thread that steps.

    Attributes:
        env_id: The environment.
        worker: The number of its worker.
        kind: `"fault"` if the environment itself failed, or if it is unknown which environment of the worker failed;
            `"neighbour"` if another environment has ended the worker.
        error: The `EnvError`, `WorkerCrashed` or `WorkerTimeout`; its text is the report with the stack.
        seed: The seed of the new environment; None with `seed="own"`.
        restarts: How often this environment has been rebuilt, this time included.
    """

    env_id: int
    worker: int
    kind: Literal["fault", "neighbour"]
    error: ParallelEnvError
    seed: int | None
    restarts: int


Seed: TypeAlias = int | Literal["own"] | None
"""The argument `seed` of `ParallelEnv`."""

OnRestart: TypeAlias = Callable[[RestartEvent], object]

RestartInfos: TypeAlias = Literal["last"]
"""The argument `restart_infos` of `ParallelEnv`, if it is not None."""


@dataclass(frozen=True)
class StepTimes:
    """A histogram of how long the steps of simulators took; histograms can be added and subtracted.

    Attributes:
        counts: How many steps took at least `bounds()[i]` seconds and less than the next bound. The first count
            includes shorter steps, the last count longer steps.

    Example:
        >>> times = StepTimes((0,) * 40 + (98, 2) + (0,) * 70)
        >>> f"{1e3 * times.quantile(0.5):.2f} ms, {1e3 * times.quantile(0.99):.2f} ms"
        '1.10 ms, 1.34 ms'
    """

    SIZE: ClassVar[int] = 112
    counts: tuple[int, ...] = (0,) * SIZE

    @staticmethod
    def bounds() -> list[float]:
        """The shortest duration of each count, in seconds, from 1 us to 224 s; each octave has four equal parts."""
        return [2.0 ** (index // 4 - 20) * (1 + index % 4 / 4) for index in range(StepTimes.SIZE)]

    @property
    def total(self) -> int:
        """The number of steps."""
        return sum(self.counts)

    def quantile(self, fraction: float) -> float:
        """The seconds that this fraction of steps did not exceed (0.5: median), to within 25 %; NaN without steps."""
        rank, bounds = fraction * self.total, [*self.bounds(), 256.0]
        if not self.total:
            return math.nan
        index = next(i for i, upto in enumerate(itertools.accumulate(self.counts)) if upto >= rank and upto)
        before = sum(self.counts[:index])
        return bounds[index] + (rank - before) / self.counts[index] * (bounds[index + 1] - bounds[index])

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(tuple(map(operator.add, self.counts, other.counts)))

    def __sub__(self, other: StepTimes) -> StepTimes:
        return StepTimes(tuple(map(operator.sub, self.counts, other.counts)))


@dataclass(frozen=True)
class WorkerStats:
    """What one worker has done, including the workers that it replaced.

    Attributes:
        steps: Environment steps.
        resets: Episodes begun, automatically too.
        restarts: Environments rebuilt after their own fault, after a fault of another environment in the same worker
            process, or by `ParallelEnv.restart`.
        faults: Exceptions, deaths and timeouts after which environments were restarted. The death of a worker counts
            for the environment that was running; for all environments of the worker if that is unknown.
        recycled: Environments replaced by new ones, as the `RecyclePolicy` says.
        simulator_s: Seconds inside the simulators.
        transport_s: Seconds spent on reading actions and writing transitions.
        waiting_s: Seconds without work.
        step_times: How long the steps inside the simulators took.
        restart_kinds: `restarts` by cause: `"exception"`, `"death"` or `"timeout"` of the environment itself,
            `"neighbour"` for a fault of another environment in its worker process, or `"request"`.
    """

    steps: int = 0
    resets: int = 0
    restarts: int = 0
    faults: int = 0
    recycled: int = 0
    simulator_s: float = 0.0
    transport_s: float = 0.0
    waiting_s: float = 0.0
    step_times: StepTimes = StepTimes()
    restart_kinds: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: WorkerStats) -> WorkerStats:
        """The sums of both."""
        sums = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(WorkerStats)}
        return WorkerStats(**sums)


@dataclass(frozen=True)
class Stats(WorkerStats):
    """The sums over all workers, and each worker's own in `workers`."""

    workers: tuple[WorkerStats, ...] = ()

    @classmethod
    def of(cls, workers: Iterable[WorkerStats]) -> Stats:
        """The sums of workers' statistics."""
        workers = tuple(workers)
        total = sum(workers, WorkerStats())
        return cls(**{one.name: getattr(total, one.name) for one in fields(WorkerStats)}, workers=workers)

    def __str__(self) -> str:
        r"""A table with a line for each worker and one for all of them.

        Example:
            >>> busy = WorkerStats(steps=1200, resets=48, simulator_s=0.2614, transport_s=0.0121, waiting_s=0.0032)
            >>> print(Stats.of([busy, WorkerStats(steps=1200, resets=48, waiting_s=0.5)]))
                      steps  resets  restarts  faults  recycled  simulator s  transport s  waiting s
            worker 0  1,200      48         0       0         0        0.261        0.012      0.003
            worker 1  1,200      48         0       0         0        0.000        0.000      0.500
            all       2,400      96         0       0         0        0.261        0.012      0.503
        """
        names = [one.name for one in fields(WorkerStats) if isinstance(getattr(self, one.name), int | float)]
        lines = [["", *(name.replace("_", " ") for name in names)]]
        for label, row in [*((f"worker {i}", row) for i, row in enumerate(self.workers)), ("all", self)]:
            values = [getattr(row, name) for name in names]
            lines.append([label, *(f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" for value in values)])
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        )
