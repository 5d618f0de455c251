"""The commands of `marl-parallel`, gathered; what each of them does is in the module of its name."""

from __future__ import annotations

from typing import Annotated

import typer

import marl_parallel as package
from marl_parallel.cli.bench import bench
from marl_parallel.cli.check import check
from marl_parallel.cli.tune import tune

app = typer.Typer(
    name="marl-parallel",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"marl-parallel {package.__version__}")
        raise typer.Exit


@app.callback()
def marl_parallel(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Many copies of a multi-agent simulator, stepped side by side at the full speed of your cores."""


app.command()(bench)
app.command()(check)
app.command()(tune)
