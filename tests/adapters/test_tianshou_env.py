"""AEC environments with `adapter="tianshou"`, by dicts: one agent is observed at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from mpe2 import simple_spread_v3
from pettingzoo.classic import rps_v2, tictactoe_v3
from pettingzoo.utils import BaseWrapper
from simulators.turn_deaths import Elimination

from marl_parallel import ParallelEnv, make
from marl_parallel.adapters import adapt
from marl_parallel.wrappers import pad_spaces


def last(env: Any) -> tuple[Any, ...]:
    """What a plain AEC environment reports of the agent whose turn it is."""
    observation, _, terminated, truncated, info = env.last()
    return env.agent_selection, observation, terminated, truncated, info


@pytest.mark.every_setup
@pytest.mark.parametrize("dead_first", [True, False])
@pytest.mark.parametrize("action", [0, 2])
def test_same_as_a_plain_loop(build, setup, dead_first, action):
    """Until the turn of an agent that has ended."""
    make_env = functools.partial(Elimination, dead_first=dead_first)
    env, loop = build([make_env] * 2, setup, False, 1, adapter="tianshou"), make_env()
    loop.reset(seed=2)
    observations, infos = env.reset()
    for _ in range(6):
        agent, observation, _, _, info = last(loop)
        assert [*observations[1]] == [agent]
        assert np.array_equal(observations[1][agent], observation)
        assert infos[1] == {agent: info}
        assert env.acting[1] == [agent]
        observations, rewards, terminateds, truncateds, infos = env.step([{a[0]: action} for a in env.acting])
        loop.step(action)
        agent, _, terminated, truncated, _ = last(loop)
        assert rewards[1] == loop.rewards
        assert terminateds[1] == {**loop.terminations, "__all__": terminated}
        assert truncateds[1] == {**loop.truncations, "__all__": truncated}
        if terminated or truncated:
            assert env.acting[1] == []
            assert [*observations[1]] == [agent]
            break
    assert (terminated or truncated) == (action == 2)


@pytest.mark.parametrize("make_env", [rps_v2.parallel_env, simple_spread_v3.parallel_env])
def test_agents_that_act_at_the_same_time(make_env):
    agents = make_env().possible_agents
    message = (
        rf"environment 0: adapter=\"tianshou\" needs an AEC environment.*, whose agents \['{agents[0]}', .* act at the"
    )
    with pytest.raises(TypeError, match=message):
        ParallelEnv([make_env], backend="serial", adapter="tianshou")


def test_different_kinds():
    def make_env(env_id: int) -> Any:
        return adapt(tictactoe_v3.env(), "tianshou" if env_id else "aec")

    with pytest.raises(ValueError, match=r"environment 1 differs .* in observes_turn: got True, expected False"):
        ParallelEnv([make_env] * 2, backend="serial")


def test_padded():
    padded = pad_spaces(adapt(tictactoe_v3.env(), "tianshou"))
    assert padded.observes_turn


def test_a_wrapper_that_sets_rewards_later():
    class Doubled(BaseWrapper):
        def step(self, action: Any) -> None:
            super().step(action)
            if self.env.rewards["player_1"]:
                self.rewards = {agent: 2 * reward for agent, reward in self.env.rewards.items()}

    env = adapt(Doubled(tictactoe_v3.env()), "tianshou")
    env.reset(seed=1)
    for action in (0, 3, 1, 4, 2):
        _, rewards, *_ = env.step(dict.fromkeys(env.possible_agents, action))
    assert rewards == {"player_1": 2, "player_2": -2}


def test_state_and_attributes():
    env = make(lambda: simple_spread_v3.env(), adapter="tianshou", backend="serial", seed=1)
    env.reset()
    assert env.state().shape == (1, 54)
    assert env.get_attr("agent_selection") == ("agent_0",)
    env.close()
