"""Variants of `variable_agents` that observe and act in arrays and numbers only.

Separate from the tests, because a worker that makes one imports its whole module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from simulators.variable_agents import ACTION, SPACE, VariableAgents


class ArrayAgents(VariableAgents):
    """Observes a dict of arrays and numbers; acts by arrays and numbers."""

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Dict(count=spaces.Discrete(100), view=SPACE["view"])

    def action_space(self, agent: str) -> spaces.Space:
        return ACTION["move"] if agent == "b" else ACTION["jump"]

    def seen(self) -> Any:
        return {"count": int(self.rng.integers(100)), "view": self.rng.normal(size=(2, 3)).astype(np.float32)}


class Line(VariableAgents):
    """Observes six numbers in a row."""

    def __init__(self, seed: int | None = None, env_id: int | None = None) -> None:
        super().__init__(seed, env_id, plain=True)

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-np.inf, np.inf, (6,), np.float32)

    def seen(self) -> np.ndarray:
        return self.rng.normal(size=6).astype(np.float32)


class EnvDefinedActions(Line):
    """Sometimes chooses the action of agent a itself and reports it in the info; never in environment 2."""

    def chosen(self) -> dict[str, Any]:
        own = {"env_defined_actions": 2 if (self.time + self.env_id) % 2 else None}
        return {agent: own if agent == "a" and self.env_id < 2 else {} for agent in self.agents}

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, _ = super().reset(seed, options)
        return observations, self.chosen()

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        results = super().step(actions)
        return (*results[:4], self.chosen())


class WaitsForFile(VariableAgents):
    """Each step waits for a file."""

    gate: Any = None

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        while self.gate and not Path(self.gate).exists():
            pass
        return super().step(actions)
