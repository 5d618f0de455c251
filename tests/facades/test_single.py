"""`PettingZooVecEnv.single`: one of the environments as a PettingZoo environment."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from helpers.batches import same
from mpe2 import simple_spread_v3
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from pettingzoo.test import parallel_api_test, parallel_seed_test
from simulators.dict_rules import DictRules
from simulators.variable_agents import VariableAgents

from marl_parallel import ParallelEnv
from marl_parallel.vector import PettingZooVecEnv


def single(make: Callable[..., Any] = simple_spread_v3.parallel_env, **how: Any) -> Any:
    return PettingZooVecEnv(ParallelEnv([make] * 2, False, **{"backend": "serial", **how})).single()


@pytest.mark.parametrize("how", [{"backend": "serial"}, {"num_workers": 2}], ids=["serial", "process"])
@pytest.mark.parametrize("make", [simple_spread_v3.parallel_env, knights_archers_zombies.parallel_env, VariableAgents])
def test_pettingzoos_own_tests(make, how):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = single(make, **how)
        parallel_api_test(env, num_cycles=200)
        env.close()
        parallel_seed_test(functools.partial(single, make, **how))


def test_seeds_for_five_hundred_steps():
    """PettingZoo's own seed test stops after one step."""
    first, second = single(VariableAgents), single(VariableAgents)
    rng = np.random.default_rng(0)
    episode = 0
    for step in range(500):
        if not first.agents:
            results = [env.reset(seed=episode) for env in (first, second)]
            episode += 1
        else:
            actions = {}
            for agent in first.agents:
                space = first.action_space(agent)
                space.seed(int(rng.integers(2**31)))
                actions[agent] = space.sample()
            results = [env.step(dict(actions)) for env in (first, second)]
        assert first.agents == second.agents
        for one, other in zip(*results, strict=True):
            assert same(one, other), f"step {step}"
    assert episode > 40
    first.close()
    second.close()


def test_other_environments_are_unaffected():
    env = PettingZooVecEnv(ParallelEnv([VariableAgents] * 2, False, backend="serial"))
    env.reset(seed=1)
    one = env.single(1)
    one.reset(seed=9)
    one.step({agent: one.action_space(agent).sample() for agent in one.agents})
    assert env.get_attr("time") == (0, 1)
    assert one.render()[0, 0, 0] == 11
    assert one.state().tolist()[1] == 1
    one.close()
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_auto_reset_must_be_disabled():
    env = PettingZooVecEnv(ParallelEnv([VariableAgents] * 2, backend="serial"))
    with env, pytest.raises(ValueError, match=r"auto_reset=False"):
        env.single()


def test_unknown_env_id():
    env = PettingZooVecEnv(ParallelEnv([VariableAgents] * 2, False, backend="serial"))
    with env, pytest.raises(ValueError, match="no environment 2"):
        env.single(2)


@pytest.mark.parametrize("how", [{}, {"shared_memory": False}, {"copy": False}], ids=repr)
def test_facade_continues_after_single(how):
    with PettingZooVecEnv(ParallelEnv([DictRules] * 3, False, backend="serial", **how)) as env:
        env.reset()
        env.reset(env_ids=[2])
        ones = [env.single(0), env.single(0), env.single(2)]
        for one in ones:
            one.reset()
            observations, *_ = one.step({"a": 0, "b": 0})
        ones[0].step({"a": 0, "b": 0})
        observations["b"][...] = 7
        del observations["a"]
        observations, _ = env.reset(env_ids=[1])
        assert observations["a"].ravel().tolist() == [2, 0, 1]
        assert how == {"copy": False} or observations["b"].ravel().tolist() == [2, 0, 1]
        assert env.present["a"].all()


def test_render():
    """Whether the other environments have been reset or not."""
    make = functools.partial(simple_spread_v3.parallel_env, render_mode="rgb_array")
    with PettingZooVecEnv(ParallelEnv([make] * 2, auto_reset=False, num_workers=1)) as env:
        alone = env.single(1)
        with pytest.raises(ResetNeeded, match=r"environments \[1\] have never been reset; call reset\(\) before state"):
            alone.state()
        alone.reset(seed=1)
        bare = make()
        bare.reset(seed=1)
        assert np.array_equal(alone.state(), bare.state())
        assert np.array_equal(alone.render(), bare.render())
        with pytest.raises(ResetNeeded, match=r"environments \[0\] have never been reset"):
            env.render()
        bare.close()
