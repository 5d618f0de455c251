"""Shared memory and semaphores with names: what a simulator makes is unlinked, what the program made is not.

Workers use the program's resource tracker, as children of `multiprocessing` do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing import resource_tracker
from multiprocessing.managers import SharedMemoryManager
from multiprocessing.pool import ThreadPool
from multiprocessing.shared_memory import ShareableList, SharedMemory
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import ROOT, TESTS
from helpers.processes import alive, gone, wait_for
from helpers.start_methods import arguments
from simulators.counting import ACTIONS, Counting

from marl_parallel import ParallelEnv, RecyclePolicy

pytestmark = [
    pytest.mark.release_independent,
    pytest.mark.starts_anew,
    pytest.mark.skipif(sys.platform == "win32", reason="named memory of Windows is freed with its last user"),
]

# A simulator that makes one of each kind and never unlinks it. The last one is as joblib and loky do it: a tracker of
# their own removes a folder when all processes that use it have ended.
MAKER = """
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
folder, start_method, end = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
from helpers.start_methods import arguments
from simulators.counting import ACTIONS, Counting
from marl_parallel import ParallelEnv

class Maker(Counting):
    def __init__(self, seed, env_id, restarts=0):
        super().__init__(seed=seed)
        if restarts:
            return
        import multiprocessing
        from multiprocessing import resource_tracker, util
        from multiprocessing.managers import SharedMemoryManager
        from multiprocessing.shared_memory import ShareableList, SharedMemory
        self.memory = SharedMemory(create=True, size=1000)
        self.list = ShareableList([1, 2, 3])
        self.manager = SharedMemoryManager()
        self.manager.start()
        managed = self.manager.SharedMemory(2000)
        self.semaphore = multiprocessing.get_context("spawn").Semaphore(1)
        semaphore = self.semaphore._semlock.name
        names = [self.memory.name, self.list.shm.name, managed.name, "sem." + semaphore.lstrip("/")]
        (folder / f"names-{{env_id}}").write_text(json.dumps(names))
        read, self.write = os.pipe()
        code = f"sys.path.insert(0, {{str(folder)!r}}); from other.resource_tracker import main; "
        code = f"import sys; {{code}}main({{read}}, {{env_id}})"
        util.spawnv_passfds(os.fsencode(sys.executable), [sys.executable, "-S", "-c", code], [read])
        os.close(read)
        assert resource_tracker._resource_tracker._pid is None  # this process has started none

    def step(self, actions):
        if self.counter == 0 and end in ("crash", "restart"):
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "raise":
            raise ValueError("no")
        return super().step(actions)

on_error = {{"on_error": "restart"}} if end == "restart" else {{}}
env = ParallelEnv([Maker] * 2, num_workers=2, **on_error, **arguments(start_method))
env.reset()
try:
    if end == "killed":
        (folder / "ready").touch()
        time.sleep(60)
    env.step([ACTIONS] * 2)
except Exception as error:
    print(type(error).__name__)
env.close()
print("closed")
"""
OTHER_TRACKER = """
import pathlib, time, os
folder = pathlib.Path(__file__).parent.parent
def main(fd, env_id):
    (folder / f"folder-{env_id}").mkdir()
    while os.read(fd, 100):
        pass
    time.sleep(0.3)
    (folder / f"folder-{env_id}").rmdir()
"""


@pytest.mark.parametrize("end", ["close", "crash", "restart", "raise", "killed"])
def test_what_simulators_made_is_unlinked(start_method: str, end: str, tmp_path: Path) -> None:
    """At the latest when the program ends, however worker and program end."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").touch()
    (tmp_path / "other" / "resource_tracker.py").write_text(OTHER_TRACKER)
    script = MAKER.format(tests=str(TESTS))
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), start_method, end],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        if end == "killed":
            wait_for(lambda: program.poll() is not None or (tmp_path / "ready").exists(), 60.0)
            started = psutil.Process(program.pid).children(recursive=True)
            program.kill()
        out, err = program.communicate(timeout=60)
    if end == "killed":
        assert gone(one.pid for one in started)
    else:
        assert out.splitlines()[-1] == "closed", err
    names = [name for path in tmp_path.glob("names-*") for name in json.loads(path.read_text())]
    assert len(names) == 8
    wait_for(lambda: not {*names} & {*os.listdir("/dev/shm")})
    if end != "killed" and start_method == "forkserver":  # otherwise the process group of the worker is killed
        wait_for(lambda: not [*tmp_path.glob("folder-*")])


class User(Counting):
    """A simulator that uses memory of the program, by object or by name, and never unlinks it."""

    def __init__(self, memories: list[SharedMemory | str], seed: int, env_id: int) -> None:
        super().__init__(seed=seed)
        self.memories = [SharedMemory(name=one) if isinstance(one, str) else one for one in memories]
        self.env_id = env_id

    def step(self, actions: Any) -> Any:
        for memory in self.memories:
            memory.buf[self.env_id] += 1
        return super().step(actions)

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("end", ["close", "terminate", "restart", "recycle"])
def test_what_the_program_made_stays(start_method: str, end: str) -> None:
    """However workers end: afterwards the program can open it by name, and so can new workers."""
    with SharedMemoryManager() as manager:
        own = SharedMemory(create=True, size=100)
        shared = ShareableList([bytes(10)])
        kinds = [own, manager.SharedMemory(100), shared.shm]
        try:
            for which in (list(kinds), [kind.name for kind in kinds]):
                recycling = {"recycle": RecyclePolicy(max_episodes=1)} if end == "recycle" else {}
                env = ParallelEnv(
                    [lambda seed, env_id, which=which: User(which, seed, env_id)] * 2,
                    num_workers=2, on_error="restart", **recycling, **arguments(start_method),
                )  # fmt: skip
                env.reset()
                pids = env.call("pid")
                env.step([ACTIONS] * 2)
                if end == "restart":
                    os.kill(pids[0], signal.SIGKILL)
                    env.step([ACTIONS] * 2)
                    env.step([ACTIONS] * 2)
                    assert env.stats().restarts == 1
                while end == "recycle" and env.call("pid")[0] == pids[0]:
                    env.reset()
                env.close(terminate=end == "terminate")
                assert gone(pids)
                for kind in kinds:
                    again = SharedMemory(name=kind.name)
                    assert again.buf[0] > 0
                    assert again.buf[1] > 0
                    again.close()
        finally:
            for one in (own, shared.shm):
                one.close()
                one.unlink()


def test_memory_made_in_several_threads(start_method: str) -> None:
    def make_many(_: Counting) -> int:
        def make(number: int) -> str:
            memory = SharedMemory(create=True, size=10)
            memory.close()
            memory.unlink()
            return memory.name

        with ThreadPool(4) as pool:
            return len({*pool.map(make, range(400))})

    with ParallelEnv([Counting], num_workers=1, **arguments(start_method)) as env:
        assert env.call(make_many) == (400,)


def test_a_tracker_that_was_killed(start_method: str) -> None:
    """Simulators go on, and no worker starts another tracker. The program does, with its next worker."""

    def memory_name(env: Counting) -> str:
        memory = SharedMemory(create=True, size=10)
        memory.close()
        memory.unlink()
        return memory.name

    with ParallelEnv([Counting] * 2, num_workers=2, **arguments(start_method)) as env:
        env.reset()
        tracker: Any = resource_tracker._resource_tracker
        pid, children = tracker._pid, psutil.Process().children(recursive=True)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not alive(pid))
        assert len({*env.call(memory_name)}) == 2
        env.step([ACTIONS] * 2)
        assert {*psutil.Process().children(recursive=True)} <= {*children}
    with pytest.warns(UserWarning, match="process died unexpectedly"):
        ParallelEnv([Counting], **arguments(start_method)).close()
    assert alive(tracker._pid)
