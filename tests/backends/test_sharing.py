"""Objects of `multiprocessing` that environments share: proxies of managers, locks, queues, values, connections."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.leaks import HeldResources
from helpers.processes import wait_for
from helpers.setups import Setup
from simulators.counting import ACTIONS, Counting
from simulators.sharing import FORK, KEY, KINDS, SPAWN, Sharing, Shelf, numbers_in

from marl_parallel import EnvError, ParallelEnv, RecyclePolicy
from marl_parallel.core.messages import Message, Request
from marl_parallel.core.objects.pickling import dumps_shared
from marl_parallel.core.objects.sharing import CannotBeShared, Shared, dumps_request, loads_request

pytestmark = pytest.mark.release_independent

LOCAL, PROCESSES = ["serial", "thread"], ["process", "portable"]
BACKENDS = [*LOCAL, "hybrid", *PROCESSES]
SOME = [
    *("Manager Queue", "Manager nested", "custom manager", "Client", "spawn Lock", "forkserver Lock", "spawn Event"),
    *("spawn Barrier", "spawn Array", "spawn Value of a structure", "spawn Queue", "spawn SimpleQueue", "Pipe"),
    *("duplex Pipe", "socket"),
]
"""One for each way of sharing."""
AT_ANY_TIME = ["Manager Queue", "Manager nested", "Manager Namespace", "Manager Lock", "custom manager", "Client"]


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with Shelf() as shelf:
        yield shelf


def setup_of(backend: str, num_workers: int = 2) -> Setup:
    return Setup(backend, True, num_workers)


def sharing(shared: dict[str, Any], count: int = 4) -> list[Any]:
    return [functools.partial(Sharing, shared)] * count


def kill_worker(env: ParallelEnv, env_id: int) -> None:
    os.kill(env.call("pid")[env_id], signal.SIGKILL)


# -- in constructors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kind_is_shared(backend, build, shelf):
    """Also after a restart."""
    shared = shelf.all()
    env = build(sharing(shared), setup_of(backend), on_error="restart")
    assert numbers_in(shared, 4) == {name: [0, 1, 2, 3] for name in KINDS}
    env.restart([1, 3])
    expected = {name: [1, 3] if is_emptied(name) else [0, 1, 1, 2, 3, 3] for name in KINDS}
    assert {name: sorted(KINDS[name].take(value, 2)) for name, value in shared.items()} == expected


def is_emptied(name: str) -> bool:
    """Whether numbers that have been taken are gone."""
    return any(word in name for word in ("Queue", "Pipe", "socket"))


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_what_only_a_constructor_refers_to(backend, build, shelf):
    """It is there for every restart, although the program and the environments have let go of it."""
    numbers = shelf.manager.list()
    constructors = [functools.partial(forgetful, numbers, *shelf.all(["spawn Lock"])["spawn Lock"])] * 2
    kept = pickle.dumps(numbers)
    env = build(constructors, setup_of(backend), on_error="restart")
    del numbers, constructors
    gc.collect()
    env.restart([1])
    assert sorted(pickle.loads(kept)) == [0, 1, 1]


def forgetful(numbers: Any, lock: Any, array: Any, *, seed: int, env_id: int) -> Counting:
    """An environment that does not keep what its constructor uses."""
    with lock:
        array[0] += 1
        numbers.append(env_id)
    return Counting(4, seed=seed)


@pytest.mark.parametrize("backend", ["hybrid", *PROCESSES])
def test_killed_workers(backend, build, shelf):
    """Their replacements share the same objects, and so do the program and the other worker."""
    names = [name for name in SOME if name != "spawn Queue"]  # whose thread may still have to send what was put
    shared = shelf.all(names)
    env = build(sharing(shared), setup_of(backend), on_error="restart")
    env.reset()
    for _ in range(2):
        kill_worker(env, 3)
        env.step([ACTIONS] * 4)
    env.call("put", env_ids=[0, 1])
    assert env.stats().faults == 4  # of both environments of that worker
    assert numbers_in(shared, 10) == {name: [0, 0, 1, 1, 2, 2, 2, 3, 3, 3] for name in names}


@pytest.mark.parametrize("backend", PROCESSES)
def test_default_timeout_of_sockets(backend, build, shelf):
    """A program may set one, and so may a simulator; connections to workers have none."""
    shared = shelf.all(["spawn Queue"])

    def set_timeout(_: Any) -> None:
        socket.setdefaulttimeout(0.05)

    socket.setdefaulttimeout(0.05)
    try:
        env = build(sharing(shared), setup_of(backend), on_error="restart")
        env.call(set_timeout)
        env.reset()
        time.sleep(0.1)
        env.restart([0])
        env.reset()
        assert env.stats().faults == 0
    finally:
        socket.setdefaulttimeout(None)


@pytest.mark.parametrize("backend", PROCESSES)
def test_recycled_workers(backend, build, shelf):
    """Environments that have moved to another worker share the same objects."""
    shared = shelf.all(SOME)
    env = build(sharing(shared, 2), setup_of(backend, 1), recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    while env.stats().recycled < 2:
        env.step([ACTIONS] * 2)
    env.call("put")
    # Twice in constructors and once now; the next standby may have begun, too.
    assert all(len(numbers) >= 6 for numbers in numbers_in(shared, 6).values())


@pytest.mark.parametrize("backend", LOCAL)
@pytest.mark.parametrize("on_error", ["raise", "restart"])
def test_the_very_objects(backend, on_error, build, shelf):
    """Workers in this process get the objects themselves, also those of the fork context."""
    shared = {**shelf.all(), "fork": [FORK.Lock(), FORK.Queue(), FORK.Value("i")]}
    env = build([functools.partial(Holds, shared)] * 2, setup_of(backend), on_error=on_error)
    assert env.call("has", id(FORK)) == (False, False)
    for name, value in shared.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if type(one).__module__ not in ("builtins", "multiprocessing.process"):
                assert env.call("has", id(one)) == (True, True), name


class Holds(Counting):
    def __init__(self, shared: dict[str, Any], *, seed: int) -> None:
        super().__init__(4, seed=seed)
        self._ids = {id(one) for value in shared.values() for one in (value, *nested(value))}
        self._shared = shared

    def has(self, identity: int) -> bool:
        return identity in self._ids


def nested(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else ()


def test_definitions_of_a_script(build, shelf):
    """The proxies of a manager whose classes a script defines, also after a restart."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, names)
    manager = names["Scores"](authkey=KEY, ctx=FORK)
    manager.start()
    shelf.callback(manager.shutdown)
    score = manager.Score()
    env = build([functools.partial(scored, score, Sharing)] * 2, setup_of("process"), on_error="restart")
    env.restart([1])
    assert score.total() == 3


SCRIPT = """
from multiprocessing.managers import BaseManager, BaseProxy
class Score:
    number = 0
    def add(self):
        self.number += 1
    def total(self):
        return self.number
class ScoreProxy(BaseProxy):
    _exposed_ = ("add", "total")
    def add(self):
        self._callmethod("add")
    def total(self):
        return self._callmethod("total")
class Scores(BaseManager):
    pass
Scores.register("Score", Score, ScoreProxy)
"""


def scored(score: Any, make: Any, *, seed: int, env_id: int) -> Any:
    score.add()
    return make({}, seed=seed, env_id=env_id)


# -- what cannot be shared ---------------------------------------------------------------------------------------------

OF_FORK = {
    "Lock": FORK.Lock,
    "RLock": FORK.RLock,
    "Semaphore": FORK.Semaphore,
    "BoundedSemaphore": FORK.BoundedSemaphore,
    "Condition": FORK.Condition,
    "Event": FORK.Event,
    "Barrier": lambda: FORK.Barrier(2),
    "Queue": FORK.Queue,
    "JoinableQueue": FORK.JoinableQueue,
    "SimpleQueue": FORK.SimpleQueue,
    "Value": lambda: FORK.Value("i"),
    "Array": lambda: FORK.Array("i", 4),
}


@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, "process") for kind in OF_FORK), ("Queue", "hybrid"), ("Queue", "portable")]
)
def test_fork_context(kind, backend):
    """The error says what to use, and where the object is."""
    constructor = functools.partial(Sharing, {"of fork": OF_FORK[kind]()})
    with pytest.raises(TypeError) as raised:
        ParallelEnv([constructor], num_workers=1, **arguments(backend))
    text = str(raised.value)
    assert text.startswith("the constructor of environment 0 holds a ")
    for part in (
        "fork context",
        "multiprocessing.Manager()",
        'multiprocessing.get_context("spawn")',
        "docs/workers.md",
    ):
        assert part in text
    assert "The part that cannot be pickled is argument 0, entry 'of fork'" in text


def arguments(backend: str) -> dict[str, Any]:
    from helpers import start_methods

    return {"backend": backend, **start_methods.arguments(backend)}


def test_manager_that_is_gone(shelf):
    queue = shelf.manager.Queue()
    shelf.manager.shutdown()
    with pytest.raises(TypeError, match=r"have not reached the worker: \w+Error: .*A Manager must still run"):
        ParallelEnv(sharing({"Manager Queue": queue}, 1), num_workers=1, **arguments("process"))


@pytest.mark.parametrize("backend", PROCESSES)
def test_connection_that_is_closed_before_a_restart(backend, build, shelf):
    """The restart fails with the reason; the environment that is built already goes on."""
    shared = shelf.all(["Pipe"])
    env = build(sharing(shared, 2), setup_of(backend))
    for end in shared["Pipe"]:
        end.close()
    with pytest.raises(EnvError, match=r"have not reached the worker: OSError: handle is closed.*must be open"):
        env.restart([1])


OF_CONSTRUCTORS = ["spawn Lock", "spawn Queue", "Pipe", "socket", "spawn Value", "spawn Event"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_the_arguments_of_a_call(backend, build, shelf):
    """Not as a number of a descriptor, which belongs to something else in the worker."""
    env = build(sharing({}, 2), setup_of(backend))
    for kind, value in shelf.all(OF_CONSTRUCTORS).items():
        for call, *passed in ((env.call, "put_in", kind, value), (env.set_attr, "shared", {kind: value})):
            with pytest.raises(
                TypeError, match=r"only in the arguments of its constructor; .*Manager\(\).*docs/workers"
            ):
                call(*passed)


def test_as_the_result_of_a_call(build, shelf):
    env = build(sharing(shelf.all(OF_CONSTRUCTORS), 1), setup_of("process", 1))
    for kind in OF_CONSTRUCTORS:
        with pytest.raises(TypeError, match="only in the arguments of its constructor"):
            env.call(shared_of, kind)


def shared_of(env: Sharing, kind: str) -> Any:
    return env.shared[kind]


# -- at any time -------------------------------------------------------------------------------------------------------


class Takes(Counting):
    """Puts its number into what comes by options and attributes."""

    def __init__(self, *, seed: int, env_id: int) -> None:
        super().__init__(4, seed=seed)
        self.env_id, self.kept = env_id, dict[str, Any]()

    def put_in(self, name: str, value: Any) -> Any:
        KINDS[name].put(value, self.env_id)
        self.kept[name] = value
        return value

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        for name, value in (options or {}).items():
            KINDS[name].put(value, self.env_id)
        return super().reset(seed, options)

    def put_in_kept(self) -> None:
        for name, value in self.kept.items():
            KINDS[name].put(value, self.env_id)


@pytest.mark.parametrize("backend", BACKENDS)
def test_proxies_are_handed_over_at_any_time(backend, build, shelf):
    """By calls and their results, attributes, options of one reset and of all."""
    shared = shelf.all(AT_ANY_TIME)
    env = build([Takes] * 4, setup_of(backend))
    for name, value in shared.items():
        for env_id, result in enumerate(env.call("put_in", name, value)):
            KINDS[name].put(result, env_id)
    env.set_attr("kept", shared)
    env.call("put_in_kept")
    in_options = {name: value for name, value in shared.items() if not name.startswith("custom")}
    env.reset(options=in_options)
    env.set_reset_options(in_options)
    env.reset()
    expected = {name: sorted([0, 1, 2, 3] * (5 if name in in_options else 3)) for name in shared}
    assert {
        name: numbers_in({name: shared[name]}, len(numbers))[name] for name, numbers in expected.items()
    } == expected


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_options_of_a_manager_with_another_key(backend, build, shelf):
    """They are an error, since files have options, which must not have keys."""
    value = shelf.all(["custom manager"])
    env = build([Takes] * 2, setup_of(backend))
    for hand_over in (env.set_reset_options, lambda value: env.reset(options=value)):
        with pytest.raises(TypeError, match=r"has an authkey of its own .* hand it to the constructor"):
            hand_over(value)


# -- keys --------------------------------------------------------------------------------------------------------------


class Fails(Takes):
    def __init__(self, shared: dict[str, Any], *, seed: int, env_id: int) -> None:
        super().__init__(seed=seed, env_id=env_id)
        self.shared = shared

    def step(self, actions: dict) -> Any:
        raise ValueError("no step")


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_files_have_no_keys(backend, build, shelf, tmp_path):
    """Neither a replay file, which says why it cannot be replayed, nor a saved state."""
    shared = shelf.all(["custom manager", "Manager list"])
    env = build([functools.partial(Fails, shared)] * 2, setup_of(backend), replay=4, replay_dir=tmp_path)
    env.reset(options={"Manager list": shared["Manager list"]})
    with pytest.raises(TypeError, match=r"cannot be saved: a .* has an authkey of its own"):
        env.save_state()
    with pytest.raises(EnvError):
        env.step([ACTIONS] * 2)
    path, *_ = tmp_path.glob("*.replay")
    shared.pop("custom manager")
    env = build([functools.partial(Fails, shared)] * 2, setup_of(backend))
    env.reset(options=shared)
    for content in (path.read_bytes(), *env.save_state()):
        assert KEY not in content
        assert bytes(multiprocessing.current_process().authkey) not in content
    if backend != "process":
        return
    done = subprocess.run(
        [sys.executable, "-m", "marl_parallel", "replay", str(path)], capture_output=True, text=True, check=False
    )
    assert "a program that is not this one" in done.stderr


def test_pickled_for_other_machines(shelf):
    """With Ray, proxies travel with the keys of their managers; what is of this machine does not."""
    board = shelf.all(["custom manager"])["custom manager"]
    shared = Shared(functools.partial(dumps_shared, []))
    shared.reduce(board)
    shared.check(same_machine=False)
    in_actor = pickle.loads(pickle.dumps(shared))
    pickled, fds = dumps_request(Request(Message.ACCESS, (0,), in_actor))  # to the actor's worker
    assert fds == []
    (found,) = loads_request(pickled, fds).payload.objects()
    found.write(3)
    assert board.read() == [3]
    for value in (SPAWN.Lock(), SPAWN.Queue(), SPAWN.Value("i"), SPAWN.RawValue("i"), SPAWN.Pipe()[0]):
        shared = Shared(functools.partial(dumps_shared, []))
        shared.reduce(value)
        with pytest.raises(CannotBeShared, match='works on this machine only; with backend="ray"'):
            shared.check(same_machine=False)
        shared.check(same_machine=True)


# -- nothing is left ---------------------------------------------------------------------------------------------------

DESCRIPTORS = ["spawn Queue", "Pipe", "duplex Pipe", "socket", "spawn Array", "spawn SimpleQueue"]


@pytest.mark.whole_machine
@pytest.mark.parametrize("backend", PROCESSES)
def test_descriptors(backend, shelf):
    """Neither in workers, however often environments are restarted, nor here after workers were killed, and closed."""
    shared = shelf.all(DESCRIPTORS)
    ParallelEnv(sharing(shared), num_workers=2, **arguments(backend)).close()
    before = HeldResources.now()
    env = ParallelEnv(sharing(shared), num_workers=2, on_error="restart", **arguments(backend))
    env.reset()
    env.restart()
    here, there = len(HeldResources.now().descriptors), env.call(open_in_worker)
    for _ in range(3):
        env.restart()
    env.reset()
    assert len(HeldResources.now().descriptors) == here
    assert env.call(open_in_worker) == there
    for _ in range(2):
        kill_worker(env, 3)
        env.step([ACTIONS] * 4)
    wait_for(lambda: len(HeldResources.now().descriptors) <= here)
    env.close()
    del env
    now = HeldResources.now()
    assert (now.descriptors, now.threads, now.processes) == (before.descriptors, before.threads, before.processes)


def open_in_worker(_: Any) -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
