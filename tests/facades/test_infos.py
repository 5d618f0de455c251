"""Infos of many rows in one dict: arrays if values fit, objects otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same

from marl_parallel import ParallelEnv
from marl_parallel.core.block import codec
from marl_parallel.vector import PettingZooVecEnv
from marl_parallel.vector.rows import vector_infos

pytestmark = pytest.mark.release_independent


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], np.int64),
        ([1, 2.5], np.float64),
        ([True, False], np.bool_),
        ([np.float32(1), np.float32(2)], np.float32),
        ([np.int8(1), 2.5], np.float64),
        ([np.zeros(2, np.int8), np.ones(2)], np.float64),
        (["a", 1], object),
        ([None, 1], object),
        ([np.zeros(2), np.zeros(3)], object),
        ([np.zeros(()), 1.0], object),
        ([{"x": 1}, 1], object),
        ([[1], [1, 2]], object),
        ([2**70, 1], object),
        ([2**63 + 1, 2**60 + 1], object),
        ([2**63, 2**60], np.float64),
        ([2**63, 2**64 - 1], np.uint64),
        ([np.float64(1), np.float64(2)], np.float64),
        ([np.uint8(1), np.uint8(2)], np.uint8),
        ([np.int64(-1), np.int64(2)], np.int64),
        ([True, 2], np.int64),
        ([np.array(["a"]), np.array([1])], object),
    ],
)
def test_kinds_of_values(values, dtype, order):
    values = values[::order]
    infos = vector_infos([(3, {"key": values[0]}), (1, {"key": values[1]})], 4)
    assert infos["key"].dtype == dtype
    assert infos["_key"].tolist() == [False, True, False, True]
    for row, value in ((3, values[0]), (1, values[1])):
        assert np.array_equal(infos["key"][row], value)
    if dtype is not object:
        assert not infos["key"][[0, 2]].any()


def test_nested_dicts():
    infos: Any = vector_infos([(0, {"deep": {"x": 1}}), (2, {"deep": {"y": "z"}})], 3)
    assert infos["_deep"].tolist() == [True, False, True]
    assert infos["deep"]["x"].tolist() == [1, 0, 0]
    assert infos["deep"]["_x"].tolist() == [True, False, False]
    assert infos["deep"]["y"].tolist() == [None, None, "z"]


def test_last_observations_stay_objects():
    infos = vector_infos([(1, {"final_obs": np.ones(2)}), (2, {"final_obs": {"x": 1}})], 3)
    assert infos["final_obs"].dtype == object
    assert infos["final_obs"][1].tolist() == [1.0, 1.0]
    assert infos["final_obs"][2] == {"x": 1}


# -- infos that compiled code stacks -----------------------------------------------------------------------------------


class Reporting:
    """Infos come from a function of the environment's number, the agent and the step; `b` dies in the second step."""

    possible_agents: ClassVar = ["a", "b", "c"]
    observation_space = spaces.Dict({agent: spaces.Discrete(9) for agent in "abc"})
    action_space = spaces.Dict({agent: spaces.Discrete(2) for agent in "abc"})

    def __init__(self, info_of: Callable[[int, str, int], Any], env_id: int = 0) -> None:
        self.info_of, self.env_id, self.steps = info_of, env_id, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return dict.fromkeys("abc", 0), {}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        there = "abc" if self.steps < 3 else "ac"
        flags = {agent: (agent, self.steps) == ("b", 2) or self.steps == 5 for agent in there}
        infos = {agent: one for agent in there if (one := self.info_of(self.env_id, agent, self.steps)) is not None}
        no, over = dict.fromkeys(there, False), self.steps == 5
        return dict.fromkeys(there, self.steps), dict.fromkeys(there, 1.0), {**flags, "__all__": over}, no, infos

    def close(self) -> None:
        pass


NUMBERS = (1, 2.5, True, np.float32(3), np.int8(4), np.float64(5), np.bool_(False), np.int64(6))
INFOS_OF: dict[str, Callable[[int, str, int], Any]] = {
    "one number": lambda env_id, agent, step: {"x": 10.0 * env_id + step + ord(agent)},
    "many types": lambda env_id, agent, step: {f"k{place}": one for place, one in enumerate(NUMBERS)},
    "another type later": lambda env_id, agent, step: {"x": 1.0 if (env_id, agent) < (1, "c") else 1},
    "other keys": lambda env_id, agent, step: {"x": 1.0, **({"y": 2.0} if agent == "b" else {})},
    "another order": lambda env_id, agent, step: dict([("x", 1.0), ("y", 2)][:: 1 if agent == "a" else -1]),
    "not everybody": lambda env_id, agent, step: {"x": step} if agent != "c" else None,
    "NumPy's number of one": lambda env_id, agent, step: {"x": np.float64(1)} if agent == "a" else None,
    "an empty key": lambda env_id, agent, step: {"": 1.0},
    "a mask that is a number": lambda env_id, agent, step: {"action_mask": 1},
    "none at all": lambda env_id, agent, step: {},
    "one has none": lambda env_id, agent, step: {"x": step} if agent != "a" else {},
    "one environment has none": lambda env_id, agent, step: {"x": step} if env_id else {},
    "arrays": lambda env_id, agent, step: {"x": np.full(2, env_id)},
    "nested": lambda env_id, agent, step: {"x": {"y": 1.0}},
    "texts": lambda env_id, agent, step: {"x": "é", "y": None},
    "the same key twice": lambda env_id, agent, step: {"x": 1.0, "_x": True},
    "large": lambda env_id, agent, step: {"x": 2**62 + step},
    "too large": lambda env_id, agent, step: {"x": 2**64},
    "many keys": lambda env_id, agent, step: {f"k{place}": place for place in range(20)},
}


@pytest.mark.needs("_codec")
@pytest.mark.parametrize("auto_reset", [True, False, "NEXT_STEP"])
@pytest.mark.parametrize("info_of", INFOS_OF.values(), ids=INFOS_OF)
def test_infos_are_the_same_with_compiled_code(info_of, auto_reset, monkeypatch):
    def results() -> list[Any]:
        with ParallelEnv([lambda env_id: Reporting(info_of, env_id)] * 3, auto_reset, backend="serial") as env:
            front = PettingZooVecEnv(env)
            front.reset()
            found = []
            for _ in range(5):
                infos = front.step(dict.fromkeys("abc", np.zeros(3, np.int64)))[4]
                latest = front._stepper.latest
                assert latest is not None
                by_env = {env_id: {**latest.infos[env_id]} for env_id in latest.infos}
                found.append((infos, by_env, env.action_masks, env.finished_episodes))
            return found

    ours = results()
    monkeypatch.setattr(codec, "Codec", None)
    for one, expected in zip(ours, results(), strict=True):
        for part, expected_part in zip(one, expected, strict=True):
            assert_same(part, expected_part)
