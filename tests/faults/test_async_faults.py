"""Faults in calls in flight are raised by `recv`, never by `send`, and close everything, or restart the environment.

The same faults in `step` and `reset` are tested in `test_environment_errors` and `test_restarts`.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.processes import gone, wait_for, workers
from helpers.setups import Setup
from helpers.signals import SIGKILL
from helpers.start_methods import arguments
from simulators.failing import Fragile, SimulatorError, dozing, hard_exit, killed_by, raising, system_exit
from simulators.paced import AT_MOST_S, Paced, acts, fleet, hold, release, seen

from marl_parallel import EnvError, ParallelEnv, RestartLimitExceeded, RestartPolicy, WorkerCrashed

pytestmark = pytest.mark.release_independent

NOOP = {"a": 0, "b": 1}
STEP_OR_RESET = pytest.mark.parametrize("method", ["step", "reset"])


def fragile_envs(notes: Path, **faults: Callable[[], Any]) -> list[Callable[..., Fragile]]:
    """Four environments; the third has faults: in `step` and `reset` from the second call on."""
    return [functools.partial(Fragile, faults if env_id == 2 else {}, notes, 1) for env_id in range(4)]


def begin(env: ParallelEnv, method: str, *env_ids: int) -> None:
    if method == "step":
        env.send([NOOP] * len(env_ids), env_ids)
    else:
        env.reset_async(env_ids=env_ids)


def receive_until_fault(env: ParallelEnv) -> None:
    """Call `recv` until it raises a fault."""
    while True:
        env.recv(min_envs=1)


def assert_closed(env: ParallelEnv, notes: Path) -> None:
    """Nothing is left, and every call raises."""
    assert gone(workers(notes))
    for use in (env.recv, env.reset, env.reset_async, lambda: env.send([NOOP] * 4)):
        with pytest.raises(ClosedEnvironmentError):
            use()


@STEP_OR_RESET
@pytest.mark.parametrize("fault", [raising(SimulatorError, "bad terrain"), system_exit], ids=["raise", "exit"])
def test_exception_in_flight(fault, method, backend_setup, build, tmp_path):
    """`recv` raises it, also if other environments are sent to after it happened."""
    env = build(fragile_envs(tmp_path, **{method: fault}), backend_setup)
    env.reset()
    env.step([NOOP] * 4)
    begin(env, method, 2)
    time.sleep(0.1)
    begin(env, "step", 0, 1)
    begin(env, "reset", 3)
    with pytest.raises(EnvError, match="environment 2") as caught:
        receive_until_fault(env)
    assert (caught.value.env_ids, caught.value.method) == ((2,), method)
    assert isinstance(caught.value.__cause__, SimulatorError | SystemExit)
    assert len([*tmp_path.glob("closed-*")]) == 4
    assert_closed(env, tmp_path)


@STEP_OR_RESET
@pytest.mark.parametrize("fault", [hard_exit, killed_by(SIGKILL)], ids=["exit", "SIGKILL"])
def test_worker_dies_in_flight(fault, method, start_method, tmp_path):
    env = ParallelEnv(fragile_envs(tmp_path, **{method: fault}), num_workers=2, **arguments(start_method))
    env.reset()
    env.step([NOOP] * 4)
    begin(env, method, 0, 1, 2, 3)
    with pytest.raises(WorkerCrashed, match="environment 2") as caught:
        receive_until_fault(env)
    assert (caught.value.env_ids, caught.value.worker) == ((2,), 1)
    assert_closed(env, tmp_path)


@STEP_OR_RESET
@pytest.mark.parametrize("seeds", ["known", "not known"])
def test_send_to_a_dead_worker(seeds, method, start_method, tmp_path):
    """The call is in flight, whatever other calls are made."""
    env = ParallelEnv(fragile_envs(tmp_path), num_workers=2, **arguments(start_method))
    env.reset()
    victim = env.call("pid")[2]
    if seeds == "known":
        env.seed()
    os.kill(victim, signal.SIGKILL)
    assert gone([victim])
    time.sleep(0.1)
    begin(env, method, 0, 1, 2, 3)
    assert env.pending == (0, 1, 2, 3)
    with pytest.raises(WorkerCrashed, match="SIGKILL") as caught:
        receive_until_fault(env)
    assert caught.value.worker == 1
    assert_closed(env, tmp_path)


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_ctrl_c(timeout, concurrent_or_portable, build, tmp_path):
    """Whatever the simulators are doing, no process is left."""
    env = build(dozing(tmp_path, 3.0), concurrent_or_portable)
    env.reset()
    begin(env, "step", 0, 1, 2, 3)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        env.recv(timeout=timeout)
    assert_closed(env, tmp_path)


@pytest.fixture
def alarm_error() -> Iterator[None]:
    """SIGALRM raises the caller's own `TimeoutError` out of any call."""

    def interrupt(*_: Any) -> None:
        raise TimeoutError("my own")

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm_error")
@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize("method", ["step", "recv"])
def test_timeout_error_of_a_signal_handler(method, backend, tmp_path):
    """It interrupts `recv` like Ctrl-C and must not be taken for `recv`'s own timeout, which loses nothing."""
    env = ParallelEnv(fleet(tmp_path, 2), backend=backend, num_workers=2)
    env.reset()
    hold(tmp_path, 0)
    if method == "recv":
        env.send(acts(1, 2))
        wait_for(lambda: env.stats().steps == 1)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(TimeoutError, match="my own"):
        env.recv() if method == "recv" else env.step(acts(1, 2))
    release(tmp_path, 0)
    with pytest.raises(ClosedEnvironmentError):
        env.reset_async()
    env.close(terminate=True)


def fork_child() -> None:
    """Fork a child that keeps the parent's descriptors open."""
    if os.fork() == 0:
        try:
            time.sleep(60)
        finally:
            os._exit(0)


def test_death_is_noticed_while_others_run(start_method, tmp_path):
    """Although its pipe stays open, and results of others arrive all the time."""
    env = ParallelEnv(fragile_envs(tmp_path, constructor=fork_child), num_workers=2, **arguments(start_method))
    env.reset()
    victim = env.call("pid")[2]
    begin(env, "step", 0)
    os.kill(victim, signal.SIGKILL)
    begin(env, "step", 2)

    def go_on() -> None:
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            env.recv(min_envs=1)
            begin(env, "step", 0)

    with pytest.raises(WorkerCrashed, match="SIGKILL") as caught:
        go_on()
    assert caught.value.worker == 1
    assert_closed(env, tmp_path)


def pid_of(_: Any) -> int:
    return os.getpid()


class BlockingConstructor(Paced):
    """Its constructor, too, can be blocked by the test, and can crash."""

    def __init__(self, notes: Any, *, env_id: int) -> None:
        super().__init__(notes, env_id=env_id)
        self.take_turn("constructor")
        if (self.notes / "doomed").exists():
            raise RuntimeError("none is left")


@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED"])
@pytest.mark.parametrize("doomed", [False, True], ids=["comes", "does not come"])
def test_reset_async_of_a_crashed_worker(doomed, mode, build, tmp_path):
    """`reset_async` does not wait for the replacement; `recv` returns its result."""
    how = {"on_error": "restart", "restart_policy": RestartPolicy(max_restarts=1)}
    env = build([functools.partial(BlockingConstructor, tmp_path)] * 2, Setup("process", True, 1), mode, **how)
    env.reset()
    pid = env.call(pid_of)[0]
    hold(tmp_path, 1)
    os.kill(pid, signal.SIGKILL)
    env.send(acts(1.0), env_ids=[0])
    env.recv()
    before = time.monotonic()
    env.reset_async(env_ids=[1], options={"map": "big"})
    assert time.monotonic() - before < AT_MOST_S / 2
    assert env.pending == (1,)
    with pytest.raises(TimeoutError):
        env.recv(timeout=0.05)
    if doomed:
        (tmp_path / "doomed").touch()
    release(tmp_path, 1)
    if doomed:
        with pytest.raises(RestartLimitExceeded, match="none is left"):
            env.recv()
        return
    batch = env.recv()
    assert batch.env_ids == (1,)
    assert batch.infos[0]["__common__"]["restarted"] is True
    assert "SIGKILL" in batch.infos[0]["__common__"]["error"]
    assert batch.truncateds[0]["__all__"] is False
    assert env.get_attr("options")[1] == {"map": "big"}
    assert seen(env.step(acts(3.0), env_ids=[1])[0]) == [3.0]
