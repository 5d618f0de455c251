"""A simulator that can be held up, and that leaves a trace of whose turn it was; and what a test says to it.

`hold` has the next reset or step of an environment last until `release`: unlike with sleeping simulators, nothing
depends on how long anything takes. With the serial backend, which computes at `send`, it would be waited for in vain.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

AT_MOST_S = 10.0
"""A simulator in a thread that nobody released would else stay for ever."""


class Paced(gymnasium.Env):
    """Dict rules, one agent: its observation is its action, a reset's is zero."""

    possible_agents = ("a",)

    def __init__(self, notes: Path, size: int = 1, *, env_id: int) -> None:
        self.notes, self.env_id = Path(notes), env_id
        space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.options: dict | None = None
        self.observation_space = self.action_space = spaces.Dict({"a": space})

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.options = options
        self.take_turn("reset")
        return {"a": np.zeros(self.observation_space["a"].shape, np.float32)}, {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.take_turn("step")
        return {"a": actions["a"]}, {"a": float(actions["a"][0])}, {"a": False}, {"a": False}, {}

    def take_turn(self, event: str) -> None:
        note(self.notes, f"{event} {self.env_id}")
        deadline = time.monotonic() + AT_MOST_S
        while (self.notes / f"hold-{self.env_id}").exists() and time.monotonic() < deadline:
            time.sleep(0.001)

    def close(self) -> None:
        note(self.notes, f"close {self.env_id}")


def fleet(notes: Path, count: int, **arguments: Any) -> list[Callable[..., Paced]]:
    return [functools.partial(Paced, notes, **arguments)] * count


def hold(notes: Path, *env_ids: int) -> None:
    for env_id in env_ids:
        (notes / f"hold-{env_id}").touch()


def release(notes: Path, *env_ids: int) -> None:
    for env_id in env_ids:
        (notes / f"hold-{env_id}").unlink()


def note(notes: Path, line: str) -> None:
    """Add a line to what all processes write together, each at once."""
    trace = os.open(notes / "trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(trace, f"{line}\n".encode())
    os.close(trace)


def trace(notes: Path) -> list[str]:
    """What has been noted, in order."""
    return (notes / "trace").read_text().splitlines()


def acts(*values: float, size: int = 1) -> list[dict[str, Any]]:
    """The actions of as many environments."""
    return [{"a": np.full(size, value, np.float32)} for value in values]


def seen(observations: Sequence[dict[str, Any]]) -> list[float]:
    """What `acts` was given, in observations."""
    for one in observations:
        assert (one["a"] == one["a"][0]).all()
    return [float(one["a"][0]) for one in observations]
