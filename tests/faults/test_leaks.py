"""After many batches no process, thread, file descriptor, memory or file is left."""

from __future__ import annotations

import functools
import gc
import logging
import os
import tempfile
import tracemalloc

import numpy as np
import psutil
import pytest
from helpers.leaks import HeldResources
from helpers.processes import alive, gone, wait_for
from helpers.setups import rest
from simulators.counting import ACTIONS, Counting
from simulators.crashing import Children, Fate, crashing
from simulators.deterministic import Hunt
from simulators.failing import Fragile, SimulatorError, raising

from marl_parallel import EnvError, ParallelEnv, RecyclePolicy, RestartPolicy, WorkerCrashed

pytestmark = [pytest.mark.release_independent, pytest.mark.whole_machine]

CYCLES = 20


@pytest.fixture(autouse=True)
def own_folder_for_temporary_files(tmp_path, monkeypatch):
    """Temporary files of other programs do not count."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def use(env: ParallelEnv) -> None:
    env.reset()
    env.step([{agent: env.action_space[agent].sample() for agent in acting} for acting in env.acting])
    env.state()
    env.call("pid")


@pytest.mark.starts_anew
@pytest.mark.parametrize("cycles", [10, rest(CYCLES)])
def test_closed_worker_processes_leave_nothing(cycles):
    check(lambda: closed(backend="process"), cycles)


@pytest.mark.parametrize("backend", ["serial", "thread", rest("hybrid")])
def test_closed_workers_leave_nothing(backend):
    check(lambda: closed(backend=backend))


@pytest.mark.parametrize("backend", ["serial", "thread", "process", rest("hybrid")])
def test_large_arrays_in_constructors_leave_nothing(backend):
    """Closed, or after a constructor that raises."""
    table = np.ones(100_000)

    def fault(number: int) -> Hunt:
        raise SimulatorError(f"no {number * table[0]:g} prey")

    def cycle() -> None:
        with ParallelEnv([functools.partial(Prices, table)] * 2, num_workers=2, backend=backend) as env:
            use(env)
        with pytest.raises(EnvError, match="no 3 prey"):
            ParallelEnv([functools.partial(Prices, table), lambda: fault(3)], num_workers=2, backend=backend)

    check(cycle, cycles=10)


class Prices(Hunt):
    def __init__(self, table: np.ndarray) -> None:
        super().__init__()
        self.table = table


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_collected_workers_leave_nothing(backend):
    check(lambda: use(ParallelEnv([Hunt] * 2, backend=backend, num_workers=2)), cycles=10)


@pytest.mark.rest
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
@pytest.mark.parametrize("place", ["constructor", "step"])
def test_environments_that_raise_leave_nothing(place, backend, tmp_path):
    fault = raising(SimulatorError, "bad terrain")
    check(lambda: failing(tmp_path, place, fault, EnvError, backend=backend), cycles=10)


@pytest.mark.parametrize("place", ["constructor", "step"])
def test_workers_that_die_leave_nothing(place, tmp_path):
    check(lambda: failing(tmp_path, place, os.abort, WorkerCrashed, backend="process"), cycles=10)


def closed(**arguments) -> None:
    with ParallelEnv([Hunt] * 2, num_workers=2, **arguments) as env:
        use(env)


def failing(notes, place, fault, error, **arguments) -> None:
    def constructor(env_id: int, seed: int) -> Fragile:
        return Fragile({place: fault} if env_id == 1 else {}, notes, env_id=env_id, seed=seed)

    with pytest.raises(error), ParallelEnv([constructor] * 2, num_workers=2, **arguments) as env:  # noqa: PT012
        env.reset()
        env.step([{"a": 0, "b": 0}] * 2)


def check(cycle, cycles: int = CYCLES) -> None:
    cycle()  # modules that are loaded at first use may stay
    before = HeldResources.now()
    for _ in range(cycles):
        cycle()
    assert not HeldResources.now().beyond(before)


def test_restarted_workers_leave_nothing():
    """Also before `close`: only the current worker and its simulators' children live, whatever their process group."""
    children = Children(os.getpid() * 10_000)
    fates = {(1, life): Fate("SIGKILL", "step", 1) for life in range(3)}
    make = crashing(Counting, fates, started=children)
    with ParallelEnv([make] * 3, num_workers=1, on_error="restart") as env:
        env.reset()
        process, others = env.call("pid")[0], len(helper_processes(children, env))
        for restarts in (3, 6, 9):
            seen = children.running()
            assert len(seen) == 6
            while env.stats().restarts < restarts:
                env.step([ACTIONS] * 3)
            now = env.call("pid")
            assert {*now} != {process}
            (process,) = {*now}
            assert gone(seen, 2.0)
            assert len(children.running()) == 6
            wait_for(lambda: len(helper_processes(children, env)) == others)  # a keeper ends a moment after its worker
    assert children.gone()


@pytest.mark.parametrize(
    "more",
    [{"on_error": "restart"}, {"recycle": RecyclePolicy(max_episodes=1)}],
    ids=["restarts", "recycling"],
)
def test_memory_of_the_caller(more, caplog):
    """It does not grow with each worker that is replaced."""
    caplog.set_level(logging.CRITICAL, "marl_parallel")  # pytest keeps what is logged
    fates = {(0, life): Fate("SIGKILL", "step", 1) for life in range(1000)} if "on_error" in more else {}
    policy = {"restart_policy": RestartPolicy(rate_limit=None)} if fates else {}
    with ParallelEnv([crashing(functools.partial(Counting, 2), fates)], num_workers=1, **more, **policy) as env:
        env.reset()
        tracemalloc.start()
        try:
            held = [replace_workers(env, 12) for _ in range(3)]
        finally:
            tracemalloc.stop()
    assert held[2] - held[1] < 12_000


def replace_workers(env: ParallelEnv, count: int) -> int:
    """Step until so many workers have been replaced; returns how many bytes are in use."""
    stats = env.stats()
    until = stats.restarts + stats.recycled + count
    while env.stats().restarts + env.stats().recycled < until:
        env.step([ACTIONS])
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def helper_processes(children: Children, env: ParallelEnv) -> set[int]:
    """All descendants of this process except the worker and its simulators' children."""
    found = {child.pid for child in psutil.Process().children(recursive=True) if alive(child.pid)}
    return found - children.running() - {*env.call("pid")}
