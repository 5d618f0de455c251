"""Choices that do not count from 0 in `SB3VecEnv`: they are moved both ways, as its library counts from 0."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from simulators.choices import ELSEWHERE, choosers, last_actions

from marl_parallel.core.spaces import from_zero, to_start
from marl_parallel.vector import SB3VecEnv

pytestmark = pytest.mark.needs("stable_baselines3", "sb3_contrib")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_actions_and_observations(name):
    space = ELSEWHERE[name]
    env = SB3VecEnv(choosers(space, True))
    assert env.action_space == env.observation_space == from_zero(space)
    observations = env.reset()
    assert observations.dtype == space.dtype
    env.action_space.seed(1)
    for _ in range(5):
        actions = np.stack([env.action_space.sample() for _ in range(env.num_envs)])
        acting = env.acting
        observations, _, dones, infos = env.step(actions)
        assert observations.dtype == space.dtype
        for row, info in enumerate(infos):
            assert env.observation_space.contains(observations[row])
            if dones[row]:
                assert env.observation_space.contains(info["terminal_observation"])
        acted = acting & env.observed
        np.testing.assert_array_equal(observations[acted], actions[acted])
        for place, agent in enumerate(env.agents):
            for env_id, got in enumerate(last_actions(env, agent)):
                if got is not None:
                    np.testing.assert_array_equal(got, to_start(space, actions[3 * env_id + place]))
    env.close()


def test_training_with_masks_and_nested_observations():
    """Networks make one-hot vectors of choices, which is an error for other numbers; all actions are legal."""
    seen = spaces.Dict(
        action_mask=spaces.MultiBinary(3), kind=spaces.Discrete(4, start=6), both=ELSEWHERE["multi-discrete"]
    )
    env = SB3VecEnv(choosers(ELSEWHERE["discrete"], True, seen))
    MaskablePPO("MultiInputPolicy", env, n_steps=8, batch_size=16, n_epochs=1, device="cpu").learn(60)
    assert {got for of_env in env.parallel_env.get_attr("got") for step in of_env for got in step.values()} <= {
        5,
        6,
        7,
    }
    env.close()
