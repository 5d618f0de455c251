"""Compare independent PPO that never waits for the slowest environment, with `send` and `recv`, with one that does.

    python examples/async_ippo.py                    both ways, and a plot of their returns over the seconds they took
    python examples/async_ippo.py --num-workers 2    no gain on two CPUs: the simulators use both

It needs `pip install -e ".[examples]"`. In turns, the policy waits until all environments have been stepped,
then they wait for the policy. In halves, the policy acts for the first half that is ready while the others step. In
both ways each environment makes the same number of steps with the same agents between two updates, so they differ only
in time. With several workers, random numbers differ as well, since the order of results then depends on timing.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import tyro
from gymnasium.spaces import flatdim
from rich.progress import track
from torch import nn
from torch.distributions import Categorical

from marl_parallel import ParallelEnv, StepBatch, make

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass
class Args:
    """Independent PPO in turns with the simulators, and in halves."""

    seed: int = 1
    num_envs: int = 16
    """number of environments"""
    num_workers: int = max((os.cpu_count() or 1) - 1, 1)
    """number of worker processes; by default all CPUs but one, which the policy uses"""
    total_steps: int = 250_000
    """steps of all environments together, in each of the two ways"""
    target: float = -18.0
    """print the time until an agent's mean return reaches this"""
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
    output: Path = Path("runs/async_ippo")
    """folder of the logs and the plot"""
    smoke: bool = False
    """a run of a few seconds, too short to learn"""


class Agent(nn.Module):
    """The networks that all agents share: a policy and a value of one agent's observation."""

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


class Rollout:
    """The collected data, `(envs, steps, agents, ...)`. Environments come first, since each is at its own step."""

    def __init__(self, num_envs: int, num_steps: int, num_agents: int, observation_size: int) -> None:
        rows = (num_envs, num_steps, num_agents)
        self.observations, self.following = torch.zeros(2, *rows, observation_size)
        self.actions, self.rewards = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
        self.terminated, self.over = torch.zeros(2, *rows, dtype=torch.bool)

    def advantages(self, agent: Agent, gamma: float, gae_lambda: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Generalised advantage estimates, and the targets of the critic.

        The value of the last state counts if the episode was truncated, since it could have continued, and not if it
        terminated. No advantage is passed on across either end.
        """
        values, expected = agent.value(self.observations), agent.value(self.following)
        surprises = self.rewards + gamma * expected * ~self.terminated - values
        advantages = torch.zeros_like(surprises)
        later = torch.zeros_like(surprises[:, 0])
        for step in reversed(range(surprises.shape[1])):
            later = advantages[:, step] = surprises[:, step] + gamma * gae_lambda * ~self.over[:, step] * later
        return advantages, advantages + values


class Collector:
    """Steps all environments, or those that are ready, with the agent's actions."""

    def __init__(self, env: ParallelEnv, agent: Agent, args: Args, at_once: int) -> None:
        self.env, self.agent, self.at_once = env, agent, at_once
        self.names = env.possible_agents
        size = flatdim(env.observation_space[self.names[0]])
        self.rollout = Rollout(env.num_envs, args.num_steps, len(self.names), size)
        self.seen = torch.as_tensor(stacked(env.reset()[0]))

    @torch.no_grad()
    def collect(self) -> list[float]:
        """Fill the rollout; returns the mean return of an agent for each episode that ended."""
        num_steps = self.rollout.actions.shape[1]
        done = np.zeros(self.env.num_envs, int)
        finished: list[float] = []
        self.act(range(self.env.num_envs), done)
        while self.env.pending:
            batch = self.env.recv(min_envs=min(self.at_once, len(self.env.pending)))
            ids = list(batch.env_ids)
            finished += [float(np.mean([*episode.returns.values()])) for episode in self.env.finished_episodes]
            self.store(batch, ids, done[ids])
            done[ids] += 1
            unfinished = [env_id for env_id in ids if done[env_id] < num_steps]
            if unfinished:
                self.act(unfinished, done)
        return finished

    def act(self, env_ids: Sequence[int], steps: np.ndarray) -> None:
        """Send the agents' actions to these environments, each at its own step."""
        ids = torch.as_tensor(list(env_ids))
        actions = self.agent.policy(self.seen[ids]).sample()
        at = ids, torch.as_tensor(steps[list(env_ids)])
        self.rollout.observations[at], self.rollout.actions[at] = self.seen[ids], actions
        self.env.send([dict(zip(self.names, row)) for row in actions.tolist()], list(env_ids))

    def store(self, batch: StepBatch, ids: list[int], steps: np.ndarray) -> None:
        self.seen[ids] = torch.as_tensor(stacked(batch.observations))
        following = self.seen[ids]
        for place, flags in enumerate(zip(batch.terminateds, batch.truncateds)):
            if any(flag["__all__"] for flag in flags):
                # The observation is the first of the next episode; the last of the old one is in the infos.
                infos = batch.infos[place]
                last = np.stack([infos[name]["final_obs"] for name in self.names])
                following[place] = torch.as_tensor(last)
        at = torch.as_tensor(ids), torch.as_tensor(steps)
        self.rollout.following[at] = following
        self.rollout.rewards[at] = torch.as_tensor(stacked(batch.rewards), dtype=torch.float32)
        terminated, truncated = (
            torch.as_tensor([[flags[name] for name in self.names] for flags in each])
            for each in (batch.terminateds, batch.truncateds)
        )
        self.rollout.terminated[at], self.rollout.over[at] = terminated, terminated | truncated


def stacked(dicts: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    return np.stack([np.stack(list(one.values())) for one in dicts])


def update(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> None:
    observations, actions = rollout.observations.flatten(0, 2), rollout.actions.flatten()
    with torch.no_grad():
        advantages, targets = (each.flatten() for each in rollout.advantages(agent, args.gamma, args.gae_lambda))
        log_probs = agent.policy(observations).log_prob(actions)
    for _ in range(args.epochs):
        for part in torch.randperm(len(actions)).chunk(args.minibatches):
            policy = agent.policy(observations[part])
            ratio = (policy.log_prob(actions[part]) - log_probs[part]).exp()
            advantage = advantages[part]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            gain = torch.min(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage).mean()
            error = (agent.value(observations[part]) - targets[part]).square().mean()
            loss = -gain + 0.5 * error - args.entropy * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def train(args: Args, way: str) -> list[dict[str, float]]:
    """One run, in turns or in halves; returns its log, with a row for each update."""
    torch.manual_seed(args.seed)
    with make(
        "mpe2.simple_spread_v3",
        num_envs=args.num_envs,
        env_kwargs={"max_cycles": 25},
        seed=1000 * args.seed,
        num_workers=args.num_workers,
    ) as env:
        first = env.possible_agents[0]
        agent = Agent(flatdim(env.observation_space[first]), flatdim(env.action_space[first]), args.hidden)
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        collector = Collector(env, agent, args, args.num_envs if way == "turns" else args.num_envs // 2)
        updates = max(args.total_steps // (args.num_steps * args.num_envs), 1)
        log: list[dict[str, float]] = []
        start, collecting = time.perf_counter(), 0.0
        for number in track(range(updates), f"in {way}"):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - number / updates)
            started = time.perf_counter()
            mean = float(np.mean(collector.collect()))
            collecting += time.perf_counter() - started
            update(agent, optimizer, collector.rollout, args)
            steps = (number + 1) * args.num_steps * args.num_envs
            seconds = time.perf_counter() - start
            log.append({"steps": steps, "return": mean, "seconds": seconds, "collecting": collecting})
    return log


def seconds_to(log: list[dict[str, float]], target: float) -> float | None:
    """Seconds until the mean return of ten updates reached `target`; None if it did not."""
    for end in range(10, len(log) + 1):
        if np.mean([row["return"] for row in log[end - 10 : end]]) >= target:
            return log[end - 1]["seconds"]
    return None


def main(args: Args) -> None:
    torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
    if args.smoke:
        args = dataclasses.replace(args, num_envs=4, num_steps=50, total_steps=600)
    args.output.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for way in ("turns", "halves"):
        log = train(args, way)
        with (args.output / f"{way}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, log[0])
            writer.writeheader()
            writer.writerows(log)
        axes.plot([row["seconds"] for row in log], [row["return"] for row in log], label=f"in {way}")
        reached, last = seconds_to(log, args.target), log[-1]
        when = "not reached" if reached is None else f"after {reached:.0f} s"
        rate = last["steps"] / last["collecting"]
        parts = [
            f"return {args.target:g} {when}",
            f"last return {last['return']:.2f}",
            f"{rate:,.0f} steps/s collected",
        ]
        print(f"in {way}: {'; '.join(parts)}")
    axes.set(title="IPPO on simple_spread", xlabel="seconds", ylabel="mean return of an agent's episode")
    axes.legend()
    figure.savefig(args.output / "return_over_time.png", dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Args))
