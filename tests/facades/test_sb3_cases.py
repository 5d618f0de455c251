"""`SB3VecEnv` with unusual simulators and requests; common cases are tested in `test_sb3`."""

from __future__ import annotations

import functools
from collections import UserDict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from simulators.dict_rules import DictRules
from simulators.teams import Team, names

from marl_parallel import ParallelEnv
from marl_parallel.vector import SB3VecEnv

pytestmark = pytest.mark.needs("stable_baselines3")


@pytest.fixture
def build_facade():
    """Two environments whose rows are agents a and b."""
    envs = []

    def make(**how: Any) -> SB3VecEnv:
        envs.append(SB3VecEnv(ParallelEnv([lambda: DictRules(**how)] * 2, backend="serial")))
        envs[-1].reset()
        return envs[-1]

    yield make
    for env in envs:
        env.close()


def test_infos_that_are_mappings_have_a_last_observation(build_facade):
    env = build_facade(length=2, infos=lambda time: {"a": UserDict(x=time)})
    env.step(np.zeros(4, np.int64))
    info = env.step(np.zeros(4, np.int64))[3][0]
    assert info["x"] == 2
    assert info["terminal_observation"].tolist() == [2]


def test_empty_indices(build_facade):
    """As with `DummyVecEnv`: the indices may be those of the rows that are done."""
    env = build_facade()
    assert env.get_attr("time", indices=np.flatnonzero([False] * 4)) == []
    assert env.env_method("both", indices=[]) == []
    env.set_attr("time", 3, indices=[])
    assert env.get_attr("time") == [0] * 4


def test_composite_actions(build_facade):
    env = build_facade(acts=spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]))
    env.step((np.arange(4) % 3, np.full((4, 2), 0.5, np.float32)))
    whole, fine = env.get_attr("actions", 2)[0]["b"]
    assert whole == 0
    assert fine.tolist() == [0.5, 0.5]


def test_reset_infos_of_an_environment(build_facade):
    """`reset_infos` has them after automatic resets as after the first one."""
    env = build_facade(length=1, infos=lambda time: {"level": {"n": time}}, first={"a": {"x": 7}, "level": {"n": 8}})
    first = env.reset_infos
    assert first[:2] == [{"x": 7, "level": {"n": 8}}, {"level": {"n": 8}}]
    env.reset_infos = [{}] * 4
    env.step(np.zeros(4, np.int64))
    assert env.reset_infos == first


@pytest.mark.parametrize("seed", ["x", -1, 0.5], ids=repr)
def test_wrong_seed_is_refused_at_once(seed, build_facade):
    env = build_facade()
    env.seed(3)
    with pytest.raises((TypeError, ValueError), match="seed"):
        env.seed(seed)
    env.reset()
    assert env.env.seed() == (3, 4)


def test_saved_states_beside_other_agents():
    """The sums and infos of an environment are its agents', wherever their rows are."""
    teams = [names(0, 1), names(1, 2), names(2, 3)]
    saved = SB3VecEnv(ParallelEnv([functools.partial(Team, team) for team in teams[1:]], backend="serial"))
    larger = SB3VecEnv(ParallelEnv([functools.partial(Team, team) for team in teams], backend="serial"))
    for env in (saved, larger):
        env.reset()
        env.step(np.arange(env.num_envs) % 4)
    larger.load_state(saved.save_state(), [1, 2])
    for _ in range(5):
        saved.step(np.ones(6, np.int64))
        larger.step(np.ones(12, np.int64))
    ended, infos = saved.step(np.ones(6, np.int64))[3], larger.step(np.ones(12, np.int64))[3]
    # Rows are agents 1 to 3 there, and 0 to 3 here.
    for row, expected in zip((5, 6, 10, 11), (0, 1, 4, 5), strict=True):
        assert infos[row]["episode"]["r"] == ended[expected]["episode"]["r"] > 0
        assert infos[row]["episode"]["l"] == ended[expected]["episode"]["l"] == 7
