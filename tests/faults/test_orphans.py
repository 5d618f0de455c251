"""Processes end with their parent: workers with the caller or the fork server, children with their worker.

The same for a whole `ParallelEnv` is tested in `test_parent_deaths`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import TESTS
from helpers.launching import LauncherHarness, linux_only, server_of
from helpers.processes import alive, all_gone, wait_for
from helpers.signals import SIGKILL

pytestmark = [pytest.mark.release_independent, pytest.mark.starts_anew, linux_only]


@pytest.mark.parametrize("end", ["kill", "SIGKILL", "stopped", "close"])
def test_children_die_with_their_worker(harness: LauncherHarness, end: str) -> None:
    bystander = harness.launch("waits")
    harness.receive()
    worker = harness.launch("has_children")
    pids = harness.receive()["pids"]
    assert all(alive(pid) for pid in [worker, *pids[1:]])
    if end == "kill":
        harness.kill(worker)
    elif end == "SIGKILL":
        os.kill(worker, SIGKILL)
    elif end == "stopped":
        os.killpg(worker, signal.SIGSTOP)
        harness.kill(worker)
    else:
        harness.launcher.close()
        assert all_gone(bystander, worker, *pids)
        return
    assert harness.death() == (worker, -SIGKILL)
    wait_for(lambda: all_gone(worker, *pids))
    assert alive(bystander)


GUARDED = """
import os, sys, time
from marl_parallel.backends.server import _arm
os.setsid()
guard, guard_end = os.pipe()
when = sys.argv[1]
copy = os.dup(guard_end) if when == "copied" else -1
if when != "armed":
    os.close(guard_end)
_arm(guard)
if when == "armed":
    os.close(guard_end)
if when == "copied":
    sys.exit(3)
time.sleep(60)
"""


@pytest.mark.parametrize(("when", "exitcode"), [("before", -SIGKILL), ("armed", -SIGKILL), ("copied", 3)])
def test_a_guard_that_closes(when: str, exitcode: int) -> None:
    """Before it is armed, too: its owner may die while a worker starts."""
    done = subprocess.run([sys.executable, "-c", GUARDED, when], timeout=50)
    assert done.returncode == exitcode


PARENT = """
import json, os, sys, time
sys.path.insert(0, {tests!r})
from marl_parallel.backends.launching import Launcher
from marl_parallel.backends.memory import Block, Semaphore
read_end, write_end = os.pipe()
block = Block()
Semaphore(block.allocate(4096), 0).init(0)
launcher = Launcher(entry="helpers.launch_targets", wake=block, threads=1)
pids = []
for target in {targets!r}:
    os.environ["TARGET"] = target
    pids.append(launcher.launch(0, [write_end]).pid)
    heard = json.loads(os.read(read_end, 10000))
    pids += heard.get("pids", [])[1:]
print(json.dumps([launcher._server.pid, *pids]), flush=True)
{then}
"""


def run_parent(targets: list[str], then: str = "time.sleep(300)") -> tuple[subprocess.Popen[str], list[int]]:
    program = PARENT.format(tests=str(TESTS), targets=targets, then=then)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    line = parent.stdout.readline()
    return parent, json.loads(line)


def reaped(parent: subprocess.Popen[str]) -> int:
    assert parent.stdout is not None
    parent.stdout.close()
    return parent.wait(10)


def test_killed_parent_leaves_nothing() -> None:
    parent, pids = run_parent(["has_children", "busy", "holds_gil"])
    parent.kill()
    reaped(parent)
    wait_for(lambda: all_gone(*pids))


def test_stopped_workers_die_with_their_parent() -> None:
    parent, pids = run_parent(["waits", "busy"])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # the fork server, too: the kernel alone has to see to it
    parent.kill()
    reaped(parent)
    workers = pids[-2:]
    try:
        wait_for(lambda: all_gone(*workers))
    finally:
        os.kill(pids[0], signal.SIGCONT)
    wait_for(lambda: all_gone(*pids))


def test_parent_that_forked_leaves_nothing() -> None:
    then = "if os.fork() == 0: os.close(1); time.sleep(2); os._exit(0)\ntime.sleep(300)"
    parent, pids = run_parent(["waits", "busy"], then)
    time.sleep(0.2)
    parent.kill()
    reaped(parent)
    wait_for(lambda: all_gone(*pids))


@pytest.mark.parametrize(
    "then", ["", "sys.exit(0)", "del launcher; time.sleep(0)", "keep = [launcher]; keep.append(keep)"]
)
def test_parent_that_exits_leaves_nothing(then: str) -> None:
    parent, pids = run_parent(["waits", "busy"], then)
    assert reaped(parent) == 0
    wait_for(lambda: all_gone(*pids))


def test_workers_die_with_their_server(harness: LauncherHarness) -> None:
    workers = [harness.launch("busy"), harness.launch("has_children")]
    received = [harness.receive(), harness.receive()]
    children = next(values["pids"] for values in received if "pids" in values)
    server = server_of(harness.launcher)
    os.kill(server, SIGKILL)
    wait_for(lambda: all_gone(*workers))
    deaths: list[tuple[int, int]] = []
    wait_for(lambda: len(deaths) == len(workers) or deaths.extend(harness.deaths()))
    assert sorted(deaths) == sorted((pid, -SIGKILL) for pid in workers)
    wait_for(lambda: all_gone(server, *workers, *children))
    fresh = harness.launch("waits")
    assert harness.receive()["ready"] == fresh
    assert server_of(harness.launcher) != server


def test_close_with_a_stopped_server(harness: LauncherHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marl_parallel.backends.launching._ENDS_WITHIN_S", 0.3)
    worker = harness.launch("has_children")
    pids = harness.receive()["pids"][1:]
    os.kill(server_of(harness.launcher), signal.SIGSTOP)
    start = time.monotonic()
    harness.launcher.close()
    assert time.monotonic() - start < 1.0
    wait_for(lambda: all_gone(worker, *pids))


def test_worker_dies_with_its_keeper(harness: LauncherHarness) -> None:
    """The keeper is the process between launcher and worker; for example the out-of-memory killer ends it."""
    bystander = harness.launch("waits")
    harness.receive()
    worker = harness.launch("busy")
    harness.receive()
    keeper = psutil.Process(worker).ppid()
    assert keeper != os.getpid()
    os.kill(keeper, SIGKILL)
    assert harness.death() == (worker, -SIGKILL)
    wait_for(lambda: all_gone(keeper, worker))
    assert alive(bystander)
    fresh = harness.launch("waits")
    assert harness.receive()["ready"] == fresh


def test_killed_keeper_leaves_nothing(harness: LauncherHarness) -> None:
    """Not even processes that left the worker's group and cleared their environment."""
    bystander = harness.launch("waits")
    harness.receive()
    worker = harness.launch("has_children")
    pids = harness.receive()["pids"][1:]
    assert all(alive(pid) for pid in pids)
    os.kill(psutil.Process(worker).ppid(), SIGKILL)
    assert harness.death() == (worker, -SIGKILL)
    wait_for(lambda: all_gone(worker, *pids))
    assert alive(bystander)


def test_children_are_gone_when_a_death_is_reported(harness: LauncherHarness) -> None:
    """A new worker may need a port or file that a child of the old one holds."""
    for _ in range(3):
        worker = harness.launch("has_children")
        pids = harness.receive()["pids"][1:]
        harness.kill(worker)
        assert harness.death() == (worker, -SIGKILL)
        assert all_gone(worker, *pids)


def test_killed_server_and_keeper_leave_nothing(harness: LauncherHarness) -> None:
    """Processes with the environment variable are found even then."""
    worker = harness.launch("has_children")
    marked = harness.receive()["pids"][1:3]  # in the worker's group, and in a session of its own
    for pid in (server_of(harness.launcher), psutil.Process(worker).ppid()):
        os.kill(pid, SIGKILL)
    wait_for(harness.deaths)
    wait_for(lambda: all_gone(worker, *marked))
