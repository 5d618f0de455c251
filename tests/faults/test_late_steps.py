"""Steps past their timeout: which steps are late, and that each late step is reported as interrupted."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import textwrap
import time
from typing import Any

import psutil
import pytest
from gymnasium.vector import AutoresetMode
from helpers import TESTS
from helpers.comparison import assert_same
from helpers.setups import Setup
from simulators.crashing import seed_of
from simulators.failing import Fragile
from simulators.forking import Walk
from simulators.stopping import FinishesLate

from marl_parallel import ParallelEnv, WorkerTimeout
from marl_parallel.backends.local import ThreadBackend
from marl_parallel.core.messages import Lost, Reply

pytestmark = pytest.mark.release_independent

SEED, NUM_ENVS = 42, 3
ACTIONS = {"a": 1, "b": 2}
SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED


class PlainEnv:
    """One environment of a plain loop."""

    def __init__(self, seed: int) -> None:
        self.env = Walk(100, seed=seed)
        self.first = self.env.reset(seed=seed)[0]

    def step(self) -> tuple[Any, ...]:
        observations, rewards, terminateds, truncateds, infos = self.env.step(ACTIONS)
        return observations, rewards, {**terminateds, "__all__": False}, {**truncateds, "__all__": False}, infos


def of(env_id: int, results: Any) -> tuple[Any, ...]:
    return tuple(dicts[env_id] for dicts in results)


def step_all(env: Any, how: str) -> tuple[Any, ...]:
    """The results of a step of all environments, in order."""
    if how == "step":
        return env.step([ACTIONS] * NUM_ENVS)
    env.send([ACTIONS] * NUM_ENVS)
    batch = env.recv()
    order = sorted(range(NUM_ENVS), key=batch.env_ids.__getitem__)
    return tuple(tuple(dicts[place] for place in order) for dicts in batch[1:])


@pytest.mark.parametrize(
    ("fault", "mode", "setup", "how", "late"),
    [
        ("stop", SAME_STEP, Setup("process", True, 1), "step", 1),
        ("stop", DISABLED, Setup("process", True, 1), "step", 2),
        ("stop", NEXT_STEP, Setup("process", False, 3), "async", 0),
        ("stop", SAME_STEP, Setup("portable", True, 1), "step", 1),
        ("pause", SAME_STEP, Setup("process", True, 1), "step", 0),
        ("pause", DISABLED, Setup("portable", True, 3), "step", 1),
    ],
    ids=str,
)
def test_late_step_is_interrupted(fault, mode, setup, how, late, build):
    """The step has the restart mark; neighbours in the same worker that finished before lose nothing."""
    env = build([functools.partial(FinishesLate, fault, late)] * NUM_ENVS, setup, mode, on_error="restart",
                step_timeout=1.0)  # fmt: skip
    plain = [PlainEnv(SEED + env_id) for env_id in range(NUM_ENVS)]
    observations, _ = env.reset()
    assert_same(observations, tuple(one.first for one in plain))
    before = [one.step() for one in plain]
    for env_id, result in enumerate(zip(*step_all(env, how), strict=True)):
        assert_same(result, before[env_id])
    results = step_all(env, how)
    fresh = PlainEnv(seed_of(SEED, late, 1))
    observations, rewards, terminateds, truncateds, infos = of(late, results)
    assert infos["__common__"]["restarted"] is True
    assert "has not finished" in infos["__common__"]["error"]
    assert_same(rewards, {"a": 0.0, "b": 0.0})
    assert_same(terminateds, {"a": False, "b": False, "__all__": False})
    assert_same(truncateds, {"a": True, "b": True, "__all__": True})
    last_known = before[late][0]
    if mode is SAME_STEP:
        assert_same(observations, fresh.first)
        assert_same({agent: infos[agent] for agent in "ab"}, {a: {"final_obs": last_known[a]} for a in "ab"})
    else:
        assert_same(observations, last_known)
        assert infos.keys() == {"__common__"}
    for env_id in range(NUM_ENVS):
        earlier = env_id < late or setup.num_workers > 1
        if env_id != late and (earlier or "__common__" not in of(env_id, results)[4]):
            assert_same(of(env_id, results), plain[env_id].step())
    if mode is SAME_STEP:
        again = of(late, step_all(env, how))
        assert_same(again, fresh.step())


SCRIPT = """
    import functools, os, sys, time
    sys.path.insert(0, {tests!r})
    from simulators.failing import Fragile
    from marl_parallel import ParallelEnv
    from marl_parallel.backends.spawn import PortableProcessBackend

    def work():
        for _ in range(40):  # a single sleep would be over as soon as it goes on
            time.sleep(0.02)

    faults = {{"step": work}}
    arguments = {arguments}
    with ParallelEnv(
        [functools.partial(Fragile, faults, {notes!r})] * 2,
        num_workers=2, step_timeout=4.0, on_error="restart", **arguments
    ) as env:
        env.reset()
        for step in range(2):
            print("step", step, flush=True)
            infos = env.step([{{"a": 0, "b": 1}}] * 2)[4]
        print("restarts", env.stats().restarts, [list(info) for info in infos], flush=True)
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    "arguments",
    ["{}", "dict(backend=PortableProcessBackend())"],
    ids=["forkserver", "portable"],
)
def test_frozen_time_does_not_count(arguments, tmp_path):
    """Parent and workers are stopped together past every limit, as when a virtual machine is paused."""
    text = textwrap.dedent(SCRIPT).format(tests=str(TESTS), notes=str(tmp_path), arguments=arguments)
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        try:
            for line in script.stdout:
                if line.split() == ["step", "1"]:
                    time.sleep(0.3)  # into the step
                    everyone = [psutil.Process(script.pid), *psutil.Process(script.pid).children(recursive=True)]
                    for process in everyone:
                        process.send_signal(signal.SIGSTOP)
                    time.sleep(6.0)
                    for process in everyone:
                        process.send_signal(signal.SIGCONT)
            assert line.strip() == "restarts 0 [['a', 'b'], ['a', 'b']]"
        finally:
            script.kill()
    assert len(everyone) > 2


class Pauses(ThreadBackend):
    """The clock jumps in the next wait, which ends early, as when a virtual machine is paused."""

    offset, seconds = 0.0, 0.0

    def __init__(self) -> None:
        super().__init__()
        self.clock = lambda: time.monotonic() + self.offset

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        if not self.seconds:
            return super().wait(timeout, at_least)
        replies = super().wait(0.01, at_least)
        self.offset, self.seconds = self.offset + self.seconds, 0.0
        return replies


def test_a_pause_in_the_first_wait_of_a_step_does_not_count(tmp_path):
    slow = functools.partial(time.sleep, 0.3)
    constructors = [functools.partial(Fragile, {"step": slow}, tmp_path)] * 2
    with ParallelEnv(constructors, backend=Pauses(), num_workers=2, step_timeout=3.0) as env:
        env.reset()
        workers = env.stepper.workers
        assert workers is not None
        for _ in range(2):
            workers.pool.backend.seconds = 10.0
            env.step([{"a": 0, "b": 1}] * 2)


def test_time_between_send_and_recv_counts(build, tmp_path):
    """A worker that hangs meanwhile is late; one that finished in time is not."""
    slow = functools.partial(time.sleep, 0.2)
    constructors = [
        functools.partial(Fragile, {"step": functools.partial(time.sleep, 600)}, tmp_path),
        functools.partial(Fragile, {"step": slow}, tmp_path),
    ]
    env = build(constructors, Setup("process", True, 2), step_timeout=1.0, on_error="restart")
    env.reset()
    env.send([{"a": 0, "b": 1}] * 2)
    time.sleep(2.5)
    batch = env.recv()
    infos = dict(zip(batch.env_ids, batch.infos, strict=True))
    assert "__common__" in infos[0]
    assert infos[1].keys() == {"a", "b"}


def test_stopped_worker_is_late(build, tmp_path):
    """The parent was not frozen."""
    env = build([functools.partial(FinishesLate, "stop", 0)] * 2, Setup("process", True, 2), step_timeout=1.0)
    env.reset()
    env.step([ACTIONS] * 2)
    with pytest.raises(WorkerTimeout):
        env.step([ACTIONS] * 2)
