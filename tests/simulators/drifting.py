"""Gymnasium's environments with one agent, whose episodes end in different steps and in both ways."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Drift(gymnasium.Env):
    """One agent; episodes of 3 to 9 steps, which terminate or are truncated; infos with and without numbers.

    Args:
        form: What is observed: an "array", a "dict", or a "number".
        fails_at: The step, counted over all episodes, that raises.
        waits: Seconds that a step takes.
    """

    render_mode = "rgb_array"

    def __init__(self, form: str = "array", fails_at: int = -1, waits: float = 0.0, restarts: int = 0) -> None:
        self.form, self.fails_at, self.waits = form, (fails_at if restarts == 0 else -1), waits
        self.steps, self.label = 0, "plain"
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = {
            "array": box,
            "dict": spaces.Dict({"place": box, "action_mask": spaces.MultiBinary(3)}),
            "number": spaces.Discrete(10),
        }[form]
        self.action_space = spaces.Discrete(3)

    def look(self) -> Any:
        place = (self.place + self.np_random.normal(size=3)).astype(np.float32)
        if self.form == "number":
            return np.int64(self.time)
        return (
            place if self.form == "array" else {"place": place, "action_mask": np.array([1, 1, self.time % 2], np.int8)}
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.time, self.place, self.length = 0, (options or {}).get("place", 0), int(self.np_random.integers(3, 10))
        return self.look(), {"first": self.length}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        if self.steps == self.fails_at:
            raise ValueError("the ground is missing")
        time.sleep(self.waits)
        self.steps, self.time, self.place = self.steps + 1, self.time + 1, self.place + int(action)
        over = self.time == self.length
        return (
            self.look(),
            self.place / 7,
            over and self.place % 2 == 0,
            over and self.place % 2 == 1,
            {"at": self.place},
        )

    def render(self) -> Any:
        return np.full((2, 2, 3), self.time, np.uint8)


class Painter(Drift):
    """Its actions, or observations, have no form that Tianshou knows."""

    def __init__(self, what: str) -> None:
        super().__init__()
        if what == "action":
            self.action_space: Any = spaces.Dict({"x": spaces.Discrete(2)})
        else:
            self.observation_space: Any = spaces.Tuple([spaces.Discrete(2)])
