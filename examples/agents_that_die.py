"""PPO on knights-archers-zombies, where agents die long before their episode is over.

    python examples/agents_that_die.py

It needs `pip install -e ".[examples]"`. Two archers and two knights share a network,
and get a reward of 1 for each zombie they kill. An agent that a zombie reaches dies, while the others continue. The
episode ends when a zombie gets past them. Rows of dead agents are zeros:

- `acting` marks the agents whose actions count. Only these rows are used for training.
- A dead agent has *terminated*: the value after its death is 0, even if its team gets more rewards. When the time limit
  ends an episode, the agents alive are *truncated*: they could have continued, so the value of their last observation
  counts. `gae` does both.
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

from marl_parallel import Current, Rollout, gae, make, record_video
from marl_parallel.vector import StackedVecEnv

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

    def seen(self, observations: torch.Tensor) -> torch.Tensor:
        """The input of the networks, `(..., agents, size)`, from observations `(..., agents, rows, columns)`."""
        values = observations.float().flatten(-2)
        return torch.cat([values, self.is_knight.expand(*values.shape[:-1], 1)], -1)

    def policy(self, seen: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(seen), validate_args=False)

    def value(self, seen: torch.Tensor) -> torch.Tensor:
        return self.critic(seen).squeeze(-1)

    @torch.no_grad()
    def act(self, current: Current) -> np.ndarray:
        return self.policy(self.seen(torch.from_numpy(current.observations))).sample().numpy()


def network(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def update(agents: Agents, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> None:
    data = rollout.torch()
    with torch.no_grad():
        seen, last_seen = agents.seen(data.observations), agents.seen(data.final_observations[data.done])
        values, final_values = agents.value(seen), agents.value(last_seen)
        estimates = gae(rollout.arrays, values.numpy(), final_values.numpy(), args.gamma, args.gae_lambda)
    acting = data.acting[:-1]
    advantages, targets = (torch.from_numpy(each)[acting] for each in estimates)
    seen, actions = seen[:-1][acting], data.actions[acting]
    with torch.no_grad():
        log_probs = agents.policy(seen).log_prob(actions)
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
        seed=1000 * args.seed,
        num_workers=args.num_workers,
    )
    with StackedVecEnv(parallel) as env:
        size, num_actions = np.prod(env.single_observation_space.shape), env.single_action_space.n
        agents = Agents(env.agents, int(size), int(num_actions), args.hidden)
        optimizer = torch.optim.Adam(agents.parameters(), lr=args.learning_rate, eps=1e-5)
        rollout = Rollout(env, args.num_steps)
        updates = max(args.total_steps // (args.num_steps * args.num_envs), 1)
        log: list[dict[str, float]] = []
        start = time.perf_counter()
        for number in track(range(updates), f"seed {args.seed}"):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - number / updates)
            rollout.collect(agents.act)
            finished = [sum(episode.returns.values()) for episode in rollout.finished_episodes]
            update(agents, optimizer, rollout, args)
            if finished:
                steps = (number + 1) * args.num_steps * args.num_envs
                log.append({"steps": steps, "killed": float(np.mean(finished)), "seconds": time.perf_counter() - start})
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
    with make(GAME, num_envs=2, env_kwargs=kwargs, auto_reset="NEXT_STEP", seed=7) as env:
        nothing = np.zeros(env.observation_space[env.possible_agents[0]].shape or ())

        @torch.no_grad()
        def act(observations: tuple[dict[str, np.ndarray], ...]) -> list[dict[str, int]]:
            rows = np.stack([[one.get(name, nothing) for name in env.possible_agents] for one in observations])
            chosen = agents.policy(agents.seen(torch.from_numpy(rows))).sample().tolist()
            return [dict(zip(env.possible_agents, row)) for row in chosen]

        record_video(env, path, steps=120, policy=act, fps=15, tile_width=400)


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
