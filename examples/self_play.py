"""Self-play: PPO learns connect four against earlier versions of its own network.

    python examples/self_play.py                      a CSV log, the learning curve as a PNG, the table of pairings
    python examples/self_play.py --seeds 3 --check    three seeds; fails unless each wins 95 % against random moves

It needs `pip install -e ".[examples]"`. `Policies` lets the learner play both sides in some games. In the others, it
plays one side against a version that is drawn for each game: in half of these games, each version is equally likely,
and in the other half, versions that win more often are drawn more often. A quarter of the versions' moves is random, so
that the learner sees more positions. The learner trains on all its own moves. The same `--seed` gives the same curve,
with every number of workers.

Why not tic-tac-toe: there, the best player wins only 96.7 % of its games against random moves, 99.5 % if it begins and
93.9 % if it does not, since random moves draw some games.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import tyro
from rich.progress import Progress
from torch import nn

from marl_parallel import Policies, Rollout, RolloutArrays, Rows, StartedEpisode, evaluate, gae, make, pfsp_weights

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GAME = "pettingzoo.classic.connect_four_v3"
WON = 0.95
"""For `--check`: at least this share of the games against random moves is won. Draws are not won."""


@dataclass
class Args:
    """PPO on connect four, against earlier versions of the network."""

    seed: int = 1
    seeds: int = 1
    """number of trainings, with `seed`, `seed + 1` and so on"""
    num_envs: int = 64
    """number of environments"""
    num_workers: int | None = None
    """number of worker processes; by default one per CPU"""
    updates: int = 70
    num_steps: int = 32
    """steps of each environment between updates"""
    version_every: int = 10
    """updates between two versions, and between two tests"""
    both_sides: float = 0.3
    """share of the games in which the learner plays both sides"""
    noise: float = 0.25
    """share of random moves of earlier versions, so that the learner sees more positions"""
    epochs: int = 3
    minibatches: int = 8
    learning_rate: float = 4e-3
    gamma: float = 0.97
    gae_lambda: float = 0.9
    clip: float = 0.2
    entropy: float = 0.03
    channels: int = 48
    test_games: int = 200
    """games against random moves, and as many against earlier versions"""
    output: Path = Path("runs/self_play")
    """folder of the logs and the curves"""
    check: bool = False
    """fail unless each seed wins enough games against random moves"""
    smoke: bool = False
    """a run of a few seconds"""


class Network(nn.Module):
    """A policy and a critic of boards `(..., 6, 7, 2)`: the player's own stones and the other player's.

    The score of a column is that of the cell in which the stone lands, by what is less than four cells away from it.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, 7, padding=3), nn.ReLU(), nn.Conv2d(channels, channels, 1), nn.ReLU()
        )
        self.actor, self.critic = nn.Conv2d(channels, 1, 1), nn.Linear(6 * 7 * channels, 1)

    def forward(self, boards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stones = boards.float().flatten(0, -4).movedim(-1, -3)
        free = 1.0 - stones.sum(-3, keepdim=True)
        features = self.body(torch.cat([stones, torch.ones_like(free)], -3))  # the ones show where the board ends
        lands = free * (1.0 - nn.functional.pad(free[..., 1:, :], (0, 0, 0, 1)))  # free, above a stone or the ground
        logits, values = (self.actor(features) * lands).sum((-3, -2)), torch.tanh(self.critic(features.flatten(-3)))
        return logits.view(*boards.shape[:-3], 7), values.view(boards.shape[:-3])

    def log_probs(self, boards: torch.Tensor, masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logarithms of the probabilities of all moves, and values."""
        logits, values = self(boards)
        return logits.masked_fill(~masks, -1e9).log_softmax(-1), values


Player = Callable[[Rows], np.ndarray]


def random(rows: Rows) -> np.ndarray:
    """Random moves, in `evaluate`."""
    assert rows.action_masks is not None
    assert rows.rngs is not None
    return np.where(rows.action_masks, [generator.random(7) for generator in rows.rngs], -1.0).argmax(-1)


def player(network: Network, rng: np.random.Generator | None = None, *, noise: float = 0.0) -> Player:
    """Moves of a network: with `rng` they are drawn, and a share of them is random; without, they are the best ones."""

    @torch.no_grad()
    def act(rows: Rows) -> np.ndarray:
        boards, masks = torch.from_numpy(rows.observations["observation"]), torch.from_numpy(rows.action_masks)
        scores = network.log_probs(boards, masks)[0].numpy()
        if rng is not None:
            at_random = rng.random((len(scores), 1)) < noise
            scores = np.where(at_random & masks.numpy(), 0.0, scores) + rng.gumbel(size=scores.shape)
        return scores.argmax(-1)

    return act


class League:
    """The learner, and its earlier versions."""

    def __init__(self, args: Args) -> None:
        self.args, self.rng = args, np.random.default_rng(args.seed)
        self.learner, self.versions = Network(args.channels), dict[str, Network]()
        self.policies = Policies({"learner": player(self.learner, self.rng)}, choose=self.choose)
        self.add_version()

    def add_version(self) -> None:
        name, network = f"version {len(self.versions)}", copy.deepcopy(self.learner)
        self.versions[name], self.policies[name] = network, player(network, self.rng, noise=self.args.noise)
        self.weigh()

    def weigh(self) -> None:
        """Compute how likely each version is drawn; call it between two rollouts."""
        returns = np.array([self.policies.mean_return("learner", version) for version in self.versions])
        hard = pfsp_weights(np.nan_to_num((1 + returns) / 2, nan=0.5))
        self.chances = 0.5 * hard + 0.5 / len(self.versions)

    def choose(self, episode: StartedEpisode, rng: np.random.Generator) -> dict[Any, str]:
        if rng.random() < self.args.both_sides:
            return dict.fromkeys(episode.agents, "learner")
        opponent, side = [*self.versions][rng.choice(len(self.versions), p=self.chances)], rng.integers(2)
        return {agent: "learner" if place == side else opponent for place, agent in enumerate(episode.agents)}

    def win_rate(self, opponents: dict[str, Player], progress: Callable[[int, int], object]) -> float:
        """The share of games that the learner wins with its most likely moves; each side plays half of the games."""
        names = [*opponents]

        def choose(episode: StartedEpisode, rng: np.random.Generator) -> dict[Any, str]:
            both = ["learner", names[episode.number // 2 % len(names)]]
            return dict(zip(episode.agents, both if episode.number % 2 == 0 else both[::-1]))

        policies = Policies({"learner": player(self.learner), **opponents}, choose=choose)
        with make(GAME, 32, facade="stacked", backend="serial", auto_reset=False) as env:
            seed = 1_000_000 + self.args.seed
            result = evaluate(env, policies, self.args.test_games, seed, action_masks=True, progress=progress)
        assert result.policies is not None
        won = [(returns > 0) & (result.policies[agent] == "learner") for agent, returns in result.returns.items()]
        return float(np.any(won, axis=0).mean())

    def test(self, progress: Callable[[int, int], object]) -> dict[str, float]:
        versions = {name: player(network, self.rng) for name, network in self.versions.items()}
        return {"random": self.win_rate({"random": random}, progress), "versions": self.win_rate(versions, progress)}


def update(network: Network, optimizer: torch.optim.Optimizer, data: RolloutArrays, args: Args, index: int) -> None:
    boards, masks = torch.from_numpy(data.observations["observation"]), torch.from_numpy(data.action_masks)
    with torch.no_grad():
        values = network(boards)[1]
    # A player that waits at the end of the rollout has no observation: it gains what the other one loses.
    last = torch.where(torch.from_numpy(data.acting[-1]), values[-1], 0.0)
    values[-1] = last - last.flip(-1)
    ended = np.zeros((int(data.done.sum()), 2))  # games end by a termination: nothing comes after it
    advantages, targets = gae(data, values.numpy(), ended, args.gamma, args.gae_lambda)
    own = torch.from_numpy(data.acting[:-1] & (data.policies == index))
    of_moves = (boards[:-1], masks[:-1], *map(torch.from_numpy, (data.actions, advantages, targets)))
    boards, masks, actions, advantages, targets = (each[own] for each in of_moves)
    actions, advantages = actions.unsqueeze(-1), (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    with torch.no_grad():
        before = network.log_probs(boards, masks)[0].gather(-1, actions).squeeze(-1)
    for _ in range(args.epochs):
        for part in torch.randperm(len(actions)).chunk(args.minibatches):
            log_probs, values = network.log_probs(boards[part], masks[part])
            ratio = (log_probs.gather(-1, actions[part]).squeeze(-1) - before[part]).exp()
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            gain = torch.min(ratio * advantages[part], clipped * advantages[part]).mean()
            error = (values - targets[part]).square().mean()
            entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
            optimizer.zero_grad()
            (-gain + 0.5 * error - args.entropy * entropy).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()


def train(args: Args, bars: Progress) -> tuple[League, list[dict[str, float]]]:
    """One run; returns the league and its log, with a row for each test."""
    torch.manual_seed(args.seed)
    league = League(args)
    optimizer = torch.optim.Adam(league.learner.parameters(), lr=args.learning_rate, eps=1e-5)
    start = time.perf_counter()
    trained, tested = bars.add_task(f"seed {args.seed}", total=args.updates), bars.add_task("test games")

    def row(updates: int) -> dict[str, float]:
        steps, seconds = updates * args.num_steps * args.num_envs, time.perf_counter() - start
        shares = league.test(lambda done, total: bars.update(tested, completed=done, total=total))
        return {"updates": updates, "steps": steps, "seconds": seconds, **shares}

    log = [row(0)]
    with make(GAME, args.num_envs, seed=1000 * args.seed, num_workers=args.num_workers, facade="stacked") as env:
        rollout = Rollout(env, args.num_steps, action_masks=True)
        for number in range(1, args.updates + 1):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (number - 1) / args.updates)
            data = rollout.collect(league.policies)
            update(league.learner, optimizer, data, args, league.policies.index("learner"))
            league.weigh()
            bars.update(trained, completed=number)
            if number % args.version_every == 0 or number == args.updates:
                log.append(row(number))
                league.add_version()
    return league, log


def save(logs: dict[int, list[dict[str, float]]], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, (seed, log) in enumerate(logs.items()):
        with (output / f"seed_{seed}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, log[0])
            writer.writeheader()
            writer.writerows(log)
        for opponents, style in (("random", "-"), ("versions", ":")):
            label = f"seed {seed}, against " + ("random moves" if opponents == "random" else "earlier versions")
            shares = [row[opponents] for row in log]
            axes.plot([row["updates"] for row in log], shares, style, color=f"C{color}", label=label)
    axes.set(title="Self-play in connect four", xlabel="updates", ylabel="share of games won", ylim=(0, 1))
    axes.legend()
    figure.savefig(output / "learning_curve.png", dpi=120)
    plt.close(figure)


def main(args: Args) -> None:
    torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
    if args.smoke:
        args = dataclasses.replace(args, num_envs=32, updates=3, version_every=3, test_games=40)
    logs, won = {}, {}
    for seed in range(args.seed, args.seed + args.seeds):
        with Progress() as bars:
            league, logs[seed] = train(dataclasses.replace(args, seed=seed), bars)
        won[seed] = logs[seed][-1]["random"]
        print(f"seed {seed}: games and mean return of each pairing")
        for policy, others, games, mean_return in league.policies.table():
            print(f"{policy:>10} against {', '.join(others) or 'itself':<10}: {games:5} games, {mean_return:5.2f}")
        print(f"seed {seed}: {won[seed]:.1%} of {args.test_games} games against random moves won")
    save(logs, args.output)
    print(f"logs and learning curves: {args.output}")
    if args.check and min(won.values()) < WON:
        sys.exit(f"expected at least {WON:.0%} of the games against random moves won with each seed, got {won}")


if __name__ == "__main__":
    main(tyro.cli(Args))
