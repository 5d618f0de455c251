"""Every kind of space and values of every type: they arrive unchanged, through shared memory or pickled."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.reference import Reference
from simulators.choices import ELSEWHERE
from simulators.deterministic import Scripted
from simulators.every_space import EverySpace, draw, pickled, shared

from marl_parallel import EnvError, NoSpaceDeclared
from marl_parallel.core.spaces import from_zero, to_start, to_zero
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv, StackedVecEnv

pytestmark = pytest.mark.in_turn

SAME_STEP = AutoresetMode.SAME_STEP
SMALL = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def scripted(observation_space: Any, first: tuple[dict, dict], *steps: Any, action_space: Any = None) -> Any:
    """A constructor of a dict environment with agent "a" and the other agents of the script."""
    declared = None if observation_space is None else spaces.Dict([("a", observation_space)])
    acting = None if action_space is None else spaces.Dict([("a", action_space)])
    return functools.partial(Scripted, declared, acting, first, steps, ("a",))


def answered(observations: dict | None = None, rewards: Any = None, flags: Any = None, infos: Any = None) -> tuple:
    flags = dict(flags or {})
    return observations or {}, rewards or {}, flags, dict(flags), infos or {}


@pytest.mark.parametrize("kind", ["shared", "pickled"])
def test_every_space(kind, setup, build):
    """Observations and actions of every agent, for longer than one episode."""
    constructors = [functools.partial(EverySpace, kind=kind)] * 4
    reference = Reference(constructors, SAME_STEP, 3)
    env = build(constructors, setup, SAME_STEP, 3)
    declared = {"shared": shared, "pickled": pickled}[kind]()
    assert list(env.observation_space) == list(declared) == list(env.action_space) == env.possible_agents
    assert env.observation_space == spaces.Dict(list(declared.items()))
    assert_same(env.reset(), reference.reset())
    rng = np.random.default_rng(0)
    for _ in range(6):
        actions = [{agent: draw(space, rng) for agent, space in declared.items()} for _ in range(4)]
        assert_same(env.step(actions), reference.step(actions))


REWARDS = {
    "int": 3,
    "negative zero": -0.0,
    "zero": 0,
    "false": False,
    "bool": True,
    "float": 0.1,
    "nan": float("nan"),
    "inf": float("-inf"),
    "beyond": 2**53 + 1,
    "negative beyond": -(2**53) - 1,
    "huge": 10**40,
    "int64": np.int64(2**62 + 1),
    "uint64": np.uint64(2**64 - 1),
    "int8": np.int8(-5),
    "float64": np.float64(0.1),
    "float64 zero": np.float64(-0.0),
    "float64 nan": np.float64("nan"),
    "float32": np.float32(0.1),
    "float16": np.float16(0.1),
    "bool_": np.bool_(True),
    "complex": 1 + 2j,
    "none": None,
    "vector": np.array([1.0, 2.0], np.float32),
    "scalar array": np.array(1.5),
    "list": [1, 2.0],
    "dict": {"speed": 1.0, "safety": np.float32(2)},
}


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_keep_type_and_value(name, two_worker_setup, build):
    """Declared agents, unknown agents, and a change of type between steps."""
    value = REWARDS[name]
    script = [answered(rewards={"a": value, "unknown": value}), answered(rewards={"a": 1.5}), answered()]
    env = build([scripted(SMALL, ({}, {}), *script)] * 2, two_worker_setup)
    env.reset()
    for step in (*script, *script):
        assert_same(env.step([{}, {}])[1], (step[1], step[1]))


FLAGS = [True, False, np.True_, np.False_, 1, 0, np.int64(1), np.float32(0.0), None]


@pytest.mark.parametrize("value", FLAGS, ids=repr)
def test_flags_keep_type_and_value(value, two_worker_setup, build):
    env = build([scripted(SMALL, ({}, {}), answered(flags={"a": value, "unknown": value}))] * 2, two_worker_setup)
    env.reset()
    _, _, terminateds, truncateds, _ = env.step([{}, {}])
    expected = {"a": value, "unknown": value, "__all__": False}
    assert_same((terminateds, truncateds), ((expected, expected), (expected, expected)))


@pytest.mark.parametrize("value", [False, np.False_, 0], ids=repr)
def test_all_of_the_environment_is_kept(value, two_worker_setup, build):
    env = build([scripted(SMALL, ({}, {}), answered(flags={"__all__": value}))] * 2, two_worker_setup)
    env.reset()
    assert_same(env.step([{}, {}])[2:4], (({"__all__": value},) * 2,) * 2)


DISCRETE = [3, -2, 0, True, 2**70, np.int64(3), np.int32(3), np.uint8(3), np.bool_(True), np.int64(2**60 + 1)]


@pytest.mark.parametrize("value", DISCRETE, ids=lambda value: f"{type(value).__name__}-{value}")
def test_discrete_values_keep_their_type(value, two_worker_setup, build):
    """As observations and as actions, whether they are members of the space or not."""
    space = spaces.Discrete(9, start=-2)
    nested = spaces.Dict(n=space, t=spaces.Tuple((space, space)))
    for one, returned in ((space, value), (nested, {"n": value, "t": (value, 1)})):
        env = build(
            [scripted(one, ({"a": returned}, {}), answered({"a": returned}), action_space=one)] * 2, two_worker_setup
        )
        assert_same(env.reset()[0], ({"a": returned},) * 2)
        assert_same(env.step([{"a": returned}, {}])[0], ({"a": returned},) * 2)
        assert_same(env.get_attr("actions"), ([{"a": returned}], [{}]))
        env.close()


ARRAYS = [
    (SMALL, np.array([0.1, np.nan, -0.0]), np.float32),
    (SMALL, np.array([1, 2, 3]), np.float32),
    (SMALL, np.arange(6, dtype=np.float32)[::2], np.float32),
    (SMALL, [1.0, 2, 3.5], np.float32),
    (spaces.Box(-9, 9, (2, 2), np.float64), np.array([[1, 2], [3, 4]], np.float32).T, np.float64),
    (spaces.Box(-9, 9, (2,), np.int8), np.array([1, 2], np.int64), np.int8),
    (spaces.Box(-9, 9, (2,), np.int64), np.array([True, False]), np.int64),
    (spaces.Box(0, 1, (), np.float32), np.array(0.1), np.float32),
    (spaces.MultiBinary(3), np.array([True, False, True]), np.int8),
    (spaces.MultiDiscrete([3, 4]), np.array([1, 2], np.int32), np.int64),
]


@pytest.mark.parametrize(("space", "value", "dtype"), ARRAYS, ids=lambda part: str(getattr(part, "dtype", part)))
def test_arrays_get_the_dtype_of_their_space(space, value, dtype, two_worker_setup, build):
    """Observations, actions and `final_obs`, also inside a Dict."""
    expected = np.array(value, dtype)
    for one, returned, due in (
        (space, value, expected),
        (spaces.Dict(x=space, y=spaces.Discrete(2)), {"x": value, "y": 1}, {"x": expected, "y": 1}),
    ):
        script = answered({"a": returned}, flags={"__all__": True})
        env = build([scripted(one, ({"a": returned}, {}), script, action_space=one)] * 2, two_worker_setup, SAME_STEP)
        assert_same(env.reset()[0], ({"a": due},) * 2)
        observations, _, _, _, infos = env.step([{"a": returned}, {"a": returned}])
        assert_same((observations, infos), (({"a": due},) * 2, ({"a": {"final_obs": due}},) * 2))
        assert_same(env.get_attr("actions"), ([{"a": due}],) * 2)
        env.close()


FORMS = [
    ({"x": [1, 2, 3.5]}, {"x": np.array([1, 2, 3.5], np.float32)}),
    ({"y": None}, {"y": None}),
    ({"n": None}, {"n": None}),
    ({"n": np.array(1)}, {"n": np.array(1)}),
    ({"more": [1]}, {"more": [1]}),
    ({"t": [1, 2]}, {"t": [1, 2]}),
    ({"t": (np.ones(3), None)}, {"t": (np.ones(3, np.float32), None)}),
    ({"t": [np.ones(3), 1]}, {"t": [np.ones(3, np.float32), 1]}),
    ({"t": [[1, 2, 3], np.array(1)]}, {"t": [np.array([1, 2, 3], np.float32), np.array(1)]}),
]


@pytest.mark.parametrize(("changed", "arrives"), FORMS, ids=[str(changed) for changed, _ in FORMS])
def test_arrays_next_to_values_of_another_form(changed, arrives, two_worker_setup, build):
    """One leaf of an undeclared form arrives unchanged; the arrays next to it get their dtype."""
    space = spaces.Dict(x=SMALL, y=SMALL, n=spaces.Discrete(3), t=spaces.Tuple((SMALL, spaces.Discrete(2))))
    zeros, ones = np.zeros(3), np.ones(3, np.float32)
    returned = {"x": zeros, "y": ones, "n": 1, "t": (zeros, 0), **changed}
    due = {"x": zeros.astype(np.float32), "y": ones, "n": 1, "t": (zeros.astype(np.float32), 0), **arrives}
    script = answered({"a": returned}, flags={"__all__": True})
    env = build([scripted(space, ({"a": returned}, {}), script, action_space=space)] * 2, two_worker_setup, SAME_STEP)
    assert_same(env.reset()[0], ({"a": due},) * 2)
    observations, _, _, _, infos = env.step([{"a": returned}, {"a": returned}])
    assert_same((observations, infos), (({"a": due},) * 2, ({"a": {"final_obs": due}},) * 2))
    assert_same(env.get_attr("actions"), ([{"a": due}],) * 2)


PARTS = {"zulu": spaces.Discrete(9), "alpha": SMALL, "mike": spaces.MultiBinary(2)}
VALUES = {"zulu": 7, "alpha": np.array([1, 2, 3], np.float32), "mike": np.array([0, 1], np.int8)}
ORDER = ["zulu", "alpha", "mike"]


def in_order(order: list[str]) -> tuple[Any, Any]:
    """A nested space that lists its keys in this order, and a value of it."""
    space = spaces.Dict([(key, PARTS[key]) for key in order])
    value = {key: VALUES[key] for key in order}
    deep = spaces.Tuple((spaces.Discrete(9), space))
    return spaces.Dict([("deep", deep), *space.items()]), {"deep": (4, value), **value}


def in_two_orders() -> list[Any]:
    """Constructors of four environments; the second worker's first one lists its keys in another order."""
    both = [in_order(order) for order in (ORDER, ORDER[::-1], ORDER[::-1], ORDER)]
    ends = {"__all__": True}
    return [scripted(s, ({"a": v}, {}), answered({"a": v}, flags=ends), action_space=s) for s, v in both]


def test_order_of_space_keys_does_not_matter(two_worker_setup, build):
    """The spaces count as equal, and observations, actions and `final_obs` arrive unchanged."""
    env = build(in_two_orders(), two_worker_setup, SAME_STEP)
    _, value = in_order(ORDER)
    assert_same(env.reset()[0], ({"a": value},) * 4)
    observations, _, _, _, infos = env.step([{"a": value}] * 4)
    assert_same((observations, infos), (({"a": value},) * 4, ({"a": {"final_obs": value}},) * 4))
    assert_same(env.get_attr("actions"), ([{"a": value}],) * 4)


def test_values_have_the_declared_key_order(backend_setup, build):
    """The order of environment 0, for all environments."""
    env = build(in_two_orders(), backend_setup, SAME_STEP)
    _, value = in_order(ORDER)
    observations, _ = env.reset()
    once_more, _, _, _, infos = env.step([{"a": value}] * 4)
    for one in (*observations, *once_more, *[info["a"]["final_obs"] for info in infos]):
        returned = one.get("a", one)
        assert [*returned] == ["deep", *ORDER]
        assert [*returned["deep"][1]] == ORDER


class Ragged(spaces.Box):
    """Arrays of any length."""


class Loose(spaces.Dict):
    """Accepts more keys than it declares."""


class Chain(spaces.Tuple):
    """Tuples of any length."""


class Dice(spaces.Discrete):
    """Its values are words."""


class Choices(spaces.MultiDiscrete):
    """Any number of entries."""


class Switches(spaces.MultiBinary):
    """Its values are lists."""


DERIVED = [
    (Ragged(-1.0, 1.0, (3,), np.float32), np.arange(5.0)),
    (Loose(x=SMALL), {"x": np.zeros(2), "more": [1]}),
    (Chain((SMALL, spaces.Discrete(2))), (np.zeros(1), 1, "more")),
    (Dice(6), "six"),
    (Choices([2, 2]), np.array([[1.5]])),
    (Switches(3), [True, False]),
]


@pytest.mark.parametrize(("space", "value"), DERIVED, ids=lambda part: type(part).__name__)
def test_values_of_derived_spaces_arrive_unchanged(space, value, two_worker_setup, build):
    """Whatever the base class would accept; also inside a Dict."""
    returned, due = {"own": value, "x": [1, 2, 3]}, {"own": value, "x": np.array([1, 2, 3], np.float32)}
    for one, received, arrives in ((space, value, value), (spaces.Dict(own=space, x=SMALL), returned, due)):
        script = answered({"a": received}, flags={"__all__": True})
        env = build([scripted(one, ({"a": received}, {}), script, action_space=one)] * 2, two_worker_setup, SAME_STEP)
        assert_same(env.reset()[0], ({"a": arrives},) * 2)
        observations, _, _, _, infos = env.step([{"a": received}, {"a": received}])
        assert_same((observations, infos), (({"a": arrives},) * 2, ({"a": {"final_obs": arrives}},) * 2))
        assert_same(env.get_attr("actions"), ([{"a": arrives}],) * 2)
        env.close()


@pytest.mark.parametrize(
    "value", [np.zeros(4), np.zeros((1, 3)), np.zeros((3, 1)), np.zeros(1), np.float32(1)], ids=str
)
@pytest.mark.parametrize("where", ["reset", "step"])
def test_wrong_shape_is_an_error(where, value, two_worker_setup, build):
    """Never broadcast or truncated: the error names the agent, the expected and the actual shape."""
    good = np.zeros(3, np.float32)
    first = value if where == "reset" else good
    fine = scripted(SMALL, ({"a": good}, {}), answered({"a": good}))
    env = build([fine, scripted(SMALL, ({"a": first}, {}), answered({"a": value}))], two_worker_setup)
    with pytest.raises(EnvError) as caught:  # noqa: PT012
        env.reset()
        env.step([{}, {}])
    assert caught.value.env_ids == (1,)
    assert caught.value.method == where
    for part in ("'a'", "(3,)", str(np.shape(value))):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [np.array([3]), [3], (3,)], ids=repr)
def test_axes_of_a_number_are_an_error(value, two_worker_setup, build):
    """As Gymnasium's `Discrete` does not contain them; also where the infos of the step travel pickled."""
    space, infos = spaces.Discrete(9), {"a": {"why": object}}
    script = [answered({"a": 3}, infos=infos), answered({"a": value}, infos=infos)]
    env = build(
        [scripted(space, ({"a": np.array(3)}, {}), answered({"a": 3})), scripted(space, ({"a": 3}, {}), *script)],
        two_worker_setup,
    )
    env.reset()
    env.step([{}, {}])
    with pytest.raises(EnvError, match=r"the observation of agent 'a': expected an integer, or .*shape \(\)") as caught:
        env.step([{}, {}])
    assert (caught.value.env_ids, caught.value.method) == ((1,), "step")


def test_wrong_shape_inside_a_dict_is_an_error(two_worker_setup, build):
    space = spaces.Dict(eyes=spaces.Tuple((spaces.Discrete(2), SMALL)))
    returned = {"eyes": (1, np.zeros(2, np.float32))}
    env = build([scripted(space, ({"a": returned}, {}), answered())] * 2, two_worker_setup)
    with pytest.raises(EnvError, match=r"'a'"):
        env.reset()


@pytest.mark.parametrize("space", [spaces.Box(0, 255, (2,), np.uint8), spaces.MultiDiscrete([3, 3])], ids=str)
def test_floats_are_not_cast_to_integers(space, two_worker_setup, build):
    env = build([scripted(space, ({"a": np.array([1.5, 2.0])}, {}), answered())] * 2, two_worker_setup)
    with pytest.raises(EnvError, match=r"'a'"):
        env.reset()


def test_undeclared_agents(two_worker_setup, build):
    """Their values travel unchanged: no cast, any id, any value."""
    returned = {("team", 3): np.array([1, 2]), 7: "seven", "b": {"deep": [np.float32(1.0), None]}}
    script = answered(
        returned, dict.fromkeys(returned, 1), dict.fromkeys(returned, False), {key: {"n": 1} for key in returned}
    )
    env = build([scripted(SMALL, (returned, {}), script)] * 2, two_worker_setup)
    assert_same(env.reset()[0], (returned, returned))
    expected = (*script[:2], *({**flags, "__all__": False} for flags in script[2:4]), script[4])
    assert_same(env.step([returned, {}]), tuple((part, part) for part in expected))
    assert_same(env.get_attr("actions"), ([returned], [{}]))


def test_no_agent_declares_a_space(two_worker_setup, build):
    script = answered({"x": [1, 2]}, {"x": 1.0}, {"x": False}, {})
    env = build([functools.partial(Scripted, None, None, ({"x": "start"}, {}), [script])] * 2, two_worker_setup)
    assert env.observation_space is None
    assert env.action_space is None
    assert env.possible_agents == []
    assert_same(env.reset()[0], ({"x": "start"},) * 2)
    assert_same(env.step([{"x": "go"}, {}])[0], ({"x": [1, 2]},) * 2)
    assert_same(env.get_attr("actions"), ([{"x": "go"}], [{}]))
    with pytest.raises(NoSpaceDeclared, match=r"no action spaces to draw random .*Declare it as the .*`action_space`"):
        env.sample_actions()


class Unlisted:
    """Two agents that are known beforehand; the first one declares the spaces that are passed."""

    possible_agents = ("a", "b")

    def __init__(self, **declared: Any) -> None:
        for name, space in declared.items():
            setattr(self, name, spaces.Dict({"a": space}))

    def reset(self) -> tuple[dict, dict]:
        return {"a": SMALL.sample(), "b": "text"}, {}

    def step(self, actions: dict) -> tuple[dict, ...]:
        return {}, {}, {"__all__": False}, {"__all__": False}, {}


BOTH = {"observation_space": SMALL, "action_space": spaces.Discrete(3)}


@pytest.mark.parametrize("declared", [{}, *({name: BOTH[name]} for name in BOTH), BOTH], ids=lambda one: "+".join(one))
def test_what_needs_a_space_says_so(declared, parallel):
    env = parallel(functools.partial(Unlisted, **declared), 2)
    for name in BOTH:
        space = getattr(env, name)
        assert space is None if name not in declared else [*space] == ["a"]
    env.reset()
    with pytest.raises(NoSpaceDeclared, match="no action space"):
        env.sample_actions()
    for facade in (StackedVecEnv, PettingZooVecEnv, GymnasiumVectorEnv):
        with pytest.raises(NoSpaceDeclared, match=rf"{facade.__name__} needs .*Declare it as the environment's"):
            facade(env)
    assert [*env.reset()[0][1]] == ["a", "b"]  # nothing is closed


INFOS: list[dict[Any, Any]] = [
    {},
    {"a": {}},
    {"a": {}, "unknown": {}},
    {"a": {"x": np.arange(3), "y": [1, (2, None)]}},
    {"__common__": {"clock": 3}, "a": {}},
    {"clock": 3.5, "a": {}},
    {"a": None},
    {"a": np.arange(3)},
    {"a": np.zeros(0), "clock": np.zeros(2)},
    {"a": OrderedDict()},
    {"a": {"nan": float("nan")}, 3: {"deep": {"deeper": {}}}},
]


@pytest.mark.parametrize("infos", INFOS, ids=str)
def test_infos_of_every_kind(infos, two_worker_setup, build):
    """Keys that are not agents, empty entries and absent entries stay as they are, also after other infos."""
    script = [answered(infos=infos), answered(infos={"a": {}}), answered(infos={})]
    env = build([scripted(SMALL, ({}, infos), *script)] * 2, two_worker_setup)
    assert_same(env.reset()[1], (infos, infos))
    for step in (*script, *script):
        assert_same(env.step([{}, {}])[4], (step[4], step[4]))


@pytest.mark.parametrize("info", [False, {}], ids=str)
def test_infos_with_the_key_all(info, two_worker_setup, build):
    """Also as the first key, and if only one kind of flags has it."""
    eyes, infos = np.ones(3, np.float32), {"__all__": info, "a": {}}
    step = ({"a": eyes}, {"a": 1.0}, {"a": False, "__all__": False}, {"a": False}, infos)
    env = build([scripted(SMALL, ({"a": eyes}, {"a": {}}), step)] * 2, two_worker_setup)
    env.reset()
    expected = (*step[:3], {"a": False, "__all__": False}, infos)
    assert_same(env.step([{}, {}]), tuple((part, part) for part in expected))


def test_each_dict_keeps_its_own_keys(two_worker_setup, build):
    """Agents may be in some of the five dicts only."""
    eyes = np.ones(3, np.float32)
    script = [
        ({"a": eyes}, {}, {}, {}, {}),
        ({}, {"a": 1.0}, {}, {}, {}),
        ({}, {}, {"a": True}, {}, {}),
        ({}, {}, {}, {"a": np.True_}, {}),
        ({}, {}, {}, {}, {"a": {}}),
        ({"a": eyes}, {"a": 2}, {"a": False}, {"a": False}, {"a": {}}),
    ]
    env = build([scripted(SMALL, ({}, {}), *script)] * 2, two_worker_setup, False)
    assert_same(env.reset(), (({}, {}), ({}, {})))
    for step in script:
        observations, rewards, terminateds, truncateds, infos = step
        expected = (
            observations,
            rewards,
            {**terminateds, "__all__": False},
            {**truncateds, "__all__": False},
            infos,
        )
        assert_same(env.step([{}, {}]), tuple((part, part) for part in expected))


def test_observation_none(two_worker_setup, build):
    """Of a declared agent."""
    env = build([scripted(SMALL, ({"a": None}, {}), answered({"a": None}))] * 2, two_worker_setup)
    assert_same(env.reset()[0], ({"a": None},) * 2)
    assert_same(env.step([{}, {}])[0], ({"a": None},) * 2)


NESTED = spaces.Dict(
    action_mask=spaces.MultiBinary(3),
    kind=spaces.Discrete(4, start=6),
    place=spaces.Tuple((spaces.Discrete(2, start=1),)),
)


@pytest.mark.parametrize("space", [*ELSEWHERE.values(), NESTED], ids=str)
def test_choices_that_count_from_0_and_back(space):
    zero = from_zero(space)
    assert from_zero(zero) is zero
    space.seed(1)
    for _ in range(5):
        value = space.sample()
        moved = to_zero(space, value)
        assert zero.contains(moved)
        back = to_start(space, moved)
        assert space.contains(back)
        assert str(back) == str(value)
