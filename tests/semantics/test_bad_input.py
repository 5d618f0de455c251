"""Bad input raises a clear error and loses nothing: the next correct step equals the reference's.

Bad constructors are tested in `test_bad_constructors`.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.reference import Reference
from helpers.scenarios import random_actions
from simulators.deterministic import Hunt, Scripted, Skirmish

from marl_parallel import EnvError, ParallelEnv

pytestmark = pytest.mark.in_turn

SAME_STEP = AutoresetMode.SAME_STEP
FLOAT32 = np.array([0.5, 0.25, -1.0], np.float32)


class Pair:
    """The package and the reference in lockstep, a few steps into an episode."""

    def __init__(self, env: ParallelEnv, reference: Reference) -> None:
        self.env, self.reference = env, reference
        self.rng = np.random.default_rng(1)
        assert_same(env.reset(), reference.reset())
        self.step()

    def actions(self) -> list[dict[Any, Any]]:
        """Valid actions."""
        return [random_actions(one, self.rng) for one in self.reference.copies]

    def step(self) -> None:
        actions = self.actions()
        expected = self.reference.step(copy.deepcopy(actions))
        assert_same(self.env.step(actions), expected)


@pytest.fixture
def pair(two_worker_setup, build):
    """Four hunts under PettingZoo rules."""
    return Pair(build([Hunt] * 4, two_worker_setup), Reference([Hunt] * 4, SAME_STEP, 42))


def assert_refused(pair: Pair, error: Any, match: str, actions: Any, env_ids: Any = None) -> None:
    """The step is refused, and the next correct one is unaffected; twice."""
    for _ in range(2):
        with pytest.raises(error, match=match):
            pair.env.step(actions, env_ids)
        pair.step()


def without(actions: list[dict], env_id: int, agent: str) -> list[dict]:
    return [
        {key: value for key, value in one.items() if (index, key) != (env_id, agent)}
        for index, one in enumerate(actions)
    ]


def everyone() -> list[dict]:
    return [{"wolf_0": 1, "wolf_1": 1, "wolf_2": FLOAT32, "wolf_3": 1} for _ in range(4)]


@pytest.mark.parametrize("count", [0, 3, 5])
def test_wrong_number_of_action_dicts(count, pair):
    assert_refused(pair, ValueError, rf"(?s)(4.*{count}|{count}.*4)", (everyone() * 2)[:count])


def test_wrong_number_of_action_dicts_for_env_ids(pair):
    assert_refused(pair, ValueError, r"(?s)(2.*3|3.*2)", everyone()[:3], [0, 2])


def test_missing_action(pair):
    """Of the last environment: the environments before it must not have been stepped."""
    agent = pair.reference.acting[3][0]
    with pytest.raises(ValueError, match=rf"(?s)(3.*{agent}|{agent}.*3)"):
        pair.env.step(without(everyone(), 3, agent))
    pair.step()


@pytest.mark.parametrize("one", [None, 3, [1, 2], "wolf_0", np.zeros(4)], ids=str)
def test_actions_that_are_not_a_dict(one, pair):
    assert_refused(pair, (TypeError, ValueError), "3", [*everyone()[:3], one])


def test_one_dict_for_all_environments(pair):
    """One dict in place of one dict per environment."""
    assert_refused(pair, (TypeError, ValueError), "wolf_0|dict|sequence|list", everyone()[0])


@pytest.mark.parametrize(
    "action",
    [np.zeros(2), np.zeros((3, 1)), np.zeros((1, 3)), np.zeros(()), 1.0, [0.5], "left"],
    ids=lambda action: f"{type(action).__name__}{np.shape(action)}",
)
def test_action_of_wrong_shape(action, two_worker_setup, build):
    """Refused before any simulator is touched; never broadcast."""
    space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    for rules in (by_pettingzoo_rules, by_dict_rules):
        env = build([rules(space)] * 4, two_worker_setup)
        env.reset()
        with pytest.raises((ValueError, TypeError), match=r"(?s)(3.*'a'|'a'.*3)"):
            env.step([{"a": FLOAT32}] * 3 + [{"a": action}])
        assert env.get_attr("actions") == ([], [], [], [])
        env.step([{"a": FLOAT32}] * 4)
        assert_same(env.get_attr("actions"), ([{"a": FLOAT32}],) * 4)
        env.close()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (0, r"expected a dict with the keys \['eat', 'move'\], got 0"),
        ({"move": (1, 2)}, r"expected a dict with the keys \['eat', 'move'\], got the keys \['move'\]"),
        ({"move": (1,), "eat": 0}, r"expected a tuple of 2, got \(1,\)"),
        ({"move": 1, "eat": 0}, "expected a tuple of 2, got 1"),
    ],
    ids=["number", "key", "short", "part"],
)
def test_float_for_a_discrete_action(action, message, two_worker_setup, build):
    space = spaces.Dict(eat=spaces.Discrete(3), move=spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3)]))
    good = {"eat": 1, "move": (1, 2)}
    env = build([by_dict_rules(space)] * 2, two_worker_setup)
    env.reset()
    with pytest.raises(ValueError, match=rf"environment 1: the action of agent 'a': {message}"):
        env.step([{"a": good}, {"a": action}])
    assert env.get_attr("actions") == ([], [])
    env.step([{"a": good}, {"a": {**good, "more": "of it"}}])
    env.step([{"a": good}, {"a": None}])  # as in PettingZoo's turn-based environments for agents that are done
    assert env.get_attr("actions")[1] == [{"a": {**good, "more": "of it"}}, {"a": None}]


@pytest.mark.parametrize("other_part", [None, np.array(1), "left"], ids=str)
@pytest.mark.parametrize(
    "array", [np.zeros(2), np.zeros((3, 1)), np.zeros(3, complex)], ids=lambda a: f"{a.dtype}{a.shape}"
)
def test_wrong_array_in_a_pickled_action(array, other_part, two_worker_setup, build):
    """An array of a wrong shape is refused also if another part of the action has to be pickled."""
    space = spaces.Dict(n=spaces.Discrete(3), x=spaces.Box(-1.0, 1.0, (3,), np.float32))
    good = {"n": other_part, "x": FLOAT32}
    for rules in (by_pettingzoo_rules, by_dict_rules):
        env = build([rules(space)] * 4, two_worker_setup)
        env.reset()
        with pytest.raises(
            ValueError, match=r"environment 3: the action of agent 'a': expected an array of shape \(3,\)"
        ):
            env.step([{"a": good}] * 3 + [{"a": {"n": other_part, "x": array}}])
        assert env.get_attr("actions") == ([], [], [], [])
        env.step([{"a": good}] * 4)
        assert_same(env.get_attr("actions"), ([{"a": good}],) * 4)
        env.close()


class RecordsActions(Hunt):
    """PettingZoo rules with one agent; records the actions it receives."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__()
        self.space, self.possible_agents, self.actions = space, ["a"], []

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def action_space(self, agent: str) -> spaces.Space:
        return self.space

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.agents = ["a"]
        return {"a": 0}, {"a": {}}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.actions.append(dict(actions))
        return {"a": 0}, {"a": 0.0}, {"a": False}, {"a": False}, {"a": {}}


def by_pettingzoo_rules(space: spaces.Space) -> Any:
    return functools.partial(RecordsActions, space)


def by_dict_rules(space: spaces.Space) -> Any:
    seen = spaces.Dict([("a", spaces.Discrete(3))])
    step = ({"a": 0}, {"a": 0.0}, {"a": False}, {"a": False}, {})
    return functools.partial(Scripted, seen, spaces.Dict([("a", space)]), ({"a": 0}, {}), [step], ("a",))


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([3, 4]), spaces.Box(0, 9, (2,), np.int32)], ids=str)
def test_floats_are_not_cast_to_integers(space, two_worker_setup, build):
    env = build([by_pettingzoo_rules(space)] * 2, two_worker_setup)
    env.reset()
    with pytest.raises((ValueError, TypeError), match="'a'"):
        env.step([{"a": np.array([1, 2])}, {"a": np.array([1.0, 2.0])}])
    assert env.get_attr("actions") == ([], [])


OUTSIDE = [
    (spaces.Discrete(3), 3, 2),
    (spaces.Discrete(3, start=-1), 2, -1),
    (spaces.Box(-1.0, 1.0, (2,), np.float32), np.array([0.0, 1.5], np.float32), np.array([0, 1], np.float32)),
    (spaces.MultiDiscrete([2, 2]), np.array([0, 2]), np.array([1, 1])),
    (spaces.Dict(x=spaces.Discrete(2)), {"x": 5}, {"x": 1}),
    (
        spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(1))),
        (0, np.array([2], np.int8)),
        (0, np.array([1], np.int8)),
    ),
    (spaces.Text(2), "long", "ok"),
]


@pytest.mark.parametrize(("space", "bad", "good"), OUTSIDE, ids=lambda part: str(part)[:30])
def test_check_actions(space, bad, good, two_worker_setup, build):
    """With `check_actions`, an action outside its space is refused; without, it is passed on."""
    for rules in (by_pettingzoo_rules, by_dict_rules):
        env = build([rules(space)] * 2, two_worker_setup, check_actions=True)
        env.reset()
        with pytest.raises(ValueError, match=r"(?s)(1.*'a'|'a'.*1)"):
            env.step([{"a": good}, {"a": bad}])
        env.step([{"a": good}] * 2)
        assert_same(env.get_attr("actions"), ([{"a": good}],) * 2)
        env.close()
        unchecked = build([rules(space)] * 2, two_worker_setup)
        unchecked.reset()
        unchecked.step([{"a": good}, {"a": bad}])
        assert_same(unchecked.get_attr("actions"), ([{"a": good}], [{"a": bad}]))
        unchecked.close()


def test_check_actions_changes_no_trajectory(two_worker_setup, build):
    pair = Pair(build([Skirmish] * 4, two_worker_setup, check_actions=True), Reference([Skirmish] * 4, SAME_STEP, 42))
    for _ in range(10):
        pair.step()


ASK_SOME = {
    "step": lambda env, ids: env.step((everyone() * 2)[: len(ids)], ids),
    "reset": lambda env, ids: env.reset(env_ids=ids),
    "call": lambda env, ids: env.call("pid", env_ids=ids),
}


@pytest.mark.parametrize("env_ids", [[4], [-1], [0, 0], [1, 2, 1], [0, 9]], ids=str)
@pytest.mark.parametrize("method", ASK_SOME)
def test_unknown_or_duplicate_env_ids(method, env_ids, pair):
    with pytest.raises(ValueError, match=r"env_ids|environment"):
        ASK_SOME[method](pair.env, env_ids)
    pair.step()


def test_wrong_number_of_seeds(pair):
    for arguments in ({"seed": [1, 2, 3]}, {"seed": [1], "env_ids": [0, 1]}):
        with pytest.raises(ValueError, match="seed"):
            pair.env.reset(**arguments)
        pair.step()


def test_wrong_number_of_values(pair):
    with pytest.raises(ValueError, match=r"(?s)(4.*3|3.*4)"):
        pair.env.set_attr("gravity", [1.0, 2.0, 3.0])
    pair.step()


def test_missing_attribute_closes_nothing(pair):
    for ask in (pair.env.get_attr, pair.env.call):
        with pytest.raises(AttributeError, match="no_such_thing"):
            ask("no_such_thing")
        pair.step()


def test_step_before_reset(two_worker_setup, build):
    env, reference = build([Hunt] * 4, two_worker_setup), Reference([Hunt] * 4, SAME_STEP, 42)
    with pytest.raises(ResetNeeded):
        env.step(everyone())
    assert_same(env.reset(env_ids=[1, 2]), reference.reset(env_ids=[1, 2]))
    with pytest.raises(ResetNeeded):
        env.step(everyone())
    with pytest.raises(ResetNeeded):
        env.step(everyone()[:2], [1, 3])
    actions = everyone()[:2]
    assert_same(env.step(actions, [2, 1]), reference.step(actions, [2, 1]))
    assert env.get_attr("steps_ever") == (0, 1, 1, 0)


def test_calls_after_close(backend_setup, build):
    env = build([Hunt] * 2, backend_setup)
    env.reset()
    env.close()
    calls = (
        env.reset,
        lambda: env.step(everyone()[:2]),
        env.render,
        env.state,
        lambda: env.call("pid"),
        lambda: env.get_attr("gravity"),
        lambda: env.set_attr("gravity", [1.0, 2.0]),
    )
    for call in calls:
        with pytest.raises(ClosedEnvironmentError):
            call()
    env.close()
    assert env.num_envs == 2


def test_missing_action_of_a_gymnasium_environment(two_worker_setup, build):
    make = functools.partial(gymnasium.make, "CartPole-v1")
    pair = Pair(build([make] * 4, two_worker_setup), Reference([make] * 4, SAME_STEP, 42))
    assert_refused(pair, ValueError, "agent_0", [{"agent_0": 0}, {}, {"agent_0": 0}, {"agent_0": 1}])


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ({"observation": np.zeros(3), "action_mask": [1, 0]}, "got a dict with the keys 'observation', 'action_mask'"),
        ("north", "got 'north' of type str"),
        ([1, 2], r"got shape \(2,\)"),
    ],
    ids=["dict", "text", "list"],
)
def test_an_observation_of_another_kind_is_described(value, got):
    class Wrong(Hunt):
        def reset(self, **keywords: Any) -> Any:
            observations, infos = super().reset(**keywords)
            return dict.fromkeys(observations, value), infos

    with pytest.raises(EnvError, match=f"the observation of agent .*: expected an array of shape .*{got}"):
        ParallelEnv([Wrong], backend="serial").reset()
