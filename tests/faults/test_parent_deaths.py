"""Scripts with worker processes of both kinds end, are killed or interrupted, and leave nothing behind.

Other ways to run the caller's code are tested in `test_scripts`, launchers alone in `test_orphans`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers import ROOT, TESTS
from helpers.processes import gone, wait_for, workers
from simulators.failing import Fragile

pytestmark = [pytest.mark.release_independent, pytest.mark.starts_anew]


SCRIPT = """
    import functools, os, sys, time
    print("read once", flush=True)
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from simulators.failing import Fragile
    from marl_parallel import ParallelEnv
    from marl_parallel.backends.spawn import PortableProcessBackend

    class Mine(Fragile):
        def step(self, actions):
            helper(self, "busy")
            return super().step(actions)

        def reset(self, seed=None, options=None):
            helper(self, "reset anew" if seed in (7, 8) else "reset")
            return super().reset(seed, options)

    def helper(env, now):
        if {then!r} == now:
            (env.notes / f"busy-{{env.env_id}}").touch()
            while True:
                pass

    if {then!r} == "starting":
        faults = {{"constructor": functools.partial(time.sleep, 60)}}
    else:
        faults = {{}}
    arguments = {arguments}
    env = ParallelEnv([lambda env_id, seed: Mine(faults, Path({notes!r}), env_id=env_id, seed=seed)] * 2, **arguments)
    env.reset()
    if {then!r} == "reset anew":
        env.reset(seed=7)
    rewards = env.step([{{"a": 0, "b": 1}}] * 2)[1]
    print(rewards[1]["a"], flush=True)
"""


def script(start_method: str, notes: Path, then: str = "end") -> str:
    expression = "dict(backend=PortableProcessBackend())" if start_method == "portable" else "{}"
    return textwrap.dedent(SCRIPT).format(tests=str(TESTS), notes=str(notes), then=then, arguments=expression)


@pytest.mark.parametrize("how", ["script", "-c", "-"])
def test_constructors_of_main(how, start_method, tmp_path):
    """Without guard and module; the script is executed once."""
    text = script(start_method, tmp_path)
    file = tmp_path / "script.py"
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, *{"-c": ["-c", text], "-": ["-"], "script": [str(file)]}[how]],
        input=text if how == "-" else None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "read once\n1.0\n")
    assert len([*tmp_path.glob("closed-*")]) == 2
    assert gone(workers(tmp_path))


@contextlib.contextmanager
def running(text: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the script in its own process group, as a shell does."""
    command = [sys.executable, "-c", text]
    environ = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        command, env=environ, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        try:
            yield parent
        finally:
            parent.kill()


def await_files(notes: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + 20
    while len([*notes.glob(pattern)]) < count:
        assert time.monotonic() < deadline, f"no {pattern}"
        time.sleep(0.01)


def test_notes_are_complete_when_they_are_found(tmp_path):
    """The tests here read notes of processes that are just starting."""
    env, left = Fragile({}, tmp_path, env_id=0, seed=0), threading.Event()

    def write() -> None:
        while not left.is_set():
            env.note("started")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(2000):
            assert workers(tmp_path) == set()  # apart from this process
    finally:
        left.set()
        thread.join()


@pytest.mark.parametrize("then", ["starting", "busy"])
def test_killed_parent(then, start_method, tmp_path, short_folder):
    with running(script(start_method, tmp_path, then), short_folder) as parent:
        await_files(tmp_path, {"starting": "started-*", "busy": "busy-*"}[then], 2)
        pids = workers(tmp_path)
        assert len(pids) == 2
        parent.kill()
        assert gone([parent.pid, *pids])
    assert os.listdir(short_folder) == []


def test_killed_parent_before_its_workers_start(short_folder, tmp_path):
    with running(script("portable", tmp_path), short_folder) as parent:
        wait_for(lambda: len(psutil.Process(parent.pid).children()) == 2, 20)
        children = psutil.Process(parent.pid).children()
        parent.kill()
        assert gone([parent.pid, *(child.pid for child in children)])
    assert os.listdir(short_folder) == []


@pytest.mark.parametrize("then", ["busy", "reset anew"])
def test_interrupted_parent(then, start_method, tmp_path, short_folder):
    """Ctrl-C reaches the whole process group: one traceback, the parent's."""
    with running(script(start_method, tmp_path, then), short_folder) as parent:
        await_files(tmp_path, "busy-*", 2)
        os.killpg(parent.pid, signal.SIGINT)
        _, err = parent.communicate(timeout=20)
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert gone(workers(tmp_path))
    assert os.listdir(short_folder) == []
