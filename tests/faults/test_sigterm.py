"""SIGTERM to all processes of a job, as batch systems send it: the main program decides, and its workers survive.

The pool's own SIGTERM still ends them, and what simulators start handles the signal as usual.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers import ROOT, TESTS
from helpers.files import write_whole
from helpers.launching import LauncherHarness, linux_only, server_of
from helpers.processes import alive, gone, wait_for
from helpers.start_methods import arguments
from simulators.failing import Fragile
from simulators.saved import Voyage

from marl_parallel import ParallelEnv
from marl_parallel.backends import worker_processes

pytestmark = [
    pytest.mark.release_independent,
    pytest.mark.starts_anew,
    pytest.mark.skipif(sys.platform == "win32", reason="no such signals"),
]

# Steps, and saves after the step in which SIGTERM came; or goes on from what was saved.
SCRIPT = """
import json, os, pickle, signal, subprocess, sys, time
from pathlib import Path
folder, start_method, doing = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path.insert(0, {tests!r})
from helpers.start_methods import arguments
from simulators.saved import Voyage
from marl_parallel import ParallelEnv

class Slow(Voyage):
    def __init__(self, seed, env_id):
        super().__init__(seed, env_id)
        self.env_id = env_id

    def step(self, actions):
        if doing != "resume" and self.time == 3:
            if doing == "die":
                with open(folder / f"child-{{self.env_id}}", "w") as file:
                    file.write(str(subprocess.Popen(["sleep", "60"]).pid))
            (folder / f"in step {{self.env_id}}").touch()
            while not (folder / "go on").exists():
                time.sleep(0.01)
        return super().step(actions)

came = []
if doing == "save":
    signal.signal(signal.SIGTERM, lambda *_: (came.append(1), (folder / "handled").touch()))
saved, rewards = folder / "saved", []
with ParallelEnv([Slow] * 2, num_workers=2, on_error="restart", **arguments(start_method)) as env:
    if doing == "resume":
        env.load_state(pickle.loads(saved.read_bytes()))
    else:
        env.reset(seed=3)
    while len(rewards) < 5:
        rewards.append([one["boat"] for one in env.step([{{"boat": 0, "kite": 0}}] * 2)[1]])
        if came:
            saved.write_bytes(pickle.dumps(env.save_state()))
            break
    print(json.dumps([rewards, env.stats().restarts]))
"""


def command(folder: Path, start_method: str, doing: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT.format(tests=str(TESTS)), str(folder), start_method, doing]


@contextlib.contextmanager
def in_the_fourth_step(
    folder: Path, start_method: str, doing: str
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Run the script until both environments are in their step; the process, and all that it has started."""
    with subprocess.Popen(
        command(folder, start_method, doing), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        try:
            wait_for(lambda: program.poll() is not None or len([*folder.glob("in step *")]) == 2, 60.0)
            yield program, psutil.Process(program.pid).children(recursive=True)
        finally:
            program.kill()


def children() -> set[psutil.Process]:
    """All that this process has started: other tests may have left some running, for later ones."""
    return {*psutil.Process().children(recursive=True)}


def terminate(processes: Iterable[psutil.Process]) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()


def uninterrupted(steps: int) -> list[list[float]]:
    with ParallelEnv([Voyage] * 2, backend="serial") as env:
        env.reset(seed=3)
        actions = [{"boat": 0, "kite": 0}] * 2
        return [[one["boat"] for one in env.step(actions)[1]] for _ in range(steps)]


def test_program_that_saves_and_goes_on(start_method: str, tmp_path: Path) -> None:
    """It finishes its step and saves; a second program goes on as if nothing had happened."""
    with in_the_fourth_step(tmp_path, start_method, "save") as (program, others):
        # Besides two workers, a resource tracker; a server and two keepers.
        assert len(others) == {"forkserver": 6, "portable": 3}[start_method]
        terminate([*others, psutil.Process(program.pid)])
        wait_for((tmp_path / "handled").exists, 60.0)
        (tmp_path / "go on").touch()
        out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (0, "")
    first, restarts = json.loads(out)
    assert (len(first), restarts) == (4, 0)
    resumed = subprocess.run(
        command(tmp_path, start_method, "resume"), capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    second, restarts = json.loads(resumed.stdout)
    assert restarts == 0
    np.testing.assert_array_equal(first + second, uninterrupted(9))
    assert gone(one.pid for one in others)


def test_program_without_a_handler(start_method: str, tmp_path: Path) -> None:
    """It dies of the signal, and everything that it has started ends with it."""
    with in_the_fourth_step(tmp_path, start_method, "die") as (program, others):
        programs = [int(path.read_text()) for path in tmp_path.glob("child-*")]
        assert len(programs) == 2
        assert all(alive(pid) for pid in programs)
        own = [one for one in others if one.pid not in programs]  # the end of these is the test
        terminate([*own, psutil.Process(program.pid)])
        program.communicate(timeout=60)
    assert program.returncode == -signal.SIGTERM
    assert gone([*(one.pid for one in own), *programs])


def test_sigterm_while_workers_start(start_method: str) -> None:
    """Also before they can handle it."""
    started, before = threading.Event(), children()

    def send() -> None:
        while not started.is_set():
            terminate(children() - before)
            time.sleep(0.001)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with ParallelEnv([Voyage] * 2, num_workers=2, **arguments(start_method)) as env:
            env.reset()
            started.set()
            sender.join()
            env.step([{"boat": 0, "kite": 0}] * 2)
    finally:
        started.set()
        sender.join()


@linux_only
def test_sigterm_to_worker_keeper_and_server(harness: LauncherHarness) -> None:
    pid = harness.launch("waits")
    harness.receive()
    keeper = psutil.Process(pid).ppid()
    for one in (pid, keeper, server_of(harness.launcher)):
        os.kill(one, signal.SIGTERM)
    other = harness.launch("waits")  # which the server answers after the signal
    assert harness.receive()["ready"] == other
    assert harness.wait_gone([pid, other], timeout=0.2) == {pid, other}
    assert alive(keeper)


class WithChildren(Voyage):
    """A simulator with processes of its own, and one with a handler of its own."""

    def reset(self, **keywords: Any) -> Any:
        self.steps = 0
        return super().reset(**keywords)

    def exit_codes(self) -> list[int | None]:
        """Of children that were terminated as soon as they had been started."""
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        codes: list[int | None] = [program.wait(30)]
        for _ in range(10):
            codes.append(self.exit_code_of_fork())
        thread = threading.Thread(target=lambda: codes.append(self.exit_code_of_fork()))
        thread.start()
        thread.join(60)
        return codes

    def exit_code_of_fork(self) -> int | None:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        child.start()
        child.terminate()
        child.join(30)
        return child.exitcode

    def is_blocked(self) -> bool:
        return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def handle(self, folder: Path) -> int:
        """Go on after the first SIGTERM, and end with the second one; each writes a file."""
        came: list[Path] = []

        def handler(number: int, frame: Any) -> None:
            came.append(folder / f"signal {len(came)}")
            came[-1].touch()
            if len(came) == 2:
                os._exit(0)

        signal.signal(signal.SIGTERM, handler)
        return os.getpid()


def test_processes_of_simulators(start_method: str) -> None:
    """They die of SIGTERM, as without workers; and the worker survives it all the same."""
    before = children()
    with ParallelEnv([WithChildren] * 2, num_workers=2, **arguments(start_method)) as env:
        for codes in env.call("exit_codes"):
            assert codes == [-signal.SIGTERM] * 12
        assert env.call("is_blocked") == (False, False)
        terminate(children() - before)
        env.reset()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that get the pool's SIGTERM have a minute to end before SIGKILL."""
    monkeypatch.setattr(worker_processes, "_TERMINATED_WITHIN_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_handler_of_a_simulator(start_method: str, tmp_path: Path) -> None:
    """It counts for signals from outside and for the end of its worker."""
    with ParallelEnv([WithChildren], num_workers=1, **arguments(start_method)) as env:
        (pid,) = env.call("handle", tmp_path)
        os.kill(pid, signal.SIGTERM)
        wait_for((tmp_path / "signal 0").exists)
        env.reset()
        assert not (tmp_path / "signal 1").exists()
        env.close(terminate=True)
        assert (tmp_path / "signal 1").exists()
        assert gone([pid])


@pytest.mark.usefixtures("patient")
def test_own_sigterm_ends_workers(start_method: str, tmp_path: Path) -> None:
    """Idle, or in a call: they do not wait for the SIGKILL that follows."""

    def hang() -> None:
        write_whole(tmp_path / "hangs", "")
        time.sleep(300)

    faults = [{}, {"step": hang}]
    constructors = [lambda env_id, seed: Fragile(faults[env_id], tmp_path, env_id=env_id, seed=seed)] * 2
    env = ParallelEnv(constructors, num_workers=2, **arguments(start_method))
    env.reset()
    env.send([{"a": 0, "b": 0}] * 2)
    wait_for((tmp_path / "hangs").exists)
    began = time.monotonic()
    env.close(terminate=True)
    assert time.monotonic() - began < 40.0
    assert gone({int(path.read_text()) for path in tmp_path.glob("started-*")})
