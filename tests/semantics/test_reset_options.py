"""Options of resets: what is refused changes nothing, and arrays are compared by their values."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from helpers.comparison import assert_same
from simulators.native_arena import Arena

from marl_parallel import ParallelEnv
from marl_parallel.adapters import DictEnv
from marl_parallel.core.objects.pickling import same
from marl_parallel.core.worker.constructors import call_constructor
from marl_parallel.vector import GymnasiumVectorEnv, StackedVecEnv

LOCK = {"lock": threading.Lock()}


class Weather:
    """Observes the wind of its latest options, and fails where an action is 2."""

    possible_agents = ("boat", "kite")
    observation_space = spaces.Dict(dict.fromkeys(possible_agents, spaces.Box(-100, 100, (2,), np.float64)))
    action_space = spaces.Dict(dict.fromkeys(possible_agents, spaces.Discrete(3)))

    def observed(self) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, np.array([*self.wind]))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.wind = (options or {}).get("wind", np.zeros(2))
        return self.observed(), {"__common__": {"seed": seed, "options": options}}

    def step(self, actions: dict) -> tuple[dict, ...]:
        if 2 in actions.values():
            raise RuntimeError("capsized")
        return self.observed(), {}, {"__all__": False}, {"__all__": False}, {}


class Remembering(DictEnv):
    """The options of a reset hold for all later episodes, also after a restart."""

    options_last = True


def winds(observations: Any) -> list[list[float]]:
    return [of_env["boat"].tolist() for of_env in observations]


REFUSED: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"options": {"wind": np.ones(2), **LOCK}}, TypeError),
    ({"options": {"wind": np.ones(2)}, "env_ids": [7]}, ValueError),
    ({"options": {"wind": np.ones(2)}, "env_ids": [0, 0]}, ValueError),
    ({"options": {"wind": np.ones(2)}, "seed": [1, 2, 3, 4]}, ValueError),
    ({"options": {"wind": np.ones(2)}, "seed": "one"}, TypeError),
    ({"options": {"wind": np.ones(2)}, "seed": -1}, ValueError),
    ({"options": [{"wind": np.ones(2)}], "seed": 5}, ValueError),
    ({"options": [{"wind": np.ones(2)}, None, LOCK], "seed": 5}, TypeError),
    ({"options": "wind", "seed": 5}, TypeError),
]


def test_refused_reset_changes_nothing(backend_setup, build):
    """Restarts pass the options of the last reset that was not refused."""
    env = build([Weather] * 3, backend_setup, False, on_error="restart", adapter=Remembering)
    env.reset(options={"wind": np.array([3.0, 4.0])}, env_ids=[0, 1, 2])
    seeds, masks = env.seed(), env.acting
    for arguments, error in REFUSED:
        for reset in (env.reset, env.reset_async, lambda **more: env.reset(drain=True, **more)):
            with pytest.raises(error):
                reset(**arguments)
            assert env.pending == ()
    assert (env.seed(), env.acting) == (seeds, masks)
    *_, infos = env.step([{"boat": 2}, {}, {"boat": 2}])
    assert ["__common__" in of_env for of_env in infos] == [True, False, True]
    observations, infos = env.reset()
    assert winds(observations) == [[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]]  # restarted environments get them again
    assert env.stats().restarts == 2


def test_refused_reset_drops_nothing_in_flight(backend_setup, build):
    env = build([Weather] * 3, backend_setup, False)
    env.reset()
    for arguments, error in REFUSED:
        env.send([{}] * 3)
        with pytest.raises(error):
            env.reset(drain=True, **arguments)
        assert len(env.recv().env_ids) == 3


def test_refused_reset_does_not_choose_the_facade_that_steps(parallel):
    env = parallel(Weather, 2)
    one, other = StackedVecEnv(env), StackedVecEnv(env)
    with pytest.raises(TypeError, match="options cannot be pickled"):
        one.reset(options=LOCK)
    other.reset()
    with pytest.raises(RuntimeError, match="stepped by a StackedVecEnv already"):
        one.reset()


# -- values of the caller's that have no `==` ----------------------------------------------------------------------


class NoTruth:
    """A value whose comparison has no truth value, as that of tensors and tables."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass
class Map:
    cells: Any


def values(number: int = 1) -> list[Any]:
    """New objects that are equal for equal numbers."""
    return [
        np.full((2, 2), number),
        np.array([np.nan, number]),
        np.array([{"a": number}, None], object),
        {"map": {"cells": np.full(2, number)}},
        [np.arange(number)],
        (number, "x"),
        float(number),
        NoTruth(number),
        Map(np.full(3, number)),
    ]


@pytest.mark.parametrize("place", range(len(values())))
def test_values_are_equal_as_their_contents_are(place):
    one, equal, other = values()[place], values()[place], values(2)[place]
    assert same(one, equal)
    assert not same(one, other)
    assert not same(one, {"an": "other"})


def test_equal_options_with_arrays_in_the_rows_of_two_environments(parallel):
    rows = GymnasiumVectorEnv(parallel(Weather, 2))._rows
    options = [{"wind": np.full(2, number), "no truth": NoTruth(number)} for number in (1, 1, 2, 2)]
    chosen = rows.by_env(options, "options")
    assert [of_env["wind"].tolist() for of_env in chosen] == [[1, 1], [2, 2]]
    with pytest.raises(ValueError, match="options must be equal for all rows of an environment, but for environment 0"):
        rows.by_env([options[0], options[2], options[2], options[3]], "options")


def test_seed_of_a_registered_environment_that_is_an_array():
    made = []

    class Made(gymnasium.Env):
        observation_space = action_space = spaces.Discrete(2)

        def __init__(self, seed: Any = None) -> None:
            made.append(seed)

    spec = EnvSpec("Made-v0", entry_point=Made, kwargs={"seed": np.array([1, 2])})
    call_constructor(spec.make, {"seed": 5, "env_id": 0, "restarts": 0})
    assert_same(made, [np.array([1, 2])])


class Batches(Arena):
    """A native simulator that returns two of its three environments at a time, so that not all are reset at once."""

    batch_size, reseeds = 2, True

    def __init__(self) -> None:
        super().__init__(3)
        self.batch_size = 2


def test_refused_reset_keeps_the_seeds_of_a_native_simulator():
    with ParallelEnv.from_native(Batches()) as env:
        seeds = env.seed()
        with pytest.raises(ValueError, match=r"reset of 3 environments, but .* returns batch_size=2 at a time"):
            env.reset(seed=77)
        assert env.seed() == seeds
