"""Worker processes with random faults for thousands of steps: the run goes on, nothing is lost and nothing is left.

`tests/simulation` has many more schedules, without processes.

When, where and how each life ends is drawn from a seed in advance. `restart_reference` computes the expected results.

pytest                                  one schedule for each way to step
CHAOS_SEEDS=20 pytest -k chaos          20 schedules
CHAOS_SEEDS=20 CHAOS_FIRST=100 pytest   20 schedules from number 100 on
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers.leaks import HeldResources
from helpers.restart_comparison import OFTEN, RestartComparison, actions_for
from helpers.restart_reference import RestartReference, assert_same_with_reports
from helpers.setups import rest
from simulators.crashing import DEADLY, HANGING, RAISED, Children, Fate, Fates, crashing
from simulators.deterministic import Skirmish

from marl_parallel import ParallelEnv

pytestmark = [pytest.mark.release_independent, pytest.mark.whole_machine]

NUM_ENVS = 16
ONE_BY_ONE = 6  # environments, each with a worker of its own
FIRST = int(os.environ.get("CHAOS_FIRST", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("CHAOS_SEEDS", "1")))
LIMITS = {"step_timeout": 3.0, "reset_timeout": 3.0}
each_seed = pytest.mark.parametrize("seed", SEEDS)


def fates_of(seed: int, num_envs: int, hangs: int, deaths: int) -> Fates:
    """The scheduled faults: at least as many lives per environment as the test needs.

    Args:
        seed: The seed of the schedule.
        num_envs: The number of environments.
        hangs: The number of first lives that end in a call that never returns.
        deaths: The number of lives of each environment that end in another way.
    """
    rng = np.random.default_rng(seed)

    def drawn(faults: list[str]) -> str:
        return faults[int(rng.integers(len(faults)))]

    fates: dict[tuple[int, int], Fate] = {}
    for env_id in range(num_envs):
        for life in range(deaths):
            place = ["step", "step", "step", "reset", "constructor"][int(rng.integers(5 if life else 4))]
            after = int(rng.integers(0, 60)) if place == "step" else int(rng.integers(0, 6))
            fates[env_id, life] = Fate(drawn(RAISED + DEADLY), place, 0 if place == "constructor" else after)
    for env_id in rng.permutation(num_envs)[:hangs]:
        fates[int(env_id), 0] = Fate(drawn(HANGING), ["step", "reset"][int(rng.integers(2))], int(rng.integers(1, 9)))
    return fates


@pytest.fixture
def children(tmp_path, monkeypatch) -> Iterator[Children]:
    """Child processes of simulators; after the test, no process is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # files of other programs do not count
    children = Children(os.getpid() * 10_000 + int(time.time() * 1000) % 10_000)
    use_once(children)
    before = HeldResources.now()
    yield children
    assert children.gone()
    assert not HeldResources.now().beyond(before)


def use_once(children: Children) -> None:
    """Load everything that is loaded at first use."""
    constructor = crashing(Skirmish, {(0, 0): Fate("SIGKILL"), (1, 0): Fate("raise")}, started=children)
    with ParallelEnv([constructor] * 2, num_workers=2, on_error="restart") as env:
        env.reset()
        env.step([{}, {}])


def chaotic(fates: Fates, num_envs: int, children: Children, mode: AutoresetMode, **more: Any) -> ParallelEnv:
    constructors = [crashing(Skirmish, fates, started=children)] * num_envs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # there are fewer CPUs than workers
        return ParallelEnv(constructors, mode, on_error="restart", restart_policy=OFTEN, **LIMITS, **more)


@each_seed
@pytest.mark.parametrize(
    ("num_workers", "mode"),
    [(4, AutoresetMode.SAME_STEP), rest(4, AutoresetMode.NEXT_STEP), rest(16, AutoresetMode.DISABLED)],
    ids=lambda value: getattr(value, "name", value),
)
def test_chaos_in_lockstep(num_workers, mode, seed, children):
    """All environments step together; those that share a worker die together."""
    fates = fates_of(seed, NUM_ENVS, hangs=1, deaths=4)
    world = RestartReference(Skirmish, NUM_ENVS, num_workers, mode, fates)
    with chaotic(fates, NUM_ENVS, children, mode, num_workers=num_workers) as env:
        going = RestartComparison(env, world, Skirmish, mode, seed=seed)
        going.go(200)
        going.check_counts()
        assert sum(world.restarts) >= NUM_ENVS
        assert children.running()


@each_seed
def test_chaos_one_by_one(seed, children):
    """Each environment steps as soon as it can while others are rebuilt; none of thousands of steps is missing."""
    mode = AutoresetMode.SAME_STEP
    num_envs = ONE_BY_ONE
    fates = fates_of(seed, num_envs, hangs=2, deaths=4)
    rng = np.random.default_rng(seed)
    world = RestartReference(Skirmish, num_envs, num_envs, mode, fates)
    with chaotic(fates, num_envs, children, mode, num_workers=num_envs, shared_memory=bool(seed % 2)) as env:
        assert_same_with_reports(env.reset(), world.reset(), "reset")
        left, due = [150] * num_envs, {}
        while any(left) or due:
            actions = {i: actions_for(Skirmish, rng) for i in range(num_envs) if left[i] and i not in due}
            for i in actions:
                left[i] -= 1
                due[i] = world.step([actions[i]], [i])
            if actions:
                env.send(actions)
            batch = env.recv(min_envs=1, timeout=60.0)
            for place, i in enumerate(batch.env_ids):
                one = tuple((part[place],) for part in batch[1:])
                assert_same_with_reports(one, due.pop(i), f"environment {i}, {left[i]} steps to come")
        assert env.stats().restarts == sum(world.restarts)
        assert env.seed() == world.seeds
        assert sum(world.restarts) >= 3 * num_envs
