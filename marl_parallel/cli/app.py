"""The commands of `marl-parallel` and their options."""

from __future__ import annotations

import functools
import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import psutil
import typer

import marl_parallel as package
from marl_parallel.backends import NAMES
from marl_parallel.cli import check as checking
from marl_parallel.cli import doctor as examining
from marl_parallel.cli import measure as measuring
from marl_parallel.cli import record as recording
from marl_parallel.cli import replay as replaying
from marl_parallel.cli import report as reporting
from marl_parallel.cli.check_texts import BACKENDS, next_step, show
from marl_parallel.cli.measure import ASYNC, FACADES, STEP
from marl_parallel.cli.output import check_writable, deliver, report_written, say_next
from marl_parallel.cli.report import Report, machine, progress
from marl_parallel.cli.target import (
    MEASURING_HINT,
    CommandError,
    constructor_of,
    distributions_of,
    names_in,
    parsed_size,
    positive_numbers,
    short_errors,
    stdout_to_stderr,
)
from marl_parallel.core.backend import usable_cpus
from marl_parallel.types import Seed

app = typer.Typer(
    name="marl-parallel", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)  # fmt: skip

EnvArgument = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="module\\[:attribute], path/to/file.py\\[:function], or an id of PettingZoo or Gymnasium. Without an "
        "attribute: parallel_env, else env, else raw_env.",
        show_default=False,
    ),
]
EnvKwargs = Annotated[str, typer.Option(help="Keywords for the environment, as JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON, and nothing else.")]
Output = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Save the results here, as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_ENVS_PER_CPU = 16


def _print_version(version: bool) -> None:
    if version:
        print(f"marl-parallel {package.__version__}")
        raise typer.Exit


@app.callback()
def marl_parallel(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Check, measure, record and replay multi-agent simulators that are stepped in parallel.

    Every command ends with a line that says what to do next.

    [bold]Start with[/bold]:  marl-parallel check mpe2.simple_spread_v3
    """


@app.command()
def bench(
    env: EnvArgument,
    num_envs: Annotated[int, typer.Option(min=1, help="The number of environments.")] = 8,
    workers: Annotated[str, typer.Option(help="Numbers of workers, comma-separated.")] = "1,2,4",
    backends: Annotated[
        str,
        typer.Option(help=f"Backends to measure: {', '.join(NAMES)}; comma-separated."),
    ] = "process",
    stepped_async: Annotated[
        bool, typer.Option("--async", help="Also measure send and recv, for half of the environments at a time.")
    ] = False,
    facade: Annotated[str, typer.Option(help=f"Also measure facades: {', '.join(FACADES)}; comma-separated.")] = "",
    env_kwargs: EnvKwargs = "{}",
    seconds: Annotated[float, typer.Option(min=0.001, help="How long each measurement lasts.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="The number of rounds; each measures everything.")] = 5,
    as_json: AsJson = False,
    output: Output = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Save the table here.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Save a picture here (.png, .svg, .pdf).")
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure how fast environments are stepped, in parallel and in a plain loop.

    All contenders step the same environments with the same random actions, in turns. Efficiency is throughput as a
    share of min(workers, CPUs) times the plain loop's.

    [bold]Example[/bold]:  marl-parallel bench mpe2.simple_spread_v3 --num-envs 8 --workers 1,2,4 --async
    """
    with short_errors(debug, hint=MEASURING_HINT):
        constructor = constructor_of(env, env_kwargs)
        ways = [STEP, *([ASYNC] if stepped_async else []), *(names_in(facade, FACADES, "facade") if facade else [])]
        against = measuring.contenders(names_in(backends), positive_numbers("--workers", workers), num_envs, ways)
        if plot_file is not None and plot_file.suffix.lower() not in reporting.FORMATS:
            formats = " ".join(reporting.FORMATS)
            raise CommandError(f"--plot {plot_file}: {plot_file.suffix!r} is not a format of pictures", formats)
        check_writable(output, csv_file, plot_file)
        described = machine(distributions_of(env))
        turns = measuring.num_turns(len(against), repeats)
        with progress(turns) as on_turn, stdout_to_stderr() if as_json else nullcontext():
            measurements = measuring.measure(
                env, constructor, num_envs, against, seconds=seconds, repeats=repeats, on_turn=on_turn
            )
        settings = {"seconds": seconds, "repeats": repeats, "env_kwargs": json.loads(env_kwargs)}
        report = Report(described, settings, measurements)
        if not as_json:
            reporting.show(report)
        deliver(asdict(report), as_json, output)
        for path, write in ((csv_file, reporting.write_csv), (plot_file, reporting.save_plot)):
            if path is not None:
                write(report, path)
                report_written(path)
        say_next(reporting.next_after_bench(report, env), as_json)


@app.command()
def check(
    env: EnvArgument,
    env_kwargs: EnvKwargs = "{}",
    backends: Annotated[
        str, typer.Option(help=f"Backends to check: {', '.join(BACKENDS)}; comma-separated.")
    ] = ",".join(BACKENDS),
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a constructor, step or reset may take.")] = 30.0,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long each run lasts, at most.")] = 2.0,
    steps: Annotated[int, typer.Option(min=1, help="How many steps each run has, at most.")] = 200,
    as_json: AsJson = False,
    output: Output = None,
    debug: Debug = False,
) -> None:
    """Check ENV: its API, spaces, determinism, pickling, processes, and what steps cost.

    ENV runs alone, and with the backends "serial", "thread" and "process". Everything runs in worker processes, so that
    a crash or a hang is a finding. The exit code is 1 if there is a problem,
    something that does not work here; 0 if there are remarks only, such as a failing test of PettingZoo, or nothing.

    [bold]Example[/bold]:  marl-parallel check mpe2.simple_spread_v3 --env-kwargs '{"N": 5}'
    """
    with short_errors(debug):
        job = checking.Job("alone", env, env_kwargs, timeout=timeout, seconds=seconds, steps=steps)
        names = names_in(backends, BACKENDS)
        check_writable(output)
        with progress(4 + len(names), "checking") as on_start, stdout_to_stderr() if as_json else nullcontext():
            result = checking.examine(job, names, on_start)
        if not as_json:
            show(result)
        deliver(result.as_json(), as_json, output)
        say_next(next_step(result), as_json)
    raise typer.Exit(0 if result.healthy else 1)


@app.command()
def tune(
    env: EnvArgument,
    env_kwargs: EnvKwargs = "{}",
    memory: Annotated[
        str,
        typer.Option(
            help="The memory that all worker processes may use together, such as 2GB.", show_default="what is free"
        ),
    ] = "",
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, comma-separated.", show_default="up to twice the CPUs")
    ] = "",
    envs_per_worker: Annotated[
        str, typer.Option(help="Numbers of environments in each, comma-separated.")
    ] = "1,2,4,8,16",
    max_envs: Annotated[
        int, typer.Option(min=0, help="The most environments; 0: 16 for each CPU.", show_default="16 for each CPU")
    ] = 0,
    seconds: Annotated[float, typer.Option(min=0.001, help="How long each measurement lasts.")] = 0.5,
    as_json: AsJson = False,
    output: Output = None,
    debug: Debug = False,
) -> None:
    """Find the number of workers and of environments in each that step ENV fastest, by measuring.

    Every setting is measured once, the better half of them twice more, the best quarter three times more. Of those
    within 2 % of the best, tune proposes the one with the fewest environments. It then compares that one with a plain
    loop and with backend="serial", and advises against workers where they do not pay off. It proposes nothing if the
    load is above the number of CPUs, or rounds of the same setting differ by more than a third.

    [bold]Example[/bold]:  marl-parallel tune mpe2.simple_spread_v3 --memory 2GB
    """
    with short_errors(debug, hint=MEASURING_HINT), stdout_to_stderr() if as_json else nullcontext():
        check_writable(output)
        cpus = usable_cpus()
        powers_of_two = [2**n for n in range(cpus.bit_length())]
        settings = measuring.grid(
            positive_numbers("--workers", workers) if workers else [*powers_of_two, cpus, 2 * cpus],
            positive_numbers("--envs-per-worker", envs_per_worker),
            max_envs or _ENVS_PER_CPU * cpus,
        )
        limit = parsed_size(memory) if memory else psutil.virtual_memory().available
        constructor = constructor_of(env, env_kwargs)
        with measuring.simulators(constructor, 1) as (simulator,):
            adapted = measuring.adapted_for_loop(simulator)
        described = machine(distributions_of(env))
        with progress(measuring.max_turns(settings) + measuring.ROUNDS, "tuning") as on_turn:
            measure = functools.partial(measuring.measure_alike, constructor, adapted, seconds, on_turn)
            best, trials = measuring.search(settings, measure, limit)
            in_turns = measuring.compare(constructor, adapted, seconds, best, measure)
    result = reporting.tune_result(env, json.loads(env_kwargs), best, trials, in_turns, described)
    result |= {"memory_limit": limit}
    if not as_json:
        reporting.show_tune(result)
    deliver(result, as_json, output)
    say_next(reporting.next_after_tune(result), as_json)


@app.command()
def doctor(as_json: AsJson = False, output: Output = None, debug: Debug = False) -> None:
    """Print what a bug report needs: versions, CPUs and their quota, memory, limits, the codec, how workers start, Ray.

    Two worker processes are started and stepped. The exit code is 1 if that fails.

    [bold]Example[/bold]:  marl-parallel doctor --output doctor.json
    """
    with short_errors(debug):
        check_writable(output)
        with progress(examining.TURNS, "examining") as on_turn, stdout_to_stderr():
            facts, works = examining.examine(on_turn)
        if not as_json:
            typer.echo(examining.as_text(facts))
        deliver(dict(facts), as_json, output)
        say_next(examining.next_step(works), as_json)
    raise typer.Exit(0 if works else 1)


def _seed(text: str) -> Seed:
    """The seed that an option names."""
    if text == "own":
        return "own"
    try:
        return int(text)
    except ValueError:
        raise CommandError(f"--seed must be an integer or own, got {text!r}", "pass one, such as --seed 1") from None


@app.command()
def record(
    env: EnvArgument,
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="The video: a .gif or an .mp4.")],
    num_envs: Annotated[int, typer.Option(min=1, help="The number of environments, shown in a grid.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="The number of steps.")] = 200,
    policy: Annotated[
        str,
        typer.Option(
            help="module:function or path/to/file.py:function, which takes the observations of all environments and "
            "returns actions for `step`.",
            show_default="random actions",
        ),
    ] = "",
    env_kwargs: EnvKwargs = "{}",
    seed: Annotated[
        str,
        typer.Option(
            metavar="INTEGER",
            help='The seed of environment 0; the others have the next ones. Or "own": each has its own seed.',
        ),
    ] = "42",
    workers: Annotated[
        int, typer.Option(min=0, help="The number of workers; 0: one for each CPU.", show_default="one for each CPU")
    ] = 0,
    fps: Annotated[
        float | None, typer.Option(min=0.1, help="Frames per second.", show_default="the environment's, else 30")
    ] = None,
    tile_width: Annotated[
        int | None, typer.Option(min=1, help="Pixels of each environment's frame.", show_default="as rendered")
    ] = None,
    labels: Annotated[bool, typer.Option(help="Show the number and the return of each environment.")] = True,
    debug: Debug = False,
) -> None:
    """Step environments and save a video of all of them, with random actions or those of a policy.

    The environments are constructed with render_mode="rgb_array", unless --env-kwargs has a render_mode. It needs the
    extra `video`.

    [bold]Example[/bold]:  marl-parallel record mpe2.simple_spread_v3 --output spread.gif --steps 50
    """
    with short_errors(debug):
        check_writable(output)
        with progress(recording.num_turns(steps), "recording") as on_turn:
            recording.record(
                env, output, num_envs, steps, policy, env_kwargs, _seed(seed), workers or None, on_turn,
                fps=fps, tile_width=tile_width, labels=labels,
            )  # fmt: skip
        report_written(output)
        say_next(f"open {output}" + ("" if policy else "; to see your policy instead of random actions, pass --policy"))


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file that the error names.")],
    debugger: Annotated[
        bool, typer.Option("--pdb", help="Stop in pdb where an exception was raised, or before a step that crashes.")
    ] = False,
    until: Annotated[
        int | None, typer.Option(min=0, metavar="STEP", help="Stop before this step; with --pdb, in the debugger.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="SECONDS", help="Print the stacks and end if a call or the exit takes longer."),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Replay a worker's death in this process instead of a child, for example under gdb; --pdb implies it.",
        ),
    ] = False,
    assume_yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before code of a file runs that belongs to another user.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Repeat a failure of one environment in this process, from FILE, which ParallelEnv(replay=N) has written.

    If the failure was the death of a worker process, a child process replays it, and its death is reported.

    FILE runs code of its author: open only files of people you trust. If another user owns FILE, the command asks
    before it runs anything, or needs --yes without a terminal. The exit code is 0 if it failed again at
    the same step; 1 if at another step or not at all; 2 if FILE cannot be used here; 3 if FILE lacks the first steps
    or if call() failed.

    [bold]Example[/bold]:  marl-parallel replay marl_parallel-replays/env-3-20260131-120000-4711-0.replay --pdb
    """
    with short_errors(debug, replaying.Outcome.UNUSABLE):
        outcome = replaying.replay(
            file, debugger=debugger, until=until, timeout=timeout, in_process=in_process, assume_yes=assume_yes
        )
    raise typer.Exit(int(outcome))
