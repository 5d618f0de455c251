"""`AgileRLVecEnv` with simulators and actions that are unlike most; what is usual is tested in `test_agilerl`."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
from agilerl.vector import AsyncPettingZooVecEnv
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv
from simulators.dict_rules import DictRules
from simulators.vector_rewards import Couriers

from marl_parallel import ParallelEnv
from marl_parallel.vector import AgileRLVecEnv

pytestmark = pytest.mark.needs("agilerl")


class Relay(PettingZooEnv):
    """Agent a dies at 2, and b waits at odd times, alive all the while, as its flags say."""

    metadata: ClassVar = {"name": "relay"}
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = ["a", "b"]

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 99, (1,))

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def seen(self) -> dict[str, Any]:
        there = [agent for agent in self.agents if agent == "a" or self.time % 2 == 0]
        return {agent: np.full(1, self.time, np.float32) for agent in there}

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.time, self.agents = 0, ["a", "b"]
        return self.seen(), {}

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.time += 1
        alive, seen = self.agents, self.seen()
        ended = {agent: self.time == 6 or (agent == "a" and self.time == 2) for agent in alive}
        self.agents = [agent for agent in alive if not ended[agent]]
        return seen, dict.fromkeys(seen, 1.0), ended, dict.fromkeys(alive, False), {}


@pytest.mark.parametrize("how", [{}, {"shared_memory": False}])
def test_flags_of_agents_that_wait(how):
    """They are told as they are, as by AgileRL's own, where NaN is for the dead: its training counts these as done."""
    facade = AgileRLVecEnv(ParallelEnv([Relay] * 2, backend="serial", **how))
    own = AsyncPettingZooVecEnv([Relay] * 2, context="fork")
    try:
        facade.reset()
        own.reset()
        for _ in range(13):
            actions = {agent: np.where(acts, 0.0, np.nan) for agent, acts in facade.acting.items()}
            for mine, theirs in zip(facade.step(actions)[1:4], own.step(actions)[1:4], strict=True):
                for agent in "ab":
                    assert mine[agent].dtype == theirs[agent].dtype
                    assert np.array_equal(mine[agent], theirs[agent], equal_nan=True)
    finally:
        own.close()
        facade.close()


@pytest.fixture
def odd():
    """Makes two copies of agents a and b."""
    made = []

    def make(copy: bool = True, **how: Any) -> AgileRLVecEnv:
        made.append(AgileRLVecEnv(ParallelEnv([lambda: DictRules(**how)] * 2, backend="serial", copy=copy)))
        made[-1].reset()
        return made[-1]

    yield make
    for env in made:
        env.close()


NOBODY = dict.fromkeys("ab", np.zeros(2, np.int64))


def test_last_observations_are_ones_own(odd):
    """Also where the environment hands out views."""
    clock = itertools.count()
    env = odd(copy=False, length=2, look=lambda time: np.full(1, next(clock), np.float32))
    env.step(NOBODY)
    last = env.step(NOBODY)[4]["a"]["final_obs"]
    kept = [array.copy() for array in last]
    env.step(NOBODY)
    env.step(NOBODY)
    assert all(map(np.array_equal, last, kept))


# Actions


@pytest.mark.parametrize("acts", [spaces.Dict({"x": spaces.Discrete(2)}), spaces.Tuple([spaces.Discrete(2)])])
def test_actions_of_several_parts_are_refused(acts, odd):
    with pytest.raises(ValueError, match=r"actions are arrays, but the action space of agent 'a' is (Dict|Tup)"):
        odd(acts=acts)


def test_shapes_of_actions(odd):
    """Axes of length 1 may be missing or too many, and a row may be flat; nothing else is read as something else."""
    env = odd(acts=spaces.Box(-9, 9, (2, 3)))
    rows = np.arange(12, dtype=np.float32)
    for shape in (2, 2, 3), (2, 1, 2, 3), (2, 2, 3, 1), (2, 6):
        env.step(dict.fromkeys("ab", rows.reshape(shape)))
        assert env.get_attr("actions")[1]["b"].tolist() == rows.reshape(2, 2, 3)[1].tolist()
    with pytest.raises(ValueError, match=r"agent 'a': expected .*3, 2\)"):
        env.step(dict.fromkeys("ab", rows.reshape(2, 3, 2)))
    with pytest.raises(ValueError, match=r"agent 'a': expected .*3, 2\)"):
        env.step_async([dict.fromkeys("ab", rows[:6].reshape(3, 2))] * 2)


def test_actions_of_no_numbers(odd):
    env = odd(acts=spaces.Box(-1, 1, (0,)))
    env.step({agent: env.action_space(agent).sample() for agent in "ab"})
    env.step_async([dict.fromkeys("ab", np.zeros(0, np.float32))] * 2)
    env.step_wait()
    assert [given["a"].shape for given in env.get_attr("actions")] == [(0,), (0,)]


def test_whole_floats_for_boxes_of_integers(odd):
    """NaN for those who are absent makes floats of all."""
    env = odd(acts=spaces.Box(0, 9, (1,), np.int32))
    env.step({"a": np.array([[3.0], [np.nan]]), "b": np.array([[1.0], [2.0]])})
    assert [sorted(given) for given in env.get_attr("actions")] == [["a", "b"], ["b"]]
    assert env.get_attr("actions")[0]["a"].dtype == np.int32


# Infos


def test_actions_that_simulators_have_chosen_are_of_one_shape(odd):
    env = odd(infos=lambda time: {"a": {"env_defined_actions": np.zeros(time)}})
    assert env.step(NOBODY)[4]["a"]["env_defined_actions"].shape == (2, 1)
    env.set_attr("time", [1, 2])
    with pytest.raises(ValueError, match=r"environment 1: the env_defined_actions of agent 'a' have shape \(3,\)"):
        env.step(NOBODY)


def test_infos_of_the_reset_are_on_top(odd):
    """What they say of a copy, too."""
    said = {"a": {"x": 7}, "level": {"n": 8}}
    env = odd(length=2, infos=lambda time: {"a": {"x": time}, "level": {"n": time}}, first=said)
    env.step(NOBODY)
    infos = env.step(NOBODY)[4]["a"]
    assert infos["x"].tolist() == [7, 7]
    assert infos["level"]["n"].tolist() == [8, 8]
    assert infos["final_info"]["x"].tolist() == [2, 2]
    assert infos["final_info"]["level"]["n"].tolist() == [2, 2]


def test_vector_rewards_become_numbers():
    with pytest.raises(ValueError, match=r"AgileRLVecEnv takes rewards that are numbers, but agent 'van'.*scalarize="):
        AgileRLVecEnv(ParallelEnv([Couriers], backend="serial"))
    plain = ParallelEnv([Couriers] * 2, backend="serial")
    rules = {"van": [1.0, 0.0], "bike": [0.0, 1.0], "drone": lambda vector: vector[0] * vector[1]}
    env = AgileRLVecEnv(ParallelEnv([Couriers] * 2, backend="serial"), scalarize=rules)
    plain.reset()
    env.reset()
    for _ in range(9):
        _, due, *_ = plain.step([dict.fromkeys(acting, 1) for acting in plain.acting])
        _, rewards, *_ = env.step({agent: np.ones(2, np.int64) for agent in env.agents})
        for agent, rule in {"van": lambda v: v[0], "bike": lambda v: v[1], "drone": lambda v: v[0] * v[1]}.items():
            paid = [rule(of_env[agent]) if agent in of_env else np.nan for of_env in due]
            assert np.allclose(rewards[agent], paid, equal_nan=True)
    plain.close()
    env.close()
