"""TorchRL's own ways of using its parallel environments, with only the renames of `docs/migrating.md`."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import AlreadyPendingCallError
from mpe2 import simple_spread_v3
from simulators.variable_agents import VariableAgents
from tensordict import TensorDictBase

from marl_parallel import ParallelEnv, make
from marl_parallel.vector import TorchRLEnv

pytestmark = pytest.mark.needs("torchrl")


def test_example_of_parallel_env():
    def make_env() -> Any:
        return gymnasium.make("Pendulum-v1")

    env = TorchRLEnv(ParallelEnv([make_env] * 3, auto_reset=False, num_workers=2))
    env.set_seed(5)
    data = env.rollout(10)
    again = make("Pendulum-v1", 3, facade="torchrl", backend="serial")
    again.set_seed(5)
    assert torch.equal(data["agent", "observation"][:, 0], again.reset()["agent", "observation"])
    assert data.batch_size == (3, 10)
    env.close()
    again.close()


def test_example_of_multi_threaded_env():
    env = make("Pendulum-v1", 3, facade="torchrl", num_workers=2)
    env.reset()
    assert env.rand_step()["next", "agent", "reward"].shape == (3, 1, 1)
    assert env.rollout(5).batch_size == (3, 5)
    env.close()


SIMULATORS = {"spread": simple_spread_v3.parallel_env, "plain variable": functools.partial(VariableAgents, plain=True)}


def rows(env: TorchRLEnv, tensordict: TensorDictBase, rngs: list[np.random.Generator]) -> TensorDictBase:
    """With random actions, which depend on the environment only."""
    for name, agents in env.group_map.items():
        n = env.full_action_spec[name, "action"].space.n
        drawn = [rngs[int(env_id)].integers(n, size=len(agents)) for env_id in tensordict["env_index"]]
        tensordict[name, "action"] = torch.as_tensor(np.array(drawn))
    return tensordict


@pytest.mark.parametrize("how", [{"backend": "serial"}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("name", SIMULATORS)
def test_async_env_pool(name, how):
    """Environments that are ready go on without the others; each plays as if they were stepped together."""
    env, together = (TorchRLEnv(ParallelEnv([SIMULATORS[name]] * 4, False, 8, **how)) for _ in range(2))
    steps = 60
    expected: list[list[TensorDictBase]] = [[] for _ in range(4)]
    played: list[list[TensorDictBase]] = [[] for _ in range(4)]
    rngs = [np.random.default_rng(i) for i in range(4)]
    now = together.reset().set("env_index", torch.arange(4))
    for _ in range(steps):
        data, now = together.step_and_maybe_reset(rows(together, now, rngs))
        for env_id, row in enumerate(data.unbind(0)):
            expected[env_id].append(row)
        now = now.set("env_index", torch.arange(4))

    rngs = [np.random.default_rng(i) for i in range(4)]
    env.async_reset_send()
    resetting, stepping = 4, 0
    while min(map(len, played)) < steps:
        if resetting:
            ready = env.async_reset_recv(min_get=1)
            resetting -= len(ready)
            env.async_step_send(rows(env, ready, rngs))
            stepping += len(ready)
            continue
        data = env.async_step_recv(min_get=min(2, stepping))
        stepping -= len(data)
        for env_id, row in zip(data["env_index"].tolist(), data.unbind(0), strict=True):
            played[env_id].append(row)
        done = data["next", "done"].squeeze(-1)
        if done.any():
            env.async_reset_send(env_index=data["env_index"][done].tolist())
            resetting += int(done.sum())
        if not done.all():
            env.async_step_send(rows(env, env.step_mdp(data[~done]).set("env_index", data["env_index"][~done]), rngs))
            stepping += int((~done).sum())
    for one, other in zip(expected, played, strict=True):
        for mine, theirs in zip(one, other, strict=False):
            assert (mine == theirs).all(), (mine, theirs)
    env.close()
    together.close()


def test_one_environment_at_a_time():
    env = make("mpe2.simple_spread_v3", 3, facade="torchrl", num_workers=2)
    first = env.reset()
    one = env.rand_action(first)[1]
    env.async_step_send(one, env_index=1)
    with pytest.raises(AlreadyPendingCallError):
        env.async_step_send(one, env_index=1)
    with pytest.raises(AlreadyPendingCallError):
        env.rand_step(first)
    with pytest.raises(ValueError, match="min_get=2, but 1 of these are in flight"):
        env.async_step_recv(min_get=2)
    with pytest.raises(ValueError, match="min_get=1, but 0 of these are in flight"):
        env.async_reset_recv()
    data = env.async_step_recv(timeout=60.0)
    assert data.batch_size == (1,)
    assert data["env_index"].tolist() == [1]
    assert (data["agent", "observation"] == first["agent", "observation"][1:2]).all()
    with pytest.raises(ValueError, match="expected a row for each of the environments"):
        env.async_step_send(env.rand_action(first), env_index=[0, 2])
    env.set_seed(4)
    env.async_reset_send(env_index=[2])
    again = make("mpe2.simple_spread_v3", 3, facade="torchrl", num_workers=2, seed=4)
    assert torch.equal(env.async_reset_recv()["agent", "observation"][0], again.reset()["agent", "observation"][2])
    env.rand_step(env.reset())
    for closed in (env, again):
        closed.close()


def test_states_are_of_all_environments():
    env = TorchRLEnv(make("mpe2.simple_spread_v3", 2, auto_reset=False, backend="serial"), return_state=True)
    with pytest.raises(NotImplementedError, match="are stepped all at once"):
        env.async_reset_send()
    env.close()
