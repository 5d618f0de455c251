"""Draw a picture of a trace, for use without a browser.

    python benchmarks/draw_trace.py run.json picture.png --first 20 --milliseconds 8

The file is written by `ParallelEnv(trace="run.json")`; https://ui.perfetto.dev shows it with all details.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.patches import Patch
from pictures import OTHER_COLOURS, framed, plain

from marl_parallel.cli.report import COLOURS

KINDS = {
    "step": COLOURS["process"],
    "reset": COLOURS["thread"],
    "transport": OTHER_COLOURS[0],
    "waiting": "#dddddd",
    "write actions": COLOURS["serial"],
    "read results": OTHER_COLOURS[2],
}


def colour_of(name: str) -> str:
    return KINDS.get(name.partition(" for ")[0], KINDS.get(name, "#999999"))


def main(
    trace: Annotated[Path, typer.Argument(help="The file of the trace.")],
    picture: Annotated[Path, typer.Argument(help="PNG, SVG or PDF.")],
    first: Annotated[float, typer.Option(help="Where to start, in milliseconds.")] = 0.0,
    milliseconds: Annotated[float, typer.Option(min=0.001, help="How many milliseconds to show.")] = 10.0,
) -> None:
    """Draw some milliseconds of a trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    figure = framed(9.0, 0.9 + 0.45 * len(lanes))
    panel = figure.subplots()
    shown: dict[str, Any] = {}
    for event in events:
        if event["ph"] == "X" and event["ts"] / 1e3 < first + milliseconds and event["ts"] + event["dur"] > 1e3 * first:
            colour = colour_of(event["name"])
            panel.barh(event["tid"], event["dur"] / 1e3, 0.8, event["ts"] / 1e3 - first, color=colour, linewidth=0)
            shown.setdefault(event["name"].partition(" for ")[0], colour)
    panel.set_yticks([*lanes], [*lanes.values()], fontsize=7)
    panel.invert_yaxis()
    panel.set_xlim(0, milliseconds)
    panel.set_xlabel("milliseconds", fontsize=8)
    plain(panel, "x")
    handles = [Patch(color=colour, label=name) for name, colour in shown.items()]
    panel.legend(handles=handles, fontsize=7, frameon=False, ncols=7, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    typer.run(main)
