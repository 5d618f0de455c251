"""`marl-parallel replay`: what it prints, its exit code, and which files it refuses."""

from __future__ import annotations

import atexit
import functools
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from helpers.owners import OTHER, give_away, has_owners
from helpers.setups import rest
from simulators.counting import ACTIONS, Counting
from simulators.crashing import Fate, crashing
from typer.testing import CliRunner

from marl_parallel import ParallelEnv, ParallelEnvError
from marl_parallel.cli.app import app
from marl_parallel.cli.replay import Outcome
from marl_parallel.cli.replay import replay as replay_file
from marl_parallel.cli.target import CommandError
from marl_parallel.core.pool.replay_file import read_crash, write_crash

pytestmark = pytest.mark.release_independent


@pytest.fixture
def replay(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    return lambda *arguments: runner.invoke(app, ["replay", *map(str, arguments)])


def command(*arguments: object, text: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without the tests on its path: the file has the path."""
    return subprocess.run(
        [sys.executable, "-m", "marl_parallel", "replay", *map(str, arguments)],
        capture_output=True, text=True, timeout=60, cwd=ROOT, input=text,
    )  # fmt: skip


def fail(
    folder: Path,
    fate: Fate,
    length: int | None = None,
    steps: int = 12,
    kept: int = 50,
    make: Callable[..., Any] = Counting,
) -> Path:
    """The file of a failure of environment 1 that has such a fault."""
    how: dict[str, Any] = {"backend": "serial"} if fate.fault == "raise" else {"step_timeout": 1.0}
    constructor = crashing(lambda seed: make(length, seed=seed), {(1, 0): fate})
    with (  # noqa: PT012
        pytest.raises(ParallelEnvError) as caught,
        ParallelEnv([constructor] * 2, num_workers=1, replay=kept, replay_dir=folder, **how) as env,
    ):
        env.reset()
        for _ in range(steps):
            env.step([ACTIONS] * 2)
    (path,) = re.findall(r"marl-parallel replay (\S+)", str(caught.value))
    return Path(path)


@pytest.fixture
def raised(tmp_path) -> Path:
    return fail(tmp_path, Fate("raise", "step", 2))


def test_exception(raised, replay):
    done = replay(raised)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("environment 1: EnvError in step 3, ")
    assert lines[-2] == "failed with SimulatorError: bad terrain again at the same step: step 3"
    assert lines[-1].startswith("what to do next: run this command with --pdb")
    assert "next: step 3, in which it failed" in lines
    assert "Traceback" in done.stderr
    assert "failing.py" in done.stderr


@pytest.mark.parametrize(
    ("fault", "how"), [("os._exit", "exit code 7"), ("SIGSEGV", "SIGSEGV (signal 11)"), ("SIGKILL", "SIGKILL")]
)
def test_death(fault, how, tmp_path):
    """It is reported, and does not end the command; with --in-process, it does, after the step is printed."""
    path = fail(tmp_path, Fate(fault, "step", 2))
    done = command(path)
    assert done.returncode == 0, done.stderr
    result, to_do = done.stdout.splitlines()[-2:]
    assert result.startswith(f"the process died ({how}")
    assert result.endswith(") again at the same step: step 3")
    assert to_do.startswith("what to do next: run this command with --pdb")
    alone = command(path, "--in-process")
    assert alone.returncode == {"os._exit": 7, "SIGSEGV": -11, "SIGKILL": -9}[fault]
    assert alone.stdout.splitlines()[-1] == "next: step 3, in which it failed"
    assert ("Fatal Python error: Segmentation fault" in done.stderr) == (fault == "SIGSEGV")


def test_death_at_another_step(tmp_path):
    path = fail(tmp_path, Fate("os._exit", "step", 2))
    crash = read_crash(path)
    write_crash(replace(crash, step=2, actions=pickle.dumps([ACTIONS] * 4)), path)
    done = command(path)
    assert done.returncode == 1
    result, to_do = done.stdout.splitlines()[-2:]
    assert result == "the process died (exit code 7) at another step: step 3 instead of step 2"
    assert "pass isolate_rng=True" in to_do


def test_timeout(tmp_path):
    path = fail(tmp_path, Fate("loop", "step", 2))
    done = command(path, "--timeout", "0.5")
    assert done.returncode == 0, done.stderr
    result, to_do = done.stdout.splitlines()[-2:]
    assert result == "did not finish within 0.5 s again at the same step: step 3"
    assert to_do.startswith("what to do next: run this command with --pdb")
    assert "in forever" in done.stderr


@pytest.mark.parametrize("fault", ["raise", "os._exit"])
def test_not_reproduced(fault, tmp_path):
    """The fault comes from steps of earlier episodes, which a replay does not repeat."""
    done = command(fail(tmp_path, Fate(fault, "step", 6), length=4))
    assert done.returncode == 1, done.stderr
    result, to_do = done.stdout.splitlines()[-2:]
    assert result.startswith("did not fail: step 3 went well. The failure may depend on earlier")
    assert "pass isolate_rng=True" in to_do


class FailsAtTheEnd(Counting):
    """Steps well, and then dies or hangs in `close` or when its process exits."""

    def __init__(self, length: int | None, how: str, *, seed: int) -> None:
        super().__init__(length, seed=seed)
        self.how = how
        if how == "dies at exit":
            atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
        elif how == "hangs at exit":
            threading.Thread(target=lambda: time.sleep(60)).start()

    def close(self) -> None:
        if self.how == "dies in close":
            os._exit(7)
        elif self.how == "exits in close":
            sys.exit("no licence left")
        elif self.how == "hangs in close":
            time.sleep(60)


def fails_at_the_end(folder: Path, fault: str, how: str) -> Path:
    """A file whose replay steps well."""
    return fail(folder, Fate(fault, "step", 6), length=4, make=functools.partial(FailsAtTheEnd, how=how))


@pytest.mark.parametrize(("how", "death"), [("dies in close", "exit code 7"), ("dies at exit", "SIGSEGV")])
def test_death_after_the_replay(how, death, tmp_path):
    """It is no failure of the step that came before."""
    done = command(fails_at_the_end(tmp_path, "os._exit", how))
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-2].startswith("did not fail: step 3 went well.")
    assert f"the process died ({death}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("fault", ["os._exit", rest("loop")])
def test_exit_in_close(fault, tmp_path):
    done = command(fails_at_the_end(tmp_path, fault, "exits in close"))
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-2].startswith("did not fail: step 3 went well.")


@pytest.mark.parametrize(("fault", "how"), [("os._exit", "hangs at exit"), rest("loop", "hangs in close")])
def test_timeout_after_the_replay(fault, how, tmp_path):
    """In a child process, or in that of the command."""
    done = command(fails_at_the_end(tmp_path, fault, how), "--timeout", "1")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-2].startswith("did not fail: step 3 went well.")
    assert "test_replay.py" in done.stderr
    assert "close() or the exit of this process did not finish within 1 s" in done.stderr.splitlines()[-1]


def test_another_step(raised, replay):
    crash = read_crash(raised)
    write_crash(replace(crash, step=5, actions=pickle.dumps([ACTIONS] * 5)), raised)
    done = replay(raised)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-2].endswith("at another step: step 3 instead of step 5")


def test_lost_beginning(tmp_path, replay):
    done = replay(fail(tmp_path, Fate("raise", "step", 9), kept=4))
    assert done.exit_code == 3
    assert "the file has only the last 4 of 10 steps" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("what to do next: pass replay=10 or more to ParallelEnv")


def test_until(raised, replay):
    done = replay(raised, "--until", "2")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-2] == "stopped before step 2"
    assert done.stdout.splitlines()[-1] == "what to do next: run this command without --until to reach the failure"


def test_debugger(raised):
    """It stops in the frame that raised."""
    done = command(raised, "--pdb", text="p make.__name__\nq\n")
    assert done.returncode == 0, done.stderr
    assert "'SimulatorError'" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("what to do next: fix the simulator, then run this command again")


class RunsCode:
    """What another user may have pickled: it makes a folder when it is unpickled."""

    def __init__(self, noted: Path) -> None:
        self.noted = str(noted)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.noted,)


@pytest.fixture
def noted(tmp_path) -> Path:
    return tmp_path / "noted"


def test_nothing_is_unpickled_before_the_warning(raised, noted):
    """A file of somebody else's runs code, but not before the warning."""
    crash = replace(read_crash(raised), constructor=pickle.dumps(RunsCode(noted)))
    write_crash(crash, raised)
    assert read_crash(raised) == crash
    assert not noted.exists()
    done = command(raised)
    assert noted.exists()  # which is what the warning is about
    assert "open only files of people you trust" in done.stdout
    assert done.returncode == 2


# -- files of other users ----------------------------------------------------------------------------------------------


def taken_over(path: Path, part: str, noted: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of another user, with code in one of its pickles."""
    write_crash(replace(read_crash(path), **{part: pickle.dumps(RunsCode(noted))}), path)
    give_away(path, monkeypatch)
    return path


@pytest.fixture
def foreign(raised, noted, monkeypatch) -> Path:
    return taken_over(raised, "constructor", noted, monkeypatch)


class Terminal(io.StringIO):
    """The standard input of a program in a terminal, with what is typed."""

    def isatty(self) -> bool:
        return True


def run_here(path: Path, **how: Any) -> Outcome:
    return replay_file(path, **{"debugger": False, "until": None, "timeout": None, "in_process": False, **how})


@has_owners
@pytest.mark.parametrize("part", ["constructor", "adapter", "registrations", "options", "actions"])
def test_foreign_file_without_a_terminal(part, raised, noted, replay, monkeypatch):
    """Such as in a script: nothing of it runs without --yes."""
    foreign = taken_over(raised, part, noted, monkeypatch)
    done = replay(foreign)
    assert done.exit_code == Outcome.UNUSABLE
    assert f"belongs to the user with the number {OTHER}, not to you, and there is no terminal to ask" in done.stderr
    assert "hint: if you trust it, pass --yes" in done.stderr
    assert not noted.exists()
    replay(foreign, "--yes")
    assert noted.exists()


@has_owners
@pytest.mark.parametrize("stdin", [None, io.StringIO("y\n")])
def test_foreign_file_with_a_stdin_that_is_no_terminal(stdin, foreign, noted, monkeypatch):
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(CommandError, match="no terminal"):
        run_here(foreign)
    assert not noted.exists()


@has_owners
@pytest.mark.parametrize("answer", ["n\n", "\n", "", "no\n"])
def test_foreign_file_that_is_not_trusted(answer, foreign, noted, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    with pytest.raises(CommandError, match="was not replayed"):
        run_here(foreign)
    assert not noted.exists()
    assert "not to you. Run its code? [y/N]" in capsys.readouterr().out


@has_owners
@pytest.mark.parametrize("how", [{"stdin": "y\n"}, {"assume_yes": True}, {"own": True}])
def test_trusted_files_are_replayed(how, raised, monkeypatch):
    if not how.pop("own", False):
        give_away(raised, monkeypatch)
    monkeypatch.setattr(sys, "stdin", Terminal(how.pop("stdin", "")))
    assert run_here(raised, **how) is Outcome.SAME_STEP


@has_owners
def test_file_that_is_replaced_while_the_command_asks(tmp_path, noted, monkeypatch):
    """The child process does not read it again."""
    path = fail(tmp_path, Fate("os._exit", "step", 2))
    give_away(path, monkeypatch)

    class Swapping(Terminal):
        def readline(self, *args: Any) -> str:
            write_crash(replace(read_crash(path), constructor=pickle.dumps(RunsCode(noted))), path)
            return super().readline(*args)

    monkeypatch.setattr(sys, "stdin", Swapping("y\n"))
    assert run_here(path) is Outcome.SAME_STEP
    assert not noted.exists()


CLEAR = "\x1b[2J\x1b]0;title\x07\r\u202e\x9b31m\ud800"


@pytest.mark.parametrize("name", ["error", "method", "mode", "report", "written"])
def test_texts_of_a_file_cannot_control_the_terminal(name, raised, replay):
    write_crash(replace(read_crash(raised), **{name: f"red{CLEAR}\nenvironment 7: fine"}), raised)
    done = replay(raised, "--until", "0")
    shown = done.stdout.partition("warning:")[0]
    assert all(one.isprintable() or one == "\n" for one in shown)
    assert "environment 7" not in [line[: len("environment 7")] for line in shown.splitlines()]
    assert "red" in shown or name == "method"


def test_versions_cannot_control_the_terminal(raised, replay):
    write_crash(replace(read_crash(raised), versions={CLEAR: CLEAR, "Python": "3\x1b[2J"}), raised)
    assert "\x1b" not in replay(raised, "--until", "0").stdout
    raised.write_bytes(b"marl_parallel replay \x1b[2J" + 500 * b"1" + b"\n{}\n")
    done = replay(raised)
    assert "\x1b" not in done.stderr
    assert len(done.stderr) < 1000


@has_owners
def test_name_of_a_file_cannot_control_the_terminal(raised, replay, tmp_path, monkeypatch):
    """As in `marl-parallel replay /tmp/*`."""
    path = raised.rename(tmp_path / "\x1b[2J.replay")
    with monkeypatch.context() as patch:
        give_away(path, patch)
        assert "\\x1b[2J.replay belongs to" in replay(path).stderr
    path.write_bytes(b"{}")
    assert "\\x1b[2J.replay is not a replay file" in replay(path).stderr
    path.unlink()
    assert "\\x1b[2J.replay cannot be read" in replay(path).stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "\x1b[2J"), ("first_step", None), ("env_id", [1]), ("seed", 1.5), ("arrays", 1), ("report", ["x"]),
        ("versions", {"Python": 3}), ("versions", []), ("sys_path", [1]), ("sys_path", "x"), ("restarts", True),
    ],
)  # fmt: skip
def test_wrong_types_in_a_file(name, value, raised, replay):
    write_crash(replace(read_crash(raised), **{name: value}), raised)
    done = replay(raised)
    assert done.exit_code == Outcome.UNUSABLE
    assert "is incomplete or was changed" in done.stderr
    assert done.stdout == ""


@has_owners
def test_writing_a_file_follows_no_link_and_keeps_no_permissions(raised, tmp_path, monkeypatch):
    victim, crash = tmp_path / "victim", read_crash(raised)
    victim.write_text("mine")
    beside = raised.with_name(f".{raised.name}")
    beside.symlink_to(victim)
    give_away(beside, monkeypatch)
    raised.chmod(0o666)
    write_crash(crash, raised)
    assert read_crash(raised) == crash
    assert raised.stat().st_mode & 0o777 == 0o600
    raised.unlink()
    raised.symlink_to(victim)
    give_away(raised, monkeypatch)
    with pytest.raises(PermissionError, match="is a link of"):
        write_crash(crash, raised)
    assert victim.read_text() == "mine"


# -- files that cannot be replayed -------------------------------------------------------------------------------------


def damaged(content: bytes, how: str) -> bytes:
    header, line, body = content.split(b"\n", 2)
    if how == "another file":
        return b"{}"
    if how == "empty":
        return b""
    if how == "newer":
        return b"\n".join([header[:-1] + b"999", line, body])
    if how == "truncated":
        return content[:-10]
    if how == "longer":
        return content + b"x"
    if how == "flipped":
        return content[:-10] + bytes([content[-10] ^ 1]) + content[-9:]
    if how == "no header":
        return header + b"\n[]\n" + body
    fields = json.loads(line)
    del fields["mode"]
    return b"\n".join([header, json.dumps(fields).encode(), body])


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("another file", "is not a replay file"),
        ("empty", "is not a replay file"),
        ("newer", "has version 999 of this format"),
        ("truncated", "is incomplete or was changed"),
        ("longer", "is incomplete or was changed"),
        ("flipped", "is damaged"),
        ("no header", "is incomplete or was changed"),
        ("no mode", "is incomplete or was changed"),
    ],
)
def test_damaged_files(how, text, raised, replay):
    raised.write_bytes(damaged(raised.read_bytes(), how))
    done = replay(raised)
    assert done.exit_code == 2
    assert text in done.stderr
    assert "hint: " in done.stderr
    assert done.stdout == ""


def test_missing_file(replay, tmp_path):
    done = replay(tmp_path / "none.replay")
    assert done.exit_code == 2
    assert "none.replay cannot be read: No such file or directory" in done.stderr


def test_missing_module(raised):
    """The file names the folders on the path of its writer; one without them needs the module."""
    write_crash(replace(read_crash(raised), sys_path=[], folder=""), raised)
    done = command(raised)
    assert done.returncode == 2
    assert "the file needs the module 'simulators'" in done.stderr


def test_help(replay):
    done = replay("--help")
    assert "open only files of people you trust" in " ".join(done.stdout.split())
    assert "--in-process" in done.stdout
