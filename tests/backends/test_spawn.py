"""The portable backend: alone, and on systems without the other start methods."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import cloudpickle
import pytest
from gymnasium.vector import AutoresetMode
from helpers import ROOT, TESTS

from marl_parallel.backends import spawn
from marl_parallel.backends.spawn import PortableProcessBackend
from marl_parallel.core.messages import Lost, Message, Plan, Reply, Request

pytestmark = pytest.mark.release_independent


# By itself


@pytest.fixture
def portable() -> Iterator[PortableProcessBackend]:
    backend = PortableProcessBackend()
    backend.start([range(1), range(1, 2)], 8)
    yield backend
    assert backend.stop(0.0) == []


def received(backend: PortableProcessBackend, count: int) -> list[tuple[int, Reply | Lost]]:
    replies: list[tuple[int, Reply | Lost]] = []
    while len(replies) < count:
        new = backend.wait(10.0)
        assert new
        replies += new
    return replies


def test_large_messages_in_both_directions(portable):
    """Requests are sent while a large reply has not been read."""

    def constructor(text: str = "x" * 1_000_000) -> None:
        raise ValueError(text)

    plan = Plan({7: cloudpickle.dumps(constructor)}, {7: 0}, AutoresetMode.SAME_STEP, cloudpickle.dumps(None))
    for _ in range(3):
        portable.post(dict.fromkeys((0, 1), Request(Message.ACCESS, (7,), plan)))
    replies = received(portable, 6)
    assert sorted(worker for worker, _ in replies) == [0, 0, 0, 1, 1, 1]
    assert all(isinstance(reply, Reply) and len(reply.failures[7].summary) > 1_000_000 for _, reply in replies)


def test_each_death_is_reported_once(portable):
    portable.interrupt()
    assert portable.wait() == []
    assert "spawn.py" in portable.stack(0)
    portable.post({1: Request(Message.CLOSE)})
    ((worker, reply),) = received(portable, 1)
    assert (worker, reply.message) == (1, Message.CLOSE)
    portable.post(dict.fromkeys((0, 1), Request(Message.CLOSE)))
    replies = dict(received(portable, 2))
    assert portable.stack(1) == ""
    assert replies[1] == Lost(0, "")
    assert portable.wait(0.05) == []
    portable.post({1: Request(Message.CLOSE)})
    assert portable.wait(1.0) == [(1, Lost(0, ""))]


def test_replacement_that_dies_during_its_start(portable, monkeypatch):
    """It counts as lost, and can be replaced again."""
    wait_started = spawn._WorkerProcess.wait_started

    def too_late(process: spawn._WorkerProcess, deadline: float) -> None:
        process.signal(signal.SIGKILL)
        wait_started(process, deadline)

    with monkeypatch.context() as patched:
        patched.setattr(spawn._WorkerProcess, "wait_started", too_late)
        portable.replace(1)
    portable.post({1: Request(Message.CLOSE)})
    assert received(portable, 1) == [(1, Lost(-signal.SIGKILL, ""))]
    portable.replace(1)
    portable.post({1: Request(Message.CLOSE)})
    ((worker, reply),) = received(portable, 1)
    assert (worker, reply.message) == (1, Message.CLOSE)


def start_with(monkeypatch, program):
    """Workers run this program instead of their own."""
    monkeypatch.setattr(spawn, "_PROGRAM", program)


def test_worker_that_cannot_start(monkeypatch, capfd):
    start_with(monkeypatch, "import no_such_module")
    backend = PortableProcessBackend()
    with pytest.raises(RuntimeError, match="worker 0 ended with exit code 1"):
        backend.start([range(1), range(1, 2)], 8)
    assert "no_such_module" in capfd.readouterr().err
    backend.post({1: Request(Message.CLOSE)})
    assert backend.wait(1.0) == [(1, Lost(None, ""))]
    assert backend.stop(0.0) == []


def test_worker_that_does_not_start_in_time(monkeypatch):
    start_with(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr("marl_parallel.backends.spawn._STARTED_WITHIN_S", 0.2)
    with pytest.raises(TimeoutError, match="worker 0"):
        PortableProcessBackend().start([range(1), range(1, 2)], 8)


STOPS_IN_START = """
import os, signal
from multiprocessing import connection
connection.{kind}({handle}).recv()
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_worker_that_stops_during_its_start(monkeypatch):
    """It has received its first message and sends nothing."""
    start_with(monkeypatch, STOPS_IN_START)
    monkeypatch.setattr("marl_parallel.backends.spawn._STARTED_WITHIN_S", 5.0)
    with pytest.raises(TimeoutError, match="worker 0"):
        PortableProcessBackend().start([range(1), range(1, 2)], 8)


# On other systems


# Removes features that other systems lack from every interpreter that has this on its path.
ELSEWHERE = """
import os, signal, socket, sys
sys.modules["fcntl"] = None
lacking = {
    os: "fork memfd_create pidfd_open waitid sched_getaffinity register_at_fork setsid".split(),
    signal: "pidfd_send_signal sigwaitinfo".split(),
    socket: "SOCK_SEQPACKET".split(),
}
for module, names in lacking.items():
    for name in names:
        vars(module).pop(name, None)
"""
ON_IT = """
import sys
sys.path.insert(0, {tests!r})
from unittest import mock
from marl_parallel import ParallelEnv
assert not any(name.startswith("marl_parallel.backends.memory") for name in sys.modules)
from simulators.deterministic import Hunt
with mock.patch("marl_parallel.backends.memory.has_semaphores", return_value=False):
    for context in (None, "spawn"):
        with ParallelEnv([Hunt] * 2, num_workers=2, context=context) as env:
            observations, _ = env.reset()
            env.step([{{agent: env.action_space[agent].sample() for agent in acting}} for acting in env.acting])
            assert type(env.runner.pool.backend).__name__ == "PortableProcessBackend"
            print(len(set(env.call("pid"))))
    for context in ("forkserver", "fork"):
        try:
            ParallelEnv([Hunt], context=context)
        except ValueError as error:
            print(error)
"""


def test_other_operating_systems(tmp_path):
    """Simulated: neither imports nor a batch need anything specific to Linux."""
    (tmp_path / "sitecustomize.py").write_text(ELSEWHERE)
    done = subprocess.run(
        [sys.executable, "-c", ON_IT.format(tests=str(TESTS))],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["2", "2"]
    assert ["needs Linux" in line for line in lines[2:]] == [True, True]
