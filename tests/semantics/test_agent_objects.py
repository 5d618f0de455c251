"""Agents that are objects: those that are equal once they have been pickled can be used, others are refused."""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from gymnasium import spaces

from marl_parallel import EnvError

pytestmark = pytest.mark.in_turn

MOVES = spaces.Discrete(3)


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True)
class Car:
    name: str
    lane: int


@dataclass(eq=True, unsafe_hash=True)
class Truck:
    name: str


class Place(NamedTuple):
    x: int
    y: int


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Plain:
    """An object with the default `==`."""


@dataclass(eq=False)
class Alone:
    name: str


@dataclass(frozen=True)
class Holds:
    what: Any


@dataclass(frozen=True)
class Locked:
    name: str
    lock: Any = field(default_factory=threading.Lock, compare=False)


class Simulator:
    """Checks that it gets its own agents back, in actions."""

    def __init__(self, agents: Any, declares: bool = True) -> None:
        self.mine = list(agents)
        if declares:
            self.possible_agents = self.mine
            self.observation_space = self.action_space = dict.fromkeys(self.mine, MOVES)

    def reset(self, seed: int | None = None) -> tuple[dict, dict]:
        return dict.fromkeys(self.mine, 1), {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert [actions[agent] in (0, 1, 2) for agent in self.mine] == [True] * len(self.mine)
        over = {**dict.fromkeys(self.mine, False), "__all__": False}
        return dict.fromkeys(self.mine, 1), dict.fromkeys(self.mine, 2.0), over, over, {}


GOOD: dict[str, list[Any]] = {
    "tuples": [("car", 1), ("car", 2)],
    "nested": [("car", Side.LEFT), ("car", Side.RIGHT)],
    "enums": [*Side],
    "int enums": [*Level],
    "frozen dataclasses": [Car("a", 1), Car("b", 1)],
    "dataclasses with a hash": [Truck("a"), Truck("b")],
    "named tuples": [Place(0, 1), Place(1, 0)],
    "objects with ==": [Named("a"), Named("b")],
    "frozen sets": [frozenset({1, 2}), frozenset({3})],
    "bytes and None": [b"a", None],
    "classes": [Car, Truck],
}


@pytest.mark.parametrize("kind", GOOD)
def test_agents_that_stay_equal(kind, backend_setup, build):
    agents = GOOD[kind]
    env = build([lambda: Simulator(agents)] * 2, backend_setup)
    observations, _ = env.reset()
    assert [[*one] for one in observations] == [agents] * 2 == [*env.acting]
    assert env.possible_agents == agents
    for _ in range(2):
        _, rewards, *_ = env.step(env.sample_actions())
        assert [one[agents[1]] for one in rewards] == [2.0, 2.0]
    open_ended = build([lambda: Simulator(agents, declares=False)] * 2, backend_setup)
    observations, _ = open_ended.reset()
    open_ended.step([dict.fromkeys(one, 2) for one in observations])


BAD: dict[str, Any] = {
    "default ==": lambda: [Plain(), Plain()],
    "dataclass without ==": lambda: [Alone("a")],
    "in a tuple": lambda: [("car", Plain())],
    "in a frozen dataclass": lambda: [Holds(Plain())],
    "not a number": lambda: [float("nan")],
    "cannot be pickled": lambda: [Locked("a")],
}


@pytest.mark.parametrize("kind", BAD)
def test_agents_that_are_refused(kind, backend_setup, build):
    """At construction; agents that are not declared, at the first reset."""
    make = BAD[kind]
    reason = "TypeError: " if kind == "cannot be pickled" else "it is not equal to its copy"
    text = rf"Simulator declares the agent .*, which does not survive pickling \({reason}.*frozen dataclass"
    with pytest.raises(ValueError, match=f"environment 0: .*{text}"):
        build([lambda: Simulator(make())] * 2, backend_setup)
    open_ended = build([lambda: Simulator(make(), declares=False)] * 2, backend_setup)
    with pytest.raises(EnvError, match=text):
        open_ended.reset()
