"""Simulators that are registered with Gymnasium when this module is imported."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Scenario(gymnasium.Env):
    """Draws its map in the constructor, as SMARTS does; the seed of `reset` does not change the map."""

    observation_space = spaces.Dict(car=spaces.Box(0.0, 1.0, (2,), np.float64))
    action_space = spaces.Dict(car=spaces.Discrete(2))

    def __init__(self, size: int = 1, seed: int = 42, **more: Any) -> None:
        self.received = {"size": size, "seed": seed, **more}
        self.map = np.random.default_rng(seed).random(2)
        self.seed = seed

    def reset(self, *, seed=None, options=None):
        return {"car": self.map.copy()}, {}

    def step(self, actions):
        return {"car": self.map.copy()}, {"car": 0.0}, {"__all__": False}, {"__all__": False}, {}


class WithoutSeed(Scenario):
    """Its entry point has no seed argument."""

    def __init__(self, size: int = 1) -> None:
        super().__init__(size)


gymnasium.register("registered/Scenario-v0", entry_point="simulators.registered:Scenario")
gymnasium.register("registered/Scenario-v1", entry_point=Scenario, kwargs={"size": 7, "seed": None})
gymnasium.register("registered/Fixed-v0", entry_point=Scenario, kwargs={"seed": 5})
gymnasium.register("registered/WithoutSeed-v0", entry_point=WithoutSeed)
