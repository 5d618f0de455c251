"""Compare throughput by backend and number of workers with a plain loop, on real and synthetic environments.

    python benchmarks/compare_workers.py              about eight minutes; writes results/compare_workers.*
    python benchmarks/compare_workers.py --quick      a few seconds; writes only where --output says so
    python benchmarks/compare_workers.py --markdown   the table for docs/performance.md, from the last run's JSON
    python benchmarks/compare_workers.py --baseline ../before
                                                      about an hour; compares this checkout with another one, beside
                                                      plain loops, and exits with status 1 if a row is slower

`marl_parallel/cli/measure.py` measures throughput; `versions.py` compares two versions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import versions
from games import connect_four, texas_holdem
from mpe2 import simple_spread_v3
from options import (
    AsMarkdown,
    Only,
    Output,
    Quick,
    Workers,
    backend_names,
    counts,
    folder_for,
)
from pettingzoo.butterfly import pistonball_v6
from pettingzoo.sisl import multiwalker_v9
from pictures import finish, framed, in_docs
from synthetic import Synthetic, rounds_per_microsecond
from version_stepper import CALL_S, Loops

from marl_parallel.cli.measure import LOOP, PETTINGZOO, STEP, Contender, Run, contenders, measure, num_turns, repeatedly
from marl_parallel.cli.report import (
    COLOURS,
    GREY,
    Report,
    in_microseconds,
    in_one_line,
    machine,
    progress,
    read_json,
    show,
    tidy,
    write_csv,
    write_json,
)

RESULTS = Path(__file__).parent / "results"
NAME = "compare_workers"
SPEEDUPS = "speedup_by_step_cost"
NUM_ENVS = 8
LOOPS = Contender("plain loops side by side", 2)
WORKERS, BACKENDS = "1,2,4", "serial,thread,process"
SECONDS, REPEATS = 0.9, 5
ROUND_SECONDS, LAUNCHES = 0.2, 5


class Case(NamedTuple):
    name: str
    constructor: Callable[..., Any]
    num_envs: int = NUM_ENVS


def synthetic(name: str, num_envs: int = NUM_ENVS, **keywords: Any) -> Case:
    """A case with `Synthetic`. The work per microsecond is measured once, so that all environments do the same."""
    return Case(name, functools.partial(Synthetic, rounds_per_us=rounds_per_microsecond(), **keywords), num_envs)


def cases() -> list[Case]:
    return [
        Case("simple_spread_v3", simple_spread_v3.parallel_env),
        Case("multiwalker_v9", multiwalker_v9.parallel_env),
        Case("pistonball_v6", pistonball_v6.parallel_env),
        *(synthetic(f"synthetic {cost} µs, 3 x 18", step_us=cost) for cost in (200, 100, 50, 20)),
        synthetic("synthetic 0 µs, 3 x 18"),
        synthetic("synthetic 0 µs, 3 x 18", num_envs=32),
        synthetic("synthetic 0 µs, 20 x 128", num_envs=32, num_agents=20, observation_size=128),
    ]


def further_cases() -> list[Case]:
    """Those of `--baseline` only: infos, episodes of random length, and games whose agents take turns."""
    return [
        synthetic("synthetic 50 µs, infos", step_us=50, infos=True),
        synthetic("synthetic 0 µs, infos", num_envs=32, infos=True),
        synthetic("synthetic 0 µs, random lengths", num_envs=32, episode_steps=(50, 150)),
        Case("connect_four_v3", connect_four),
        *([Case("texas_holdem_v4", texas_holdem)] if find_spec("rlcard") else []),
    ]


def main(
    quick: Quick = False,
    workers: Workers = WORKERS,
    backends: Annotated[str, typer.Option(help="Backends, separated by commas.")] = BACKENDS,
    only: Only = "",
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.001, help=f"How long each measurement lasts: {SECONDS}, with --baseline {ROUND_SECONDS}, by default."
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Rounds, in each of which every contender is measured ({REPEATS} by default); with --baseline, how "
            f"often both versions are started again for {versions.ROUNDS} rounds ({LAUNCHES} by default).",
        ),
    ] = None,
    output: Output = None,
    as_markdown: AsMarkdown = False,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="The folder of another checkout: compare this one with it, in alternating rounds. The exit status is "
            "1 if a row is slower."
        ),
    ] = None,
    arrays: Annotated[
        bool, typer.Option("--arrays", help="With --baseline: step through the facade PettingZooVecEnv, too.")
    ] = False,
) -> None:
    """Measure throughput by backend and number of workers, or compare two checkouts."""
    if as_markdown:
        print(markdown(read_json((output or RESULTS) / f"{NAME}.json")))
        return
    chosen = [case for case in cases() + (further_cases() if baseline else []) if only in case.name]
    if not chosen:
        raise typer.BadParameter(f"no environment has {only!r} in its name", param_hint="--only")
    whole = not only and (workers, backends) == (WORKERS, BACKENDS)
    if quick:
        backends, workers, seconds, repeats = "process", "1,2", 0.02, 2
    if baseline is not None:
        ways = (STEP, PETTINGZOO) if arrays else (STEP,)
        comparisons = against(baseline, chosen, backends, counts(workers), ways, seconds, repeats, output)
        raise typer.Exit(int(any(one.slower for one in comparisons)))
    seconds, repeats = seconds or SECONDS, repeats or REPEATS
    directory = folder_for(output, RESULTS, whole=whole and not quick)
    report = run(chosen, backend_names(backends), counts(workers), seconds, repeats)
    show(report)
    if directory is not None:
        write_json(report, directory / f"{NAME}.json")
        write_csv(report, directory / f"{NAME}.csv")
        save_speedups(report, directory / f"{SPEEDUPS}.png")


def markdown(report: Report) -> str:
    """A picture and the table: microseconds per environment step; in brackets, throughput over the plain loop's."""
    columns = list(dict.fromkeys(m.contender for m in report.measurements if m.backend != LOOP))
    lines = [
        "| environment | envs | plain loop | " + " | ".join(map(str, columns)) + " |",
        "|---|---:|---:|" + "---:|" * len(columns),
    ]
    for measurements in report.tables():
        cells = {m.contender: f"{in_microseconds(m)} ({m.speedup:.2f}x)" for m in measurements}
        loop = next(m for m in measurements if m.backend == LOOP)
        row = [loop.environment, str(loop.num_envs), in_microseconds(loop), *(cells.get(one, "") for one in columns)]
        lines.append(f"| {' | '.join(row)} |")
    note = (
        "Microseconds of wall time per environment step; in brackets, throughput relative to the plain loop; "
        f"medians of {report.settings['repeats']} rounds. {in_one_line(report.machine)}."
    )
    picture = in_docs("Speed-up over a plain loop, by the time of a step and the number of workers", SPEEDUPS)
    return "\n".join([picture, "", *lines, "", note])


def speedups(report: Report, backend: str = "process") -> dict[int, list[tuple[float, float]]]:
    """By number of worker processes: the plain loop's microseconds per step and the speed-up, for `NUM_ENVS`."""
    points: dict[int, list[tuple[float, float]]] = {}
    for loop, *others in report.tables():
        for one in others:
            if one.backend == backend and one.num_envs == NUM_ENVS:
                points.setdefault(one.workers, []).append((loop.microseconds_per_step, one.speedup))
    return {workers: sorted(points[workers]) for workers in sorted(points)}


def save_speedups(report: Report, path: Path) -> None:
    """Draw the speed-up over the plain loop by the time of a step, with a line for each number of workers."""
    from matplotlib.ticker import FuncFormatter

    figure = framed(7.5, 4.0)
    panel = figure.subplots()
    panel.axhline(1, color="black", linestyle="dashed", linewidth=1, label="plain loop")
    for workers, points in speedups(report, LOOPS.backend).items():
        style = {"color": GREY, "linestyle": "dotted", "linewidth": 1.2}
        panel.plot(*zip(*points), label=f"{workers} plain loops side by side", **style)
    shades = ("#9dbfe0", COLOURS["process"], "#12335a")
    for (workers, points), shade in zip(speedups(report).items(), itertools.cycle(shades)):
        label = f"{workers} worker{'s' * (workers > 1)}"
        panel.plot(*zip(*points), color=shade, marker="o", markersize=4, linewidth=1.5, label=label)
    for loop, *others in report.tables():
        if others and loop.num_envs == NUM_ENVS:
            name = loop.environment.partition(",")[0]
            place, style = loop.microseconds_per_step, {"rotation": 90, "ha": "center", "va": "top"}
            panel.text(place, 0.99, name, transform=panel.get_xaxis_transform(), fontsize=7, color=GREY, **style)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda microseconds, _: f"{microseconds:,.0f}"))
    panel.set_xlabel("µs of a simulator's step (plain loop)", fontsize=8)
    panel.set_ylabel(f"speed-up over a plain loop, {NUM_ENVS} environments", fontsize=8)
    tidy(panel)
    panel.set_ylim(top=1.45 * panel.get_ylim()[1])  # room for the names
    finish(figure, report.machine, path)


@contextmanager
def loops(case: Case) -> Iterator[Run]:
    """Plain loops in processes of their own, which is the most that this machine can do with so many workers."""
    with closing(Loops(case.constructor, case.num_envs, LOOPS.workers, barrier=False)) as processes:
        batches = processes.warm(CALL_S)
        yield repeatedly(lambda _: processes.step(batches), [None], batches * case.num_envs)


def run(chosen: list[Case], backends: list[str], workers: list[int], seconds: float, repeats: int) -> Report:
    against = {case.name: contenders(backends, workers, case.num_envs) for case in chosen}
    described = machine(("mpe2",))
    measurements = []
    with progress(sum(num_turns(1 + len(who), repeats) for who in against.values())) as on_turn:
        for case in chosen:
            name, constructor, num_envs = case
            measurements += measure(
                name,
                constructor,
                num_envs,
                against[name],
                others={LOOPS: functools.partial(loops, case)},
                seconds=seconds,
                repeats=repeats,
                on_turn=lambda turn, name=name: on_turn(f"{name}: {turn}"),
            )
    return Report(described, {"seconds": seconds, "repeats": repeats}, measurements)


def against(
    baseline: Path,
    chosen: list[Case],
    backends: str,
    workers: list[int],
    ways: Sequence[str],
    seconds: float | None,
    launches: int | None,
    output: Path | None,
) -> list[versions.Comparison]:
    """Compare this checkout with another one; print the rows and save them where `output` says."""
    if not (baseline / "marl_parallel" / "__init__.py").is_file():
        raise typer.BadParameter(f"{baseline} is not a checkout: it has no marl_parallel", param_hint="--baseline")
    seconds, launches = seconds or ROUND_SECONDS, launches or LAUNCHES
    names = backend_names(backends, also=("auto",))
    cases = [(case, contenders(names, workers, case.num_envs, ways)) for case in chosen]
    with progress(launches * sum(len(who) for _, who in cases)) as on_turn:
        comparisons = versions.compare(cases, baseline.resolve(), seconds=seconds, launches=launches, on_turn=on_turn)
    versions.show(comparisons, baseline)
    if output is not None:
        settings = {"seconds": seconds, "launches": launches, "rounds": versions.ROUNDS}
        versions.write_json(comparisons, output / f"{NAME}_baseline.json", settings)
    return comparisons


if __name__ == "__main__":
    typer.run(main)
