"""Choices that do not count from 0 in `RLlibVectorMultiAgentEnv`: they are moved both ways, as RLlib counts from 0."""

from __future__ import annotations

import numpy as np
import pytest
from simulators.choices import ELSEWHERE, choosers, last_actions

from marl_parallel.core.spaces import from_zero, to_start
from marl_parallel.vector import RLlibVectorMultiAgentEnv

pytestmark = pytest.mark.needs("ray")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_actions_and_observations(name):
    space = ELSEWHERE[name]
    env = RLlibVectorMultiAgentEnv(choosers(space, "NEXT_STEP"))
    zero = from_zero(space)
    for spaces_of in (env.single_action_spaces, env.single_observation_spaces, env.envs[0].action_spaces):
        assert [*spaces_of.values()] == [zero] * 3
    assert env.single_action_space["chief_0"] == env.envs[1].observation_space["chief_0"] == zero
    observations, _ = env.reset()
    for _ in range(4):
        actions = [{agent: zero.sample() for agent in acting} for acting in env.parallel_env.acting]
        actions = [{a: np.asarray(one, np.int64)[()] for a, one in of_env.items()} for of_env in actions]  # as RLlib's
        observations, *_ = env.step(actions)
        for env_id, (of_env, seen) in enumerate(zip(actions, observations)):
            assert all(map(zero.contains, seen.values()))
            for agent, action in of_env.items():
                np.testing.assert_array_equal(last_actions(env, agent)[env_id], to_start(space, action))
                if agent in seen:
                    np.testing.assert_array_equal(seen[agent], action)
    env.close()
