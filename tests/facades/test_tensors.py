"""Tensors of `StackedVecEnv` and `Rollout`: shared memory on the CPU, and the calls of CUDA, recorded by a fake."""

from __future__ import annotations

import gc
import logging
from typing import Any

import numpy as np
import pytest
import torch
from mpe2 import simple_spread_v3, simple_tag_v3

from marl_parallel import ParallelEnv, Rollout
from marl_parallel.vector import StackedVecEnv, tensors

pytestmark = pytest.mark.needs("torch")
ACTIONS = np.array([[1, 2, 3], [4, 0, 1]])


def opened(**keywords: Any) -> StackedVecEnv:
    return StackedVecEnv(ParallelEnv([simple_spread_v3.parallel_env] * 2, num_workers=2, **keywords), with_state=True)


class FakeCuda:
    """Records what would be registered, unregistered and waited for."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.log: list[str] = []

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0

    def Event(self) -> FakeCuda:  # noqa: N802
        return self

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("synchronize")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    tensors.has_cuda.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", fake.cudart)
    monkeypatch.setattr(torch.cuda, "Event", fake.Event)
    yield fake
    tensors.has_cuda.cache_clear()


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("pin", [True, False])
def test_tensors_equal_arrays(cuda, pin, copy):
    with opened(copy=copy).torch(pin=pin) as env, opened() as plain:
        observations, _ = env.reset(seed=3)
        expected, _ = plain.reset(seed=3)
        assert np.array_equal(observations.numpy(), expected)
        for step in range(30):
            actions: Any = torch.as_tensor(ACTIONS) if step % 2 else ACTIONS
            observations, rewards, terminations, truncations, infos = env.step(actions)
            expected = plain.step(ACTIONS)
            for actual, array in zip((observations, rewards, terminations, truncations), expected):
                assert actual.numpy().dtype == array.dtype
                assert np.array_equal(actual.numpy(), array)
            assert infos.keys() == expected[4].keys()
            for name in ("done", "acting", "present", "present_next", "state", "final_observations", "action_masks"):
                assert np.array_equal(getattr(env, name).numpy(), getattr(plain, name))
        assert env.num_agents == 3
        assert env.group_map == plain.group_map


def test_trees_and_groups_become_tensors():
    env = StackedVecEnv(ParallelEnv([simple_tag_v3.parallel_env], backend="serial")).torch()
    with env:
        observations, _ = env.reset()
        assert {name: tuple(part.shape) for name, part in observations.items()} == {
            "adversary": (1, 3, 16),
            "agent": (1, 1, 14),
        }
        zeros = {name: torch.zeros(1, len(of), dtype=torch.int64) for name, of in env.group_map.items()}
        assert env.step(zeros)[1]["agent"].shape == (1, 1)


def test_pinned_observations_are_registered_and_not_overwritten_while_copied(cuda):
    env = opened().torch(pin=True)
    first, _ = env.reset()
    address, where = first.data_ptr(), [*cuda.registered]
    assert where == [address]
    assert cuda.registered[address] == 2 * 3 * 18 * 4
    assert cuda.log == ["synchronize", "record"]
    second = env.step(ACTIONS)[0]
    assert second.data_ptr() == address
    assert cuda.log == ["synchronize", "record"] * 2
    env.close()
    del env, first, second
    gc.collect()
    assert not cuda.registered


def test_a_timeout_loses_nothing(cuda, monkeypatch):
    """The step can be waited for again. Meanwhile the `StackedVecEnv` itself does not write into page-locked memory."""
    with opened() as arrays, opened() as plain:
        env = arrays.torch(pin=True)
        pinned, _ = env.reset(seed=3)
        plain.reset(seed=3)
        saved = pinned.clone()
        env.step_async(ACTIONS)
        with monkeypatch.context() as patched:
            patched.setattr(arrays.stepper, "_received", too_early)
            with pytest.raises(TimeoutError):
                env.step_wait(timeout=0.01)
        expected = plain.step(ACTIONS)[0]
        assert np.array_equal(arrays.step_wait()[0], expected)
        assert torch.equal(pinned, saved)
        env.step_async(ACTIONS)
        assert np.array_equal(env.step_wait(timeout=60.0)[0].numpy(), plain.step(ACTIONS)[0])
        with pytest.raises(ValueError, match="seed"):
            env.reset(seed=[1, 2, 3])
        saved = pinned.clone()
        assert np.array_equal(arrays.reset(seed=5)[0], plain.reset(seed=5)[0])
        assert torch.equal(pinned, saved)


def too_early(min_envs: int | None, timeout: float | None, env_ids: Any) -> Any:
    """As a `_received` whose results do not come within its timeout."""
    assert timeout == 0.01
    raise TimeoutError


def test_a_rollout_is_registered_once(cuda):
    with opened() as env:
        rollout = Rollout(env, 10, extras={"log_probs": ()})
        rollout.collect(lambda _: (ACTIONS, {"log_probs": np.ones((2, 3))}))
        for _ in range(2):
            data = rollout.torch(pin=True)
            ((address, nbytes),) = cuda.registered.items()
            for part in (data.observations, data.states, data.rewards, data.extras["log_probs"]):
                assert address <= part.data_ptr() < address + nbytes
        assert data.action_masks is None
        rollout.arrays.rewards[3] = 7.0
        assert (data.rewards[3] == 7.0).all()
        del rollout, data
        gc.collect()
        assert not cuda.registered


def test_an_error_of_cuda_is_reported(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *_: 2)
    with opened() as env, pytest.raises(RuntimeError, match="cannot page-lock 432 bytes: error 2"):
        env.torch(pin=True)


def test_without_cuda_the_log_says_so_once(monkeypatch, caplog):
    tensors.has_cuda.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with opened() as env, caplog.at_level(logging.WARNING):
        for _ in range(2):
            env.torch(pin=True).reset()
            Rollout(env, 2).torch(pin=True)
    assert [record.message for record in caplog.records] == ["pin=True has no effect: torch finds no CUDA device"]
    tensors.has_cuda.cache_clear()


def test_rollouts_collected_ahead():
    """Tensors share the memory of the latest rollout, which alternates between two."""
    with opened() as env:
        rollout, addresses = Rollout(env, 4), []
        with rollout.ahead(lambda current: ACTIONS, publish=lambda: None, rollouts=3) as rollouts:
            for data in rollouts:
                found = rollouts.torch(pin=True)
                assert np.array_equal(found.rewards.numpy(), data.rewards)
                assert found.rewards.data_ptr() == data.rewards.ctypes.data
                addresses.append(found.rewards.data_ptr())
        assert addresses[0] == addresses[2] != addresses[1]
        assert rollout.torch().rewards.data_ptr() == addresses[2]
