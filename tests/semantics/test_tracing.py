"""Timelines: their contents, agreement with `stats()`, and what a trace contains if the run fails."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError
from helpers.owners import give_away, has_owners
from helpers.processes import gone
from simulators.failing import Fragile, hard_exit

from marl_parallel import ParallelEnv, WorkerCrashed
from marl_parallel.core import worker_status as tracing
from marl_parallel.vector import PettingZooVecEnv

pytestmark = pytest.mark.release_independent

ACTIONS = {"a": 0, "b": 0}
TOLERANCE_US = 0.01  # numbers in the file are rounded


def slices(path: Path, lane: int) -> list[dict[str, Any]]:
    """The slices of one lane, in order."""
    events = json.loads(path.read_text())["traceEvents"]
    return sorted(
        (event for event in events if event["ph"] == "X" and event["tid"] == lane), key=lambda event: event["ts"]
    )


def names(path: Path) -> dict[int, str]:
    """The names of the lanes."""
    events = json.loads(path.read_text())["traceEvents"]
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def fragile(folder: Path, count: int = 4, length: int = 3, **faults: Any) -> list[Any]:
    return [functools.partial(Fragile, faults if i == 1 else {}, folder, 5, length=length) for i in range(count)]


def test_one_lane_per_worker_and_one_for_the_parent(two_worker_setup, build, tmp_path):
    file = tmp_path / "run.json"
    env = build(fragile(tmp_path), two_worker_setup, trace=file)
    before = env.stats()
    env.reset()
    for _ in range(7):
        env.step([ACTIONS] * 4)
    after = env.stats()
    env.close()
    assert names(file) == {0: "your program", 1: "worker 0 (environments [0, 1])", 2: "worker 1 (environments [2, 3])"}
    for lane, share in ((1, (0, 1)), (2, (2, 3))):
        saved = slices(file, lane)
        counts = Counter((one["name"], one["args"].get("env_id")) for one in saved)
        for env_id in share:
            assert counts["step", env_id] == 7
            assert counts["reset", env_id] == 3  # one explicit reset, two automatic ones
            assert counts["close", env_id] == 1
        assert counts["transport", None] > 0
        assert counts["waiting", None] > 0
        for one, following in pairwise(saved):  # nothing overlaps
            assert one["ts"] + one["dur"] <= following["ts"] + TOLERANCE_US
        inside = sum(one["dur"] for one in saved if one["name"] in ("step", "reset"))
        counted = after.workers[lane - 1].simulator_s - before.workers[lane - 1].simulator_s
        assert inside / 1e6 == pytest.approx(counted, abs=1e-6)
    own = Counter(one["name"] for one in slices(file, 0))
    assert own["write actions"] == own["read results"] - 1 == own["waiting for step"] == 7
    assert own["waiting for reset"] == 1


def test_trace_of_part_of_a_run(backend_setup, build, tmp_path):
    file = tmp_path / "some.json"
    env = build(fragile(tmp_path, length=100), backend_setup)
    env.reset()
    for _ in range(3):
        env.step([ACTIONS] * 4)
    env.start_trace(str(file))
    assert not file.exists()
    for _ in range(5):
        env.step([ACTIONS] * 4)
    assert env.stop_trace() == file
    before = file.read_bytes()
    for _ in range(2):
        env.step([ACTIONS] * 4)
    env.close()
    assert file.read_bytes() == before
    assert Counter(one["name"] for one in slices(file, 1))["step"] == 2 * 5


def test_no_slices_after_the_end(backend_setup, build, tmp_path):
    """Calls between two traces are in neither."""
    env = build(fragile(tmp_path), backend_setup)
    env.start_trace(tmp_path / "a.json")
    env.stop_trace()
    env.reset()
    env.start_trace(tmp_path / "b.json")
    env.step([ACTIONS] * 4)
    env.stop_trace()
    for file, steps in (("a.json", 0), ("b.json", 1)):
        own = Counter(one["name"] for one in slices(tmp_path / file, 0))
        assert own["waiting for reset"] == 0
        assert own["waiting for step"] == steps


def test_send_and_recv(concurrent_setup, build, tmp_path):
    file = tmp_path / "async.json"
    env = build(fragile(tmp_path), concurrent_setup, trace=file)
    env.reset()
    env.send([ACTIONS] * 4)
    with pytest.raises(AlreadyPendingCallError):
        env.stop_trace()
    env.recv()
    env.close()
    own = Counter(one["name"] for one in slices(file, 0))
    assert own["send step"] == own["waiting"] == 1
    assert Counter(one["name"] for one in slices(file, 2))["step"] == 2


def test_trace_of_a_run_that_ends_with_a_fault(tmp_path):
    """The trace has all slices of the other workers, none of the worker that died."""

    def exit_late():
        time.sleep(0.2)  # so that the other worker has begun its step, which the fault would cancel
        hard_exit()

    file = tmp_path / "fault.json"
    env = ParallelEnv(fragile(tmp_path, 2, 100, step=exit_late), num_workers=2, trace=file)
    env.reset()
    for _ in range(5):
        env.step([ACTIONS] * 2)
    with pytest.raises(WorkerCrashed):
        env.step([ACTIONS] * 2)
    assert Counter(one["name"] for one in slices(file, 1))["step"] == 6
    assert slices(file, 2) == []


def test_trace_of_a_replaced_worker(tmp_path):
    file = tmp_path / "replaced.json"
    constructors = fragile(tmp_path, 2, 100, step=hard_exit)
    with ParallelEnv(constructors, num_workers=2, on_error="restart", trace=file) as env:
        env.reset()
        for _ in range(8):
            env.step([ACTIONS] * 2)
    assert Counter(one["name"] for one in slices(file, 1))["step"] == 8
    assert Counter(one["name"] for one in slices(file, 2))["step"] == 2  # after the sixth, it was another
    (mark,) = (event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "i")
    assert (mark["name"], mark["tid"]) == ("replaced", 2)


def test_trace_has_a_maximum_size(monkeypatch, tmp_path):
    monkeypatch.setattr(tracing, "MOST_SLICES", 10)
    file = tmp_path / "long.json"
    with ParallelEnv(fragile(tmp_path, 2), backend="serial", num_workers=1, trace=file) as env:
        env.reset()
        for _ in range(20):
            env.step([ACTIONS] * 2)
    saved = [one for one in slices(file, 1) if one["name"] not in ("waiting", "transport")]
    assert 0 < len(saved) <= 10
    assert len(slices(file, 0)) == 10


def test_trace_path_is_not_writable(tmp_path, caplog):
    for path in (tmp_path, tmp_path / "nowhere" / "run.json"):
        with pytest.raises(ValueError, match="cannot write"):
            ParallelEnv(fragile(tmp_path), trace=path)
    with pytest.raises(TypeError, match="trace must be the path"):
        ParallelEnv(fragile(tmp_path), trace=True)
    with pytest.raises(RuntimeError, match="no trace is being recorded"), ParallelEnv(fragile(tmp_path)) as env:
        env.stop_trace()
    folder = tmp_path / "goes"
    folder.mkdir()
    with caplog.at_level(logging.WARNING), ParallelEnv(fragile(tmp_path), trace=folder / "run.json") as env:
        with pytest.raises(RuntimeError, match="is being recorded already"):
            env.start_trace(tmp_path / "other.json")
        folder.rmdir()
    assert "the trace could not be written" in caplog.text


def test_times_match_the_clock(tmp_path):
    """A slice of a sleeping step has the right start and duration."""
    file = tmp_path / "clock.json"
    nap = functools.partial(time.sleep, 0.05)
    with ParallelEnv([functools.partial(Fragile, {"step": nap}, tmp_path)], num_workers=1, trace=file) as env:
        env.reset()
        env.step([ACTIONS])
    (step,) = (one for one in slices(file, 1) if one["name"] == "step")
    (wait,) = (one for one in slices(file, 0) if one["name"] == "waiting for step")
    assert step["dur"] >= 50_000
    assert wait["ts"] <= step["ts"] + TOLERANCE_US
    assert step["ts"] + step["dur"] <= wait["ts"] + wait["dur"] + TOLERANCE_US


def kill_worker_of(env: ParallelEnv, env_id: int) -> None:
    """Kill the worker of an environment, unnoticed by the parent."""
    (pid,) = env.call(_process_of, env_ids=[env_id])
    os.kill(pid, signal.SIGKILL)
    assert gone([pid])


def _process_of(simulator: Any) -> int:
    return os.getpid()


@pytest.mark.parametrize("which", [0, 1])
def test_worker_dies_at_the_start_or_end_of_a_trace(which, tmp_path):
    """No trace is started partially; at its end, the slices of the other worker are written."""
    env = ParallelEnv(fragile(tmp_path, 2, 100), num_workers=2, on_error="restart")
    file, other = tmp_path / "run.json", 2 - which
    with env:
        env.reset()
        kill_worker_of(env, which)
        with pytest.raises(WorkerCrashed):
            env.start_trace(file)
        env.step([ACTIONS] * 2)
        with pytest.raises(RuntimeError, match="no trace is being recorded"):
            env.stop_trace()
        env.start_trace(file)
        env.step([ACTIONS] * 2)
        kill_worker_of(env, which)
        with pytest.raises(WorkerCrashed):
            env.stop_trace()
        env.stop_trace()
        assert Counter(one["name"] for one in slices(file, other))["step"] == 1
        assert not [one for one in slices(file, which + 1) if one["name"] == "step"]
        env.step([ACTIONS] * 2)
        env.start_trace(file)
        env.stop_trace()
        assert all(one["name"] not in ("step", "constructor") for lane in (1, 2) for one in slices(file, lane))


def test_relative_trace_path(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with ParallelEnv(fragile(tmp_path), backend="serial", trace="run.json"):
        monkeypatch.chdir("elsewhere")
    assert slices(tmp_path / "run.json", 1)


def test_trace_file_is_written_atomically(tmp_path, monkeypatch):
    file, link = tmp_path / "run.json", tmp_path / "link.json"
    file.write_text("the last one")
    link.symlink_to(file)
    with ParallelEnv(fragile(tmp_path), backend="serial", trace=link) as env:
        with monkeypatch.context() as patch:
            patch.setattr(tracing.json, "dump", _write_half)
            with pytest.raises(OSError, match="no space"):
                env.stop_trace()
        assert file.read_text() == "the last one"
        assert not [*tmp_path.glob(".*")]
        env.start_trace(link)
    assert link.is_symlink()
    assert slices(file, 1)
    with ParallelEnv(fragile(tmp_path), backend="serial", trace="/dev/null"):
        pass
    assert Path("/dev/null").is_char_device()


def _write_half(_: Any, file: Any) -> None:
    file.write("{")
    raise OSError("no space left")


@has_owners
@pytest.mark.parametrize("backend", ["process", "serial", "thread", "hybrid"])
def test_trace_does_not_follow_links_of_other_users(backend, tmp_path, monkeypatch, caplog):
    """Not at the path, whether the link is there from the start or appears in the run; and not beside it."""
    victim, file = tmp_path / "victim", tmp_path / "run.json"
    victim.write_text("mine")
    for name in (".run.json", f".run.json-{os.getpid()}"):  # where it might be written first
        (tmp_path / name).symlink_to(victim)
        give_away(tmp_path / name, monkeypatch)
    with ParallelEnv(fragile(tmp_path), num_workers=2, backend=backend, trace=file) as env:
        env.reset()
    assert slices(file, 1)
    file.unlink()
    with caplog.at_level(logging.WARNING), ParallelEnv(fragile(tmp_path), backend=backend, trace=file):
        file.symlink_to(victim)
        give_away(file, monkeypatch)
    assert "the trace could not be written" in caplog.text
    assert "run.json is a link of the user with the number" in caplog.text
    with pytest.raises(ValueError, match=r"cannot write a file there: .*run\.json is a link of"):
        ParallelEnv(fragile(tmp_path), backend=backend, trace=file)
    with ParallelEnv(fragile(tmp_path), backend=backend) as env, pytest.raises(ValueError, match="is a link of"):
        env.start_trace(file)
    assert victim.read_text() == "mine"


@has_owners
def test_second_trace_at_the_same_path(tmp_path):
    """It replaces the first one, and does not keep permissions that somebody has given to that."""
    file = tmp_path / "run.json"
    mask = os.umask(0o027)
    try:
        for mode in (0o666, 0o600):
            with ParallelEnv(fragile(tmp_path), backend="serial", trace=file) as env:
                env.reset()
            assert slices(file, 1)
            assert file.stat().st_mode & 0o777 == 0o640
            file.chmod(mode)
    finally:
        os.umask(mask)


@pytest.mark.parametrize("traced_first", [True, False])
def test_facade_slices_are_in_the_parents_lane(traced_first, tmp_path):
    file = tmp_path / "facade.json"
    env = ParallelEnv(fragile(tmp_path), backend="serial", trace=file if traced_first else None)
    facade = PettingZooVecEnv(env)
    if not traced_first:
        env.start_trace(file)
    facade.reset()
    for _ in range(7):  # with ends of episodes, which are read one by one
        facade.step({agent: np.zeros(4, np.int64) for agent in ACTIONS})
    assert env.stop_trace() == file
    own = Counter(one["name"] for one in slices(file, 0))
    assert own["write actions"] == own["read results"] - 1 == 7
    env.close()
