"""Agents that die one by one in a dict environment; RLlib's own are in `rllib_envs`."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

POINT = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class DyingAgents(gymnasium.Env):
    """Dead agents are absent from the dicts. Records its config and its seeds."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = {} if config is None else dict(config)
        self.context = getattr(config, "worker_index", None), getattr(config, "vector_index", None)
        self.seeds: list[int | None] = []
        self.possible_agents = self.agents = ["x", "y", "z"]
        self.observation_spaces: dict[str, Any] = dict.fromkeys(self.agents, POINT)
        self.action_spaces = {agent: spaces.Discrete(3) for agent in self.agents}
        self.rng = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.seeds.append(seed)
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.total = 0, 0.0
        self.death = {"x": int(self.rng.integers(2, 5)), "y": int(self.rng.integers(3, 8)), "z": 9}
        return {agent: self.observed(agent) for agent in self.agents}, {}

    def observed(self, agent: str) -> Any:
        return (self.rng.normal(size=2) + self.total).astype(np.float32)

    def reported(self) -> list[str]:
        return [agent for agent in self.agents if self.time <= self.death[agent]]

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        self.total += sum((index + 1) * int(actions[agent]) for index, agent in enumerate(sorted(actions)))
        reported = self.reported()
        ends = {agent: self.time >= self.death[agent] for agent in reported}
        terminateds = {agent: ends[agent] and agent != "y" for agent in reported}
        truncateds = {agent: ends[agent] and agent == "y" for agent in reported}
        terminateds["__all__"], truncateds["__all__"] = self.time == 9, False
        infos: dict = {agent: {"time": self.time} for agent in reported}
        if self.time % 3 == 0:
            infos["__common__"] = {"total": self.total}
        observations = {agent: self.observed(agent) for agent in reported}
        return observations, dict.fromkeys(reported, self.total), terminateds, truncateds, infos

    def pid(self) -> int:
        return os.getpid()


class ReturningAgents(DyingAgents):
    """Dead agents stay in the dicts; one agent observes a Dict."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.observation_spaces = {**self.observation_spaces, "y": spaces.Dict(at=POINT, kind=spaces.Discrete(4))}

    def observed(self, agent: str) -> Any:
        at = super().observed(agent)
        return {"at": at, "kind": self.time % 4} if agent == "y" else at

    def reported(self) -> list[str]:
        return self.agents

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        reported = super().step(actions)
        if self.time == 6:
            reported[4]["z"]["__common__"] = "its own"
        return reported


class TwoAgents(PettingZooEnv):
    """A reward of 1 a step; `short` dies at step 5 of 20."""

    metadata = {"name": "two"}  # noqa: RUF012
    possible_agents = ["long", "short"]  # noqa: RUF012

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 10, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.agents, self.time = [*self.possible_agents], 0
        return {a: np.full(1, 5, np.float32) for a in self.agents}, {a: {} for a in self.agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        there = self.agents
        ends = {a: self.time == 20 or (a == "short" and self.time == 5) for a in there}
        self.agents = [a for a in there if not ends[a]]
        seen = {a: np.full(1, 5, np.float32) for a in there}
        return seen, dict.fromkeys(there, 1.0), ends, dict.fromkeys(there, False), {a: {} for a in there}


class TwoMaskedAgents(TwoAgents):
    """Both agents may take action 0 only; the masks are in infos, or in observations that are dicts."""

    def __init__(self, *, in_dicts: bool = False, strict: bool = False) -> None:
        self.in_dicts, self.strict = in_dicts, strict

    def observation_space(self, agent: str) -> spaces.Space:
        point = super().observation_space(agent)
        return spaces.Dict(at=point, action_mask=spaces.MultiBinary(2)) if self.in_dicts else point

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return self.masked(*super().reset(seed, options))

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        if self.strict and any(actions.values()):
            raise ValueError("action 1 is not allowed")
        seen, rewards, terminated, truncated, infos = super().step(actions)
        seen, infos = self.masked(seen, infos)
        return seen, rewards, terminated, truncated, infos

    def masked(self, seen: dict, infos: dict) -> tuple[dict, dict]:
        mask = np.array([1, 0], np.int8)
        if self.in_dicts:
            return {agent: {"at": point, "action_mask": mask} for agent, point in seen.items()}, infos
        return seen, {agent: {"action_mask": mask} for agent in infos}


class Interrupted(DyingAgents):
    """The first instance of each environment raises in its sixth step, after the deaths of some agents."""

    def __init__(self, restarts: int = 0) -> None:
        super().__init__()
        self.fails = restarts == 0

    def step(self, actions: dict) -> Any:
        if self.fails and self.time == 5:
            raise RuntimeError("an accident")
        return super().step(actions)


class ReportsTheDead(DyingAgents):
    """In the last step, dead agents have the `episode` of a wrapper of the simulator in their infos."""

    def step(self, actions: dict) -> Any:
        *results, infos = super().step(actions)
        if self.time == 9:
            infos |= {agent: {"episode": {"r": 1.0, "l": 1}} for agent in self.agents if agent not in infos}
        return *results, infos


class LastStepWithoutZ(DyingAgents):
    """Agent z is alive, but the last step returns nothing for it."""

    def reported(self) -> list[str]:
        return [agent for agent in super().reported() if self.time < 9 or agent != "z"]
