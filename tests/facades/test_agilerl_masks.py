"""Action masks in the infos of `AgileRLVecEnv`: AgileRL's algorithms find them there and follow them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from agilerl.algorithms import MADDPG
from simulators.masked_actions import Gate
from simulators.pymarl_envs import Skirmish

from marl_parallel import ParallelEnv
from marl_parallel.vector import AgileRLVecEnv

pytestmark = pytest.mark.needs("agilerl")


def test_maddpg_never_takes_an_illegal_action():
    """The simulators raise if it does. AgileRL wants masks in infos, and refuses them in observations."""
    env = AgileRLVecEnv(ParallelEnv([functools.partial(Gate, "infos")] * 3, num_workers=2))
    spaces = [[of(agent) for agent in env.agents] for of in (env.single_observation_space, env.single_action_space)]
    learner = MADDPG(*spaces, agent_ids=env.agents)
    observations, infos = env.reset()
    loop = [Gate("infos", env_id) for env_id in range(3)]
    for simulator in loop:
        simulator.reset()
    for _ in range(10):  # `guest` dies after two steps, and episodes end after four
        for agent in env.agents:
            rows = [env_id for env_id, simulator in enumerate(loop) if agent in simulator.agents]
            due = [loop[row].mask(agent) for row in rows]
            if rows:
                np.testing.assert_array_equal(infos[agent]["action_mask"][rows], due)
        actions, _ = learner.get_action(observations, infos)
        observations, _, _, _, infos = env.step(actions)
        for simulator in loop:
            simulator.step({agent: simulator.right(agent) for agent in simulator.agents})
            if not simulator.agents:
                simulator.reset()
    env.close()


def test_masks_that_simulators_report_apart_are_in_infos():
    """Skirmishes assert that actions are allowed."""
    env = AgileRLVecEnv(ParallelEnv([Skirmish] * 3, num_workers=2))
    _, infos = env.reset()
    for _ in range(30):
        expected = np.array(env.env.call("get_avail_actions"))
        for place, agent in enumerate(env.agents):
            np.testing.assert_array_equal(infos[agent]["action_mask"], expected[:, place])
            assert infos[agent]["action_mask"].dtype == np.int8
            assert infos[agent]["_action_mask"].all()
        *_, infos = env.step({agent: infos[agent]["action_mask"].argmax(axis=1) for agent in env.agents})
    env.close()
