"""Simulators that are saved in the middle of what they do, and some that can only be saved in part."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import EzPickle


class Voyage:
    """Two agents with random observations; an action ends the episode (1), raises (2), or kills the process (3).

    An agent dies now and then, and its last observation is a text.
    """

    possible_agents = ("boat", "kite")
    observation_space = spaces.Dict(boat=spaces.Box(-9, 9, (3,), np.float64), kite=spaces.Text(20))
    action_space = spaces.Dict(dict.fromkeys(possible_agents, spaces.Discrete(4)))
    state_space = spaces.Box(-9, 9, (2,), np.float64)
    render_mode = None

    def __init__(self, seed: int = 0, env_id: int = 0, restarts: int = 0) -> None:
        self.table = np.random.default_rng(seed).normal(size=4)  # drawn once
        self.made_with, self.lock = (seed, env_id, restarts), threading.Lock()
        self.buffer = np.zeros(6)
        self.first_half = self.buffer[:3]  # a view
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.options = 0, options
        infos = {"__common__": {"made_with": self.made_with, "seed": seed, "options": options}}
        return self.observed(), infos

    def observed(self) -> dict[str, Any]:
        self.buffer[:] = self.rng.normal(size=6)
        boat = self.first_half + self.table[:3]
        if self.time % 4 == 3:
            return {"boat": boat}
        return {"boat": boat, "kite": f"{self.buffer[4]:.9f}"}

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.time += 1
        action = actions.get("boat", 0)
        if action == 2:
            raise RuntimeError("capsized")
        if action == 3:
            import os

            os._exit(3)
        observations = self.observed()
        dies = self.time % 4 == 2
        rewards = {agent: float(self.rng.normal()) for agent in observations}
        over = action == 1
        return observations, rewards, {"kite": dies, "__all__": over}, {"__all__": False}, {"boat": {"t": self.time}}

    def state(self) -> np.ndarray:
        return self.buffer[:2].clip(-9, 9)


class Global(Voyage):
    """It draws from the process-wide generators."""

    def observed(self) -> dict[str, Any]:
        self.first_half[:] = np.random.random(3) + random.random()
        return {"boat": self.first_half.copy()}


class Engine:
    """The state of a simulator in another language: it cannot be pickled."""

    def __init__(self, seed: int) -> None:
        self.position, self.seed = 0.0, seed

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'Engine' object")


class WithEngine:
    """A simulator whose engine cannot be pickled."""

    possible_agents = ("arm",)
    observation_space = spaces.Dict(arm=spaces.Box(-99, 99, (), np.float64))
    action_space = spaces.Dict(arm=spaces.Discrete(3))

    def __init__(self, seed: int = 0) -> None:
        self.engine, self.seed_of_constructor = Engine(seed), seed

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.engine.position = 0.0 if seed is None else seed / 10
        return {"arm": self.engine.position}, {"arm": {"made_with": self.seed_of_constructor}}

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.engine.position += actions["arm"]
        over = self.engine.position > 20
        return {"arm": self.engine.position}, {"arm": 1.0}, {"__all__": over}, {"__all__": False}, {}


class SavesItself(WithEngine):
    def get_state(self) -> tuple[float, int]:
        return self.engine.position, self.engine.seed

    def set_state(self, state: tuple[float, int]) -> None:
        self.engine.position, self.engine.seed = state


class SavesItselfAsAtari(WithEngine):
    def clone_state(self, include_rng: bool = False) -> dict[str, Any]:
        assert include_rng
        return {"position": self.engine.position}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.engine.position = state["position"]


class Wrapper:
    """It counts steps, and forwards everything else."""

    def __init__(self, env: Any) -> None:
        self.env, self.steps = env, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: dict) -> Any:
        self.steps += 1
        *results, infos = self.env.step(actions)
        return (*results, {**infos, "arm": {"steps": self.steps}})


def wrapped_engine(seed: int = 0) -> Wrapper:
    return Wrapper(SavesItself(seed))


class FailsToLoad(SavesItself):
    def set_state(self, state: tuple[float, int]) -> None:
        if self.seed_of_constructor % 2:
            raise ValueError("no such state")
        super().set_state(state)


class Easy(EzPickle, Voyage):
    """Its pickle has only the arguments of the constructor."""

    def __init__(self, seed: int = 0, env_id: int = 0) -> None:
        EzPickle.__init__(self, seed, env_id)
        Voyage.__init__(self, seed, env_id)


class Table(Voyage):
    """It reads a large table, and may write to it."""

    def __init__(self, table: np.ndarray, seed: int = 0) -> None:
        super().__init__(seed)
        self.numbers, self.row = table, table[3]

    def observed(self) -> dict[str, Any]:
        return {"boat": self.numbers[self.time % 10, :3].copy()}

    def write(self, value: float) -> None:
        self.numbers[:, 0] = value
