"""Ends of episodes, rule by rule, with expected values written out instead of the reference."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from pettingzoo import ParallelEnv as PettingZooEnv
from simulators.deterministic import Hunt, Scripted

SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
EVERYONE = {"__all__": False}


def seen(number: float) -> np.ndarray:
    return np.array([number, -number], np.float32)


def by_dict_rules(steps: list[Any], first: tuple[dict, dict] | None = None) -> Any:
    both = [(agent, BOX) for agent in ("a", "b")]
    first = first or ({"a": seen(100), "b": seen(200)}, {})
    return functools.partial(Scripted, spaces.Dict(both), spaces.Dict(both), first, steps, ("a", "b"))


class ScriptedEnds(PettingZooEnv):
    """PettingZoo rules: in each step the listed agents terminate or are truncated."""

    metadata = {"name": "scripted_ends"}  # noqa: RUF012

    def __init__(self, steps: list[tuple[str, str]], info: dict | None = None) -> None:
        self.script, self.info = steps, info or {}
        self.possible_agents = ["a", "b", "c"]
        self.agents: list[str] = []
        self.calls = 0

    def observation_space(self, agent: str) -> spaces.Space:
        return BOX

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(9)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.agents = self.possible_agents[:]
        self.time = 0
        return {agent: seen(100) for agent in self.agents}, {agent: dict(self.info) for agent in self.agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.calls += 1
        ending, cut = self.script[self.time]
        self.time += 1
        acted = self.agents
        terminated = {agent: agent in ending for agent in acted}
        truncated = {agent: agent in cut for agent in acted}
        self.agents = [agent for agent in acted if agent not in ending + cut]
        observations = {agent: seen(self.time) for agent in acted}
        return observations, dict.fromkeys(acted, 1.0), terminated, truncated, {agent: {} for agent in acted}


def acts(env: Any) -> list[dict]:
    return [dict.fromkeys(agents, 0) for agents in env.acting]


def step_of(observations: dict, *, over: Any = None, infos: dict | None = None, **flags: Any) -> tuple:
    terminateds = {agent: flags.get(agent, False) for agent in observations}
    if over is not None:
        terminateds["__all__"] = over
    return (
        observations,
        dict.fromkeys(observations, 0.5),
        terminateds,
        dict.fromkeys(observations, False),
        infos or {},
    )


def test_same_step_under_dict_rules(two_worker_setup, build):
    """The new episode's first observation with the old episode's last values; `final_obs` only for observed agents."""
    infos = {"a": {"score": 3}, "__common__": {"laps": 2}}
    script = [step_of({"a": seen(1)}, over=np.bool_(True), infos=infos, a=True)]
    first = ({"a": seen(100), "b": seen(200)}, {"b": {"spawn": "north"}, "a": {}, "__common__": {"map": 5}})
    env = build([by_dict_rules(script, first)] * 2, two_worker_setup, SAME_STEP)
    assert_same(env.reset(), ((first[0],) * 2, (first[1],) * 2))
    expected = (
        first[0],
        {"a": 0.5},
        {"a": True, "__all__": np.bool_(True)},
        {"a": False, "__all__": False},
        {
            "a": {"score": 3, "final_obs": seen(1)},
            "b": {"reset_info": {"spawn": "north"}},
            "__common__": {"laps": 2, "reset_info": {"map": 5}},
        },
    )
    for _ in range(2):
        assert_same(env.step([{"a": seen(0), "b": seen(0)}] * 2), tuple((part, part) for part in expected))
        assert [sorted(agents) for agents in env.acting] == [["a", "b"]] * 2


def test_keys_of_the_environment_are_not_overwritten(two_worker_setup, build):
    """Keys that we would add keep the environment's own value."""
    own = {"a": {"final_obs": "mine", "reset_info": "mine too"}, "__common__": {"restarted": 1}}
    script = [step_of({"a": seen(1)}, over=True, infos=own)]
    env = build([by_dict_rules(script, ({"a": seen(9)}, {"a": {"n": 1}}))] * 2, two_worker_setup, SAME_STEP)
    env.reset()
    assert_same(env.step([{}, {}])[4], (own, own))


def test_infos_of_dict_subclasses(two_worker_setup, build):
    """Added keys change neither the class nor an existing entry."""
    counted = defaultdict(list, laps=[2])
    infos = {"a": OrderedDict(hp=3), "b": OrderedDict(final_obs="mine"), "__common__": counted}
    script = [step_of({"a": seen(1), "b": seen(2)}, over=True, infos=infos)]
    first = ({"a": seen(100)}, {key: {"spawn": 1} for key in infos})
    env = build([by_dict_rules(script, first)] * 2, two_worker_setup, SAME_STEP)
    env.reset()
    again = {"reset_info": {"spawn": 1}}
    expected = {
        "a": OrderedDict(hp=3, final_obs=seen(1), **again),
        "b": OrderedDict(final_obs="mine", **again),
        "__common__": defaultdict(list, laps=[2], **again),
    }
    assert_same(env.step([{}, {}])[4], (expected, expected))
    assert counted == {"laps": [2]}


def test_infos_that_are_mappings(two_worker_setup, build):
    """They become dicts if a key is added."""
    script = [step_of({"a": seen(1)}, over=True, infos={"a": UserDict(hp=3), "b": UserDict(hp=2)})]
    env = build([by_dict_rules(script, ({"a": seen(100)}, {"a": {"spawn": 1}}))] * 2, two_worker_setup, SAME_STEP)
    env.reset()
    infos_of_step = env.step([{}, {}])[4][1]
    assert_same(infos_of_step["a"], {"hp": 3, "final_obs": seen(1), "reset_info": {"spawn": 1}})
    assert type(infos_of_step["b"]) is UserDict


def test_agents_that_share_one_info_dict(two_worker_setup, build):
    """Keys that are added for one agent do not appear for the others."""
    nothing: dict[str, Any] = {}
    spawn = {"spawn": 1}
    infos = {"a": nothing, "b": nothing, "c": nothing}
    script = [step_of({"a": seen(1), "b": seen(2)}, over=True, infos=infos)]
    first = ({"a": seen(100)}, {"a": spawn, "b": spawn})
    env = build([by_dict_rules(script, first)] * 2, two_worker_setup, SAME_STEP)
    env.reset()
    again = {"reset_info": {"spawn": 1}}
    expected = {"a": {"final_obs": seen(1), **again}, "b": {"final_obs": seen(2), **again}, "c": {}}
    for _ in range(2):
        assert_same(env.step([{}, {}])[4], (expected, expected))


@pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
def test_missing_all_is_false_under_dict_rules(mode, two_worker_setup, build):
    """All agents may be done; without `__all__` the episode goes on."""
    script = [
        step_of({"a": seen(1), "b": seen(2)}, a=True, b=True),
        step_of({}),
        step_of({"b": seen(3)}, over=False),
    ]
    env = build([by_dict_rules(script)] * 2, two_worker_setup, mode)
    env.reset()
    for observations, rewards, terminateds, truncateds, infos in script:
        expected = (observations, rewards, {**EVERYONE, **terminateds}, {**truncateds, **EVERYONE}, infos)
        assert_same(env.step([{}, {}]), tuple((part, part) for part in expected))


def test_next_step_resets_in_the_next_step(two_worker_setup, build):
    script = [step_of({"a": seen(1)}, over=True, a=True), step_of({"b": seen(2)})]
    first = ({"a": seen(100), "b": seen(200)}, {"a": {"spawn": 1}})
    env = build([by_dict_rules(script, first), by_dict_rules(script[1:], first)], two_worker_setup, NEXT_STEP)
    env.reset()
    last = env.step([{"a": seen(0)}, {}])
    assert_same(last[0], ({"a": seen(1)}, {"b": seen(2)}))
    assert_same(last[4], ({}, {}))
    again = env.step([{"a": seen(5), "nobody": None}, {}])
    unfinished = {"a": False, "b": False, "__all__": False}
    assert_same([part[0] for part in again], [first[0], {"a": 0.0, "b": 0.0}, unfinished, unfinished, first[1]])
    assert_same(again[0][1], {"b": seen(2)})
    assert [len(actions) for actions in env.get_attr("actions")] == [1, 2]


@pytest.mark.parametrize("mode", [NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
def test_reset_cancels_the_pending_autoreset(mode, two_worker_setup, build):
    env = build([functools.partial(ScriptedEnds, [("abc", ""), ("a", "")])] * 2, two_worker_setup, mode)
    env.reset()
    env.step(acts(env))
    observations, _ = env.reset(env_ids=[1])
    assert_same(observations, (dict.fromkeys("abc", seen(100)),))
    assert [sorted(agents) for agents in env.acting][1] == ["a", "b", "c"]
    result = env.step([{}, dict.fromkeys("abc", 0)])
    assert_same(result[0][1], dict.fromkeys("abc", seen(1)))
    assert env.get_attr("calls") == (1, 2)


def test_disabled_under_dict_rules_keeps_stepping(two_worker_setup, build):
    """An environment whose episode is over is still stepped."""
    script = [step_of({"a": seen(1)}, over=True), step_of({"a": seen(2)}, over=True), step_of({}, over=1)]
    env = build([by_dict_rules(script)] * 2, two_worker_setup, DISABLED)
    env.reset()
    for number, (observations, rewards, terminateds, truncateds, infos) in enumerate(script):
        expected = (observations, rewards, terminateds, {**truncateds, "__all__": False}, infos)
        action = {"a": seen(number)}
        assert_same(env.step([action, action]), tuple((part, part) for part in expected))
    assert_same(env.get_attr("actions")[0], [{"a": seen(number)} for number in range(3)])


@pytest.mark.parametrize(("last", "flags"), [("t", (True, False)), ("u", (False, True))])
def test_disabled_under_pettingzoo_rules_stops_stepping(last, flags, two_worker_setup, build):
    script = [("abc", "") if last == "t" else ("a", "bc")]
    env = build([functools.partial(ScriptedEnds, script)] * 2, two_worker_setup, DISABLED)
    env.reset()
    env.step(acts(env))
    assert env.acting == ([], [])
    empty = ({}, {}, {"__all__": flags[0]}, {"__all__": flags[1]}, {})
    for actions in ({}, {"a": 1, "nobody": 2}):
        assert_same(env.step([actions] * 2), tuple((part, part) for part in empty))
    assert env.get_attr("calls") == (1, 1)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ([("abc", "")], (True, False)),
        ([("", "abc")], (False, True)),
        ([("ab", "c")], (False, True)),
        ([("", "ab"), ("c", "")], (True, False)),
        ([("ab", ""), ("", "c")], (False, True)),
        ([("a", ""), ("", "b"), ("", ""), ("c", "")], (True, False)),
    ],
    ids=str,
)
def test_all_under_pettingzoo_rules(script, flags, two_worker_setup, build):
    """The episode is over when no agent is left; terminated if all agents alive before that step terminated."""
    env = build([functools.partial(ScriptedEnds, script)] * 2, two_worker_setup, NEXT_STEP)
    env.reset()
    for remaining in reversed(range(len(script))):
        _, _, terminateds, truncateds, _ = env.step(acts(env))
        expected = flags if remaining == 0 else (False, False)
        assert_same((terminateds[0]["__all__"], truncateds[1]["__all__"]), expected)


class ReturnsAll(ScriptedEnds):
    """Returns `__all__` itself, in one kind of flags only and always False."""

    def __init__(self, steps: list[tuple[str, str]], kind: int) -> None:
        super().__init__(steps)
        self.kind = kind

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        result = super().step(actions)
        result[self.kind]["__all__"] = np.False_
        return result


@pytest.mark.parametrize("ending", [("abc", ""), ("", "abc"), ("ab", "c")], ids=str)
@pytest.mark.parametrize("kind", [2, 3], ids=["terminateds", "truncateds"])
def test_all_in_one_kind_of_flags_under_pettingzoo_rules(kind, ending, two_worker_setup, build):
    """The environment's own value is kept; the other kind of flags ends the episode when no agent is left."""
    env = build([functools.partial(ReturnsAll, [("", ""), ending], kind)] * 2, two_worker_setup, DISABLED)
    env.reset()
    other = {2: 3, 3: 2}[kind]
    for over in (False, True):
        result = env.step(acts(env))
        assert_same([flags["__all__"] for flags in result[kind]], [np.False_] * 2)
        assert_same([flags["__all__"] for flags in result[other]], [over] * 2)
    assert env.acting == ([], [])
    assert_same(env.step([{}, {}])[other], ({"__all__": True},) * 2)
    assert env.get_attr("calls") == (2, 2)


def test_same_step_under_pettingzoo_rules(two_worker_setup, build):
    """`final_obs` for agents of the last step, `reset_info` for agents with one; then all agents are alive again."""
    env = build([functools.partial(ScriptedEnds, [("a", ""), ("b", "c")], {"hp": 3})] * 2, two_worker_setup, SAME_STEP)
    env.reset()
    env.step(acts(env))
    assert [sorted(agents) for agents in env.acting] == [["b", "c"]] * 2
    observations, rewards, terminateds, truncateds, infos = (part[0] for part in env.step(acts(env)))
    assert_same(observations, dict.fromkeys("abc", seen(100)))
    assert_same(rewards, {"b": 1.0, "c": 1.0})
    assert_same(terminateds, {"b": True, "c": False, "__all__": False})
    assert_same(truncateds, {"b": False, "c": True, "__all__": True})
    fresh = {"reset_info": {"hp": 3}}
    assert_same(infos, {"a": fresh, "b": {"final_obs": seen(2), **fresh}, "c": {"final_obs": seen(2), **fresh}})
    assert [sorted(agents) for agents in env.acting] == [["a", "b", "c"]] * 2


@pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
def test_single_agent_environment(mode, two_worker_setup, build):
    """Gymnasium's own environments have one agent, `agent_0`, and PettingZoo rules."""
    make = functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=2)
    env = build([make] * 2, two_worker_setup, mode)
    assert env.possible_agents == ["agent_0"]
    env.reset()
    env.step([{"agent_0": 0}] * 2)
    observations, rewards, terminateds, truncateds, infos = env.step([{"agent_0": 1}] * 2)
    assert_same(terminateds, ({"agent_0": False, "__all__": False},) * 2)
    assert_same(truncateds, ({"agent_0": True, "__all__": True},) * 2)
    assert ("final_obs" in infos[0]["agent_0"]) == (mode is SAME_STEP)
    assert env.acting == ((["agent_0"],) * 2 if mode is SAME_STEP else ([], []))
    assert observations[0]["agent_0"].dtype == np.float32
    assert_same(rewards, ({"agent_0": 1.0},) * 2)


def test_turn_based_environment(two_worker_setup, build):
    """Only the agent whose turn it is acts; infos name it from the first reset on."""
    classic = pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    env = build([classic.env] * 2, two_worker_setup, SAME_STEP)
    _, infos = env.reset()
    infos_of_step = {agent: {"active_agent": "player_1"} for agent in ("player_1", "player_2")}
    assert_same(infos, (infos_of_step, infos_of_step))
    for turn, cell in enumerate([0, 1, 3, 4, 6]):
        player, waiting = ("player_1", "player_2") if turn % 2 == 0 else ("player_2", "player_1")
        assert env.acting == ([player],) * 2
        result = env.step([{player: cell, waiting: 8}, {player: cell}])
    assert_same(result[2], ({"player_1": True, "player_2": True, "__all__": True},) * 2)
    assert result[1][0]["player_1"] == 1
    assert result[1][0]["player_2"] == -1
    assert {"final_obs", "reset_info"} <= result[4][0]["player_2"].keys()
    assert env.acting == (["player_1"],) * 2


def test_dict_environments_receive_actions_unchanged(two_worker_setup, build):
    """Nothing is dropped or required: done agents, unknown agents, no agents."""
    script = [step_of({"a": seen(1), "b": seen(2)}, a=True), step_of({"b": seen(3)}), step_of({"b": seen(4)})]
    env = build([by_dict_rules(script)] * 2, two_worker_setup)
    env.reset()
    sent = [{"a": seen(5), "b": seen(6)}, {"a": seen(7), "nobody": ["north", 3]}, {"b": None}]
    for actions in sent:
        env.step([actions, {}])
    assert_same(env.get_attr("actions"), (sent, [{}, {}, {}]))


def test_acting_agents_that_leave_and_rejoin(two_worker_setup, build):
    """Acting: alive and in the latest observation; an agent that is observed after its end has come back."""
    script = [
        step_of({"a": seen(1)}),
        step_of({"a": seen(2), "b": seen(3), "c": {"unknown": 1}}),
        step_of({"b": seen(4), "c": {"unknown": 2}}, c=True),
        step_of({"a": seen(5), "c": {"unknown": 3}}),
    ]
    env = build([by_dict_rules(script, ({"a": seen(0)}, {}))] * 2, two_worker_setup, DISABLED)
    env.reset()
    assert env.acting == (["a"], ["a"])
    for expected in (["a"], ["a", "b", "c"], ["b"], ["a", "c"]):
        env.step([{}, {}])
        assert [sorted(agents) for agents in env.acting] == [expected] * 2


class UnobservedAgent(Hunt):
    """The last wolf has rewards and flags but no observations; the others leave before it is truncated."""

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, infos = super().reset(seed=seed, options=options)
        self.last, *_ = self.agents
        self.time = 0
        return {agent: seen for agent, seen in observations.items() if agent != self.last}, infos

    def step(self, actions: dict) -> Any:
        self.time += 1
        others = [agent for agent in self.agents if agent != self.last]
        ends, cut = {**dict.fromkeys(others, self.time == 2), self.last: False}, self.time == 4
        rewards = dict.fromkeys(self.agents, 1.0)
        seen = {agent: self.observation_space(agent).sample() for agent in others}
        flags = ends, {**dict.fromkeys(others, False), self.last: cut}
        if self.time == 2:
            self.agents = [self.last]
        if cut:
            self.agents = []
        return seen, rewards, *flags, {}


def test_last_agent_without_observations(backend_setup, build):
    """The flags of the last agent decide how the episode ends."""
    env = build([UnobservedAgent], backend_setup, "DISABLED")
    env.reset()
    ends = []
    for _ in range(4):
        actions = [{agent: env.action_space[agent].sample() for agent in env.acting[0]}]
        _, _, terminateds, truncateds, _ = env.step(actions)
        ends.append((terminateds[0]["__all__"], truncateds[0]["__all__"]))
    assert ends == [(False, False)] * 3 + [(False, True)]
