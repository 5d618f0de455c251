"""Measure the time to a fixed mean return of `examples/ippo_simple_spread.py`, by number of workers.

    python benchmarks/time_to_return.py              some ten minutes; writes results/time_to_return.*
    python benchmarks/time_to_return.py --quick      a minute: too short to learn anything; writes where --output says
    python benchmarks/time_to_return.py --markdown   the table for docs/performance.md, from the last run's JSON

With one seed, every number of workers gives the same returns after the same number of steps. So all runs end with the
same update, which is checked, and differ only in time. More workers make the simulators faster, but not the policy and
its training. Runs alternate.
"""

from __future__ import annotations

import csv
import functools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import frame
import typer
from frame import AsMarkdown, Output, Page, Quick, Repeats, Table
from pictures import finish, framed, plain

from marl_parallel.cli.report import COLOURS, GREY, in_one_line, machine, progress, tidy

NAME = "time_to_return"
WORKERS = "0,1,2,4"
SCRIPT = Path(__file__).parents[1] / "examples" / "ippo_simple_spread.py"
DISTRIBUTIONS = ("torch", "mpe2")


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        seconds: Seconds from the first reset until the return was reached.
        curve: Seconds and return of each update.
    """

    seconds: float
    curve: list[tuple[float, float]]


@dataclass(frozen=True)
class Result:
    """The measurements with one number of workers.

    Attributes:
        workers: Number of worker processes; 0 for environments stepped one after another in the training process.
        steps: Environment steps until the return was reached.
        seconds: Seconds until the return was reached: the median of the rounds.
        least_s: The smallest of these.
        most_s: The largest of these.
        steps_per_second: Environment steps per second, training included.
        speedup: Seconds without workers over seconds with them: the median of the rounds' ratios.
        rounds: All rounds.
    """

    workers: int
    steps: int
    seconds: float
    least_s: float
    most_s: float
    steps_per_second: float
    speedup: float
    rounds: list[Run]

    @property
    def name(self) -> str:
        return f"{self.workers} worker{'s' * (self.workers > 1)}" if self.workers else "none: serial"


@dataclass(frozen=True)
class Report(frame.Report):
    results: list[Result]


def train(workers: int, target: float, seed: int, smoke: bool) -> tuple[int, Run]:
    """Train until the mean return of ten updates reaches `target`; returns the number of steps, and the run."""
    where = ["--num-workers", str(workers)] if workers else ["--backend", "serial"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", str(SCRIPT), "--seed", str(seed), "--output", folder, *where]
        command += ["--test-episodes", "20", "--stop-at", str(target), *["--smoke"] * smoke]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        with (Path(folder) / f"seed_{seed}.csv").open(newline="") as file:
            log = list(csv.DictReader(file))
    curve = [(float(row["seconds"]), float(row["return"])) for row in log]
    recent = statistics.mean(value for _, value in curve[-10:])
    if recent < target and not smoke:
        raise RuntimeError(f"a mean return of {target} was not reached in {log[-1]['steps']} steps: {recent:.2f}")
    return int(log[-1]["steps"]), Run(curve[-1][0], curve)


def measure(workers: Sequence[int], target: float, seed: int, repeats: int, smoke: bool) -> list[Result]:
    turns = {count: functools.partial(train, count, target, seed, smoke) for count in workers}
    with progress(repeats * len(workers), "training, workers:") as on_turn:
        rounds = frame.rounds(turns, repeats, on_turn)
    everything = [turn for of_count in rounds.values() for turn in of_count]
    steps = {needed for needed, _ in everything}
    if len({tuple(value for _, value in run.curve) for _, run in everything}) != 1:
        raise RuntimeError(f"runs with the same seed have different curves, of {sorted(steps)} steps")
    runs = {count: [run for _, run in of_count] for count, of_count in rounds.items()}
    return [result(count, min(steps), runs[count], runs[workers[0]]) for count in workers]


def result(workers: int, steps: int, rounds: list[Run], baseline: list[Run]) -> Result:
    seconds = [run.seconds for run in rounds]
    typical = statistics.median(seconds)
    speedup = frame.ratio([run.seconds for run in baseline], seconds)
    return Result(workers, steps, typical, min(seconds), max(seconds), steps / typical, speedup, rounds)


# -- showing -----------------------------------------------------------------------------------------------------------


HEADINGS = ("workers", "seconds", "min to max", "environment steps/s", "speedup")


def page(report: Report) -> Page:
    rows = [
        [
            one.name,
            f"{one.seconds:.0f}",
            f"{one.least_s:.0f} to {one.most_s:.0f}",
            f"{one.steps_per_second:,.0f}",
            f"{one.speedup:.2f}x",
        ]
        for one in report.results
    ]
    note = (
        f"`examples/ippo_simple_spread.py` until an agent's mean return is {report.settings['target']:g}: "
        f"{report.results[0].steps:,} steps of 16 environments, the same steps with every number of workers; medians "
        f"of {report.settings['repeats']} rounds. {in_one_line(report.machine)}."
    )
    return Table(HEADINGS, rows), note


def save_plot(report: Report, path: Path) -> None:
    figure = framed(9, 3.6)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    shades = [GREY, "#9dbfe0", COLOURS["process"], "#12335a", "#0a1c33"]
    for one, shade in zip(report.results, shades):
        seconds, returns = zip(*one.rounds[-1].curve)
        curves.plot(seconds, returns, color=shade, linewidth=1.2, label=one.name)
        label = bars.bar(one.name.replace(": ", "\n"), one.seconds, color=shade, width=0.6)
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
    seed: Annotated[int, typer.Option(help="The seed of the training.")] = 1,
    repeats: Repeats = 2,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure the time of training to a fixed mean return."""
    if as_markdown:
        print(frame.markdown(page(frame.read(NAME, Report, output))))
        return
    numbers = frame.counts(workers, least=0)
    repeats = 1 if quick else repeats
    settings = {"target": target, "seed": seed, "repeats": repeats}
    report = Report(machine(DISTRIBUTIONS), settings, measure(numbers, target, seed, repeats, quick))
    frame.show(page(report))
    folder = frame.folder_for(output, whole=workers == WORKERS and not quick)
    frame.save(NAME, report, folder, report.results, save_plot)


if __name__ == "__main__":
    typer.run(main)
