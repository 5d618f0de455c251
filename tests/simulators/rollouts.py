"""Dict environments for rollouts: infos in all places, and truncations without a last observation."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

SPACE = spaces.Box(-1.0, 99.0, (2,), np.float32)


class TwoAgents:
    """Rewards are 1; an episode has six steps."""

    possible_agents = ("a", "b")
    observation_space = spaces.Dict([(agent, SPACE) for agent in possible_agents])
    action_space = spaces.Dict([(agent, spaces.Discrete(2)) for agent in possible_agents])
    length = 6

    def __init__(self, seed: int | None = None) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.time = 0
        return self.observed(), {}

    def observed(self) -> dict[str, Any]:
        return {agent: np.full(2, self.time, np.float32) for agent in self.possible_agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        terminateds = {**dict.fromkeys(self.possible_agents, False), "__all__": False}
        truncateds = {**terminateds, "__all__": self.time == self.length}
        return self.observed(), dict.fromkeys(self.possible_agents, 1.0), terminateds, truncateds, {}


class TruncatedUnseen(TwoAgents):
    """Agents get no last observation when they are truncated: both at the end, and before it `b` alone.

    Args:
        whole: Whether `b` goes on to the end.
    """

    state_space = spaces.Box(0.0, 99.0, (3,), np.float32)

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole

    def state(self) -> np.ndarray:
        return np.full(3, self.time, np.float32)

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, terminateds, truncateds, infos = super().step(actions)
        gone = 4 if self.time > 3 and not self.whole else 99
        if self.time == 3 and not self.whole:
            truncateds["b"] = True
            del observations["b"]
        for values in (observations, rewards, terminateds, truncateds):
            if self.time >= gone:
                values.pop("b", None)
        return {} if truncateds["__all__"] else observations, rewards, terminateds, truncateds, infos


class Scored(TwoAgents):
    """Infos of agents, of the environment and common ones, each at other times."""

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, terminateds, truncateds, infos = super().step(actions)
        if self.time == self.length:
            infos["a"] = {"won": bool(self.rng.integers(2))}
            infos["__common__"] = {"length": self.time}
        if self.time % 3 == 0:
            infos["b"] = {"place": [self.time, -self.time]}
        if self.time % 4 == 0:
            infos["score"] = [0.5, float(self.time)]
        return observations, rewards, terminateds, truncateds, infos
