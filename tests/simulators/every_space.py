"""A simulator with one agent for every kind of space; its infos return the actions.

Other simulators without faults are in `deterministic`.
"""

from __future__ import annotations

import copy
from string import ascii_letters
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
FLOATS = (np.float16, np.float32, np.float64)
LETTERS = ascii_letters
"""In an order: Gymnasium's default is a set, which old releases draw from in another order in each process."""


class Colour(gymnasium.Space[str]):
    """A user-defined space that no library knows."""

    def __init__(self, names: tuple[str, ...] = ("red", "green", "blue")) -> None:
        super().__init__(None, None)
        self.names = names

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return self.names[int(self.np_random.integers(len(self.names)))]

    def contains(self, x: Any) -> bool:
        return x in self.names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Colour) and other.names == self.names

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"Colour{self.names}"


def shared() -> dict[str, gymnasium.Space[Any]]:
    """Spaces that fit into shared memory."""
    boxes = {f"box_{t.__name__}": spaces.Box(0, 100, (2, 3), dtype=t) for t in (*INTEGERS, *FLOATS)}
    small = spaces.Box(-1.0, 1.0, (2,), np.float32)
    return {
        **boxes,
        "box_bool": spaces.Box(0, 1, (5,), dtype=np.bool_),
        "box_extremes": spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (4,), dtype=np.int64),
        "box_unbounded": spaces.Box(-np.inf, np.inf, (4,), np.float64),
        "box_scalar": spaces.Box(-1.0, 1.0, (), np.float32),
        "box_empty": spaces.Box(-1.0, 1.0, (0, 3), np.float32),
        "discrete": spaces.Discrete(6),
        "discrete_start": spaces.Discrete(5, start=-3),
        "multi_discrete": spaces.MultiDiscrete([3, 4, 5]),
        "multi_discrete_grid": spaces.MultiDiscrete(np.array([[3, 4], [2, 2]])),
        "multi_binary": spaces.MultiBinary(7),
        "multi_binary_grid": spaces.MultiBinary([2, 3]),
        "dict": spaces.Dict(zulu=spaces.Discrete(3), alpha=small, deep=spaces.Dict(x=spaces.MultiBinary(2))),
        "dict_empty": spaces.Dict({}),
        "tuple": spaces.Tuple((spaces.Discrete(3), small, spaces.Tuple((small, spaces.Dict(y=small))))),
        "tuple_empty": spaces.Tuple(()),
    }


def pickled() -> dict[str, gymnasium.Space[Any]]:
    """Spaces whose values are pickled."""
    small = spaces.Box(-1.0, 1.0, (2,), np.float32)
    return {
        "text": spaces.Text(9, charset=LETTERS),
        "graph": spaces.Graph(small, spaces.Discrete(3)),
        "sequence": spaces.Sequence(spaces.Discrete(4)),
        "sequence_stacked": spaces.Sequence(small, stack=True),
        "one_of": spaces.OneOf((spaces.Discrete(2), small)),
        "custom": Colour(),
        "mixed": spaces.Dict(words=spaces.Text(4, charset=LETTERS), number=spaces.Discrete(3)),
    }


def draw(space: gymnasium.Space[Any], rng: np.random.Generator) -> Any:
    """A sample that depends only on `rng`, not on earlier samples of the space."""
    space = copy.deepcopy(space)
    space.seed(int(rng.integers(2**31)))
    return space.sample()


class EverySpace(gymnasium.Env):
    """Dict rules: one agent per space, which observes and acts in it; some are absent at random."""

    def __init__(self, seed: int, kind: str = "all") -> None:
        declared = {"shared": shared(), "pickled": pickled(), "all": {**shared(), **pickled()}}[kind]
        self.possible_agents = list(declared)
        self.observation_space = spaces.Dict(list(declared.items()))
        self.action_space = spaces.Dict(list(declared.items()))
        self.rng = np.random.default_rng(seed)

    def observe(self) -> dict[str, Any]:
        here = [agent for agent in self.possible_agents if self.rng.random() < 0.9]
        return {agent: draw(self.observation_space[agent], self.rng) for agent in here}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.time = 0
        return self.observe(), {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        observations = self.observe()
        infos = {agent: {"action": copy.deepcopy(action)} for agent, action in actions.items()}
        flags = dict.fromkeys(observations, False)
        ends = {**flags, "__all__": self.time == 4}
        return observations, dict.fromkeys(observations, 0.5), flags, ends, infos
