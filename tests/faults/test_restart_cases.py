"""Results of `step` and `reset` when an environment fails: expected values written out, case by case.

In `counting`, observations show the seed, the number of resets, and the steps since. Of two environments the second
fails. All other cases are compared with a reference in `test_restarts`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple
from unittest.mock import ANY

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.setups import Setup
from simulators.counting import ACTIONS, Counting, CountingDicts, seen
from simulators.crashing import FAULT_KINDS, Fate, crashing

from marl_parallel import ParallelEnv

pytestmark = pytest.mark.release_independent

SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
OLD, FRESH, FRESHER = 43, 1067095921, 1218218947  # of environment 1, with base 42
OLD_0, FRESH_0 = 42, 948246714  # of environment 0

each_rules = pytest.mark.parametrize("make", [Counting, CountingDicts], ids=["pettingzoo", "dict"])
each_mode = pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
each_way = pytest.mark.parametrize(
    ("fault", "setup"),
    [
        ("raise", Setup("serial", True, 2)),
        ("SIGKILL", Setup("process", True, 2)),
    ],
    ids=str,
)


def start(build: Any, make: Any, mode: AutoresetMode, setup: Setup, *lives: Fate) -> ParallelEnv:
    """Two environments, of which the second has these fates, one per life."""
    fates = {(1, life): fate for life, fate in enumerate(lives)}
    return build([crashing(make, fates)] * 2, setup, mode, on_error="restart")


def step(env: ParallelEnv, env_id: int = 1) -> tuple[Any, ...]:
    """The results of one environment in a step of all."""
    return tuple(dicts[env_id] for dicts in env.step([ACTIONS] * 2))


def mark(infos: dict[Any, Any], fault: str) -> dict[str, Any]:
    """The expected `__common__`, with the actual report if it names the fault."""
    report = infos["__common__"]["error"]
    assert isinstance(report, str)
    assert FAULT_KINDS[fault].word in report
    return {"restarted": True, "error": report}


def first_step_of(seed: int) -> tuple[Any, ...]:
    """The first step after a reset if nothing fails."""
    return (
        {"long": seen(seed, 1, 1), "short": seen(seed, 1, 1)},
        {"long": 1.5, "short": 1.5},
        {"long": False, "short": False, "__all__": False},
        {"long": False, "short": False, "__all__": False},
        {"long": {}, "short": {}},
    )


def test_seeds_of_the_cases():
    """The seeds that the cases below expect, and how they are derived."""
    for seed, env_id, restarts in ((FRESH, 1, 1), (FRESHER, 1, 2), (FRESH_0, 0, 1)):
        assert seed == int(np.random.SeedSequence((42, env_id, restarts)).generate_state(1)[0] >> 1)


# A step fails, or the automatic reset within or after a step. Each line is the result of a step, in order.

BOTH_RUN = {"long": False, "short": False, "__all__": False}
CUT_OFF = {"long": True, "short": True, "__all__": True}
NO_REWARDS = {"long": 0.0, "short": 0.0}
LAST_STEP = (
    {"long": 1.5, "short": 1.5},
    {"long": False, "short": True, "__all__": False},
    {"long": True, "short": False, "__all__": True},
)
OVER = ({}, {}, {"__all__": False}, {"__all__": True}, {})
REPORT = object()  # in the place of `__common__`: that of a restart


def both(seed: int, steps: int) -> dict[str, Any]:
    return {"long": seen(seed, 1, steps), "short": seen(seed, 1, steps)}


def final(steps: int, *agents: str) -> dict[str, Any]:
    return {agent: {"final_obs": seen(OLD, 1, steps)} for agent in agents}


def first_observations(infos: dict[str, Any]) -> tuple[Any, ...]:
    return both(FRESH, 0), NO_REWARDS, BOTH_RUN, BOTH_RUN, {"long": {}, "short": {}, **infos}


class Case(NamedTuple):
    """Environment 1 of two fails once.

    Attributes:
        mode: The auto-reset mode.
        length: Steps of an episode; None for the simulator's own.
        fate: The method that fails, and the number of calls before.
        steps: The results of each step.
        acting: The acting agents after the last step but one; None if another test checks them.
    """

    mode: AutoresetMode
    length: int | None
    fate: tuple[str, int]
    steps: list[Any]
    acting: Any = None


CASES = {
    "step, same-step": Case(
        SAME_STEP,
        None,
        ("step", 1),
        [
            first_step_of(OLD),
            (both(FRESH, 0), NO_REWARDS, BOTH_RUN, CUT_OFF, {**final(1, "long", "short"), "__common__": REPORT}),
            first_step_of(FRESH),
        ],
        (["long"], ["long", "short"]),
    ),
    "step, next-step": Case(
        NEXT_STEP,
        None,
        ("step", 1),
        [
            first_step_of(OLD),
            (both(OLD, 1), NO_REWARDS, BOTH_RUN, CUT_OFF, {"__common__": REPORT}),
            first_observations({}),
            first_step_of(FRESH),
        ],
    ),
    "step, disabled": Case(
        DISABLED,
        None,
        ("step", 1),
        [first_step_of(OLD), (both(OLD, 1), NO_REWARDS, BOTH_RUN, CUT_OFF, {"__common__": REPORT}), OVER, OVER],
        (["long"], []),
    ),
    # "short" ends with its second step: its last observation is repeated only if it is the latest.
    "step, as an agent ends": Case(
        SAME_STEP,
        None,
        ("step", 2),
        [
            first_step_of(OLD),
            ANY,
            (
                both(FRESH, 0),
                {"long": 0.0},
                {"long": False, "__all__": False},
                {"long": True, "__all__": True},
                {**final(2, "long", "short"), "__common__": REPORT},
            ),
        ],
    ),
    "step, after an agent has ended": Case(
        SAME_STEP,
        None,
        ("step", 3),
        [
            first_step_of(OLD),
            ANY,
            ANY,
            (
                both(FRESH, 0),
                {"long": 0.0},
                {"long": False, "__all__": False},
                {"long": True, "__all__": True},
                {**final(3, "long"), "__common__": REPORT},
            ),
        ],
    ),
    # The step itself was fine: it returns its own rewards and flags.
    "reset within a step": Case(
        SAME_STEP,
        2,
        ("reset", 1),
        [
            first_step_of(OLD),
            (both(FRESH, 0), *LAST_STEP, {**final(2, "long", "short"), "__common__": REPORT}),
            first_step_of(FRESH),
        ],
    ),
    "reset after a step": Case(
        NEXT_STEP,
        2,
        ("reset", 1),
        [
            first_step_of(OLD),
            (both(OLD, 2), *LAST_STEP, {"long": {}, "short": {}}),
            first_observations({"__common__": REPORT}),
            first_step_of(FRESH),
        ],
    ),
}


@pytest.mark.rest
@each_rules
@each_way
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_around_a_restart(case, fault, setup, make, build):
    of_this_length = make if case.length is None else functools.partial(make, case.length)
    env = start(build, of_this_length, case.mode, setup, Fate(fault, *case.fate))
    env.reset()
    for number, expected in enumerate(case.steps):
        result = step(env)
        if expected is not ANY:
            if expected[4].get("__common__") is REPORT:
                expected = (*expected[:4], {**expected[4], "__common__": mark(result[4], fault)})
            assert_same(result, expected, f"step {number}")
        if case.acting is not None and number == len(case.steps) - 2:
            assert env.acting == case.acting
    assert env.seed() == (OLD_0, FRESH)


@each_rules
@each_way
def test_reset_after_a_restart_with_auto_reset_disabled(fault, setup, make, build):
    env = start(build, make, DISABLED, setup, Fate(fault, "step", 1))
    env.reset()
    for _ in range(4):
        step(env)
    observations, infos = env.reset(env_ids=[1])
    assert_same(observations, (both(FRESH, 0),))
    assert_same(infos, ({"long": {}, "short": {}},))
    assert_same(step(env), first_step_of(FRESH))


# A reset that breaks


@pytest.mark.rest
@each_mode
@each_rules
@each_way
def test_failing_reset(fault, setup, make, mode, build):
    """Returns the fresh environment's reset, after two restarts."""
    env = start(build, make, mode, setup, Fate(fault, "reset", 0), Fate(fault, "reset", 0))
    observations, infos = env.reset()
    untroubled = {"long": seen(OLD_0, 1, 0), "short": seen(OLD_0, 1, 0)}
    assert_same(observations, (untroubled, {"long": seen(FRESHER, 1, 0), "short": seen(FRESHER, 1, 0)}))
    expected = {"long": {}, "short": {}, "__common__": mark(infos[1], fault)}
    assert_same(infos, ({"long": {}, "short": {}}, expected))
    assert env.seed() == (OLD_0, FRESHER)
    assert_same(step(env), first_step_of(FRESHER))


# Those that shared a process with it


@each_rules
def test_neighbour_that_had_finished(make, build):
    """Its step is returned unchanged; its next step is marked as interrupted and its action is ignored."""
    env = start(build, make, SAME_STEP, Setup("process", True, 1), Fate("SIGKILL", "step", 0))
    env.reset()
    results = [*zip(*env.step([ACTIONS] * 2), strict=True)]
    assert_same(results[0], first_step_of(OLD_0))
    assert results[1][4]["__common__"]["restarted"] is True
    result = step(env, 0)
    expected = (
        {"long": seen(FRESH_0, 1, 0), "short": seen(FRESH_0, 1, 0)},
        {"long": 0.0, "short": 0.0},
        {"long": False, "short": False, "__all__": False},
        {"long": True, "short": True, "__all__": True},
        {
            "long": {"final_obs": seen(OLD_0, 1, 1)},
            "short": {"final_obs": seen(OLD_0, 1, 1)},
            "__common__": mark(result[4], "SIGKILL"),
        },
    )
    assert_same(result, expected)
    assert_same(step(env, 0), first_step_of(FRESH_0))


@each_rules
@pytest.mark.parametrize("mode", [NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
def test_neighbour_that_had_finished_is_reset_later(mode, make, build):
    env = start(build, make, mode, Setup("process", True, 1), Fate("SIGKILL", "step", 0))
    env.reset()
    assert_same(step(env, 0), first_step_of(OLD_0))
    result = step(env, 0)
    expected = (
        {"long": seen(OLD_0, 1, 1), "short": seen(OLD_0, 1, 1)},
        {"long": 0.0, "short": 0.0},
        {"long": False, "short": False, "__all__": False},
        {"long": True, "short": True, "__all__": True},
        {"__common__": mark(result[4], "SIGKILL")},
    )
    assert_same(result, expected)
    fresh = {"long": seen(FRESH_0, 1, 0), "short": seen(FRESH_0, 1, 0)}
    if mode is NEXT_STEP:
        assert_same(step(env, 0)[0], fresh)
    else:
        assert_same(step(env, 0), ({}, {}, {"__all__": False}, {"__all__": True}, {}))
        assert_same(
            env.reset(),
            ((fresh, {"long": seen(FRESH, 1, 0), "short": seen(FRESH, 1, 0)}), ({"long": {}, "short": {}},) * 2),
        )
    assert_same(step(env, 0), first_step_of(FRESH_0))


# Arguments of a reset


@pytest.mark.rest
@each_mode
@each_way
@pytest.mark.parametrize("asynchronous", [False, True], ids=["reset", "reset_async"])
def test_options_of_a_failed_reset(asynchronous, fault, setup, mode, build):
    """Each replacement in that reset gets them; one that is built later does not."""
    fates = [Fate(fault, "reset", 1), Fate(fault, "reset", 0), Fate(fault, "step", 0)]
    env = start(build, Counting, mode, setup, *fates)
    env.reset()
    options = {"map": "big", "deep": {"n": [1, 2]}}
    if asynchronous:
        env.reset_async(options=options)
        env.recv()
    else:
        env.reset(options=options)
    assert env.seed() == (OLD_0, FRESHER)
    assert env.get_attr("options") == (options, options)
    assert step(env)[4]["__common__"]["restarted"] is True
    if mode is NEXT_STEP:
        step(env)
    elif mode is DISABLED:
        env.reset()
    assert env.get_attr("resets")[1] == 1
    assert env.get_attr("options")[1] is None


@each_way
@pytest.mark.parametrize("asynchronous", [False, True], ids=["reset", "reset_async"])
def test_seed_of_a_failed_reset(asynchronous, fault, setup, build):
    """It becomes the base seed, but the replacement gets its own derived seed."""
    env = start(build, Counting, SAME_STEP, setup, Fate(fault, "reset", 1))
    env.reset()
    if asynchronous:
        env.reset_async(seed=100)
        env.recv()
    else:
        env.reset(seed=100)
    assert env.seed() == (100, int(np.random.SeedSequence((100, 1, 1)).generate_state(1)[0] >> 1))


def refuse() -> None:
    raise RuntimeError("cannot be made here")


class UnpicklesInWorkerOnly:
    """Pickles, but cannot be unpickled by the caller."""

    def __reduce__(self) -> Any:
        return refuse, ()


class UnreadableFirstInfos(Counting):
    """In its first life, the infos of its first reset cannot be unpickled by the caller."""

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, infos = super().reset(seed, options)
        return observations, {**infos, "secret": UnpicklesInWorkerOnly()} if self.last_seed == OLD else infos


@each_mode
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_unreadable_reset(mode, backend, build):
    """It counts as failed."""
    env = build([UnreadableFirstInfos] * 2, Setup(backend, True, 2), mode, on_error="restart")
    observations, infos = env.reset()
    assert_same(observations[1], {"long": seen(FRESH, 1, 0), "short": seen(FRESH, 1, 0)})
    report = infos[1]["__common__"]["error"]
    assert "cannot be unpickled" in report
    assert_same(infos[1], {"long": {}, "short": {}, "__common__": {"restarted": True, "error": report}})
    assert_same(step(env), first_step_of(FRESH))
