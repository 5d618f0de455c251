"""`reset(drain=True)` drops what is in flight, and then resets."""

from __future__ import annotations

import pytest
from gymnasium.error import AlreadyPendingCallError
from helpers.comparison import assert_same
from simulators.deterministic import Hunt

from marl_parallel import EnvError


def actions(env):
    return [{agent: env.action_space[agent].sample() for agent in acting} for acting in env.acting]


def test_results_in_flight_are_dropped(backend_setup, build):
    env, other = build([Hunt] * 4, backend_setup), build([Hunt] * 4, backend_setup)
    env.reset(seed=1)
    env.send(actions(env)[:2], [0, 3])
    env.reset_async(env_ids=[1])
    with pytest.raises(AlreadyPendingCallError):
        env.reset()
    assert_same(env.reset(seed=9, drain=True), other.reset(seed=9))
    assert env.pending == ()
    assert env.stats().steps == 2
    assert env.stats().resets == 9
    chosen = actions(other)
    assert_same(env.step(chosen), other.step(chosen))
    assert_same(env.reset(seed=5, drain=True), other.reset(seed=5))


def test_some_are_reset_and_all_are_drained(backend_setup, build):
    env = build([Hunt] * 3, backend_setup)
    env.reset(seed=1)
    env.send(actions(env))
    observations, _ = env.reset(env_ids=[2], drain=True)
    assert len(observations) == 1
    assert env.pending == ()
    env.step(actions(env))


@pytest.mark.parametrize("wrong", [{"env_ids": [7]}, {"seed": [1, 2]}, {"seed": "one"}], ids=str)
def test_refused_arguments_drop_nothing(wrong, backend_setup, build):
    env = build([Hunt] * 3, backend_setup)
    env.reset(seed=1)
    env.send(actions(env))
    with pytest.raises((ValueError, TypeError)):
        env.reset(**wrong, drain=True)
    assert len(env.recv().env_ids) == 3


def test_faults_in_flight_are_raised(build, backend_setup):
    class Fails(Hunt):
        def step(self, actions):
            raise ZeroDivisionError

    env = build([Fails] * 2, backend_setup)
    env.reset()
    env.send(actions(env))
    with pytest.raises(EnvError):
        env.reset(drain=True)
