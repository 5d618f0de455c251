"""Values that raise when they are read as numbers, as tensors with a gradient do.

Environment 1 returns one in its third step, from agent b.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

SPACE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
NESTED = spaces.Dict(at=SPACE)
WHEN, WHERE = 3, 1


class Gradient:
    """As a tensor of torch with a gradient: `float` works, conversions of NumPy do not."""

    def __float__(self) -> float:
        return 1.5

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("call detach() first")

    def __repr__(self) -> str:
        return "Gradient(1.5)"


class Broken(Gradient):
    """Nothing works; not even its `repr`."""

    shape = ()

    def __float__(self) -> float:
        raise ValueError("no float")

    __index__ = __bool__ = __repr__ = __float__  # type: ignore[assignment]


class Ambiguous:
    """As an array with several elements."""

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")

    def __repr__(self) -> str:
        return "Ambiguous()"


class UnreadableValues:
    """Dict rules; two agents, or one that observes a dict.

    Args:
        place: "reward", "terminated", "truncated", "all" (the flag `__all__`), "observation" or "part" of one.
        value: The class of the value there.
    """

    possible_agents = ("a", "b")

    def __init__(self, place: str, value: type, env_id: int, restarts: int) -> None:
        self.place, self.value, self.bad = place, value, env_id == WHERE and not restarts
        self.seen = NESTED if place == "part" else SPACE
        self.observation_space = spaces.Dict([(agent, self.seen) for agent in self.possible_agents])
        self.action_space = spaces.Dict([(agent, spaces.Discrete(3)) for agent in self.possible_agents])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.time = 0
        return self.observed(), {}

    def observed(self) -> dict[str, Any]:
        point = np.full(2, self.time, np.float32)
        return {agent: {"at": point} if self.seen is NESTED else point for agent in self.possible_agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        observations, rewards = self.observed(), {"a": 1.0, "b": float(self.time)}
        terminateds, truncateds = ({"a": False, "b": False, "__all__": False} for _ in range(2))
        if self.bad and self.time == WHEN:
            value = self.value()
            if self.place == "reward":
                rewards["b"] = value
            elif self.place == "observation":
                observations["b"] = value
            elif self.place == "part":
                observations["b"]["at"] = value
            elif self.place == "all":
                terminateds["__all__"] = value
            else:
                (terminateds if self.place == "terminated" else truncateds)["b"] = value
        return observations, rewards, terminateds, truncateds, {}
