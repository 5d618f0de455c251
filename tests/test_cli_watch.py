"""`marl-parallel check` while it runs: how long simulators may take, and that nothing outlives the command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from liveness import gone

from marl_parallel.cli import probes
from marl_parallel.cli.check import _official
from marl_parallel.cli.isolation import Job, Notebook, run_probes

SICK = Path(__file__).with_name("sick.py")


class Timed(Notebook):
    """Ends nobody; keeps how much of the time that a call might have taken is left."""

    def __init__(self, job: Job) -> None:
        self._job, self._found, self.facts, self.traces, self.left = job, set(), {}, [], []

    def _write(self, event, value):
        if event == "facts":
            self.facts |= value
        elif event == "trace":
            self.traces.append(value)

    @contextlib.contextmanager
    def watch(self, doing, question=None, seconds=0.0, *_, **__):
        begun = time.monotonic()
        yield
        self.left.append(self._job.timeout + seconds - (time.monotonic() - begun))


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return Job("alone", f"{SICK}:Slowly", "{}", timeout=0.45, seconds=0.01, steps=5)


def test_what_is_slow_is_not_taken_for_hanging(slow):
    """Ten steps take longer than one may, three constructors too; none of them does."""
    facts = {"construct_s": 0.05, "step": {"median_s": 0.05}, "reset": {"median_s": 0.0}}
    names = ["pettingzoo.test.parallel_api_test", "pettingzoo.test.parallel_seed_test"]
    official = _official(slow, {**facts, "official": names})
    assert [job.test for job in official] == names
    for job in (replace(slow, probe="copies"), *official):
        notebook = Timed(job)
        probes.PROBES[job.probe](job, notebook)
        assert min(notebook.left) > 0
    notebook = Timed(slow)
    probes._measure_cost(probes._solo(probes._imported(slow, notebook), slow, notebook), slow, notebook)
    assert min(notebook.left) > 0
    assert 1 <= notebook.facts["step"]["count"] < 5


@pytest.fixture
def default_signals():
    """Started with `nohup`, these tests and what they start would not be ended by a SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_the_command(number, tmp_path):
    told = tmp_path / "child"
    arguments = ["--env-kwargs", json.dumps({"file": str(told)}), "--seconds", "60", "--steps", "100000"]
    with subprocess.Popen(
        [sys.executable, "-m", "marl_parallel", "check", f"{SICK}:Starts", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
    ) as command:
        deadline = time.monotonic() + 60
        while not (told.exists() and told.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        command.send_signal(number)
        assert command.wait(30) == -number
        assert command.stderr.read() == b""
    assert gone([int(told.read_text())])
    while [*tmp_path.glob("marl-parallel-check-*")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["Masked", "OddInfos", "Counts"])
def test_what_is_allowed_is_no_finding(name):
    ((_, outcome),) = run_probes([_brief(name)], 1, lambda job: None)
    assert not [one for one in outcome.findings if "__all__" not in one.what]


def test_a_step_that_takes_no_actions():
    ((_, outcome),) = run_probes([_brief("StepTakesNothing")], 1, lambda job: None)
    (found,) = outcome.findings
    assert "step() takes 1 positional argument but 2 were given" in found.what
    assert found.advice.startswith("let step take what its API says")


def _brief(name):
    return Job("alone", f"{SICK}:{name}", "{}", timeout=8.0, seconds=0.05, steps=25)
