"""Measure the CPU time of a batch: of the process that calls `step`, and of its worker processes.

    python benchmarks/cpu_times.py              two to three minutes; writes results/cpu_times.*
    python benchmarks/cpu_times.py --quick      some ten seconds; writes only where --output says so
    python benchmarks/cpu_times.py --markdown   the table for docs/performance.md, from the last run's JSON

Other programs change CPU time less than wall time, so it shows small differences between versions of the package.
`PYTHONPATH=../before python benchmarks/cpu_times.py --output before` measures the version in another folder.

Simulators take next to no time. Workers sleep while they wait (`wait="block"`), so no time is spent on spinning. All
cases are open at once and take turns. The time of workers is that of `psutil`, in steps of 10 ms for each process; a
turn should last for some hundred times as long.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import frame
import psutil
import typer
from frame import AsMarkdown, Only, Output, Page, Quick, Repeats, Seconds, Table
from plain_loops import action_spaces, drawn, opened_envs, step_all
from synthetic import Synthetic
from version_stepper import PETTINGZOO, STACKED, STEP, Stepper

from marl_parallel.cli.report import in_one_line, machine, progress

NAME = "cpu_times"
WORKERS = 2
WAYS = {STEP: "dicts", PETTINGZOO: "PettingZooVecEnv", STACKED: "StackedVecEnv"}
WARM_S = 0.2


@dataclass(frozen=True, eq=False)
class Case:
    """Environments, and how they are stepped.

    Attributes:
        environment: Their name in the table.
        num_envs: How many there are.
        way: "step" for dicts, "pettingzoo" or "stacked" for a facade.
        simulator: Arguments of `Synthetic`.
        arguments: Further arguments of `ParallelEnv`.
    """

    environment: str
    num_envs: int
    way: str = STEP
    simulator: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.environment}, {self.num_envs} environments, {WAYS[self.way]}"

    @property
    def constructor(self) -> Callable[[], Synthetic]:
        return functools.partial(Synthetic, **self.simulator)


def cases() -> list[Case]:
    small, dying, infos = "3 x 18", "3 x 18, 1 of 3 dead", "3 x 18, infos"
    checked = {"on_error": "restart", "step_timeout": 60.0, "reset_timeout": 60.0}
    return [
        *(Case(small, 8, way) for way in WAYS),
        Case(f"{small}, restarts and timeouts", 8, arguments=checked),
        *(Case(small, 64, way) for way in WAYS),
        *(Case(dying, 64, way, {"dying": 1}) for way in WAYS),
        *(Case(infos, 64, way, {"infos": True}) for way in (STEP, PETTINGZOO)),
        Case("20 x 128", 64, STACKED, {"num_agents": 20, "observation_size": 128}),
    ]


@dataclass(frozen=True)
class Result:
    """The CPU time of a case.

    Attributes:
        environment: As in `Case`.
        num_envs: As in `Case`.
        way: As in `Case`.
        caller_us: Microseconds of the calling process per batch: the median of the rounds.
        workers_us: Microseconds of the worker processes per environment step, with the simulator's: the median.
        simulator_us: Microseconds per environment step of a plain loop: the median.
        rounds: These three in each round.
    """

    environment: str
    num_envs: int
    way: str
    caller_us: float
    workers_us: float
    simulator_us: float
    rounds: list[list[float]]


@dataclass(frozen=True)
class Report(frame.Report):
    results: list[Result]


# -- measuring ---------------------------------------------------------------------------------------------------------


class Measured:
    """The environments of a case, once in worker processes and once in a plain loop."""

    def __init__(self, step: Callable[[int], object], envs: Sequence[Any], workers: set[psutil.Process]) -> None:
        self._step, self._envs, self._workers = step, envs, workers
        self._batches = drawn(action_spaces(envs[0]), len(envs))

    def turn(self, seconds: float) -> list[float]:
        """Step for some seconds: microseconds of the caller per batch, of workers and of the simulator per step."""
        warm_s, batches = min(seconds, WARM_S), 0
        began = now = time.perf_counter()
        while now < began + warm_s:
            self._step(batches)
            batches += 1
            now = time.perf_counter()
        batches = max(round(batches * seconds / (now - began)), 1)
        of_workers, of_caller = self._of_workers(), time.process_time()
        for number in range(batches):
            self._step(number)
        of_caller = time.process_time() - of_caller
        of_workers = self._of_workers() - of_workers
        alone = time.process_time()
        for number in range(batches):
            step_all(self._envs, self._batches[number % len(self._batches)])
        alone = time.process_time() - alone
        steps = batches * len(self._envs)
        return [1e6 * of_caller / batches, 1e6 * of_workers / steps, 1e6 * alone / steps]

    def _of_workers(self) -> float:
        """Seconds that the worker processes have used so far."""
        return sum(sum(worker.cpu_times()[:2]) for worker in self._workers)


@contextmanager
def opened(case: Case, seconds: float) -> Iterator[Callable[[], list[float]]]:
    before = descendants()
    arguments = {"num_workers": WORKERS, "wait": "block", **case.arguments}
    with ExitStack() as stack:
        stepper = stack.enter_context(closing(Stepper(case.constructor, case.num_envs, arguments, case.way)))
        envs = stack.enter_context(opened_envs(case.constructor, range(case.num_envs)))
        measured = Measured(stepping(stepper, case.way), envs, descendants() - before)
        yield functools.partial(measured.turn, seconds)


def stepping(stepper: Stepper, way: str) -> Callable[[int], object]:
    """The function that steps all environments once, for batches numbered from 0.

    With dicts it does what a training loop must: see who acts, and make a dict of actions for each environment.
    """
    env, actions = stepper.env, stepper.actions
    if way == STEP:
        return lambda _: env.step([dict.fromkeys(acting, 0) for acting in env.acting])
    return lambda number: env.step(actions[number % len(actions)])


def descendants() -> set[psutil.Process]:
    return {*psutil.Process().children(recursive=True)}


def run(chosen: Sequence[Case], seconds: float, repeats: int) -> Report:
    described = machine()
    with progress(len(chosen) * (1 + repeats)) as on_turn:
        rounds = frame.opened_rounds({case: opened(case, seconds) for case in chosen}, repeats, on_turn)
    results = [
        Result(case.environment, case.num_envs, case.way, *map(statistics.median, zip(*taken)), taken)
        for case, taken in rounds.items()
    ]
    return Report(described, {"seconds": seconds, "repeats": repeats}, results)


# -- showing -----------------------------------------------------------------------------------------------------------


HEADINGS = (
    "simulator", "envs", "stepped by", "caller, µs per batch", "workers, µs per step", "plain loop, µs per step",
)  # fmt: skip


def page(report: Report) -> Page:
    rows = [
        [
            one.environment,
            str(one.num_envs),
            WAYS[one.way],
            f"{one.caller_us:,.0f}",
            f"{one.workers_us:.1f}",
            f"{one.simulator_us:.1f}",
        ]
        for one in report.results
    ]
    note = (
        "CPU time of the calling process per batch, in which all environments are stepped once; with dicts, it reads "
        f"`env.acting` and makes the dicts of actions. CPU time of the {WORKERS} worker processes per environment "
        "step; it includes the simulator's own, which is that of the plain loop. Simulators without work, by agents x "
        f'numbers that each observes; `wait="block"`. Medians of {report.settings["repeats"]} rounds. '
        f"{in_one_line(report.machine)}."
    )
    return Table(HEADINGS, rows, "lrl"), note


# -- the command -------------------------------------------------------------------------------------------------------


def main(
    quick: Quick = False,
    only: Only = "",
    seconds: Seconds = 1.0,
    repeats: Repeats = 7,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure the CPU time of the caller and of its workers."""
    if as_markdown:
        print(frame.markdown(page(frame.read(NAME, Report, output))))
        return
    chosen = frame.named(cases(), only)
    report = run(chosen, 0.1, 2) if quick else run(chosen, seconds, repeats)
    frame.show(page(report))
    frame.save(NAME, report, frame.folder_for(output, whole=not (quick or only)), report.results)


if __name__ == "__main__":
    typer.run(main)
