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
import json
import operator
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer
import versions
from contest import one_thread_each
from games import battle, connect_four, texas_holdem
from mpe2 import simple_spread_v3
from options import (
    AsMarkdown,
    Only,
    Output,
    Quick,
    Workers,
    backend_names,
    counts,
    default_backends,
    folder_for,
)
from pettingzoo.butterfly import pistonball_v6
from pettingzoo.sisl import multiwalker_v9
from pictures import finish, framed, in_docs
from plain_loops import CALL_S, SEED, Loops, constructed, drawn, step_all
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from synthetic import Synthetic, rounds_per_microsecond
from version_stepper import PETTINGZOO, STACKED, STEP, Stepper

from marl_parallel.cli.measure import LOOP, Contender, Measurement, Run, contenders, rate, repeatedly, spread, warm
from marl_parallel.cli.report import (
    COLOURS,
    GREY,
    Report,
    in_microseconds,
    in_one_line,
    machine,
    progress,
    tidy,
    write_csv,
    write_json,
)
from marl_parallel.core.backend import usable_cpus

RESULTS = Path(__file__).parent / "results"
NAME = "compare_workers"
SPEEDUPS = "speedup_by_step_cost"
NUM_ENVS = 8
LOOPS, LIMIT = "plain loops side by side", "plain loops with a barrier"
PARALLEL = ("process", "hybrid")
"""Backends with processes: their arrays are measured as well, and hybrid with one worker is serial."""
ARRAYS = {PETTINGZOO: "PettingZooVecEnv", STACKED: "StackedVecEnv"}
DYING, INFOS, MASKS, BATTLE = "1 of 3 dead", "infos", "masks", "MAgent2 battle_v4"
WORKERS, BACKENDS = "1,2,4", default_backends()
SECONDS, REPEATS = 0.4, 9
ROUNDS_AT_ONCE = 3
"""Rounds of a case before the next case: a machine that is slow for a minute then slows down all cases alike."""
ROUND_SECONDS, LAUNCHES = 0.2, 5

Opened: TypeAlias = Callable[[], AbstractContextManager[Run]]


class Case(NamedTuple):
    """An environment to step.

    Attributes:
        name: Its name in tables.
        constructor: Constructs one, of PettingZoo.
        num_envs: How many are stepped.
        arrays: Whether they are stepped through facades that return arrays, too.
        needs: The module that must be installed for it.
    """

    name: str
    constructor: Callable[..., Any]
    num_envs: int = NUM_ENVS
    arrays: bool = False
    needs: str = ""


@dataclass(frozen=True)
class Row(Measurement):
    """A measurement with its share of the limit.

    Attributes:
        of_limit: Throughput as a share of the limit's: the median of the ratios within each round; None in results
            that were saved before the limit was measured.
    """

    of_limit: float | None = None


def synthetic(name: str, num_envs: int = NUM_ENVS, arrays: bool = False, **keywords: Any) -> Case:
    """A case with `Synthetic`. The work per microsecond is measured once, so that all environments do the same."""
    return Case(
        name, functools.partial(Synthetic, rounds_per_us=rounds_per_microsecond(), **keywords), num_envs, arrays
    )


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
        print(markdown(read_json((output or RESULTS) / f"{NAME}.json")))
        return
    named = [case for case in cases() + (further_cases() if baseline else []) if only in case.name]
    if not named:
        raise typer.BadParameter(f"no environment has {only!r} in its name", param_hint="--only")
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
        comparisons = against(baseline, chosen, backends, counts(workers), ways, seconds, repeats, output)
        raise typer.Exit(int(any(one.slower for one in comparisons)))
    seconds, repeats = seconds or SECONDS, repeats or REPEATS
    directory = folder_for(output, RESULTS, whole=whole and not quick)
    report = run(chosen, backend_names(backends), counts(workers), seconds, repeats, left_out)
    show(report)
    if directory is not None:
        write_json(report, directory / f"{NAME}.json")
        write_csv(report, directory / f"{NAME}.csv")
        save_speedups(report, directory / f"{SPEEDUPS}.png")


# -- showing -----------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> Report:
    saved = json.loads(path.read_text())
    return Report(saved["machine"], saved["settings"], [Row(**values) for values in saved["measurements"]])


def show(report: Report) -> None:
    """Print a table for each environment, and the machine."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    for rows in report.tables():
        title = f"{rows[0].environment}, {rows[0].num_envs} environments"
        shown = Table(title=escape(title), title_justify="left", title_style="bold")
        shown.add_column()
        for heading in ("steps/s", "± %", "µs/step", "x loop", "of limit"):
            shown.add_column(heading, justify="right")
        for one in rows:
            deviation, ratios = f"{100 * one.spread:.0f}", (f"{one.speedup:.2f}", in_share(one))
            shown.add_row(label(one), f"{one.steps_per_second:,.0f}", deviation, in_microseconds(one), *ratios)
        console.print(shown)
    for text in report.settings.get("left_out", ()):
        console.print(f"[dim]Left out: {escape(text)}.", highlight=False)
    console.print(f"[dim]{escape(in_one_line(report.machine))}", highlight=False)


def in_share(one: Measurement) -> str:
    share = getattr(one, "of_limit", None)
    return "" if share is None else f"{share:.2f}"


def label(one: Measurement) -> str:
    facade = ARRAYS.get(one.way)
    name = str(Contender(one.backend, one.workers))
    return f"{name}, {facade}" if facade else name


def table(
    report: Report, cell: Callable[[Measurement], str], columns: Sequence[Contender], first: Mapping[str, str]
) -> list[str]:
    """A table in Markdown: a row for each environment, and one for each facade that steps it.

    Args:
        report: The measurements.
        cell: The text of one.
        columns: Contenders that step dicts; a facade's row has the same backends and numbers of workers.
        first: Headings of the columns before them, which have microseconds, by backend.
    """
    headings = ["environment", "envs", *first.values(), *map(str, columns)]
    lines = [f"| {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) - 1)]
    for measurements in report.tables():
        took = {one.backend: in_microseconds(one) for one in measurements if one.backend in first}
        name, num_envs = measurements[0].environment, str(measurements[0].num_envs)
        for way in dict.fromkeys(one.way for one in measurements):
            cells = {Contender(one.backend, one.workers): cell(one) for one in measurements if one.way == way}
            facade = f", {ARRAYS[way]}" if way in ARRAYS else ""
            row = [
                f"{name}{facade}",
                num_envs,
                *(took[kind] for kind in first),
                *(cells.get(one, "") for one in columns),
            ]
            lines.append(f"| {' | '.join(row)} |")
    return lines


def markdown(report: Report) -> str:
    """A picture and a table: microseconds per environment step; in brackets, throughput over the plain loop's.

    Then a table of the shares of the limit.
    """
    columns = [one for one in dict.fromkeys(m.contender for m in report.measurements) if one.way == STEP]
    speeds = [one for one in columns if one.backend not in (LOOP, LIMIT)]
    parts = [
        in_docs("Speed-up over a plain loop, by the time of a step and the number of workers", SPEEDUPS),
        "\n".join(table(report, lambda m: f"{in_microseconds(m)} ({m.speedup:.2f}x)", speeds, {LOOP: "plain loop"})),
        "Microseconds of wall time per environment step; in brackets, throughput relative to the plain loop; "
        f"medians of {report.settings['repeats']} rounds. {in_one_line(report.machine)}.",
    ]
    if any(in_share(one) for one in report.measurements):
        shares = [one for one in columns if one.backend != LIMIT]
        number = max(one.workers for one in columns if one.backend == LIMIT)
        parts += [
            "\n".join(table(report, in_share, shares, {LIMIT: "limit, µs"})),
            f"Throughput as a share of the limit: {number} plain loops in processes that meet at a barrier after each "
            "batch. Medians of the ratios within each round, of the same run.",
        ]
    if report.settings.get("left_out"):
        parts.append(f"Not measured: {'; '.join(report.settings['left_out'])}.")
    return "\n\n".join(parts)


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
    """Draw the speed-up over the plain loop by the time of a step, with a line for each number of workers."""
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
    finish(figure, report.machine, path)


# -- measuring ---------------------------------------------------------------------------------------------------------


@contextmanager
def loop(case: Case) -> Iterator[Run]:
    """A plain loop in this process."""
    with ExitStack() as stack:
        envs = [stack.enter_context(closing(constructed(case.constructor))) for _ in range(case.num_envs)]
        for env_id, env in enumerate(envs):
            env.reset(seed=SEED + env_id)
        spaces = {agent: envs[0].action_space(agent) for agent in envs[0].possible_agents}
        yield repeatedly(functools.partial(step_all, envs), drawn(spaces, case.num_envs), case.num_envs)


@contextmanager
def loops(case: Case, workers: int, barrier: bool) -> Iterator[Run]:
    """Plain loops in processes of their own: the most that this machine can do with so many workers."""
    with closing(Loops(case.constructor, case.num_envs, workers, barrier)) as processes:
        batches = processes.warm(CALL_S)
        yield repeatedly(lambda _: processes.step(batches), [None], batches * case.num_envs)


@contextmanager
def parallel_env(case: Case, contender: Contender) -> Iterator[Run]:
    backend, workers, way = contender
    arguments = {"backend": backend, "num_workers": workers}
    with closing(Stepper(case.constructor, case.num_envs, arguments, way)) as stepper:
        yield repeatedly(stepper.env.step, stepper.actions, case.num_envs)


def everyone(case: Case, backends: list[str], workers: list[int]) -> dict[Contender, Opened]:
    """All contenders of a case, each with the function that opens it.

    The plain loop comes first. The limit is that of the largest number of workers that have a CPU each.
    """
    most = min(max(workers), usable_cpus(), case.num_envs)
    opened: dict[Contender, Opened] = {
        Contender(LOOP): functools.partial(loop, case),
        Contender(LOOPS, most): functools.partial(loops, case, most, barrier=False),
        Contender(LIMIT, most): functools.partial(loops, case, most, barrier=True),
    }
    those = [one for one in contenders(backends, workers, case.num_envs) if one[:2] != ("hybrid", 1)]
    arrays = [
        one._replace(way=way) for one in those if one.backend in PARALLEL and one.workers == most for way in ARRAYS
    ]
    for one in those + (arrays if case.arrays else []):
        opened[one] = functools.partial(parallel_env, case, one)
    return opened


def rounds_of(
    case: Case, opened: Mapping[Contender, Opened], seconds: float, repeats: int, on_turn: Callable[[str], None]
) -> Iterator[tuple[Contender, float]]:
    """Start all contenders, warm them up, and measure them in turns: each with its environment steps per second."""
    with ExitStack() as stack:
        runs = {}
        for who, opens in opened.items():
            on_turn(f"{case.name}: {who}")
            runs[who] = warm(stack.enter_context(opens()), seconds)
        for who in [*opened] * repeats:
            on_turn(f"{case.name}: {who}")
            yield who, rate(runs[who], seconds)


def rows_of(case: Case, rounds: Mapping[Contender, list[float]]) -> list[Row]:
    """The medians of all contenders of a case, with their ratios to the plain loop and to the limit."""
    limit = next(rates for who, rates in rounds.items() if who.backend == LIMIT)
    rows = []
    for (backend, workers, way), rates in rounds.items():
        median = statistics.median(rates)
        speedup, of_limit = (
            statistics.median(map(operator.truediv, rates, other)) for other in (rounds[Contender(LOOP)], limit)
        )
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
    one_thread_each()
    opened = [everyone(case, backends, workers) for case in chosen]
    described = machine(("mpe2", *(case.needs for case in chosen if case.needs)))
    passes = [min(ROUNDS_AT_ONCE, repeats - done) for done in range(0, repeats, ROUNDS_AT_ONCE)]
    rounds: list[dict[Contender, list[float]]] = [{one: [] for one in who} for who in opened]
    with progress(sum(map(len, opened)) * (len(passes) + repeats)) as on_turn:
        for times in passes:
            for case, who, rates in zip(chosen, opened, rounds, strict=True):
                for one, per_second in rounds_of(case, who, seconds, times, on_turn):
                    rates[one].append(per_second)
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
