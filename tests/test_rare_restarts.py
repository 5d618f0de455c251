"""Restarts at moments that are rare: what is told is of the episode it is told of, once, and never half of it.

Each simulator's observation is a hundred for each time it was built, ten for each episode, and one for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Setup
from gymnasium import spaces

from marl_parallel import EnvError, ParallelEnv

SETUPS = [Setup("serial", True, 1), Setup("thread", True, 1), Setup("process", True, 1), Setup("process", False, 1)]
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=str)
ACTIONS = {"a": 0, "b": 0}


class Clock:
    """Two agents in episodes of three steps; breaks or says odd things where `at` of a class beneath says so."""

    possible_agents = ("a", "b")
    observation_space = spaces.Dict({agent: spaces.Box(-999, 999, (1,), np.float32) for agent in "ab"})
    action_space = spaces.Dict({agent: spaces.Discrete(2) for agent in "ab"})
    length = 3

    def __init__(self, restarts: int = 0) -> None:
        self.restarts, self.episode, self.time = restarts, 0, 0
        self.got: list[dict] = []

    def now(self) -> np.ndarray:
        return np.full(1, 100 * self.restarts + 10 * self.episode + self.time, np.float32)

    def seen(self) -> dict[str, Any]:
        return {"a": self.now(), "b": self.now()}

    def infos(self) -> dict[str, Any]:
        return {"a": {}, "b": {}}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.episode, self.time = self.episode + 1, 0
        return self.seen(), {"a": {}, "b": {}}

    def step(self, actions: dict) -> tuple[dict, ...]:
        self.got.append(actions)
        self.time += 1
        over = {"__all__": self.time == self.length}
        return self.seen(), {"a": 1.0, "b": 1.0}, over, {"__all__": False}, self.infos()

    def state(self) -> np.ndarray:
        if not self.episode:
            raise RuntimeError("reset() needs to be called before state")
        return self.now()

    @property
    def state_space(self) -> spaces.Space:
        return spaces.Box(-999, 999, (1,), np.float32)

    def broken(self) -> None:
        raise RuntimeError("broken in a call")


def alone(build: Callable[..., ParallelEnv], make: type, setup: Setup, mode: Any = True) -> ParallelEnv:
    return build([make], setup, mode, on_error="restart")


def step(env: ParallelEnv) -> tuple[Any, ...]:
    return tuple(dicts[0] for dicts in env.step([ACTIONS]))


class FailsToBegin(Clock):
    """The second copy breaks in its first reset."""

    episodes = 0

    def reset(self, **keywords: Any) -> tuple[dict, dict]:
        if (self.restarts, self.episode) == (1, self.episodes):
            raise RuntimeError("broken in a reset")
        return super().reset(**keywords)


class FailsToBeginAgain(FailsToBegin):
    """The second copy breaks in its second reset."""

    episodes = 1


@each_setup
@pytest.mark.parametrize("mode", [True, "NEXT_STEP", False])
def test_a_mark_goes_with_its_episode(mode, setup, build):
    """Broken while it was idle, and again in the caller's own reset: that one is told of, and nothing after it."""
    # With auto-reset in the same step, a fresh copy has been reset before anybody asks for it.
    env = alone(build, FailsToBeginAgain if mode is True else FailsToBegin, setup, mode)
    env.reset()
    step(env)
    with pytest.raises(EnvError):
        env.call("broken")
    (observations,), (infos,) = env.reset()
    assert observations["a"] == 210
    assert infos["__common__"]["restarted"]
    for time in (1, 2):
        observations, rewards, terminateds, truncateds, infos = step(env)
        assert observations["a"] == 210 + time
        assert rewards == {"a": 1.0, "b": 1.0}
        assert not terminateds["__all__"]
        assert not truncateds["__all__"]
        assert "__common__" not in infos
    assert env.get_attr("got") == ([ACTIONS] * 2,)


class SaysWhoWon(Clock):
    """The first episode's end says something; the third reset fails."""

    length = 1

    def infos(self) -> dict[str, Any]:
        return {"a": {"winner": "red"} if self.episode == 1 else {}, "b": {}}

    def reset(self, **keywords: Any) -> tuple[dict, dict]:
        if (self.restarts, self.episode) == (0, 2):
            raise RuntimeError("broken in a reset")
        return super().reset(**keywords)


@each_setup
def test_a_last_step_says_what_it_said_itself(setup, build):
    env = alone(build, SaysWhoWon, setup)
    env.reset()
    assert step(env)[4]["a"]["winner"] == "red"
    infos = step(env)[4]
    assert infos["__common__"]["restarted"]
    assert infos["a"].keys() == {"final_obs"}
    assert infos["a"]["final_obs"] == 21


class SeesTooMuch(Clock):
    """The first copy's agent b sees too many numbers at one moment."""

    at = (1, 2)

    def seen(self) -> dict[str, Any]:
        wrong = not self.restarts and (self.episode, self.time) == self.at
        return {"a": self.now(), "b": np.zeros(7, np.float32) if wrong else self.now()}


class SeesTooMuchAtFirst(SeesTooMuch):
    at = (2, 0)


class TellsTooMuch(Clock):
    """The first copy's last info does not pickle, and says that agent b has terminated."""

    def step(self, actions: dict) -> tuple[dict, ...]:
        observations, rewards, terminateds, truncateds, infos = super().step(actions)
        if not self.restarts and self.time == 2:
            infos["a"]["generator"] = (number for number in range(3))
            terminateds["b"] = True
        return observations, rewards, terminateds, truncateds, infos


@each_setup
@pytest.mark.parametrize("make", [SeesTooMuch, TellsTooMuch])
def test_a_step_that_is_refused_is_told_as_interrupted(make, setup, build):
    env = alone(build, make, setup)
    env.reset()
    step(env)
    observations, rewards, terminateds, truncateds, infos = step(env)
    assert observations == {"a": 110, "b": 110}
    assert rewards == {"a": 0.0, "b": 0.0}
    assert terminateds == {"a": False, "b": False, "__all__": False}
    assert truncateds == {"a": True, "b": True, "__all__": True}
    assert {agent: infos[agent]["final_obs"][0] for agent in "ab"} in ({"a": 0, "b": 0}, {"a": 11, "b": 11})


@each_setup
def test_a_first_observation_that_is_refused_spoils_no_last_one(setup, build):
    env = alone(build, SeesTooMuchAtFirst, setup)
    env.reset()
    for _ in range(3):
        observations, rewards, terminateds, _, infos = step(env)
    assert observations == {"a": 110, "b": 110}
    assert rewards == {"a": 1.0, "b": 1.0}
    assert terminateds["__all__"]
    assert {agent: infos[agent]["final_obs"][0] for agent in "ab"} == {"a": 13, "b": 13}


class Breaks(Clock):
    def step(self, actions: dict) -> tuple[dict, ...]:
        if not self.restarts:
            raise RuntimeError("broken in a step")
        return super().step(actions)


@each_setup
@pytest.mark.parametrize("mode", ["NEXT_STEP", "DISABLED"])
def test_who_looks_at_it_early_changes_nothing(mode, setup, build):
    """A fresh simulator whose reset is not due yet has a state all the same."""
    env, other = (alone(build, Breaks, setup, mode) for _ in range(2))
    for one in (env, other):
        one.reset()
        assert step(one)[3]["__all__"]
    assert env.state().tolist() == [[110]]
    assert env.state().tolist() == [[110]]
    if mode == "NEXT_STEP":
        assert step(env)[0] == step(other)[0] == {"a": 110, "b": 110}
    else:
        assert env.reset()[0][0]["a"] == 120  # it has been reset before
        other.reset()
    assert step(env)[2]["__all__"] is False
    assert env.stats().restarts == 1
    assert env.state()[0] == env.call("now")[0]


class UsesItsArraysAgain(Clock):
    """Writes into the arrays it has given, and says what `copy.deepcopy` refuses."""

    def __init__(self, restarts: int = 0) -> None:
        super().__init__(restarts)
        self.array, self.near = np.zeros(1, np.float32), {"b": 1}

    def seen(self) -> dict[str, Any]:
        self.array[...] = self.now()
        return {"a": self.array, "b": self.array}

    def infos(self) -> dict[str, Any]:
        return {"a": {"near": self.near.keys()}, "b": {}}


@each_setup
def test_a_last_observation_is_kept_whatever_is_beside_it(setup, build):
    env = build([UsesItsArraysAgain], setup)
    env.reset()
    for _ in range(3):
        observations, *_, infos = step(env)
    assert observations["a"] == 20
    assert infos["a"]["final_obs"] == 13
    assert [*infos["a"]["near"]] == ["b"]
