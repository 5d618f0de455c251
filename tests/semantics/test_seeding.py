"""Seeds and env ids: which environment gets which, through the constructor and through `reset`."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
from helpers.comparison import assert_same
from simulators.deterministic import Hunt, Relay, Skirmish

from marl_parallel import EnvError
from marl_parallel.adapters.pettingzoo_env import PettingZooEnv

pytestmark = pytest.mark.in_turn


class RecordsArguments(Hunt):
    """Records its arguments; every constructor below returns one."""

    def __init__(self, **received: Any) -> None:
        super().__init__()
        self.received = received

    def fail(self) -> None:
        raise ArithmeticError("no such luck")


def takes_both(seed, env_id):
    return RecordsArguments(seed=seed, env_id=env_id)


def takes_seed(seed, **kw):
    return RecordsArguments(seed=seed, **kw)


def takes_env_id(*, env_id=None, other=5):
    return RecordsArguments(env_id=env_id, other=other)


def takes_nothing():
    return RecordsArguments()


def takes_anything(**kw):
    return RecordsArguments(**kw)


def takes_by_position(seed=None, env_id=None, /):
    return RecordsArguments(seed=seed, env_id=env_id)


class TakesSeed(RecordsArguments):
    def __init__(self, seed: int = -1) -> None:
        super().__init__(seed=seed)


class Inherits(TakesSeed):
    """Its constructor is its parent's."""


class Maker:
    """A callable object."""

    def __call__(self, env_id: int) -> RecordsArguments:
        return RecordsArguments(env_id=env_id)

    def method(self, seed: int) -> RecordsArguments:
        return RecordsArguments(seed=seed)


class NoSignature:
    """A constructor without a readable signature."""

    @property
    def __signature__(self) -> Any:
        raise ValueError("no signature")

    def __call__(self, seed: int = -1, env_id: int = -1) -> RecordsArguments:
        return RecordsArguments(seed=seed, env_id=env_id)


CONSTRUCTORS: list[tuple[Any, dict[str, Any]]] = [
    (takes_both, {"seed": 43, "env_id": 1}),
    (takes_seed, {"seed": 43}),
    (takes_env_id, {"env_id": 1, "other": 5}),
    (takes_nothing, {}),
    (takes_anything, {}),
    (takes_by_position, {"seed": None, "env_id": None}),
    (TakesSeed, {"seed": 43}),
    (Inherits, {"seed": 43}),
    (Maker(), {"env_id": 1}),
    (Maker().method, {"seed": 43}),
    (NoSignature(), {"seed": -1, "env_id": -1}),
    (lambda seed: RecordsArguments(seed=seed), {"seed": 43}),
    (functools.partial(takes_both, seed=7), {"seed": 7, "env_id": 1}),
    (functools.partial(takes_both, 7), {"seed": 7, "env_id": 1}),
    (functools.partial(takes_anything, seed=7), {"seed": 7}),
    (functools.partial(takes_anything, env_id=None), {"env_id": None}),
    (
        functools.partial(functools.partial(takes_seed, map="big"), sky="red"),
        {"seed": 43, "map": "big", "sky": "red"},
    ),
    (functools.partial(TakesSeed, seed=None), {"seed": None}),
]


@pytest.mark.parametrize(("constructor", "received"), CONSTRUCTORS, ids=lambda part: getattr(part, "__name__", None))
def test_constructors_get_the_arguments_in_their_signature(constructor, received, backend_setup, build):
    env = build([takes_nothing, constructor], backend_setup)
    assert_same(env.get_attr("received"), ({}, received))


def test_seeds_are_base_plus_number(setup, build):
    env = build([Skirmish] * 4, setup, seed=100)
    assert env.seed() == (100, 101, 102, 103)
    assert env.get_attr("received") == tuple({"seed": 100 + i, "env_id": i} for i in range(4))


def takes_restarts(restarts):
    return RecordsArguments(restarts=restarts)


def test_constructors_get_the_number_of_restarts(backend_setup, build):
    env = build([takes_restarts] * 2, backend_setup, on_error="restart")
    assert env.get_attr("received") == ({"restarts": 0},) * 2
    env.reset()
    for count in (1, 2):
        with pytest.raises(EnvError, match="no such luck"):
            env.call("fail", env_ids=[1])
        env.reset()
        assert env.get_attr("received") == ({"restarts": 0}, {"restarts": count})


class SeededByConstructor(PettingZooEnv):
    """Seeded by its constructor."""

    seeded_when_made = True


@pytest.mark.parametrize("reset", ["reset", "reset_async"])
def test_reset_without_seed_argument_warns(reset, backend_setup, build):
    """The seeds of the constructors stay in use."""
    env = build([Hunt] * 2, backend_setup, seed=5, adapter=SeededByConstructor)
    with pytest.warns(UserWarning, match="seed=9 is ignored: these environments are seeded when they are made"):
        getattr(env, reset)(seed=9)
    if env.pending:
        env.recv()
    assert env.seed() == (5, 6)


class ReportsReset(Relay):
    """Its infos contain the arguments of `reset`."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:  # type: ignore[override]
        observations, _ = super().reset()
        return observations, {"__common__": {"seed": seed, "options": options}}


def reset_values(infos: tuple[dict, ...], name: str = "seed") -> list[Any]:
    return [info["__common__"][name] for info in infos]


def test_only_the_first_reset_gets_the_seed(two_worker_setup, build):
    env = build([ReportsReset] * 4, two_worker_setup, seed=5)
    assert reset_values(env.reset(env_ids=[1])[1]) == [6]
    assert reset_values(env.reset()[1]) == [5, None, 7, 8]
    assert reset_values(env.reset()[1]) == [None] * 4


def test_automatic_resets_are_not_seeded(two_worker_setup, build):
    for mode in ("SAME_STEP", "NEXT_STEP"):
        env = build([ReportsReset] * 2, two_worker_setup, mode)
        env.reset()
        for _ in range(5 if mode == "SAME_STEP" else 6):
            infos = env.step([{}, {}])[4]
        info = infos[1]["__common__"]
        assert (info["reset_info"] if mode == "SAME_STEP" else info)["seed"] is None


def test_reset_with_a_seed(two_worker_setup, build):
    """s + i also with `env_ids`; a sequence follows `env_ids`; `seed()` returns the new seeds."""
    env = build([ReportsReset] * 4, two_worker_setup, seed=5)
    assert reset_values(env.reset(seed=20)[1]) == [20, 21, 22, 23]
    assert env.seed() == (20, 21, 22, 23)
    assert reset_values(env.reset(seed=30, env_ids=[3, 1])[1]) == [33, 31]
    assert env.seed() == (20, 31, 22, 33)
    assert reset_values(env.reset(seed=[9, 8], env_ids=[2, 0])[1]) == [9, 8]
    assert env.seed() == (8, 31, 9, 33)
    assert reset_values(env.reset(seed=(1, 2, 3, 4))[1]) == [1, 2, 3, 4]
    assert reset_values(env.reset(seed=0)[1]) == [0, 1, 2, 3]
    assert reset_values(env.reset()[1]) == [None] * 4


def test_numpy_seeds(backend_setup, build):
    env = build([ReportsReset] * 2, backend_setup, seed=np.int64(5))
    assert env.seed() == (5, 6)
    assert reset_values(env.reset(seed=np.int64(7))[1]) == [7, 8]
    assert reset_values(env.reset(seed=np.array([3, 1]))[1]) == [3, 1]


def test_options_go_to_every_environment(two_worker_setup, build):
    env = build([ReportsReset] * 3, two_worker_setup)
    assert reset_values(env.reset()[1], "options") == [None] * 3
    options = {"map": "big", "deep": {"n": [1, 2]}}
    assert_same(reset_values(env.reset(options=options)[1], "options"), [options] * 3)
    assert reset_values(env.reset(env_ids=[2], options={"a": 1})[1], "options") == [{"a": 1}]
    assert reset_values(env.reset()[1], "options") == [None] * 3


class DeclaresSeed(Hunt):
    """Has a `seed` attribute of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed = 1000 + seed


def test_declared_seed_of_an_environment(backend_setup, build):
    assert build([DeclaresSeed, Hunt], backend_setup, seed=5).seed() == (1005, 6)


def test_without_a_seed_a_base_is_drawn(backend_setup, build):
    """A 31-bit base that differs each time; passing it as `seed` gives the same results."""
    first, second = build([Skirmish] * 3, backend_setup, seed=None), build([Skirmish] * 3, backend_setup, seed=None)
    base = first.seed()[0]
    assert isinstance(base, int)
    assert 0 <= base < 2**31
    assert first.seed() == (base, base + 1, base + 2)
    assert second.seed() != first.seed()
    again = build([Skirmish] * 3, backend_setup, seed=base)
    assert_same(again.reset(), first.reset())
    actions = [{"tank": np.zeros(2, np.float32)}] * 3
    assert_same(again.step(actions), first.step(actions))


class UsesGlobalGenerators(Hunt):
    """Draws from the global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = (random.random(), float(np.random.rand()))


def test_workers_seed_the_global_generators(build, process_setup):
    """Before each constructor, so the number of workers does not matter; environments differ."""
    drawn = build([UsesGlobalGenerators] * 4, process_setup, seed=11).get_attr("drawn")
    assert len(set(drawn)) == 4
    assert drawn == build([UsesGlobalGenerators] * 4, process_setup._replace(num_workers=4), seed=11).get_attr("drawn")
    assert drawn != build([UsesGlobalGenerators] * 4, process_setup, seed=99).get_attr("drawn")


def test_global_generators_of_the_caller_are_unchanged(backend_setup, build):
    random.seed(1)
    np.random.seed(1)
    expected = random.getstate(), np.random.get_state()[1].tolist()
    build([Hunt] * 4, backend_setup).reset()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == expected
