"""`EnvError` is an instance of the original exception's class, too, where that is safe."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import pickle
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    InvalidAction,
    NoAsyncCallError,
    ResetNeeded,
)

from marl_parallel import EnvError, ParallelEnv, ParallelEnvError, WorkerCrashed


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


class SettingError(ValueError):
    """Refuses to have any attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise PermissionError(name)


class FinalError(ValueError):
    def __init_subclass__(cls) -> None:
        raise TypeError("it can have no subclasses")


def test_except_finds_the_original_class():
    with ParallelEnv([functools.partial(Raising, ZeroDivisionError)] * 3, num_workers=2) as env:
        env.reset()
        env.step([{"agent_0": 0}] * 3)
        try:
            env.step([{"agent_0": 0}] * 3)
        except ZeroDivisionError as error:
            caught = error
    assert isinstance(caught, EnvError)
    assert (caught.env_ids, caught.worker, caught.method) == ((0,), 0, "step")
    assert type(caught.__cause__) is ZeroDivisionError
    assert str(caught).startswith("environment 0 (worker 0) raised in step, at line")
    assert repr(caught).startswith("EnvError('environment 0 (worker 0) raised in step")


ORDINARY = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, AttributeError | StopIteration | StopAsyncIteration | UnicodeError)
    and kind.__name__ != "ExceptionGroup"
]


@pytest.mark.parametrize("kind", ORDINARY, ids=lambda kind: kind.__name__)
def test_built_in_exceptions(kind):
    error = raised_here(functools.partial(kind, "hills"))
    assert isinstance(error, kind)
    assert "hills" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.env_ids, again.method) == (str(error), (0,), "step")


@pytest.mark.parametrize(
    ("make_error", "attributes"),
    [
        (functools.partial(FileNotFoundError, 2, "no such file", "map.xml"), {"errno": 2, "filename": "map.xml"}),
        (functools.partial(UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "no"), {"reason": "no", "object": b"\xff"}),
        (functools.partial(TerrainError, "hill", 3.5), {"place": "hill", "height": 3.5}),
        (functools.partial(MapError, tile=7), {"tile": 7}),
        (functools.partial(CodeError, 4), {"code": 4}),
        (functools.partial(InvalidAction, "no"), {}),
    ],
    ids=lambda part: getattr(part, "func", dict).__name__,
)
def test_attributes_of_the_original(make_error, attributes):
    error = raised_here(make_error)
    assert isinstance(error, make_error.func)
    assert {name: getattr(error, name) for name in attributes} == attributes
    assert error.env_ids == (0,)
    assert str(error).startswith("environment 0 (worker 0) raised in step")


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
@pytest.mark.parametrize(
    "make_error",
    [
        ZeroDivisionError,
        functools.partial(MapError, tile=7),
        functools.partial(SlottedError, 4),
        AttributeError,
        FinalError,
    ],
    ids=lambda part: getattr(part, "func", part).__name__,
)
def test_original_exception(make_error, backend):
    """It is the cause, too, and both are still there after `pickle`, where the class allows it."""
    error = raised_here(make_error, backend=backend)
    assert type(error.original) is getattr(make_error, "func", make_error)
    assert error.original is error.__cause__
    assert not isinstance(error.original, EnvError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), type(again.original)) == (str(error), type(error.original))
    assert (again.env_ids, again.worker, again.method) == ((0,), 0, "step")


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


@dataclasses.dataclass
class SourceError(ValueError):
    """Has attributes of the names that an `EnvError` has."""

    original: str = "upstream"
    method: str = "get"


class SlottedSourceError(ValueError):
    __slots__ = ("original",)

    def __init__(self) -> None:
        super().__init__()
        self.original = "upstream"


@pytest.mark.parametrize("kind", [SourceError, SlottedSourceError])
def test_attribute_of_the_same_name(kind):
    error = raised_here(kind)
    assert isinstance(error, kind)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert type(one.original) is kind
        assert one.original.original == "upstream"
        assert one.method == "step"


def test_slots_of_the_original():
    error = raised_here(functools.partial(SlottedError, 4))
    assert isinstance(error, SlottedError)
    assert error.code == 4


MISLEADING = [
    AttributeError, StopIteration, StopAsyncIteration, SystemExit, GeneratorExit, AlreadyPendingCallError,
    ClosedEnvironmentError, NoAsyncCallError, ResetNeeded, ParallelEnvError, WorkerCrashed,
]  # fmt: skip


@pytest.mark.parametrize("kind", MISLEADING, ids=lambda kind: kind.__name__)
def test_exceptions_that_would_mislead(kind):
    """They are only the cause; everything is closed as after any other error."""
    arguments = ("hills", "step") if kind in (AlreadyPendingCallError, NoAsyncCallError) else ("hills",)
    with ParallelEnv([functools.partial(Raising, functools.partial(kind, *arguments))], backend="serial") as env:
        env.reset()
        env.step([{"agent_0": 0}])
        with pytest.raises(EnvError) as caught:
            env.step([{"agent_0": 0}])
        assert type(caught.value) is EnvError
        assert type(caught.value.__cause__) is (type(None) if len(arguments) == 2 else kind)  # those do not unpickle
        with pytest.raises(ClosedEnvironmentError):
            env.reset()


@pytest.mark.parametrize(
    ("make_error", "cause"),
    [(SettingError, SettingError), (FinalError, FinalError), (functools.partial(FrozenError, 4), type(None))],
)
def test_classes_that_do_not_allow_it(make_error, cause):
    error = raised_here(make_error)
    assert type(error) is EnvError
    assert type(error.__cause__) is cause
    assert error.env_ids == (0,)


def test_error_of_a_step_in_flight():
    with ParallelEnv([functools.partial(Raising, TimeoutError)], num_workers=1) as env:
        env.reset()
        env.step([{"agent_0": 0}])
        env.send([{"agent_0": 0}])
        with pytest.raises(TimeoutError) as caught:
            env.recv(timeout=60.0)
        assert isinstance(caught.value, EnvError)
        with pytest.raises(ClosedEnvironmentError):
            env.recv()
