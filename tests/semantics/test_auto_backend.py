"""`backend="auto"` chooses what fits the simulator, says so, and changes no results."""

from __future__ import annotations

import functools
import logging
import os
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.comparison import assert_same
from helpers.processes import gone
from helpers.signals import SIGKILL
from mpe2 import simple_spread_v3
from simulators.failing import Fragile, SimulatorError, raising
from simulators.waiting import Computing, Instant, Waiting

from marl_parallel import EnvError, ParallelEnv, planning
from marl_parallel.backends.hybrid import HybridBackend

pytestmark = pytest.mark.release_independent

CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SEVERAL = CPUS + 2
PROCESSES = {"backend": "process", "num_workers": CPUS}


def chosen(constructor: Any, num_envs: int = SEVERAL, **arguments: Any) -> dict[str, Any]:
    with ParallelEnv([constructor] * num_envs, backend="auto", **arguments) as env:
        plan = env.plan
        assert plan is not None
        assert env.num_workers == plan["arguments"]["num_workers"]
        return plan


@pytest.mark.parametrize("auto_reset", [True, False, "NEXT_STEP"])
def test_quick_simulators_are_stepped_in_line(auto_reset, caplog):
    caplog.set_level(logging.INFO, "marl_parallel")
    plan = chosen(Instant, auto_reset=auto_reset)
    assert plan["arguments"] == {"backend": "serial", "num_workers": 1}
    assert plan["batch_ms"]["serial, estimated"] < plan["batch_ms"][f"process, {CPUS} workers"]
    (record,) = [record for record in caplog.records if "auto" in record.getMessage()]
    assert "'backend': 'serial'" in record.getMessage()


def test_simulators_that_compute_get_a_process_for_each_cpu():
    plan = chosen(Computing)
    assert plan["arguments"] == PROCESSES
    assert plan["batch_ms"].keys() == {f"process, {CPUS} workers", "serial, estimated", f"hybrid, {CPUS} workers"}


def test_portable_workers_do_not_tell_their_cpu_time(monkeypatch):
    """So more workers than CPUs are measured. They are faster if other programs use the CPUs."""
    monkeypatch.setenv("MARL_PARALLEL_PORTABLE", "1")
    plan = chosen(Computing)
    measured, few, more = plan["batch_ms"], f"process, {CPUS} workers", f"process, {SEVERAL} workers"
    if measured["serial, estimated"] < 0.9 * measured[few]:  # on a busy machine, two workers may have one CPU
        assert plan["arguments"] == {"backend": "serial", "num_workers": 1}
        return
    assert measured.keys() == {few, "serial, estimated", more}
    number = SEVERAL if measured[more] < 0.9 * measured[few] else CPUS
    assert plan["arguments"] == {"backend": "process", "num_workers": number}


def test_simulators_that_wait_get_more_workers_than_cpus():
    """Unless other programs use the CPUs, so that these workers are not faster."""
    plan = chosen(Waiting)
    are_faster = plan["batch_ms"][f"process, {SEVERAL} workers"] < 0.9 * plan["batch_ms"][f"process, {CPUS} workers"]
    assert plan["arguments"] == {"backend": "process", "num_workers": SEVERAL if are_faster else CPUS}
    assert ("wait" in plan["reason"]) == are_faster


@pytest.mark.parametrize(
    "arguments",
    [
        {"on_error": "restart"},
        {"step_timeout": 9.0},
        {"reset_timeout": 9.0},
        {"start_timeout": 30.0},
        {"wait": "block"},
    ],
    ids=str,
)
def test_what_needs_processes_gets_them(arguments):
    plan = chosen(Instant, 2, **arguments)
    assert plan["arguments"] == {"backend": "process", "num_workers": min(CPUS, 2)}
    assert "serial, estimated" not in plan["batch_ms"]
    assert f"hybrid, {min(CPUS, 2)} workers" not in plan["batch_ms"]  # it would run simulators in this process


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of a batch by backend, in place of what would be measured; other steps are as they are."""
    batch_s: dict[str, float] = {}

    def found(env: Any) -> Any:
        in_line = isinstance(env.stepper.source.backend, HybridBackend)
        env.reset()
        env.step(env.sample_actions())
        return SimpleNamespace(
            batch_s=batch_s["hybrid" if in_line else "process"], serial_batch_s=batch_s["serial"], cpu_share=1.0
        )

    monkeypatch.setattr(planning, "_Measured", found)
    return batch_s


@pytest.mark.parametrize(
    ("serial", "hybrid", "chosen_by_auto", "is_faster"),
    [
        (9.0, 0.8, "process", True),
        (9.0, 0.95, "process", False),
        (0.5, 0.4, "serial", True),
        (0.5, 0.6, "serial", False),
    ],
)
def test_hybrid_is_proposed_and_chosen_by_its_own_name_only(
    serial, hybrid, chosen_by_auto, is_faster, measured, caplog
):
    caplog.set_level(logging.INFO, "marl_parallel")
    measured.update(process=1.0, serial=serial, hybrid=hybrid)
    proposal = {"backend": "hybrid", "num_workers": CPUS}
    plan = chosen(Instant)
    assert plan["arguments"]["backend"] == chosen_by_auto
    assert plan["proposal"] == (proposal if is_faster else None)
    logged = [record.getMessage() for record in caplog.records]
    assert ['backend="hybrid" is faster' in text for text in logged] == ([False, True] if is_faster else [False])
    with ParallelEnv([Instant] * SEVERAL, backend="auto-hybrid") as env:
        assert env.plan is not None
        assert env.plan["arguments"] == (proposal if is_faster else plan["arguments"])
        assert env.plan["proposal"] is None
        assert isinstance(env.stepper.source.backend, HybridBackend) == is_faster


def test_auto_hybrid_measures_hybrid_also_if_processes_are_needed(measured):
    measured.update(process=1.0, serial=0.1, hybrid=0.5)
    with pytest.warns(RuntimeWarning, match="step_timeout=9.0 has no effect") as caught:
        env = ParallelEnv([Instant] * 2, backend="auto-hybrid", step_timeout=9.0)
    with env:
        assert env.plan is not None
        assert env.plan["arguments"] == {"backend": "hybrid", "num_workers": min(CPUS, 2)}
    assert len(caught) == 1  # none while it is measured


def test_measuring_does_not_touch_the_generators_of_this_process():
    random.seed(3)
    before = random.getstate()
    plan = chosen(Random)
    assert f"hybrid, {CPUS} workers" in plan["batch_ms"]
    assert random.getstate() == before


class Random(Computing):
    def step(self, actions):
        random.random()
        return super().step(actions)


@pytest.mark.parametrize("constructor", [Instant, simple_spread_v3.parallel_env])
def test_results_are_those_of_the_arguments_that_were_chosen(constructor):
    def run(**arguments: Any) -> tuple[list[Any], Any]:
        with ParallelEnv([constructor] * 3, seed=7, **arguments) as env:
            results: list[Any] = [env.reset()]
            for step in range(60):
                results.append(env.step([dict.fromkeys(acting, step % 2) for acting in env.acting]))
            return results, env.plan

    results, plan = run(backend="auto")
    again, no_plan = run(**plan["arguments"])
    assert_same(again, results)
    assert no_plan is None


def test_faults_while_measuring_are_those_of_the_environment(tmp_path):
    faults = {"step": raising(SimulatorError, "broken")}
    with ParallelEnv([functools.partial(Fragile, faults, tmp_path)] * 2, backend="auto") as env:
        assert env.plan is not None
        assert env.plan["arguments"] == {"backend": "process", "num_workers": min(CPUS, 2)}
        assert "broken" in env.plan["reason"]
        env.reset()
        with pytest.raises(EnvError, match="broken"):
            env.step([{"a": 0, "b": 0}] * 2)


def test_faults_of_constructors_are_raised(tmp_path):
    faults = {"constructor": raising(SimulatorError, "broken")}
    with pytest.raises(EnvError, match="broken"):
        ParallelEnv([functools.partial(Fragile, faults, tmp_path)] * 2, backend="auto")


def test_slow_steps_end_the_measurement(tmp_path):
    faults = {"step": functools.partial(time.sleep, 20.0)}
    began = time.monotonic()
    with ParallelEnv([functools.partial(Fragile, faults, tmp_path)] * 2, backend="auto") as env:
        assert time.monotonic() - began < 15.0
        assert env.plan is not None
        assert env.plan["arguments"]["backend"] == "process"
        assert "has not finished its step within 1 s" in env.plan["reason"]


def test_measuring_leaves_no_process_behind(tmp_path):
    pids = set()

    def constructor(env_id: int, seed: int) -> Any:
        return Fragile({"step": functools.partial(note, tmp_path)}, tmp_path, env_id=env_id, seed=seed)

    def note(folder: Any) -> None:
        (folder / f"pid-{os.getpid()}").touch()

    with ParallelEnv([constructor] * 2, backend="auto", on_error="restart") as env:
        env.reset()
        env.step([{"a": 0, "b": 0}] * 2)
        own = set(env.call(lambda _: os.getpid()))
        pids = {int(path.name[4:]) for path in tmp_path.glob("pid-*")}
        assert own < pids
        assert gone(pids - own)
    assert gone(own)


@pytest.mark.parametrize(
    "arguments",
    [{"on_error": "retry"}, {"step_timeout": -1.0}, {"trace": "missing/trace.json"}, {"seed": "x"}, {"adapter": "x"}],
    ids=str,
)
def test_wrong_arguments_are_refused_before_anything_is_measured(arguments, tmp_path):
    with pytest.raises((TypeError, ValueError)):
        ParallelEnv([functools.partial(Fragile, {}, tmp_path)] * 2, backend="auto", **arguments)
    assert not [*tmp_path.iterdir()]


class Undeclared(Instant):
    """Declares no action space."""

    action_space = None  # type: ignore[assignment]


def test_unknown_actions_cannot_be_measured():
    plan = chosen(Undeclared, 2)
    assert plan["arguments"]["backend"] == "process"
    assert "action space" in plan["reason"]


@pytest.mark.parametrize("arguments", [{"num_workers": 2}, {"envs_per_worker": 1}])
@pytest.mark.parametrize(("backend", "instead"), [("auto", "process"), ("auto-hybrid", "hybrid")])
def test_numbers_of_workers_are_refused(arguments, backend, instead):
    text = f'backend="{backend}" chooses the number of workers: pass backend="{instead}" with yours'
    with pytest.raises(ValueError, match=text):
        ParallelEnv([Instant] * 2, backend=backend, **arguments)


def test_the_log_says_nothing_of_workers_that_wait(caplog):
    """Not after 100 batches either, nor where a worker has died before."""
    caplog.set_level(logging.INFO, "marl_parallel")
    with ParallelEnv([Waiting] * (CPUS + 1), on_error="restart") as env:
        env.reset()
        for batch in range(105):
            if batch == 97:
                os.kill(env.call(lambda _: os.getpid())[0], SIGKILL)
            env.step(env.sample_actions())
    assert ["restarted" in record.getMessage() for record in caplog.records] == [True]
