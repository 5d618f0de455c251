"""Measure the overhead of each facade over `ParallelEnv`'s dicts, and compare each with its peers in other projects.

    python benchmarks/compare_facades.py              two to four minutes; adds to results/compare_facades.*
    python benchmarks/compare_facades.py --quick      a few seconds; writes only where --output says so
    python benchmarks/compare_facades.py --markdown   the tables for docs/performance.md, from the saved JSON

The peers and their settings are in `peers.py`; `contest.py` measures in turns. Not all of these libraries can be
installed into one virtual environment: run it in each of them. `merged.py` merges the results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import facades
import frame
import peers
import typer
from contest import Case, one_thread_each, settings
from frame import AsMarkdown, Only, Output, Page, Picture, Quick, Repeats, Seconds, Table
from matplotlib.axes import Axes
from merged import Pair, Report, Result, machines, read, remarks, run, show_and_save
from mpe2 import simple_spread_v3
from pictures import finish, framed, plain
from synthetic import Synthetic

from marl_parallel.cli.report import COLOURS, PATCH

NAME = "compare_facades"
WORKERS = 2
OVERHEAD, PEERS = "overhead", "peers"


FACADES = {
    facades.PETTINGZOO: [peers.SUPERSUIT, peers.AGILERL],
    facades.GYMNASIUM: [peers.SUPERSUIT, peers.GYMNASIUM],
    facades.SB3: [peers.SUPERSUIT, peers.SB3],
    facades.TORCHRL: [peers.TORCHRL, peers.TORCHRL_SERIAL],
    facades.RLLIB: [peers.RLLIB],
    facades.AGILERL: [peers.AGILERL],
}
"""Each facade, and the peers for the same training loops; plain loops are added to each."""


# -- the cases ---------------------------------------------------------------------------------------------------------


def synthetic(agents: int, size: int) -> Case:
    constructor = functools.partial(Synthetic, num_agents=agents, observation_size=size)
    return Case(f"synthetic 0 µs, {agents} x {size}", constructor, 32, WORKERS, episode_steps=100)


def pairs() -> list[Pair]:
    free = synthetic(3, 18), synthetic(20, 128)
    spread_case = Case("simple_spread_v3", simple_spread_v3.parallel_env, 8, WORKERS, episode_steps=25)
    return [
        *(Pair(OVERHEAD, case, ours, facades.DICTS) for case in free for ours in FACADES),
        *(
            Pair(PEERS, spread_case, ours, against)
            for ours, own_peers in FACADES.items()
            for against in [*own_peers, peers.LOOPS, peers.LOOP]
        ),
    ]


# -- showing -----------------------------------------------------------------------------------------------------------


def overheads(report: Report) -> Table:
    """Facades under the `ParallelEnv` of the same run."""
    results = [one for one in report.results if one.benchmark == OVERHEAD]
    environments = list(dict.fromkeys(one.environment for one in results))
    rows = []
    for letter in report.runs:
        of_run = {(one.ours, one.environment): one for one in results if one.run == letter}
        baseline = {one.environment: f"{1e6 / one.against_steps_per_second:.1f}" for one in of_run.values()}
        if baseline:
            rows.append(["ParallelEnv, dicts", *(baseline.get(name, "") for name in environments), letter])
        for who in dict.fromkeys(ours for ours, _ in of_run):
            rows.append([who, *(_overhead(of_run.get((who, name))) for name in environments), letter])
    return Table(["facade", *environments, "run"], rows, "l" + "r" * len(environments) + "l")


def _overhead(one: Result | None) -> str:
    return f"{one.microseconds_per_step:.1f} ({one.extra_us:+.1f})" if one else ""


def gains(report: Report) -> Table:
    """Facades and their peers."""
    rows = [
        [
            one.ours,
            one.against,
            f"{one.steps_per_second:,.0f} ± {100 * one.spread:.0f} %",
            f"{one.against_steps_per_second:,.0f} ± {100 * one.against_spread:.0f} %",
            f"{one.gain:.2f}x",
            one.run,
        ]
        for one in report.results
        if one.benchmark == PEERS
    ]
    return Table(["facade", "peer", "facade, steps/s", "peer, steps/s", "gain", "run"], rows, "llrrrl")


def notes(report: Report) -> list[str]:
    """What the tables show, the settings of the peers, the runs, and what is missing."""
    shown = {one.against for one in report.results if one.benchmark == PEERS}
    contenders = dict.fromkeys(peer for its_peers in FACADES.values() for peer in [*its_peers, peers.LOOPS, peers.LOOP])
    texts = []
    if any(one.benchmark == OVERHEAD for one in report.results):
        texts.append(
            "Overhead: microseconds of wall time per environment step of a simulator without work, 32 environments, "
            f"{WORKERS} workers; in brackets, the difference from `ParallelEnv` with dicts in the same rounds."
        )
    if shown:
        texts.append(
            f"Peers: environment steps per second on simple_spread_v3, 8 environments, {WORKERS} workers; gain is the "
            "facade's throughput divided by the peer's, the median of the ratios within each round. All begin new "
            "episodes by themselves, take the same actions, and have one thread for numerical libraries in each "
            f"process; calls that only reset are not counted. {settings(contenders, shown, WORKERS)}"
        )
    return [*texts, *remarks(report)]


def page(report: Report) -> Page:
    """A picture and two tables."""
    tables = [table for table in (overheads(report), gains(report)) if table.rows]
    return [Picture("Facades compared", NAME), *tables, *notes(report)]


def save_plot(report: Report, path: Path) -> None:
    """For each environment, microseconds per step of facades and of dicts, or throughput relative to the peers."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for one in report.without(peers.LOOP.name).results:
        groups.setdefault((one.benchmark, one.environment), []).append(one)
    bars = [*map(len, groups.values())]
    figure = framed(8.5, sum(1.0 + 0.24 * count for count in bars))
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=[count + 2 for count in bars])[:, 0]
    for panel, ((benchmark, environment), results) in zip(panels, groups.items(), strict=True):
        (_draw_overhead if benchmark == OVERHEAD else _draw_gains)(panel, results)
        panel.set_title(f"{environment}: {results[0].num_envs} environments, {WORKERS} workers", fontsize=9)
    finish(figure, machines(report), path)


def _draw_overhead(panel: Axes, results: Sequence[Result]) -> None:
    took = [one.microseconds_per_step for one in results]
    _draw_bars(panel, [one.ours for one in results], took, [f"{value:.1f}" for value in took])
    _mark(panel, [1e6 / one.against_steps_per_second for one in results])
    panel.set_xlabel("µs per step (dashed: ParallelEnv, dicts)", fontsize=8)


def _draw_gains(panel: Axes, results: Sequence[Result]) -> None:
    gains = [one.gain for one in results]
    _draw_bars(panel, [f"{one.ours} / {one.against}" for one in results], gains, [f"{gain:.2f}" for gain in gains])
    _mark(panel, [1.0] * len(gains))
    panel.set_xlabel("times the other's throughput (dashed: as fast)", fontsize=8)


def _draw_bars(panel: Axes, labels: list[str], values: list[float], numbers: list[str]) -> None:
    bars = panel.barh(range(len(values)), values, 0.7, color=COLOURS["process"])
    panel.bar_label(bars, numbers, fontsize=7, padding=2, bbox=PATCH)
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.invert_yaxis()
    plain(panel, "x")
    panel.margins(x=0.12)


def _mark(panel: Axes, values: list[float]) -> None:
    for place, value in enumerate(values):
        panel.vlines(value, place - 0.45, place + 0.45, colors="black", linestyles="dashed", linewidth=1)


# -- the command -------------------------------------------------------------------------------------------------------


def main(
    quick: Quick = False,
    only: Only = "",
    seconds: Seconds = 1.0,
    repeats: Repeats = 7,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure facades against dicts and against their peers."""
    if as_markdown:
        print(frame.markdown(page(read(NAME, output))))
        return
    chosen = frame.named(pairs(), only, "comparison")
    if quick:
        seconds, repeats = 0.02, 2
    one_thread_each()
    report = run(chosen, seconds, repeats)
    show_and_save(NAME, report, page, pairs(), frame.folder_for(output, whole=not quick), save_plot)


if __name__ == "__main__":
    typer.run(main)
