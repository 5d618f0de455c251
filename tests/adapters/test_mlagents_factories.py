"""What users of ML-Agents' `SubprocessEnvManager` have: factories, parameters without a reset, merged timers."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.setups import Setup
from mlagents_envs.side_channel.engine_configuration_channel import EngineConfig, EngineConfigurationChannel
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel
from mlagents_envs.timers import hierarchical_timer, timed
from simulators.crashing import SimulatorError
from simulators.mlagents_arena import MAX_STEPS, Arena, BareReference, actions_for, arena

from marl_parallel import ParallelEnv
from marl_parallel.adapters.mlagents import from_factory, merged_timers

pytestmark = pytest.mark.needs("mlagents_envs")

PROCESSES = Setup("process", True, 2)


def env_factory(worker_id: int, side_channels: list[Any]) -> Arena:
    assert [type(one) for one in side_channels] == [EngineConfigurationChannel, EnvironmentParametersChannel]
    return Arena(42 + worker_id, side_channels)


def test_factory(backend_setup, build):
    """Equal to a plain loop over what the factory makes."""
    make = from_factory(
        env_factory, engine=EngineConfig.default_config(), parameters={"wind": 0.5}, max_steps=MAX_STEPS
    )
    env = build([make] * 2, backend_setup)
    reference = BareReference(Arena, 2, AutoresetMode.SAME_STEP, MAX_STEPS)
    for one in reference.copies:
        one.env.parameters.update(time_scale=20.0, wind=0.5)
    rng = random.Random(2)
    assert_same(env.reset(), reference.reset())
    assert env.call("get_properties") == ({"wind": 0.5},) * 2
    for _ in range(MAX_STEPS + 3):
        actions = actions_for(reference.acting, rng)
        assert_same(env.step(actions), reference.step(actions))


def test_parameters_without_a_reset(backend_setup, build):
    env = build([arena] * 3, backend_setup)
    reference = BareReference(Arena, 3, AutoresetMode.SAME_STEP, MAX_STEPS)
    rng = random.Random(2)
    assert_same(env.reset(options={"wind": 2.0}), reference.reset(options={"wind": 2.0}))
    for step in range(8):
        if step == 2:
            env.set_parameters({"wind": -1.5, "gravity": 3})
            for one in reference.copies:
                one.env.parameters.update(wind=-1.5, gravity=3.0)
        if step == 5:
            env.set_parameters({"wind": 0.25}, env_ids=[2])
            reference.copies[2].env.parameters["wind"] = 0.25
        actions = actions_for(reference.acting, rng)
        assert_same(env.step(actions), reference.step(actions))
    assert env.call("get_properties") == ({"wind": -1.5, "gravity": 3},) * 2 + ({"wind": 0.25, "gravity": 3},)
    assert env.get_attr("parameters") == ({"wind": -1.5, "gravity": 3.0},) * 2 + ({"wind": 0.25, "gravity": 3.0},)


class BreaksOnce(Arena):
    """Environment 1 fails in its fifth step."""

    def step(self) -> None:
        if self.time == 4 and self.breaks:
            raise SimulatorError("engine stopped")
        super().step()


def breaking_factory(worker_id: int, side_channels: list[Any]) -> Arena:
    env = BreaksOnce(worker_id, side_channels)
    env.breaks, env.worker_id = worker_id == 1, worker_id
    return env


def test_parameters_reach_a_rebuilt_environment(backend_setup, build):
    make = from_factory(breaking_factory, parameters={"wind": 0.5, "height": 2.0}, max_steps=MAX_STEPS)
    env = build([make] * 2, backend_setup, on_error="restart")
    rng = random.Random(3)
    env.reset()
    env.set_parameters({"wind": 7.0})
    for _ in range(8):
        env.step(actions_for(env.acting, rng))
    assert env.stats().restarts == 1
    assert env.get_attr("worker_id") == (0, 1001)  # a port of its own
    assert env.get_attr("parameters") == ({"wind": 7.0, "height": 2.0},) * 2
    assert env.call("get_properties") == ({"wind": 7.0, "height": 2.0},) * 2


class Constant:
    """As ML-Agents' `ParameterRandomizationSettings`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def apply(self, key: str, channel: EnvironmentParametersChannel) -> None:
        channel.set_float_parameter(key, self.value)


def test_settings_that_apply_themselves(build):
    env = build([arena] * 2, PROCESSES)
    env.reset(options={"wind": Constant(4.0)})
    env.set_parameters({"gravity": Constant(2.0)})
    env.step(actions_for(env.acting, random.Random(1)))
    assert env.get_attr("parameters") == ({"wind": 4.0, "gravity": 2.0},) * 2


def test_refused_parameters(build):
    env = build([arena] * 2, PROCESSES)
    with pytest.raises(ValueError, match="must be numbers by parameter name, got 'wind': 'strong'"):
        env.set_parameters({"wind": "strong"})
    without = build([lambda seed: Arena(seed)] * 2, PROCESSES)
    with pytest.raises(NotImplementedError, match="do not keep options of reset"):
        without.set_parameters({"wind": 1.0})
    with pytest.raises(TypeError, match="env_factory must be a function of a worker id"):
        from_factory("Soccer")
    with pytest.raises(ValueError, match="must be numbers by parameter name"):
        from_factory(env_factory, parameters={"wind": None})


class Timed(Arena):
    """Times parts of its steps as ML-Agents' code does."""

    @timed
    def think(self) -> None:
        with hierarchical_timer("look"):
            time.sleep(0.002)

    def step(self) -> None:
        self.think()
        with hierarchical_timer("look"):
            super().step()


@pytest.mark.parametrize("setup_", [PROCESSES, Setup("thread", True, 2), Setup("serial", True, 1)], ids=str)
def test_timers_of_all_workers_are_merged(setup_, build):
    env = build([from_factory(lambda worker_id, channels: Timed(worker_id, channels))] * 3, setup_)
    before = env.timers()["children"] if setup_.backend == "serial" and "children" in env.timers() else {}
    env.reset()
    for _ in range(4):
        env.step(actions_for(env.acting, random.Random(1)))
    tree = env.timers()
    assert tree["name"] == "root"
    assert tree["count"] == setup_.num_workers
    assert {*tree["children"]} >= {"Timed.think", "look"}
    think, look = tree["children"]["Timed.think"], tree["children"]["look"]
    known = before.get("Timed.think", {"count": 0})["count"]
    assert (think["count"] - known, think["children"]["look"]["count"] - known, look["count"] - known) == (12, 12, 12)
    assert think["total"] >= think["children"]["look"]["total"] >= 12 * 0.002
    assert think["self"] == pytest.approx(think["total"] - think["children"]["look"]["total"])
    assert tree["total"] > think["total"]


def test_trees_with_different_blocks():
    one = {"total": 3.0, "count": 1, "children": {"a": {"total": 2.0, "count": 4}}}
    other = {
        "total": 5.0,
        "count": 1,
        "children": {"b": {"total": 1.0, "count": 1}, "a": {"total": 1.0, "count": 1, "children": {"c": {}}}},
    }
    merged = merged_timers([one, other, {}])
    assert (merged["total"], merged["count"], merged["self"]) == (8.0, 2, 4.0)
    assert {name: child["count"] for name, child in merged["children"].items()} == {"a": 5, "b": 1}
    assert merged["children"]["a"]["children"]["c"]["count"] == 0
    assert merged_timers([]) == {"total": 0.0, "count": 0, "is_parallel": True, "self": 0.0}


def test_managers_loop():
    """Their example of a manager: a factory, parameters, steps of what is ready, a reset in between."""
    constructor = from_factory(env_factory, engine={"time_scale": 20.0}, max_steps=MAX_STEPS)
    rng, received = random.Random(0), 0
    with ParallelEnv([constructor] * 3, num_workers=2, on_error="restart") as manager:
        manager.set_parameters({"wind": 1.0})
        manager.reset_async()
        while received < 30:
            steps = manager.recv(min_envs=1)
            received += len(steps.env_ids)
            manager.send(actions_for([manager.acting[i] for i in steps.env_ids], rng), steps.env_ids)
        observations, _ = manager.reset(options={"wind": 2.0}, drain=True)
        assert len(observations) == 3
        assert manager.pending == ()
        assert {*manager.get_attr("group_map")[0]} == {*manager.observation_space}
