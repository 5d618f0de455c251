"""Independent PPO on simple_spread with several learners, each with environments of its own on a Ray cluster.

    python examples/ray_sharded_ippo.py --local-nodes 2    on this machine, as a cluster of two nodes
    python examples/ray_sharded_ippo.py --learners 4       on the running cluster, or that of RAY_ADDRESS

It needs `pip install -e ".[mpe,ray]" torch tyro` on every node. Each learner is a process with a shard of the
environments and a `RayBackend`. All have the same parameters: each computes gradients on its own data, and
`torch.distributed` (gloo) averages them. The script starts the learners on this machine. Where RANK and WORLD_SIZE are
set, as by torchrun, it is one of them; `clusters/slurm.sh` starts one on each node that way.

The number of learners changes the speed and not the training: episodes, actions and minibatches are the same for 1
learner with 32 environments and for 4 with 8 each, and parameters differ by rounding only, while no environment is
restarted.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from ray.cluster_utils import Cluster
from torch import nn
from torch.distributions import Categorical
from torch.multiprocessing.spawn import spawn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from marl_parallel import Current, RayBackend, Rollout, gae, make
from marl_parallel.vector import StackedVecEnv


@dataclass
class Args:
    """Independent PPO with several learners on a Ray cluster."""

    seed: int = 1
    learners: int = 2
    """number of learner processes that are started here; not used where RANK and WORLD_SIZE are set"""
    num_envs: int = 32
    """number of environments of all learners together"""
    num_nodes: int = 1
    """number of the cluster's nodes for the environments of each learner"""
    workers_per_node: int = 2
    """number of worker processes of each learner on each of its nodes"""
    num_cpus: float = 1.0
    """CPUs that Ray sets aside for each worker"""
    local_nodes: int = 0
    """start a cluster of so many nodes on this machine; with 0, connect to the one that runs"""
    total_steps: int = 250_000
    """steps of all environments together"""
    num_steps: int = 125
    """steps of each environment between updates: five episodes"""
    epochs: int = 8
    minibatches: int = 8
    learning_rate: float = 1e-3
    gamma: float = 0.95
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    max_grad_norm: float = 0.5
    hidden: int = 128
    step_timeout: float = 60.0
    """seconds until an environment that hangs is restarted"""
    placement_timeout: float = 300.0
    """seconds to wait for room in the cluster"""
    learner_timeout: float = 600.0
    """seconds that learners wait for one another, before they end with an error"""
    output: Path = Path("runs/ray_sharded_ippo")
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


# -- what learners exchange --------------------------------------------------------------------------------------------


def average(values: torch.Tensor) -> torch.Tensor:
    """The mean of a tensor over all learners, in place; each of them must call it."""
    dist.all_reduce(values)
    return values.div_(dist.get_world_size())


def average_gradients(module: nn.Module) -> None:
    """All gradients in one message: for networks of this size, the time is that of the message itself."""
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    vector_to_parameters(average(parameters_to_vector(gradients)), gradients)


def from_all(value: Any) -> list[Any]:
    """The value of each learner, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- one learner -------------------------------------------------------------------------------------------------------


class Sampler:
    """Samples actions, with a random generator for each environment.

    So its actions do not depend on which other environments the learner has.
    """

    def __init__(self, agent: Agent, seeds: range) -> None:
        self.agent = agent
        self.generators = [np.random.default_rng((seed, 1)) for seed in seeds]  # (seed, 1): the simulator has `seed`

    @torch.no_grad()
    def __call__(self, current: Current) -> np.ndarray:
        logits = self.agent.actor(torch.from_numpy(current.observations)).numpy()
        noise = np.stack([generator.gumbel(size=logits.shape[1:]) for generator in self.generators])
        return (logits + noise).argmax(-1)  # a sample of softmax(logits)


def update(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> None:
    data = rollout.torch()
    observations, actions = data.observations[:-1], data.actions
    with torch.no_grad():
        values, final_values = agent.value(data.observations), agent.value(data.final_observations[data.done])
        estimates = gae(rollout.arrays, values.numpy(), final_values.numpy(), args.gamma, args.gae_lambda)
        advantages, targets = map(torch.from_numpy, estimates)
        advantages = advantages - average(advantages.mean())
        advantages = advantages / (average(advantages.square().mean()).sqrt() + 1e-8)
        log_probs = agent.policy(observations).log_prob(actions)
    for _ in range(args.epochs):
        # The same steps in all learners, since their generators of torch are in the same state.
        for steps in torch.randperm(args.num_steps).chunk(args.minibatches):
            policy = agent.policy(observations[steps])
            ratio = (policy.log_prob(actions[steps]) - log_probs[steps]).exp()
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            gain = torch.min(ratio * advantages[steps], clipped * advantages[steps]).mean()
            error = (agent.value(observations[steps]) - targets[steps]).square().mean()
            loss = -gain + 0.5 * error - args.entropy * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(agent)
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()


def train(args: Args) -> None:
    """One learner: the first one writes the log, with a row for each update, and the parameters."""
    rank, learners = dist.get_rank(), dist.get_world_size()
    if args.num_envs % learners:
        sys.exit(f"--num-envs must be a multiple of the number of learners, {learners}; got {args.num_envs}")
    shard = args.num_envs // learners
    # Shards have consecutive seeds, and runs with other seeds are far away: no episode is played twice.
    first_seed = 1_000_000 * args.seed + rank * shard
    backend = RayBackend(
        "auto",
        args.num_cpus,
        placement="SPREAD",
        workers_per_node=args.workers_per_node,
        placement_timeout=args.placement_timeout,
    )
    parallel = make(
        "mpe2.simple_spread_v3",
        num_envs=shard,
        env_kwargs={"max_cycles": 25},
        seed=first_seed,
        num_workers=min(args.num_nodes * args.workers_per_node, shard),
        backend=backend,
        on_error="restart",
        step_timeout=args.step_timeout,
        reset_timeout=args.step_timeout,
    )
    with contextlib.closing(StackedVecEnv(parallel)) as env:
        torch.manual_seed(args.seed)
        agent = Agent(env.single_observation_space.shape[0], env.single_action_space.n, args.hidden)
        sampler = Sampler(agent, range(first_seed, first_seed + shard))
        rollout = Rollout(env, args.num_steps)
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        log = []
        updates = max(args.total_steps // (args.num_steps * args.num_envs), 1)
        dist.barrier()
        start, collecting = time.perf_counter(), 0.0
        for number in range(updates):
            began = time.perf_counter()
            rollout.collect(sampler)
            collecting += time.perf_counter() - began
            returns = [float(np.mean([*each.returns.values()])) for each in rollout.finished_episodes]
            update(agent, optimizer, rollout, args)
            sums = torch.tensor([sum(returns), len(returns), parallel.stats().restarts], dtype=torch.float64)
            dist.all_reduce(sums)
            total, episodes, restarts = sums.tolist()
            steps, seconds = (number + 1) * args.num_steps * args.num_envs, time.perf_counter() - start
            row = {"steps": steps, "return": total / episodes, "restarts": int(restarts), "seconds": seconds}
            log.append(row)
            if rank == 0:
                line = f"{steps:9,} steps: return {row['return']:6.2f}, {steps / seconds:7,.0f} steps/s"
                print(line, f"{row['restarts']} restarts", sep=", ", flush=True)
        steps = updates * args.num_steps * shard
        parameters = parameters_to_vector(agent.parameters()).detach().numpy().tobytes()
        results = from_all((steps / collecting, steps / seconds, hashlib.sha256(parameters).hexdigest()[:16]))
    if rank == 0:
        for learner, (alone, together, digest) in enumerate(results):
            print(f"learner {learner}: {together:,.0f} steps/s, {alone:,.0f} while it collects, parameters {digest}")
        alone, together = (sum(column) for column in [*zip(*results)][:2])
        print(f"sum of {learners} learners: {together:,.0f} environment steps/s, {alone:,.0f} while they collect")
        save(agent, log, args)
    if len({digest for *_, digest in results}) > 1:
        sys.exit("the learners do not have the same parameters")


def save(agent: Agent, log: list[dict[str, float]], args: Args) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    torch.save(agent.state_dict(), args.output / f"seed_{args.seed}.pt")
    with (args.output / f"seed_{args.seed}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, log[0])
        writer.writeheader()
        writer.writerows(log)
    print(f"log and parameters: {args.output}")


# -- processes ---------------------------------------------------------------------------------------------------------


def learner(rank: int, learners: int, rendezvous: str, args: Args) -> None:
    """The main function of a learner process."""
    logging.basicConfig(format=f"learner {rank}: %(levelname)s %(message)s")  # each restart is a line
    torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
    # A learner that dies closes its connections, and the others get an error. For one that hangs there is the timeout.
    timeout = timedelta(seconds=args.learner_timeout)
    dist.init_process_group("gloo", rendezvous, timeout, rank=rank, world_size=learners)
    train(args)
    dist.destroy_process_group()


@contextlib.contextmanager
def local_cluster(args: Args) -> Iterator[None]:
    """A cluster of nodes on this machine, with room for all workers: its number of CPUs is not that of the machine."""
    of_each = math.ceil(args.workers_per_node * args.num_cpus) * math.ceil(
        args.learners * args.num_nodes / args.local_nodes
    )
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": of_each, "include_dashboard": False})
    try:
        for _ in range(args.local_nodes - 1):
            cluster.add_node(num_cpus=of_each)
        os.environ["RAY_ADDRESS"] = str(cluster.address)  # for the learners
        yield
    finally:
        cluster.shutdown()


def main(args: Args) -> None:
    if args.smoke:
        args = dataclasses.replace(args, num_envs=8, num_steps=50, total_steps=1200)
    if (
        "RANK" in os.environ
    ):  # started by torchrun, or by srun in clusters/slurm.sh; MASTER_ADDR and MASTER_PORT are set
        learner(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", args)
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        local_cluster(args) if args.local_nodes else contextlib.nullcontext(),
    ):
        # If one learner fails, `spawn` ends the others and raises its error.
        spawn(learner, (args.learners, f"file://{folder}/rendezvous", args), nprocs=args.learners)


if __name__ == "__main__":
    main(tyro.cli(Args))
