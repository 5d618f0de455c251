"""Time limits of `marl-parallel check`, and that no process outlives the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import SIMULATORS
from helpers.processes import gone
from helpers.signals import number_of

from marl_parallel.cli.check import Job, examine, run_probes
from marl_parallel.cli.check_texts import Question

pytestmark = pytest.mark.release_independent

BUGGY = SIMULATORS / "buggy.py"


@pytest.mark.rest
def test_slow_simulators_do_not_count_as_hanging():
    """Thirty steps or constructors take longer than the limit of one call."""
    job = Job("alone", f"{BUGGY}:Slowly", "{}", timeout=1.2, seconds=1.5, steps=30)
    found = examine(job, ["serial"])
    assert not [one for one in found.findings if "did not finish" in one.what or "ends the process" in one.what]
    assert found.facts["steps"] * 0.05 > job.timeout
    assert found.facts["step"]["count"] >= 1
    assert found.facts["tests"] == ["pettingzoo.test.parallel_api_test", "pettingzoo.test.parallel_seed_test"]
    assert {Question.RUNS, Question.COST, Question.DETERMINISM, Question.SERIAL} <= found.checked


@pytest.fixture
def default_signals():
    """Reset SIGHUP, which `nohup` ignores for the tests and their child processes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [*map(number_of, ["SIGTERM", "SIGHUP", "SIGKILL"])])
def test_nothing_outlives_the_command(number, tmp_path):
    pid_file = tmp_path / "child"
    arguments = ["--env-kwargs", json.dumps({"file": str(pid_file)}), "--seconds", "60", "--steps", "100000"]
    with subprocess.Popen(
        [sys.executable, "-m", "marl_parallel", "check", f"{BUGGY}:Starts", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
    ) as command:
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        command.send_signal(number)
        assert command.wait(30) == -number
        assert command.stderr.read() == b""
    assert gone([int(pid_file.read_text())])
    while [*tmp_path.glob("marl*parallel*")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["Masked", "UnusualInfos", "Counts"])
def test_allowed_behaviour_is_no_finding(name):
    ((_, outcome),) = run_probes([_brief(name)], 1, lambda job: None)
    assert not [one for one in outcome.findings if "__all__" not in one.what]


def test_step_without_an_actions_argument():
    ((_, outcome),) = run_probes([_brief("StepTakesNothing")], 1, lambda job: None)
    (found,) = outcome.findings
    assert "step() takes 1 positional argument but 2 were given" in found.what
    assert found.advice.startswith("let step take what it is called with")


def _brief(name):
    return Job("alone", f"{BUGGY}:{name}", "{}", timeout=8.0, seconds=0.05, steps=25)
