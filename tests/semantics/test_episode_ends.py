"""The last step of an episode: the saved copy, and its transfer with every combination of agents in the dicts."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same, spoil

from marl_parallel import ParallelEnv
from marl_parallel.adapters.protocol import Schema
from marl_parallel.backends.spawn import PortableProcessBackend
from marl_parallel.core.block.codec import open_codec
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.block.records import TransitionRecords
from marl_parallel.core.reports import reports
from marl_parallel.core.transition import Transition, copied_dicts
from marl_parallel.core.worker.env_runner import dicts_of, is_over

pytestmark = pytest.mark.release_independent

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


# Episodes without agents, which have no end


BOTH = ["a", "b"]


class WithoutEnd:
    """Two agents, in steps of 1, 2, ...; `steps` has what each returns: who is observed, and three values or dicts."""

    possible_agents = BOTH
    observation_spaces = dict.fromkeys(BOTH, BOX)
    action_spaces = dict.fromkeys(BOTH, spaces.Discrete(2))
    steps: Any = ()
    infos: Any = None

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.time = 0
        return dict.fromkeys(BOTH, seen(0)), {}

    def step(self, actions: Any) -> Any:
        who, terminated, truncated = self.steps[min(self.time, len(self.steps) - 1)]
        self.time += 1
        observations = dict.fromkeys(who, seen(self.time))
        return observations, dict.fromkeys(who, 1.0), terminated, truncated, dict.fromkeys(who, self.infos)


NO, YES, NOT_OVER = dict.fromkeys(BOTH, False), dict.fromkeys(BOTH, True), {"__all__": False}
GOES_ON = BOTH, NO, NO
A_ENDS, B_ENDS = ("a", {"a": True}, {"a": False}), ("b", {"b": False}, {"b": True})
SILENT = "", {}, {}
WITHOUT_END = {
    "both terminate": [GOES_ON, (BOTH, YES, NO), SILENT],
    "both are truncated in the first step": [(BOTH, NO, YES), SILENT],
    "one after the other": [GOES_ON, A_ENDS, B_ENDS, SILENT],
    "flags stay true": [GOES_ON, (BOTH, YES, NO)],
    "only truncateds has an end": [(BOTH, YES, {**NO, **NOT_OVER}), ("", {}, NOT_OVER)],
    "one truncated flag, with the flags of those that are left": [A_ENDS, ("b", {"b": True}, False), ("", {}, False)],
    "flags of NumPy's": [(BOTH, dict.fromkeys(BOTH, np.True_), dict.fromkeys(BOTH, np.False_)), SILENT],
}
WITH_END = {
    "an end": [GOES_ON, (BOTH, {**YES, "__all__": True}, {**NO, **NOT_OVER})],
    "no end yet, as the simulator says": [(BOTH, {**YES, **NOT_OVER}, {**NO, **NOT_OVER}), ("", NOT_OVER, NOT_OVER)],
    "one is left": [GOES_ON, A_ENDS, ("b", {"b": False}, {"b": False})],
    "one comes back": [GOES_ON, (BOTH, YES, NO), ("a", {"a": False}, {"a": False}), (BOTH, YES, NO), GOES_ON],
    "nobody is observed": [("", {}, {})],
    "one terminated flag": [(BOTH, False, NO), (BOTH, True, NO)],
}


def ends(steps: Any, infos: Any = None, **keywords: Any) -> list[bool]:
    """Whether an episode was over after each of five steps."""
    simulator = type("Scripted", (WithoutEnd,), {"steps": steps, "infos": infos or {}})
    with ParallelEnv([simulator], False, **{"backend": "serial", "adapter": "dict", **keywords}) as env:
        env.reset()
        over = []
        for _ in range(5):
            _, _, terminateds, truncateds, _ = env.step([dict.fromkeys(env.acting[0], 0)])
            over.append(bool(terminateds[0]["__all__"] or truncateds[0]["__all__"]))
        return over


@pytest.mark.parametrize("infos", [{}, {"x": "y"}], ids=["plain", "infos"])
@pytest.mark.parametrize("compiled", [True, False], ids=["codec", "python"])
@pytest.mark.parametrize("name", [*WITHOUT_END, *WITH_END])
def test_an_episode_without_agents_and_without_end_is_a_warning(name, compiled, infos, monkeypatch, caplog):
    if not compiled:
        monkeypatch.setattr("marl_parallel.core.block.codec.Codec", None)
    over = ends({**WITHOUT_END, **WITH_END}[name], infos)
    texts = [record.getMessage() for record in caplog.records if record.name == "marl_parallel"]
    if name in WITH_END:
        assert not texts
        assert any(over) == (name in ("an end", "one terminated flag"))
        return
    (text,) = texts
    assert "environment 0: all its agents have ended, but its `step` returns no `__all__`" in text
    assert 'return terminateds["__all__"] = True at the end of an episode, or pass adapter="pettingzoo"' in text
    assert not any(over)


def test_the_advice_of_that_warning_helps(caplog):
    assert ends(WITHOUT_END["both terminate"], adapter="pettingzoo") == [False, True, True, True, True]
    assert not caplog.records


@pytest.fixture(autouse=True)
def as_in_a_new_program(monkeypatch):
    monkeypatch.setattr(reports, "_said", set())


@pytest.mark.parametrize("backend", ["serial", "thread", "process", "hybrid", "portable"])
def test_an_episode_without_end_is_warned_of_once(backend, caplog):
    simulator = type("Scripted", (WithoutEnd,), {"steps": WITHOUT_END["one after the other"], "infos": {}})
    for where in [PortableProcessBackend(), PortableProcessBackend()] if backend == "portable" else [backend] * 2:
        with ParallelEnv([simulator] * 4, adapter="dict", num_workers=2, backend=where) as env:
            for _ in range(2):
                env.reset()
                for _ in range(6):
                    env.step([dict.fromkeys(acting, 0) for acting in env.acting])
    texts = [record.getMessage() for record in caplog.records if "returns no `__all__`" in record.getMessage()]
    assert len(texts) == 1


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("flag", [False, np.False_, np.zeros(1, bool)], ids=repr)
def test_with_one_truncated_flag_an_episode_is_over_when_all_agents_have_terminated(flag, mode, caplog):
    steps = [(BOTH, NO, flag), (BOTH, {"a": True, "b": False}, flag), (BOTH, YES, flag)]
    simulator = type("Public", (WithoutEnd,), {"steps": steps, "infos": {}})
    with ParallelEnv([simulator], mode, backend="serial") as env:
        env.reset()
        over = []
        for _ in range(7):
            _, _, terminateds, truncateds, _ = env.step([dict.fromkeys(BOTH, 0)])
            over.append(terminateds[0]["__all__"])
            assert not truncateds[0]["__all__"]
    same, following = [False, False, True], [False, False, True, False]
    assert over == ([*same, *same, False] if mode == "SAME_STEP" else [*following, *following[:3]])
    assert not caplog.records
