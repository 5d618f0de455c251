"""`backend="hybrid"`: worker 0 is this thread. Results are those of a plain loop in the tests with setups."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.comparison import assert_same
from helpers.leaks import HeldResources
from helpers.processes import gone, wait_for, workers
from helpers.start_methods import START_METHODS
from simulators.deterministic import Hunt
from simulators.dying_agents import DyingAgents
from simulators.failing import Fragile, SimulatorError, raising
from simulators.paced import acts, fleet, hold, release, seen, trace

from marl_parallel import (
    EnvError,
    ParallelEnv,
    ParallelEnvError,
    RecyclePolicy,
    RestartPolicy,
    WorkerCrashed,
    WorkerTimeout,
)
from marl_parallel.backends.hybrid import HybridBackend

pytestmark = pytest.mark.release_independent

ACTIONS = [{"a": 0, "b": 0}] * 2
COVERS_EXCEPTIONS = pytest.warns(RuntimeWarning, match='on_error="restart" covers exceptions only')


@contextlib.contextmanager
def started(constructors: Any, num_workers: int = 2, **arguments: Any) -> Iterator[ParallelEnv]:
    with ParallelEnv(constructors, num_workers=num_workers, backend="hybrid", **arguments) as env:
        env.reset()
        yield env


def fragile(notes: Path, *faults: dict[str, Any]) -> list[Callable[..., Fragile]]:
    """An environment with each of these faults; the first half is stepped in this thread."""
    return [functools.partial(Fragile, one, notes) for one in faults]


def pids(env: ParallelEnv) -> tuple[int, ...]:
    return env.call(lambda _: os.getpid())


def step(env: ParallelEnv, how: str) -> None:
    if how == "step":
        env.step(ACTIONS)
    else:
        env.send(ACTIONS)
        env.recv()


# -- results ---------------------------------------------------------------------------------------------------------


def played(constructor: Any, **arguments: Any) -> list[Any]:
    with ParallelEnv([constructor] * 5, seed=3, **arguments) as env:
        results: list[Any] = [env.reset()]
        for step in range(40):
            results.append(env.step([dict.fromkeys(acting, step % 2) for acting in env.acting]))
        env.send([dict.fromkeys(acting, 1) for acting in env.acting])
        received = {}
        while env.pending:
            batch = env.recv(1)
            received.update(zip(batch.env_ids, zip(*batch[1:])))
        results.append(sorted(received.items()))
        results.append(env.reset(env_ids=[4, 0]))
        assert env.stats().steps == 5 * 41
    return results


@pytest.mark.parametrize("start_method", START_METHODS)
def test_results_are_those_of_serial(start_method, monkeypatch):
    monkeypatch.setenv("MARL_PARALLEL_PORTABLE", str(int(start_method == "portable")))
    expected = played(DyingAgents, backend="serial")
    for num_workers in (1, 2, 3) if start_method != "portable" else (2,):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of more workers than CPUs
            assert_same(played(DyingAgents, backend="hybrid", num_workers=num_workers), expected)


def test_worker_0_is_this_process_and_the_only_one_if_there_is_one_worker():
    with started([Hunt] * 4) as env:
        first, second, third, fourth = pids(env)
        assert first == second == os.getpid()
        assert third == fourth != os.getpid()
        assert env.num_workers == 2
    with started([Hunt] * 3) as env:  # this thread, which also reads all results, has the smaller share
        assert [pid == os.getpid() for pid in pids(env)] == [True, False, False]
    before = HeldResources.now().processes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with started([Hunt] * 4, 1) as env:
            assert pids(env) == (os.getpid(),) * 4
            assert HeldResources.now().processes == before


def test_generators_and_threads_of_this_process_stay_as_they_are():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), dict(os.environ)
    with started([Hunt] * 4, seed=7) as env:
        env.step(env.sample_actions())
    assert (random.getstate(), np.random.get_state()[1].tolist(), dict(os.environ)) == before


class Drawing(Hunt):
    """Draws from the process-wide generators."""

    def drawn(self) -> list[float]:
        return [random.random(), float(np.random.random())]


def test_isolated_generators_do_not_depend_on_who_steps():
    drawn = []
    for backend in ("serial", "hybrid"):
        with ParallelEnv([Drawing] * 4, num_workers=2, backend=backend, isolate_rng=True) as env:
            env.reset()
            drawn.append([env.call("drawn"), env.call("drawn")])
    assert drawn[0] == drawn[1]


# -- send and recv -----------------------------------------------------------------------------------------------------


def test_environments_of_this_thread_are_stepped_in_recv(tmp_path):
    with started(fleet(tmp_path, 4)) as env:
        env.send(acts(0.0, 1.0, 2.0, 3.0))
        wait_for(lambda: "step 3" in trace(tmp_path))
        assert not {"step 0", "step 1"} & {*trace(tmp_path)}
        assert env.pending == (0, 1, 2, 3)
        batch = env.recv()
        assert sorted(zip(batch.env_ids, seen(batch.observations))) == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
        assert env.pending == ()


def test_recv_leaves_them_for_later_if_it_has_enough(tmp_path):
    with started(fleet(tmp_path, 4)) as env:
        steps = env.stats().steps
        env.send(acts(0.0, 1.0, 2.0, 3.0))
        wait_for(lambda: env.stats().steps == steps + 2)
        time.sleep(0.1)  # the last reply is on its way
        assert env.recv(2).env_ids == (2, 3)
        assert not {"step 0", "step 1"} & {*trace(tmp_path)}
        assert env.recv(1).env_ids == (0,)
        assert env.recv(1).env_ids == (1,)


def test_none_is_passed_over_twice(tmp_path):
    """An environment comes before the result of one that was sent later, also if the others are always ready."""
    with started(fleet(tmp_path, 4)) as env:
        sent, times, received = [0] * 4, [1] * 4, list[tuple[int, int, int]]()
        env.send(acts(0.0, 1.0, 2.0, 3.0))
        for now in range(1, 13):
            wait_for(functools.partial(all_stepped, tmp_path, {env_id: times[env_id] for env_id in (2, 3)}))
            time.sleep(0.01)  # the last reply is on its way
            batch = env.recv(1)
            received += [(sent[env_id], now, env_id) for env_id in batch.env_ids]
            env.send(acts(*map(float, batch.env_ids)), env_ids=batch.env_ids)
            for env_id in batch.env_ids:
                sent[env_id], times[env_id] = now, times[env_id] + 1
        env.recv()
    assert {env_id for *_, env_id in received} == {0, 1, 2, 3}
    for sent_at, at, env_id in received:
        assert env_id > 1 or not [one for one in received if one[0] > sent_at and one[1] < at]


def all_stepped(notes: Path, times: dict[int, int]) -> bool:
    return all(trace(notes).count(f"step {env_id}") == count for env_id, count in times.items())


def test_recv_without_patience_steps_one_environment_at_a_time(tmp_path):
    """Else a loop that only looks would never end."""
    with started(fleet(tmp_path, 4)) as env:
        hold(tmp_path, 2)
        env.send(acts(0.0, 1.0, 2.0), env_ids=[0, 1, 2])
        assert env.recv(0).env_ids == (0,)
        assert "step 1" not in trace(tmp_path)
        with pytest.raises(TimeoutError, match=r"expected at least 2 environments to be ready within .* s, got 1"):
            env.recv(timeout=0)
        assert env.recv(0).env_ids == (1,)
        assert env.recv(0).env_ids == ()
        release(tmp_path, 2)
        assert env.recv().env_ids == (2,)


def test_results_of_others_are_received_while_this_thread_steps(tmp_path):
    """Environments of this thread are stepped one by one, with a look at the others in between."""
    with started(fleet(tmp_path, 4)) as env:
        hold(tmp_path, 0, 3)
        env.send(acts(0.0, 1.0, 2.0, 3.0))
        timer = threading.Timer(0.3, release, (tmp_path, 0))
        timer.start()
        batch = env.recv(2)
        timer.join()
        assert batch.env_ids == (2, 0)
        assert "step 1" not in trace(tmp_path)
        release(tmp_path, 3)
        assert sorted(env.recv().env_ids) == [1, 3]


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", [0, 1])
def test_exceptions_of_both_sides(env_id, tmp_path):
    faults = [{}, {}]
    faults[env_id] = {"step": raising(SimulatorError, "bad terrain")}
    with started(fragile(tmp_path, *faults)) as env, pytest.raises(EnvError, match="bad terrain") as raised:
        env.step(ACTIONS)
    assert raised.value.env_ids == (env_id,)
    assert raised.value.worker == env_id
    assert (tmp_path / "closed-0").exists()
    assert gone(workers(tmp_path))


@pytest.mark.parametrize("env_id", [0, 1])
def test_restarts_of_both_sides(env_id, tmp_path):
    """An exception; the other environment loses nothing."""
    faults: list[dict[str, Any]] = [{}, {}]
    faults[env_id] = {"step": raising(SimulatorError, "bad terrain")}
    restarted: list[Any] = []
    with COVERS_EXCEPTIONS, started(
        fragile(tmp_path, *faults), on_error="restart", on_restart=restarted.append
    ) as env:  # fmt: skip
        before = pids(env)
        observations, rewards, _, truncateds, infos = env.step(ACTIONS)
        assert infos[env_id]["__common__"]["restarted"]
        assert "bad terrain" in infos[env_id]["__common__"]["error"]
        assert truncateds[env_id]["__all__"]
        assert (rewards[1 - env_id], infos[1 - env_id]) == ({"a": 1.0, "b": 1.0}, {"a": {}, "b": {}})
        assert_same(observations[1 - env_id]["a"], np.ones(3, np.float32))
        assert [(event.env_id, event.worker, event.kind) for event in restarted] == [(env_id, env_id, "fault")]
        assert env.stats().restarts == 1
        assert pids(env) == before


def kill_other(notes: Path, how: int) -> None:
    """In this thread: kill or stop the other worker in the middle of the step of all."""
    (other,) = workers(notes)
    os.kill(other, how)
    time.sleep(0.05)


@pytest.mark.parametrize("wait", ["adaptive", "block", *(["spin"] if sys.platform == "linux" else [])])
@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_other_worker_dies_while_this_thread_steps(on_error, wait, tmp_path):
    faults = [
        {"step": functools.partial(kill_other, tmp_path, signal.SIGKILL)},
        {"step": functools.partial(time.sleep, 9.0)},
    ]
    if on_error == "raise":
        with started(fragile(tmp_path, *faults), wait=wait) as env, pytest.raises(WorkerCrashed) as raised:
            env.step(ACTIONS)
        assert (raised.value.worker, raised.value.exitcode) == (1, -signal.SIGKILL)
        assert (tmp_path / "closed-0").exists()
        return
    with COVERS_EXCEPTIONS, started(fragile(tmp_path, *faults), on_error="restart", wait=wait) as env:
        observations, *_, infos = env.step(ACTIONS)
        assert infos[1]["__common__"]["restarted"]
        assert "strange" not in infos[0]["a"]
        assert_same(observations[0]["a"], np.ones(3, np.float32))
        assert gone(workers(tmp_path) - {*pids(env)})


@pytest.mark.parametrize("how", ["step", "recv"])
def test_timeouts_of_others_are_enforced(how, tmp_path):
    """When this thread has stepped its share; the simulators of this thread are closed."""
    faults: list[dict[str, Any]] = [
        {"step": functools.partial(time.sleep, 0.6)},
        {"step": functools.partial(time.sleep, 60.0)},
    ]
    warning = pytest.warns(RuntimeWarning, match=r"environments \[0\]; for them, step_timeout=0.3 has no effect")
    with (
        warning,
        started(fragile(tmp_path, *faults), step_timeout=0.3) as env,
        pytest.raises(WorkerTimeout, match="worker 1") as raised,
    ):
        step(env, how)
    assert raised.value.env_ids == (1,)
    assert (tmp_path / "closed-0").exists()
    assert gone(workers(tmp_path))


def test_what_waits_for_this_thread_is_not_late(tmp_path, caplog):
    """Neither a timeout nor a warning of long calls."""
    faults: list[dict[str, Any]] = [{}, {"step": functools.partial(time.sleep, 0.3)}, {}]
    warning = pytest.warns(RuntimeWarning, match="has no effect")
    with warning, started(fragile(tmp_path, {}, *faults), step_timeout=0.8, warn_after=0.1) as env:
        env.send(ACTIONS[:1] * 3, env_ids=[0, 1, 2])
        time.sleep(0.9)
        assert env.recv(1).env_ids == (2,)
        env.send(ACTIONS[:1], env_ids=[2])
        assert env.recv(3).env_ids[:2] == (0, 1)
    assert all("worker 1" in record.getMessage() for record in caplog.records)


def test_ctrl_c_in_this_thread_is_the_callers(tmp_path):
    faults = [{"step": raising(KeyboardInterrupt)}, {"step": functools.partial(time.sleep, 60.0)}]
    with started(fragile(tmp_path, *faults)) as env:
        with pytest.raises(KeyboardInterrupt):
            env.step(ACTIONS)
        with pytest.raises(ClosedEnvironmentError):
            env.reset()
        assert (tmp_path / "closed-0").exists()
        assert gone(workers(tmp_path))


@pytest.mark.parametrize("how", ["step", "recv"])
def test_close_in_a_signal_handler_while_this_thread_steps(how, tmp_path):
    faults: list[dict[str, Any]] = [{"step": functools.partial(signal.raise_signal, signal.SIGUSR1)}, {}]
    with started(fragile(tmp_path, *faults)) as env:
        before = signal.signal(signal.SIGUSR1, lambda *_: env.close())
        try:
            with pytest.raises(ClosedEnvironmentError):
                step(env, how)
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert (tmp_path / "closed-0").exists()
    assert (tmp_path / "closed-1").exists()
    assert gone(workers(tmp_path))


def test_close_from_another_thread_while_this_one_steps(tmp_path):
    with started(fleet(tmp_path, 2)) as env:
        hold(tmp_path, 0)
        closing = threading.Thread(target=env.close)
        threading.Timer(0.1, closing.start).start()
        threading.Timer(0.4, release, (tmp_path, 0)).start()
        with pytest.raises(ClosedEnvironmentError):
            env.step(acts(0.0, 1.0))
        closing.join(20.0)
    assert sorted(trace(tmp_path)[-2:]) == ["close 0", "close 1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_it_counts_as_closed_in_a_forked_child(tmp_path):
    with started(fragile(tmp_path, {}, {})) as env:
        child = os.fork()
        if not child:
            status = 1
            try:
                env.step(ACTIONS)
            except ClosedEnvironmentError:
                env.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not (tmp_path / "closed-0").exists()
        observations, *_ = env.step(ACTIONS)
        assert_same([one["a"][0] for one in observations], [np.float32(1.0)] * 2)


@pytest.mark.whole_machine
@pytest.mark.parametrize("how", ["closed", "collected", "raises"])
def test_nothing_is_left(how, tmp_path):
    def cycle() -> None:
        faults = {"step": raising(SimulatorError, "bad terrain")} if how == "raises" else {}
        env = ParallelEnv(fragile(tmp_path, faults, {}), num_workers=2, backend="hybrid")
        env.reset()
        with contextlib.suppress(EnvError):
            env.step(ACTIONS)
        if how == "closed":
            env.close()

    cycle()
    gc.collect()
    before = HeldResources.now()
    for _ in range(4):
        cycle()
    assert not HeldResources.now().beyond(before)


# -- what the caller's thread cannot do --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"step_timeout": 5.0, "reset_timeout": 6.0}, "step_timeout=5.0, reset_timeout=6.0 have no effect"),
        ({"start_timeout": 60.0}, "start_timeout=60.0 has no effect"),
        ({"log_dir": "logs"}, "log_dir="),
        ({"recycle": RecyclePolicy(max_memory_mb=9000)}, "recycle= has no effect"),
        (
            {"on_error": "restart", "recycle": RecyclePolicy(kill_above_mb=9000), "start_timeout": 9.0},
            'start_timeout=9.0, recycle= have no effect and on_error="restart" covers exceptions only',
        ),
    ],
    ids=["timeouts", "the default passed", "logs", "memory", "restarts"],
)
def test_one_warning_says_what_has_no_effect_in_this_thread(arguments, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(RuntimeWarning) as caught, started([Hunt] * 5, **arguments):
        pass
    (warning,) = caught
    assert f'with backend="hybrid", this thread steps environments [0, 1]; for them, {text}' in str(warning.message)
    assert warning.filename == __file__


def test_without_such_arguments_there_is_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with started([Hunt] * 2, wait="block"):
            pass


def test_only_the_other_side_is_recycled():
    """Environments of this thread stay, since there is no other process for them."""
    with contextlib.ExitStack() as stack:
        with pytest.warns(RuntimeWarning, match=r"environments \[0\]; for them, recycle= has no effect"):
            env = stack.enter_context(started([functools.partial(Hunt)] * 2, recycle=RecyclePolicy(max_episodes=1)))
        before, recycled = pids(env), list[int]()
        while len(recycled) < 2:
            *_, infos = env.step(env.sample_actions())
            recycled += [env_id for env_id, info in enumerate(infos) if info.get("__common__", {}).get("recycled")]
        after = pids(env)
        assert after[0] == before[0] == os.getpid()
        assert after[1] not in before
        assert {*recycled} == {1}
        assert env.stats().recycled == len(recycled)


def test_policies_count_both_sides(tmp_path):
    faults: list[dict[str, Any]] = [{"step": raising(SimulatorError, "bad terrain")}, {}]
    policy = RestartPolicy(max_restarts=1)
    with COVERS_EXCEPTIONS, started(fragile(tmp_path, *faults), on_error="restart", restart_policy=policy) as env:
        env.step(ACTIONS)
        with pytest.raises(ParallelEnvError, match="max_restarts=1"):
            env.step(ACTIONS)


def test_worker_0_is_neither_ended_nor_replaced():
    from marl_parallel.backends import open_backend

    backend = open_backend("hybrid", worker_threads=1)
    assert isinstance(backend, HybridBackend)
    start = functools.partial(backend.start_worker, share=range(1))
    for refused in (backend.end, start, functools.partial(backend.remove, kill=True)):
        with pytest.raises(NotImplementedError, match="caller's own thread"):
            refused(0)
    assert backend.memory(0) is backend.cpu_seconds(0) is None
    backend.stop(0.0)
