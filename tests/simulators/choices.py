"""Simulators that refuse actions which are not in their spaces, with choices of every dtype, also from 5 on."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

from marl_parallel import ParallelEnv
from marl_parallel.core.spaces import tree_map


def discrete(n: int, start: int = 0, dtype: Any = np.int64) -> spaces.Discrete:
    """A space of choices; with releases of Gymnasium that have only int64, its samples are of another dtype."""
    if "dtype" in inspect.signature(spaces.Discrete).parameters:
        return spaces.Discrete(n, start=start, dtype=dtype)
    space: spaces.Discrete = spaces.Discrete(n, start=start)
    space.dtype = np.dtype(dtype)
    return space


SPACES: dict[str, spaces.Space] = {
    **{f"discrete {name}": discrete(3, 5, name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint32")},
    "discrete below zero": discrete(4, -2, np.int32),
    "discrete uint64": discrete(3, 5, np.uint64),
    "multi-discrete": spaces.MultiDiscrete([3, 2], dtype=np.int32, start=[5, 7]),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "box without axes": spaces.Box(-1, 1, (), np.float32),
    "box of integers without axes": spaces.Box(0, 9, (), np.int32),
    "dict": spaces.Dict(go=discrete(3, 5, np.int32), far=spaces.Box(0, 1, (), np.float32), two=spaces.Box(0, 1, (2,))),
    "tuple": spaces.Tuple((discrete(2, 1, np.uint8), spaces.Box(0, 1, (), np.float64))),
}


ELSEWHERE: dict[str, Any] = {
    "discrete": spaces.Discrete(3, start=5),
    "below zero": spaces.Discrete(4, start=-2),
    "int32": discrete(3, 5, np.int32),
    "uint8": discrete(3, 5, np.uint8),
    "multi-discrete": spaces.MultiDiscrete([3, 2], start=[5, -7]),
    "int32 from zero": discrete(3, dtype=np.int32),
}
"""For facades of libraries that count choices from 0, and know only int64."""


def sample(space: spaces.Space) -> Any:
    """A sample whose choices have the dtypes of their spaces, with all releases of Gymnasium."""

    def of_leaf(leaf: Any, value: Any) -> Any:
        return leaf.dtype.type(value) if isinstance(leaf, spaces.Discrete) else value

    return tree_map(of_leaf, space, space.sample())


class Chooser(gymnasium.Env):
    """One agent, who observes its last action."""

    def __init__(self, space: spaces.Space) -> None:
        self.observation_space = self.action_space = space
        self.got: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(3)
        self.got.clear()
        return sample(self.observation_space), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.got.append(action)
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return action, 1.0, False, False, {}


class Choosers(PettingZooEnv):
    """Three agents, who observe their last actions; the last one dies after two steps, the second one joins late."""

    metadata = {"name": "choosers"}  # noqa: RUF012
    render_mode = None

    def __init__(self, space: spaces.Space, observed: spaces.Space | None = None) -> None:
        self.space, self.observed = space, space if observed is None else observed
        self.possible_agents = ["chief_0", "chief_1", "chief_2"]
        self.got: list[dict[str, Any]] = []

    def observation_space(self, agent: str) -> spaces.Space:
        return self.observed

    def action_space(self, agent: str) -> spaces.Space:
        return self.space

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.time, self.agents = 0, ["chief_0", "chief_2"]
        self.got.clear()
        self.observed.seed(3)
        return {agent: sample(self.observed) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.got.append(actions)
        assert [*actions] == self.agents
        for agent, action in actions.items():
            assert self.space.contains(action), f"{action!r} of {agent} is not in {self.space}"
        self.time += 1
        if self.time == 1:
            self.agents = [*self.possible_agents]
        seen = {
            a: actions[a] if a in actions and self.observed is self.space else self.observed.sample()
            for a in self.agents
        }
        ended = {agent: agent == "chief_2" and self.time == 2 for agent in self.agents}
        self.agents = [agent for agent in self.agents if not ended[agent]]
        return seen, dict.fromkeys(seen, 1.0), ended, dict.fromkeys(seen, False), {agent: {} for agent in seen}


class Wide(Chooser):
    """Observes a number that the dtype of its space does not hold."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return 300, *super().step(action)[1:]


def choosers(space: Any, mode: Any, observed: Any = None) -> ParallelEnv:
    """Two environments."""
    return ParallelEnv([functools.partial(Choosers, space, observed)] * 2, mode, backend="serial")


def last_actions(facade: Any, agent: str) -> list[Any]:
    """What each environment got last; None if the agent did not act."""
    return [of_env[-1].get(agent) for of_env in facade.parallel_env.get_attr("got")]
