"""Examples of Gym and RLlib with only the renames of `docs/migrating.md`, beside plain loops."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import ROOT
from helpers.comparison import assert_same
from simulators.deterministic import Hunt

from marl_parallel import EnvError, ParallelEnv, make
from marl_parallel.vector import GymnasiumVectorEnv

PAGE = (ROOT / "docs" / "migrating.md").read_text()


def test_gyms_first_example():
    """Random actions in four carts, made by name."""
    env = make("CartPole-v1", 4, facade="gymnasium", num_workers=2)
    alone = [gymnasium.make("CartPole-v1") for _ in range(4)]
    observations, _ = env.reset(seed=11)
    assert observations.shape == (4, 4)
    first = [one.reset(seed=11 + i)[0] for i, one in enumerate(alone)]
    assert np.array_equal(observations, first)
    env.action_space.seed(5)
    over = [False] * 4
    for _ in range(40):
        actions = env.action_space.sample()
        observations, rewards, terminations, truncations, _ = env.step(actions)
        for i, one in enumerate(alone):
            if over[i]:
                seen, reward, flags = one.reset()[0], 0.0, (False, False)
            else:
                seen, reward, *flags, _ = one.step(actions[i])
            assert np.array_equal(observations[i], seen)
            assert (rewards[i], terminations[i], truncations[i]) == (reward, *flags)
            over[i] = any(flags)
    env.close()


class Reciprocal(gymnasium.Env):
    """Divides by the action."""

    observation_space = spaces.Box(0.0, np.inf, (), np.float64)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        super().reset(seed=seed)
        return np.float64(1.0), {}

    def step(self, action: Any) -> Any:
        return np.float64(1 / int(action)), 1.0, False, False, {}


def test_gyms_asynchronous_example():
    env = GymnasiumVectorEnv(ParallelEnv([Reciprocal] * 3, "NEXT_STEP", num_workers=2))
    env.reset_async(seed=1)
    observations, _ = env.reset_wait(timeout=60.0)
    assert observations.tolist() == [1.0, 1.0, 1.0]
    env.step_async(np.array([1, 2, 3]))
    observations, rewards, *_ = env.step_wait(timeout=60.0)
    assert observations.tolist() == [1.0, 1 / 2, 1 / 3]
    assert rewards.tolist() == [1.0, 1.0, 1.0]
    env.call_async("has_wrapper_attr", "action_space")
    assert env.call_wait(timeout=60.0) == (True, True, True)
    env.set_attr("spec", ["a", "b", "c"])
    assert env.get_attr("spec") == ("a", "b", "c")
    with pytest.raises(EnvError, match="environment 1") as caught:
        env.step(np.array([1, 0, 2]))
    assert isinstance(caught.value.original, ZeroDivisionError)
    env.close(terminate=True)


def test_rllibs_poll_and_send_actions():
    """Environments that are ready get their next actions; each environment plays as in a plain loop."""

    def make_env(env_id: int, seed: int) -> Hunt:
        return Hunt(seed=seed)

    env = ParallelEnv([make_env] * 4, auto_reset=False, num_workers=2, seed=3)
    spaces_of = env.action_space
    rngs = [np.random.default_rng(env_id) for env_id in range(4)]
    alone = [Hunt(seed=3 + env_id) for env_id in range(4)]
    expected = [one.reset(seed=3 + env_id)[0] for env_id, one in enumerate(alone)]
    steps = [0] * 4
    env.reset_async()
    while min(steps) < 12:
        polled = env.recv(1, window=0.01)
        chosen, again = {}, []
        for env_id, seen, terminated, truncated in zip(
            polled.env_ids, polled.observations, polled.terminateds, polled.truncateds, strict=True
        ):
            assert_same(seen, expected[env_id])
            steps[env_id] += 1
            if terminated["__all__"] or truncated["__all__"]:
                again.append(env_id)
                expected[env_id] = alone[env_id].reset()[0]
                continue
            acting = env.acting[env_id]
            for agent in acting:
                spaces_of[agent].seed(int(rngs[env_id].integers(2**31)))
            chosen[env_id] = {agent: spaces_of[agent].sample() for agent in acting}
            expected[env_id] = alone[env_id].step(chosen[env_id])[0]
        if again:
            env.reset_async(env_ids=again)
        if chosen:
            env.send(chosen)
    env.close()


def test_page_names_what_exists():
    """Methods and arguments in the right-hand columns of the tables."""
    rows = [row.split(" | ") for row in PAGE.splitlines() if row.startswith("| `")]
    assert len(rows) > 40
    here = " ".join(row[1] for row in rows)
    for name in {*re.findall(r"`env\.(\w+)\(", here), *re.findall(r"then `env\.(\w+)\(", here)}:
        assert any(hasattr(kind, name) for kind in (ParallelEnv, GymnasiumVectorEnv)), name
    for section in ("SMARTS", "ML-Agents", "TorchRL", "RLlib", "Gymnasium and Gym"):
        assert f"## Migrating from {section}\n" in PAGE
