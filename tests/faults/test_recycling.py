"""`recycle=`: environments past a limit move to a standby worker, where an episode begins.

What needs no real process (orders of replies, faults while environments move, seeds and counts) is in
`tests/simulation`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.processes import alive, all_gone, gone, wait_for
from helpers.setups import BACKEND_SETUPS, Setup, rest
from mpe2 import simple_spread_v3
from simulators.counting import ACTIONS, Counting
from simulators.crashing import seed_of

from marl_parallel import (
    EnvError,
    ParallelEnv,
    RecyclePolicy,
    RestartEvent,
    RestartLimitExceeded,
    Rollout,
)
from marl_parallel.adapters import adapt
from marl_parallel.adapters.protocol import MultiAgentEnv
from marl_parallel.backends.local import SerialBackend
from marl_parallel.backends.process import ProcessBackend
from marl_parallel.core.backend import share_out
from marl_parallel.vector import StackedVecEnv

pytestmark = pytest.mark.release_independent

SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
MARK = {"recycled": True}
ONE_WORKER, TWO_WORKERS = Setup("process", True, 1), Setup("process", True, 2)
RAY = [setup for setup in BACKEND_SETUPS if setup.backend == "ray"]
PROCESSES = [TWO_WORKERS, rest(Setup("process", False, 2)), rest(Setup("portable", True, 2)), *map(rest, RAY)]
LENGTHS = (3, 5, 4, 6)
each_mode = pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP, DISABLED], ids=lambda mode: mode.name)


class Reference:
    """One environment in a plain loop, which is replaced after so many episodes.

    Attributes:
        stays: Whether it goes on in the present call, whatever its number of episodes: see `Neighbours`.
    """

    def __init__(self, env_id: int, mode: AutoresetMode, episodes: int) -> None:
        self.env_id, self.mode, self.limit = env_id, mode, episodes
        self.rebuilds = self.moves = 0
        self.stays = False
        self._make(seed_of(42, env_id, 0))

    def _make(self, seed: int) -> None:
        self.env, self.seed, self.left, self.over = Counting(LENGTHS[self.env_id], seed=seed), seed, self.limit, False
        self.first = True

    def begin(self) -> tuple[dict, dict]:
        """Begin the next episode, in a new environment if this one has had its episodes."""
        recycled = self.left <= 0 and not self.stays
        if recycled:
            self.rebuilds += 1
            self._make(seed_of(42, self.env_id, self.rebuilds))
        observations, infos = self.env.reset(**({"seed": self.seed} if self.first else {}))
        self.first = self.over = False
        return observations, {**infos, **({"__common__": MARK} if recycled else {})}

    def step(self) -> tuple[Any, ...]:
        if self.over and self.mode is NEXT_STEP:
            observations, infos = self.begin()
            flags = {**dict.fromkeys(observations, False), "__all__": False}
            return observations, dict.fromkeys(observations, 0.0), flags, flags, infos
        before = [*self.env.agents]
        observations, rewards, terminateds, truncateds, infos = self.env.step(dict.fromkeys(before, 0))
        self.over = not self.env.agents
        ended = all(terminateds[agent] for agent in before)
        terminateds = {**terminateds, "__all__": self.over and ended}
        truncateds = {**truncateds, "__all__": self.over and not ended}
        if self.over:
            self.left -= 1
            if self.mode is SAME_STEP:
                last = observations
                observations, reset_infos = self.begin()
                infos = {agent: {**info, "final_obs": last[agent]} for agent, info in infos.items()}
                if "__common__" in reset_infos:
                    infos["__common__"] = MARK
        return observations, rewards, terminateds, truncateds, infos


class Neighbours:
    """The environments of one worker: one that has moved does not move again before all others have, too."""

    def __init__(self, references: Sequence[Reference]) -> None:
        self.references = references

    def begin_call(self) -> None:
        most = max(reference.rebuilds for reference in self.references)
        is_split = any(reference.rebuilds < most for reference in self.references)
        for reference in self.references:
            reference.stays = is_split and reference.rebuilds == most


@each_mode
@pytest.mark.parametrize("limit", [1, rest(2)])
@pytest.mark.parametrize("setup", PROCESSES, ids=str)
def test_like_a_plain_loop(setup, limit, mode, build):
    """With `max_episodes`, results are those of a loop that replaces environments, however fast its steps are."""
    constructors = [functools.partial(Counting, length) for length in LENGTHS]
    env = build(constructors, setup, mode, recycle=RecyclePolicy(max_episodes=limit))
    references = [Reference(env_id, mode, limit) for env_id in range(4)]
    workers = [Neighbours(references[ids[0] : ids[-1] + 1]) for ids in share_out(4, 2)]
    assert_same(env.reset(), tuple(zip(*[reference.begin() for reference in references])))
    for _ in range(40):
        over = [reference.env_id for reference in references if reference.over]
        if mode is DISABLED and over:
            for worker in workers:
                worker.begin_call()
            results = env.reset(env_ids=over)
            assert_same(results, tuple(zip(*[references[env_id].begin() for env_id in over])))
        for worker in workers:
            worker.begin_call()
        assert_same(env.step([ACTIONS] * 4), tuple(zip(*[reference.step() for reference in references])))
    stats = env.stats()
    assert stats.recycled == sum(reference.rebuilds for reference in references) >= 10 // limit
    assert (stats.restarts, stats.faults) == (0, 0)
    assert env.seed() == tuple(reference.seed for reference in references)


@pytest.mark.parametrize("setup", PROCESSES, ids=str)
def test_asynchronous(setup, build):
    """Also with `send` and `recv`, in the order in which results come."""
    env = build([functools.partial(Counting, length) for length in LENGTHS[:2]], setup,
                recycle=RecyclePolicy(max_episodes=2))  # fmt: skip
    references = [Reference(env_id, SAME_STEP, 2) for env_id in range(2)]
    env.reset_async()
    for reference in references:
        reference.begin()
    env.recv()
    env.send([ACTIONS] * 2)
    for _ in range(80):
        batch = env.recv(min_envs=1)
        for env_id, *dicts in zip(*batch):
            assert_same(tuple(dicts), references[env_id].step())
        env.send([ACTIONS] * len(batch.env_ids), batch.env_ids)
    env.recv()
    assert env.stats().recycled >= 6


class Unreadable:
    """An option that can be pickled, but not be made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_seed_and_options_of_the_caller(build):
    """They reach the new environment; options that its worker cannot read are an error as in any other reset."""
    env = build([functools.partial(Counting, 3)] * 2, ONE_WORKER, DISABLED, recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    for seed in (5, 6):
        env.step([ACTIONS] * 2)
        observations, infos = env.reset(seed=[seed, None], env_ids=[0, 1], options={"map": seed})
        assert [info["__common__"] for info in infos] == [MARK, MARK]
        assert observations[0]["long"][0] == seed
        assert env.seed() == (seed, seed_of(42, 1, seed - 4))
        assert env.get_attr("options") == ({"map": seed},) * 2
    assert env.stats().recycled == 4
    with pytest.raises(EnvError, match=r"environment 0[\s\S]*no number"):
        env.reset(options={"map": Unreadable()}, env_ids=[0])


class Noted(Counting):
    """Each construction adds its number, its seed and its process to a file; each first reset adds "reset"."""

    def __init__(self, length: int, path: Path, *, seed: int, env_id: int) -> None:
        super().__init__(length, seed=seed)
        self.path, self.is_new = path, True
        self.note(f"{env_id} {seed} {os.getpid()}")

    def note(self, line: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{line}\n")

    def reset(self, seed=None, options=None):
        result = super().reset(seed, options)
        if self.is_new:
            self.note("reset")
        self.is_new = False
        return result


def processes(path: Path) -> list[int]:
    """Those in which environments were constructed, in that order."""
    return [*dict.fromkeys([int(line.split()[2]) for line in path.read_text().splitlines() if line != "reset"])]


def test_slow_neighbour(build, tmp_path):
    """An environment past its limit goes on until its neighbour has moved; there are never more than two processes."""
    notes = tmp_path / "notes"
    env = build([functools.partial(Noted, length, notes) for length in (2, 30)], ONE_WORKER,
                recycle=RecyclePolicy(max_episodes=1))  # fmt: skip
    env.reset()
    marks: list[list[int]] = [[], []]
    for step in range(1, 71):
        infos = env.step([ACTIONS] * 2)[4]
        assert sum(map(alive, processes(notes))) <= 2
        for env_id in (0, 1):
            if "__common__" in infos[env_id]:
                marks[env_id].append(step)
    assert marks == [[2, 32, 62], [30, 60]]


class Slow(Counting):
    """Takes long to be constructed; holds on to memory with each episode. Infos say how many steps were made before."""

    steps_here = 0

    def __init__(self, build_s: float = 0.0, leak_mb: float = 0.0, *, seed: int) -> None:
        super().__init__(4, seed=seed)
        self.steps_before = Slow.steps_here
        self.leak_mb, self.leaked = leak_mb, []
        time.sleep(build_s)

    def reset(self, seed=None, options=None):
        self.leaked.append(np.ones(int(self.leak_mb * 1e6 / 8)))
        return super().reset(seed, options)

    def step(self, actions):
        time.sleep(0.01)
        Slow.steps_here += 1
        *dicts, infos = super().step(actions)
        return (*dicts, {agent: {"steps_before": self.steps_before} for agent in infos})


@pytest.mark.parametrize("setup", PROCESSES, ids=str)
def test_memory(setup, build):
    """Processes with too much memory end, and their environments are constructed where nothing steps."""
    env = build([functools.partial(Slow, 0.3, 10.0)] * 4, setup, recycle=RecyclePolicy(max_memory_mb=250))
    env.reset()
    first = {*env.call("pid")}
    until = time.monotonic() + 80
    while env.stats().recycled < 4 and time.monotonic() < until:
        infos = env.step([ACTIONS] * 4)[4]
        assert all(info[agent]["steps_before"] == 0 for info in infos for agent in info.keys() & ACTIONS.keys())
    assert env.stats().recycled >= 4
    assert wait_for(lambda: env.step([ACTIONS] * 4) and all_gone(*first), timeout=30)
    assert max(map(int, env.stepper.source.memory())) < 10**9


def test_age(build):
    """Environments are replaced when they are old, each at the end of its own episode."""
    env = build([Slow] * 2, TWO_WORKERS, recycle=RecyclePolicy(max_age_s=0.5))
    env.reset()
    until = time.monotonic() + 80
    while env.stats().recycled < 4 and time.monotonic() < until:
        for dicts in env.step([ACTIONS] * 2)[4]:
            if "__common__" in dicts:
                assert dicts["__common__"] == MARK
                assert "final_obs" in dicts["long"]
    assert env.stats().recycled >= 4


@pytest.mark.parametrize(
    "setup", [ONE_WORKER, rest(Setup("portable", True, 1)), *(rest(Setup("ray", True, 1)) for _ in RAY)], ids=str
)
def test_kill_above(setup, build, caplog):
    """A worker with too much memory is restarted in the middle of an episode."""
    leaks = functools.partial(Slow, 0.0, 20.0)
    policy = RecyclePolicy(kill_above_mb=400)
    events: list[RestartEvent] = []
    env = build([leaks] * 2, setup, on_error="restart", recycle=policy, on_restart=events.append)
    env.reset()
    until = time.monotonic() + 80
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        while not env.stats().restarts and time.monotonic() < until:
            infos = env.step([ACTIONS] * 2)[4]
    assert env.stats().restarts == 2
    infos += env.step([ACTIONS] * 2)[4]  # it may have been killed after the results had come
    reports = [info["__common__"]["error"] for info in infos if "__common__" in info]
    assert reports
    assert {*reports} == {reports[0]}
    assert re.match(
        r"worker \d+ \(environments 0 to 1\) was killed because of its memory: \d{3} MB, over the limit of "
        r"kill_above_mb=400 of the RecyclePolicy; (no environment was running|environment [01] was in (step|reset))",
        reports[0],
    )
    assert "kill_above_mb=400" in caplog.text
    # Only the memory of the worker is known: that is one fault.
    stats = env.stats()
    assert stats.faults == 1
    assert stats.restart_kinds == {"death": 1, "neighbour": 1}
    (kinds,) = {tuple(sorted((event.kind, event.env_id in event.error.env_ids) for event in events))}
    assert kinds == (("fault", True), ("neighbour", False))
    assert f"This counts as one fault of environment {events[0].error.env_ids[0]}" in reports[0]


class Swelling(Counting):
    """Takes more and more memory in the third step, which never ends."""

    def step(self, actions):
        taken = []
        while self.steps == 2:
            taken.append(np.ones(1 << 20))
            time.sleep(0.01)
        return super().step(actions)


def test_kill_above_in_the_middle_of_a_step(build):
    """Also if nothing else limits a step."""
    env = build(
        [functools.partial(Swelling, 40)] * 2, TWO_WORKERS, on_error="restart",
        recycle=RecyclePolicy(kill_above_mb=600), warn_after=None,
    )  # fmt: skip
    env.reset()
    for _ in range(2):
        env.step([ACTIONS] * 2)
    for env_id, info in enumerate(env.step([ACTIONS] * 2)[4]):
        assert "kill_above_mb=600" in info["__common__"]["error"]
        assert f"environment {env_id} was in step" in info["__common__"]["error"]
        assert "counts as one fault" not in info["__common__"]["error"]  # nothing is to be explained
    assert env.stats().faults == 2


@pytest.mark.rest
def test_send_raises_no_faults(build):
    """A limit that is too low for any process ends the run in `recv`, as all faults do."""
    env = build([Slow] * 2, ONE_WORKER, on_error="restart", recycle=RecyclePolicy(kill_above_mb=5))
    env.reset()
    deadline, raised = time.monotonic() + 60, False
    while not raised:
        assert time.monotonic() < deadline
        env.send([ACTIONS] * 2)
        try:
            env.recv()
        except RestartLimitExceeded as error:
            raised = "kill_above_mb=5" in str(error)


class SlowMemory(SerialBackend):
    """A backend whose memory takes 0.2 s to measure, by a clock of its own; no environment reaches a limit."""

    capabilities = dataclasses.replace(SerialBackend.capabilities, has_standbys=True, may_leave=True)

    def __init__(self) -> None:
        super().__init__()
        self.now, self.measured, self.asked = 0.0, 0, 0
        self.clock: Callable[[], float] = lambda: self.now

    @property
    def leaving(self) -> tuple[int, ...]:
        self.asked += 1
        return ()

    def memory(self, worker: int) -> int:
        self.now += 0.2
        self.measured += 1
        return 1


def test_slow_measurements_of_memory():
    """They become rare, but not too rare; machines that go are looked for once a second all the same."""
    backend = SlowMemory()
    with ParallelEnv([Counting], backend=backend, recycle=RecyclePolicy(max_memory_mb=1)) as env:
        env.reset()
        env.step([ACTIONS])
        measured, asked, began = backend.measured, backend.asked, backend.now
        while backend.now < began + 60:
            backend.now += 1.01
            env.step([ACTIONS])
        assert 5 <= backend.measured - measured <= 6
        assert 50 <= backend.asked - asked <= 60


class FailsWithOneSeed(Counting):
    """Cannot be constructed with one seed, however often it is tried."""

    def __init__(self, fails: Callable[[], Any], *, seed: int, env_id: int) -> None:
        super().__init__(4, seed=seed)
        if env_id == 1 and seed == seed_of(42, 1, 1):
            fails()

    def step(self, actions):
        time.sleep(0.01)
        return super().step(actions)


@pytest.mark.parametrize(
    "fails",
    [functools.partial(int, "no map"), functools.partial(os._exit, 1), rest(functools.partial(time.sleep, 60))],
    ids=["raises", "dies", "hangs"],
)
@pytest.mark.parametrize("setup", PROCESSES, ids=str)
def test_seed_with_which_nothing_can_be_constructed(fails, setup, build, caplog):
    """The old environments go on, also those of other workers; it is tried again soon, with the next seed."""
    make = functools.partial(FailsWithOneSeed, fails)
    env = build([make] * 4, setup, recycle=RecyclePolicy(max_episodes=2), start_timeout=6.0)
    env.reset()
    deadline = time.monotonic() + 60.0
    seeds: list[list[int]] = [[], [], [], []]
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        while not seeds[1] or len(seeds[3]) < 2:
            assert time.monotonic() < deadline, seeds
            for env_id, infos in enumerate(env.step([ACTIONS] * 4)[4]):
                if "recycled" in infos.get("__common__", {}):
                    seeds[env_id].append(env.seed()[env_id])
    assert "next attempt in 1 s" in caplog.text
    assert seeds[1][0] == seed_of(42, 1, 2)
    assert seeds[0][0] == seed_of(42, 0, 1)
    assert seeds[3][:2] == [seed_of(42, 3, 1), seed_of(42, 3, 2)]
    assert env.stats().faults == 0


def test_killed_standby(build, tmp_path):
    """It is noticed when its first environment is to begin, as a fault of that one; the neighbour goes on there."""
    notes = tmp_path / "notes"
    makes = [functools.partial(Noted, length, notes) for length in (4, 40)]
    env = build(makes, ONE_WORKER, on_error="restart", recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    wait_for(lambda: env.get_attr("length") and notes.read_text().count("reset") == 4)
    time.sleep(0.5)  # the worker replies
    _, standby = processes(notes)
    os.kill(standby, signal.SIGKILL)
    for _ in range(3):
        env.step([ACTIONS] * 2)
    observations, _, _, truncateds, infos = env.step([ACTIONS] * 2)
    assert truncateds[0]["__all__"]
    assert "SIGKILL" in infos[0]["__common__"]["error"]
    assert observations[0]["long"].tolist() == [seed_of(42, 0, 2), 1, 0]
    assert "__common__" not in infos[1]
    assert observations[1]["long"].tolist() == [43, 1, 4]
    marks = [env.step([ACTIONS] * 2)[4][1].get("__common__") for _ in range(36)]
    assert marks == [None] * 35 + [MARK]
    assert env.stats().restart_kinds == {"death": 1}


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="Windows stops no processes")
@pytest.mark.parametrize("timeout", ["step_timeout", "reset_timeout", "start_timeout"])
def test_stopped_standby(timeout, build, tmp_path):
    """A standby that does not begin to take over is late by whatever timeout there is."""
    notes = tmp_path / "notes"
    recycle = RecyclePolicy(max_episodes=1)
    env = build([functools.partial(Noted, 4, notes)], ONE_WORKER, on_error="restart", recycle=recycle, **{timeout: 2.0})
    env.reset()
    wait_for(lambda: env.get_attr("length") and notes.read_text().count("reset") == 2)
    time.sleep(0.5)  # the worker replies
    os.kill(processes(notes)[1], signal.SIGSTOP)
    for _ in range(3):
        env.step([ACTIONS])
    (info,) = env.step([ACTIONS])[4]
    assert "within 2 s" in info["__common__"]["error"]
    assert env.stats().restart_kinds == {"timeout": 1}


class LeavesBadly(Counting):
    def __init__(self, leave: Callable[[], Any], length: int, *, seed: int) -> None:
        super().__init__(length, seed=seed)
        self.leave = leave

    def close(self) -> None:
        self.leave()


@pytest.mark.parametrize(
    ("leave", "text"),
    [
        (functools.partial(os._exit, 3), "died in close of environment 0"),
        (functools.partial(int, "no file"), "no file"),
        rest(functools.partial(time.sleep, 60), "did not close in time"),
    ],
    ids=["dies", "raises", "hangs"],
)
def test_replaced_environment_that_cannot_be_closed(leave, text, build, caplog):
    """A warning says so; its process ends, and the next replacement is exact."""
    env = build([functools.partial(LeavesBadly, leave, 3)], ONE_WORKER, recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    first = env.call("pid")
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        marks = [env.step([ACTIONS])[4][0].get("__common__") for _ in range(6)]
    assert marks == [None, None, MARK] * 2
    assert text in caplog.text
    assert all_gone(*first)
    env.close(terminate=True)


def test_close_while_a_standby_is_in_a_constructor(build, tmp_path):
    """`close` does not wait for it, and no process is left."""
    notes = tmp_path / "notes"

    class SlowLater(Noted):
        def __init__(self, *, seed: int, env_id: int) -> None:
            super().__init__(4, notes, seed=seed, env_id=env_id)
            time.sleep(0.0 if seed == 42 else 60.0)

    env = build([SlowLater], ONE_WORKER, recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    env.step([ACTIONS])
    pids = wait_for(lambda: len(found := processes(notes)) == 2 and found)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 10
    assert gone(pids)


def keeping_options(simulator: Any) -> MultiAgentEnv:
    env = adapt(simulator, None)
    env.options_last = True
    return env


def test_options_that_stay_the_same(build, tmp_path):
    """Standbys of environments that keep their options are constructed again only for other options."""
    notes = tmp_path / "notes"
    env = build([functools.partial(Noted, 3, notes)], ONE_WORKER, DISABLED,
                adapter=keeping_options, recycle=RecyclePolicy(max_episodes=2))  # fmt: skip
    for options in [{"a": 1}] * 6:
        env.reset(options=options)
        for _ in range(3):
            env.step([ACTIONS])
    assert env.stats().recycled == 2
    assert env.get_attr("options") == ({"a": 1},)
    assert notes.read_text().count(" ") // 2 <= 4  # the first, the two that have moved, and perhaps the next one


@pytest.mark.parametrize("begins", ["before", "after"])
def test_traces(begins, build, tmp_path):
    """A trace has the steps of a standby that was ready when it began; it traces no more when the trace has ended."""
    notes, path = tmp_path / "notes", tmp_path / "trace.json"
    env = build([functools.partial(Noted, 4, notes)], ONE_WORKER, recycle=RecyclePolicy(max_episodes=5))

    def steps(count: int) -> int:
        for _ in range(count):
            env.step([ACTIONS])
        return env.stats().recycled

    def traced() -> int:
        env.stop_trace()
        return sum(event["name"] == "step" for event in json.loads(path.read_text())["traceEvents"])

    env.reset()
    if begins == "before":
        env.start_trace(path)
    assert steps(17) == 0
    wait_for(lambda: env.call("pid") and notes.read_text().count("reset") == 2)
    if begins == "before":
        assert traced() == 17
        assert steps(8) == 1
        env.start_trace(path)
        steps(1)
        assert traced() == 1
    else:
        env.start_trace(path)
        assert steps(8) == 1
        assert traced() == 8


def test_limits_that_are_too_low(build, caplog):
    """A worker that is past the limit from its beginning causes one warning; the run goes on."""
    env = build([Slow] * 2, TWO_WORKERS, recycle=RecyclePolicy(max_memory_mb=5))
    env.reset()
    until = time.monotonic() + 60
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        while env.stats().recycled < 4 and time.monotonic() < until:
            env.step([ACTIONS] * 2)
    assert env.stats().recycled >= 4
    assert caplog.text.count("max_memory_mb=5 of the RecyclePolicy is too low") == 1


def test_wrong_arguments(build):
    for arguments, error, word in (
        ({}, ValueError, "needs a limit"),
        ({"max_episodes": 0}, ValueError, "at least 1"),
        ({"max_episodes": 1.5}, TypeError, "integer"),
        ({"max_memory_mb": -1}, ValueError, "positive"),
        ({"max_age_s": "1"}, TypeError, "seconds"),
        ({"kill_above_mb": 5, "max_memory_mb": 10}, ValueError, "more than max_memory_mb"),
    ):
        with pytest.raises(error, match=word):
            RecyclePolicy(**arguments)
    with pytest.raises(TypeError, match="RecyclePolicy"):
        build([Counting], Setup("serial", True, 1), recycle=5)
    with pytest.raises(ValueError, match="restart"):
        build([Counting], Setup("serial", True, 1), recycle=RecyclePolicy(kill_above_mb=100))
    for backend in ("serial", "thread"):
        with pytest.raises(ValueError, match=rf"backend='{backend}' has none: pass backend=\"process\""):
            build([Counting], Setup(backend, True, 1), recycle=RecyclePolicy(max_episodes=100))


def test_memory_that_is_unknown(build, monkeypatch):
    monkeypatch.setattr(ProcessBackend, "memory", lambda *_: None)
    with pytest.warns(RuntimeWarning, match="memory of its workers is unknown"):
        build([Counting], ONE_WORKER, recycle=RecyclePolicy(max_memory_mb=100))


@pytest.mark.filterwarnings("ignore:.*workers share:ResourceWarning")
@pytest.mark.parametrize("halves", [1, rest(2)])
def test_rollouts(halves):
    """Arrays of rollouts, with states, are the same however many workers there are, and where results are pickled."""
    collected = []
    for setup in (Setup("process", False, 4), TWO_WORKERS):
        make_env = functools.partial(simple_spread_v3.parallel_env, max_cycles=5)
        env = StackedVecEnv(ParallelEnv([make_env] * 4, **setup._asdict(), recycle=RecyclePolicy(max_episodes=2)))
        with env:
            rollout = Rollout(env, num_steps=32, halves=halves)
            steps = itertools.count()

            def policy(current, steps=steps):
                step = next(steps)
                return np.array([[(step + env_id) % 5] * 3 for env_id in current.env_ids])

            for _ in range(2):
                arrays = rollout.collect(policy)
                names = ("observations", "rewards", "done", "final_observations", "states", "final_states")
                collected.append([np.array(getattr(arrays, name)) for name in names])
            assert env.parallel_env.stats().recycled >= 16
    for pickled, shared in zip(collected[:2], collected[2:], strict=True):
        for one, other in zip(pickled, shared, strict=True):
            np.testing.assert_array_equal(one, other)
