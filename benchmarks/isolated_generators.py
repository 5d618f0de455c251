"""What `isolate_rng=True` costs: the time of an environment step with and without it, in alternating rounds.

python benchmarks/isolated_generators.py               half a minute; writes results/isolated_generators.json
python benchmarks/isolated_generators.py --markdown    the table for docs/seeding.md, from the saved JSON
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Annotated

import typer
from frame import AsMarkdown, Output, Results, folder_for, markdown, read, rounds, save, show
from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv
from marl_parallel.cli.report import machine, progress

NAME = "isolated_generators"
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
        print(markdown(read(NAME, Results, output).page))
        return
    described = machine(("mpe2",))
    turns = {f"`isolate_rng={value}`": functools.partial(step_us, value, steps) for value in (False, True)}
    with progress(2 * repeats) as on_turn:
        times = rounds(turns, repeats, on_turn)
    rows = [[name, f"{statistics.median(took):.0f}"] for name, took in times.items()]
    note = (
        f"Microseconds of wall time per environment step, {NUM_ENVS} environments of simple_spread in {WORKERS} "
        f"workers; medians of {repeats} rounds."
    )
    results = Results(described, ("", "µs"), rows, note)
    show(results.page)
    save(NAME, results, folder_for(output, whole=(steps, repeats) == (STEPS, REPEATS)))


if __name__ == "__main__":
    typer.run(main)
