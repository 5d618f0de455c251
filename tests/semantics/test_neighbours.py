"""Environments in one process that have something in common: one object, or settings of the process."""

from __future__ import annotations

import functools
import gc
import locale
import os
import threading
import warnings
import weakref
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from mpe2 import simple_spread_v3
from simulators.one_object import (
    Counter,
    Single,
    cached,
    cached_by_env,
    of_module,
    wrapped,
    wrapped_spread,
    wrapped_twice,
)

from marl_parallel import EnvError, ParallelEnv
from marl_parallel.adapters import adapt
from marl_parallel.core.worker.neighbours import process_settings

pytestmark = pytest.mark.release_independent

BACKENDS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread", "num_workers": 2},
    "process": {"backend": "process", "envs_per_worker": 2},
    "hybrid": {"backend": "hybrid", "num_workers": 2},
}
OWN = {"backend": "process", "envs_per_worker": 1}


def times(env: ParallelEnv) -> list[float]:
    """What the environments observe after a reset and two steps."""
    env.reset()
    for _ in range(2):
        observations, *_ = env.step([{"agent_0": 0}] * env.num_envs)
    return [float(one["agent_0"][0]) for one in observations]


def warned(constructors: list[Any], **keywords: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ParallelEnv(constructors, **{"backend": "serial", **keywords}).close()
    found = [one for one in caught if one.category is UserWarning]
    assert all(one.filename == __file__ for one in found)
    return [str(one.message) for one in found]


# -- one object --------------------------------------------------------------------------------------------------------


def unpicklable() -> Any:
    one = Counter()
    one.lock = threading.Lock()
    return lambda: one


def adapted() -> Any:
    """An adapter that makes a new `MultiAgentEnv` only once."""
    one = adapt(Counter())
    one.lock = threading.Lock()
    return lambda _: one


def spread() -> Any:
    one = simple_spread_v3.parallel_env()
    one.lock = threading.Lock()
    return lambda: one


class Counters:
    def __init__(self) -> None:
        self.made = unpicklable()()

    def one(self) -> Any:
        return self.made


SAME: dict[str, Any] = {
    "of a module": of_module, "cached": cached, "singleton": Single, "captured": unpicklable(), "PettingZoo": spread(),
    "bound": functools.partial(lambda one: one, unpicklable()()), "method": Counters().one,
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_one_object_for_several_environments_is_refused(name):
    with pytest.raises(
        ValueError,
        match=r"environment 1: its constructor returned the same object as the constructor of environment 0, of type .*"
        r"such as `lambda: Simulator\(\)`, or, .* pass backend=\"process\" and envs_per_worker=1",
    ):
        ParallelEnv([SAME[name]] * 3, backend="serial")
    with ParallelEnv([SAME[name]], backend="serial") as env:
        env.reset()


def test_one_object_of_an_adapter_is_refused():
    with pytest.raises(ValueError, match="environment 1: its constructor returned the same object as"):
        ParallelEnv([Counter] * 2, backend="serial", adapter=adapted())


@pytest.mark.parametrize("name", BACKENDS)
def test_one_object_is_refused_in_every_backend(name):
    how = 'backend="process" and envs_per_worker=1' if name in ("serial", "thread") else ""
    with pytest.raises(ValueError, match=rf"environment \d: its .* the same object as .* environment \d.*{how}"):
        ParallelEnv([of_module] * 4, **BACKENDS[name])


def test_environments_in_processes_of_their_own_may_have_one_object_each():
    with ParallelEnv([of_module] * 2, **OWN) as env:
        assert times(env) == [2.0, 2.0]


@pytest.mark.parametrize("name", BACKENDS)
def test_an_object_that_is_copied_for_each_environment_is_accepted(name):
    """Constructors travel pickled, and with them what they hold."""
    one = Counter()
    with ParallelEnv([lambda: one] * 4, **BACKENDS[name]) as env:
        assert times(env) == [2.0] * 4


@pytest.mark.parametrize("name", ["serial", "process"])
def test_a_restart_may_return_the_object_of_before(name):
    class Breaks(gymnasium.Wrapper):
        def step(self, action: Any) -> Any:
            if self.env.unwrapped.time == 1 and not hasattr(self.env.unwrapped, "broke"):
                self.env.unwrapped.broke = True
                raise RuntimeError("broken once")
            return self.env.step(action)

    @functools.cache
    def broken(env_id: int) -> Any:
        return Breaks(cached_by_env(env_id))

    with ParallelEnv([lambda env_id: broken(env_id)] * 2, on_error="restart", **BACKENDS[name]) as env:
        env.reset()
        for _ in range(4):
            env.step([{"agent_0": 0}] * 2)
        assert env.stats().restarts == 2
        env.restart([0])
        env.reset(env_ids=[0])


def test_a_loaded_state_replaces_the_object():
    with ParallelEnv([Counter] * 2, backend="serial") as env:
        times(env)
        for _ in range(3):  # new objects may have the ids of old ones
            env.load_state(env.save_state())
        env.restart([1, 0])
        assert times(env) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("constructor", "name"),
    [*((wrapped, name) for name in BACKENDS), (wrapped_twice, "serial"), (wrapped_spread, "serial")],
)
def test_one_object_inside_of_wrappers_is_a_warning(constructor, name):
    texts = warned([constructor] * 4, **BACKENDS[name])
    assert texts
    for text in texts:  # for each of its layers
        assert text.startswith("environments [0, 1, 2, 3] wrap the same object of type ")
        assert "so a step of one of them also steps the others. Let each call of a constructor make a new one" in text
    assert not warned([constructor], backend="serial")


LOADED: dict[str, Any] = {}


def loaded_or_new(env_id: int) -> Any:
    return Counter() if env_id == 0 else LOADED.get("one") or Counter()


def keep(source: Any) -> None:
    LOADED["one"] = source


@pytest.mark.parametrize("num_envs", [2, 3])
@pytest.mark.parametrize("name", ["serial", "thread", "hybrid"])
def test_a_loaded_environment_is_compared_with_later_ones(name, num_envs):
    LOADED.clear()
    with ParallelEnv([loaded_or_new] * num_envs, **{**BACKENDS[name], "num_workers": 1}) as env:
        env.reset()
        env.load_state(env.save_state())
        env.call(keep, env_ids=[0])
        with pytest.raises(Exception, match=r"environment 1.*the same object as the constructor of environment 0"):
            env.restart([1])


def fails() -> Any:
    raise RuntimeError("no licence")


@pytest.mark.parametrize("refused", [object, dict, lambda: 3])
def test_a_refused_environment_is_no_neighbour(refused):
    """The error of a constructor suggests a process for each environment only if there is another environment."""
    with pytest.raises(EnvError, match="no licence") as caught:
        ParallelEnv([refused, fails], backend="serial")
    assert "envs_per_worker" not in str(caught.value)
    with pytest.raises(EnvError, match="no licence") as caught:
        ParallelEnv([Counter, fails], backend="serial")
    assert "envs_per_worker" in str(caught.value)


class Counted(Counter):
    """Counts those that live."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)
        self.padding = np.zeros(9)


class Holding(gymnasium.Env):
    observation_space, action_space = Counter.observation_space, Counter.action_space

    def __init__(self) -> None:
        self.env = Counted()

    def step(self, action: Any) -> Any:
        return self.env.step(action)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.env = None  # many simulators cannot have two engines at a time
        assert len(Counted.alive) < 2
        self.env = Counted()
        return self.env.reset()


class Replacing(gymnasium.Wrapper):
    def __init__(self) -> None:
        super().__init__(Counted())

    reset = Holding.reset


class ReplacingForwarded(gymnasium.Wrapper):
    def __init__(self) -> None:
        super().__init__(gymnasium.Wrapper(Counted()))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.env.env = None
        self.env.env = Counted()
        return self.env.reset()


@pytest.mark.parametrize("constructor", [Holding, Replacing, ReplacingForwarded])
@pytest.mark.parametrize("name", ["serial", "thread"])
def test_wrappers_may_drop_what_they_wrap(constructor, name):
    """Its memory is freed, without a garbage collection."""
    Counted.alive.clear()
    gc.disable()
    try:
        with ParallelEnv([constructor], **{**BACKENDS[name], "num_workers": 1}) as env:
            for _ in range(3):
                env.reset()
                assert len(Counted.alive) == 1
    finally:
        gc.enable()


# -- settings of the process -------------------------------------------------------------------------------------------


def sets(name: str, value: str) -> None:
    """Set something for the whole process."""
    if name == "the working directory":
        os.chdir(value)
    elif name == "the umask":
        os.umask(int(value, 8))
    elif name == "the locale":
        locale.setlocale(locale.LC_ALL, value)
    elif value:
        os.environ["MARL_PARALLEL_TEST"] = value
    else:
        del os.environ["MARL_PARALLEL_TEST"]


VARIABLE = "os.environ['MARL_PARALLEL_TEST']"


class Setting:
    """A constructor that sets something, to a value for each environment; an empty text sets nothing."""

    def __init__(self, name: str, *values: str) -> None:
        self.name, self.values = name, values

    def __call__(self, env_id: int) -> Any:
        value = self.values[env_id % len(self.values)]
        if value or self.name == "deletes":
            sets(self.name, value)
        return Counter()


@pytest.fixture
def process(monkeypatch, tmp_path):
    """A process whose settings come back after the test."""
    for folder in ("a", "b", "start"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "start")
    monkeypatch.delenv("MARL_PARALLEL_TEST", raising=False)
    umask, current = os.umask(0o22), locale.setlocale(locale.LC_ALL)
    yield tmp_path
    os.umask(umask)
    locale.setlocale(locale.LC_ALL, current)


# What each constructor sets, and the environments whose constructors have changed it for others.
CHANGES: dict[str, tuple[str, tuple[str, ...], list[int]]] = {
    "directories": ("the working directory", ("{}/a", "{}/b"), [1, 2]),
    "a directory of a later environment": ("the working directory", ("", "{}/b", ""), [1]),
    "umasks": ("the umask", ("77", "27"), [1, 2]),
    "locales": ("the locale", ("C", "C.UTF-8"), [1, 2]),
    "variables": (VARIABLE, ("0", "1", "2"), [1, 2]),
    "numbers that begin alike": (VARIABLE, ("1", "10", "10"), [1]),
    "a variable that is deleted": ("deletes", ("x", "", "x"), [1]),
    "lists of others": (VARIABLE, ("/a:/b".replace(":", os.pathsep), "/b", "/b"), [1]),
}
SILENT: dict[str, tuple[str, tuple[str, ...]]] = {
    "one directory": ("the working directory", ("{}/a",)),
    "one umask": ("the umask", ("77",)),
    "one locale": ("the locale", ("C",)),
    "one value": (VARIABLE, ("dummy",)),
    "the first one only": (VARIABLE, ("0", "", "")),
    "a later one only": (VARIABLE, ("", "", "0")),
    "a list that grows": (VARIABLE, tuple(os.pathsep.join(["/x"] * n + ["/y"]) for n in (1, 2, 3))),
    "flags that are added": (VARIABLE, ("--a", "--a --b", "--c --a --b")),
    "the first directory only": ("the working directory", ("{}/a", "", "")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_settings_of_the_process_that_constructors_override_are_a_warning(name, process):
    setting, values, env_ids = CHANGES[name]
    shown = VARIABLE if setting == "deletes" else setting
    constructor = Setting(setting, *(value.format(process) for value in values))
    (text,) = warned([constructor] * 3)
    assert f"the constructors of environments {env_ids} changed {shown}, which belongs to the whole process" in text
    assert text.endswith('Pass backend="process" and envs_per_worker=1 if each environment needs its own')


@pytest.mark.parametrize("name", SILENT)
def test_settings_of_the_process_that_stay_the_same_are_no_warning(name, process):
    setting, values = SILENT[name]
    assert not warned([Setting(setting, *(value.format(process) for value in values))] * 3)


def test_a_variable_of_the_caller_that_a_later_constructor_overrides_is_a_warning(process, monkeypatch):
    monkeypatch.setenv("MARL_PARALLEL_TEST", "0")
    (text,) = warned([Setting(VARIABLE, "0", "1")] * 2)
    assert f"environments [1] changed {VARIABLE}" in text


def test_what_a_constructor_sets_for_a_while_is_no_warning(process):
    def constructor(env_id: int) -> Any:
        before = os.getcwd()
        os.chdir(process / "ab"[env_id])
        os.chdir(before)
        return Counter()

    assert not warned([constructor] * 2)


def test_a_removed_directory_is_no_error(process):
    def constructor() -> Any:
        (process / "gone").mkdir(exist_ok=True)
        os.chdir(process / "gone")
        (process / "gone").rmdir()
        return Counter()

    assert not warned([constructor])
    assert process_settings()["the working directory"] is None


class SettingAll:
    """Sets the working directory and three more, to other values for each environment."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def __call__(self, env_id: int) -> Any:
        sets("the working directory", f"{self.folder}/{'ab'[env_id % 2]}")
        sets("the umask", ["77", "27"][env_id % 2])
        sets("the locale", ["C", "C.UTF-8"][env_id % 2])
        sets(VARIABLE, str(env_id))
        return Counter()


@pytest.mark.parametrize("name", ["process", "hybrid", "thread"])
def test_settings_are_compared_in_every_backend(name, process):
    keywords = BACKENDS[name] if name != "thread" else {"backend": "thread", "num_workers": 1}
    (text,) = warned([SettingAll(process)] * 4, **keywords)
    env_ids = [1, 2, 3] if name == "thread" else [1, 3]
    names = f"{VARIABLE} and the working directory and the umask and the locale"
    for one in names.split(" and "):
        assert one in text
    assert f"environments {env_ids} changed " in text
    way = "envs_per_worker=1" if name == "process" else 'backend="process" and envs_per_worker=1'
    assert f"Pass {way} if each" in text


def test_with_a_process_for_each_environment_each_keeps_its_settings(process):
    class Here(Counter):
        def here(self) -> Any:
            return os.path.basename(os.getcwd()), os.environ["MARL_PARALLEL_TEST"]

    def constructor(env_id: int) -> Any:
        SettingAll(process)(env_id)
        return Here()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with ParallelEnv([constructor] * 2, **OWN) as env:
            assert env.call("here") == (("a", "0"), ("b", "1"))


# -- a second environment that cannot live in the same process ---------------------------------------------------------


class Engine(Counter):
    """Only one may live in a process."""

    error: Any = RuntimeError("the engine is already initialised")
    living: Any = []  # noqa: RUF012

    def __init__(self) -> None:
        if self.living:
            raise self.error
        self.living.append(self)


BUSY = RuntimeError("already initialised"), PermissionError(13, "locked"), OSError("busy"), SystemExit("licence in use")


@pytest.mark.parametrize(
    ("backend", "way", "error"),
    [
        *(({"backend": "serial"}, 'backend="process" and envs_per_worker=1', error) for error in BUSY),
        ({"backend": "thread", "num_workers": 1}, 'backend="process" and envs_per_worker=1', BUSY[0]),
        ({"backend": "process", "num_workers": 1}, "envs_per_worker=1", BUSY[1]),
        ({"backend": "process", "num_workers": 1, "on_error": "restart"}, "envs_per_worker=1", BUSY[0]),
    ],
)
def test_the_error_of_a_second_engine_says_how_each_gets_a_process(backend, way, error):
    engine = type("Engine", (Engine,), {"error": error, "living": []})
    expected = (
        r"raised in constructor.*\n\nWhat to do: fix the simulator, or its arguments.*; or, if the simulator can exist "
    )
    with pytest.raises(EnvError, match=expected + rf"only once in a process, pass {way}\.") as caught:
        ParallelEnv([engine] * 2, **backend)
    assert caught.value.env_ids == (1,)


def test_the_error_of_a_first_engine_is_as_before():
    engine = type("Engine", (Engine,), {"living": [1]})
    with pytest.raises(EnvError, match=r"What to do: fix the simulator, or its arguments\.\n"):
        ParallelEnv([engine] * 2, backend="serial")


def test_each_engine_in_its_own_process_is_right():
    engine = type("Engine", (Engine,), {"living": []})
    with ParallelEnv([engine] * 2, **OWN) as env:
        np.testing.assert_array_equal(times(env), [2.0, 2.0])
