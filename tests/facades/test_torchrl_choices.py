"""Choices that do not count from 0 in `TorchRLEnv`: actions count from 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from simulators.choices import ELSEWHERE, choosers, last_actions
from torchrl.envs.utils import check_env_specs

from marl_parallel.core.spaces import to_start
from marl_parallel.vector import TorchRLEnv

pytestmark = pytest.mark.needs("torchrl")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_actions_and_observations(name):
    """Actions count from 0; observations are the simulator's own, in the dtype of their space."""
    space = ELSEWHERE[name]
    env = TorchRLEnv(choosers(space, False))
    check_env_specs(env)
    data = env.reset()
    dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
    for _ in range(4):
        data = env.rand_action(data)
        following = env.step(data)["next"]
        assert data["chief", "action"].dtype == following["chief", "observation"].dtype == dtype
        data = following
    env.async_reset_send(env_index=[0, 1])
    data = env.rand_action(env.async_reset_recv(2))
    env.async_step_send(data)  # each action is checked by the simulators
    assert env.async_step_recv(2).batch_size == (2,)
    got = last_actions(env, "chief_0")
    np.testing.assert_array_equal(got, to_start(space, data["chief", "action"][:, 0].numpy()))
    env.close()
