"""AgileRL's training functions and algorithms on an unchanged `AgileRLVecEnv`."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agilerl.algorithms import IPPO, MADDPG
from agilerl.components.replay_buffer import ReplayBuffer
from agilerl.training.train_multi_agent_off_policy import train_multi_agent_off_policy
from agilerl.training.train_multi_agent_on_policy import train_multi_agent_on_policy
from agilerl.vector import AsyncPettingZooVecEnv
from helpers import ROOT
from helpers.episodes import ENVS, SEED, PlainLoop, ended
from mpe2 import simple_spread_v3
from simulators.array_agents import EnvDefinedActions, Line
from simulators.dying_agents import DyingAgents, TwoAgents

from marl_parallel import ParallelEnv
from marl_parallel.vector import AgileRLVecEnv

pytestmark = pytest.mark.needs("agilerl")

COPIES = 3
NETWORKS: dict[str, Any] = {
    "encoder_config": {"hidden_size": [16]},
    "head_config": {"hidden_size": [16]},
    "latent_dim": 16,
}
QUIET = {"verbose": False, "eval_loop": 1}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def declared(env: AgileRLVecEnv) -> dict[str, Any]:
    return {
        "observation_spaces": [env.single_observation_space(agent) for agent in env.agents],
        "action_spaces": [env.single_action_space(agent) for agent in env.agents],
        "agent_ids": env.agents,
        "net_config": NETWORKS,
    }


def weights(algorithm: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in algorithm.actors.parameters()])


def trained(env: Any, train: Callable[..., Any], make: Callable[..., Any], **arguments: Any) -> tuple[Any, Any]:
    """The weights before and after training with fixed seeds."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    env.reset(seed=42)
    algorithm = make(**declared(env))
    before = weights(algorithm)
    (after,), fitnesses = train(env, "name", algorithm.algo, [algorithm], **arguments, **QUIET)
    assert np.isfinite(fitnesses).all()
    assert env.closed
    return before, weights(after)


@pytest.mark.parametrize("policy", ["on", "off"])
def test_training_equals_agilerls_own_vector_environment(policy):
    """To the bit."""
    come_to = []
    for own in (False, True):
        constructors = [functools.partial(simple_spread_v3.parallel_env, max_cycles=8)] * COPIES
        if own:
            env: Any = AsyncPettingZooVecEnv(constructors, context="fork")
        else:
            env = AgileRLVecEnv(ParallelEnv(constructors, num_workers=2))
        if policy == "on":
            make = functools.partial(IPPO, learn_step=64, batch_size=32, update_epochs=1, lr=1e-2)
            results = trained(env, train_multi_agent_on_policy, make, max_steps=400, evo_steps=200)
        else:
            make = functools.partial(MADDPG, vect_noise_dim=COPIES, batch_size=16, learn_step=8)
            memory = ReplayBuffer(max_size=1000)
            results = trained(env, train_multi_agent_off_policy, make, memory=memory, max_steps=240, evo_steps=120)
        come_to.append(results)
    (before, after), (_, after_own) = come_to
    assert not torch.equal(before, after)
    assert torch.equal(after, after_own)


def test_training_with_agents_that_die():
    """AgileRL replaces NaN, which marks absent agents, by a placeholder and treats them as done."""
    env = AgileRLVecEnv(ParallelEnv([Line] * COPIES, backend="serial"))
    algorithm = MADDPG(**declared(env), vect_noise_dim=COPIES, batch_size=16, learn_step=8)
    before, memory = weights(algorithm), ReplayBuffer(max_size=1000)
    (trained,), fitnesses = train_multi_agent_off_policy(
        env, "line", "MADDPG", [algorithm], memory, max_steps=240, evo_steps=120, **QUIET
    )
    assert np.isfinite(fitnesses).all()
    assert torch.isfinite(weights(trained)).all()
    assert not torch.equal(weights(trained), before)
    assert torch.isnan(memory.sample(200)["obs"]["a"]).any()


@pytest.mark.parametrize("episode_stats", [False, True])
def test_returns_where_agents_die(episode_stats):
    """AgileRL counts by itself: rewards of dead agents are NaN, which it takes for 0."""
    env = AgileRLVecEnv(ParallelEnv([TwoAgents] * COPIES, backend="serial", episode_stats=episode_stats))
    algorithm = MADDPG(**declared(env), vect_noise_dim=COPIES, batch_size=16, learn_step=8)
    assert algorithm.test(env, loop=2) == 25.0
    assert algorithm.test(env, loop=2, sum_scores=False).tolist() == [20.0, 5.0]
    memory = ReplayBuffer(max_size=1000)
    _, fitnesses = train_multi_agent_off_policy(
        env, "two", "MADDPG", [algorithm], memory, max_steps=240, evo_steps=120, **QUIET
    )
    assert np.all(np.array(fitnesses) == 25.0)


def test_finished_episodes():
    with ParallelEnv([DyingAgents] * ENVS, seed=SEED, num_workers=2, episode_stats=True) as parallel:
        env, loops = AgileRLVecEnv(parallel), [PlainLoop(env_id, "SAME_STEP") for env_id in range(ENVS)]
        env.reset()
        for number in range(40):
            if number == 14:
                env.reset()
                for loop in loops:
                    loop.reset()
                assert env.parallel_env.finished_episodes == ()
            if number % 2:
                infos = env.step({agent: np.ones(ENVS, np.int64) for agent in env.agents})[4]
            else:
                env.step_async([dict.fromkeys(loop.alive, np.int64(1)) for loop in loops])
                infos = env.step_wait()[4]
            parts, episodes = ended(loops)
            assert [*env.parallel_env.finished_episodes] == episodes
            for env_id, of_env in enumerate(parts):
                for agent, part in of_env.items():
                    over = env_id in [episode[0] for episode in episodes]
                    last = infos[agent]["final_info"] if over else infos[agent]
                    assert last["_episode"][env_id]
                    assert {key: last["episode"][key][env_id] for key in part} == part


def test_env_defined_actions():
    env = AgileRLVecEnv(ParallelEnv([EnvDefinedActions] * COPIES, backend="serial"))
    observations, infos = env.reset(seed=1)
    assert np.array_equal(infos["a"]["env_defined_actions"], [np.nan, 2.0, np.nan], equal_nan=True)
    algorithm = IPPO(**declared(env))
    actions, *_ = algorithm.get_action(observations, infos)
    assert actions["a"][1] == 2
    infos = env.step(actions)[4]
    assert np.array_equal(infos["a"]["env_defined_actions"], [2.0, np.nan, np.nan], equal_nan=True)
    env.close()


def test_example():
    command = [sys.executable, str(ROOT / "examples" / "agilerl_train.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "mean return" in done.stdout
