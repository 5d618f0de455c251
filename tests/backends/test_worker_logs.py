"""`log_dir=`: a file for the output of each worker, and its last lines in errors."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, TESTS
from helpers.launching import linux_only
from helpers.leaks import HeldResources, nothing_more
from helpers.owners import give_away, has_owners
from helpers.start_methods import arguments
from simulators.counting import ACTIONS
from simulators.failing import Fragile
from simulators.talking import Talking

from marl_parallel import ParallelEnv, WorkerCrashed, WorkerTimeout, make

pytestmark = pytest.mark.release_independent

HEADER = re.compile(
    r"=== \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d marl_parallel worker (\d) \(env ([\d-]+)\), process (\d+) ==="
)


def exits() -> None:
    print("about to exit", end="")  # no end of the line
    sys.stdout.flush()
    os._exit(7)


def aborts() -> None:
    os.abort()


def hangs() -> None:
    print("about to hang")
    time.sleep(60)


def writes_bytes() -> None:
    os.write(2, b"\xff broken \xe2\x82\n" + b"x" * 9000 + b"\nlast\n")
    os._exit(7)


@contextlib.contextmanager
def talking(num_envs: int = 3, **how: Any) -> Iterator[ParallelEnv]:
    with ParallelEnv([Talking] * num_envs, num_workers=2, **how) as env:
        env.reset()
        yield env


def break_in_step(env: ParallelEnv, env_id: int, fault: Any) -> dict[str, Any]:
    """Let a step fail once; the info of its restart."""
    env.set_attr("fault", [fault], env_ids=[env_id])
    infos = env.step([ACTIONS] * env.num_envs)[4]
    common: dict[str, Any] = infos[env_id]["__common__"]
    assert common["restarted"]
    return common


def quoted(error: object, path: Path) -> list[str]:
    """The lines of the last section of an error."""
    _, found, section = str(error).partition(f"\n\nThe end of its log, {path}:\n")
    assert found, error
    return section.splitlines()


def headers(path: Path) -> list[tuple[str, str, int]]:
    """Worker, environments and process of each start."""
    found = map(HEADER.fullmatch, path.read_text(errors="replace").splitlines())
    return [(match[1], match[2], int(match[3])) for match in found if match]


def test_output_of_workers_goes_to_their_files(start_method, tmp_path, capfd):
    folder = tmp_path / "new" / "logs"
    with talking(log_dir=folder, **arguments(start_method)) as env:
        env.call("say_in_all_ways", "hello", env_ids=[2])
        pids = env.call("pid")
    assert sorted(path.name for path in folder.iterdir()) == ["worker-0.log", "worker-1.log"]
    first, second = folder / "worker-0.log", folder / "worker-1.log"
    assert headers(first) == [("0", "0-1", pids[0])]
    assert headers(second) == [("1", "2", pids[2])]
    ways = ["stdout", "stderr", "descriptor", "child", "child-stderr"]
    assert first.read_text().count("\n") == 1
    assert second.read_text().splitlines()[1:] == [f"hello {way}" for way in ways]
    assert capfd.readouterr() == ("", "")


def test_earlier_runs_are_kept(tmp_path):
    (tmp_path / "worker-0.log").write_text("an earlier run, without an end of line")
    (tmp_path / "notes.txt").write_text("mine")
    for word in ("one", "two"):
        with talking(log_dir=str(tmp_path)) as env:
            env.call("say", word, env_ids=[0])
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert lines[0] == "an earlier run, without an end of line"
    assert [bool(HEADER.fullmatch(line)) or line for line in lines[1:]] == [True, "one", True, "two"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_reports_of_restarts_quote_the_log(start_method, tmp_path):
    """Only the lines of the process that died; its replacement goes on in the same file."""
    path = tmp_path / "worker-0.log"
    with talking(log_dir=tmp_path, on_error="restart", **arguments(start_method)) as env:
        pids = [env.call("pid")[0]]
        env.call("say", *map(str, range(30)), env_ids=[0])
        report = break_in_step(env, 0, exits)["error"]
        assert quoted(report, path) == [*map(str, range(11, 30)), "about to exit"]
        pids.append(env.call("pid")[0])
        env.call("say", "second life", env_ids=[0])
        assert quoted(break_in_step(env, 1, exits)["error"], path) == ["second life", "about to exit"]
        pids.append(env.call("pid")[0])
        assert "The end of its log" not in break_in_step(env, 1, aborts)["error"]  # it had printed nothing
    assert headers(path)[:3] == [("0", "0-1", pid) for pid in pids]
    assert len(headers(path)) == 4


def test_error_of_a_crash_quotes_the_log(start_method, tmp_path):
    with pytest.raises(WorkerCrashed) as caught, talking(log_dir=tmp_path, **arguments(start_method)) as env:  # noqa: PT012
        env.set_attr("fault", [writes_bytes], env_ids=[2])
        env.step([ACTIONS] * 3)
    lines = quoted(caught.value, tmp_path / "worker-1.log")
    assert lines == ["last"]  # the line before is longer than what is quoted
    assert caught.value.exitcode == 7


def test_undecodable_output_is_quoted(tmp_path):
    with talking(log_dir=tmp_path, on_error="restart") as env:
        env.call(lambda _: os.write(1, b"\xff broken\n" + b"y" * 5000), env_ids=[0])
        (line,) = quoted(break_in_step(env, 0, aborts)["error"], tmp_path / "worker-0.log")
        assert 3000 < len(line) <= 4096  # one line without an end: its last part
        env.call(lambda _: os.write(1, b"\xff broken\n"), env_ids=[0])
        assert quoted(break_in_step(env, 0, aborts)["error"], tmp_path / "worker-0.log") == ["� broken"]


def test_error_of_a_timeout_quotes_the_log(start_method, tmp_path):
    how = arguments(start_method)
    with pytest.raises(WorkerTimeout) as caught, talking(log_dir=tmp_path, step_timeout=5.0, **how) as env:  # noqa: PT012
        env.set_attr("fault", [hangs], env_ids=[2])
        env.step([ACTIONS] * 3)
    assert quoted(caught.value, tmp_path / "worker-1.log") == ["about to hang"]
    assert "in hangs" in str(caught.value)


def test_log_that_is_emptied_during_a_run(tmp_path):
    """As `logrotate` does with `copytruncate`: the worker goes on at the beginning, and errors quote what is there."""
    path = tmp_path / "worker-0.log"
    path.write_text("an earlier run\n" * 100)
    with talking(log_dir=tmp_path, on_error="restart") as env:
        env.call("say", "before", env_ids=[0])
        os.truncate(path, 0)
        env.call("say", "after", env_ids=[0])
        assert path.read_text() == "after\n"
        assert quoted(break_in_step(env, 0, exits)["error"], path) == ["after", "about to exit"]


def test_errors_without_logs_have_no_such_section():
    with pytest.raises(WorkerCrashed) as caught, talking() as env:  # noqa: PT012
        env.set_attr("fault", [exits], env_ids=[2])
        env.step([ACTIONS] * 3)
    assert "The end of its log" not in str(caught.value)


# -- the folder --------------------------------------------------------------------------------------------------------


def test_relative_folder_and_changed_directory(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with talking(log_dir="logs", on_error="restart") as env:
        monkeypatch.chdir(tmp_path / "other")
        break_in_step(env, 0, exits)
    assert len(headers(tmp_path / "logs" / "worker-0.log")) == 2
    assert [*(tmp_path / "other").iterdir()] == []


def test_folder_that_is_deleted_during_a_run(tmp_path, caplog):
    """It is made again; if that is not possible, the run goes on without."""
    folder = tmp_path / "logs"
    with talking(log_dir=folder, on_error="restart") as env:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        assert "The end of its log" not in break_in_step(env, 0, exits)["error"]
        assert headers(folder / "worker-0.log") == [("0", "0-1", env.call("pid")[0])]
        (folder / "worker-0.log").unlink()
        folder.rmdir()
        folder.write_text("in its place")
        break_in_step(env, 0, exits)
        assert "worker 0 (env 0-1) has no log" in caplog.text
        assert env.step([ACTIONS] * 3)[4][0].get("__common__") is None


@pytest.mark.parametrize("backend", ["process", "serial", "auto"])
@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("file", ValueError, "cannot create this folder"),
        ("file/below", ValueError, "cannot create this folder"),
        ("nul\0", ValueError, "cannot create this folder"),
        ("taken", ValueError, r"cannot append to .*worker-7\.log"),
        ("/proc/none", ValueError, "cannot create this folder"),
        (b"logs", TypeError, "must be the path of a folder"),
        (3, TypeError, "must be the path of a folder"),
    ],
)
def test_wrong_values_are_refused(path, error, text, backend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "worker-7.log").mkdir(parents=True)
    (tmp_path / "notes").mkdir()

    def constructor(env_id: int, seed: int) -> Fragile:
        return Fragile({}, tmp_path / "notes", env_id=env_id, seed=seed)

    with pytest.raises(error, match=text):
        ParallelEnv([constructor] * 2, backend=backend, log_dir=path)
    assert [*(tmp_path / "notes").iterdir()] == []


def test_folder_without_permission(tmp_path, monkeypatch):
    """The permission is taken away by a patch, since it does not count for root."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ValueError, match="cannot write"):
        ParallelEnv([Talking], log_dir=tmp_path)


@pytest.fixture
def victim(tmp_path) -> Path:
    path = tmp_path / "victim"
    path.write_text("mine\n")
    return path


@has_owners
@pytest.mark.parametrize("backend", ["process", "hybrid", "serial", "auto"])
def test_log_that_is_a_link_of_another_user_is_refused(backend, tmp_path, victim, monkeypatch):
    log = tmp_path / "logs" / "worker-0.log"
    log.parent.mkdir()
    log.symlink_to(victim)
    give_away(log, monkeypatch)
    with pytest.raises(
        ValueError, match=r"log_dir=.*worker-0\.log is a link of the user .*; remove it, or pass another"
    ):
        ParallelEnv([Talking] * 2, backend=backend, log_dir=log.parent)
    assert victim.read_text() == "mine\n"


@has_owners
def test_log_of_another_user_in_a_shared_folder_is_refused(tmp_path, monkeypatch):
    """In a folder like /tmp, as that user could read what workers print; in a folder of a team, both append to it."""
    log = tmp_path / "logs" / "worker-0.log"
    log.parent.mkdir()
    log.touch(0o666)
    give_away(log, monkeypatch)
    log.parent.chmod(0o1777)
    with pytest.raises(ValueError, match=r"worker-0\.log is a file of the user .*; remove it, or pass another folder"):
        ParallelEnv([Talking] * 2, log_dir=log.parent)
    log.parent.chmod(0o775)
    with talking(log_dir=log.parent):
        pass
    assert len(headers(log)) == 1


@has_owners
def test_folder_behind_a_link_of_another_user_is_refused(tmp_path, monkeypatch):
    """In a folder where every user may put it."""
    (tmp_path / "own").mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    link = tmp_path / "shared" / "link"
    link.symlink_to(tmp_path / "own")
    give_away(link, monkeypatch)
    for folder in (link, link / "below"):
        with pytest.raises(ValueError, match=r"log_dir=.*link is a link of the user .*; pass a folder of your own"):
            ParallelEnv([Talking] * 2, log_dir=folder)
    assert [*(tmp_path / "own").iterdir()] == []


@has_owners
def test_link_that_another_user_puts_there_during_a_run(start_method, tmp_path, victim, monkeypatch, caplog):
    """The next worker has no log, and no error quotes what the link leads to."""
    log = tmp_path / "logs" / "worker-0.log"
    with talking(log_dir=log.parent, on_error="restart", **arguments(start_method)) as env:
        log.unlink()
        log.symlink_to(victim)
        give_away(log, monkeypatch)
        assert "The end of its log" not in break_in_step(env, 0, exits)["error"]
        assert "worker 0 (env 0-1) has no log file" in caplog.text
        assert "worker-0.log is a link of the user" in caplog.text
        env.call("say", "hello", env_ids=[0])
    assert victim.read_text() == "mine\n"


def test_own_link_is_followed(start_method, tmp_path):
    """To a file on another disk, say."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").symlink_to(tmp_path / "far.log")
    (tmp_path / "far.log").touch()
    with talking(log_dir=tmp_path / "logs", on_error="restart", **arguments(start_method)) as env:
        assert quoted(break_in_step(env, 0, exits)["error"], tmp_path / "logs" / "worker-0.log") == ["about to exit"]
    assert len(headers(tmp_path / "far.log")) == 2


# -- other backends and states of the program --------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_backends_without_processes_warn(backend, tmp_path, capfd):
    with (
        pytest.warns(RuntimeWarning, match="has no effect with backend"),
        talking(log_dir=tmp_path, backend=backend) as env,
    ):
        env.call("say", "hello", env_ids=[0])
    assert capfd.readouterr().out == "hello\n"
    assert [*tmp_path.iterdir()] == []


def test_auto_backend_takes_processes(tmp_path):
    with ParallelEnv([Talking] * 2, backend="auto", log_dir=tmp_path) as env:
        env.reset()
        assert env.plan is not None
        assert env.plan["arguments"]["backend"] == "process"
        env.call("say", "hello", env_ids=[0])
    assert (tmp_path / "worker-0.log").read_text().endswith("hello\n")


def test_make_passes_it_on(tmp_path):
    with make(Talking, 2, num_workers=2, log_dir=tmp_path):
        pass
    assert len(headers(tmp_path / "worker-1.log")) == 1


UNUSUAL = """
import os, sys
sys.path.insert(0, {tests!r})
from helpers.start_methods import arguments
from simulators.counting import ACTIONS
from simulators.talking import Talking
from marl_parallel import ParallelEnv

def exits():
    os._exit(7)

os.mkdir({gone!r})
os.chdir({gone!r})
os.rmdir({gone!r})
with ParallelEnv([Talking], log_dir={folder!r}, on_error="restart", **arguments({start_method!r})) as env:
    if os.fork() == 0:  # a child that never uses it, and outlives it
        os._exit(0)
    os.wait()
    env.reset()
    env.set_attr("fault", [exits])
    env.step([ACTIONS])
    env.call("say_in_all_ways", "hello")
"""


@linux_only
def test_closed_streams_removed_directory_and_forked_child(start_method, tmp_path):
    """As in `python train.py <&- >&- 2>&-`."""
    folder = tmp_path / "logs"
    text = UNUSUAL.format(tests=str(TESTS), gone=str(tmp_path / "gone"), folder=str(folder), start_method=start_method)
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", text]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    lines = (folder / "worker-0.log").read_text().splitlines()
    assert [bool(HEADER.fullmatch(line)) for line in lines] == [True, True] + [False] * 5
    assert lines[2] == "hello stdout"


@pytest.mark.rest
@linux_only
@pytest.mark.whole_machine
def test_logs_leave_nothing_open(start_method, tmp_path):
    """Not even while workers run: this process opens a log only while a worker starts."""

    def cycle() -> None:
        with talking(log_dir=tmp_path, on_error="restart", **arguments(start_method)) as env:
            break_in_step(env, 0, exits)
            assert not [path for path in HeldResources.now().descriptors if path.startswith(str(tmp_path))]

    cycle()
    before = HeldResources.now()
    for _ in range(3):
        cycle()
    nothing_more(before)
