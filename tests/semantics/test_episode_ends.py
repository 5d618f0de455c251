"""The last step of an episode: the saved copy, and its transfer with every combination of agents in the dicts."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same, spoil

from marl_parallel.adapters.protocol import Schema
from marl_parallel.core.codec import open_codec
from marl_parallel.core.columns import Layout
from marl_parallel.core.episode import dicts_of, is_over
from marl_parallel.core.records import TransitionRecords
from marl_parallel.core.transition import Transition, copied_dicts

AGENTS = ["a", "b", "c"]
BOX = spaces.Box(-9, 9, (2,), np.float32)


def seen(number: float) -> np.ndarray:
    return np.array([number, -number], np.float32)


def last_step(**changed: Any) -> list[dict[Any, Any]]:
    """The five dicts of a step that truncates the episode."""
    parts = {
        "observations": {agent: seen(place) for place, agent in enumerate(AGENTS)},
        "rewards": {agent: place / 4 for place, agent in enumerate(AGENTS)},
        "terminateds": {**dict.fromkeys(AGENTS, False), "__all__": False},
        "truncateds": {**dict.fromkeys(AGENTS, True), "__all__": True},
        "infos": {agent: {} for agent in AGENTS},
    }
    return [*{**parts, **changed}.values()]


# The saved copy


class Uncopiable:
    def __deepcopy__(self, memo: dict) -> Any:
        raise RuntimeError("there is only one of me")

    def __reduce__(self) -> Any:
        raise RuntimeError("and I do not travel")


@pytest.mark.parametrize(
    "value",
    [
        1, 1.5, True, None, "word", b"bytes", 1j, np.float32(2), np.uint8(3), np.False_, seen(1), np.array(4),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)), {}, {"x": seen(2)}, {"x": {"y": [1]}}, [1, [2]], (seen(3), {}),
        np.ma.array([1.0, 2.0], mask=[True, False]),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("part", range(5))
def test_saved_copy_is_independent(value, part):
    dicts = last_step()
    dicts[part] = {"a": copy.deepcopy(value), "b": copy.deepcopy(value)}
    expected = copy.deepcopy(dicts)
    ours = copied_dicts(tuple(dicts))
    assert_same([*ours], expected)
    spoil(dicts)
    assert_same([*ours], expected)


def test_objects_in_arrays_are_copied():
    array = np.array([{"x": 1}, None])
    observations, *_ = copied_dicts(tuple(last_step(observations={"a": array})))
    array[0]["x"] = 2
    assert observations["a"][0] == {"x": 1}


@pytest.mark.parametrize("value", [seen(1), {}, {"x": 1}, [1]], ids=repr)
def test_shared_objects_stay_shared(value):
    """Between agents and between dicts."""
    dicts = last_step(observations=dict.fromkeys(AGENTS, value), infos=dict.fromkeys(AGENTS, value))
    observations, *_, infos = copied_dicts(tuple(dicts))
    assert observations["a"] is not value
    assert {id(one) for one in [*observations.values(), *infos.values()]} == {id(observations["a"])}


def test_array_shared_by_observation_and_info_stays_shared():
    view = seen(1)
    observations, *_, infos = copied_dicts(tuple(last_step(observations={"a": view}, infos={"a": {"view": view}})))
    assert infos["a"]["view"] is observations["a"] is not view


@pytest.mark.parametrize("info", [{}, {"x": 1}, 1], ids=repr)
def test_type_of_infos_is_preserved(info):
    *_, infos = copied_dicts(tuple(last_step(infos=defaultdict(list, a=info))))
    assert_same(infos, defaultdict(list, a=info))
    assert infos.default_factory is list


def test_uncopiable_infos_are_passed_on():
    dicts = tuple(last_step(infos={"a": Uncopiable()}))
    *others, infos = copied_dicts(dicts)
    assert infos is dicts[4]
    for own, original in zip(others, dicts[:4], strict=True):
        assert_same(own, original)
        assert own is not original
    assert others[0]["b"] is not dicts[0]["b"]


# What arrives

LATE = {"c": 0.5, "a": 0.25, "b": 0.0}
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "one is not seen": {"observations": {"a": seen(1), "c": seen(2)}},
    "nobody is seen": {"observations": {}},
    "a stranger is seen": {"observations": {**dict.fromkeys(AGENTS, seen(1)), "d": "anything"}},
    "another order": {"observations": {agent: seen(place) for place, agent in enumerate(LATE)}, "rewards": LATE},
    "an observation is None": {"observations": {**dict.fromkeys(AGENTS, seen(1)), "b": None}},
    "one has no reward": {"rewards": {"b": 1.5}},
    "integers": {"rewards": {"a": 1, "b": -2, "c": 0}},
    "too large": {"rewards": {"a": 1, "b": 2**60, "c": 0}},
    "of several types": {"rewards": {"a": 1, "b": 1.0, "c": np.float32(1)}},
    "a vector": {"rewards": {"a": 1.0, "b": seen(1), "c": 1.0}},
    "a stranger's reward": {"rewards": {**dict.fromkeys(AGENTS, 1.0), "d": 1.0}},
    "flags of NumPy's": {"terminateds": {**dict.fromkeys(AGENTS, np.True_), "__all__": False}},
    "all flags of NumPy's": {"truncateds": {**dict.fromkeys(AGENTS, np.False_), "__all__": np.True_}},
    "flags of two types": {"terminateds": {"a": np.True_, "b": True, "c": np.False_, "__all__": False}},
    "flags that are numbers": {"truncateds": {"a": 1, "b": True, "c": 0.0, "__all__": True}},
    "all is a number": {"truncateds": {**dict.fromkeys(AGENTS, True), "__all__": 1}},
    "all comes first": {"terminateds": {"__all__": False, **dict.fromkeys(AGENTS, True)}},
    "one has no flag": {"terminateds": {"a": True, "b": False, "__all__": False}},
    "a stranger's flag": {"terminateds": {**dict.fromkeys(AGENTS, True), "d": True, "__all__": False}},
    "one has no info": {"infos": {"a": {}, "c": {}}},
    "no infos": {"infos": {}},
    "an info that says something": {"infos": {"a": {}, "b": {"x": 1}, "c": {}}},
    "an empty thing": {"infos": {"a": {}, "b": [], "c": {}}},
    "a stranger's info": {"infos": {**{agent: {} for agent in AGENTS}, "d": {}}},
}
FINALS: dict[str, dict[str, Any] | None] = {
    "no reset": None,
    "all": {agent: seen(place + 5) for place, agent in enumerate(AGENTS)},
    "some": {"a": seen(5), "c": seen(6)},
    "none": {},
    "another order": {agent: seen(place + 5) for place, agent in enumerate(LATE)},
    "one does not fit": {"a": seen(5), "b": None, "c": seen(6)},
    "a stranger": {**dict.fromkeys(AGENTS, seen(5)), "d": "anything"},
}


def written_and_read(records: int, transition: Transition, record: int, compiled: bool) -> Transition:
    """The transition read from a record that held other values before."""
    layout = Layout(Schema(AGENTS, dict.fromkeys(AGENTS, BOX), {}, None), records)
    block = bytearray([0xFF]) * layout.nbytes
    layout.bind(block)
    codec = open_codec(layout, block, infos_in_block=True) if compiled else None
    leftovers = TransitionRecords(layout, block, codec=codec).write(record, transition)
    return TransitionRecords(layout, block, codec=codec).read(record, copy.deepcopy(leftovers))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("final", FINALS.values(), ids=FINALS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("there", [AGENTS, ["b"], ["c", "d"], []], ids=str)
def test_last_step_round_trip(there, change, final, compiled):
    dicts = last_step(**change)
    expected = copy.deepcopy(dicts)
    for agent, value in (final or {}).items():
        info = expected[4].setdefault(agent, {})
        if isinstance(info, dict):
            info["final_obs"] = value
    transition = Transition(*dicts, alive=there, acting=there, final_observations=final)
    arrived = written_and_read(3, transition, 1, compiled)
    assert_same([*dicts_of(arrived)], expected)
    assert (arrived.acting, arrived.alive, is_over(arrived)) == (there, there, True)
