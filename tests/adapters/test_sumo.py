"""sumo-rl, constructed as in its README, equals a plain loop; also with one simulation per process (libsumo)."""

from __future__ import annotations

import pytest
import sumo
from helpers.real_simulators import NUM_ENVS, assert_equal, merged, report, rollouts, script

pytestmark = pytest.mark.needs("sumo", "sumo_rl")

SETUP = """
from pathlib import Path

import sumo_rl

nets = Path(sumo_rl.__file__).parent / "nets" / "2x2grid"
"""
MAKE = (
    "sumo_rl.parallel_env(net_file=str(nets / '2x2.net.xml'), route_file=str(nets / '2x2.rou.xml'), use_gui=False, "
    "num_seconds=300)"
)
SUMO = {"SUMO_HOME": sumo.SUMO_HOME}


def test_equals_a_plain_loop(tmp_path):
    everything = f"plain {','.join(map(str, range(NUM_ENVS)))}"
    of = rollouts(script(SETUP, MAKE), tmp_path, ["process", "serial", everything], SUMO)
    report("sumo-rl", of)
    assert all(ends > 0 for ends in of[everything].ends)
    assert_equal(of["serial"], of[everything], "serial")
    assert_equal(of["process"], of[everything], "process")


def test_one_simulation_per_process(tmp_path):
    """With libsumo, two environments in one worker would wait for each other forever."""
    text = script(SETUP, MAKE, "envs_per_worker=1")
    alone = [f"plain {env_id}" for env_id in range(NUM_ENVS)]
    of = rollouts(text, tmp_path, ["process", *alone], {**SUMO, "LIBSUMO_AS_TRACI": "1"})
    report("sumo-rl, libsumo", of)
    expected = merged(*(of[one] for one in alone))
    assert all(ends > 0 for ends in expected.ends)
    assert_equal(of["process"], expected, "process")
