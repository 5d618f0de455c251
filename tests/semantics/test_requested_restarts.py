"""`ParallelEnv.restart`: environments are constructed again on request."""

from __future__ import annotations

import functools
import os
import time

import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.setups import CONCURRENT_SETUPS, Setup
from simulators.counting import ACTIONS, Counting, seen
from simulators.crashing import Fate, crashing, seed_of

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.core.pool.replacement import Present

pytestmark = [pytest.mark.release_independent, pytest.mark.in_turn]

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
@pytest.mark.parametrize("env_ids", [None, [1]], ids=["reset-of-all", "reset-of-one"])
def test_actions_after_the_next_reset(env_ids, setup, build):
    """Agents act again, also where every environment had all of its agents acting before and after."""
    env = build([Counting] * 3, setup)
    env.reset()
    env.step(env.sample_actions())
    env.restart([1])
    assert env.acting == (["long", "short"], [], ["long", "short"])
    env.reset(env_ids=env_ids)
    assert env.acting == (["long", "short"],) * 3
    rewards = env.step(env.sample_actions())[1]
    assert [[*of_env] for of_env in rewards] == [["long", "short"]] * 3


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


class DiesWithASlowNeighbour(Counting):
    """The first one dies in its first step; the other takes a moment to be constructed again."""

    def __init__(self, *, seed: int, env_id: int, restarts: int) -> None:
        super().__init__(9, seed=seed)
        self.dies = env_id == restarts == 0
        if env_id and restarts == 1:
            time.sleep(1.0)

    def step(self, actions):
        if self.dies:
            os._exit(3)
        return super().step(actions)


def test_while_it_is_constructed_again(build):
    """The report of the fault is dropped: its caller wants a new environment, and gets the second one."""
    env = build([DiesWithASlowNeighbour] * 2, Setup("process", True, 1), AutoresetMode.DISABLED, on_error="restart")
    env.reset()
    env.send([ACTIONS], [0])
    assert env.recv(min_envs=1).infos[0]["__common__"]["restarted"]
    assert env.stepper.workers.pool.slots[1].present is Present.RESTARTS
    env.restart([1])
    observations, infos = env.reset()
    assert seeds_and_resets(observations) == [(seed_of(42, 0, 1), 1), (seed_of(42, 1, 2), 1)]
    assert infos == ({"long": {}, "short": {}},) * 2
    assert env.stats().restart_kinds == {"death": 1, "neighbour": 1, "request": 1}
