"""PPO with a GRU on a task that needs memory, with agents that die and come back; and without memory, to compare.

    python examples/recurrent_ippo.py            both networks: a CSV log of each, and their curves as a PNG
    python examples/recurrent_ippo.py --check    fails unless the GRU learns the task and the other network does not

It needs `pip install -e ".[examples]"`. `current.begins` says whose hidden state begins anew, the rollout stores the
hidden states as an extra, and `sequences` cuts it into sequences of single agents. The same `--seed` gives the same
curves, with every number of workers.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import tyro
from gymnasium import spaces
from rich.progress import track
from torch import nn
from torch.distributions import Categorical

from marl_parallel import Current, Rollout, gae, make, sequences

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LEFT, RIGHT = range(2)
LENGTH, TRAPS = 60, 0.02
LEARNED, GUESSED = 0.9, 0.6
"""For `--check`: at least and at most this share of the doors is open, with and without memory."""
Values = dict[str, Any]


class Corridors:
    """Each agent walks down a corridor of 2 to 5 places, whatever its actions, and chooses one of two doors at its end.

    A sign says which door is open; it is at the entrance and cannot be seen from elsewhere. The open door gives a
    reward of 1, the closed one -1. With its choice the agent's life ends. 1 to 4 steps later it is back at the entrance
    of another corridor. In each step some agents fall into a trap, and come back in the same way.
    """

    possible_agents: tuple[str, ...] = ("a", "b", "c")

    def __init__(self) -> None:
        seen = spaces.Box(0.0, 1.0, (3,), np.float32)  # a sign to the left, a sign to the right, the end
        self.observation_space = spaces.Dict([(agent, seen) for agent in self.possible_agents])
        self.action_space = spaces.Dict([(agent, spaces.Discrete(2)) for agent in self.possible_agents])

    def reset(self, seed: int | None = None, options: Values | None = None) -> tuple[Values, Values]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.back_at = 0, dict.fromkeys(self.possible_agents, 0)
        self.place: dict[str, int] = {}
        self.end: dict[str, int] = {}
        self.open: dict[str, int] = {}
        for agent in self.possible_agents:
            self.enter(agent)
        return {agent: self.seen(agent) for agent in self.possible_agents}, {}

    def enter(self, agent: str) -> None:
        self.place[agent], self.end[agent] = 0, int(self.rng.integers(2, 6))
        self.open[agent] = LEFT if self.rng.random() < 0.5 else RIGHT

    def seen(self, agent: str) -> np.ndarray:
        at_entrance, at_end = self.place[agent] == 0, self.place[agent] == self.end[agent]
        signs = [at_entrance and self.open[agent] == side for side in (LEFT, RIGHT)]
        return np.array([*signs, at_end], np.float32)

    def step(self, actions: Values) -> tuple[Values, Values, Values, Values, Values]:
        self.time += 1
        observations, rewards, terminated = {}, {}, {}
        for agent in self.possible_agents:
            if agent in self.place:
                rewards[agent], terminated[agent] = self.move(agent, actions[agent])
                observations[agent] = self.seen(agent)
                if terminated[agent]:
                    del self.place[agent]
                    self.back_at[agent] = self.time + int(self.rng.integers(1, 5))
            elif self.time == self.back_at[agent]:
                self.enter(agent)
                observations[agent], rewards[agent], terminated[agent] = self.seen(agent), 0.0, False
        return observations, rewards, {**terminated, "__all__": False}, {"__all__": self.time == LENGTH}, {}

    def move(self, agent: str, action: int) -> tuple[float, bool]:
        """Returns the reward, and whether the agent's life ends."""
        if self.place[agent] == self.end[agent]:
            return (1.0 if action == self.open[agent] else -1.0), True
        self.place[agent] += 1
        return 0.0, bool(self.rng.random() < TRAPS)


@dataclass
class Args:
    """PPO with a GRU, and without memory."""

    seed: int = 1
    num_envs: int = 16
    """number of environments"""
    num_workers: int | None = None
    """number of worker processes; by default one per CPU"""
    updates: int = 30
    num_steps: int = 64
    """steps of each environment between updates"""
    length: int = 16
    """steps of the longest sequence: gradients do not reach further back"""
    hidden: int = 32
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 3e-3
    gamma: float = 0.95
    gae_lambda: float = 0.95
    output: Path = Path("runs/recurrent_ippo")
    """folder of the logs and the curves"""
    check: bool = False
    """fail unless the GRU learns the task, and the network without memory does not"""
    smoke: bool = False
    """a run of a few seconds, too short to learn"""


class Network(nn.Module):
    """A policy and a critic that share a GRU."""

    def __init__(self, inputs: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.encoder, self.gru = nn.Linear(inputs, hidden), nn.GRU(hidden, hidden, batch_first=True)
        self.actor, self.critic = nn.Linear(hidden, actions), nn.Linear(hidden, 1)

    def forward(
        self, observations: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[Categorical, torch.Tensor, torch.Tensor]:
        """Of sequences `(S, length, inputs)` and their first hidden states `(S, hidden)`; also the last ones."""
        states, last = self.gru(torch.tanh(self.encoder(observations)), hidden.unsqueeze(0))
        return Categorical(logits=self.actor(states)), self.critic(states).squeeze(-1), last.squeeze(0)


class Team:
    """One network acts for all agents; `hidden` has the hidden state of each of them, `(num_envs, k, hidden)`."""

    def __init__(self, network: Network, num_envs: int, num_agents: int, *, has_memory: bool) -> None:
        self.network, self.has_memory = network, has_memory
        self.hidden = torch.zeros(num_envs, num_agents, network.gru.hidden_size)

    def step(self, seen: torch.Tensor, hidden: torch.Tensor) -> tuple[Categorical, torch.Tensor, torch.Tensor]:
        """One step of rows `(..., inputs)`: the policy, the values, and the hidden states after it."""
        rows = seen.shape[:-1]
        policy, values, after = self.network(seen.flatten(0, -2).unsqueeze(1), hidden.flatten(0, -2))
        after = after if self.has_memory else torch.zeros_like(after)
        return Categorical(logits=policy.logits.view(*rows, -1)), values.view(rows), after.view(*rows, -1)

    @torch.no_grad()
    def act(self, current: Current) -> tuple[np.ndarray, Values]:
        hidden = self.hidden[current.env_ids.start : current.env_ids.stop]  # a view
        hidden[torch.from_numpy(current.begins)] = 0.0
        before = hidden.clone()  # what the step begins with: the rollout stores it
        policy, values, after = self.step(torch.from_numpy(current.observations), before)
        observed = torch.from_numpy(current.observed)
        hidden[observed] = after[observed]  # agents without an observation keep their state
        actions = policy.sample()
        extras = {"hidden": before, "values": values, "log_probs": policy.log_prob(actions)}
        return actions.numpy(), {name: extra.numpy() for name, extra in extras.items()}

    @torch.no_grad()
    def estimates(self, rollout: Rollout, args: Args) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns."""
        data = rollout.torch()
        _, last, _ = self.step(data.observations[-1], self.hidden.masked_fill(data.begins[-1].unsqueeze(-1), 0.0))
        # An agent's last observation follows the step that ended the episode, so its hidden state does, too.
        done, before = data.done, data.extras["hidden"][data.done]
        _, _, after = self.step(data.observations[:-1][done], before)
        hidden = torch.where(data.observed[:-1][done].unsqueeze(-1), after, before)
        _, final, _ = self.step(data.final_observations[done], hidden)
        values = torch.cat([data.extras["values"], last.unsqueeze(0)])
        return gae(rollout.arrays, values.numpy(), final.numpy(), args.gamma, args.gae_lambda)


def update(team: Team, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> None:
    data, network = rollout.torch(), team.network
    cut = sequences(rollout.arrays, args.length if team.has_memory else 1)
    advantages, targets = (torch.from_numpy(cut.cut(each)) for each in team.estimates(rollout, args))
    observations, actions, log_probs = cut.cut((data.observations, data.actions, data.extras["log_probs"]))
    hidden, acting = data.extras["hidden"][cut.first], torch.from_numpy(cut.acting)
    for _ in range(args.epochs):
        for part in torch.randperm(len(acting)).chunk(args.minibatches):
            policy, values, _ = network(observations[part], hidden[part])
            used = acting[part]
            ratio = (policy.log_prob(actions[part]) - log_probs[part]).exp()[used]
            advantage = advantages[part][used]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            error = (values - targets[part])[used].square().mean()
            loss = -gain + 0.5 * error - 0.01 * policy.entropy()[used].mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()


def train(args: Args, *, has_memory: bool) -> list[dict[str, float]]:
    """One run; returns its log, with a row for each update."""
    torch.manual_seed(args.seed)
    env = make(Corridors, args.num_envs, seed=1000 * args.seed, num_workers=args.num_workers, facade="stacked")
    rollout = Rollout(env, args.num_steps, extras={"hidden": (args.hidden,), "values": (), "log_probs": ()})
    network = Network(env.single_observation_space.shape[0], env.single_action_space.n, args.hidden)
    team = Team(network, args.num_envs, env.num_agents, has_memory=has_memory)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    log: list[dict[str, float]] = []
    for number in track(range(args.updates), "GRU" if has_memory else "without memory"):
        rewards = rollout.collect(team.act).rewards
        steps = (number + 1) * args.num_steps * args.num_envs
        log.append({"steps": steps, "open doors": float((rewards > 0).sum() / max((rewards != 0).sum(), 1))})
        update(team, optimizer, rollout, args)
    env.close()
    return log


def save(logs: dict[str, list[dict[str, float]]], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, log in logs.items():
        with (output / f"{name.replace(' ', '_')}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, log[0])
            writer.writeheader()
            writer.writerows(log)
        axes.plot([row["steps"] for row in log], [row["open doors"] for row in log], label=name)
    axes.axhline(0.5, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="environment steps", ylabel="share of open doors", ylim=(0, 1))
    axes.legend()
    figure.savefig(output / "learning_curve.png", dpi=120)


def main(args: Args) -> None:
    torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
    if args.smoke:
        args = dataclasses.replace(args, num_envs=4, updates=3)
    logs = {"GRU": train(args, has_memory=True), "without memory": train(args, has_memory=False)}
    save(logs, args.output)
    last = {}
    for name, log in logs.items():
        shares = [row["open doors"] for row in log]
        last[name] = float(np.mean(shares[-5:]))
        curve = " ".join(f"{share:.2f}" for share in shares[:: max(len(shares) // 10, 1)])
        print(f"{name}: share of open doors {curve}; last five updates {last[name]:.2f}")
    if args.check and not (last["GRU"] >= LEARNED and last["without memory"] <= GUESSED):
        sys.exit(f"expected at least {LEARNED} of open doors with memory and at most {GUESSED} without, got {last}")


if __name__ == "__main__":
    main(tyro.cli(Args))
