"""Examples of checkpoints and curricula."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT

pytestmark = pytest.mark.release_independent

FEW = ["--updates", "8", "--num-envs", "3", "--num-steps", "10"]


def command(script: str, *arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", str(ROOT / "examples" / script), *arguments]


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(command(script, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def curve(folder: Path) -> list[list[str]]:
    with (folder / "curve.csv").open(newline="") as lines:
        return [*csv.reader(lines)]


KILLED = """
import os, runpy, signal, sys
replace, calls = os.replace, 0

def replace_and_die(*paths):
    global calls
    calls += 1
    if calls == {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
    if calls == {after}:
        os.kill(os.getpid(), signal.SIGKILL)

os.replace = replace_and_die
sys.argv = {arguments!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A run that is killed before or after it puts a checkpoint in its place, the so many-th."""


def test_preempted_training(tmp_path):
    """It is killed twice, and goes on with other numbers of workers: the curve is that of a run without a break."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert "goes on" not in run("preempted_training.py", *FEW, "--num-workers", "2", "--output", str(whole))
    for workers, before, after in (("2", 0, 2), ("1", 3, 0)):
        arguments = command("preempted_training.py", *FEW, "--num-workers", workers, "--output", str(broken))[3:]
        script = KILLED.format(before=before, after=after, arguments=arguments)
        job = subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, capture_output=True, timeout=110)
        assert job.returncode == -signal.SIGKILL, job.stderr
    printed = run("preempted_training.py", *FEW, "--num-workers", "3", "--output", str(broken))
    assert "goes on after update 4" in printed
    assert len(curve(whole)) == 9
    assert curve(broken) == curve(whole)


@pytest.mark.rest
def test_preempted_training_learns(tmp_path):
    started = time.monotonic()
    arguments = ["--updates", "80", "--num-workers", "1", "--output", str(tmp_path)]
    last = run("preempted_training.py", *arguments).splitlines()[-1]
    before, after = map(float, last.rpartition(": ")[2].split(" -> "))
    assert after > before + 0.1
    assert time.monotonic() - started < 110


def test_team_sizes():
    """Large teams learn in a batch with small ones."""
    alone, together = run("team_sizes.py", "--steps", "2500", "--num-workers", "1").splitlines()
    share = together.rpartition(": ")[2].partition("%")[0]
    assert alone.startswith("teams of [4] robots: 0%")
    assert int(share) > 30


def test_curriculum():
    """The chargers come to be as far away as they should."""
    few = ["--steps", "700", "--num-envs", "4", "--num-workers", "1", "--distance", "6"]
    without, with_curriculum = run("curriculum.py", *few).splitlines()
    assert without.startswith("without a curriculum: ")
    share = with_curriculum.removeprefix("with a curriculum: ").partition("%")[0]
    assert int(share) > 60
