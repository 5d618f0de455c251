"""A large table in a notebook: cells as a kernel executes them."""

from __future__ import annotations

import textwrap

import pytest

pytestmark = [pytest.mark.release_independent, pytest.mark.needs("ipykernel", "jupyter_client")]

CELLS = [
    """
    import os
    import numpy as np
    from gymnasium import spaces
    from pettingzoo import ParallelEnv as PettingZooEnv
    from marl_parallel import ParallelEnv

    table = np.full(20_000, 2.0)

    class Market(PettingZooEnv):
        metadata = {"name": "market"}
        possible_agents = ["a"]

        def __init__(self, table, scale=1.0):
            self.scale, self.table = scale, table

        def observation_space(self, agent):
            return spaces.Box(-9, 9, (1,), np.float32)

        action_space = observation_space

        def total(self):
            return float(self.table.sum() * self.scale)

        def write(self, value):
            self.table[:] = value
    """,
    """
    same = lambda: Market(table)
    env = ParallelEnv([same, lambda: Market(table, 2.0), same, lambda: Market(table, 3.0)], num_workers=2)
    size = os.fstat(env.stepper.source.backend.array_file).st_size
    print(f"{size / table.nbytes:.1f} tables")
    """,
    "table[:] = -1",
    """
    print(env.call("total"))
    env.call("write", 1.0, env_ids=[0])
    print(env.call("total"))
    env.close()
    """,
]


def test_table_of_another_cell():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(startup_timeout=120)
    printed = []

    def note(message: dict) -> None:
        content = message["content"]
        printed.append(content.get("text", "") + "\n".join(content.get("traceback", [])))

    try:
        for cell in CELLS:
            client.execute_interactive(textwrap.dedent(cell), timeout=120, output_hook=note)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    text = "".join(printed)
    assert "1.0 tables" in text, text
    assert "(40000.0, 80000.0, 40000.0, 120000.0)" in text, text
    assert "(20000.0, 80000.0, 40000.0, 120000.0)" in text, text
