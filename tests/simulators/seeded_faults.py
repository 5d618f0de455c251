"""A simulator whose fault depends on the seed, the options and the actions of the episode, and on nothing before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

from simulators.counting import AGENTS, CountingDicts
from simulators.failing import SimulatorError

LIMIT = 5.0
SPACE = spaces.Box(-np.inf, np.inf, (1,), np.float64)


def raises(level: float) -> None:
    raise SimulatorError(f"overflow at {level!r}")


class Tank(PettingZooEnv):
    """Fills by random amounts times the actions. An episode has 1 to 6 steps, if the tank does not overflow before.

    Args:
        overflow: Called with the level where it passes `LIMIT`.
    """

    metadata = {"name": "tank", "render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self, overflow: Callable[[float], Any] = raises) -> None:
        self.overflow, self.rng = overflow, np.random.default_rng()
        self.possible_agents = AGENTS[:]
        self.agents: list[str] = []
        self.level, self.left = 0.0, 0

    def observation_space(self, agent: str) -> spaces.Space:
        return SPACE

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.level, self.left = (options or {}).get("level", 0.0), int(self.rng.integers(1, 7))
        self.agents = AGENTS[:]
        return self._observed(), {agent: {} for agent in self.agents}

    def _observed(self) -> dict[str, np.ndarray]:
        return {agent: np.array([self.level]) for agent in self.agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        acted = self.agents
        self.level += sum(self.rng.random() * int(action) for action in actions.values())
        if self.level > LIMIT:
            self.overflow(self.level)
        self.left -= 1
        observed, over = self._observed(), self.left <= 0
        self.agents = [] if over else acted
        truncated = dict.fromkeys(acted, over)
        return (
            observed,
            dict.fromkeys(acted, 0.5),
            dict.fromkeys(acted, False),
            truncated,
            {agent: {} for agent in acted},
        )

    def render(self) -> np.ndarray:
        if self.level > LIMIT / 2:
            raise SimulatorError(f"cannot draw {self.level!r}")
        return np.zeros((2, 2, 3), np.uint8)


class TankDicts(CountingDicts):
    """The same under dict rules."""

    def __init__(self) -> None:
        self.own = Tank()
        self.possible_agents = AGENTS[:]
        self.observation_space = spaces.Dict(dict.fromkeys(AGENTS, SPACE))
        self.action_space = spaces.Dict(dict.fromkeys(AGENTS, spaces.Discrete(3)))

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, terminated, truncated, infos = self.own.step(actions)
        return (
            observations,
            rewards,
            {**terminated, "__all__": False},
            {**truncated, "__all__": not self.own.agents},
            infos,
        )
