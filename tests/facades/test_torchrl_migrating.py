"""TorchRL's own ways of using its parallel environments, with only the renames of `docs/migrating.md`."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import AlreadyPendingCallError
from helpers.processes import wait_for
from mpe2 import simple_spread_v3
from simulators import paced
from simulators.gated import Levels
from simulators.variable_agents import VariableAgents
from tensordict import TensorDictBase
from torchrl.envs import AsyncEnvPool, GymWrapper, SerialEnv, TransformedEnv

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
    with pytest.raises(ValueError, match="min_get=2, but 1 requests of this kind are in flight"):
        env.async_step_recv(min_get=2)
    with pytest.raises(ValueError, match="min_get=1, but 0 requests of this kind are in flight"):
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


@pytest.mark.parametrize("wrap", [lambda env: env, TransformedEnv], ids=["plain", "transformed"])
def test_attributes_and_methods_of_the_simulators(wrap):
    """As through TorchRL's own batched environments."""
    env = wrap(TorchRLEnv(ParallelEnv([Levels] * 3, False, num_workers=2)))
    assert env.num_workers == 3  # of environments, as there
    assert env.level == [0, 10, 20]
    assert env.twice() == [0, 20, 40]
    assert env.twice(3, offset=1) == [1, 31, 61]
    assert env.times_read == [1, 1, 1]
    assert env.possible_agents == [["a", "b", "c"]] * 3
    for name in ("wings", "failing"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}', and environment 0: "):
            getattr(env, name)
        assert not hasattr(env, name)
    with pytest.raises(TypeError, match=r"the attribute 'lock' of the simulators: environment 0: .*cannot be pickled"):
        _ = env.lock
    assert env.rollout(3).batch_size[0] == 3  # nothing was closed
    env.close()


def test_attributes_as_of_serial_env():
    def make_env() -> Any:
        return GymWrapper(gymnasium.make("CartPole-v1").unwrapped)

    theirs = SerialEnv(2, make_env)
    theirs.reset()
    ours = TorchRLEnv(make("CartPole-v1", 2, auto_reset=False, backend="serial"))
    ours.reset()
    assert ours.gravity == theirs.gravity == [9.8, 9.8]
    assert ours.num_workers == theirs.num_workers
    for env in (ours, theirs):
        with pytest.raises(AttributeError):
            _ = env.wings
        env.close()


def test_two_threads(tmp_path):
    """While one waits for results, calls of another one are refused."""
    env = TorchRLEnv(ParallelEnv(paced.fleet(tmp_path, 2), False, num_workers=2))
    rows = env.rand_action(env.reset())
    paced.hold(tmp_path, 0)
    env.async_step_send(rows, env_index=[0, 1])
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(env.async_step_recv, 2)
        try:
            wait_for(lambda: bool(env.parallel_env.stepper.batch.guard))
            for call in (
                env.async_step_recv,
                env.async_reset_send,
                env.reset,
                lambda: env.parallel_env.get_attr("options"),
            ):
                with pytest.raises(AlreadyPendingCallError, match=r"is inside recv\(\)"):
                    call()
        finally:
            paced.release(tmp_path, 0)
        assert sorted(result.result(60.0)["env_index"].tolist()) == [0, 1]
    env.close()


@pytest.mark.parametrize("index", [1, slice(1, 3), [0, 2]], ids=str)
def test_views_of_some_environments_are_refused(index):
    env = TorchRLEnv(ParallelEnv([Levels] * 3, False, backend="serial"))
    with pytest.raises(TypeError, match=r'cannot be indexed, got .*"_step" mask .*parallel_env.call\(name, env_ids='):
        _ = env[index]
    env.close()


def sent_to_all(folder: Path) -> TorchRLEnv:
    """Four environments whose steps are in flight, in a worker each; step i ends when the file `10 * i` exists."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        env = TorchRLEnv(ParallelEnv([Levels] * 4, False, num_workers=4))
    env.parallel_env.set_attr("folder", str(folder))
    env.async_step_send(env.rand_action(env.reset()).set("env_index", torch.arange(4)))
    return env


def test_results_of_named_environments(tmp_path):
    """`env_index` waits for these, whatever else is ready; an integer gives one without a batch."""
    env = sent_to_all(tmp_path)
    (tmp_path / "0").touch()
    (tmp_path / "20").touch()
    one = env.async_step_recv(env_index=2, timeout=60.0)
    assert (one.batch_size, int(one["env_index"])) == (torch.Size([]), 2)
    assert one["next", "done"].shape == (1,)
    with pytest.raises(multiprocessing.TimeoutError):
        env.async_step_recv(env_index=[0, 3], timeout=0.05)
    with pytest.raises(ValueError, match=r"env_index=2, but environments \[2\] have no request of this kind in flight"):
        env.async_step_recv(env_index=2)
    with pytest.raises(ValueError, match="have no request of this kind in flight"):
        env.async_reset_recv(env_index=3)
    for name in ("10", "30"):
        (tmp_path / name).touch()
    assert env.async_step_recv(None, [3, 0], timeout=60.0)["env_index"].tolist() == [3, 0]
    assert env.async_step_recv()["env_index"].tolist() == [1]
    env.async_reset_send(env_index=[1, 3])
    assert int(env.async_reset_recv(env_index=3, timeout=60.0)["env_index"]) == 3
    assert env.async_reset_recv(timeout=60.0)["env_index"].tolist() == [1]
    env.close()


def test_most_results_of_a_call(tmp_path):
    """`max_get` leaves the others for the next call, which also returns what has become ready since."""
    env = sent_to_all(tmp_path)
    for name in ("0", "10", "20"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="max_get=1 is less than min_get=2"):
        env.async_step_recv(2, max_get=1)
    with pytest.raises(ValueError, match="min_get=5, but 4 requests of this kind are in flight"):
        env.async_step_recv(5)
    first = env.async_step_recv(3, max_get=3, timeout=60.0)["env_index"].tolist()
    assert sorted(first) == [0, 1, 2]
    env.async_step_send(env.rand_action(env.fake_tensordict())[:3].set("env_index", torch.tensor([0, 1, 2])))
    seen: list[int] = []
    while len(seen) < 3:  # `max_get` may be less than what is ready
        got = env.async_step_recv(max_get=1, timeout=60.0)["env_index"].tolist()
        assert len(got) == 1
        seen += got
    assert sorted(seen) == [0, 1, 2]
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        env.async_step_recv(timeout=0.3)  # for the whole call
    assert time.monotonic() - began >= 0.3
    (tmp_path / "30").touch()
    assert env.async_step_recv(min_get=None, timeout=60.0)["env_index"].tolist() == [3]
    env.close()


def test_what_was_left_comes_with_what_is_ready_by_then():
    env = TorchRLEnv(ParallelEnv([Levels] * 4, False, backend="serial"))
    actions = env.rand_action(env.reset())
    env.async_step_send(actions[:2], env_index=[0, 1])
    assert env.async_step_recv(max_get=1)["env_index"].tolist() == [0]
    env.async_step_send(actions[2:], env_index=[2, 3])
    assert env.async_step_recv()["env_index"].tolist() == [1, 2, 3]
    env.close()


@pytest.mark.parametrize("name", ["async_reset_recv", "async_step_recv"])
def test_parameters_are_torchrls(name):
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (TorchRLEnv, AsyncEnvPool))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def test_calls_during_the_first_reset():
    """They are refused because it is in flight, not because nothing has been reset."""
    env = TorchRLEnv(ParallelEnv([Levels] * 2, False, backend="serial"))
    data = env.rand_action(env.fake_tensordict())
    env.async_reset_send()
    for call in (lambda: env.async_step_send(data, env_index=[0, 1]), lambda: env.step(data)):
        with pytest.raises(AlreadyPendingCallError, match="in flight"):
            call()
    env.close()


def test_states_are_of_all_environments():
    env = TorchRLEnv(make("mpe2.simple_spread_v3", 2, auto_reset=False, backend="serial"), return_state=True)
    with pytest.raises(NotImplementedError, match="are stepped all at once"):
        env.async_reset_send()
    env.close()
