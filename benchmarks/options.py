"""The options that benchmarks have in common, with their help; what each does by default is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Quick: TypeAlias = Annotated[
    bool, typer.Option("--quick", help="See that it works, briefly; saved is only where --output says.")
]
Only: TypeAlias = Annotated[str, typer.Option(help="Only what contains this in its name.")]
Workers: TypeAlias = Annotated[str, typer.Option(help="Numbers of workers, with commas between.")]
Seconds: TypeAlias = Annotated[float, typer.Option(min=0.001, help="How long each measurement lasts.")]
Repeats: TypeAlias = Annotated[int, typer.Option(min=1, help="Rounds, in each of which everyone is measured.")]
Output: TypeAlias = Annotated[Path | None, typer.Option(help="The directory for what is saved.")]
AsMarkdown: TypeAlias = Annotated[
    bool, typer.Option("--markdown", help="Print what is saved as the README has it; measure nothing.")
]
