"""Measure the time to a fixed mean return of `examples/ippo_simple_spread.py`, by number of workers.

    python benchmarks/time_to_return.py              half an hour; writes results/time_to_return.*
    python benchmarks/time_to_return.py --quick      a minute: too short to learn anything; writes where --output says
    python benchmarks/time_to_return.py --markdown   the table for docs/performance.md, from the last run's JSON

With one seed, every number of workers gives the same returns after the same number of steps. So these runs end with the
same update, which is checked, and differ only in time. More workers make the simulators faster, but not the policy and
its training. With `--ahead`, a thread collects the next rollout meanwhile: the data come from weights that are one
update older, so other updates reach the return, more or fewer. Each round has another seed. Runs alternate.
"""

from __future__ import annotations

import csv
import functools
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import frame
import typer
from frame import AsMarkdown, Output, Page, Quick, Table
from pictures import finish, framed, plain

from marl_parallel.cli.report import COLOURS, GREY, in_one_line, machine, progress, tidy

NAME = "time_to_return"
WORKERS = "0,1,2,4"
AHEAD = "1,2"
SEEDS = "1,2,3"
SCRIPT = Path(__file__).parents[1] / "examples" / "ippo_simple_spread.py"
DISTRIBUTIONS = ("torch", "mpe2")


class Case(NamedTuple):
    """How environments are stepped.

    Attributes:
        workers: Number of worker processes; 0 for environments stepped one after another in the training process.
        ahead: Whether a thread collects while the network is trained.
    """

    workers: int
    ahead: bool = False

    @property
    def name(self) -> str:
        name = f"{self.workers} worker{'s' * (self.workers > 1)}" if self.workers else "none: serial"
        return f"{name}, ahead" if self.ahead else name


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        steps: Environment steps until the return was reached.
        seconds: Seconds from the first reset until then.
        curve: Seconds and return of each update.
    """

    steps: int
    seconds: float
    curve: list[tuple[float, float]]


@dataclass(frozen=True)
class Result:
    """The measurements of a case.

    Attributes:
        workers: Number of worker processes; 0 for environments stepped one after another in the training process.
        ahead: Whether a thread collected while the network was trained.
        steps: Environment steps until the return was reached: the median of the rounds.
        seconds: Seconds until the return was reached: the median of the rounds.
        least_s: The smallest of these.
        most_s: The largest of these.
        steps_per_second: Environment steps per second, training included: the median of the rounds.
        rate: Steps per second, divided by those of the first case: the median of the rounds' ratios.
        speedup: Seconds of the first case over seconds of this one: the median of the rounds' ratios.
        rounds: All rounds.
    """

    workers: int
    ahead: bool
    steps: int
    seconds: float
    least_s: float
    most_s: float
    steps_per_second: float
    rate: float
    speedup: float
    rounds: list[Run]

    @property
    def name(self) -> str:
        return Case(self.workers, self.ahead).name


@dataclass(frozen=True)
class Report(frame.Report):
    results: list[Result]


def train(case: Case, target: float, seed: int, smoke: bool) -> Run:
    """Train until the mean return of ten updates reaches `target`."""
    where = ["--num-workers", str(case.workers)] if case.workers else ["--backend", "serial"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", str(SCRIPT), "--seed", str(seed), "--output", folder, *where]
        command += ["--test-episodes", "20", "--stop-at", str(target), *["--smoke"] * smoke, *["--ahead"] * case.ahead]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        with (Path(folder) / f"seed_{seed}.csv").open(newline="") as file:
            log = list(csv.DictReader(file))
    curve = [(float(row["seconds"]), float(row["return"])) for row in log]
    recent = statistics.mean(value for _, value in curve[-10:])
    if recent < target and not smoke:
        raise RuntimeError(f"a mean return of {target} was not reached in {log[-1]['steps']} steps: {recent:.2f}")
    return Run(int(log[-1]["steps"]), curve[-1][0], curve)


def measure(cases: Sequence[Case], target: float, seeds: Sequence[int], repeats: int, smoke: bool) -> list[Result]:
    def turn(case: Case, of_rounds: Iterator[int]) -> Run:
        return train(case, target, next(of_rounds), smoke)

    turns = {case: functools.partial(turn, case, itertools.cycle(seeds)) for case in cases}
    number = repeats * len(seeds)
    with progress(number * len(cases), "training, workers:") as on_turn:
        runs = frame.rounds(turns, number, on_turn, lambda case: case.name)
    for of_round in zip(*[of_case for case, of_case in runs.items() if not case.ahead]):
        if len({tuple(value for _, value in run.curve) for run in of_round}) != 1:
            raise RuntimeError(
                f"runs with the same seed have different curves, of {[run.steps for run in of_round]} steps"
            )
    return [result(case, runs[case], runs[cases[0]]) for case in cases]


def result(case: Case, rounds: list[Run], baseline: list[Run]) -> Result:
    seconds, rates = [run.seconds for run in rounds], [run.steps / run.seconds for run in rounds]
    return Result(
        *case,
        steps=int(statistics.median([run.steps for run in rounds])),
        seconds=statistics.median(seconds),
        least_s=min(seconds),
        most_s=max(seconds),
        steps_per_second=statistics.median(rates),
        rate=frame.ratio(rates, [run.steps / run.seconds for run in baseline]),
        speedup=frame.ratio([run.seconds for run in baseline], seconds),
        rounds=rounds,
    )


# -- showing -----------------------------------------------------------------------------------------------------------


HEADINGS = ("workers", "environment steps/s", "of serial", "steps to the return", "seconds", "min to max", "speedup")


def page(report: Report) -> Page:
    rows = [
        [
            one.name,
            f"{one.steps_per_second:,.0f}",
            f"{one.rate:.2f}x",
            f"{one.steps:,}",
            f"{one.seconds:.0f}",
            f"{one.least_s:.0f} to {one.most_s:.0f}",
            f"{one.speedup:.2f}x",
        ]
        for one in report.results
    ]
    seeds = report.settings["seeds"]
    note = (
        f"`examples/ippo_simple_spread.py` until an agent's mean return is {report.settings['target']:g}, with 16 "
        "environments: the same steps with every number of workers; other steps where a thread collects ahead; medians "
        f"of {len(report.results[0].rounds)} rounds with {len(seeds)} seed{'s' * (len(seeds) > 1)}. Of serial: steps "
        f"per second; speedup: of the seconds to the return. Both are compared within each round. "
        f"{in_one_line(report.machine)}."
    )
    return Table(HEADINGS, rows), note


def save_plot(report: Report, path: Path) -> None:
    figure = framed(9, 3.6)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    shades = itertools.cycle(["#9dbfe0", COLOURS["process"], "#12335a", "#0a1c33"])
    for one in report.results:
        shade = next(shades) if one.workers else GREY
        seconds, returns = zip(*one.rounds[-1].curve)
        style = "dashed" if one.ahead else "solid"
        curves.plot(seconds, returns, color=shade, linewidth=1.2, linestyle=style, label=one.name)
        label = bars.bar(one.name.replace(": ", "\n").replace(", ", ",\n"), one.seconds, color=shade, width=0.6)
        bars.bar_label(label, [f"{one.seconds:.0f} s"], fontsize=8, padding=2)
    curves.axhline(report.settings["target"], color="black", linewidth=0.8, linestyle="dashed", label="target")
    curves.set_xlabel("seconds", fontsize=8)
    curves.set_title("mean return of an agent's episode", fontsize=9)
    plain(curves)
    bars.set_title("seconds to the target", fontsize=9)
    tidy(bars)
    finish(figure, in_one_line(report.machine), path)


def main(
    quick: Quick = False,
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas; 0 for none.")] = WORKERS,
    target: Annotated[float, typer.Option(help="The mean return to reach.")] = -18.0,
    ahead: Annotated[str, typer.Option(help="Numbers of workers with which a thread also collects ahead.")] = AHEAD,
    seeds: Annotated[str, typer.Option(help="The seeds of the training, one for each round.")] = SEEDS,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds with each seed.")] = 1,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure the time of training to a fixed mean return."""
    if as_markdown:
        print(frame.markdown(page(frame.read(NAME, Report, output))))
        return
    cases = [Case(count) for count in frame.counts(workers, least=0)]
    cases += [Case(count, ahead=True) for count in frame.counts(ahead, least=0, option="--ahead")]
    numbers = frame.counts(seeds, least=0, option="--seeds")[: 1 if quick else None]
    settings = {"target": target, "seeds": numbers, "repeats": repeats}
    report = Report(machine(DISTRIBUTIONS), settings, measure(cases, target, numbers, repeats, quick))
    frame.show(page(report))
    folder = frame.folder_for(output, whole=(workers, ahead) == (WORKERS, AHEAD) and not quick)
    frame.save(NAME, report, folder, report.results, save_plot)


if __name__ == "__main__":
    typer.run(main)
