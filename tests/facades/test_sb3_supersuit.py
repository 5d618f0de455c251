"""SuperSuit's vector environment for Stable-Baselines3, with only the renames of `docs/migrating.md`."""

from __future__ import annotations

import numpy as np
import pytest
from mpe2 import simple_spread_v3
from supersuit import concat_vec_envs_v1, pettingzoo_env_to_vec_env_v1

from marl_parallel import make

pytestmark = pytest.mark.needs("supersuit", "stable_baselines3")
LENGTH, NUM_ENVS = 5, 4


def test_rows_equal_supersuits():
    """Observations, rewards, ends and last observations of each row, over automatic resets."""
    vec = pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env(max_cycles=LENGTH))
    theirs = concat_vec_envs_v1(vec, NUM_ENVS, num_cpus=1, base_class="stable_baselines3")
    ours = make(simple_spread_v3.parallel_env, NUM_ENVS, {"max_cycles": LENGTH}, facade="sb3", num_workers=2)
    assert (ours.num_envs, ours.observation_space, ours.action_space) == (
        theirs.num_envs, theirs.observation_space, theirs.action_space,
    )  # fmt: skip
    expected, _ = theirs.venv.reset(seed=3)
    ours.seed(3)
    assert np.array_equal(ours.reset(), expected)
    rng, ends = np.random.default_rng(0), 0
    for _ in range(3 * LENGTH):
        actions = rng.integers(0, 5, ours.num_envs)
        observations, rewards, dones, infos = ours.step(actions)
        expected, expected_rewards, expected_dones, expected_infos = theirs.step(actions)
        assert np.array_equal(observations, expected)
        assert np.array_equal(rewards.astype(np.float32), expected_rewards)
        assert np.array_equal(dones, expected_dones)
        for info, other in zip(infos, expected_infos, strict=True):
            if "terminal_observation" in other:
                assert np.array_equal(info["terminal_observation"], other["terminal_observation"])
                ends += 1
    assert ends == 3 * ours.num_envs
    ours.close()
    theirs.close()
