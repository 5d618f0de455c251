"""Every program in `benchmarks/` runs, saves its results, and prints them for a page of the documentation."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import typer
from helpers import ROOT
from typer.testing import CliRunner

from marl_parallel import ParallelEnv

pytestmark = pytest.mark.release_independent

BENCHMARKS = ROOT / "benchmarks"
QUICK = "--quick"
LEARNING = "torch", "tyro"
SMOKE = [
    ("compare_workers", [QUICK, "--only", "synthetic 20 µs"], ".json .csv .png", "| synthetic 20 µs, 3 x 18 | 8 |"),
    ("cpu_times", [QUICK, "--only", "3 x 18, 8 environments, d"], ".json .csv", "| 3 x 18 | 8 | dicts |"),
    ("many_agents", [QUICK, "--only", "half observed"], ".json .csv", "| half observed | SAME_STEP | dicts |"),
    ("async_stepping", [QUICK, "--only", "wait"], ".json .csv .png", "| simulators wait | 1 |"),
    ("recovery", [QUICK, "--only", "raises: simple"], ".json .csv", "| simple_spread_v3 | it raises | 1 |"),
    (
        "compare_peers",
        [QUICK, "--only", "v3: ParallelEnv / plain loop"],
        ".json .csv .png",
        "| plain loops side by side |",
    ),
    ("compare_facades", [QUICK, "--only", "3 x 18: PettingZooVecEnv"], ".json .csv .png", "| PettingZooVecEnv |"),
    ("collect_rollouts", [QUICK, "--only", "plain loops"], ".json", "| plain loops side by side |"),
    ("collect_rollouts:torch", [QUICK, "--only", "Rollout"], ".json", "| Rollout, halves=2 |", *LEARNING),
    ("time_to_return", [QUICK, "--workers", "0,2", "--ahead", "2"], ".json .csv .png", "| 2 workers |", *LEARNING),
    ("isolated_generators", ["--steps", "5", "--repeats", "1"], ".json", "| `isolate_rng=True` |"),
    ("recycling", ["--seconds", "0.2", "--episodes", "3", "--age", "0.2"], ".json", "| an environment is replaced |"),
    ("soak", ["--hours", "0.001", "--memory-mb", "60", "--programs", "1"], ".json", "| calls that hang | 0 |"),
    ("summary", [], ".png", "On two CPUs, two workers"),
    ("envpool_overhead", [QUICK], ".json .csv", "| CartPole-v1 | 256 |", "envpool"),
    ("pools_overhead", [QUICK, "--only", "envpool"], ".json", "| envpool CartPole-v1 |", "envpool"),
    ("ray_calls", ["--seconds", "0.05"], ".json", "| a compiled graph, other node |", "ray"),
    ("ray_scaling", [QUICK], ".json .csv .png", "| 2 x 8 |", "ray"),
    ("ray_scaling:nodes", [QUICK, "--nodes"], ".json .csv .png", "| 2 x 1 | 1 ms |", "ray"),
]
"""Programs, with options that make a run short, the kinds of files that it writes, what the page then has, and modules
that it needs."""


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def invoked(name, *arguments):
    """A program's result, in this process."""
    app = typer.Typer()
    app.command()(importlib.import_module(name).main)
    return CliRunner().invoke(app, arguments)


@pytest.mark.rest
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "options", "endings", "shown"),
    [
        pytest.param(*row, marks=[pytest.mark.needs(*needs)] if needs else [], id=row[0])
        for *row, needs in ((*row[:4], row[4:]) for row in SMOKE)
    ],
)
def test_smoke(name, options, endings, shown, tmp_path):
    """In a process of its own, as users run it. The time limit is far above what a busy machine needs."""
    name, output = name.partition(":")[0], ["--output", str(tmp_path)]
    run = subprocess.run([sys.executable, BENCHMARKS / f"{name}.py", *options, *output], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == sorted(endings.split())
    assert all(path.stat().st_size for path in tmp_path.iterdir())
    printed = invoked(name, *output, "--markdown", *(one for one in options if one == "--nodes"))
    assert printed.exit_code == 0, printed.output
    assert shown in printed.output


def test_all_programs_run_here():
    """`all.py` knows every program that a page quotes, and there is a short run of each."""
    every = importlib.import_module("all")
    runs = {name.partition(":")[0] for name, *_ in SMOKE}
    known = {program.name for program in every.PROGRAMS}
    assert known - runs == {"simulators"}  # which installs them; see `test_benchmark_parts.py`
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if "typer.run(main)" in path.read_text()}
    assert scripts == known | {"all", "draw_trace"}
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert {name for name in scripts if f"benchmarks/{name}.py" not in pages} == set()


def test_tables_in_pages():
    """`all.py` puts the tables of saved results between the marks of a page."""
    every = importlib.import_module("all")
    assert every.run("a name that none has") == []
    mark = "<!-- recovery table: benchmarks/recovery.py --markdown -->\n"
    page = every.refreshed(f"before\n{mark}old\n<!-- end -->\nafter\n")
    assert page == f"before\n{mark}{invoked('recovery', '--markdown').stdout.strip()}\n<!-- end -->\nafter\n"


def test_draw_trace(tmp_path):
    from synthetic import Synthetic

    trace, picture = tmp_path / "run.json", tmp_path / "picture.png"
    with ParallelEnv([Synthetic] * 2, num_workers=1, backend="thread", trace=str(trace)) as env:
        env.reset()
        env.step([dict.fromkeys(env.possible_agents, 0)] * 2)
    result = invoked("draw_trace", str(trace), str(picture), "--milliseconds", "1000")
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *((name, "--only", "chess") for name, options, *_ in SMOKE if "--only" in options and ":" not in name),
        ("envpool_overhead", "--only", "chess"),
        ("compare_workers", "--workers", "1,a"),
        ("compare_workers", "--backends", "greenlet"),
        ("async_stepping", "--workers", "0"),
        ("time_to_return", "--workers", "two"),
    ],
)
def test_impossible_measurements_are_refused(name, option, value):
    result = invoked(name, option, value, "--output", "/dev/null/nowhere")
    assert result.exit_code == 2, result.output
    assert f"Invalid value for {option}" in result.stderr
