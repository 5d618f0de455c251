"""Choices that do not count from 0 in `AgileRLVecEnv`: they are moved both ways, as its library counts from 0."""

from __future__ import annotations

import numpy as np
import pytest
from simulators.choices import ELSEWHERE, choosers, last_actions

from marl_parallel.core.spaces import from_zero, to_start
from marl_parallel.vector import AgileRLVecEnv

pytestmark = pytest.mark.needs("agilerl")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_actions_and_observations(name):
    space = ELSEWHERE[name]
    env = AgileRLVecEnv(choosers(space, True))
    env.reset()
    for agent in env.agents:
        assert env.single_action_space(agent) == env.single_observation_space(agent) == from_zero(space)
    for number in range(4):
        actions = {agent: np.stack([from_zero(space).sample() for _ in range(2)]) for agent in env.agents}
        acting = env.acting
        if number == 3:
            env.step_async([{agent: values[env_id] for agent, values in actions.items()} for env_id in range(2)])
            observations, *_ = env.step_wait()
        else:
            observations, *_ = env.step(actions)
        for agent in env.agents:
            assert observations[agent].dtype == space.dtype
            for env_id, got in enumerate(last_actions(env, agent)):
                if acting[agent][env_id]:
                    np.testing.assert_array_equal(got, to_start(space, actions[agent][env_id]))
                if acting[agent][env_id] and env.present[agent][env_id]:
                    own = observations[agent][env_id]
                    np.testing.assert_array_equal(own.reshape(space.shape), actions[agent][env_id])
    env.close()
