"""What was measured, shown and saved: a table in the terminal, JSON, CSV, Markdown.

Nothing is measured or judged here. The picture is in `plotting.py`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from marl_parallel.cli.machine import in_one_line
from marl_parallel.cli.measure import LOOP, Measurement


@dataclass(frozen=True)
class Report:
    """Measurements, and under which circumstances they were taken.

    Attributes:
        machine: What `marl_parallel.cli.machine.machine` says.
        settings: How long each turn lasted and how many rounds there were.
        measurements: Those of one environment beside each other, its plain loop first.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    measurements: list[Measurement]

    def tables(self) -> list[list[Measurement]]:
        """The measurements of each environment and number of copies, in their order."""
        grouped = groupby(self.measurements, key=lambda one: (one.environment, one.num_envs))
        return [list(group) for _, group in grouped]


@contextmanager
def progress(total: int, description: str = "measuring") -> Iterator[Any]:
    """A progress bar on standard error; gives the function to be called before each turn, with a text.

    Where it becomes known only meanwhile how many turns there are, it takes their number, too.

    It is drawn between turns only: a thread that redraws it would take part in what is measured.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[turn]}"),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=total, turn="")
        begun = 0

        def on_turn(text: str, total: int | None = None) -> None:
            nonlocal begun
            bar.update(task, completed=begun, total=total, turn=text, refresh=True)
            begun += 1

        yield on_turn


def table(measurements: Sequence[Measurement]) -> Table:
    """One environment's measurements, for the terminal."""
    first = measurements[0]
    title = escape(f"{first.environment}, {first.num_envs} copies")
    shown = Table(title=title, title_justify="left", title_style="bold")
    shown.add_column("")
    for heading in ("steps/s", "± %", "µs/step", "x loop", "efficiency"):
        shown.add_column(heading, justify="right")
    for one in measurements:
        shown.add_row(
            str(one.contender),
            f"{one.steps_per_second:,.0f}",
            f"{100 * one.spread:.0f}",
            in_microseconds(one),
            f"{one.speedup:.2f}",
            "" if one.backend == LOOP else f"{one.efficiency:.2f}",
            end_section=one.backend == LOOP,
        )
    return shown


def show(report: Report) -> None:
    """Print all tables, and what they were measured on."""
    console = Console()
    for measurements in report.tables():
        console.print(table(measurements))
    console.print(f"[dim]{escape(in_one_line(report.machine))}", highlight=False)


def markdown(report: Report) -> str:
    """A table for a README: one row per environment, microseconds per environment step, times faster than the loop."""
    columns = list(dict.fromkeys(m.contender for m in report.measurements if m.backend != LOOP))
    lines = [
        "| environment | copies | plain loop | " + " | ".join(map(str, columns)) + " |",
        "|---|---:|---:|" + "---:|" * len(columns),
    ]
    for measurements in report.tables():
        cells = {m.contender: _cell(m) for m in measurements}
        loop = next(m for m in measurements if m.backend == LOOP)
        row = [
            loop.environment,
            str(loop.num_envs),
            in_microseconds(loop),
            *(cells.get(column, "") for column in columns),
        ]
        lines.append(f"| {' | '.join(row)} |")
    note = (
        "Microseconds of wall time per environment step, and in brackets how many times the plain loop's throughput; "
        f"medians of {report.settings['repeats']} rounds. {in_one_line(report.machine)}."
    )
    return "\n".join([*lines, "", note])


def _cell(measurement: Measurement) -> str:
    return f"{in_microseconds(measurement)} ({measurement.speedup:.2f}x)"


def in_microseconds(measurement: Measurement) -> str:
    """Wall time per environment step, in as many digits as mean something."""
    microseconds = measurement.microseconds_per_step
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def write_json(report: Any, path: Path) -> None:
    """Save a report, or any other dataclass: everything, each round included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(report), indent=2) + "\n")


def read_json(path: Path) -> Report:
    """What `write_json` saved."""
    saved = json.loads(path.read_text())
    return Report(saved["machine"], saved["settings"], [Measurement(**values) for values in saved["measurements"]])


def write_csv(report: Report, path: Path) -> None:
    """Save one line for each contender on each environment, without the single rounds."""
    write_rows(report.measurements, path)


def write_rows(measured: Sequence[Any], path: Path) -> None:
    """Save one line for each of some dataclasses of the same kind, without their `rounds`."""
    names = [field.name for field in fields(measured[0]) if field.name != "rounds"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for one in measured:
            writer.writerow([_rounded(getattr(one, name)) for name in names])


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
