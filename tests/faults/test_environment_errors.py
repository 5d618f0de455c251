"""Environments that raise, exit or die: an error that says which, where and how, and everything closed."""

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


class LocalError(Exception):
    """Of a module that no worker can import by the name that pytest gave it."""


def fleet(notes: Path, faults: dict[str, Callable[[], Any]], after: int = 0, faulty: Sequence[int] = (2,)) -> list[Any]:
    """Four environments, some of which break."""
    return [functools.partial(Fragile, faults if i in faulty else {}, notes, after) for i in range(4)]


def told(notes: Path, event: str) -> set[int]:
    """The environments that left such a note."""
    return {int(path.name.rpartition("-")[2]) for path in notes.glob(f"{event}-*")}


def steps(env: Any, count: int) -> None:
    for _ in range(count):
        env.step([{"a": 0, "b": 1}] * 4)


def assert_closed(env: Any, notes: Path) -> None:
    """Everything that was built was closed, no worker is left, nothing can be called any more."""
    assert told(notes, "closed") == told(notes, "built")
    assert gone(workers(notes))
    with pytest.raises(ClosedEnvironmentError):
        env.reset()
    env.close()


ERRORS = [
    (raising(ValueError, "bad terrain"), ValueError),
    (raising(SimulatorError, "bad terrain"), SimulatorError),
    (raising(LocalError, "bad terrain"), LocalError),
    (raising(AttributeError, "bad terrain"), AttributeError),
    (raising(MemoryError, "bad terrain"), MemoryError),
    (raising(RecursionError, "bad terrain"), RecursionError),
    (raising(KeyError, "bad terrain"), KeyError),
    (raising(TimeoutError, "bad terrain"), TimeoutError),
]
PLACES: list[tuple[str, Callable[[Any], Any]]] = [
    ("reset", lambda env: env.reset()),
    ("step", lambda env: steps(env, 1)),
    ("render", lambda env: env.render()),
]


@pytest.mark.parametrize(("fault", "kind"), ERRORS, ids=lambda part: getattr(part, "__name__", ""))
def test_an_exception_in_step(fault, kind, setup, build, tmp_path):
    env = build(fleet(tmp_path, {"step": fault}, after=2), setup)
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


@pytest.mark.parametrize(("place", "act"), PLACES, ids=[place for place, _ in PLACES])
def test_an_exception_elsewhere(place, act, setup, build, tmp_path):
    env = build(fleet(tmp_path, {place: raising(SimulatorError, "bad weather")}), setup)
    if place != "reset":
        env.reset()
    with pytest.raises(EnvError, match="bad weather") as caught:
        act(env)
    assert (caught.value.env_ids, caught.value.method) == ((2,), place)
    assert f"in {place}" in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, SimulatorError)
    assert_closed(env, tmp_path)


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_an_exception_in_an_automatic_reset(mode, packed, build, tmp_path):
    """It is the reset that failed, not the step."""
    constructors = fleet(tmp_path, {"reset": raising(SimulatorError, "no map")}, after=1)
    env = build([functools.partial(make, length=3) for make in constructors], packed, mode)
    env.reset()
    steps(env, 2)
    with pytest.raises(EnvError, match="no map") as caught:
        steps(env, 2)
    assert (caught.value.env_ids, caught.value.method) == ((2,), "reset")
    assert_closed(env, tmp_path)


def test_an_exception_in_a_called_method(packed, build, tmp_path):
    env = build(fleet(tmp_path, {"call": raising(SimulatorError, "no such lever")}), packed)
    with pytest.raises(EnvError, match="no such lever") as caught:
        env.call("act_up")
    assert caught.value.env_ids == (2,)
    assert caught.value.method in {"call", "act_up"}
    assert "in act_up" in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, SimulatorError)
    assert_closed(env, tmp_path)


def test_an_exception_in_the_constructor(setup, build, tmp_path):
    """All that had been built is closed again; no worker stays."""
    with pytest.raises(EnvError, match="no licence") as caught:
        build(fleet(tmp_path, {"constructor": raising(SimulatorError, "no licence")}), setup)
    assert (caught.value.env_ids, caught.value.method) == ((2,), "constructor")
    assert "in __init__" in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, SimulatorError)
    assert told(tmp_path, "closed") == told(tmp_path, "built")
    assert gone(workers(tmp_path))


def test_an_exception_in_close(setup, build, tmp_path):
    """The others are closed all the same, and the error says whose it was."""
    env = build(fleet(tmp_path, {"close": raising(SimulatorError, "stuck door")}), setup)
    env.reset()
    with pytest.raises(EnvError, match="stuck door") as caught:
        env.close()
    assert (caught.value.env_ids, caught.value.method) == ((2,), "close")
    assert_closed(env, tmp_path)


def test_several_raise_in_close(setup, build, tmp_path):
    """The first of them is named, whichever worker was quicker."""
    env = build(fleet(tmp_path, {"close": raising(SimulatorError, "stuck door")}, faulty=(1, 2, 3)), setup)
    env.reset()
    with pytest.raises(EnvError, match=r"environment 1 .*stuck door") as caught:
        env.close()
    assert (caught.value.env_ids, caught.value.method) == ((1,), "close")
    assert caught.value.worker == {1: 0, 2: 0, 4: 1}[env.num_workers]
    assert isinstance(caught.value.__cause__, SimulatorError)
    assert_closed(env, tmp_path)


def test_an_exception_in_close_hides_no_other(packed, build, tmp_path):
    """What went wrong first is what is told."""
    faults = {"step": raising(SimulatorError, "bad terrain"), "close": raising(SimulatorError, "stuck door")}
    env = build(fleet(tmp_path, faults), packed)
    env.reset()
    with pytest.raises(EnvError, match="bad terrain"):
        steps(env, 1)
    assert_closed(env, tmp_path)


def test_several_raise_in_the_same_step(setup, build, tmp_path):
    env = build(fleet(tmp_path, {"step": raising(SimulatorError, "bad terrain")}, faulty=(1, 3)), setup)
    env.reset()
    with pytest.raises(EnvError, match="bad terrain") as caught:
        steps(env, 1)
    assert set(caught.value.env_ids) <= {1, 3}
    assert caught.value.env_ids
    assert_closed(env, tmp_path)


def test_sys_exit(setup, build, tmp_path):
    env = build(fleet(tmp_path, {"step": system_exit}), setup)
    env.reset()
    with pytest.raises(EnvError, match="SystemExit") as caught:
        steps(env, 1)
    assert caught.value.env_ids == (2,)
    assert isinstance(caught.value.__cause__, SystemExit)
    assert caught.value.__cause__.code == 3
    assert_closed(env, tmp_path)


@pytest.mark.parametrize("make", [functools.partial(PickyError, 3, "gate"), functools.partial(LockedError, "gate")])
def test_exceptions_that_do_not_travel(make, packed, build, tmp_path):
    """The text tells what the exception itself cannot."""
    env = build(fleet(tmp_path, {"step": raising(make)}), packed)
    env.reset()
    with pytest.raises(EnvError, match="gate") as caught:
        steps(env, 1)
    assert caught.value.env_ids == (2,)
    assert make.func.__name__ in caught.value.remote_traceback
    assert "in step" in caught.value.remote_traceback
    assert_closed(env, tmp_path)


def unpicklable() -> Any:
    """A thing that no pickle takes."""
    return threading.Lock()


def test_infos_that_do_not_travel(killable, build, tmp_path):
    env = build(fleet(tmp_path, {"step": unpicklable}), killable)
    env.reset()
    with pytest.raises(EnvError, match="infos") as caught:
        steps(env, 1)
    assert (caught.value.env_ids, caught.value.method) == ((2,), "step")
    assert_closed(env, tmp_path)


class Haunted(Fragile):
    """One more than the declared agents is seen, and it cannot be described."""

    def step(self, actions: dict) -> Any:
        observations, *others = super().step(actions)
        return {**observations, **({"ghost": threading.Lock()} if self.env_id == 2 else {})}, *others


def test_observations_that_do_not_travel(killable, build, tmp_path):
    env = build([functools.partial(Haunted, {}, tmp_path)] * 4, killable)
    env.reset()
    with pytest.raises(EnvError, match=r"the observations entry of 'ghost' .*lock.* cannot be pickled") as caught:
        steps(env, 1)
    assert (caught.value.env_ids, caught.value.method) == ((2,), "step")
    assert_closed(env, tmp_path)


DEATHS = [
    (hard_exit, 7, "7"),
    (killed_by(signal.SIGKILL), -signal.SIGKILL, "SIGKILL"),
    (killed_by(signal.SIGSEGV), -signal.SIGSEGV, "SIGSEGV"),
    (killed_by(signal.SIGABRT), -signal.SIGABRT, "SIGABRT"),
]


@pytest.mark.parametrize(("fault", "exitcode", "word"), DEATHS, ids=["os._exit", "SIGKILL", "SIGSEGV", "SIGABRT"])
@pytest.mark.parametrize("place", ["constructor", "reset", "step", "render"])
def test_a_worker_that_dies(place, fault, exitcode, word, processes, build, tmp_path):
    constructors = fleet(tmp_path, {place: fault})
    with pytest.raises(WorkerCrashed, match=word) as caught:  # noqa: PT012
        env = build(constructors, processes)
        env.reset()
        steps(env, 1)
        env.render()
    error = caught.value
    assert error.exitcode == exitcode
    assert 2 in error.env_ids
    assert error.env_ids == (2,) or processes.num_workers < 4
    assert error.worker == {1: 0, 2: 1, 4: 2}[processes.num_workers]
    assert gone(workers(tmp_path))
    if word in {"SIGSEGV", "SIGABRT"}:
        assert "failing.py" in str(error)
    if place != "constructor":
        with pytest.raises(ClosedEnvironmentError):
            env.reset()
        env.close()


def test_the_others_are_closed_in_an_orderly_way(build, killable, tmp_path):
    """Environments in workers that live are asked to close; only the dead worker's cannot be."""
    env = build(fleet(tmp_path, {"step": hard_exit}), killable)
    env.reset()
    with pytest.raises(WorkerCrashed):
        steps(env, 1)
    assert told(tmp_path, "closed") >= {1: set(), 2: {0, 1}, 4: {0, 1, 3}}[killable.num_workers]


@pytest.mark.parametrize("idle", ["before the first reset", "between steps"])
def test_a_worker_killed_while_idle(idle, killable, build, tmp_path):
    env = build(fleet(tmp_path, {}), killable)
    if idle == "between steps":
        env.reset()
        steps(env, 1)
    os.kill(env.call("pid")[3], signal.SIGKILL)
    with pytest.raises(WorkerCrashed, match="SIGKILL") as caught:  # noqa: PT012
        if idle != "between steps":
            env.reset()
        steps(env, 1)
    assert caught.value.exitcode == -signal.SIGKILL
    assert caught.value.worker == killable.num_workers - 1
    assert gone(workers(tmp_path))
    with pytest.raises(ClosedEnvironmentError):
        steps(env, 1)


def forever() -> None:
    while True:
        time.sleep(0.1)


def test_a_constructor_that_never_returns(killable, build, tmp_path):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="start_timeout") as caught:
        build(fleet(tmp_path, {"constructor": forever}), killable, start_timeout=2.0)
    assert isinstance(caught.value, ParallelEnvError)
    assert caught.value.env_ids == (2,) or killable.num_workers < 4
    assert time.monotonic() - began < 10.0
    assert gone(workers(tmp_path))


class Slow(dict):
    """Takes its time to be pickled."""

    def __reduce__(self) -> Any:
        time.sleep(0.2)
        return dict, ()


class Detailed(Fragile):
    @property
    def metadata(self) -> Any:
        return {"slow": Slow()}


def test_start_timeout_does_not_pass_between_constructors(build, killable, tmp_path):
    """A worker that tells of one environment before it builds the next is not late."""
    constructors = [functools.partial(Detailed, {}, tmp_path)] * 6
    build(constructors, killable._replace(num_workers=1), start_timeout=0.9).reset()


def test_start_timeout_is_per_constructor(build, killable, tmp_path):
    """Four constructors of half a second each, one after the other, are not two seconds to one."""
    constructors = fleet(tmp_path, {"constructor": functools.partial(time.sleep, 0.5)}, faulty=range(4))
    env = build(constructors, killable._replace(num_workers=1), start_timeout=1.4)
    env.reset()
