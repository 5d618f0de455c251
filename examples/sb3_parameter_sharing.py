"""Train with Stable-Baselines3's PPO: one policy for all agents of eight simple_spread environments.

    python examples/sb3_parameter_sharing.py
    python examples/sb3_parameter_sharing.py --smoke

It needs `pip install -e ".[mpe,sb3]"`. Eight environments with three agents are 24 rows, which PPO treats as
24 environments. Every episode is truncated after 25 steps here and does not terminate, so the value of its last state
counts. At the last step, the infos of each row have `TimeLimit.truncated` and the last observation of the episode
(`terminal_observation`), and PPO adds the value of that observation to the reward.
"""

import argparse
import functools
import time

import torch
from mpe2 import simple_spread_v3
from stable_baselines3 import PPO

from marl_parallel import ParallelEnv
from marl_parallel.vector import SB3VecEnv, evaluate_policy

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--num-envs", type=int, default=8, help="number of environments")
parser.add_argument("--num-workers", type=int, default=None, help="number of worker processes")
parser.add_argument("--timesteps", type=int, default=300_000, help="steps of all rows together")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--smoke", action="store_true", help="a run of a few seconds, too short to learn")
args = parser.parse_args()
timesteps, episodes = (5_000, 8) if args.smoke else (args.timesteps, 80)

make_env = functools.partial(simple_spread_v3.parallel_env, max_cycles=25)
torch.set_num_threads(1)  # small networks: the CPUs are for the simulators


def vectorised(seed):
    """All environments as one `VecEnv` of Stable-Baselines3, with the return of each agent's episode in its infos."""
    return SB3VecEnv(ParallelEnv([make_env] * args.num_envs, seed=seed, num_workers=args.num_workers))


env, unseen = vectorised(args.seed), vectorised(args.seed + 1000)
model = PPO(
    "MlpPolicy",
    env,
    n_steps=125,  # five episodes of each row
    batch_size=750,
    n_epochs=10,
    learning_rate=1e-3,
    gamma=0.95,
    ent_coef=0.01,
    device="cpu",
    seed=args.seed,
    policy_kwargs={"net_arch": [128, 128]},
)
before, _ = evaluate_policy(model, unseen, n_eval_episodes=episodes, deterministic=False)
start = time.perf_counter()
model.learn(timesteps)
seconds = time.perf_counter() - start
after, _ = evaluate_policy(model, unseen, n_eval_episodes=episodes, deterministic=False)

print(f"{args.num_envs} environments on {env.parallel_env.num_workers} workers, {env.num_envs} rows")
print(f"{model.num_timesteps:,} timesteps in {seconds:.0f} s: {model.num_timesteps / seconds:,.0f} per second")
print(f"mean return of an agent's episode, before -> after training: {before:.1f} -> {after:.1f}")
stats = env.parallel_env.stats()
print(f"time in simulators: {stats.simulator_s:.0f} s, summed over workers")
env.close()
unseen.close()
