"""The picture of a report: throughput over the number of workers, one panel for each environment."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from marl_parallel.cli.machine import in_one_line
from marl_parallel.cli.measure import LOOP, Measurement
from marl_parallel.cli.report import Report, in_microseconds

COLOURS = {"process": "#2463a8", "thread": "#e08a1e", "serial": "#7a9a3a"}
OTHER_COLOURS = ("#a23b72", "#5c5470", "#2a9d8f")
GREY = "#555555"
_PATTERNS = ("", "////", "....", "xxxx")
_LEGEND_ENTRY_IN = 1.5
PATCH = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
COLUMNS = 4
FORMATS = (".png", ".svg", ".pdf")


def save_plot(report: Report, path: Path) -> None:
    """Draw all environments of a report side by side and save the picture; its format follows the path's suffix."""
    panels = report.tables()
    columns = min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    styles = _styles(report.measurements)
    width = max(3.2 * columns, 6.0)
    figure = framed(width, 2.9 * rows + 0.8 + 0.2 * (-(-(len(styles) + 2) // _legend_columns(width))))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, measurements in zip(axes, panels, strict=False):
        _draw(panel, measurements, report.machine["cpus"], styles)
    for unused in axes[len(panels) :]:
        unused.set_visible(False)
    figure.supylabel("environment steps per second (small: µs per step)", fontsize=9)
    finish(figure, report.machine, path)


def framed(width: float, height: float) -> Figure:
    """An empty picture of so many inches, with room for what `finish` adds."""
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(rect=(0, 0.2 / height, 1, 1 - 0.2 / height)))


def finish(figure: Figure, machine: dict[str, Any], path: Path) -> None:
    """Add the legend, and at the foot on what it was measured; save it."""
    _legend(figure)
    footer = {"ha": "right", "va": "bottom", "fontsize": 5, "color": GREY}
    figure.text(0.995, 0.05 / figure.get_figheight(), in_one_line(machine), footer)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def tidy(panel: Axes) -> None:
    """Bars from zero, few lines."""
    panel.set_ylim(bottom=0)
    panel.tick_params(labelsize=8, length=0)
    panel.grid(axis="y", linewidth=0.4, alpha=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _legend(figure: Figure) -> None:
    """One for all panels: whatever is labelled in any of them, once."""
    entries: dict[str, Artist] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside upper center",
        ncols=min(len(entries), _legend_columns(figure.get_figwidth())),
        fontsize=8,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.2,
    )


def _legend_columns(width: float) -> int:
    return max(int(width / _LEGEND_ENTRY_IN), 1)


def _styles(measurements: Sequence[Measurement]) -> dict[str, dict[str, Any]]:
    """How bars of each kind are drawn: the colour says which backend, the pattern which way of stepping."""
    kinds = [*dict.fromkeys(m.kind for m in measurements if m.backend != LOOP)]
    backends, ways = ([*dict.fromkeys(kind.partition(", ")[part] for kind in kinds)] for part in (0, 2))
    others = itertools.cycle(OTHER_COLOURS)
    colours = {backend: COLOURS.get(backend) or next(others) for backend in backends}
    patterns = dict(zip(ways, itertools.cycle(_PATTERNS)))
    return {
        kind: {"color": colours[backend], "hatch": patterns[way], "edgecolor": "white"}
        for kind in kinds
        for backend, _, way in [kind.partition(", ")]
    }


def _draw(panel: Axes, measurements: Sequence[Measurement], cpus: int, styles: dict[str, dict[str, Any]]) -> None:
    """Bars in groups, one group for each number of workers; the ideal is a dashed line over each group."""
    loop = next(m for m in measurements if m.backend == LOOP)
    counts = sorted({m.workers for m in measurements if m.backend != LOOP})
    panel.axhline(loop.steps_per_second, color=GREY, linewidth=1, label="plain loop")
    for position, count in enumerate(counts):
        group = [m for m in measurements if m.backend != LOOP and m.workers == count]
        width = 0.8 / max(len(styles), 2)
        for place, one in enumerate(group):
            bar = panel.bar(
                position + (place - (len(group) - 1) / 2) * width,
                one.steps_per_second,
                0.92 * width,
                yerr=one.spread * one.steps_per_second,
                error_kw={"elinewidth": 0.8, "ecolor": GREY},
                label=one.kind,
                **styles[one.kind],
            )
            panel.bar_label(bar, [in_microseconds(one)], fontsize=6, padding=2, color=GREY, bbox=PATCH)
        ideal = loop.steps_per_second * min(count, cpus)
        panel.hlines(
            ideal,
            position - 0.46,
            position + 0.46,
            colors="black",
            linestyles="dashed",
            linewidth=1,
            label=f"ideal on {cpus} CPUs",
        )
    panel.set_xticks(range(len(counts)), [str(count) for count in counts])
    panel.set_title(f"{loop.environment}\n{loop.num_envs} copies", fontsize=9)
    panel.set_xlabel("workers", fontsize=8)
    panel.yaxis.set_major_formatter(FuncFormatter(_short))
    tidy(panel)


def _short(value: float, _: object) -> str:
    for unit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{suffix}"
    return f"{value:g}"
