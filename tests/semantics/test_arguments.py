"""Arguments that are refused before anything starts, and cleanup after a failed start or a failed transfer."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref

import gymnasium
import numpy as np
import psutil
import pytest
from mpe2 import simple_spread_v3
from simulators.deterministic import Skirmish

from marl_parallel import EnvError, ParallelEnv, make
from marl_parallel.adapters import adapt
from marl_parallel.backends.local import SerialBackend, ThreadBackend
from marl_parallel.vector import DummyVecEnv, ShareDummyVecEnv, ShareSubprocVecEnv, SubprocVecEnv, pymarl_connections

pytestmark = pytest.mark.release_independent


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"num_workers": "2"}, TypeError, "num_workers must be an integer"),
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1"),
        ({"envs_per_worker": "2"}, TypeError, "envs_per_worker must be an integer"),
        ({"envs_per_worker": 0}, ValueError, "envs_per_worker must be at least 1"),
        (
            {"num_workers": 2, "envs_per_worker": 2},
            ValueError,
            "num_workers=2 and envs_per_worker=2 do not agree: 2 environments with at most 2 in each worker take 1",
        ),
        ({"worker_threads": "two"}, TypeError, "worker_threads must be an integer"),
        ({"worker_threads": 0}, ValueError, "worker_threads must be at least 1"),
        ({"start_timeout": -1}, ValueError, "start_timeout must be positive"),
        ({"start_timeout": "soon"}, TypeError, "start_timeout must be a number of seconds"),
        ({"adapter": "nope"}, ValueError, "No adapter is named 'nope'"),
        ({"adapter": 3}, TypeError, "adapter"),
        ({"backend": "nope"}, ValueError, "backend must be one of .*, got 'nope'"),
        ({"backend": 3}, TypeError, "backend must be one of"),
        ({"context": "spawn"}, TypeError, "unexpected keyword argument 'context'"),
        ({"auto_reset": "sometimes"}, ValueError, "auto_reset must be"),
        ({"seed": -1}, ValueError, "seed must not be negative"),
        ({"seed": "x"}, TypeError, "seed must be an integer"),
    ],
)
def test_refused_before_anything_starts(arguments, error, says):
    children = psutil.Process().children(recursive=True)
    with pytest.raises(error, match=says):
        ParallelEnv([Skirmish] * 2, **arguments)
    assert psutil.Process().children(recursive=True) == children


@pytest.mark.parametrize(
    "arguments",
    [
        {"seed": "x"},
        {"backend": "auto", "num_workers": 2},
        {"wait": "never"},
        {"replay": 3, "seed": "own"},
        {"backend": "nope"},
        {"backend": 3},
    ],
    ids=str,
)
def test_wrong_arguments_change_nothing(arguments, tmp_path):
    """No folder is made; `make` does not even import the environment."""
    folders = {"log_dir": tmp_path / "logs"} | ({"replay_dir": tmp_path / "replays"} if "replay" in arguments else {})
    for opened in (lambda **all_of: ParallelEnv([Skirmish], **all_of), lambda **all_of: make("no.such", **all_of)):
        with pytest.raises((TypeError, ValueError), match="|".join(arguments)):
            opened(**arguments, **folders)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.filterwarnings("ignore:.*workers share:ResourceWarning")
@pytest.mark.parametrize(
    ("num_envs", "arguments", "sizes"),
    [
        (5, {"envs_per_worker": 1}, [1] * 5),
        (5, {"envs_per_worker": 2}, [2, 2, 1]),
        (5, {"envs_per_worker": 4}, [3, 2]),
        (2, {"envs_per_worker": 9}, [2]),
        (5, {"envs_per_worker": np.int64(2), "num_workers": 3}, [2, 2, 1]),
        (2, {"envs_per_worker": 1, "num_workers": 7}, [1, 1]),
    ],
)
def test_envs_per_worker(num_envs, arguments, sizes):
    """The number of CPUs does not matter."""
    with ParallelEnv([Skirmish] * num_envs, backend="thread", **arguments) as env:
        assert env.num_workers == len(sizes)
        assert [len(share) for share in env.stepper.source.shares] == sizes
        assert len(env.reset()[0]) == num_envs


class SingleSimulation(Skirmish):
    """Allows one simulation per process."""

    running = False

    def __init__(self) -> None:
        super().__init__()
        if SingleSimulation.running:
            raise RuntimeError("a simulation is already running in this process")
        SingleSimulation.running = True


@pytest.mark.filterwarnings("ignore:.*workers share:ResourceWarning")
def test_one_simulation_per_process():
    with pytest.raises(EnvError, match="already running"):
        ParallelEnv([SingleSimulation] * 3, num_workers=1)
    with make(f"{__name__}:SingleSimulation", 3, envs_per_worker=1) as env:
        env.reset()
        assert env.num_workers == 3


def test_serial_timeout_warns_once(recwarn):
    """Only for a limit that the caller set, not for the default."""
    ParallelEnv([Skirmish] * 2, backend="serial", start_timeout=5.0).close()
    (warning,) = recwarn
    assert warning.category is RuntimeWarning
    assert "start_timeout=5.0 cannot be enforced by backend='serial'" in str(warning.message)
    assert warning.filename == __file__
    for arguments in ({"backend": "serial"}, {"backend": "serial", "start_timeout": None}, {"start_timeout": 5.0}):
        ParallelEnv([Skirmish], **arguments).close()
    assert len(recwarn) == 1


@pytest.mark.parametrize("seconds", [60.0, 60, np.float32(60), 59.0])
@pytest.mark.parametrize(
    "opened",
    [
        lambda **arguments: ParallelEnv([Skirmish], backend="serial", **arguments),
        lambda **arguments: ParallelEnv([Skirmish], backend=SerialBackend(), **arguments),
        lambda **arguments: make(Skirmish, backend="serial", facade="stacked", **arguments),
        lambda **arguments: DummyVecEnv([simple_spread_v3.parallel_env], **arguments),
    ],
    ids=["name", "object", "make", "drop-in"],
)
def test_a_limit_that_equals_the_default_is_a_given_one(opened, seconds, recwarn):
    """So the warning does not depend on the number; the default is silent, also where a function passes it on."""
    opened().close()
    opened(start_timeout=inspect.signature(ParallelEnv).parameters["start_timeout"].default).close()
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]
    opened(start_timeout=seconds).close()
    (warning,) = [warning for warning in recwarn if warning.category is RuntimeWarning]
    assert f"start_timeout={seconds} cannot be enforced by backend=" in str(warning.message)


@pytest.mark.parametrize(
    "opened",
    [
        lambda env: ShareSubprocVecEnv([env], backend="serial", auto_reset="NEXT_STEP"),
        lambda env: ShareDummyVecEnv([env], auto_reset="NEXT_STEP"),
        lambda env: SubprocVecEnv([env], backend="serial", auto_reset="NEXT_STEP"),
        lambda env: DummyVecEnv([env], auto_reset="NEXT_STEP"),
        lambda env: pymarl_connections([env], backend="serial", adapter=adapt),
        lambda env: make(env, facade="share", backend="serial", auto_reset="NEXT_STEP"),
    ],
    ids=["ShareSubprocVecEnv", "ShareDummyVecEnv", "SubprocVecEnv", "DummyVecEnv", "pymarl_connections", "make"],
)
def test_simulators_are_closed_if_their_facade_raises(opened):
    closed = []

    class Noted(Skirmish):
        def close(self) -> None:
            closed.append(self)

    with pytest.raises(ValueError, match="needs") as raised:
        opened(Noted)
    assert len(closed) == 1
    assert raised.tb is not None  # it refers to the environment, which is not closed by being freed


def test_unpicklable_adapter():
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"adapter=.* cannot be pickled.*variable 'lock' of <lambda> \(lock\)"):
        ParallelEnv([Skirmish], adapter=lambda env: (lock, env))
    for backend in ("serial", "thread"):  # which need no pickle
        with ParallelEnv([Skirmish] * 2, backend=backend, adapter=lambda env: lock and adapt(env)) as env:
            assert len(env.reset()[0]) == 2


@pytest.mark.parametrize("constructors", [None, 5, Skirmish, "Skirmish", {0: Skirmish}])
def test_constructors_must_be_a_sequence(constructors):
    with pytest.raises(TypeError, match="env_constructors must be a sequence of callables"):
        ParallelEnv(constructors)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (lambda: Skirmish(), "which is an environment: pass its class"),
        (
            lambda: simple_spread_v3,
            "pass .*parallel_env",
        ),
        (lambda: "mpe2.simple_spread_v3", r"make\('mpe2.simple_spread_v3', num_envs=...\) takes names"),
    ],
    ids=["environment", "module", "name"],
)
def test_constructors_must_be_callable(argument, says):
    with pytest.raises(TypeError, match=rf"env_constructors\[1\] must be a callable .*[;,] ({says})"):
        ParallelEnv([Skirmish, argument()])


@pytest.fixture
def two():
    with ParallelEnv([Skirmish] * 2, backend="serial") as env:
        yield env


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda env: env.reset(env_ids=[True, False]),
            TypeError,
            "must be integers, got a boolean mask",
        ),
        (lambda env: env.reset(env_ids=np.array([True, False])), TypeError, "got a boolean mask"),
        (
            lambda env: env.reset(env_ids=[]),
            ValueError,
            "pass at least one environment id, or None for all; there are environments 0 to 1",
        ),
        (lambda env: env.reset(options=[{}]), ValueError, "expected options for each of 2 environments, got 1"),
        (lambda env: env.reset(options="x"), TypeError, "options must be a dict or None, got 'x'"),
        (lambda env: (env.reset_async(), env.recv(min_envs=-1)), ValueError, "min_envs must not be negative, got -1"),
        (
            lambda env: (env.reset_async(), env.recv(min_envs="all")),
            TypeError,
            "min_envs must be an integer or None, got 'all'",
        ),
        (lambda env: env.call(3), TypeError, "name must be the name of a method or attribute, or a function; got 3"),
        (lambda env: env.close(timeout=-1), ValueError, "timeout must be positive"),
        (lambda env: env.close(timeout="soon"), TypeError, "timeout must be a number of seconds"),
        (pickle.dumps, TypeError, "cannot be pickled or copied"),
        (copy.deepcopy, TypeError, "cannot be pickled or copied"),
    ],
)
def test_refused_call_has_no_effect(call, error, says, two):
    with pytest.raises(error, match=says):
        call(two)
    if two.pending:
        two.recv()
    assert len(two.reset(seed=np.array(3))[0]) == 2  # a number like any other


@pytest.mark.parametrize("backend", [SerialBackend, ThreadBackend])
def test_backend_serves_one_environment(backend):
    shared = backend()
    with ParallelEnv([Skirmish], backend=shared) as env:
        with pytest.raises(ValueError, match="a backend serves one ParallelEnv"):
            ParallelEnv([Skirmish], backend=shared)
        env.reset()


def test_failed_start_raises_the_first_error(monkeypatch):
    """The error of the start is raised, not an error of the cleanup."""
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(FileNotFoundError, match="/no/such/python"):
        ParallelEnv([Skirmish] * 2)


class UnpicklesInWorkerOnly:
    """Pickles, but can be unpickled only in the worker's process."""

    def __reduce__(self):
        return (_only_elsewhere, (threading.get_ident(),))


def _only_elsewhere(made_in):
    if threading.get_ident() != made_in:
        raise RuntimeError("cannot be made here")
    return UnpicklesInWorkerOnly()


class UnreadableInfos(gymnasium.Env):
    """Its infos cannot be unpickled by the caller."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)
    secret = UnpicklesInWorkerOnly()

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {"secret": UnpicklesInWorkerOnly()}


def test_unreadable_infos():
    with ParallelEnv([UnreadableInfos] * 2, backend="thread", num_workers=1) as env:
        env.reset()
        with pytest.raises(EnvError, match="cannot be unpickled") as caught:
            env.step([{"agent_0": 0}] * 2)
        assert caught.value.env_ids == (0,)
        with pytest.raises(gymnasium.error.ClosedEnvironmentError):
            env.reset()


def test_unreadable_call_result_closes_nothing():
    with ParallelEnv([UnreadableInfos] * 2, backend="thread", num_workers=1) as env:
        for ask in (lambda: env.get_attr("secret"), lambda: env.call("secret", env_ids=[0])):
            with pytest.raises(
                TypeError, match="environment 0: the result was pickled in the worker but cannot be unpickled here"
            ):
                ask()
        assert len(env.reset()[0]) == 2


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_memory_is_freed_with_the_object(backend):
    """No reference cycle keeps the block alive until the next garbage collection."""
    gc.collect()
    gc.disable()
    try:
        env = ParallelEnv([Skirmish] * 2, backend=backend)
        env.reset()
        env.close()
        batch = weakref.ref(env.stepper.transitions.layout)
        del env
        assert batch() is None
    finally:
        gc.enable()
