"""Agents that come back after their end, under the same id and in the same episode.

Every number follows from the seed and the actions; rewards are multiples of 1/8, so that their sums are exact.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

AGENTS = ["x", "y", "z"]
LENGTH = 10
POINT = spaces.Box(-np.inf, np.inf, (2,), np.float32)
# When each agent ends, how, and when it is observed again. `x` comes back in the very next step, and once more; `y`
# several steps later, and in the last step of some episodes; `z` does not come back.
TERMINATED, TRUNCATED = "terminated", "truncated"
LIVES: dict[str, list[tuple[int, str, int]]] = {
    "x": [(1, TERMINATED, 2), (3, TRUNCATED, 5)],
    "y": [(2, TRUNCATED, 6), (8, TERMINATED, 9)],
    "z": [(7, TERMINATED, 99)],
}


class ReturningAgents(gymnasium.Env):
    """Dict rules. Actions of agents that are dead or waiting to come back count, too.

    Args:
        corpses: Whether dead agents stay in the dicts, with a flag that is True.
        none_left: Whether `y` and `z` end and come back when `x` does, so that nobody is alive in between.
    """

    def __init__(
        self, seed: int | None = None, *, corpses: bool = False, none_left: bool = False, length: int = LENGTH
    ) -> None:
        self.corpses, self.length = corpses, length
        self.lives = {agent: LIVES["x"] if none_left else LIVES[agent] for agent in AGENTS}
        self.possible_agents, self.agents = AGENTS[:], AGENTS[:]
        self.observation_space = spaces.Dict(dict.fromkeys(AGENTS, POINT))
        self.action_space = spaces.Dict({agent: spaces.Discrete(3) for agent in AGENTS})
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.total = 0, 0
        self.shift = int(self.rng.integers(2))  # of all times, so that episodes differ
        self.agents = AGENTS[:]
        return {agent: self.seen() for agent in AGENTS}, {}

    def seen(self) -> np.ndarray:
        return np.array([self.total, self.rng.normal()], np.float32)

    def ends(self, agent: str, time: int) -> str | None:
        return next((how for dies, how, _ in self.lives[agent] if dies + self.shift == time), None)

    def is_dead(self, agent: str, time: int) -> bool:
        """Whether it has ended before this time, and has not come back."""
        return any(dies + self.shift < time < back + self.shift for dies, _, back in self.lives[agent])

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        if self.time > self.length:
            return {}, {}, {"__all__": False}, {"__all__": True}, {}
        self.total += sum((AGENTS.index(agent) + 1) * int(action) for agent, action in actions.items())
        observations: dict[str, Any] = {}
        rewards: dict[str, float] = {}
        terminateds: dict[str, bool] = {}
        truncateds: dict[str, bool] = {}
        for place, agent in enumerate(AGENTS):
            dead = self.is_dead(agent, self.time)
            if dead and not self.corpses:
                continue
            how = self.ends(agent, self.time)
            observations[agent] = self.seen()
            rewards[agent] = (self.total + place) / 8
            terminateds[agent], truncateds[agent] = dead or how == TERMINATED, how == TRUNCATED
        self.agents = [a for a in observations if not (terminateds[a] or truncateds[a])]
        return observations, rewards, self.with_all(terminateds, over=False), self.with_all(truncateds), {}

    def with_all(self, flags: dict[str, bool], *, over: bool = True) -> dict[str, bool]:
        return {**flags, "__all__": over and self.time == self.length}


class ReturningPettingZooAgents(PettingZooEnv):
    """PettingZoo's rules: agents that come back are in `agents` again.

    Args:
        ghosts: Whether agents stay in the dicts for one step after their end without a flag, but are not in `agents`.
    """

    metadata = {"name": "returning"}  # noqa: RUF012
    possible_agents = AGENTS

    def __init__(self, seed: int | None = None, *, ghosts: bool = False) -> None:
        self.own, self.ghosts = ReturningAgents(seed, length=LENGTH + 1), ghosts
        self.agents: list[str] = []
        self.state_space = POINT

    def observation_space(self, agent: str) -> spaces.Space:
        return POINT

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, _ = self.own.reset(seed=seed)
        self.agents = AGENTS[:]
        return observations, {agent: {} for agent in AGENTS}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert actions.keys() == {*self.agents}, f"{[*actions]} given, {self.agents} are to act"
        observations, rewards, terminateds, truncateds, _ = self.own.step(actions)
        for flags in (terminateds, truncateds):
            del flags["__all__"]
        if self.own.time == self.own.length:
            truncateds = {agent: not terminateds[agent] for agent in truncateds}
        self.agents = [a for a in observations if not (terminateds[a] or truncateds[a])]
        if self.ghosts:
            for agent in AGENTS:
                if agent not in observations and self.own.ends(agent, self.own.time - 1):
                    observations[agent], rewards[agent] = self.own.seen(), 0.5
                    terminateds[agent] = truncateds[agent] = False
        return observations, rewards, terminateds, truncateds, {agent: {} for agent in observations}

    def state(self) -> np.ndarray:
        return np.array([self.own.total, self.own.time], np.float32)
