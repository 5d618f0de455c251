"""What an environment that is built anew has to say of it, and that the others have nothing to say.

For simulators with fates (`crashing`), `restart_reference` works out what the design means.
"""

from __future__ import annotations

import itertools

import pytest
from gymnasium.vector import AutoresetMode
from helpers.comparison import assert_same
from helpers.reference import Reference
from helpers.restart_comparison import SIMULATORS, Play, actions_for, many, play
from helpers.restart_reference import World
from helpers.setups import ALL_SETUPS, PROCESS_SETUPS, Setup
from simulators.crashing import DEADLY, HANGING, RAISED, Fate, crashing

pytestmark = pytest.mark.release_independent

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
# One kind of simulator in all setups, the others in some. What draws with pygame breaks by itself where two of it are
# made in two threads at a time.
COMBINED = [
    *[("skirmish", setup) for setup in ALL_SETUPS],
    *[(name, setup) for name in SIMULATORS if name != "skirmish" for setup in PROCESS_SETUPS[:3]],
]
each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


@each_mode
@pytest.mark.parametrize(("name", "setup"), COMBINED, ids=str)
def test_simulators_that_raise(name, setup, mode, build):
    going = play(build, setup, name, mode, many("raise", "sys.exit"))
    assert going.world.restarts[0] == 0
    assert going.world.restarts[1] >= 3
    assert going.world.restarts[3] == 2


@each_mode
@pytest.mark.parametrize(
    "setup", [Setup("process", *how) for how in itertools.product([True, False], [1, 2, 4])], ids=str
)
@pytest.mark.parametrize("name", ["skirmish", "hunt"])
def test_simulators_that_die(name, setup, mode, build):
    """Where they share a worker, they die together."""
    going = play(build, setup, name, mode, many("os._exit", "SIGSEGV"))
    assert all(number > 0 for number in going.world.restarts) or setup.num_workers == 4
    assert going.world.restarts[0] == 0 or setup.num_workers < 4


@each_mode
@pytest.mark.parametrize("way", [*RAISED, *DEADLY])
@pytest.mark.parametrize("place", ["step", "reset", "constructor"])
@pytest.mark.parametrize("setup", [Setup("process", True, 1), Setup("process", True, 4)], ids=str)
def test_every_way_in_every_place(setup, place, way, mode, build):
    """All in one worker, and one in each."""
    fates = {(1, 0): Fate("raise", "step", 2), (1, 1): Fate(way, place, 0), (2, 0): Fate(way, "reset", 1)}
    play(build, setup, "hunt", mode, fates, steps=14)


@each_mode
@pytest.mark.parametrize("way", HANGING)
@pytest.mark.parametrize("place", ["step", "reset"])
def test_simulators_that_hang(place, way, mode, build):
    fates = {(1, 0): Fate(way, place, 1), (3, 0): Fate(way, "step", 3)}
    limits = {"step_timeout": 1.0, "reset_timeout": 1.0}
    going = play(build, Setup("process", True, 2), "skirmish", mode, fates, steps=14, **limits)
    assert going.world.restarts[1] > 0
    assert going.world.restarts[3] > 0


@each_mode
@pytest.mark.parametrize("way", ["raise", "SIGKILL"])
def test_views(way, mode, processes, build):
    """With `copy=False` as well."""
    play(build, processes, "hunt", mode, many(way, way), copy=False)


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("name", ["skirmish", "hunt"])
def test_other_ways_to_start(name, context, build):
    fates = many("SIGKILL", "raise")
    play(build, Setup("process", True, 2), name, AutoresetMode.SAME_STEP, fates, context=context)


@each_mode
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
def test_portable_workers(shared_memory, mode, build):
    play(build, Setup("portable", shared_memory, 2), "skirmish", mode, many("SIGKILL", "raise"))


@each_mode
@pytest.mark.parametrize("way", [*RAISED, *DEADLY])
@pytest.mark.parametrize("name", ["hunt"])
def test_the_others_are_as_without_the_fault(name, way, mode, build):
    """Equal to the bit to those in a run in which nothing breaks, seed included."""
    make = SIMULATORS[name]
    fates = {(1, 0): Fate(way, "step", 3), (1, 1): Fate(way, "step", 4), (1, 2): Fate(way, "constructor")}
    env = build([crashing(make, fates)] * 4, PROCESS_SETUPS[2], mode, on_error="restart")
    untroubled = Reference([make] * 4, mode, 42)
    others = [0, 2, 3]
    going = Play(env, World(make, 4, 4, mode, fates), make, mode)

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
