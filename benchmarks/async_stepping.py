"""Compare `send` and `recv` with `step`, for uneven simulators and for a policy that computes while simulators step.

    python benchmarks/async_stepping.py              about two minutes; writes results/async_stepping.*
    python benchmarks/async_stepping.py --quick      a few seconds; writes only where --output says so
    python benchmarks/async_stepping.py --markdown   the tables for docs/performance.md, from the last run's JSON

Sync calls `step` for all environments. Async calls `recv(min_envs=...)`, then `send` for the environments it received.
Both continue where their previous turn ended, and alternate in rounds, so that a slow or busy machine affects both.

The wall time of a turn starts before the first action is sent and ends when every result has been received. So a turn
of async includes its end, in which fewer and fewer environments are in flight. The simulators' time is measured around
their own `step` and `reset`: in CPU seconds of their thread, which do not grow while a process waits for a CPU, or in
wall time for simulators that wait. Context switches, memory and the parent's work count as wall time only.
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import frame
import typer
from frame import AsMarkdown, Block, Only, Output, Page, Picture, Quick, Repeats, Seconds, Table, Workers
from pictures import finish, framed
from policies import Clocked, Drawn, Network
from synthetic import rounds_per_microsecond

from marl_parallel import ParallelEnv
from marl_parallel.backends import interpreter
from marl_parallel.cli.measure import spread
from marl_parallel.cli.report import COLOURS, GREY, PATCH, in_one_line, machine, progress, tidy
from marl_parallel.core.backend import usable_cpus

NAME, COLUMNS = "async_stepping", 2
WORKERS = "1,2,3,4"
NUM_ENVS = 8
STEP_US = 1000
UNEVEN, OVERLAP = "uneven simulators", "policy and simulators"
SYNC, ASYNC = "sync", "async"


# -- the cases ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One kind of simulator.

    Attributes:
        benchmark: `UNEVEN` or `OVERLAP`.
        name: What is special about the simulators.
        keywords: Keyword arguments of the simulators.
        min_envs: How many results async waits for.
        computes: Whether the simulators need a CPU.
    """

    benchmark: str
    name: str
    keywords: dict[str, Any]
    min_envs: int
    computes: bool = True

    def __str__(self) -> str:
        return f"{self.benchmark}: {self.name}"

    def limit(self, workers: int, cpus: int) -> float | None:
        """The largest gain in throughput that the CPUs allow; None where nothing overlaps.

        Suppose that policy and simulation take one second each in sync. At the same time they take one second, or, if
        there are too few CPUs, the CPU seconds of both divided by the number of CPUs.
        """
        if self.benchmark == UNEVEN:
            return None
        busy = 1 + (min(workers, cpus) if self.computes else 0)
        return 2 / max(1.0, busy / cpus)


def cases() -> list[Case]:
    work = {"step_us": STEP_US, "rounds_per_us": rounds_per_microsecond()}
    tail = {**work, "tail": (0.1, 20.0)}
    return [
        Case(UNEVEN, "1 step in 10 takes 20 times as long", tail, 1),
        Case(UNEVEN, "the same, and resets of 50 ms", {**tail, "reset_us": 50_000, "episode_steps": (50, 150)}, 1),
        Case(OVERLAP, "simulators compute", work, NUM_ENVS // 2),
        Case(OVERLAP, "simulators wait", {**work, "waits": True}, NUM_ENVS // 2, computes=False),
    ]


# -- measuring ---------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """Environment steps, and seconds: wall time, inside the simulators, inside the policy."""

    steps: int
    wall_s: float
    simulators_s: float
    policy_s: float


class Player:
    """One `ParallelEnv` and its policy, stepped in sync and async turns."""

    def __init__(self, case: Case, env: ParallelEnv) -> None:
        self._env, self._min_envs = env, case.min_envs
        self._latest = list(env.reset()[0])
        self._act = Network(env, self._latest) if case.benchmark == OVERLAP else Drawn(env)

    def turn(self, way: str, seconds: float) -> Turn:
        inside, policy_s = sum(self._env.get_attr("inside_s")), self._act.spent_s
        started = time.perf_counter()
        steps = (self._sync if way == SYNC else self._async)(started + seconds)
        wall_s = time.perf_counter() - started
        return Turn(steps, wall_s, sum(self._env.get_attr("inside_s")) - inside, self._act.spent_s - policy_s)

    def _sync(self, deadline: float) -> int:
        observations, steps = self._latest, 0
        while not steps or time.perf_counter() < deadline:
            observations, *_ = self._env.step(self._act(observations))
            steps += NUM_ENVS
        self._latest[:] = observations
        return steps

    def _async(self, deadline: float) -> int:
        env, act, latest, min_envs, steps = self._env, self._act, self._latest, self._min_envs, 0
        for first in range(0, NUM_ENVS, min_envs):
            env_ids = range(first, first + min_envs)
            env.send(act([latest[env_id] for env_id in env_ids]), env_ids)
        while time.perf_counter() < deadline:
            batch = env.recv(min_envs=min_envs)
            env.send(act(batch.observations), batch.env_ids)
            steps += len(batch.env_ids)
        batch = env.recv()
        for env_id, observation in zip(batch.env_ids, batch.observations, strict=True):
            latest[env_id] = observation
        return steps + len(batch.env_ids)


@dataclass(frozen=True)
class Result:
    """The measurements of one way of stepping in one case.

    Attributes:
        benchmark: `UNEVEN` or `OVERLAP`.
        simulators: What is special about the simulators.
        workers: Number of worker processes.
        way: `SYNC` or `ASYNC`.
        utilisation: Seconds inside the simulators, as a share of wall time x min(workers, CPUs): the median.
        policy: Seconds inside the policy, as a share of wall time: the median.
        steps_per_second: Environment steps per second: the median.
        spread: Half the distance between the best and the worst round, as a share of the median.
        gain: Throughput divided by that of sync: the median of the ratios within each round.
        limit: The largest gain that the CPUs allow; None where it is not known.
        rounds: Environment steps per second in each round.
    """

    benchmark: str
    simulators: str
    workers: int
    way: str
    utilisation: float
    policy: float
    steps_per_second: float
    spread: float
    gain: float
    limit: float | None
    rounds: list[float]


@dataclass(frozen=True)
class Report(frame.Report):
    results: list[Result]

    def of(self, benchmark: str) -> list[list[Result]]:
        """The results of one benchmark, grouped by simulator."""
        chosen = [one for one in self.results if one.benchmark == benchmark]
        return [list(group) for _, group in groupby(chosen, key=lambda one: one.simulators)]


def measure(
    case: Case, workers: Sequence[int], seconds: float, repeats: int, on_turn: Callable[[str], None]
) -> list[Result]:
    constructors = [functools.partial(Clocked, **case.keywords)] * NUM_ENVS
    turns = {}
    with ExitStack() as stack:
        for count in workers:
            on_turn(f"{case.name}: {count} workers")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # more workers than CPUs are to be measured
                env = stack.enter_context(ParallelEnv(constructors, num_workers=count))
            player = Player(case, env)
            for way in (SYNC, ASYNC):
                player.turn(way, seconds / 4)
                turns[count, way] = functools.partial(player.turn, way, seconds)
        rounds = frame.rounds(turns, repeats, on_turn, lambda key: f"{case.name}: {key[1]} x {key[0]}")
    return [_result(case, count, way, taken, rounds[count, SYNC]) for (count, way), taken in rounds.items()]


def _result(case: Case, workers: int, way: str, turns: Sequence[Turn], sync: Sequence[Turn]) -> Result:
    cpus = usable_cpus()
    rates = [turn.steps / turn.wall_s for turn in turns]
    return Result(
        benchmark=case.benchmark,
        simulators=case.name,
        workers=workers,
        way=way,
        utilisation=statistics.median(turn.simulators_s / turn.wall_s / min(workers, cpus) for turn in turns),
        policy=statistics.median(turn.policy_s / turn.wall_s for turn in turns),
        steps_per_second=statistics.median(rates),
        spread=spread(rates),
        gain=frame.ratio(rates, [turn.steps / turn.wall_s for turn in sync]),
        limit=case.limit(workers, cpus),
        rounds=rates,
    )


def run(chosen: Sequence[Case], workers: Sequence[int], seconds: float, repeats: int) -> Report:
    interpreter.limit_loaded_libraries(1)  # so that the policy uses one CPU
    counts = {case.name: [n for n in workers if case.benchmark == UNEVEN or n <= usable_cpus()] for case in chosen}
    described, results = machine(), []
    with progress(sum(len(numbers) * (1 + 2 * repeats) for numbers in counts.values())) as on_turn:
        for case in chosen:
            results += measure(case, counts[case.name], seconds, repeats, on_turn)
    return Report(described, {"seconds": seconds, "repeats": repeats}, results)


# -- showing -----------------------------------------------------------------------------------------------------------

NOTES = {
    UNEVEN: (
        "{envs} environments, {step_ms:g} ms of work per step on average, no policy; async is `recv(min_envs=1)`. Time "
        "inside the simulators as a share of wall time x min(workers, CPUs); in brackets, throughput relative to sync. "
        "Time inside the simulators is the CPU time of their `step` and `reset`; a turn ends when every result has "
        "been received."
    ),
    OVERLAP: (
        "{envs} environments, {step_ms:g} ms per step, and a policy in NumPy, in one thread, that processes one "
        "environment after the other and takes as long for all of them as one step of all simulators; async is "
        "`recv(min_envs={half})`. Environment steps per second, and throughput relative to sync. CPU limit: in sync, "
        "policy and simulation alternate; overlapped, they take at least as long as one of them, and on {cpus} CPUs at "
        "least the CPU time of both divided by the number of CPUs."
    ),
}


def note(report: Report, benchmark: str) -> str:
    words = {"envs": NUM_ENVS, "half": NUM_ENVS // 2, "step_ms": STEP_US / 1000, "cpus": report.machine["cpus"]}
    return f"{NOTES[benchmark].format(**words)} Medians of {report.settings['repeats']} rounds."


def details(report: Report) -> Page:
    """All measurements, for the terminal."""
    blocks: list[Block] = []
    for benchmark in NOTES:
        for results in report.of(benchmark):
            rows = [
                [
                    f"{one.way} x {one.workers}",
                    f"{one.steps_per_second:,.0f}",
                    f"{100 * one.spread:.0f}",
                    f"{one.utilisation:.2f}",
                    f"{one.policy:.2f}" if one.limit else "",
                    f"{one.gain:.2f}",
                    f"{one.limit:.2f}" if one.limit and one.way == ASYNC else "",
                ]
                for one in results
            ]
            headings = ("", "steps/s", "± %", "utilisation", "policy", "x sync", "limit")
            blocks.append(Table(headings, rows, title=f"{benchmark}: {results[0].simulators}"))
        if report.of(benchmark):
            blocks.append(note(report, benchmark))
    return [*blocks, f"{in_one_line(report.machine)}."]


def page(report: Report) -> Page:
    """A picture and two tables."""
    blocks: list[Block] = [Picture("Sync and async stepping compared", NAME)]
    if uneven := report.of(UNEVEN):
        counts = list(dict.fromkeys(one.workers for results in uneven for one in results))
        rows = []
        for results in uneven:
            for way in (SYNC, ASYNC):
                cells = [
                    f"{100 * one.utilisation:.0f} %" + (f" ({one.gain:.2f}x)" if way == ASYNC else "")
                    for one in results
                    if one.way == way
                ]
                rows.append([results[0].simulators if way == SYNC else "", way, *cells])
        headings = [UNEVEN, "", *(f"{count} worker{'s' * (count > 1)}" for count in counts)]
        blocks += [Table(headings, rows, "ll"), note(report, UNEVEN)]
    if overlap := report.of(OVERLAP):
        rows = []
        for results in overlap:
            for sync, other in zip(results[::2], results[1::2], strict=True):
                rates = f"{sync.steps_per_second:,.0f}", f"{other.steps_per_second:,.0f}"
                rows.append([sync.simulators, str(sync.workers), *rates, f"{other.gain:.2f}x", f"{other.limit:.2f}x"])
        headings = [OVERLAP, "workers", "sync", "async", "gain", "CPU limit"]
        blocks += [Table(headings, rows), note(report, OVERLAP)]
    return [*blocks, f"{in_one_line(report.machine)}."]


def save_plot(report: Report, path: Path) -> None:
    panels = [results for benchmark in NOTES for results in report.of(benchmark)]
    rows = -(-len(panels) // COLUMNS)
    figure = framed(7.5, 0.6 + 2.9 * rows)
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for unused in axes[len(panels) :]:
        unused.set_visible(False)
    for panel, results in zip(axes, panels, strict=False):
        uneven = results[0].benchmark == UNEVEN
        counts = sorted({one.workers for one in results})
        for one in results:
            place = counts.index(one.workers) + (0.2 if one.way == ASYNC else -0.2)
            height = one.utilisation if uneven else one.gain
            colour = COLOURS["process"] if one.way == ASYNC else "#b8bec6"
            bar = panel.bar(place, height, 0.37, color=colour, label=one.way)
            label = f"{100 * height:.0f} %" if uneven else f"{height:.2f}x"
            panel.bar_label(bar, [label], fontsize=6, padding=2, color=GREY, bbox=PATCH)
            if one.limit and one.way == ASYNC:
                panel.hlines(
                    one.limit, place - 0.66, place + 0.26, colors="black", linestyles="dashed", linewidth=1,
                    label="CPU limit",
                )  # fmt: skip
        if uneven:
            panel.axhline(1.0, color="black", linestyle="dashed", linewidth=1, label="CPU limit")
        panel.set_xticks(range(len(counts)), [str(count) for count in counts])
        panel.set_title(f"{results[0].benchmark}\n{results[0].simulators}", fontsize=9)
        panel.set_xlabel("workers", fontsize=8)
        panel.set_ylabel("share of min(workers, CPUs) in simulators" if uneven else "throughput over sync", fontsize=8)
        tidy(panel)
        panel.set_ylim(top=1.12 if uneven else 2.25)
    finish(figure, in_one_line(report.machine), path)


# -- the command -------------------------------------------------------------------------------------------------------


def main(
    quick: Quick = False,
    workers: Workers = WORKERS,
    only: Only = "",
    seconds: Seconds = 1.0,
    repeats: Repeats = 5,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure sync and async stepping."""
    if as_markdown:
        print(frame.markdown(page(frame.read(NAME, Report, output))))
        return
    chosen = frame.named(cases(), only)
    folder = frame.folder_for(output, whole=not (quick or only) and workers == WORKERS)
    if quick:
        workers, seconds, repeats = "1,2", 0.05, 2
    report = run(chosen, frame.counts(workers), seconds, repeats)
    frame.show(details(report))
    frame.save(NAME, report, folder, report.results, save_plot)


if __name__ == "__main__":
    typer.run(main)
