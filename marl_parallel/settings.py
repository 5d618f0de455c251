"""`Settings`: the arguments of `ParallelEnv` as frozen objects that check themselves.

`ParallelEnv`, `make` and the drop-ins take flat keywords. `Settings.of` puts them into four groups, and a `Settings`
can be passed on as keywords again::

    keywords -> Settings.of -> workers, faults, output, episodes -> ParallelEnv(constructors, **settings)

A new argument is a field of its group, with its default and its check, an entry of `ParallelEnvArguments`, and a
parameter of `ParallelEnv` with its text; a test compares them. Checks read files, but write none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import MultiAgentEnv, adapter_function
from marl_parallel.arguments import (
    autoreset_mode,
    check_path,
    checked_integer,
    checked_modules,
    checked_timeout,
    checked_trace,
    first_seeds,
    is_own,
    made_folder,
    made_log_dir,
)
from marl_parallel.backends import AUTOMATIC, WAITS, check_backend
from marl_parallel.core.backend import Backend
from marl_parallel.core.pool.replay_file import FOLDER, make_private
from marl_parallel.core.pool.timeouts import Limits
from marl_parallel.types import (
    AdapterName,
    AutoresetName,
    BackendName,
    OnError,
    OnRestart,
    RecyclePolicy,
    RestartInfos,
    RestartPolicy,
    Seed,
    Wait,
)


class ParallelEnvArguments(TypedDict, total=False):
    """The arguments of `ParallelEnv` besides the constructors, for functions that pass them on; types only."""

    auto_reset: bool | AutoresetMode | AutoresetName
    seed: Seed
    num_workers: int | None
    envs_per_worker: int | None
    backend: BackendName | Backend
    adapter: AdapterName | Callable[[Any], MultiAgentEnv] | None
    shared_memory: bool
    copy: bool
    check_actions: bool
    on_error: OnError
    restart_policy: RestartPolicy
    step_timeout: float | None
    reset_timeout: float | None
    start_timeout: float | None
    worker_threads: int | None
    trace: str | os.PathLike[str] | None
    wait: Wait
    episode_stats: bool
    on_restart: OnRestart | None
    restart_infos: RestartInfos | None
    warn_after: float | None
    log_dir: str | os.PathLike[str] | None
    recycle: RecyclePolicy | None
    replay: int | None
    replay_dir: str | os.PathLike[str] | None
    isolate_rng: bool
    forward_logs: bool
    preload: Sequence[str]


NAMES = (*ParallelEnvArguments.__annotations__,)
"""The names of all arguments, in the order of the signature."""


class _DefaultInt(int):
    """A default: an object of its own, which `is_default` tells from an equal number that the caller passed."""


class _DefaultFloat(float):
    """A default that is no integer, which `is_default` tells from an equal number that the caller passed."""


DEFAULT_SEED = _DefaultInt(42)
START_TIMEOUT_S = _DefaultFloat(60.0)
_TIMEOUTS = ("step_timeout", "reset_timeout", "start_timeout")  # in the order of `Limits`


def is_default(value: object) -> bool:
    """Whether a number is the default of its argument, and not one that the caller passed."""
    return isinstance(value, _DefaultInt | _DefaultFloat)


@dataclass(frozen=True)
class WorkerPoolSettings:
    """Where workers run, how many, and how they exchange data with the caller."""

    num_workers: int | None = None
    envs_per_worker: int | None = None
    backend: BackendName | Backend = "process"
    shared_memory: bool = True
    worker_threads: int | None = 1
    wait: Wait = "adaptive"
    preload: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("num_workers", "envs_per_worker", "worker_threads"):
            if getattr(self, name) is not None:
                checked_integer(getattr(self, name), name)
        check_backend(self.backend)
        object.__setattr__(self, "preload", checked_modules(self.preload))  # not the caller's list
        if self.wait not in WAITS:
            raise ValueError(f"wait must be one of {', '.join(WAITS)}, got {self.wait!r}")
        if self.is_automatic and (self.num_workers is not None or self.envs_per_worker is not None):
            instead = "process" if self.backend == "auto" else "hybrid"
            raise ValueError(
                f'backend="{self.backend}" chooses the number of workers: pass backend="{instead}" with yours'
            )

    @property
    def is_automatic(self) -> bool:
        """Whether the backend and the number of workers are chosen by measurements."""
        return isinstance(self.backend, str) and self.backend in AUTOMATIC


@dataclass(frozen=True)
class FaultSettings:
    """What happens when environments fail, hang or leak memory."""

    on_error: OnError = "raise"
    restart_policy: RestartPolicy = RestartPolicy()  # noqa: RUF009  # it is immutable
    on_restart: OnRestart | None = None
    restart_infos: RestartInfos | None = None
    step_timeout: float | None = None
    reset_timeout: float | None = None
    start_timeout: float | None = START_TIMEOUT_S
    warn_after: float | None = 60.0
    recycle: RecyclePolicy | None = None
    replay: int | None = None
    replay_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "restart"):
            raise ValueError(f'on_error must be "raise" or "restart", got {self.on_error!r}')
        policy: Any = self.restart_policy
        if not isinstance(policy, RestartPolicy):
            raise TypeError(f"restart_policy must be a RestartPolicy(max_restarts=..., ...), got {policy!r}")
        if self.on_restart is not None and not callable(self.on_restart):
            raise TypeError(f"on_restart must be a function of a RestartEvent, or None, got {self.on_restart!r}")
        if self.on_restart is not None and not self.restarts:
            raise ValueError('on_restart is never called without restarts: pass on_error="restart", too')
        if self.restart_infos not in (None, "last"):
            raise ValueError(f'restart_infos must be "last" or None, got {self.restart_infos!r}')
        if self.restart_infos is not None and not self.restarts:
            raise ValueError('restart_infos has no effect without restarts: pass on_error="restart", too')
        for name in (*_TIMEOUTS, "warn_after"):
            checked_timeout(getattr(self, name), name)
        self._check_recycle(self.recycle)
        self._check_replay(self.replay)

    def _check_recycle(self, recycle: Any) -> None:
        if recycle is None:
            return
        if not isinstance(recycle, RecyclePolicy):
            raise TypeError(f"recycle must be a RecyclePolicy(max_memory_mb=..., ...) or None, got {recycle!r}")
        if recycle.kill_above_mb is not None and not self.restarts:
            raise ValueError(
                f"kill_above_mb={recycle.kill_above_mb} kills workers in the middle of episodes, after which their "
                'environments must be rebuilt: pass on_error="restart", too'
            )

    def _check_replay(self, replay: Any) -> None:
        if replay is None:
            if self.replay_dir is not None:
                raise ValueError(
                    f"replay_dir={self.replay_dir!r} needs replay=: pass the number of steps to keep, such as "
                    "replay=1000"
                )
            return
        if isinstance(replay, bool | np.bool_):
            raise TypeError(
                "replay must be the number of steps to keep for each environment, such as 1000, or None; "
                f"got {replay!r}"
            )
        checked_integer(replay, "replay", or_none=" or None")
        if self.replay_dir is not None:
            check_path(self.replay_dir, "replay_dir")

    @property
    def restarts(self) -> bool:
        """Whether environments that fail are rebuilt."""
        return self.on_error == "restart"

    @property
    def limits(self) -> Limits:
        """All timeouts in seconds."""
        return Limits(*[checked_timeout(getattr(self, name), name) for name in _TIMEOUTS])

    @property
    def passed_timeouts(self) -> list[str]:
        """The timeouts that the caller passed, such as `step_timeout=9.0`."""
        timeouts = {name: getattr(self, name) for name in _TIMEOUTS}
        return [f"{name}={s}" for name, s in timeouts.items() if s is not None and not is_default(s)]

    @property
    def warn_after_s(self) -> float | None:
        """`warn_after` in seconds."""
        return checked_timeout(self.warn_after, "warn_after")

    def kept_steps(self) -> tuple[int, Path] | None:
        """How many steps are kept for replays, and the folder of their files, which is made; None for no replays."""
        if self.replay is None:
            return None
        folder = FOLDER if self.replay_dir is None else self.replay_dir
        return checked_integer(self.replay, "replay"), made_folder(folder, "replay_dir", make_private)


@dataclass(frozen=True)
class OutputSettings:
    """What workers print and log, and files about a run."""

    trace: str | os.PathLike[str] | None = None
    log_dir: str | os.PathLike[str] | None = None
    forward_logs: bool = True

    def __post_init__(self) -> None:
        if self.trace is not None:
            checked_trace(self.trace)
        if self.log_dir is not None:
            check_path(self.log_dir, "log_dir")
        if not isinstance(self.forward_logs, bool):
            raise TypeError(f"forward_logs must be True or False, got {self.forward_logs!r}")

    def log_folder(self) -> Path | None:
        """The folder of logs, which is made; None for no logs."""
        return None if self.log_dir is None else made_log_dir(self.log_dir)


@dataclass(frozen=True)
class EpisodeSettings:
    """What episodes are, and what steps take and return."""

    auto_reset: bool | AutoresetMode | AutoresetName = True
    seed: Seed = DEFAULT_SEED
    adapter: AdapterName | Callable[[Any], MultiAgentEnv] | None = None
    copy: bool = True
    check_actions: bool = False
    episode_stats: bool = False
    isolate_rng: bool = False

    def __post_init__(self) -> None:
        autoreset_mode(self.auto_reset)
        first_seeds(self.seed, 1)
        adapter_function(self.adapter)
        if not isinstance(self.isolate_rng, bool):
            raise TypeError(f"isolate_rng must be True or False, got {self.isolate_rng!r}")

    @property
    def mode(self) -> AutoresetMode:
        """The auto-reset mode."""
        return autoreset_mode(self.auto_reset)


_GROUPS = {
    "workers": WorkerPoolSettings,
    "faults": FaultSettings,
    "output": OutputSettings,
    "episodes": EpisodeSettings,
}
_GROUP_OF = {one.name: group for group, kind in _GROUPS.items() for one in fields(kind)}


@dataclass(frozen=True)
class Settings:
    """All arguments of `ParallelEnv` besides the constructors. `**settings` are the flat keywords."""

    workers: WorkerPoolSettings
    faults: FaultSettings
    output: OutputSettings
    episodes: EpisodeSettings

    def __post_init__(self) -> None:
        if self.faults.replay is not None and is_own(self.episodes.seed):
            raise ValueError(
                f'replay={self.faults.replay} is impossible with seed="own": an episode is repeated from its seed, '
                "which is not known here. Pass a number as seed, or leave replay out"
            )

    @classmethod
    def of(cls, passed: Mapping[str, Any], taker: str = "ParallelEnv", hint: str = "") -> Settings:
        """The settings of flat keywords; for keywords that are left out, the defaults.

        Raises:
            TypeError: There is no such argument; `taker` takes the keywords, and `hint` says what to do.
            TypeError, ValueError: An argument is wrong.
        """
        by_group: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
        for name, value in passed.items():
            if name not in _GROUP_OF:
                hint = hint or f"it takes ParallelEnv's arguments: {', '.join(NAMES)}"
                raise TypeError(f"{taker} takes no argument {name!r}; {hint}")
            by_group[_GROUP_OF[name]][name] = value
        return cls(**{group: kind(**by_group[group]) for group, kind in _GROUPS.items()})

    def changed(self, **values: Any) -> Settings:
        """The same settings with other values of some arguments."""
        return Settings.of({**self, **values})

    def keys(self) -> Iterator[str]:
        """The names of all arguments."""
        return iter(NAMES)

    def __getitem__(self, name: str) -> Any:
        return getattr(getattr(self, _GROUP_OF[name]), name)

    @property
    def needs_processes(self) -> bool:
        """Whether the caller wants something that only worker processes can do."""
        faults = self.faults
        survives = faults.restarts or bool(faults.passed_timeouts) or faults.recycle is not None
        return survives or self.output.log_dir is not None or self.workers.wait != "adaptive"
