"""Environments whose constructors take long: they import, unpickle, run or sleep."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium import spaces


def run(seconds: float) -> None:
    """Run for some time on the clock of the wall: on a busy machine with less CPU time, and more waiting for a CPU."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        pass


class Importing(gymnasium.Env[Any, Any]):
    """Imports a module in its constructor, then does something else."""

    observation_space = action_space = spaces.Discrete(3)

    def __init__(
        self, name: str | None = None, then: Callable[[float], object] = time.sleep, seconds: float = 0.0
    ) -> None:
        if name is not None:
            importlib.import_module(name)
        then(seconds)
        self.part: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 0, 0.0, False, False, {}


class SlowToUnpickle:
    """A constructor that takes some time while it is unpickled; also a part of a simulator."""

    def __init__(self, work: Callable[[float], object], seconds: float) -> None:
        self.work, self.seconds = work, seconds

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.work(self.seconds)

    def __call__(self) -> Importing:
        return Importing()


class SavesItself(Importing):
    """Saves a state that takes some time while it is unpickled, and cannot be pickled itself."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.loaded = seconds, False
        self.unpicklable = (number for number in ())

    def get_state(self) -> SlowToUnpickle:
        return SlowToUnpickle(run, self.seconds)

    def set_state(self, state: SlowToUnpickle) -> None:
        self.loaded = True
