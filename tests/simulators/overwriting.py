"""A simulator whose native code overwrites the memory that its worker shares with the caller."""

from __future__ import annotations

import os
import time
from typing import Any

from gymnasium import spaces

from marl_parallel.core import worker_status


class Overwriting:
    """Counts steps; in the second one, it overwrites numbers of its worker's status.

    Args:
        numbers: The numbers by place: integers or floats of 8 bytes.
        then: What the step does after that: "return", "die" or "hang".
    """

    possible_agents = ("a",)
    observation_space = action_space = spaces.Dict(a=spaces.Discrete(99))

    def __init__(self, numbers: dict[int, Any], then: str) -> None:
        self.numbers, self.then, self.time = numbers, then, 0

    def reset(self) -> tuple[dict, dict]:
        self.time = 0
        return {"a": 0}, {}

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.time += 1
        if self.time == 2:
            (status,) = worker_status._of_this_process
            for place, number in self.numbers.items():
                (status._floats if isinstance(number, float) else status._ints)[place] = number
            if self.then == "die":
                os._exit(3)
            while self.then == "hang":
                time.sleep(0.01)
        return {"a": self.time}, {"a": 1.0}, {"__all__": False}, {"__all__": False}, {}
