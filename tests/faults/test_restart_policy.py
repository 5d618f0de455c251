"""`RestartPolicy`: how often an environment is restarted, which faults count, and the error past the limit."""

from __future__ import annotations

import functools
import time

import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.processes import gone
from helpers.setups import Setup
from simulators.counting import ACTIONS, Counting
from simulators.crashing import Fate, crashing
from simulators.failing import SimulatorError

from marl_parallel import EnvError, ParallelEnv, RestartLimitExceeded, RestartPolicy, WorkerCrashed

pytestmark = pytest.mark.release_independent

PACKED = Setup("process", True, 1)
APART = Setup("process", True, 2)


def short_lives(env_id: int, fault: str = "raise", place: str = "step", count: int = 20, after: int = 0):
    return {(env_id, life): Fate(fault, place, after) for life in range(count)}


def step_with_faults(env: ParallelEnv, times: int) -> None:
    """Step; environment 1 is interrupted in each step."""
    for _ in range(times):
        infos = env.step([ACTIONS] * 2)[4]
        assert infos[1]["__common__"]["restarted"] is True


def start(build, setup: Setup, fates, policy: RestartPolicy) -> ParallelEnv:
    env = build([crashing(Counting, fates)] * 2, setup, on_error="restart", restart_policy=policy)
    env.reset()
    return env


@pytest.mark.parametrize("fault", ["raise", "SIGKILL"])
@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_max_restarts(allowed, fault, build):
    """The next fault past the limit is the cause of the error, and everything is closed."""
    env = start(build, APART, short_lives(1, fault), RestartPolicy(max_restarts=allowed, rate_limit=None))
    pids = env.call("pid")
    step_with_faults(env, allowed)
    with pytest.raises(RestartLimitExceeded, match="max_restarts") as caught:
        step_with_faults(env, 1)
    assert caught.value.env_ids == (1,)
    assert caught.value.worker == 1
    cause = caught.value.__cause__
    if fault == "raise":
        assert isinstance(cause, EnvError)
        assert isinstance(cause.__cause__, SimulatorError)
    else:
        assert isinstance(cause, WorkerCrashed)
        assert cause.exitcode == -9
    assert gone(pids)
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_max_restarts_in_other_methods(backend, build):
    env = start(build, Setup(backend, True, 2), short_lives(1), RestartPolicy(max_restarts=2))
    step_with_faults(env, 2)
    with pytest.raises(RestartLimitExceeded):
        step_with_faults(env, 1)
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_rate_limit(build):
    """The number of restarts within a moving period."""
    env = start(build, APART, short_lives(1), RestartPolicy(rate_limit=2, rate_period_s=1.0))
    step_with_faults(env, 2)
    time.sleep(1.1)
    step_with_faults(env, 2)
    with pytest.raises(RestartLimitExceeded, match="rate_limit"):
        step_with_faults(env, 1)


def test_default_rate_limit_is_five_per_minute(build):
    env = start(build, APART, short_lives(1), RestartPolicy())
    step_with_faults(env, 5)
    with pytest.raises(RestartLimitExceeded):
        step_with_faults(env, 1)


@pytest.mark.parametrize("place", ["constructor", "reset"])
@pytest.mark.parametrize("fault", ["raise", "SIGKILL"])
def test_failed_restarts_count(fault, place, build):
    """One step with three failures: the step, and two replacements that cannot be built or reset."""
    fates = {(1, 0): Fate(fault), (1, 1): Fate(fault, place), (1, 2): Fate(fault, place)}
    env = start(build, APART, fates, RestartPolicy(max_restarts=3))
    step_with_faults(env, 1)
    assert env.stats().restarts == 3
    env.close()
    env = start(build, APART, fates, RestartPolicy(max_restarts=2))
    with pytest.raises(RestartLimitExceeded):
        step_with_faults(env, 1)


def test_neighbours_do_not_count(build):
    """Environment 0 shares a worker that dies repeatedly, and may not be restarted for its own faults."""
    fates = {**short_lives(1, "SIGKILL", count=4), (0, 5): Fate("raise", "step", 3)}
    policy = RestartPolicy(max_restarts=4, rate_limit=None)
    env = start(build, PACKED, fates, policy)
    for _ in range(8):
        env.step([ACTIONS] * 2)
    assert env.stats().restarts == 8


@pytest.mark.parametrize("fault", ["raise", "SIGKILL"])
def test_the_first_construction_always_raises(fault, build):
    fates = {(1, 0): Fate(fault, "constructor")}
    with pytest.raises(EnvError if fault == "raise" else WorkerCrashed) as caught:
        build([crashing(Counting, fates)] * 2, APART, on_error="restart")
    assert caught.value.env_ids == (1,)


@pytest.mark.parametrize("name", ["max_restarts", "rate_limit", "rate_period_s"])
@pytest.mark.parametrize("wrong", [-1, "5", 1.5j])
def test_wrong_arguments(name, wrong):
    with pytest.raises((TypeError, ValueError), match=name):
        RestartPolicy(**{name: wrong})


def test_period_of_zero():
    with pytest.raises(ValueError, match="rate_period_s"):
        RestartPolicy(rate_period_s=0)


@pytest.mark.parametrize("wrong", ["ignore", None, True])
def test_unknown_on_error(wrong):
    with pytest.raises(ValueError, match="on_error"):
        ParallelEnv([Counting], on_error=wrong)


def test_restart_policy_of_a_wrong_type():
    with pytest.raises(TypeError, match="restart_policy"):
        ParallelEnv([functools.partial(Counting)], on_error="restart", restart_policy={"max_restarts": 1})
