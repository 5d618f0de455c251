"""`AgileRLVecEnv` with unusual simulators and actions; common cases are tested in `test_agilerl`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from agilerl.vector import AsyncPettingZooVecEnv
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv
from simulators.dict_rules import DictRules

from marl_parallel import ParallelEnv
from marl_parallel.vector import AgileRLVecEnv

pytestmark = pytest.mark.needs("agilerl")


class WaitingAgents(PettingZooEnv):
    """Agent a dies at 2; b is not observed at odd times, although it is alive."""

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
def test_flags_of_waiting_agents(how):
    """They are returned unchanged; AgileRL's own has NaN for dead agents only, which its training treats as done."""
    facade = AgileRLVecEnv(ParallelEnv([WaitingAgents] * 2, backend="serial", **how))
    own = AsyncPettingZooVecEnv([WaitingAgents] * 2, context="fork")
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
def build_facade():
    """Two environments with agents a and b."""
    envs = []

    def make(copy: bool = True, **how: Any) -> AgileRLVecEnv:
        envs.append(AgileRLVecEnv(ParallelEnv([lambda: DictRules(**how)] * 2, backend="serial", copy=copy)))
        envs[-1].reset()
        return envs[-1]

    yield make
    for env in envs:
        env.close()


NOBODY = dict.fromkeys("ab", np.zeros(2, np.int64))


# Actions


@pytest.mark.parametrize("acts", [spaces.Dict({"x": spaces.Discrete(2)}), spaces.Tuple([spaces.Discrete(2)])])
def test_composite_actions_are_refused(acts, build_facade):
    with pytest.raises(ValueError, match=r"actions are arrays, but the action space of agent 'a' is (Dict|Tup)"):
        build_facade(acts=acts)


def test_shapes_of_actions(build_facade):
    """Axes of length 1 may be missing or extra, and a row may be flat; other shapes are refused."""
    env = build_facade(acts=spaces.Box(-9, 9, (2, 3)))
    rows = np.arange(12, dtype=np.float32)
    for shape in (2, 2, 3), (2, 1, 2, 3), (2, 2, 3, 1), (2, 6):
        env.step(dict.fromkeys("ab", rows.reshape(shape)))
        assert env.get_attr("actions")[1]["b"].tolist() == rows.reshape(2, 2, 3)[1].tolist()
    with pytest.raises(ValueError, match=r"agent 'a': expected .*3, 2\)"):
        env.step(dict.fromkeys("ab", rows.reshape(2, 3, 2)))
    with pytest.raises(ValueError, match=r"agent 'a': expected .*3, 2\)"):
        env.step_async([dict.fromkeys("ab", rows[:6].reshape(3, 2))] * 2)


def test_non_numeric_actions(build_facade):
    env = build_facade(acts=spaces.Box(-1, 1, (0,)))
    env.step({agent: env.action_space(agent).sample() for agent in "ab"})
    env.step_async([dict.fromkeys("ab", np.zeros(0, np.float32))] * 2)
    env.step_wait()
    assert [action["a"].shape for action in env.get_attr("actions")] == [(0,), (0,)]


def test_whole_floats_for_boxes_of_integers(build_facade):
    """NaN for absent agents turns all actions into floats."""
    env = build_facade(acts=spaces.Box(0, 9, (1,), np.int32))
    env.step({"a": np.array([[3.0], [np.nan]]), "b": np.array([[1.0], [2.0]])})
    assert [sorted(action) for action in env.get_attr("actions")] == [["a", "b"], ["b"]]
    assert env.get_attr("actions")[0]["a"].dtype == np.int32


# Infos


def test_env_defined_actions_have_one_shape(build_facade):
    env = build_facade(infos=lambda time: {"a": {"env_defined_actions": np.zeros(time)}})
    assert env.step(NOBODY)[4]["a"]["env_defined_actions"].shape == (2, 1)
    env.set_attr("time", [1, 2])
    with pytest.raises(ValueError, match=r"environment 1: the env_defined_actions of agent 'a' have shape \(3,\)"):
        env.step(NOBODY)


def test_reset_infos_are_at_the_top_level(build_facade):
    """Also infos of the environment."""
    info = {"a": {"x": 7}, "level": {"n": 8}}
    env = build_facade(length=2, infos=lambda time: {"a": {"x": time}, "level": {"n": time}}, first=info)
    env.step(NOBODY)
    infos = env.step(NOBODY)[4]["a"]
    assert infos["x"].tolist() == [7, 7]
    assert infos["level"]["n"].tolist() == [8, 8]
    assert infos["final_info"]["x"].tolist() == [2, 2]
    assert infos["final_info"]["level"]["n"].tolist() == [2, 2]
