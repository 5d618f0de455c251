"""A simulator to evaluate: two agents walk for a number of steps that follows from the seed; `b` leaves half-way.

Rewards are multiples of 1/8, so that their sums are exact.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

AGENTS = ["a", "b"]
SHORT, LONG = 2, 12


class WalkFailed(Exception):
    """The fault of a `Walk`."""


class Walk(gymnasium.Env):
    """Dict rules, so that an episode that is over must not be stepped on.

    Args:
        fails: By seed, the step in which the episode raises an exception; 0 for the reset.
        dies: By seed, the step in which the process ends.
        until: How often the environment is constructed again before episodes fail no more; None for never.
        drifts: Whether observations depend on a generator that `reset` does not seed.
        differs: Whether rewards depend on the seed of the constructor.
        slow: Seconds of each step.
        vectors: Whether rewards are vectors of two numbers.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(
        self,
        seed: int | None = None,
        restarts: int = 0,
        *,
        fails: Mapping[int, int] | None = None,
        dies: Mapping[int, int] | None = None,
        until: int | None = None,
        drifts: bool = False,
        differs: bool = False,
        slow: float = 0.0,
        vectors: bool = False,
    ) -> None:
        is_repaired = until is not None and restarts >= until
        self.fails, self.dies = ({} if is_repaired else dict(faults or {}) for faults in (fails, dies))
        self.possible_agents = AGENTS[:]
        self.observation_space = spaces.Dict({agent: spaces.Box(-99, 99, (2,), np.float64) for agent in AGENTS})
        self.action_space = spaces.Dict({agent: spaces.Discrete(5) for agent in AGENTS})
        if vectors:
            self.reward_space = spaces.Dict({agent: spaces.Box(-99, 99, (2,), np.float64) for agent in AGENTS})
        self.render_mode, self.vectors, self.slow = "rgb_array", vectors, slow
        self.own = np.random.default_rng(0) if drifts else None
        self.bonus = (seed or 0) if differs else 0
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.fault, self.death = (faults.get(-1 if seed is None else seed, -1) for faults in (self.fails, self.dies))
        if self.fault == 0:
            raise WalkFailed(f"reset with the seed {seed}")
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.total, self.over = 0, 0, False
        self.length = SHORT if self.rng.integers(2) else LONG
        return self.seen(AGENTS), {}

    def seen(self, agents: list[str]) -> dict[str, np.ndarray]:
        drift = 0.0 if self.own is None else self.own.random()
        return {agent: np.array([self.total + drift, self.rng.normal()]) for agent in agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert not self.over, "stepped on after the end"
        self.time += 1
        time.sleep(self.slow)
        if self.time == self.death:
            os._exit(3)
        if self.time == self.fault:
            raise WalkFailed("on the way")
        self.total += sum((AGENTS.index(agent) + 1) * int(action) for agent, action in actions.items())
        agents = AGENTS if self.time <= self.length // 2 else ["a"]
        self.over = self.time == self.length
        terminateds = {agent: agent == "b" and self.time == self.length // 2 for agent in agents}
        rewards: dict[str, Any] = {agent: (self.total + self.bonus) / 8 + len(agent) for agent in agents}
        if self.vectors:
            rewards = {agent: np.array([reward, 1.0]) for agent, reward in rewards.items()}
        infos: dict[str, Any] = {agent: {"place": self.time} for agent in agents}
        if self.over:
            infos["__common__"] = {"battle_won": self.total % 2 == 0}
        return self.seen(agents), rewards, {**terminateds, "__all__": self.over}, {"__all__": False}, infos

    def render(self) -> np.ndarray:
        return np.full((16, 16, 3), 20 * self.time, np.uint8)
