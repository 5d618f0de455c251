"""The example on Level-Based Foraging runs, and writes its log; `test_examples` trains again with other workers."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.needs("lbforaging", "torch", "tyro")


def test_training(tmp_path):
    output = tmp_path / "runs"
    script = [str(ROOT / "examples" / "ippo_foraging.py"), "--smoke", "--num-workers", "2", "--output", str(output)]
    done = subprocess.run([sys.executable, "-W", "ignore", *script], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "food loaded in an episode" in done.stdout
    assert (output / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    with (output / "seed_1.csv").open(newline="") as lines:
        assert len([(row["steps"], row["return"]) for row in csv.DictReader(lines)]) >= 2
