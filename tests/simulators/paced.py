"""A simulator that tests can block, and that logs the order of its calls.

`hold` makes the next reset or step of an environment last until `release`, so unlike with sleeping simulators no
result depends on time. With the serial backend, which computes in `send`, it would block forever.
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
"""Release all simulators, because one that is blocked in a thread would stay forever."""


class Paced(gymnasium.Env):
    """Dict rules, one agent: its observation is its action, zero after a reset."""

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
    """Append a line to the log that all processes share."""
    trace = os.open(notes / "trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(trace, f"{line}\n".encode())
    os.close(trace)


def trace(notes: Path) -> list[str]:
    """The logged lines in order."""
    return (notes / "trace").read_text().splitlines()


def acts(*values: float, size: int = 1) -> list[dict[str, Any]]:
    """Actions for this many environments."""
    return [{"a": np.full(size, value, np.float32)} for value in values]


def seen(observations: Sequence[dict[str, Any]]) -> list[float]:
    """The observations that result from `acts`."""
    for one in observations:
        assert (one["a"] == one["a"][0]).all()
    return [float(one["a"][0]) for one in observations]
