"""MAPPO on simple_spread: agents act on their own observations, and the critic sees the state of the environment.

    python examples/mappo_simple_spread.py

It needs `pip install "marl-parallel[examples]"`. `PettingZooVecEnv` returns arrays by agent, and `state()` the states
of all environments. The environments reset one step later (`NEXT_STEP`): when an episode is over, `state()` is still
its last one, so the critic can compute the value of a truncated episode's last state. In the step that resets, no agent
acts; a mask excludes it from training.
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

from marl_parallel import make
from marl_parallel.vector import PettingZooVecEnv

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
    num_steps: int = 130
    """steps of each environment between updates: five episodes of 25 and their resets"""
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

    def __init__(self, env: PettingZooVecEnv, hidden: int) -> None:
        super().__init__()
        first = env.possible_agents[0]
        (seen,), (whole,) = env.single_observation_space(first).shape, env.env.state_space.shape
        self.actor = network(seen, hidden, int(env.single_action_space(first).n), gain=0.01)
        self.critic = network(seen + whole, hidden, 1, gain=1.0)

    def policy(self, observations: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(observations), validate_args=False)

    def value(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.critic(inputs).squeeze(-1)


def network(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


@dataclass
class Rollout:
    """The collected data, `(steps, envs, agents, ...)`; `observations` and `states` have one step more."""

    observations: torch.Tensor
    states: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    terminated: torch.Tensor
    over: torch.Tensor
    acting: torch.Tensor

    @classmethod
    def empty(cls, num_steps: int, env: PettingZooVecEnv) -> Rollout:
        rows = (num_steps, env.num_envs, env.max_num_agents)
        observations = torch.zeros(num_steps + 1, *rows[1:], *env.single_observation_space("agent_0").shape)
        states = torch.zeros(num_steps + 1, env.num_envs, *env.env.state_space.shape)
        flags = torch.zeros(3, *rows, dtype=torch.bool)
        return cls(observations, states, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows), *flags)

    @property
    def inputs(self) -> torch.Tensor:
        """The critic's input for each agent: its observation and the state of its environment."""
        states = self.states.unsqueeze(2).expand(*self.observations.shape[:3], -1)
        return torch.cat([self.observations, states], -1)

    def advantages(self, agents: Agents, gamma: float, gae_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Generalised advantage estimates, and the targets of the critic.

        The value of the last state counts if the episode was truncated, since it could have continued, and not if it
        terminated. No advantage is passed on across either end.
        """
        values = agents.value(self.inputs)
        surprises = self.rewards + gamma * values[1:] * ~self.terminated - values[:-1]
        advantages = torch.zeros_like(surprises)
        later = torch.zeros_like(surprises[0])
        for step in reversed(range(len(surprises))):
            later = advantages[step] = surprises[step] + gamma * gae_lambda * ~self.over[step] * later
        return advantages, advantages + values[:-1]


class Collector:
    """Steps the environments with the agents' actions, and sums the returns of episodes."""

    def __init__(self, env: PettingZooVecEnv, agents: Agents, num_steps: int) -> None:
        self.env, self.agents = env, agents
        self.rollout = Rollout.empty(num_steps, env)
        self.running = torch.zeros(env.num_envs)
        observations, _ = env.reset()
        self.see(-1, observations)

    def see(self, step: int, observations: dict[str, np.ndarray]) -> None:
        self.rollout.observations[step] = self.stacked(observations)
        self.rollout.states[step] = torch.as_tensor(self.env.state())

    def stacked(self, by_agent: dict[str, np.ndarray]) -> torch.Tensor:
        """Stack arrays by agent `(num_envs, ...)` to one of `(num_envs, agents, ...)`."""
        return torch.as_tensor(np.stack([by_agent[agent] for agent in self.env.possible_agents], axis=1))

    @torch.no_grad()
    def collect(self) -> list[float]:
        """Fill the rollout; returns the mean return of an agent for each episode that ended."""
        rollout, finished = self.rollout, []
        rollout.observations[0], rollout.states[0] = rollout.observations[-1], rollout.states[-1]
        for step in range(len(rollout.actions)):
            rollout.acting[step] = self.stacked(self.env.acting)
            actions = self.agents.policy(rollout.observations[step]).sample()
            rollout.actions[step] = actions
            by_agent = dict(zip(self.env.possible_agents, actions.T.numpy()))
            observations, rewards, terminations, truncations, _ = self.env.step(by_agent)
            self.see(step + 1, observations)
            rollout.rewards[step], rollout.terminated[step] = self.stacked(rewards), self.stacked(terminations)
            rollout.over[step] = rollout.terminated[step] | self.stacked(truncations)
            self.running += rollout.rewards[step].mean(-1)
            ended = rollout.over[step].all(-1)
            finished += self.running[ended].tolist()
            self.running[ended] = 0.0
        return finished


def update(agents: Agents, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> None:
    with torch.no_grad():
        advantages, targets = rollout.advantages(agents, args.gamma, args.gae_lambda)
        log_probs = agents.policy(rollout.observations[:-1]).log_prob(rollout.actions)
    mask = rollout.acting  # excludes steps that reset
    observations, inputs, actions = rollout.observations[:-1][mask], rollout.inputs[:-1][mask], rollout.actions[mask]
    advantages, targets, log_probs = advantages[mask], targets[mask], log_probs[mask]
    for _ in range(args.epochs):
        for part in torch.randperm(len(actions)).chunk(args.minibatches):
            policy = agents.policy(observations[part])
            ratio = (policy.log_prob(actions[part]) - log_probs[part]).exp()
            advantage = advantages[part]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            gain = torch.min(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage).mean()
            error = (agents.value(inputs[part]) - targets[part]).square().mean()
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
        auto_reset="NEXT_STEP",
        seed=1000 * args.seed,
        num_workers=args.num_workers,
    )
    with PettingZooVecEnv(parallel) as env:
        agents = Agents(env, args.hidden)
        optimizer = torch.optim.Adam(agents.parameters(), lr=args.learning_rate, eps=1e-5)
        collector = Collector(env, agents, args.num_steps)
        updates = max(args.total_steps // (args.num_steps * args.num_envs), 1)
        log: list[dict[str, float]] = []
        start = time.perf_counter()
        for number in track(range(updates), f"seed {args.seed}"):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - number / updates)
            mean = float(np.mean(collector.collect()))
            update(agents, optimizer, collector.rollout, args)
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
        args = dataclasses.replace(args, num_envs=4, num_steps=52, total_steps=600)
    log = train(args)
    save(log, args)
    first, last = (np.mean([row["return"] for row in part]) for part in (log[:3], log[-10:]))
    print(f"mean return of an agent's episode, first -> last updates: {first:.2f} -> {last:.2f}")
    print(f"{log[-1]['steps']:,} steps in {log[-1]['seconds']:.0f} s; log and curve: {args.output}")


if __name__ == "__main__":
    main(tyro.cli(Args))
