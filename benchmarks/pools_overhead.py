"""Measure the overhead of `StackedVecEnv` over EnvPool, VMAS and JaxMARL alone, at 4,096 environments.

    python benchmarks/pools_overhead.py            a minute or two for each; writes results/pools_overhead.json
    python benchmarks/pools_overhead.py --quick    16 environments, a few steps; writes only where --output says so
    python benchmarks/pools_overhead.py --only vmas
    python benchmarks/pools_overhead.py --markdown the table for docs/simulators.md, from the saved JSON

Both sides take the same random actions, in turns of a few steps. "Alone" is the library's own call for a step with its
own automatic resets, whose results stay in the library's arrays. CPU time is that of all threads of the process: on a
busy machine it tells more than wall time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import typer
from frame import RESULTS, AsMarkdown, Only, Output, Quick, Results, folder_for, markdown, named, ratio
from plain_loops import SEED

from marl_parallel import make
from marl_parallel.cli.report import machine

NAME = "pools_overhead"
PACKAGES = ("envpool", "vmas", "torch", "jaxmarl", "jax")
HEADINGS = ("", "wall time, alone", "with `StackedVecEnv`", "CPU time, alone", "with `StackedVecEnv`", "CPU time")
NOTE = "Medians for one step of all 4,096 environments; the last column is the median of the differences."
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "envpool": ("CartPole-v1", {}),
    "vmas": ("balance", {"n_agents": 3, "max_steps": 100}),
    "jaxmarl": ("MPE_simple_spread_v3", {}),
}
"""By library, what is stepped and its arguments."""
TURN_S = 0.5
"""The longest turn of a side."""

Step = Callable[[np.ndarray], object]


def envpool_alone(task: str, num_envs: int, arguments: dict[str, Any]) -> Step:
    import envpool

    pool = envpool.make_gymnasium(task, num_envs=num_envs, seed=SEED, **arguments)
    pool.reset()
    return lambda actions: pool.step(actions[:, 0].astype(np.int32))


def vmas_alone(scenario: str, num_envs: int, arguments: dict[str, Any]) -> Step:
    import torch
    import vmas

    env = vmas.make_env(scenario, num_envs=num_envs, seed=SEED, terminated_truncated=True, **arguments)
    env.reset()
    over = [False]

    def step(actions: np.ndarray) -> None:
        if over[0]:
            env.reset()
            over[0] = False
            return
        _, _, terminated, truncated, _ = env.step(
            [torch.from_numpy(actions[:, agent]) for agent in range(actions.shape[1])]
        )
        done = terminated | truncated
        over[0] = bool(done.all())
        if not over[0]:
            for env_id in done.nonzero().flatten().tolist():
                env.reset_at(env_id, return_observations=False)

    return step


def jaxmarl_alone(name: str, num_envs: int, arguments: dict[str, Any]) -> Step:
    import jax
    import jaxmarl

    env = jaxmarl.make(name, **arguments)
    state = [
        jax.random.PRNGKey(SEED),
        jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(SEED), num_envs))[1],
    ]

    @jax.jit
    def advance(key: Any, states: Any, actions: Any) -> Any:
        key, subkey = jax.random.split(key)
        by_agent = {agent: actions[:, place] for place, agent in enumerate(env.agents)}
        return key, jax.vmap(env.step)(jax.random.split(subkey, num_envs), states, by_agent)

    def step(actions: np.ndarray) -> None:
        key, results = advance(*state, actions.astype(np.int32))
        jax.block_until_ready(results)
        state[:] = key, results[1]

    return step


ALONE = {"envpool": envpool_alone, "vmas": vmas_alone, "jaxmarl": jaxmarl_alone}


@contextmanager
def ours(library: str, name: str, num_envs: int, arguments: dict[str, Any]) -> Iterator[Any]:
    vec = make(f"{library}:{name}", num_envs, arguments, seed=SEED, facade="stacked")
    vec.reset()
    yield vec
    vec.close()


def timed(step: Step, actions: list[np.ndarray]) -> tuple[float, float]:
    """Wall and CPU time of each step, in seconds."""
    began = time.perf_counter(), time.process_time()
    for of_all in actions:
        step(of_all)
    return (time.perf_counter() - began[0]) / len(actions), (time.process_time() - began[1]) / len(actions)


def measure(library: str, num_envs: int, rounds: int, steps: int) -> dict[str, Any]:
    """The medians of both sides, and of the ratios within each round; fewer steps if a turn would take too long."""
    name, arguments = CASES[library]
    with ours(library, name, num_envs, arguments) as vec:
        space = vec.single_action_space
        space.seed(SEED)
        draws = [
            np.stack([[space.sample() for _ in vec.agents] for _ in range(min(num_envs, 64))]).repeat(
                -(-num_envs // 64), 0
            )
            for _ in range(8)
        ]
        batches = [draw[:num_envs] for draw in draws]
        sides: dict[str, Step] = {"alone": ALONE[library](name, num_envs, arguments), "ours": vec.step}
        slowest = max(timed(step, batches)[0] for step in sides.values())
        steps = min(steps, max(1, round(TURN_S / slowest)))
        times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for number in range(rounds):
            for side in sorted(sides, reverse=number % 2 == 1):
                times[side].append(timed(sides[side], [batches[(number + at) % 8] for at in range(steps)]))
    result: dict[str, Any] = {"library": library, "name": name, "num_envs": num_envs, "rounds": rounds, "steps": steps}
    for at, kind in enumerate(("wall", "cpu")):
        both = {side: [one[at] for one in of_side] for side, of_side in times.items()}
        for side, values in both.items():
            result[f"{side}_{kind}_us"] = round(1e6 * statistics.median(values), 1)
        result[f"overhead_{kind}_percent"] = round(100 * (ratio(both["ours"], both["alone"]) - 1), 1)
    return result


def table(found: dict[str, Any]) -> Results:
    """What has been measured; the machine is that of the latest run."""
    cells = [
        [
            f"{library} {one['name']}",
            *(f"{one[key] / 1000:.1f} ms" for key in ("alone_wall_us", "ours_wall_us", "alone_cpu_us", "ours_cpu_us")),
            f"{one['overhead_cpu_percent']:+.1f} %",
        ]
        for library, one in sorted(found.items())
    ]
    described = max((one["machine"] for one in found.values()), key=lambda one: one["date"])
    return Results(described, HEADINGS, cells, NOTE)


def main(
    quick: Quick = False,
    only: Only = "",
    rounds: int = 41,
    steps: int = 26,
    output: Output = None,
    as_markdown: AsMarkdown = False,
) -> None:
    """Measure the overhead over EnvPool, VMAS and JaxMARL."""
    path = (output or RESULTS) / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if as_markdown:
        print(markdown(table(found).page))
        return
    chosen = named(CASES, only, "library")
    described = machine(PACKAGES)
    for library in chosen:
        try:
            result = measure(library, *((16, 3, 2) if quick else (4096, rounds, steps)))
        except ImportError as error:
            print(f"{library}: left out, {error}")
            continue
        print(json.dumps(result))
        found[library] = {**result, "machine": described}
        if folder_for(output, whole=not quick):
            path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
