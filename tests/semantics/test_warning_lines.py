"""Warnings name the line of the caller, whichever facade they came through."""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers import ROOT
from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv, RecyclePolicy, Rollout, make
from marl_parallel.adapters import PettingZooEnv
from marl_parallel.vector import (
    DummyVecEnv,
    GymnasiumVectorEnv,
    PettingZooVecEnv,
    ShareDummyVecEnv,
    ShareVecEnv,
    StackedVecEnv,
)

pytestmark = pytest.mark.release_independent


def line_of(call: Callable[..., Any], *args: Any) -> tuple[str, int]:
    """File and line that the only warning of a call names."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    (warning,) = caught
    return warning.filename, warning.lineno


def assert_names(call: Callable[..., Any], *args: Any) -> None:
    """The warning of a function that consists of one line names this line."""
    assert line_of(call, *args) == (__file__, call.__code__.co_firstlineno)  # type: ignore[attr-defined]


class SeededByConstructor(PettingZooEnv):
    seeded_when_made = True


class Drawing:
    """Draws from a process-wide generator."""

    possible_agents = ["a"]  # noqa: RUF012
    observation_space = spaces.Dict(a=spaces.Box(0.0, 1.0, (1,)))
    action_space = spaces.Dict(a=spaces.Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"a": np.float32([random.random()])}, {}

    def step(self, actions: Any) -> Any:
        return {"a": np.float32([random.random()])}, {"a": 0.0}, {"__all__": False}, {"__all__": False}, {}


ONE = [simple_spread_v3.parallel_env]
LOGS: dict[str, Any] = {"log_dir": "logs", "backend": "serial"}
CONSTRUCTIONS: dict[str, Callable[[], Any]] = {
    "timeout": lambda: ParallelEnv(ONE, backend="serial", step_timeout=5.0),
    "logs": lambda: ParallelEnv(ONE, **LOGS),
    "recycling": lambda: ParallelEnv(ONE, backend="hybrid", recycle=RecyclePolicy(max_memory_mb=9e9)),
    "make": lambda: make("mpe2.simple_spread_v3", 1, **LOGS),
    "make with a facade": lambda: make("mpe2.simple_spread_v3", 1, auto_reset=True, facade="stacked", **LOGS),
    "drop-in": lambda: DummyVecEnv([lambda: simple_spread_v3.parallel_env()], log_dir="logs"),
    "drop-in of arrays": lambda: ShareDummyVecEnv(ONE, log_dir="logs"),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_constructions(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_names(CONSTRUCTIONS[name])


RESETS: dict[str, tuple[Any, Callable[[ParallelEnv], Any], Callable[[Any], Any]]] = {
    "dicts": (True, lambda env: env, lambda env: env.reset(seed=9)),
    "async": (True, lambda env: env, lambda env: env.reset_async(seed=9)),
    "stacked": (True, StackedVecEnv, lambda envs: envs.reset(seed=9)),
    "rollout": (True, StackedVecEnv, lambda envs: Rollout(envs, 2).reset(seed=9)),
    "gymnasium": ("NEXT_STEP", GymnasiumVectorEnv, lambda envs: envs.reset(seed=9)),
    "gymnasium, async": ("NEXT_STEP", GymnasiumVectorEnv, lambda envs: envs.reset_async(seed=9)),
    "pettingzoo": (True, PettingZooVecEnv, lambda envs: envs.reset(seed=9)),
    "one of pettingzoo": (False, lambda env: PettingZooVecEnv(env).single(), lambda one: one.reset(seed=9)),
    "share": (True, ShareVecEnv, lambda envs: envs.reset(seed=9)),
}


@pytest.mark.parametrize("facade", RESETS)
def test_resets(facade):
    mode, wrap, reset = RESETS[facade]
    with ParallelEnv(ONE * 2, mode, backend="serial", adapter=SeededByConstructor) as env:
        assert_names(reset, wrap(env))


def test_reset_by_a_library():
    """The line of the library that called this package."""
    library: dict[str, Any] = {}
    exec(compile("\ndef reset(env):\n    env.reset(seed=9)\n", "/site-packages/library.py", "exec"), library)
    with ParallelEnv(ONE * 2, backend="serial", adapter=SeededByConstructor) as env:
        assert line_of(library["reset"], StackedVecEnv(env)) == ("/site-packages/library.py", 3)


SAVES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "dicts": (lambda env: env, lambda env: env.save_state()),
    "stacked": (StackedVecEnv, lambda envs: envs.save_state()),
    "share": (ShareVecEnv, lambda envs: envs.save_state()),
    "rollout": (lambda env: Rollout(StackedVecEnv(env), 2), lambda rollout: rollout.save_state()),
}


@pytest.mark.parametrize("facade", SAVES)
def test_saves(facade):
    wrap, save = SAVES[facade]
    with ParallelEnv([Drawing], True, num_workers=1) as env:
        envs = wrap(env)
        envs.reset()
        assert_names(save, envs)


def test_all_warnings_come_from_one_function():
    """All others would count frames."""
    found = []
    for path in sorted((ROOT / "marl_parallel").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                found.append(str(path.relative_to(ROOT)))
    assert [*map(Path, found)] == [Path("marl_parallel/cli/measure.py"), Path("marl_parallel/core/warn.py")]
