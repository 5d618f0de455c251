"""Calls, attributes and frames: what is asked, and what is refused without anything being closed."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any

import gymnasium
import pytest
from gymnasium.error import ResetNeeded
from helpers.comparison import assert_same
from helpers.setups import Setup
from simulators.deterministic import Hunt


class Counting(Hunt):
    looks = 0

    @property
    def looked_at(self) -> int:
        self.looks += 1
        return self.looks


def test_an_attribute_is_looked_at_once(each, build):
    env = build([Counting] * 2, each)
    assert_same(env.get_attr("looked_at"), (1, 1))


def test_arguments_for_what_is_no_method_close_nothing(each, build):
    env = build([Hunt] * 2, each)
    with pytest.raises(TypeError, match="environment 0: 'metadata' takes no arguments: it is not a method"):
        env.call("metadata", 3)
    env.reset()


class Unreadable:
    """Pickles, but nothing can be made again from that."""

    def __init__(self, module: str | None = None) -> None:
        self.module = module

    def __reduce__(self) -> Any:
        return (int, ("seven",)) if self.module is None else (importlib.import_module, (self.module,))


TELLINGS = {
    "call": lambda env, value: env.call("scale", 1.0, offset=value),
    "set_attr": lambda env, value: env.set_attr("gravity", value),
}


@pytest.mark.parametrize("tell", TELLINGS.values(), ids=TELLINGS)
def test_what_cannot_be_read_where_environments_are_closes_nothing(tell, each, build):
    env = build([Hunt] * 2, each)
    with pytest.raises(TypeError, match=r"environment 0: .* cannot be made again from that: ValueError: .*seven"):
        tell(env, Unreadable())
    env.reset()
    assert_same(env.get_attr("gravity"), (1.0, 1.0))


@pytest.mark.parametrize("tell", TELLINGS.values(), ids=TELLINGS)
def test_a_module_that_workers_cannot_have_closes_nothing(tell, build, monkeypatch):
    monkeypatch.setitem(sys.modules, "local_modules", types.ModuleType("local_modules"))
    env = build([Hunt] * 2, Setup("process", True, 2))
    with pytest.raises(ModuleNotFoundError, match="sent to environment 0 needs the module 'local_modules'") as caught:
        tell(env, Unreadable("local_modules"))
    assert caught.value.name == "local_modules"
    env.reset()
    assert_same(env.get_attr("gravity"), (1.0, 1.0))


def test_frames_want_a_reset(each, build):
    env = build([functools.partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array")] * 2, each)
    with pytest.raises(ResetNeeded, match=r"environments \[0, 1\] have never been reset; call reset\(\) before render"):
        env.render()
    env.reset()
    assert [frame.ndim for frame in env.render()] == [3, 3]
