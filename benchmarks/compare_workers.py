"""Compare throughput by backend and number of workers with a plain loop, on real and synthetic environments.

    python benchmarks/compare_workers.py              some twenty minutes; writes results/compare_workers.*
    python benchmarks/compare_workers.py --quick      half a minute; writes only where --output says so
    python benchmarks/compare_workers.py --markdown   the tables for docs/performance.md, from the last run's JSON
    python benchmarks/compare_workers.py --baseline ../before
                                                      about an hour; compares this checkout with another one, beside
                                                      plain loops, and exits with status 1 if a row is slower

Each case has its limit, measured in the same rounds: plain loops in processes that meet at a barrier after each batch
(`plain_loops.py`). All take the same actions, drawn beforehand. `versions.py` compares two versions.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import contest
import frame
import peers
import typer
import versions
from frame import AsMarkdown, Block, Only, Output, Page, Picture, Quick, Table, Workers
from games import battle, connect_four, texas_holdem
from mpe2 import simple_spread_v3
from pettingzoo.butterfly import pistonball_v6
from pettingzoo.sisl import multiwalker_v9
from pictures import finish, framed
from synthetic import Synthetic, rounds_per_microsecond
from version_stepper import PETTINGZOO, STACKED, STEP, Stepper

from marl_parallel.cli.measure import LOOP, Contender, Measurement, contenders, spread
from marl_parallel.cli.report import COLOURS, GREY, Report, in_microseconds, in_one_line, machine, progress, tidy
from marl_parallel.core.backend import usable_cpus

NAME = "compare_workers"
SPEEDUPS = "speedup_by_step_cost"
NUM_ENVS = 8
LOOPS, LIMIT = "plain loops side by side", "plain loops with a barrier"
PARALLEL = ("process", "hybrid")
"""Backends with processes: their arrays are measured as well, and hybrid with one worker is serial."""
ARRAYS = {PETTINGZOO: "PettingZooVecEnv", STACKED: "StackedVecEnv"}
DYING, INFOS, MASKS, BATTLE = "1 of 3 dead", "infos", "masks", "MAgent2 battle_v4"
WORKERS, BACKENDS = "1,2,4", frame.default_backends()
SECONDS, REPEATS = 0.4, 9
ROUNDS_AT_ONCE = 3
"""Rounds of a case before the next case: a machine that is slow for a minute then slows down all cases alike."""
ROUND_SECONDS, LAUNCHES = 0.2, 5


@dataclass(frozen=True)
class Case(contest.Case):
    """An environment to step.

    Attributes:
        arrays: Whether they are stepped through facades that return arrays, too.
        needs: The module that must be installed for it.
    """

    arrays: bool = field(default=False, kw_only=True)
    needs: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Row(Measurement):
    """A measurement with its share of the limit.

    Attributes:
        of_limit: Throughput as a share of the limit's: the median of the ratios within each round; None in results
            that were saved before the limit was measured.
    """

    of_limit: float | None = None


@dataclass(frozen=True)
class Rows(Report):
    measurements: list[Row]  # type: ignore[assignment]  # a list of nothing else


def synthetic(name: str, num_envs: int = NUM_ENVS, arrays: bool = False, **keywords: Any) -> Case:
    """A case with `Synthetic`. The work per microsecond is measured once, so that all environments do the same."""
    constructor = functools.partial(Synthetic, rounds_per_us=rounds_per_microsecond(), **keywords)
    return Case(name, constructor, num_envs, arrays=arrays)


def cases() -> list[Case]:
    return [
        Case("simple_spread_v3", simple_spread_v3.parallel_env),
        Case("multiwalker_v9", multiwalker_v9.parallel_env),
        Case("pistonball_v6", pistonball_v6.parallel_env),
        Case(BATTLE, battle, arrays=True, needs="magent2"),
        *(synthetic(f"synthetic {cost} µs, 3 x 18", step_us=cost, arrays=cost == 50) for cost in (200, 100, 50, 20)),
        synthetic("synthetic 0 µs, 3 x 18"),
        synthetic("synthetic 0 µs, 3 x 18", 32, arrays=True),
        synthetic("synthetic 0 µs, 20 x 128", 32, arrays=True, num_agents=20, observation_size=128),
        synthetic(f"synthetic 50 µs, {DYING}", arrays=True, step_us=50, dying=1),
        synthetic(f"synthetic 0 µs, {DYING}", dying=1),
        synthetic(f"synthetic 0 µs, {DYING}", 32, arrays=True, dying=1),
        synthetic(f"synthetic 50 µs, {INFOS}", step_us=50, infos=True),
        synthetic(f"synthetic 0 µs, {INFOS}", 32, arrays=True, infos=True),
        synthetic(f"synthetic 50 µs, {MASKS}", step_us=50, masks=True),
        synthetic(f"synthetic 0 µs, {MASKS}", 32, masks=True),
    ]


def further_cases() -> list[Case]:
    """Those of `--baseline` only: episodes of random length, and games whose agents take turns."""
    return [
        synthetic("synthetic 0 µs, random lengths", 32, episode_steps=(50, 150)),
        Case("connect_four_v3", connect_four),
        Case("texas_holdem_v4", texas_holdem, needs="rlcard"),
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
        print(frame.markdown(page(frame.read(NAME, Rows, output))))
        return
    named = frame.named(cases() + (further_cases() if baseline else []), only, "environment")
    chosen = [case for case in named if not case.needs or find_spec(case.needs)]
    left_out = [f"{case.name} (needs {case.needs}, which is not installed)" for case in named if case not in chosen]
    if not chosen:
        raise typer.BadParameter(f"nothing is left to measure: {'; '.join(left_out)}", param_hint="--only")
    for text in left_out:
        print(f"left out: {text}", file=sys.stderr)
    whole = not only and (workers, backends) == (WORKERS, BACKENDS)
    if quick:
        backends, workers, seconds, repeats = "process", "1,2", 0.02, 2
    if baseline is not None:
        ways = (STEP, *ARRAYS) if arrays else (STEP,)
        comparisons = against(baseline, chosen, backends, frame.counts(workers), ways, seconds, repeats, output)
        raise typer.Exit(int(any(one.slower for one in comparisons)))
    seconds, repeats = seconds or SECONDS, repeats or REPEATS
    report = run(chosen, frame.backend_names(backends), frame.counts(workers), seconds, repeats, left_out)
    frame.show(details(report))
    frame.save(NAME, report, frame.folder_for(output, whole=whole and not quick), report.measurements, save_speedups)


# -- showing -----------------------------------------------------------------------------------------------------------


def details(report: Report) -> Page:
    """All measurements, in a table for each environment, for the terminal."""
    blocks: list[Block] = []
    for measurements in report.tables():
        rows = [
            [
                label(one),
                f"{one.steps_per_second:,.0f}",
                f"{100 * one.spread:.0f}",
                in_microseconds(one),
                f"{one.speedup:.2f}",
                in_share(one),
            ]
            for one in measurements
        ]
        title = f"{measurements[0].environment}, {measurements[0].num_envs} environments"
        blocks.append(Table(("", "steps/s", "± %", "µs/step", "x loop", "of limit"), rows, title=title))
    return [*blocks, *frame.not_measured(report.settings.get("left_out", ())), f"{in_one_line(report.machine)}."]


def in_share(one: Measurement) -> str:
    share = getattr(one, "of_limit", None)
    return "" if share is None else f"{share:.2f}"


def label(one: Measurement) -> str:
    facade = ARRAYS.get(one.way)
    name = str(Contender(one.backend, one.workers))
    return f"{name}, {facade}" if facade else name


def table(
    report: Report, cell: Callable[[Measurement], str], columns: Sequence[Contender], first: Mapping[str, str]
) -> Table:
    """A row for each environment, and one for each facade that steps it.

    Args:
        report: The measurements.
        cell: The text of one.
        columns: Contenders that step dicts; a facade's row has the same backends and numbers of workers.
        first: Headings of the columns before them, which have microseconds, by backend.
    """
    rows = []
    for measurements in report.tables():
        took = {one.backend: in_microseconds(one) for one in measurements if one.backend in first}
        name, num_envs = measurements[0].environment, str(measurements[0].num_envs)
        for way in dict.fromkeys(one.way for one in measurements):
            cells = {Contender(one.backend, one.workers): cell(one) for one in measurements if one.way == way}
            facade = f", {ARRAYS[way]}" if way in ARRAYS else ""
            shown = (cells.get(one, "") for one in columns)
            rows.append([f"{name}{facade}", num_envs, *(took[kind] for kind in first), *shown])
    return Table(["environment", "envs", *first.values(), *map(str, columns)], rows)


def page(report: Report) -> Page:
    """A picture and a table: microseconds per environment step; in brackets, throughput over the plain loop's.

    Then a table of the shares of the limit.
    """
    columns = [one for one in dict.fromkeys(m.contender for m in report.measurements) if one.way == STEP]
    speeds = [one for one in columns if one.backend not in (LOOP, LIMIT)]
    blocks: list[Block] = [
        Picture("Speed-up over a plain loop, by the time of a step and the number of workers", SPEEDUPS),
        table(report, lambda m: f"{in_microseconds(m)} ({m.speedup:.2f}x)", speeds, {LOOP: "plain loop"}),
        "Microseconds of wall time per environment step; in brackets, throughput relative to the plain loop; "
        f"medians of {report.settings['repeats']} rounds. {in_one_line(report.machine)}.",
    ]
    if any(in_share(one) for one in report.measurements):
        shares = [one for one in columns if one.backend != LIMIT]
        number = max(one.workers for one in columns if one.backend == LIMIT)
        blocks += [
            table(report, in_share, shares, {LIMIT: "limit, µs"}),
            f"Throughput as a share of the limit: {number} plain loops in processes that meet at a barrier after each "
            "batch. Medians of the ratios within each round, of the same run.",
        ]
    return [*blocks, *frame.not_measured(report.settings.get("left_out", ()))]


def speedups(report: Report, backend: str = "process") -> dict[int, list[tuple[float, float]]]:
    """By number of workers: the plain loop's microseconds per step and the speed-up, where everybody lives."""
    points: dict[int, list[tuple[float, float]]] = {}
    for loop, *others in report.tables():
        for one in others if drawn_in_picture(loop) else ():
            if one.backend == backend and one.way == STEP:
                points.setdefault(one.workers, []).append((loop.microseconds_per_step, one.speedup))
    return {workers: sorted(points[workers]) for workers in sorted(points)}


def drawn_in_picture(loop: Measurement) -> bool:
    """Whether it is one of the environments that differ mostly in the time of a step."""
    return loop.num_envs == NUM_ENVS and not any(kind in loop.environment for kind in (DYING, INFOS, MASKS, BATTLE))


def save_speedups(report: Report, path: Path) -> None:
    """Draw the speed-up over the plain loop by the time of a step, with a line for each number of workers.

    The picture has a name of its own, `SPEEDUPS`.
    """
    from matplotlib.ticker import FuncFormatter

    figure = framed(7.5, 4.0)
    panel = figure.subplots()
    panel.axhline(1, color="black", linestyle="dashed", linewidth=1, label="plain loop")
    for kind, style in ((LOOPS, "dotted"), (LIMIT, "dashdot")):
        for workers, points in speedups(report, kind).items():
            name = f"{workers} {kind}"
            panel.plot(*zip(*points), label=name, color=GREY, linestyle=style, linewidth=1.2)
    shades = ("#9dbfe0", COLOURS["process"], "#12335a")
    for (workers, points), shade in zip(speedups(report).items(), itertools.cycle(shades)):
        label = f"{workers} worker{'s' * (workers > 1)}"
        panel.plot(*zip(*points), color=shade, marker="o", markersize=4, linewidth=1.5, label=label)
    for loop, *others in report.tables():
        if others and drawn_in_picture(loop):
            name = loop.environment.partition(",")[0]
            place, style = loop.microseconds_per_step, {"rotation": 90, "ha": "center", "va": "top"}
            panel.text(place, 0.99, name, transform=panel.get_xaxis_transform(), fontsize=7, color=GREY, **style)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda microseconds, _: f"{microseconds:,.0f}"))
    panel.set_xlabel("µs of a simulator's step (plain loop)", fontsize=8)
    panel.set_ylabel(f"speed-up over a plain loop, {NUM_ENVS} environments", fontsize=8)
    tidy(panel)
    panel.set_ylim(top=1.45 * panel.get_ylim()[1])  # room for the names
    finish(figure, in_one_line(report.machine), path.with_stem(SPEEDUPS))


# -- measuring ---------------------------------------------------------------------------------------------------------


@contextmanager
def parallel_env(case: Case, contender: Contender) -> Iterator[contest.Step]:
    backend, workers, way = contender
    arguments = {"backend": backend, "num_workers": workers}
    with closing(Stepper(case.constructor, case.num_envs, arguments, way)) as stepper:
        yield contest.stepping(stepper.env.step, stepper.actions)


def everyone(case: Case, backends: list[str], workers: list[int]) -> dict[Contender, Callable[[Any], Any]]:
    """All contenders of a case, each with the function that starts it.

    The plain loop comes first. The limit is that of the largest number of workers that have a CPU each.
    """
    most = min(max(workers), usable_cpus(), case.num_envs)
    starts: dict[Contender, Callable[[Any], Any]] = {
        Contender(LOOP): peers.plain_loop,
        Contender(LOOPS, most): functools.partial(peers.loops, workers=most),
        Contender(LIMIT, most): functools.partial(peers.loops, workers=most, barrier=True),
    }
    those = [one for one in contenders(backends, workers, case.num_envs) if one[:2] != ("hybrid", 1)]
    arrays = [
        one._replace(way=way) for one in those if one.backend in PARALLEL and one.workers == most for way in ARRAYS
    ]
    return starts | {
        one: functools.partial(parallel_env, contender=one) for one in those + (arrays if case.arrays else [])
    }


def rows_of(case: Case, rounds: Mapping[Contender, list[float]]) -> list[Row]:
    """The medians of all contenders of a case, with their ratios to the plain loop and to the limit."""
    limit = next(rates for who, rates in rounds.items() if who.backend == LIMIT)
    rows = []
    for (backend, workers, way), rates in rounds.items():
        median = statistics.median(rates)
        speedup, of_limit = (frame.ratio(rates, other) for other in (rounds[Contender(LOOP)], limit))
        numbers = median, 1e6 / median, spread(rates), speedup, speedup / min(workers, usable_cpus())
        rows.append(Row(case.name, case.num_envs, backend, workers, *numbers, rates, way, of_limit))
    return rows


def run(
    chosen: list[Case],
    backends: list[str],
    workers: list[int],
    seconds: float,
    repeats: int,
    left_out: Sequence[str] = (),
) -> Report:
    contest.one_thread_each()
    everybody = [everyone(case, backends, workers) for case in chosen]
    described = machine(("mpe2", *(case.needs for case in chosen if case.needs)))
    passes = [min(ROUNDS_AT_ONCE, repeats - done) for done in range(0, repeats, ROUNDS_AT_ONCE)]
    rounds: list[dict[Contender, list[float]]] = [{one: [] for one in starts} for starts in everybody]
    with progress(sum(map(len, everybody)) * (len(passes) + repeats)) as on_turn:
        for times in passes:
            for case, starts, rates in zip(chosen, everybody, rounds, strict=True):
                those = [contest.Contender(str(one), start, ours=True) for one, start in starts.items()]
                measured, _ = contest.measure(case, those, seconds, times, on_turn)
                for one in starts:
                    rates[one] += measured[str(one)]
    measurements: list[Measurement] = [
        row for case, rates in zip(chosen, rounds, strict=True) for row in rows_of(case, rates)
    ]
    settings = {"seconds": seconds, "repeats": repeats, "left_out": list(left_out)}
    return Report(described, settings, measurements)


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
    names = frame.backend_names(backends, also=("auto",))
    cases = [(case, contenders(names, workers, case.num_envs, ways)) for case in chosen]
    with progress(launches * sum(len(who) for _, who in cases)) as on_turn:
        comparisons = versions.compare(cases, baseline.resolve(), seconds=seconds, launches=launches, on_turn=on_turn)
    frame.show(versions.page(comparisons, baseline))
    if output is not None:
        settings = {"seconds": seconds, "launches": launches, "rounds": versions.ROUNDS}
        versions.write_json(comparisons, output / f"{NAME}_baseline.json", settings)
    return comparisons


if __name__ == "__main__":
    typer.run(main)
