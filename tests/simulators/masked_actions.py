"""Simulators with action masks in observations, in infos or in both, in every form, also unusable ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

LENGTH = 4


class Turnstile(PettingZooEnv):
    """Allows one action at a time, which differs by agent, step and episode, and refuses all others.

    In the last step of an episode its mask allows nothing. Agents draw lots: `guest` dies after two steps.

    Args:
        where: "infos", "observations" or "both"; with "both", the observation's mask allows the action after the right
            one.
        crashes_at: The step of the first instance in which the process dies.
    """

    metadata = {"name": "turnstile"}  # noqa: RUF012

    def __init__(self, where: str = "infos", env_id: int = 0, restarts: int = 0, crashes_at: int | None = None) -> None:
        self.where, self.env_id, self.episode = where, env_id, 10 * restarts
        self.crashes_at = crashes_at if env_id == 0 and not restarts else None
        self.possible_agents = ["host", "guest"]
        self.agents: list[str] = []
        self.refuses = True

    def observation_space(self, agent: str) -> spaces.Space:
        seen = spaces.Box(0, 100, (), np.float32)
        return seen if self.where == "infos" else spaces.Dict(seen=seen, action_mask=spaces.MultiBinary(5))

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(5)

    def right(self, agent: str) -> int:
        return (self.env_id + 2 * self.episode + self.time + self.possible_agents.index(agent)) % 5

    def mask(self, agent: str, shift: int = 0) -> np.ndarray:
        over = self.time == LENGTH
        return np.zeros(5, np.int8) if over else np.eye(5, dtype=np.int8)[(self.right(agent) + shift) % 5]

    def observe(self, agents: list[str]) -> dict[str, Any]:
        if self.where == "infos":
            return {agent: np.float32(self.time) for agent in agents}
        shift = int(self.where == "both")
        return {agent: {"seen": np.float32(self.time), "action_mask": self.mask(agent, shift)} for agent in agents}

    def infos(self, agents: list[str]) -> dict[str, dict]:
        return {agent: {} if self.where == "observations" else {"action_mask": self.mask(agent)} for agent in agents}

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.episode, self.time = self.episode + 1, 0
        self.agents = self.possible_agents[:]
        return self.observe(self.agents), self.infos(self.agents)

    def step(self, actions: dict) -> tuple[dict, ...]:
        wrong = {agent: action for agent, action in actions.items() if action != self.right(agent)}
        assert not (self.refuses and wrong), f"{wrong} in step {self.time} of episode {self.episode}"
        self.time += 1
        if self.time == self.crashes_at:
            os._exit(3)
        acted = self.agents
        terminated = {agent: self.time == LENGTH or (agent == "guest" and self.time == 2) for agent in acted}
        self.agents = [agent for agent in acted if not terminated[agent]]
        return (
            self.observe(acted),
            dict.fromkeys(acted, 1.0),
            terminated,
            dict.fromkeys(acted, False),
            self.infos(acted),
        )


class Gate(Turnstile):
    """A `Turnstile` whose observations have the shape that training libraries need."""

    def observation_space(self, agent: str) -> spaces.Space:
        seen = spaces.Box(0, 100, (1,), np.float32)
        return seen if self.where == "infos" else spaces.Dict(seen=seen, action_mask=spaces.MultiBinary(5))

    def observe(self, agents: list[str]) -> dict[str, Any]:
        seen = np.array([self.time], np.float32)
        if self.where == "infos":
            return dict.fromkeys(agents, seen)
        return {agent: {"seen": seen, "action_mask": self.mask(agent)} for agent in agents}


class Formed(gymnasium.Env):
    """One agent with a mask of any form in its info."""

    def __init__(self, acts: spaces.Space, mask: Callable[[], Any]) -> None:
        self.observation_space, self.action_space, self.mask = spaces.Discrete(2), acts, mask

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.time = 0
        return 0, {"action_mask": self.mask()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.time += 1
        return 0, 1.0, self.time == 5, False, {"action_mask": self.mask()}


class BoxWithMask(PettingZooEnv):
    """Observes, in arrays, a mask unrelated to its continuous actions."""

    metadata = {"name": "box_with_mask"}  # noqa: RUF012

    def __init__(self) -> None:
        self.possible_agents, self.agents = ["a"], []

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Dict(seen=spaces.Discrete(3), action_mask=spaces.MultiBinary(7))

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.agents, self.time = ["a"], 0
        return {"a": {"seen": 0, "action_mask": np.ones(7, np.int8)}}, {"a": {}}

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.time += 1
        over = self.time == 5
        self.agents = [] if over else ["a"]
        seen = {"seen": self.time % 3, "action_mask": np.ones(7, np.int8)}
        return {"a": seen}, {"a": 0.0}, {"a": over}, {"a": False}, {"a": {}}


def mask_of_another_form() -> Formed:
    """For `marl-parallel check`: seven entries for two continuous actions."""
    return Formed(spaces.Box(-1.0, 1.0, (2,), np.float32), lambda: np.ones(7, np.int8))


def by_observations() -> Turnstile:
    """For the command line."""
    return Turnstile("observations")


def by_infos() -> Turnstile:
    """For the command line."""
    return Turnstile("infos")


def refusing_multi_discrete(mask: Any) -> Formed:
    """One agent with two choices, of 3 and of 2, whose mask allows 1 and 0; it refuses all others."""
    env = Formed(spaces.MultiDiscrete([3, 2]), lambda: mask)
    step = env.step

    def strict(action: Any) -> Any:
        assert [*action] == [1, 0]
        return step(action)

    env.step = strict  # type: ignore[method-assign]
    return env
