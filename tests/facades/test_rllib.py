"""RLlib's facade compared with the core's dicts, and wrong use. Its environments are in `rllib_envs`."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from helpers import ROOT
from helpers.comparison import assert_same
from helpers.restart_comparison import OFTEN
from helpers.setups import Setup
from mpe2 import simple_spread_v3
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv
from simulators.crashing import Fate, crashing
from simulators.deterministic import Hunt, Skirmish
from simulators.dying_agents import POINT, DyingAgents, ReturningAgents
from simulators.every_space import draw
from simulators.rllib_envs import DyingRLlibAgents, WithFrames
from simulators.teams import Team, names

from marl_parallel import ParallelEnv
from marl_parallel.core.spaces import to_zero
from marl_parallel.vector import RLlibVectorMultiAgentEnv

pytestmark = pytest.mark.needs("ray", "tree", "torch")

SETUPS = [Setup("serial", True, 2), Setup("process", True, 2), Setup("process", False, 2)]
SIMULATORS = {
    "spread": functools.partial(simple_spread_v3.parallel_env, max_cycles=7),
    "hunt": Hunt,
    "skirmish": Skirmish,
    "dying": DyingAgents,
    "returning": ReturningAgents,
}
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=str)
Five = tuple[list[dict], list[dict], list[dict], list[dict], list[dict]]


class ExpectedForRLlib:
    """RLlib's form of the core's dicts: without dead agents, common infos in every info."""

    def __init__(self, count: int) -> None:
        self.over, self.dead = [False] * count, [set() for _ in range(count)]
        self.last: list[dict] = [{} for _ in range(count)]
        self.left_out = self.deaths = self.restarts = self.never_begun = 0

    def reset(self, results: tuple[Any, ...]) -> tuple[list[dict], list[dict]]:
        observations, infos = results
        pairs = [self.one(i, (observations[i], {}, {}, {}, infos[i])) for i in range(len(observations))]
        return [pair[0] for pair in pairs], [pair[4] for pair in pairs]

    def step(self, results: tuple[Any, ...]) -> Five:
        rows = [self.one(env_id, five) for env_id, five in enumerate(zip(*results, strict=True))]
        return tuple(map(list, zip(*rows, strict=True)))

    def one(self, env_id: int, results: tuple[dict, ...]) -> tuple[dict, ...]:
        if begins := self.over[env_id]:
            self.dead[env_id], self.last[env_id] = set(), {}
        dead, last = self.dead[env_id], self.last[env_id]
        five = [{agent: value for agent, value in dicts.items() if agent not in dead} for dicts in results]
        self.left_out += sum(map(len, results)) - sum(map(len, five))
        flags = [(agent, flag) for dicts in five[2:4] for agent, flag in dicts.items()]
        self.over[env_id] = any(flag for agent, flag in flags if agent == "__all__")
        common = five[4].get("__common__", {})
        if common.get("restarted"):
            self.restarts += 1
            self.never_begun += begins and self.over[env_id]
            if self.over[env_id]:  # a running episode is truncated; one that had not started has no entry
                five[0] = {} if begins else {a: last[a] for a in last if a not in dead} | five[0]
        last.update(five[0])
        if "__common__" in five[4]:
            five[4] |= {agent: {"__common__": common} | five[4].get(agent, {}) for agent in five[0]}
        died = {agent for agent, flag in flags if flag} - {"__all__"}
        self.deaths += bool(died) and not self.over[env_id]
        dead |= died
        return tuple(five)


def actions_for(env: ParallelEnv, rng: np.random.Generator) -> list[dict]:
    spaces = env.action_space
    return [{a: draw(spaces[a], rng) for a in acting if a in spaces.spaces} for acting in env.acting]


def compare(env: RLlibVectorMultiAgentEnv, core: ParallelEnv, steps: int, seed: int | None = 3) -> ExpectedForRLlib:
    """Step facade and core with the same seeds and actions; choices of the facade count from 0."""
    rng, reference = np.random.default_rng(8), ExpectedForRLlib(len(core))
    assert_equal(env.reset(seed=seed), reference.reset(seen_from_zero(core, core.reset(seed=seed))))
    for _ in range(steps):
        actions = actions_for(core, rng)
        results = env.step(from_zero(core.action_space, copy.deepcopy(actions)))
        assert_equal(results, reference.step(seen_from_zero(core, core.step(copy.deepcopy(actions)))))
    return reference


def seen_from_zero(core: ParallelEnv, results: Any) -> Any:
    return from_zero(core.observation_space, results[0]), *results[1:]


def from_zero(declared: Any, values: Any) -> list[dict[Any, Any]]:
    """Values of agents, of whom some declare no space, with choices that count from 0."""
    return [{a: to_zero(declared[a], v) if a in declared.spaces else v for a, v in one.items()} for one in values]


def assert_equal(results: Any, expected: Any) -> None:
    """Equal except for fault reports, which name processes."""
    assert_same(without_reports(list(results)), without_reports(list(expected)))


def without_reports(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: v.splitlines()[0][:15] if k == "error" else without_reports(v) for k, v in value.items()}
    return [without_reports(item) for item in value] if isinstance(value, list | tuple) else value


# -- the facade against the core ---------------------------------------------------------------------------------------


@each_setup
@pytest.mark.parametrize("name", SIMULATORS)
def test_results_equal_the_core(name, setup, build):
    make = SIMULATORS[name]
    env = RLlibVectorMultiAgentEnv(build([make] * 4, setup, "NEXT_STEP"))
    reference = compare(env, build([make] * 4, setup, "NEXT_STEP"), 40)
    assert (reference.deaths > 0) is (name != "spread")
    assert (reference.left_out > 0) is (name == "returning")
    env.close()


@each_setup
@pytest.mark.parametrize("name", ["skirmish", "hunt", "returning"])
def test_restarts(name, setup, build):
    """In a step, at a pending reset, in the constructor; other environments of a dead worker are idle or in flight."""
    ways = ("raise", "raise") if setup.backend == "serial" else ("os._exit", "raise")
    fates = {
        (1, 0): Fate(ways[0], "step", 5),
        (1, 1): Fate(ways[1], "constructor"),
        (1, 2): Fate(ways[0], "reset", 1),
        (2, 0): Fate(ways[0], "step", 2),
        (2, 1): Fate(ways[0], "reset"),
        (3, 0): Fate(ways[1], "step", 5),
        (3, 1): Fate(ways[0], "step", 0),
        (3, 2): Fate(ways[0], "reset"),
    }
    made = [
        build([crashing(SIMULATORS[name], fates)] * 4, setup, "NEXT_STEP", on_error="restart", restart_policy=OFTEN)
        for _ in range(2)
    ]
    reference = compare(RLlibVectorMultiAgentEnv(made[0]), made[1], 40, seed=None)
    assert reference.restarts >= 4
    assert (reference.never_begun > 0) is (setup.backend == "process")
    assert made[0].stats().restarts == made[1].stats().restarts >= 6


def test_a_sequence_of_seeds(build):
    made = [build([DyingRLlibAgents] * 3, SETUPS[0], "NEXT_STEP") for _ in range(2)]
    env = RLlibVectorMultiAgentEnv(made[0])
    assert_same(env.reset(seed=[7, 1, 7])[0], [*made[1].reset(seed=[7, 1, 7])[0]])
    assert env.get_attr("seeds") == ([7], [1], [7])


def test_interface_that_rllib_uses(build):
    core = build([WithFrames] * 2, SETUPS[0], "NEXT_STEP")
    env = RLlibVectorMultiAgentEnv(core)
    assert isinstance(env, VectorMultiAgentEnv)
    assert env.unwrapped is env
    assert (env.num_envs, env.render_mode, env.metadata["render_modes"]) == (2, "rgb_array", ["rgb_array"])
    assert env.single_observation_space == core.observation_space
    assert env.single_observation_spaces == dict(core.observation_space)
    assert env.single_action_space == core.action_space
    assert env.single_action_spaces == dict(core.action_space)
    env.reset()
    env.step([{"x": 0}, {"x": 0}])
    assert [int(frame[0, 0, 0]) for frame in env.render()] == [1, 1]
    env.set_attr("time", [0, 9])
    assert env.get_attr("time") == (0, 9)
    env.set_attr("colour", "red")  # a new one
    assert env.get_attr("colour") == ("red", "red")
    assert env.call("reported") == (["x", "y", "z"], ["z"])
    stand_in = env.envs[1]
    assert len(env.envs) == 2
    assert isinstance(stand_in.unwrapped, MultiAgentEnv)
    assert stand_in.possible_agents == ["x", "y", "z"]
    assert stand_in.get_observation_space("z") == POINT
    assert stand_in.get_action_space("z") == gymnasium.spaces.Discrete(3)
    assert stand_in.get_action_space("nobody") is None
    assert int(stand_in.render()[0, 0, 0]) == 9
    with pytest.raises(AttributeError, match=r"get_attr\('time'\)"):
        stand_in.time  # noqa: B018
    with pytest.raises(RuntimeError, match="cannot be stepped"):
        stand_in.step({})
    with pytest.raises(RuntimeError, match="cannot be reset"):
        stand_in.reset(seed=1)


# -- wrong use ---------------------------------------------------------------------------------------------------------


def test_wrong_actions_are_named(build):
    env = RLlibVectorMultiAgentEnv(build([Hunt] * 2, SETUPS[0], "NEXT_STEP"))
    env.reset()
    with pytest.raises(ValueError, match="no action for agent 'wolf_0'"):
        env.step([{}, {}])
    with pytest.raises(ValueError, match="2 action dicts"):
        env.step([{}])
    env.close()
    assert env.closed


def test_missing_library():
    program = """
import sys
import marl_parallel.vector
assert "ray" not in sys.modules
sys.modules["ray"] = None
try:
    marl_parallel.vector.RLlibVectorMultiAgentEnv
except ImportError as error:
    print(error)
"""
    output = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert 'pip install "marl-parallel[rllib]", or in a checkout: pip install -e ".[rllib]"' in output.stdout, (
        output.stderr
    )


def test_environments_with_different_agents():
    """Each stand-in has its own agents and spaces; so have dicts."""
    teams = [names(0, 1), names(2, 1)]
    env = RLlibVectorMultiAgentEnv(
        ParallelEnv([functools.partial(Team, team) for team in teams], "NEXT_STEP", backend="serial")
    )
    for stand_in, own in zip(env.envs, [names(0, 1), names(1, 2)]):
        assert stand_in.possible_agents == [*stand_in.observation_spaces] == [*stand_in.action_spaces] == own
        assert {*stand_in.observation_space} == {*own}
    observations, _ = env.reset()
    actions = [dict.fromkeys(of_env, 1) for of_env in observations]
    assert [{*of_env} for of_env in actions] == [{*team} for team in teams]
    _, rewards, *_ = env.step(actions)
    assert rewards == [dict.fromkeys(team, 1.0) for team in (names(0, 1), names(1, 2))]
    env.close()
