"""Action masks in the infos of `GymnasiumVectorEnv`, from observations and from infos."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from simulators.masked_actions import BoxWithMask, Turnstile
from simulators.pymarl_envs import Skirmish

from marl_parallel import ParallelEnv
from marl_parallel.vector import GymnasiumVectorEnv


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("where", ["observations", "both", "infos"])
def test_masks_are_those_of_a_plain_loop(where, mode):
    """Rows of agents that do not act are all True, or zeros if the masks are in infos."""
    env = GymnasiumVectorEnv(ParallelEnv([functools.partial(Turnstile, where)] * 3, mode, backend="serial"))
    _, infos = env.reset()
    loop = [Turnstile(where, env_id) for env_id in range(3)]
    for simulator in loop:
        simulator.reset()
    for _ in range(11):
        rows = [(simulator, agent) for simulator in loop for agent in simulator.possible_agents]
        right = np.array([simulator.right(agent) for simulator, agent in rows])
        acting = np.array([agent in simulator.agents for simulator, agent in rows])
        np.testing.assert_array_equal(infos["acting"], acting)
        if acting.any() or where != "infos":
            assert infos["action_mask"].shape == (6, 5)
            np.testing.assert_array_equal(infos["action_mask"][acting], np.eye(5)[right[acting]])
        if where != "infos":
            assert infos["action_mask"].dtype == np.bool_
            assert infos["action_mask"][~infos["present"]].all()
            assert infos["_action_mask"].all()
        *_, infos = env.step(right)
        for simulator in loop:
            if simulator.agents:
                simulator.step({agent: simulator.right(agent) for agent in simulator.agents})
                if not simulator.agents and mode == "SAME_STEP":
                    simulator.reset()
            else:
                simulator.reset()
    env.close()


def test_masks_of_continuous_actions_stay_observations():
    env = GymnasiumVectorEnv(ParallelEnv([BoxWithMask] * 2, backend="serial"))
    observations, infos = env.reset()
    assert "action_mask" not in infos
    assert observations["action_mask"].shape == (2, 7)
    env.close()


def test_masks_that_are_neither_in_observations_nor_in_infos():
    """Skirmishes assert that actions are allowed."""
    env = GymnasiumVectorEnv(ParallelEnv([Skirmish] * 3, backend="serial"))
    _, infos = env.reset()
    for _ in range(30):
        assert infos["action_mask"].shape == (9, 6)
        assert infos["_action_mask"].all()
        expected = [mask for masks in env.call("get_avail_actions") for mask in masks]
        np.testing.assert_array_equal(infos["action_mask"], expected)
        *_, infos = env.step(infos["action_mask"].argmax(axis=1))
    assert sum(stats["battles_game"] for stats in env.call("get_stats")) > 3
    env.close()
