"""`marl-parallel doctor`: the facts of a bug report, and a trial of worker processes."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version

import numpy as np
import pytest
from typer.testing import CliRunner

import marl_parallel
from marl_parallel.cli.app import app
from marl_parallel.core import backend


@pytest.fixture
def doctor():
    return lambda *arguments: CliRunner().invoke(app, ["doctor", *arguments])


def test_facts_as_json_and_in_a_file(doctor, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("A_SECRET_TOKEN", "never to be shown")
    path = tmp_path / "new" / "doctor.json"
    result = doctor("--json", "--output", str(path))
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts == json.loads(path.read_text())
    assert str(path) in result.stderr
    assert facts["marl_parallel"]["version"] == marl_parallel.__version__
    assert facts["marl_parallel"]["codec"] == marl_parallel.codec
    assert facts["Python"]["version"] == f"CPython {platform.python_version()}"
    assert facts["libraries"]["numpy"] == np.__version__
    assert facts["libraries"]["gymnasium"] == version("gymnasium")
    assert facts["CPUs"]["used by default"] == backend.usable_cpus()
    assert facts["environment variables"]["OMP_NUM_THREADS"] == "3"
    assert "never to be shown" not in result.stdout
    assert facts["trial"]["two worker processes"] == "work"
    if sys.platform == "linux":
        assert facts["marl_parallel"]["worker processes"] == "from a fork server"
        assert facts["limits"]["open files"]


def test_facts_as_text(doctor):
    result = doctor()
    assert result.exit_code == 0, result.output
    *lines, to_do = result.stdout.splitlines()
    assert to_do == "what to do next: paste all of this into your report of the problem"
    sections = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert sections == [
        "marl_parallel", "Python", "libraries", "CPUs", "memory", "limits", "Ray", "environment variables", "trial",
    ]  # fmt: skip
    assert f"  numpy {np.__version__}" in [" ".join(["", *line.split()]).replace(" ", "  ", 1) for line in lines]
    assert "two worker processes  work" in result.stdout


def test_quota_of_the_control_group(doctor, monkeypatch):
    monkeypatch.setattr("marl_parallel.cli.doctor.cpu_quota", lambda: 1.5)
    assert json.loads(doctor("--json").stdout)["CPUs"]["quota of its control group"] == 1.5


def test_workers_that_cannot_start_are_reported(doctor, monkeypatch):
    def refused(*arguments, **keywords):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("marl_parallel.make", refused)
    result = doctor("--json")
    assert result.exit_code == 1
    trial = json.loads(result.stdout)["trial"]
    assert "Too many open files" in trial["two worker processes"]
    assert "Traceback" in trial["report"]
    assert doctor().stdout.splitlines()[-1].startswith("what to do next: read the error under 'trial' above")


def test_errors_are_one_line_and_a_hint(doctor):
    result = doctor("--output", ".")
    assert result.exit_code == 1
    error, hint = result.stderr.strip().splitlines()
    assert error.startswith("error: . is a directory")
    assert hint.startswith("hint: ")
