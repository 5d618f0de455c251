"""What `isolate_rng=True` costs: the time of an environment step with and without it, in alternating rounds.

python benchmarks/isolated_generators.py               half a minute; writes results/isolated_generators.json
python benchmarks/isolated_generators.py --markdown    the table for docs/seeding.md, from the saved JSON
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated

import typer
from mpe2 import simple_spread_v3
from options import AsMarkdown, Output, folder_for
from tables import Results, read, show_and_save

from marl_parallel import ParallelEnv
from marl_parallel.cli.report import machine

RESULTS, NAME = Path(__file__).parent / "results", "isolated_generators.json"
NUM_ENVS, WORKERS = 8, 2
STEPS, REPEATS = 300, 11


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
    steps: Annotated[int, typer.Option(min=1, help="Steps of each environment in a round.")] = STEPS,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds.")] = REPEATS,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure steps with and without `isolate_rng`."""
    if as_markdown:
        print(read((output or RESULTS) / NAME).markdown())
        return
    described = machine(("mpe2",))
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for isolate_rng, took in times.items():
            took.append(step_us(isolate_rng, steps))
    rows = [[f"`isolate_rng={value}`", f"{statistics.median(took):.0f}"] for value, took in times.items()]
    note = (
        f"Microseconds of wall time per environment step, {NUM_ENVS} environments of simple_spread in {WORKERS} "
        f"workers; medians of {repeats} rounds."
    )
    folder = folder_for(output, RESULTS, whole=(steps, repeats) == (STEPS, REPEATS))
    show_and_save(Results(described, ("", "µs"), rows, note), folder and folder / NAME)


if __name__ == "__main__":
    typer.run(main)
