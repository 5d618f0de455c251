"""The example on Level-Based Foraging runs, writes its log, and is reproducible."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.needs("lbforaging", "torch", "tyro")


def curve(output, workers):
    script = [str(ROOT / "examples" / "ippo_foraging.py"), "--smoke", "--num-workers", workers, "--output", str(output)]
    done = subprocess.run([sys.executable, "-W", "ignore", *script], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "food loaded in an episode" in done.stdout
    assert (output / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    with (output / "seed_1.csv").open(newline="") as lines:
        return [(row["steps"], row["return"]) for row in csv.DictReader(lines)]


def test_number_of_workers_does_not_change_the_curve(tmp_path):
    first, second = (curve(tmp_path / workers, workers) for workers in ("1", "2"))
    assert len(first) >= 2
    assert first == second
