"""Train with AgileRL's own multi-agent function: IPPO on eight simple_spread environments.

    python examples/agilerl_train.py
    python examples/agilerl_train.py --smoke

It needs `pip install -e ".[mpe,agilerl]"`. AgileRL's function takes the facade like its own vector environment,
trains all agents with one pair of networks, and closes it.
"""

import argparse
import functools
import time
from typing import Any

import numpy as np
import torch
from agilerl.algorithms import IPPO
from agilerl.training.train_multi_agent_on_policy import train_multi_agent_on_policy
from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv
from marl_parallel.vector import AgileRLVecEnv

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--num-envs", type=int, default=8, help="number of environments")
parser.add_argument("--num-workers", type=int, default=None, help="number of worker processes")
parser.add_argument("--steps", type=int, default=40_000, help="steps of all environments together")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--smoke", action="store_true", help="a run of a few seconds, too short to learn")
args = parser.parse_args()
steps, learn_step, episodes = (800, 200, 1) if args.smoke else (args.steps, 1_000, 10)

torch.manual_seed(args.seed)
np.random.seed(args.seed)
torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
make_env = functools.partial(simple_spread_v3.parallel_env, max_cycles=25)


def vectorised(seed):
    """All environments as one vector environment of AgileRL."""
    return AgileRLVecEnv(ParallelEnv([make_env] * args.num_envs, seed=seed, num_workers=args.num_workers))


env, unseen = vectorised(args.seed), vectorised(args.seed + 1000)
observed: Any = [env.single_observation_space(agent) for agent in env.agents]  # IPPO's annotation names some spaces
algorithm = IPPO(
    observation_spaces=observed,
    action_spaces=[env.single_action_space(agent) for agent in env.agents],
    agent_ids=env.agents,
    learn_step=learn_step,
    batch_size=learn_step // 4,
    update_epochs=10,
    lr=1e-3,
    gamma=0.95,
    net_config={"encoder_config": {"hidden_size": [64]}, "head_config": {"hidden_size": [64]}, "latent_dim": 64},
)
before = algorithm.test(unseen, loop=episodes)
start = time.perf_counter()
(trained,), _ = train_multi_agent_on_policy(
    env, "simple_spread_v3", "IPPO", [algorithm], max_steps=steps, evo_steps=steps // 4, eval_loop=1, verbose=False
)
seconds = time.perf_counter() - start
after = trained.test(unseen, loop=episodes)

print(f"{args.num_envs} environments on {unseen.env.num_workers} workers")
print(f"{steps:,} steps in {seconds:.0f} s: {steps / seconds:,.0f} per second, with learning and evaluation")
print(f"mean return of an episode, all agents together, before -> after training: {before:.1f} -> {after:.1f}")
unseen.close()
