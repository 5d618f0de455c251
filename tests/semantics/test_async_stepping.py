"""`send`, `reset_async` and `recv` return what `step` and `reset` return, one environment at a time.

When results arrive is tested in `test_readiness`; which calls are allowed in flight in `test_in_flight`.
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
from helpers.setups import Setup, rest
from simulators.deterministic import Hunt, Skirmish
from simulators.paced import acts, fleet, seen

from marl_parallel import ParallelEnv, StepBatch

pytestmark = pytest.mark.release_independent

SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
TWO_PROCESSES = Setup("process", True, 2)
# Agents that join and leave under dict rules, a simple real environment, one whose agents die, a turn-based one.
CHOSEN = ["skirmish", "spread", "knights", "connect_four"]


def schedule(*parts: Any) -> int:
    """A different schedule for each test, the same in every run."""
    return zlib.crc32(repr(parts).encode())


@pytest.mark.parametrize("name", CHOSEN)
def test_random_schedules(name, setup, build):
    play(Tandem(build(scenario(name).constructors, setup), name), schedule(name, setup))


@pytest.mark.parametrize("mode", [NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", ["skirmish", "connect_four"])
def test_random_schedules_in_other_autoreset_modes(name, mode, backend_setup, build):
    play(
        Tandem(build(scenario(name).constructors, backend_setup, mode), name, mode),
        schedule(name, mode.name, backend_setup),
    )


@pytest.mark.parametrize("name", [*sorted({*SYNTHETIC} - {*CHOSEN}), *map(rest, sorted({*REAL} - {*CHOSEN}))])
def test_random_schedules_of_others(name, build):
    play(Tandem(build(scenario(name).constructors, TWO_PROCESSES), name), schedule(name))


@pytest.mark.parametrize("name", ["skirmish", "hunt"])
def test_random_schedules_with_restarts_enabled(name, backend_setup, build):
    """`on_error="restart"` changes no result while nothing fails."""
    env = build(scenario(name).constructors, backend_setup, on_error="restart")
    play(Tandem(env, name), schedule(name, backend_setup, "restart"))


def over(turn: Turn) -> bool:
    return any(flags["__all__"] for flags in turn.result[2:4])


def deadly(turn: Turn) -> bool:
    return not over(turn) and any(any(flags.values()) for flags in turn.result[2:4])


@pytest.mark.parametrize("name", CHOSEN)
def test_turns_cover_ends_resets_and_deaths(name):
    """Episodes end and are cut short by resets; agents die before the end in the scenarios that declare it."""
    every = [turn for own in turns(name, SAME_STEP) for turn in own]
    assert sum(turn.actions is None for turn in every) > 4
    assert sum(map(over, every)) >= 3
    assert sum(map(deadly, every)) >= 3 or name not in {"skirmish", "knights"}


@pytest.mark.parametrize("name", ["skirmish", "hunt", "zoo", "connect_four"])
def test_views_last_until_the_next_send(name, backend_setup, build):
    """With `copy=False`, while others are stepped; the last ones stay valid after `close`."""
    env = build(scenario(name).constructors, backend_setup, copy=False)
    tandem = Tandem(env, name)
    play(tandem, schedule(name, backend_setup), views=True)
    env.close()
    assert len(tandem.latest) == 4
    tandem.check_latest()


def test_views_are_views(build, killable_setup):
    env = build([Hunt] * 4, killable_setup, copy=False)
    env.reset_async()
    assert not any(array.flags.owndata for one in env.recv().observations for array in one.values())


@pytest.mark.parametrize("name", ["skirmish", "hunt", "recycler", "zoo"])
def test_results_belong_to_the_caller(name, backend_setup, build):
    """Modifying a result changes no later result."""
    play(Tandem(build(scenario(name).constructors, backend_setup), name), schedule(name, backend_setup), spoiled=True)


@pytest.mark.parametrize("name", ["hunt", "tictactoe"])
def test_mixing_step_and_send(name, two_worker_setup, build):
    """`step` and `reset` work after `send` and `recv`, and the other way round."""
    tandem = Tandem(build(scenario(name).constructors, two_worker_setup), name)
    rng = np.random.default_rng(3)
    while tandem.idle:
        tandem.go(some_of(tandem.idle, rng))
        while tandem.due:
            tandem.recv(min_envs=1)
        tandem.wait(some_of(tandem.idle, rng))


def test_a_reset_and_a_step_in_one_batch(setup, build):
    """The reset has rewards 0.0 and flags False, for the same agents."""
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


def test_step_batch_fields(backend_setup, build, tmp_path):
    """It is the exported type, with six fields of one length."""
    env = build(fleet(tmp_path, 3), backend_setup)
    env.reset_async()
    batch = env.recv()
    assert type(batch) is StepBatch
    assert batch._fields == ("env_ids", "observations", "rewards", "terminateds", "truncateds", "infos")
    assert [type(part) for part in batch] == [tuple] * 6
    assert [len(part) for part in batch] == [3] * 6
    assert [type(env_id) for env_id in batch.env_ids] == [int] * 3


@pytest.mark.parametrize("form", FORMS)
def test_actions_by_env_ids_or_mapping(form, backend_setup, build, tmp_path):
    """A sequence follows `env_ids`, also an array; a mapping has env ids as keys."""
    env = build(fleet(tmp_path, 4), backend_setup)
    env.reset()
    one, two, three = acts(1.0, 2.0, 3.0)
    if form == "sequence":
        env.send((one, two, three), env_ids=np.array([3, 0, 2]))
    else:
        env.send({np.int64(3): one, 0: two, 2: three}, env_ids=None if form == "mapping" else [0, 2, 3])
    assert env.pending == (0, 2, 3)
    batch = env.recv()
    assert dict(zip(batch.env_ids, seen(batch.observations), strict=True)) == {3: 1.0, 0: 2.0, 2: 3.0}


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "reset_arguments",
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
def test_reset_arguments(constructor, reset_arguments, backend_setup, build):
    reference = Reference([constructor] * 4, SAME_STEP, 42)
    env = build([constructor] * 4, backend_setup)
    assert_same(env.reset(), reference.reset())
    due = reference.reset(**reset_arguments)
    env.reset_async(**reset_arguments)
    batch = env.recv()
    for env_id, *expected in zip(reset_arguments.get("env_ids", range(4)), *due, strict=True):
        place = batch.env_ids.index(env_id)
        assert_same([batch.observations[place], batch.infos[place]], expected)


def test_seeds_are_the_same_as_with_reset(backend_setup, build):
    """Each first reset has its own seed; `reset_async(seed=s)` makes s the base, and `seed()` returns the new seeds."""
    env = build([Hunt] * 4, backend_setup, seed=5)
    assert reset_seeds(env, env_ids=[1]) == {1: 6}
    assert reset_seeds(env, env_ids=[1]) == {1: None}
    assert reset_seeds(env, env_ids=[2], seed=20) == {2: 22}
    assert env.seed() == (5, 6, 22, 8)
    assert reset_seeds(env) == {0: 20, 1: None, 2: None, 3: 23}
    assert env.seed() == (20, 6, 22, 23)
    assert reset_seeds(env, env_ids=[3, 0], seed=[8, 9]) == {3: 8, 0: 9}
    assert env.seed() == (9, 6, 22, 8)


def reset_seeds(env: ParallelEnv, **reset_arguments: Any) -> dict[int, int | None]:
    """The seeds that each simulator's `reset` received, from its infos."""
    env.reset_async(options={"tell": True}, **reset_arguments)
    batch = env.recv()
    return {env_id: infos["wolf_0"]["seed"] for env_id, infos in zip(batch.env_ids, batch.infos, strict=True)}


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("reset_arguments", "error"),
    [
        ({"seed": -1}, ValueError),
        ({"seed": 1.5}, TypeError),
        ({"seed": [1, 2]}, ValueError),
        ({"seed": 9, "options": {"lock": threading.Lock()}}, TypeError),
    ],
    ids=["negative", "no integer", "too few", "unpicklable"],
)
def test_refused_reset_has_no_effect(reset_arguments, error, backend_setup, build):
    """Nothing is reset, and the base seed is unchanged."""
    env = build([Hunt] * 4, backend_setup, seed=5)
    with pytest.raises(error):
        env.reset_async(**reset_arguments)
    assert env.pending == ()
    assert reset_seeds(env) == {0: 5, 1: 6, 2: 7, 3: 8}
