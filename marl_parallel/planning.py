"""The choice of workers: `backend="auto"` and `"auto-hybrid"`.

`plan` measures each setting with a `ParallelEnv` of its own and random actions, for about half a second::

    a process for each CPU ---> this process alone is faster, by the time that steps take in workers: take "serial"
                           ---> workers hardly need their CPUs: measure more workers, and take them if they are faster
                           ---> else measure "hybrid": if it is faster than all others, take or propose it
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal

from gymnasium.vector import AutoresetMode

from marl_parallel.core.backend import usable_cpus
from marl_parallel.core.reports.reports import first_line, logger
from marl_parallel.settings import FaultSettings, OutputSettings, Settings
from marl_parallel.types import ParallelEnvError

_MEASURED_S = 0.4
_WARMED_UP_S = 0.05
_BETTER = 0.9  # an alternative is chosen if it takes at most this share of the time
_MOSTLY_WAITS = 0.5  # simulators wait if workers need a CPU for less than this share of the time inside them
STEP_TIMEOUT_S = 1.0
"""The timeout of each step while a setting is measured."""


_measuring = ContextVar("measuring", default=False)
_made = itertools.count()


def is_measuring() -> bool:
    """Whether this thread constructs a `ParallelEnv` only to measure a setting."""
    return _measuring.get()


def count_made() -> int:
    """How many `ParallelEnv`s the program has made before this one, without those that only measure a setting."""
    return 0 if is_measuring() else next(_made)


@contextlib.contextmanager
def _while_measuring() -> Iterator[None]:
    token = _measuring.set(True)
    try:
        yield
    finally:
        _measuring.reset(token)


class _Measured:
    """Seconds for a batch of steps, and the share of the time inside simulators for which workers need a CPU."""

    def __init__(self, env: Any) -> None:
        backend, workers = env.stepper.workers.pool.backend, range(env.num_workers)
        env.reset()

        def totals() -> tuple[Any, list[float | None]]:
            return env.stats(), [backend.cpu_seconds(worker) for worker in workers]

        def timed() -> float:
            over = [env_id for env_id, acting in enumerate(env.acting) if not acting]
            if over and env.stepper.mode is AutoresetMode.DISABLED:
                env.reset(env_ids=over)
            actions = env.sample_actions()
            began = time.monotonic()
            env.step(actions)
            return time.monotonic() - began

        before = totals()
        warm = time.monotonic() + _WARMED_UP_S
        times = [timed()]
        while times[0] < _WARMED_UP_S and time.monotonic() < warm:
            timed()
        if times[0] < _MEASURED_S:
            before, times, until = totals(), [], time.monotonic() + _MEASURED_S
            while not times or time.monotonic() < until:
                times.append(timed())
        self.batch_s = statistics.median(times)
        (old, cpu_before), (new, cpu_after) = before, totals()
        inside = new.simulator_s - old.simulator_s
        busy = inside + new.transport_s - old.transport_s
        self.serial_batch_s = busy / max(new.steps - old.steps, 1) * env.num_envs
        used = [math.nan if a is None or b is None else b - a for a, b in zip(cpu_before, cpu_after)]
        self.cpu_share = min(sum(used) / inside, 1.0) if inside > 0 and not math.isnan(sum(used)) else None


def plan(settings: Settings, num_envs: int, open_env: Callable[[Settings], Any]) -> dict[str, Any]:
    """Measure settings for a simulator; returns the fastest arguments, and the measurements.

    Args:
        settings: The settings of the caller. With `backend="auto-hybrid"`, `"hybrid"` may be chosen. With `"auto"`, it
            is only proposed, and it is measured only if the caller can do without processes, since it runs simulators
            in this process.
        num_envs: The number of environments.
        open_env: Opens a `ParallelEnv` of the simulators, with these settings.

    Returns:
        `arguments` for `ParallelEnv`; `reason`, a phrase; `batch_ms`, the milliseconds of a batch by setting; and
        `proposal`, the arguments of a faster setting that only the caller may choose, or None.
    """
    takes_hybrid, can_be_serial = settings.workers.backend == "auto-hybrid", not settings.needs_processes
    workers = min(num_envs, usable_cpus())
    batch_ms: dict[str, float] = {}
    arguments: dict[str, Any] = {"backend": "process", "num_workers": workers}
    proposal: dict[str, Any] | None = None

    def measured(number: int, backend: Literal["process", "hybrid"] = "process") -> _Measured:
        with warnings.catch_warnings(), _while_measuring():
            warnings.simplefilter("ignore", ResourceWarning)  # more workers than CPUs
            warnings.simplefilter("ignore", RuntimeWarning)  # arguments that have no effect in this thread
            env = open_env(_to_measure(settings, backend, number))
        with env:
            found = _Measured(env)
        batch_ms[f"{backend}, {number} workers"] = round(1e3 * found.batch_s, 4)
        return found

    try:
        first = measured(workers)
        share, best_s = first.cpu_share, first.batch_s
        waits = workers < num_envs and (share is None or share < _MOSTLY_WAITS)
        reason = "other settings are not faster"
        if can_be_serial:
            batch_ms["serial, estimated"] = round(1e3 * first.serial_batch_s, 4)
        if can_be_serial and first.serial_batch_s < _BETTER * first.batch_s:
            arguments, best_s = {"backend": "serial", "num_workers": 1}, first.serial_batch_s
            reason = "steps are too short for messages between processes"
        elif waits:
            more = num_envs if not share else min(math.ceil(usable_cpus() / share), num_envs)
            if measured(more).batch_s < _BETTER * first.batch_s:
                arguments["num_workers"], reason = more, "simulators mostly wait, and do not need a CPU each"
        has_hybrid = workers > 1 and not waits and (can_be_serial or takes_hybrid)
        if has_hybrid and measured(workers, "hybrid").batch_s < _BETTER * best_s:
            proposal = {"backend": "hybrid", "num_workers": workers}
    except (ParallelEnvError, ValueError) as error:  # such as a step of more than a second, or no action space
        reason = f"measurement stopped early: {first_line(error)}"
    if proposal is not None and takes_hybrid:
        arguments, proposal, reason = proposal, None, "this thread steps its share while the others step theirs"
    name = "auto-hybrid" if takes_hybrid else "auto"
    logger.info('backend="%s" chooses %s: %s; milliseconds of a batch: %s', name, arguments, reason, batch_ms)
    if proposal is not None:
        logger.info(
            'backend="hybrid" is faster, but a crash of a simulator in this process ends the program: pass it, or '
            'backend="auto-hybrid", to use it'
        )
    return {"arguments": arguments, "reason": reason, "batch_ms": batch_ms, "proposal": proposal}


def _to_measure(settings: Settings, backend: Literal["process", "hybrid"], num_workers: int) -> Settings:
    """The settings while workers are measured: all that changes how long steps take, but no restarts and no files."""
    faults = settings.faults
    # Simulators must not draw from the generators of this process while they are measured.
    isolate_rng = settings.episodes.isolate_rng or backend == "hybrid"
    return Settings(
        workers=replace(settings.workers, backend=backend, num_workers=num_workers),
        faults=FaultSettings(
            step_timeout=min(faults.limits.step or math.inf, STEP_TIMEOUT_S),
            reset_timeout=faults.reset_timeout,
            start_timeout=faults.start_timeout,
        ),
        output=OutputSettings(forward_logs=settings.output.forward_logs),
        episodes=replace(settings.episodes, isolate_rng=isolate_rng),
    )
