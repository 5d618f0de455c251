"""Train with TorchRL's MAPPO on many simple_spread environments.

    python examples/torchrl_mappo.py
    python examples/torchrl_mappo.py --smoke

It needs `pip install -e ".[mpe,torchrl]"`. The environments have `auto_reset=False`, since TorchRL resets them
itself: `"next"` has the last observation of an episode, and the first of the next one comes with the next step.
Episodes are truncated after 25 steps here: `done` is set and `terminated` is not. Advantages end there, but the value
of the last observation counts, since the episode could have continued.
"""

import argparse
import time

import torch
from mpe2 import simple_spread_v3
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import RewardSum, TransformedEnv
from torchrl.modules import MultiAgentMLP, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss, ValueEstimators

from marl_parallel import ParallelEnv
from marl_parallel.vector import TorchRLEnv

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--num-envs", type=int, default=32, help="number of environments")
parser.add_argument("--batches", type=int, default=90, help="number of batches")
parser.add_argument("--steps", type=int, default=100, help="steps of each environment in a batch; an episode has 25")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--smoke", action="store_true", help="a run of a few seconds, too short to learn")
args = parser.parse_args()
if args.smoke:
    args.num_envs, args.batches, args.steps = 2, 2, 25

torch.manual_seed(args.seed)
torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
parallel = ParallelEnv([simple_spread_v3.parallel_env] * args.num_envs, auto_reset=False, seed=args.seed)
group = "agent"  # of agent_0, agent_1 and agent_2
summed = RewardSum(in_keys=[(group, "reward")], out_keys=[(group, "episode_reward")], reset_keys=["_reset"])
env = TransformedEnv(TorchRLEnv(parallel), summed)

sizes = {"n_agents": 3, "n_agent_inputs": 18, "share_params": True, "depth": 2, "num_cells": 64}
actor = ProbabilisticActor(
    TensorDictModule(
        MultiAgentMLP(n_agent_outputs=5, centralized=False, **sizes), [(group, "observation")], [(group, "logits")]
    ),
    in_keys=[(group, "logits")],
    out_keys=[(group, "action")],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
    log_prob_key=(group, "log_prob"),
)
critic = TensorDictModule(
    MultiAgentMLP(n_agent_outputs=1, centralized=True, **sizes), [(group, "observation")], [(group, "state_value")]
)
loss = ClipPPOLoss(actor, critic, entropy_coeff=0.01, normalize_advantage=True, normalize_advantage_exclude_dims=(-2,))
names = {"sample_log_prob": "log_prob", "value": "state_value"}
names |= {name: name for name in ("action", "reward", "done", "terminated")}
loss.set_keys(**{key: (group, name) for key, name in names.items()})
loss.loss_mask_key = (group, "mask")  # here all agents always act; if agents die, their rows must not count
loss.make_value_estimator(ValueEstimators.GAE, gamma=0.95, lmbda=0.9)
optimiser = torch.optim.Adam(loss.parameters(), lr=1e-3)

frames = args.num_envs * args.steps
returns = []
start = time.perf_counter()
collector = Collector(
    env, actor, frames_per_batch=frames, total_frames=args.batches * frames, auto_register_policy_transforms=False
)
for batch, data in enumerate(collector):
    with torch.no_grad():
        loss.value_estimator(data, params=loss.critic_network_params, target_params=loss.target_critic_network_params)
    for _ in range(4):
        for part in data.reshape(-1)[torch.randperm(frames)].split(max(frames // 4, 1)):
            losses = loss(part)
            optimiser.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
            optimiser.step()
    over = data["next", "done"].squeeze(-1)  # of environments: an agent that dies is also done before that
    returns.append(data["next", group, "episode_reward"][over].mean().item())
    if batch % 10 == 9:
        print(f"batch {batch + 1:3}: {returns[-1]:7.2f} per agent and episode")
collector.shutdown()
seconds = time.perf_counter() - start
print(f"mean return of an agent's episode, first -> last: {returns[0]:.2f} -> {returns[-1]:.2f}")
print(f"{args.batches * frames:,} steps in {seconds:.0f} s")
