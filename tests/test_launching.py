"""Starting, watching and ending workers: each promise of the launchers, and each way of dying."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from marl_parallel.backends import descendants, threads
from marl_parallel.backends.contexts import open_launcher
from marl_parallel.backends.launching import Launcher
from marl_parallel.backends.memory import Block
from marl_parallel.backends.semaphores import Semaphore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these launchers are Linux's")

CONTEXTS = ["forkserver", "spawn", "fork"]


class Stage:
    """A launcher, the semaphore it posts, and a pipe that workers write to."""

    def __init__(self, context: str, limit: int | None = 1) -> None:
        block = Block.create(4096)
        self.wake = Semaphore(block.buffer, 64)
        self.wake.init()
        self.launcher = open_launcher(context, entry="launch_targets", wake=(block, 64), threads=limit)
        self.block = block
        read_end, self.write_end = os.pipe()
        self.said = os.fdopen(read_end)

    def launch(self, target: str, index: int = 0) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TARGET", target)
            return self.launcher.launch(index, [self.write_end])

    def hear(self) -> Any:
        return json.loads(self.said.readline())

    def death(self) -> tuple[int, int]:
        """The next death, which the context "forkserver" announces by the semaphore."""
        if type(self.launcher).__name__ == "ForkServerLauncher":
            assert self.wake.take(timeout=10)
        return wait_for(self.launcher.deaths)[0]

    def close(self) -> None:
        self.launcher.close()
        self.block.close_fd()
        self.said.close()
        os.close(self.write_end)


def wait_for(condition: Callable[[], Any], timeout: float = 10.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.001)
    return value


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_gone(*pids: int) -> bool:
    return not any(alive(pid) for pid in pids)


def server_of(launcher: Launcher) -> int:
    return launcher._server._process.pid  # type: ignore[attr-defined]


@pytest.fixture(params=CONTEXTS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with contextlib.closing(Stage(request.param)) as stage:
        yield stage


@pytest.fixture
def served() -> Iterator[Stage]:
    with contextlib.closing(Stage("forkserver")) as stage:
        yield stage


@pytest.fixture(params=["forkserver", "spawn"])
def executed(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Workers that are, or descend from, a program of their own."""
    with contextlib.closing(Stage(request.param)) as stage:
        yield stage


# What a worker is like


def test_worker_finds_what_its_parent_has(stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage.launch("waits")  # whatever is set now, the next worker must not get by chance
    stage.hear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_LATER", "\udcff")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(sys, "argv", ["script", "--flag"])
    monkeypatch.syspath_prepend(str(tmp_path))
    stage.launch("tells", index=3)
    told = stage.hear()
    assert told["index"] == 3
    assert told["path"] == sys.path
    assert told["argv"] == ["script", "--flag"]
    assert told["cwd"] == str(tmp_path)
    for name in ("TARGET", descendants.MARKER, *threads.variables(1)):
        told["environ"].pop(name)
    expected = {name: value for name, value in os.environ.items() if name not in threads.variables(1)}
    assert told["environ"] == expected


def test_worker_is_a_process_of_its_own(stage: Stage) -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stage.launch("tells")
    finally:
        signal.signal(signal.SIGINT, previous)
    told = stage.hear()
    assert told["leads"]
    assert told["interrupt"]
    assert told["blocked"] == []
    assert told["stdin"] == os.devnull
    assert told["main"] == []
    assert told["main_file"] is None


@pytest.mark.parametrize(("context", "guards"), [("forkserver", 2), ("spawn", 1)])
def test_worker_inherits_no_descriptor(context: str, guards: int) -> None:
    with contextlib.closing(Stage(context)) as stage:
        stage.launch("tells")
        # stdio, the crash file, the guards, what it was given, and the listing itself
        assert len(stage.hear()["fds"]) == 3 + 1 + guards + 1 + 1


def test_output_goes_to_the_parents(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    pid = stage.launch("tells")
    assert stage.death() == (pid, 0)
    assert "printed by the worker" in capfd.readouterr().out


def test_stdout_without_descriptor(
    served: Stage, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    served.launch("tells")
    served.death()
    assert "printed by the worker" in capfd.readouterr().out


def test_large_environment(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        monkeypatch.setenv(f"LARGE_{number}", "x" * 50_000)
    pid = stage.launch("returns")
    assert stage.death() == (pid, 0)


def test_many_descriptors(served: Stage) -> None:
    os.environ["TARGET"] = "waits"
    try:
        assert served.launcher.launch(0, [served.write_end] * 240) == served.hear()["ready"]
        with pytest.raises(ValueError, match="240 file descriptors"):
            served.launcher.launch(0, [served.write_end] * 241)
    finally:
        del os.environ["TARGET"]


@pytest.mark.parametrize("limit", [1, 2, None])
@pytest.mark.parametrize("context", CONTEXTS)
def test_threads_of_numerical_libraries(context: str, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in threads.variables(1):
        monkeypatch.delenv(name, raising=False)
    with contextlib.closing(Stage(context, limit)) as stage:
        stage.launch("tells")
        told = stage.hear()
    expected = len(os.sched_getaffinity(0)) if limit is None else limit
    assert told["blas_threads"] == expected
    if context != "fork":
        assert told["threads"] == expected
    values = {told["environ"].get(name) for name in threads.variables(1)}
    assert values == {None if limit is None else str(limit)}


# How it ends


def test_return_runs_what_the_interpreter_runs(stage: Stage) -> None:
    pid = stage.launch("returns", index=4)
    assert stage.hear() == {"thread": 4}
    assert stage.hear() == {"atexit": 4}
    assert stage.death() == (pid, 0)


def test_exception(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    pid = stage.launch("raises")
    assert stage.death() == (pid, 1)
    assert "ValueError: raised by the worker" in capfd.readouterr().err


@pytest.mark.parametrize(("target", "exitcode"), [("exits", 7), ("sys_exits", 5)])
def test_exit(stage: Stage, target: str, exitcode: int) -> None:
    pid = stage.launch(target)
    assert stage.death() == (pid, exitcode)
    assert stage.launcher.crash_report(pid) == ""


def test_crash(stage: Stage) -> None:
    pid = stage.launch("segfaults")
    assert stage.death() == (pid, -signal.SIGSEGV)
    report = stage.launcher.crash_report(pid)
    assert "Segmentation fault" in report
    assert "_segfaults" in report


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_signal(stage: Stage, number: int) -> None:
    pid = stage.launch("waits")
    stage.hear()
    os.kill(pid, number)
    assert stage.death() == (pid, -number)
    assert stage.launcher.deaths() == []


def test_a_signal_that_c_code_has_laid_hands_on(stage: Stage) -> None:
    """As SDL does; Python does not know of it, and what is ignored stays so in a new program."""
    ignored = ctypes.c_void_p(1)  # SIG_IGN
    ctypes.CDLL(None).signal(signal.SIGTERM, ignored)
    try:
        pid = stage.launch("waits")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stage.hear()
    os.kill(pid, signal.SIGTERM)
    assert stage.death() == (pid, -signal.SIGTERM)


def test_death_is_announced_at_once(served: Stage) -> None:
    pid = served.launch("waits")
    served.hear()
    assert not served.wake.try_take()
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert served.wake.take(timeout=10)
    assert time.monotonic() - start < 1.0
    assert served.launcher.deaths() == [(pid, -signal.SIGKILL)]


def test_every_death_is_told_once(stage: Stage) -> None:
    pids = [stage.launch("waits", index) for index in range(5)]
    for pid in pids[:4]:
        stage.launcher.kill(pid)
    assert stage.launcher.wait_gone(pids, timeout=1.0) == {pids[4]}
    assert sorted(stage.launcher.deaths()) == sorted((pid, -signal.SIGKILL) for pid in pids[:4])
    assert stage.launcher.deaths() == []
    stage.launcher.terminate(pids[4])
    assert stage.launcher.wait_gone(pids, timeout=5.0) == set()
    assert stage.launcher.deaths() == [(pids[4], -signal.SIGTERM)]
    stage.launcher.kill(pids[4])


def test_kill_right_after_launch(stage: Stage) -> None:
    for _ in range(10):
        pid = stage.launch("waits")
        stage.launcher.kill(pid)
        assert stage.death() == (pid, -signal.SIGKILL)


def test_wait_gone_keeps_to_its_timeout(stage: Stage) -> None:
    pid = stage.launch("waits")
    start = time.monotonic()
    assert stage.launcher.wait_gone([pid], timeout=0.2) == {pid}
    assert 0.2 <= time.monotonic() - start < 1.0
    assert stage.launcher.wait_gone([pid], timeout=0) == {pid}


# Where it hangs


@pytest.mark.parametrize(
    ("target", "where"),
    [("busy", "_busy"), ("waits", "_waits"), ("locked", "_locked"), ("holds_gil", "_holds_gil")],
)
def test_stack_of_the_living(stage: Stage, target: str, where: str) -> None:
    pid = stage.launch(target)
    stage.hear()
    for _ in range(2):
        stack = stage.launcher.stack(pid)
        assert where in stack
        assert stack.count("most recent call first") == 1
    assert stage.launcher.crash_report(pid) == ""
    assert stage.launcher.deaths() == []


def test_stack_right_after_launch(stage: Stage) -> None:
    for _ in range(10):
        assert "most recent call first" in stage.launcher.stack(stage.launch("waits"))


def test_stack_of_the_stopped(stage: Stage) -> None:
    pid = stage.launch("waits")
    stage.hear()
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    assert "_waits" in stage.launcher.stack(pid)


def test_stack_of_one_that_blocks_signals(served: Stage) -> None:
    pid = served.launch("blocks_signals")
    served.hear()
    assert "_blocks_signals" in served.launcher.stack(pid, timeout=0.1)
    assert served.death() == (pid, -signal.SIGABRT)


def test_stack_of_the_dead(stage: Stage) -> None:
    pid = stage.launch("exits")
    stage.death()
    assert stage.launcher.stack(pid) == ""


# What is left


@pytest.mark.parametrize("end", ["kill", "SIGKILL", "stopped", "close"])
def test_children_die_with_their_worker(executed: Stage, end: str) -> None:
    bystander = executed.launch("waits")
    executed.hear()
    worker = executed.launch("has_children")
    pids = executed.hear()["pids"]
    assert all(alive(pid) for pid in [worker, *pids[1:]])
    if end == "kill":
        executed.launcher.kill(worker)
    elif end == "SIGKILL":
        os.kill(worker, signal.SIGKILL)
    elif end == "stopped":
        os.killpg(worker, signal.SIGSTOP)
        executed.launcher.kill(worker)
    else:
        executed.launcher.close()
        assert all_gone(bystander, worker, *pids)
        return
    assert executed.death() == (worker, -signal.SIGKILL)
    wait_for(lambda: all_gone(worker, *pids), timeout=1.0)
    assert alive(bystander)


def test_forked_workers_children_die_too_where_they_can_be_found() -> None:
    with contextlib.closing(Stage("fork")) as stage:
        worker = stage.launch("has_children")
        _, plain, executed, forked, daemon = stage.hear()["pids"]
        stage.launcher.kill(worker)
        assert stage.death() == (worker, -signal.SIGKILL)
        wait_for(lambda: all_gone(worker, plain, executed), timeout=1.0)
        for pid in (forked, daemon):
            os.kill(pid, signal.SIGKILL)


PARENT = """
import json, os, sys, time
sys.path.insert(0, {tests!r})
from marl_parallel.backends.contexts import open_launcher
read_end, write_end = os.pipe()
launcher = open_launcher({context!r}, entry="launch_targets", wake=None, threads=1)
pids = []
for target in {targets!r}:
    os.environ["TARGET"] = target
    pids.append(launcher.launch(0, [write_end]))
    heard = json.loads(os.read(read_end, 10000))
    pids += heard.get("pids", [])[1:]
server = getattr(launcher, "_server", None)
print(json.dumps([server and server._process.pid, *pids]), flush=True)
{then}
"""


def run_parent(
    context: str, targets: list[str], then: str = "time.sleep(300)"
) -> tuple[subprocess.Popen[str], list[int]]:
    program = PARENT.format(tests=str(Path(__file__).parent), context=context, targets=targets, then=then)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    line = parent.stdout.readline()
    return parent, [pid for pid in json.loads(line) if pid is not None]


def reaped(parent: subprocess.Popen[str]) -> int:
    assert parent.stdout is not None
    parent.stdout.close()
    return parent.wait(10)


def test_killed_parent_leaves_nothing() -> None:
    parent, pids = run_parent("forkserver", ["has_children", "busy", "holds_gil"])
    parent.kill()
    reaped(parent)
    wait_for(lambda: all_gone(*pids), timeout=2.0)


def test_killed_parent_leaves_no_forked_worker() -> None:
    parent, pids = run_parent("fork", ["waits", "busy", "holds_gil"])
    parent.kill()
    reaped(parent)
    wait_for(lambda: all_gone(*pids), timeout=2.0)


@pytest.mark.parametrize("context", CONTEXTS)
def test_stopped_workers_die_with_their_parent(context: str) -> None:
    parent, pids = run_parent(context, ["waits", "busy"])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # the fork server, too: the kernel alone has to see to it
    parent.kill()
    reaped(parent)
    workers = pids[-2:]
    try:
        wait_for(lambda: all_gone(*workers), timeout=2.0)
    finally:
        if context == "forkserver":
            os.kill(pids[0], signal.SIGCONT)
    wait_for(lambda: all_gone(*pids), timeout=2.0)


@pytest.mark.parametrize("context", CONTEXTS)
def test_parent_that_forked_leaves_nothing(context: str) -> None:
    then = "if os.fork() == 0: os.close(1); time.sleep(2); os._exit(0)\ntime.sleep(300)"
    parent, pids = run_parent(context, ["waits", "busy"], then)
    time.sleep(0.2)
    parent.kill()
    reaped(parent)
    wait_for(lambda: all_gone(*pids), timeout=1.0)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    "then", ["", "sys.exit(0)", "del launcher; time.sleep(0)", "keep = [launcher]; keep.append(keep)"]
)
def test_parent_that_just_ends_leaves_nothing(context: str, then: str) -> None:
    parent, pids = run_parent(context, ["waits", "busy"], then)
    assert reaped(parent) == 0
    wait_for(lambda: all_gone(*pids), timeout=2.0)


def test_killed_server_takes_its_workers_along(served: Stage) -> None:
    workers = [served.launch("busy"), served.launch("has_children")]
    heard = [served.hear(), served.hear()]
    children = next(values["pids"] for values in heard if "pids" in values)
    server = server_of(served.launcher)
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: all_gone(*workers), timeout=1.0)
    deaths: list[tuple[int, int]] = wait_for(served.launcher.deaths)
    assert sorted(deaths) == sorted((pid, -signal.SIGKILL) for pid in workers)
    wait_for(lambda: all_gone(server, *workers, *children), timeout=1.0)
    fresh = served.launch("waits")
    assert served.hear()["ready"] == fresh
    assert server_of(served.launcher) != server


def test_stopped_server_does_not_keep_close_from_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marl_parallel.backends.forkserver._ENDS_WITHIN", 0.3)
    with contextlib.closing(Stage("forkserver")) as stage:
        worker = stage.launch("has_children")
        pids = stage.hear()["pids"][1:]
        os.kill(server_of(stage.launcher), signal.SIGSTOP)
        start = time.monotonic()
        stage.launcher.close()
        assert time.monotonic() - start < 1.0
        wait_for(lambda: all_gone(worker, *pids), timeout=1.0)


def test_server_that_cannot_start(capfd: pytest.CaptureFixture[str]) -> None:
    launcher = open_launcher("forkserver", entry="no_such_module", wake=None, threads=1)
    with pytest.raises(RuntimeError, match="exit code 1"):
        launcher.launch(0, [])
    launcher.close()
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_unknown_context() -> None:
    with pytest.raises(ValueError, match='"forkserver", "spawn" or "fork"'):
        open_launcher("teleport", entry="launch_targets")


# Closing


def test_close_twice_and_use_afterwards(stage: Stage) -> None:
    pid = stage.launch("segfaults")
    stage.death()
    other = stage.launch("waits")
    stage.launcher.close()
    stage.launcher.close()
    assert all_gone(other)
    assert "Segmentation fault" in stage.launcher.crash_report(pid)
    assert stage.launcher.deaths() == []
    stage.launcher.kill(other)
    with pytest.raises(RuntimeError, match="closed"):
        stage.launch("waits")


@pytest.mark.parametrize("context", CONTEXTS)
def test_close_before_anything_was_launched(context: str) -> None:
    open_launcher(context, entry="launch_targets", wake=None, threads=1).close()


def test_close_by_another_thread_ends_a_launch(served: Stage) -> None:
    served.launch("waits")
    os.kill(server_of(served.launcher), signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (server_of(served.launcher), signal.SIGCONT))
    closer = threading.Timer(0.1, served.launcher.close)
    timer.start()
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        served.launch("waits")
    timer.join()
    closer.join()


def test_forked_child_touches_nothing(stage: Stage) -> None:
    worker = stage.launch("waits")
    stage.hear()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            stage.launcher.kill(worker)
            stage.launcher.close()
            stage.launcher.__del__()
            code = 0 if stage.launcher.deaths() == [] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert alive(worker)
    assert stage.launcher.deaths() == []
    other = stage.launch("waits")
    assert stage.hear()["ready"] == other


@pytest.mark.parametrize("context", CONTEXTS)
def test_nothing_leaks(context: str) -> None:
    def held() -> tuple[int, int, list[str]]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), os.listdir("/dev/shm")

    def cycle(number: int) -> None:
        stage = Stage(context)
        pids = [stage.launch("waits", index) for index in range(2)]
        if number % 2:
            stage.launcher.kill(pids[0])
            stage.death()
        stage.close()
        assert all_gone(*pids)

    cycle(0)
    before = held()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for number in range(50):
        cycle(number)
    assert held() == before
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children
