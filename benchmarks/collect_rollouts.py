"""Compare collectors of rollouts on simple_spread, all with the same policy on the CPU.

    python benchmarks/collect_rollouts.py              some five minutes; writes results/collect_rollouts.json
    python benchmarks/collect_rollouts.py --quick      half a minute; writes only where --output says so
    python benchmarks/collect_rollouts.py --markdown   the table for docs/learners.md, from the saved JSON

The contenders are in `collectors.py`; `contest.py` measures them in turns. With each first rollout, it is checked that
all of it was stored. Contenders whose library is not installed are listed with the reason; the policy is that of an
example, and needs `tyro`. PyTorch has one thread.

PufferLib 3 is the distribution `pufferlib-core`. Its releases from 3.0.22 on want another PyTorch than TorchRL, but
run with TorchRL's: `pip install torchrl psutil`, then `pip install --no-deps pufferlib-core`.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import collectors
import contest
import frame
import typer
from collectors import Rollouts
from contest import DISTRIBUTIONS, Contender, Step, measure, one_thread_each, turns
from frame import AsMarkdown, Only, Output, Page, Quick, Repeats, Seconds, Table
from mpe2 import simple_spread_v3

from marl_parallel.cli.measure import spread
from marl_parallel.cli.report import in_one_line, machine, progress

NAME = "collect_rollouts"
CASE = Rollouts("simple_spread_v3", simple_spread_v3.parallel_env, 16, workers=2, episode_steps=25, num_steps=128)


@dataclass(frozen=True)
class Result:
    """The measurements of one contender.

    Attributes:
        contender: Its name.
        steps_per_second: Environment steps per second: the median of the rounds.
        spread: Half the distance between the best and worst round, as a share of the median.
        policy_us: CPU microseconds of the policy per environment step: the median of the rollouts.
        parent_us: CPU microseconds of this process beyond the policy's, per environment step: the median.
        ratio: The throughput divided by that of `Rollout`: the median of the ratios within each round; None without it.
        rounds: Environment steps per second in each round.
    """

    contender: str
    steps_per_second: float
    spread: float
    policy_us: float
    parent_us: float
    ratio: float | None
    rounds: list[float]


@dataclass(frozen=True)
class Report:
    """All results; `missing` has the reasons why contenders could not be measured, by name."""

    machine: dict[str, Any]
    num_steps: int
    workers: int
    seconds: float
    repeats: int
    results: list[Result]
    missing: dict[str, str]


# -- measuring ---------------------------------------------------------------------------------------------------------


def run(case: Rollouts, contenders: Sequence[Contender], seconds: float, repeats: int) -> Report:
    described = machine(DISTRIBUTIONS)
    used: dict[str, list[tuple[float, float]]] = {one.name: [] for one in contenders}
    accounted = [replace(one, start=functools.partial(accounting, one, used[one.name])) for one in contenders]
    with progress(turns(contenders, repeats)) as on_turn:
        rounds, missing = measure(case, accounted, seconds, repeats, on_turn)
    rates = {name: [case.num_steps * rate for rate in of_rounds] for name, of_rounds in rounds.items()}
    base = rates.get(collectors.ROLLOUT.name)
    results = []
    for name, of_rounds in rates.items():
        policy_us, parent_us = map(statistics.median, zip(*used[name], strict=True))
        ratio = frame.ratio(of_rounds, base) if base else None
        results.append(
            Result(name, statistics.median(of_rounds), spread(of_rounds), policy_us, parent_us, ratio, of_rounds)
        )
    return Report(described, case.num_steps, case.workers, seconds, repeats, results, missing)


@contextmanager
def accounting(contender: Contender, used: list[tuple[float, float]], case: Rollouts) -> Iterator[Step]:
    """Check a first rollout; add the CPU microseconds per environment step of each other one to `used`.

    These are the policy's, and all others of this process.
    """
    steps = case.num_steps * contender.counted(case)
    with contender.start(case) as collect:
        if isinstance(first := collect(), collectors.Batch):
            collectors.check(case, first)

        def step() -> None:
            policy, process = collectors.Policy.cpu_s, time.process_time()
            collect()
            process, policy = time.process_time() - process, collectors.Policy.cpu_s - policy
            used.append((policy / steps * 1e6, (process - policy) / steps * 1e6))

        yield step


# -- showing -----------------------------------------------------------------------------------------------------------


HEADINGS = (
    "", "environment steps/s", "times `Rollout`", "CPU time of the main process per step: policy", "all else",
)  # fmt: skip


def page(report: Report) -> Page:
    rows = [
        [
            one.contender,
            f"{one.steps_per_second:,.0f} ± {one.spread:.0%}",
            "" if one.ratio is None else f"{one.ratio:.2f}",
            f"{one.policy_us:.0f} µs",
            f"{one.parent_us:.0f} µs",
        ]
        for one in sorted(report.results, key=lambda one: -one.steps_per_second)
    ]
    shown = {one.contender for one in report.results}
    settings = contest.settings(collectors.CONTENDERS, shown, report.workers)
    notes = [
        f"Rollouts of {report.num_steps} steps of {CASE.num_envs} environments, workers: {report.workers}. Medians; "
        "± is half the distance between the best and worst round; ratios are within each round. CPU time includes "
        f"waiting where the process polls. {settings}",
        f"{report.repeats} rounds of {report.seconds:g} s; {in_one_line(report.machine)}.",
    ]
    missing = [f"{name} ({why})" for name, why in report.missing.items()]
    return [Table(HEADINGS, rows), *notes, *frame.not_measured(missing)]


def main(
    quick: Quick = False,
    only: Only = "",
    workers: Annotated[int, typer.Option(min=1, help="Processes that simulate, of each contender.")] = CASE.workers,
    seconds: Seconds = 2.0,
    repeats: Repeats = 7,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure collectors of rollouts."""
    if as_markdown:
        print(frame.markdown(page(frame.read(NAME, Report, output))))
        return
    chosen = frame.named(collectors.CONTENDERS, only, "contender")
    case = replace(CASE, workers=workers)
    if quick:
        seconds, repeats, case = 0.02, 2, replace(CASE, num_steps=30)
    one_thread_each()
    report = run(case, chosen, seconds, repeats)
    frame.show(page(report))
    frame.save(NAME, report, frame.folder_for(output, whole=not (quick or only or workers != CASE.workers)))


if __name__ == "__main__":
    typer.run(main)
