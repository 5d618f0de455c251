"""Results of `bench` and `tune`: tables in the terminal, JSON, CSV and plots, with a description of the machine."""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.metadata import distributions as installed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from marl_parallel import __version__
from marl_parallel.cli import measure
from marl_parallel.cli.measure import ASYNC, LOOP, STEP, Measurement, Trial, in_size, spread
from marl_parallel.core.backend import usable_cpus
from marl_parallel.core.files import replaced_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "process": "#2463a8", "thread": "#e08a1e", "serial": "#7a9a3a", "ray": "#a23b72", "hybrid": "#3f8f8b"
}  # fmt: skip
GREY = "#555555"
PATCH = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
FORMATS = (".png", ".svg", ".pdf")
LINE_EVERY_S = 30.0
IN_TURNS = "in turns"
_RELIABLE = 1 / 3  # the greatest difference between rounds of one setting, as a share of the fastest round
PLOT_LABEL = "environment steps per second (small: µs per step)"
_DISTRIBUTIONS = ("numpy", "gymnasium", "pettingzoo")
_PATTERNS = {STEP: "", ASYNC: "////", measure.PETTINGZOO: "....", measure.GYMNASIUM: "xxxx"}


def machine(distributions: tuple[str, ...] = ()) -> dict[str, Any]:
    """Describe this machine, with the versions of this package, `_DISTRIBUTIONS` and more installed distributions."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"^model name.*?:(.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else None
    versions = {"marl-parallel": __version__} | {
        name: next((one.version for one in installed(name=name)), None)
        for name in dict.fromkeys((*_DISTRIBUTIONS, *distributions))
    }
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cpus": usable_cpus(),
        "load": round(psutil.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def in_one_line(described: dict[str, Any]) -> str:
    """A machine's description as a line of text."""
    versions = ", ".join(f"{name} {number}" for name, number in described["versions"].items() if number)
    load = f", load {described['load']:.1f} at the start" if "load" in described else ""
    return (
        f"{described['cpu']}, {described['cpus']} CPUs{load}; {described['system']}; "
        f"Python {described['python']}, {versions}; {described['date']}"
    )


@dataclass(frozen=True)
class Report:
    """Measurements, grouped by environment with its plain loop first; the machine and the settings of the run."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    measurements: list[Measurement]

    def tables(self) -> list[list[Measurement]]:
        """The measurements of each environment and number of environments, in their order."""
        grouped = itertools.groupby(self.measurements, key=lambda one: (one.environment, one.num_envs))
        return [list(group) for _, group in grouped]


@contextmanager
def progress(total: int, description: str = "measuring") -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error; yields the function to call before each turn, with a text.

    If standard error is not a terminal but, for example, a log file, a line is printed at most every `LINE_EVERY_S`
    seconds. Bar and lines are written between turns only, so that no thread runs during a measurement.
    """
    console, latest = Console(stderr=True), time.monotonic()
    with Progress(console=console, auto_refresh=False, transient=True, disable=not console.is_terminal) as bar:
        task, done = bar.add_task(description, total=total), itertools.count()

        def on_turn(turn: str) -> None:
            nonlocal latest
            completed = next(done)
            bar.update(task, completed=completed, description=f"{description} {escape(turn)}", refresh=True)
            if not console.is_terminal and time.monotonic() - latest >= LINE_EVERY_S:
                latest = time.monotonic()
                print(f"{description} {turn} ({completed} of {total} done)", file=sys.stderr, flush=True)

        yield on_turn


def show(report: Report) -> None:
    """Print a table for each environment, and the machine."""
    console = _wide_console()
    for measurements in report.tables():
        loop = measurements[0]
        table = _table(f"{loop.environment}, {loop.num_envs} environments")
        table.add_column()
        for heading in ("steps/s", "± %", "µs/step", "x loop", "efficiency"):
            table.add_column(heading, justify="right")
        for one in measurements:
            is_loop = one.backend == LOOP
            speed, deviation = f"{one.steps_per_second:,.0f}", f"{100 * one.spread:.0f}"
            ratios = f"{one.speedup:.2f}", "" if is_loop else f"{one.efficiency:.2f}"
            table.add_row(str(one.contender), speed, deviation, in_microseconds(one), *ratios, end_section=is_loop)
        console.print(table)
    console.print(f"[dim]{escape(in_one_line(report.machine))}", highlight=False)


def _table(title: str, **options: Any) -> Table:
    return Table(title=escape(title), title_justify="left", title_style="bold", **options)


def in_microseconds(measurement: Measurement) -> str:
    """Wall time per environment step, in as many digits as are significant."""
    microseconds = measurement.microseconds_per_step
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


_TABLE_WIDTH = 110


def _wide_console() -> Console:
    """A console that does not shorten tables: if they are wider than the terminal, it breaks their lines."""
    return Console(width=max(Console().width, _TABLE_WIDTH))


def show_tune(result: dict[str, Any]) -> None:
    """Print a `tune_result`: the settings, the fastest first, the comparison, the advice and the line to paste."""
    console, best, pays_off = _wide_console(), result["best"], result["pays_off"]
    proposes = pays_off and result["reliable"]
    table = _table(result["environment"], box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("workers", "per worker", "environments", "by", "steps/s", "± %", "rounds", "memory", ""):
        table.add_column(heading, justify="left" if heading in ("by", "") else "right", no_wrap=True)
    for trial in result["trials"]:
        remark, style = ("", None) if trial["fits"] else ("too large", "dim")
        if trial == best:
            remark, style = "proposed" if proposes else "fastest in the search", "bold green"
        speed = _speed(trial["rounds"])
        table.add_row(*_counts_and_way(trial), *speed, in_size(trial["memory"]), remark, style=style)
    table.add_section()
    table.add_row(*_counts_and_way(best), *_speed(result["in_turns"][measure.WORKERS]), "", IN_TURNS)
    for name in (measure.SERIAL, measure.PLAIN_LOOP):
        table.add_row("", "", str(best["envs_per_worker"]), name, *_speed(result["in_turns"][name]), "", IN_TURNS)
    console.print(table)
    console.print(f"[dim]{escape(in_one_line(result['machine']))}", highlight=False)
    style = None if proposes else "bold yellow"
    console.print(f"\n{result['advice']}", style=style, markup=False, highlight=False, soft_wrap=True)
    if result["reliable"]:
        console.print(result["code"], markup=False, highlight=False, soft_wrap=True)


def _counts_and_way(trial: dict[str, Any]) -> list[str]:
    counts = [str(trial[name]) for name in ("num_workers", "envs_per_worker", "num_envs")]
    return [*counts, "send, recv" if trial["way"] == ASYNC else "step"]


def next_after_bench(report: Report, environment: str) -> str:
    """What to do next: pass the arguments of the fastest contender, or keep the plain loop."""
    loop, *others = report.measurements
    best = max(others, key=lambda one: one.speedup)
    if best.speedup <= 1:
        return "use a plain loop for this simulator: nothing here was faster"
    if best.speedup - 1 <= max(loop.spread, best.spread):
        return "measure again with --seconds 5 on an idle machine: the rounds differ by more than the speed-up"
    arguments = f'backend="{best.backend}"' + (f", num_workers={best.workers}" if best.backend != "serial" else "")
    named = "make" if best.way in measure.FACADES else "ParallelEnv"
    arguments += f', facade="{best.way}"' if best.way in measure.FACADES else ""
    way = " and step by send and recv" if best.way == ASYNC else ""
    return (
        f"pass {arguments} to {named}{way} ({best.speedup:.2f} times a plain loop), "
        f"or run marl-parallel tune {shlex.quote(environment)} to find the number of environments, too"
    )


def next_after_tune(result: dict[str, Any]) -> str:
    """What to do next with a `tune_result`."""
    if not result["reliable"]:
        return f"run marl-parallel tune {shlex.quote(result['environment'])} again on an idle machine, with --seconds 5"
    lines = "lines" if "\n" in result["code"] else "line"
    return f"copy the {lines} above into your program"


def _speed(rounds: Sequence[float]) -> tuple[str, str, str]:
    deviation = f"{100 * spread(rounds):.0f}" if len(rounds) > 1 else ""
    return f"{statistics.median(rounds):,.0f}", deviation, f"{len(rounds)}"


def tune_result(
    environment: str,
    env_kwargs: dict[str, Any],
    best: Trial,
    trials: Sequence[Trial],
    in_turns: dict[str, list[float]],
    machine: dict[str, Any],
) -> dict[str, Any]:
    """The measurements of `tune`, the fastest trials first, and its proposal, in values that JSON has.

    `machine` is what `machine()` returned before the measurements. If they are not `reliable`, `advice` says why.
    """
    loop, serial, workers = (
        statistics.median(in_turns[name]) for name in (measure.PLAIN_LOOP, measure.SERIAL, measure.WORKERS)
    )
    doubts = _doubts(best, in_turns, machine)
    pays_off, setting = workers > loop, best.setting
    arguments = [
        json.dumps(environment),  # quoted, also with the backslashes of Windows
        f"num_envs={setting.num_envs}",
        *([f"env_kwargs={env_kwargs!r}"] if env_kwargs else []),
    ]
    figures = (
        f"In rounds that took turns, a plain loop reaches {loop:,.0f} steps/s, backend='serial' {serial:,.0f} and the "
        f"fastest setting {workers:,.0f} (in the search before: {best.steps_per_second:,.0f})."
    )
    if doubts:
        advice = (
            f"The measurement is not reliable, so nothing is proposed: {'; '.join(doubts)}. {figures} "
            "Measure again on an idle machine, with longer rounds, such as --seconds 5."
        )
    else:
        if pays_off:
            advice = f"{workers / loop:.2f} times the speed of a plain loop. {figures}"
        else:
            faster = "a plain loop or backend='serial' is" if serial > workers else "a plain loop is"
            advice = f"Do not parallelise this simulator: {faster} faster. {figures}"
        noise = max(measure.spread(in_turns[name]) for name in (measure.PLAIN_LOOP, measure.WORKERS))
        if abs(workers / loop - 1) < noise:
            advice += " The rounds differ by more than that: measure again with more --seconds, on an idle machine."
    arguments.append(f"num_workers={setting.num_workers}" if pays_off else 'backend="serial"')
    code = f"env = marl_parallel.make({', '.join(arguments)})"
    if pays_off and setting.way == ASYNC:
        half = max(1, setting.num_envs // 2)
        code += f"\nenv.reset_async()  # then repeat: batch = env.recv({half}); env.send(actions, batch.env_ids)"
    return {
        "environment": environment,
        "env_kwargs": env_kwargs,
        "best": best.as_json(),
        "plain_loop": loop,
        "serial": serial,
        "pays_off": pays_off,
        "reliable": not doubts,
        "advice": advice,
        "code": code,
        "trials": [one.as_json() for one in sorted(trials, key=lambda one: (not one.fits, -one.steps_per_second))],
        "in_turns": in_turns,
        "machine": machine,
    }


def _doubts(best: Trial, in_turns: Mapping[str, Sequence[float]], machine: Mapping[str, Any]) -> list[str]:
    """Why the measurements of `tune` are not reliable, as clauses; none if they are."""
    doubts = []
    if machine["load"] > machine["cpus"]:
        doubts.append(f"the load was {machine['load']:.1f} at the start, on {machine['cpus']} CPUs")
    rounds = {"the fastest setting in the search": best.rounds, **in_turns}
    rounds["the fastest setting in turns"] = rounds.pop(measure.WORKERS)
    differing = [name for name, rates in rounds.items() if 1 - min(rates) / max(rates) > _RELIABLE]
    if differing:
        doubts.append(f"rounds of the same setting differ by more than a third ({', '.join(differing)})")
    searched, again = best.steps_per_second, statistics.median(in_turns[measure.WORKERS])
    if 1 - min(searched, again) / max(searched, again) > _RELIABLE:
        doubts.append(
            f"the fastest setting reached {searched:,.0f} steps/s in the search, but {again:,.0f} when it took "
            "turns with a plain loop"
        )
    return doubts


# -- in files ----------------------------------------------------------------------------------------------------------


def write_json(report: Any, path: Path) -> None:
    """Save all fields of a dataclass, such as a `Report`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as file:
        file.write(json.dumps(asdict(report), indent=2) + "\n")


def read_json(path: Path) -> Report:
    """Read a report that `write_json` saved."""
    saved = json.loads(path.read_text())
    return Report(saved["machine"], saved["settings"], [Measurement(**values) for values in saved["measurements"]])


def write_csv(report: Report, path: Path) -> None:
    """Save one line for each measurement, without its `rounds`."""
    write_rows(report.measurements, path)


def write_rows(results: Sequence[Any], path: Path) -> None:
    """Save one line for each dataclass, all of one class, without its `rounds`."""
    names = [field.name for field in fields(results[0]) if field.name != "rounds"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path, newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for one in results:
            values = [getattr(one, name) for name in names]
            writer.writerow([float(f"{value:.6g}") if isinstance(value, float) else value for value in values])


def save_plot(report: Report, path: Path) -> None:
    """Draw the first of the report's tables into a file of one of `FORMATS`."""
    from matplotlib.figure import Figure  # here: it takes half a second to import

    figure = Figure(figsize=(6.0, 4.2), layout="constrained")
    panel = figure.subplots()
    draw(panel, report.tables()[0], report.machine["cpus"])
    legend = dict(zip(*reversed(panel.get_legend_handles_labels())))  # each label once
    columns = min(len(legend), 4)
    figure.legend([*legend.values()], [*legend], loc="outside upper center", ncols=columns, fontsize=8, frameon=False)
    figure.supylabel(PLOT_LABEL, fontsize=9)
    figure.supxlabel(in_one_line(report.machine), x=0.995, ha="right", fontsize=5, color=GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path, "wb") as file:
        figure.savefig(file, dpi=150, format=path.suffix.lower().removeprefix("."))


def draw(panel: Axes, measurements: Sequence[Measurement], cpus: int) -> None:
    """Draw throughput in bars, one group for each number of workers, with a dashed line over each group: the ideal."""
    from matplotlib.ticker import EngFormatter

    loop, *others = measurements
    counts = sorted({m.workers for m in others})
    panel.axhline(loop.steps_per_second, color=GREY, linewidth=1, label="plain loop")
    width = 0.8 / max(len({m.kind for m in others}), 2)
    for position, count in enumerate(counts):
        group = [m for m in others if m.workers == count]
        for index, one in enumerate(group):
            bar = panel.bar(
                position + (index - (len(group) - 1) / 2) * width,
                one.steps_per_second,
                0.92 * width,
                yerr=one.spread * one.steps_per_second,
                error_kw={"elinewidth": 0.8, "ecolor": GREY},
                label=one.kind,
                color=COLOURS[one.backend],
                hatch=_PATTERNS[one.way],
                edgecolor="white",
            )
            panel.bar_label(bar, [in_microseconds(one)], fontsize=6, padding=2, color=GREY, bbox=PATCH)
        ideal, ends = loop.steps_per_second * min(count, cpus), (position - 0.46, position + 0.46)
        panel.hlines(ideal, *ends, colors="black", linestyles="dashed", linewidth=1, label=f"ideal on {cpus} CPUs")
    panel.set_xticks(range(len(counts)), [str(count) for count in counts])
    panel.set_title(f"{loop.environment}\n{loop.num_envs} environments", fontsize=9)
    panel.set_xlabel("workers", fontsize=8)
    panel.yaxis.set_major_formatter(EngFormatter(sep=""))
    tidy(panel)


def tidy(panel: Axes) -> None:
    """Start bars at zero and draw few lines."""
    panel.set_ylim(bottom=0)
    panel.tick_params(labelsize=8, length=0)
    panel.grid(axis="y", linewidth=0.4, alpha=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
