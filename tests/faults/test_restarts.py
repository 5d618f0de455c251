"""Restarts compared with a reference: results of the restarted environment and of all others.

Each kind of fault happens in real workers here. When it happens, and to which environments, is tested in
`tests/simulation`. For simulators with fates (`crashing`), `restart_reference` computes what the design requires.
"""

from __future__ import annotations

import pytest
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.reference import Reference
from helpers.restart_comparison import SIMULATORS, RestartComparison, actions_for, many_fates, play
from helpers.restart_reference import RestartReference
from helpers.setups import BACKEND_SETUPS, Setup
from simulators.crashing import DEADLY, HANGING, RAISED, Fate, crashing

pytestmark = pytest.mark.release_independent

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
SHARING, APART, PICKLED = Setup("process", True, 2), Setup("process", True, 4), Setup("process", False, 2)
# One kind of simulator on all backends, the others on one.
COMBINED = [
    *[("skirmish", setup) for setup in [*BACKEND_SETUPS, PICKLED]],
    *[(name, SHARING) for name in SIMULATORS if name != "skirmish"],
]
each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


@each_mode
@pytest.mark.parametrize(("name", "setup"), COMBINED, ids=str)
def test_simulators_that_raise(name, setup, mode, build):
    going = play(build, setup, name, mode, many_fates("raise", "sys.exit"))
    assert going.world.restarts[0] == 0
    assert going.world.restarts[1] >= 3
    assert going.world.restarts[3] == 2


@each_mode
@pytest.mark.parametrize(("name", "setup"), [("skirmish", SHARING), ("hunt", APART), ("skirmish", PICKLED)], ids=str)
def test_simulators_that_die(name, setup, mode, build):
    """Environments that share a worker die together."""
    going = play(build, setup, name, mode, many_fates("os._exit", "SIGSEGV"))
    assert all(number > 0 for number in going.world.restarts) or setup.num_workers == 4
    assert going.world.restarts[0] == 0 or setup.num_workers < 4


@pytest.mark.rest
@pytest.mark.parametrize("fault", [*RAISED, *DEADLY])
@pytest.mark.parametrize("place", ["step", "reset", "constructor"])
def test_every_fault_in_every_method(place, fault, build):
    fates = {(1, 0): Fate("raise", "step", 2), (1, 1): Fate(fault, place, 0), (2, 0): Fate(fault, "reset", 1)}
    play(build, SHARING, "hunt", AutoresetMode.SAME_STEP, fates, steps=14)


@pytest.mark.rest
@pytest.mark.parametrize("fault", HANGING)
@pytest.mark.parametrize("place", ["step", "reset"])
def test_simulators_that_hang(place, fault, build):
    fates = {(1, 0): Fate(fault, place, 1), (3, 0): Fate(fault, "step", 3)}
    limits = {"step_timeout": 1.0, "reset_timeout": 1.0}
    going = play(build, SHARING, "skirmish", AutoresetMode.SAME_STEP, fates, steps=14, **limits)
    assert going.world.restarts[1] > 0
    assert going.world.restarts[3] > 0


@each_mode
def test_views_with_restarts(mode, build):
    """With `copy=False`."""
    play(build, SHARING, "hunt", mode, many_fates("raise", "SIGKILL"), copy=False)


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
def test_portable_workers(shared_memory, build):
    fates = many_fates("SIGKILL", "raise")
    play(build, Setup("portable", shared_memory, 2), "skirmish", AutoresetMode.SAME_STEP, fates)


@each_mode
@pytest.mark.parametrize("fault", ["raise", "SIGKILL"])
def test_other_environments_are_unaffected(fault, mode, build):
    """Equal to the bit to a run without faults, seeds included."""
    make = SIMULATORS["hunt"]
    fates = {(1, 0): Fate(fault, "step", 3), (1, 1): Fate(fault, "step", 4), (1, 2): Fate(fault, "constructor")}
    env = build([crashing(make, fates)] * 4, APART, mode, on_error="restart")
    untroubled = Reference([make] * 4, mode, 42)
    others = [0, 2, 3]
    going = RestartComparison(env, RestartReference(make, 4, 4, mode, fates), make, mode)

    def compare(actual, expected):
        for one, other in zip(actual, expected, strict=True):
            assert_same(tuple(one[i] for i in others), tuple(other[i] for i in others))

    compare(env.reset(), untroubled.reset())
    for time in range(20):
        actions = [actions_for(make, going.rng) for _ in range(4)]
        compare(env.step(actions), untroubled.step(actions))
        if mode is AutoresetMode.DISABLED and time % 3 == 2:
            compare(env.reset(), untroubled.reset())
    assert env.stats().restarts == 3
    assert [env.seed()[i] for i in others] == [42, 44, 45]
