"""A configurable simulator with dict rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class DictRules(gymnasium.Env):
    """Two agents that observe the time, in an episode that only `__all__` ends.

    Args:
        seen: The observation space.
        acts: The action space.
        look: The observation at a time.
        infos: The infos at a time.
        first: The infos of a reset.
        flags: The terminated flags at a time.
        length: The steps of an episode.
    """

    possible_agents = ("a", "b")

    def __init__(
        self,
        seen: spaces.Space = spaces.Box(-9e9, 9e9, (1,)),  # noqa: B008
        acts: spaces.Space = spaces.Discrete(3),  # noqa: B008
        look: Callable[[int], Any] = lambda time: np.full(1, time, np.float32),
        infos: Callable[[int], dict] = lambda time: {},
        first: dict | None = None,
        flags: Callable[[int], dict] = lambda time: {},
        length: int = 99,
    ) -> None:
        self.observation_space = spaces.Dict({"a": seen, "b": seen})
        self.action_space = spaces.Dict({"a": acts, "b": acts})
        self.look, self.infos, self.first, self.flags, self.length = look, infos, first or {}, flags, length

    def both(self) -> dict[str, Any]:
        return {"a": self.look(self.time), "b": self.look(self.time)}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.time = 0
        return self.both(), self.first

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.time, self.actions = self.time + 1, actions
        over = {"__all__": self.time == self.length}
        return self.both(), {"a": 1.0, "b": 1.0}, {**over, **self.flags(self.time)}, {}, self.infos(self.time)
