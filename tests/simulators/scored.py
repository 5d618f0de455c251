"""A simulator with one agent whose infos have a score."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces


class Scored(gymnasium.Env):
    """One agent; each episode is longer than the one before, and its score is in the info of every step."""

    observation_space = action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        self.length, self.time = 2, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        self.length, self.time = self.length + 1, 0
        return 0, {"score": -1}

    def step(self, action: Any) -> Any:
        self.time += 1
        done = self.time == self.length
        return self.time % 3, 0.5, done, False, {"score": 10 * self.time + int(action), "won": done}
