"""What the end of an episode means, sentence by sentence, on scripts written out here: without the reference."""

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


class Told(PettingZooEnv):
    """PettingZoo rules: in each step these terminate, those are truncated."""

    metadata = {"name": "told"}  # noqa: RUF012

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


def test_same_step_under_dict_rules(packed, build):
    """The new episode's first observation; all else is the old one's last; `final_obs` only who was observed."""
    infos = {"a": {"score": 3}, "__common__": {"laps": 2}}
    script = [step_of({"a": seen(1)}, over=np.bool_(True), infos=infos, a=True)]
    first = ({"a": seen(100), "b": seen(200)}, {"b": {"spawn": "north"}, "a": {}, "__common__": {"map": 5}})
    env = build([by_dict_rules(script, first)] * 2, packed, SAME_STEP)
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


def test_what_the_environment_has_stays(packed, build):
    """Keys we would add are the environment's own where it has them already."""
    own = {"a": {"final_obs": "mine", "reset_info": "mine too"}, "__common__": {"restarted": 1}}
    script = [step_of({"a": seen(1)}, over=True, infos=own)]
    env = build([by_dict_rules(script, ({"a": seen(9)}, {"a": {"n": 1}}))] * 2, packed, SAME_STEP)
    env.reset()
    assert_same(env.step([{}, {}])[4], (own, own))


def test_infos_of_a_class_of_their_own(packed, build):
    """What is added changes neither their class nor what they have by that name already."""
    counted = defaultdict(list, laps=[2])
    infos = {"a": OrderedDict(hp=3), "b": OrderedDict(final_obs="mine"), "__common__": counted}
    script = [step_of({"a": seen(1), "b": seen(2)}, over=True, infos=infos)]
    first = ({"a": seen(100)}, {key: {"spawn": 1} for key in infos})
    env = build([by_dict_rules(script, first)] * 2, packed, SAME_STEP)
    env.reset()
    again = {"reset_info": {"spawn": 1}}
    expected = {
        "a": OrderedDict(hp=3, final_obs=seen(1), **again),
        "b": OrderedDict(final_obs="mine", **again),
        "__common__": defaultdict(list, laps=[2], **again),
    }
    assert_same(env.step([{}, {}])[4], (expected, expected))
    assert counted == {"laps": [2]}


def test_infos_that_are_mappings_but_no_dicts(packed, build):
    """They become dicts where something is added."""
    script = [step_of({"a": seen(1)}, over=True, infos={"a": UserDict(hp=3), "b": UserDict(hp=2)})]
    env = build([by_dict_rules(script, ({"a": seen(100)}, {"a": {"spawn": 1}}))] * 2, packed, SAME_STEP)
    env.reset()
    told = env.step([{}, {}])[4][1]
    assert_same(told["a"], {"hp": 3, "final_obs": seen(1), "reset_info": {"spawn": 1}})
    assert type(told["b"]) is UserDict


def test_infos_that_are_one_and_the_same_dict(packed, build):
    """An environment may tell all agents by one dict; what is added for one of them is not told to the others."""
    nothing: dict[str, Any] = {}
    spawn = {"spawn": 1}
    infos = {"a": nothing, "b": nothing, "c": nothing}
    script = [step_of({"a": seen(1), "b": seen(2)}, over=True, infos=infos)]
    first = ({"a": seen(100)}, {"a": spawn, "b": spawn})
    env = build([by_dict_rules(script, first)] * 2, packed, SAME_STEP)
    env.reset()
    again = {"reset_info": {"spawn": 1}}
    expected = {"a": {"final_obs": seen(1), **again}, "b": {"final_obs": seen(2), **again}, "c": {}}
    for _ in range(2):
        assert_same(env.step([{}, {}])[4], (expected, expected))


@pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
def test_all_is_false_where_a_dict_environment_does_not_say(mode, packed, build):
    """Dict rules: everybody may be done, as long as the environment does not say `__all__` it is not over."""
    script = [
        step_of({"a": seen(1), "b": seen(2)}, a=True, b=True),
        step_of({}),
        step_of({"b": seen(3)}, over=False),
    ]
    env = build([by_dict_rules(script)] * 2, packed, mode)
    env.reset()
    for observations, rewards, terminateds, truncateds, infos in script:
        expected = (observations, rewards, {**EVERYONE, **terminateds}, {**truncateds, **EVERYONE}, infos)
        assert_same(env.step([{}, {}]), tuple((part, part) for part in expected))


def test_next_step_resets_in_the_next_step(packed, build):
    script = [step_of({"a": seen(1)}, over=True, a=True), step_of({"b": seen(2)})]
    first = ({"a": seen(100), "b": seen(200)}, {"a": {"spawn": 1}})
    env = build([by_dict_rules(script, first), by_dict_rules(script[1:], first)], packed, NEXT_STEP)
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
def test_a_reset_in_between_cancels_the_due_one(mode, packed, build):
    env = build([functools.partial(Told, [("abc", ""), ("a", "")])] * 2, packed, mode)
    env.reset()
    env.step(acts(env))
    observations, _ = env.reset(env_ids=[1])
    assert_same(observations, (dict.fromkeys("abc", seen(100)),))
    assert [sorted(agents) for agents in env.acting][1] == ["a", "b", "c"]
    result = env.step([{}, dict.fromkeys("abc", 0)])
    assert_same(result[0][1], dict.fromkeys("abc", seen(1)))
    assert env.get_attr("calls") == (1, 2)


def test_disabled_under_dict_rules_steps_on(packed, build):
    """An environment that is over is stepped on, as its own business."""
    script = [step_of({"a": seen(1)}, over=True), step_of({"a": seen(2)}, over=True), step_of({}, over=1)]
    env = build([by_dict_rules(script)] * 2, packed, DISABLED)
    env.reset()
    for number, (observations, rewards, terminateds, truncateds, infos) in enumerate(script):
        expected = (observations, rewards, terminateds, {**truncateds, "__all__": False}, infos)
        action = {"a": seen(number)}
        assert_same(env.step([action, action]), tuple((part, part) for part in expected))
    assert_same(env.get_attr("actions")[0], [{"a": seen(number)} for number in range(3)])


@pytest.mark.parametrize(("last", "flags"), [("t", (True, False)), ("u", (False, True))])
def test_disabled_under_pettingzoo_rules_does_not_touch(last, flags, packed, build):
    script = [("abc", "") if last == "t" else ("a", "bc")]
    env = build([functools.partial(Told, script)] * 2, packed, DISABLED)
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
def test_all_under_pettingzoo_rules(script, flags, packed, build):
    """Over when nobody is left; terminated if everyone alive before that very step terminated."""
    env = build([functools.partial(Told, script)] * 2, packed, NEXT_STEP)
    env.reset()
    for remaining in reversed(range(len(script))):
        _, _, terminateds, truncateds, _ = env.step(acts(env))
        expected = flags if remaining == 0 else (False, False)
        assert_same((terminateds[0]["__all__"], truncateds[1]["__all__"]), expected)


class Outspoken(Told):
    """Says `__all__` itself, but in one kind of flags only, and always that nothing is over."""

    def __init__(self, steps: list[tuple[str, str]], kind: int) -> None:
        super().__init__(steps)
        self.kind = kind

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        result = super().step(actions)
        result[self.kind]["__all__"] = np.False_
        return result


@pytest.mark.parametrize("ending", [("abc", ""), ("", "abc"), ("ab", "c")], ids=str)
@pytest.mark.parametrize("kind", [2, 3], ids=["terminateds", "truncateds"])
def test_all_in_one_kind_of_flags_under_pettingzoo_rules(kind, ending, packed, build):
    """It stays as it was said; that nobody is left ends the episode all the same, so the other kind says that."""
    env = build([functools.partial(Outspoken, [("", ""), ending], kind)] * 2, packed, DISABLED)
    env.reset()
    other = {2: 3, 3: 2}[kind]
    for over in (False, True):
        result = env.step(acts(env))
        assert_same([flags["__all__"] for flags in result[kind]], [np.False_] * 2)
        assert_same([flags["__all__"] for flags in result[other]], [over] * 2)
    assert env.acting == ([], [])
    assert_same(env.step([{}, {}])[other], ({"__all__": True},) * 2)
    assert env.get_attr("calls") == (2, 2)


def test_same_step_under_pettingzoo_rules(packed, build):
    """`final_obs` for those in the last step, `reset_info` for all who got one, alive are all of the new episode."""
    env = build([functools.partial(Told, [("a", ""), ("b", "c")], {"hp": 3})] * 2, packed, SAME_STEP)
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
def test_a_single_agent_environment(mode, packed, build):
    """Gymnasium's own environments have one agent, `agent_0`, and PettingZoo rules."""
    make = functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=2)
    env = build([make] * 2, packed, mode)
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


def test_a_turn_based_environment(packed, build):
    """Only the one whose turn it is acts, and all are told who that is, from the first reset on."""
    classic = pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    env = build([classic.env] * 2, packed, SAME_STEP)
    _, infos = env.reset()
    told = {agent: {"active_agent": "player_1"} for agent in ("player_1", "player_2")}
    assert_same(infos, (told, told))
    for turn, cell in enumerate([0, 1, 3, 4, 6]):
        player, waiting = ("player_1", "player_2") if turn % 2 == 0 else ("player_2", "player_1")
        assert env.acting == ([player],) * 2
        result = env.step([{player: cell, waiting: 8}, {player: cell}])
    assert_same(result[2], ({"player_1": True, "player_2": True, "__all__": True},) * 2)
    assert result[1][0]["player_1"] == 1
    assert result[1][0]["player_2"] == -1
    assert {"final_obs", "reset_info"} <= result[4][0]["player_2"].keys()
    assert env.acting == (["player_1"],) * 2


def test_dict_environments_get_the_actions_as_given(packed, build):
    """Nothing is dropped, nothing is missed: agents who are done, unknown ones, none at all."""
    script = [step_of({"a": seen(1), "b": seen(2)}, a=True), step_of({"b": seen(3)}), step_of({"b": seen(4)})]
    env = build([by_dict_rules(script)] * 2, packed)
    env.reset()
    given = [{"a": seen(5), "b": seen(6)}, {"a": seen(7), "nobody": ["north", 3]}, {"b": None}]
    for actions in given:
        env.step([actions, {}])
    assert_same(env.get_attr("actions"), (given, [{}, {}, {}]))


def test_agents_who_rejoin_or_leave_without_a_word(packed, build):
    """Acting: seen in this episode, not done yet, and in the latest observation."""
    script = [
        step_of({"a": seen(1)}),
        step_of({"a": seen(2), "b": seen(3), "c": {"unknown": 1}}),
        step_of({"b": seen(4), "c": {"unknown": 2}}, c=True),
        step_of({"a": seen(5), "c": {"unknown": 3}}),
    ]
    env = build([by_dict_rules(script, ({"a": seen(0)}, {}))] * 2, packed, DISABLED)
    env.reset()
    assert env.acting == (["a"], ["a"])
    for expected in (["a"], ["a", "b", "c"], ["b"], ["a"]):
        env.step([{}, {}])
        assert [sorted(agents) for agents in env.acting] == [expected] * 2


class Unseen(Hunt):
    """A wolf who is rewarded and flagged, but sees nothing; the others go before it is cut off."""

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


def test_the_last_one_was_never_seen(each, build):
    """How the episode ends is told by whoever is flagged then."""
    env = build([Unseen], each, "DISABLED")
    env.reset()
    ends = []
    for _ in range(4):
        actions = [{agent: env.action_space[agent].sample() for agent in env.acting[0]}]
        _, _, terminateds, truncateds, _ = env.step(actions)
        ends.append((terminateds[0]["__all__"], truncateds[0]["__all__"]))
    assert ends == [(False, False)] * 3 + [(False, True)]
