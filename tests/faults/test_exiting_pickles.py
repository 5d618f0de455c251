"""Exceptions and values of simulators whose pickles exit, raise or hang: the program gets an error and goes on."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.comparison import assert_same
from helpers.setups import BACKEND_SETUPS, Setup
from simulators import exiting_pickles
from simulators.exiting_pickles import EXCEPTIONS, VALUES, WHERE, ExitingPickles, Reduced, exit_in, hang_in

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.cli.check_findings import pickling_error
from marl_parallel.core.objects import pickling

pytestmark = [pytest.mark.release_independent, pytest.mark.in_turn]

ENVS = 3
STEP = [{"a": 0, "b": 1}] * ENVS
SETUPS = pytest.mark.parametrize("setup", [*BACKEND_SETUPS, Setup("portable", True, 2)], ids=str)


def envs(place: str, make: Callable[[], Any]) -> list[Any]:
    return [functools.partial(ExitingPickles, place, make)] * ENVS


def named(table: str, name: str) -> Any:
    """An entry of `EXCEPTIONS` or `VALUES`, made in the worker."""
    return getattr(exiting_pickles, table)[name]()


def check_raised(env: ParallelEnv, name: str) -> EnvError:
    env.reset()
    env.step(STEP)
    with pytest.raises(EnvError) as caught:
        env.step(STEP)
    error = caught.value
    assert (error.env_ids, error.method) == ((WHERE,), "step")
    assert str(error).startswith(f"environment {WHERE} (worker")
    assert type(EXCEPTIONS[name]()).__name__ in error.remote_traceback
    assert "in step" in error.remote_traceback
    assert error.original is None
    with pytest.raises(ClosedEnvironmentError):
        env.step(STEP)
    return error


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_in_this_process(name):
    check_raised(ParallelEnv(envs("raises", functools.partial(named, "EXCEPTIONS", name)), backend="serial"), name)


@SETUPS
@pytest.mark.parametrize("name", ["sys.exit", "reduce", "KeyboardInterrupt", "a number"])
def test_exceptions_on_every_backend(name, setup, build):
    check_raised(build(envs("raises", functools.partial(named, "EXCEPTIONS", name)), setup), name)


def test_neighbours_of_such_an_exception_go_on(two_worker_setup, build):
    make = functools.partial(named, "EXCEPTIONS", "setstate")
    env = build(envs("raises", make), two_worker_setup, on_error="restart")
    loops = {env_id: ExitingPickles("raises", make, env_id=env_id) for env_id in range(ENVS) if env_id != WHERE}
    env.reset()
    for loop in loops.values():
        loop.reset()
    for number in range(1, 4):
        results = env.step(STEP)
        assert ("__common__" in results[4][WHERE]) is (number == 2)
        for env_id, loop in loops.items():
            assert_same(tuple(column[env_id] for column in results), loop.step(STEP[env_id]))
    assert env.stats().restarts == 1


@pytest.mark.parametrize("fault", [exit_in, hang_in])
@pytest.mark.parametrize("backend", ["process", "hybrid"])
def test_exceptions_that_only_this_process_cannot_load(fault, backend, monkeypatch):
    monkeypatch.setattr(pickling, "RETURNS_WITHIN_S", 0.3)
    make = functools.partial(Reduced, fault, os.getpid())
    with ParallelEnv(envs("raises", make), backend=backend, num_workers=2) as env:
        env.reset()
        env.step(STEP)
        with pytest.raises(EnvError, match="Reduced") as caught:
            env.step(STEP)
        assert (caught.value.env_ids, caught.value.original) == ((WHERE,), None)


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_exceptions_that_hang(backend, monkeypatch):
    monkeypatch.setattr(pickling, "RETURNS_WITHIN_S", 0.3)
    with ParallelEnv(envs("raises", functools.partial(Reduced, hang_in, os.getpid())), backend=backend) as env:
        env.reset()
        env.step(STEP)
        with pytest.raises(EnvError, match="Reduced") as caught:
            env.step(STEP)
        assert caught.value.original is None


def test_other_exceptions_are_loaded(backend_setup, build):
    env = build(envs("raises", functools.partial(FileNotFoundError, 2, "no map", "map.xml")), backend_setup)
    env.reset()
    env.step(STEP)
    with pytest.raises(EnvError) as caught:
        env.step(STEP)
    assert isinstance(caught.value.original, FileNotFoundError)
    assert caught.value.original.filename == "map.xml"
    assert caught.value.__cause__ is caught.value.original


# -- other values ------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[ParallelEnv], Any]] = {
    "info": lambda env: env.step(STEP),
    "observation": lambda env: env.step(STEP),
    "render": lambda env: env.render(),
}


def check_value(env: ParallelEnv, place: str, name: str) -> None:
    env.reset()
    env.step(STEP)
    with pytest.raises(EnvError) as caught:
        READS[place](env)
    method = place if place == "render" else "step"
    assert (caught.value.env_ids, caught.value.method) == ((WHERE,), "unpickle")
    assert str(caught.value).startswith(f"environment {WHERE} (worker")
    assert f"in {method}" in str(caught.value)
    assert name in str(caught.value)
    with pytest.raises(ClosedEnvironmentError):
        env.step(STEP)


@pytest.mark.parametrize("place", READS)
@pytest.mark.parametrize("name", VALUES)
def test_values_in_this_process(name, place):
    check_value(ParallelEnv(envs(place, functools.partial(named, "VALUES", name)), backend="serial"), place, name)


@SETUPS
@pytest.mark.parametrize(
    ("name", "place"), [("SystemExit", "info"), ("KeyboardInterrupt", "observation"), ("CancelledError", "render")]
)
def test_values_on_every_backend(name, place, setup, build):
    check_value(build(envs(place, functools.partial(named, "VALUES", name)), setup), place, name)


def test_infos_of_a_reset(backend_setup, build):
    env = build(envs("reset info", functools.partial(named, "VALUES", "SystemExit")), backend_setup)
    with pytest.raises(EnvError, match=rf"environment {WHERE} .* in reset .*SystemExit"):
        env.reset()


def test_spaces(backend_setup, build):
    with pytest.raises(EnvError, match=rf"environment {WHERE} .* in constructor .*SystemExit") as caught:
        build(envs("spaces", functools.partial(named, "VALUES", "SystemExit")), backend_setup)
    assert caught.value.env_ids == (WHERE,)


def test_restart_after_such_an_info(two_worker_setup, build):
    env = build(envs("info", functools.partial(named, "VALUES", "SystemExit")), two_worker_setup, on_error="restart")
    env.reset()
    env.step(STEP)
    infos = env.step(STEP)[4]
    assert "SystemExit" in infos[WHERE]["__common__"]["error"]
    assert [observed["a"][0] for observed in env.step(STEP)[0]] == [3.0, 1.0, 3.0]


@pytest.mark.parametrize("name", VALUES)
def test_results_of_calls_close_nothing(name, backend_setup, build):
    make = functools.partial(named, "VALUES", name)
    for place, ask in (("call", lambda env: env.call("told")), ("attribute", lambda env: env.get_attr("record"))):
        env = build(envs(place, make), backend_setup)
        env.reset()
        if place == "attribute":
            with pytest.raises(TypeError, match=rf"environment {WHERE}: .*'record' .*{name}"):
                env.call("record", env_ids=[WHERE])
        else:
            with pytest.raises(TypeError, match=rf"environment {WHERE}: .*'told' .*{name}"):
                ask(env)
        assert len(env.step(STEP)[0]) == ENVS
        env.close()


@pytest.mark.parametrize("name", VALUES)
def test_saved_states(name, backend_setup, build):
    """A state that cannot be loaded changes nothing."""
    env = build(envs("state", functools.partial(named, "VALUES", name)), backend_setup)
    env.reset()
    env.step(STEP)
    states = env.save_state()
    with pytest.raises(TypeError, match=rf"environment {WHERE} .*its state cannot be loaded.*{name}"):
        env.load_state(states)
    assert env.step(STEP)[0][0]["a"][0] == 2.0


@pytest.mark.parametrize("name", VALUES)
def test_check_reports_such_values(name):
    """`marl-parallel check` says why a value cannot be unpickled, and goes on."""
    assert name in (pickling_error(VALUES[name]()) or "")


def test_replay_of_such_an_info(tmp_path):
    with ParallelEnv(
        envs("info", functools.partial(named, "VALUES", "SystemExit")), replay=10, replay_dir=tmp_path
    ) as env:
        env.reset()
        env.step(STEP)
        with pytest.raises(EnvError, match="marl-parallel replay"):
            env.step(STEP)
    (path,) = tmp_path.glob("env-1-*.replay")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "marl_parallel", "replay", str(path)],
        capture_output=True, text=True, timeout=100, env=environ,
    )  # fmt: skip
    assert "it raised SystemExit: 3" in done.stdout
    assert "failed" in done.stdout


# -- signals -----------------------------------------------------------------------------------------------------------


OTHER = getattr(signal, "SIGUSR2", signal.SIGABRT)  # which Windows lacks


class Terminated(BaseException):
    """Raised by a program's own handler."""


@pytest.fixture
def handlers() -> Iterator[None]:
    """A SIGTERM exits, `OTHER` raises an exception of the program."""

    def exit_now(*_: object) -> None:
        sys.exit("terminated")

    def end(*_: object) -> None:
        raise Terminated

    handled = {signal.SIGTERM: exit_now, OTHER: end, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handle) for number, handle in handled.items()}
    exiting_pickles.begun.clear()
    yield
    for number, handle in before.items():
        signal.signal(number, handle)


SIGNALS = pytest.mark.parametrize(
    ("number", "kind"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (OTHER, Terminated)],
)


@SIGNALS
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
@pytest.mark.usefixtures("handlers")
def test_signals_stay_what_they_are(number, kind, backend):
    """What a handler of the program raises while a value is unpickled reaches the program."""
    make = functools.partial(exiting_pickles.Pickle, exiting_pickles.signalled_here, os.getpid(), int(number))
    env = ParallelEnv(envs("info", make), backend=backend, num_workers=1)
    env.reset()
    env.step(STEP)
    with pytest.raises(kind):
        env.step(STEP)


@SIGNALS
@pytest.mark.usefixtures("handlers")
def test_signals_in_the_middle_of_a_slow_pickle(number, kind):
    def interrupt() -> None:
        exiting_pickles.begun.wait(10)
        os.kill(os.getpid(), number)

    env = ParallelEnv(envs("info", functools.partial(exiting_pickles.Pickle, exiting_pickles.slow_here, os.getpid())))
    env.reset()
    env.step(STEP)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(kind):
        env.step(STEP)
    thread.join()


@SIGNALS
@pytest.mark.usefixtures("handlers")
def test_signals_while_an_exception_is_loaded(number, kind):
    def interrupt() -> None:
        exiting_pickles.begun.wait(10)
        os.kill(os.getpid(), number)

    env = ParallelEnv(envs("raises", functools.partial(Reduced, exiting_pickles.slow_here, os.getpid())))
    env.reset()
    env.step(STEP)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(kind):
        env.step(STEP)
    thread.join()
