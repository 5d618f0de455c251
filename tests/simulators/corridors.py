"""One agent in a corridor; how long it is depends on the environment, and so do the bounds of observations."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Corridor(gymnasium.Env):
    """Each step to the right is paid by its place; the episode ends at the end of the corridor.

    Args:
        length: The number of places.
        seen: The observation space; by default a `Box` of the places.
        acts: The action space.
        dict_state: Whether the default observation is a dict with the place and the number of places on the right.
    """

    def __init__(self, length: int, seen: Any = None, acts: Any = None, dict_state: bool = False) -> None:
        place = spaces.Box(0, length - 1, (1,), np.float32)
        rest = spaces.Discrete(length)
        self.observation_space = seen or (spaces.Dict(place=place, rest=rest) if dict_state else place)
        self.action_space = acts or spaces.Discrete(2)
        self.length, self.dict_state, self.place = length, dict_state, 0

    def seen(self) -> Any:
        place = np.array([self.place], np.float32)
        return {"place": place, "rest": np.int64(self.length - 1 - self.place)} if self.dict_state else place

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.place = 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = min(self.place + int(action), self.length - 1)
        return self.seen(), float(self.place), self.place == self.length - 1, False, {}
