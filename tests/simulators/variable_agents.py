"""A simulator for facades: equal agents that die and join at different times, with dict observations and actions.

Every number follows from the seed and the actions. Under dict rules agents also join late. Under both rules there are
occasional infos of every kind, including kinds that arrays cannot hold.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

from simulators.deterministic import weight

AGENTS = ["a", "b", "c"]
LENGTH = 9
SPACE = spaces.Dict(
    view=spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
    rest=spaces.Tuple((spaces.Discrete(100), spaces.MultiBinary(2))),
)
ACTION = spaces.Dict(move=spaces.Box(-1.0, 1.0, (2,), np.float32), jump=spaces.Discrete(3))


class VariableAgents(PettingZooEnv):
    """PettingZoo rules.

    Args:
        plain: Observe and act in plain arrays and numbers.
    """

    metadata = {"name": "variable", "render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, seed: int | None = None, env_id: int | None = None, *, plain: bool = False) -> None:
        self.possible_agents = AGENTS[:]
        self.agents: list[str] = []
        self.plain, self.env_id, self.render_mode = plain, env_id or 0, "rgb_array"
        self.rng = np.random.default_rng(seed)
        self.state_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.options: dict | None = None

    def observation_space(self, agent: str) -> spaces.Space:
        return SPACE["view"] if self.plain else SPACE

    def action_space(self, agent: str) -> spaces.Space:
        return ACTION["jump"] if self.plain else ACTION

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.options = options
        self.agents, self.time, self.total = AGENTS[:], 0, 0.0
        self.received: dict = {}
        # All agents left at the end die together, or are truncated.
        self.death = {
            "a": int(self.rng.integers(2, 8)),
            "b": int(self.rng.choice([4, LENGTH])),
            "c": int(self.rng.choice([LENGTH, 99])),
        }
        return self.observe(), {agent: {"born": self.death["a"]} if agent == "a" else {} for agent in self.agents}

    def observe(self) -> dict[str, Any]:
        return {agent: self.seen() for agent in self.agents}

    def seen(self) -> Any:
        view = (self.rng.normal(size=(2, 3)) + self.total).astype(np.float32)
        if self.plain:
            return view
        return {"view": view, "rest": (int(self.rng.integers(100)), self.rng.integers(0, 2, 2, dtype=np.int8))}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert actions.keys() == set(self.agents), f"{[*actions]} given, {self.agents} are to act"
        self.time += 1
        self.received = actions
        self.total += sum(weight(action) for action in actions.values()) / 8
        acted = self.agents
        terminated = {agent: self.time == self.death[agent] for agent in acted}
        truncated = {agent: self.time == LENGTH and not terminated[agent] for agent in acted}
        observations = self.observe()
        rewards = {agent: self.total + index for index, agent in enumerate(acted)}
        self.agents = [agent for agent in acted if not (terminated[agent] or truncated[agent])]
        return observations, rewards, terminated, truncated, {agent: self.info(agent) for agent in acted}

    def info(self, agent: str) -> dict[str, Any]:
        if self.time % 3 == 0:
            return {"time": self.time, "word": agent * self.time, "deep": {"total": self.total}}
        return {"place": np.arange(2.0)} if self.time == LENGTH else {}

    def state(self) -> np.ndarray:
        return np.array([self.total, self.time])

    def render(self) -> np.ndarray:
        return np.full((4, 6, 3), 10 * self.env_id + self.time, np.uint8)

    def scale(self, factor: float) -> float:
        return self.total * factor


class VariableDictAgents(gymnasium.Env):
    """Dict rules: c joins at the third step; some infos belong to no agent."""

    def __init__(self, seed: int | None = None, env_id: int | None = None, *, plain: bool = False) -> None:
        self.own = VariableAgents(seed, env_id, plain=plain)
        self.possible_agents = AGENTS[:]
        self.observation_space = spaces.Dict({agent: self.own.observation_space(agent) for agent in AGENTS})
        self.action_space = spaces.Dict({agent: self.own.action_space(agent) for agent in AGENTS})

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, infos = self.own.reset(seed, options)
        return self.joined(observations), self.joined(infos)

    def joined(self, values: dict) -> dict:
        return {agent: value for agent, value in values.items() if agent != "c" or self.own.time >= 3}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        own = self.own
        left_out = {agent: {"jump": 0, "move": np.zeros(2, np.float32)} for agent in own.agents if agent not in actions}
        if own.plain:
            left_out = dict.fromkeys(left_out, 0)
        acts = {**left_out, **{agent: actions[agent] for agent in own.agents if agent in actions}}
        results = [self.joined(values) for values in own.step(acts)]
        results[2]["__all__"] = False
        results[3]["__all__"] = own.time == LENGTH
        if own.time == 5:
            results[4]["__common__"] = {"weather": "rain"}
        return results[0], results[1], results[2], results[3], results[4]
