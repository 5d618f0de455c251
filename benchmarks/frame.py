"""What all programs share: command line options, rounds in turn, pages of tables, and saved results.

A program says what its cases are and how one round of a case runs; `rounds` runs them in turn. It makes a page of its
report, which is a list of tables, pictures and notes: `show` prints it in the terminal, and `markdown` prints it for
`docs`. `save` and `read` are for reports.
"""

from __future__ import annotations

import json
import operator
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_args, get_type_hints

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as TerminalTable

from marl_parallel.backends import NAMES
from marl_parallel.cli.report import in_one_line, write_json, write_rows

RESULTS = Path(__file__).parent / "results"
WIDTH = 160
"""Columns of output that goes to a file."""

Key = TypeVar("Key")
Value = TypeVar("Value")


# -- command line options; each program has its own defaults -----------------------------------------------------------

Quick: TypeAlias = Annotated[
    bool, typer.Option("--quick", help="A short test run; results are saved only with --output.")
]
Only: TypeAlias = Annotated[str, typer.Option(help="Run only the cases that have this in their name.")]
Workers: TypeAlias = Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")]
Seconds: TypeAlias = Annotated[float, typer.Option(min=0.001, help="Seconds of each measurement.")]
Repeats: TypeAlias = Annotated[int, typer.Option(min=1, help="Rounds, in each of which every contender is measured.")]
Output: TypeAlias = Annotated[
    Path | None, typer.Option(help="The directory for results; without it, only a complete run is saved, in results/.")
]
AsMarkdown: TypeAlias = Annotated[
    bool, typer.Option("--markdown", help="Print the saved results as Markdown for `docs`, without a new run.")
]


def counts(workers: str, least: int = 1, option: str = "--workers") -> list[int]:
    """Parse the numbers of an option, by default numbers of workers."""
    numbers = [int(text) if text.strip().isdecimal() else -1 for text in workers.split(",")]
    if min(numbers) < least:
        raise typer.BadParameter(f"expected numbers with commas between, got {workers!r}", param_hint=option)
    return numbers


def default_backends() -> str:
    """The backends of this machine that the package has, with commas between; Ray has benchmarks of its own."""
    first = [name for name in ("serial", "thread", "process") if name in NAMES]
    return ",".join([*first, *(name for name in NAMES if name not in (*first, "ray"))])


def backend_names(backends: str, also: Sequence[str] = ()) -> list[str]:
    """Parse names of backends, `also` among them."""
    names = [name.strip() for name in backends.split(",")]
    for name in names:
        if name not in NAMES and name not in also:
            raise typer.BadParameter(f"there is no backend {name!r}", param_hint="--backends")
    return names


def named(cases: Iterable[Value], only: str, kind: str = "case") -> list[Value]:
    """The cases that have `only` in their name."""
    chosen = [case for case in cases if only in str(case)]
    if not chosen:
        raise typer.BadParameter(f"no {kind} has {only!r} in its name", param_hint="--only")
    return chosen


def folder_for(output: Path | None, *, whole: bool) -> Path | None:
    """The directory to save in: `output`, else `RESULTS` for a complete run, else None."""
    return output or (RESULTS if whole else None)


# -- rounds ------------------------------------------------------------------------------------------------------------


def rounds(
    turns: Mapping[Key, Callable[[], Value]],
    repeats: int,
    on_turn: Callable[[str], None],
    label: Callable[[Key], str] = str,
) -> dict[Key, list[Value]]:
    """Call each function once in each round, so that a slow or busy machine affects all of them.

    Args:
        turns: The functions, each of which measures one turn.
        repeats: Number of rounds.
        on_turn: Called before each turn with a text for its key.
        label: Returns that text.

    Returns:
        What the functions returned in each round.
    """
    results: dict[Key, list[Value]] = {key: [] for key in turns}
    for _ in range(repeats):
        for key, turn in turns.items():
            on_turn(label(key))
            results[key].append(turn())
    return results


def opened_rounds(
    contenders: Mapping[Key, AbstractContextManager[Callable[[], Value]]],
    repeats: int,
    on_turn: Callable[[str], None],
    label: Callable[[Key], str] = str,
) -> dict[Key, list[Value]]:
    """The same with contenders that stay open and yield their functions. `on_turn` is called before each start, too."""
    with ExitStack() as stack:
        turns = {}
        for key, contender in contenders.items():
            on_turn(label(key))
            turns[key] = stack.enter_context(contender)
        return rounds(turns, repeats, on_turn, label)


def ratio(ours: Iterable[float], others: Iterable[float]) -> float:
    """The median of the ratios within each round."""
    return float(statistics.median(map(operator.truediv, ours, others)))


# -- pages -------------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """A table: `aligned` has "l" or "r" for each column from the left; further columns are aligned to the right."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    aligned: str = "l"
    title: str = ""


class Picture(NamedTuple):
    """A saved picture, `results/NAME.png`. A click on a page of `docs` shows it in full size."""

    title: str
    name: str


Block: TypeAlias = Table | Picture | str
Page: TypeAlias = Sequence[Block]


def not_measured(what: Sequence[str]) -> list[str]:
    """A note about what is missing, if anything is."""
    return [f"Not measured: {'; '.join(what)}."] if what else []


def show(page: Page) -> None:
    """Print a page in the terminal, without pictures."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for block in page:
        if isinstance(block, str):
            console.print(block, style="dim", highlight=False, markup=False)
        elif isinstance(block, Table) and block.rows:
            title = escape(block.title) or None
            shown = TerminalTable(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
            for heading, letter in zip(block.headings, block.aligned.ljust(len(block.headings), "r"), strict=True):
                shown.add_column(escape(heading), justify="left" if letter == "l" else "right")
            for row in block.rows:
                shown.add_row(*map(escape, row))
            console.print(shown)


def markdown(page: Page) -> str:
    """A page in Markdown."""
    return "\n\n".join(map(_block_in_markdown, page))


def _block_in_markdown(block: Block) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Picture):
        path = f"../benchmarks/results/{block.name}.png"
        return f"[![{block.title}]({path})]({path})"
    letters = block.aligned.ljust(len(block.headings), "r")
    rule = "|".join("---" if letter == "l" else "---:" for letter in letters)
    rows = (f"| {' | '.join(row)} |" for row in (block.headings, *block.rows))
    return "\n".join([next(rows), f"|{rule}|", *rows])


# -- saved results -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """The results of a run, each a dataclass, with its machine and settings."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    results: list[Any]


@dataclass(frozen=True)
class Results:
    """Results that are one table.

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
    def page(self) -> Page:
        return Table(self.headings, self.rows, "l" * self.labels), f"{self.note} {in_one_line(self.machine)}."


def save(
    name: str,
    report: Any,
    folder: Path | None,
    rows: Sequence[Any] = (),
    draw: Callable[[Any, Path], object] | None = None,
) -> None:
    """Save a report, if there is a folder: all of it as JSON, its rows as CSV, and its picture."""
    if folder is None:
        return
    write_json(report, folder / f"{name}.json")
    if rows:
        write_rows(rows, folder / f"{name}.csv")
    if draw is not None:
        draw(report, folder / f"{name}.png")


def read(name: str, kind: type[Value], folder: Path | None = None) -> Value:
    """The report, a dataclass, that `save` wrote into a folder; `RESULTS` by default."""
    report: Value = _built(kind, json.loads(((folder or RESULTS) / f"{name}.json").read_text()))
    return report


def _built(kind: Any, saved: Any) -> Any:
    """A dataclass from the dict that has its fields, and so for those in lists and dicts."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _built(hints[name], value) for name, value in saved.items()})  # type: ignore[operator]
    inside = get_args(kind)[-1:]
    if isinstance(saved, list) and inside:
        return [_built(inside[0], value) for value in saved]
    if isinstance(saved, dict) and inside:
        return {key: _built(inside[0], value) for key, value in saved.items()}
    return saved
