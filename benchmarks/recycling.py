"""How long a step takes that replaces an environment, compared with a step that resets one.

python benchmarks/recycling.py

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
from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv, RecyclePolicy
from marl_parallel.cli.report import in_one_line, machine

NUM_ENVS, WORKERS = 8, 2
CONSTRUCTOR_S = 0.2


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


def main(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to step.")] = 60.0,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes after which an environment is replaced.")] = 100,
    age: Annotated[float, typer.Option(min=0.1, help="Seconds after which one is replaced, in another run.")] = 5.0,
) -> None:
    """Print the distribution of each kind of step."""
    for recycle in (RecyclePolicy(max_age_s=age), RecyclePolicy(max_episodes=episodes)):
        print(recycle)
        for kind, of in measure(seconds / 2, recycle).items():
            of.sort()
            median, late = statistics.median(of), of[min(int(0.99 * len(of)), len(of) - 1)]
            waited = sum(one > 1000 * CONSTRUCTOR_S / 2 for one in of)
            print(
                f"{kind}: median {median:.2f} ms, p99 {late:.2f} ms, maximum {of[-1]:.2f} ms ({len(of)} steps, "
                f"{waited} of them longer than half a constructor)"
            )
    print(f"constructor: {1000 * CONSTRUCTOR_S:.0f} ms. {in_one_line(machine(('mpe2',)))}")


if __name__ == "__main__":
    typer.run(main)
