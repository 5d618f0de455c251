"""Small simulators of every kind, and real ones in the newest installed version."""

import importlib
import warnings

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
MOVES = spaces.Discrete(2)


def real(*modules, maker="parallel_env", **arguments):
    """An environment of the first of these modules that the installed release has."""
    for module in modules:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(found, maker)(**arguments)
    pytest.skip(f"none of {modules} is installed")


class Crossing:
    """A dict environment that declares nothing: two cars, three steps."""

    def reset(self, seed=None):
        self.time, self.seed_given = 0, seed
        return {car: np.zeros(3, np.float32) for car in ("left", "right")}, {}

    def step(self, actions):
        self.time += 1
        self.actions = actions
        over = {"left": False, "__all__": self.time == 3}
        return {"left": np.ones(3, np.float32)}, {"left": 0.5}, over, {"__all__": False}, {"note": 7}


class Declared(Crossing):
    observation_space = spaces.Dict([("right", BOX), ("left", BOX)])
    action_space = {"left": MOVES, "right": MOVES}  # noqa: RUF012


class DictGym(Crossing, gymnasium.Env):
    possible_agents = ("left", "right")
    observation_space = spaces.Dict({"left": BOX, "right": BOX})
    action_space = spaces.Dict({"left": MOVES, "right": MOVES})

    def reset(self, *, seed=None, options=None):
        return Crossing.reset(self, seed)


class FakeRLlib(gymnasium.Env):
    """RLlib's rules for finding spaces; its module name is set to RLlib's."""

    observation_spaces = None
    action_spaces = None
    possible_agents: list = []  # noqa: RUF012
    observation_space = None
    action_space = None

    def get_observation_space(self, agent):
        if self.observation_spaces is not None:
            return self.observation_spaces[agent]
        return self.observation_space

    def get_action_space(self, agent):
        return self.action_spaces[agent] if self.action_spaces is not None else self.action_space

    def reset(self, *, seed=None, options=None):
        return {"a": BOX.sample()}, {}

    def step(self, action_dict):
        return {"a": BOX.sample()}, {"a": 1.0}, {"__all__": False}, {"__all__": False}, {}


FakeRLlib.__name__ = "MultiAgentEnv"
FakeRLlib.__module__ = "ray.rllib.env.multi_agent_env"


class Open(pettingzoo.ParallelEnv):
    """A parallel environment without `possible_agents` and optional members."""

    def reset(self, seed=None, options=None):
        self.agents = ["late"]
        return {"late": BOX.sample()}, {"late": {}}

    def step(self, actions):
        self.agents = []
        return {"late": BOX.sample()}, {"late": 1.0}, {"late": True}, {"late": False}, {"late": {}}


class OnlyDicts(Open):
    """Its spaces are in dicts, which PettingZoo's base class reads with a warning."""

    metadata = {"render_modes": []}  # noqa: RUF012
    render_mode = None
    possible_agents = ["late", "later"]  # noqa: RUF012
    observation_spaces = {"late": BOX}  # noqa: RUF012
    action_spaces = {"late": MOVES, "later": MOVES}  # noqa: RUF012


class OnlyDictsAEC(pettingzoo.AECEnv):
    metadata = {"is_parallelizable": True}  # noqa: RUF012
    possible_agents = ["one"]  # noqa: RUF012
    observation_spaces = {"one": BOX}  # noqa: RUF012
    action_spaces = {"one": MOVES}  # noqa: RUF012
    render_mode = None

    def observe(self, agent):
        return BOX.sample()
