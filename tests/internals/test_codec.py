"""The compiled codec does what Python does: the same results, the same actions in simulators, the same bytes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import struct
import sys
from collections import OrderedDict, defaultdict
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpe2 import simple_spread_v3
from pettingzoo.classic import connect_four_v3
from pettingzoo.sisl import multiwalker_v9

import marl_parallel
from marl_parallel import EnvError, MultiAgentEnv, ParallelEnv, Rules, vector
from marl_parallel.adapters.dict_env import DictEnv
from marl_parallel.adapters.protocol import Schema
from marl_parallel.backends.local import SerialBackend
from marl_parallel.core.block import codec
from marl_parallel.core.block.block_transitions import BlockTransitions
from marl_parallel.core.block.columns import Layout, damaged
from marl_parallel.core.transition import Transition
from marl_parallel.core.worker.worker import Worker
from marl_parallel.core.worker_status import WorkerStatus

AGENTS = ["a", "b", 3]
NOBODY = np.zeros((3, 3), np.bool_), np.zeros(3, np.bool_)
BOX = spaces.Box(-9, 9, (2, 2), np.float32)
OBSERVATIONS = {
    "boxes": [BOX] * 3,
    "discrete": [spaces.Discrete(5, start=-2)] * 3,
    "several": [BOX, spaces.Discrete(4), spaces.MultiBinary(3)],
    "trees": [
        spaces.Dict(x=BOX, m=spaces.MultiBinary(2), d=spaces.Discrete(3)),
        spaces.Tuple((spaces.Discrete(3), spaces.Tuple((BOX, spaces.Dict(z=spaces.Box(-1, 1, ())))))),
        spaces.Dict(x=BOX, m=spaces.MultiBinary(2), d=spaces.Discrete(3)),
    ],
    "text": [BOX, spaces.Text(5), BOX],
}
PYTHON = (
    "block.records.TransitionRecords.read", "block.records.TransitionRecords.write", "block.records.ActionRecords.read",
    "block.records.ActionRecords.write_none", "block.records.ActionRecords.fitting",
)  # fmt: skip
"""What reads and writes in place of compiled code."""
pytestmark = pytest.mark.needs("_codec")


class Scripted:
    """A dict environment that returns what it is told, and stores the actions that it gets."""

    possible_agents = AGENTS

    def __init__(
        self,
        script: list[Any],
        declared: list[spaces.Space[Any]],
        actions: list[spaces.Space[Any]],
        reset_infos: Any = None,
    ) -> None:
        self.script, self.received = copy.deepcopy(script), []
        self.reset_infos = {a: {} for a in AGENTS} if reset_infos is None else reset_infos
        self.observation_space = spaces.Dict([*zip(AGENTS, declared)])  # type: ignore[list-item]
        self.action_space = spaces.Dict([*zip(AGENTS, actions)])  # type: ignore[list-item]
        for space in declared:
            space.seed(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observations = {a: space.sample() for a, space in self.observation_space.items()}
        return observations, copy.deepcopy(self.reset_infos)

    def step(self, actions: Any) -> Any:
        self.received.append(copy.deepcopy(actions))
        return self.script.pop(0)

    def close(self) -> None:
        pass


class Turned(DictEnv):
    """Tells whose turn it is, from a list; None if that follows from the observations."""

    turns: ClassVar[list[Any]]

    def turn(self) -> Any:
        return self.turns[len(self.source.received) % len(self.turns)]


class Outcome:
    """What a run gave: results or an error, and the actions that arrived."""

    def __init__(
        self,
        *,
        compiled: bool,
        infos_in_block: bool,
        scripts: Any,
        declared: Any,
        action_spaces: Any,
        actions: Any,
        turns: Any = None,
        only_acting: bool = True,
        rules: Rules = Rules.DICT,
        adapter: Any = "dict",
        reset_infos: Any = None,
        **keywords: Any,
    ) -> None:
        self.results: list[Any] = []
        self.received: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            shared = dataclasses.replace(SerialBackend.capabilities, shares_memory=infos_in_block)
            patch.setattr(SerialBackend, "capabilities", shared)
            if not compiled:
                patch.setattr(codec, "Codec", None)
            arguments = declared, action_spaces, reset_infos
            constructors = [lambda script=script: Scripted(script, *arguments) for script in scripts]
            if turns:
                adapter = type("Turned", (Turned,), {"turns": turns, "rules": rules})
            with ParallelEnv(constructors, backend="serial", seed=3, adapter=adapter, **keywords) as env:
                self.results.append(copy.deepcopy(env.reset()))
                for of_envs in actions:
                    if turns and only_acting:
                        of_envs = [{a: one[a] for a in acting if a in one} for one, acting in zip(of_envs, env.acting)]
                    try:
                        more = env.acting, env.action_masks, sorted(map(repr, env.finished_episodes))
                        self.results.append(copy.deepcopy((env.step(of_envs), *more)))
                    except Exception as error:
                        self.results.append((type(error), str(error).splitlines()[0]))
                        break
                    self.received = list(env.get_attr("received"))


def assert_equal_with_both(infos_in_block: bool, **arguments: Any) -> None:
    ours = Outcome(compiled=True, infos_in_block=infos_in_block, **arguments)
    pure = Outcome(compiled=False, infos_in_block=False, **arguments)
    assert_same(tuple(ours.results), tuple(pure.results))
    assert_same(ours.received, pure.received)


class Subclass(np.ndarray):
    """An array of a derived class."""


def changed_array(array: np.ndarray[Any, Any], how: int) -> Any:
    """The same numbers in other clothes, or others."""
    readonly = array.copy()
    readonly.flags.writeable = False
    two = np.repeat(array[..., None], 2, axis=-1)
    return [
        array, array.astype(np.float64), array.astype(np.float16), readonly, two[..., 0], np.asfortranarray(array),
        array.astype(array.dtype.newbyteorder()), array.view(Subclass), array.tolist(), array.astype(object),
        array[..., None], array.astype(np.int64), array.astype(np.complex64), None, array.reshape(-1)[:1], "text",
    ][how]  # fmt: skip


def changed_value(value: Any, how: int) -> Any:
    if isinstance(value, np.ndarray):
        return changed_array(value, how)
    if isinstance(value, dict):
        parts = {key: changed_value(part, how) for key, part in value.items()}
        return [parts, OrderedDict(parts), dict(reversed(parts.items())), {**parts, "other": 1}, {}, None][how % 6]
    if isinstance(value, tuple):
        parts = tuple(changed_value(part, how) for part in value)
        return [parts, [*parts], (*parts, 1), (), None][how % 5]
    if isinstance(value, str):
        return [value, None, 5][how % 3]
    kinds: list[Any] = [
        int, np.int64, np.int32, np.uint8, np.float64, bool, str, float, np.array, lambda _: None, lambda _: 2**63,
        lambda _: -1, lambda _: np.uint64(2**63), np.bool_, np.int16, lambda v: np.array([v]),
    ]  # fmt: skip
    return kinds[how](value)


REWARDS: list[Any] = [
    1.5, float("nan"), float("-inf"), -1.0, np.float64(2.5), np.float32(0.1), np.float16(3), 7, 2**53, 2**53 + 1,
    -(2**60), True, np.int64(-4), np.uint8(200), np.bool_(True), np.int64(2**62), np.array(1.5), np.ones(1), None, "1",
    np.array([7]), np.array(2.5, np.float32), np.array(True), np.array(2.0, ">f8"), np.array(2**63, np.uint64),
    np.array(2**60), np.ones((1, 1)), np.array(1.0, np.dtype("f8", metadata={"unit": "m"})), np.array(-1, np.int8),
]  # fmt: skip
FLAGS: list[Any] = [False, np.False_, True, np.True_, 0, 1, None, np.zeros(1, bool), np.zeros(()), [False], {}, "no"]
INFOS: list[Any] = [
    {}, {"x": 1}, {"x": 0.5, "y": -1.5}, {"x": np.ones(2), 3: np.float32(2)}, {"action_mask": np.ones(3, np.int8)},
    {"x": {"y": (1, [None, "é", False]), "z": np.array(2.0)}}, {"n": np.int64(-1), "b": np.bool_(True)},
    {"h": np.float16(1)}, {"x": 2**70}, {"x": b"bytes"}, {(1, 2): 3}, {True: 1}, {"x": "\ud800"}, {"x": np.ones(300)},
    {"x": np.asfortranarray(np.eye(2))}, {"x": np.ones(2, np.dtype("f8", metadata={"unit": "m"}))},
    {"x": np.datetime64("2020-01-01")}, {"x": np.array(["a"])}, {"x": OrderedDict(a=1)}, {"x": 1j, "y": {1, 2}},
    {"x": np.float64("nan"), "y": float("-inf")}, OrderedDict(), None, [], 0,
]  # fmt: skip
NO = {**dict.fromkeys(AGENTS, False), "__all__": False}
PLAIN_STEP = (
    {agent: space.sample() for agent, space in zip(AGENTS, OBSERVATIONS["several"])},
    dict.fromkeys(AGENTS, 0.5), NO, NO, {agent: {"active_agent": "a"} for agent in AGENTS},
)  # fmt: skip
few = st.integers(0, 3).map(lambda number: number == 0)


@st.composite
def transitions(draw: st.DrawFn, declared: list[spaces.Space[Any]]) -> Any:
    """What a step returns: plain, but for at most a few things."""
    agents = draw(st.sampled_from([AGENTS] * 6 + [AGENTS[:2], [*reversed(AGENTS)], [*AGENTS, "new"], []]))
    of_agent = dict(zip(AGENTS, declared))
    seen = {}
    for agent in agents:
        value = of_agent.get(agent, BOX).sample()
        seen[agent] = changed_value(value, draw(st.integers(0, 15))) if draw(few) else value
    reward = draw(st.sampled_from(REWARDS[:5] * 3 + REWARDS))
    rewards = {agent: draw(st.sampled_from(REWARDS)) if draw(few) and draw(few) else reward for agent in agents}
    flags, flagged = [], [] if draw(few) else agents
    for _ in range(2):
        flag = draw(st.sampled_from(FLAGS[:1] * 8 + FLAGS[:3]))
        own = {agent: draw(st.sampled_from(FLAGS)) if draw(few) and draw(few) else flag for agent in flagged}
        if draw(st.booleans()):
            own["__all__"] = draw(st.sampled_from(FLAGS[:1] * 6 + FLAGS[:4]))
        flags.append(own)
    info = draw(st.sampled_from(INFOS[:1] * 3 + INFOS))
    infos: Any = {agent: draw(st.sampled_from(INFOS)) if draw(few) and draw(few) else info for agent in agents}
    if draw(few):
        infos = draw(
            st.sampled_from([{}, {**infos, "else": {}}, {**infos, "__common__": {"t": 1}}, dict([*infos.items()][1:])])
        )
    kinds: Any = [dict] * 12 + [functools.partial(defaultdict, int), OrderedDict]
    dicts: Any = (*(draw(st.sampled_from(kinds))(one) for one in (seen, rewards, *flags)), infos)
    if isinstance(infos, dict):
        dicts = *dicts[:4], draw(st.sampled_from(kinds))(infos)
    return draw(st.sampled_from([dicts] * 9 + [[*dicts]]))


TWO_OR_ALL, DICTS = st.sampled_from([2, 3]), [one for one in INFOS if isinstance(one, dict)]
thorough = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.filterwarnings("ignore")
@thorough
@given(data=st.data())
def test_any_transitions(name, data):
    """Results and errors are the same for whatever simulators return."""
    declared = OBSERVATIONS[name]
    scripts = [[data.draw(transitions(declared)) for _ in range(3)] for _ in range(3)]
    steps = [[dict.fromkeys(AGENTS, 0)] * 3] * 3
    discrete = [spaces.Discrete(3)] * 3
    arguments = {"scripts": scripts, "declared": declared, "action_spaces": discrete, "actions": steps}
    if data.draw(few):
        arguments["reset_infos"] = {
            agent: data.draw(st.sampled_from(DICTS)) for agent in AGENTS[: data.draw(TWO_OR_ALL)]
        }
    with_infos, copies = data.draw(st.booleans()), data.draw(st.booleans())
    auto_reset = data.draw(st.sampled_from([True, False, "NEXT_STEP"]))
    assert_equal_with_both(with_infos, **arguments, auto_reset=auto_reset, copy=copies)


class Left(DictEnv):
    """Tells which agents are left, as a simulator of PettingZoo does."""

    rules = Rules.PETTINGZOO
    lists: ClassVar[list[Any]] = [None]

    def agents_left(self) -> Any:
        return self.lists[len(self.source.received) % len(self.lists)]


@st.composite
def steps_of_lives(draw: st.DrawFn, declared: list[spaces.Space[Any]]) -> Any:
    """What a step returns where agents die, leave, come late and come back."""

    def some(values: Any) -> dict[Any, Any]:
        left_out = draw(st.sampled_from([None, None, *AGENTS, "all"]))
        agents = [] if left_out == "all" else [agent for agent in AGENTS if agent != left_out]
        if draw(few) and draw(few):
            agents.reverse()
        return {agent: draw(values) for agent in agents}

    def flags() -> dict[Any, Any]:
        values = st.sampled_from([False] * 8 + [np.False_, True, np.True_, np.zeros(1, bool), np.ones(1, bool), 0])
        of_agents = some(values) if not draw(few) else {}
        over = draw(st.sampled_from([None] * 5 + [False] * 3 + [np.False_, True]))
        return of_agents if over is None else {**of_agents, "__all__": over}

    observations = {agent: space.sample() for agent, space in zip(AGENTS, declared)}
    infos = draw(st.sampled_from([{}, "all", "all", "some"]))
    if infos == "all":
        infos = {agent: {} for agent in AGENTS}
    elif infos == "some":
        infos = some(st.sampled_from(INFOS[:4]))
    rewards = st.sampled_from([0.5, 0.5, 0.5, -1.5, np.float32(2), 3, np.array(1.0)])
    return {agent: observations[agent] for agent in some(st.none())}, some(rewards), flags(), flags(), infos


@pytest.mark.parametrize("name", ["boxes", "several", "trees"])
@pytest.mark.parametrize("rules", Rules)
@pytest.mark.filterwarnings("ignore")
@thorough
@given(data=st.data())
def test_any_lives(name, rules, data):
    """Agents die, leave, come late and come back."""
    declared = OBSERVATIONS[name]
    scripts = [[data.draw(steps_of_lives(declared)) for _ in range(6)] for _ in range(2)]
    lists = data.draw(st.lists(st.sampled_from([None, None, AGENTS, ["b"], [], ["other"]]), min_size=1, max_size=3))
    adapter = "dict" if rules is Rules.DICT else type("Left", (Left,), {"lists": lists})
    given = data.draw(st.sampled_from([AGENTS, AGENTS, ["b", "a", 3], ["a", 3]]))
    steps = [[dict.fromkeys(given, 1)] * 2] * 6
    arguments = {"scripts": scripts, "declared": declared, "action_spaces": [spaces.Discrete(3)] * 3, "actions": steps}
    more = {"auto_reset": data.draw(st.sampled_from([True, False, "NEXT_STEP"])), "copy": data.draw(st.booleans())}
    more["episode_stats"] = data.draw(st.booleans())
    assert_equal_with_both(data.draw(st.booleans()), **arguments, adapter=adapter, **more)


@pytest.mark.parametrize("rules", Rules)
@pytest.mark.filterwarnings("ignore")
@thorough
@given(data=st.data())
def test_any_turns(rules, data):
    """One agent acts at a time, or all do for a while."""
    declared = OBSERVATIONS["several"]
    turns = data.draw(st.lists(st.sampled_from([*AGENTS, *AGENTS, None, "nobody"]), min_size=1, max_size=4))
    plain = transitions(declared) if data.draw(few) else st.just(PLAIN_STEP)
    scripts = [[data.draw(plain) for _ in range(5)] for _ in range(2)]
    action = data.draw(st.sampled_from([2, np.int64(1), np.array(0), 7, None, "x"]))
    steps = [[dict.fromkeys(AGENTS, action if data.draw(few) else 1)] * 2 for _ in range(5)]
    arguments = {"scripts": scripts, "declared": declared, "actions": steps, "turns": turns, "rules": rules}
    arguments |= {"action_spaces": [spaces.Discrete(3)] * 3, "only_acting": data.draw(st.booleans())}
    assert_equal_with_both(data.draw(st.booleans()), **arguments)


def test_plain_turns_stay_in_compiled_code(monkeypatch):
    adapter: Any = type("Turned", (Turned,), {"turns": ["b", 3, "a"], "rules": Rules.PETTINGZOO})
    scripted = functools.partial(Scripted, [PLAIN_STEP] * 6, OBSERVATIONS["several"], [spaces.Discrete(3)] * 3)
    with ParallelEnv([scripted] * 2, backend="serial", adapter=adapter) as env:
        env.reset()
        for name in PYTHON:
            monkeypatch.setattr(f"marl_parallel.core.{name}", None)
        for step in range(6):
            (acting,) = env.acting[0]
            assert acting == ["b", 3, "a"][step % 3]
            results = env.step([{acting: 2}] * 2)
            assert_same([one[1] for one in results], [*PLAIN_STEP])
        assert env.get_attr("received")[1] == [{agent: 2} for agent in ["b", 3, "a"] * 2]


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.filterwarnings("ignore")
@thorough
@given(data=st.data())
def test_any_actions(name, data):
    """Simulators receive the same actions, or the same error is raised, for whatever callers pass."""
    declared = OBSERVATIONS[name]
    steps = []
    for _ in range(2):
        of_envs = []
        for _ in range(3):
            agents = data.draw(st.sampled_from([AGENTS] * 6 + [AGENTS[:2], [*reversed(AGENTS)], [*AGENTS, "new"]]))
            values = {agent: dict(zip(AGENTS, declared)).get(agent, BOX).sample() for agent in agents}
            for agent in agents:
                if data.draw(few) and data.draw(few):
                    values[agent] = changed_value(values[agent], data.draw(st.integers(0, 15)))
            of_envs.append(values)
        steps.append(of_envs)
    plain = (
        {agent: BOX.sample() for agent in AGENTS},
        dict.fromkeys(AGENTS, 0.5),
        *[dict.fromkeys(AGENTS, False)] * 2,
        {},
    )
    assert_equal_with_both(False, scripts=[[plain] * 2] * 3, declared=[BOX] * 3, action_spaces=declared, actions=steps)


KINDS: list[Any] = [float, np.float64, np.float32, int, np.int64, bool, np.bool_, np.array, np.atleast_1d]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_steps_stay_in_compiled_code(kind, monkeypatch):
    """Otherwise the comparisons above would compare Python with itself."""
    flags = {**dict.fromkeys(AGENTS, False), "__all__": False}
    plain = {a: BOX.sample() for a in AGENTS}, dict.fromkeys(AGENTS, kind(1)), flags, flags, {a: {} for a in AGENTS}
    discrete = [spaces.Discrete(3)] * 3
    with ParallelEnv([lambda: Scripted([plain] * 4, [BOX] * 3, discrete)] * 3, backend="serial", adapter="dict") as env:
        env.reset()
        for name in PYTHON:
            monkeypatch.setattr(f"marl_parallel.core.{name}", None)
        for _ in range(4):
            assert_same(env.step([dict.fromkeys(AGENTS, 1)] * 3)[1][2], plain[1])


def looped() -> dict[str, Any]:
    info: dict[str, Any] = {"x": 1}
    info["loop"] = [info]
    return info


@pytest.mark.parametrize("info", [*INFOS[:7], {"x": [["deep"] * 2] * 3}], ids=str)
def test_infos_in_the_block(info, monkeypatch):
    """Infos of simple values are not pickled, whatever agents have them."""
    monkeypatch.setattr("marl_parallel.core.worker.worker.dump_leftovers", None)
    flags, infos = {**dict.fromkeys(AGENTS, False), "__all__": False}, {"a": info, 3: {}, "more": {"y": info}}
    plain = {a: BOX.sample() for a in AGENTS}, dict.fromkeys(AGENTS, 1.0), flags, flags, infos
    discrete = [spaces.Discrete(3)] * 3
    with ParallelEnv([lambda: Scripted([plain] * 4, [BOX] * 3, discrete)] * 3, backend="serial", adapter="dict") as env:
        env.reset()
        for _ in range(4):
            assert_same(env.step([dict.fromkeys(AGENTS, 1)] * 3)[4], (infos,) * 3)


def test_infos_that_refer_to_themselves_are_pickled():
    flags, infos = {**dict.fromkeys(AGENTS, False), "__all__": False}, {a: looped() for a in AGENTS}
    plain = {a: BOX.sample() for a in AGENTS}, dict.fromkeys(AGENTS, 1.0), flags, flags, infos
    discrete = [spaces.Discrete(3)] * 3
    with ParallelEnv([lambda: Scripted([plain], [BOX] * 3, discrete)], backend="serial", adapter="dict") as env:
        env.reset()
        info = env.step([dict.fromkeys(AGENTS, 1)])[4][0]["a"]
        assert info["loop"][0] is info


def test_references_are_returned():
    """Counts of shared objects and the number of blocks stay the same over many steps of every kind."""
    tree = OBSERVATIONS["trees"]
    seen = {agent: space.sample() for agent, space in zip(AGENTS, tree)}
    no = {**dict.fromkeys(AGENTS, False), "__all__": False}
    kinds = [
        (seen, dict.fromkeys(AGENTS, reward), no, no, dict.fromkeys(AGENTS, info))
        for reward, info in [
            (1.5, {}),
            (np.float64(1), {"x": 1}),
            (7, {}),
            (True, {"y": np.ones(1)}),
            (None, {}),
            (0.5, INFOS[5]),
        ]
    ]
    two = {agent: seen[agent] for agent in AGENTS[:2]}
    for flag, infos in [
        (False, {}),
        (True, {"a": {"x": 1}}),
        (False, {"b": {}}),
        (True, {}),
        (False, {"a": {"x": b""}}),
    ]:
        flags = {"a": False, "b": flag, "__all__": False}
        kinds.append((two, {"a": 0.5, "b": np.float32(1)}, flags, no, infos))
        kinds.append(({"a": seen["a"]}, {}, {}, {}, infos))
    kinds.append((seen, {}, no, {}, {}))  # the others are back
    status, shared = WorkerStatus(bytearray(WorkerStatus.NBYTES)), [*AGENTS, "__all__", None, False, np.dtype("f4")]

    class Cycle(Scripted):
        def step(self, actions: Any) -> Any:
            self.script = self.script[1:] + self.script[:1]
            return self.script[0]

    with ParallelEnv([lambda: Cycle(kinds, tree, tree)] * 2, backend="serial", adapter="dict") as env:
        env.reset()
        actions = [{agent: space.sample() for agent, space in zip(AGENTS, tree)}] * 2

        def measured(steps: int) -> tuple[list[int], int]:
            for _ in range(steps):
                env.step(actions)
            gc.collect()
            return [sys.getrefcount(one) for one in shared], sys.getallocatedblocks()

        rounds = [measured(3000) for _ in range(4)]
    growth = []
    for (before, blocks), (after, blocks_after) in itertools.pairwise(rounds):
        assert all(abs(one - other) < 100 for one, other in zip(before, after))
        growth.append(blocks_after - blocks)
    assert min(growth) < 200  # threads that other tests have left may allocate now and then
    assert status.running is None


@pytest.mark.parametrize("leftovers", ["a snapshot", {"infos": {}, "rewards": {}}, {"rewards": {}}])
def test_records_with_other_leftovers_are_left_to_python(leftovers):
    declared: Any = dict.fromkeys(AGENTS, BOX)
    layout = Layout(Schema(AGENTS, declared, {}, None), 5)
    block = bytearray(layout.nbytes)
    layout.bind(block)
    no = {**dict.fromkeys(AGENTS, False), "__all__": False}
    plain = {a: BOX.sample() for a in AGENTS}, dict.fromkeys(AGENTS, 1.0), no, no, {a: {} for a in AGENTS}
    compiled = codec.open_codec(layout, block, infos_in_block=False)
    for record in range(5):
        assert compiled.put(record, Transition(*plain, AGENTS, AGENTS)) == 1
    _, (left, *_) = compiled.read((4, 2, 0), {2: leftovers}, True)
    assert left == [2]


def test_infos_that_a_record_does_not_announce():
    """They are left to Python, and nothing refers to them less often than before."""
    layout = Layout(Schema(AGENTS, dict.fromkeys(AGENTS, BOX), {}, None), 1)
    block = bytearray(layout.nbytes)
    layout.bind(block)
    compiled = codec.open_codec(layout, block, infos_in_block=False)
    no = {**dict.fromkeys(AGENTS, False), "__all__": False}
    plain = {a: BOX.sample() for a in AGENTS}, dict.fromkeys(AGENTS, 1.0), no, no, {a: {} for a in AGENTS}
    assert compiled.put(0, Transition(*plain, AGENTS, AGENTS)) == 1
    infos = {"a": {"x": object()}}
    before = sys.getrefcount(infos)
    for _ in range(5):
        assert compiled.read((0,), {0: {"infos": infos}}, True)[1][0] == [0]
        others = compiled.read_arrays(0, 1, (), None, False, {0: {"infos": infos}}, True, False, True, *NOBODY)[1]
        assert others[0] == [0]
    assert sys.getrefcount(infos) == before


class Tracked(MultiAgentEnv):
    """An adapter that tells whose turn it is, and who is alive."""

    rules = Rules.DICT
    steps: ClassVar[int] = 0
    possible_agents = AGENTS
    observation_spaces = action_spaces = dict.fromkeys(AGENTS, spaces.Discrete(9))
    state_space = render_mode = None
    metadata: ClassVar[dict[str, Any]] = {}
    reset_keywords = frozenset()

    def __init__(self) -> None:
        self.source, self.count = self, 0

    def reset(self, **keywords: Any) -> Any:
        self.count = 0
        return dict.fromkeys(AGENTS, 0), {a: {} for a in AGENTS}

    def step(self, actions: Any) -> Any:
        self.count += 1
        no = {**dict.fromkeys(AGENTS, False), "__all__": False}
        return dict.fromkeys(AGENTS, self.count), dict.fromkeys(AGENTS, 0.5), no, no, {a: {} for a in AGENTS}

    def turn(self) -> Any:
        return AGENTS[0] if self.count == 3 else None

    def alive(self) -> Any:
        return AGENTS[:2] if self.count in (5, 6) else AGENTS

    def agents_left(self) -> Any:
        if self.count == 8:
            raise KeyError("once")
        return None

    def render(self) -> Any: ...

    def state(self) -> Any: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("returned", [None, {"oops": 1}, {}], ids=str)
def test_steps_that_return_anything(returned, monkeypatch):
    """A simulator is stepped once, and what is no transition is an error, with both codecs."""

    class Custom(Tracked):
        def step(self, actions: Any) -> Any:
            Tracked.steps += 1
            return returned

    for compiled in (codec.Codec, None):
        monkeypatch.setattr(codec, "Codec", compiled)
        Tracked.steps = 0
        with ParallelEnv([object] * 2, backend="serial", adapter=lambda _: Custom()) as env:
            env.reset()
            with pytest.raises(EnvError, match="raised in step"):
                env.step([dict.fromkeys(AGENTS, 0)] * 2)
        assert Tracked.steps == 2


def test_adapters_that_tell_who_acts_are_asked(monkeypatch):
    acting = []
    for compiled in (codec.Codec, None):
        monkeypatch.setattr(codec, "Codec", compiled)
        with ParallelEnv([object] * 2, backend="serial", adapter=lambda _: Tracked()) as env:
            env.reset()
            acting.append([(env.step([dict.fromkeys(AGENTS, 0)] * 2)[0], env.acting) for _ in range(7)])
    assert acting[0] == acting[1]
    assert [of_envs[0] for _, of_envs in acting[0]] == [AGENTS, AGENTS, ["a"], AGENTS, ["a", "b"], ["a", "b"], AGENTS]


@pytest.mark.parametrize("error", [KeyError("once"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_errors_of_the_list_of_agents_are_raised(error, monkeypatch):
    """Also if they do not come a second time."""
    errors = [error]

    class Raises(Tracked):
        rules = Rules.PETTINGZOO
        turn, alive = MultiAgentEnv.turn, MultiAgentEnv.alive

        def agents_left(self) -> Any:
            if self.count == 2 and errors:
                raise errors.pop()
            return AGENTS

    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else EnvError
    with ParallelEnv([object], backend="serial", adapter=lambda _: Raises()) as env:
        env.reset()
        env.step([dict.fromkeys(AGENTS, 0)])
        with pytest.raises(expected):
            env.step([dict.fromkeys(AGENTS, 0)])
        assert env.stats().steps == 2


HEADS = st.tuples(st.sampled_from(b"isndlta Q"), st.sampled_from([0, 1, 2, 3, 9, 12, 2**40, -1]))
TOKENS = st.one_of(
    st.sampled_from([b"N", b"T", b"F"]), st.binary(max_size=9), HEADS.map(lambda head: struct.pack("=bq", *head))
)


def test_plain_records_that_are_read_are_added_to_totals():
    layout = Layout(Schema(AGENTS, dict.fromkeys(AGENTS, BOX), {}, None), 3)
    block = bytearray(layout.nbytes)
    layout.bind(block)
    no = {**dict.fromkeys(AGENTS, False), "__all__": False}
    rewards = {agent: 1.5 * place for place, agent in enumerate(AGENTS)}
    plain = {a: BOX.sample() for a in AGENTS}, rewards, no, no, {a: {} for a in AGENTS}
    totals = np.zeros((3, 2 * len(AGENTS) + 1))
    compiled = codec.open_codec(layout, block, infos_in_block=False, totals=totals)
    for record in range(3):
        assert compiled.put(record, Transition(*plain, AGENTS, AGENTS)) == 1
    compiled.read((2, 0), {}, True)
    compiled.read((2,), {}, True)
    compiled.read((1,), {1: "a snapshot"}, True)
    assert totals[:, -1].tolist() == [1, 0, 2]
    compiled.read_arrays(0, 3, (), None, False, {}, True, False, True, *NOBODY)
    compiled.read_arrays(1, 2, (), None, False, {}, True, False, True, *NOBODY)
    compiled.read_arrays(0, 3, (), None, False, {}, True, False, False, *NOBODY)
    assert totals[:, -1].tolist() == [2, 2, 3]
    expected = [[n * reward for reward in rewards.values()] + [n] * len(AGENTS) for n in (2, 2, 3)]
    assert totals[:, :-1].tolist() == expected
    for outside in ((-1, 2), (0, 4)):
        with pytest.raises(IndexError, match="there are no records"):
            compiled.read_arrays(*outside, (), None, False, {}, True, False, True, *NOBODY)
    for wrong in (np.zeros((2, 2)), np.zeros((3, len(AGENTS) + 1), np.float32), totals[:, ::-1], "totals"):
        with pytest.raises(ValueError, match="totals must be None or float64"):
            codec.open_codec(layout, block, infos_in_block=False, totals=wrong)


def test_the_clock_of_compiled_steps():
    space = spaces.Discrete(2)
    schema = Schema(AGENTS, dict.fromkeys(AGENTS, BOX), dict.fromkeys(AGENTS, space), None)
    layout = Layout(schema, 2)
    block, moment, is_forked = bytearray(layout.nbytes), np.array([100.0]), bytearray(1)
    layout.bind(block)
    compiled = codec.open_codec(layout, block, infos_in_block=True, moment=moment)
    no = {**dict.fromkeys(AGENTS, False), "__all__": False}
    result = {a: BOX.sample() for a in AGENTS}, dict.fromkeys(AGENTS, 1.0), no, no, {a: {} for a in AGENTS}
    numbers, times, began = np.zeros(10, np.int64), np.zeros(112, np.int64), []

    def step(actions: Any) -> Any:
        began.append(numbers[2:3].view(np.float64).item())
        moment[0] += 0.25
        return result

    episodes = dict.fromkeys(range(2), SimpleNamespace(fast=(step, None, False, None)))
    for env_id in range(2):
        compiled.put(env_id, Transition(*result, AGENTS, AGENTS))
    compiled.read((0, 1), {}, True)
    assert compiled.write((0, 1), [dict.fromkeys(AGENTS, 1)] * 2, 0, True, False) == 2
    assert compiled.run((0, 1), 0, episodes, numbers, times, is_forked, None) is None
    assert began == [100.0, 100.25]
    assert compiled.sums() == (0.5, 2)
    assert compiled.run((0, 1), 0, episodes, numbers, times, is_forked, began.append) is None
    assert began[2:] == [100.5, 0, 100.75, 1]  # what follows a step comes before the next one
    with pytest.raises(ZeroDivisionError):
        compiled.run((0, 1), 1, episodes, numbers, times, is_forked, lambda env_id: env_id // 0)
    assert compiled.place == 1
    forked = compiled.run((0, 1), 0, episodes, numbers, times, is_forked, lambda _: is_forked.__setitem__(0, 1))
    assert forked == (0, "c", None)
    for wrong in (np.zeros(2), np.zeros(1, np.float32), "now"):
        with pytest.raises(ValueError, match="moment must be None or a float64 array of one number"):
            codec.open_codec(layout, block, infos_in_block=True, moment=wrong)


@thorough
@given(
    header=st.binary(min_size=50, max_size=50), code=st.sampled_from([0, 1, 2, 8, 10, 25, 33, 57, 1 << 24 | 1, None])
)
def test_damaged_headers(header, code):
    """Whatever is in a header, the caller gets dicts, an error, or the place of a record that Python reads."""
    layout = Layout(Schema(AGENTS, dict.fromkeys(AGENTS, BOX), dict.fromkeys(AGENTS, spaces.Discrete(2)), None), 1)
    block = bytearray(layout.nbytes)
    layout.bind(block)
    start = layout.transition_header
    block[start : start + 50] = header
    if code is not None:
        block[start : start + 8] = struct.pack("=Q", code)
    compiled = codec.open_codec(layout, block, infos_in_block=True, totals=np.zeros((1, 7)))
    leaves = ((layout.observations.groups[0][0].array, (0, 1, 2)),)
    errors: list[str] = []
    for as_arrays in (False, True):
        try:
            if as_arrays:
                (observations, *_), _ = compiled.read_arrays(0, 1, leaves, None, False, {}, True, True, True, *NOBODY)
                assert observations[0].shape == (1, 3, *BOX.shape)
                continue
            columns, others = compiled.read((0,), {}, True)
        except ValueError as raised:
            errors.append(str(raised))
            continue
        assert (others is not None and others[0] == [0]) or type(columns[4][0]) is dict
    assert {*errors} <= {str(damaged(0))}
    compiled.write((0,), [dict.fromkeys(AGENTS, 1)], 0, False, True)


@thorough
@given(tokens=st.lists(TOKENS, max_size=12), excess=st.sampled_from([0, 0, 0, 1, -1, 10**6, -(10**6)]))
def test_damaged_infos(tokens, excess):
    layout = Layout(Schema(AGENTS, dict.fromkeys(AGENTS, BOX), {}, None), 1)
    block, content = bytearray(layout.nbytes), b"".join(tokens)
    layout.bind(block)
    block[layout.transition_header] = 8  # infos are in the block
    block[layout.infos : layout.infos + 8 + len(content)] = struct.pack("=q", len(content) + excess) + content
    error = ""
    try:
        codec.open_codec(layout, block, infos_in_block=True).parts(0, True)
    except MemoryError:
        return
    except ValueError as raised:
        error = str(raised)
    assert error in ("", str(damaged(0)))


def test_names_of_infos_that_are_damaged():
    """As arrays, too, they give the error for damage."""
    layout = Layout(Schema(AGENTS, dict.fromkeys(AGENTS, BOX), {}, None), 2)
    block = bytearray(layout.nbytes)
    layout.bind(block)
    compiled = codec.open_codec(layout, block, infos_in_block=True)
    no = {**dict.fromkeys(AGENTS, False), "__all__": False}
    plain = {a: BOX.sample() for a in AGENTS}, dict.fromkeys(AGENTS, 1.0), no, no
    for record in range(2):
        infos = {"a": {"length" if record else "": 0.5}}
        assert compiled.put(record, Transition(*plain, infos, AGENTS, AGENTS)) == 1
    start = block.index(b"length")
    block[start] = 0xFF
    for as_table in (True, False):
        with pytest.raises(ValueError, match="the record of environment 1 is damaged"):
            compiled.read_arrays(1, 2, (), None, False, {}, True, as_table, True, NOBODY[0][:1], NOBODY[1][:1])
    assert compiled.agents_of(1, 2, 64) == [[]]


@pytest.mark.parametrize("infos", [{}, {agent: {} for agent in AGENTS}, {"__common__": {"time": 1}}])
@pytest.mark.parametrize("flagged", [AGENTS, [*AGENTS, "__all__"], ["__all__"]])
def test_plain_forms_stay_in_compiled_code(flagged, infos, monkeypatch):
    """Simulators with dict rules may return no infos at all, and the flags of the environment alone."""
    plain = *PLAIN_STEP[:2], *[dict.fromkeys(flagged, False)] * 2, infos
    scripted = functools.partial(Scripted, [plain] * 3, OBSERVATIONS["several"], [spaces.Discrete(3)] * 3)
    with ParallelEnv([scripted] * 2, backend="serial") as env:
        env.reset()
        for name in PYTHON:
            monkeypatch.setattr(f"marl_parallel.core.{name}", None)
        for _ in range(3):
            results = env.step([dict.fromkeys(AGENTS, 1)] * 2)
            flags = [{**dict.fromkeys(flagged, False), "__all__": False}] * 2
            assert_same([one[1] for one in results], [*PLAIN_STEP[:2], *flags, infos])


class Dying:
    """Agents die one after the other, and the first one comes late."""

    possible_agents = AGENTS
    observation_space = spaces.Dict([*zip(AGENTS, OBSERVATIONS["several"])])  # type: ignore[list-item]
    action_space = spaces.Dict([(agent, spaces.Discrete(3)) for agent in AGENTS])

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return {agent: PLAIN_STEP[0][agent] for agent in AGENTS[1:]}, {}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        assert [*actions] == [AGENTS[1:], AGENTS, AGENTS, AGENTS[:2], AGENTS[:2], AGENTS[:1]][self.steps - 1]
        seen = [AGENTS, AGENTS, AGENTS, AGENTS[:2], AGENTS[:2], AGENTS[:1]][self.steps - 1]
        dies = {3: 3, 5: "b", 6: "a"}.get(self.steps)
        flags = {agent: agent == dies for agent in seen} | {"__all__": self.steps == 6}
        infos = {agent: {"steps": self.steps} for agent in seen}
        rewards = {agent: float(self.steps) for agent in seen}
        return {agent: PLAIN_STEP[0][agent] for agent in seen}, rewards, flags, dict.fromkeys(flags, False), infos

    def close(self) -> None:
        pass


@pytest.mark.parametrize("facade", [None, "PettingZooVecEnv"])
def test_agents_that_die_stay_in_compiled_code(facade, monkeypatch):
    """Python completes the last step of an episode, and no other one; it reads no record."""
    completed, read = [], []
    go_on, read_one = Worker._go_on, BlockTransitions._read_one
    monkeypatch.setattr(Worker, "_go_on", lambda *left: completed.append(left) or go_on(*left))
    monkeypatch.setattr(
        BlockTransitions, "_read_one", lambda *left, **more: read.append(left) or read_one(*left, **more)
    )
    with ParallelEnv([Dying] * 2, backend="serial") as env:
        front: Any = env if facade is None else getattr(vector, facade)(env)
        front.reset()
        for step in range(18):
            if facade is None:
                infos = env.step([dict.fromkeys(acting, 1) for acting in env.acting])[4]
                assert infos[1]["a"]["steps"] == step % 6 + 1
            else:
                front.step(dict.fromkeys(AGENTS, np.ones(2, np.int64)))
    assert (len(completed), len(read)) == (6, 0)


def test_environments_that_were_constructed_again_are_freed():
    """Two simulators at a time would need twice the memory."""
    with ParallelEnv([Dying], backend="serial") as env:
        for _ in range(2):
            env.reset()
            for _ in range(4):
                env.step([dict.fromkeys(acting, 1) for acting in env.acting])
            env.restart()
            gc.collect()
            assert sum(type(one).__name__ == "Dying" for one in gc.get_objects()) == 1


@pytest.mark.parametrize("make_env", [simple_spread_v3.parallel_env, multiwalker_v9.parallel_env, connect_four_v3.env])
def test_real_environments_stay_in_compiled_code(make_env, monkeypatch):
    """Python completes the last step of an episode, and no other one."""
    completed = []
    go_on = Worker._go_on

    def note(worker: Worker, *left: Any) -> Any:
        completed.append(left)
        return go_on(worker, *left)

    monkeypatch.setattr(Worker, "_go_on", note)
    with ParallelEnv([make_env] * 2, backend="serial") as env:
        env.reset()
        ends = 0
        for _ in range(30):
            *_, terminateds, truncateds, _ = env.step(env.sample_actions())
            ends += sum(flags["__all__"] for flags in (*terminateds, *truncateds))
    assert len(completed) == ends


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">f8"])
def test_spaces_with_a_byte_order_of_their_own(dtype):
    declared = [spaces.Box(-9, 9, (2,), np.dtype(dtype))] * 3
    value = np.array([1, 2], np.dtype(dtype).newbyteorder("="))
    no = {**dict.fromkeys(AGENTS, False), "__all__": False}
    plain = dict.fromkeys(AGENTS, value), dict.fromkeys(AGENTS, 1.0), no, no, {a: {} for a in AGENTS}
    actions = [[dict.fromkeys(AGENTS, value)] * 2]
    assert_equal_with_both(False, scripts=[[plain]] * 2, declared=declared, action_spaces=declared, actions=actions)


def test_which_codec_runs():
    assert marl_parallel.codec == "c"
