"""The stack of a worker whose simulator calls `os._exit`, which is no signal and no exception."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
from helpers.processes import workers
from helpers.start_methods import arguments
from simulators.failing import Fragile, hard_exit

from marl_parallel import EnvError, ParallelEnv, WorkerCrashed

pytestmark = pytest.mark.release_independent
ACTIONS = [{"a": 0, "b": 0}] * 2


def exit_in_a_thread() -> None:
    """As a watchdog does."""
    thread = threading.Thread(target=hard_exit)
    thread.start()
    thread.join()


def crash_of(fault: Callable[[], Any], place: str, folder: Any, start_method: str) -> WorkerCrashed:
    """The error of a worker whose environment 1 has a fault at a place."""
    constructors = [functools.partial(Fragile, faults, folder) for faults in ({}, {place: fault})]
    try:
        with ParallelEnv(constructors, num_workers=2, seed=1, **arguments(start_method)) as env:
            env.reset()
            env.step(ACTIONS)
    except WorkerCrashed as error:
        return error
    pytest.fail("the worker did not die")


@pytest.mark.parametrize("place", ["constructor", "step"])
def test_os_exit_leaves_the_stack(place, start_method, tmp_path):
    error = crash_of(hard_exit, place, tmp_path, start_method)
    assert error.exitcode == 7
    assert error.env_ids == (1,)
    assert f"died in {place} of environment 1, at line " in str(error)
    assert "failing.py: exit code 7" in str(error)
    lines = error.stack.splitlines()
    assert lines[0] == "os._exit was called here (most recent call first):"
    assert lines[1].endswith("in hard_exit")
    assert "in come_to" in error.stack
    assert "worker.py" in error.stack


def test_os_exit_in_another_thread_leaves_its_stack(start_method, tmp_path):
    error = crash_of(exit_in_a_thread, "step", tmp_path, start_method)
    assert error.exitcode == 7
    assert "in hard_exit" in error.stack
    assert "threading.py" in error.stack


def try_out_exits(env: Any) -> dict[str, Any]:
    """What else code may do with `os._exit`; the process goes on."""
    child = os.fork()
    if not child:
        hard_exit()
    _, status = os.waitpid(child, 0)
    found = {"child": os.waitstatus_to_exitcode(status), "name": os._exit.__name__}
    found["pickled"] = pickle.loads(pickle.dumps(os._exit)) is os._exit
    found["by cloudpickle"] = pickle.loads(cloudpickle.dumps({"end": os._exit}))["end"] is os._exit
    try:
        os._exit("no number")  # type: ignore[arg-type]
    except TypeError:
        found["wrong"] = True
    return found


def test_os_exit_stays_what_it_is(start_method, tmp_path):
    """It pickles by name, ends forked children, refuses other values; none of these leaves a stack."""
    env = ParallelEnv([functools.partial(Fragile, {}, tmp_path)], num_workers=1, seed=1, **arguments(start_method))
    with env, pytest.raises(WorkerCrashed) as caught:  # noqa: PT012
        env.reset()
        expected = {"child": 7, "name": "_exit", "pickled": True, "by cloudpickle": True, "wrong": True}
        assert env.call(try_out_exits) == (expected,)
        assert env.call(lambda _: os._exit) == (os._exit,)
        (pid,) = workers(tmp_path)
        os.kill(pid, signal.SIGKILL)
        env.step(ACTIONS[:1])
    assert caught.value.exitcode == -signal.SIGKILL
    assert caught.value.stack == ""


def test_os_exit_of_this_process_is_not_replaced(tmp_path):
    """Nor are the functions of serial environments, which run here."""
    before = os._exit
    with ParallelEnv([functools.partial(Fragile, {}, tmp_path)], backend="serial", seed=1) as env:
        env.reset()
        with pytest.raises(EnvError, match="TypeError"):
            env.call(lambda _: os._exit("no number"))
    assert os._exit is before
