"""Independent PPO on simple_spread in several processes (ranks), on one machine or on several, without Ray.

    torchrun --standalone --nproc-per-node 2 examples/torchrun_ippo.py    two ranks on this machine
    sbatch examples/clusters/slurm_ranks.sh                               several nodes of a Slurm cluster, by srun
    python examples/torchrun_ippo.py                                      one rank

It needs `pip install -e ".[mpe]" torch tyro`. Each rank has environments of its own, in its own worker processes, and a
copy of the networks, on a GPU if there is one. `torch.distributed` (nccl on GPUs, gloo on CPUs) averages gradients, so
all ranks keep the same parameters. At its end, the program checks that.

If a rank dies, torchrun, or `srun --kill-on-bad-exit=1`, ends the others. If a rank hangs, the others end with an error
after `--rank-timeout` seconds. Workers end with their rank. Training is that of `ippo_simple_spread.py`, except that
advantages are normalised over the data of all ranks, before they are cut into minibatches.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributions import Categorical
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from marl_parallel import Current, Rollout, gae, make
from marl_parallel.vector import StackedVecEnv


@dataclass
class Args:
    """Independent PPO in several ranks, with averaged gradients."""

    seed: int = 1
    num_envs: int = 8
    """number of environments of each rank"""
    num_workers: int | None = None
    """number of worker processes of each rank; by default the CPUs of the rank"""
    device: Literal["auto", "cpu"] = "auto"
    """"cpu": do not use GPUs"""
    total_steps: int = 250_000
    """steps of all environments of all ranks together"""
    num_steps: int = 125
    """steps of each environment between updates: five episodes"""
    epochs: int = 8
    minibatches: int = 8
    learning_rate: float = 1e-3
    gamma: float = 0.95
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    hidden: int = 128
    step_timeout: float = 60.0
    """seconds until an environment that hangs is restarted"""
    rank_timeout: float = 600.0
    """seconds that ranks wait for one another, before they end with an error; more than `step_timeout`"""
    output: Path = Path("runs/torchrun_ippo")
    """folder of the log and the parameters"""
    smoke: bool = False
    """a run of a few seconds, too short to learn"""


class Agent(nn.Module):
    """The networks that all agents share: a policy, and the value of one agent's observation."""

    def __init__(self, observation_size: int, num_actions: int, hidden: int) -> None:
        super().__init__()
        self.actor = network(observation_size, hidden, num_actions, gain=0.01)
        self.critic = network(observation_size, hidden, 1, gain=1.0)

    def value(self, observations: torch.Tensor) -> torch.Tensor:
        return self.critic(observations).squeeze(-1)

    def policy(self, observations: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(observations), validate_args=False)


def network(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


# -- ranks -------------------------------------------------------------------------------------------------------------


def join(args: Args) -> torch.device:
    """Make this process a rank, and return its device. Without torchrun and srun, it is the only rank."""
    environ = os.environ
    if "RANK" not in environ and "SLURM_STEP_NUM_TASKS" in environ:  # a task of srun: sbatch alone does not set it
        hosts = subprocess.check_output(["scontrol", "show", "hostnames", environ["SLURM_STEP_NODELIST"]], text=True)
        environ.setdefault("MASTER_ADDR", hosts.split()[0])
        environ.setdefault("MASTER_PORT", str(20000 + int(environ["SLURM_JOB_ID"]) % 10000))  # the same in all ranks
        environ["RANK"], environ["WORLD_SIZE"] = environ["SLURM_PROCID"], environ["SLURM_STEP_NUM_TASKS"]
        environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    elif "RANK" not in environ:
        environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")  # 0: any free port
    backend, device = "gloo", torch.device("cpu")
    if args.device == "auto" and torch.cuda.is_available():
        # Where a rank sees only its own GPU, as with `srun --gpus-per-task=1`, that is number 0.
        backend, device = "nccl", torch.device("cuda", int(environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=args.rank_timeout))
    return device


def cpus_of_rank() -> int:
    """Number of CPUs for this rank: ranks of one machine that share their CPUs, as with torchrun, divide them."""
    mine = socket.gethostname(), os.sched_getaffinity(0)
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return max(len(mine[1]) // everyone.count(mine), 1)


def average(values: torch.Tensor) -> torch.Tensor:
    """The mean of a tensor over all ranks, in place; each of them must call it."""
    dist.all_reduce(values)
    return values.div_(dist.get_world_size())


def average_gradients(module: nn.Module) -> None:
    """All gradients in one message: for networks of this size, the time is that of the message itself."""
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    vector_to_parameters(average(parameters_to_vector(gradients)), gradients)


def same_parameters(module: nn.Module) -> bool:
    """Whether all ranks have the same parameters, bit for bit."""
    lowest = parameters_to_vector(module.parameters()).detach()
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)


# -- training ----------------------------------------------------------------------------------------------------------


def update(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args, device: torch.device) -> None:
    data = rollout.torch(device)
    observations, actions = data.observations[:-1].flatten(0, 2), data.actions.flatten()
    with torch.no_grad():
        values, final_values = agent.value(data.observations), agent.value(data.final_observations[data.done])
        estimates = gae(rollout.arrays, values.cpu().numpy(), final_values.cpu().numpy(), args.gamma, args.gae_lambda)
        advantages, targets = (torch.from_numpy(each).flatten().to(device) for each in estimates)
        advantages = advantages - average(advantages.mean())
        advantages = advantages / (average(advantages.square().mean()).sqrt() + 1e-8)
        log_probs = agent.policy(observations).log_prob(actions)
    for _ in range(args.epochs):
        # Each rank shuffles its own data: the sizes of minibatches are equal, so means of means are right.
        for part in torch.randperm(len(actions)).chunk(args.minibatches):
            policy = agent.policy(observations[part])
            ratio = (policy.log_prob(actions[part]) - log_probs[part]).exp()
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            gain = torch.min(ratio * advantages[part], clipped * advantages[part]).mean()
            error = (agent.value(observations[part]) - targets[part]).square().mean()
            loss = -gain + 0.5 * error - args.entropy * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(agent)
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def train(args: Args, device: torch.device) -> None:
    """One rank: rank 0 writes the log, with a row for each update, and the parameters."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_workers = min(args.num_workers or cpus_of_rank(), args.num_envs)
    parallel = make(
        "mpe2.simple_spread_v3",
        num_envs=args.num_envs,
        env_kwargs={"max_cycles": 25},
        # Environment i of a rank has this seed + i: ranks play different episodes, and so do runs with other seeds.
        seed=1_000_000 * args.seed + rank * args.num_envs,
        num_workers=num_workers,
        on_error="restart",
        step_timeout=args.step_timeout,
        reset_timeout=args.step_timeout,
    )
    with contextlib.closing(StackedVecEnv(parallel)) as env:
        torch.manual_seed(1_000_000 * args.seed + rank)  # ranks sample different actions
        agent = Agent(env.single_observation_space.shape[0], env.single_action_space.n, args.hidden).to(device)
        for parameter in agent.parameters():
            dist.broadcast(parameter.data, src=0)

        @torch.no_grad()
        def act(current: Current) -> np.ndarray:
            return agent.policy(torch.from_numpy(current.observations).to(device)).sample().cpu().numpy()

        rollout, log = Rollout(env, args.num_steps), []
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        per_update = args.num_steps * args.num_envs * ranks
        updates, start = max(args.total_steps // per_update, 1), time.perf_counter()
        for number in range(updates):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - number / updates)
            rollout.collect(act)
            returns = [float(np.mean([*each.returns.values()])) for each in rollout.finished_episodes]
            update(agent, optimizer, rollout, args, device)
            sums = torch.tensor([sum(returns), len(returns), parallel.stats().restarts], device=device)
            dist.all_reduce(sums)
            total, episodes, restarts = sums.tolist()
            steps, seconds = (number + 1) * per_update, time.perf_counter() - start
            log.append({"steps": steps, "return": total / episodes, "restarts": int(restarts), "seconds": seconds})
            if rank == 0:
                line = f"{steps:9,} steps: return {total / episodes:6.2f}, {steps / seconds:7,.0f} steps/s"
                print(line, f"{restarts:.0f} restarts", sep=", ", flush=True)
    if not same_parameters(agent):
        sys.exit(f"rank {rank}: the ranks do not have the same parameters")
    if rank == 0:
        print(f"environments of each rank: {args.num_envs}, workers: {num_workers}")
        print("1 rank has no other to compare with" if ranks == 1 else f"{ranks} ranks have the same parameters")
        save(agent, log, args)


def save(agent: Agent, log: list[dict[str, float]], args: Args) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    torch.save(agent.state_dict(), args.output / f"seed_{args.seed}.pt")
    with (args.output / f"seed_{args.seed}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, log[0])
        writer.writeheader()
        writer.writerows(log)
    print(f"log and parameters: {args.output}")


def main(args: Args) -> None:
    torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
    if args.smoke:
        args = dataclasses.replace(args, num_envs=4, num_steps=50, total_steps=1200)
    device = join(args)
    logging.basicConfig(format=f"rank {dist.get_rank()}: %(levelname)s %(message)s")  # each restart is a line
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args))
