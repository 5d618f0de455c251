"""Worker processes from the fork server and portable ones: the same results, the same errors, nothing left behind.

Workers whose parent is killed are tested in `test_parent_deaths`, launchers in `test_launching`, the portable backend
alone in `test_spawn`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.processes import gone, workers
from helpers.scenarios import record, scenario
from helpers.signals import SIGKILL
from helpers.start_methods import arguments
from simulators.failing import Fragile, SimulatorError, hang, hard_exit, killed_by, raising

from marl_parallel import EnvError, ParallelEnv, WorkerCrashed, WorkerTimeout
from marl_parallel.backends.spawn import PortableProcessBackend

pytestmark = [pytest.mark.release_independent, pytest.mark.starts_anew]


@pytest.fixture
def build(start_method: str) -> Iterator[Callable[..., ParallelEnv]]:
    """Makes a `ParallelEnv` with two workers that start in this way."""
    with contextlib.ExitStack() as stack:

        def make(constructors: list[Any], mode: Any = True, **more: Any) -> ParallelEnv:
            env = ParallelEnv(constructors, mode, **{"num_workers": 2, **arguments(start_method), **more})
            stack.callback(env.close, terminate=True)
            return env

        yield make


def four_envs(notes: Path, count: int = 4, **faults: Any) -> list[Any]:
    """Four environments of which the third fails."""
    return [functools.partial(Fragile, faults if index == 2 else {}, notes) for index in range(count)]


def step(env: ParallelEnv) -> Any:
    return env.step([{"a": 0, "b": 1}] * env.num_envs)


# Results


@pytest.mark.parametrize("shared_memory", [True, False])
def test_trajectory(shared_memory, build):
    env = build(scenario("skirmish").constructors, shared_memory=shared_memory)
    for index, event in enumerate(record("skirmish", AutoresetMode.SAME_STEP)):
        result = getattr(env, event.method)(**copy.deepcopy(event.arguments))
        assert_same(result, event.result, f"event {index}, {event.method}")


def test_views_outlive_the_environment(build):
    env = build(scenario("hunt").constructors, copy=False)
    observations, _ = env.reset()
    saved = copy.deepcopy(observations)
    env.close()
    assert_same(observations, saved)


def test_stats_and_calls(build, tmp_path):
    env = build(four_envs(tmp_path))
    env.reset()
    step(env)
    assert env.stats().steps == 4
    assert env.stats().simulator_s > 0.0
    assert len(set(env.call("pid"))) == 2
    assert set(env.call("pid")) == workers(tmp_path)


class Reporter(Fragile):
    """Reports the state of its process."""

    def setting(self) -> dict[str, Any]:
        names = ("OMP_NUM_THREADS", "SET_LATER")
        return {
            "argv": sys.argv,
            "path": sys.path,
            "cwd": os.getcwd(),
            "environ": {name: os.environ.get(name) for name in names},
            "leads": os.getpid() == os.getpgrp() == os.getsid(0),
            "stdin": os.read(0, 1),
        }


def test_process_settings(start_method, build, tmp_path, monkeypatch):
    monkeypatch.setenv("SET_LATER", "\udcff")
    monkeypatch.setattr(sys, "argv", ["script", "ü\udcff"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    backend = {"backend": PortableProcessBackend(threads=3)} if start_method == "portable" else {}
    env = build([functools.partial(Reporter, {}, tmp_path)], num_workers=1, worker_threads=3, **backend)
    (settings,) = env.call("setting")
    assert settings["argv"] == ["script", "ü\udcff"]
    assert settings["path"] == sys.path
    assert settings["cwd"] == str(tmp_path)
    assert settings["environ"] == {"OMP_NUM_THREADS": "3", "SET_LATER": "\udcff"}
    assert settings["leads"]
    assert settings["stdin"] == b""


# What goes wrong


def test_exception(build, tmp_path):
    env = build(four_envs(tmp_path, step=raising(SimulatorError, "bad terrain")))
    env.reset()
    with pytest.raises(EnvError, match="bad terrain") as caught:
        step(env)
    assert (caught.value.env_ids, caught.value.worker, caught.value.method) == ((2,), 1, "step")
    assert isinstance(caught.value.__cause__, SimulatorError)
    assert len([*tmp_path.glob("closed-*")]) == 4
    assert gone(workers(tmp_path))


@pytest.mark.parametrize("place", ["constructor", "step"])
def test_exit(place, build, tmp_path):
    with pytest.raises(WorkerCrashed, match="exit code 7") as caught:  # noqa: PT012
        env = build(four_envs(tmp_path, **{place: hard_exit}))
        env.reset()
        step(env)
    assert (caught.value.exitcode, caught.value.env_ids, caught.value.worker) == (7, (2,), 1)
    assert gone(workers(tmp_path))


@pytest.mark.parametrize("number", [SIGKILL, signal.SIGSEGV])
def test_signal(number, build, tmp_path):
    env = build(four_envs(tmp_path, step=killed_by(number)))
    env.reset()
    with pytest.raises(WorkerCrashed, match=number.name) as caught:
        step(env)
    assert caught.value.exitcode == -number
    assert ("failing.py" in str(caught.value)) == (number == signal.SIGSEGV)
    assert gone(workers(tmp_path))


def die_with_forked_child() -> None:
    """Die while a child keeps all descriptors open, including the channel to the parent."""
    if os.fork():
        os._exit(7)
    time.sleep(60)


def test_death_with_a_forked_child(build, tmp_path):
    env = build(four_envs(tmp_path, step=die_with_forked_child))
    env.reset()
    began = time.monotonic()
    with pytest.raises(WorkerCrashed, match="exit code 7"):
        step(env)
    assert time.monotonic() - began < 3.0


def test_hanging_constructor(build, tmp_path):
    began = time.monotonic()
    with pytest.raises(WorkerTimeout, match="start_timeout") as caught:
        build(four_envs(tmp_path, constructor=hang), start_timeout=2.0)
    assert time.monotonic() - began < 30.0
    assert caught.value.env_ids == (2,)
    assert "in hang" in caught.value.stack
    assert gone(workers(tmp_path))


def test_close_from_another_thread(build, tmp_path):
    env = build(four_envs(tmp_path, step=hang))
    env.reset()
    timer = threading.Timer(0.2, functools.partial(env.close, terminate=True))
    timer.start()
    with pytest.raises(ClosedEnvironmentError):
        step(env)
    timer.join()
    assert gone(workers(tmp_path))


def test_close_timeout(build, tmp_path):
    env = build(four_envs(tmp_path, close=hang))
    began = time.monotonic()
    env.close(timeout=0.3)
    assert time.monotonic() - began < 2.0
    assert gone(workers(tmp_path))


def test_forked_child_touches_nothing(build, tmp_path):
    env = build(four_envs(tmp_path))
    env.reset()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            env.close()
            del env
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    step(env)


# Leftovers


def with_child(notes: Path) -> Callable[[], None]:
    def start() -> None:
        sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        (notes / f"started-child-{os.getpid()}").write_text(str(sleeper.pid))
        sleeper.returncode = 0  # it is the test that looks after it

    return start


@pytest.mark.parametrize("fault", [None, hard_exit])
def test_children_of_simulators(fault, build, tmp_path):
    faults = {"reset": with_child(tmp_path)} | ({} if fault is None else {"step": fault})
    env = build(four_envs(tmp_path, **faults))
    env.reset()
    assert len(workers(tmp_path)) == 3
    if fault is None:
        env.close()
    else:
        with pytest.raises(WorkerCrashed):
            step(env)
    assert gone(workers(tmp_path))


@pytest.mark.whole_machine
def test_nothing_is_left(start_method, tmp_path):
    def held() -> tuple[Any, ...]:
        gc.collect()  # what other tests have left in cycles
        shown = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(("marl_parallel", "pymp"))]
        return len(os.listdir("/proc/self/fd")), threading.active_count(), os.listdir("/dev/shm"), shown

    def cycle(number: int) -> None:
        env = ParallelEnv(four_envs(tmp_path), num_workers=2, **arguments(start_method))
        env.reset()
        if number % 2:
            os.kill(env.call("pid")[0], signal.SIGKILL)
            with pytest.raises(WorkerCrashed):
                step(env)
        env.close()

    cycle(0)
    before, children = held(), psutil.Process().children(recursive=True)
    for number in range(4):
        cycle(number)
    assert held() == before
    assert psutil.Process().children(recursive=True) == children
