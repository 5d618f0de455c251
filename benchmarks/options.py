"""Command line options that several benchmarks share. Each benchmark has its own defaults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from marl_parallel.backends import NAMES

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


def counts(workers: str, least: int = 1) -> list[int]:
    """Parse numbers of workers."""
    numbers = [int(text) if text.strip().isdecimal() else -1 for text in workers.split(",")]
    if min(numbers) < least:
        raise typer.BadParameter(f"expected numbers with commas between, got {workers!r}", param_hint="--workers")
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


def folder_for(output: Path | None, results: Path, *, whole: bool) -> Path | None:
    """The directory to save in: `output`, else `results` for a complete run, else None."""
    return output or (results if whole else None)
