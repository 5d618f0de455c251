"""`ParallelEnv.restart`: environments are constructed again on request."""

from __future__ import annotations

import functools

import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.setups import CONCURRENT_SETUPS, Setup
from simulators.counting import ACTIONS, Counting, seen
from simulators.crashing import Fate, crashing, seed_of

from marl_parallel import EnvError, ParallelEnv

pytestmark = pytest.mark.release_independent

SETUPS = [Setup("serial", True, 2), *CONCURRENT_SETUPS]
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=str)


def seeds_and_resets(observations) -> list[tuple[int, int]]:
    return [(int(dicts["long"][0]), int(dicts["long"][1])) for dicts in observations]


@each_setup
@pytest.mark.parametrize("mode", [*AutoresetMode], ids=lambda mode: mode.name)
@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_chosen_environments(on_error, mode, setup, build):
    """They are new and have derived seeds; the others go on, and step like before."""
    env = build([functools.partial(Counting, 3)] * 4, setup, mode, on_error=on_error)
    env.reset()
    env.step([ACTIONS] * 4)
    env.restart([1, 3])
    assert env.acting == (["long", "short"], [], ["long", "short"], [])
    with pytest.raises(ResetNeeded, match=r"\[1, 3\]"):
        env.step([ACTIONS] * 4)
    step = env.step([ACTIONS] * 2, [0, 2])
    assert_same(step[0][1]["long"], seen(44, 1, 2))
    observations, infos = env.reset(env_ids=[3, 1])
    assert seeds_and_resets(observations) == [(seed_of(42, 3, 1), 1), (seed_of(42, 1, 1), 1)]
    assert infos == ({"long": {}, "short": {}},) * 2
    observations = env.step([ACTIONS] * 4)[0]
    assert_same(observations[1]["long"], seen(seed_of(42, 1, 1), 1, 1))
    stats = env.stats()
    assert (stats.restarts, stats.faults, stats.recycled) == (2, 0, 0)
    assert env.seed() == (42, seed_of(42, 1, 1), 44, seed_of(42, 3, 1))


@each_setup
@pytest.mark.parametrize("steps", [0, 1])
def test_who_acts_after_the_reset(steps, setup, build):
    env = build([Counting] * 3, setup)
    env.reset()
    for _ in range(steps):
        env.step([ACTIONS] * 3)
    env.restart([1])
    assert env.acting[1] == []
    env.reset(env_ids=[1])
    assert env.acting == (["long", "short"],) * 3


@each_setup
def test_all_environments(setup, build):
    """None restarts all; before the first reset, too, and several times; an explicit seed is the caller's."""
    env = build([Counting] * 3, setup)
    env.restart()
    assert seeds_and_resets(env.reset()[0]) == [(seed_of(42, env_id, 1), 1) for env_id in range(3)]
    env.restart()
    env.restart()
    assert seeds_and_resets(env.reset(seed=7)[0]) == [(7, 1), (8, 1), (9, 1)]


def test_running_episodes_are_dropped(build):
    """They do not count as finished."""
    env = build([functools.partial(Counting, 3)] * 2, Setup("process", True, 2))
    env.reset()
    env.step([ACTIONS] * 2)
    env.step([ACTIONS] * 2)
    env.restart([1])
    env.reset(env_ids=[1])
    env.step([ACTIONS] * 2)
    assert [(episode.env_id, episode.length) for episode in env.finished_episodes] == [(0, 3)]
    env.step([ACTIONS] * 2)
    env.step([ACTIONS] * 2)
    assert [(episode.env_id, episode.length) for episode in env.finished_episodes] == [(1, 3)]


@each_setup
def test_constructors_that_fail(setup, build):
    """With `on_error="raise"` the error is raised and everything is closed; else the environment is rebuilt again."""
    makes = [crashing(Counting, {(1, 1): Fate("raise", "constructor")})] * 2
    env = build(makes, setup)
    env.reset()
    with pytest.raises(EnvError, match=r"environment 1 .* raised in constructor"):
        env.restart([1])
    with pytest.raises(ClosedEnvironmentError):
        env.step([ACTIONS] * 2)
    env = build(makes, setup, on_error="restart")
    env.reset()
    with pytest.raises(EnvError, match=r"environment 1 .* raised in constructor"):
        env.restart([1])
    observations = env.reset()[0]
    assert seeds_and_resets(observations) == [(42, 2), (seed_of(42, 1, 2), 1)]


def test_refused(build):
    """While something is in flight, unknown environments, after `close`."""
    env: ParallelEnv = build([Counting] * 2, Setup("process", True, 1))
    env.reset()
    env.send([ACTIONS] * 2)
    with pytest.raises(AlreadyPendingCallError):
        env.restart([0])
    env.recv()
    with pytest.raises(ValueError, match="no environment 2"):
        env.restart([2])
    env.step([ACTIONS] * 2)
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.restart([0])
