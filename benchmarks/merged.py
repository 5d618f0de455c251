"""Compare contenders in pairs, and merge the results of several runs into one report.

Not all libraries can be installed into one virtual environment. So a run measures what is installed, and replaces the
results of the same pairs in the report. The other results stay, with the machine and versions of their own run.
Contenders that no run could measure are listed with the reason. `contest.py` measures in turns; the scripts define the
pairs and the page.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import contest
import frame
from contest import Case, Contender

from marl_parallel.cli.measure import spread
from marl_parallel.cli.report import in_one_line, machine, progress

RENAMED = {"Ray, an actor per copy": "Ray, an actor per environment"}
"""Contenders that have another name now than in saved results."""


class Pair(NamedTuple):
    """Two contenders that are compared on one case."""

    benchmark: str
    case: Case
    ours: Contender
    against: Contender

    def __str__(self) -> str:
        return f"{self.benchmark}: {self.case.name}: {self.ours.name} / {self.against.name}"

    @property
    def what(self) -> tuple[str, str, str, str]:
        """The key of its result."""
        return self.benchmark, self.case.name, self.ours.name, self.against.name


@dataclass(frozen=True)
class Result:
    """The measurements of a facade and another contender in the same rounds.

    Attributes:
        benchmark: The part of the report.
        environment: The case's name.
        num_envs: Number of environments.
        ours: The facade's name.
        against: The other contender's name: `ParallelEnv` with dicts, or a peer.
        steps_per_second: The facade's environment steps per second: the median.
        against_steps_per_second: The other's.
        spread: Half the distance between the facade's best and worst round, as a share of the median.
        against_spread: The other's.
        microseconds_per_step: The facade's wall time per environment step, from the median.
        extra_us: The facade's microseconds per environment step less the other's: the median of the differences.
        gain: The facade's throughput divided by the other's: the median of the ratios within each round.
        run: The key of its `Run` in the report.
        rounds: Environment steps per second in each round: the facade's, the other's.
    """

    benchmark: str
    environment: str
    num_envs: int
    ours: str
    against: str
    steps_per_second: float
    against_steps_per_second: float
    spread: float
    against_spread: float
    microseconds_per_step: float
    extra_us: float
    gain: float
    run: str
    rounds: list[list[float]]

    @property
    def what(self) -> tuple[str, str, str, str]:
        """Its key: a later result with the same key replaces it."""
        return self.benchmark, self.environment, self.ours, self.against


@dataclass(frozen=True)
class Run:
    """The machine and settings of one run."""

    machine: dict[str, Any]
    seconds: float
    repeats: int

    def __str__(self) -> str:
        return f"medians of {self.repeats} rounds of {self.seconds:g} s; {in_one_line(self.machine)}"


@dataclass(frozen=True)
class Report:
    """The results of several runs.

    Attributes:
        runs: The runs by letter.
        results: The results, in the order of the pairs.
        missing: Reasons why contenders could not be measured, by name; by "name on environment" where others work.
    """

    runs: dict[str, Run] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def without(self, against: str) -> Report:
        """This report without the comparisons with one contender."""
        return replace(self, results=[one for one in self.results if one.against != against])

    def updated(self, other: Report, known: Sequence[Pair]) -> Report:
        """This report with newer results; runs without results are dropped.

        Args:
            other: The newer report, of one run.
            known: All pairs, in order; results of other pairs are dropped.
        """
        letter = next(letter for letter in map(chr, itertools.count(ord("a"))) if letter not in self.runs)
        order = {pair.what: place for place, pair in enumerate(known)}
        results = {one.what: one for one in self.results if one.what in order}
        results |= {one.what: replace(one, run=letter) for one in other.results}
        kept = sorted(results.values(), key=lambda one: order[one.what])
        shown = {name for one in kept for name in (one.ours, one.against)}
        shown |= {f"{name} on {one.environment}" for one in kept for name in (one.ours, one.against)}
        runs = self.runs | dict.fromkeys([letter], *other.runs.values())
        return Report(
            {letter: runs[letter] for letter in sorted({one.run for one in kept})},
            kept,
            {name: why for name, why in {**self.missing, **other.missing}.items() if name not in shown},
        )


def run(chosen: Sequence[Pair], seconds: float, repeats: int) -> Report:
    by_case: dict[str, list[Pair]] = {}
    for pair in chosen:
        by_case.setdefault(pair.case.name, []).append(pair)
    contenders = {
        name: list(dict.fromkeys(who for pair in pairs for who in (pair.against, pair.ours)))
        for name, pairs in by_case.items()
    }
    described, results = machine(contest.DISTRIBUTIONS), []
    missing: dict[str, dict[str, str]] = {}  # reasons by contender and simulator
    with progress(sum(contest.turns(who, repeats) for who in contenders.values())) as on_turn:
        for name, pairs in by_case.items():
            rounds, left_out = contest.measure(pairs[0].case, contenders[name], seconds, repeats, on_turn)
            for who, why in left_out.items():
                missing.setdefault(who, {})[name] = why
            results += [
                result(pair, rounds[pair.ours.name], rounds[pair.against.name])
                for pair in pairs
                if pair.ours.name in rounds and pair.against.name in rounds
            ]
    reasons: dict[str, str] = {}
    for who, by_name in missing.items():
        everywhere = len(by_name) == len(
            [name for name, those in contenders.items() if who in {one.name for one in those}]
        )
        if everywhere and len({*by_name.values()}) == 1:
            reasons[who] = next(iter(by_name.values()))
        else:
            reasons |= {f"{who} on {name}": why for name, why in by_name.items()}
    return Report({"a": Run(described, seconds, repeats)}, results, reasons)


def result(pair: Pair, ours: list[float], against: list[float]) -> Result:
    both = list(zip(ours, against, strict=True))
    return Result(
        benchmark=pair.benchmark,
        environment=pair.case.name,
        num_envs=pair.case.num_envs,
        ours=pair.ours.name,
        against=pair.against.name,
        steps_per_second=statistics.median(ours),
        against_steps_per_second=statistics.median(against),
        spread=spread(ours),
        against_spread=spread(against),
        microseconds_per_step=1e6 / statistics.median(ours),
        extra_us=statistics.median(1e6 / rate - 1e6 / other for rate, other in both),
        gain=frame.ratio(ours, against),
        run="a",
        rounds=[ours, against],
    )


def machines(report: Report) -> str:
    """The machines and days of all runs, for the foot of a picture."""
    described = [run.machine for run in report.runs.values()]
    return "; ".join(dict.fromkeys(f"{one['cpu']}, {one['cpus']} CPUs, {one['date']}" for one in described))


def remarks(report: Report, names: Callable[[str], str] = lambda letter: f"{letter}: ") -> list[str]:
    """Notes about the runs, each after its name, and what is missing."""
    texts = [f"{names(letter)}{run}." for letter, run in report.runs.items()]
    return [*texts, *frame.not_measured([f"{name} ({why})" for name, why in report.missing.items()])]


def read(name: str, output: Path | None) -> Report:
    """The saved report; an empty one if nothing is saved."""
    if not ((output or frame.RESULTS) / f"{name}.json").is_file():
        return Report()
    saved = frame.read(name, Report, output)
    return replace(
        saved, results=[replace(one, against=RENAMED.get(one.against, one.against)) for one in saved.results]
    )


def show_and_save(
    name: str,
    report: Report,
    page: Callable[[Report], frame.Page],
    known: Sequence[Pair],
    folder: Path | None,
    draw: Callable[[Report, Path], object] | None = None,
) -> None:
    """Show a new report; merge it into the one that is saved in the folder, if there is a folder."""
    frame.show(page(report))
    if folder is not None:
        merged = read(name, folder).updated(report, known)
        frame.save(name, merged, folder, merged.results, draw)
