"""Measure the recovery time after a fault: from the fault to the next full batch, compared with construction.

    python benchmarks/recovery.py              about two minutes; writes results/recovery.*
    python benchmarks/recovery.py --quick      a few seconds; writes only where --output says so
    python benchmarks/recovery.py --markdown   the table for docs/performance.md, from the last run's JSON

There are two workers, and the fault is in the first. The clock starts when the worker is killed, or with the step in
which an environment raises or hangs; for a hang, `step_timeout` is subtracted. The clock stops when `step` returns a
batch of all environments, with the first observations of rebuilt ones.

Construction is the part that cannot be avoided: constructing and resetting as many environments, in a new interpreter
that has imported what workers have imported, and none of the simulator's modules. If the process stays and only the
environment is rebuilt, the simulator's modules are already imported. All cases alternate in rounds, so that a slow or
busy machine affects all of them.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import frame
import typer
from frame import AsMarkdown, Only, Output, Page, Quick, Repeats, Table
from mpe2 import simple_spread_v3
from pettingzoo.utils import BaseParallelWrapper

from marl_parallel import ParallelEnv, RestartPolicy
from marl_parallel.cli.report import in_one_line, machine, progress

NAME = "recovery"
TARGET_MS = 50.0
STEP_TIMEOUT_S = 0.5
CONSTRUCTOR_S = 0.2
KILLED, RAISES, HANGS = "killed", "raises", "hangs"
IN_WORDS = {KILLED: "its worker is killed", RAISES: "it raises", HANGS: "it hangs"}


# -- simulators -------------------------------------------------------------------------------------------------------


class Breakable(BaseParallelWrapper):
    """Raises or hangs if `fault` is set."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.fault = ""

    def step(self, actions: dict[str, Any]) -> Any:
        if self.fault == RAISES:
            raise RuntimeError("the simulator has lost its way")
        while self.fault == HANGS:
            time.sleep(0.01)
        return super().step(actions)

    def pid(self) -> int:
        return os.getpid()


def make_env(constructor_s: float = 0.0) -> Breakable:
    time.sleep(constructor_s)
    return Breakable(simple_spread_v3.parallel_env(max_cycles=1000))


class Case(NamedTuple):
    """A fault and the environment that has it.

    Attributes:
        fault: `KILLED`, `RAISES` or `HANGS`.
        environment: The environment's name.
        constructor: Constructs the environment.
        per_worker: Number of environments per worker.
    """

    fault: str
    environment: str
    constructor: Callable[..., Any]
    per_worker: int = 1

    def __str__(self) -> str:
        return f"{self.fault}: {self.environment} x {self.per_worker}"

    @property
    def gone(self) -> int:
        """Number of environments that must be rebuilt."""
        return 1 if self.fault == RAISES else self.per_worker


def cases() -> list[Case]:
    quick = "simple_spread_v3", make_env
    slow = "200 ms constructor", functools.partial(make_env, CONSTRUCTOR_S)
    return [
        *(Case(KILLED, *kind, per_worker) for kind in (quick, slow) for per_worker in (1, 4)),
        *(Case(fault, *kind) for fault in (RAISES, HANGS) for kind in (quick, slow)),
    ]


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        recovery_ms: Milliseconds from the fault to the next full batch.
        construction_ms: Milliseconds that construction takes.
    """

    recovery_ms: float
    construction_ms: float

    @property
    def beyond_ms(self) -> float:
        return self.recovery_ms - self.construction_ms


@dataclass(frozen=True)
class Result:
    """The measurements of one case, in milliseconds.

    Attributes:
        fault: `KILLED`, `RAISES` or `HANGS`.
        environment: The environment's name.
        per_worker: Number of environments per worker.
        construction_ms: The median time of construction.
        recovery_ms: The median recovery time.
        beyond_ms: Recovery less construction: the median of the rounds' differences.
        beyond_least_ms: The smallest difference.
        beyond_most_ms: The largest difference.
        rounds: All rounds.
    """

    fault: str
    environment: str
    per_worker: int
    construction_ms: float
    recovery_ms: float
    beyond_ms: float
    beyond_least_ms: float
    beyond_most_ms: float
    rounds: list[Round]


@dataclass(frozen=True)
class Report(frame.Report):
    results: list[Result]


_CONSTRUCT = """
import pickle, sys, time
import marl_parallel
pickled, count, times = pickle.load(sys.stdin.buffer)
for _ in range(times):
    started = time.perf_counter()
    for seed in range(count):
        env = pickle.loads(pickled)()
        env.reset(seed=seed)
    took = time.perf_counter() - started
print(took)
"""


def construction_s(case: Case) -> float:
    """Seconds that an interpreter takes to construct: the first time if the process is new, else the second time."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    task = cloudpickle.dumps((cloudpickle.dumps(case.constructor), case.gone, 2 if case.fault == RAISES else 1))
    done = subprocess.run([sys.executable, "-c", _CONSTRUCT], input=task, stdout=subprocess.PIPE, check=True)
    return float(done.stdout.split()[-1])


def recovery_s(case: Case, env: ParallelEnv) -> float:
    """Seconds from the fault to the next full batch."""
    actions = [dict.fromkeys(acting, 0) for acting in env.acting]
    for _ in range(5):
        env.step(actions)
    before, pid = env.stats().restarts, env.call("pid")[0]
    if case.fault != KILLED:
        env.set_attr("fault", [case.fault] + [""] * (env.num_envs - 1))
    started = time.perf_counter()
    if case.fault == KILLED:
        os.kill(pid, signal.SIGKILL)
    observations, _, _, _, infos = env.step(actions)
    took = time.perf_counter() - started
    rebuilt = [env_id for env_id, info in enumerate(infos) if "__common__" in info]
    assert rebuilt == [*range(case.gone)], infos
    assert all(len(seen) == len(env.possible_agents) for seen in observations)
    assert env.stats().restarts == before + case.gone
    assert (env.call("pid")[0] == pid) == (case.fault == RAISES)
    return took - (STEP_TIMEOUT_S if case.fault == HANGS else 0.0)


@contextmanager
def opened(case: Case) -> Iterator[Callable[[], Round]]:
    with ParallelEnv(
        [case.constructor] * (2 * case.per_worker),
        num_workers=2,
        on_error="restart",
        restart_policy=RestartPolicy(rate_limit=None),
        step_timeout=STEP_TIMEOUT_S if case.fault == HANGS else None,
    ) as env:
        env.reset()
        yield lambda: Round(1000 * recovery_s(case, env), 1000 * construction_s(case))


def run(chosen: Sequence[Case], repeats: int) -> Report:
    logging.getLogger("marl_parallel").setLevel(logging.ERROR)  # no warning for each restart
    described = machine(("mpe2",))
    with progress(len(chosen) * (1 + repeats)) as on_turn:
        rounds = frame.opened_rounds({case: opened(case) for case in chosen}, repeats, on_turn)
    settings = {"repeats": repeats, "step_timeout_s": STEP_TIMEOUT_S, "target_ms": TARGET_MS}
    return Report(described, settings, [_result(case, rounds[case]) for case in chosen])


def _result(case: Case, rounds: list[Round]) -> Result:
    beyond = [one.beyond_ms for one in rounds]
    return Result(
        fault=case.fault,
        environment=case.environment,
        per_worker=case.per_worker,
        construction_ms=statistics.median(one.construction_ms for one in rounds),
        recovery_ms=statistics.median(one.recovery_ms for one in rounds),
        beyond_ms=statistics.median(beyond),
        beyond_least_ms=min(beyond),
        beyond_most_ms=max(beyond),
        rounds=rounds,
    )


# -- showing -----------------------------------------------------------------------------------------------------------


HEADINGS = ("environment", "fault", "envs per worker", "construction", "recovery", "difference")


def page(report: Report) -> Page:
    rows = []
    for one in report.results:
        beyond = f"{one.beyond_ms:.0f} ({one.beyond_least_ms:.0f} to {one.beyond_most_ms:.0f})"
        times = f"{one.construction_ms:.0f}", f"{one.recovery_ms:.0f}", beyond
        rows.append([one.environment, IN_WORDS[one.fault], str(one.per_worker), *times])
    note = (
        "Milliseconds: medians, and in brackets minimum and maximum, of "
        f"{report.settings['repeats']} rounds. Recovery is the time from the fault to the next full batch; for hangs, "
        "without `step_timeout`. Construction is the time to construct and reset as many environments as are lost, in "
        "a process that has not imported the simulator's modules, or, if an environment raises, in one that has. For a "
        f"killed worker, the target of the difference is {report.settings['target_ms']:.0f} ms. "
        f"{in_one_line(report.machine)}."
    )
    return Table(HEADINGS, rows, "ll"), note


# -- the command -------------------------------------------------------------------------------------------------------


def main(
    quick: Quick = False,
    only: Only = "",
    repeats: Repeats = 11,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure the recovery time after a fault."""
    if as_markdown:
        print(frame.markdown(page(frame.read(NAME, Report, output))))
        return
    report = run(frame.named(cases(), only), 1 if quick else repeats)
    frame.show(page(report))
    frame.save(NAME, report, frame.folder_for(output, whole=not (quick or only)), report.results)


if __name__ == "__main__":
    typer.run(main)
