"""Measure the overhead of `ParallelEnv` and its facades over EnvPool alone, with the same task and actions.

    python benchmarks/envpool_overhead.py              about two minutes; writes results/envpool_overhead.*
    python benchmarks/envpool_overhead.py --quick      a few seconds; writes only where --output says so
    python benchmarks/envpool_overhead.py --markdown   the table for docs/performance.md, from the saved JSON

EnvPool must be installed. `contest.py` measures in turns, `merged.py` saves a run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import frame
import typer
from contest import Case, Contender, Step, stepping
from frame import AsMarkdown, Only, Output, Page, Quick, Repeats, Seconds, Table
from merged import Pair, Report, Result, read, run, show_and_save
from plain_loops import SEED

import marl_parallel.vector
from marl_parallel import ParallelEnv

NAME = "envpool_overhead"
PART = "overhead"
HEADINGS = ("task", "envs", "stepped by", "µs per batch", "EnvPool alone, µs", "overhead")


@dataclass(frozen=True)
class Pool(Case):
    """A task of EnvPool, with EnvPool's own number of threads.

    Attributes:
        task: EnvPool's name of the task.
    """

    task: str = ""

    @functools.cached_property
    def _action_spaces(self) -> dict[str, Any]:
        import envpool  # not needed to show saved results

        return {"agent_0": envpool.make_spec(self.task).action_space}


def pool(task: str, num_envs: int) -> Pool:
    return Pool(f"{task} x {num_envs}", lambda: None, num_envs, workers=1, episode_steps=1, task=task)


# -- contenders --------------------------------------------------------------------------------------------------------


@contextmanager
def alone(case: Pool) -> Iterator[Step]:
    import envpool

    env = envpool.make_gymnasium(case.task, num_envs=case.num_envs, seed=SEED)
    env.reset()
    yield stepping(env.step, case.rows)


@contextmanager
def ours(case: Pool, facade: str, actions: str) -> Iterator[Step]:
    """`ParallelEnv` over EnvPool, through a facade or with dicts."""
    with ParallelEnv.from_envpool(case.task, case.num_envs, seed=SEED) as parallel:
        env = getattr(marl_parallel.vector, facade)(parallel) if facade else parallel
        env.reset()
        yield stepping(env.step, getattr(case, actions))


ALONE = Contender("EnvPool", alone)
OURS = [
    Contender(name, functools.partial(ours, facade=facade, actions=actions), ours=True)
    for name, facade, actions in (
        ("PettingZooVecEnv", "PettingZooVecEnv", "by_agent"),
        ("GymnasiumVectorEnv", "GymnasiumVectorEnv", "rows"),
        ("ParallelEnv, dicts", "", "by_env"),
    )
]


def pairs() -> list[Pair]:
    cases = pool("CartPole-v1", 64), pool("CartPole-v1", 256), pool("Pendulum-v1", 64)
    return [Pair(PART, case, one, ALONE) for case in cases for one in OURS]


# -- showing -----------------------------------------------------------------------------------------------------------


def page(report: Report) -> Page:
    rows = [
        [
            one.environment.partition(" ")[0],
            str(one.num_envs),
            one.ours,
            _batch(one, one.steps_per_second, one.spread),
            _batch(one, one.against_steps_per_second, one.against_spread),
            f"{100 / one.gain - 100:+.0f} %",
        ]
        for one in report.results
    ]
    note = (
        "Microseconds of wall time to step all environments once, resets included; the overhead is the median of the "
        "ratios within each round."
    )
    return [Table(HEADINGS, rows, "lrl"), note, *(f"{one}." for one in report.runs.values())]


def _batch(one: Result, steps_per_second: float, spread: float) -> str:
    return f"{1e6 * one.num_envs / steps_per_second:.0f} ± {100 * spread:.0f} %"


# -- the command -------------------------------------------------------------------------------------------------------


def main(
    quick: Quick = False,
    only: Only = "",
    seconds: Seconds = 0.05,
    repeats: Repeats = 121,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure the overhead of `ParallelEnv` and its facades over EnvPool."""
    if as_markdown:
        print(frame.markdown(page(read(NAME, output))))
        return
    chosen = frame.named(pairs(), only, "comparison")
    if quick:
        seconds, repeats = 0.02, 2
    show_and_save(NAME, run(chosen, seconds, repeats), page, pairs(), frame.folder_for(output, whole=not quick))


if __name__ == "__main__":
    typer.run(main)
