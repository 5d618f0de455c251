"""Simulators with vector rewards, declared in each form that other libraries use."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

LENGTH = 4


class Couriers(PettingZooEnv):
    """Three agents with rewards in two currencies: `reward_space(agent)`, as in MOMAland; one dies early.

    Args:
        dtype: The dtype of returned arrays; the declared one is float32.
        one_by_one: Agents have different numbers of objectives.
    """

    metadata = {"name": "couriers"}  # noqa: RUF012

    def __init__(
        self,
        seed: int = 0,
        env_id: int = 0,
        restarts: int = 0,
        dtype: Any = np.float32,
        one_by_one: bool = False,
        crashes_at: int | None = None,
    ) -> None:
        self.possible_agents = ["van", "bike", "drone"]
        self.agents: list[str] = []
        self.dtype, self.one_by_one = dtype, one_by_one
        self.crashes_at = crashes_at if env_id == 0 and not restarts else None
        self.rng = np.random.default_rng(seed)

    def objectives(self, agent: str) -> int:
        return 1 + self.possible_agents.index(agent) if self.one_by_one else 2

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reward_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-np.inf, np.inf, (self.objectives(agent),), np.float32)

    def observe(self) -> dict[str, np.ndarray]:
        return {agent: self.rng.normal(size=3).astype(np.float32) for agent in self.agents}

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time = self.possible_agents[:], 0
        return self.observe(), {agent: {} for agent in self.agents}

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.time += 1
        if self.time == self.crashes_at:
            os._exit(3)
        acted, observations = self.agents, self.observe()
        rewards = {
            agent: (actions[agent] + self.rng.normal(size=self.objectives(agent))).astype(self.dtype) for agent in acted
        }
        over = {agent: self.time == LENGTH or (agent == "drone" and self.time == 2) for agent in acted}
        self.agents = [agent for agent in acted if not over[agent]]
        return observations, rewards, over, dict.fromkeys(acted, False), {agent: {} for agent in acted}


class ScriptedRewards(gymnasium.Env):
    """Dict rules: `reward_space` is a Dict; returns configured rewards."""

    def __init__(self, rewards: Any, reward_space: Any = None, infos: Any = None) -> None:
        seen = spaces.Box(-9, 9, (2,), np.float32)
        self.possible_agents = ["a", "b"]
        self.observation_space = spaces.Dict(a=seen, b=seen)
        self.action_space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))
        default = spaces.Dict(a=spaces.Box(-9, 9, (2,), np.float32))
        self.reward_space = default if reward_space is None else reward_space
        self.rewards, self.infos = rewards, infos or {}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return dict.fromkeys("ab", np.zeros(2, np.float32)), {}

    def step(self, actions: dict) -> tuple[dict, ...]:
        seen = dict.fromkeys("ab", np.ones(2, np.float32))
        return seen, self.rewards, {"__all__": False}, {"__all__": False}, self.infos


class TreasureHunt(gymnasium.Env):
    """One agent: `reward_space` is a Box, as in MO-Gymnasium."""

    observation_space = spaces.Discrete(10)
    action_space = spaces.Discrete(2)
    reward_space = spaces.Box(-10, 10, (2,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.time = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, np.ndarray, bool, bool, dict]:
        self.time += 1
        return self.time, np.array([self.time, -1.0]), self.time == 3, False, {}


class Summed(gymnasium.Wrapper):
    """A wrapper that returns scalars and declares them."""

    reward_space = None

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(np.sum(reward)), terminated, truncated, info
