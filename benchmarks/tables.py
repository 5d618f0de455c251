"""Results that are one table: saved as JSON, and shown in the terminal and on a page of the documentation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from marl_parallel.cli.report import in_one_line, write_json


@dataclass(frozen=True)
class Results:
    """A table with its machine.

    Attributes:
        machine: The machine, as `marl_parallel.cli.report.machine` describes it.
        headings: A text for each column.
        rows: The cells, as they are shown.
        note: What the numbers are, in whole sentences.
        labels: How many columns, from the left, have labels; the others have numbers.
    """

    machine: dict[str, Any]
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str
    labels: int = 1

    @property
    def notes(self) -> str:
        """The note and the machine."""
        return f"{self.note} {in_one_line(self.machine)}."

    def show(self) -> None:
        """Print it in the terminal."""
        shown = Table(box=SIMPLE_HEAD)
        for place, heading in enumerate(self.headings):
            shown.add_column(heading, justify="left" if place < self.labels else "right")
        for row in self.rows:
            shown.add_row(*row)
        console = Console()
        console.print(shown)
        console.print(self.notes, style="dim", highlight=False, markup=False)

    def markdown(self) -> str:
        """The table and its notes, for a page."""
        rule = ["---"] * self.labels + ["---:"] * (len(self.headings) - self.labels)
        lines = [f"| {' | '.join(self.headings)} |", f"|{'|'.join(rule)}|"]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in self.rows), "", self.notes])


def show_and_save(results: Results, path: Path | None) -> None:
    """Print results, and save them if there is a path."""
    results.show()
    if path is not None:
        write_json(results, path)


def read(path: Path) -> Results:
    """What `show_and_save` saved."""
    return Results(**json.loads(path.read_text()))
