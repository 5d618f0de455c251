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
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import frame
import numpy as np
import typer
from contest import Case, Step, stepping
from frame import AsMarkdown, Output, Page, Picture, Quick, Repeats, Seconds, Table
from peers import ray_actors
from pictures import OTHER_COLOURS, finish, framed, plain
from synthetic import Synthetic

from marl_parallel import ParallelEnv
from marl_parallel.cli.measure import draw_actions, spread
from marl_parallel.cli.report import COLOURS, in_one_line, machine, progress

if TYPE_CHECKING:  # matplotlib takes half a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    """

    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    once_us: float = 0.0

    def of(self, contender: str, **values: Any) -> list[Measured]:
        """The measurements with these attributes."""
        return [
            one
            for one in self.measured
            if one.contender == contender and all(getattr(one, name) == value for name, value in values.items())
        ]


@dataclass(frozen=True)
class ActorsReport(Report):
    """With `each_us`, c1: the cost per actor and batch in microseconds."""

    each_us: float = 0.0

    def efficiency(self, actors: float, envs_each: int, step_ms: float) -> float:
        """The share of the time in which simulators step, by the formula."""
        inside = 1000 * step_ms * envs_each
        return inside / (inside + self.once_us + self.each_us * actors)

    def reach(self, envs_each: int, step_ms: float) -> int:
        """The most actors with which simulators step for at least `GOOD` of the time."""
        spare = 1000 * step_ms * envs_each * (1 / GOOD - 1)
        return max(int((spare - self.once_us) / self.each_us), 0)


@dataclass(frozen=True)
class NodesReport(Report):
    """With `node_us`, `worker_us` and `mb_us`, c1, c2 and c3: the costs per node, worker and megabyte."""

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


class Round(NamedTuple):
    """Per batch: milliseconds of wall time, microseconds of this process's CPU time, milliseconds inside an actor."""

    wall: float
    cpu: float
    inside: float | None


class Contender(NamedTuple):
    """What is stepped, and its `ParallelEnv`, if it has one."""

    step: Step
    env: ParallelEnv | None = None

    def turn(self, seconds: float) -> Round:
        """Step for some seconds."""
        env = self.env
        inside = 0.0 if env is None else env.stats().simulator_s / env.num_workers
        count, cpu = 0, time.process_time()
        started = now = time.perf_counter()
        while now < started + seconds or not count:
            self.step()
            count += 1
            now = time.perf_counter()
        took = 1e3 * (now - started) / count, 1e6 * (time.process_time() - cpu) / count
        if env is None:
            return Round(*took, None)
        return Round(*took, 1e3 * (env.stats().simulator_s / env.num_workers - inside) / count)


@contextmanager
def ours(workers: int, envs_each: int, per_actor: int = 1, observation_size: int = 18) -> Iterator[Contender]:
    """`ParallelEnv` with so many workers in each actor, which stands for a node if it has several."""
    from marl_parallel import RayBackend  # not needed to show saved results

    count = workers * envs_each
    backend = RayBackend(num_cpus=CPU_SHARE, workers_per_node=per_actor)
    constructors = [functools.partial(Waiting, observation_size)] * count
    with ParallelEnv(constructors, seed=None, backend=backend, num_workers=workers) as env:
        env.reset()
        yield Contender(stepping(env.step, draw_actions(dict(env.action_space.spaces), count)), env)


@contextmanager
def plain_actors(count: int) -> Iterator[Contender]:
    """A first version with plain Ray: one actor per environment, dicts as arguments and results."""
    with ray_actors(Case("waiting", Waiting, count, count, 100)) as step:
        yield Contender(step)


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


@contextmanager
def local_ray() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def in_turns(
    contenders: Mapping[str, Contender], step_ms: float, seconds: float, repeats: int
) -> dict[str, list[Round]]:
    for one in contenders.values():
        if one.env is not None:
            one.env.call("be_slow", step_ms)
        one.turn(seconds / 4)
    turns = {name: functools.partial(one.turn, seconds) for name, one in contenders.items()}
    return frame.rounds(turns, repeats, lambda _: None)


def run(packings: Sequence[tuple[int, int]], step_ms: Sequence[float], seconds: float, repeats: int) -> ActorsReport:
    described = machine(("ray",))
    measured: list[Measured] = []
    with local_ray(), progress(len(packings) * len(step_ms) + 1) as on_turn:
        for actors, envs_each in packings:
            with ours(actors, envs_each) as contender:
                for wait in step_ms:
                    on_turn(f"{actors} actors with {envs_each} environments, {wait} ms")
                    rounds = in_turns({OURS: contender}, wait, seconds, repeats)
                    measured.append(summary(OURS, actors, envs_each, wait, rounds[OURS]))
        on_turn("plain actors")
        with ours(2, PEER_ENVS // 2) as contender, plain_actors(PEER_ENVS) as other:
            rounds = in_turns({OURS: contender, PLAIN: other}, 0, seconds, repeats)
            measured.append(summary(OURS, 2, PEER_ENVS // 2, 0, rounds[OURS]))
            measured.append(summary(PLAIN, PEER_ENVS, 1, 0, rounds[PLAIN]))
    once, each = fitted([one for one in measured if one.contender == OURS])
    return ActorsReport(described, {"seconds": seconds, "repeats": repeats}, measured, once, each)


def run_nodes(
    packings: Sequence[tuple[int, int]], step_ms: Sequence[float], seconds: float, repeats: int, plain_envs: int
) -> NodesReport:
    """Measure one actor per node in turns with one actor per worker, and with one plain actor per environment."""
    described = machine(("ray",))
    measured: list[Measured] = []
    with local_ray(), progress(len(packings) * len(step_ms) + 2) as on_turn:
        for nodes, workers in packings:
            total = nodes * workers
            with ours(total, K, workers) as by_node, ours(total, K) as by_worker:
                for wait in step_ms:
                    on_turn(f"{nodes} x {workers} workers with {K} environments, {wait} ms")
                    rounds = in_turns({NODES: by_node, OURS: by_worker}, wait, seconds, repeats)
                    measured.append(replace(summary(NODES, total, K, wait, rounds[NODES]), nodes=nodes))
                    measured.append(summary(OURS, total, K, wait, rounds[OURS]))
        on_turn("large observations")
        with ours(2, K, 2) as small, ours(2, K, 2, LARGE) as large:
            rounds = in_turns({"small": small, "large": large}, 0, seconds, repeats)
            for name, size in (("small", 18), ("large", LARGE)):
                measured.append(replace(summary(NODES, 2, K, 0, rounds[name]), nodes=1, observation_size=size))
        on_turn("plain actors")
        with ours(plain_envs // K, K, plain_envs // K) as by_node, plain_actors(plain_envs) as other:
            rounds = in_turns({NODES: by_node, PLAIN: other}, 0, seconds, repeats)
            measured.append(replace(summary(NODES, plain_envs // K, K, 0, rounds[NODES]), nodes=1))
            measured.append(summary(PLAIN, plain_envs, 1, 0, rounds[PLAIN]))
    return NodesReport(described, {"seconds": seconds, "repeats": repeats}, measured, *fitted_to_nodes(measured))


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


def page(report: ActorsReport) -> Page:
    """A picture, and a row for each packing, a column for each step time."""
    waits = list(dict.fromkeys(one.step_ms for one in report.of(OURS)))
    cells = {}
    for one in report.of(OURS):
        share = "" if one.efficiency is None else f" ({one.efficiency:.2f})"
        cells[one.actors, one.envs_each, one.step_ms] = f"{one.steps_per_second:,.0f}{share}"
    packings = list(dict.fromkeys((actors, envs) for actors, envs, _ in cells))
    headings = ["actors x environments", *(f"{wait:g} ms" for wait in waits)]
    rows = [[f"{a} x {k}", *(cells.get((a, k, wait), "") for wait in waits)] for a, k in packings]
    return [Picture("Scaling over Ray actors", NAME), Table(headings, rows), *notes(report)]


def notes(report: ActorsReport) -> list[str]:
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


def page_of_nodes(report: NodesReport) -> Page:
    """Each measurement beside that with an actor per worker."""
    headings = ["nodes x workers", "step", "batch", "busy", "driver", "actor per worker: batch", "busy", "driver"]
    rows = []
    for one, other in itertools.pairwise(report.measured):
        if (one.contender, other.contender) == (NODES, OURS):
            rows.append(
                [f"{one.nodes} x {one.actors // one.nodes}", f"{one.step_ms:g} ms", *_cells(one), *_cells(other)]
            )
    return [Table(headings, rows), *remarks_on_nodes(report), f"{in_one_line(report.machine)}."]


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


def page_of_simulation(report: NodesReport) -> Page:
    return [
        Picture("Share of the time in which simulators step, by number of nodes", NODES_NAME),
        simulation(report),
        Table(["", "measured", "cost of", "assumed"], assumptions(report), "lrll"),
        f"{in_one_line(report.machine)}.",
    ]


def simulation(report: NodesReport) -> Table:
    """What one driver reaches by the formula, and how many drivers are enough."""
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
    return Table(headings, cells)


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


def save_simulation(report: NodesReport, path: Path) -> None:
    """The share of the time in which simulators step, by number of nodes of one driver."""
    figure, panel = axes_of_shares(max(SIMULATED_NODES))
    reach = np.geomspace(1, max(SIMULATED_NODES), 60)
    for wait, colour in zip([wait for wait in STEP_MS if wait], [*COLOURS.values(), *OTHER_COLOURS]):
        shares = [report.efficiency(nodes, nodes * SIMULATED_WORKERS, wait) for nodes in reach]
        panel.plot(reach, shares, color=colour, linewidth=1, label=f"steps of {wait:g} ms")
    text = f"nodes of one driver, {SIMULATED_WORKERS} workers of {K} environments on each (by the formula)"
    panel.set_xlabel(text, fontsize=8)
    finish(figure, in_one_line(report.machine), path)


def save_plot(report: ActorsReport, path: Path) -> None:
    """The share of the time in which simulators step, by number of actors: measured, and by the formula."""
    figure, panel = axes_of_shares(256)
    waits = [wait for wait in dict.fromkeys(one.step_ms for one in report.of(OURS)) if wait]
    reach = np.geomspace(1, 256, 60)
    for wait, colour in zip(waits, [*COLOURS.values(), *OTHER_COLOURS]):
        measured = report.of(OURS, envs_each=K, step_ms=wait)
        points = [one.actors for one in measured], [one.efficiency for one in measured]
        panel.plot(*points, "o", color=colour, markersize=4, label=f"steps of {wait:g} ms")
        panel.plot(reach, [report.efficiency(actors, K, wait) for actors in reach], color=colour, linewidth=1)
    panel.set_xlabel(f"Ray actors with {K} environments each, one driver (lines: the formula)", fontsize=8)
    finish(figure, in_one_line(report.machine), path)


def axes_of_shares(most: int) -> tuple[Figure, Axes]:
    """A picture of shares of the time in which simulators step, with powers of two up to `most` to the right."""
    figure = framed(6.4, 3.8)
    panel = figure.subplots()
    panel.axhline(GOOD, color="black", linestyle="dashed", linewidth=0.8, label=f"{100 * GOOD:.0f} %")
    panel.set_xscale("log", base=2)
    ticks = [2**n for n in range(most.bit_length())]
    panel.set_xticks(ticks, [*map(str, ticks)])
    panel.set_ylim(0, 1.05)
    panel.set_ylabel("share of the time in which simulators step", fontsize=8)
    plain(panel)
    return figure, panel


# -- the command -------------------------------------------------------------------------------------------------------


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
    folder = frame.folder_for(output, whole=not quick)
    if quick:
        seconds, repeats = 0.1, 2
    if simulate:
        saved = frame.read(NODES_NAME, NodesReport, output)
        if as_markdown:
            print(frame.markdown(page_of_simulation(saved)))
        else:
            frame.show(page_of_simulation(saved))
            save_simulation(saved, (output or frame.RESULTS) / f"{NODES_NAME}.png")
    elif as_markdown and nodes:
        print(frame.markdown(page_of_nodes(frame.read(NODES_NAME, NodesReport, output))))
    elif as_markdown:
        print(frame.markdown(page(frame.read(NAME, ActorsReport, output))))
    elif nodes:
        chosen, waits = (((1, 2), (2, 1)), (0, 1)) if quick else (NODE_PACKINGS, STEP_MS)
        by_node = run_nodes(chosen, waits, seconds, repeats, K if quick else NODE_PEER_ENVS)
        frame.show(page_of_nodes(by_node))
        frame.save(NODES_NAME, by_node, folder, by_node.measured, save_simulation)
    else:
        packings, waits = (((1, 2), (2, 8)), (0, 1)) if quick else (PACKINGS, STEP_MS)
        report = run(packings, waits, seconds, repeats)
        frame.show(page(report))
        frame.save(NAME, report, folder, report.measured, save_plot)


if __name__ == "__main__":
    typer.run(main)
