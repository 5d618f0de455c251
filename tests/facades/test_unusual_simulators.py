"""Facades over unusual simulators: arrays equal the core's dicts."""

from __future__ import annotations

import contextlib
import enum
import os
import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same
from simulators.dict_rules import DictRules

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.core.block import codec
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv

TRAVELS = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
NOBODY = {"a": np.zeros(2, np.int64), "b": np.zeros(2, np.int64)}


@pytest.fixture
def by_agent():
    """Two environments in arrays by agent."""
    envs = []

    def make(mode: Any = True, shared_memory: bool = True, **how: Any) -> PettingZooVecEnv:
        parallel = ParallelEnv([lambda: DictRules(**how)] * 2, mode, backend="serial", shared_memory=shared_memory)
        envs.append(PettingZooVecEnv(parallel))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


@pytest.fixture
def in_rows():
    """Two environments in rows."""
    envs = []

    def make(mode: Any = "NEXT_STEP", agents: Any = None, others: Any = None, **how: Any) -> GymnasiumVectorEnv:
        parallel = ParallelEnv([lambda: DictRules(**how)] * 2, mode, backend="serial")
        envs.append(GymnasiumVectorEnv(parallel, agents, others))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


# Partial resets


class Level(enum.IntEnum):
    LOW, MIDDLE, HIGH = 2, 3, 4


@TRAVELS
@pytest.mark.parametrize(
    ("seen", "look"),
    [
        (spaces.Discrete(9), lambda time: np.array(time + 2)),
        (spaces.Discrete(9), lambda time: Level(time + 2)),
        (spaces.Discrete(9), lambda time: time + 2),
        (spaces.Dict({"x": spaces.Discrete(9), "y": spaces.Box(0, 9, ())}), lambda t: {"x": np.array(t), "y": t + 0.5}),
        (spaces.Text(3), lambda time: "abc"[: time + 1]),
    ],
    ids=["0-d", "enum", "int", "nested", "text"],
)
def test_partial_reset_changes_only_reset_environments(seen, look, shared_memory, by_agent):
    env = by_agent(False, shared_memory, seen=seen, look=look)
    env.reset()
    env.step(NOBODY)
    observations, *_ = env.step(NOBODY)
    before, _ = env.reset(env_ids=[0])
    assert str(_at(before["b"], 1)) == str(_at(observations["b"], 1))
    assert str(_at(before["b"], 0)) != str(_at(observations["b"], 0))


def _at(value: Any, row: int) -> Any:
    return {key: child[row] for key, child in value.items()} if isinstance(value, dict) else value[row]


def test_partial_reset_after_a_restart():
    class Dying(DictRules):
        def __init__(self, env_id: int, restarts: int) -> None:
            base = 1000 * env_id + 100 * restarts
            super().__init__(look=lambda time: np.full(1, base + time, np.float32))
            self.dies = env_id == 1 and not restarts

        def step(self, actions: dict) -> tuple[dict, ...]:
            if self.dies and self.time == 2:
                os._exit(1)
            return super().step(actions)

    with PettingZooVecEnv(ParallelEnv([Dying] * 2, num_workers=1, on_error="restart")) as env:
        env.reset()
        for _ in range(3):
            observations, *_ = env.step(NOBODY)
        assert observations["a"].ravel().tolist() == [3, 1100]
        observations, _ = env.reset(env_ids=[1])
        assert observations["a"].ravel().tolist() == [3, 1100]


# Ends


def test_episode_end_applies_to_all_agents(by_agent):
    for mode in ("SAME_STEP", "NEXT_STEP", "DISABLED"):
        env = by_agent(mode, length=2)
        env.reset()
        assert not env.step(NOBODY)[2]["a"].any()
        _, _, terminations, truncations, _ = env.step(NOBODY)
        assert terminations["a"].all()
        assert terminations["b"].all()
        assert not truncations["a"].any()
        assert env.agents == (["a", "b"] if mode == "SAME_STEP" else [])


def test_pettingzoo_loop_ends_with_the_episode():
    with ParallelEnv([lambda: DictRules(length=3)], False, backend="serial") as parallel:
        env, steps = PettingZooVecEnv(parallel).single(), 0
        env.reset()
        while env.agents:
            *_, terminations, truncations, _ = env.step(dict.fromkeys(env.agents, 0))
            steps += 1
        assert steps == 3
        assert terminations == {"a": True, "b": True}
        assert truncations == {"a": False, "b": False}


@TRAVELS
def test_pending_reset_needs_no_actions(shared_memory, by_agent, in_rows):
    env = by_agent("NEXT_STEP", shared_memory, length=1)
    env.reset()
    env.step(NOBODY)
    assert not env.acting["a"].any()
    observations, _, terminations, *_ = env.step({})
    assert observations["a"].ravel().tolist() == [0, 0]
    assert not terminations["a"].any()
    rows = in_rows(length=1)
    rows.reset()
    assert not rows.step(np.zeros(4, np.int64))[4]["acting"].any()
    assert rows.step(np.zeros(4, np.int64))[4]["acting"].all()


# Actions


@TRAVELS
@pytest.mark.parametrize("actions", [np.array([0, 1, 2]), np.array([0]), np.array([0.5, 1.5]), 1, None], ids=repr)
def test_actions_are_checked_with_and_without_shared_memory(actions, shared_memory, by_agent):
    env = by_agent(True, shared_memory)
    env.reset()
    with pytest.raises(ValueError, match="the actions of agent 'a': expected"):
        env.step({"a": actions, "b": np.zeros(2, np.int64)})
    assert env.get_attr("time") == (0, 0)


@pytest.mark.parametrize("actions", ["xy", ["x", "y", "z"], 3])
def test_number_of_actions_without_a_fixed_form(actions, by_agent):
    env = by_agent(acts=spaces.Text(3))
    env.reset()
    env.step({"a": ["x", "y"], "b": ("x", "y")})
    with pytest.raises(ValueError, match="the actions of agent 'a': expected a sequence of 2 values, got"):
        env.step({"a": actions, "b": ["x", "y"]})
    assert env.get_attr("time") == (1, 1)


@TRAVELS
def test_missing_part_of_an_action(shared_memory, by_agent):
    acts = spaces.Dict({"go": spaces.Discrete(3), "look": spaces.Tuple([spaces.Box(-1, 1, (2,))])})
    env = by_agent(True, shared_memory, acts=acts)
    env.reset()
    whole = {"go": np.array([1, 2]), "look": (np.zeros((2, 2)),)}
    env.step({"a": whole, "b": whole})
    assert env.get_attr("actions")[1]["a"]["go"] == 2
    with pytest.raises(ValueError, match=r"agent 'b': expected a dict with the keys \['go', 'look'\]"):
        env.step({"a": whole, "b": {"go": np.array([1, 2])}})
    with pytest.raises(ValueError, match="agent 'b': expected a tuple of 1"):
        env.step({"a": whole, "b": {**whole, "look": np.zeros((2, 2))}})


def test_ignored_actions(by_agent):
    env = by_agent(False, acts=spaces.Box(0, 9, (), np.uint8), flags=lambda time: {"a": time == 1})
    env.reset()
    go = np.ones(2, np.uint8)
    env.step({"a": go, "b": go})
    env.reset(env_ids=[1])
    env.step({"a": np.array([-1, 3]), "b": go})  # copy 0's is dead
    assert [sorted(received) for received in env.get_attr("actions")] == [["b"], ["a", "b"]]


@pytest.mark.parametrize(
    ("acts", "nearest"),
    [
        (spaces.Discrete(5, start=-2), 0),
        (spaces.Discrete(3, start=4), 4),
        (spaces.Discrete(3, start=-9), -7),
        (spaces.MultiDiscrete([3, 3], start=[-1, 5]), [0, 5]),
        (spaces.Box(2, 3, (1,)), [2]),
    ],
)
def test_default_actions_are_nearest_to_zero(acts, nearest, in_rows):
    env = in_rows(agents=["a"], acts=acts)
    env.reset()
    env.step(env.action_space.sample())
    assert np.array_equal(env.get_attr("actions")[0]["b"], nearest)


def test_default_actions_from_batched_spaces(in_rows):
    env = in_rows(agents=["a"], others=lambda agent, seen: (1, 2))
    env.reset()
    env.step(np.zeros(2, np.int64))
    assert [received["b"] for received in env.get_attr("actions")] == [1, 2]
    env = in_rows(agents=["a"], others=lambda agent, seen: 1)
    env.reset()
    with pytest.raises(TypeError, match="others, for agent 'b': expected actions for 2 rows"):
        env.step(np.zeros(2, np.int64))
    assert env.get_attr("time") == (0, 0)


# Infos


def test_infos_that_are_not_dicts(by_agent, in_rows):
    how = {"infos": lambda time: {"clock": time, "a": None, "b": {"x": 1}}}
    env = by_agent(**how)
    env.reset()
    infos = env.step(NOBODY)[4]
    assert infos["clock"].tolist() == [1, 1]
    assert infos["_clock"].tolist() == [True, True]
    assert infos["a"] == {}
    assert infos["b"]["x"].tolist() == [1, 1]
    rows = in_rows(**how)
    rows.reset()
    infos = rows.step(np.zeros(4, np.int64))[4]
    assert infos["clock"].tolist() == [1, 1, 1, 1]
    assert infos["_x"].tolist() == [False, True, False, True]


def test_agent_infos_that_are_not_dicts(by_agent, in_rows):
    how = {"infos": lambda time: {"b": 3}}
    for env, actions in (by_agent(**how), NOBODY), (in_rows(**how), np.zeros(4, np.int64)):
        env.reset()
        with pytest.raises(ValueError, match="environment 0: the infos of agent 'b' must be a dict, got 3"):
            env.step(actions)


def test_agent_infos_override_environment_infos(in_rows):
    env = in_rows(infos=lambda _: {"a": {"x": 1}, "x": 3})
    env.reset()
    assert env.step(np.zeros(4, np.int64))[4]["x"].tolist() == [1, 3, 1, 3]


def test_reset_infos_are_at_the_top_level(in_rows):
    results = {"a": {"b": 1}, "common": {"level": 1}}
    env = in_rows("SAME_STEP", length=1, infos=lambda _: results, first={"a": {"b": 7}, "common": {"level": 8}})
    env.reset()
    infos = env.step(np.zeros(4, np.int64))[4]
    assert infos["b"].tolist() == [7, 0, 7, 0]
    assert infos["common"]["level"].tolist() == [8, 8, 8, 8]
    assert infos["final_info"]["b"].tolist() == [1, 0, 1, 0]


# Values


@TRAVELS
@pytest.mark.parametrize("wrong", [1.7, "2", None])
def test_non_numbers_are_not_converted(wrong, shared_memory, by_agent):
    env = by_agent(True, shared_memory, seen=spaces.Discrete(9), look=lambda time: wrong)
    with pytest.raises(ValueError, match="environment 0: the observation of agent 'a': expected"):
        env.reset()


class Mission(spaces.Space):
    """Texts in a class of their own, like MiniGrid's."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "go there"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mission)

    __hash__ = None  # type: ignore[assignment]


class DerivedText(spaces.Text):
    """Derived from a space of texts."""


def scene(mission: spaces.Space) -> spaces.Dict:
    eyes = spaces.Tuple((spaces.Discrete(9), spaces.Box(0, 1, (2,), np.float32)))
    return spaces.Dict(eyes=eyes, mission=mission, way=spaces.Discrete(4))


def look_around(time: int) -> dict:
    """A list for a tuple, a text, a number in an array, and numbers outside their Box."""
    return {"eyes": [np.array(time), np.full(2, 1.25)], "mission": f"go {time}", "way": np.array(time % 4)}


@TRAVELS
@pytest.mark.parametrize("mission", [Mission(), DerivedText(9), spaces.Text(9)], ids=lambda space: type(space).__name__)
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_lists_texts_and_single_numbers_are_equal_in_dicts_and_arrays(mode, mission, shared_memory):
    def make() -> ParallelEnv:
        constructors = [lambda: DictRules(seen=scene(mission), look=look_around, length=3)] * 2
        return ParallelEnv(constructors, mode, backend="serial", shared_memory=shared_memory)

    with (
        make() as plain,
        PettingZooVecEnv(make()) as by_agent,
        contextlib.closing(GymnasiumVectorEnv(make())) as in_rows,
    ):
        results, stacked, rows = plain.reset()[0], by_agent.reset()[0], in_rows.reset()[0]
        for _ in range(8):
            assert results[0]["a"]["eyes"][1].dtype == np.float32
            assert isinstance(results[0]["a"]["eyes"], list)
            for env_id, of_env in enumerate(results):
                for place, (agent, seen) in enumerate(of_env.items()):
                    for one, row in ((stacked[agent], env_id), (rows, 2 * env_id + place)):
                        assert one["mission"][row] == seen["mission"]
                        assert one["way"][row] == seen["way"]
                        assert one["eyes"][0][row] == seen["eyes"][0]
                        assert one["eyes"][1][row].tolist() == seen["eyes"][1].tolist() == [1.25, 1.25]
            results = plain.step([{"a": 0, "b": 0}] * 2)[0]
            stacked, rows = by_agent.step(NOBODY)[0], in_rows.step(np.zeros(4, np.int64))[0]


@TRAVELS
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"eyes": [1, np.zeros(2)], "mission": 3, "way": "north"}, r"at \['way'\]: expected an array of shape \(\)"),
        ({"eyes": [1, 2, 3], "mission": "", "way": 1}, r"at \['eyes'\]: expected a tuple of 2, as its space declares"),
        ({"eyes": (1, 2), "mission": "", "way": 1}, r"'a'.* expected an array of shape \(2,\)"),
        ({"eyes": [1, np.zeros(3)], "mission": "", "way": 1}, r"at \['eyes'\]\[1\]: expected an array of shape \(2,\)"),
        ({"eyes": [1, np.zeros(2)]}, r"'a': expected a dict with the keys \['eyes', 'mission', 'way'\]"),
    ],
    ids=["text", "too long", "tuple", "shape", "keys"],
)
def test_error_names_the_agent_and_the_key(wrong, words, shared_memory, by_agent):
    env = by_agent(True, shared_memory, seen=scene(Mission()), look=lambda time: wrong)
    with pytest.raises((ValueError, EnvError), match=r"environment 0.*the observation of agent 'a'.*") as caught:
        env.reset()
    assert re.search(words, str(caught.value))


@TRAVELS
def test_lists_in_place_of_tuples_in_actions(shared_memory, by_agent, in_rows):
    acts = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)))
    env = by_agent(True, shared_memory, acts=acts)
    env.reset()
    for kind in (list, tuple):
        both = kind([np.array([1, 2]), np.zeros((2, 2))])
        env.step({"a": both, "b": both})
        number, aim = env.get_attr("actions")[1]["a"]
        assert (number, aim.dtype) == (2, np.float32)
    rows = in_rows(acts=acts)
    rows.reset()
    rows.step([np.array([0, 1, 2, 0]), np.zeros((4, 2))])
    assert [received["a"][0] for received in rows.get_attr("actions")] == [0, 2]
    with ParallelEnv([lambda: DictRules(acts=acts)], backend="serial", shared_memory=shared_memory) as plain:
        plain.reset()
        plain.step([{"a": [1, [0.5, 0.5]], "b": (1, [0.5, 0.5])}])
        ((listed, declared),) = ((received["a"], received["b"]) for received in plain.get_attr("actions"))
        assert isinstance(listed, list)
        assert listed[1].dtype == declared[1].dtype == np.float32


DIE, DIAL, SWITCH = spaces.Discrete(9), spaces.MultiDiscrete([9]), spaces.MultiBinary(1)
BAR, LEVEL = spaces.Box(-9, 9, (1,), np.int32), spaces.Box(-9, 9, (), np.float32)
PICKLED_INFOS: dict[str, Any] = {"a": {"level": Level.LOW}}
READERS = pytest.mark.parametrize(
    ("shared_memory", "codec_class"),
    [(True, codec.Codec), (True, None), (False, codec.Codec)],
    ids=["compiled", "pure", "pickled"],
)


def alone(space: spaces.Space, value: Any) -> tuple[spaces.Space, Any]:
    return space, value


def in_tree(space: spaces.Space, value: Any) -> tuple[spaces.Space, Any]:
    """A space with this part, and a value of it."""
    half = np.array(0.5, np.float32)
    return spaces.Dict(part=spaces.Tuple((space, LEVEL)), more=DIE), {"part": (value, half), "more": 1}


@READERS
@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        *((DIE, value) for value in (np.array([3]), [3], (3,), np.array([[3]]), np.zeros(0, int), np.array([True]))),
        *((DIE, value) for value in (np.array([3], np.uint8), np.array([3.0]), np.array([3], ">i8"), np.arange(3))),
        *((DIAL, value) for value in (3, np.int64(3), np.array(3), [[3]], np.array([[3]]), True)),
        *((SWITCH, value) for value in (1, True, np.array(1), np.ones((1, 1), np.int8), [[True]])),
        *((BAR, value) for value in (3, np.array(3), np.array([[3]]), [[3]])),
        *((LEVEL, value) for value in (np.ones(1, np.float32), [0.5], (0.5,), np.ones((1, 1)))),
    ],
    ids=repr,
)
def test_axes_too_many_or_too_few_are_refused(space, wrong, shared_memory, codec_class, monkeypatch):
    """By the worker, in dicts and in arrays, however the value and its neighbours travel."""
    monkeypatch.setattr(codec, "Codec", codec_class)
    fine = np.zeros(space.shape, space.dtype)
    expected = f"observation of agent 'a': expected an.*shape {re.escape(str(space.shape))}"
    for where, infos in ((alone, {}), (in_tree, PICKLED_INFOS)):
        looks = {0: where(space, fine)[1], 1: where(space, wrong)[1]}
        how = {"seen": where(space, fine)[0], "look": looks.get, "infos": lambda time, infos=infos: infos}
        made = [lambda how=how: DictRules(**how)] * 2
        for facade, actions in ((None, [{"a": 0, "b": 0}] * 2), (PettingZooVecEnv, NOBODY)):
            plain = ParallelEnv(made, backend="serial", shared_memory=shared_memory, seed=None)
            with contextlib.closing(facade(plain) if facade else plain) as env:
                env.reset()
                with pytest.raises(EnvError, match=f"in step: .*{expected}"):
                    env.step(actions)


@READERS
@pytest.mark.parametrize(
    ("space", "right"),
    [
        *((DIE, value) for value in (3, True, np.array(3), np.array(3, np.uint8), np.array(3, ">i8"), np.bool_(True))),
        *((DIAL, value) for value in ([3], (3,), np.array([3], np.int8), np.array([True]))),
        *((SWITCH, value) for value in ([1], (True,), np.ones(1, bool))),
        *((BAR, value) for value in ([3], (3,), np.array([3], ">i8"))),
        *((LEVEL, value) for value in (3, 0.5, True, np.float64(0.5), np.array(0.5))),
    ],
    ids=repr,
)
def test_the_axes_of_the_space_are_equal_in_dicts_and_arrays(space, right, shared_memory, codec_class, monkeypatch):
    """Numbers of a `Discrete` keep their types in dicts; arrays have the dtype of the space."""
    monkeypatch.setattr(codec, "Codec", codec_class)
    expected = np.asarray(right).astype(space.dtype)
    for where, infos in ((alone, {}), (in_tree, PICKLED_INFOS)):
        declared, value = where(space, right)
        due = where(space, right if space is DIE else expected)[1]
        how = {"seen": declared, "look": lambda time, value=value: value, "infos": lambda time, infos=infos: infos}
        made = [lambda how=how: DictRules(**how)] * 2
        plain, other = (ParallelEnv(made, backend="serial", shared_memory=shared_memory, seed=None) for _ in range(2))
        with plain, contextlib.closing(PettingZooVecEnv(other)) as by_agent:
            plain.reset()
            by_agent.reset()
            dicts, arrays = plain.step([{"a": 0, "b": 0}] * 2)[0], by_agent.step(NOBODY)[0]
            assert_same(dicts, ({"a": due, "b": due},) * 2)
            stacked = arrays["a"] if where is alone else arrays["a"]["part"][0]
            assert_same(stacked, np.stack([expected, expected]))


class DerivedBox(spaces.Box):
    """A user-defined space class."""


def test_derived_spaces_are_arrays(in_rows):
    env = in_rows(seen=DerivedBox(-9, 9, (1,)))
    observations, _ = env.reset()
    assert observations in env.observation_space


@TRAVELS
def test_all_environments_are_read_before_an_error(shared_memory):
    """They have been stepped: the acting agents of later environments are known, too."""

    class NoRewards(DictRules):
        def __init__(self, env_id: int) -> None:
            super().__init__(flags=lambda time: {"b": True})
            self.pays = env_id != 0

        def step(self, actions: dict) -> tuple[dict, ...]:
            observations, rewards, *rest = super().step(actions)
            return observations, rewards if self.pays or self.time > 1 else {"a": None}, *rest

    with PettingZooVecEnv(ParallelEnv([NoRewards] * 2, False, backend="serial", shared_memory=shared_memory)) as env:
        env.reset()
        with pytest.raises(ValueError, match="environment 0: the reward of agent 'a' is None"):
            env.step(NOBODY)
        assert env.env.acting == (["a"], ["a"])
        assert env.step({"a": np.ones(2, np.int64)})[1]["a"].tolist() == [1, 1]
        assert env.acting["b"].tolist() == [False, False]
