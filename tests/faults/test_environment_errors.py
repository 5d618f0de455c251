"""Environments that raise, exit or die: the error says which, where and how, and everything is closed."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.processes import gone, workers
from helpers.signals import SIGKILL
from simulators.failing import (
    Fragile,
    LockedError,
    PickyError,
    SimulatorError,
    hard_exit,
    killed_by,
    raising,
    system_exit,
)

from marl_parallel import EnvError, ParallelEnvError, WorkerCrashed

pytestmark = pytest.mark.release_independent


class LocalError(Exception):
    """Of a module that workers cannot import by the name that pytest uses."""


def four_envs(
    notes: Path, faults: dict[str, Callable[[], Any]], after: int = 0, faulty: Sequence[int] = (2,)
) -> list[Any]:
    """Four environments, some of which fail."""
    return [functools.partial(Fragile, faults if i in faulty else {}, notes, after) for i in range(4)]


def envs_with_note(notes: Path, event: str) -> set[int]:
    """The environments that wrote such a note."""
    return {int(path.name.rpartition("-")[2]) for path in notes.glob(f"{event}-*")}


def steps(env: Any, count: int) -> None:
    for _ in range(count):
        env.step([{"a": 0, "b": 1}] * 4)


def assert_closed(env: Any, notes: Path) -> None:
    """All built environments were closed, no worker is left, and every call raises."""
    assert envs_with_note(notes, "closed") == envs_with_note(notes, "built")
    assert gone(workers(notes))
    with pytest.raises(ClosedEnvironmentError):
        env.reset()
    env.close()


ERRORS = [
    (raising(SimulatorError, "bad terrain"), SimulatorError),
    (raising(LocalError, "bad terrain"), LocalError),
    (raising(MemoryError, "bad terrain"), MemoryError),
    (raising(TimeoutError, "bad terrain"), TimeoutError),
]
PLACES: list[tuple[str, Callable[[Any], Any]]] = [
    ("reset", lambda env: env.reset()),
    ("step", lambda env: steps(env, 1)),
    ("render", lambda env: env.render()),
]


@pytest.mark.in_turn
@pytest.mark.parametrize(("fault", "kind"), ERRORS, ids=lambda part: getattr(part, "__name__", ""))
def test_exception_in_step(fault, kind, setup, build, tmp_path):
    env = build(four_envs(tmp_path, {"step": fault}, after=2), setup)
    env.reset()
    steps(env, 2)
    with pytest.raises(EnvError, match="bad terrain") as caught:
        steps(env, 1)
    error = caught.value
    assert error.env_ids == (2,)
    assert error.worker == {1: 0, 2: 1, 4: 2}[setup.num_workers] or setup.backend == "serial"
    assert error.method == "step"
    assert "in step" in error.remote_traceback
    assert "bad terrain" in error.remote_traceback
    assert isinstance(error.__cause__, kind)
    assert_closed(env, tmp_path)


@pytest.mark.in_turn
@pytest.mark.parametrize(("place", "act"), PLACES, ids=[place for place, _ in PLACES])
def test_exception_in_other_methods(place, act, setup, build, tmp_path):
    env = build(four_envs(tmp_path, {place: raising(SimulatorError, "bad weather")}), setup)
    if place != "reset":
        env.reset()
    with pytest.raises(EnvError, match="bad weather") as caught:
        act(env)
    assert (caught.value.env_ids, caught.value.method) == ((2,), place)
    assert f"in {place}" in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, SimulatorError)
    assert_closed(env, tmp_path)


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_exception_in_an_auto_reset(mode, two_worker_setup, build, tmp_path):
    """The error names `reset`, not `step`."""
    constructors = four_envs(tmp_path, {"reset": raising(SimulatorError, "no map")}, after=1)
    env = build([functools.partial(make, length=3) for make in constructors], two_worker_setup, mode)
    env.reset()
    steps(env, 2)
    with pytest.raises(EnvError, match="no map") as caught:
        steps(env, 2)
    assert (caught.value.env_ids, caught.value.method) == ((2,), "reset")
    assert_closed(env, tmp_path)


def test_exception_in_a_called_method(two_worker_setup, build, tmp_path):
    env = build(four_envs(tmp_path, {"call": raising(SimulatorError, "no such lever")}), two_worker_setup)
    with pytest.raises(EnvError, match="no such lever") as caught:
        env.call("act_up")
    assert caught.value.env_ids == (2,)
    assert caught.value.method in {"call", "act_up"}
    assert "in act_up" in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, SimulatorError)
    assert_closed(env, tmp_path)


def test_exception_in_the_constructor(setup, build, tmp_path):
    """Environments that were built are closed; no worker is left."""
    with pytest.raises(EnvError, match="no licence") as caught:
        build(four_envs(tmp_path, {"constructor": raising(SimulatorError, "no licence")}), setup)
    assert (caught.value.env_ids, caught.value.method) == ((2,), "constructor")
    assert "in __init__" in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, SimulatorError)
    assert envs_with_note(tmp_path, "closed") == envs_with_note(tmp_path, "built")
    assert gone(workers(tmp_path))


def test_exception_in_close(setup, build, tmp_path):
    """The other environments are closed, and the error names the environment."""
    env = build(four_envs(tmp_path, {"close": raising(SimulatorError, "stuck door")}), setup)
    env.reset()
    with pytest.raises(EnvError, match="stuck door") as caught:
        env.close()
    assert (caught.value.env_ids, caught.value.method) == ((2,), "close")
    assert_closed(env, tmp_path)


def test_several_exceptions_in_close(setup, build, tmp_path):
    """The error names the first environment, whichever worker was faster."""
    env = build(four_envs(tmp_path, {"close": raising(SimulatorError, "stuck door")}, faulty=(1, 2, 3)), setup)
    env.reset()
    with pytest.raises(EnvError, match=r"environment 1 .*stuck door") as caught:
        env.close()
    assert (caught.value.env_ids, caught.value.method) == ((1,), "close")
    assert caught.value.worker == {1: 0, 2: 0, 4: 1}[env.num_workers]
    assert isinstance(caught.value.__cause__, SimulatorError)
    assert_closed(env, tmp_path)


def test_exception_in_close_does_not_hide_an_earlier_one(two_worker_setup, build, tmp_path):
    """The first exception is raised."""
    faults = {"step": raising(SimulatorError, "bad terrain"), "close": raising(SimulatorError, "stuck door")}
    env = build(four_envs(tmp_path, faults), two_worker_setup)
    env.reset()
    with pytest.raises(EnvError, match="bad terrain"):
        steps(env, 1)
    assert_closed(env, tmp_path)


def test_several_exceptions_in_one_step(setup, build, tmp_path):
    env = build(four_envs(tmp_path, {"step": raising(SimulatorError, "bad terrain")}, faulty=(1, 3)), setup)
    env.reset()
    with pytest.raises(EnvError, match="bad terrain") as caught:
        steps(env, 1)
    assert set(caught.value.env_ids) <= {1, 3}
    assert caught.value.env_ids
    assert_closed(env, tmp_path)


def test_sys_exit(setup, build, tmp_path):
    env = build(four_envs(tmp_path, {"step": system_exit}), setup)
    env.reset()
    with pytest.raises(EnvError, match="SystemExit") as caught:
        steps(env, 1)
    assert caught.value.env_ids == (2,)
    assert isinstance(caught.value.__cause__, SystemExit)
    assert caught.value.__cause__.code == 3
    assert_closed(env, tmp_path)


@pytest.mark.parametrize("make", [functools.partial(PickyError, 3, "gate"), functools.partial(LockedError, "gate")])
def test_unpicklable_exceptions(make, two_worker_setup, build, tmp_path):
    """The error has the exception's text."""
    env = build(four_envs(tmp_path, {"step": raising(make)}), two_worker_setup)
    env.reset()
    with pytest.raises(EnvError, match="gate") as caught:
        steps(env, 1)
    assert caught.value.env_ids == (2,)
    assert make.func.__name__ in caught.value.remote_traceback
    assert "in step" in caught.value.remote_traceback
    assert_closed(env, tmp_path)


def unpicklable() -> Any:
    """An unpicklable object."""
    return threading.Lock()


def test_unpicklable_infos(killable_setup, build, tmp_path):
    env = build(four_envs(tmp_path, {"step": unpicklable}), killable_setup)
    env.reset()
    with pytest.raises(EnvError, match="infos") as caught:
        steps(env, 1)
    assert (caught.value.env_ids, caught.value.method) == ((2,), "step")
    assert_closed(env, tmp_path)


class UnpicklableObservation(Fragile):
    """One more agent than declared is observed, and its observation cannot be pickled."""

    def step(self, actions: dict) -> Any:
        observations, *others = super().step(actions)
        return {**observations, **({"ghost": threading.Lock()} if self.env_id == 2 else {})}, *others


def test_unpicklable_observations(killable_setup, build, tmp_path):
    env = build([functools.partial(UnpicklableObservation, {}, tmp_path)] * 4, killable_setup)
    env.reset()
    with pytest.raises(EnvError, match=r"the observations entry of 'ghost' .*lock.* cannot be pickled") as caught:
        steps(env, 1)
    assert (caught.value.env_ids, caught.value.method) == ((2,), "step")
    assert_closed(env, tmp_path)


DEATHS = [
    (hard_exit, 7, "7"),
    (killed_by(SIGKILL), -SIGKILL, "SIGKILL"),
    (killed_by(signal.SIGSEGV), -signal.SIGSEGV, "SIGSEGV"),
    (killed_by(signal.SIGABRT), -signal.SIGABRT, "SIGABRT"),
]


@pytest.mark.parametrize(
    ("place", "fault", "exitcode", "word"),
    [("step", *death) for death in DEATHS] + [(place, *DEATHS[0]) for place in ("constructor", "reset", "render")],
)
def test_worker_dies(place, fault, exitcode, word, process_setup, build, tmp_path):
    constructors = four_envs(tmp_path, {place: fault})
    with pytest.raises(WorkerCrashed, match=word) as caught:  # noqa: PT012
        env = build(constructors, process_setup)
        env.reset()
        steps(env, 1)
        env.render()
    error = caught.value
    assert error.exitcode == exitcode
    assert 2 in error.env_ids
    assert error.env_ids == (2,) or process_setup.num_workers < 4
    assert error.worker == {1: 0, 2: 1, 4: 2}[process_setup.num_workers]
    assert gone(workers(tmp_path))
    if word in {"SIGSEGV", "SIGABRT"}:
        assert "failing.py" in str(error)
    if place != "constructor":
        with pytest.raises(ClosedEnvironmentError):
            env.reset()
        env.close()


def test_environments_in_live_workers_are_closed(build, killable_setup, tmp_path):
    """Only the environments of the dead worker are not."""
    env = build(four_envs(tmp_path, {"step": hard_exit}), killable_setup)
    env.reset()
    with pytest.raises(WorkerCrashed):
        steps(env, 1)
    assert envs_with_note(tmp_path, "closed") >= {1: set(), 2: {0, 1}, 4: {0, 1, 3}}[killable_setup.num_workers]


@pytest.mark.parametrize("idle", ["before the first reset", "between steps"])
def test_worker_killed_while_idle(idle, killable_setup, build, tmp_path):
    env = build(four_envs(tmp_path, {}), killable_setup)
    if idle == "between steps":
        env.reset()
        steps(env, 1)
    os.kill(env.call("pid")[3], signal.SIGKILL)
    with pytest.raises(WorkerCrashed, match="SIGKILL") as caught:  # noqa: PT012
        if idle != "between steps":
            env.reset()
        steps(env, 1)
    assert caught.value.exitcode == -signal.SIGKILL
    assert caught.value.worker == killable_setup.num_workers - 1
    assert gone(workers(tmp_path))
    with pytest.raises(ClosedEnvironmentError):
        steps(env, 1)


def forever() -> None:
    while True:
        time.sleep(0.1)


def test_constructor_that_never_returns(killable_setup, build, tmp_path):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="start_timeout") as caught:
        build(four_envs(tmp_path, {"constructor": forever}), killable_setup, start_timeout=2.0)
    assert isinstance(caught.value, ParallelEnvError)
    assert caught.value.env_ids == (2,) or killable_setup.num_workers < 4
    assert time.monotonic() - began < 10.0
    assert gone(workers(tmp_path))


class SlowToPickle(dict):
    """Pickling takes some time."""

    def __reduce__(self) -> Any:
        time.sleep(0.2)
        return dict, ()


class Detailed(Fragile):
    @property
    def metadata(self) -> Any:
        return {"slow": SlowToPickle()}


def test_start_timeout_does_not_pass_between_constructors(build, killable_setup, tmp_path):
    """A worker that reports one environment before it builds the next is not late."""
    constructors = [functools.partial(Detailed, {}, tmp_path)] * 6
    build(constructors, killable_setup._replace(num_workers=1), start_timeout=0.9).reset()


def test_start_timeout_is_per_constructor(build, killable_setup, tmp_path):
    """Four constructors of half a second each, one after the other, do not exceed a limit of less than two seconds."""
    constructors = four_envs(tmp_path, {"constructor": functools.partial(time.sleep, 0.5)}, faulty=range(4))
    env = build(constructors, killable_setup._replace(num_workers=1), start_timeout=1.4)
    env.reset()
