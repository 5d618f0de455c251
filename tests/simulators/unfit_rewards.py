"""A simulator whose rewards may have no place in arrays."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

BAD = 2
"""The action after which the reward is a text."""


class UnfitRewards(gymnasium.Env):
    """Observes the number of steps; its action is the reward, but a text for `BAD`."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        reward: Any = "many" if action == BAD else float(action)
        return np.full(1, self.steps, np.float32), reward, False, False, {}
