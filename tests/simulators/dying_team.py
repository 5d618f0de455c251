"""A team with a global state and action masks, whose agents die one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv


class DyingTeam(PettingZooEnv):
    """All agents have the same reward. Episodes end when all are dead, or are truncated in their sixth step."""

    metadata = {"name": "dying_team"}  # noqa: RUF012
    possible_agents = ["a", "b", "c"]  # noqa: RUF012
    state_space = spaces.Box(-100, 100, (3,), np.float32)

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-9, 9, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time, self.total = [*self.possible_agents], 0, 0
        self.deaths = dict(zip(self.agents, self.rng.integers(2, 9, 3).tolist(), strict=True))
        return self.observed(self.agents), self.infos(self.agents)

    def observed(self, agents: list[str]) -> dict[str, Any]:
        return {agent: self.rng.uniform(1, 3, 2).astype(np.float32) for agent in agents}

    def infos(self, agents: list[str]) -> dict[str, Any]:
        return {agent: {"action_mask": np.arange(4) != (self.time + ord(agent)) % 4} for agent in agents}

    def state(self) -> np.ndarray:
        return np.array([self.time, self.total, len(self.agents)], np.float32)

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time, acted = self.time + 1, self.agents
        self.total += sum(int(action) for action in actions.values())
        terminated = {agent: self.time >= self.deaths[agent] for agent in acted}
        truncated = dict.fromkeys(acted, self.time == 6)
        self.agents = [agent for agent in acted if not (terminated[agent] or truncated[agent])]
        rewards = dict.fromkeys(acted, float(self.total))
        return self.observed(acted), rewards, terminated, truncated, self.infos(acted)
