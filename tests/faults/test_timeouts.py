"""Timeouts per environment and method, also in shared workers, and their error messages."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import time
import warnings

import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.processes import gone, workers
from helpers.setups import PROCESS_SETUPS, Setup
from simulators.crashing import HANGING, Fate, crashing, forever
from simulators.failing import Fragile

from marl_parallel import ParallelEnv, ParallelEnvError, WorkerTimeout

pytestmark = pytest.mark.release_independent

ACTIONS = [{"a": 0, "b": 1}] * 4
AT_MOST_S = 15.0  # far more than any of these timeouts, and far less than forever
ONE_EACH = PROCESS_SETUPS[2]


def fleet(notes, faults, faulty=(2,), **more):
    return [functools.partial(Fragile, faults if i in faulty else {}, notes, **more) for i in range(4)]


def caught_in_time(act) -> WorkerTimeout:
    began = time.monotonic()
    with pytest.raises(WorkerTimeout) as caught:
        act()
    assert time.monotonic() - began < AT_MOST_S
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, multiprocessing.TimeoutError)
    assert isinstance(caught.value, ParallelEnvError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), vars(again)) == (WorkerTimeout, str(caught.value), vars(caught.value))
    return caught.value


@pytest.mark.parametrize(
    ("place", "limit", "act"),
    [
        ("step", "step_timeout", lambda env: env.step(ACTIONS)),
        ("reset", "reset_timeout", lambda env: env.reset()),
        ("render", "step_timeout", lambda env: env.render()),
        ("call", "step_timeout", lambda env: env.call("act_up")),
    ],
)
def test_each_method_has_its_limit(place, limit, act, killable_setup, build, tmp_path):
    """The error names the environment, the method and the simulator's line."""
    env = build(fleet(tmp_path, {place: forever}), killable_setup, **{limit: 0.5})
    if place != "reset":
        env.reset()
    error = caught_in_time(lambda: act(env))
    assert error.env_ids == (2,)
    assert error.worker == {1: 0, 2: 1, 4: 2}[killable_setup.num_workers]
    assert error.method == place
    assert "crashing.py" in error.stack
    assert "in forever" in error.stack
    assert "in forever" in str(error)
    assert limit in str(error)
    assert 'on_error="restart"' in str(error)
    assert gone(workers(tmp_path))
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_reset_timeout_applies_to_auto_resets(killable_setup, build, tmp_path):
    constructors = fleet(tmp_path, {"reset": forever}, after=1, length=2)
    env = build(constructors, killable_setup, step_timeout=60.0, reset_timeout=0.5)
    env.reset()
    env.step(ACTIONS)
    error = caught_in_time(lambda: env.step(ACTIONS))
    assert (error.env_ids, error.method) == ((2,), "reset")
    assert "reset_timeout" in str(error)


@pytest.mark.parametrize("fault", HANGING)
def test_stopped_and_looping_processes(fault, killable_setup, build, tmp_path):
    env = build(
        [crashing(functools.partial(Fragile, {}, tmp_path), {(2, 0): Fate(fault)})] * 4,
        killable_setup,
        step_timeout=0.5,
    )
    env.reset()
    error = caught_in_time(lambda: env.step(ACTIONS))
    assert (error.env_ids, error.method) == ((2,), "step")
    assert gone(workers(tmp_path))


@pytest.mark.parametrize("place", ["step", "reset"])
def test_timeouts_are_per_environment(place, build, tmp_path):
    """Four environments of one worker that run one after the other are not late in sum."""
    slow = {place: functools.partial(time.sleep, 0.4)}
    limits = {"step_timeout": 1.5, "reset_timeout": 1.5}
    env = build(fleet(tmp_path, slow, faulty=range(4)), Setup("process", True, 1), **limits)
    env.reset()
    env.step(ACTIONS)
    env.reset_async()
    assert len(env.recv().env_ids) == 4


def test_no_timeout_by_default(build, tmp_path):
    env = build(fleet(tmp_path, {"step": functools.partial(time.sleep, 1.0)}), ONE_EACH, reset_timeout=0.3)
    env.reset()
    env.step(ACTIONS)


def test_recv_raises_the_timeout_and_send_does_not(killable_setup, build, tmp_path):
    env = build(fleet(tmp_path, {"step": forever}), killable_setup, step_timeout=0.5)
    env.reset()
    env.send(ACTIONS)
    assert caught_in_time(env.recv).env_ids == (2,)


def test_recv_timeout_before_step_timeout(build, tmp_path):
    """`recv`'s own timeout is a `TimeoutError`, no `WorkerTimeout`, and closes nothing."""
    slow = {"step": functools.partial(time.sleep, 1.0)}
    env = build(fleet(tmp_path, slow), ONE_EACH, step_timeout=30.0)
    env.reset()
    env.send(ACTIONS)
    with pytest.raises(TimeoutError) as caught:
        env.recv(timeout=0.1)
    assert isinstance(caught.value, multiprocessing.TimeoutError)
    assert not isinstance(caught.value, ParallelEnvError)
    assert sorted(env.recv().env_ids) == [0, 1, 2, 3]


@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_threads_cannot_be_restarted(on_error, build, tmp_path):
    """The error is raised with any `on_error`, with the stack."""
    nap = functools.partial(time.sleep, 4.0)
    env = build(fleet(tmp_path, {"step": nap}), Setup("thread", True, 2), step_timeout=0.5, on_error=on_error)
    env.reset()
    error = caught_in_time(lambda: env.step(ACTIONS))
    assert error.env_ids == (2,)
    assert "failing.py" in error.stack
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


@pytest.mark.parametrize("limit", ["step_timeout", "reset_timeout", "start_timeout"])
def test_serial_warns_once_that_timeouts_are_not_enforced(limit, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ParallelEnv(fleet(tmp_path, {}), backend="serial", num_workers=2, **{limit: 5.0}) as env:
            env.reset()
            env.step(ACTIONS)
    messages = [str(warning.message) for warning in caught if "timeout" in str(warning.message)]
    assert len(messages) == 1
    assert "serial" in messages[0]


def test_serial_does_not_warn_without_timeouts(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ParallelEnv(fleet(tmp_path, {}), backend="serial", num_workers=1).close()


@pytest.mark.parametrize("fault", [forever, functools.partial(time.sleep, 60)], ids=["loop", "sleep"])
def test_close_timeout(fault, killable_setup, build, tmp_path):
    """At most one second more, whatever simulators do in `close`."""
    env = build(fleet(tmp_path, {"close": fault}, faulty=range(4)), killable_setup)
    env.reset()
    began = time.monotonic()
    env.close(timeout=1.0)
    assert time.monotonic() - began < 2.0
    assert gone(workers(tmp_path))


@pytest.mark.parametrize("name", ["step_timeout", "reset_timeout", "start_timeout"])
@pytest.mark.parametrize(("wrong", "kind"), [(0, ValueError), (-1.0, ValueError), ("5", TypeError), (True, TypeError)])
def test_wrong_arguments(name, wrong, kind, tmp_path):
    with pytest.raises(kind, match=name):
        ParallelEnv(fleet(tmp_path, {}), **{name: wrong})
