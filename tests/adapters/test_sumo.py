"""sumo-rl, constructed as in its README, follows a plain loop; also with one simulation per process (libsumo)."""

from __future__ import annotations

import pytest
from helpers import real_simulators
from simulators.real import SIMULATORS

pytestmark = pytest.mark.needs("sumo", "sumo_rl")


@pytest.mark.parametrize("name", [name for name, one in SIMULATORS.items() if one.install == "sumo"])
def test_follows_a_plain_loop(name, tmp_path):
    """With libsumo, two environments in one worker would wait for each other forever."""
    simulator = SIMULATORS[name]
    of = real_simulators.runs_of(simulator, tmp_path, [*simulator.facades, "restart"])
    real_simulators.report(name, of)
    real_simulators.check_about(simulator, of["about"])
    real_simulators.check_equality(
        simulator, {run: of[run] for run in (*simulator.plain_runs, *simulator.parallel_runs)}
    )
    for facade in simulator.facades:
        real_simulators.check_facade(of[facade], of["process"])
    real_simulators.check_restart(of["restart"])
    # Without libsumo, each environment has a SUMO process, which must not survive its worker.
    assert ("sumo" in of["restart"]["started"]) == ("libsumo" not in name)
