"""Examples that train with PyTorch only: they run, write their logs, and are reproducible."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

pytestmark = pytest.mark.needs("torch", "tyro")

OF_TIME = {"seconds", "steps_per_second", "collecting"}


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", str(ROOT / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def curve(file: Path) -> list[dict[str, str]]:
    """A log without the columns that depend on the clock."""
    with file.open(newline="") as lines:
        return [{key: row[key] for key in row.keys() - OF_TIME} for row in csv.DictReader(lines)]


@pytest.mark.parametrize(
    ("script", "video"),
    [("ippo_simple_spread.py", "spread.gif"), ("mappo_simple_spread.py", None), ("agents_that_die.py", "zombies.mp4")],
)
def test_same_seed_same_curve(script, video, tmp_path):
    """With any number of workers."""
    logs = []
    for workers in ("1", "2"):
        output = tmp_path / workers
        filmed = ["--video", str(tmp_path / video)] if video and workers == "1" else []
        run(f"examples/{script}", "--smoke", "--seed", "3", "--num-workers", workers, "--output", str(output), *filmed)
        assert {path.name for path in output.iterdir()} == {"seed_3.csv", "learning_curve.png"}
        assert (output / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
        logs.append(curve(output / "seed_3.csv"))
    assert len(logs[0]) >= 2
    assert logs[0] == logs[1]
    assert video is None or (tmp_path / video).stat().st_size > 10_000


def test_own_simulator():
    """`Warehouse` raises on moves that its masks forbid."""
    first, second = (run("examples/mappo_own_simulator.py", "--smoke", "--num-workers", n) for n in ("1", "2"))
    (line,) = [line for line in first.splitlines() if "packages in an episode, first -> last update" in line]
    assert line in second


def test_recurrent_policies(tmp_path):
    """Agents die and come back; the curves do not depend on the number of workers."""
    logs = []
    for workers in ("1", "2"):
        output = tmp_path / workers
        run("examples/recurrent_ippo.py", "--smoke", "--num-workers", workers, "--output", str(output))
        assert (output / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
        logs.append([curve(output / f"{name}.csv") for name in ("GRU", "without_memory")])
    assert logs[0] == logs[1]
    assert logs[0][0] != logs[0][1]


def test_failing_check_of_memory(tmp_path):
    """Within seconds the GRU does not learn the task."""
    command = [sys.executable, "examples/recurrent_ippo.py", "--smoke", "--check", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "expected at least 0.9 of open doors with memory" in done.stderr


def test_failing_check_of_the_return(tmp_path):
    """Within seconds the policy does not improve."""
    command = [sys.executable, "examples/ippo_simple_spread.py", "--smoke", "--check", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "on average; expected" in done.stderr
    assert {path.stem for path in tmp_path.glob("*.csv")} == {"seed_1", "seed_2", "seed_3"}
    logs = [curve(tmp_path / f"seed_{seed}.csv") for seed in (1, 2, 3)]
    assert logs[0] != logs[1] != logs[2]


def test_self_play(tmp_path):
    """The network plays better than before, and the curve does not depend on the number of workers."""
    logs = []
    for workers in ("1", "2"):
        output = tmp_path / workers
        arguments = ["--smoke", "--seed", "2", "--num-workers", workers, "--output", str(output)]
        printed = run("examples/self_play.py", *arguments)
        assert (output / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
        logs.append(curve(output / "seed_2.csv"))
        assert re.search(r"learner against version 0 +: +[1-9]\d* games", printed)
        assert re.search(r"learner against itself +: +[1-9]\d* games", printed)
    assert logs[0] == logs[1]
    assert float(logs[0][-1]["random"]) > float(logs[0][0]["random"])


def test_failing_check_of_self_play(tmp_path):
    """A network that is not trained does not win enough games."""
    arguments = ["--updates", "0", "--test-games", "20", "--seed", "2", "--check", "--output", str(tmp_path)]
    command = [sys.executable, "examples/self_play.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1, done.stderr
    assert "expected at least 95% of the games against random moves won" in done.stderr


def test_async_and_sync_stepping(tmp_path):
    message = run("examples/async_ippo.py", "--smoke", "--output", str(tmp_path))
    assert "in turns: " in message
    assert "in halves: " in message
    turns, halves = (curve(tmp_path / f"{way}.csv") for way in ("turns", "halves"))
    assert [row["steps"] for row in turns] == [row["steps"] for row in halves]
    assert (tmp_path / "return_over_time.png").read_bytes().startswith(b"\x89PNG")
