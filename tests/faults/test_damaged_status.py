"""A worker's status that native code of a simulator has overwritten: it neither ends a run nor hides a fault."""

from __future__ import annotations

import functools
import math

import pytest
from helpers.setups import Setup
from simulators.overwriting import Overwriting

from marl_parallel import WorkerCrashed

pytestmark = pytest.mark.release_independent

PROCESS, PORTABLE = Setup("process", True, 2), Setup("portable", True, 2)
ENV, ACTIVITY, SINCE, DISCARDED = range(4)
DAMAGE = [
    {ENV: 10**6},
    {ENV: -(2**63)},
    {ENV: 2**63 - 1},
    {ACTIVITY: 99},
    {ACTIVITY: -1, SINCE: math.nan},
    {SINCE: math.inf},
    {DISCARDED: 1 << 40},
]
REST = [pytest.param(PORTABLE, damage) for damage in DAMAGE[:4:3]]


def made(build, setup, damage, then, **more):
    """The second of two environments overwrites the status of its worker."""
    constructors = [functools.partial(Overwriting, *how) for how in (({}, "return"), (damage, then))]
    return build(constructors, setup, False, **more)


@pytest.mark.parametrize(("setup", "damage"), [*((PROCESS, damage) for damage in DAMAGE), *REST], ids=str)
def test_results_arrive_and_the_worker_goes_on(setup, damage, build):
    env = made(build, setup, damage, "return")
    env.reset()
    for time in range(1, 5):
        assert env.step([{"a": 0}] * 2)[0] == ({"a": time},) * 2
    assert "worker 1" in str(env.stats())


@pytest.mark.parametrize(("setup", "damage"), [*((PROCESS, damage) for damage in DAMAGE), *REST], ids=str)
def test_a_death_is_reported(setup, damage, build):
    env = made(build, setup, damage, "die")
    env.reset()
    env.step([{"a": 0}] * 2)
    with pytest.raises(WorkerCrashed, match="worker 1") as caught:
        env.step([{"a": 0}] * 2)
    assert caught.value.env_ids == (1,)


@pytest.mark.parametrize(("setup", "damage"), [*((PROCESS, damage) for damage in DAMAGE), *REST], ids=str)
def test_a_timeout_comes(setup, damage, build):
    env = made(build, setup, damage, "hang", step_timeout=0.3, on_error="restart")
    env.reset()
    env.step([{"a": 0}] * 2)
    infos = env.step([{"a": 0}] * 2)[4]
    assert infos[0] == {}
    assert "has not finished its step within 0.3 s" in infos[1]["__common__"]["error"]
