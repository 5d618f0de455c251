"""`env.runner`, the deprecated interface below `ParallelEnv`: it warns, and works as in the release before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv
from marl_parallel.core.exclusive import exclusive
from marl_parallel.runner import BatchRunner
from marl_parallel.vector import StackedVecEnv

ACTIONS = [{"agent_0": 1, "agent_1": 2, "agent_2": 3}] * 4


def opened() -> ParallelEnv:
    return ParallelEnv([simple_spread_v3.parallel_env] * 4, seed=5, num_workers=2, backend="serial")


@pytest.fixture
def expected() -> Iterator[ParallelEnv]:
    """An environment that is stepped by its own methods."""
    with opened() as env:
        yield env


@pytest.fixture
def env() -> Iterator[ParallelEnv]:
    with opened() as env:
        yield env


def runner_of(env: ParallelEnv) -> BatchRunner:
    with pytest.warns(DeprecationWarning, match="use env.stepper"):
        return env.runner


def test_a_step_in_three_calls(env: ParallelEnv, expected: ParallelEnv) -> None:
    runner = runner_of(env)
    ids, leftovers = runner.reset(seed=3)
    observations, _ = expected.reset(seed=3)
    assert repr(runner.transitions.read(ids, leftovers)[0]) == repr(observations)
    for _ in range(30):
        ids = runner.ids_to_step()
        leftovers = runner.step(ids, runner.transitions.write_actions(ids, ACTIONS))
        assert repr(runner.transitions.read(ids, leftovers)) == repr(expected.step(ACTIONS))
    runner.send((2,), runner.transitions.write_actions([2], ACTIONS[:1]))
    results = runner.recv()
    assert results.env_ids == (2,)
    assert repr(runner.transitions.read((2,), results.leftovers)) == repr(expected.step(ACTIONS[:1], [2]))
    states = expected.save_state()
    loaded, leftovers = runner.load_state(states, None)
    runner.transitions.read(tuple(loaded), leftovers)
    assert repr(env.step(ACTIONS)) == repr(expected.step(ACTIONS))


def test_a_step_with_arrays(env: ParallelEnv, expected: ParallelEnv) -> None:
    runner = runner_of(env)
    view = runner.view(copy=True)
    ids, leftovers = runner.reset(seed=3)
    view.read(leftovers)
    expected.reset(seed=3)
    by_agent = {agent: np.full(4, action) for agent, action in ACTIONS[0].items()}
    leftovers = runner.step(ids, view.write(by_agent))
    observations, rewards, *_ = expected.step(ACTIONS)
    arrays = view.read(leftovers)
    assert arrays.rewards.tolist() == [[*of_env.values()] for of_env in rewards]
    last, ids = view.last(), (1,)
    leftovers = runner.step(ids, view.write(by_agent, ids))
    (observed,), *_ = expected.step(ACTIONS[:1], [1])
    arrays = view.read_some(ids, leftovers, last)
    assert np.array_equal(arrays.observations[0][1], [*observed.values()])
    assert np.array_equal(arrays.observations[0][0], [*observations[0].values()])


def test_attributes(env: ParallelEnv) -> None:
    """Those that facades were allowed to use, and the checks."""
    runner = runner_of(env)
    assert runner.schema is env.stepper.schema
    assert runner.transitions.statistics is env.stepper.transitions.statistics
    assert (runner.num_envs, runner.env_ids, runner.seeds) == (4, (0, 1, 2, 3), (5, 6, 7, 8))
    assert (runner.mode, runner.restarts, runner.takes_options) == (env.stepper.mode, False, True)
    assert runner.workers is env.stepper.workers
    assert runner.stepped_by() is None
    assert runner.checked_ids([1]) == (1,)
    with pytest.raises(ValueError, match="seed"):
        runner.check_reset([1, 2], None, None)
    with pytest.raises(AttributeError, match="'BatchRunner' object has no attribute 'nothing'"):
        _ = runner.nothing
    facade = StackedVecEnv(env)
    with pytest.warns(DeprecationWarning, match="use the stepper itself"):
        assert facade.stepper.runner.stepped_by() is None
    facade.reset()
    assert runner.stepped_by() is facade


def test_attributes_that_are_set(env: ParallelEnv) -> None:
    """They reach the view and the checks below, also from a copy."""
    runner = runner_of(env)
    view = runner.view(copy=True)
    view.writes_all = view.wants_info_arrays = True
    assert copy.copy(view).writes_all
    runner.reset(seed=3)
    runner.stepped_by = lambda: view
    assert env.stepper.batch.stepped_by() is view
    assert copy.copy(runner.transitions).statistics is runner.transitions.statistics


def test_memory_under_one_entry_of_the_guard(env: ParallelEnv) -> None:
    """A facade with the runner's guard may ask for what workers write."""

    class Facade:
        def __init__(self) -> None:
            self.runner = runner_of(env)
            self._guard = self.runner.guard

        @exclusive("open")
        def open(self) -> Any:
            self.runner.write_states()
            return self.runner.rollout_buffer(3, 0)

    assert Facade().open() is not None
    assert env.stepper.batch.rollout_buffer(3, 0) is not None
