"""Constructors that cannot be pickled: `"serial"` and `"thread"` take them, for processes the error names the part."""

from __future__ import annotations

import functools
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.setups import Setup
from simulators.deterministic import Hunt

from marl_parallel import ParallelEnv

LOCAL = ("serial", "thread")
LOCK = threading.Lock()


class Holds:
    """Makes environments, and has something that cannot be pickled in an attribute."""

    def __init__(self, held: Any, **more: Any) -> None:
        self.held = held
        vars(self).update(more)

    def make(self) -> Hunt:
        assert self.held is not None
        return Hunt()

    __call__ = make


class Slotted:
    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = LOCK


class NoState:
    def __getstate__(self) -> Any:
        raise RuntimeError("the viewer has no state")


class NoReduce:
    def __reduce__(self) -> Any:
        raise pickle.PicklingError("not this one")


def in_script(text: str, **values: Any) -> Any:
    """The `make` that code of a script defines, whose functions and classes travel by value."""
    names = {"__name__": "__main__", "Hunt": Hunt, "functools": functools, **values}
    exec(text, names)
    return names["make"]


def closure(held: Any) -> Callable[[], Hunt]:
    return lambda: Holds(held).make()


USED = """
class Env(Hunt):
    def reset(self, *, seed=None, options=None):
        with lock:
            return super().reset(seed=seed, options=options)
def make():
    return Env()
"""
CACHED = """
@functools.cache
def ready():
    with lock:
        return True
def make():
    return ready() and Hunt()
"""
WAYS = {
    "closure": (lambda: closure(LOCK), "variable 'held' of <lambda> (lock)"),
    "default": (
        lambda: in_script("def make(held=lock): return Hunt()", lock=LOCK),
        "default argument 'held' of make (lock)",
    ),
    "argument": (lambda: functools.partial(lambda held: Hunt(), LOCK), "argument 0 (lock)"),
    "keyword": (lambda: functools.partial(lambda held: Hunt(), held=[LOCK]), "argument 'held', item 0 (lock)"),
    "method": (lambda: Holds(LOCK).make, "the object of its method make, attribute 'held' (lock)"),
    "instance": (lambda: Holds(threading.local()), "attribute 'held' (_local)"),
    "slot": (lambda: Holds(Slotted()), "attribute 'held', attribute 'lock' (lock)"),
    "nested": (lambda: Holds({"x": Holds((0, LOCK))}), "entry 'x', attribute 'held', item 1 (lock)"),
    "state": (lambda: Holds(NoState()), "attribute 'held' (NoState)"),
    "reduce": (lambda: Holds(NoReduce()), "attribute 'held' (NoReduce)"),
    "generator": (lambda: Holds(number for number in ()), "attribute 'held' (generator)"),
    "global": (
        lambda: in_script("def make(): return config.held and Hunt()", config=Holds(LOCK)),
        "global 'config' of make, attribute 'held' (lock)",
    ),
    "class": (
        lambda: in_script(USED, lock=LOCK),
        "global 'Env' of make, attribute 'reset' of class Env, global 'lock' of reset (lock)",
    ),
    "cached": (
        lambda: in_script(CACHED, lock=LOCK),
        "global 'ready' of make, its function, global 'lock' of ready (lock)",
    ),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    make, part = WAYS[request.param]
    return make(), part


@pytest.mark.parametrize("backend", LOCAL)
def test_workers_in_this_process_take_them(way, backend, build):
    constructor, _ = way
    env = build([constructor] * 3, Setup(backend, True, 2))
    env.reset()
    with ParallelEnv([Hunt] * 3, backend="serial") as plain:
        plain.reset()
        actions = plain.sample_actions()
        assert env.step(actions)[1:] == plain.step(actions)[1:]


def test_the_error_for_processes_names_the_part(way):
    constructor, part = way
    with pytest.raises(TypeError) as caught:
        ParallelEnv([Hunt, constructor], num_workers=1)
    text = str(caught.value)
    assert text.startswith("the constructor of environment 1 cannot be pickled")
    assert part in text
    assert "inside the constructor, or move the class or function that uses it into a module" in text
    assert 'backend="serial"' in text


@pytest.mark.parametrize("backend", LOCAL)
def test_objects_of_each_environment_stay_its_own(backend, build):
    """A constructor that can be pickled gets its own objects; one that cannot is shared, as in a plain loop."""
    for held, ports, left in ((None, [1, 1, 1], 0), (LOCK, [1, 2, 3], 3)):
        args = types.SimpleNamespace(port=0, held=held)
        build([functools.partial(counting_up, args)] * 3, Setup(backend, True, 1)).reset()
        assert ports == PORTS
        assert args.port == left
        PORTS.clear()


PORTS: list[int] = []


def counting_up(args: Any) -> Hunt:
    args.port += 1
    PORTS.append(args.port)
    return Hunt()


class Recursive:
    """Delegates to what it wraps, so it looks for `env` in itself while it is unpickled."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def __setstate__(self, state: Any) -> None:
        assert self.unknown, "no such attribute"


@pytest.mark.parametrize("backend", [*LOCAL, "process"])
def test_constructor_that_cannot_be_unpickled(backend, build):
    """It has not been called, so the error does not say that it raised."""
    wrapped = Recursive(Hunt())
    if backend in LOCAL:
        build([lambda: wrapped], Setup(backend, True, 1)).reset()
        return
    words = r"environment 0: the constructor can be pickled but not unpickled: .*RecursionError"
    with pytest.raises(TypeError, match=words) as caught:
        ParallelEnv([lambda: wrapped] * 2, num_workers=2)
    assert "raised in" not in str(caught.value)
    assert "inside the constructor" in str(caught.value)


@pytest.mark.parametrize("backend", LOCAL)
def test_restart_of_what_cannot_be_pickled(backend):
    lock, made = threading.Lock(), []

    def make(env_id: int) -> Hunt:
        with lock:
            made.append(env_id)
        return Hunt()

    with ParallelEnv([make] * 2, backend=backend, num_workers=1, on_error="restart") as env:
        env.reset()
        env.restart([1])
        env.reset()
    assert made == [0, 1, 1]


def test_replays_need_pickles():
    """Their files have the constructor."""
    with pytest.raises(TypeError, match=r"cannot be pickled.*variable 'held' of <lambda> \(lock\)"):
        ParallelEnv([closure(LOCK)], backend="serial", replay=5)
