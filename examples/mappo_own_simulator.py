"""MAPPO on a simulator of one's own: robots that join late, run out of battery, and may not drive off the floor.

    python examples/mappo_own_simulator.py

It needs `pip install -e ".[examples]"`. `Warehouse` is a simulator with dicts. Its observations have an
`action_mask`, and `state()` is what the critic sees. The three lines marked with `(1)` to `(3)` are all that
`marl_parallel` needs; the rest is a policy and PPO. The same `--seed` gives the same returns.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tyro
from gymnasium import spaces
from rich.progress import track
from torch import nn
from torch.distributions import Categorical

from marl_parallel import Current, Rollout, gae, make

SIZE, LENGTH, BATTERY = 5, 60, 40
MOVES = np.array([[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0]])
Values = dict[str, Any]


class Warehouse:
    """Robots fetch packages on a floor of 5 x 5 places: a reward of 1 for each, and the next one appears elsewhere.

    `late` joins after 10 steps. A robot's battery lasts for 40 steps; then it stops for the rest of the episode.
    """

    possible_agents: tuple[str, ...] = ("first", "second", "late")

    def __init__(self) -> None:
        seen = spaces.Dict(
            to_package=spaces.Box(-1.0, 1.0, (2,), np.float32),
            place=spaces.Box(0.0, 1.0, (2,), np.float32),
            action_mask=spaces.MultiBinary(len(MOVES)),
        )
        self.observation_space = spaces.Dict([(agent, seen) for agent in self.possible_agents])
        self.action_space = spaces.Dict([(agent, spaces.Discrete(len(MOVES))) for agent in self.possible_agents])
        self.state_space = spaces.Box(-1.0, 1.0, (5 * len(self.possible_agents),), np.float32)

    def reset(self, seed: int | None = None, options: Values | None = None) -> tuple[Values, Values]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.battery = 0, dict.fromkeys(self.possible_agents, BATTERY)
        self.places, self.packages = ({a: self.rng.integers(SIZE, size=2) for a in self.battery} for _ in range(2))
        return self.observe(self.on_the_floor()), {}

    def on_the_floor(self) -> list[str]:
        return [a for a in self.possible_agents if self.battery[a] and (a != "late" or self.time >= 10)]

    def observe(self, agents: list[str]) -> Values:
        return {
            agent: {
                "to_package": ((self.packages[agent] - self.places[agent]) / SIZE).astype(np.float32),
                "place": (self.places[agent] / SIZE).astype(np.float32),
                "action_mask": self.allowed(agent),
            }
            for agent in agents
        }

    def allowed(self, agent: str) -> np.ndarray:
        after = self.places[agent] + MOVES
        return np.asarray(((after >= 0) & (after < SIZE)).all(axis=1), np.int8)

    def step(self, actions: Values) -> tuple[Values, Values, Values, Values, Values]:
        self.time += 1
        rewards = {}
        for agent, action in actions.items():
            assert self.allowed(agent)[action], f"{agent} drives off the floor"
            self.places[agent] = self.places[agent] + MOVES[action]
            self.battery[agent] -= 1
            rewards[agent] = float((self.places[agent] == self.packages[agent]).all())
            if rewards[agent]:
                self.packages[agent] = self.rng.integers(SIZE, size=2)
        seen = list(dict.fromkeys([*actions, *self.on_the_floor()]))  # also those whose battery has just run out
        terminated = {agent: self.battery[agent] == 0 for agent in actions}
        return self.observe(seen), rewards, terminated, {"__all__": self.time == LENGTH}, {}

    def state(self) -> np.ndarray:
        robots = [[*self.places[a] / SIZE, *(self.packages[a] - self.places[a]) / SIZE] for a in self.possible_agents]
        batteries = [self.battery[agent] / BATTERY for agent in self.possible_agents]
        return np.array([*np.ravel(robots), *batteries], np.float32)


@dataclass
class Args:
    """MAPPO on a simulator of one's own."""

    seed: int = 1
    num_envs: int = 16
    """number of environments"""
    num_workers: int | None = None
    """number of worker processes; by default one per CPU"""
    updates: int = 60
    num_steps: int = 128
    """steps of each environment between updates"""
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 2e-3
    gamma: float = 0.95
    gae_lambda: float = 0.95
    smoke: bool = False
    """a run of a few seconds, too short to learn"""


class Agents(nn.Module):
    """The networks that all robots share. The critic sees the state of the warehouse and the robot's observation."""

    def __init__(self, state_size: int, hidden: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, len(MOVES)))
        self.critic = nn.Sequential(nn.Linear(4 + state_size, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def policy(self, seen: torch.Tensor, allowed: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(seen).masked_fill(~allowed, -1e9))

    def value(self, seen: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        states = states.unsqueeze(-2).expand(*seen.shape[:-1], -1)
        return self.critic(torch.cat([seen, states], -1)).squeeze(-1)

    @torch.no_grad()
    def act(self, current: Current) -> np.ndarray:
        seen = joined({key: torch.from_numpy(part) for key, part in current.observations.items()})
        return self.policy(seen, torch.from_numpy(current.action_masks)).sample().numpy()


def joined(observations: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([observations["to_package"], observations["place"]], -1)


def update(agents: Agents, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> None:
    data = rollout.torch()
    assert data.action_masks is not None
    acting, seen, states = data.acting[:-1], joined(data.observations), data.states
    with torch.no_grad():
        values = agents.value(seen, states).numpy()
        last_seen = joined(data.final_observations)[data.done]
        final_values = agents.value(last_seen, data.final_states[data.done]).numpy()
        estimates = gae(rollout.arrays, values, final_values, args.gamma, args.gae_lambda)
        advantages, targets = (torch.from_numpy(each)[acting] for each in estimates)
        states = states[:-1].unsqueeze(2).expand(*acting.shape, -1)[acting].unsqueeze(1)
        seen, allowed, actions = seen[:-1][acting], data.action_masks[:-1][acting], data.actions[acting]
        log_probs = agents.policy(seen, allowed).log_prob(actions)
    for _ in range(args.epochs):
        for part in torch.randperm(len(actions)).chunk(args.minibatches):
            policy = agents.policy(seen[part], allowed[part])
            ratio = (policy.log_prob(actions[part]) - log_probs[part]).exp()
            advantage = (advantages[part] - advantages[part].mean()) / (advantages[part].std() + 1e-8)
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            error = (agents.value(seen[part].unsqueeze(1), states[part].squeeze(1)).squeeze(1) - targets[part]).square()
            loss = -gain + 0.5 * error.mean() - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agents.parameters(), 0.5)
            optimizer.step()


def main(args: Args) -> None:
    torch.set_num_threads(1)  # small networks: the CPUs are for the simulators
    if args.smoke:
        args = dataclasses.replace(args, num_envs=4, updates=3)
    torch.manual_seed(args.seed)
    env = make(  # (1)
        Warehouse, args.num_envs, seed=1000 * args.seed, num_workers=args.num_workers,
        facade="stacked", facade_kwargs={"with_state": True},
    )  # fmt: skip
    rollout = Rollout(env, args.num_steps, action_masks=True)  # (2)
    agents = Agents(env.state_space.shape[0])
    optimizer = torch.optim.Adam(agents.parameters(), lr=args.learning_rate)
    means = []
    for _ in track(range(args.updates), f"seed {args.seed}"):
        rollout.collect(agents.act)  # (3)
        means.append(np.mean([sum(episode.returns.values()) for episode in rollout.finished_episodes]))
        update(agents, optimizer, rollout, args)
    env.close()
    print(f"packages in an episode, first -> last update: {means[0]:.1f} -> {means[-1]:.1f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
