"""What `isolate_rng=True` costs: the time of an environment step with and without it, in alternating rounds.

python benchmarks/isolated_generators.py
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import typer
from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv
from marl_parallel.cli.report import in_one_line, machine

NUM_ENVS, WORKERS = 8, 2


def step_us(isolate_rng: bool, steps: int) -> float:
    """Microseconds per environment step."""
    with ParallelEnv([simple_spread_v3.parallel_env] * NUM_ENVS, num_workers=WORKERS, isolate_rng=isolate_rng) as env:
        env.reset()
        actions = [dict.fromkeys(env.possible_agents, 0)] * NUM_ENVS
        for _ in range(min(steps, 50)):
            env.step(actions)
        began = time.perf_counter()
        for _ in range(steps):
            env.step(actions)
        return 1e6 * (time.perf_counter() - began) / (steps * NUM_ENVS)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of each environment in a round.")] = 300,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = 11,
) -> None:
    """Print the median of each."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for isolate_rng, of in times.items():
            of.append(step_us(isolate_rng, steps))
    for isolate_rng, of in times.items():
        print(f"isolate_rng={isolate_rng}: {statistics.median(of):.1f} µs per environment step")
    print(in_one_line(machine()))


if __name__ == "__main__":
    typer.run(main)
