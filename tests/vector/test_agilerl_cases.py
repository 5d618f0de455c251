"""`AgileRLVecEnv` with simulators and actions that are unlike most; what is usual is tested in `test_agilerl`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from agilerl.vector import AsyncPettingZooVecEnv
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

from marl_parallel import ParallelEnv
from marl_parallel.vector import AgileRLVecEnv


class Relay(PettingZooEnv):
    """Agent a dies at 2, and b waits at odd times, alive all the while, as its flags say."""

    metadata: ClassVar = {"name": "relay"}
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = ["a", "b"]

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 99, (1,))

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def seen(self) -> dict[str, Any]:
        there = [agent for agent in self.agents if agent == "a" or self.time % 2 == 0]
        return {agent: np.full(1, self.time, np.float32) for agent in there}

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.time, self.agents = 0, ["a", "b"]
        return self.seen(), {}

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.time += 1
        alive, seen = self.agents, self.seen()
        ended = {agent: self.time == 6 or (agent == "a" and self.time == 2) for agent in alive}
        self.agents = [agent for agent in alive if not ended[agent]]
        return seen, dict.fromkeys(seen, 1.0), ended, dict.fromkeys(alive, False), {}


@pytest.mark.parametrize("how", [{}, {"shared_memory": False}])
def test_flags_of_agents_that_wait(how):
    """They are told as they are, as by AgileRL's own, where NaN is for the dead: its training counts these as done."""
    facade = AgileRLVecEnv(ParallelEnv([Relay] * 2, backend="serial", **how))
    own = AsyncPettingZooVecEnv([Relay] * 2, context="fork")
    try:
        facade.reset()
        own.reset()
        for _ in range(13):
            actions = {agent: np.where(acts, 0.0, np.nan) for agent, acts in facade.acting.items()}
            for mine, theirs in zip(facade.step(actions)[1:4], own.step(actions)[1:4], strict=True):
                for agent in "ab":
                    assert mine[agent].dtype == theirs[agent].dtype
                    assert np.array_equal(mine[agent], theirs[agent], equal_nan=True)
    finally:
        own.close()
        facade.close()
