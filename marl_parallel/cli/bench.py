"""`marl-parallel bench`: is stepping copies of an environment in parallel worth it, and with how many workers?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from marl_parallel.backends import NAMES
from marl_parallel.cli import report as reporting
from marl_parallel.cli.failures import CommandError, told_briefly
from marl_parallel.cli.machine import machine
from marl_parallel.cli.measure import contenders, measure, turns
from marl_parallel.cli.options import Debug, EnvArgument, EnvKwargs, backend_names, whole_numbers
from marl_parallel.cli.report import Report
from marl_parallel.cli.target import constructor_of, distributions_of
from marl_parallel.cli.ways import ASYNC, FACADES, STEP


def bench(
    env: EnvArgument,
    num_envs: Annotated[int, typer.Option(min=1, help="Copies of the environment.")] = 8,
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas between.")] = "1,2,4",
    backends: Annotated[
        str,
        typer.Option("--backends", "--backend", help=f"Of {', '.join(NAMES)}; with commas between."),
    ] = "process",
    stepped_async: Annotated[
        bool, typer.Option("--async", help="Also by send and recv: half of the copies go on while the others step.")
    ] = False,
    facade: Annotated[
        str, typer.Option(help=f"Also through a facade: {', '.join(FACADES)}; with commas between.")
    ] = "",
    env_kwargs: EnvKwargs = "{}",
    seconds: Annotated[float, typer.Option(min=0.001, help="How long each measurement lasts.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, in each of which everyone is measured.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Save everything here.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Save the table here.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Save a picture here (.png, .svg, .pdf).")
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure how fast copies of ENV are stepped, in parallel and in a plain loop.

    Everyone steps the same copies with the same random actions, in turns. Efficiency is throughput as a share of
    min(workers, CPUs) times the plain loop's.

    [bold]Example[/bold]:  marl-parallel bench mpe2.simple_spread_v3 --num-envs 8 --workers 1,2,4 --async
    """
    with told_briefly(debug):
        constructor = constructor_of(env, env_kwargs)
        against = contenders(
            backend_names(backends), whole_numbers("--workers", workers), num_envs, _ways(stepped_async, facade)
        )
        outputs = _outputs(json_file, csv_file, plot_file)
        described = machine(distributions_of(env))
        with reporting.progress(turns(len(against), repeats)) as on_turn:
            measurements = measure(
                env, constructor, num_envs, against, seconds=seconds, repeats=repeats, on_turn=on_turn
            )
        settings = {"seconds": seconds, "repeats": repeats, "env_kwargs": json.loads(env_kwargs)}
        result = Report(described, settings, measurements)
        reporting.show(result)
        for path, write in outputs:
            write(result, path)
            typer.echo(f"wrote {path}", err=True)


def _ways(stepped_async: bool, facade: str) -> list[str]:
    facades = list(dict.fromkeys(name.strip() for name in facade.split(","))) if facade else []
    for name in facades:
        if name not in FACADES:
            raise CommandError(f"there is no facade {name!r} to measure", f"there are {', '.join(FACADES)}")
    return [STEP, *([ASYNC] if stepped_async else []), *facades]


def _outputs(
    json_file: Path | None, csv_file: Path | None, plot_file: Path | None
) -> list[tuple[Path, Callable[[Report, Path], None]]]:
    """Where to save the result, and how; what can be refused is refused before anything has been measured."""
    outputs: list[tuple[Path, Callable[[Report, Path], None]]] = []
    if json_file is not None:
        outputs.append((json_file, reporting.write_json))
    if csv_file is not None:
        outputs.append((csv_file, reporting.write_csv))
    if plot_file is not None:
        from marl_parallel.cli.plotting import FORMATS, save_plot  # half a second that only pictures cost

        if plot_file.suffix.lower() not in FORMATS:
            raise CommandError(f"--plot {plot_file}: no picture is saved as {plot_file.suffix!r}", " ".join(FORMATS))
        outputs.append((plot_file, save_plot))
    for path, _ in outputs:
        if path.is_dir():
            raise CommandError(f"{path} is a directory", "name a file")
        above = next(folder for folder in path.absolute().parents if folder.exists())  # the others are made
        if not above.is_dir():
            raise CommandError(f"{path}: {above} is no directory", "name a file in a directory")
    return outputs
