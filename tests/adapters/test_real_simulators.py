"""Simulators from PyPI, constructed as in their READMEs, follow a plain loop; `simulators/real.py` has the table."""

from __future__ import annotations

import pytest
from helpers import real_simulators
from simulators.real import SIMULATORS

pytestmark = pytest.mark.needs("highway_env", "lbforaging", "magent2", "momaland", "pyspiel", "rware", "shimmy", "vmas")

MPE = "MPE2 simple_world_comm_v3"
INSTALLED = [
    name
    for name, one in SIMULATORS.items()
    if one.install == "simulators"
    and (name == MPE or not name.startswith(("MPE2", "PettingZoo")))  # many others use those
]
QUICKEST = [
    "LBF Foraging-8x8-2p-1f-v3",
    "RWARE rware-tiny-2ag-v2",
    MPE,
    "MOMAland connect4",
    "OpenSpiel connect_four",
]
"""Those that facades also step, and whose workers are killed."""


@pytest.mark.parametrize("name", INSTALLED)
def test_follows_a_plain_loop(name, tmp_path):
    simulator = SIMULATORS[name]
    more = [*simulator.facades, "restart"] if name in QUICKEST else []
    of = real_simulators.runs_of(simulator, tmp_path, more)
    real_simulators.report(name, of)
    real_simulators.check_about(simulator, of["about"])
    rollouts = {run: of[run] for run in (*simulator.plain_runs, *simulator.parallel_runs)}
    real_simulators.check_equality(simulator, rollouts)
    if more:
        real_simulators.check_restart(of["restart"])
        for facade in simulator.facades:
            real_simulators.check_facade(of[facade], rollouts["process"])
