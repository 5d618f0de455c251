"""The error of a call after everything was closed says what has closed it."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.processes import wait_for
from helpers.setups import Setup
from simulators.failing import Fragile, SimulatorError, raising
from simulators.native_arena import Arena

from marl_parallel import EnvError, ParallelEnv, ParallelEnvError
from marl_parallel.vector import GymnasiumVectorEnv

pytestmark = pytest.mark.release_independent

ACTIONS = [{"a": 0, "b": 0}] * 4
CALLS: list[Callable[[Any], Any]] = [lambda env: env.reset(), lambda env: env.step(ACTIONS), lambda env: env.seed()]


def fleet(notes: Path, **faults: Any) -> list[Any]:
    """Four environments, of which the last one has faults."""
    return [functools.partial(Fragile, faults if index == 3 else {}, notes) for index in range(4)]


def check(env: Any, cause: str) -> None:
    """Every call raises the error with this cause; `close` changes nothing about it."""
    for _ in range(2):
        for call in CALLS:
            with pytest.raises(ClosedEnvironmentError) as raised:
                call(env)
            assert str(raised.value) == f"the environments have been closed{cause}; make a new ParallelEnv"
        env.close()


def test_close(backend_setup: Setup, build: Any, tmp_path: Path) -> None:
    env = build(fleet(tmp_path), backend_setup)
    env.reset()
    env.close()
    check(env, "")


def test_error(backend_setup: Setup, build: Any, tmp_path: Path) -> None:
    env = build(fleet(tmp_path, step=raising(SimulatorError, "bad terrain\nsecond line")), backend_setup)
    env.reset()
    with pytest.raises(EnvError) as raised:
        env.step(ACTIONS)
    first = str(raised.value).splitlines()[0]
    assert re.match(r"environment 3 \(worker \d\) raised in step, .*SimulatorError: bad terrain$", first)
    check(env, f" by an error in step() (EnvError: {first})")


def test_error_after_send(build: Any, tmp_path: Path) -> None:
    env = build(fleet(tmp_path, step=raising(SimulatorError, "bad terrain")), Setup("thread", True, 2))
    env.reset()
    env.send(ACTIONS)
    with pytest.raises(EnvError) as raised:
        env.recv(4)
    check(env, f" by an error in recv() (EnvError: {str(raised.value).splitlines()[0]})")


@pytest.mark.parametrize("place", ["death", "timeout"])
def test_death_and_timeout(place: str, process_setup: Setup, build: Any, tmp_path: Path) -> None:
    fault = functools.partial(os._exit, 3) if place == "death" else functools.partial(time.sleep, 60)
    env = build(fleet(tmp_path, step=fault), process_setup, step_timeout=None if place == "death" else 0.3)
    env.reset()
    with pytest.raises(ParallelEnvError) as raised:
        env.step(ACTIONS)
    name = {"death": "WorkerCrashed", "timeout": "WorkerTimeout"}[place]
    check(env, f" by an error in step() ({name}: {str(raised.value).splitlines()[0]})")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (KeyboardInterrupt(), " by Ctrl-C in step()"),
        (TimeoutError("my own limit"), " by an error in step() (TimeoutError: my own limit)"),
        (SystemExit(), " by SystemExit in step()"),
    ],
    ids=["Ctrl-C", "error of a handler", "exit"],
)
def test_signal(error: BaseException, cause: str, process_setup: Setup, build: Any, tmp_path: Path) -> None:
    """In the middle of a step: Ctrl-C, or a handler of the caller that raises."""

    def hang() -> None:
        (tmp_path / "hangs").touch()
        time.sleep(60)

    def handler(*_: Any) -> None:
        raise error

    env = build(fleet(tmp_path, step=hang), process_setup)
    env.reset()

    def send() -> None:
        wait_for((tmp_path / "hangs").exists)
        os.kill(os.getpid(), signal.SIGUSR2)

    before, sender = signal.signal(signal.SIGUSR2, handler), threading.Thread(target=send)
    try:
        sender.start()
        with pytest.raises(type(error)):
            env.step(ACTIONS)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR2, before)
    check(env, cause)


def test_facade(build: Any, tmp_path: Path) -> None:
    """It raises the same error."""
    env = build(fleet(tmp_path, step=raising(SimulatorError, "bad terrain")), Setup("serial", True, 1))
    facade = GymnasiumVectorEnv(env)
    facade.reset()
    with pytest.raises(EnvError, match="environment 3"):
        facade.step(facade.action_space.sample())
    with pytest.raises(
        ClosedEnvironmentError, match=r"closed by an error in step\(\) \(EnvError: environment 3 .*bad t"
    ):
        facade.reset()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            ValueError("no map\nat all"),
            r" by an error in reset\(\) \(EnvError: .* raised in reset: ValueError: no map\)",
        ),
        (KeyboardInterrupt(), r" by Ctrl-C in reset\(\)"),
    ],
    ids=["error", "Ctrl-C"],
)
def test_native_simulator(error: BaseException, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Arena(2)

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    env = ParallelEnv.from_native(simulator)
    monkeypatch.setattr(simulator, "reset", fails)
    with pytest.raises(EnvError if isinstance(error, Exception) else type(error)):
        env.reset()
    for _ in range(2):
        with pytest.raises(ClosedEnvironmentError, match=f"have been closed{cause}; make a new ParallelEnv"):
            env.reset()
        env.close()


def test_forked_child(build: Any, tmp_path: Path) -> None:
    env = build(fleet(tmp_path), Setup("serial", True, 1))
    env.reset()
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        try:
            env.reset()
        except ClosedEnvironmentError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with open(read_end) as pipe:
        text = pipe.read()
    where = "in this process, which was forked from the one that made them"
    assert text == f"the environments have been closed {where}; make a new ParallelEnv"
    env.step(ACTIONS)
