"""Nothing outlives what it works for: not a worker its parent or its fork server, not a child its worker.

The same for a whole `ParallelEnv` is tested in `test_parents`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import TESTS
from helpers.launching import Stage, linux_only, server_of
from helpers.processes import alive, all_gone, wait_for
from helpers.start_methods import CONTEXTS

pytestmark = [pytest.mark.release_independent, linux_only]


@pytest.mark.parametrize("end", ["kill", "SIGKILL", "stopped", "close"])
def test_children_die_with_their_worker(stage: Stage, end: str) -> None:
    bystander = stage.launch("waits")
    stage.hear()
    worker = stage.launch("has_children")
    pids = stage.hear()["pids"]
    assert all(alive(pid) for pid in [worker, *pids[1:]])
    if end == "kill":
        stage.kill(worker)
    elif end == "SIGKILL":
        os.kill(worker, signal.SIGKILL)
    elif end == "stopped":
        os.killpg(worker, signal.SIGSTOP)
        stage.kill(worker)
    else:
        stage.launcher.close()
        assert all_gone(bystander, worker, *pids)
        return
    assert stage.death() == (worker, -signal.SIGKILL)
    wait_for(lambda: all_gone(worker, *pids))
    assert alive(bystander)


PARENT = """
import json, os, sys, time
sys.path.insert(0, {tests!r})
from marl_parallel.backends.launching import Launcher
from marl_parallel.backends.memory import Block, Semaphore
read_end, write_end = os.pipe()
block = Block()
Semaphore(block.allocate(4096), 0).init(0)
launcher = Launcher({context!r}, entry="helpers.launch_targets", wake=block, threads=1)
pids = []
for target in {targets!r}:
    os.environ["TARGET"] = target
    pids.append(launcher.launch(0, [write_end]).pid)
    heard = json.loads(os.read(read_end, 10000))
    pids += heard.get("pids", [])[1:]
print(json.dumps([launcher._server.pid, *pids]), flush=True)
{then}
"""


def run_parent(
    context: str, targets: list[str], then: str = "time.sleep(300)"
) -> tuple[subprocess.Popen[str], list[int]]:
    program = PARENT.format(tests=str(TESTS), context=context, targets=targets, then=then)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    line = parent.stdout.readline()
    return parent, json.loads(line)


def reaped(parent: subprocess.Popen[str]) -> int:
    assert parent.stdout is not None
    parent.stdout.close()
    return parent.wait(10)


@pytest.mark.parametrize("context", CONTEXTS)
def test_killed_parent_leaves_nothing(context: str) -> None:
    parent, pids = run_parent(context, ["has_children", "busy", "holds_gil"])
    parent.kill()
    reaped(parent)
    wait_for(lambda: all_gone(*pids))


@pytest.mark.parametrize("context", CONTEXTS)
def test_stopped_workers_die_with_their_parent(context: str) -> None:
    parent, pids = run_parent(context, ["waits", "busy"])
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


@pytest.mark.parametrize("context", CONTEXTS)
def test_parent_that_forked_leaves_nothing(context: str) -> None:
    then = "if os.fork() == 0: os.close(1); time.sleep(2); os._exit(0)\ntime.sleep(300)"
    parent, pids = run_parent(context, ["waits", "busy"], then)
    time.sleep(0.2)
    parent.kill()
    reaped(parent)
    wait_for(lambda: all_gone(*pids))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    "then", ["", "sys.exit(0)", "del launcher; time.sleep(0)", "keep = [launcher]; keep.append(keep)"]
)
def test_parent_that_just_ends_leaves_nothing(context: str, then: str) -> None:
    parent, pids = run_parent(context, ["waits", "busy"], then)
    assert reaped(parent) == 0
    wait_for(lambda: all_gone(*pids))


def test_killed_server_takes_its_workers_along(served: Stage) -> None:
    workers = [served.launch("busy"), served.launch("has_children")]
    heard = [served.hear(), served.hear()]
    children = next(values["pids"] for values in heard if "pids" in values)
    server = server_of(served.launcher)
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: all_gone(*workers))
    deaths: list[tuple[int, int]] = []
    wait_for(lambda: len(deaths) == len(workers) or deaths.extend(served.deaths()))
    assert sorted(deaths) == sorted((pid, -signal.SIGKILL) for pid in workers)
    wait_for(lambda: all_gone(server, *workers, *children))
    fresh = served.launch("waits")
    assert served.hear()["ready"] == fresh
    assert server_of(served.launcher) != server


def test_stopped_server_does_not_keep_close_from_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marl_parallel.backends.launching._ENDS_WITHIN_S", 0.3)
    with contextlib.closing(Stage("forkserver")) as stage:
        worker = stage.launch("has_children")
        pids = stage.hear()["pids"][1:]
        os.kill(server_of(stage.launcher), signal.SIGSTOP)
        start = time.monotonic()
        stage.launcher.close()
        assert time.monotonic() - start < 1.0
        wait_for(lambda: all_gone(worker, *pids))


@pytest.mark.parametrize("context", CONTEXTS)
def test_killed_keeper_takes_its_worker_along(context: str) -> None:
    """The process between launcher and worker, which only the out-of-memory killer and the like can end."""
    with contextlib.closing(Stage(context)) as stage:
        bystander = stage.launch("waits")
        stage.hear()
        worker = stage.launch("busy")
        stage.hear()
        keeper = psutil.Process(worker).ppid()
        assert keeper != os.getpid()
        os.kill(keeper, signal.SIGKILL)
        assert stage.death() == (worker, -signal.SIGKILL)
        wait_for(lambda: all_gone(keeper, worker))
        assert alive(bystander)
        fresh = stage.launch("waits")
        assert stage.hear()["ready"] == fresh


@pytest.mark.parametrize("context", CONTEXTS)
def test_killed_keeper_leaves_nothing(context: str) -> None:
    """Not even processes that have left the worker's group and cleared their environment."""
    with contextlib.closing(Stage(context)) as stage:
        bystander = stage.launch("waits")
        stage.hear()
        worker = stage.launch("has_children")
        pids = stage.hear()["pids"][1:]
        assert all(alive(pid) for pid in pids)
        os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
        assert stage.death() == (worker, -signal.SIGKILL)
        wait_for(lambda: all_gone(worker, *pids))
        assert alive(bystander)


@pytest.mark.parametrize("context", CONTEXTS)
def test_children_are_gone_when_a_death_is_reported(context: str) -> None:
    """A new worker may need the port or file that a child of the old one holds."""
    with contextlib.closing(Stage(context)) as stage:
        for _ in range(3):
            worker = stage.launch("has_children")
            pids = stage.hear()["pids"][1:]
            stage.kill(worker)
            assert stage.death() == (worker, -signal.SIGKILL)
            assert all_gone(worker, *pids)


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_killed_server_and_keeper_leave_nothing(context: str) -> None:
    """What shows the variable of the environment is found, whatever else has been killed."""
    with contextlib.closing(Stage(context)) as stage:
        worker = stage.launch("has_children")
        marked = stage.hear()["pids"][1:3]  # in the worker's group, and in a session of its own
        for pid in (server_of(stage.launcher), psutil.Process(worker).ppid()):
            os.kill(pid, signal.SIGKILL)
        wait_for(stage.deaths)
        wait_for(lambda: all_gone(worker, *marked))
