"""AEC games whose agents die at different times, and one whose process dies."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv
from pettingzoo.classic import tictactoe_v3
from pettingzoo.utils import BaseWrapper


class Elimination(AECEnv):
    """Players act in turn; action 2 kills the next player, and the last one alive ends the game with action 1.

    Rewards, observations and infos depend on the seed and on all actions. A dead player's turn comes next with
    `dead_first`, as in PettingZoo's own games, else in the usual order. Deaths of `c` are truncations.
    """

    metadata: ClassVar = {"name": "elimination", "is_parallelizable": False}
    render_mode = None

    def __init__(self, *, dead_first: bool = True, masked: bool = False, continuous: bool = False) -> None:
        self.dead_first, self.masked = dead_first, masked
        self.possible_agents = ["a", "b", "c"]
        self.sees = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.acts = spaces.Box(0, 3, (1,), np.float32) if continuous else spaces.Discrete(3)
        if masked:
            self.sees = spaces.Dict(observation=self.sees, action_mask=spaces.Box(0, 1, (3,), np.int8))

    def observation_space(self, agent: str) -> Any:
        return self.sees

    def action_space(self, agent: str) -> Any:
        return self.acts

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.agents, self.total, self.time = [*self.possible_agents], float(self.rng.normal()), 0
        self.rewards = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0)
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection, self._skip_agent_selection = "a", None

    def observe(self, agent: str) -> Any:
        seen = np.array([self.total, self.possible_agents.index(agent)], np.float32)
        mask = np.array([1, self.time % 2, 1], np.int8)
        return {"observation": seen, "action_mask": mask} if self.masked else seen

    def after(self, agent: str) -> str:
        return self.agents[(self.agents.index(agent) + 1) % len(self.agents)]

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        choice = int(np.asarray(action).reshape(-1)[0])
        self._cumulative_rewards[agent] = 0
        self.time += 1
        self.total += choice + float(self.rng.normal())
        self.rewards = {one: round(self.total) + index for index, one in enumerate(self.agents)}
        self.infos = {one: {"time": self.time, "of": one} for one in self.agents}
        self.agent_selection = self.after(agent)
        if choice == 2 and len(self.agents) > 1:
            dead = self.after(self.agent_selection) if self.time % 2 else self.agent_selection
            (self.truncations if dead == "c" else self.terminations)[dead] = True
        self._accumulate_rewards()
        if self.dead_first:
            self._deads_step_first()


class TwoSizes(Elimination):
    """The observation of `b` has another shape."""

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1, 1, (3,)) if agent == "b" else self.sees


class SplitMasks(Elimination):
    """The mask of each part of a `MultiDiscrete` action, in a tuple: in infos, or in observations."""

    def __init__(self, *, in_observations: bool) -> None:
        super().__init__(masked=in_observations)
        self.acts = spaces.MultiDiscrete([2, 3])
        if in_observations:
            masks = spaces.Tuple([spaces.MultiBinary(2), spaces.MultiBinary(3)])
            self.sees = spaces.Dict(observation=self.sees["observation"], action_mask=masks)

    def observe(self, agent: str) -> Any:
        seen, masks = super().observe(agent), (np.array([1, self.time % 2], np.int8), np.ones(3, np.int8))
        self.infos[agent] = {} if self.masked else {"action_mask": masks}
        return {"observation": seen["observation"], "action_mask": masks} if self.masked else seen


class Fragile(BaseWrapper):
    """With `crashes`, the process dies in the third step."""

    def __init__(self, env: Any, crashes: bool) -> None:
        super().__init__(env)
        self.crashes, self.steps = crashes, 0

    def step(self, action: Any) -> None:
        self.steps += 1
        if self.crashes and self.steps == 3:
            os.abort()
        super().step(action)


def fragile(env_id: int, restarts: int) -> Any:
    """A game of tictactoe, which crashes once in the first environment."""
    return Fragile(tictactoe_v3.env(), crashes=env_id == 0 and restarts == 0)
