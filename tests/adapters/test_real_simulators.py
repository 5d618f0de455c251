"""Simulators from PyPI, constructed as in their READMEs, equal a plain loop."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from helpers import real_simulators
from helpers.real_simulators import GROUPS, assert_equal, merged, report, rollouts, script

pytestmark = pytest.mark.needs("highway_env", "lbforaging", "magent2", "momaland", "pyspiel", "rware", "shimmy", "vmas")


class Simulator(NamedTuple):
    """The lines of a script.

    Attributes:
        setup: Imports, as in the simulator's README.
        make: The expression that makes an environment.
        options: Arguments of `real_simulators.main`.
    """

    setup: str
    make: str
    options: str = ""


CROSSING = {
    "observation": {
        "type": "MultiAgentObservation",
        "observation_config": {"type": "Kinematics", "normalize": False},
    },
    "initial_vehicle_count": 1,
    "spawn_probability": 0.05,
    "simulation_frequency": 3,
    "duration": 8,
}
"""Little traffic, and observations without pandas' work: highway-env's steps are slow."""

SIMULATORS = {
    "lbforaging, by class": Simulator(
        "from lbforaging.foraging import ForagingEnv",
        "ForagingEnv(players=3, min_player_level=1, max_player_level=2, min_food_level=1, max_food_level=None, "
        "field_size=(8, 8), max_num_food=2, sight=8, max_episode_steps=50, force_coop=False)",
    ),
    "lbforaging": Simulator("import gymnasium as gym\nimport lbforaging", "gym.make('Foraging-8x8-2p-1f-v3')"),
    "rware": Simulator("import gymnasium as gym\nimport rware", "gym.make('rware-tiny-2ag-v2', max_steps=80)"),
    "rware, by module": Simulator("import gymnasium as gym", "gym.make('rware:rware-tiny-2ag-v2', max_steps=80)"),
    "MOMAland walker": Simulator(
        "from momaland.envs.multiwalker_stability import momultiwalker_stability_v0 as _env", "_env.env(max_cycles=60)"
    ),
    "MOMAland walker, parallel": Simulator(
        "from momaland.envs.multiwalker_stability import momultiwalker_stability_v0 as _env",
        "_env.parallel_env(max_cycles=60)",
    ),
    "MOMAland connect4": Simulator("from momaland.envs.connect4 import moconnect4_v0", "moconnect4_v0.env()"),
    "OpenSpiel connect_four": Simulator(
        "from shimmy import OpenSpielCompatibilityV0", "OpenSpielCompatibilityV0(game_name='connect_four')"
    ),
    "MAgent2 battle": Simulator(
        "from magent2.environments import battle_v4", "battle_v4.parallel_env(map_size=14, max_cycles=60)"
    ),
}
"""Those that draw from generators of their own."""

HIGHWAY = {
    version: Simulator(
        "import gymnasium as gym\nimport highway_env",
        f"gym.make('intersection-multi-agent-{version}', config={CROSSING})",
    )
    for version in ("v0", "v1")
}

VMAS = "num_envs=1, wrapper='gymnasium', terminated_truncated=True, max_steps=60, seed=0"
GLOBAL_GENERATORS = {
    "VMAS": Simulator("import vmas", f"vmas.make_env('balance', {VMAS})"),
    "VMAS, dict_spaces": Simulator("import vmas", f"vmas.make_env('balance', dict_spaces=True, {VMAS})"),
}
"""Those that draw from generators of the process: environments of one process are compared with one plain loop."""


@pytest.mark.parametrize("name", SIMULATORS)
def test_equals_a_plain_loop(name, tmp_path):
    simulator = SIMULATORS[name]
    of = rollouts(script(*simulator), tmp_path, ["process", "serial", "plain 0,1,2,3"])
    expected = of["plain 0,1,2,3"]
    report(name, of)
    assert all(ends > 0 for ends in expected.ends)
    assert_equal(of["serial"], expected, "serial")
    assert_equal(of["process"], expected, "process")


@pytest.mark.parametrize("version", HIGHWAY)
def test_highway_env_equals_a_plain_loop(version, tmp_path):
    """Except one info of its resets: an action sampled from an unseeded space."""
    everybody = "plain 0,1,2,3"
    of = rollouts(script(*HIGHWAY[version]), tmp_path, ["process", "serial", everybody, f"{everybody} again"])
    report(f"highway-env {version}", of)
    assert all(ends > 0 for ends in of[everybody].ends)
    with pytest.raises(AssertionError, match="action"):
        assert_equal(of[f"{everybody} again"], of[everybody], "a plain loop")
    expected = without_sampled_actions(of[everybody])
    for run in ("process", "serial", f"{everybody} again"):
        assert_equal(without_sampled_actions(of[run]), expected, run)


def without_sampled_actions(rollout):
    for _, infos in rollout.resets:
        infos["__common__"].pop("action", None)
    for steps in rollout.steps:
        for *_, infos in steps:
            infos["__common__"].get("reset_info", {}).pop("action", None)
    return rollout


@pytest.mark.parametrize("name", GLOBAL_GENERATORS)
def test_equals_plain_loops_with_the_same_neighbours(name, tmp_path):
    groups = [f"plain {group}" for group in GROUPS]
    of = rollouts(script(*GLOBAL_GENERATORS[name]), tmp_path, ["process", *groups])
    report(name, of)
    expected = merged(*(of[group] for group in groups))
    assert all(ends > 0 for ends in expected.ends)
    assert_equal(of["process"], expected, "process")


def test_equals_a_plain_loop_in_one_process(tmp_path):
    of = rollouts(script(*GLOBAL_GENERATORS["VMAS"]), tmp_path, ["serial", "plain 0,1,2,3"])
    report("VMAS", of)
    assert_equal(of["serial"], of["plain 0,1,2,3"], "serial")


def test_form_of_unseeded_backgammon(tmp_path):
    """No seed reaches the generator of its dice, so only the form of results is compared."""
    text = script("from shimmy import OpenSpielCompatibilityV0", "OpenSpielCompatibilityV0(game_name='backgammon')")
    of = rollouts(text, tmp_path, ["process", "serial", "plain 0,1,2,3", "plain 0,1,2,3 again"])
    report("OpenSpiel backgammon", of)
    first, again = of["plain 0,1,2,3"], of["plain 0,1,2,3 again"]
    with pytest.raises(AssertionError):
        assert_equal(first, again, "plain")
    for backend in ("process", "serial"):
        for one, other in zip(of[backend].resets, first.resets, strict=True):
            assert real_simulators.structure(one[0]) == real_simulators.structure(other[0])
        for transition in of[backend].steps[0]:
            assert real_simulators.structure(transition[0]) == real_simulators.structure(first.steps[0][0][0])
