"""Constructors with a large table, in scripts: one copy for all environments, and yet what each one writes is its own.

What leaves the pickle, and how it comes back, is tested in `test_array_file`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.setups import rest

pytestmark = pytest.mark.release_independent

ENVIRONMENT = """
    import functools, gc, logging, os, sys, types
    if sys.argv[1:] == ["no files in memory"]:
        del os.memfd_create  # as on macOS and Windows
    import numpy as np
    from gymnasium import spaces
    from pettingzoo import ParallelEnv as PettingZooEnv
    from marl_parallel import ParallelEnv, RecyclePolicy, RestartPolicy
    from marl_parallel.adapters import pettingzoo_env

    class Market(PettingZooEnv):
        metadata = {"name": "market"}
        possible_agents = ["a"]

        def __init__(self, table, frozen=None, args=None):
            self.table, self.frozen, self.args = table, frozen, args

        def observation_space(self, agent):
            return spaces.Box(-9, 9, (1,), np.float32)

        def action_space(self, agent):
            return spaces.Discrete(4)

        def reset(self, seed=None, options=None):
            self.agents = ["a"]
            return {"a": np.zeros(1, np.float32)}, {"a": {}}

        def step(self, actions):
            if actions["a"] == 1:
                os._exit(3)
            if actions["a"] == 2:
                raise ValueError("no such price")
            if over := actions["a"] == 3:
                self.agents = []
            return {"a": np.zeros(1, np.float32)}, {"a": self.total()}, {"a": over}, {"a": False}, {"a": {}}

        def total(self):
            return float(self.table.sum())

        def write(self, value):
            self.table[:] = value

        def write_frozen(self):
            try:
                self.frozen[0] = 1
            except ValueError as error:
                return str(error)

        def next_port(self):
            self.args.port += 1
            return self.args.port

        def pid(self):
            return os.getpid()
"""

MEMORY = """
    import contextlib, psutil

    def fields(path):
        lines = [line.split() for line in open(path).read().splitlines()]
        return {line[0]: int(line[1]) * 1024 for line in lines if len(line) == 3 and line[2] == "kB"}

    def used():
        "Memory of this process and all that it has started: their own, and the files of the package."
        total, files = 0, {}
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            total += fields(f"/proc/{process.pid}/smaps_rollup")["Pss_Anon:"]
            folder = f"/proc/{process.pid}/fd"
            for fd in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):  # the descriptor that reads the list
                    if "(deleted)" in os.readlink(f"{folder}/{fd}"):
                        stat = os.stat(f"{folder}/{fd}")
                        files[stat.st_dev, stat.st_ino] = stat.st_size
        return total + sum(files.values())

    def peak(pid="self"):
        return fields(f"/proc/{pid}/status")["VmHWM:"]

    class Maker:
        def __init__(self, table):
            self.table = table

        def make(self):
            return Market(self.table)

    def made_of_global():
        return Market(TABLE)

    def constructors(table):
        same = lambda: Market(table)
        partials = [functools.partial(Market, table, None, number) for number in range(2)]
        others = [lambda seed: Market(table), lambda: Market(TABLE), Maker(table).make, made_of_global]
        return [same, same, *partials, *others]

    def measured():
        open("/proc/self/clear_refs", "w").write("5")  # sets the peak to what is used now
        own = peak()
        with ParallelEnv(constructors(TABLE), num_workers=2) as env:
            peaks = [peak() - own, *(peak(pid) for pid in {*env.call("pid")})]
            env.reset()
            rewards = env.step([{"a": 0}] * 8)[1]
            assert [reward["a"] for reward in rewards] == [TABLE.sum()] * 8
            return np.array(peaks), used()

    TABLE = np.ones((1000, 1))
    peaks_before, used_before = measured()
    TABLE = np.full((6_000, 1000), 0.5)  # 48 MB
    used_before += TABLE.nbytes
    peaks_after, used_after = measured()
    tables = (used_after - used_before) / TABLE.nbytes
    peaks = (peaks_after - peaks_before) / TABLE.nbytes
    print(tables, peaks)
    assert 0.9 < tables < 1.3, tables
    assert max(peaks) < 0.3, peaks  # no other copy for a while, neither here nor there
    TABLE = np.full((6_000, 2_000), 0.5)[:, ::2]  # written without a copy that is contiguous
    assert max((measured()[0] - peaks_before) / TABLE.nbytes) < 0.3
"""

PRIVATE = """
    SIZE = 20_000
    TOTAL = SIZE * 2.0

    def new_constructors():
        "Their arrays have other values when this function returns, and are gone later."
        table, frozen = np.full(SIZE, 2.0), np.ones(SIZE)
        frozen.flags.writeable = False
        return [functools.partial(Market, table, frozen, types.SimpleNamespace(port=5000))] * 4

    def resources(simulator):
        gc.collect()
        maps = open("/proc/self/maps").read()
        return len(os.listdir("/proc/self/fd")), sum("(deleted)" in line for line in maps.splitlines())

    def check_private(env, constructors):
        constructors[0].args[0][:] = -1
        constructors.clear()
        assert env.call("total") == (TOTAL,) * 4
        env.call("write", 3.0, env_ids=[1])
        assert env.call("total") == (TOTAL, 3.0 * SIZE, TOTAL, TOTAL)
        assert {*env.call("write_frozen")} == {"assignment destination is read-only"}
        assert env.call("next_port") == (5001,) * 4

    logging.getLogger("marl_parallel").setLevel("CRITICAL")  # restarts are expected
    policy = RestartPolicy(rate_limit=None)
    constructors = new_constructors()
    with ParallelEnv(constructors, num_workers=2, on_error="restart", restart_policy=policy) as env:
        assert os.listdir(os.environ["TMPDIR"]) == []
        env.reset()
        check_private(env, constructors)
        pids = env.call("pid")
        env.step([{"a": 1}, {"a": 0}, {"a": 0}, {"a": 0}])  # environments 0 and 1 get a new process
        assert env.stats().restarts == 2
        assert [old == new for old, new in zip(pids, env.call("pid"))] == [False, False, True, True]
        assert env.call("total") == (TOTAL,) * 4
        env.call("write", 3.0)
        held = []
        for _ in range(6):
            env.step([{"a": 0}, {"a": 0}, {"a": 2}, {"a": 2}])  # environments 2 and 3 are rebuilt in their process
            assert env.call("total") == (3.0 * SIZE, 3.0 * SIZE, TOTAL, TOTAL)
            held.append(env.call(resources)[2])
        assert held[-1] == held[1], held

    constructors = new_constructors()
    with ParallelEnv(constructors, num_workers=2, recycle=RecyclePolicy(max_episodes=1)) as env:
        env.reset()
        check_private(env, constructors)
        pids = env.call("pid")
        while not {*pids}.isdisjoint(env.call("pid")):
            env.step([{"a": 3}] * 4)
        assert env.call("total") == (TOTAL,) * 4

    def adapted(table, simulator):
        simulator.table = table
        return pettingzoo_env.PettingZooEnv(simulator)

    table = np.full(SIZE, 5.0)
    constructors = [functools.partial(Market, None)] * 3
    with ParallelEnv(constructors, num_workers=2, adapter=functools.partial(adapted, table)) as env:
        table[:] = -1
        env.call("write", 3.0, env_ids=[1])
        assert env.call("total") == (5.0 * SIZE, 3.0 * SIZE, 5.0 * SIZE)

    for backend in ("serial", "thread"):
        constructors = new_constructors()
        with ParallelEnv(constructors, num_workers=2, backend=backend) as env:
            check_private(env, constructors)
"""


@pytest.fixture(params=["default", "portable", rest("no files in memory")])
def run(request, tmp_path):
    """Runs a script with worker processes of one kind."""

    def run(text: str) -> str:
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(ENVIRONMENT) + textwrap.dedent(text))
        (tmp_path / "temporary").mkdir()
        portable = "0" if request.param == "default" else "1"
        done = subprocess.run(
            [sys.executable, script, request.param],
            env={**os.environ, "MARL_PARALLEL_PORTABLE": portable, "TMPDIR": str(tmp_path / "temporary")},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        assert [*Path(tmp_path / "temporary").iterdir()] == []
        return done.stdout

    return run


def test_all_environments_share_one_copy(run):
    """Whatever refers to the table: lambdas, partials, bound methods, globals of the script."""
    run(MEMORY)


def test_what_an_environment_writes_is_its_own(run):
    """Also in environments that are built again, from what the arrays were when the first ones were constructed."""
    run(PRIVATE)
