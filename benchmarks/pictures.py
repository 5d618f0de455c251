"""Frames, legends and footers of pictures with several panels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_parallel.cli.report import GREY, in_one_line

if TYPE_CHECKING:  # matplotlib takes half a second to import
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

OTHER_COLOURS = ("#a23b72", "#5c5470", "#2a9d8f")
LEGEND_ENTRY_IN = 1.5


def in_docs(title: str, name: str) -> str:
    """Markdown of a saved picture, for a page of `docs`: a click shows it in full size."""
    path = f"../benchmarks/results/{name}.png"
    return f"[![{title}]({path})]({path})"


def framed(width: float, height: float) -> Figure:
    """An empty picture of so many inches, with room for the machine that `finish` adds."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(rect=(0, 0.2 / height, 1, 1 - 0.2 / height)))


def finish(figure: Figure, machine: dict[str, Any], path: Path) -> None:
    """Add the legend, one for all panels, and the machine at the foot; save the picture."""
    entries: dict[str, Artist] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside upper center",
        ncols=min(len(entries), max(int(figure.get_figwidth() / LEGEND_ENTRY_IN), 1)),
        fontsize=8,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.2,
    )
    footer = {"ha": "right", "va": "bottom", "fontsize": 5, "color": GREY}
    figure.text(0.995, 0.05 / figure.get_figheight(), in_one_line(machine), footer)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
