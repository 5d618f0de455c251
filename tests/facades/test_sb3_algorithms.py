"""Stable-Baselines3's wrappers, buffers and algorithms on an `SB3VecEnv`."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import ROOT
from helpers.batches import sample_rows
from mpe2 import simple_spread_v3
from pettingzoo import ParallelEnv as PettingZooEnv
from simulators.variable_agents import LENGTH, VariableAgents
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import (
    VecCheckNan,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from marl_parallel import ParallelEnv
from marl_parallel.vector import SB3VecEnv

pytestmark = pytest.mark.needs("stable_baselines3")


def build_facade(make: Callable[..., Any] = VariableAgents, copies: int = 3, **how: Any) -> SB3VecEnv:
    return SB3VecEnv(ParallelEnv([make] * copies, **{"backend": "serial", **how}))


def test_wrappers():
    env: Any = VecMonitor(
        VecFrameStack(
            VecNormalize(VecCheckNan(build_facade(functools.partial(simple_spread_v3.parallel_env, max_cycles=8)))), 2
        )
    )
    env.seed(1)
    env.reset()
    for step in range(24):
        _, _, dones, infos = env.step(sample_rows(env.action_space, 9))
        assert dones.all() == (step % 8 == 7)
    assert [info["episode"]["l"] for info in infos] == [8] * 9
    assert all(info["terminal_observation"].shape == (36,) for info in infos)
    env.close()


def test_episodes_of_a_row_end_at_the_death_of_its_agent():
    """The second end of the row, with the episode of its environment, is that of no episode, also for a monitor."""
    env: Any = VecMonitor(build_facade(functools.partial(VariableAgents, plain=True)))
    env.seed(1)
    env.reset()
    lengths: list[list[int]] = [[] for _ in range(9)]
    for _ in range(2 * LENGTH):
        for row, info in enumerate(env.step(sample_rows(env.action_space, 9))[3]):
            if "episode" in info:
                lengths[row].append(info["episode"]["l"])
    assert lengths[2] == lengths[5] == lengths[8] == [LENGTH, LENGTH]
    assert all(len(own) == 2 for own in lengths)
    assert all(length < LENGTH for row in (0, 3, 6) for length in lengths[row])
    env.close()


class Images(VariableAgents):
    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 255, (36, 40, 3), np.uint8)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.MultiBinary(3)

    def seen(self) -> np.ndarray:
        return self.rng.integers(0, 256, (36, 40, 3), dtype=np.uint8)


def test_images_and_binary_actions():
    """PPO samples binary actions as floats, and transposes observations, also terminal ones."""
    env = build_facade(Images, 2)
    model = PPO("CnnPolicy", env, n_steps=10, batch_size=30, n_epochs=1, device="cpu", seed=1)
    assert isinstance(model.get_env(), VecTransposeImage)
    model.learn(60)
    assert model.num_timesteps == 60
    for _ in range(2 * LENGTH):
        observations, _, dones, infos = model.get_env().step(np.ones((6, 3), np.float32))
        assert observations.shape == (6, 3, 36, 40)
        assert all(infos[row]["terminal_observation"].shape == (3, 36, 40) for row in np.flatnonzero(dones))
    assert env.env.stats().steps == 2 * (10 + 2 * LENGTH)
    env.close()


class Signals(PettingZooEnv):
    """Each agent observes which action is rewarded; one dies half-way."""

    metadata = {"name": "signals"}  # noqa: RUF012
    possible_agents = ["brief", "long"]  # noqa: RUF012
    choices, length = 4, 10

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0.0, 1.0, (self.choices,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(self.choices)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time = self.possible_agents[:], 0
        return self.observe(), {agent: {} for agent in self.agents}

    def observe(self) -> dict[str, np.ndarray]:
        self.paid = {agent: int(self.rng.integers(self.choices)) for agent in self.agents}
        return {agent: np.eye(self.choices, dtype=np.float32)[action] for agent, action in self.paid.items()}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        rewards = {agent: float(actions[agent] == self.paid[agent]) for agent in self.agents}
        terminated = {agent: agent == "brief" and self.time == self.length // 2 for agent in self.agents}
        truncated = dict.fromkeys(self.agents, self.time == self.length)
        observations, infos = self.observe(), {agent: {} for agent in self.agents}
        self.agents = [agent for agent in self.agents if not (terminated[agent] or truncated[agent])]
        return observations, rewards, terminated, truncated, infos


def test_ppo_learns():
    """The reward rises from a quarter of the maximum to nearly all of it."""
    torch.set_num_threads(1)
    env, other = build_facade(Signals, 8, num_workers=2, backend="process"), VecMonitor(build_facade(Signals, 4))
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=128, learning_rate=3e-3, gamma=0.5, device="cpu", seed=3)
    greedy = {"deterministic": True, "n_eval_episodes": 80}
    other.seed(1)
    # A copy's two rows end three episodes: of 5 steps, of zeros, of 10 steps.
    best = (Signals.length // 2 + 0 + Signals.length) / 3
    before, _ = evaluate_policy(model, other, **greedy)
    model.learn(12_000)
    after, _ = evaluate_policy(model, other, **greedy)
    assert before < 0.5 * best
    assert after > 0.9 * best
    env.close()
    other.close()


def test_returns_stop_at_episode_ends():
    """Sums of one episode's rewards: no discount, and a value of zero afterwards."""
    env = build_facade(functools.partial(VariableAgents, plain=True))
    model = PPO("MlpPolicy", env, n_steps=3 * LENGTH, batch_size=27, n_epochs=1, gamma=1.0, gae_lambda=1.0, seed=2)
    for parameter in model.policy.value_net.parameters():
        torch.nn.init.zeros_(parameter)
    model.learn(1)
    buffer = model.rollout_buffer
    starts = np.vstack([buffer.episode_starts[1:], model._last_episode_starts])
    returns, following = np.zeros((3 * LENGTH, 9)), np.zeros(9)
    for step in reversed(range(3 * LENGTH)):
        following = buffer.rewards[step] + np.where(starts[step], 0.0, following)
        returns[step] = following
    by_row = buffer.returns.reshape(9, 3 * LENGTH).T  # training has laid them end to end
    assert np.allclose(by_row, returns, rtol=1e-3, atol=1e-3)
    assert starts.sum() > 9 * 3
    env.close()


def test_replay_buffer_gets_last_observations():
    env = build_facade(functools.partial(VariableAgents, plain=True))
    returned: list[Any] = []
    step_wait = env.step_wait
    env.step_wait = lambda: returned.append(step_wait()) or returned[-1]  # type: ignore[method-assign]
    model = DQN("MlpPolicy", env, buffer_size=9 * 40, learning_starts=10**6, device="cpu", seed=4)
    model.learn(9 * 20)
    buffer, ends = model.replay_buffer, 0
    for step, (observations, _, dones, infos) in enumerate(returned):
        for row in range(9):
            last = infos[row].get("terminal_observation", observations[row])
            assert np.array_equal(buffer.next_observations[step, row], last)
            assert buffer.dones[step, row] == dones[row]
            assert buffer.timeouts[step, row] == infos[row]["TimeLimit.truncated"]
            ends += dones[row]
    assert len(returned) == 20
    assert ends > 18
    env.close()


def test_example():
    command = [sys.executable, str(ROOT / "examples" / "sb3_parameter_sharing.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "mean return" in done.stdout
