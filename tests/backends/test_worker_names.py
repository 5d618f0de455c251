"""The names of worker processes, also in `multiprocessing`, keepers and the fork server in lists of processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.launching import linux_only
from helpers.start_methods import arguments
from simulators.counting import ACTIONS
from simulators.failing import killed_by
from simulators.talking import Talking

from marl_parallel import ParallelEnv
from marl_parallel.backends import interpreter

pytestmark = [pytest.mark.release_independent, linux_only]


def name_of(pid: int) -> tuple[str, str]:
    """What `ps` shows as the command line, and the short name of `top`."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    return line, Path(f"/proc/{pid}/comm").read_text().strip()


def test_names_of_workers(start_method):
    """Also of replaced ones. The command line that the simulator sees stays the caller's."""
    expected = [("marl_parallel worker 0 (env 0-1)", "marl worker 0")] * 2
    expected += [("marl_parallel worker 1 (env 2)", "marl worker 1")]
    with ParallelEnv([Talking] * 3, num_workers=2, on_error="restart", **arguments(start_method)) as env:
        env.reset()
        first = env.call("pid")
        assert [*map(name_of, first)] == expected
        assert env.call(lambda _: sys.argv) == (sys.argv,) * 3
        env.set_attr("fault", [killed_by(signal.SIGKILL)] * 2, env_ids=[1, 2])
        env.step([ACTIONS] * 3)
        second = env.call("pid")
        assert not {*first} & {*second}
        assert [*map(name_of, second)] == expected


def identity(_: object) -> tuple[str, tuple[int, ...], int, bool]:
    process, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    assert parent is not None
    return process.name, process._identity, parent.pid, parent.is_alive()


def test_identity_in_multiprocessing(start_method):
    """No two workers have the same, nor has a worker in the place of another, or a child of the caller's own."""
    known = set()
    with ParallelEnv([Talking] * 3, num_workers=2, on_error="restart", **arguments(start_method)) as env:
        env.reset()
        for _ in range(2):
            first, same, other = env.call(identity)
            assert first == same
            for name, numbers, parent, alive in (first, other):
                assert numbers not in known
                known.add(numbers)
                assert name == f"ParallelEnvWorker-{':'.join(map(str, numbers))}"
                assert (parent, alive) == (os.getpid(), True)
            env.set_attr("fault", [killed_by(signal.SIGKILL)] * 2, env_ids=[1, 2])
            env.step([ACTIONS] * 3)
        assert multiprocessing.get_context("spawn").Process()._identity not in known


def key(_: object = None) -> bytes:
    """What opens the managers of a program and its processes."""
    return bytes(multiprocessing.current_process().authkey)


@pytest.mark.starts_anew
def test_key_of_the_program(start_method, monkeypatch):
    """Workers have it, and so do those that replace them. Neither command lines nor environment variables show it."""
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, command: list[str], **more: Any) -> None:
            started.append(repr((command, more)))
            super().__init__(command, **more)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with ParallelEnv([Talking] * 2, num_workers=2, on_error="restart", **arguments(start_method)) as env:
        env.reset()
        assert env.call(key) == (key(),) * 2
        env.set_attr("fault", [killed_by(signal.SIGKILL)], env_ids=[1])
        env.step([ACTIONS] * 2)
        assert env.call(key) == (key(),) * 2
        started += [Path(f"/proc/{pid}/environ").read_bytes() for pid in env.call("pid")]
    assert len(started) == {"forkserver": 1, "portable": 3}[start_method] + 2
    for shown in (key().hex(), repr(key())[2:-1]):
        assert not any(shown in str(one) for one in started)


def test_names_of_keepers_and_fork_server():
    with ParallelEnv([Talking] * 2, num_workers=2) as env:
        for worker, pid in enumerate(env.call("pid")):
            keeper = psutil.Process(pid).parent()
            assert name_of(keeper.pid) == (f"marl_parallel keeper of worker {worker}", f"marl keeper {worker}")
            assert name_of(keeper.parent().pid) == ("marl_parallel fork server", "marl forkserver")


@pytest.mark.parametrize(
    ("worker", "share", "name"),
    [
        (3, range(12, 16), "marl_parallel worker 3 (env 12-15)"),
        (0, [12], "marl_parallel worker 0 (env 12)"),
        (4, (), "marl_parallel worker 4"),
        (5, (0, 2, 3), "marl_parallel worker 5 (env 0,2-3)"),
    ],
)
def test_name_of_a_share(worker, share, name):
    assert interpreter.worker_name(worker, share) == (name, f"marl worker {worker}")
