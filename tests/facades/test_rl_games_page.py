"""The page of rl_games: its vector environment equals `RayVecEnv` over the same simulators."""

from __future__ import annotations

import functools
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import ROOT
from helpers.comparison import assert_same
from mpe2 import simple_spread_v3
from rl_games.common import env_configurations, vecenv
from simulators.dying_team import DyingTeam

pytestmark = pytest.mark.needs("rl_games")

PAGE = (ROOT / "docs/frameworks/rl_games.md").read_text()
(BLOCK,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
DEFINED: dict[str, Any] = {"__name__": "page"}
exec(BLOCK.partition("\nvecenv.register(")[0], DEFINED)  # without the training

SIMULATORS = {"spread": functools.partial(simple_spread_v3.parallel_env, local_ratio=0.0), "dying": DyingTeam}
NUM_ENVS = 3


class InFormOfRLGames:
    """A PettingZoo environment in the form of rl_games' `SMACEnv`: a row for each agent, dead or alive."""

    use_central_value = concat_infos = True

    def __init__(self, make: Any) -> None:
        self.env = make()
        self.names = self.env.possible_agents
        self.observation_space = self.env.observation_space(self.names[0])
        self.action_space, self.state_space = self.env.action_space(self.names[0]), self.env.state_space
        self.first_seed: int | None = None

    def get_number_of_agents(self) -> int:
        return len(self.names)

    def seed(self, seed: int) -> None:
        self.first_seed = seed

    def reset(self) -> Any:
        observations, infos = self.env.reset(seed=self.first_seed)
        self.first_seed = None
        return self.shown(observations, infos)

    def shown(self, observations: Any, infos: Any) -> Any:
        allowed = np.ones(self.action_space.n, np.bool_)
        self.masks = np.array([infos.get(name, {}).get("action_mask", allowed) for name in self.names])
        nothing = np.zeros(self.observation_space.shape, np.float32)
        rows = np.array([observations.get(name, nothing) for name in self.names])
        return {"obs": rows, "state": self.env.state()}

    def step(self, actions: Any) -> Any:
        alive = [*self.env.agents]
        chosen = {name: action for name, action in zip(self.names, actions, strict=True) if name in alive}
        observations, rewards, terminated, _, infos = self.env.step(chosen)
        over = not self.env.agents
        timed_out = over and not all(terminated[name] for name in alive)
        result = self.shown({name: observations[name] for name in alive}, infos)
        of_agents = np.array([float(rewards[name]) if name in alive else 0.0 for name in self.names])
        time_outs = np.full(len(self.names), timed_out, np.float32)
        return result, of_agents, np.full(len(self.names), over), {"time_outs": time_outs}

    def get_action_mask(self) -> Any:
        return self.masks


class InProcess:
    """An object whose methods are called by `.remote`, as those of Ray's actors."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.target, name)
        return type("Method", (), {"remote": staticmethod(method)})


@pytest.fixture
def own(request, monkeypatch):
    """rl_games' own vector environment, with actors in this process in place of Ray's."""
    ray: Any = ModuleType("ray")
    ray.is_initialized = lambda: True
    ray.get = lambda results: results
    ray.remote = lambda actor: type("Actor", (), {"remote": staticmethod(lambda *args: InProcess(actor(*args)))})
    monkeypatch.setitem(sys.modules, "ray", ray)
    creator = functools.partial(InFormOfRLGames, SIMULATORS[request.param])
    monkeypatch.setitem(env_configurations.configurations, "own", {"vecenv_type": "RAY", "env_creator": creator})
    return vecenv.create_vec_env("own", NUM_ENVS, seed=7)


@pytest.fixture
def ours(request, monkeypatch):
    monkeypatch.setitem(vecenv.vecenv_config, "PARALLEL", DEFINED["ParallelVecEnv"])
    configuration = {"vecenv_type": "PARALLEL", "env_creator": SIMULATORS[request.param]}
    monkeypatch.setitem(env_configurations.configurations, "ours", configuration)
    env = vecenv.create_vec_env("ours", NUM_ENVS, seed=7, num_workers=2, central_value=True)
    yield env
    env.close()


@pytest.mark.parametrize(("own", "ours"), [("spread", "spread"), ("dying", "dying")], indirect=True)
def test_all_equals_rl_games_own_vector_environment(own, ours):
    expected_info, info = own.get_env_info(), ours.get_env_info()
    assert {name: expected_info[name] for name in info} == info
    assert own.has_action_masks() == ours.has_action_masks()
    assert_same(ours.reset(), own.reset())
    rng, ends, time_outs = np.random.default_rng(1), 0, 0
    for _ in range(60):
        masks = ours.get_action_masks()
        assert_same(masks, own.get_action_masks())
        actions = rng.random(masks.shape).argmax(axis=1)
        results = ours.step(actions)
        assert_same(results, own.step(actions))
        ends += int(results[2].sum())
        time_outs += int(results[3]["time_outs"].sum())
    assert 0 < time_outs <= ends


@pytest.mark.parametrize("ours", ["dying"], indirect=True)
def test_rows_of_dead_agents(ours):
    ours.reset()
    dead = 0
    for _ in range(30):
        acting = ours.env.acting.reshape(-1)
        observed, rewards, dones, _ = ours.step(np.ones(9, np.int64))
        assert not rewards[~acting].any()
        gone = ~ours.env.present_next.reshape(-1)
        assert not observed["obs"][gone].any()
        assert not dones[gone].any()
        assert (dones.reshape(3, 3) == dones[::3, None]).all()
        dead += int(gone.sum())
    assert dead
