"""Step eight multi-agent environments in parallel with random actions, and compare with a plain loop.

    python examples/quickstart.py
    python examples/quickstart.py --num-workers 1 --backend thread

It needs `pip install -e ".[mpe]"`. No `if __name__ == "__main__"` guard is needed, since workers never import
this file.
"""

import argparse
import time
from dataclasses import dataclass, fields
from typing import Literal

from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv


@dataclass
class Args:
    num_envs: int = 8
    """number of environments"""
    num_workers: int | None = None
    """number of worker processes; by default the number of usable CPUs"""
    backend: Literal["process", "thread", "serial"] = "process"
    """what workers are: process, thread or serial"""
    steps: int = 1000
    """steps of each environment"""
    max_cycles: int = 25
    """steps of an episode"""
    seed: int = 1
    """env i is seeded with seed + i"""


parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
for field in fields(Args):
    kind = str if field.name == "backend" else int
    parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
args = Args(**vars(parser.parse_args()))


def make_env():
    """Construct one environment, in a worker. Any callable works here, also lambdas and closures."""
    return simple_spread_v3.parallel_env(max_cycles=args.max_cycles)


# In parallel: lists of dicts in, tuples of dicts out, one dict for each environment.
with ParallelEnv([make_env] * args.num_envs, seed=args.seed, num_workers=args.num_workers, backend=args.backend) as env:
    print(f"{env.num_envs} environments on {env.num_workers} {args.backend} workers, seeds {env.seed()}")
    for agent, space in env.action_space.items():
        space.seed(args.seed)
        print(f"  {agent}: {space}, {env.observation_space[agent]}")

    observations, infos = env.reset()
    returns, parallel_s = [], 0.0
    for _ in range(args.steps):
        # `acting` lists the agents that act next in each environment: agents come and go.
        actions = [{agent: env.action_space[agent].sample() for agent in acting} for acting in env.acting]
        start = time.perf_counter()
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        parallel_s += time.perf_counter() - start
        for episode in env.finished_episodes:
            # The next episode has already begun: `observations` are its first. The last observations of the old
            # episode, which bootstrapping needs, are in the infos.
            last = {agent: infos[episode.env_id][agent]["final_obs"] for agent in episode.returns}
            assert last.keys() == observations[episode.env_id].keys()
            returns.append(sum(episode.returns.values()))
    print(f"{len(returns)} episodes, mean return {sum(returns) / max(len(returns), 1):.1f}")

# The same without the package: one environment after the other.
envs, loop_s = [make_env() for _ in range(args.num_envs)], 0.0
for index, env in enumerate(envs):
    env.reset(seed=args.seed + index)
for _ in range(args.steps):
    actions = [{agent: env.action_space(agent).sample() for agent in env.agents} for env in envs]
    start = time.perf_counter()
    for env, chosen in zip(envs, actions):
        env.step(chosen)
        if not env.agents:
            env.reset()
    loop_s += time.perf_counter() - start

total = args.steps * args.num_envs
print(f"in parallel: {total / parallel_s:8,.0f} environment steps per second")
print(f"plain loop:  {total / loop_s:8,.0f} environment steps per second")
print(f"             {loop_s / parallel_s:8.2f} times as fast")
