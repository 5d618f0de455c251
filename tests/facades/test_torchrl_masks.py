"""Action masks and the global state of `TorchRLEnv`, as of TorchRL's own wrapper of PettingZoo."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from mpe2 import simple_spread_v3
from pettingzoo.classic import connect_four_v3
from simulators.masked_actions import BoxWithMask, Turnstile, refusing_multi_discrete
from simulators.native_arena import Arena
from simulators.pymarl_envs import Skirmish
from torchrl.envs import PettingZooWrapper
from torchrl.envs.utils import check_env_specs

from marl_parallel import ParallelEnv
from marl_parallel.vector import TorchRLEnv

pytestmark = pytest.mark.needs("torchrl")
CHOICES = spaces.MultiDiscrete([3, 2])
MASK = np.array([0, 1, 0], np.int8), np.array([1, 0], np.int8)


REFUSING: dict[str, tuple[Any, bool]] = {
    "observations": (functools.partial(Turnstile, "observations"), False),
    "infos": (functools.partial(Turnstile, "infos"), True),
    "turn-based": (connect_four_v3.raw_env, False),
    "neither": (Skirmish, False),
    "multi-discrete": (
        functools.partial(refusing_multi_discrete, (np.array([0, 1, 0], np.int8), np.array([1, 0], np.int8))),
        True,
    ),
}


@pytest.mark.parametrize("case", REFUSING)
def test_random_actions_are_legal(case):
    """Simulators raise if they are not."""
    make, info_masks = REFUSING[case]
    env = TorchRLEnv(ParallelEnv([make] * 3, False, num_workers=2), info_masks=info_masks)
    check_env_specs(env)
    data = env.rollout(60, break_when_any_done=False)
    for name in env.group_map:
        masks, actions, acting, present = (data[name, key] for key in ("action_mask", "action", "mask", "present"))
        assert masks.dtype == torch.bool
        assert masks[~acting & ~present].all()
        if case != "multi-discrete":
            assert masks.gather(-1, actions[..., None])[acting].all()
        assert ("observation", "action_mask") not in data["next", name].keys(True)
    assert data["next", "done"].any()
    env.close()


def test_masks_equal_those_of_torchrls_own_wrapper():
    env = TorchRLEnv(ParallelEnv([connect_four_v3.env] * 2, False, backend="serial"))
    theirs = PettingZooWrapper(connect_four_v3.env(), use_mask=True, group_map={"player": ["player_0", "player_1"]})
    ours, other = env.reset(), theirs.reset()
    for _ in range(7):
        for name in env.group_map:
            action = torch.full((2, 2), 3)
            assert torch.equal(ours[name, "action_mask"], torch.stack([other[name, "action_mask"]] * 2))
            spec = env.observation_spec[name, "action_mask"]
            assert spec.shape[1:] == theirs.observation_spec[name, "action_mask"].shape
            assert spec.dtype == theirs.observation_spec[name, "action_mask"].dtype
            ours[name, "action"] = action
            other[name, "action"] = action[0]
        if ours["done"].any():
            break
        ours, other = env.step(ours)["next"], theirs.step(other)["next"]
    env.close()


def test_partial_resets_change_only_masks_of_these_environments():
    env = TorchRLEnv(ParallelEnv([functools.partial(Turnstile, "observations")] * 3, False, backend="serial"))
    data = env.reset()
    before = {name: data[name, "action_mask"].clone() for name in env.group_map}
    chosen = torch.tensor([[True], [False], [False]])
    data = env.reset(data.set("_reset", chosen))
    for name in env.group_map:
        changed = (data[name, "action_mask"] != before[name]).flatten(1).any(1)
        assert changed.tolist() == [True, False, False]
    env.rollout(5, break_when_any_done=False)
    env.close()


@pytest.mark.parametrize("make", [simple_spread_v3.parallel_env, BoxWithMask])
def test_no_masks_without_choices_or_declared_masks(make):
    env = TorchRLEnv(ParallelEnv([make] * 2, False, backend="serial"))
    data = env.rollout(3)
    assert not any("action_mask" in data[name] for name in env.group_map)
    env.close()


def test_global_state():
    make = functools.partial(simple_spread_v3.parallel_env, max_cycles=5)
    env = TorchRLEnv(ParallelEnv([make] * 2, False, backend="serial"), return_state=True)
    plain = ParallelEnv([make] * 2, False, backend="serial")
    check_env_specs(env)
    env.env.reset(seed=3)
    plain.reset(seed=3)
    env.set_seed(3)
    data = env.reset()
    assert env.observation_spec["state"].shape == (2, *plain.state_space.shape)
    for _ in range(5):
        np.testing.assert_array_equal(data["state"].numpy(), plain.state())
        data = env.rand_action(data)
        acts = data["agent", "action"].numpy()
        plain.step([dict(zip(plain.possible_agents, row)) for row in acts])
        data = env.step(data)["next"]
    assert data["done"].all()
    np.testing.assert_array_equal(data["state"].numpy(), plain.state())
    env.close()
    plain.close()


def test_what_environments_do_not_have_is_refused():
    with (
        ParallelEnv.from_native(Arena(2)) as env,
        pytest.raises(ValueError, match="return_state=True, but the state_sp"),
    ):
        TorchRLEnv(env, return_state=True)
    env = ParallelEnv([BoxWithMask], False, backend="serial")
    with pytest.raises(ValueError, match="info_masks=True, but no group"):
        TorchRLEnv(env, info_masks=True)
    env.close()
