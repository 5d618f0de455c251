"""`close` and every event that causes it: nothing is left, however often and by whom it is called."""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers import ROOT, TESTS
from helpers.processes import wait_for, workers
from helpers.setups import Setup
from helpers.start_methods import arguments
from simulators import paced
from simulators.deterministic import Hunt
from simulators.failing import Fragile, SimulatorError, raising

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.vector import StackedVecEnv

pytestmark = pytest.mark.release_independent


def fleet(notes: Path, count: int = 4, **faults: Any) -> list[Any]:
    return [functools.partial(Fragile, faults, notes)] * count


def closed(notes: Path) -> set[str]:
    return {path.name for path in notes.glob("closed-*")}


def gone(numbers: set[int], seconds: float = 5.0) -> bool:
    """Whether all these processes end in time and are reaped."""
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(number) for number in numbers) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(psutil.pid_exists(number) for number in numbers)


ALL_FOUR = {f"closed-{index}" for index in range(4)}


def test_close_twice(setup, build, tmp_path):
    env = build(fleet(tmp_path), setup)
    env.reset()
    env.close()
    assert closed(tmp_path) == ALL_FOUR
    assert gone(workers(tmp_path))
    env.close()
    env.close(terminate=True)


@pytest.mark.in_turn
@pytest.mark.parametrize("timeout", [None, float("inf"), 1e12, 0])
def test_close_timeout_arguments(timeout, two_worker_setup, build, tmp_path):
    env = build(fleet(tmp_path), two_worker_setup)
    env.reset()
    env.close(timeout=timeout)
    if timeout != 0:
        assert closed(tmp_path) == ALL_FOUR
    assert gone(workers(tmp_path))


def test_close_before_the_first_reset(setup, build, tmp_path):
    build(fleet(tmp_path), setup).close()
    assert closed(tmp_path) == ALL_FOUR
    assert gone(workers(tmp_path))


def test_context_manager(two_worker_setup, build, tmp_path):
    with build(fleet(tmp_path), two_worker_setup) as env:
        assert isinstance(env, ParallelEnv)
        env.reset()
    assert closed(tmp_path) == ALL_FOUR
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_context_left_by_an_exception(two_worker_setup, build, tmp_path):
    with pytest.raises(KeyError, match="mine"), build(fleet(tmp_path), two_worker_setup) as env:  # noqa: PT012
        env.reset()
        raise KeyError("mine")
    assert closed(tmp_path) == ALL_FOUR
    assert gone(workers(tmp_path))


def test_context_left_by_an_env_error(two_worker_setup, build, tmp_path):
    with (  # noqa: PT012
        pytest.raises(EnvError, match="bad terrain"),
        build(fleet(tmp_path, step=raising(SimulatorError, "bad terrain")), two_worker_setup) as env,
    ):
        env.reset()
        env.step([{"a": 0, "b": 0}] * 4)
    assert closed(tmp_path) == ALL_FOUR
    assert gone(workers(tmp_path))


@pytest.mark.parametrize("cyclic", [False, True])
def test_garbage_collection(cyclic, two_worker_setup, tmp_path, recwarn):
    env = ParallelEnv(fleet(tmp_path), **two_worker_setup._asdict())
    env.reset()
    if cyclic:
        env.myself = env
    del env
    gc.collect()
    assert closed(tmp_path) == ALL_FOUR
    assert gone(workers(tmp_path))
    assert not [str(warning.message) for warning in recwarn if warning.category is ResourceWarning]


def test_closed_environments_are_collected(two_worker_setup, tmp_path):
    """Also if `on_restart` refers to them, so that nothing but `close` frees them before the program ends."""

    class Trainer:
        def __init__(self) -> None:
            self.env = ParallelEnv(
                fleet(tmp_path), on_error="restart", on_restart=self.note, **two_worker_setup._asdict()
            )

        def note(self, event: Any) -> None: ...

    trainer = Trainer()
    trainer.env.reset()
    trainer.env.close()
    kept = weakref.ref(trainer.env)
    del trainer
    gc.collect()
    assert kept() is None


def test_results_stay_readable_after_close(two_worker_setup, build):
    env = build([Hunt] * 4, two_worker_setup, copy=False)
    observations, _ = env.reset()
    saved = [{agent: array.copy() for agent, array in one.items()} for one in observations]
    env.close()
    del env
    gc.collect()
    for one, other in zip(observations, saved, strict=True):
        assert all((one[agent] == other[agent]).all() for agent in other)


def test_terminate_skips_close_of_environments(killable_setup, build, tmp_path):
    """An environment whose `close` hangs does not delay it."""
    env = build(fleet(tmp_path, close=functools.partial(time.sleep, 60)), killable_setup)
    env.reset()
    began = time.monotonic()
    env.close(terminate=True)
    assert time.monotonic() - began < 3.0
    assert gone(workers(tmp_path))


@pytest.mark.parametrize("busy", [[], [0]], ids=["all idle", "one busy"])
def test_idle_threads_end_at_once(busy, build, tmp_path, caplog):
    """Only a thread in the middle of a call is left behind, with a warning."""
    env = build(paced.fleet(tmp_path, 4), Setup("thread", True, 4))
    env.reset()
    paced.hold(tmp_path, *busy)
    env.send(paced.acts(1, 2, 3, 4))
    wait_for(lambda: all(f"step {env_id}" in paced.trace(tmp_path) for env_id in range(4)))
    env.recv(min_envs=4 - len(busy))
    began = time.monotonic()
    env.close(terminate=True)
    assert time.monotonic() - began < 1.0
    paced.release(tmp_path, *busy)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        f"worker {worker} could not be ended and keeps running" for worker in busy
    ]


def test_close_from_another_thread(killable_setup, build, tmp_path):
    """The blocked call raises `ClosedEnvironmentError`; only a process can be interrupted in its call."""
    env = build(fleet(tmp_path, step=functools.partial(time.sleep, 60)), killable_setup)
    env.reset()
    timer = threading.Timer(0.5, lambda: env.close(terminate=True))
    timer.start()
    with pytest.raises(ClosedEnvironmentError):
        env.step([{"a": 0, "b": 0}] * 4)
    timer.join()
    assert gone(workers(tmp_path))


def close_in_a_while(env: ParallelEnv, how: dict[str, Any]) -> None:
    signal.signal(signal.SIGALRM, lambda *_: env.close(**how))
    signal.setitimer(signal.ITIMER_REAL, 0.3)


@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize("how", [{}, {"terminate": True}], ids=["asked", "terminated"])
def test_close_in_a_signal_handler(how, backend, tmp_path):
    """The interrupted call does not wait for replies that were discarded."""
    env = ParallelEnv(fleet(tmp_path, 2, step=functools.partial(time.sleep, 1.0)), backend=backend, num_workers=2)
    env.reset()
    before = signal.getsignal(signal.SIGALRM)
    close_in_a_while(env, how)
    try:
        with pytest.raises(ClosedEnvironmentError):
            env.step([{"a": 0, "b": 0}] * 2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert gone(workers(tmp_path))


class Closes:
    """A trainer that closes its environments when it is collected."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __del__(self) -> None:
        self.env.close(terminate=True)


@pytest.mark.parametrize("where", ["the thread of the call", "another thread"])
@pytest.mark.parametrize("facade", [None, StackedVecEnv])
def test_close_in_a_finalizer(facade, where, killable_setup, build, tmp_path):
    """It ends the blocked call, of a facade, too."""
    env = build(fleet(tmp_path, step=functools.partial(time.sleep, 60)), killable_setup)
    env = env if facade is None else facade(env)
    env.reset()
    trainers = [Closes(env)]
    before = signal.signal(signal.SIGALRM, lambda *_: trainers.clear())
    try:
        if where == "another thread":
            threading.Timer(0.5, trainers.clear).start()
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(ClosedEnvironmentError):
            env.step([{"a": 0, "b": 0}] * 4 if facade is None else np.zeros((4, 2), np.int64))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not trainers
    wait_for(lambda: gone(workers(tmp_path)))


def test_ctrl_c_during_close(build, killable_setup, tmp_path):
    """Ctrl-C while simulators close: the remaining workers are killed at once."""
    env = build(fleet(tmp_path, close=functools.partial(time.sleep, 60)), killable_setup)
    env.reset()
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        env.close(timeout=50.0)
    assert gone(workers(tmp_path))


@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_ctrl_c_during_reset(on_error, concurrent_or_portable, build, tmp_path, capfd, caplog):
    """Nothing is left, nothing is restarted, and counts stay."""
    go_on = tmp_path / "go on"
    slow = functools.partial(Fragile, {"reset": functools.partial(wait_for, go_on.exists, 60.0)}, tmp_path, after=1)
    env = build([slow] * 4, concurrent_or_portable, on_error=on_error)
    env.reset(seed=5)
    env.step([{"a": 0, "b": 0}] * 4)
    assert env.seed() == (5, 6, 7, 8)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        env.reset(seed=100)
    assert not go_on.exists()
    timer.join()
    assert gone(workers(tmp_path))
    for use in (env.seed, env.reset, lambda: env.step([{"a": 0, "b": 0}] * 4)):
        with pytest.raises(ClosedEnvironmentError):
            use()
    assert env.pending == ()
    stats = env.stats()
    assert (stats.steps, stats.resets, stats.restarts) == (4, 4, 0)
    assert len(stats.workers) == 2
    env.close()
    out, err = capfd.readouterr()
    assert [line for line in out.splitlines() if line.strip() and "(raylet)" not in line] == []  # which reports deaths
    assert err == ""
    assert all("worker" in record.getMessage() for record in caplog.records)
    assert bool(caplog.records) == (concurrent_or_portable.backend == "thread")
    go_on.touch()
    for thread in {*threading.enumerate()} - {threading.current_thread()}:
        thread.join(10.0)  # what cannot be killed would write its notes in the middle of another test


SCRIPT = """
    import functools, sys
    sys.path.insert(0, {tests!r})
    from simulators.failing import Fragile
    from marl_parallel import ParallelEnv
    env = ParallelEnv([functools.partial(Fragile, {{}}, {notes!r})] * 4, backend={backend!r}, num_workers=2)
    env.reset()
    {ending}
"""


ENDINGS = ["", "sys.exit(3)", "1 / 0"]


@pytest.mark.parametrize(
    ("how", "backend", "ending"),
    [
        *[("-c", "process", ending) for ending in ENDINGS],
        # Where there are no processes, and how the script is read, matters to each ending alike.
        *[("-c", backend, "1 / 0") for backend in ("serial", "thread")],
        *[(how, "process", "") for how in ("-", "script")],
    ],
)
def test_interpreter_exit(how, backend, ending, tmp_path):
    """Without guard and `close`: environments are closed, processes end, exit code and stderr are the script's."""
    text = textwrap.dedent(SCRIPT).format(tests=str(TESTS), notes=str(tmp_path), backend=backend, ending=ending)
    script = tmp_path / "script.py"
    script.write_text(text)
    command = {"-c": ["-c", text], "-": ["-"], "script": [str(script)]}[how]
    done = subprocess.run(
        [sys.executable, *command],
        input=text if how == "-" else None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == {"": 0, "sys.exit(3)": 3, "1 / 0": 1}[ending]
    assert done.stderr.count("Traceback") == (ending == "1 / 0"), done.stderr
    assert done.stdout == ""
    assert closed(tmp_path) == ALL_FOUR
    assert gone(workers(tmp_path))


def linger() -> None:
    atexit.register(time.sleep, 3)


@pytest.fixture
def alarm_interrupt():
    """SIGALRM raises KeyboardInterrupt, like Ctrl-C."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def open_files() -> list[str]:
    paths = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sorted(re.sub(r"\d+", "", os.readlink(path)) for path in paths if os.path.islink(path))


@pytest.mark.usefixtures("alarm_interrupt")
def test_ctrl_c_while_workers_end(start_method, tmp_path):
    """No process, descriptor or memory is left."""
    gc.collect()  # garbage of the test before
    before = open_files()
    env = ParallelEnv(fleet(tmp_path, 2, constructor=linger), num_workers=2, **arguments(start_method))
    env.reset()
    signal.setitimer(signal.ITIMER_REAL, 0.7)
    with pytest.raises(KeyboardInterrupt):
        env.close()
    assert gone(workers(tmp_path))
    env.close()
    del env
    gc.collect()
    assert open_files() == before


def leave_thread() -> None:
    threading.Thread(target=wait_for_nothing).start()


def wait_for_nothing() -> None:
    time.sleep(60)


def leave_process() -> None:
    multiprocessing.get_context("fork").Process(target=wait_for_nothing).start()


@pytest.mark.parametrize("fault", [leave_thread, leave_process])
def test_threads_and_children_that_block_exit_are_named(fault, start_method, tmp_path, caplog):
    """Processes wait for non-daemon threads and children; `close` warns and kills them."""
    env = ParallelEnv(
        [*fleet(tmp_path, 2, constructor=fault), *fleet(tmp_path, 2)], num_workers=2, **arguments(start_method)
    )
    env.reset()
    env.close(timeout=4.0)
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("worker 0 (environments 0 to 1) has closed its environments, but its process did not end")
    assert "join it in the simulator's close(), or start it with daemon=True" in text
    assert ("wait_for_nothing" if fault is leave_thread else "multiprocessing") in text
    assert closed(tmp_path) == ALL_FOUR
    assert gone(workers(tmp_path))


def test_more_workers_than_cpus():
    cpus = len(os.sched_getaffinity(0))
    with pytest.warns(ResourceWarning), ParallelEnv([Hunt] * (cpus + 1), num_workers=cpus + 1) as env:
        env.reset()


def test_workers_by_default():
    cpus = len(os.sched_getaffinity(0))
    with ParallelEnv([Hunt] * (cpus + 1)) as env:
        assert env.num_workers == cpus
    with ParallelEnv([Hunt]) as env:
        assert env.num_workers == 1
