"""Examples of `marl-parallel COMMAND --help` run; every command shows progress and ends with what to do next."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys

import pytest
from simulators.counting import ACTIONS, Counting
from simulators.crashing import Fate, crashing
from typer.testing import CliRunner

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.cli import report as reporting
from marl_parallel.cli.app import app
from marl_parallel.cli.check_texts import Examination, Finding, Question, Severity, next_step
from marl_parallel.cli.measure import ASYNC, GYMNASIUM, LOOP, Measurement
from marl_parallel.cli.report import Report, next_after_bench, progress

pytestmark = pytest.mark.release_independent

# What an example gets in addition, so that it takes seconds: the measurements are shorter.
SHORTER = {
    "bench": ["--seconds", "0.001", "--repeats", "1"],
    "check": ["--seconds", "0.02", "--steps", "5"],
    "tune": ["--workers", "1", "--envs-per-worker", "1", "--seconds", "0.001"],
    "record": ["--num-envs", "1", "--tile-width", "40"],
    "replay": [],
    "doctor": [],
}
NEXT = "what to do next: "


def examples(*command: str) -> list[list[str]]:
    """The arguments of the examples of `--help`."""
    shown = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [*command, "--help"]).stdout
    return [
        shlex.split(line) for line in re.findall(r"^ *(?:Example|Start with):  marl-parallel (.*?) *$", shown, re.M)
    ]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a command in an empty folder, as if standard error were a terminal."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env={"COLUMNS": "200", "FORCE_COLOR": "1", "TERM": "xterm"})
    return lambda arguments: runner.invoke(app, arguments, input="q\n")


def failure(path) -> None:
    """Write the file of a failure."""
    constructor = crashing(lambda seed: Counting(None, seed=seed), {(0, 0): Fate("raise", "step", 2)})
    with pytest.raises(EnvError), ParallelEnv([constructor], backend="serial", replay=9, replay_dir=path.parent) as env:  # noqa: PT012
        env.reset()
        for _ in range(5):
            env.step([ACTIONS])
    (written,) = path.parent.iterdir()
    written.rename(path)


def test_every_command_has_an_example():
    assert {name: len(examples(name)) for name in SHORTER} == dict.fromkeys(SHORTER, 1)
    ((first, *_),) = examples()
    assert first in SHORTER
    assert {command.name or command.callback.__name__ for command in app.registered_commands} == {*SHORTER}


@pytest.mark.parametrize("command", SHORTER)
def test_example_runs(command, run, tmp_path):
    (arguments,) = examples(command)
    assert arguments[0] == command
    if command == "replay":
        failure(tmp_path / arguments[1])
    done = run([*arguments, *SHORTER[command]])
    assert done.exit_code == 0, done.output
    last = done.stdout.splitlines()[-1]
    assert last.startswith(NEXT)
    assert done.stdout.count(NEXT) == 1
    if command != "replay":  # it prints its steps
        assert "100%" in done.stderr or re.search(r"(measuring|checking|tuning|recording|examining) ", done.stderr)
    if "--output" in arguments:
        assert (tmp_path / arguments[arguments.index("--output") + 1]).stat().st_size
    for other in re.findall(r"run marl-parallel (.+?)(?: to | again|$)", last):
        name, *rest = shlex.split(other)
        assert name in SHORTER
        assert rest == arguments[1:2]


def test_json_has_no_such_line(run):
    done = run(["doctor", "--json"])
    assert json.loads(done.stdout)
    assert NEXT not in done.output


def test_progress_of_a_log_file(monkeypatch, capsys):
    """Without a terminal: a line now and then."""
    times = itertools.count(0.0, 20.0)
    monkeypatch.setattr("marl_parallel.cli.report.time.monotonic", lambda: next(times))
    with progress(6, "tuning") as on_turn:
        for number in range(6):
            on_turn(f"{number} workers")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tuning 1 workers (1 of 6 done)"
    assert 1 < len(lines) < 6


def measured(backend: str, workers: int, speedup: float, way: str = "step", spread: float = 0.05) -> Measurement:
    return Measurement("a sim", 8, backend, workers, 1e3 * speedup, 1e3 / speedup, spread, speedup, 0.5, [1.0], way)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([measured("process", 1, 0.8), measured("process", 2, 1.6)],
         'pass backend="process", num_workers=2 to ParallelEnv (1.60 times a plain loop), or run marl-parallel tune '
         "'a sim' to find the number of environments, too"),
        ([measured("process", 2, 1.6), measured("process", 2, 1.9, ASYNC)], "to ParallelEnv and step by send and recv"),
        ([measured("thread", 2, 1.6, GYMNASIUM)], 'pass backend="thread", num_workers=2, facade="gymnasium" to make'),
        ([measured("serial", 1, 1.2)], 'pass backend="serial" to ParallelEnv (1.20 times'),
        ([measured("process", 2, 0.9)], "use a plain loop for this simulator: nothing here was faster"),
        ([measured("process", 2, 1.1, spread=0.2)], "measure again with --seconds 5 on an idle machine"),
    ],
)  # fmt: skip
def test_what_to_do_after_bench(others, text):
    assert text in next_after_bench(Report({}, {}, [measured(LOOP, 1, 1.0), *others]), "a sim")


def test_what_to_do_after_tune():
    result = {"code": "env = ...", "reliable": True, "environment": "my sim.py:make"}
    assert reporting.next_after_tune(result) == "copy the line above into your program"
    assert reporting.next_after_tune({**result, "code": "env = ...\nenv.reset_async()"}).startswith(
        "copy the lines above"
    )
    due = "run marl-parallel tune 'my sim.py:make' again on an idle machine, with --seconds 5"
    assert reporting.next_after_tune({**result, "reliable": False}) == due


@pytest.mark.parametrize(
    ("severities", "text"),
    [
        ([], "run marl-parallel tune 'my sim.py:make' to find the number of workers"),
        ([Severity.REMARK], "run marl-parallel tune 'my sim.py:make' to find the number of workers"),
        ([Severity.PROBLEM], "fix the problem above, then run marl-parallel check 'my sim.py:make' again"),
        ([Severity.PROBLEM] * 2, "fix the 2 problems above, then run marl-parallel check 'my sim.py:make' again"),
    ],
)
def test_what_to_do_after_check(severities, text):
    found = Examination("my sim.py:make")
    found.add(Finding(Question.API, one, f"fault {number}", "fix it") for number, one in enumerate(severities))
    assert next_step(found) == text
