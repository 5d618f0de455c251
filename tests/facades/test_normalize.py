"""Normalisers for `GymnasiumVectorEnv`: as Gymnasium's where all agents live, and without the rows of the dead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward
from mpe2 import simple_spread_v3
from simulators.dying_agents import TwoAgents

from marl_parallel import ParallelEnv
from marl_parallel.vector import GymnasiumVectorEnv, NormalizePresentObservation, NormalizePresentReward


def opened(make: Any, **keywords: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(ParallelEnv([make] * 2, "NEXT_STEP", num_workers=2, **keywords))


@pytest.mark.parametrize(
    ("ours", "theirs"), [(NormalizePresentObservation, NormalizeObservation), (NormalizePresentReward, NormalizeReward)]
)
def test_like_gymnasiums_while_all_agents_live(ours, theirs):
    env, plain = ours(opened(simple_spread_v3.parallel_env)), theirs(opened(simple_spread_v3.parallel_env))
    env.action_space.seed(0)
    assert np.array_equal(env.reset(seed=1)[0], plain.reset(seed=1)[0])
    for _ in range(24):
        actions = env.action_space.sample()
        for actual, expected in zip(env.step(actions)[:4], plain.step(actions)[:4]):
            assert np.allclose(actual, expected)
    env.close()
    plain.close()


@pytest.mark.parametrize(("kind", "mean"), [(NormalizePresentObservation, 5.0), (NormalizeObservation, 3.25)])
def test_observations_of_the_dead(kind, mean):
    """Each observation of a living agent is 5; after its death, the row is zeros."""
    env = kind(opened(TwoAgents))
    env.obs_rms.count = 0.0
    env.reset()
    for _ in range(19):
        env.step(np.zeros(4, np.int64))
    assert env.obs_rms.mean[0] == pytest.approx(mean, abs=0.03)
    mean_before = env.obs_rms.mean.copy()
    env.update_running_mean = False
    env.step(np.zeros(4, np.int64))
    assert env.obs_rms.mean == mean_before
    assert not env.update_running_mean
    env.close()


def test_rewards_of_the_dead_and_of_resets():
    """With no discount into the past, each counted return is the reward of 1."""
    env = NormalizePresentReward(opened(TwoAgents), gamma=0.0)
    env.return_rms.count = 0.0
    env.reset()
    for _ in range(21 + 20):  # two episodes, with a step between that resets
        env.step(np.zeros(4, np.int64))
    assert env.return_rms.mean == pytest.approx(1.0)
    assert env.return_rms.count == 2 * 2 * (20 + 5)
    env.close()
