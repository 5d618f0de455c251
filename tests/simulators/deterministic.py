"""Small deterministic simulators without faults: every number follows from the seed and the actions.

Simulators with faults are in `failing`, every kind of space in `every_space`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

Dicts = tuple[dict, dict, dict, dict, dict]


def weight(action: Any) -> float:
    """A number that changes with every aspect of an action: leaves, order, dtype."""
    if isinstance(action, dict):
        return sum((index + 1) * weight(action[key]) for index, key in enumerate(sorted(action)))
    if isinstance(action, tuple | list):
        return sum((index + 2) * weight(item) for index, item in enumerate(action))
    if isinstance(action, np.ndarray | np.floating):  # an array without axes, and what arrays of these consist of
        numbers = np.asarray(action, dtype=np.float64).ravel()
        return float(numbers @ np.arange(1, numbers.size + 1)) + action.dtype.num
    return float(len(str(action))) if action is None or isinstance(action, str) else float(action)


class Skirmish(gymnasium.Env):
    """Dict rules with `Dict` spaces: agents that die, join late or are undeclared; infos of every kind."""

    metadata = {"name": "skirmish", "render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, seed: int | None = None, env_id: int | None = None, render_mode: str | None = None) -> None:
        self.received = {"seed": seed, "env_id": env_id}
        self.render_mode = render_mode
        self.possible_agents = ["tank", "scout", "medic", "sniper"]
        self.observation_space = spaces.Dict(
            [
                ("tank", spaces.Box(-np.inf, np.inf, (3,), np.float32)),
                (
                    "scout",
                    spaces.Dict(view=spaces.Box(0, 255, (2, 2), np.uint8), ammo=spaces.Discrete(50, start=-2)),
                ),
                ("medic", spaces.Tuple((spaces.MultiBinary(4), spaces.Box(-np.inf, np.inf, (), np.float64)))),
                ("sniper", spaces.MultiDiscrete([5, 6, 7])),
            ]
        )
        self.action_space = spaces.Dict(
            [
                ("tank", spaces.Box(-1.0, 1.0, (2,), np.float32)),
                ("scout", spaces.Discrete(4, start=1)),
                ("medic", spaces.Dict(aim=spaces.Box(-1.0, 1.0, (), np.float32), heal=spaces.MultiBinary(3))),
                ("sniper", spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([2, 3])))),
            ]
        )
        self.rng = np.random.default_rng(seed)
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.episode += 1
        self.time, self.total = 0, float((options or {}).get("start", 0.0))
        self.length = int(self.rng.integers(6, 12))
        self.death = {"medic": 4, "sniper": int(self.rng.integers(2, 7))}
        infos: dict[Any, Any] = {"tank": {"episode": self.episode}, "scout": {}} if self.episode % 2 else {}
        if options:
            infos["__common__"] = {"options": dict(options)}
        return self.observe(), infos

    def present(self) -> list[str]:
        late = ["scout"] if self.time >= 3 else []
        alive = [agent for agent in ("medic", "sniper") if self.time <= self.death[agent]]
        return ["tank", *late, *alive, *(["drone"] if self.time in (2, 5) else [])]

    def observe(self) -> dict[str, Any]:
        numbers = self.rng.normal(size=3) + self.total
        every = {
            "tank": numbers.astype(np.float32),
            "scout": {"view": self.rng.integers(0, 256, (2, 2), dtype=np.uint8), "ammo": self.time - 2},
            "medic": (self.rng.integers(0, 2, 4, dtype=np.int8), np.array(numbers[0])),
            "sniper": self.rng.integers(0, 5, 3),
            "drone": {"words": ["over", self.time], "height": float(numbers[1])},
        }
        return {agent: every[agent] for agent in self.present()}

    def step(self, actions: dict) -> Dicts:
        self.time += 1
        self.total += sum(weight(action) for action in actions.values()) / 16
        observations = self.observe()
        typed = {"tank": 1, "scout": np.float32(0.5), "medic": self.total, "sniper": np.float64(self.total)}
        rewards = {agent: typed.get(agent, [1.0, 2]) for agent in observations}
        terminateds: dict[str, Any] = {agent: self.time == self.death.get(agent) for agent in observations}
        truncateds: dict[str, Any] = {agent: np.bool_(False) for agent in observations}
        terminateds["__all__"] = bool(self.time >= self.length and self.episode % 2)
        if self.episode % 2 == 0:
            truncateds["__all__"] = np.bool_(self.time >= self.length)
        infos: dict[str, Any] = {agent: {} for agent in observations}
        if self.time % 3 == 0:
            infos = {"tank": {"hits": [self.time, self.total]}, "__common__": {"time": self.time}}
        return observations, rewards, terminateds, truncateds, infos

    def render(self) -> np.ndarray | None:
        if self.render_mode is None:
            return None
        return np.full((4, 6, 3), 10 * (self.received["env_id"] or 0) + self.time, np.uint8)


class Relay(gymnasium.Env):
    """Dict rules recognised by spaces only: no `possible_agents`, a minimal `reset`, no `__all__` until the end."""

    def __init__(self, seed: int) -> None:
        spaces_by_agent = [
            (agent, spaces.Box(-np.inf, np.inf, (2,), np.float64)) for agent in ("zulu", "alpha", "mike")
        ]
        self.observation_space = spaces.Dict(spaces_by_agent)
        self.action_space = spaces.Dict(spaces_by_agent)
        self.rng = np.random.default_rng(seed)

    def reset(self) -> tuple[dict, dict]:  # type: ignore[override]
        self.time = 0
        return {agent: self.rng.normal(size=2) for agent in self.observation_space}, {}

    def step(self, actions: dict) -> Dicts:
        self.time += 1
        observations = {agent: self.rng.normal(size=2) + weight(action) for agent, action in actions.items()}
        terminateds: dict[str, Any] = dict.fromkeys(actions, False)
        if self.time >= 5:
            terminateds["__all__"] = True
        return observations, dict.fromkeys(actions, 0.0), terminateds, {}, {}


class Hunt(PettingZooEnv):
    """PettingZoo rules: images, agents that die one by one, a global state, frames."""

    metadata = {"name": "hunt", "render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, seed: int | None = None, env_id: int | None = None, render_mode: str | None = None) -> None:
        self.received = {"seed": seed, "env_id": env_id}
        self.env_id = env_id or 0
        self.render_mode = render_mode
        self.possible_agents = [f"wolf_{index}" for index in range(4)]
        self.agents: list[str] = []
        self.state_space = spaces.Box(-np.inf, np.inf, (2, 3), np.float64)
        self.gravity = 1.0
        self.steps_ever = 0

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(5) if agent != "wolf_2" else spaces.Box(-1.0, 1.0, (3,), np.float32)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents = self.possible_agents[:]
        self.death = {agent: int(self.rng.integers(2, 9)) for agent in self.agents}
        self.time, self.total = 0, 0.0
        infos: dict[str, dict] = {agent: {} for agent in self.agents}
        if options:
            infos["wolf_0"] = {"options": dict(options), "seed": seed}
        return self.observe(), infos

    def observe(self) -> dict[str, np.ndarray]:
        return {agent: self.rng.integers(0, 256, (8, 8, 3), dtype=np.uint8) for agent in self.agents}

    def step(self, actions: dict) -> Dicts:
        assert actions.keys() == set(self.agents), f"{list(actions)} given, {self.agents} are to act"
        self.time += 1
        self.steps_ever += 1
        self.total += self.gravity * sum(weight(action) for action in actions.values())
        acted = self.agents
        terminated = {agent: self.time >= self.death[agent] for agent in acted}
        truncated = {agent: self.time >= 7 and not terminated[agent] for agent in acted}
        observations = self.observe()
        rewards = {agent: self.total + index for index, agent in enumerate(acted)}
        infos = {agent: {"time": self.time} if self.time == 4 else {} for agent in acted}
        self.agents = [agent for agent in acted if not (terminated[agent] or truncated[agent])]
        return observations, rewards, terminated, truncated, infos

    def state(self) -> np.ndarray:
        return np.full((2, 3), self.total) + np.arange(6.0).reshape(2, 3)

    def render(self) -> np.ndarray | None:
        return None if self.render_mode is None else np.full((4, 6, 3), 10 * self.env_id + self.time, np.uint8)

    def pid(self) -> int:
        return os.getpid()

    def scale(self, factor: float, *, offset: float = 0.0) -> float:
        return self.total * factor + offset


class Recycler(PettingZooEnv):
    """Returns the same buffers and infos in every step; keeps its actions and writes into them."""

    metadata = {"name": "recycler"}  # noqa: RUF012

    def __init__(self) -> None:
        self.possible_agents = ["left", "right"]
        self.agents: list[str] = []
        self.buffers = {agent: np.zeros(5, np.float32) for agent in self.possible_agents}
        self.infos: dict[str, dict[str, Any]] = {agent: {"path": []} for agent in self.possible_agents}
        self.rewards = dict.fromkeys(self.possible_agents, 0.0)
        self.flags = dict.fromkeys(self.possible_agents, False)
        self.ends = dict.fromkeys(self.possible_agents, False)

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-np.inf, np.inf, (5,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.agents = self.possible_agents[:]
        self.time = 0
        self.saved = {agent: np.zeros(2, np.float32) for agent in self.agents}
        for agent in self.agents:
            self.buffers[agent][:] = 0.0
            self.infos[agent]["path"].clear()
            self.ends[agent] = False
        return self.buffers, self.infos

    def step(self, actions: dict) -> Dicts:
        self.time += 1
        for agent in self.agents:
            self.buffers[agent][:] = [self.time, *self.saved[agent], *actions[agent]]
            self.infos[agent]["path"].append(self.time)
            self.rewards[agent] += float(actions[agent][0])
            self.ends[agent] = self.time == 6
            actions[agent] *= 2
        self.saved = dict(actions)
        actions.clear()
        if self.time == 6:
            self.agents = []
        return self.buffers, self.rewards, self.flags, self.ends, self.infos


class Scripted(gymnasium.Env):
    """Dict rules: returns scripted steps, one five-tuple after the other, and records its actions."""

    def __init__(
        self,
        observation_space: spaces.Dict | None,
        action_space: spaces.Dict | None,
        first: tuple[dict, dict],
        steps: Sequence[Dicts],
        possible_agents: Sequence[Any] = (),
    ) -> None:
        self.observation_space = observation_space  # type: ignore[assignment]
        self.action_space = action_space  # type: ignore[assignment]
        self.possible_agents = list(possible_agents)
        self.first, self.script = first, steps
        self.actions: list[dict] = []

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.time = 0
        return self.first

    def step(self, actions: dict) -> Dicts:
        self.actions.append(dict(actions))
        self.time += 1
        return self.script[(self.time - 1) % len(self.script)]


class Identified:
    """A custom wrapper, found only through `env`."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.possible_agents = env.unwrapped.possible_agents
        self.observation_space = env.observation_space
        self.action_space = env.action_space

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: dict) -> Dicts:
        return self.env.step(actions)
