"""The page of XuanCe: its vector environment equals XuanCe's own, and XuanCe's runners train the same weights on it."""

from __future__ import annotations

import copy
import functools
import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import ROOT
from helpers.comparison import assert_same
from xuance import get_arguments, get_runner
from xuance.environment import REGISTRY_VEC_ENV, RawMultiAgentEnv, XuanCeMultiAgentEnvWrapper, make_envs
from xuance.environment.vector_envs import DummyVecMultiAgentEnv

pytestmark = pytest.mark.needs("xuance")

PAGE = (ROOT / "docs/frameworks/xuance.md").read_text()
(BLOCK,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
DEFINED: dict[str, Any] = {"__name__": "page"}
exec(BLOCK.partition("\nREGISTRY_VEC_ENV[")[0], DEFINED)  # without the training
ParallelVecEnv = functools.partial(DEFINED["ParallelVecEnv"], num_workers=2, preload=("xuance",))

BUFFERS = ("buf_obs", "buf_info", "buf_state", "buf_avail_actions")
ATTRIBUTES = (
    "num_envs",
    "agents",
    "num_agents",
    "max_episode_steps",
    "observation_space",
    "action_space",
    "state_space",
)


class Hunters(RawMultiAgentEnv):
    """Agents die one by one: they observe zeros then, and may only choose action 0. Episodes end in either way."""

    def __init__(self, env_seed: int, fails_at: int | None = None) -> None:
        super().__init__()
        self.rng, self.fails_at, self.steps = np.random.default_rng(env_seed), fails_at, 0
        self.agents = ["hunter_0", "hunter_1", "prey_0"]
        self.agent_groups = [self.agents[:2], self.agents[2:]]
        self.num_agents, self.max_episode_steps = 3, 6
        self.observation_space = {agent: spaces.Box(-9, 9, (2,), np.float32) for agent in self.agents}
        self.action_space = {agent: spaces.Discrete(4) for agent in self.agents}
        self.state_space = spaces.Box(-9, 9, (3,))

    def reset(self, **keywords: Any) -> Any:
        self.time, self.total = 0, 0.0
        self.deaths = dict(zip(self.agents, self.rng.integers(2, 9, 3).tolist(), strict=True))
        return self.observed(), {"deaths": self.deaths}

    def observed(self) -> Any:
        alive = self.agent_mask()
        values = self.rng.uniform(-1, 1, (3, 2)).astype(np.float32)
        return {agent: value * alive[agent] for agent, value in zip(self.agents, values, strict=True)}

    def step(self, actions: Any) -> Any:
        self.time, self.steps = self.time + 1, self.steps + 1
        if self.steps == self.fails_at:
            raise RuntimeError("an accident")
        alive = self.agent_mask()
        self.total += sum(float(action) for agent, action in actions.items() if alive[agent])
        rewards = {agent: np.float64(self.total * alive[agent]) for agent in self.agents}
        terminated = {agent: not is_alive for agent, is_alive in self.agent_mask().items()}
        return self.observed(), rewards, terminated, self.time == self.max_episode_steps, {"total": self.total}

    def agent_mask(self) -> Any:
        return {agent: self.time < death for agent, death in self.deaths.items()}

    def avail_actions(self) -> Any:
        return {agent: np.array([True, *[alive] * 3]) for agent, alive in self.agent_mask().items()}

    def state(self) -> Any:
        return np.array([self.time, self.total, sum(self.agent_mask().values())])

    def render(self, *args: Any) -> Any:
        return np.full((2, 2, 3), self.time, np.uint8)

    def close(self) -> None:
        """Frees nothing."""


def make_hunters(env_seed: int, fails_at: int | None = None) -> Any:
    env = Hunters(env_seed, fails_at)
    env.reset()  # for what the wrapper reads
    return XuanCeMultiAgentEnvWrapper(env)


def spread(vectorize: str, *, continuous: bool) -> Any:
    arguments = Namespace(vectorize=vectorize, parallels=3, continuous_action=continuous, render_mode="rgb_array")
    return make_envs(get_arguments("qmix", "mpe", "simple_spread_v3", parser_args=arguments))


def hunters(make: Callable[..., Any]) -> Any:
    return make([make_hunters] * 3, env_seed=5)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(REGISTRY_VEC_ENV, "ParallelEnv", ParallelVecEnv)
    monkeypatch.setitem(REGISTRY_VEC_ENV, "WithCopies", WithCopies)
    torch.set_num_threads(1)


class WithCopies(DummyVecMultiAgentEnv):
    """Like `SubprocVecMultiAgentEnv`, a step overwrites nothing that agents store.

    `DummyVecMultiAgentEnv` overwrites the list `buf_obs`, which agents read before their first step, and PettingZoo's
    `mpe` overwrites the actions of MAPPO.
    """

    def step_async(self, actions: Any) -> None:
        super().step_async(copy.deepcopy(actions))

    def step_wait(self) -> Any:
        for name in BUFFERS:
            setattr(self, name, [*getattr(self, name)])
        return super().step_wait()


def without_overwritten(infos: list[Any]) -> list[Any]:
    """XuanCe's `mpe` shares one dict of rewards by all its infos, and its reset sets them to zero."""
    return [
        {key: value for key, value in info.items() if key != "individual_episode_rewards" or "reset_obs" not in info}
        for info in infos
    ]


def recorded(env: Any, steps: int) -> list[Any]:
    """All that XuanCe's agents read."""
    shown: list[Any] = [{name: getattr(env, name) for name in ATTRIBUTES}, env.env_info, env.groups_info]
    rng = np.random.default_rng(1)

    def keep(*results: Any) -> None:
        *others, infos = copy.deepcopy(results)
        buffers = {name: copy.deepcopy(getattr(env, name)) for name in BUFFERS}
        buffers["buf_info"] = without_overwritten(buffers["buf_info"])
        others = [
            [dict(one) if isinstance(one, dict) else one for one in values] for values in others
        ]  # no defaultdict
        shown.append((others, without_overwritten(infos), buffers))

    keep(*env.reset())
    for _ in range(steps):
        actions = []
        for _ in range(env.num_envs):
            of_env = {
                agent: space.n if isinstance(space, spaces.Discrete) else 0 for agent, space in env.action_space.items()
            }
            actions.append({agent: rng.integers(n) if n else rng.random(5, np.float32) for agent, n in of_env.items()})
        keep(*env.step(actions))
    return shown


@pytest.mark.parametrize(
    "make",
    [
        lambda vectorize: spread(vectorize, continuous=False),
        lambda vectorize: spread(vectorize, continuous=True),
        lambda vectorize: hunters(REGISTRY_VEC_ENV[vectorize]),
    ],
    ids=["spread", "continuous", "hunters"],
)
def test_all_equals_xuances_own_vector_environment(make):
    own, ours = make("DummyVecMultiAgentEnv"), make("ParallelEnv")
    try:
        expected = recorded(own, 60)
        assert_same(recorded(ours, 60), expected)
        ends = sum("reset_obs" in info for _, infos, _ in expected[3:] for info in infos)
        assert ends >= 6
        assert_same(ours.render("rgb_array"), own.render("rgb_array"))
    finally:
        ours.close()


def test_agents_of_the_reference_die_before_episodes_end():
    """So that the test above covers masks, and both ends of episodes."""
    terminated, truncated, masks = [], [], []
    for others, infos, _ in recorded(hunters(DummyVecMultiAgentEnv), 60)[4:]:
        terminated += [all(flags.values()) for flags in others[2]]
        truncated += others[3]
        masks += [sum(info["agent_mask"].values()) for info in infos]
    assert any(terminated)
    assert any(truncated)
    assert {1, 2} <= {*masks}


@pytest.mark.parametrize("algorithm", ["mappo", "qmix"])
def test_training_equals_xuances_own(algorithm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for XuanCe's logs and models

    def trained(vectorize: str) -> dict[str, torch.Tensor]:
        settings: dict[str, Any] = {"running_steps": 160, "parallels": 2, "continuous_action": False, "render": False}
        if algorithm == "mappo":
            settings |= {"policy": "Categorical_MAAC_Policy", "buffer_size": 80}
        else:
            settings |= {"start_training": 60, "batch_size": 16, "training_frequency": 10}
        arguments = Namespace(vectorize=vectorize, **settings)
        runner = get_runner(algo=algorithm, env="mpe", env_id="simple_spread_v3", parser_args=arguments)
        for seed, space in enumerate(runner.agent.action_space.values()):
            space.seed(seed)  # QMIX explores with samples of it, and XuanCe does not seed it
        before = copy.deepcopy(runner.agent.policy.state_dict())
        runner.run(mode="train")
        after = runner.agent.policy.state_dict()
        assert any(not torch.equal(after[name], before[name]) for name in before)
        return after

    expected, actual = trained("WithCopies"), trained("ParallelEnv")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_a_restart_ends_the_episode():
    fns = [make_hunters, functools.partial(make_hunters, fails_at=2)]
    env = ParallelVecEnv(fns, env_seed=5, on_error="restart")
    try:
        env.reset()
        actions = [dict.fromkeys(env.agents, 1)] * 2
        before, *_ = env.step(actions)
        observations, rewards, terminated, truncated, infos = env.step(actions)
        assert truncated == [False, True]
        assert terminated[1] == dict.fromkeys(env.agents, False)
        assert rewards[1] == dict.fromkeys(env.agents, 0.0)
        assert_same(observations[1], before[1])
        assert infos[1]["restarted"]
        assert infos[1].keys() >= infos[0].keys() | {"reset_obs", "reset_state", "reset_avail_actions"}
        assert infos[1]["episode_step"] == 1
        assert infos[1]["reset_state"][0] == 0
    finally:
        env.close()
