"""Bad input gets a clear error and loses nothing: the next correct step is the reference's."""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from comparison import assert_same
from environments import Hunt, Relay, Scripted, Skirmish
from faults import Fragile, SimulatorError, raising
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from liveness import gone, workers
from reference import Reference
from scenarios import random_actions

from marl_parallel import ParallelEnv
from marl_parallel.adapters.pettingzoo_env import PettingZooEnv

SAME_STEP = AutoresetMode.SAME_STEP
FLOAT32 = np.array([0.5, 0.25, -1.0], np.float32)


class Pair:
    """The package and the reference side by side, a few steps into an episode."""

    def __init__(self, env: ParallelEnv, reference: Reference) -> None:
        self.env, self.reference = env, reference
        self.rng = np.random.default_rng(1)
        assert_same(env.reset(), reference.reset())
        self.step()

    def actions(self) -> list[dict[Any, Any]]:
        """Good ones."""
        return [random_actions(one, self.rng) for one in self.reference.copies]

    def step(self) -> None:
        actions = self.actions()
        expected = self.reference.step(copy.deepcopy(actions))
        assert_same(self.env.step(actions), expected)


@pytest.fixture
def pair(packed, build):
    """Four hunts under PettingZoo rules."""
    return Pair(build([Hunt] * 4, packed), Reference([Hunt] * 4, SAME_STEP, 42))


def refuses(pair: Pair, error: Any, match: str, actions: Any, env_ids: Any = None) -> None:
    """The step is refused, and the next good one shows that nothing had happened; twice."""
    for _ in range(2):
        with pytest.raises(error, match=match):
            pair.env.step(actions, env_ids)
        pair.step()


def without(actions: list[dict], env_id: int, agent: str) -> list[dict]:
    return [
        {key: value for key, value in one.items() if (index, key) != (env_id, agent)}
        for index, one in enumerate(actions)
    ]


def replaced(actions: list[dict], env_id: int, agent: str, action: Any) -> list[dict]:
    return [{**one, agent: action} if index == env_id else one for index, one in enumerate(actions)]


def everyone() -> list[dict]:
    return [{"wolf_0": 1, "wolf_1": 1, "wolf_2": FLOAT32, "wolf_3": 1} for _ in range(4)]


@pytest.mark.parametrize("count", [0, 3, 5])
def test_wrong_number_of_action_dicts(count, pair):
    refuses(pair, ValueError, rf"(?s)(4.*{count}|{count}.*4)", (everyone() * 2)[:count])


def test_wrong_number_of_action_dicts_for_env_ids(pair):
    refuses(pair, ValueError, r"(?s)(2.*3|3.*2)", everyone()[:3], [0, 2])


def test_a_missing_agent(pair):
    """The last environment's: those before it must not have been stepped."""
    agent = pair.reference.acting[3][0]
    with pytest.raises(ValueError, match=rf"(?s)(3.*{agent}|{agent}.*3)"):
        pair.env.step(without(everyone(), 3, agent))
    pair.step()


@pytest.mark.parametrize("one", [None, 3, [1, 2], "wolf_0", np.zeros(4)], ids=str)
def test_not_a_dict(one, pair):
    refuses(pair, (TypeError, ValueError), "3", [*everyone()[:3], one])


def test_a_dict_for_all(pair):
    """One dict where one per environment was wanted."""
    refuses(pair, (TypeError, ValueError), "wolf_0|dict|sequence|list", everyone()[0])


@pytest.mark.parametrize(
    "action",
    [np.zeros(2), np.zeros((3, 1)), np.zeros((1, 3)), np.zeros(()), 1.0, [0.5], "left"],
    ids=lambda action: f"{type(action).__name__}{np.shape(action)}",
)
def test_a_wrong_shape(action, packed, build):
    """Refused before any simulator is touched; never broadcast."""
    space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    for rules in (by_pettingzoo_rules, by_dict_rules):
        env = build([rules(space)] * 4, packed)
        env.reset()
        with pytest.raises((ValueError, TypeError), match=r"(?s)(3.*'a'|'a'.*3)"):
            env.step([{"a": FLOAT32}] * 3 + [{"a": action}])
        assert env.get_attr("actions") == ([], [], [], [])
        env.step([{"a": FLOAT32}] * 4)
        assert_same(env.get_attr("actions"), ([{"a": FLOAT32}],) * 4)
        env.close()


@pytest.mark.parametrize("beside", [None, np.array(1), "left"], ids=str)
@pytest.mark.parametrize(
    "array", [np.zeros(2), np.zeros((3, 1)), np.zeros(3, complex)], ids=lambda a: f"{a.dtype}{a.shape}"
)
def test_a_wrong_array_beside_what_does_not_fit(array, beside, packed, build):
    """That another part of the action has a form that has to travel pickled saves nothing."""
    space = spaces.Dict(n=spaces.Discrete(3), x=spaces.Box(-1.0, 1.0, (3,), np.float32))
    good = {"n": beside, "x": FLOAT32}
    for rules in (by_pettingzoo_rules, by_dict_rules):
        env = build([rules(space)] * 4, packed)
        env.reset()
        with pytest.raises(
            ValueError, match=r"environment 3: the action of agent 'a': expected an array of shape \(3,\)"
        ):
            env.step([{"a": good}] * 3 + [{"a": {"n": beside, "x": array}}])
        assert env.get_attr("actions") == ([], [], [], [])
        env.step([{"a": good}] * 4)
        assert_same(env.get_attr("actions"), ([{"a": good}],) * 4)
        env.close()


class Listener(Hunt):
    """PettingZoo rules with one agent that keeps the actions it was given."""

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
    return functools.partial(Listener, space)


def by_dict_rules(space: spaces.Space) -> Any:
    seen = spaces.Dict([("a", spaces.Discrete(3))])
    step = ({"a": 0}, {"a": 0.0}, {"a": False}, {"a": False}, {})
    return functools.partial(Scripted, seen, spaces.Dict([("a", space)]), ({"a": 0}, {}), [step], ("a",))


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([3, 4]), spaces.Box(0, 9, (2,), np.int32)], ids=str)
def test_floats_are_not_cast_to_integers(space, packed, build):
    env = build([by_pettingzoo_rules(space)] * 2, packed)
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
def test_check_actions(space, bad, good, packed, build):
    """Asked for, an action outside its space is refused; not asked for, it goes through."""
    for rules in (by_pettingzoo_rules, by_dict_rules):
        env = build([rules(space)] * 2, packed, check_actions=True)
        env.reset()
        with pytest.raises(ValueError, match=r"(?s)(1.*'a'|'a'.*1)"):
            env.step([{"a": good}, {"a": bad}])
        env.step([{"a": good}] * 2)
        assert_same(env.get_attr("actions"), ([{"a": good}],) * 2)
        env.close()
        unchecked = build([rules(space)] * 2, packed)
        unchecked.reset()
        unchecked.step([{"a": good}, {"a": bad}])
        assert_same(unchecked.get_attr("actions"), ([{"a": good}], [{"a": bad}]))
        unchecked.close()


def test_checked_trajectories_are_the_same(packed, build):
    pair = Pair(build([Skirmish] * 4, packed, check_actions=True), Reference([Skirmish] * 4, SAME_STEP, 42))
    for _ in range(10):
        pair.step()


ASK_SOME = {
    "step": lambda env, ids: env.step((everyone() * 2)[: len(ids)], ids),
    "reset": lambda env, ids: env.reset(env_ids=ids),
    "call": lambda env, ids: env.call("pid", env_ids=ids),
}


@pytest.mark.parametrize("env_ids", [[4], [-1], [0, 0], [1, 2, 1], [0, 9]], ids=str)
@pytest.mark.parametrize("method", ASK_SOME)
def test_unknown_or_doubled_env_ids(method, env_ids, pair):
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


def test_a_missing_attribute_closes_nothing(pair):
    for ask in (pair.env.get_attr, pair.env.call):
        with pytest.raises(AttributeError, match="no_such_thing"):
            ask("no_such_thing")
        pair.step()


def test_step_before_reset(packed, build):
    env, reference = build([Hunt] * 4, packed), Reference([Hunt] * 4, SAME_STEP, 42)
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


def test_calls_after_close(each, build):
    env = build([Hunt] * 2, each)
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


def test_no_constructors(each, build):
    with pytest.raises(ValueError, match=r"env_constructors|constructor|environment"):
        build([], each)


@pytest.mark.parametrize("thing", [None, "mpe2.simple_spread_v3", 3], ids=repr)
def test_not_callable(thing, each, build):
    with pytest.raises(TypeError, match="2"):
        build([Hunt, Hunt, thing], each)


def test_an_environment_where_a_constructor_was_wanted(each, build):
    with pytest.raises(TypeError, match="0"):
        build([Hunt()], each)


@pytest.mark.parametrize("arguments", [{"num_workers": 0}, {"num_workers": -1}, {"backend": "fast"}], ids=str)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=rf"{next(iter(arguments))}.*{next(iter(arguments.values()))}"):
        ParallelEnv([Hunt] * 2, **arguments)


@pytest.mark.parametrize("mode", ["SOMETIMES", "same step"])
def test_an_unknown_mode(mode, each, build):
    with pytest.raises(ValueError, match=mode):
        build([Hunt] * 2, each, mode)


def test_an_unpicklable_constructor_is_named(processes, build):
    lock = threading.Lock()

    def locked() -> Any:
        with lock:
            return Hunt()

    with pytest.raises(Exception, match="2") as caught:
        build([Hunt, Hunt, locked, Hunt], processes)
    assert isinstance(caught.value, TypeError | ValueError) or "Pickling" in type(caught.value).__name__


class Odd(Relay):
    """Whose spaces can be chosen."""

    def __init__(self, observed: Any, acted: Any, names: tuple[str, ...] = ("alpha", "beta")) -> None:
        self.observation_space = spaces.Dict([(name, observed) for name in names])
        self.action_space = spaces.Dict([(names[0], spaces.Discrete(2)), *((name, acted) for name in names[1:])])


PLAIN = spaces.Box(-1.0, 1.0, (2,), np.float32)
OTHERS = [
    (spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2), "alpha"),
    (spaces.Box(-1.0, 2.0, (2,), np.float32), spaces.Discrete(2), "alpha"),
    (spaces.Box(-1.0, 1.0, (2,), np.float64), spaces.Discrete(2), "alpha"),
    (PLAIN, spaces.Discrete(3), "beta"),
    (PLAIN, spaces.Discrete(2, start=1), "beta"),
]


@pytest.mark.parametrize(("observed", "acted", "agent"), OTHERS, ids=str)
def test_spaces_that_differ(observed, acted, agent, packed, build):
    """Which environment, which agent, what against what."""
    usual = functools.partial(Odd, PLAIN, spaces.Discrete(2))
    other = functools.partial(Odd, observed, acted)
    with pytest.raises(ValueError, match=agent) as caught:
        build([usual, usual, other, usual], packed)
    differing = (PLAIN, observed) if agent == "alpha" else (spaces.Discrete(2), acted)
    for part in ("2", *map(str, differing)):
        assert part in str(caught.value)


class Own(spaces.Box):
    """Equal to the Box that it is derived from, but its values are its own business."""


@pytest.mark.parametrize("kinds", [(spaces.Box, Own), (Own, spaces.Box)], ids=["usual first", "own first"])
@pytest.mark.parametrize("below", [lambda space: space, lambda space: spaces.Dict(x=space)], ids=["alone", "below"])
def test_spaces_of_kinds_that_differ(below, kinds, packed, build):
    declared = [below(kind(-1.0, 1.0, (2,), np.float32)) for kind in kinds]
    with pytest.raises(ValueError, match=r"environment 1 differs .* agent 'alpha'.* against .* another class"):
        build([functools.partial(Odd, one, spaces.Discrete(2)) for one in declared], packed)


class Bare(spaces.Space[int]):
    """A space that does not say what it is equal to, as Gymnasium allows."""

    def __init__(self) -> None:
        super().__init__(None, None)


def test_spaces_without_equality_do_not_differ(packed, build):
    declared = spaces.Dict([("a", Bare()), ("b", spaces.Tuple([Bare(), spaces.Discrete(2)]))])
    env = build([functools.partial(Scripted, declared, None, ({"a": 1}, {}), (), ("a", "b"))] * 2, packed)
    assert env.reset()[0] == ({"a": 1}, {"a": 1})


def test_agents_that_differ(packed, build):
    usual = functools.partial(Odd, PLAIN, spaces.Discrete(2))
    other = functools.partial(Odd, PLAIN, spaces.Discrete(2), ("alpha", "gamma"))
    with pytest.raises(ValueError, match=r"(?s)1.*(beta|gamma)|(beta|gamma).*1"):
        build([usual, other], packed)


class Half:
    """Can be reset and closed, but not stepped."""

    def __init__(self, notes: Path, fault: Callable[[], Any] = int) -> None:
        self.notes, self.fault = notes, fault

    def reset(self) -> None:
        """Is never called."""

    def close(self) -> None:
        (self.notes / "closed-half").touch()
        self.fault()


NO_ENVIRONMENTS = {
    "a number": (lambda notes: 3, "builtins.int without `reset` and `step`"),
    "a dict": (lambda notes: {}, "builtins.dict without `reset` and `step`"),
    "nothing": (lambda notes: None, "returned None; does it lack a `return`"),
    "a class": (lambda notes: Hunt, "returned the class Hunt, not an instance"),
    "a constructor": (lambda notes: lambda: Hunt(), "did a constructor return another constructor"),
    "a module": (lambda notes: os, "builtins.module without `reset` and `step`"),  # its `close` wants an argument
    "half of one": (Half, "Half without `step`"),
    "half of one that breaks": (functools.partial(Half, fault=raising(SimulatorError)), "Half without `step`"),
}


def refused(env_id: int, make: Any, notes: Path, setup: Any, build: Any, **more: Any) -> str:
    """What is said of a constructor among others that returns no environment, everything having been freed."""
    before = {*threading.enumerate()}
    constructors = [functools.partial(Fragile, {}, notes)] * 4
    constructors[env_id] = functools.partial(make, notes)
    with pytest.raises(TypeError, match=f"^environment {env_id}: ") as caught:
        build(constructors, setup, **more)
    assert type(caught.value) is TypeError
    built, closed = ({path.name.rpartition("-")[2] for path in notes.glob(f"{what}-*")} for what in ("built", "closed"))
    assert closed - {"half"} == built == {"0", "1", "2", "3"} - {str(env_id)}
    assert gone(workers(notes))
    assert {*threading.enumerate()} <= before
    return str(caught.value)


@pytest.mark.parametrize("env_id", [0, 3])
@pytest.mark.parametrize("thing", NO_ENVIRONMENTS)
def test_no_environment_at_all(thing, env_id, each, build, tmp_path):
    """What the constructor returned is none of the kinds that are known; what can be closed is."""
    make, said = NO_ENVIRONMENTS[thing]
    assert said in refused(env_id, make, tmp_path, each, build)
    assert (tmp_path / "closed-half").exists() == thing.startswith("half")


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ("pettingzoo", "A PettingZoo parallel environment has no method `step`: "),
        ("dict", "A dict environment has no method `step`: "),
        (
            lambda env: PettingZooEnv(env) if isinstance(env, Fragile) else env,
            "must return a MultiAgentEnv; it returned",
        ),
    ],
    ids=["pettingzoo", "dict", "own"],
)
def test_no_environment_of_the_kind_that_was_named(adapter, said, each, build, tmp_path):
    assert said in refused(2, Half, tmp_path, each, build, adapter=adapter)
    assert (tmp_path / "closed-half").exists()


def test_the_first_of_several_that_are_none_is_named(each, build):
    for _ in range(3):
        with pytest.raises(TypeError, match=r"^environment 1: "):
            build([Hunt, dict, dict, dict], each)


def test_a_gymnasium_environment_needs_its_agent(packed, build):
    make = functools.partial(gymnasium.make, "CartPole-v1")
    pair = Pair(build([make] * 4, packed), Reference([make] * 4, SAME_STEP, 42))
    refuses(pair, ValueError, "agent_0", [{"agent_0": 0}, {}, {"agent_0": 0}, {"agent_0": 1}])
