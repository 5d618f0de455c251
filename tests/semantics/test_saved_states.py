"""`save_state` and `load_state`: another `ParallelEnv` goes on from a state as the first one does, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.comparison import assert_same
from helpers.scenarios import REAL, SYNTHETIC, Event, record, scenario
from helpers.setups import Setup, rest

MODES = ["SAME_STEP", "NEXT_STEP", "DISABLED"]
OTHERS = {
    "serial": Setup("process", True, 1),
    "thread": Setup("serial", True, 1),
    "process": Setup("process", True, 1),
    "hybrid": Setup("process", True, 2),
    "ray": Setup("process", True, 1),
}
"""Where the states of a backend are loaded."""


def play(env: Any, events: Sequence[Event], save_after: Sequence[int] = ()) -> dict[int, Any]:
    """Repeat recorded calls, whose results must be equal; returns what `save_state` has returned after some of them."""
    saved = {}
    for index, event in enumerate(events):
        result = getattr(env, event.method)(**copy.deepcopy(event.arguments))
        assert_same(result, event.result, f"event {index}, {event.method}")
        if index in save_after:
            saved[index] = env.save_state(), env.acting, env.action_masks, env.seed(), result
    return saved


def check_loads(name: str, mode: Any, setup: Setup, build: Any) -> None:
    constructors, events = (
        scenario(name).constructors,
        record(name, getattr(__import__("gymnasium").vector.AutoresetMode, mode)),
    )
    first = build(constructors, setup, mode)
    points = [0, len(events) // 3, 2 * len(events) // 3]
    saved = play(first, events, points)
    for point in points:
        states, acting, masks, seeds, result = saved[point]
        env = build(constructors, OTHERS[setup.backend], mode)
        observations, infos = env.load_state(states)
        whole = events[point].arguments.get("env_ids") is None
        if whole:
            assert_same(observations, result[0])
            assert_same(infos, result[-1])
        assert_same(env.acting, acting)
        assert_same(env.action_masks, masks)
        assert_same(env.seed(), seeds)
        again = env.save_state()
        play(env, events[point + 1 :])
        env.load_state(again)  # once more, in the middle of another episode
        play(env, events[point + 1 :])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*SYNTHETIC, *map(rest, sorted(REAL))])
def test_another_number_of_workers(name, mode, two_worker_setup, build):
    check_loads(name, mode, two_worker_setup, build)
