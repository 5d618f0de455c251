"""PPO on knights-archers-zombies, where agents die long before their episode is over.

    python examples/agents_that_die.py

It needs `pip install "marl-parallel[examples]"`. Two archers and two knights share a network,
and get a reward of 1 for each zombie they kill. An agent that a zombie reaches dies, while the others continue. The
episode ends when a zombie gets past them. Training must skip the rows of zeros of dead agents:

- *acting*, before a step, marks the agents whose actions count. Only these rows are used for training. This excludes
  the step that resets an environment (`NEXT_STEP`), in which no agent acts.
- *present*, after a step, marks the agents whose observations are data. At its last step, an agent is present and no
  longer acting.
- A dead agent has *terminated*: the value after its death is 0, even if its team gets more rewards. When the time limit
  ends an episode, the agents alive are *truncated*: they could have continued, so the value of their last state counts.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
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

from marl_parallel import make, record_video
from marl_parallel.vector import PettingZooVecEnv

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GAME = "pettingzoo.butterfly.knights_archers_zombies_v11"


@dataclass
class Args:
    """PPO on knights-archers-zombies, with one network for all agents."""

    seed: int = 1
    num_envs: int = 16
    """number of environments"""
    num_workers: int | None = None
    """number of worker processes; by default one per CPU"""
    total_steps: int = 300_000
    """steps of all environments together"""
    max_cycles: int = 500
    """steps after which an episode is truncated"""
    num_steps: int = 128
    """steps of each environment between updates"""
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 1e-3
    gamma: float = 0.98
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    hidden: int = 128
    output: Path = Path("runs/agents_that_die")
    """folder of the log and the curve"""
    video: Path | None = None
    """also record the trained agents: a .gif or .mp4"""
    smoke: bool = False
    """a run of a few seconds, too short to learn"""


class Agents(nn.Module):
    """The networks that all agents share. Their input is an agent's observation and whether it is a knight."""

    def __init__(self, names: list[str], observation_size: int, num_actions: int, hidden: int) -> None:
        super().__init__()
        self.is_knight = torch.tensor([[float(name.startswith("knight"))] for name in names])
        self.actor = network(observation_size + 1, hidden, num_actions, gain=0.01)
        self.critic = network(observation_size + 1, hidden, 1, gain=1.0)

    def seen(self, by_agent: dict[str, np.ndarray]) -> torch.Tensor:
        """The input of the networks, `(num_envs, agents, size)`, from arrays by agent `(num_envs, ...)`."""
        values = torch.as_tensor(stacked(by_agent), dtype=torch.float32).flatten(2)
        return torch.cat([values, self.is_knight.expand(*values.shape[:2], 1)], -1)

    def policy(self, seen: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(seen), validate_args=False)

    def value(self, seen: torch.Tensor) -> torch.Tensor:
        return self.critic(seen).squeeze(-1)


def network(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def stacked(by_agent: dict[str, np.ndarray]) -> np.ndarray:
    """Stack arrays by agent `(num_envs, ...)` to one of `(num_envs, agents, ...)`."""
    return np.stack(list(by_agent.values()), axis=1)


class Rollout:
    """The collected data, `(steps, envs, agents, ...)`; `seen` has one step more."""

    def __init__(self, num_steps: int, num_envs: int, num_agents: int, size: int) -> None:
        rows = (num_steps, num_envs, num_agents)
        self.seen = torch.zeros(num_steps + 1, *rows[1:], size)
        self.actions, self.rewards = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
        self.acting, self.terminated, self.over = torch.zeros(3, *rows, dtype=torch.bool)

    def advantages(self, agents: Agents, gamma: float, gae_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Generalised advantage estimates, and the targets of the critic; meaningless for rows that did not act."""
        values = agents.value(self.seen)
        surprises = self.rewards + gamma * values[1:] * ~self.terminated - values[:-1]
        advantages = torch.zeros_like(surprises)
        later = torch.zeros_like(surprises[0])
        for step in reversed(range(len(surprises))):
            later = advantages[step] = surprises[step] + gamma * gae_lambda * ~self.over[step] * later
        return advantages, advantages + values[:-1]


class Collector:
    """Steps the environments with the agents' actions, and counts the zombies that were killed."""

    def __init__(self, env: PettingZooVecEnv, agents: Agents, num_steps: int) -> None:
        self.env, self.agents = env, agents
        seen = agents.seen(env.reset()[0])
        self.rollout = Rollout(num_steps, *seen.shape)
        self.rollout.seen[-1] = seen
        self.killed = np.zeros(env.num_envs)

    @torch.no_grad()
    def collect(self) -> list[float]:
        """Fill the rollout; returns the number of zombies killed in each episode that ended."""
        rollout, finished = self.rollout, []
        rollout.seen[0] = rollout.seen[-1]
        for step in range(len(rollout.actions)):
            rollout.acting[step] = torch.as_tensor(stacked(self.env.acting))
            actions = self.agents.policy(rollout.seen[step]).sample()
            rollout.actions[step] = actions
            by_agent = dict(zip(self.env.possible_agents, actions.T.numpy()))
            observations, rewards, terminations, truncations, _ = self.env.step(by_agent)
            rollout.seen[step + 1] = self.agents.seen(observations)
            rollout.rewards[step] = torch.as_tensor(stacked(rewards))
            rollout.terminated[step] = torch.as_tensor(stacked(terminations))
            rollout.over[step] = rollout.terminated[step] | torch.as_tensor(stacked(truncations))
            self.killed += stacked(rewards).sum(1)
            finished += self.killed[self.env.over].tolist()
            self.killed[self.env.over] = 0.0
        return finished


def update(agents: Agents, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> None:
    with torch.no_grad():
        advantages, targets = rollout.advantages(agents, args.gamma, args.gae_lambda)
        log_probs = agents.policy(rollout.seen[:-1]).log_prob(rollout.actions)
    mask = rollout.acting
    seen, actions, log_probs = rollout.seen[:-1][mask], rollout.actions[mask], log_probs[mask]
    advantages, targets = advantages[mask], targets[mask]
    for _ in range(args.epochs):
        for part in torch.randperm(len(actions)).chunk(args.minibatches):
            policy = agents.policy(seen[part])
            ratio = (policy.log_prob(actions[part]) - log_probs[part]).exp()
            advantage = advantages[part]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            gain = torch.min(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage).mean()
            error = (agents.value(seen[part]) - targets[part]).square().mean()
            loss = -gain + 0.5 * error - args.entropy * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agents.parameters(), 0.5)
            optimizer.step()


def train(args: Args) -> tuple[Agents, list[dict[str, float]]]:
    """One run; returns the agents and their log, with a row for each update in which episodes ended."""
    torch.manual_seed(args.seed)
    parallel = make(
        GAME,
        num_envs=args.num_envs,
        env_kwargs={"max_cycles": args.max_cycles},
        auto_reset="NEXT_STEP",
        seed=1000 * args.seed,
        num_workers=args.num_workers,
    )
    with PettingZooVecEnv(parallel) as env:
        first = env.possible_agents[0]
        size, num_actions = np.prod(env.single_observation_space(first).shape), env.single_action_space(first).n
        agents = Agents(env.possible_agents, int(size), int(num_actions), args.hidden)
        optimizer = torch.optim.Adam(agents.parameters(), lr=args.learning_rate, eps=1e-5)
        collector = Collector(env, agents, args.num_steps)
        updates = max(args.total_steps // (args.num_steps * args.num_envs), 1)
        log: list[dict[str, float]] = []
        start = time.perf_counter()
        for number in track(range(updates), f"seed {args.seed}"):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - number / updates)
            finished = collector.collect()
            update(agents, optimizer, collector.rollout, args)
            if finished:
                steps = (number + 1) * args.num_steps * args.num_envs
                log.append({"steps": steps, "killed": np.mean(finished), "seconds": time.perf_counter() - start})
    return agents, log


def save(log: list[dict[str, float]], args: Args) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / f"seed_{args.seed}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, log[0])
        writer.writeheader()
        writer.writerows(log)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([row["steps"] for row in log], [row["killed"] for row in log])
    axes.set(title="PPO on knights-archers-zombies", xlabel="environment steps", ylabel="zombies killed in an episode")
    figure.savefig(args.output / "learning_curve.png", dpi=120)


def record(agents: Agents, args: Args, path: Path) -> None:
    kwargs = {"max_cycles": args.max_cycles, "render_mode": "rgb_array"}
    with make(GAME, num_envs=4, env_kwargs=kwargs, auto_reset="NEXT_STEP", seed=7) as env:
        nothing = np.zeros(env.observation_space[env.possible_agents[0]].shape)

        @torch.no_grad()
        def act(observations: tuple[dict[str, np.ndarray], ...]) -> list[dict[str, int]]:
            rows = {name: np.stack([one.get(name, nothing) for one in observations]) for name in env.possible_agents}
            chosen = agents.policy(agents.seen(rows)).sample().tolist()
            return [dict(zip(env.possible_agents, row)) for row in chosen]

        record_video(env, path, steps=120, policy=act, fps=15, tile_width=200)


def main(args: Args) -> None:
    torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
    if args.video is not None and args.video.suffix not in (".gif", ".mp4"):
        sys.exit(f"--video must be a .gif or .mp4 file, got {args.video}")
    if args.smoke:
        args = dataclasses.replace(args, num_envs=2, num_steps=100, total_steps=1000, max_cycles=40)
    agents, log = train(args)
    save(log, args)
    first, last = (np.mean([row["killed"] for row in part]) for part in (log[:10], log[-10:]))
    print(f"zombies killed in an episode, first -> last updates: {first:.2f} -> {last:.2f}")
    print(f"{log[-1]['steps']:,} steps in {log[-1]['seconds']:.0f} s; log and curve: {args.output}")
    if args.video is not None:
        record(agents, args, args.video)


if __name__ == "__main__":
    main(tyro.cli(Args))
