"""Summarise the saved results of the other programs: a paragraph, a picture, and what more CPUs would give.

    python benchmarks/summary.py                 draws results/summary.png; measures nothing
    python benchmarks/summary.py --markdown      the paragraph and the picture for docs/performance.md
    python benchmarks/summary.py --extrapolated  the table for more CPUs, computed from results/cpu_times.json

The results are those of `compare_workers.py`, `async_stepping.py`, `collect_rollouts.py`, `compare_peers.py` and
`cpu_times.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from frame import RESULTS, AsMarkdown, Output, Page, Picture, Table, markdown
from pictures import OTHERS, finish, framed, plain

from marl_parallel.cli.report import COLOURS, in_one_line

NAME = "summary"
SHOWN = {
    "simple_spread_v3": "MPE2 simple_spread",
    "synthetic 20 µs, 3 x 18": "20 µs a step",
    "synthetic 50 µs, 3 x 18": "50 µs a step",
    "synthetic 50 µs, 1 of 3 dead": "50 µs, 1 of 3 agents dead",
    "synthetic 200 µs, 3 x 18": "200 µs a step",
}
"""The environments of `compare_workers.py` in the picture."""
DYING, SPREAD = "synthetic 50 µs, 1 of 3 dead", "simple_spread_v3"
"""The environments of `compare_peers.py` in the picture."""
LOOPS = ("plain loop", "plain loops side by side")
STEPS_US, CPUS, ENVS_EACH = (50, 100, 200, 1_000), (2, 4, 8, 16), 8
"""Of the table for more CPUs: microseconds of a step, workers, and environments of each worker."""


class SpeedUp(NamedTuple):
    """Throughput relative to a plain loop: of two workers, of hybrid, and of two plain loops that meet at a barrier."""

    process: float
    hybrid: float
    limit: float


def read(name: str) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return saved


def speed_ups() -> dict[str, SpeedUp]:
    """By environment of `SHOWN`."""
    rows = [one for one in read("compare_workers")["measurements"] if one["way"] == "step" and one["num_envs"] == 8]
    by_name: dict[str, dict[tuple[str, int], float]] = {}
    for one in rows:
        by_name.setdefault(one["environment"], {})[one["backend"], one["workers"]] = one["speedup"]
    return {
        name: SpeedUp(rates["process", 2], rates["hybrid", 2], rates["plain loops with a barrier", 2])
        for name, rates in by_name.items()
        if name in SHOWN
    }


def gains_over_peers(environment: str) -> dict[str, float]:
    """How many times as fast this package is, by other package."""
    rows = [one for one in read("compare_peers")["results"] if one["environment"] == environment]
    return {one["against"]: one["gain"] for one in rows if one["against"] not in LOOPS}


def async_gains() -> tuple[float, float, float]:
    """Of asynchronous stepping in two workers: uneven steps; with a policy, simulators that compute, that wait."""
    rows = [one for one in read("async_stepping")["results"] if one["workers"] == 2 and one["way"] == "async"]
    uneven = next(one["gain"] for one in rows if one["benchmark"] == "uneven simulators")
    computes, waits = (
        next(one["gain"] for one in rows if one["simulators"] == f"simulators {what}") for what in ("compute", "wait")
    )
    return uneven, computes, waits


def paragraph() -> str:
    found, (uneven, computes, waits) = speed_ups(), async_gains()
    rollouts = {one["contender"]: one for one in read("collect_rollouts")["results"]}
    with_policy = rollouts["Rollout"]["steps_per_second"] / rollouts["plain loops side by side"]["steps_per_second"]
    collector = 1 / rollouts["TorchRL Collector"]["ratio"]
    peers = [gain for environment in (SPREAD, DYING) for gain in gains_over_peers(environment).values()]
    shown = [found[name] for name in SHOWN]
    labels = [label.replace("MPE2 ", "MPE2's ").replace(" a step", "") for label in SHOWN.values()]
    process, hybrid = ([f"{getattr(one, name):.2f} times" for one in shown] for name in ("process", "hybrid"))
    limits = sorted(one.limit for one in shown)
    sentences = (
        "On two CPUs, two workers with eight environments are faster than a plain loop:",
        f"{', '.join(f'{value} ({label})' for label, value in zip(labels, process, strict=True))}.",
        f'With `backend="hybrid"`, these are {", ".join(hybrid)}.',
        "The limit of `step`, two plain loops that meet at a barrier after each batch, is",
        f"{limits[0]:.2f} to {limits[-1]:.2f} times.",
        f"Asynchronous stepping gains {uneven:.2f} times where steps are uneven.",
        f"With a policy that takes as long as the simulators, it gains {waits:.2f} times where simulators wait, and",
        f"{computes:.2f} times where they compute.",
        f"`Rollout` with a policy of PyTorch reaches {with_policy:.2f} of two plain loops without a policy,",
        f"and is {collector:.1f} times as fast as TorchRL's collector.",
        f"Other packages take {min(peers):.1f} to {max(peers):.0f} times as long for the simulators on the right.",
    )
    return " ".join(sentences)


def save_picture(path: Path) -> None:
    """Left: speed-ups with the limit of each; right: how many times as fast this package is as others."""
    figure = framed(9, 4.6)
    speed_panel, peer_panel = figure.subplots(1, 2, width_ratios=[1, 1.15])
    found = speed_ups()
    names = [name for name in SHOWN if name in found]
    for place, name in enumerate(names):
        speed_up = found[name]
        for offset, value, backend in ((-0.2, speed_up.process, "process"), (0.2, speed_up.hybrid, "hybrid")):
            label = {"process": "two workers", "hybrid": "hybrid"}[backend] if place == 0 else None
            bar = speed_panel.barh(place + offset, value, 0.36, color=COLOURS[backend], label=label)
            speed_panel.bar_label(bar, [f"{value:.2f}"], fontsize=7, padding=-22, color="white")
        label = "limit: two loops with a barrier" if place == 0 else None
        speed_panel.plot([speed_up.limit] * 2, [place - 0.42, place + 0.42], "k:", linewidth=1.2, label=label)
    speed_panel.axvline(1, color="black", linewidth=0.8)
    speed_panel.set_yticks(range(len(names)), [SHOWN[name] for name in names], fontsize=8)
    speed_panel.invert_yaxis()
    speed_panel.set_xlabel("times the throughput of a plain loop", fontsize=8)
    gains = {environment: gains_over_peers(environment) for environment in (SPREAD, DYING)}
    packages = list(dict.fromkeys(name for speed_up in gains.values() for name in speed_up))
    for offset, environment, colour in ((-0.2, SPREAD, OTHERS), (0.2, DYING, "#5c5470")):
        shown = [place for place, name in enumerate(packages) if name in gains[environment]]
        values = [gains[environment][packages[place]] for place in shown]
        places = [place + offset for place in shown]
        bars = peer_panel.barh(places, values, 0.36, color=colour, label=SHOWN[environment])
        peer_panel.bar_label(bars, [f"{value:.1f}" for value in values], fontsize=7, padding=2)
    peer_panel.set_xscale("log")
    peer_panel.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    peer_panel.set_xticks([], minor=True)
    peer_panel.axvline(1, color="black", linewidth=0.8)
    peer_panel.set_yticks(range(len(packages)), packages, fontsize=8)
    peer_panel.invert_yaxis()
    peer_panel.set_xlabel("times as fast as the other package", fontsize=8)
    peer_panel.margins(x=0.15)
    for panel in (speed_panel, peer_panel):
        plain(panel, "x")
    finish(figure, in_one_line(read("compare_workers")["machine"]), path)


# -- more CPUs ---------------------------------------------------------------------------------------------------------


class Costs(NamedTuple):
    """CPU time that the package adds to a batch, in microseconds: a constant, and one for each environment."""

    caller: tuple[float, float]
    worker: tuple[float, float]

    def speed_up(self, step_us: float, workers: int, envs_each: int = ENVS_EACH) -> float:
        """Throughput relative to a plain loop, if each worker has a CPU and the caller waits for all of them."""
        num_envs = workers * envs_each
        caller = self.caller[0] + self.caller[1] * num_envs
        worker = self.worker[0] + (self.worker[1] + step_us) * envs_each
        return num_envs * step_us / (caller + worker)


def costs() -> Costs:
    """The lines through the results of `cpu_times.py` for dicts with 8 and with 64 environments in two workers."""
    rows = {one["num_envs"]: one for one in read("cpu_times")["results"] if _is_plain(one)}
    few, many = rows[8], rows[64]

    def line(at_few: float, at_many: float, x_few: int, x_many: int) -> tuple[float, float]:
        each = (at_many - at_few) / (x_many - x_few)
        return at_few - each * x_few, each

    def of_worker(row: Mapping[str, Any]) -> float:
        added: float = (row["workers_us"] - row["simulator_us"]) * row["num_envs"] / 2
        return added

    return Costs(line(few["caller_us"], many["caller_us"], 8, 64), line(of_worker(few), of_worker(many), 4, 32))


def _is_plain(one: Mapping[str, Any]) -> bool:
    return bool(one["environment"] == "3 x 18" and one["way"] == "step")


def extrapolated() -> Page:
    """A table, and how it is computed."""
    found, machine = costs(), read("cpu_times")["machine"]
    rows = [[f"{step:,}", *(f"{found.speed_up(step, cpus):.1f}" for cpus in CPUS)] for step in STEPS_US]
    measured = speed_ups()
    two = [(step, name) for step in STEPS_US if (name := f"synthetic {step} µs, 3 x 18") in measured]
    sentences = (
        "Times the throughput of a plain loop, with dicts, as many workers as CPUs, and",
        f"{ENVS_EACH} environments for each worker. **Computed, not measured**: a batch takes",
        f"{found.worker[0]:.0f} µs + {ENVS_EACH} x (step + {found.worker[1]:.1f} µs) in each worker, then",
        f"{found.caller[0]:.0f} µs + {found.caller[1]:.1f} µs for each environment in the caller. These are",
        "the CPU times of the package in the table of CPU times, with 8 and 64 environments in two workers.",
        "Two workers with 4 environments each:",
        "; ".join(
            f"{found.speed_up(step, 2, 4):.2f} computed and {measured[name].process:.2f} measured at {step} µs"
            for step, name in two
        ),
        "(measured by another program of the run). Limits of the machine, such as its memory, are not in it.",
    )
    table = Table(["µs a step", *(f"{cpus} CPUs" for cpus in CPUS)], rows, "")
    return table, f"{' '.join(sentences)} {in_one_line(machine)}."


# -- the command -------------------------------------------------------------------------------------------------------


def main(
    output: Output = None,
    as_markdown: AsMarkdown = False,
    more_cpus: Annotated[bool, typer.Option("--extrapolated", help="Print the table for more CPUs.")] = False,
) -> None:
    """Summarise saved results."""
    if more_cpus:
        print(markdown(extrapolated()))
    elif as_markdown:
        picture = Picture("Two workers compared with a plain loop, and with other packages", NAME)
        print(markdown([paragraph(), picture]))
    else:
        path = (output or RESULTS) / f"{NAME}.png"
        save_picture(path)
        print(path)


if __name__ == "__main__":
    typer.run(main)
