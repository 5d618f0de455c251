"""Frames, legends and footers of pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from marl_parallel.cli.report import GREY

if TYPE_CHECKING:  # matplotlib takes half a second to import
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OTHER_COLOURS = ("#a23b72", "#5c5470", "#2a9d8f")
OTHERS = "#a9b2bc"
"""The colour of other packages."""
LEGEND_ENTRY_IN = 1.5


def framed(width: float, height: float) -> Figure:
    """An empty picture of so many inches, with room for the footer that `finish` adds."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(rect=(0, 0.2 / height, 1, 1 - 0.2 / height)))


def finish(figure: Figure, footer: str, path: Path) -> None:
    """Add the legend, one for all panels, and a footer, such as the machine; save the picture."""
    entries: dict[str, Artist] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
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
    style = {"ha": "right", "va": "bottom", "fontsize": 5, "color": GREY}
    figure.text(0.995, 0.05 / figure.get_figheight(), footer, style)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plain(panel: Axes, axis: Literal["x", "both"] = "both") -> None:
    """Small labels of one or both axes, and no lines at the top and the right."""
    panel.tick_params(axis=axis, labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
