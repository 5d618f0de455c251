"""Measure how throughput scales with Ray actors and environments per actor, and the driver's cost per actor.

    python benchmarks/ray_scaling.py              some five minutes; writes results/ray_scaling.*
    python benchmarks/ray_scaling.py --quick      half a minute; writes only where --output says so
    python benchmarks/ray_scaling.py --markdown   the section for the README, from the saved JSON

Simulators wait here instead of computing, so that more actors than CPUs behave like actors on many machines. The work
of the actors and of Ray is still done by the CPUs of this machine, so several machines can only be faster.

A batch of `k` environments in each of `A` actors takes `k x s + c0 + c1 x A` with steps of `s`: the simulators' time,
the constant cost of a batch, and the cost per actor. The constants are fitted to the measurements. A simulator waits
somewhat longer than requested; `s` is the time that it takes.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import typer
from options import AsMarkdown, Output, Quick, Repeats, Seconds
from pictures import OTHER_COLOURS, framed
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from synthetic import Synthetic

from marl_parallel import ParallelEnv
from marl_parallel.cli.measure import draw_actions, spread
from marl_parallel.cli.report import (
    COLOURS,
    GREY,
    in_one_line,
    machine,
    progress,
    write_json,
    write_rows,
)

RESULTS = Path(__file__).parent / "results"
NAME = "ray_scaling"
STEP_MS = (0, 1, 5, 20)
PACKINGS = ((1, 8), (2, 1), (2, 4), (2, 8), (4, 8), (8, 8), (16, 8))
"""Actors, and environments in each."""

K = 8
CPU_SHARE = 0.05
"""CPUs that each actor requests from Ray: actors mostly wait."""

PEER_ENVS = 16
WAITING_ACTORS, WAITING_ENVS, WAITING_MS = 4, 32, 5
GOOD = 0.9
OURS, PLAIN = "marl_parallel", "one Ray actor per environment"


class Waiting(Synthetic):
    """Waits in each step for the time that `be_slow` has set."""

    def __init__(self) -> None:
        super().__init__(waits=True)
        self._costs = itertools.repeat(0)

    def be_slow(self, step_ms: float) -> None:
        self._costs = itertools.repeat(round(1000 * step_ms))


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """The measurements of one contender and packing.

    Attributes:
        contender: `OURS` or `PLAIN`.
        actors: Number of actors.
        envs_each: Number of environments in each.
        step_ms: The requested waiting time of a step.
        inside_ms: Time that the simulators of an actor take for a batch; None if not known.
        batch_ms: Wall time of a batch: the median of the rounds.
        spread: Half the distance between the best and the worst round, as a share of the median.
        steps_per_second: Environment steps per second.
        efficiency: The share of the time in which simulators step; None for steps of 0 ms and for `PLAIN`.
        driver_us: CPU time of the driver's process per actor and batch.
        rounds: Milliseconds of a batch in each round.
    """

    contender: str
    actors: int
    envs_each: int
    step_ms: float
    inside_ms: float | None
    batch_ms: float
    spread: float
    steps_per_second: float
    efficiency: float | None
    driver_us: float
    rounds: list[float]


@dataclass(frozen=True)
class Report:
    """All measurements, and the constants fitted to them.

    Attributes:
        machine: The machine and versions.
        settings: Seconds and number of rounds.
        measured: The measurements, in order.
        once_us: c0, the constant cost of a batch in microseconds.
        each_us: c1, the cost per actor and batch in microseconds.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    once_us: float = 0.0
    each_us: float = 0.0

    def efficiency(self, actors: float, envs_each: int, step_ms: float) -> float:
        """The share of the time in which simulators step, by the formula."""
        inside = 1000 * step_ms * envs_each
        return inside / (inside + self.once_us + self.each_us * actors)

    def reach(self, envs_each: int, step_ms: float) -> int:
        """The most actors with which simulators step for at least `GOOD` of the time."""
        spare = 1000 * step_ms * envs_each * (1 / GOOD - 1)
        return max(int((spare - self.once_us) / self.each_us), 0)

    def of(self, contender: str, **values: Any) -> list[Measured]:
        """The measurements with these attributes."""
        return [
            one
            for one in self.measured
            if one.contender == contender and all(getattr(one, name) == value for name, value in values.items())
        ]


Step = Callable[[], object]


@contextmanager
def ours(actors: int, envs_each: int) -> Iterator[tuple[Step, ParallelEnv]]:
    from marl_parallel import RayBackend  # not needed to show saved results

    count = actors * envs_each
    with ParallelEnv([Waiting] * count, backend=RayBackend(num_cpus=CPU_SHARE), num_workers=actors) as env:
        env.reset()
        batches = itertools.cycle(draw_actions(dict(env.action_space.spaces), count))
        yield lambda: env.step(next(batches)), env


class Plain:
    """A first version with plain Ray: one actor per environment, dicts as arguments and results."""

    def __init__(self) -> None:
        self.env = Waiting()

    def reset(self, seed: int) -> Any:
        return self.env.reset(seed=seed)

    def step(self, actions: dict[str, Any]) -> Any:
        result = self.env.step(actions)
        if not self.env.agents:
            return (self.env.reset()[0], *result[1:])
        return result


@contextmanager
def plain(count: int) -> Iterator[Step]:
    import ray

    actors = [ray.remote(Plain).options(num_cpus=CPU_SHARE).remote() for _ in range(count)]
    try:
        ray.get([actor.reset.remote(seed) for seed, actor in enumerate(actors)])
        spaces = Waiting().action_spaces
        batches = itertools.cycle(draw_actions(spaces, count))
        yield lambda: ray.get([actor.step.remote(acts) for actor, acts in zip(actors, next(batches), strict=True)])
    finally:
        for actor in actors:
            ray.kill(actor)


class Round(NamedTuple):
    """Per batch: milliseconds of wall time, microseconds of this process's CPU time, milliseconds inside an actor."""

    wall: float
    cpu: float
    inside: float | None


def timed(step: Step, seconds: float, env: ParallelEnv | None = None) -> Round:
    inside = None if env is None else env.stats().simulator_s / env.num_workers
    count, cpu = 0, time.process_time()
    started = now = time.perf_counter()
    while now < started + seconds or not count:
        step()
        count += 1
        now = time.perf_counter()
    if env is not None and inside is not None:
        inside = 1e3 * (env.stats().simulator_s / env.num_workers - inside) / count
    return Round(1e3 * (now - started) / count, 1e6 * (time.process_time() - cpu) / count, inside)


def summary(contender: str, actors: int, envs_each: int, step_ms: float, rounds: Sequence[Round]) -> Measured:
    walls = [one.wall for one in rounds]
    batch_ms = statistics.median(walls)
    shares = [one.inside / one.wall for one in rounds if one.inside is not None]
    return Measured(
        contender,
        actors,
        envs_each,
        step_ms,
        statistics.median(one.inside for one in rounds if one.inside is not None) if shares else None,
        batch_ms,
        spread(walls),
        1e3 * actors * envs_each / batch_ms,
        statistics.median(shares) if step_ms and shares else None,
        statistics.median(one.cpu for one in rounds) / actors,
        walls,
    )


def run(packings: Sequence[tuple[int, int]], step_ms: Sequence[float], seconds: float, repeats: int) -> Report:
    described = machine(("ray",))
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    measured: list[Measured] = []
    try:
        with progress(len(packings) * len(step_ms) + 2) as on_turn:
            for actors, envs_each in packings:
                with ours(actors, envs_each) as (step, env):
                    for wait in step_ms:
                        on_turn(f"{actors} actors with {envs_each} environments, {wait} ms")
                        env.call("be_slow", wait)
                        timed(step, seconds / 4)
                        rounds = [timed(step, seconds, env) for _ in range(repeats)]
                        measured.append(summary(OURS, actors, envs_each, wait, rounds))
            on_turn("plain actors")
            measured += against_plain(seconds, repeats)
    finally:
        ray.shutdown()
    once, each = fitted([one for one in measured if one.contender == OURS])
    return Report(described, {"seconds": seconds, "repeats": repeats}, measured, once, each)


def against_plain(seconds: float, repeats: int) -> list[Measured]:
    """Measure steps of 0 ms in turns: 16 environments in two actors, and one plain actor for each environment."""
    with ExitStack() as stack:
        step, env = stack.enter_context(ours(2, PEER_ENVS // 2))
        both = {OURS: step, PLAIN: stack.enter_context(plain(PEER_ENVS))}
        rounds: dict[str, list[Round]] = {name: [] for name in both}
        for own in both.values():
            timed(own, seconds / 4)
        for _ in range(repeats):
            for name, own in both.items():
                rounds[name].append(timed(own, seconds, env if name == OURS else None))
    return [
        summary(OURS, 2, PEER_ENVS // 2, 0, rounds[OURS]),
        summary(PLAIN, PEER_ENVS, 1, 0, rounds[PLAIN]),
    ]


def fitted(measured: Sequence[Measured]) -> tuple[float, float]:
    """c0 and c1 by least squares, neither negative."""
    rest = np.array([1e3 * (one.batch_ms - (one.inside_ms or 0.0)) for one in measured])
    actors = np.array([float(one.actors) for one in measured])
    each, once = np.polyfit(actors, rest, 1)
    return max(float(once), 0.0), max(float(each), 1.0)


# -- showing -----------------------------------------------------------------------------------------------------------


def rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: a row for each packing, a column for each step time."""
    waits = list(dict.fromkeys(one.step_ms for one in report.of(OURS)))
    cells = {}
    for one in report.of(OURS):
        share = "" if one.efficiency is None else f" ({one.efficiency:.2f})"
        cells[one.actors, one.envs_each, one.step_ms] = f"{one.steps_per_second:,.0f}{share}"
    packings = list(dict.fromkeys((actors, envs) for actors, envs, _ in cells))
    return (
        ["actors x environments", *(f"{wait:g} ms" for wait in waits)],
        [[f"{a} x {k}", *(cells.get((a, k, wait), "") for wait in waits)] for a, k in packings],
    )


def notes(report: Report) -> list[str]:
    texts = [
        "Environment steps per second with `step`; in brackets, the share of the time in which simulators step "
        f"(simulators that wait; medians of {report.settings['repeats']} rounds of {report.settings['seconds']:g} s).",
        f"A batch takes `k·s + {report.once_us / 1000:.2f} ms + {report.each_us / 1000:.2f} ms·A` for `A` actors of "
        f"`k` environments with steps of `s`. With simulators that step for {100 * GOOD:.0f} % of the time, one driver "
        "serves "
        + ", ".join(f"{report.reach(K, wait)} actors at {wait:g} ms" for wait in STEP_MS if wait)
        + f" ({K} environments in each).",
    ]
    both = report.of(OURS, actors=2, envs_each=PEER_ENVS // 2, step_ms=0)[-1:], report.of(PLAIN)
    if all(both):
        own, other = (1e6 / one.steps_per_second for (one,) in both)
        texts.append(
            f"Steps of 0 ms, {PEER_ENVS} environments: {own:.0f} µs per environment step with 2 actors, "
            f"{other:.0f} µs with one plain Ray actor per environment and dicts: {other / own:.1f} times as much."
        )
    waiting = report.of(OURS, actors=WAITING_ACTORS, envs_each=WAITING_ENVS // WAITING_ACTORS, step_ms=WAITING_MS)
    if waiting:
        nominal = waiting[0].envs_each * WAITING_MS / waiting[0].batch_ms
        texts.append(
            f"{WAITING_ENVS} environments that wait {WAITING_MS} ms, in {WAITING_ACTORS} actors: "
            f"{waiting[0].efficiency:.2f} of the ideal ({nominal:.2f} counting only the requested wait). "
            "The driver's own CPU time is "
            f"{statistics.median(one.driver_us for one in report.of(OURS)):.0f} µs per actor and batch."
        )
    return [*texts, f"{in_one_line(report.machine)}."]


def show(report: Report) -> None:
    console, (headings, cells) = Console(), rows(report)
    shown = Table(box=SIMPLE_HEAD)
    for heading in headings:
        shown.add_column(heading, justify="right")
    for row in cells:
        shown.add_row(*row)
    console.print(shown)
    for note in notes(report):
        console.print(note, highlight=False, style="dim")


def markdown(report: Report) -> str:
    headings, cells = rows(report)
    lines = [f"| {' | '.join(headings)} |", "|---|" + "---:|" * (len(headings) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in cells]
    return "\n\n".join([f"![Scaling over Ray actors](benchmarks/results/{NAME}.png)", "\n".join(lines), *notes(report)])


def save_plot(report: Report, path: Path) -> None:
    """The share of the time in which simulators step, by number of actors: measured, and by the formula."""
    figure = framed(6.4, 3.8)
    panel = figure.subplots()
    waits = [wait for wait in dict.fromkeys(one.step_ms for one in report.of(OURS)) if wait]
    reach = np.geomspace(1, 256, 60)
    for wait, colour in zip(waits, [*COLOURS.values(), *OTHER_COLOURS]):
        measured = report.of(OURS, envs_each=K, step_ms=wait)
        points = [one.actors for one in measured], [one.efficiency for one in measured]
        panel.plot(*points, "o", color=colour, markersize=4, label=f"steps of {wait:g} ms")
        panel.plot(reach, [report.efficiency(actors, K, wait) for actors in reach], color=colour, linewidth=1)
    panel.axhline(GOOD, color="black", linestyle="dashed", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_xticks([2**n for n in range(9)], [str(2**n) for n in range(9)])
    panel.set_ylim(0, 1.05)
    panel.set_xlabel(f"Ray actors with {K} environments each, one driver (lines: the formula)", fontsize=8)
    panel.set_ylabel("share of the time in which simulators step", fontsize=8)
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, frameon=False)
    figure.supxlabel(in_one_line(report.machine), x=0.995, ha="right", fontsize=4, color=GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


# -- the command -------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> Report:
    saved = json.loads(path.read_text())
    return Report(**{**saved, "measured": [Measured(**values) for values in saved["measured"]]})


def main(
    quick: Quick = False,
    seconds: Seconds = 1.0,
    repeats: Repeats = 5,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure throughput by number of Ray actors."""
    if as_markdown:
        print(markdown(read_json((output or RESULTS) / f"{NAME}.json")))
        return
    packings, waits = (((1, 2), (2, 8)), (0, 1)) if quick else (PACKINGS, STEP_MS)
    report = run(packings, waits, 0.1 if quick else seconds, 2 if quick else repeats)
    show(report)
    directory = output or (None if quick else RESULTS)
    if directory is not None:
        write_json(report, directory / f"{NAME}.json")
        write_rows(report.measured, directory / f"{NAME}.csv")
        save_plot(report, directory / f"{NAME}.png")


if __name__ == "__main__":
    typer.run(main)
