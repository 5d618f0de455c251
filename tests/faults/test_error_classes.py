"""The simulator's exception is the `original` and the cause of an `EnvError`, also after `pickle`."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded

from marl_parallel import EnvError, ParallelEnv, WorkerCrashed

pytestmark = pytest.mark.release_independent


class Raising(gymnasium.Env):
    """Raises an exception in its second step."""

    observation_space = action_space = spaces.Discrete(3)

    def __init__(self, make_error: Any) -> None:
        self.make_error, self.time = make_error, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        self.time += 1
        if self.time == 2:
            raise self.make_error()
        return 0, 0.0, False, False, {}


def raised_here(make_error: Any, **how: Any) -> EnvError:
    """The error of a `ParallelEnv` of one environment that raises this."""
    with ParallelEnv([functools.partial(Raising, make_error)], **{"backend": "serial", **how}) as env:
        env.reset()
        env.step([{"agent_0": 0}])
        try:
            env.step([{"agent_0": 0}])
        except EnvError as error:
            return error
    raise AssertionError("it did not raise")


class TerrainError(Exception):
    def __init__(self, place: str, height: float) -> None:
        super().__init__(place, height)
        self.place, self.height = place, height

    def __str__(self) -> str:
        return f"{self.place} is {self.height} m too high"


class MapError(RuntimeError):
    """Its constructor, which would not accept a text, is not called."""

    def __init__(self, *, tile: int) -> None:
        super().__init__()
        self.tile = tile

    def __reduce__(self) -> Any:
        return functools.partial(MapError, tile=self.tile), ()

    def __str__(self) -> str:
        raise NotImplementedError


@dataclasses.dataclass
class CodeError(Exception):
    """Has no hash."""

    code: int


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Pickles, but cannot be unpickled."""

    code: int


class SlottedError(ValueError):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclasses.dataclass
class SourceError(ValueError):
    """Has attributes of the names that an `EnvError` has."""

    original: str = "upstream"
    method: str = "get"


TERRAIN = (functools.partial(TerrainError, "hill", 3.5), {"place": "hill", "height": 3.5})


@pytest.mark.parametrize(
    ("make_error", "attributes", "backend"),
    [
        (ZeroDivisionError, {}, "serial"),
        (AttributeError, {}, "serial"),
        (SystemExit, {}, "serial"),
        (functools.partial(FileNotFoundError, 2, "no such file", "map.xml"), {"filename": "map.xml"}, "serial"),
        (functools.partial(UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "no"), {"object": b"\xff"}, "serial"),
        (functools.partial(MapError, tile=7), {"tile": 7}, "serial"),
        (functools.partial(CodeError, 4), {"code": 4}, "serial"),
        (functools.partial(SlottedError, 4), {"code": 4}, "serial"),
        (SourceError, {"original": "upstream", "method": "get"}, "serial"),
        (*TERRAIN, "serial"),
        (*TERRAIN, "thread"),
        (*TERRAIN, "process"),
    ],
    ids=lambda part: part if isinstance(part, str) else getattr(getattr(part, "func", part), "__name__", "attributes"),
)
def test_original_exception(make_error, attributes, backend):
    error = raised_here(make_error, backend=backend)
    assert type(error) is EnvError
    assert error.original is error.__cause__
    assert str(error).startswith("environment 0 (worker 0) raised in step, at line")
    assert repr(error).startswith("EnvError('environment 0 (worker 0) raised in step")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (EnvError, str(error))
    for one in (error, again):
        assert (one.env_ids, one.worker, one.method) == ((0,), 0, "step")
        assert type(one.original) is getattr(make_error, "func", make_error)
        assert {name: getattr(one.original, name) for name in attributes} == attributes


def test_original_exceptions_that_do_not_pickle():
    class LocalError(AttributeError):
        """Pickled by value, which `pickle` does not do."""

    error = raised_here(LocalError)
    assert isinstance(error.original, AttributeError)
    assert type(error.original).__name__ == "LocalError"
    again = pickle.loads(pickle.dumps(error))
    assert (again.original, str(again), again.env_ids) == (None, str(error), (0,))
    error = raised_here(functools.partial(FrozenError, 4))
    assert error.original is error.__cause__ is None
    with ParallelEnv([functools.partial(Raising, ZeroDivisionError)], backend="serial") as env:
        env.reset()
        env.call_async(len, 3)
        with pytest.raises(EnvError) as caught:  # also of a method
            env.call_wait()
        assert type(caught.value.original) is TypeError


@pytest.mark.parametrize(
    "kind",
    [StopIteration, GeneratorExit, AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded, WorkerCrashed],
    ids=lambda kind: kind.__name__,
)
def test_exceptions_with_a_meaning_of_their_own(kind):
    """They are errors of a simulator like any others: everything is closed after them."""
    arguments = ("hills", "step") if kind is AlreadyPendingCallError else ("hills",)
    with ParallelEnv([functools.partial(Raising, functools.partial(kind, *arguments))], backend="serial") as env:
        env.reset()
        env.step([{"agent_0": 0}])
        with pytest.raises(EnvError) as caught:
            env.step([{"agent_0": 0}])
        assert type(caught.value) is EnvError
        assert type(caught.value.__cause__) is (type(None) if len(arguments) == 2 else kind)  # it does not unpickle
        with pytest.raises(ClosedEnvironmentError):
            env.reset()


def test_error_of_a_step_in_flight():
    with ParallelEnv([functools.partial(Raising, TimeoutError)], num_workers=1) as env:
        env.reset()
        env.step([{"agent_0": 0}])
        env.send([{"agent_0": 0}])
        with pytest.raises(EnvError) as caught:  # no `TimeoutError`, after which `recv` can be called again
            env.recv(timeout=60.0)
        assert type(caught.value.original) is TimeoutError
        assert not isinstance(caught.value, TimeoutError)
        with pytest.raises(ClosedEnvironmentError):
            env.recv()
