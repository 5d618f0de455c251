"""`RestartPolicy` and `on_restart`: which faults restart an environment, how often, and the error past the limit."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.processes import gone
from helpers.setups import Setup
from simulators.counting import ACTIONS, Counting
from simulators.crashing import Fate, crashing, seed_of
from simulators.failing import SimulatorError

from marl_parallel import EnvError, ParallelEnv, RestartEvent, RestartLimitExceeded, RestartPolicy, WorkerCrashed

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
    assert (env.stats().restarts, env.stats().faults) == (8, 4)


@pytest.mark.parametrize("fault", ["raise", "SIGKILL"])
def test_the_first_construction_always_raises(fault, build):
    fates = {(1, 0): Fate(fault, "constructor")}
    with pytest.raises(EnvError if fault == "raise" else WorkerCrashed) as caught:
        build([crashing(Counting, fates)] * 2, APART, on_error="restart")
    assert caught.value.env_ids == (1,)


@pytest.mark.parametrize("name", ["max_restarts", "rate_limit", "rate_period_s"])
@pytest.mark.parametrize("wrong", [-2, "5", 1.5j])
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


@pytest.mark.parametrize("setup", [Setup("serial", True, 1), Setup("thread", True, 2), PACKED, APART], ids=str)
@pytest.mark.parametrize("kinds", [SimulatorError, (KeyError, SimulatorError), (Exception,)], ids=str)
def test_exceptions_that_restart(kinds, setup, build):
    """Types, or types that they are derived from; also of exceptions that travel by value."""
    env = start(build, setup, short_lives(1, count=2), RestartPolicy(exceptions=kinds))
    step_with_faults(env, 2)
    env.step([ACTIONS] * 2)
    assert env.stats().faults == 2


@pytest.mark.parametrize("setup", [Setup("serial", True, 1), Setup("thread", True, 2), PACKED, APART], ids=str)
@pytest.mark.parametrize("kinds", [(), (KeyError, OSError)], ids=str)
def test_other_exceptions_are_raised(kinds, setup, build):
    env = start(build, setup, short_lives(1), RestartPolicy(exceptions=kinds))
    with pytest.raises(EnvError, match="exceptions of the RestartPolicy") as caught:
        env.step([ACTIONS] * 2)
    assert isinstance(caught.value.__cause__, SimulatorError)
    assert caught.value.env_ids == (1,)
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_deaths_restart_whatever_the_exceptions(build):
    env = start(build, APART, short_lives(1, "SIGKILL", count=2), RestartPolicy(exceptions=()))
    step_with_faults(env, 2)


def test_exceptions_that_do_not_unpickle_here(build):
    """The type counts, not the exception itself."""

    class Own(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("own")

    def act(self: Counting, actions: dict) -> None:
        raise Own(1, 2)

    env = build(
        [type("Raising", (Counting,), {"step": act})] * 2, APART,
        on_error="restart", restart_policy=RestartPolicy(exceptions=(Own,)),
    )  # fmt: skip
    env.reset()
    assert [info["__common__"]["restarted"] for info in env.step([ACTIONS] * 2)[4]] == [True, True]


def test_minus_one_is_no_limit(build):
    assert RestartPolicy(max_restarts=-1, rate_limit=-1) == RestartPolicy(max_restarts=None, rate_limit=None)
    env = start(build, APART, short_lives(1), RestartPolicy(max_restarts=-1, rate_limit=-1))
    step_with_faults(env, 7)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"max_restarts": -2}, ValueError, "None or -1 stands for no limit"),
        ({"exceptions": ("OSError",)}, TypeError, "types of exceptions, got 'OSError'"),
        ({"exceptions": (int,)}, TypeError, "tuple of types of exceptions"),
        ({"exceptions": 3}, TypeError, "tuple of types of exceptions"),
    ],
    ids=str,
)
def test_wrong_policies(arguments, error, text):
    with pytest.raises(error, match=text):
        RestartPolicy(**arguments)


@pytest.mark.parametrize("setup", [Setup("serial", True, 1), Setup("thread", True, 1), PACKED], ids=str)
def test_events_of_restarts(setup, build):
    events: list[RestartEvent] = []
    fates = {(1, 0): Fate("raise"), (1, 1): Fate("raise", "step", 1)}
    env = build([crashing(Counting, fates)] * 2, setup, on_error="restart", on_restart=events.append)
    env.reset()
    for count in (1, 1, 2):
        infos = env.step([ACTIONS] * 2)[4]
        assert len(events) == count
    assert [(event.env_id, event.worker, event.kind, event.restarts) for event in events] == [
        (1, 0, "fault", 1),
        (1, 0, "fault", 2),
    ]
    assert [event.seed for event in events] == [seed_of(42, 1, 1), seed_of(42, 1, 2)]
    assert isinstance(events[1].error, EnvError)
    assert str(events[1].error) == infos[1]["__common__"]["error"]


def test_events_of_neighbours(build):
    events: list[RestartEvent] = []
    fates = {(1, 0): Fate("SIGKILL")}
    env = build([crashing(Counting, fates)] * 2, PACKED, on_error="restart", on_restart=events.append)
    env.reset()
    env.step([ACTIONS] * 2)
    assert [(event.env_id, event.kind) for event in events] == [(0, "neighbour"), (1, "fault")]
    assert all(isinstance(event.error, WorkerCrashed) for event in events)


def test_faulty_function_of_events(build, caplog):
    """A bug in it is in the log, and the run goes on."""

    def fail(event: RestartEvent) -> None:
        raise ZeroDivisionError(f"event of {event.env_id}")

    env = build([crashing(Counting, {(1, 0): Fate("raise")})] * 2, APART, on_error="restart", on_restart=fail)
    env.reset()
    step_with_faults(env, 1)
    env.step([ACTIONS] * 2)
    assert "ZeroDivisionError: event of 1" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"on_restart": print}, ValueError, 'pass on_error="restart"'),
        ({"on_restart": "print", "on_error": "restart"}, TypeError, "function of a RestartEvent"),
    ],
    ids=str,
)
def test_wrong_functions_of_events(arguments, error, text):
    with pytest.raises(error, match=text):
        ParallelEnv([Counting], **arguments)


class Fragile:
    """Pickles, but cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


class ReturnsFragile(Counting):
    """Its third step returns an info that cannot be unpickled."""

    def step(self, actions):
        *dicts, infos = super().step(actions)
        return (*dicts, {agent: {"fragile": Fragile()} if self.steps == 3 else {} for agent in infos})


@pytest.mark.parametrize("restarts", [True, False])
def test_results_that_cannot_be_unpickled(restarts, build):
    """The policy decides by the exception of unpickling."""
    policy = RestartPolicy(exceptions=(ValueError if restarts else ConnectionError,))
    env = build([ReturnsFragile] * 2, APART, on_error="restart", restart_policy=policy)
    env.reset()
    for _ in range(2):
        env.step([ACTIONS] * 2)
    if restarts:
        assert all(info["__common__"]["restarted"] for info in env.step([ACTIONS] * 2)[4])
        assert env.stats().restarts == 2
    else:
        with pytest.raises(EnvError, match="cannot be unpickled here: ValueError"):
            env.step([ACTIONS] * 2)
