"""The command line with simulators that print or exit, and with names that look like markup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
from helpers.owners import give_away, has_owners
from helpers.setups import rest

from marl_parallel.cli import measure
from marl_parallel.cli import report as reporting
from marl_parallel.cli.output import check_writable, deliver
from marl_parallel.cli.report import Report
from marl_parallel.cli.target import CommandError

pytestmark = pytest.mark.release_independent

BENCH = ("--num-envs", "1", "--workers", "1", "--backends", "serial", "--seconds", "0.001", "--repeats", "1")
TUNE = ("--workers", "1", "--envs-per-worker", "1", "--seconds", "0.001")
CHECK = ("--backends", "serial", "--seconds", "0.01", "--steps", "2")
FILE = """
    import os
    import sys

    import gymnasium

    class Talkative(gymnasium.Wrapper):
        def __init__(self):
            print("made")
            super().__init__(gymnasium.make("CartPole-v1"))

        def reset(self, **keywords):
            os.write(1, b"reset\\n")
            return super().reset(**keywords)

    class Exits(Talkative):
        def __init__(self):
            sys.exit(0)

    class ExitsInStep(Talkative):
        def step(self, action):
            sys.exit(0)
"""


@pytest.fixture
def folder(tmp_path):
    """A folder of simulators whose name looks like markup."""
    inner = tmp_path / "v[" / "2]"
    inner.mkdir(parents=True)
    (inner / "wordy.py").write_text(textwrap.dedent(FILE))
    (inner / "exits.py").write_text("raise SystemExit(0)\n")
    return tmp_path


def run(command, name, *arguments, folder, **environ):
    return subprocess.run(
        [sys.executable, "-m", "marl_parallel", command, f"v[/2]/{name}", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
    )


@pytest.mark.parametrize(
    ("command", "name", "more"),
    [
        ("bench", "exits.py:it", ()),
        ("bench", "wordy.py:Exits", ("--debug",)),
        ("bench", "wordy.py:ExitsInStep", ()),
        ("tune", "wordy.py:Exits", ()),
    ],
)
def test_simulator_that_exits_is_an_error(command, name, more, folder):
    done = run(command, name, *(BENCH if command == "bench" else TUNE), *more, folder=folder)
    assert done.returncode == 1
    assert "SystemExit: 0" in done.stderr
    assert "sys.exit" in done.stderr


@pytest.mark.parametrize(("command", "arguments"), [("bench", BENCH), rest("tune", TUNE), ("check", CHECK)])
def test_json_output_excludes_prints_of_the_simulator(command, arguments, folder):
    """Every command prints the same as it saves, and nothing else."""
    done = run(command, "wordy.py:Talkative", *arguments, "--json", "--output", "new/result.json", folder=folder)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((folder / "new" / "result.json").read_text())
    if command == "tune":
        assert result["best"]["num_workers"] == 1
    elif command == "bench":
        assert [one["backend"] for one in result["measurements"]] == ["loop", "serial"]
    else:
        assert result["healthy"]
    shown = {"made", "reset"} & {*done.stderr.splitlines()}
    assert shown == (set() if command == "check" else {"made", "reset"})  # check shows nothing of simulators
    assert "wrote new/result.json" in done.stderr.splitlines()


def test_names_with_markup_and_ascii_terminals(folder):
    done = run("bench", "wordy.py:Talkative", *BENCH, folder=folder, PYTHONIOENCODING="ascii", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "v[/2]/wordy.py:Talkative" in done.stdout


@pytest.mark.parametrize(
    ("command", "arguments", "streams"),
    [
        ("check", [*CHECK, "--output", "out.json"], ["stdout"]),
        ("bench", [*BENCH, "--output", "out.json"], ["stdout", "stderr"]),
    ],
    ids=["check", "bench"],
)
def test_reader_that_has_ended(command, arguments, streams, folder):
    """As in `marl-parallel check ENV | head`: no error, and the command does the rest of its work."""
    read, write = os.pipe()
    os.close(read)
    (folder / "game.py").write_text("import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "marl_parallel", command, "game.py:make", *arguments],
            **{"stderr": subprocess.PIPE, **dict.fromkeys(streams, write)},
            timeout=60,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    finally:
        os.close(write)
    said = (done.stderr or b"").decode()
    assert "Broken" not in said
    assert "error:" not in said
    assert json.loads((folder / "out.json").read_text())
    assert done.returncode == 0


def test_help_for_a_reader_that_has_ended():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "marl_parallel", "--help"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def report() -> Report:
    """One with a text in place of each number."""
    measured = [measure.Measurement(*["x"] * len(fields(measure.Measurement)))]
    return Report({"cpus": 2}, {}, measured)


@has_owners
@pytest.mark.parametrize(
    "write",
    [
        lambda path: deliver({"a": 1}, False, path),
        lambda path: reporting.write_json(report(), path),
        lambda path: reporting.write_csv(report(), path),
    ],
    ids=["deliver", "write_json", "write_csv"],
)
def test_links_of_other_users_are_not_followed(write, tmp_path, monkeypatch):
    """A link of this user is, and so is /dev/null written to."""
    victim, path = tmp_path / "victim", tmp_path / "out"
    victim.write_text("mine")
    path.symlink_to(victim)
    write(path)
    assert victim.read_text() != "mine"
    assert path.is_symlink()
    victim.write_text("mine")
    give_away(path, monkeypatch)
    with pytest.raises(PermissionError, match="out is a link of the user"):
        write(path)
    assert victim.read_text() == "mine"
    write(Path(os.devnull))


@has_owners
def test_plot_does_not_follow_links_of_other_users(tmp_path, monkeypatch):
    victim, path = tmp_path / "victim", tmp_path / "out.png"
    victim.write_text("mine")
    path.symlink_to(victim)
    give_away(path, monkeypatch)
    monkeypatch.setattr(reporting, "draw", lambda panel, *more: panel.plot([1, 2], label="line"))
    monkeypatch.setattr(Report, "tables", lambda self: [self.measurements])
    monkeypatch.setattr(reporting, "in_one_line", lambda machine: "here")
    with pytest.raises(PermissionError, match="is a link of the user"):
        reporting.save_plot(report(), path)
    assert victim.read_text() == "mine"
    for name in ("out.svg", "out.PNG", "out.pdf"):
        reporting.save_plot(report(), tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


@has_owners
def test_commands_refuse_links_of_other_users(tmp_path, monkeypatch):
    """Before it does its work."""
    (tmp_path / "out.json").symlink_to(tmp_path / "victim")
    give_away(tmp_path / "out.json", monkeypatch)
    with pytest.raises(CommandError, match=r"out\.json is a link of the user"):
        check_writable(tmp_path / "out.json")
