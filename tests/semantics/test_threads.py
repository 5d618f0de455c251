"""Calls from several threads: a second concurrent call raises, and the first one gets its own results."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from helpers.processes import wait_for
from simulators.native_arena import Arena
from simulators.paced import acts, fleet, hold, release, seen, trace

from marl_parallel import ParallelEnv
from marl_parallel.core.exclusive import CallGuard, exclusive
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv

pytestmark = pytest.mark.release_independent

PATIENCE_S = 60.0


class CallInThread:
    """Runs a call in a thread named "first" until environment 0 blocks in the middle of it."""

    def __init__(self, notes: Path, call: Callable[[], Any]) -> None:
        self._notes, self._pool = notes, ThreadPoolExecutor(1, "first")
        before = len(trace(notes)) if (notes / "trace").exists() else 0
        hold(notes, 0)
        self.result = self._pool.submit(call)
        wait_for(lambda: (notes / "trace").exists() and len(trace(notes)) > before)

    def __enter__(self) -> CallInThread:
        return self

    def finish(self) -> Any:
        release(self._notes, 0)
        return self.result.result(PATIENCE_S)

    def __exit__(self, *_: object) -> None:
        if (self._notes / "hold-0").exists():
            release(self._notes, 0)
        self._pool.shutdown()


def calls_of(env: ParallelEnv, notes: Path) -> dict[str, Callable[[], Any]]:
    return {
        "step": lambda: env.step(acts(7, 7)),
        "reset": lambda: env.reset(seed=7),
        "send": lambda: env.send(acts(7, 7)),
        "recv": lambda: env.recv(timeout=0.01),
        "reset_async": lambda: env.reset_async(env_ids=[1]),
        "call": lambda: env.call("close"),
        "get_attr": lambda: env.get_attr("env_id"),
        "set_attr": lambda: env.set_attr("env_id", 5),
        "render": env.render,
        "state": env.state,
        "start_trace": lambda: env.start_trace(notes / "trace.json"),
        "stop_trace": env.stop_trace,
    }


@pytest.mark.in_turn
@pytest.mark.parametrize("on_error", ["raise", "restart"])
@pytest.mark.parametrize("call", ["step", "step some", "recv", "reset"])
def test_call_from_a_second_thread_is_refused(on_error, call, backend_setup, build, tmp_path):
    """For every call; the first call is not affected, and afterwards any thread may call."""
    env = build(fleet(tmp_path, 2), backend_setup, on_error=on_error)
    env.reset()
    first: dict[str, Callable[[], Any]] = {
        "step": lambda: seen(env.step(acts(1, 2))[0]),
        "step some": lambda: seen(env.step(acts(1), env_ids=[0])[0]),
        "recv": lambda: sorted(seen(env.recv().observations)),
        "reset": lambda: seen(env.reset()[0]),
    }
    expected = {"step": [1.0, 2.0], "step some": [1.0], "recv": [1.0, 2.0], "reset": [0.0, 0.0]}[call]
    name, due = call.split()[0], False
    if call == "recv":
        hold(tmp_path, 0)
        if backend_setup.backend == "serial":  # computes in send
            name, first["recv"], expected = "send", (lambda: env.send(acts(1, 2))), None
            due = True
        else:
            env.send(acts(1, 2))
    with (
        CallInThread(tmp_path, first[call])
        if call != "recv" or due
        else _RecvInThread(tmp_path, first[call], env) as other
    ):
        for method, call in calls_of(env, tmp_path).items():
            shown = "call" if method == "get_attr" else method
            with pytest.raises(AlreadyPendingCallError) as caught:
                call()
            text = str(caught.value)
            assert text.startswith(
                f"{shown}() was called in thread 'MainThread' while thread 'first_0' is inside {name}()"
            )
        assert env.num_envs == 2
        assert len(env.stats().workers) == env.num_workers
        assert other.finish() == expected
    if due:
        assert seen(env.recv().observations) == [1.0, 2.0]
    assert not env.pending
    observations, rewards, *_ = env.step(acts(3, 4))
    assert (seen(observations), [one["a"] for one in rewards]) == ([3.0, 4.0], [3.0, 4.0])
    assert env.get_attr("env_id") == (0, 1)
    assert not [line for line in trace(tmp_path) if line.startswith("close")]


class _RecvInThread(CallInThread):
    """The same for `recv`: the environment already blocks before it."""

    def __init__(self, notes: Path, call: Callable[[], Any], env: ParallelEnv) -> None:
        self._notes, self._pool = notes, ThreadPoolExecutor(1, "first")
        self.result = self._pool.submit(call)
        wait_for(lambda: bool(env._guard))


def test_two_stepping_threads(backend_setup, build, tmp_path):
    """Each gets an error or its own results."""
    env = build(fleet(tmp_path, 4), backend_setup)
    env.reset()
    begin = threading.Barrier(2)

    def loop(sign: int) -> tuple[int, int, int]:
        right = wrong = refused = 0
        begin.wait()
        for number in range(1, 201):
            values = [float(sign * (4 * number + env_id)) for env_id in range(4)]
            try:
                observations, rewards, *_ = env.step(acts(*values))
            except AlreadyPendingCallError:
                refused += 1
                time.sleep(1e-4)
                continue
            same = seen(observations) == values == [one["a"] for one in rewards]
            right, wrong = right + same, wrong + (not same)
        return right, wrong, refused

    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(loop, [1, -1])]
    assert [wrong for _, wrong, _ in results] == [0, 0]
    assert sum(right for right, _, _ in results) > 0
    assert sum(refused for _, _, refused in results) > 0


@pytest.mark.parametrize("facade", [PettingZooVecEnv, GymnasiumVectorEnv])
def test_facades_refuse_a_second_thread(facade, backend_setup, build, tmp_path):
    env = build(fleet(tmp_path, 2), backend_setup)
    vector: Any = facade(env)
    vector.reset()
    array = np.array([[1], [2]], np.float32)
    by_agent = facade is PettingZooVecEnv
    actions: Any = {"a": array} if by_agent else array
    with CallInThread(tmp_path, lambda: vector.step(actions)) as other:
        for name, call in {
            "step": lambda: vector.step(actions),
            "step_async": lambda: vector.step_async(actions),
            "step_wait": vector.step_wait,
            "reset": vector.reset,
            "call": lambda: vector.call("close"),
        }.items():
            with pytest.raises(AlreadyPendingCallError, match=rf"^{name}\(\) was called in thread 'MainThread'"):
                call()
        with pytest.raises(AlreadyPendingCallError, match=r"is inside step\(\)"):
            env.step(acts(5, 5))
        observations = other.finish()[0]
    assert np.array_equal(observations["a"] if by_agent else observations, array)
    vector.step_async(actions)
    observations = vector.step_wait()[0]
    assert np.array_equal(observations["a"] if by_agent else observations, array)
    assert not [line for line in trace(tmp_path) if line.startswith("close")]


class SlowArena(Arena):
    """`receive` waits until an event is set."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.go, self.inside = threading.Event(), threading.Event()
        self.go.set()

    def receive(self) -> Any:
        self.inside.set()
        assert self.go.wait(PATIENCE_S)
        return super().receive()


def test_native_simulator_refuses_a_second_thread():
    arena = SlowArena(3)
    with ParallelEnv.from_native(arena) as env, ThreadPoolExecutor(1, "first") as pool:
        observations, _ = env.reset()
        env.seed()
        actions = [{agent: env.action_space[agent].sample() for agent in acting} for acting in env.acting]
        arena.go.clear()
        arena.inside.clear()
        result = pool.submit(env.step, actions)
        assert arena.inside.wait(PATIENCE_S)
        for call in (lambda: env.step(actions), env.reset, env.recv, lambda: env.send(actions)):
            with pytest.raises(AlreadyPendingCallError, match=r"thread 'first_0' is inside step\(\)"):
                call()
        arena.go.set()
        assert len(result.result(PATIENCE_S)[0]) == len(observations)
        assert len(env.step([dict(one) for one in actions])[0]) == 3


def test_step_in_a_signal_handler_is_refused(concurrent_setup, build, tmp_path):
    """The interrupted step goes on."""
    env = build(fleet(tmp_path, 2), concurrent_setup)
    env.reset()
    errors: list[BaseException] = []

    def handler(*_: object) -> None:
        try:
            env.step(acts(9, 9))
        except Exception as error:
            errors.append(error)
        release(tmp_path, 0)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        hold(tmp_path, 0)
        steps = trace(tmp_path).count("step 0")

        def interrupt() -> None:
            wait_for(lambda: trace(tmp_path).count("step 0") > steps)
            os.kill(os.getpid(), signal.SIGUSR1)

        thread = threading.Thread(target=interrupt)
        thread.start()
        observations, *_ = env.step(acts(1, 2))
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    (error,) = errors
    assert isinstance(error, AlreadyPendingCallError)
    assert str(error).startswith("step() was called inside step() of the same thread")
    assert seen(observations) == [1.0, 2.0]
    assert seen(env.step(acts(3, 4))[0]) == [3.0, 4.0]


def test_call_after_close_during_a_blocked_call(concurrent_or_portable, build, tmp_path):
    """It raises `ClosedEnvironmentError` although another thread is still in a call."""
    env = build(fleet(tmp_path, 2), concurrent_or_portable)
    env.reset()
    with CallInThread(tmp_path, lambda: env.step(acts(1, 2))) as other:
        closing = threading.Thread(target=env.close, kwargs={"terminate": True})
        closing.start()
        wait_for(lambda: env.stepper.source.closed)
        with pytest.raises(ClosedEnvironmentError):
            env.step(acts(1, 2))
        with pytest.raises(ClosedEnvironmentError):
            other.result.result(PATIENCE_S)
        release(tmp_path, 0)
        closing.join()


class InterruptingActions(dict):
    """Actions that raise KeyboardInterrupt when they are read."""

    def __iter__(self) -> Any:
        raise KeyboardInterrupt

    def keys(self) -> Any:
        raise KeyboardInterrupt


def test_failed_call_allows_the_next_one(concurrent_setup, build, tmp_path):
    """After an interrupt, a wrong argument or a timeout."""
    env = build(fleet(tmp_path, 2), concurrent_setup)
    env.reset()
    with pytest.raises(KeyboardInterrupt):
        env.step([InterruptingActions(), InterruptingActions()])
    with pytest.raises(ValueError, match="one for each environment"):
        env.step(acts(1))
    with pytest.raises(AttributeError):
        env.get_attr("nothing of the kind")
    hold(tmp_path, 0)
    env.send(acts(1, 2))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            env.recv(timeout=0.01)
    release(tmp_path, 0)
    assert sorted(seen(env.recv().observations)) == [1.0, 2.0]
    assert seen(env.step(acts(3, 4))[0]) == [3.0, 4.0]


class Counter:
    """An object with one guarded method."""

    def __init__(self) -> None:
        self._guard = CallGuard(lambda: None)
        self.count = 0

    @exclusive("add")
    def add(self) -> None:
        self.count += 1


def test_interrupt_at_any_moment_allows_the_next_call():
    """Ctrl-C during the entry or exit of a call."""
    counter = Counter()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupts = 0
    try:
        for number in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + number % 50 * 1e-6)
                while True:
                    counter.add()
            except KeyboardInterrupt:
                interrupts += 1
            assert not counter._guard
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts == 300
    counter.add()
