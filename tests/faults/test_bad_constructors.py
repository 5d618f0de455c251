"""Constructors that are not callable, return no environment, or differ: a clear error, and nothing is left."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.processes import gone, workers
from simulators.deterministic import Hunt, Relay, Scripted
from simulators.failing import Fragile, SimulatorError, raising

from marl_parallel import ParallelEnv
from marl_parallel.adapters.pettingzoo_env import PettingZooEnv

pytestmark = [pytest.mark.release_independent, pytest.mark.in_turn]


def test_no_constructors(backend_setup, build):
    with pytest.raises(ValueError, match=r"env_constructors|constructor|environment"):
        build([], backend_setup)


@pytest.mark.parametrize("thing", [None, "mpe2.simple_spread_v3", 3], ids=repr)
def test_not_callable(thing, backend_setup, build):
    with pytest.raises(TypeError, match="2"):
        build([Hunt, Hunt, thing], backend_setup)


def test_environment_in_place_of_a_constructor(backend_setup, build):
    with pytest.raises(TypeError, match="0"):
        build([Hunt()], backend_setup)


def test_a_simulator_derived_from_the_wrong_parallel_env():
    class CustomEnvironment(ParallelEnv): ...

    message = r"env_constructors\[0\] is the class .*CustomEnvironment, which derives from marl_parallel.ParallelEnv"
    with pytest.raises(TypeError, match=message):
        ParallelEnv([CustomEnvironment] * 2)


@pytest.mark.parametrize("arguments", [{"num_workers": 0}, {"num_workers": -1}, {"backend": "fast"}], ids=str)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=rf"{next(iter(arguments))}.*{next(iter(arguments.values()))}"):
        ParallelEnv([Hunt] * 2, **arguments)


@pytest.mark.parametrize("mode", ["SOMETIMES", "same step"])
def test_unknown_mode(mode, backend_setup, build):
    with pytest.raises(ValueError, match=mode):
        build([Hunt] * 2, backend_setup, mode)


def test_unpicklable_constructor_is_named(killable_setup, build):
    lock = threading.Lock()

    def locked() -> Any:
        with lock:
            return Hunt()

    with pytest.raises(Exception, match="2") as caught:
        build([Hunt, Hunt, locked, Hunt], killable_setup)
    assert isinstance(caught.value, TypeError | ValueError) or "Pickling" in type(caught.value).__name__


class Declaring(Relay):
    """An environment with configurable spaces."""

    def __init__(self, observed: Any, acted: Any, names: tuple[str, ...] = ("alpha", "beta")) -> None:
        self.observation_space = spaces.Dict([(name, observed) for name in names])
        self.action_space = spaces.Dict([(names[0], spaces.Discrete(2)), *((name, acted) for name in names[1:])])


PLAIN = spaces.Box(-1.0, 1.0, (2,), np.float32)
OTHERS = [
    (spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2), "alpha"),
    (spaces.Box(-1.0, 1.0, (2,), np.float64), spaces.Discrete(2), "alpha"),
    (PLAIN, spaces.Discrete(3), "beta"),
    (PLAIN, spaces.Discrete(2, start=1), "beta"),
]


@pytest.mark.parametrize(("observed", "acted", "agent"), OTHERS, ids=str)
def test_different_spaces(observed, acted, agent, two_worker_setup, build):
    """The error names the environment, the agent and both spaces."""
    known = functools.partial(Declaring, PLAIN, spaces.Discrete(2))
    other = functools.partial(Declaring, observed, acted)
    with pytest.raises(ValueError, match=agent) as caught:
        build([known, known, other, known], two_worker_setup)
    differing = (PLAIN, observed) if agent == "alpha" else (spaces.Discrete(2), acted)
    for part in ("2", *map(str, differing)):
        assert part in str(caught.value)


class CustomBox(spaces.Box):
    """Equal to the Box it is derived from, but with its own kind of values."""


@pytest.mark.parametrize("kinds", [(spaces.Box, CustomBox), (CustomBox, spaces.Box)], ids=["known first", "own first"])
@pytest.mark.parametrize("below", [lambda space: space, lambda space: spaces.Dict(x=space)], ids=["alone", "below"])
def test_spaces_of_different_kinds(below, kinds, two_worker_setup, build):
    declared = [below(kind(-1.0, 1.0, (2,), np.float32)) for kind in kinds]
    with pytest.raises(ValueError, match=r"environment 1 differs .* agent 'alpha': got .*, expected .* another class"):
        build([functools.partial(Declaring, one, spaces.Discrete(2)) for one in declared], two_worker_setup)


class SpaceWithoutEquality(spaces.Space[int]):
    """A space without `__eq__`, as Gymnasium allows."""

    def __init__(self) -> None:
        super().__init__(None, None)


def test_spaces_without_equality_do_not_differ(two_worker_setup, build):
    declared = spaces.Dict(
        [("a", SpaceWithoutEquality()), ("b", spaces.Tuple([SpaceWithoutEquality(), spaces.Discrete(2)]))]
    )
    env = build([functools.partial(Scripted, declared, None, ({"a": 1}, {}), (), ("a", "b"))] * 2, two_worker_setup)
    assert env.reset()[0] == ({"a": 1}, {"a": 1})


class WithoutStep:
    """Has `reset` and `close`, but no `step`."""

    def __init__(self, notes: Path, fault: Callable[[], Any] = int) -> None:
        self.notes, self.fault = notes, fault

    def reset(self) -> None:
        """Never called."""

    def close(self) -> None:
        (self.notes / "closed-half").touch()
        self.fault()


NO_ENVIRONMENTS = {
    "a number": (lambda notes: 3, "builtins.int without `reset` and `step`"),
    "a dict": (lambda notes: {}, "builtins.dict without `reset` and `step`"),
    "nothing": (lambda notes: None, "returned None; does it lack a `return`"),
    "a class": (lambda notes: Hunt, "returned the class Hunt, not an instance"),
    "a constructor": (lambda notes: lambda: Hunt(), "did a constructor return another constructor"),
    "a module": (lambda notes: os, "builtins.module without `reset` and `step`"),  # its `close` wants an argument
    "half of one": (WithoutStep, "WithoutStep without `step`"),
    "half of one that breaks": (
        functools.partial(WithoutStep, fault=raising(SimulatorError)),
        "WithoutStep without `step`",
    ),
}


def refusal_message(env_id: int, make: Any, notes: Path, setup: Any, build: Any, **more: Any) -> str:
    """The message for one constructor among others that returns no environment; everything has been freed."""
    before = {*threading.enumerate()}
    constructors = [functools.partial(Fragile, {}, notes)] * 4
    constructors[env_id] = functools.partial(make, notes)
    with pytest.raises(TypeError, match=f"^environment {env_id}: ") as caught:
        build(constructors, setup, **more)
    assert type(caught.value) is TypeError
    built, closed = ({path.name.rpartition("-")[2] for path in notes.glob(f"{what}-*")} for what in ("built", "closed"))
    assert closed - {"half"} == built == {"0", "1", "2", "3"} - {str(env_id)}
    assert gone(workers(notes))
    assert {*threading.enumerate()} <= before
    return str(caught.value)


@pytest.mark.parametrize("env_id", [0, 3])
@pytest.mark.parametrize("thing", NO_ENVIRONMENTS)
def test_constructor_returns_no_environment(thing, env_id, backend_setup, build, tmp_path):
    """The result is of no known kind; it is closed if it has `close`."""
    make, words = NO_ENVIRONMENTS[thing]
    assert words in refusal_message(env_id, make, tmp_path, backend_setup, build)
    assert (tmp_path / "closed-half").exists() == thing.startswith("half")


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ("pettingzoo", "A PettingZoo parallel environment has no method `step`: "),
        ("dict", "A dict environment has no method `step`: "),
        (
            lambda env: PettingZooEnv(env) if isinstance(env, Fragile) else env,
            "must return a MultiAgentEnv; it returned",
        ),
    ],
    ids=["pettingzoo", "dict", "own"],
)
def test_constructor_returns_another_kind_than_the_adapter(adapter, words, backend_setup, build, tmp_path):
    assert words in refusal_message(2, WithoutStep, tmp_path, backend_setup, build, adapter=adapter)
    assert (tmp_path / "closed-half").exists()


def test_first_of_several_wrong_constructors_is_named(backend_setup, build):
    for _ in range(3):
        with pytest.raises(TypeError, match=r"^environment 1: "):
            build([Hunt, dict, dict, dict], backend_setup)


class NeedsModule:
    """Cannot be unpickled without a module, not even by value."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("local_modules",)


def test_module_that_only_the_program_has(backend_setup, build, monkeypatch):
    """Workers get a module with the same names."""
    monkeypatch.setitem(sys.modules, "local_modules", types.ModuleType("local_modules"))
    build([functools.partial(lambda _: Hunt(), NeedsModule())] * 2, backend_setup).reset()


def test_module_that_workers_cannot_import(backend_setup, build):
    constructor = functools.partial(lambda _: Hunt(), NeedsModule())
    with pytest.raises(ModuleNotFoundError, match="environment 0 needs the module 'local_modules'"):
        build([constructor] * 2, backend_setup)
