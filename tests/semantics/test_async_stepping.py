"""`send`, `reset_async` and `recv` mean what `step` and `reset` mean, one environment at a time.

When results come is tested in `test_readiness`, what is allowed while they are on their way in `test_in_flight`.
"""

from __future__ import annotations

import threading
import zlib
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers.async_comparison import FORMS, Tandem, Turn, play, some_of, turns
from helpers.comparison import assert_same
from helpers.reference import Reference
from helpers.scenarios import REAL, SYNTHETIC, scenario
from helpers.start_methods import arguments
from simulators.deterministic import Hunt, Skirmish
from simulators.paced import acts, fleet, seen

from marl_parallel import ParallelEnv, StepBatch

SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
# Agents that come and go under dict rules, a real one without surprises, one whose agents die, a turn-based one.
CHOSEN = ["skirmish", "spread", "knights", "connect_four"]


def schedule(*parts: Any) -> int:
    """Another one for each test, and the same each time."""
    return zlib.crc32(repr(parts).encode())


@pytest.mark.parametrize("name", CHOSEN)
def test_random_schedules(name, setup, build):
    play(Tandem(build(scenario(name).constructors, setup), name), schedule(name, setup))


@pytest.mark.parametrize("mode", [NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", CHOSEN)
def test_random_schedules_in_other_modes(name, mode, each, build):
    play(Tandem(build(scenario(name).constructors, each, mode), name, mode), schedule(name, mode.name, each))


@pytest.mark.parametrize("name", sorted({*SYNTHETIC, *REAL} - {*CHOSEN}))
def test_random_schedules_of_all_kinds(name, each, build):
    play(Tandem(build(scenario(name).constructors, each), name), schedule(name, each))


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
@pytest.mark.parametrize("name", CHOSEN)
def test_random_schedules_in_portable_workers(name, shared_memory):
    where = {"num_workers": 2, "shared_memory": shared_memory, **arguments("portable")}
    with ParallelEnv(scenario(name).constructors, **where) as env:
        play(Tandem(env, name), schedule(name, shared_memory))


@pytest.mark.parametrize("name", ["skirmish", "hunt"])
def test_random_schedules_where_faults_would_be_survived(name, each, build):
    """Nothing of what is kept in case of a fault shows where there is none."""
    env = build(scenario(name).constructors, each, on_error="restart")
    play(Tandem(env, name), schedule(name, each, "restart"))


def over(turn: Turn) -> bool:
    return any(flags["__all__"] for flags in turn.result[2:4])


def deadly(turn: Turn) -> bool:
    return not over(turn) and any(any(flags.values()) for flags in turn.result[2:4])


@pytest.mark.parametrize("name", CHOSEN)
def test_the_turns_show_what_they_are_for(name):
    """Episodes end and are cut short by resets; agents die before the end where they are said to."""
    every = [turn for own in turns(name, SAME_STEP) for turn in own]
    assert sum(turn.actions is None for turn in every) > 4
    assert sum(map(over, every)) >= 3
    assert sum(map(deadly, every)) >= 3 or name not in {"skirmish", "knights"}


@pytest.mark.parametrize("name", ["skirmish", "hunt", "zoo", "connect_four"])
def test_views_hold_until_the_environment_is_sent_to(name, each, build):
    """With `copy=False`, while others are stepped; and after `close`, the last ones for good."""
    env = build(scenario(name).constructors, each, copy=False)
    tandem = Tandem(env, name)
    play(tandem, schedule(name, each), views=True)
    env.close()
    assert len(tandem.latest) == 4
    tandem.check_latest()


def test_views_are_views(build, killable):
    env = build([Hunt] * 4, killable, copy=False)
    env.reset_async()
    assert not any(array.flags.owndata for one in env.recv().observations for array in one.values())


@pytest.mark.parametrize("name", ["skirmish", "hunt", "recycler", "zoo"])
def test_results_belong_to_the_caller(name, each, build):
    """Whatever the caller does to a result, no later result shows it."""
    play(Tandem(build(scenario(name).constructors, each), name), schedule(name, each), spoiled=True)


@pytest.mark.parametrize("name", ["hunt", "tictactoe"])
def test_waiting_and_not_waiting_in_turn(name, packed, build):
    """`step` and `reset` are right after `send` and `recv`, and the other way round, again and again."""
    tandem = Tandem(build(scenario(name).constructors, packed), name)
    rng = np.random.default_rng(3)
    while tandem.idle:
        tandem.go(some_of(tandem.idle, rng))
        while tandem.due:
            tandem.recv(min_envs=1)
        tandem.wait(some_of(tandem.idle, rng))


def test_a_reset_and_a_step_in_one_batch(setup, build):
    """The reset's rewards are 0.0 and its flags False, for the same agents."""
    reference = Reference([Hunt] * 2, SAME_STEP, 42)
    env = build([Hunt] * 2, setup)
    env.reset()
    reference.reset()
    actions = {agent: np.zeros(3, np.float32) if agent == "wolf_2" else 1 for agent in env.acting[1]}
    env.send({1: actions})
    env.reset_async(env_ids=[0])
    batch = env.recv()
    (first,), (infos,) = reference.reset(env_ids=[0])
    agents = ["wolf_0", "wolf_1", "wolf_2", "wolf_3"]
    unfinished = {**dict.fromkeys(agents, False), "__all__": False}
    of_the_reset = (first, dict.fromkeys(agents, 0.0), unfinished, unfinished, infos)
    of_the_step = tuple(part[0] for part in reference.step([actions], env_ids=[1]))
    due = {0: of_the_reset, 1: of_the_step}
    assert sorted(batch.env_ids) == [0, 1]
    for env_id, *result in zip(*batch, strict=True):
        assert_same(tuple(result), due[env_id])


def test_a_batch(each, build, tmp_path):
    """It is of the type that users import, with six fields of one length."""
    env = build(fleet(tmp_path, 3), each)
    env.reset_async()
    batch = env.recv()
    assert type(batch) is StepBatch
    assert batch._fields == ("env_ids", "observations", "rewards", "terminateds", "truncateds", "infos")
    assert [type(part) for part in batch] == [tuple] * 6
    assert [len(part) for part in batch] == [3] * 6
    assert [type(env_id) for env_id in batch.env_ids] == [int] * 3


@pytest.mark.parametrize("form", FORMS)
def test_whose_actions_are_whose(form, each, build, tmp_path):
    """A sequence follows `env_ids`, also where that is an array; a mapping has the ids itself."""
    env = build(fleet(tmp_path, 4), each)
    env.reset()
    one, two, three = acts(1.0, 2.0, 3.0)
    if form == "sequence":
        env.send((one, two, three), env_ids=np.array([3, 0, 2]))
    else:
        env.send({np.int64(3): one, 0: two, 2: three}, env_ids=None if form == "mapping" else [0, 2, 3])
    assert env.pending == (0, 2, 3)
    batch = env.recv()
    assert dict(zip(batch.env_ids, seen(batch.observations), strict=True)) == {3: 1.0, 0: 2.0, 2: 3.0}


@pytest.mark.parametrize(
    "asked",
    [
        {"seed": 9},
        {"seed": 9, "env_ids": [2, 1]},
        {"seed": [30, 10, 20], "env_ids": [3, 0, 2]},
        {"seed": 0, "options": {"start": 1.5}},
        {"options": {"start": 1.5, "name": "x"}, "env_ids": (2,)},
    ],
    ids=str,
)
@pytest.mark.parametrize("constructor", [Skirmish, Hunt])
def test_reset_arguments(constructor, asked, each, build):
    reference = Reference([constructor] * 4, SAME_STEP, 42)
    env = build([constructor] * 4, each)
    assert_same(env.reset(), reference.reset())
    due = reference.reset(**asked)
    env.reset_async(**asked)
    batch = env.recv()
    for env_id, *expected in zip(asked.get("env_ids", range(4)), *due, strict=True):
        place = batch.env_ids.index(env_id)
        assert_same([batch.observations[place], batch.infos[place]], expected)


def test_seeds_are_those_of_reset(each, build):
    """The first reset of each has its own; `reset_async(seed=s)` makes s the base, and `seed` tells afterwards."""
    env = build([Hunt] * 4, each, seed=5)
    assert seeds_given(env, env_ids=[1]) == {1: 6}
    assert seeds_given(env, env_ids=[1]) == {1: None}
    assert seeds_given(env, env_ids=[2], seed=20) == {2: 22}
    assert env.seed() == (5, 6, 22, 8)
    assert seeds_given(env) == {0: 20, 1: None, 2: None, 3: 23}
    assert env.seed() == (20, 6, 22, 23)
    assert seeds_given(env, env_ids=[3, 0], seed=[8, 9]) == {3: 8, 0: 9}
    assert env.seed() == (9, 6, 22, 8)


def seeds_given(env: ParallelEnv, **asked: Any) -> dict[int, int | None]:
    """What each simulator's `reset` got, as its infos say."""
    env.reset_async(options={"tell": True}, **asked)
    batch = env.recv()
    return {env_id: infos["wolf_0"]["seed"] for env_id, infos in zip(batch.env_ids, batch.infos, strict=True)}


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"seed": -1}, ValueError),
        ({"seed": 1.5}, TypeError),
        ({"seed": [1, 2]}, ValueError),
        ({"seed": 9, "options": {"lock": threading.Lock()}}, TypeError),
    ],
    ids=["negative", "no integer", "too few", "unpicklable"],
)
def test_a_refused_reset(asked, error, each, build):
    """Nothing has been reset, and the base is what it was."""
    env = build([Hunt] * 4, each, seed=5)
    with pytest.raises(error):
        env.reset_async(**asked)
    assert env.pending == ()
    assert seeds_given(env) == {0: 5, 1: 6, 2: 7, 3: 8}
