"""Simulators of all kinds of trouble, for thousands of steps: the run goes on, nothing is lost and nothing is left.

When each life ends, where and how, is drawn beforehand from a seed. `restart_reference` works out what must come of it.

pytest                                  one schedule for each way to step
CHAOS_SEEDS=20 pytest -k chaos          so many
CHAOS_SEEDS=20 CHAOS_FIRST=100 pytest   from another first one on
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers.leaks import Held
from helpers.restart_comparison import OFTEN, Play, actions_for
from helpers.restart_reference import World, assert_as_told
from simulators.crashing import DEADLY, HANGING, RAISED, Children, Fate, Fates, crashing
from simulators.deterministic import Skirmish

from marl_parallel import ParallelEnv

pytestmark = [pytest.mark.release_independent, pytest.mark.whole_machine]

NUM_ENVS = 16
FIRST = int(os.environ.get("CHAOS_FIRST", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("CHAOS_SEEDS", "1")))
LIMITS = {"step_timeout": 3.0, "reset_timeout": 3.0}
each_seed = pytest.mark.parametrize("seed", SEEDS)


def fates_of(seed: int, hangs: int, deaths: int) -> Fates:
    """How lives end, of as many in each environment as will be lived, and of some more.

    Args:
        seed: Of the schedule.
        hangs: How many first lives end in something that never returns.
        deaths: How many lives of each environment end otherwise.
    """
    rng = np.random.default_rng(seed)

    def way(ways: list[str]) -> str:
        return ways[int(rng.integers(len(ways)))]

    fates: dict[tuple[int, int], Fate] = {}
    for env_id in range(NUM_ENVS):
        for life in range(deaths):
            place = ["step", "step", "step", "reset", "constructor"][int(rng.integers(5 if life else 4))]
            after = int(rng.integers(0, 60)) if place == "step" else int(rng.integers(0, 6))
            fates[env_id, life] = Fate(way(RAISED + DEADLY), place, 0 if place == "constructor" else after)
    for env_id in rng.permutation(NUM_ENVS)[:hangs]:
        fates[int(env_id), 0] = Fate(way(HANGING), ["step", "reset"][int(rng.integers(2))], int(rng.integers(1, 9)))
    return fates


@pytest.fixture
def children(tmp_path, monkeypatch) -> Iterator[Children]:
    """Child processes of simulators; when all is over, there is nothing more than there was before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what others put into the usual one is not ours
    children = Children(os.getpid() * 10_000 + int(time.time() * 1000) % 10_000)
    use_once(children)
    before = Held.now()
    yield children
    assert children.gone()
    now = Held.now()
    assert not now.processes - before.processes
    assert not now.threads - before.threads
    assert not Counter(now.descriptors) - Counter(before.descriptors)
    assert now.mappings <= before.mappings
    assert not now.shared - before.shared
    assert not now.temporary - before.temporary


def use_once(children: Children) -> None:
    """What is loaded at first use may stay."""
    constructor = crashing(Skirmish, {(0, 0): Fate("SIGKILL"), (1, 0): Fate("raise")}, started=children)
    with ParallelEnv([constructor] * 2, num_workers=2, on_error="restart") as env:
        env.reset()
        env.step([{}, {}])


def chaotic(fates: Fates, children: Children, mode: AutoresetMode, **more: Any) -> ParallelEnv:
    constructors = [crashing(Skirmish, fates, started=children)] * NUM_ENVS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # there are fewer CPUs than workers
        return ParallelEnv(constructors, mode, on_error="restart", restart_policy=OFTEN, **LIMITS, **more)


@each_seed
@pytest.mark.parametrize(
    ("num_workers", "mode"),
    [(4, AutoresetMode.SAME_STEP), (4, AutoresetMode.NEXT_STEP), (16, AutoresetMode.DISABLED)],
    ids=lambda value: getattr(value, "name", value),
)
def test_chaos_in_lockstep(num_workers, mode, seed, children):
    """All step at once; those that share a worker die together."""
    fates = fates_of(seed, hangs=1, deaths=4)
    world = World(Skirmish, NUM_ENVS, num_workers, mode, fates)
    with chaotic(fates, children, mode, num_workers=num_workers) as env:
        going = Play(env, world, Skirmish, mode, seed=seed)
        going.go(200)
        going.check_counts()
        assert sum(world.restarts) >= NUM_ENVS
        assert children.running()


@each_seed
def test_chaos_one_by_one(seed, children):
    """Each steps as soon as it can, while others are being built anew; of thousands of steps, none is missing."""
    mode = AutoresetMode.SAME_STEP
    fates = fates_of(seed, hangs=10, deaths=6)
    rng = np.random.default_rng(seed)
    world = World(Skirmish, NUM_ENVS, NUM_ENVS, mode, fates)
    with chaotic(fates, children, mode, num_workers=NUM_ENVS, shared_memory=bool(seed % 2)) as env:
        assert_as_told(env.reset(), world.reset(), "reset")
        left, due = [250] * NUM_ENVS, {}
        while any(left) or due:
            actions = {i: actions_for(Skirmish, rng) for i in range(NUM_ENVS) if left[i] and i not in due}
            for i in actions:
                left[i] -= 1
                due[i] = world.step([actions[i]], [i])
            if actions:
                env.send(actions)
            batch = env.recv(min_envs=1, timeout=60.0)
            for place, i in enumerate(batch.env_ids):
                one = tuple((part[place],) for part in batch[1:])
                assert_as_told(one, due.pop(i), f"environment {i}, {left[i]} steps to come")
        assert env.stats().restarts == sum(world.restarts)
        assert env.seed() == world.seeds
        assert sum(world.restarts) >= 3 * NUM_ENVS
