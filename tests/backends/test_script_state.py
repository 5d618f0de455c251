"""Workers have settings of the caller's thread and process: `numpy.seterr` and the recursion limit."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.start_methods import arguments
from simulators.counting import Counting

from marl_parallel import EnvError, ParallelEnv

pytestmark = pytest.mark.release_independent

# A portable worker starts as on macOS and Windows. Ray's workers get the settings as those of "process" do.
BACKENDS = ("serial", "thread", "process", "portable", "hybrid")
NUM_ENVS = 4


class Dividing(Counting):
    """Divides by zero in each step; with `overflows`, its constructor overflows."""

    def __init__(self, overflows: bool = False) -> None:
        super().__init__(seed=0)
        self.seen = np.geterr()  # in the constructor
        if overflows:
            np.float64(1e308) * np.float64(10)

    def step(self, actions: Any) -> Any:
        self.divided = np.float64(1) / np.float64(0)
        return super().step(actions)


def opened(backend: str, constructor: Callable[..., Any] = Dividing, **more: Any) -> ParallelEnv:
    chosen = arguments(backend) or {"backend": backend}
    return ParallelEnv([constructor] * NUM_ENVS, num_workers=2, **{**chosen, **more})


def float_errors(_: Any) -> dict[str, str]:
    return dict(np.geterr())


def recursion_limit(_: Any) -> int:
    return sys.getrecursionlimit()


def step(env: ParallelEnv) -> Any:
    return env.step(env.sample_actions())


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """Restores what a test sets."""
    limit = sys.getrecursionlimit()
    with np.errstate():
        yield
    sys.setrecursionlimit(limit)


@pytest.mark.parametrize("backend", BACKENDS)
def test_caller_settings_in_workers(backend):
    np.seterr(divide="raise", over="print", under="warn", invalid="ignore")
    sys.setrecursionlimit(4321)
    at_first = dict(np.geterr())
    with opened(backend) as env:
        assert env.get_attr("seen") == (at_first,) * NUM_ENVS
        assert env.call(float_errors) == (at_first,) * NUM_ENVS
        assert env.call(recursion_limit) == (4321,) * NUM_ENVS
        with np.errstate(all="ignore"):
            sys.setrecursionlimit(2345)
            env.reset()
            step(env)
            assert env.get_attr("divided") == (np.inf,) * NUM_ENVS
            assert env.call(float_errors) == (dict(np.geterr()),) * NUM_ENVS
            assert env.call(recursion_limit) == (2345,) * NUM_ENVS
        env.reset()
        assert env.call(float_errors) == (at_first,) * NUM_ENVS
        with pytest.raises(EnvError, match="divide by zero") as caught:
            step(env)
        assert isinstance(caught.value.original, FloatingPointError)
    assert np.geterr() == at_first
    assert sys.getrecursionlimit() == 2345


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_constructors_have_the_settings(backend):
    np.seterr(over="raise")
    with pytest.raises(EnvError, match="overflow") as caught:
        opened(backend, functools.partial(Dividing, True))
    assert caught.value.method == "constructor"
    assert np.geterr()["over"] == "raise"


class Crashing(Dividing):
    """Its first environment of number 1 ends its worker in the second step."""

    def __init__(self, env_id: int, restarts: int) -> None:
        super().__init__()
        self.crashes = env_id == 1 and not restarts

    def step(self, actions: Any) -> Any:
        if self.crashes and self.steps == 1:
            os.abort()
        return super().step(actions)


def test_after_a_restart():
    np.seterr(divide="print", invalid="print")
    with opened("process", Crashing, on_error="restart") as env:
        np.seterr(divide="ignore", over="ignore")
        sys.setrecursionlimit(3210)
        env.reset()
        for _ in range(2):
            step(env)
        assert env.stats().restarts
        assert env.get_attr("seen")[:2] == (dict(np.geterr()),) * 2  # the environments of the worker that crashed
        assert env.call(float_errors) == (dict(np.geterr()),) * NUM_ENVS
        assert env.call(recursion_limit) == (3210,) * NUM_ENVS


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_what_a_simulator_sets_stays_its_own(backend):
    np.seterr(all="warn")
    with opened(backend) as env:
        env.call(lambda _: np.seterr(divide="ignore"))
        np.seterr(over="ignore")
        env.reset()
        assert env.call(float_errors) == ({**np.geterr(), "divide": "ignore"},) * NUM_ENVS
        assert np.geterr()["divide"] == "warn"


def test_modes_that_call_a_function_of_the_caller():
    calls: list[Any] = []
    before = np.seterrcall(lambda *args: calls.append(args))
    np.seterr(divide="call", over="log")
    try:
        with opened("process") as env:
            seen: Mapping[str, str] = env.call(float_errors)[0]
    finally:
        np.seterrcall(before)
    assert (seen["divide"], seen["over"]) == ("warn", "warn")


class Tiny(Counting):
    """Returns float64 observations that float32, which its space declares, has to round."""

    def __init__(self, observed: float) -> None:
        super().__init__(seed=0)
        self.observed = observed

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def _observed(self) -> dict[str, Any]:
        return {agent: np.array([self.observed]) for agent in self.agents}


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_rounding_to_the_dtype_of_the_space_is_no_error(backend):
    np.seterr(all="raise")
    with opened(backend, functools.partial(Tiny, 1e-50)) as env:
        observations, _ = env.reset()
        assert observations[3]["long"].tolist() == [0.0]
    with opened(backend, functools.partial(Tiny, 1e50)) as env, pytest.raises(EnvError, match="overflow"):
        env.reset()


def deep(_: Any, depth: int) -> int:
    def down(left: int) -> int:
        return 0 if left == 0 else 1 + down(left - 1)

    return down(depth)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_recursion_as_deep_as_in_the_caller(backend):
    sys.setrecursionlimit(5000)
    with opened(backend) as env:
        assert env.call(deep, 3000) == (3000,) * NUM_ENVS
        sys.setrecursionlimit(500)
        env.reset()
        with pytest.raises(EnvError, match="RecursionError"):
            env.call(deep, 3000)
