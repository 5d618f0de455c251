"""`log_dir`, and names of worker processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import start_methods
from helpers.setups import Setup
from simulators.counting import ACTIONS, Counting
from simulators.crashing import Fate, crashing

from marl_parallel import ParallelEnv, WorkerCrashed, WorkerTimeout, make

pytestmark = pytest.mark.release_independent

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S*"
START = re.compile(rf"=== {TIME} marl_parallel worker (\d) \(env ([\d-]+)\), process (\d+) ===")


class Talkative(Counting):
    """Writes in each step, also from a process of its own."""

    def step(self, actions: dict) -> Any:
        print(f"step {self.steps + 1}", flush=True)
        print("to stderr", file=sys.stderr)
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        return super().step(actions)


class Dying(Counting):
    """Writes 30 lines, the last one without an end, and some bytes; then its process ends, or hangs."""

    def __init__(self, hangs: bool = False, *, seed: int) -> None:
        super().__init__(seed=seed)
        self.hangs = hangs

    def step(self, actions: dict) -> Any:
        for line in range(29):
            print("line", line)
        os.write(1, b"last line \xff")
        while self.hangs:
            pass
        os._exit(3)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def pid_of(env: Any) -> int:
    return os.getpid()


def argv_of(env: Any) -> list[str]:
    return sys.argv


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_names(context):
    with ParallelEnv([Counting] * 5, num_workers=2, context=context) as env:
        pids = env.call(pid_of)
        assert [command_line(pid) for pid in dict.fromkeys(pids)] == [
            "marl_parallel worker 0 (env 0-2)",
            "marl_parallel worker 1 (env 3-4)",
        ]
        assert Path(f"/proc/{pids[4]}/comm").read_text() == "marl worker 1\n"
        keeper = parent_of(pids[4])
        assert command_line(keeper) == "marl_parallel keeper of worker 1"
        assert command_line(parent_of(keeper)) == "marl_parallel fork server"
        assert env.call(argv_of) == (sys.argv,) * 5


def test_name_after_a_fork_of_this_program():
    """As much as fits into the command line."""
    with ParallelEnv([Counting] * 2, num_workers=2, context="fork") as env:
        pid = env.call(pid_of)[1]
        assert command_line(pid) in ("marl_parallel worker 1 (env 1)", "marl worker 1")
        assert Path(f"/proc/{pid}/comm").read_text() == "marl worker 1\n"
        assert env.call(argv_of) == (sys.argv,) * 2


def test_portable_name():
    with ParallelEnv([Counting] * 2, num_workers=2, **start_methods.arguments("portable")) as env:
        assert command_line(env.call(pid_of)[1]).endswith(" marl_parallel worker 1 (env 1)")
        assert env.call(argv_of) == (sys.argv,) * 2


def test_name_of_a_replaced_worker(build):
    env = build([crashing(Counting, {(1, 0): Fate("SIGKILL")})] * 2, Setup("process", True, 2), on_error="restart")
    env.reset()
    env.step([ACTIONS] * 2)
    assert command_line(env.call(pid_of)[1]) == "marl_parallel worker 1 (env 1)"


METHODS = ["forkserver", "spawn", "fork", "portable"]


@pytest.mark.parametrize("method", METHODS)
def test_logs(method, tmp_path, capfd):
    folder = tmp_path / "new" / "logs"
    for run in (1, 2):
        with ParallelEnv([Talkative] * 3, num_workers=2, log_dir=folder, **start_methods.arguments(method)) as env:
            pids = env.call(pid_of)
            env.reset()
            env.step([ACTIONS] * 3)
        assert sorted(file.name for file in folder.iterdir()) == ["worker-0.log", "worker-1.log"]
        lines = (folder / "worker-0.log").read_text().splitlines()
        starts = [START.fullmatch(line) for line in lines]
        last = max(place for place, start in enumerate(starts) if start)
        assert sum(start is not None for start in starts) == run
        assert starts[last].groups() == ("0", "0-1", str(pids[0]))
        own = sorted(lines[last + 1 :])
        assert own == ["from a child"] * 2 + ["step 1"] * 2 + ["to stderr"] * 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("method", METHODS)
def test_errors_have_the_end_of_the_log(method, tmp_path):
    with ParallelEnv([Dying], log_dir=str(tmp_path), **start_methods.arguments(method)) as env:
        env.reset()
        with pytest.raises(WorkerCrashed, match="exit code 3") as caught:
            env.step([ACTIONS])
    text = str(caught.value)
    assert f"\n\nThe end of its log, {tmp_path / 'worker-0.log'}:\nline 10\n" in text
    assert text.endswith("\nline 28\nlast line \ufffd")


def test_timeouts_have_the_end_of_the_log(tmp_path):
    with ParallelEnv([lambda seed: Dying(hangs=True, seed=seed)], log_dir=tmp_path, step_timeout=0.5) as env:
        env.reset()
        with pytest.raises(WorkerTimeout) as caught:
            env.step([ACTIONS])
    assert "\nline 28\nlast line" in str(caught.value)


@pytest.mark.parametrize("method", ["forkserver", "portable"])
def test_replaced_worker_goes_on_in_the_same_file(method, tmp_path):
    """Its error has only its own lines."""
    with ParallelEnv([Dying], log_dir=tmp_path, on_error="restart", **start_methods.arguments(method)) as env:
        env.reset()
        for _ in range(2):
            report = env.step([ACTIONS])[4][0]["__common__"]["error"]
            assert report.count("line 28") == 1
    lines = (tmp_path / "worker-0.log").read_text(errors="replace").splitlines()
    assert sum(START.fullmatch(line) is not None for line in lines) == 3
    assert lines.count("line 28") == 2


def test_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with make(Talkative, 1, log_dir="logs", on_error="restart") as env:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        env.reset()
        env.step([ACTIONS])
    assert "step 1" in (tmp_path / "logs" / "worker-0.log").read_text()


def test_folder_that_has_been_deleted(tmp_path, build, caplog):
    """A restart makes it again."""
    fates = {(0, 0): Fate("SIGKILL")}
    env = build([crashing(Talkative, fates)], Setup("process", True, 1), on_error="restart", log_dir=tmp_path / "logs")
    env.reset()
    (tmp_path / "logs" / "worker-0.log").unlink()
    (tmp_path / "logs").rmdir()
    env.step([ACTIONS])
    env.step([ACTIONS])
    assert "step 1" in (tmp_path / "logs" / "worker-0.log").read_text()


def test_log_that_cannot_be_opened_any_more(tmp_path, build, caplog, capfd):
    """The run goes on, with a warning."""
    fates = {(0, 0): Fate("SIGKILL")}
    env = build([crashing(Talkative, fates)], Setup("process", True, 1), on_error="restart", log_dir=tmp_path / "logs")
    env.reset()
    (tmp_path / "logs" / "worker-0.log").unlink()
    (tmp_path / "logs").rmdir()
    (tmp_path / "logs").touch()
    env.step([ACTIONS])
    env.step([ACTIONS])
    assert "marl_parallel worker 0 (env 0) has no log" in caplog.text
    assert "step 1" in capfd.readouterr().out


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_backends_without_logs_warn(backend, tmp_path):
    with pytest.warns(RuntimeWarning, match="log_dir=.* has no effect with backend="):
        ParallelEnv([Counting], backend=backend, log_dir=tmp_path).close()


@pytest.mark.parametrize(
    ("wrong", "error"), [(3, TypeError), (b"logs", TypeError), ("file", ValueError), ("file/logs", ValueError)], ids=str
)
def test_wrong_folders(wrong, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(error, match="log_dir"):
        ParallelEnv([Counting], log_dir=wrong)


def test_log_that_is_a_folder(tmp_path):
    (tmp_path / "worker-0.log").mkdir()
    with pytest.raises(ValueError, match="nothing can be appended to"):
        ParallelEnv([Counting], log_dir=tmp_path)
