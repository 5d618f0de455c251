"""Constructors of a module that return one object in each call, or wrap one."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from mpe2 import simple_spread_v3
from pettingzoo.utils.wrappers import BaseParallelWrapper

BOX, MOVES = spaces.Box(-9, 99, (1,)), spaces.Discrete(2)


class Counter(gymnasium.Env):
    """One agent; observes how many steps there were in the episode."""

    observation_space, action_space = BOX, MOVES

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.full(1, self.time, np.float32), 0.0, False, False, {}


class Single(Counter):
    """Python's usual singleton."""

    one: ClassVar[Any] = None

    def __new__(cls) -> Any:
        cls.one = cls.one or super().__new__(cls)
        return cls.one


COUNTER = Counter()


def of_module() -> Any:
    return COUNTER


@functools.cache
def cached() -> Any:
    return Counter()


@functools.cache
def cached_by_env(env_id: int) -> Any:
    return Counter()


def wrapped() -> Any:
    return gymnasium.Wrapper(COUNTER)


def wrapped_twice() -> Any:
    return gymnasium.wrappers.TimeLimit(gymnasium.Wrapper(COUNTER), 9)


@functools.cache
def spread() -> Any:
    return simple_spread_v3.parallel_env()


def wrapped_spread() -> Any:
    return BaseParallelWrapper(spread())
