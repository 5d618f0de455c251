"""Trajectories equal the reference's to the bit and to the type, on every setup; results belong to the caller."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same, spoil
from helpers.reference import Reference
from helpers.scenarios import REAL, SYNTHETIC, Event, record, scenario
from helpers.setups import in_turn, rest_in_turn
from simulators.deterministic import Hunt, Recycler, Skirmish

pytestmark = pytest.mark.every_setup

SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED


def assert_acting(actual: Sequence[list[Any]], expected: Sequence[list[Any] | None], where: str) -> None:
    assert isinstance(actual, tuple), where
    for index, (agents, due) in enumerate(zip(actual, expected, strict=True)):
        assert isinstance(agents, list), where
        if due is not None:
            assert sorted(map(str, agents)) == sorted(map(str, due)), f"{where}: acting[{index}]"


def replay(env: Any, events: Sequence[Event]) -> None:
    """Repeat the recorded calls on `env`; each result must be equal, also after all later calls."""
    saved = []
    for index, event in enumerate(events):
        arguments = copy.deepcopy(event.arguments)
        result = getattr(env, event.method)(**arguments)
        where = f"event {index}, {event.method}({event.arguments.get('env_ids')})"
        assert_same(arguments, event.arguments, f"{where}: the caller's own arguments")
        assert_same(result, event.result, where)
        assert_acting(env.acting, event.acting, where)
        if event.arguments.get("env_ids") is None and index % 4 == 0:
            saved.append((result, event.result, f"{where}, looked at later"))
    for result, expected, where in saved:
        assert_same(result, expected, where)


# The synthetic simulators have all that the real ones have, on every setup.
@pytest.mark.parametrize("name", [*SYNTHETIC, *map(in_turn, REAL)])
def test_same_step(name, setup, build):
    replay(build(scenario(name).constructors, setup, SAME_STEP), record(name, SAME_STEP))


@pytest.mark.parametrize("mode", [NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", ["skirmish", "hunt", "tictactoe"])
def test_other_autoreset_modes(name, mode, setup, build):
    replay(build(scenario(name).constructors, setup, mode), record(name, mode))


@pytest.mark.parametrize("mode", [NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
@pytest.mark.parametrize(
    "name", [*sorted({*SYNTHETIC} - {"skirmish", "hunt"}), *map(rest_in_turn, sorted({*REAL} - {"tictactoe"}))]
)
def test_other_autoreset_modes_on_two_workers(name, mode, two_worker_setup, build):
    replay(build(scenario(name).constructors, two_worker_setup, mode), record(name, mode))


@pytest.mark.parametrize("name", [*SYNTHETIC, *REAL])
def test_scenarios_cover_ends_and_deaths(name):
    """Episodes end in all recordings; agents die before the end in the scenarios that declare it."""
    over, deaths = 0, 0
    for event in record(name, SAME_STEP):
        if event.method == "step":
            _, _, terminateds, truncateds, _ = event.result
            for flags in zip(terminateds, truncateds, strict=True):
                ended = any(flag["__all__"] for flag in flags)
                over += ended
                deaths += not ended and any(value for flag in flags for value in flag.values())
    assert over >= 4
    assert deaths >= 4 or name not in {"skirmish", "hunt", "knights"}


@pytest.mark.parametrize("name", ["skirmish", "hunt", "zoo", "connect_four"])
def test_views_last_until_the_next_step(name, two_worker_setup, build):
    """With `copy=False`, results of idle environments and the last results stay valid."""
    events = record(name, SAME_STEP)
    env = build(scenario(name).constructors, two_worker_setup, SAME_STEP, copy=False)
    latest: dict[int, tuple[Any, ...]] = {}
    for index, event in enumerate(events):
        result = getattr(env, event.method)(**event.arguments)
        env_ids = event.arguments.get("env_ids")
        for place, env_id in enumerate(range(4) if env_ids is None else env_ids):
            latest[env_id] = tuple((part[place], due[place]) for part, due in zip(result, event.result, strict=True))
        for env_id, parts in latest.items():
            for actual, expected in parts:
                assert_same(actual, expected, f"event {index}, environment {env_id}")
    env.close()
    for env_id, parts in latest.items():
        for actual, expected in parts:
            assert_same(actual, expected, f"after close, environment {env_id}")


def test_views_are_views(build, killable_setup):
    env = build([Hunt] * 4, killable_setup, copy=False)
    observations, _ = env.reset()
    assert not any(array.flags.owndata for one in observations for array in one.values())


@pytest.mark.parametrize("name", ["skirmish", "hunt", "recycler", "zoo"])
def test_results_belong_to_the_caller(name, two_worker_setup, build):
    """Modifying a result changes no later result."""
    env = build(scenario(name).constructors, two_worker_setup, SAME_STEP)
    for index, event in enumerate(record(name, SAME_STEP)):
        result = getattr(env, event.method)(**copy.deepcopy(event.arguments))
        assert_same(result, event.result, f"event {index}")
        spoil(result)


@pytest.mark.parametrize("constructor", [Skirmish, Hunt, Recycler])
def test_first_reset_in_parts(constructor, two_worker_setup, build):
    """Each environment uses its own seed in its first reset, whenever that is."""
    reference = Reference([constructor] * 4, SAME_STEP, 5)
    env = build([constructor] * 4, two_worker_setup, SAME_STEP, 5)
    for arguments in (
        {"env_ids": [3]},
        {"env_ids": [1, 0], "options": {"start": 2.0}},
        {},
        {"env_ids": (2,)},
    ):
        assert_same(env.reset(**arguments), reference.reset(**arguments), str(arguments))


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "arguments",
    [
        {"seed": 9},
        {"seed": 9, "env_ids": [2, 1]},
        {"seed": [30, 10, 20], "env_ids": [3, 0, 2]},
        {"seed": (4, 3, 2, 1)},
        {"seed": 0, "options": {"start": 1.5}},
        {"options": {"start": 1.5, "name": "x"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("constructor", [Skirmish, Hunt])
def test_reset_arguments(constructor, arguments, two_worker_setup, build):
    reference = Reference([constructor] * 4, SAME_STEP, 42)
    env = build([constructor] * 4, two_worker_setup)
    assert_same(env.reset(), reference.reset())
    assert_same(env.reset(**arguments), reference.reset(**arguments))
    for _ in range(3):
        actions = [dict.fromkeys(agents, 1) for agents in reference.acting]
        for one in actions:
            for agent in one.keys() & {"tank", "medic", "sniper", "wolf_2"}:
                one[agent] = fixed_action(agent)
        assert_same(env.step(actions), reference.step(actions))


def fixed_action(agent: str) -> Any:
    return {
        "tank": np.array([0.5, -0.5], np.float32),
        "medic": {"aim": np.array(0.25, np.float32), "heal": np.array([1, 0, 1], np.int8)},
        "sniper": (2, np.array([1, 2])),
        "wolf_2": np.array([0.5, 0.25, -1.0], np.float32),
    }[agent]


@pytest.mark.parametrize("env_ids", [[3, 1], (0,), [2, 3, 0, 1], np.array([1, 2])], ids=str)
def test_step_in_any_order(env_ids, setup, build):
    reference = Reference([Hunt] * 4, SAME_STEP, 42)
    env = build([Hunt] * 4, setup)
    assert_same(env.reset(), reference.reset())
    for _ in range(12):
        acting = [reference.acting[index] for index in env_ids]
        actions = [{a: fixed_action(a) if a == "wolf_2" else 2 for a in agents} for agents in acting]
        assert_same(env.step(actions, env_ids=env_ids), reference.step(actions, env_ids=env_ids))
        assert_acting(env.acting, reference.acting, "acting")


def test_number_of_workers_changes_nothing(build, backend_setup):
    """For environments with their own generators, batches are equal for every number of workers."""
    for workers in (1, 3, 4):
        env = build(scenario("skirmish").constructors, backend_setup._replace(num_workers=workers), SAME_STEP)
        replay(env, record("skirmish", SAME_STEP)[:10])
        env.close()
