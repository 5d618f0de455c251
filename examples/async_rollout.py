"""Compare a policy that acts for one half of the environments while the other half steps with one that waits for all.

    python examples/async_rollout.py

It needs `pip install -e ".[mpe]"`, and is faster if there is a CPU for the policy and one for each worker.
"""

import argparse
import os
import time

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported: the other CPUs are for the simulators

import numpy as np
from mpe2 import simple_spread_v3

from marl_parallel import FinishedEpisode, ParallelEnv

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--num-envs", type=int, default=64, help="number of environments")
parser.add_argument("--steps", type=int, default=100, help="steps of each environment, in each of the two ways")
args = parser.parse_args()

rng = np.random.default_rng(1)
shapes = [(18, 1024), (1024, 1024), (1024, 1024), (1024, 1024), (1024, 5)]  # observations to values of five actions
weights = [rng.normal(scale=shape[0] ** -0.5, size=shape).astype(np.float32) for shape in shapes]


def policy(observations):
    """One dict of actions for each dict of observations; all agents of all environments at once."""
    values = np.stack([seen for by_agent in observations for seen in by_agent.values()])
    for matrix in weights:
        values = np.tanh(values @ matrix)
    chosen = iter(values.argmax(axis=1).tolist())
    return [{agent: next(chosen) for agent in by_agent} for by_agent in observations]


num_workers = max((os.cpu_count() or 1) - 1, 1)
with ParallelEnv([simple_spread_v3.parallel_env] * args.num_envs, seed=1, num_workers=num_workers) as env:
    # In turns: the workers wait for the policy, and the policy for the workers.
    observations, infos = env.reset()
    start = time.perf_counter()
    for _ in range(args.steps):
        observations, rewards, terminateds, truncateds, infos = env.step(policy(observations))
    in_turns = args.steps * env.num_envs / (time.perf_counter() - start)
    print(f"in turns:  {in_turns:6,.0f} environment steps per second")

    # In two halves: the environments that are ready, at least one half, get new actions while the others step.
    env.reset_async()
    start, stepped = time.perf_counter(), 0
    episodes: list[FinishedEpisode] = []
    while stepped < args.steps * env.num_envs:
        batch = env.recv(min_envs=env.num_envs // 2)
        episodes += env.finished_episodes  # those that ended in these steps
        env.send(policy(batch.observations), batch.env_ids)
        stepped += len(batch.env_ids)
    env.recv()  # so that nothing is left in flight
    in_halves = stepped / (time.perf_counter() - start)
    print(f"in halves: {in_halves:6,.0f} environment steps per second, {in_halves / in_turns:.2f} times as many")
    returns = [sum(episode.returns.values()) for episode in episodes]
    print(f"{len(returns)} episodes in halves, mean return {sum(returns) / max(len(returns), 1):.1f}")
