"""How long a step takes that replaces an environment, compared with a step that resets one.

    python benchmarks/recycling.py               two minutes; writes results/recycling.json
    python benchmarks/recycling.py --markdown    the table for docs/recycling.md, from the saved JSON

Constructing an environment takes 200 ms here, and episodes have different lengths, so that mostly one environment at a
time is reset or replaced. Steps of both kinds come from the same run, so that a busy machine affects both. There is a
run with a limit of age, which waits until the new environments are there, and one with a limit of episodes, which is
exact.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Annotated, Any

import typer
from frame import AsMarkdown, Output, Results, folder_for, markdown, read, save, show
from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv, RecyclePolicy
from marl_parallel.cli.report import machine

NAME = "recycling"
NUM_ENVS, WORKERS = 8, 2
CONSTRUCTOR_S = 0.2
SECONDS, EPISODES, AGE_S = 120.0, 100, 5.0
HEADINGS = ("limit", "in the step", "median", "p99", "longest", "steps", "that waited")
NOTE = (
    f"Milliseconds of a step of {NUM_ENVS} environments of simple_spread in {WORKERS} workers, whose episodes have "
    f"different lengths and whose constructors take {1000 * CONSTRUCTOR_S:.0f} ms. A step has waited if it took longer "
    "than half a constructor."
)


def make_env(env_id: int) -> Any:
    time.sleep(CONSTRUCTOR_S)
    return simple_spread_v3.parallel_env(max_cycles=20 + 2 * env_id)


def measure(seconds: float, recycle: RecyclePolicy) -> dict[str, list[float]]:
    """Milliseconds of each step, by what happens in it."""
    times: dict[str, list[float]] = {"nothing else": [], "an episode begins": [], "an environment is replaced": []}
    kinds = [*times]
    with ParallelEnv([make_env] * NUM_ENVS, num_workers=WORKERS, recycle=recycle) as env:
        env.reset()
        step = functools.partial(env.step, [dict.fromkeys(env.possible_agents, 0)] * NUM_ENVS)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or not times[kinds[2]]:
            began = time.perf_counter()
            _, _, terminateds, truncateds, infos = step()
            took = time.perf_counter() - began
            over = any(flags["__all__"] for flags in (*terminateds, *truncateds))
            recycled = any("recycled" in info.get("__common__", {}) for info in infos)
            times[kinds[2 if recycled else int(over)]].append(1000 * took)
    return times


def rows(seconds: float, policies: dict[str, RecyclePolicy]) -> list[list[str]]:
    """A row for each policy and kind of step."""
    found = []
    for limit, recycle in policies.items():
        for kind, took in measure(seconds / len(policies), recycle).items():
            took.sort()
            numbers = (
                statistics.median(took),
                took[min(int(0.99 * len(took)), len(took) - 1)],
                took[-1],
            )
            waited = sum(one > 1000 * CONSTRUCTOR_S / 2 for one in took)
            found.append([limit, kind, *(f"{number:.1f}" for number in numbers), f"{len(took):,}", f"{waited:,}"])
    return found


def main(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to step.")] = SECONDS,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes after which an environment is replaced.")] = EPISODES,
    age: Annotated[float, typer.Option(min=0.1, help="Seconds after which one is replaced, in another run.")] = AGE_S,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure each kind of step."""
    if as_markdown:
        print(markdown(read(NAME, Results, output).page))
        return
    described = machine(("mpe2",))
    policies = {
        f"`max_age_s={age:g}`": RecyclePolicy(max_age_s=age),
        f"`max_episodes={episodes}`": RecyclePolicy(max_episodes=episodes),
    }
    results = Results(described, HEADINGS, rows(seconds, policies), NOTE, labels=2)
    show(results.page)
    save(NAME, results, folder_for(output, whole=(seconds, episodes, age) == (SECONDS, EPISODES, AGE_S)))


if __name__ == "__main__":
    typer.run(main)
