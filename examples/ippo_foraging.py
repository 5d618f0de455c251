"""Independent PPO with shared parameters on Level-Based Foraging: two agents learn to find and load food.

    python examples/ippo_foraging.py           one run: a CSV log, and the learning curve as a PNG
    python examples/ippo_foraging.py --check   three seeds; fails unless they learn

It needs `pip install -e ".[examples]" lbforaging`. The simulator takes and returns tuples; `StackedVecEnv`
makes arrays over environments and agents of them, `Rollout` collects its steps, and one network acts for both agents.
The same `--seed` gives the same returns, with every number of workers.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import torch
import tyro
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.distributions import Categorical

from marl_parallel import Current, Rollout, gae, make
from marl_parallel.vector import StackedVecEnv

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TASK = "lbforaging:Foraging-8x8-2p-1f-v3"
EPISODE_STEPS = 50
"""At most; an episode ends when the food is loaded."""
MARGIN = 0.5
"""How much more food trained agents must load than random ones, for `--check`: a share of all food."""


@dataclass
class Args:
    """Independent PPO with shared parameters on Level-Based Foraging."""

    seed: int = 1
    num_envs: int = 16
    """number of environments"""
    num_workers: int | None = None
    """number of worker processes; by default one per CPU"""
    backend: Literal["process", "serial"] = "process"
    """or "serial": all environments in this process, one after another"""
    total_steps: int = 800_000
    """steps of all environments together"""
    num_steps: int = 100
    """steps of each environment between updates"""
    epochs: int = 8
    minibatches: int = 8
    learning_rate: float = 5e-4
    gamma: float = 0.98
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    hidden: int = 128
    test_episodes: int = 400
    """number of episodes to test the trained agents"""
    output: Path = Path("runs/ippo_foraging")
    """folder of the log and the curve"""
    check: bool = False
    """train with three seeds, and fail unless the agents are much better than random ones"""
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
    """The food loaded by both agents, on average over the episodes that ended: 1 is all of it."""
    return float(np.mean([sum(episode.returns.values()) for episode in rollout.finished_episodes]))


def update(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> None:
    data = rollout.torch()
    with torch.no_grad():
        values, final_values = agent.value(data.observations), agent.value(data.final_observations[data.done])
        estimates = gae(rollout.arrays, values.numpy(), final_values.numpy(), args.gamma, args.gae_lambda)
        advantages, targets = (torch.from_numpy(each).flatten() for each in estimates)
        observations, actions = data.observations[:-1].flatten(0, 2), data.actions.flatten()
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


def train(args: Args) -> tuple[Agent, list[dict[str, float]]]:
    """One run; returns the agent and its log, with a row for each update."""
    torch.manual_seed(args.seed)
    env = StackedVecEnv(
        make(TASK, args.num_envs, seed=1000 * args.seed, num_workers=args.num_workers, backend=args.backend)
    )
    agent = Agent(env.single_observation_space.shape[0], env.single_action_space.n, args.hidden)
    rollout = Rollout(env, args.num_steps)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    log: list[dict[str, float]] = []
    bar = Progress(
        TextColumn("seed {task.fields[seed]}"), BarColumn(), TextColumn("food {task.fields[mean]:5.2f}"),
        TextColumn("{task.fields[speed]:6,.0f} steps/s"), TimeRemainingColumn(),
    )  # fmt: skip
    per_update = args.num_steps * args.num_envs
    updates = max(args.total_steps // per_update, 1)
    with bar:
        task = bar.add_task("", total=updates, seed=args.seed, mean=float("nan"), speed=0.0)
        start = time.perf_counter()
        for number in range(updates):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - number / updates)
            rollout.collect(agent.act)
            mean = mean_return(rollout)
            update(agent, optimizer, rollout, args)
            seconds, steps = time.perf_counter() - start, (number + 1) * per_update
            log.append({"steps": steps, "return": mean, "seconds": seconds, "steps_per_second": steps / seconds})
            bar.update(task, advance=1, mean=mean, speed=steps / seconds)
    env.close()
    return agent, log


@torch.no_grad()
def evaluate(agent: Agent | None, seed: int, episodes: int) -> float:
    """Mean food loaded in an episode: by the agents, or by random actions if `agent` is None."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    with StackedVecEnv(make(TASK, 20, seed=seed)) as env:
        rollout = Rollout(env, EPISODE_STEPS * episodes // 20)
        rollout.collect(agent.act if agent is not None else lambda _: rng.integers(6, size=(20, 2)))
    return mean_return(rollout)


def save(runs: dict[int, list[dict[str, float]]], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for seed, log in runs.items():
        with (output / f"seed_{seed}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, log[0])
            writer.writeheader()
            writer.writerows(log)
        axes.plot([row["steps"] for row in log], [row["return"] for row in log], label=f"seed {seed}")
    axes.set(title=f"IPPO on {TASK}", xlabel="environment steps", ylabel="food loaded in an episode", ylim=(0, 1))
    axes.legend()
    figure.savefig(output / "learning_curve.png", dpi=120)
    plt.close(figure)


def main(args: Args) -> None:
    torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
    if args.smoke:
        args = dataclasses.replace(args, num_envs=4, num_steps=100, total_steps=1200, test_episodes=20)
    runs, better = {}, []
    for seed in range(args.seed, args.seed + (3 if args.check else 1)):
        agent, runs[seed] = train(dataclasses.replace(args, seed=seed))
        trained, by_chance = (evaluate(each, 90_000 + seed, args.test_episodes) for each in (agent, None))
        better.append(trained - by_chance)
        print(f"seed {seed}: food loaded in an episode {trained:.2f}, with random actions {by_chance:.2f}")
    save(runs, args.output)
    print(f"log and learning curve: {args.output}")
    if args.check and np.mean(better) < MARGIN:
        sys.exit(f"better than random by {np.mean(better):.2f} on average; expected {MARGIN} or more")


if __name__ == "__main__":
    main(tyro.cli(Args))
