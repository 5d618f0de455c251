"""Compare this package with others that step many environments at once, on several simulators.

    python benchmarks/compare_peers.py              some twenty minutes; adds to results/compare_peers.*
    python benchmarks/compare_peers.py --quick      half a minute; writes only where --output says so
    python benchmarks/compare_peers.py --markdown   the table for docs/performance.md, from the saved JSON

Each has its best setting, which is in `peers.py`; `contest.py` measures in turns. Not all of these libraries can be
installed into one virtual environment: run it in each of them. `merged.py` merges the results.
"""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import facades
import frame
import peers
import typer
from contest import Case, Contender, one_thread_each, settings
from frame import AsMarkdown, Only, Output, Page, Picture, Quick, Repeats, Seconds, Table
from merged import Pair, Report, Result, machines, read, remarks, run, show_and_save
from mpe2 import simple_spread_v3
from pictures import OTHERS, finish, framed, plain
from synthetic import Synthetic, rounds_per_microsecond

from marl_parallel.cli.report import COLOURS

NAME = "compare_peers"
NUM_ENVS, WORKERS = 8, 2
PART = "peers"
OWN, DYING = "marl_parallel, dicts", "1 of 3 dead"
COLUMNS, LONGEST = 2, 2.0
"""Of the picture: columns of panels, and the highest limit that it shows."""
QUICK = ("simple_spread_v3", "synthetic 0 µs", f"synthetic 0 µs, {DYING}")
"""The cases of `--quick`."""
AGAINST = [
    peers.LOOP,
    peers.LOOPS,
    peers.SMARTS,
    peers.SUPERSUIT,
    peers.AGILERL,
    peers.PUFFERLIB,
    peers.TORCHRL,
    peers.TORCHRL_SERIAL,
    peers.TORCHRL_ASYNC,
    peers.TIANSHOU,
    peers.RAY_ACTORS,
]


def multiwalker() -> object:
    from pettingzoo.sisl import multiwalker_v9

    return multiwalker_v9.parallel_env()


def pistonball() -> object:
    from pettingzoo.butterfly import pistonball_v6

    return pistonball_v6.parallel_env()


def synthetic(cost: int, dying: int = 0) -> Case:
    constructor = functools.partial(Synthetic, cost, rounds_per_us=rounds_per_microsecond(), dying=dying)
    name = f"synthetic {cost} µs" + (f", {DYING}" if dying else "")
    return Case(name, constructor, NUM_ENVS, WORKERS, deaths=dying > 0)


def cases() -> list[Case]:
    return [
        Case("simple_spread_v3", simple_spread_v3.parallel_env, NUM_ENVS, WORKERS, 25),
        Case("multiwalker_v9", multiwalker, NUM_ENVS, WORKERS, 500),
        Case("pistonball_v6", pistonball, NUM_ENVS, WORKERS, 125),
        *map(synthetic, (0, 50, 200)),
        *(synthetic(cost, dying=1) for cost in (0, 50)),
    ]


def pairs() -> list[Pair]:
    return [Pair(PART, case, ours, peer) for case in cases() for ours in OURS for peer in AGAINST]


OURS: list[Contender] = [facades.DICTS]


# -- showing -----------------------------------------------------------------------------------------------------------


def table(report: Report) -> Table:
    """A row for this package and for each of the others, a column for each simulator.

    Times are those of the run that has measured most. Of another run there is only the ratio.
    """
    environments, most = list(dict.fromkeys(one.environment for one in report.results)), _largest_run(report)
    cells = {
        (one.against, one.environment): f"{_took(one)} ({one.gain:.2f}x)"
        if one.run == most
        else f"({one.gain:.2f}x, {one.run})"
        for one in report.results
    }
    ours_us = {one.environment: f"{one.microseconds_per_step:,.1f}" for one in report.results if one.run == most}
    rows = [[peer.name, *(cells.get((peer.name, name), "") for name in environments)] for peer in AGAINST]
    ours = [OWN, *(ours_us.get(name, "") for name in environments)]
    return Table(["", *environments], [ours, *(row for row in rows if any(row[1:]))])


def _largest_run(report: Report) -> str:
    counts = Counter(one.run for one in report.results)
    return max(counts, key=counts.__getitem__, default="")


def _took(one: Result) -> str:
    microseconds = 1e6 / one.against_steps_per_second
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def notes(report: Report) -> list[str]:
    shown = {one.against for one in report.results}
    texts = [
        f"Microseconds of wall time per environment step, {NUM_ENVS} environments, {WORKERS} workers where they can be "
        "chosen; in brackets, this package's throughput divided by that of the row, the median of the ratios within "
        f"each round. {settings(AGAINST, shown, WORKERS)}",
    ]
    if any(DYING in one.environment for one in report.results):
        by_setting: dict[str, list[str]] = {}
        for peer in AGAINST:
            if peer.name in shown and peer.with_deaths:
                by_setting.setdefault(peer.with_deaths, []).append(peer.name)
        with_deaths = [f"{', '.join(names)}: {setting}." for setting, names in by_setting.items()]
        texts.append(" ".join([f"{DYING}: one agent of three dies in the first step of each episode.", *with_deaths]))
    most = _largest_run(report)
    return [*texts, *remarks(report, lambda letter: "" if letter == most else f"{letter}: ")]


def page(report: Report) -> Page:
    return [Picture("Throughput compared with other packages", NAME), table(report), *notes(report)]


def save_plot(report: Report, path: Path) -> None:
    """For each simulator, each other package's throughput as a share of this one's, whose bar is 1.

    A dotted line is the limit of the machine, where it is in the picture: for a simulator without work it is not.
    """
    environments = list(dict.fromkeys(one.environment for one in report.results))
    limits = {one.environment: 1 / one.gain for one in report.results if one.against == peers.LOOPS.name}
    report = report.without(peers.LOOP.name).without(peers.LOOPS.name)
    names = [OWN, *(peer.name for peer in AGAINST if any(one.against == peer.name for one in report.results))]
    lines = -(-len(environments) // COLUMNS)
    figure = framed(8.5, 0.6 + lines * (0.5 + 0.24 * len(names)))
    panels = list(figure.subplots(lines, COLUMNS, squeeze=False, sharex=True, sharey=True).flat)
    for panel, environment in zip(panels, environments, strict=False):
        shares = {one.against: 1 / one.gain for one in report.results if one.environment == environment}
        shares[OWN] = 1.0
        shown = [place for place, name in enumerate(names) if name in shares]
        colours = [COLOURS["process"] if names[place] == OWN else OTHERS for place in shown]
        bars = panel.barh(shown, [shares[names[place]] for place in shown], 0.75, color=colours)
        panel.bar_label(bars, [f"{shares[names[place]]:.2f}" for place in shown], fontsize=7, padding=2)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        if limits.get(environment, LONGEST) < LONGEST:
            panel.axvline(limits[environment], color="black", linestyle="dotted", linewidth=1)
        panel.set_title(environment, fontsize=9)
        plain(panel, "x")
        panel.margins(x=0.12)
    for unused in panels[len(environments) :]:
        unused.set_visible(False)
    panels[0].invert_yaxis()  # of all panels
    figure.supxlabel("throughput, as a share of this package's; dotted: plain loops side by side", fontsize=8)
    finish(figure, machines(report), path)


# -- the command -------------------------------------------------------------------------------------------------------


def main(
    quick: Quick = False,
    only: Only = "",
    seconds: Seconds = 1.0,
    repeats: Repeats = 5,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure this package and its peers."""
    if as_markdown:
        print(frame.markdown(page(read(NAME, output))))
        return
    everything = pairs()
    chosen = frame.named(everything, only, "comparison")
    if quick:
        seconds, repeats = 0.02, 2
        chosen = [pair for pair in chosen if only or pair.case.name in QUICK]
    one_thread_each()
    report = run(chosen, seconds, repeats)
    show_and_save(NAME, report, page, everything, frame.folder_for(output, whole=not quick), save_plot)


if __name__ == "__main__":
    typer.run(main)
