"""Eight copies of a multi-agent simulator, stepped side by side with random actions, beside a plain loop over them.

    python examples/quickstart.py
    python examples/quickstart.py --num-workers 1 --backend thread

It needs `pip install -e ".[mpe]"`. Note what is missing: a `if __name__ == "__main__"` guard. Workers never import
this file.
"""

import argparse
import time
from dataclasses import dataclass, fields

from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv


@dataclass
class Args:
    num_envs: int = 8
    """how many copies"""
    num_workers: int | None = None
    """how many worker processes; by default as many as there are CPUs to use"""
    backend: str = "process"
    """where the workers live: process, thread or serial"""
    steps: int = 1000
    """how often each copy is stepped"""
    max_cycles: int = 25
    """how many steps make an episode"""
    seed: int = 1
    """copy i is seeded with seed + i"""


parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
for field in fields(Args):
    kind = str if field.name == "backend" else int
    parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
args = Args(**vars(parser.parse_args()))


def make_env():
    """What a worker calls to make one copy: any callable will do, lambdas and closures too."""
    return simple_spread_v3.parallel_env(max_cycles=args.max_cycles)


# In parallel: lists of dicts in, tuples of dicts out, one dict for each copy.
with ParallelEnv([make_env] * args.num_envs, seed=args.seed, num_workers=args.num_workers, backend=args.backend) as env:
    print(f"{env.num_envs} copies on {env.num_workers} {args.backend} workers, seeds {env.seed()}")
    for agent, space in env.action_space.items():
        space.seed(args.seed)
        print(f"  {agent}: {space}, {env.observation_space[agent]}")

    observations, infos = env.reset()
    returns, finished, parallel_s = [0.0] * env.num_envs, [], 0.0
    for _ in range(args.steps):
        # `acting` says who is to act in each copy: agents come and go.
        actions = [{agent: env.action_space[agent].sample() for agent in acting} for acting in env.acting]
        start = time.perf_counter()
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        parallel_s += time.perf_counter() - start
        for copy in range(env.num_envs):
            returns[copy] += sum(rewards[copy].values())
            if terminateds[copy]["__all__"] or truncateds[copy]["__all__"]:
                # Its next episode has begun already: `observations` are that one's first. The last ones of the
                # episode that is over, which bootstrapping needs, are in the infos.
                last = {agent: infos[copy][agent]["final_obs"] for agent in rewards[copy]}
                assert last.keys() == observations[copy].keys()
                finished.append(returns[copy])
                returns[copy] = 0.0
    print(f"{len(finished)} episodes, mean return {sum(finished) / max(len(finished), 1):.1f}")

# The same without the package: one copy after the other.
copies, loop_s = [make_env() for _ in range(args.num_envs)], 0.0
for index, copy in enumerate(copies):
    copy.reset(seed=args.seed + index)
for _ in range(args.steps):
    actions = [{agent: copy.action_space(agent).sample() for agent in copy.agents} for copy in copies]
    start = time.perf_counter()
    for copy, chosen in zip(copies, actions):
        copy.step(chosen)
        if not copy.agents:
            copy.reset()
    loop_s += time.perf_counter() - start

total = args.steps * args.num_envs
print(f"in parallel: {total / parallel_s:8,.0f} environment steps per second")
print(f"plain loop:  {total / loop_s:8,.0f} environment steps per second")
print(f"             {loop_s / parallel_s:8.2f} times as fast")
