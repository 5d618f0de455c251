"""Every way in which worker processes start: the same results, the same errors, nothing left behind.

What the launchers promise in detail is tested in `test_launching`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from comparison import assert_same
from faults import Fragile, SimulatorError, hard_exit, killed_by, raising
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from scenarios import record, scenario

from marl_parallel import EnvError, ParallelEnv, WorkerCrashed, WorkerTimeout
from marl_parallel.backends import portable_process, portable_worker
from marl_parallel.backends.portable import PortableProcessBackend
from marl_parallel.runtime.messages import Lost, Message, Reply, Request
from marl_parallel.runtime.worker import Plan

TESTS = str(Path(__file__).parent)
WAYS = ["forkserver", "spawn", "fork", "portable"]


def arguments(way: str) -> dict[str, Any]:
    return {"backend": PortableProcessBackend()} if way == "portable" else {"context": way}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def build(way: str) -> Iterator[Callable[..., ParallelEnv]]:
    """Makes a `ParallelEnv` with two workers that start in this way."""
    with contextlib.ExitStack() as stack:

        def make(constructors: list[Any], mode: Any = True, **more: Any) -> ParallelEnv:
            env = ParallelEnv(constructors, mode, **{"num_workers": 2, **arguments(way), **more})
            stack.callback(env.close, terminate=True)
            return env

        yield make


def fleet(notes: Path, count: int = 4, **faults: Any) -> list[Any]:
    """Environments of which the third one breaks."""
    return [functools.partial(Fragile, faults if index == 2 else {}, notes) for index in range(count)]


def step(env: ParallelEnv) -> Any:
    return env.step([{"a": 0, "b": 1}] * env.num_envs)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: Any, seconds: float = 5.0) -> bool:
    """Whether all these processes end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def workers(notes: Path) -> set[int]:
    return {int(path.read_text()) for path in notes.glob("started-*")} - {os.getpid()}


# What comes back


@pytest.mark.parametrize("shared_memory", [True, False])
def test_trajectory(shared_memory, build):
    env = build(scenario("skirmish").constructors, shared_memory=shared_memory)
    for index, event in enumerate(record("skirmish", AutoresetMode.SAME_STEP)):
        result = getattr(env, event.method)(**copy.deepcopy(event.arguments))
        assert_same(result, event.result, f"event {index}, {event.method}")


def test_views_outlive_the_environment(build):
    env = build(scenario("hunt").constructors, copy=False)
    observations, _ = env.reset()
    kept = copy.deepcopy(observations)
    env.close()
    assert_same(observations, kept)


def test_stats_and_calls(build, tmp_path):
    env = build(fleet(tmp_path))
    env.reset()
    step(env)
    assert env.stats().steps == 4
    assert env.stats().simulator_s > 0.0
    assert len(set(env.call("pid"))) == 2
    assert set(env.call("pid")) == workers(tmp_path)


class Reporter(Fragile):
    """Tells what its process is like."""

    def setting(self) -> dict[str, Any]:
        names = ("OMP_NUM_THREADS", "SET_LATER")
        return {
            "argv": sys.argv,
            "path": sys.path,
            "cwd": os.getcwd(),
            "environ": {name: os.environ.get(name) for name in names},
            "leads": os.getpid() == os.getpgrp() == os.getsid(0),
            "stdin": os.read(0, 1),
        }


def test_setting(way, build, tmp_path, monkeypatch):
    monkeypatch.setenv("SET_LATER", "\udcff")
    monkeypatch.setattr(sys, "argv", ["script", "ü\udcff"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    backend = {"backend": PortableProcessBackend(threads=3)} if way == "portable" else {}
    env = build([functools.partial(Reporter, {}, tmp_path)], num_workers=1, worker_threads=3, **backend)
    (told,) = env.call("setting")
    assert told["argv"] == ["script", "ü\udcff"]
    assert told["path"] == sys.path
    assert told["cwd"] == str(tmp_path)
    assert told["environ"] == {"OMP_NUM_THREADS": "3", "SET_LATER": "\udcff"}
    assert told["leads"]
    assert told["stdin"] == b""


# What goes wrong


def test_exception(build, tmp_path):
    env = build(fleet(tmp_path, step=raising(SimulatorError, "bad terrain")))
    env.reset()
    with pytest.raises(EnvError, match="bad terrain") as caught:
        step(env)
    assert (caught.value.env_ids, caught.value.worker, caught.value.method) == ((2,), 1, "step")
    assert isinstance(caught.value.__cause__, SimulatorError)
    assert len([*tmp_path.glob("closed-*")]) == 4
    assert gone(workers(tmp_path))


@pytest.mark.parametrize("place", ["constructor", "step"])
def test_exit(place, build, tmp_path):
    with pytest.raises(WorkerCrashed, match="exit code 7") as caught:  # noqa: PT012
        env = build(fleet(tmp_path, **{place: hard_exit}))
        env.reset()
        step(env)
    assert (caught.value.exitcode, caught.value.env_ids, caught.value.worker) == (7, (2,), 1)
    assert gone(workers(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_signal(number, build, tmp_path):
    env = build(fleet(tmp_path, step=killed_by(number)))
    env.reset()
    with pytest.raises(WorkerCrashed, match=number.name) as caught:
        step(env)
    assert caught.value.exitcode == -number
    assert ("faults.py" in str(caught.value)) == (number == signal.SIGSEGV)
    assert gone(workers(tmp_path))


def die_beside_a_fork() -> None:
    """Die while a child holds all that was open, the way back to the parent too."""
    if os.fork():
        os._exit(7)
    time.sleep(60)


def test_death_beside_a_fork(build, tmp_path):
    env = build(fleet(tmp_path, step=die_beside_a_fork))
    env.reset()
    began = time.monotonic()
    with pytest.raises(WorkerCrashed, match="exit code 7"):
        step(env)
    assert time.monotonic() - began < 3.0


def hang() -> None:
    time.sleep(60)


def test_hanging_constructor(build, tmp_path):
    began = time.monotonic()
    with pytest.raises(WorkerTimeout, match="start_timeout") as caught:
        build(fleet(tmp_path, constructor=hang), start_timeout=1.0)
    assert time.monotonic() - began < 5.0
    assert caught.value.env_ids == (2,)
    assert "in hang" in caught.value.stack
    assert gone(workers(tmp_path))


def test_close_from_another_thread(build, tmp_path):
    env = build(fleet(tmp_path, step=hang))
    env.reset()
    timer = threading.Timer(0.2, functools.partial(env.close, terminate=True))
    timer.start()
    with pytest.raises(ClosedEnvironmentError):
        step(env)
    timer.join()
    assert gone(workers(tmp_path))


def test_close_takes_no_longer_than_it_may(build, tmp_path):
    env = build(fleet(tmp_path, close=hang))
    began = time.monotonic()
    env.close(timeout=0.3)
    assert time.monotonic() - began < 2.0
    assert gone(workers(tmp_path))


def test_forked_child_touches_nothing(build, tmp_path):
    env = build(fleet(tmp_path))
    env.reset()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            env.close()
            del env
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    step(env)


# What is left


def with_child(notes: Path) -> Callable[[], None]:
    def start() -> None:
        sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        (notes / f"started-child-{os.getpid()}").write_text(str(sleeper.pid))
        sleeper.returncode = 0  # it is the test that looks after it

    return start


@pytest.mark.parametrize("fault", [None, hard_exit])
def test_children_of_simulators(fault, build, tmp_path):
    faults = {"reset": with_child(tmp_path)} | ({} if fault is None else {"step": fault})
    env = build(fleet(tmp_path, **faults))
    env.reset()
    assert len(workers(tmp_path)) == 3
    if fault is None:
        env.close()
    else:
        with pytest.raises(WorkerCrashed):
            step(env)
    assert gone(workers(tmp_path))


def test_nothing_is_left(way, tmp_path):
    def held() -> tuple[Any, ...]:
        shown = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(("marl_parallel", "pymp"))]
        return len(os.listdir("/proc/self/fd")), threading.active_count(), os.listdir("/dev/shm"), shown

    def cycle(number: int) -> None:
        env = ParallelEnv(fleet(tmp_path), num_workers=2, **arguments(way))
        env.reset()
        if number % 2:
            os.kill(env.call("pid")[0], signal.SIGKILL)
            with pytest.raises(WorkerCrashed):
                step(env)
        env.close()

    cycle(0)
    before, children = held(), psutil.Process().children(recursive=True)
    for number in range(4):
        cycle(number)
    assert held() == before
    assert psutil.Process().children(recursive=True) == children


SCRIPT = """
    import functools, os, sys, time
    print("read once", flush=True)
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from faults import Fragile
    from marl_parallel import ParallelEnv
    from marl_parallel.backends.portable import PortableProcessBackend

    class Mine(Fragile):
        def step(self, actions):
            helper(self)
            return super().step(actions)

    def helper(env):
        if {then!r} == "busy":
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
    rewards = env.step([{{"a": 0, "b": 1}}] * 2)[1]
    print(rewards[1]["a"], flush=True)
"""


def script(way: str, notes: Path, then: str = "end") -> str:
    expression = "dict(backend=PortableProcessBackend())" if way == "portable" else f"dict(context={way!r})"
    return textwrap.dedent(SCRIPT).format(tests=TESTS, notes=str(notes), then=then, arguments=expression)


@pytest.mark.parametrize("how", ["script", "-c", "-"])
def test_constructors_of_main(how, way, tmp_path):
    """No guard, no module: and the script is read once."""
    text = script(way, tmp_path)
    file = tmp_path / "script.py"
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, *{"-c": ["-c", text], "-": ["-"], "script": [str(file)]}[how]],
        input=text if how == "-" else None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(TESTS).parent,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "read once\n1.0\n")
    assert len([*tmp_path.glob("closed-*")]) == 2
    assert gone(workers(tmp_path))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For temporary files: the name of a socket in it must not get too long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@contextlib.contextmanager
def running(text: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", text]
    environ = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environ, cwd=Path(TESTS).parent, stderr=subprocess.PIPE, text=True) as parent:
        try:
            yield parent
        finally:
            parent.kill()


def await_files(notes: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + 20
    while len([*notes.glob(pattern)]) < count:
        assert time.monotonic() < deadline, f"no {pattern}"
        time.sleep(0.01)


@pytest.mark.parametrize("then", ["starting", "busy"])
def test_killed_parent(then, way, tmp_path, short_folder):
    with running(script(way, tmp_path, then), short_folder) as parent:
        await_files(tmp_path, {"starting": "started-*", "busy": "busy-*"}[then], 2)
        pids = workers(tmp_path)
        assert len(pids) == 2
        parent.kill()
        assert gone([parent.pid, *pids])
    assert os.listdir(short_folder) == []


def test_killed_parent_before_its_workers_are_there(short_folder, tmp_path):
    with running(script("portable", tmp_path), short_folder) as parent:
        await_files(short_folder, "marl_parallel-*/stacks-1", 1)
        children = psutil.Process(parent.pid).children()
        parent.kill()
        assert gone([parent.pid, *(child.pid for child in children)])
    assert os.listdir(short_folder) == []


def test_clearing_away_what_is_being_added_to(short_folder):
    def add() -> None:
        with contextlib.suppress(FileNotFoundError):  # the folder has gone
            for number in itertools.count():
                Path(folder, f"socket-{number}").touch()

    folder = tempfile.mkdtemp(dir=short_folder)
    adding = threading.Thread(target=add)
    adding.start()
    portable_worker._clear_away(folder)
    adding.join(20)
    assert not adding.is_alive()
    assert os.listdir(short_folder) == []


def test_interrupted_parent(way, tmp_path, short_folder):
    """One traceback, the parent's."""
    with running(script(way, tmp_path, "busy"), short_folder) as parent:
        await_files(tmp_path, "busy-*", 2)
        parent.send_signal(signal.SIGINT)
        _, err = parent.communicate(timeout=20)
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert gone(workers(tmp_path))
    assert os.listdir(short_folder) == []


# Which way it is


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_unknown_context(backend, tmp_path):
    with pytest.raises(ValueError, match="forkserver, spawn, fork"):
        ParallelEnv(fleet(tmp_path), context="teleport", backend=backend)


@pytest.mark.parametrize("backend", ["serial", "thread", PortableProcessBackend()])
def test_contexts_are_for_processes(backend, tmp_path):
    with pytest.raises(ValueError, match='backend="process" only'):
        ParallelEnv(fleet(tmp_path), context="spawn", backend=backend)


# What other systems lack is taken away from every interpreter that starts with this on its path.
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
assert not any(name.startswith("marl_parallel.backends.semaphores") for name in sys.modules)
from environments import Hunt
with mock.patch("marl_parallel.backends.semaphores.available", return_value=False):
    for context in (None, "spawn"):
        with ParallelEnv([Hunt] * 2, num_workers=2, context=context) as env:
            observations, _ = env.reset()
            env.step([{{agent: env.action_space[agent].sample() for agent in acting}} for acting in env.acting])
            assert type(env._crew.backend).__name__ == "PortableProcessBackend"
            print(len(set(env.call("pid"))))
    for context in ("forkserver", "fork"):
        try:
            ParallelEnv([Hunt], context=context)
        except ValueError as error:
            print(error)
"""


def test_elsewhere(tmp_path):
    """Simulated: nothing that only Linux has is needed, neither to import nor to run a batch."""
    (tmp_path / "sitecustomize.py").write_text(ELSEWHERE)
    done = subprocess.run(
        [sys.executable, "-c", ON_IT.format(tests=TESTS)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=Path(TESTS).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["2", "2"]
    assert ["needs Linux" in line for line in lines[2:]] == [True, True]


# The portable backend by itself


@pytest.fixture
def portable() -> Iterator[PortableProcessBackend]:
    backend = PortableProcessBackend()
    backend.start(2)
    yield backend
    assert backend.stop(0.0) == []


def heard(backend: PortableProcessBackend, count: int) -> list[tuple[int, Reply | Lost]]:
    replies: list[tuple[int, Reply | Lost]] = []
    while len(replies) < count:
        new = backend.wait(10.0)
        assert new
        replies += new
    return replies


def test_much_on_the_way_both_ways(portable):
    """Requests are taken in while a large reply still waits to be read."""

    def constructor(text: str = "x" * 1_000_000) -> None:
        raise ValueError(text)

    plan = Plan({7: cloudpickle.dumps(constructor)}, {7: 0}, AutoresetMode.SAME_STEP, cloudpickle.dumps(None))
    for _ in range(3):
        portable.post(dict.fromkeys((0, 1), Request(Message.ACCESS, (7,), plan)))
    replies = heard(portable, 6)
    assert sorted(worker for worker, _ in replies) == [0, 0, 0, 1, 1, 1]
    assert all(isinstance(reply, Reply) and len(reply.failures[7].summary) > 1_000_000 for _, reply in replies)


def test_the_dead_are_told_once(portable):
    portable.interrupt()
    assert portable.wait() == []
    assert "portable_worker.py" in portable.stack(0)
    portable.post({1: Request(Message.CLOSE)})
    ((worker, reply),) = heard(portable, 1)
    assert (worker, reply.answers) == (1, Message.CLOSE)
    portable.post(dict.fromkeys((0, 1), Request(Message.CLOSE)))
    replies = dict(heard(portable, 2))
    assert portable.stack(1) == ""
    assert replies[1] == Lost(0, "")
    assert portable.wait(0.05) == []
    portable.post({1: Request(Message.CLOSE)})
    assert portable.wait(1.0) == [(1, Lost(0, ""))]


def test_worker_that_cannot_start(monkeypatch, capfd):
    monkeypatch.setattr(portable_process, "command", lambda _: [sys.executable, "-c", "import no_such_module"])
    backend = PortableProcessBackend()
    with pytest.raises(RuntimeError, match="worker 0 ended with exit code 1"):
        backend.start(2)
    assert "no_such_module" in capfd.readouterr().err
    backend.post({1: Request(Message.CLOSE)})
    assert backend.wait(1.0) == [(1, Lost(None, ""))]
    assert backend.stop(0.0) == []


def test_worker_that_does_not_start_in_time(monkeypatch):
    monkeypatch.setattr(portable_process, "command", lambda _: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr("marl_parallel.backends.portable._STARTED_WITHIN_S", 0.2)
    with pytest.raises(TimeoutError, match="worker 0"):
        PortableProcessBackend().start(2)
