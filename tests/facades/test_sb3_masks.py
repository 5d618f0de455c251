"""Action masks of `SB3VecEnv`, in the form in which `sb3_contrib.MaskablePPO` takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from mpe2 import simple_spread_v3
from pettingzoo.classic import connect_four_v3
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from simulators.masked_actions import Gate, Turnstile, refusing_multi_discrete
from stable_baselines3.common.vec_env import VecMonitor

from marl_parallel import ParallelEnv
from marl_parallel.vector import SB3VecEnv

pytestmark = pytest.mark.needs("stable_baselines3", "sb3_contrib")


REFUSING: dict[str, tuple[Callable[..., Any], str, int]] = {
    "masks in infos, agents die": (functools.partial(Gate, "infos"), "MlpPolicy", 5),
    "masks in observations": (functools.partial(Gate, "observations"), "MultiInputPolicy", 5),
    "turn-based": (connect_four_v3.raw_env, "MultiInputPolicy", 7),
    "multi-discrete": (functools.partial(refusing_multi_discrete, np.array([0, 1, 0, 1, 0], np.int8)), "MlpPolicy", 5),
}


def open_env(case: str) -> tuple[SB3VecEnv, str, int]:
    make, policy, num_choices = REFUSING[case]
    return SB3VecEnv(ParallelEnv([make] * 3, num_workers=2)), policy, num_choices


@pytest.mark.parametrize("case", REFUSING)
def test_maskable_ppo_never_takes_an_illegal_action(case):
    """Simulators raise if it does."""
    env, policy, num_choices = open_env(case)
    wrapped = VecMonitor(env)
    try:
        assert is_masking_supported(wrapped)
        model = MaskablePPO(policy, wrapped, n_steps=24, batch_size=16, n_epochs=1, seed=0, device="cpu")
        model.learn(3 * 24 * env.num_envs)
        observations = wrapped.reset()
        for _ in range(20):
            masks = get_action_masks(wrapped)
            assert masks.shape == (env.num_envs, num_choices)
            assert masks.dtype == np.bool_
            actions, _ = model.predict(observations, action_masks=masks)
            observations, *_ = wrapped.step(actions)
        assert env.env.stats().resets > 3
    finally:
        env.close()


def test_rows_are_those_of_agents_that_act():
    env, _, _ = open_env("masks in infos, agents die")
    env.reset()
    loop = [Turnstile("infos", env_id) for env_id in range(3)]
    for simulator in loop:
        simulator.reset()
    reported = [simulator.agents for simulator in loop]  # also in the step in which an agent dies
    for _ in range(9):
        due = np.array([
            simulator.mask(agent) if agent in agents else np.ones(5)
            for simulator, agents in zip(loop, reported) for agent in simulator.possible_agents
        ], np.bool_)  # fmt: skip
        np.testing.assert_array_equal(env.action_masks(), due)
        np.testing.assert_array_equal(env.env_method("action_masks", indices=[4, 0]), due[[4, 0]])
        env.step(due.argmax(axis=1))
        for place, simulator in enumerate(loop):
            reported[place] = simulator.agents
            simulator.step({agent: simulator.right(agent) for agent in simulator.agents})
            if not simulator.agents:
                simulator.reset()
                reported[place] = simulator.agents
    env.close()


def test_without_masks_everything_is_allowed():
    env = SB3VecEnv(ParallelEnv([simple_spread_v3.parallel_env] * 2, backend="serial"))
    assert is_masking_supported(env)
    env.reset()
    assert env.action_masks().tolist() == [[True] * 5] * 6
    env.close()


def test_continuous_actions_have_no_masks():
    make = functools.partial(simple_spread_v3.parallel_env, continuous_actions=True)
    env = SB3VecEnv(ParallelEnv([make] * 2, backend="serial"))
    assert not is_masking_supported(env)
    with pytest.raises(AttributeError):
        get_action_masks(env)
    with pytest.raises(ValueError, match="need agents with equal Discrete"):
        env.action_masks()
    env.close()


def test_no_masks_after_close():
    env, _, _ = open_env("masks in infos, agents die")
    env.reset()
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.action_masks()
