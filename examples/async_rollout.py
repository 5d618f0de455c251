"""A policy that acts on one half of the copies while the other half simulates, beside one that takes turns with all.

    python examples/async_rollout.py

It needs `pip install -e ".[mpe]"`, and gains where there is a CPU for the policy and one for each worker.
"""

import argparse
import os
import time

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported: the other CPUs are for the simulators

import numpy as np
from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--num-envs", type=int, default=64, help="how many copies")
parser.add_argument("--steps", type=int, default=100, help="how often each copy is stepped, in each of the two ways")
args = parser.parse_args()

rng = np.random.default_rng(1)
shapes = [(18, 1024), (1024, 1024), (1024, 1024), (1024, 1024), (1024, 5)]  # observations to values of five actions
weights = [rng.normal(scale=shape[0] ** -0.5, size=shape).astype(np.float32) for shape in shapes]


def policy(observations):
    """One dict of actions for each dict of observations; all agents of all copies at once."""
    values = np.stack([seen for copy in observations for seen in copy.values()])
    for matrix in weights:
        values = np.tanh(values @ matrix)
    chosen = iter(values.argmax(axis=1).tolist())
    return [{agent: next(chosen) for agent in copy} for copy in observations]


num_workers = max(os.cpu_count() - 1, 1)
with ParallelEnv([simple_spread_v3.parallel_env] * args.num_envs, seed=1, num_workers=num_workers) as env:
    # In turns: the workers wait for the policy, and the policy for the workers.
    observations, infos = env.reset()
    start = time.perf_counter()
    for _ in range(args.steps):
        observations, rewards, terminateds, truncateds, infos = env.step(policy(observations))
    in_turns = args.steps * env.num_envs / (time.perf_counter() - start)
    print(f"in turns:  {in_turns:6,.0f} environment steps per second")

    # In two halves: whoever is ready, at least one half, is sent new actions; meanwhile the others simulate.
    env.reset_async()
    start, stepped, returns = time.perf_counter(), 0, [0.0] * env.num_envs
    while stepped < args.steps * env.num_envs:
        batch = env.recv(min_envs=env.num_envs // 2)
        env.send(policy(batch.observations), batch.env_ids)
        for copy, rewards in zip(batch.env_ids, batch.rewards):
            returns[copy] += sum(rewards.values())  # of a reset they are 0.0
        stepped += len(batch.env_ids)
    env.recv()  # so that nothing is left in flight
    in_halves = stepped / (time.perf_counter() - start)
    print(f"in halves: {in_halves:6,.0f} environment steps per second, {in_halves / in_turns:.2f} times as many")
