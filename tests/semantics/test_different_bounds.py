"""Observations, rewards and states whose bounds differ between environments: the declared space has all bounds."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers.comparison import assert_same
from helpers.reference import Reference
from simulators.corridors import Corridor

from marl_parallel import MultiAgentEnv, ParallelEnv, RestartLimitExceeded
from marl_parallel.adapters import GroupSpaces, Rules
from marl_parallel.core.schema import equal, union
from marl_parallel.vector import GymnasiumVectorEnv, StackedVecEnv


def box(low: Any, high: Any, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)


class Own(spaces.Box):
    """A derived class, whose values may travel in another way."""


UNIONS = {
    "elements": (box([0, -1], [1, 1]), box([-2, 0], [0, 5]), box([-2, -1], [1, 5])),
    "no bounds": (box([0], [1]), box([-np.inf], [np.inf]), box([-np.inf], [np.inf])),
    "whole numbers": (box([0], [9], np.uint8), box([3], [255], np.uint8), box([0], [255], np.uint8)),
    "large numbers": (box([0], [2**62], np.int64), box([-(2**62)], [1], np.int64), box([-(2**62)], [2**62], np.int64)),
    "one axis less": (box(0, 1), box(-1, 0), box(-1, 1)),
    "choices": (spaces.Discrete(3), spaces.Discrete(5), spaces.Discrete(5)),
    "first choices": (spaces.Discrete(3, start=2), spaces.Discrete(2, start=-1), spaces.Discrete(6, start=-1)),
    "many choices": (spaces.MultiDiscrete([2, 7]), spaces.MultiDiscrete([4, 3]), spaces.MultiDiscrete([4, 7])),
    "few values": (
        spaces.MultiDiscrete([100], np.int8, start=[20]),
        spaces.MultiDiscrete([9], np.int8, start=[100]),
        spaces.MultiDiscrete([100], np.int8, start=[20]),
    ),
    "parts": (
        spaces.Dict([("b", box([0], [1])), ("a", spaces.Tuple([spaces.Discrete(2), box([0], [1])]))]),
        spaces.Dict([("a", spaces.Tuple([spaces.Discrete(4), box([0], [2])])), ("b", box([0], [1]))]),
        spaces.Dict([("b", box([0], [1])), ("a", spaces.Tuple([spaces.Discrete(4), box([0], [2])]))]),
    ),
}
OTHERS = {
    "shape": (box([0], [1]), box([0, 0], [1, 1])),
    "dtype": (box([0], [1]), box([0], [2], np.float64)),
    "class": (box([0], [1]), Own(0, 2, (1,))),
    "derived classes": (Own(0, 1, (1,)), Own(0, 2, (1,))),
    "kind": (spaces.Discrete(2), box([0], [1])),
    "number of choices": (spaces.MultiDiscrete([2]), spaces.MultiDiscrete([2, 2])),
    "bits": (spaces.MultiBinary(2), spaces.MultiBinary(3)),
    "keys": (spaces.Dict(a=box([0], [1])), spaces.Dict(b=box([0], [1]))),
    "length": (spaces.Tuple([box([0], [1])]), spaces.Tuple([box([0], [1])] * 2)),
    "a part": (spaces.Dict(a=box([0], [1]), b=box([0], [1])), spaces.Dict(a=box([0], [2]), b=box([0], [1], np.int8))),
    "texts": (spaces.Text(2), spaces.Text(3)),
}


@pytest.mark.parametrize("name", UNIONS)
def test_bounds_of_both(name):
    one, another, expected = UNIONS[name]
    for ours, theirs in ((one, another), (another, one)):
        wider = union(ours, theirs)
        assert equal(wider, expected, classes=True)
        assert type(wider) is type(ours)
        assert wider is ours or wider is not theirs
        assert expected.contains(wider.sample())
        assert union(wider, ours) is wider
        assert union(wider, theirs) is wider
    assert [*union(one, another)] == [*one] if isinstance(one, spaces.Dict) else True


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_more_than_bounds(name):
    one, another = OTHERS[name]
    assert union(one, another) is None
    assert union(another, one) is None


class Field:
    """Agents "a" and "b" have equal spaces in the first environment, and different ones in all others."""

    possible_agents = ("a", "b", "c")

    def __init__(self, env_id: int, restarts: int = 0, grown: int = 0) -> None:
        size = env_id + 1 + (grown if restarts else 0)
        of_a = spaces.Dict([("place", box([0, 0], [size, size])), ("cell", spaces.Discrete(size))])
        of_b = spaces.Dict([("place", box([0, 0], [size, 1])), ("cell", spaces.Discrete(1, start=-env_id))])
        self.observation_space = spaces.Dict([("a", of_a), ("b", of_b), ("c", box([-size], [0], np.int16))])
        self.action_space = spaces.Dict([(agent, spaces.Discrete(4)) for agent in self.possible_agents])
        self.state_space = box([0], [size])
        self.reward_space = spaces.Dict([("a", box([-size, 0], [0, size], np.float64))])
        self.size, self.env_id, self.steps = size, env_id, 0

    def seen(self) -> dict[str, Any]:
        place = np.array([self.size, self.steps % 2], np.float32)
        of_b = {"place": place, "cell": -self.env_id}
        return {"a": {"place": place, "cell": self.size - 1}, "b": of_b, "c": np.array([-self.size], np.int16)}

    def state(self) -> Any:
        return np.array([self.size], np.float32)

    def reset(self, *, seed: int | None = None) -> tuple[dict, dict]:
        self.steps = 0
        return self.seen(), {}

    def step(self, actions: dict[str, int]) -> tuple[dict, ...]:
        if actions["c"] == 3:
            raise RuntimeError("the field is flooded")
        self.steps += 1
        rewards = {"a": np.array([-self.size, 0.5]), "b": float(actions["b"]), "c": 0.0}
        flags = {"__all__": self.steps == 2 + self.env_id}
        return self.seen(), rewards, flags, {"__all__": False}, {}


ACTIONS = {"a": 0, "b": 1, "c": 2}


def test_values_are_those_of_a_plain_loop(setup, build):
    """Also where the agents of one environment have equal spaces, and those of another have not."""
    reference = Reference([Field] * 4, AutoresetMode.SAME_STEP, 3)
    env = build([Field] * 4, setup, AutoresetMode.SAME_STEP, 3)
    assert env.observation_space["a"] == spaces.Dict(place=box([0, 0], [4, 4]), cell=spaces.Discrete(4))
    assert env.observation_space["b"] == spaces.Dict(place=box([0, 0], [4, 1]), cell=spaces.Discrete(4, start=-3))
    assert env.observation_space["c"] == box([-4], [0], np.int16)
    assert env.state_space == box([0], [4])
    assert env.reward_space["a"] == box([-4, 0], [0, 4], np.float64)
    assert_same(env.reset(), reference.reset())
    for _ in range(6):
        observations, *rest = env.step([ACTIONS] * 4)
        assert_same((observations, *rest), reference.step([ACTIONS] * 4))
        assert all(env.observation_space.contains(of_env) for of_env in observations)
    assert env.state().tolist() == [[1], [2], [3], [4]]


def test_arrays_have_the_bounds_of_all():
    env = StackedVecEnv(ParallelEnv([Field] * 3, seed=3, num_workers=2))
    assert env.single_observation_space["a"] == spaces.Dict(place=box([0, 0], [3, 3]), cell=spaces.Discrete(3))
    observations = env.reset()[0]
    assert observations["a"]["cell"][:, 0].tolist() == [0, 1, 2]
    assert observations["b"]["cell"][:, 0].tolist() == [0, -1, -2]
    env.close()


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_restarts_and_saved_states_keep_their_own_bounds(backend):
    with ParallelEnv([Field] * 3, False, 3, backend=backend, num_workers=2, on_error="restart") as env:
        env.reset()
        states = env.save_state()
        infos = env.step([ACTIONS, {**ACTIONS, "c": 3}, ACTIONS])[4]
        assert [info.get("__common__", {}).get("restarted") for info in infos] == [None, True, None]
        observations = env.reset(env_ids=[1])[0]
        assert observations[0]["c"].tolist() == [-2]
        assert [seen["c"].tolist() for seen in env.load_state(states)[0]] == [[-1], [-2], [-3]]


@pytest.mark.parametrize(("grown", "error"), [(1, None), (2, "the environment differs after its restart in the state")])
def test_bounds_after_a_restart_are_within_the_declared_ones(grown, error):
    constructor = functools.partial(Field, grown=grown)
    with ParallelEnv([constructor] * 2, False, 3, backend="serial", on_error="restart") as env:
        env.reset()
        broken = [{**ACTIONS, "c": 3}, ACTIONS]
        if error is None:
            env.step(broken)
            assert env.reset(env_ids=[0])[0][0]["c"].tolist() == [-2]
            assert env.stats().restarts == 1
        else:
            with pytest.raises(RestartLimitExceeded, match=error):
                env.step(broken)


class Groups(MultiAgentEnv):
    """Open-ended agents, with a space for each group."""

    rules = Rules.DICT
    possible_agents: ClassVar[list[Any]] = []
    state_space, metadata, render_mode, reset_keywords = None, {}, None, frozenset[str]()

    def __init__(self, env_id: int) -> None:
        size = [[1, 2], [3, 1]][env_id]
        declared = {group: box([0], [high]) for group, high in zip(("wolf", "sheep"), size, strict=True)}
        self.observation_spaces = GroupSpaces(declared, group_of)
        self.action_spaces = GroupSpaces(dict.fromkeys(declared, spaces.Discrete(2)), group_of)
        self.env_id = env_id

    def reset(self) -> tuple[dict, dict]:
        return {f"wolf_{self.env_id}": np.ones(1, np.float32)}, {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        return *self.reset(), {"__all__": False}, {"__all__": False}, {}

    def render(self) -> None: ...
    def state(self) -> None: ...
    def close(self) -> None: ...


def group_of(agent: str) -> str:
    return agent.partition("_")[0]


def test_bounds_of_groups():
    with ParallelEnv([Groups] * 2, num_workers=2) as env:
        assert env.observation_space["wolf_5"] == box([0], [3])
        assert env.observation_space["sheep"] == box([0], [2])
        assert [[*of_env] for of_env in env.reset()[0]] == [["wolf_0"], ["wolf_1"]]


def test_rows_equal_gymnasiums_with_different_observations():
    corridors = [functools.partial(Corridor, length) for length in (2, 3, 5)]
    theirs = SyncVectorEnv(corridors, observation_mode="different")
    ours = GymnasiumVectorEnv(ParallelEnv(corridors, "NEXT_STEP", num_workers=2))
    assert ours.single_observation_space == box([0], [4])
    np.testing.assert_array_equal(ours.reset()[0], theirs.reset()[0])
    for _ in range(6):
        results = zip(ours.step(np.ones(3, np.int64))[:4], theirs.step(np.ones(3, np.int64))[:4], strict=True)
        for our, their in results:
            np.testing.assert_array_equal(our, their)
    ours.close()
    theirs.close()


ACTED = {
    "box": (box([0], [1]), box([0], [2])),
    "choices": (spaces.Discrete(2), spaces.Discrete(3)),
    "parts": (spaces.Dict(a=spaces.Discrete(2)), spaces.Dict(a=spaces.Discrete(3))),
}


@pytest.mark.parametrize("name", ACTED)
def test_bounds_of_actions_must_be_equal(name):
    """As in Gymnasium: an action from the bounds of all may be outside those of the environment that receives it."""
    constructors = [functools.partial(Corridor, 3, None, acted) for acted in ACTED[name]]
    with pytest.raises(ValueError, match=r"environment 1 differs from environment 0 in the action space of .*: got .*"):
        ParallelEnv(constructors, backend="serial")
    with pytest.raises(ValueError, match="Only what environments return may differ in bounds"):
        ParallelEnv(constructors[::-1], backend="serial")


@pytest.mark.parametrize("name", OTHERS)
def test_more_than_bounds_is_refused(name):
    narrow, other = OTHERS[name]
    constructors = [functools.partial(Corridor, 3, seen) for seen in (narrow, narrow, other)]
    with pytest.raises(ValueError, match="environment 2 differs from environment 0 in the observation space of agent"):
        ParallelEnv(constructors, backend="serial")


def test_the_error_shows_the_bounds_of_all_environments_before():
    constructors = [functools.partial(Corridor, 3, box([0], [high])) for high in (1, 2)]
    constructors.append(functools.partial(Corridor, 3, box([0, 0], [1, 1])))
    with pytest.raises(ValueError, match=r"2 differs from environment 1 .*: got .* expected Box\(0.0, 2.0"):
        ParallelEnv(constructors, backend="serial")
