"""Fork servers and keepers that die or are stopped under a `ParallelEnv`.

The launcher alone is tested in `test_launcher_faults`. Portable workers have no fork server and no keepers.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.comparison import assert_same
from helpers.launching import SERVER_DEATHS, children_of, inject, linux_only, send_and_wait
from helpers.leaks import open_descriptors
from helpers.processes import gone, wait_for
from helpers.setups import KILLABLE_SETUPS, Setup, rest
from helpers.signals import number_of
from simulators.counting import ACTIONS, Counting, seen
from simulators.crashing import seed_of

from marl_parallel import ParallelEnv, RecyclePolicy, WorkerCrashed, WorkerTimeout
from marl_parallel.backends.launching import Launcher

pytestmark = [pytest.mark.release_independent, linux_only]

TWO = Setup("process", True, 2)
PROCESSES = [TWO, rest(Setup("process", False, 2))]
KILLABLE = [*KILLABLE_SETUPS, Setup("hybrid", True, 2)]
KEEPER_FAULTS = ["keeper-killed", "keeper-stopped"]
SIGKILL = "SIGKILL (signal 9)"


def keeper_of(worker: int) -> int:
    return psutil.Process(worker).ppid()


def server_of(worker: int) -> int:
    return psutil.Process(keeper_of(worker)).ppid()


def observed(env: ParallelEnv, env_ids: list[int]) -> tuple[list[Any], list[dict[str, Any]]]:
    """Step these environments: the observations of the first agent, and what a restart reports."""
    observations, _, _, truncateds, infos = env.step([ACTIONS] * len(env_ids), env_ids)
    reports = [info.get("__common__", {}) for info in infos]
    assert [flags["__all__"] for flags in truncateds] == [bool(report) for report in reports]
    return [dicts["long"] for dicts in observations], reports


def kill(worker: int) -> None:
    send_and_wait(worker, signal.SIGKILL, "Z")


# A server or keeper that dies or stops while a worker starts


@pytest.mark.parametrize("fault", [*SERVER_DEATHS, *KEEPER_FAULTS])
@pytest.mark.parametrize("setup", PROCESSES, ids=str)
def test_restart(setup, fault, build, monkeypatch):
    """The run goes on; each worker is replaced once, and each fault is counted once."""
    env = build([Counting] * 2, setup, on_error="restart")
    env.reset()
    assert_same(observed(env, [0, 1]), ([seen(42, 1, 1), seen(43, 1, 1)], [{}, {}]))
    old = env.call("pid")
    gc.collect()  # what other tests have left in cycles
    first, descriptors = server_of(old[0]), len(open_descriptors())
    kill(old[1])
    inject(monkeypatch, fault)
    new = seed_of(42, 1, 1)
    (observations,), (report,) = observed(env, [1])
    assert_same(observations, seen(new, 1, 0))
    assert SIGKILL in report["error"]
    both, reports = observed(env, [0, 1])
    with_server = fault in SERVER_DEATHS
    assert_same(both[1], seen(new, 1, 1))
    assert_same(both[0], seen(seed_of(42, 0, 1), 1, 0) if with_server else seen(42, 1, 2))
    assert f"fork server (process {first}) ended: {SIGKILL}" in reports[0].get("error", "") or not with_server
    assert reports[1] == {}
    pids = env.call("pid")
    assert {*old}.isdisjoint(pids) if with_server else old[0] == pids[0]
    wait_for(lambda: len(children_of(server_of(pids[0]))) == 2)
    assert len(open_descriptors()) == descriptors
    stats = env.stats()
    assert (stats.restarts, stats.faults) == (1 + with_server,) * 2
    env.close()
    assert gone({*pids, *old, first})


@pytest.mark.parametrize("fault", [*SERVER_DEATHS, *KEEPER_FAULTS])
def test_requested_restart(fault, build, monkeypatch):
    """`env.restart` of an environment whose worker has died."""
    env = build([Counting] * 2, TWO, on_error="restart")
    env.reset()
    kill(env.call("pid")[1])
    inject(monkeypatch, fault)
    with pytest.raises(WorkerCrashed, match=r"environment 1\) died"):
        env.restart([1])
    observations, _ = env.reset()
    assert observations[1]["long"][1:].tolist() == [1, 0]
    observations = env.step([ACTIONS] * 2)[0]
    assert observations[1]["long"][1:].tolist() == [1, 1]
    wait_for(lambda: len(children_of(server_of(env.call("pid")[1]))) == 2)


@pytest.mark.parametrize("fault", [*SERVER_DEATHS, *KEEPER_FAULTS])
def test_first_construction(fault, build, monkeypatch):
    """The first worker is started again. If earlier workers die with their server, the error says so."""
    inject(monkeypatch, fault)
    env = build([Counting] * 2, TWO)
    assert_same(env.reset()[0], tuple(dict.fromkeys(["long", "short"], seen(42 + env_id, 1, 0)) for env_id in (0, 1)))
    inject(monkeypatch, fault, [1])
    if fault in KEEPER_FAULTS:
        build([Counting] * 2, TWO).reset()
    else:
        with pytest.raises(WorkerCrashed, match=r"environment 0\) died.*fork server .*SIGKILL.*all its workers"):
            build([Counting] * 2, TWO)


@pytest.mark.parametrize("fault", [*SERVER_DEATHS, "just-launched", *KEEPER_FAULTS])
def test_standby_of_recycling(fault, build, monkeypatch):
    """No step is lost or done twice, and every new environment is announced."""
    inject(monkeypatch, fault, [2])  # the first standby
    recycle = RecyclePolicy(max_episodes=1)
    env = build([functools.partial(Counting, 3)] * 2, TWO, on_error="restart", recycle=recycle)
    last = [dicts["long"] for dicts in env.reset()[0]]
    deadline = time.monotonic() + 20.0
    while (stats := env.stats()).recycled < 2 or stats.steps < 40:
        assert time.monotonic() < deadline
        observations, *_, infos = env.step([ACTIONS] * 2)
        for env_id, (dicts, info) in enumerate(zip(observations, infos, strict=True)):
            now, before, last[env_id] = dicts["long"], last[env_id], dicts["long"]
            if "__common__" in info:
                assert now[0] != before[0]
                assert now[1:].tolist() == [1, 0]
            else:
                over = before[2] == 2  # the standby is late after a failure: the environment has another episode
                assert now.tolist() == [before[0], before[1] + over, 0 if over else before[2] + 1]
    assert (stats.restarts > 0) == (fault not in KEEPER_FAULTS)
    pids = env.call("pid")
    env.close()
    assert gone(pids)


def test_worker_killed_right_after_its_launch(build, monkeypatch):
    """Before it has got its first message."""
    env = build([Counting] * 2, TWO, on_error="restart")
    env.reset()
    kill(env.call("pid")[1])
    launch, numbers = Launcher.launch, iter(range(100))

    def launched(*arguments: Any) -> Any:
        worker = launch(*arguments)
        if next(numbers) == 0:
            kill(worker.pid)
        return worker

    monkeypatch.setattr(Launcher, "launch", launched)
    (observations,), (report,) = observed(env, [1])
    assert_same(observations, seen(seed_of(42, 1, 2), 1, 0))
    assert SIGKILL in report["error"]
    assert env.stats().restarts == 2


# A server that dies at another time


@pytest.mark.parametrize("number", [*map(number_of, ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS"])], ids=str)
@pytest.mark.parametrize("setup", KILLABLE, ids=str)
def test_report_of_a_lost_server(setup, number, build):
    env = build([Counting] * 2, setup)
    env.reset()
    pids = [pid for pid in env.call("pid") if pid != os.getpid()]
    server = server_of(pids[0])
    send_and_wait(server, number, "Z")
    with pytest.raises(WorkerCrashed) as caught:
        env.step([ACTIONS] * 2)
    first, _, to_do, *_ = str(caught.value).splitlines()
    name = f"{signal.Signals(number).name} (signal {int(number)})"
    assert f"the fork server (process {server}) ended: {name}, and all its workers ended with it" in first
    assert "memory ran out" not in str(caught.value)
    assert ("dmesg" in to_do) == (number == signal.SIGKILL)
    assert caught.value.exitcode == -signal.SIGKILL
    assert gone(pids)


# Stopped keepers hide the deaths of their workers


def stop(env: ParallelEnv, also: str) -> tuple[int, int]:
    """Stop the keeper of the second worker, and maybe others; returns the worker and the keeper."""
    worker = env.call("pid")[1]
    keeper = keeper_of(worker)
    server = server_of(worker)
    for pid in [keeper, *([worker] if "worker" in also else []), *([server] if "server" in also else [])]:
        send_and_wait(pid, signal.SIGSTOP, "T")
    return worker, keeper


@pytest.mark.parametrize("limits", [{}, {"step_timeout": 20.0}], ids=["no-timeout", "timeout"])
@pytest.mark.parametrize("also", ["", "worker", "server", "worker and server"])
@pytest.mark.parametrize("setup", KILLABLE, ids=str)
def test_stopped_keeper(setup, also, limits, build):
    """Its worker is killed: the error comes all the same, and so does a restart."""
    for on_error in ("raise", "restart"):
        env = build([Counting] * 2, setup, on_error=on_error, **limits)
        env.reset()
        worker, keeper = stop(env, also)
        os.kill(worker, signal.SIGKILL)
        if on_error == "raise":
            with pytest.raises(WorkerCrashed, match="SIGKILL"):
                env.step([ACTIONS] * 2)
        else:
            observations, reports = observed(env, [1])
            assert_same(observations[0], seen(seed_of(42, 1, 1), 1, 0))
            assert SIGKILL in reports[0]["error"]
            assert_same(observed(env, [0])[0][0], seen(42, 1, 1))
        assert gone([worker, keeper])


def test_keeper_stopped_in_every_restart(build, caplog):
    env = build([Counting] * 2, TWO, on_error="restart")
    env.reset()
    for count in (1, 2, 3):
        worker, keeper = stop(env, "")
        os.kill(worker, signal.SIGKILL)
        assert_same(observed(env, [1])[0][0], seen(seed_of(42, 1, count), 1, 0))
        assert f"keeper (process {keeper}) was stopped (SIGSTOP)" in caplog.text


@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_stopped_keeper_and_worker_past_the_timeout(on_error, build):
    env = build([Counting] * 2, TWO, on_error=on_error, step_timeout=1.0)
    env.reset()
    worker, keeper = stop(env, "worker")
    if on_error == "raise":
        with pytest.raises(WorkerTimeout):
            env.step([ACTIONS] * 2)
    else:
        assert_same(observed(env, [1])[0][0], seen(seed_of(42, 1, 1), 1, 0))
    assert gone([worker, keeper])


@pytest.mark.starts_anew
@pytest.mark.parametrize("also", ["", "worker", "worker and server"])
def test_close_with_a_stopped_keeper(also, build, caplog):
    """It ends as usual, without a warning that a simulator has left something running."""
    env = build([Counting] * 2, TWO)
    env.reset()
    pids = env.call("pid")
    server = server_of(pids[0])
    _, keeper = stop(env, also)
    env.close(timeout=1.2)
    assert gone([*pids, keeper, server])
    assert "did not end within" not in caplog.text


@pytest.mark.starts_anew
def test_close_from_another_thread_while_a_keeper_is_stopped(build, monkeypatch):
    """In a wait that the stopped keeper keeps up."""
    monkeypatch.setattr("marl_parallel.backends.launching._CHECK_EVERY_S", 1000.0)
    env: ParallelEnv = build([Counting] * 2, TWO)
    env.reset()
    worker, _ = stop(env, "")
    kill(worker)
    timer = threading.Timer(0.3, env.close, kwargs={"terminate": True})
    timer.start()
    with pytest.raises(ClosedEnvironmentError):
        env.step([ACTIONS] * 2)
    timer.join()
    assert gone([worker])
