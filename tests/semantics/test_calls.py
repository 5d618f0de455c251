"""`call`, `get_attr`, `set_attr` and `render`: what they return, and errors that close nothing."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from helpers.comparison import assert_same
from helpers.setups import Setup
from simulators.deterministic import Hunt

from marl_parallel import EnvError

pytestmark = pytest.mark.in_turn


class Counting(Hunt):
    looks = 0

    @property
    def looked_at(self) -> int:
        self.looks += 1
        return self.looks


def test_calls_in_flight_have_the_results_of_calls(backend_setup, build, tmp_path):
    env = build([Hunt] * 3, backend_setup)
    env.reset(seed=4)
    expected = env.call("scale", 3.0, offset=1.0)
    env.call_async("scale", 3.0, offset=1.0)
    actions = [dict.fromkeys(acting, 0) for acting in env.acting]
    refused: dict[str, Callable[[], Any]] = {
        "call": lambda: env.call("scale", 3.0),
        "call_async": lambda: env.call_async("gravity"),
        "get_attr": lambda: env.get_attr("gravity"),
        "set_attr": lambda: env.set_attr("gravity", 2.0),
        "reset": env.reset,
        "reset_async": env.reset_async,
        "step": lambda: env.step(actions),
        "send": lambda: env.send(actions),
        "recv": lambda: env.recv(min_envs=0, timeout=0.0),
        "sample_actions": env.sample_actions,
        "restart": env.restart,
        "render": env.render,
        "state": env.state,
        "timers": env.timers,
        "start_trace": lambda: env.start_trace(tmp_path / "trace.json"),
        "stop_trace": env.stop_trace,
    }
    for name, method in refused.items():
        with pytest.raises(AlreadyPendingCallError, match=r"while a call_async\(\) is in flight: call call_wait"):
            method()
        assert env.pending == (), name
    assert env.seed() == (4, 5, 6)
    assert env.stats().resets == 3
    assert_same(env.call_wait(), expected)
    env.call_async("gravity", env_ids=[2, 0])
    assert_same(env.call_wait(timeout=60.0), (1.0, 1.0))
    with pytest.raises(NoAsyncCallError, match=r"call_wait\(\) was called without a call_async\(\) before it"):
        env.call_wait()
    env.call_async("wings")
    with pytest.raises(AttributeError, match=r"environment 0: .*wings"):
        env.call_wait()
    env.call_async("gravity")
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.call_wait()


def raise_zero_division(env: Any) -> None:
    raise ZeroDivisionError("of the caller's function")


def test_other_arguments_in_each_environment(backend_setup, build):
    env = build([Hunt] * 3, backend_setup)
    env.reset(seed=4)
    env.set_attr("total", [1.0, 2.0, 3.0])
    factors, expected = [(2.0,), {"factor": 3.0, "offset": 1.0}, [4.0]], (2.0, 7.0, 12.0)
    assert_same(env.call_each("scale", factors), expected)
    assert_same(env.call_each("scale", factors[1:], env_ids=[2, 0]), (10.0, 4.0))
    assert env.call_each("scale", factors, wait=False) is None
    with pytest.raises(AlreadyPendingCallError):
        env.call_each("scale", factors)
    assert_same(env.call_wait(), expected)
    assert env.call_each(lambda simulator, number: number, [(0,), (1,), (2,)]) == (0, 1, 2)
    with pytest.raises(ValueError, match="a tuple or dict of arguments for each of 3 environments, got 2"):
        env.call_each("scale", factors[:2])
    with pytest.raises(TypeError, match=r"environment 1: expected a tuple or list of arguments, or a dict .* got 3.0"):
        env.call_each("scale", [(2.0,), 3.0, (4.0,)])
    assert_same(env.call_each("scale", factors), expected)  # nothing has been closed


@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_errors_of_calls_in_flight(on_error, backend_setup, build):
    env = build([Hunt] * 2, backend_setup, on_error=on_error)
    env.reset()
    env.call_async(raise_zero_division)
    with pytest.raises(EnvError, match=r"raised in call.*of the caller's function"):
        env.call_wait()
    if on_error == "raise":
        with pytest.raises(ClosedEnvironmentError):
            env.reset()
    else:
        env.reset()
        assert env.stats().restarts == 2


def test_attribute_is_read_once(backend_setup, build):
    env = build([Counting] * 2, backend_setup)
    assert_same(env.get_attr("looked_at"), (1, 1))


def test_arguments_for_an_attribute_close_nothing(backend_setup, build):
    env = build([Hunt] * 2, backend_setup)
    with pytest.raises(TypeError, match="environment 0: 'metadata' takes no arguments: it is not a method"):
        env.call("metadata", 3)
    env.reset()


class Unreadable:
    """Pickles, but cannot be unpickled."""

    def __init__(self, module: str | None = None) -> None:
        self.module = module

    def __reduce__(self) -> Any:
        return (int, ("seven",)) if self.module is None else (importlib.import_module, (self.module,))


TELLINGS = {
    "call": lambda env, value: env.call("scale", 1.0, offset=value),
    "set_attr": lambda env, value: env.set_attr("gravity", value),
}


@pytest.mark.parametrize("tell", TELLINGS.values(), ids=TELLINGS)
def test_arguments_that_workers_cannot_unpickle_close_nothing(tell, backend_setup, build):
    env = build([Hunt] * 2, backend_setup)
    with pytest.raises(TypeError, match=r"environment 0: .* can be pickled but not unpickled: ValueError: .*seven"):
        tell(env, Unreadable())
    env.reset()
    assert_same(env.get_attr("gravity"), (1.0, 1.0))


@pytest.mark.parametrize("tell", TELLINGS.values(), ids=TELLINGS)
def test_module_that_workers_cannot_import_closes_nothing(tell, build, monkeypatch):
    monkeypatch.setitem(sys.modules, "local_modules", types.ModuleType("local_modules"))
    env = build([Hunt] * 2, Setup("process", True, 2))
    with pytest.raises(ModuleNotFoundError, match="sent to environment 0 needs the module 'local_modules'") as caught:
        tell(env, Unreadable("local_modules"))
    assert caught.value.name == "local_modules"
    env.reset()
    assert_same(env.get_attr("gravity"), (1.0, 1.0))


def test_render_before_reset(backend_setup, build):
    env = build([functools.partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array")] * 2, backend_setup)
    with pytest.raises(ResetNeeded, match=r"environments \[0, 1\] have never been reset; call reset\(\) before render"):
        env.render()
    env.reset()
    assert [frame.ndim for frame in env.render()] == [3, 3]


@pytest.mark.parametrize("name", ["reset", "step", "close"])
def test_methods_that_would_change_episodes(name, backend_setup, build):
    """As in Gymnasium, an error names the method to use; nothing is called, and the batch goes on."""
    env = build([Hunt] * 2, backend_setup)
    plain = build([Hunt] * 2, backend_setup)
    for one in (env, plain):
        one.reset(seed=4)
    refused: list[Callable[[], Any]] = [
        lambda: env.call(name),
        lambda: env.call(name, env_ids=[1]),
        lambda: env.call_async(name),
        lambda: env.get_attr(name),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=rf"call\('{name}'\) would change .*: use env\.{name}\("):
            call()
    actions = env.sample_actions()
    assert_same(env.step(actions), plain.step(actions))
