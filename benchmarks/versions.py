"""Compare two versions of the package: this checkout and another one, in alternating rounds.

Each version runs in its own process, which imports `marl_parallel` from its own checkout. The two processes alternate,
one round each, and the first one changes from round to round. Both step the same number of batches in a round, with the
same actions and the same simulators (of this checkout), so that the two times of a round are a pair.

Three more processes take turns with them: a plain loop, as many plain loops side by side as there are workers, which
is what the machine can do at most, and the same with a barrier after each batch. On a shared machine, a turn in which
other programs used a CPU is repeated.

A process can be a few percent faster or slower than another one that runs the same code, for its whole life. So both
versions are started several times, and the interval of the ratio includes the differences between launches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import frame
import numpy as np
import psutil

from marl_parallel.cli.measure import Contender

HERE = Path(__file__).resolve().parents[1]
STEPPER = Path(__file__).with_name("version_stepper.py")
ROUNDS = 5
"""Pairs of rounds in each launch."""
LIMIT = 1.02
"""A version is slower if the whole interval of its ratio is above this."""
RESAMPLES = 2000
MOST_FOREIGN, TICK_S, MOST_REPEATS = 0.06, 0.02, 4
"""A turn is repeated, at most so often, if others used more than this share of a CPU; the clocks' resolution."""


class Case(Protocol):
    """The environments to step: `compare_workers.Case`."""

    @property
    def name(self) -> str: ...

    @property
    def constructor(self) -> Callable[..., Any]: ...

    @property
    def num_envs(self) -> int: ...


@dataclass(frozen=True)
class Comparison:
    """One row: this checkout's time per step over the baseline's.

    Attributes:
        environment: The case's name.
        num_envs: How many environments were stepped.
        backend: A backend of `ParallelEnv`.
        workers: How many workers shared the environments; with "auto", how many plain loops ran side by side.
        way: "step"; or "pettingzoo" or "stacked" for the facades `PettingZooVecEnv` or `StackedVecEnv`.
        baseline_us: Microseconds per environment step of the baseline, the median of all rounds.
        this_us: The same of this checkout.
        ratio: This checkout's time over the baseline's, from pairs of rounds.
        low: The lower end of the ratio's 95 % interval.
        high: The upper end.
        loop_us: Microseconds per environment step of one plain loop over all environments.
        loops_us: Of as many plain loops side by side as there are workers.
        barrier_us: The same, with a barrier after each batch: the limit.
    """

    environment: str
    num_envs: int
    backend: str
    workers: int
    way: str
    baseline_us: float
    this_us: float
    ratio: float
    low: float
    high: float
    loop_us: float
    loops_us: float
    barrier_us: float

    @property
    def slower(self) -> bool:
        """Whether the whole interval is above the limit."""
        return self.low > LIMIT


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """The ratio and its 95 % interval, by a bootstrap that resamples launches and rounds within them.

    Args:
        ratios: `(launches, rounds)`: the ratio of the two times of each pair of rounds.
    """
    logs = np.log(ratios)
    launches, rounds = logs.shape
    rng = np.random.default_rng(0)
    chosen = rng.integers(launches, size=(RESAMPLES, launches, 1))
    pairs = rng.integers(rounds, size=(RESAMPLES, launches, rounds))
    means = np.median(logs[chosen, pairs], axis=2).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(np.exp(np.median(logs, axis=1).mean())), float(np.exp(low)), float(np.exp(high))


def compare(
    cases: Sequence[tuple[Case, Sequence[Contender]]],
    baseline: Path,
    *,
    seconds: float,
    launches: int,
    on_turn: Callable[[str], None] = lambda label: None,
) -> list[Comparison]:
    """Step every case with every contender in both versions.

    Args:
        cases: Each case and the contenders (backend and number of workers) that step it.
        baseline: The other checkout's folder.
        seconds: About how long a round lasts.
        launches: How often both versions are started.
        on_turn: Called with a label before each contender's rounds in each launch.
    """
    taken: dict[tuple[int, Contender], list[np.ndarray]] = {}
    for launch in range(launches):
        for number, (case, contenders) in enumerate(cases):
            with ExitStack() as stack:
                both = [stack.enter_context(_version(checkout)) for checkout in (baseline, HERE)]
                loops = [stack.enter_context(_version(HERE)) for _ in range(3)]
                for contender in contenders:
                    on_turn(f"{case.name}: {contender}, launch {launch + 1}")
                    turned = both if launch % 2 == 0 else both[::-1]  # the first is constructed and warmed up first
                    rows = _rounds([*turned, *loops], case, contender, seconds)
                    if launch % 2:
                        rows[:, :2] = rows[:, 1::-1]
                    taken.setdefault((number, contender), []).append(rows)
    return [_comparison(cases[number][0], who, np.stack(times)) for (number, who), times in taken.items()]


def _comparison(case: Case, contender: Contender, times: np.ndarray) -> Comparison:
    """Summarise `times`: seconds per environment step by launch, round and process."""
    baseline_us, this_us, *loops_us = [float(median) for median in np.median(times, axis=(0, 1)) * 1e6]
    ratio, low, high = interval(times[:, :, 1] / times[:, :, 0])
    return Comparison(
        case.name, case.num_envs, contender.backend, contender.workers, contender.way, baseline_us, this_us,
        ratio, low, high, *loops_us,
    )  # fmt: skip


def _rounds(processes: Sequence[Connection], case: Case, contender: Contender, seconds: float) -> np.ndarray:
    """Measure two versions and three kinds of plain loops in turns; returns seconds per step, `(ROUNDS, 5)`."""

    def ask(place: int, *request: Any) -> Any:
        processes[place].send_bytes(cloudpickle.dumps(request))
        return processes[place].recv()

    places = range(len(processes))
    for place in places[:2]:
        arguments = {"backend": contender.backend, "num_workers": contender.workers}
        if contender.backend == "auto":
            del arguments["num_workers"]
        ask(place, "Stepper", case.constructor, case.num_envs, arguments, contender.way)
    for place, arguments in zip(places[2:], ((1, False), (contender.workers, False), (contender.workers, True))):
        ask(place, "Loops", case.constructor, case.num_envs, *arguments)
    count = max(1, min([ask(place, "warm", seconds) for place in places]))
    times = np.empty((ROUNDS, len(processes)))
    for number in range(ROUNDS):
        for place in places if number % 2 == 0 else places[::-1]:
            for _ in range(MOST_REPEATS):
                before = _foreign_seconds()
                took = ask(place, "step", count)
                if _foreign_seconds() - before < MOST_FOREIGN * took + TICK_S:
                    break
            times[number, place] = took / (count * case.num_envs)
    for place in places:
        ask(place, "close")
    return times


def _foreign_seconds() -> float:
    """Seconds of CPU that all other programs have used so far, and the host that runs this machine."""
    this = psutil.Process()
    used = 0.0
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:2])
    everyone = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")  # those that the system knows
    return sum(getattr(everyone, name, 0.0) for name in names) - used


@contextmanager
def _version(checkout: Path) -> Iterator[Connection]:
    """A connection to a process that steps with the package of a checkout."""
    ours, theirs = Pipe()
    # The order of sets and the layout of dicts are then the same in both.
    variables = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(STEPPER), str(checkout), str(theirs.fileno())]
    with ours:
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=variables)
        try:
            yield ours
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise RuntimeError(
                f"the process that steps with the package in {checkout} or the other version's ended with an error; "
                "its traceback is above"
            ) from error
        finally:
            ours.close()  # it ends by itself
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def page(comparisons: Sequence[Comparison], baseline: Path) -> frame.Page:
    """A table, and whether anything is slower."""
    loops = "loop", "loops", "barrier"
    ratios = "baseline", "this", "ratio", "95 % interval"
    headings = ("environment", "envs", "backend", *ratios, *loops, *(f"of {one}" for one in loops), "")
    rows = [
        [
            one.environment, str(one.num_envs), str(Contender(one.backend, one.workers, one.way)),
            f"{one.baseline_us:.2f}", f"{one.this_us:.2f}", f"{one.ratio:.3f}", f"{one.low:.3f} to {one.high:.3f}",
            *(f"{us:.2f}" for us in (one.loop_us, one.loops_us, one.barrier_us)),
            *(f"{us / one.this_us:.3f}" for us in (one.loop_us, one.loops_us, one.barrier_us)),
            "slower" if one.slower else "not slower",
        ]
        for one in comparisons
    ]  # fmt: skip
    slower = sum(one.slower for one in comparisons)
    verdict = f"slower than the baseline: {slower} of {len(comparisons)} rows" if slower else "nothing is slower"
    title = f"time per environment step, in µs; the baseline is {baseline}"
    return frame.Table(
        headings, rows, "lllrrrrrrrrrrl", title
    ), f"{verdict} (slower: the whole interval is above {LIMIT})"


def write_json(comparisons: Sequence[Comparison], path: Path, settings: dict[str, Any]) -> None:
    """Save the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(one), "slower": one.slower} for one in comparisons]
    path.write_text(json.dumps({"settings": settings, "comparisons": rows}, indent=1) + "\n")
