"""Independent PPO with shared parameters on simple_spread: three agents learn to cover three landmarks.

    python examples/ippo_simple_spread.py                   one run: a CSV log, and the learning curve as a PNG
    python examples/ippo_simple_spread.py --check           three seeds; fails unless they learn
    python examples/ippo_simple_spread.py --video out.gif   also a video of the trained agents

It needs `pip install -e ".[examples]"`. `StackedVecEnv` has arrays over environments and agents, `Rollout`
collects its steps, and one network acts for all agents. The same `--seed` gives the same returns, with every number of
workers. The same holds with `--ahead`, which lets a thread collect the next rollout while the network is trained; its
returns differ from those without.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import dataclasses
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import matplotlib
import numpy as np
import torch
import tyro
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.distributions import Categorical

from marl_parallel import Current, FinishedEpisode, Rollout, RolloutArrays, gae, make, record_video
from marl_parallel.vector import StackedVecEnv

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RANDOM_RETURN = -26.1
"""Mean return of one agent's episode with random actions, over 1,000 episodes."""
MARGIN = 8.0
"""How much better than random the trained agents must be, for `--check`."""

Collected: TypeAlias = Generator[tuple[RolloutArrays, list[FinishedEpisode]], None, None]
"""The data of each rollout, and the episodes that ended in it."""


@dataclass
class Args:
    """Independent PPO with shared parameters on simple_spread."""

    seed: int = 1
    num_envs: int = 16
    """number of environments"""
    num_workers: int | None = None
    """number of worker processes; by default one per CPU"""
    backend: Literal["process", "serial"] = "process"
    """or "serial": all environments in this process, one after another"""
    halves: Literal[1, 2] = 1
    """2: the agents act in one half of the environments while the other half is stepped"""
    ahead: bool = False
    """collect the next rollout while the network is trained"""
    total_steps: int = 250_000
    """steps of all environments together"""
    stop_at: float | None = None
    """stop when the mean return of the last ten updates reaches this"""
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
    test_episodes: int = 400
    """number of episodes to test the trained agents"""
    output: Path = Path("runs/ippo_simple_spread")
    """folder of the log and the curve"""
    video: Path | None = None
    """also record the trained agents: a .gif or .mp4"""
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


def mean_return(episodes: Sequence[FinishedEpisode]) -> float:
    """Mean return of an agent."""
    return float(np.mean([list(episode.returns.values()) for episode in episodes]))


def one_by_one(agent: Agent, rollout: Rollout, updates: int) -> Collected:
    for _ in range(updates):
        yield rollout.collect(agent.act), rollout.finished_episodes


def ahead(agent: Agent, rollout: Rollout, updates: int, seed: int) -> Collected:
    """The same, while a thread collects the next rollout, with networks and a generator of its own."""
    actor, generator = copy.deepcopy(agent), torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def act(current: Current) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        policy = actor.policy(torch.from_numpy(current.observations))
        actions = torch.multinomial(policy.probs.flatten(0, 1), 1, generator=generator).view(current.acting.shape)
        return actions.numpy(), {"log_probs": policy.log_prob(actions).numpy()}

    def publish() -> None:
        actor.load_state_dict(agent.state_dict())

    with rollout.ahead(act, publish=publish, rollouts=updates) as rollouts:
        for data in rollouts:
            yield data, rollouts.finished_episodes


def update(agent: Agent, optimizer: torch.optim.Optimizer, arrays: RolloutArrays, args: Args) -> None:
    with torch.no_grad():
        everything, final = torch.from_numpy(arrays.observations), torch.from_numpy(arrays.final_observations)
        values, final_values = agent.value(everything), agent.value(final[torch.from_numpy(arrays.done)])
        estimates = gae(arrays, values.numpy(), final_values.numpy(), args.gamma, args.gae_lambda)
        advantages, targets = (torch.from_numpy(each).flatten() for each in estimates)
        observations, actions = everything[:-1].flatten(0, 2), torch.from_numpy(arrays.actions).flatten()
        if args.ahead:  # older networks have acted
            log_probs = torch.from_numpy(arrays.extras["log_probs"]).flatten()
        else:
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
    parallel = make(
        "mpe2.simple_spread_v3",
        num_envs=args.num_envs,
        env_kwargs={"max_cycles": 25},
        seed=1000 * args.seed,
        num_workers=args.num_workers,
        backend=args.backend,
    )
    env = StackedVecEnv(parallel)
    agent = Agent(env.single_observation_space.shape[0], env.single_action_space.n, args.hidden)
    rollout = Rollout(env, args.num_steps, halves=args.halves, extras={"log_probs": ()} if args.ahead else None)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    log: list[dict[str, float]] = []
    bar = Progress(
        TextColumn("seed {task.fields[seed]}"), BarColumn(), TextColumn("return {task.fields[mean]:6.2f}"),
        TextColumn("{task.fields[speed]:6,.0f} steps/s"), TimeRemainingColumn(),
    )  # fmt: skip
    per_update = args.num_steps * args.num_envs
    updates = max(args.total_steps // per_update, 1)
    collected = ahead(agent, rollout, updates, args.seed) if args.ahead else one_by_one(agent, rollout, updates)
    with bar, contextlib.closing(collected):
        task = bar.add_task("", total=updates, seed=args.seed, mean=float("nan"), speed=0.0)
        start = time.perf_counter()
        for number, (data, episodes) in enumerate(collected):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - number / updates)
            mean = mean_return(episodes)
            update(agent, optimizer, data, args)
            seconds, steps = time.perf_counter() - start, (number + 1) * per_update
            log.append({"steps": steps, "return": mean, "seconds": seconds, "steps_per_second": steps / seconds})
            bar.update(task, advance=1, mean=mean, speed=steps / seconds)
            recent = np.mean([row["return"] for row in log[-10:]])
            if args.stop_at is not None and number >= 9 and recent >= args.stop_at:
                break
    env.close()
    return agent, log


@torch.no_grad()
def evaluate(agent: Agent | None, seed: int, episodes: int) -> float:
    """Mean return of an agent's episode: with the most likely actions, or with random ones if `agent` is None."""
    rng = np.random.default_rng(seed)

    def act(current: Current) -> np.ndarray:
        if agent is None:
            return rng.integers(5, size=(20, 3))
        return agent.actor(torch.from_numpy(current.observations)).argmax(-1).numpy()

    with StackedVecEnv(make("mpe2.simple_spread_v3", num_envs=20, env_kwargs={"max_cycles": 25}, seed=seed)) as env:
        rollout = Rollout(env, 25 * episodes // 20)
        rollout.collect(act)
    return mean_return(rollout.finished_episodes)


def save(runs: dict[int, list[dict[str, float]]], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for seed, log in runs.items():
        with (output / f"seed_{seed}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, log[0])
            writer.writeheader()
            writer.writerows(log)
        axes.plot([row["steps"] for row in log], [row["return"] for row in log], label=f"seed {seed}")
    axes.axhline(RANDOM_RETURN, color="grey", linestyle=":", label="random actions")
    axes.set(title="IPPO on simple_spread", xlabel="environment steps", ylabel="mean return of an agent's episode")
    axes.legend()
    figure.savefig(output / "learning_curve.png", dpi=120)
    plt.close(figure)


def record(agent: Agent, path: Path) -> None:
    def act(observations: tuple[dict[str, np.ndarray], ...]) -> list[dict[str, int]]:
        seen = torch.as_tensor(np.stack([np.stack(list(one.values())) for one in observations]))
        best = agent.actor(seen).argmax(-1).tolist()
        return [dict(zip(one, row)) for one, row in zip(observations, best)]

    kwargs = {"max_cycles": 25, "render_mode": "rgb_array"}
    with make("mpe2.simple_spread_v3", num_envs=6, env_kwargs=kwargs, auto_reset="NEXT_STEP", seed=7) as env:
        record_video(env, path, steps=77, policy=act, fps=8, tile_width=220)


def main(args: Args) -> None:
    torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
    if args.video is not None and args.video.suffix not in (".gif", ".mp4"):
        sys.exit(f"--video must be a .gif or .mp4 file, got {args.video}")
    if args.smoke:
        args = dataclasses.replace(args, num_envs=4, num_steps=50, total_steps=600, test_episodes=20)
    runs, better = {}, []
    for seed in range(args.seed, args.seed + (3 if args.check else 1)):
        agent, runs[seed] = train(dataclasses.replace(args, seed=seed))
        trained, by_chance = (evaluate(each, 90_000 + seed, args.test_episodes) for each in (agent, None))
        better.append(trained - by_chance)
        print(f"seed {seed}: mean return of an agent's episode {trained:.2f}, with random actions {by_chance:.2f}")
    save(runs, args.output)
    print(f"log and learning curve: {args.output}")
    if args.video is not None:
        record(agent, args.video)
    if args.check and np.mean(better) < MARGIN:
        sys.exit(f"better than random by {np.mean(better):.2f} on average; expected {MARGIN} or more")


if __name__ == "__main__":
    main(tyro.cli(Args))
