"""Small simulators whose agents have rows in arrays: variants of `deterministic` and `every_space`, and others.

Separate from the tests, so that workers which import them import no optional library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from mpe2 import simple_spread_v3
from pettingzoo import ParallelEnv as PettingZooEnv

from simulators.deterministic import Skirmish
from simulators.every_space import EverySpace

NO_TENSORS = ["box_uint16", "box_uint32", "box_uint64", "dict_empty", "tuple_empty"]


def spread() -> Any:
    return simple_spread_v3.parallel_env(max_cycles=6)


class DeclaredSkirmish(Skirmish):
    """Declared agents only: arrays have no rows for others."""

    def present(self) -> list[str]:
        return [agent for agent in super().present() if agent != "drone"]


class EveryTensorSpace(EverySpace):
    """Spaces with a tensor form."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, "shared")
        for agent in NO_TENSORS:
            self.possible_agents.remove(agent)
        declared = [(agent, self.observation_space[agent]) for agent in self.possible_agents]  # type: ignore[index]
        self.observation_space = self.action_space = spaces.Dict(declared)


class StackableAgents(PettingZooEnv):
    """Agents die one by one and their flags are repeated; episodes terminate or are truncated."""

    metadata = {"name": "variable"}  # noqa: RUF012

    def __init__(self, size: int = 3) -> None:
        self.possible_agents = [f"cow_{place}" for place in range(size)]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(1.0, 3.0, (4,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3, start=5)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time = 0
        self.agents = self.possible_agents[:]
        self.death = {agent: int(self.rng.integers(2, 12)) for agent in self.agents}
        return self.observe(self.agents), {}

    def observe(self, agents: Sequence[str]) -> dict[str, np.ndarray]:
        return {agent: self.rng.uniform(1, 3, 4).astype(np.float32) for agent in agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert all(5 <= action < 8 for action in actions.values())
        self.time += 1
        acted = self.agents
        terminated = {agent: self.time >= self.death[agent] for agent in self.possible_agents}
        truncated = dict.fromkeys(self.possible_agents, self.time == 8)
        self.agents = [agent for agent in acted if not (terminated[agent] or truncated[agent])]
        rewards = {agent: float(actions[agent]) for agent in acted}
        return self.observe(acted), rewards, terminated, truncated, {}
