"""The number of the package's Python functions that the parent calls in one step."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from mpe2 import simple_spread_v3

import marl_parallel
from marl_parallel import ParallelEnv

pytestmark = [pytest.mark.needs("_codec"), pytest.mark.release_independent]

PACKAGE = str(Path(marl_parallel.__file__).parent)


def own_calls(env: ParallelEnv, actions: list[dict[str, int]]) -> list[str]:
    """The functions of the package that one step calls in this process."""
    called = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            called.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_name}")

    sys.setprofile(note)
    try:
        env.step(actions)
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize(("on_error", "most"), [("raise", 14), ("restart", 14)])
def test_calls_of_a_step_of_four_environments_on_two_workers(on_error, most):
    with ParallelEnv([simple_spread_v3.parallel_env] * 4, num_workers=2, on_error=on_error) as env:
        env.reset()
        actions = [dict.fromkeys(acting, 0) for acting in env.acting]
        for _ in range(3):
            env.step(actions)
        counts = [own_calls(env, actions) for _ in range(5)]
        called = min(counts, key=len)  # a worker that takes longer than the others costs another look
        assert 5 < len(called) <= most, called


def test_statistics_in_infos_cost_plain_steps_nothing():
    counts = []
    for episode_stats in (False, True):
        with ParallelEnv([simple_spread_v3.parallel_env] * 4, backend="serial", episode_stats=episode_stats) as env:
            env.reset()
            actions = [dict.fromkeys(acting, 0) for acting in env.acting]
            counts.append([own_calls(env, actions) for _ in range(5)][-1])
    assert counts[0] == counts[1]
