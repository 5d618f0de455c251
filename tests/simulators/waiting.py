"""Simulators that wait instead of computing, so that their speed in each setting is known on any machine."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
from gymnasium import spaces

from simulators.buggy import Healthy

BASE_S = 2e-3


def step_s(workers: int, copies: int) -> float:
    """The seconds of one step; best with three workers of four environments each."""
    crowded = 1.0 if workers <= 3 else 3.0
    shared = 1.0 + 3.0 / copies if copies <= 4 else 3.0
    return BASE_S * crowded * shared


def steps_per_second(workers: int, copies: int) -> float:
    """For all workers together; each steps one of its environments at a time."""
    return workers / step_s(workers, copies)


class Licensed(Healthy):
    """Waits as long as `step_s` says, for the registered processes and the environments of this process.

    Args:
        folder: Where processes register.
    """

    _copies: ClassVar[Counter[int]] = Counter()  # by process: the class of a script travels with its attributes

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        Licensed._copies[os.getpid()] += 1
        (self.folder / str(os.getpid())).touch()

    def close(self):
        (self.folder / str(os.getpid())).unlink(missing_ok=True)

    def reset(self, seed=None, options=None):
        alive = sum(Path(f"/proc/{entry.name}").exists() for entry in self.folder.iterdir())
        self.wait_s = step_s(alive, Licensed._copies[os.getpid()])
        return super().reset(seed)

    def step(self, actions):
        time.sleep(self.wait_s)
        return super().step(actions)


class Waiting(Healthy):
    """Waits 5 ms in each step, so that as many steps run in parallel as there are workers."""

    def step(self, actions):
        time.sleep(5e-3)
        return super().step(actions)


class Instant:
    """One agent whose steps take less than a microsecond: a dict environment that returns the same dicts."""

    possible_agents = ("a",)
    observation_space = spaces.Dict({"a": spaces.Discrete(2)})
    action_space = spaces.Dict({"a": spaces.Discrete(2)})

    def __init__(self) -> None:
        flags = {"a": False, "__all__": False}
        self.transition = {"a": 0}, {"a": 0.0}, flags, flags, {"a": {}}

    def reset(self, seed=None, options=None):
        return {"a": 0}, {"a": {}}

    def step(self, actions):
        return self.transition


class Uneven(Healthy):
    """One step in three, drawn at random per environment, takes twenty times as long."""

    def step(self, actions):
        time.sleep(20e-3 if self.rng.random() < 1 / 3 else 1e-3)
        return super().step(actions)


class Heavy(Healthy):
    """Holds 50 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = np.ones(50_000_000, np.uint8)

    def step(self, actions):
        time.sleep(2e-3)
        return super().step(actions)


class Computing(Healthy):
    """Uses a CPU for 3 ms in each step."""

    def step(self, actions):
        until = time.process_time() + 3e-3
        while time.process_time() < until:
            pass
        return super().step(actions)
