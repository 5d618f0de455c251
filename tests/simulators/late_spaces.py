"""A PettingZoo simulator that makes its spaces in `reset`, as Generals does, and one whose spaces always raise."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class LateSpaces(ParallelEnv):
    """Each observation is a number drawn in `reset`, which counts up."""

    metadata = {"name": "late_spaces"}  # noqa: RUF012

    def __init__(self) -> None:
        self.possible_agents = ["red", "blue"]
        self.agents: list[str] = []
        self.rng = np.random.default_rng(0)

    def observation_space(self, agent: str) -> spaces.Space:
        return self.board["observation"]

    def action_space(self, agent: str) -> spaces.Space:
        return self.board["action"]

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.board = {"observation": spaces.Box(0, 1000, (1,), np.float32), "action": spaces.Discrete(3)}
        self.agents = [*self.possible_agents]
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.count = self.rng.integers(100)
        return self.observations(), {agent: {} for agent in self.agents}

    def observations(self) -> dict:
        return {agent: np.array([self.count], np.float32) for agent in self.agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.count += sum(actions.values())
        observations = self.observations()
        over = bool(self.count > 110)
        results = [dict.fromkeys(self.agents, value) for value in (1.0, over, False)]
        infos: dict = {agent: {} for agent in self.agents}
        if over:
            self.agents = []
        return observations, *results, infos


class NeverSpaces(LateSpaces):
    """Its spaces raise after a reset, too."""

    def observation_space(self, agent: str) -> spaces.Space:
        return self.misspelled["observation"]


class FailingReset(LateSpaces):
    """Its `reset` raises."""

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        raise ConnectionError("no server")
