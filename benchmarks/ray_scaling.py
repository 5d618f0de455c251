"""Measure how throughput scales with Ray actors and environments per actor, and the driver's cost per actor.

    python benchmarks/ray_scaling.py              some five minutes; writes results/ray_scaling.*
    python benchmarks/ray_scaling.py --quick      half a minute; writes only where --output says so
    python benchmarks/ray_scaling.py --nodes      one actor for the workers of a node, in turns with an actor per worker
    python benchmarks/ray_scaling.py --simulate   the cost model of a run with --nodes, extended to a thousand workers
    python benchmarks/ray_scaling.py --markdown   the tables for the documentation, from the saved JSON, also with
                                                  --nodes or --simulate

Simulators wait here instead of computing, so that more actors than CPUs behave like actors on many machines. The work
of the actors and of Ray is still done by the CPUs of this machine, so several machines can only be faster.

A batch of `k` environments in each of `A` actors takes `k x s + c0 + c1 x A` with steps of `s`: the simulators' time,
the constant cost of a batch, and the cost per actor. The constants are fitted to the measurements. A simulator waits
somewhat longer than requested; `s` is the time that it takes.

With `--nodes`, a batch over `N` nodes with `W` workers altogether takes `k x s + c0 + c1 x N + c2 x W + c3 x M` for `M`
megabytes of results.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from options import AsMarkdown, Output, Quick, Repeats, Seconds
from pictures import OTHER_COLOURS, framed, in_docs
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

K, AGENTS = 8, 3
CPU_SHARE = 0.05
"""CPUs that each actor requests from Ray: actors mostly wait."""

PEER_ENVS, NODE_PEER_ENVS = 16, 32
WAITING_ACTORS, WAITING_ENVS, WAITING_MS = 4, 32, 5
GOOD = 0.9
OURS, PLAIN = "marl_parallel", "one Ray actor per environment"

NODES = "marl_parallel, one actor per node"
NODES_NAME = "ray_nodes"
NODE_PACKINGS = ((1, 1), (1, 4), (1, 8), (2, 4), (2, 8))
"""Nodes, and workers on each."""

LARGE = 4096
"""Numbers that each agent observes where the cost of bytes is measured."""

SIMULATED_NODES, SIMULATED_WORKERS = (8, 64, 512), 16
MOST_DRIVERS = 1024


class Waiting(Synthetic):
    """Waits in each step for the time that `be_slow` has set."""

    def __init__(self, observation_size: int = 18) -> None:
        super().__init__(waits=True, observation_size=observation_size)
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
        driver_us: CPU time of the driver's process per actor and batch; of `NODES`, per worker and batch.
        rounds: Milliseconds of a batch in each round.
        nodes: Number of nodes of `NODES`; 0 for others.
        observation_size: Numbers that each agent observes.
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
    nodes: int = 0
    observation_size: int = 18


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


@dataclass(frozen=True)
class NodesReport:
    """The measurements of one actor per node and what they are compared with, and the constants fitted to them.

    Attributes:
        machine, settings, measured: As of a `Report`.
        once_us: c0, the constant cost of a batch in microseconds.
        node_us, worker_us, mb_us: c1, c2 and c3, the costs per node, worker and megabyte.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    once_us: float = 0.0
    node_us: float = 0.0
    worker_us: float = 0.0
    mb_us: float = 0.0

    def batch_us(self, nodes: float, workers: float, step_ms: float, observation_size: int = 18) -> float:
        """The wall time of a batch with one driver, by the formula."""
        cost = self.once_us + self.node_us * nodes + self.worker_us * workers
        return 1000 * step_ms * K + cost + self.mb_us * megabytes(workers, observation_size)

    def efficiency(self, nodes: float, workers: float, step_ms: float) -> float:
        """The share of the time in which simulators step."""
        return 1000 * step_ms * K / self.batch_us(nodes, workers, step_ms)

    def drivers(self, nodes: int, step_ms: float) -> int | None:
        """The fewest drivers with which simulators step for at least `GOOD` of the time; None if none are enough.

        Each has an equal part of the workers of the nodes, or of the nodes.
        """
        for count in (2**n for n in range(MOST_DRIVERS.bit_length())):
            workers = max(nodes * SIMULATED_WORKERS / count, 1.0)
            if self.efficiency(max(nodes / count, 1.0), workers, step_ms) >= GOOD:
                return count
        return None


Step = Callable[[], object]


@contextmanager
def ours(actors: int, envs_each: int) -> Iterator[tuple[Step, ParallelEnv]]:
    from marl_parallel import RayBackend  # not needed to show saved results

    count = actors * envs_each
    backend = RayBackend(num_cpus=CPU_SHARE, workers_per_node=1)
    with ParallelEnv([Waiting] * count, seed=None, backend=backend, num_workers=actors) as env:
        env.reset()
        batches = itertools.cycle(draw_actions(dict(env.action_space.spaces), count))
        yield lambda: env.step(next(batches)), env


@contextmanager
def by_node(nodes: int, workers: int, observation_size: int = 18) -> Iterator[tuple[Step, ParallelEnv]]:
    """As `ours`, with `K` environments in each worker, and so many workers in each actor, which stands for a node."""
    from marl_parallel import RayBackend

    total = nodes * workers
    backend = RayBackend(num_cpus=CPU_SHARE, workers_per_node=workers)
    constructors = [functools.partial(Waiting, observation_size)] * total * K
    with ParallelEnv(constructors, seed=None, backend=backend, num_workers=total) as env:
        env.reset()
        batches = itertools.cycle(draw_actions(dict(env.action_space.spaces), total * K))
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


def run_nodes(
    packings: Sequence[tuple[int, int]], step_ms: Sequence[float], seconds: float, repeats: int, plain_envs: int
) -> NodesReport:
    """Measure one actor per node in turns with one actor per worker, and with one plain actor per environment."""
    described = machine(("ray",))
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    measured: list[Measured] = []
    try:
        with progress(len(packings) * len(step_ms) + 2) as on_turn:
            for nodes, workers in packings:
                total = nodes * workers
                with by_node(nodes, workers) as (step, env), ours(total, K) as (before, others):
                    for wait in step_ms:
                        on_turn(f"{nodes} x {workers} workers with {K} environments, {wait} ms")
                        both = {NODES: (step, env), OURS: (before, others)}
                        rounds = in_turns(both, wait, seconds, repeats)
                        ours_by_node = summary(NODES, total, K, wait, rounds[NODES])
                        measured.append(replace(ours_by_node, nodes=nodes))
                        measured.append(summary(OURS, total, K, wait, rounds[OURS]))
            on_turn("large observations")
            with by_node(1, 2) as small, by_node(1, 2, LARGE) as large:
                rounds = in_turns({"small": small, "large": large}, 0, seconds, repeats)
                for name, size in (("small", 18), ("large", LARGE)):
                    one = summary(NODES, 2, K, 0, rounds[name])
                    measured.append(replace(one, nodes=1, observation_size=size))
            on_turn("plain actors")
            with by_node(1, plain_envs // K) as (step, env), plain(plain_envs) as other:
                rounds = in_turns({NODES: (step, env), PLAIN: (other, None)}, 0, seconds, repeats)
                measured.append(replace(summary(NODES, plain_envs // K, K, 0, rounds[NODES]), nodes=1))
                measured.append(summary(PLAIN, plain_envs, 1, 0, rounds[PLAIN]))
    finally:
        ray.shutdown()
    return NodesReport(described, {"seconds": seconds, "repeats": repeats}, measured, *fitted_to_nodes(measured))


def in_turns(
    contenders: Mapping[str, tuple[Step, ParallelEnv | None]], step_ms: float, seconds: float, repeats: int
) -> dict[str, list[Round]]:
    for step, env in contenders.values():
        if env is not None:
            env.call("be_slow", step_ms)
        timed(step, seconds / 4)
    rounds: dict[str, list[Round]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, (step, env) in contenders.items():
            rounds[name].append(timed(step, seconds, env))
    return rounds


def against_plain(seconds: float, repeats: int) -> list[Measured]:
    """Measure steps of 0 ms in turns: 16 environments in two actors, and one plain actor for each environment."""
    with ExitStack() as stack:
        step, env = stack.enter_context(ours(2, PEER_ENVS // 2))
        both = {OURS: step, PLAIN: stack.enter_context(plain(PEER_ENVS))}
        rounds: dict[str, list[Round]] = {name: [] for name in both}
        for run in both.values():
            timed(run, seconds / 4)
        for _ in range(repeats):
            for name, run in both.items():
                rounds[name].append(timed(run, seconds, env if name == OURS else None))
    return [
        summary(OURS, 2, PEER_ENVS // 2, 0, rounds[OURS]),
        summary(PLAIN, PEER_ENVS, 1, 0, rounds[PLAIN]),
    ]


def fitted_to_nodes(measured: Sequence[Measured]) -> tuple[float, float, float, float]:
    """c3 from the two sizes of observations; c0, c1 and c2 from the others by least squares. None is negative."""
    by_node = [one for one in measured if one.contender == NODES]
    large = next(one for one in by_node if one.observation_size == LARGE)
    small = next(one for one in by_node if one.observation_size != LARGE and one.actors == large.actors)
    more = megabytes(large.actors, LARGE) - megabytes(small.actors, small.observation_size)
    per_mb = max(1e3 * (large.batch_ms - small.batch_ms) / more, 0.0)
    rest = [one for one in by_node if one.observation_size != LARGE]
    costs = [
        1e3 * (one.batch_ms - (one.inside_ms or 0.0)) - per_mb * megabytes(one.actors, one.observation_size)
        for one in rest
    ]
    constants, *_ = np.linalg.lstsq(
        np.array([[1.0, one.nodes, one.actors] for one in rest]), np.array(costs), rcond=None
    )
    once, per_node, per_worker = np.maximum(constants, 0.0).tolist()
    return once, per_node, per_worker, per_mb


def megabytes(workers: float, observation_size: int) -> float:
    """The results of a batch."""
    return workers * K * AGENTS * 4 * observation_size / 1e6


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
    reach = {wait: report.reach(K, wait) for wait in STEP_MS if wait}
    served = [f"up to {count} at {wait:g} ms" for wait, count in reach.items() if count]
    too_short = [f"none at {wait:g} ms" for wait, count in reach.items() if not count]
    texts = [
        "Environment steps per second with `step`; in brackets, the share of the time in which simulators step "
        f"(simulators that wait; medians of {report.settings['repeats']} rounds of {report.settings['seconds']:g} s).",
        f"A batch takes `k·s + {report.once_us / 1000:.2f} ms + {report.each_us / 1000:.2f} ms·A` for `A` actors of "
        f"`k` environments with steps of `s`. Simulators step for at least {100 * GOOD:.0f} % of the time with these "
        f"numbers of actors ({K} environments in each): {', '.join(served + too_short)}.",
    ]
    both = report.of(OURS, actors=2, envs_each=PEER_ENVS // 2, step_ms=0)[-1:], report.of(PLAIN)
    if all(both):
        ours, other = (1e6 / one.steps_per_second for (one,) in both)
        texts.append(
            f"Steps of 0 ms, {PEER_ENVS} environments: {ours:.0f} µs per environment step with 2 actors, "
            f"{other:.0f} µs with one plain Ray actor per environment and dicts: {other / ours:.1f} times as much."
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
    return "\n\n".join([in_docs("Scaling over Ray actors", NAME), "\n".join(lines), *notes(report)])


def table_of_nodes(report: NodesReport) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: each measurement beside that with an actor per worker."""
    headings = ["nodes x workers", "step", "batch", "busy", "driver", "actor per worker: batch", "busy", "driver"]
    cells = []
    for one, other in itertools.pairwise(report.measured):
        if (one.contender, other.contender) == (NODES, OURS):
            cells.append(
                [f"{one.nodes} x {one.actors // one.nodes}", f"{one.step_ms:g} ms", *_cells(one), *_cells(other)]
            )
    return headings, cells


def _cells(one: Measured) -> list[str]:
    busy = "" if one.efficiency is None else f"{one.efficiency:.2f}"
    return [f"{one.batch_ms:.2f} ms", busy, f"{one.driver_us:.0f} µs"]


def remarks_on_nodes(report: NodesReport) -> list[str]:
    other = next(one for one in report.measured if one.contender == PLAIN)
    ours = report.measured[report.measured.index(other) - 1]
    return [
        f"{K} environments in each worker, which wait in each step; the driver's own CPU time is per worker and batch "
        f"(medians of {report.settings['repeats']} rounds of {report.settings['seconds']:g} s). A batch takes `k·s + "
        f"{report.once_us / 1000:.2f} ms + {report.node_us / 1000:.2f} ms·N + {report.worker_us / 1000:.2f} ms·W + "
        f"{report.mb_us / 1000:.2f} ms·M` for `N` nodes, `W` workers and `M` megabytes of results.",
        f"Steps of 0 ms, {other.actors} environments: {1e6 / ours.steps_per_second:.0f} µs per environment step, "
        f"{1e6 / other.steps_per_second:.0f} µs with one plain Ray actor per environment and dicts: "
        f"{ours.steps_per_second / other.steps_per_second:.1f} times as much.",
    ]


def show_nodes(report: NodesReport) -> None:
    console, shown = Console(width=120), Table(box=SIMPLE_HEAD)
    headings, cells = table_of_nodes(report)
    for heading in headings:
        shown.add_column(heading, justify="right")
    for row in cells:
        shown.add_row(*row)
    console.print(shown)
    for remark in remarks_on_nodes(report):
        console.print(remark, highlight=False)
    console.print(f"{in_one_line(report.machine)}.", highlight=False, style="dim")


def markdown_of_nodes(report: NodesReport) -> str:
    lines = [in_markdown(*table_of_nodes(report), "lr" + "r" * 6), *remarks_on_nodes(report)]
    return "\n\n".join([*lines, f"{in_one_line(report.machine)}."])


def markdown_of_simulation(report: NodesReport) -> str:
    return "\n\n".join([
        in_docs("Share of the time in which simulators step, by number of nodes", NODES_NAME),
        in_markdown(*simulation(report), "lrrrrrr"),
        in_markdown(["", "measured", "cost of", "assumed"], assumptions(report), "lrll"),
        f"{in_one_line(report.machine)}.",
    ])  # fmt: skip


def in_markdown(headings: Sequence[str], cells: Sequence[Sequence[str]], alignment: str) -> str:
    """A table; `alignment` has an `l` or `r` for each column."""
    marks = "|".join("---:" if column == "r" else "---" for column in alignment)
    return "\n".join([f"| {' | '.join(headings)} |", f"|{marks}|", *(f"| {' | '.join(row)} |" for row in cells)])


def simulation(report: NodesReport) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: what one driver reaches by the formula, and how many drivers are enough."""
    headings = [
        "nodes x workers",
        "environments",
        "step",
        "busy, one driver",
        "steps/s, one driver",
        "drivers",
        "steps/s",
    ]
    cells = []
    for nodes, wait in itertools.product(SIMULATED_NODES, [wait for wait in STEP_MS if wait]):
        workers = nodes * SIMULATED_WORKERS
        share, drivers = report.efficiency(nodes, workers, wait), report.drivers(nodes, wait)
        ideal = workers * 1000 / wait
        reached = 0.0
        if drivers is not None:
            part = max(nodes / drivers, 1.0), max(workers / drivers, 1.0)
            reached = ideal * report.efficiency(*part, wait)
        cells.append([
            f"{nodes} x {SIMULATED_WORKERS}", f"{workers * K:,}", f"{wait:g} ms", f"{share:.2f}",
            f"{ideal * share:,.0f}", str(drivers or "none is enough"), f"{reached:,.0f}" if reached else "",
        ])  # fmt: skip
    return headings, cells


def assumptions(report: NodesReport) -> list[list[str]]:
    """Each number of the formula, what it stands for, and what is assumed of it."""
    return [
        ["c0", f"{report.once_us:.0f} µs", "a batch", "the same for any number of nodes"],
        ["c1", f"{report.node_us:.0f} µs", "a node",
         "measured with two nodes on one machine, so without a network; nodes work side by side"],
        ["c2", f"{report.worker_us:.0f} µs", f"a worker of {K} environments",
         "measured with workers that share the driver's CPUs; with CPUs of their own they can only be faster"],
        ["c3", f"{report.mb_us:.0f} µs", "a megabyte",
         "measured through the memory of one machine; a network of 10 Gbit/s takes 800 µs"],
        ["s", "", "a step", "all steps take the same time; with uneven ones, send and recv are faster"],
        ["drivers", "", "several drivers",
         "each has a machine and an equal part of the workers; in a batch they exchange nothing with each other"],
    ]  # fmt: skip


def show_simulation(report: NodesReport) -> None:
    console = Console(width=120)
    for title, headings, cells in (
        (f"Busy for {100 * GOOD:.0f} % of the time, by the formula", *simulation(report)),
        ("Assumptions", ["", "measured", "cost of", "assumed"], assumptions(report)),
    ):
        shown = Table(box=SIMPLE_HEAD, title=title)
        for heading in headings:
            shown.add_column(heading, justify="left" if title == "Assumptions" else "right")
        for row in cells:
            shown.add_row(*row)
        console.print(shown)
    console.print(f"{in_one_line(report.machine)}.", highlight=False, style="dim")


def save_simulation(report: NodesReport, path: Path) -> None:
    """The share of the time in which simulators step, by number of nodes of one driver."""
    figure = framed(6.4, 3.8)
    panel = figure.subplots()
    reach = np.geomspace(1, max(SIMULATED_NODES), 60)
    for wait, colour in zip([wait for wait in STEP_MS if wait], [*COLOURS.values(), *OTHER_COLOURS]):
        shares = [report.efficiency(nodes, nodes * SIMULATED_WORKERS, wait) for nodes in reach]
        panel.plot(reach, shares, color=colour, linewidth=1, label=f"steps of {wait:g} ms")
    panel.axhline(GOOD, color="black", linestyle="dashed", linewidth=0.8, label=f"{100 * GOOD:.0f} %")
    panel.set_xscale("log", base=2)
    panel.set_xticks([2**n for n in range(10)], [str(2**n) for n in range(10)])
    panel.set_ylim(0, 1.05)
    text = f"nodes of one driver, {SIMULATED_WORKERS} workers of {K} environments on each (by the formula)"
    panel.set_xlabel(text, fontsize=8)
    panel.set_ylabel("share of the time in which simulators step", fontsize=8)
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, frameon=False)
    figure.supxlabel(in_one_line(report.machine), x=0.995, ha="right", fontsize=4, color=GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


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
    panel.axhline(GOOD, color="black", linestyle="dashed", linewidth=0.8, label=f"{100 * GOOD:.0f} %")
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


def read_nodes(path: Path) -> NodesReport:
    saved = json.loads(path.read_text())
    return NodesReport(**{**saved, "measured": [Measured(**values) for values in saved["measured"]]})


def main(
    quick: Quick = False,
    seconds: Seconds = 1.0,
    repeats: Repeats = 5,
    output: Output = None,
    as_markdown: AsMarkdown = False,
    nodes: Annotated[bool, typer.Option("--nodes", help="Measure one actor per node.")] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="Extend the saved measurements of --nodes.")] = False,
) -> None:
    """Measure throughput by number of Ray actors."""
    directory = output or RESULTS
    if simulate or (nodes and as_markdown):
        report_of_nodes = read_nodes(directory / f"{NODES_NAME}.json")
        if as_markdown:
            print((markdown_of_simulation if simulate else markdown_of_nodes)(report_of_nodes))
        else:
            show_simulation(report_of_nodes)
            save_simulation(report_of_nodes, directory / f"{NODES_NAME}.png")
        return
    if nodes:
        chosen, waits = (((1, 2), (2, 1)), (0, 1)) if quick else (NODE_PACKINGS, STEP_MS)
        plain_envs = K if quick else NODE_PEER_ENVS
        measured = run_nodes(chosen, waits, 0.1 if quick else seconds, 2 if quick else repeats, plain_envs)
        show_nodes(measured)
        if output is not None or not quick:
            write_json(measured, directory / f"{NODES_NAME}.json")
            write_rows(measured.measured, directory / f"{NODES_NAME}.csv")
            save_simulation(measured, directory / f"{NODES_NAME}.png")
        return
    if as_markdown:
        print(markdown(read_json(directory / f"{NAME}.json")))
        return
    packings, waits = (((1, 2), (2, 8)), (0, 1)) if quick else (PACKINGS, STEP_MS)
    report = run(packings, waits, 0.1 if quick else seconds, 2 if quick else repeats)
    show(report)
    if output is not None or not quick:
        write_json(report, directory / f"{NAME}.json")
        write_rows(report.measured, directory / f"{NAME}.csv")
        save_plot(report, directory / f"{NAME}.png")


if __name__ == "__main__":
    typer.run(main)
