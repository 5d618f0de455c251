"""The options that benchmarks have in common, with their help, and what follows from them; defaults are their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from marl_parallel.backends import NAMES

Quick: TypeAlias = Annotated[
    bool, typer.Option("--quick", help="See that it works, briefly; saved is only where --output says.")
]
Only: TypeAlias = Annotated[str, typer.Option(help="Only what contains this in its name.")]
Workers: TypeAlias = Annotated[str, typer.Option(help="Numbers of workers, with commas between.")]
Seconds: TypeAlias = Annotated[float, typer.Option(min=0.001, help="How long each measurement lasts.")]
Repeats: TypeAlias = Annotated[int, typer.Option(min=1, help="Rounds, in each of which everyone is measured.")]
Output: TypeAlias = Annotated[
    Path | None, typer.Option(help="The directory for what is saved; without it, only a whole run is.")
]
AsMarkdown: TypeAlias = Annotated[
    bool, typer.Option("--markdown", help="Print what is saved as the README has it; measure nothing.")
]


def counts(workers: str, least: int = 1) -> list[int]:
    """The numbers of workers that are asked for."""
    numbers = [int(text) if text.strip().isdecimal() else -1 for text in workers.split(",")]
    if min(numbers) < least:
        raise typer.BadParameter(f"expected numbers with commas between, got {workers!r}", param_hint="--workers")
    return numbers


def backend_names(backends: str) -> list[str]:
    """The backends that are asked for."""
    names = [name.strip() for name in backends.split(",")]
    for name in names:
        if name not in NAMES:
            raise typer.BadParameter(f"there is no backend {name!r}", param_hint="--backends")
    return names


def folder_for(output: Path | None, results: Path, *, whole: bool) -> Path | None:
    """Where to save: where it was said, else in place of the published results, unless this is only a part of them."""
    return output or (results if whole else None)
