"""Simulators with faults, and the faults. Simulators without faults are in `deterministic`."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from helpers.files import write_whole
from pettingzoo import ParallelEnv as PettingZooEnv

Fault = Callable[[], Any]


class SimulatorError(Exception):
    """A user-defined exception."""


class PickyError(Exception):
    """Fails to unpickle: its constructor has more arguments than its text."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"picky {code} at {place}")


class LockedError(Exception):
    """Holds an unpicklable object."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def raising(make: Callable[..., BaseException], *args: Any) -> Fault:
    """A fault that raises `make(*args)`; created when it happens, so no exception has to be pickled."""

    def fault() -> None:
        raise make(*args)

    return fault


def system_exit() -> None:
    sys.exit(3)


def hang() -> None:
    time.sleep(60)


def hard_exit() -> None:
    os._exit(7)


def killed_by(number: int) -> Fault:
    def fault() -> None:
        os.kill(os.getpid(), number)
        time.sleep(30)

    return fault


class Fragile(PettingZooEnv):
    """Works until it reaches a place with a fault.

    Args:
        faults: Faults by place: "constructor", "reset", "step", "render", "close", "call".
        notes: A folder for files with the process id: `started-<env_id>`, `built-<env_id>`, `closed-<env_id>`.
        after: The number of steps before the fault in "step", and of resets before the fault in "reset".
        length: Steps in an episode; None for endless episodes.
    """

    metadata = {"name": "fragile", "render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self,
        faults: Mapping[str, Fault],
        notes: Path,
        after: int = 0,
        length: int | None = None,
        *,
        env_id: int,
        seed: int,
    ) -> None:
        self.faults, self.notes, self.after, self.env_id = faults, Path(notes), after, env_id
        self.length = length
        self.steps = self.resets = 0
        self.render_mode = "rgb_array"
        self.possible_agents = ["a", "b"]
        self.agents: list[str] = []
        self.note("started")
        self.come_to("constructor")
        self.note("built")

    def note(self, event: str) -> None:
        write_whole(self.notes / f"{event}-{self.env_id}", str(os.getpid()))

    def come_to(self, place: str) -> Any:
        return self.faults[place]() if place in self.faults else None

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if self.resets >= self.after:
            self.come_to("reset")
        self.resets += 1
        self.agents = self.possible_agents[:]
        observations = {agent: np.full(3, self.steps, np.float32) for agent in self.agents}
        return observations, {agent: {} for agent in self.agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.steps += 1
        strange = self.come_to("step") if self.steps > self.after else None
        over = self.length is not None and self.steps % self.length == 0
        acted, self.agents = self.agents, [] if over else self.agents
        flags = dict.fromkeys(acted, over)
        infos = {agent: {} if strange is None else {"strange": strange} for agent in acted}
        observations = {agent: np.full(3, self.steps, np.float32) for agent in acted}
        return observations, dict.fromkeys(acted, 1.0), flags, dict(flags), infos

    def render(self) -> np.ndarray:
        self.come_to("render")
        return np.zeros((2, 2, 3), np.uint8)

    def act_up(self) -> None:
        self.come_to("call")

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self.note("closed")
        self.come_to("close")


def dozing(notes: Path, seconds: float) -> list[Callable[..., Fragile]]:
    """Constructors of four environments; each step of the third takes this long."""
    slow = {"step": functools.partial(time.sleep, seconds)}
    return [functools.partial(Fragile, slow if env_id == 2 else {}, notes) for env_id in range(4)]
