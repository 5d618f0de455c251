"""What the README says is so: its code runs, its table is the measured one, its arguments are the real ones."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from marl_parallel import ParallelEnv
from marl_parallel.cli.report import markdown, read_json

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results" / "compare_workers.json"
BEGIN, END = "<!-- speed table: benchmarks/compare_workers.py --markdown -->", "<!-- end -->"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def run(*command: str, text: str = "") -> str:
    done = subprocess.run([sys.executable, *command], input=text, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: f"line {line_of(block)}")
def test_python_blocks_run_by_themselves(block):
    run("-", text=block)


def line_of(block: str) -> int:
    return README[: README.index(block)].count("\n") + 1


def test_the_example_shows_its_throughput():
    said = run("examples/quickstart.py", "--steps", "60")
    assert "8 copies on" in said
    assert "16 episodes" in said
    assert len(re.findall(r"[1-9][\d,]* environment steps per second", said)) == 2


def test_the_two_commands_set_everything_up():
    commands = blocks("bash")
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && ") and command.count("\n") == 1 for command in commands)


def test_the_speed_table_is_what_was_measured():
    """Print it with `python benchmarks/compare_workers.py --markdown` and put it between the two markers."""
    shown = README[README.index(BEGIN) + len(BEGIN) : README.index(END)].strip()
    assert shown == (markdown(read_json(RESULTS)) if RESULTS.exists() else "")


def test_the_arguments_are_those_of_the_class():
    section = README[README.index("The arguments of `ParallelEnv`") :]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE)
    parameters = inspect.signature(ParallelEnv).parameters
    shown = dict(rows[: len(parameters)])
    assert list(shown) == list(parameters)
    for name, default in shown.items():
        if parameters[name].default is not inspect.Parameter.empty and parameters[name].default is not None:
            assert default == f"`{parameters[name].default!r}`".replace("'", '"'), name
