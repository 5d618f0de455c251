"""MAPPO on simple_spread: agents act on their own observations, and the critic sees the state of the environment.

    python examples/mappo_simple_spread.py

It needs `pip install -e ".[examples]"`. `StackedVecEnv(with_state=True)` has the observations of all agents
and the states of all environments. When an episode is over, its last observations and its last state are there, too, so
that the critic can compute the value of a truncated episode's last state.
"""

from __future__ import annotations

import csv
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import tyro
from rich.progress import track
from torch import nn
from torch.distributions import Categorical

from marl_parallel import Current, Rollout, gae, make
from marl_parallel.vector import StackedVecEnv

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass
class Args:
    """MAPPO on simple_spread, with one policy and one critic for all agents."""

    seed: int = 1
    num_envs: int = 16
    """number of environments"""
    num_workers: int | None = None
    """number of worker processes; by default one per CPU"""
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
    hidden: int = 128
    output: Path = Path("runs/mappo_simple_spread")
    """folder of the log and the curve"""
    smoke: bool = False
    """a run of a few seconds, too short to learn"""


class Agents(nn.Module):
    """The networks that all agents share. The critic sees the state of the environment and the agent's observation."""

    def __init__(self, env: StackedVecEnv, hidden: int) -> None:
        super().__init__()
        (seen,), (whole,) = env.single_observation_space.shape, env.state_space.shape
        self.actor = network(seen, hidden, int(env.single_action_space.n), gain=0.01)
        self.critic = network(seen + whole, hidden, 1, gain=1.0)

    def policy(self, observations: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(observations), validate_args=False)

    def value(self, observations: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Values `(..., agents)`, of observations `(..., agents, size)` and states `(..., size)`."""
        states = states.unsqueeze(-2).expand(*observations.shape[:-1], -1)
        return self.critic(torch.cat([observations, states], -1)).squeeze(-1)

    @torch.no_grad()
    def act(self, current: Current) -> np.ndarray:
        return self.policy(torch.from_numpy(current.observations)).sample().numpy()


def network(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def mean_return(rollout: Rollout) -> float:
    """Mean return of an agent, over the episodes that ended."""
    return float(np.mean([list(episode.returns.values()) for episode in rollout.finished_episodes]))


def update(agents: Agents, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> None:
    data = rollout.torch()
    with torch.no_grad():
        values = agents.value(data.observations, data.states)
        final_values = agents.value(data.final_observations[data.done], data.final_states[data.done])
        estimates = gae(rollout.arrays, values.numpy(), final_values.numpy(), args.gamma, args.gae_lambda)
        advantages, targets = (torch.from_numpy(each).flatten(0, 1) for each in estimates)
        observations, states, actions = (
            each[: args.num_steps].flatten(0, 1) for each in (data.observations, data.states, data.actions)
        )
        log_probs = agents.policy(observations).log_prob(actions)
    for _ in range(args.epochs):
        for part in torch.randperm(len(actions)).chunk(args.minibatches):
            policy = agents.policy(observations[part])
            ratio = (policy.log_prob(actions[part]) - log_probs[part]).exp()
            advantage = advantages[part]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            gain = torch.min(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage).mean()
            error = (agents.value(observations[part], states[part]) - targets[part]).square().mean()
            loss = -gain + 0.5 * error - args.entropy * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agents.parameters(), 0.5)
            optimizer.step()


def train(args: Args) -> list[dict[str, float]]:
    """One run; returns its log, with a row for each update."""
    torch.manual_seed(args.seed)
    parallel = make(
        "mpe2.simple_spread_v3",
        num_envs=args.num_envs,
        env_kwargs={"max_cycles": 25},
        seed=1000 * args.seed,
        num_workers=args.num_workers,
    )
    with StackedVecEnv(parallel, with_state=True) as env:
        agents = Agents(env, args.hidden)
        optimizer = torch.optim.Adam(agents.parameters(), lr=args.learning_rate, eps=1e-5)
        rollout = Rollout(env, args.num_steps)
        updates = max(args.total_steps // (args.num_steps * args.num_envs), 1)
        log: list[dict[str, float]] = []
        start = time.perf_counter()
        for number in track(range(updates), f"seed {args.seed}"):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - number / updates)
            rollout.collect(agents.act)
            mean = mean_return(rollout)
            update(agents, optimizer, rollout, args)
            steps = (number + 1) * args.num_steps * args.num_envs
            log.append({"steps": steps, "return": mean, "seconds": time.perf_counter() - start})
    return log


def save(log: list[dict[str, float]], args: Args) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / f"seed_{args.seed}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, log[0])
        writer.writeheader()
        writer.writerows(log)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([row["steps"] for row in log], [row["return"] for row in log])
    axes.set(title="MAPPO on simple_spread", xlabel="environment steps", ylabel="mean return of an agent's episode")
    figure.savefig(args.output / "learning_curve.png", dpi=120)


def main(args: Args) -> None:
    torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
    if args.smoke:
        args = dataclasses.replace(args, num_envs=4, num_steps=50, total_steps=600)
    log = train(args)
    save(log, args)
    first, last = (np.mean([row["return"] for row in part]) for part in (log[:3], log[-10:]))
    print(f"mean return of an agent's episode, first -> last updates: {first:.2f} -> {last:.2f}")
    print(f"{log[-1]['steps']:,} steps in {log[-1]['seconds']:.0f} s; log and curve: {args.output}")


if __name__ == "__main__":
    main(tyro.cli(Args))
