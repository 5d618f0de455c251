"""Train with RLlib's PPO on eight simple_spread environments in worker processes, with one policy for all agents.

    python examples/rllib_ppo.py
    python examples/rllib_ppo.py --num-env-runners 1 --iterations 5

It needs `pip install -e ".[mpe,rllib]" torch`. The only line to add to an RLlib script is
`env_runner_cls=...`. Episodes are truncated after 25 steps here and never terminate: the runner passes their last
observation and `truncated` to RLlib, and RLlib's PPO adds the value of that observation. The next episode begins with a
step of its own, which RLlib's runners need.
"""

import argparse
import os
import time

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from mpe2 import simple_spread_v3
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune import register_env

from marl_parallel.vector import ParallelMultiAgentEnvRunner

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--iterations", type=int, default=40, help="number of PPO iterations")
parser.add_argument("--num-envs", type=int, default=8, help="environments of each runner")
parser.add_argument(
    "--num-env-runners", type=int, default=0, help="number of runner processes; 0: one runner in this process"
)
parser.add_argument("--smoke", action="store_true", help="a short run that does not learn")
args = parser.parse_args()

ray.init(include_dashboard=False, log_to_driver=False)

# A PettingZoo environment; RLlib's own `MultiAgentEnv` works as well.
register_env("spread", lambda context: simple_spread_v3.parallel_env(max_cycles=25))

config = (
    PPOConfig()
    .environment(
        "spread",
        # Arguments for `ParallelEnv`: an environment that raises, dies or hangs is rebuilt, and the others continue.
        env_config={"parallel_env": {"on_error": "restart", "step_timeout": 30.0}},
    )
    .multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent, episode, **_: "shared")
    .env_runners(
        env_runner_cls=ParallelMultiAgentEnvRunner,
        num_envs_per_env_runner=args.num_envs,
        num_env_runners=args.num_env_runners,
    )
    .training(
        lr=1e-3,
        gamma=0.95,
        entropy_coeff=0.01,
        train_batch_size_per_learner=400 if args.smoke else 2000,
        minibatch_size=400,
        num_epochs=2 if args.smoke else 8,
    )
    .debugging(seed=1, log_level="ERROR")
)

algorithm = config.build_algo()
start, steps, first = time.perf_counter(), 0, None
for iteration in range(2 if args.smoke else args.iterations):
    sampled = algorithm.train()["env_runners"]
    steps += sampled["num_env_steps_sampled"]
    mean = sampled["episode_return_mean"]
    first = mean if first is None else first
    print(f"{iteration + 1:3}: mean return {mean:7.1f}, {steps / (time.perf_counter() - start):5.0f} steps per second")
print(f"mean return of an episode, all agents together, first -> last: {first:.1f} -> {mean:.1f}, {steps:.0f} steps")
algorithm.stop()
ray.shutdown()
