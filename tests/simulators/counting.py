"""A simulator whose observations show its seed, the number of resets, and the steps since.

Two agents; the second is done after two steps. In both sets of rules; `crashing` adds faults.
"""

from __future__ import annotations

import os

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

AGENTS = ["long", "short"]
ACTIONS = dict.fromkeys(AGENTS, 0)
SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float64)


def seen(seed: int, resets: int, steps: int) -> np.ndarray:
    """The observation of each agent."""
    return np.array([seed, resets, steps], np.float64)


class Counting(PettingZooEnv):
    """PettingZoo rules.

    Args:
        length: Steps in an episode.
    """

    metadata = {"name": "counting", "render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, length: int | None = None, *, seed: int) -> None:
        self.length, self.last_seed, self.resets, self.steps = length, seed, 0, 0
        self.options: dict | None = None
        self.render_mode = "rgb_array"
        self.possible_agents = AGENTS[:]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space:
        return SPACE

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.last_seed, self.options = self.last_seed if seed is None else seed, options
        self.resets, self.steps, self.agents = self.resets + 1, 0, AGENTS[:]
        return self._observed(), {agent: {} for agent in self.agents}

    def _observed(self) -> dict[str, np.ndarray]:
        return {agent: seen(self.last_seed, self.resets, self.steps) for agent in self.agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.steps += 1
        acted, observations = self.agents, self._observed()
        over = self.steps == self.length
        terminated = {agent: agent == "short" and self.steps == 2 for agent in acted}
        truncated = {agent: over and not terminated[agent] for agent in acted}
        self.agents = [] if over else [agent for agent in acted if not terminated[agent]]
        return observations, dict.fromkeys(acted, 1.5), terminated, truncated, {agent: {} for agent in acted}

    def render(self) -> np.ndarray:
        return np.zeros((2, 2, 3), np.uint8)

    def pid(self) -> int:
        return os.getpid()


class CountingDicts(gymnasium.Env):
    """The same under dict rules."""

    def __init__(self, length: int | None = None, *, seed: int) -> None:
        self.own = Counting(length, seed=seed)
        self.possible_agents = AGENTS[:]
        self.observation_space = spaces.Dict(dict.fromkeys(AGENTS, SPACE))
        self.action_space = spaces.Dict(dict.fromkeys(AGENTS, spaces.Discrete(3)))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return self.own.reset(seed, options)

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, terminated, truncated, infos = self.own.step(actions)
        over = self.own.steps == self.own.length
        return observations, rewards, {**terminated, "__all__": False}, {**truncated, "__all__": over}, infos
