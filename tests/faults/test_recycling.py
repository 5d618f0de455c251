"""`recycle=`: environments past a limit are replaced where an episode begins, by new ones made in the background."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import re
import signal
import time
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.processes import all_gone, gone, wait_for
from helpers.setups import BACKEND_SETUPS, Setup, rest
from marl_parallel.core.recycling import Recycler
from marl_parallel.core.slots import WorkerQueue
from mpe2 import simple_spread_v3
from simulators.counting import ACTIONS, Counting, CountingDicts
from simulators.crashing import Fate, crashing, seed_of

from marl_parallel import (
    EnvError,
    ParallelEnv,
    RecyclePolicy,
    RestartEvent,
    RestartLimitExceeded,
    RestartPolicy,
    Rollout,
    WorkerCrashed,
)
from marl_parallel.adapters import adapt
from marl_parallel.adapters.protocol import MultiAgentEnv
from marl_parallel.core.messages import Message, Request
from marl_parallel.vector import StackedVecEnv

pytestmark = pytest.mark.release_independent

SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
MARK = {"recycled": True}
SETUPS = [
    Setup("serial", True, 2),
    Setup("thread", True, 2),
    Setup("process", True, 1),
    Setup("process", True, 2),
    Setup("process", False, 2),
    *(setup for setup in BACKEND_SETUPS if setup.backend == "ray"),
]
PROCESSES = [Setup("process", True, 2), rest(Setup("portable", True, 2)), *SETUPS[5:]]
ONE_PROCESS = [
    Setup("process", True, 1),
    rest(Setup("portable", True, 1)),
    *(Setup("ray", True, 1) for _ in SETUPS[5:]),
]
LENGTHS = (3, 5, 4, 6)
each_mode = pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP, DISABLED], ids=lambda mode: mode.name)


class Reference:
    """One environment in a plain loop, which is replaced after so many episodes."""

    def __init__(self, env_id: int, mode: AutoresetMode, episodes: int) -> None:
        self.env_id, self.mode, self.limit = env_id, mode, episodes
        self.rebuilds = 0
        self._make(seed_of(42, env_id, 0))

    def _make(self, seed: int) -> None:
        self.env, self.seed, self.left, self.over = Counting(LENGTHS[self.env_id], seed=seed), seed, self.limit, False
        self.first = True

    def begin(self) -> tuple[dict, dict]:
        """Begin the next episode, in a new environment if this one has had its episodes."""
        recycled = self.left == 0
        if recycled:
            self.env.close()
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


def assert_like_plain_loops(env: ParallelEnv, references: list[Reference], mode: AutoresetMode, steps: int) -> None:
    """Reset and step all environments, and compare all results."""
    assert_same(env.reset(), tuple(zip(*[reference.begin() for reference in references])))
    for _ in range(steps):
        over = [reference.env_id for reference in references if reference.over]
        if mode is DISABLED and over:
            results = env.reset(env_ids=over)
            assert_same(results, tuple(zip(*[references[env_id].begin() for env_id in over])))
        assert_same(env.step([ACTIONS] * 4), tuple(zip(*[reference.step() for reference in references])))


@each_mode
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_like_a_plain_loop(setup, mode, build):
    """With `max_episodes`, results are those of a loop that replaces environments, in any backend."""
    constructors = [functools.partial(Counting, length) for length in LENGTHS]
    env = build(constructors, setup, mode, recycle=RecyclePolicy(max_episodes=2))
    references = [Reference(env_id, mode, 2) for env_id in range(4)]
    assert_like_plain_loops(env, references, mode, 60)
    stats = env.stats()
    assert stats.recycled == sum(reference.rebuilds for reference in references) >= 15
    assert (stats.restarts, stats.faults) == (0, 0)
    assert env.seed() == tuple(reference.seed for reference in references)


@each_mode
@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[2], *(rest(setup) for setup in SETUPS[5:])], ids=str)
def test_one_episode_each(setup, mode, build):
    """The lowest limit, with which spares are needed from the beginning."""
    constructors = [functools.partial(Counting, length) for length in LENGTHS]
    env = build(constructors, setup, mode, recycle=RecyclePolicy(max_episodes=1))
    references = [Reference(env_id, mode, 1) for env_id in range(4)]
    assert_like_plain_loops(env, references, mode, 20)
    assert env.stats().recycled == sum(reference.rebuilds for reference in references) >= 10


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("setup", [SETUPS[0], SETUPS[2]], ids=str)
def test_resets_in_the_middle_of_an_episode(setup, limit, build):
    """Each ends an episode, which counts; the limit is exact."""
    env = build([functools.partial(Counting, 4)], setup, recycle=RecyclePolicy(max_episodes=limit))
    env.reset()
    rebuilds, episodes = 0, 0

    def note(infos: dict[str, Any]) -> None:
        nonlocal rebuilds, episodes
        episodes += 1
        assert ("recycled" in infos.get("__common__", {})) == (episodes == limit)
        if episodes == limit:
            rebuilds, episodes = rebuilds + 1, 0

    for turn in range(12):
        for step in range(2 if turn % 3 == 0 else 4):
            infos = env.step([ACTIONS])[4][0]
            if step == 3:
                note(infos)
        if turn % 3 == 0:
            note(env.reset()[1][0])
    assert env.stats().recycled == rebuilds >= 6


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_asynchronous(setup, build):
    """Also with `send` and `recv`, in the order in which results come."""
    constructors = [functools.partial(Counting, length) for length in LENGTHS]
    env = build(constructors, setup, recycle=RecyclePolicy(max_episodes=2))
    references = [Reference(env_id, SAME_STEP, 2) for env_id in range(4)]
    env.reset_async()
    for reference in references:
        reference.begin()
    env.recv()
    env.send([ACTIONS] * 4)
    for _ in range(150):
        batch = env.recv(min_envs=1)
        for env_id, *dicts in zip(*batch):
            assert_same(tuple(dicts), references[env_id].step())
        env.send([ACTIONS] * len(batch.env_ids), batch.env_ids)
    env.recv()
    assert env.stats().recycled >= 8


class SlowToConstruct(Counting):
    """Also takes 5 ms for a step, so that requests wait in the queue of its worker."""

    def __init__(self, length: int, *, seed: int) -> None:
        super().__init__(length, seed=seed)
        time.sleep(0.3)

    def step(self, actions):
        time.sleep(0.005)
        return super().step(actions)


def test_episodes_that_end_while_their_worker_has_other_requests(build):
    """The limit is exact for the second one, too, of which the worker hears before it has answered for the first."""
    lengths = (3, 3, 50, 50)
    env = build([functools.partial(SlowToConstruct, length) for length in lengths], Setup("process", True, 1),
                recycle=RecyclePolicy(max_episodes=2))  # fmt: skip
    env.reset()
    env.send([ACTIONS] * 4)
    episodes = [0] * 4
    while min(episodes[:2]) < 2:
        batch = env.recv(min_envs=1)
        for env_id, truncated, infos in zip(batch.env_ids, batch.truncateds, batch.infos):
            if truncated["__all__"]:
                episodes[env_id] += 1
                assert ("__common__" in infos) == (episodes[env_id] == 2)
        env.send([ACTIONS] * len(batch.env_ids), batch.env_ids)
    env.recv()


def test_fault_in_the_first_reset(build):
    """The environment that takes its place has as many episodes as any other."""
    make = crashing(functools.partial(Counting, 3), {(0, 0): Fate("raise", "reset")})
    env = build([make], Setup("process", True, 1), on_error="restart", recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    env.step([ACTIONS])
    env.step([ACTIONS])
    assert env.step([ACTIONS])[4][0]["__common__"] == MARK


class KnowsItsProcess(Counting):
    """Infos say how many steps its process had made when it was constructed there."""

    steps_here = 0

    def __init__(self, length: int, *, seed: int) -> None:
        super().__init__(length, seed=seed)
        self.steps_before = KnowsItsProcess.steps_here

    def step(self, actions):
        KnowsItsProcess.steps_here += 1
        *dicts, infos = super().step(actions)
        return (*dicts, {agent: {"steps_before": self.steps_before} for agent in infos})


@pytest.mark.parametrize("setup", PROCESSES, ids=str)
def test_no_step_waits_for_the_constructor_of_a_neighbour(setup, build):
    """Neighbours with episodes of different lengths are constructed where nothing steps, and share workers again."""
    lengths = (2, 3, 7, 17)
    steps = 100 if setup.backend == "ray" else 250  # an actor needs a second to start
    env = build(
        [functools.partial(KnowsItsProcess, length) for length in (*lengths, *lengths)], setup,
        recycle=RecyclePolicy(max_episodes=3),
    )  # fmt: skip
    env.reset()
    workers = []
    for _ in range(steps):
        infos = env.step([ACTIONS] * 8)[4]
        assert all(info[agent]["steps_before"] == 0 for info in infos for agent in info.keys() & ACTIONS.keys())
        workers.append(len(env.runner.pool.present_shares()))
    assert env.stats().recycled == sum(2 * (steps // length // 3) for length in lengths)
    assert min(workers[50:]) < 8


class Slow(KnowsItsProcess):
    """Takes long to be constructed; holds on to memory with each episode."""

    def __init__(self, build_s: float = 0.0, leak_mb: float = 0.0, *, seed: int) -> None:
        super().__init__(4, seed=seed)
        self.leak_mb, self.leaked = leak_mb, []
        time.sleep(build_s)

    def reset(self, seed=None, options=None):
        self.leaked.append(np.ones(int(self.leak_mb * 1e6 / 8)))
        return super().reset(seed, options)

    def step(self, actions):
        time.sleep(0.01)
        return super().step(actions)


@pytest.mark.parametrize("setup", PROCESSES, ids=str)
def test_memory(setup, build):
    """Processes with too much memory end, and their environments are constructed where nothing steps."""
    env = build([functools.partial(Slow, 0.3, 10.0)] * 4, setup, seed=42, recycle=RecyclePolicy(max_memory_mb=250))
    env.reset()
    first = {*env.call("pid")}
    until = time.monotonic() + 80
    while env.stats().recycled < 4 and time.monotonic() < until:
        infos = env.step([ACTIONS] * 4)[4]
        assert all(info[agent]["steps_before"] == 0 for info in infos for agent in info.keys() & ACTIONS.keys())
    assert env.stats().recycled >= 4
    # A worker that has closed its environments is removed by a later step.
    assert wait_for(lambda: env.step([ACTIONS] * 4) and all_gone(*first), timeout=30)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_age(setup, build):
    """Environments are replaced when they are old, each at the end of its own episode."""
    env = build([Slow] * 2, setup, recycle=RecyclePolicy(max_age_s=0.5))
    env.reset()
    until = time.monotonic() + 80
    while env.stats().recycled < 4 and time.monotonic() < until:
        for dicts in env.step([ACTIONS] * 2)[4]:
            if "__common__" in dicts:
                assert dicts["__common__"] == MARK
                assert "final_obs" in dicts["long"]
    assert env.stats().recycled >= 4


@pytest.mark.parametrize("setup", ONE_PROCESS, ids=str)
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
    assert {report for report in reports if report != reports[0]} == set()
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
    assert f"This counts as one fault, of environment {events[0].error.env_ids[0]}" in reports[0]


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
        [functools.partial(Swelling, 40)] * 2, Setup("process", True, 2), on_error="restart",
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


class LargeAtTheEnd(Counting):
    """Takes much memory in the third step, which takes a while, and ends its episode there."""

    def step(self, actions):
        result = super().step(actions)
        if self.steps == 3:
            self.taken = np.ones(1 << 26)
            time.sleep(1.5)
        return result


def test_kill_above_when_the_environment_has_just_left_its_worker(build, monkeypatch, caplog):
    """The spare goes on: the worker that is killed has no environment any more."""
    env = build(
        [functools.partial(LargeAtTheEnd, 3)], Setup("process", True, 1), on_error="restart",
        recycle=RecyclePolicy(max_episodes=1, kill_above_mb=400), warn_after=None,
    )  # fmt: skip
    backend = env.runner.pool.backend
    end, ended = backend.end, []

    def end_when_the_step_is_done(worker: int):
        wait_for(lambda: backend.statuses[worker].running is None)
        ended.append(worker)
        return end(worker)

    monkeypatch.setattr(backend, "end", end_when_the_step_is_done)
    env.reset()
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        infos = [env.step([ACTIONS])[4][0] for _ in range(5)]
    assert ended == [0]
    assert [info.get("__common__") for info in infos] == [None, None, MARK, None, None]
    assert "kill_above_mb=400" in caplog.text
    stats = env.stats()
    assert (stats.recycled, stats.restarts, stats.faults) == (1, 0, 0)


@pytest.mark.rest
def test_send_raises_no_faults(build):
    """A limit that is too low for any process ends the run in `recv`, as all faults do."""
    policy = RecyclePolicy(kill_above_mb=5)
    env = build([Slow] * 2, Setup("process", True, 1), on_error="restart", recycle=policy)
    env.reset()
    deadline, raised = time.monotonic() + 60, False
    while not raised:
        assert time.monotonic() < deadline
        env.send([ACTIONS] * 2)
        try:
            env.recv()
        except RestartLimitExceeded as error:
            raised = "kill_above_mb=5" in str(error)


class SlowMemory:
    """A backend whose memory takes long to measure."""

    asked = 0
    clock = time.monotonic

    def leaving(self) -> tuple[int, ...]:
        self.asked += 1
        return ()

    def memory(self, worker: int) -> int:
        time.sleep(0.2)
        return worker


def test_slow_measurements_of_memory():
    """They become rare, but not too rare; nodes that go are looked for once a second all the same."""
    backend: Any = SlowMemory()
    recycler = Recycler(RecyclePolicy(max_memory_mb=1), backend, [0], 0.0)
    now = time.monotonic()
    for second in range(12):
        recycler.measure([second], now + 1.01 * second)
        assert recycler.memory_mb(second) == (second if second in (0, 10) else 0) / 1e6
    assert backend.asked == 12


FAULTS = [
    ("raise", Setup("serial", True, 2)),
    ("raise", Setup("process", True, 1)),
    ("SIGKILL", Setup("process", True, 1)),
    *(("SIGKILL", Setup("ray", True, 1)) for setup in SETUPS[5:]),
]


@pytest.mark.rest
@each_mode
@pytest.mark.parametrize(("fault", "setup"), FAULTS, ids=str)
@pytest.mark.parametrize("after", [rest(4), 6, 7, rest(9)])
def test_faults_while_environments_move(after, fault, setup, mode, build):
    """Seeds count rebuilds, whatever their reason; nothing hangs, and the other environment loses nothing."""
    fates = {(1, life): Fate(fault, "step", after) for life in range(0, 12, 2)}
    makes = [crashing(functools.partial(CountingDicts, length), fates) for length in (3, 5)]
    env = build(makes, setup, mode, on_error="restart", recycle=RecyclePolicy(max_episodes=2))
    env.reset()
    rebuilds = [0, 0]
    for _ in range(50):
        over = [env_id for env_id in (0, 1) if env.runner.batch.over[env_id]]
        marks = []
        if mode is DISABLED and over:
            marks += zip(over, env.reset(env_ids=over)[1])
        marks += enumerate(env.step([ACTIONS] * 2)[4])
        for env_id, infos in marks:
            mark = infos.get("__common__", {})
            rebuilds[env_id] += ("recycled" in mark) + ("restarted" in mark)
    stats = env.stats()
    assert stats.recycled + stats.restarts == sum(rebuilds)
    assert stats.faults >= 2
    assert stats.recycled >= 4
    assert env.seed() == tuple(seed_of(42, env_id, rebuilds[env_id]) for env_id in (0, 1))


@pytest.mark.parametrize("setup", ONE_PROCESS, ids=str)
def test_worker_that_dies_with_the_spare_of_another_environment(setup, build):
    """One has moved, the spare of the other waits there: the other one goes on as in a plain loop."""
    fates = {(0, 1): Fate("SIGKILL", "step", 2)}
    makes = [crashing(functools.partial(CountingDicts, length), fates) for length in (3, 20)]
    env = build(makes, setup, on_error="restart", recycle=RecyclePolicy(max_episodes=2))
    env.reset()
    plain = CountingDicts(20, seed=seed_of(42, 1, 0))
    plain.reset(seed=seed_of(42, 1, 0))
    marks = set()
    for step in range(1, 60):
        observations, _, _, _, infos = env.step([ACTIONS] * 2)
        marks.update(infos[0].get("__common__", {}))
        if step == 7:
            slots = env.runner.pool.slots
            assert slots[0].worker == slots[1].spare != slots[1].worker
        if step == 40:
            assert infos[1]["__common__"] == MARK
            plain = CountingDicts(20, seed=seed_of(42, 1, 1))
            expected = plain.reset(seed=seed_of(42, 1, 1))[0]
        else:
            expected = plain.step(ACTIONS)[0]
            if step == 20:
                expected = plain.reset()[0]
        assert_same(observations[1], expected)
    assert {"restarted", "recycled"} <= marks
    assert env.stats().restart_kinds == {"death": 1}


class ExitsWithOneSeed(Counting):
    """Environment 1 ends its process in the constructor, if its seed is derived from 1000."""

    def __init__(self, length: int, *, seed: int, env_id: int) -> None:
        super().__init__(length, seed=seed)
        if env_id == 1 and seed == seed_of(1000, 1, 1):
            os._exit(1)


def test_spare_whose_new_seed_ends_its_process(build, caplog):
    """Others have moved to the process of the spare: it is constructed in a further one, and nothing is restarted."""
    makes = [functools.partial(ExitsWithOneSeed, length) for length in (2, 12)]
    policy = RecyclePolicy(max_episodes=2)
    env = build(makes, Setup("process", True, 1), DISABLED, on_error="restart", recycle=policy)
    env.reset()
    deadline = time.monotonic() + 60
    while not env.stats().recycled:
        assert time.monotonic() < deadline
        env.step([ACTIONS] * 2)
        if env.runner.batch.over[0]:
            env.reset(env_ids=[0])
    env.reset(seed=1000, env_ids=[0])
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        while env.seed()[1] != seed_of(1000, 1, 2):
            assert time.monotonic() < deadline
            env.step([ACTIONS] * 2)
            over = [env_id for env_id in (0, 1) if env.runner.batch.over[env_id]]
            if over:
                env.reset(env_ids=over)
    assert "environments [1] could not be constructed" in caplog.text
    assert (env.stats().restarts, env.stats().faults) == (0, 0)


class SlowReset(Counting):
    """Can be constructed only once; a reset takes longer than the time until that is tried again."""

    def __init__(self, path: str, *, seed: int) -> None:
        super().__init__(3, seed=seed)
        if os.path.exists(path):
            raise RuntimeError("no licence left")
        open(path, "w").close()

    def reset(self, seed=None, options=None):
        time.sleep(0.0 if self.resets == 0 else 2.5)
        return super().reset(seed, options)


def test_reset_that_takes_longer_than_the_next_failure(build, tmp_path):
    """The old environment begins the episode once."""
    make = functools.partial(SlowReset, str(tmp_path / "made"))
    env = build([make], Setup("process", True, 1), recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    for step in range(1, 9):
        observations, rewards, *_ = env.step([ACTIONS])
        resets, steps = 1 + step // 3, step % 3
        assert observations[0]["long"][1:].tolist() == [resets, steps]
        assert rewards[0]["long"] == 1.5


class SlowSeededReset(Counting):
    """A reset by the caller takes longer than it takes to construct another one."""

    def reset(self, seed=None, options=None):
        time.sleep(3.0 if options else 0.0)
        return super().reset(seed, options)


@pytest.mark.parametrize("setup", ONE_PROCESS[:1], ids=str)
def test_seed_of_the_caller(setup, build):
    """It reaches the spare that takes over, even if a further spare is ready before its reset ends."""
    make = functools.partial(SlowSeededReset, 3)
    env = build([make] * 2, setup, DISABLED, recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    for round_ in range(2):
        env.step([ACTIONS] * 2)
        observations, _ = env.reset(seed=[5 + round_, None], env_ids=[0, 1], options={"slow": True})
        assert observations[0]["long"].tolist()[0] == 5 + round_
        assert env.seed() == (5 + round_, seed_of(42, 1, round_ + 1))
    assert env.stats().recycled == 4


class SlowStep(Counting):
    """Environment 1 takes long for its fifth step."""

    def __init__(self, length: int, *, seed: int, env_id: int) -> None:
        super().__init__(length, seed=seed)
        self.waits = env_id == 1

    def step(self, actions):
        if self.waits and self.steps == 4:
            time.sleep(3.0)
        return super().step(actions)


def test_spare_behind_a_long_step(build):
    """The spare of one environment waits in a worker in which another one steps: it takes over once, when it can."""
    makes = [functools.partial(SlowStep, length) for length in (40, 40)]
    env = build(makes, Setup("process", True, 1), DISABLED, recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    slots = env.runner.pool.slots
    env.reset(env_ids=[1])  # it moves
    assert slots[0].spare == slots[1].worker != slots[0].worker
    for _ in range(4):
        env.step([ACTIONS] * 2)
    env.send([ACTIONS], [1])
    env.reset_async(env_ids=[0])
    results = {}
    while env.pending:
        batch = env.recv(min_envs=1)
        results.update(zip(batch.env_ids, batch.observations))
    assert results[0]["long"].tolist() == [seed_of(42, 0, 1), 1, 0]
    assert env.seed()[0] == seed_of(42, 0, 1)


class FailsOnce(Counting):
    """Environment 2 ends its process in the constructor of its first spare."""

    def __init__(self, path: str, length: int, *, seed: int, env_id: int) -> None:
        super().__init__(length, seed=seed)
        with open(path, "a") as file:
            file.write(f"{env_id}\n")
        if env_id == 2 and seed == seed_of(42, 2, 1):
            time.sleep(0.5)
            os._exit(1)


def test_lost_spares_of_others_are_constructed_once_more(build, tmp_path):
    made = tmp_path / "made"
    makes = [functools.partial(FailsOnce, str(made), length) for length in (1, 60, 60)]
    env = build(makes, Setup("process", True, 1), recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    deadline = time.monotonic() + 60
    while env.stats().recycled < 5:
        assert time.monotonic() < deadline
        env.step([ACTIONS] * 3)
    assert made.read_text().split().count("1") == 3


class Remembering(Counting):
    def __init__(self, path: str, *, seed: int, env_id: int, restarts: int) -> None:
        super().__init__(3, seed=seed)
        if (env_id, restarts) == (0, 1):
            raise RuntimeError("no licence left")


def test_requested_restarts_of_which_one_fails(build, tmp_path):
    """The spares of the others have other seeds than the environments that were constructed."""
    env = build([functools.partial(Remembering, "")] * 2, Setup("process", True, 1), on_error="restart",
                recycle=RecyclePolicy(max_episodes=2))  # fmt: skip
    env.reset()
    pool = env.runner.pool
    for _ in range(4):
        env.step([ACTIONS] * 2)
    wait_for(lambda: env.step([ACTIONS] * 2) and pool.slots[1].spare is not None)
    with pytest.raises(EnvError, match="no licence left"):
        env.restart()
    seeds = [env.seed()[1]]
    env.reset()
    deadline = time.monotonic() + 30
    while len(seeds) < 3:
        assert time.monotonic() < deadline
        if "recycled" in env.step([ACTIONS] * 2)[4][1].get("__common__", {}):
            seeds.append(env.seed()[1])
    assert len({*seeds}) == 3


@pytest.mark.parametrize("mode", [SAME_STEP, DISABLED], ids=lambda mode: mode.name)
def test_episodes_after_a_fault_between_them(mode, build):
    """A worker that dies while nothing is in flight: an episode that was over does not count twice."""
    env = build([functools.partial(Counting, 4)], Setup("process", True, 1), mode, on_error="restart",
                recycle=RecyclePolicy(max_episodes=2))  # fmt: skip
    env.reset()
    for _ in range(4):
        env.step([ACTIONS])
    os.kill(env.call("pid")[0], signal.SIGKILL)
    with pytest.raises(WorkerCrashed):
        env.call("pid")
    marks: list[str] = []
    steps: list[int] = []
    while "recycled" not in marks:
        if mode is DISABLED and env.runner.batch.over[0]:
            marks += env.reset()[1][0].get("__common__", {})
        if "recycled" not in marks:
            marks += (infos := env.step([ACTIONS])[4][0]).get("__common__", {})
            steps += [] if "restarted" in infos.get("__common__", {}) else [1]
    assert marks.count("restarted") == 1
    assert len(steps) == 8


class DiesInClose(Counting):
    def close(self) -> None:
        os._exit(3)


def test_replaced_environment_that_dies_in_close(build, caplog):
    """A warning says so; the run goes on."""
    makes = [functools.partial(DiesInClose, 3)]
    env = build(makes, Setup("process", True, 1), recycle=RecyclePolicy(max_episodes=2))
    env.reset()
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        wait_for(lambda: env.step([ACTIONS]) and "had already been replaced" in caplog.text)
    assert "died in close of environment 0" in caplog.text


class Moody(Counting):
    """Can be constructed once only."""

    def __init__(self, path: str, *, seed: int) -> None:
        super().__init__(4, seed=seed)
        if os.path.exists(path):
            raise RuntimeError("no licence left")
        self.path = path

    def reset(self, seed=None, options=None):
        with open(self.path, "w"):
            return super().reset(seed, options)


class Licensed(Counting):
    """Environment 1 fails in its eighth step, and its second replacement cannot be constructed; each of these once."""

    def __init__(self, path: str, length: int, *, seed: int, env_id: int, restarts: int) -> None:
        super().__init__(length, seed=seed)
        self.fails_at = 8 if (env_id, restarts) == (1, 0) else None
        if env_id == 1 and restarts == 2 and not os.path.exists(path):
            open(path, "w").close()
            raise RuntimeError("no licence left")

    def step(self, actions):
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at == 0:
                raise RuntimeError("bad terrain")
        return super().step(actions)


@each_mode
def test_spare_that_cannot_be_made_again(mode, build, tmp_path, caplog):
    """Where others have moved already, only its own environment goes on in the old worker; no episode is lost."""
    makes = [functools.partial(Licensed, str(tmp_path / "failed"), length) for length in (2, 6)]
    env = build(makes, Setup("process", True, 1), mode, on_error="restart", recycle=RecyclePolicy(max_episodes=2))
    env.reset()
    marks: list[tuple[int, Any]] = []
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        for _ in range(40):
            over = [env_id for env_id in (0, 1) if env.runner.batch.over[env_id]]
            infos = [*zip(over, env.reset(env_ids=over)[1])] if mode is DISABLED and over else []
            infos += enumerate(env.step([ACTIONS] * 2)[4])
            marks += [
                (env_id, mark) for env_id, info in infos for mark in info.get("__common__", {}) if mark != "error"
            ]
    assert "no licence left" in caplog.text
    assert marks.count((1, "restarted")) == 1
    assert marks.count((0, "recycled")) >= 4
    assert len({env_id for env_id, _ in marks}) == 2


@each_mode
def test_spares_that_cannot_be_made(mode, build, tmp_path, caplog):
    """The old environments go on, and a warning has the error."""
    make = functools.partial(Moody, str(tmp_path / "made"))
    env = build([make] * 2, Setup("process", True, 1), mode, recycle=RecyclePolicy(max_episodes=2))
    env.reset()
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        for _ in range(30):
            over = [env_id for env_id in (0, 1) if env.runner.batch.over[env_id]]
            if mode is DISABLED and over:
                env.reset(env_ids=over)
            for infos in env.step([ACTIONS] * 2)[4]:
                assert "__common__" not in infos
    assert env.stats().recycled == 0
    assert "no licence left" in caplog.text
    assert "tried again in 1 s" in caplog.text


class FailsWithOneSeed(Counting):
    """Cannot be constructed with one seed, however often it is tried."""

    def __init__(self, *, seed: int, env_id: int, fails: Any) -> None:
        super().__init__(4, seed=seed)
        if env_id == 1 and seed == seed_of(42, 1, 1):
            fails()


@pytest.mark.parametrize(
    "fails",
    [functools.partial(int, "no map"), functools.partial(os._exit, 1), functools.partial(time.sleep, 60)],
    ids=["raises", "dies", "hangs"],
)
@pytest.mark.parametrize("setup", PROCESSES, ids=str)
def test_seed_with_which_nothing_can_be_constructed(fails, setup, build, caplog):
    """It is tried again soon, with the next seed; the environments of other workers do not wait for that."""
    make = functools.partial(FailsWithOneSeed, fails=fails)
    env = build([make] * 4, setup, recycle=RecyclePolicy(max_episodes=2), start_timeout=10.0)
    env.reset()
    deadline = time.monotonic() + 60.0
    seeds: list[list[int]] = [[], [], [], []]
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        while not seeds[1] or len(seeds[3]) < 2:
            assert time.monotonic() < deadline, seeds
            for env_id, infos in enumerate(env.step([ACTIONS] * 4)[4]):
                if "recycled" in infos.get("__common__", {}):
                    seeds[env_id].append(env.seed()[env_id])
    assert "tried again in 1 s" in caplog.text
    assert seeds[1][0] == seed_of(42, 1, 2)
    assert seeds[0][0] == seed_of(42, 0, 1)
    assert seeds[3][:2] == [seed_of(42, 3, 1), seed_of(42, 3, 2)]


def test_environments_share_a_worker_again(build, monkeypatch):
    """One that could not be constructed with its neighbours takes them along later, although they have not leaked."""
    leaking = {0}  # workers
    monkeypatch.setattr(Recycler, "is_past_limit", lambda _, worker, *__: worker in leaking)
    make = functools.partial(FailsWithOneSeed, fails=functools.partial(int, "no map"))
    env = build([make] * 3, Setup("process", True, 1), recycle=RecyclePolicy(max_age_s=1000))
    env.reset()
    shares = env.runner.pool.present_shares

    def step_until(expected: list[tuple[int, ...]]) -> bool:
        return wait_for(lambda: env.step([ACTIONS] * 3) and sorted(map(tuple, shares().values())) == expected)

    assert step_until([(0, 2), (1,)])
    assert step_until([(0, 1, 2)])
    assert {*shares()}.isdisjoint(leaking)
    assert [slot.recycled for slot in env.runner.pool.slots] == [2, 1, 2]


class Listed(Counting):
    """Adds the seed of each construction to a file; takes long to be constructed."""

    def __init__(self, path: str, *, seed: int) -> None:
        super().__init__(40, seed=seed)
        time.sleep(0.3)
        with open(path, "a") as file:
            file.write(f"{seed}\n")


def test_seeds_that_change_faster_than_spares_are_constructed(build, tmp_path):
    """Only the present and the next construction are outstanding, and the spare has the last seed."""
    made = tmp_path / "made"
    made.touch()
    listed, policy = functools.partial(Listed, str(made)), RecyclePolicy(max_episodes=60)
    env = build([listed], Setup("process", True, 1), DISABLED, recycle=policy)
    env.reset()
    seed = 100
    while not env.stats().recycled:
        seed += 1
        env.step([ACTIONS])
        time.sleep(0.03)  # so that there is time for a spare before the last episode
        before = made.read_text().split()
        env.reset(seed=seed)
    assert seed == 160
    assert len(made.read_text().split()) <= len(before) + 2
    assert env.seed() == (seed,)


def test_last_spare_of_a_worker_that_cannot_be_constructed(build, tmp_path):
    """Nothing counts as outstanding any more, so that the next waits are as long as before."""
    makes = [functools.partial(Counting, 4), functools.partial(Moody, str(tmp_path / "made"))]
    env = build(makes, Setup("process", True, 1), recycle=RecyclePolicy(max_episodes=2))
    env.reset()
    for _ in range(30):
        assert "__common__" not in env.step([ACTIONS] * 2)[4][1]
    wait_for(lambda: env.step([ACTIONS] * 2) and env.runner.pool._for_spares == 0)  # it is tried again and again


def test_close_while_spares_are_made(build):
    """`close` does not wait for a constructor in the background, and no process is left."""
    env = build([Counting] * 2, Setup("process", True, 1), recycle=RecyclePolicy(max_episodes=1))
    env.close()
    slow = functools.partial(Slow, 2.0)
    env = build([slow] * 2, Setup("process", True, 1), recycle=RecyclePolicy(max_age_s=0.1))
    env.reset()
    pids = env.call("pid")
    for _ in range(12):
        env.step([ACTIONS] * 2)
        time.sleep(0.05)
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 1.5
    assert gone(pids)


def test_new_base_seed(build):
    """Spares have seeds of the base that the last `reset(seed=)` has set."""
    env = build([functools.partial(Counting, 4)] * 2, Setup("process", True, 1), recycle=RecyclePolicy(max_episodes=2))
    env.reset()
    for _ in range(6):
        env.step([ACTIONS] * 2)
    env.reset(seed=1000)
    for _ in range(12):
        env.step([ACTIONS] * 2)
    recycled = env.stats().recycled // 2
    assert recycled >= 1
    assert env.seed() == tuple(seed_of(1000, env_id, recycled) for env_id in (0, 1))


def test_states_and_calls(build):
    """Calls, attributes and traces reach all environments while some have moved."""
    env = build([functools.partial(Counting, 3 + i) for i in range(4)], Setup("process", True, 1),
                recycle=RecyclePolicy(max_episodes=1))  # fmt: skip
    env.reset()
    for _ in range(10):
        env.step([ACTIONS] * 4)
        assert env.get_attr("length") == (3, 4, 5, 6)
        env.set_attr("options", [1, 2, 3, 4])


def episodes_at_marks(env: ParallelEnv, env_id: int, steps: int, killed_at: int) -> list[int]:
    """How many episodes environments had, those that were replaced by a spare since step `killed_at`."""
    counts, episodes, mode = [], 0, env.runner.mode
    for step in range(1, steps):
        common = {}
        was_over = env.runner.batch.over[env_id]
        if mode is DISABLED and was_over and step != killed_at:
            common, was_over = env.reset(env_ids=[env_id])[1][0].get("__common__", {}), False
            if "recycled" in common:
                counts, episodes = [*counts, episodes], 0
        _, _, terminateds, truncateds, infos = env.step([ACTIONS] * env.num_envs)
        common = infos[env_id].get("__common__", {})
        if "restarted" in common:
            counts, episodes = [], 0
            continue
        episodes += not was_over and (terminateds[env_id]["__all__"] or truncateds[env_id]["__all__"])
        if "recycled" in common:
            counts, episodes = [*counts, episodes], 0
    return counts


@pytest.mark.parametrize(
    ("mode", "killer", "killed_at"),
    [(SAME_STEP, 1, 3), (NEXT_STEP, 1, 2), (NEXT_STEP, 1, 3), (NEXT_STEP, 1, 4), (NEXT_STEP, 0, 4), (DISABLED, 0, 4)],
    ids=str,
)
def test_neighbour_that_ends_the_process_where_an_episode_ends(mode, killer, killed_at, build):
    """Before or after it in the same step: the ends of episodes that the caller receives are those that count."""
    lengths = {killer: 100, 1 - killer: 3}
    fates = {(killer, 0): Fate("SIGKILL", "step", killed_at - 1)}
    makes = [crashing(functools.partial(Counting, lengths[env_id]), fates) for env_id in (0, 1)]
    env = build(makes, Setup("process", True, 1), mode, on_error="restart", recycle=RecyclePolicy(max_episodes=2))
    env.reset()
    counts = episodes_at_marks(env, 1 - killer, 40, killed_at)
    assert counts == [2] * len(counts)
    assert len(counts) >= 3


class FailsInItsFirstRestart(Counting):
    def __init__(self, length: int, *, seed: int, env_id: int, restarts: int) -> None:
        super().__init__(length, seed=seed)
        self.kills = (env_id, restarts) == (1, 0)
        time.sleep(0.5 if restarts == 1 else 0.0)
        if (env_id, restarts) == (0, 1):
            raise RuntimeError("no licence left")

    def step(self, actions):
        if self.kills and self.steps == 1:
            os._exit(3)
        return super().step(actions)


def test_second_fault_while_a_reset_waits_for_the_first(build):
    env = build([functools.partial(FailsInItsFirstRestart, length) for length in (2, 100)],
                Setup("process", True, 1), on_error="restart", recycle=RecyclePolicy(max_episodes=3))  # fmt: skip
    env.reset()
    env.step([ACTIONS] * 2)
    env.send([ACTIONS], [1])
    with pytest.raises(TimeoutError):
        env.recv(1, timeout=0.3)
    assert env.runner.pool.slots[0].rebuilding
    env.reset_async(env_ids=[0])
    env.recv()
    marks = ["recycled" in env.step([ACTIONS], [0])[4][0].get("__common__", {}) for _ in range(12)]
    assert [place for place, mark in enumerate(marks, 1) if mark] == [6, 12]


class FailsInOneReset(Counting):
    """Its first spare fails in a reset with options; none can be constructed after the next life."""

    def __init__(self, length: int, *, seed: int, restarts: int) -> None:
        super().__init__(length, seed=seed)
        self.restarts = restarts
        if restarts >= 3:
            raise RuntimeError("no licence left")

    def reset(self, seed=None, options=None):
        if options and self.restarts == 1:
            raise RuntimeError("bad options")
        return super().reset(seed, options)


def test_spare_that_fails_before_its_first_result(build):
    """The report of the fault has no mark, nor has an episode that begins in the same environment later."""
    env = build([functools.partial(FailsInOneReset, 3)], Setup("process", True, 1), DISABLED, on_error="restart",
                recycle=RecyclePolicy(max_episodes=1))  # fmt: skip
    env.reset()
    for options in ({"x": 1}, None, None):
        for _ in range(3):
            env.step([ACTIONS])
        (infos,) = env.reset(options=options)[1]
        assert "recycled" not in infos.get("__common__", {})
        assert ("restarted" in infos.get("__common__", {})) == (options is not None)


class Brief(Counting):
    def step(self, actions):
        time.sleep(0.001)
        return super().step(actions)


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_age_of_a_neighbour_whose_episode_is_long(backend, build):
    """An environment is replaced when it is old itself, not at each of its ends while its neighbour is old."""
    makes = [functools.partial(Brief, length) for length in (3, 100_000)]
    env = build(makes, Setup(backend, True, 1), recycle=RecyclePolicy(max_age_s=0.5, max_episodes=60))
    env.reset()
    episodes, moves, since = 0, [], time.monotonic()
    until = since + 4.0
    while time.monotonic() < until or len(moves) < 3:
        infos = env.step([ACTIONS] * 2)[4][0]
        episodes += "final_obs" in infos["long"]
        if "__common__" in infos:
            moves.append((episodes, time.monotonic() - since))
            episodes, since = 0, time.monotonic()
    # The first one may have moved with its neighbour.
    assert all(count == 60 or seconds > 0.4 for count, seconds in moves[1:]), moves


def test_a_request_to_retire_is_no_step_that_a_caller_waits_for():
    queue = WorkerQueue((0, 1), 0)
    queue.requests.append((Request(Message.RETIRE, (0,), True), 1, None))
    assert not queue.owes_one_reply({0})
    queue.requests.append((Request(Message.STEP, (0, 1)), 2, None))
    assert queue.owes_one_reply({0})


class Constructed(Counting):
    """Each construction adds a letter to a file."""

    def __init__(self, path: str, *, seed: int) -> None:
        super().__init__(3, seed=seed)
        with open(path, "a") as file:
            file.write("x")


def keeping_options(simulator: Any) -> MultiAgentEnv:
    env = adapt(simulator, None)
    env.options_last = True
    return env


def test_options_that_stay_the_same(build, tmp_path):
    """Spares of environments that keep their options are constructed again only for other options."""
    made = tmp_path / "made"
    env = build([functools.partial(Constructed, str(made))], Setup("process", True, 1), DISABLED,
                adapter=keeping_options, recycle=RecyclePolicy(max_episodes=2))  # fmt: skip
    for options in [{"a": 1}] * 6:
        env.reset(options=options)
        for _ in range(3):
            env.step([ACTIONS])
    assert env.stats().recycled == 2
    assert wait_for(lambda: env.call("pid") and env.runner.pool._for_spares == 0)
    assert len(made.read_text()) <= 4  # the first, the two that have taken over, and perhaps the next one


@pytest.mark.parametrize("begins", ["before", "after"])
def test_traces(begins, build, tmp_path):
    """A trace has the steps of spares that were ready when it began; they trace no more when it has ended."""
    env = build([functools.partial(Counting, 4)], Setup("process", True, 1), recycle=RecyclePolicy(max_episodes=5))
    path = tmp_path / "trace.json"

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
    assert wait_for(lambda: env.call("pid") and env.runner.pool._is_prepared(env.runner.pool.slots[0]))
    if begins == "before":
        assert traced() == 17
        assert steps(8) == 1
    env.start_trace(path)
    if begins == "before":
        steps(1)
        assert traced() == 1
    else:
        assert steps(8) == 1
        assert traced() == 8


def fates_at_random(rng: np.random.Generator, backend: str, num_envs: int) -> dict[tuple[int, int], Fate]:
    kinds = ["raise"] if backend != "process" else ["raise", "SIGKILL"]
    share = rng.choice([0.0, 0.2, 0.5])
    places = [("step", 12), ("step", 12), ("reset", 3)]
    fates = {}
    for life in itertools.product(range(num_envs), range(60)):
        if rng.random() < share:
            place, most = places[rng.integers(3)]
            fates[life] = Fate(str(rng.choice(kinds)), place, int(rng.integers(place == "reset", most + 1)))
    return fates


class Count:
    """The episodes of one environment, as the results that its caller receives say; checks the marks in them."""

    def __init__(self, mode: AutoresetMode, limit: int) -> None:
        self.mode, self.limit, self.episodes, self.over, self.begun, self.marks = mode, limit, 0, False, False, 0

    def note(self, is_reset: bool, terminated: Any, truncated: Any, infos: dict) -> None:
        common = infos.get("__common__", {})
        ended = not is_reset and bool(terminated["__all__"] or truncated["__all__"])
        was_over, self.over = self.over, ended and self.mode is not SAME_STEP
        recycled, begun, self.begun = "recycled" in common, self.begun, True
        if "restarted" in common:
            assert not recycled
            self.episodes = 0
            return
        if is_reset:
            self.episodes += begun and not was_over
            begins = begun
        else:
            self.episodes += ended and not was_over
            begins = ended if self.mode is SAME_STEP else self.mode is NEXT_STEP and was_over
        assert recycled == (begins and self.episodes == self.limit)
        if recycled:
            self.episodes, self.marks = 0, self.marks + 1


@pytest.mark.parametrize("seed", [*range(4), *map(rest, range(4, 20))])
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_exact_at_random(backend, seed, build):
    """Any mode, limit, lengths, faults, and order of calls: the limit is exact, and so are seeds and counts."""
    rng = np.random.default_rng(seed)
    mode, num_envs, limit = (SAME_STEP, NEXT_STEP, DISABLED)[seed % 3], int(rng.integers(1, 5)), int(rng.integers(1, 4))
    fates = fates_at_random(rng, backend, num_envs)
    makes = [crashing(functools.partial(Counting, int(rng.integers(1, 7))), fates) for _ in range(num_envs)]
    workers = int(rng.integers(1, min(num_envs, 2) + 1))
    env = build(makes, Setup(backend, True, workers), mode, on_error="restart", warn_after=None,
                restart_policy=RestartPolicy(max_restarts=-1, rate_limit=-1),
                recycle=RecyclePolicy(max_episodes=limit))  # fmt: skip
    counts = [Count(mode, limit) for _ in range(num_envs)]
    for count, infos in zip(counts, env.reset()[1], strict=True):
        count.note(True, {}, {}, infos)
    resets: dict[int, bool] = {}  # of the environments in flight
    for turn in range(150):
        idle = [env_id for env_id in range(num_envs) if env_id not in resets]
        chosen = [env_id for env_id in idle if rng.random() < 0.7] if turn < 120 else []
        again = [one for one in chosen if rng.random() < 0.05 or (mode is DISABLED and counts[one].over)]
        stepped = [env_id for env_id in chosen if env_id not in again]
        if again:
            env.reset_async(env_ids=again)
        if stepped:
            env.send([ACTIONS] * len(stepped), stepped)
        resets |= {env_id: env_id in again for env_id in chosen}
        if resets:
            batch = env.recv(min_envs=int(rng.integers(0, 2)))
            for env_id, _, _, terminated, truncated, infos in zip(*batch):
                counts[env_id].note(resets.pop(env_id), terminated, truncated, infos)
    while resets:
        batch = env.recv(1)
        for env_id, _, _, terminated, truncated, infos in zip(*batch):
            counts[env_id].note(resets.pop(env_id), terminated, truncated, infos)
    slots, stats = env.runner.pool.slots, env.stats()
    assert env.seed() == tuple(seed_of(42, slot.env_id, slot.rebuilds) for slot in slots)
    assert sum(slot.rebuilds for slot in slots) == stats.recycled + stats.restarts
    # One that fails before its first result has no mark.
    assert 0 <= stats.recycled - sum(count.marks for count in counts) <= stats.restarts


def test_limits_that_are_too_low(build, caplog):
    """A worker that is past the limit from its beginning causes one warning; the run goes on."""
    env = build([Slow] * 2, Setup("process", True, 2), recycle=RecyclePolicy(max_memory_mb=5))
    env.reset()
    until = time.monotonic() + 30
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        while env.stats().recycled < 4 and time.monotonic() < until:
            env.step([ACTIONS] * 2)
    assert env.stats().recycled >= 4
    assert caplog.text.count("max_memory_mb=5 of the RecyclePolicy is too low") == 1


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({}, ValueError, "needs a limit"),
        ({"max_episodes": 0}, ValueError, "at least 1"),
        ({"max_episodes": 1.5}, TypeError, "integer"),
        ({"max_memory_mb": -1}, ValueError, "positive"),
        ({"max_age_s": "1"}, TypeError, "seconds"),
        ({"kill_above_mb": 5, "max_memory_mb": 10}, ValueError, "more than max_memory_mb"),
    ],
)
def test_wrong_policies(arguments, error, word):
    with pytest.raises(error, match=word):
        RecyclePolicy(**arguments)


def test_wrong_arguments(build):
    with pytest.raises(TypeError, match="RecyclePolicy"):
        build([Counting], Setup("serial", True, 1), recycle=5)
    with pytest.raises(ValueError, match="restart"):
        build([Counting], Setup("serial", True, 1), recycle=RecyclePolicy(kill_above_mb=100))
    with pytest.warns(RuntimeWarning, match="memory of its workers"):
        build([Counting], Setup("serial", True, 1), recycle=RecyclePolicy(max_memory_mb=100))


@pytest.mark.parametrize("halves", [1, 2])
def test_rollouts(halves):
    """Arrays of rollouts, with states, are those of a batch in line, whose environments are replaced in place."""
    collected = []
    for setup in (Setup("serial", True, 2), Setup("process", True, 2)):
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
    for in_line, in_processes in zip(collected[:2], collected[2:], strict=True):
        for one, other in zip(in_line, in_processes, strict=True):
            np.testing.assert_array_equal(one, other)
