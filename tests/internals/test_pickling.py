"""The caller's classes are pickled by value; classes that the receiver already has stay unchanged."""

from __future__ import annotations

import abc
import copy
import importlib.util
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

import cloudpickle
import pytest

from marl_parallel import ParallelEnv
from marl_parallel.core.objects import classes, pickling
from marl_parallel.core.objects.pickling import dumps, loads

SIMULATORS = """
import gymnasium
import numpy as np
from gymnasium import spaces

from marl_parallel.adapters.gymnasium_env import GymnasiumEnv

GRAVITY = 1.0

class Clock:
    ticks = 0

class Body:
    def __init__(self):
        self.fallen = 0.0

    def fall(self):
        self.fallen += GRAVITY
        return self.fallen

class Falling(gymnasium.Env):
    observation_space = spaces.Box(-99.0, 99.0, (1,))
    action_space = spaces.Discrete(2)
    built = []

    def __init__(self):
        self.body, self.clock = Body(), Clock()
        Falling.built.append(self)

    def reset(self, *, seed=None, options=None):
        global GRAVITY
        GRAVITY += 2.0
        self.body.fallen = 0.0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        Clock.ticks += 1
        return np.full(1, self.body.fall(), np.float32), 0.0, False, False, {"body": self.body}

    def copies(self):
        return len(Falling.built)

def adapted(simulator):
    return GymnasiumEnv(simulator)
"""


@pytest.fixture
def falling(tmp_path: Path) -> Iterator[types.ModuleType]:
    """A module that workers cannot import."""
    (tmp_path / "falling_bodies.py").write_text(SIMULATORS)
    spec = importlib.util.spec_from_file_location("falling_bodies", tmp_path / "falling_bodies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["falling_bodies"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["falling_bodies"]


def heights(env: ParallelEnv, look: str) -> list[float]:
    """The distance that a body falls in the first step of each episode."""
    fallen = []
    for episode in range(5):
        env.reset()
        observations, _, _, _, infos = env.step([{"agent_0": 0}] * env.num_envs)
        fallen.append(float(observations[0]["agent_0"][0]))
        if episode == 2 and look == "get":
            assert env.get_attr("body")[0].fallen == fallen[-1]
        if episode == 2 and look == "set":
            env.set_attr("body", copy.copy(infos[0]["agent_0"]["body"]))
    return fallen


@pytest.mark.parametrize("look", ["", "get", "set"])
def test_reading_attributes_changes_no_class(look, falling, backend_setup, build):
    """Neither the simulator's classes in the worker nor the caller's."""
    known, fall = falling.GRAVITY, falling.Body.fall
    env = build([falling.Falling] * 2, backend_setup, num_workers=1)
    shared = 2.0 * (2 if backend_setup.backend in ("serial", "thread") or env.num_workers == 1 else 1)
    assert heights(env, look) == [known + shared * episode for episode in range(1, 6)]
    assert falling.Body.fall is fall
    assert fall.__globals__ is vars(falling)
    falling.GRAVITY = known


def test_environments_in_one_process_share_classes(falling, backend_setup, build):
    """As without workers: no constructor resets class attributes."""
    env = build([falling.Falling] * 3, backend_setup, num_workers=1)
    before = len(falling.Falling.built) if backend_setup.backend in ("serial", "thread") else 3
    assert env.call("copies") == (before,) * 3
    falling.Falling.built.clear()


def test_adapter_that_workers_cannot_import(falling, backend_setup, build):
    for adapter in (falling.adapted, lambda simulator: falling.adapted(simulator)):
        env = build([falling.Falling] * 2, backend_setup, adapter=adapter)
        assert len(env.reset()[0]) == 2


def test_class_is_rebuilt_after_a_failed_unpickling(falling):
    """The second attempt, with the missing module, succeeds."""
    rebuilt = types.new_class(
        "Late", (), {}, lambda names: names.update(missing=falling, value=3, __module__="__main__")
    )
    pickled = dumps(rebuilt)
    program = (
        "import sys, types; from marl_parallel.core.objects.pickling import loads\n"
        f"pickled = {pickled!r}\n"
        "for _ in range(2):\n"
        "    try:\n        loads(pickled)\n    except ModuleNotFoundError as error:\n        print(error.name)\n"
        "sys.modules['falling_bodies'] = types.ModuleType('falling_bodies')\n"
        "print(loads(pickled).value, loads(pickled) is loads(pickled))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["falling_bodies", "falling_bodies", "3", "True"], done.stderr


@pytest.mark.parametrize("size", [1, 100_000])
def test_known_classes_stay_unchanged(size):
    """Cloudpickle alone would reset their attributes."""

    class Own:
        value = 1

    by_cloudpickle = cloudpickle.dumps(Own)
    pickled = dumps((Own, b"." * size))
    Own.value = 2
    assert loads(pickled) == (Own, b"." * size)
    assert Own.value == 2
    pickle.loads(by_cloudpickle)
    assert Own.value == 1


def test_definitions_are_read_once(monkeypatch):
    """Steps may return values of a script's classes, which travel by value in each step."""

    class Info(metaclass=abc.ABCMeta):
        size: int = 3

        def area(self: Info) -> int:
            return eval("self.size") ** 2

        @abc.abstractmethod
        def name(self): ...

    class Wall(Info):
        name = "wall"

    monkeypatch.setattr(classes, "_with_keywords", WeakKeyDictionary())
    calls = []
    for owner, name in ((pickling, "looks_up_names"), (pickling, "names_in_annotations"), (classes, "_parameters")):
        read = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, read=read, name=name: (calls.append(name), read(*args))[1])
    with pickling.by_value([sys.modules[__name__]]):
        first = pickling.dumps_by_value(Wall())
        assert {*calls} == {"looks_up_names", "names_in_annotations", "_parameters"}
        calls.clear()
        assert pickling.dumps_by_value(Wall()) == first
        assert calls == []
        Info.area.__code__ = (lambda self: 4).__code__
        assert pickling.dumps_by_value(Wall()) != first
        assert {*calls} == {"looks_up_names"}
