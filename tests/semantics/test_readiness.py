"""When `recv` returns results: as soon as they are ready, in order, however much is in flight.

What the results contain is tested in `test_async_stepping`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
from gymnasium.error import NoAsyncCallError
from helpers.async_comparison import some_of
from helpers.processes import wait_for
from simulators.paced import acts, fleet, hold, note, release, seen, trace

from marl_parallel import ParallelEnv, ParallelEnvError, StepBatch
from marl_parallel.backends.local import SerialBackend
from marl_parallel.core.messages import Lost, Reply

pytestmark = [pytest.mark.release_independent, pytest.mark.in_turn]

PACKINGS = pytest.mark.parametrize("num_workers", [1, 2, 4])


def started(env: ParallelEnv) -> ParallelEnv:
    env.reset()
    return env


def start(env: ParallelEnv, what: str, env_ids: list[int]) -> None:
    """Send an action to these environments, or reset them."""
    if what == "step":
        env.send(acts(*env_ids), env_ids=env_ids)
    else:
        env.reset_async(env_ids=env_ids)


def done(env: ParallelEnv) -> int:
    """How many steps and resets have finished so far."""
    return env.stats().steps + env.stats().resets


# In which order


@pytest.mark.parametrize("what", ["step", "reset"])
def test_order_of_completion(what, concurrent_setup, build, tmp_path):
    env = started(build(fleet(tmp_path, 2), concurrent_setup))
    before = done(env)
    hold(tmp_path, 0)
    start(env, what, [0, 1])
    wait_for(lambda: done(env) == before + 1)
    release(tmp_path, 0)
    assert env.recv().env_ids == (1, 0)


def test_order_within_a_worker(backend_setup, build, tmp_path):
    """Environments of a worker are stepped in the order of `send`."""
    env = started(build(fleet(tmp_path, 4), backend_setup, num_workers=1))
    env.send(acts(2.0, 0.0, 3.0), env_ids=[2, 0, 3])
    env.reset_async(env_ids=[1])
    assert env.recv().env_ids == (2, 0, 3, 1)
    assert trace(tmp_path)[4:] == ["step 2", "step 0", "step 3", "reset 1"]


class FrozenClock(SerialBackend):
    """A backend whose clock stands still."""

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        replies = super().wait(timeout, at_least)
        return [(worker, reply._replace(completed=1.0)) for worker, reply in replies if isinstance(reply, Reply)]


def test_ties_are_ordered_by_env_id(tmp_path):
    with ParallelEnv(fleet(tmp_path, 4), backend=FrozenClock(), num_workers=2) as env:
        env.reset_async(env_ids=[3, 1, 0, 2])
        assert env.recv().env_ids == (0, 1, 2, 3)
        env.send(acts(3.0, 1.0, 2.0), env_ids=[3, 1, 2])
        batch = env.recv()
        assert (batch.env_ids, seen(batch.observations)) == ((1, 2, 3), [1.0, 2.0, 3.0])


# Results as soon as they are ready


def test_serial_computes_at_send(tmp_path):
    with ParallelEnv(fleet(tmp_path, 2), backend="serial") as env:
        env.reset_async()
        assert trace(tmp_path) == ["reset 0", "reset 1"]
        env.recv()
        env.send(acts(1), env_ids=[1])
        assert trace(tmp_path)[2:] == ["step 1"]


@pytest.mark.parametrize("what", ["step", "reset"])
def test_slow_neighbour_does_not_delay_results(what, concurrent_setup, build, tmp_path):
    """One worker: finished results arrive while the neighbour runs, and a new step runs before the neighbour's next
    one.
    """
    env = started(build(fleet(tmp_path, 2), concurrent_setup, num_workers=1))
    for _ in range(3):
        hold(tmp_path, 0)
        start(env, "step", [1])
        start(env, what, [0])
        assert env.recv(min_envs=1).env_ids == (1,)
        wait_for(lambda: trace(tmp_path)[-1] == f"{what} 0")
        start(env, "step", [1])
        release(tmp_path, 0)
        assert env.recv(min_envs=1).env_ids[0] == 0
        start(env, what, [0])
        env.recv()
        assert trace(tmp_path)[-4:] == ["step 1", f"{what} 0", "step 1", f"{what} 0"]


def test_recv_waits_for_min_envs(concurrent_setup, build, tmp_path):
    env = started(build(fleet(tmp_path, 4), concurrent_setup))
    hold(tmp_path, 1)
    start(env, "step", [2, 0, 1, 3])
    assert sorted(env.recv(min_envs=3).env_ids) == [0, 2, 3]
    release(tmp_path, 1)
    assert env.recv(min_envs=1).env_ids == (1,)


def test_recv_with_min_envs_zero_does_not_wait(concurrent_setup, build, tmp_path):
    env = started(build(fleet(tmp_path, 2), concurrent_setup))
    hold(tmp_path, 0, 1)
    start(env, "step", [0, 1])
    for timeout in (None, 0, 5.0):
        assert env.recv(min_envs=0, timeout=timeout) == StepBatch((), (), (), (), (), ())
    assert env.pending == (0, 1)
    release(tmp_path, 0, 1)
    assert sorted(env.recv().env_ids) == [0, 1]


def test_recv_with_min_envs_zero_returns_ready_results(backend_setup, build, tmp_path):
    env = started(build(fleet(tmp_path, 2), backend_setup))
    start(env, "step", [0, 1])
    received: list[int] = []
    wait_for(lambda: received.extend(env.recv(min_envs=0).env_ids) or len(received) == 2)
    assert sorted(received) == [0, 1]


# Fairness


def neighbour_steps_before(lines: list[str], share: int) -> list[int]:
    """The number of neighbours' steps between the `send` of each action and its step."""
    waiting: Counter[int] = Counter()
    finished = []
    for event, number in (line.split() for line in lines):
        env_id = int(number)
        if event == "sent":
            waiting[env_id] = 0
        elif event == "step":
            finished.append(waiting.pop(env_id))
            waiting.update(other for other in waiting if other // share == env_id // share)
    return finished


@PACKINGS
def test_no_environment_starves(num_workers, backend_setup, build, tmp_path):
    """In any order of calls, each neighbour in a worker goes first at most once."""
    env = started(build(fleet(tmp_path, 4), backend_setup, num_workers=num_workers))
    rng = np.random.default_rng(num_workers)
    sent = 0
    while sent < 300:
        idle = [env_id for env_id in range(4) if env_id not in env.pending]
        if chosen := some_of(idle, rng):
            for env_id in chosen:
                note(tmp_path, f"sent {env_id}")
            start(env, "step", chosen)
            sent += len(chosen)
        if env.pending:
            env.recv(min_envs=1)
    if env.pending:
        env.recv()
    waiting = neighbour_steps_before(trace(tmp_path)[4:], 4 // num_workers)
    assert len(waiting) == sent
    assert max(waiting) < 4 // num_workers


@PACKINGS
def test_environments_of_a_worker_take_turns(num_workers, backend_setup, build, tmp_path):
    """If results are sent again at once, the environments of a worker take turns."""
    env = started(build(fleet(tmp_path, 4), backend_setup, num_workers=num_workers))
    start(env, "step", [2, 0, 3, 1])
    received: Counter[int] = Counter()
    for _ in range(200):
        batch = env.recv(min_envs=1)
        received.update(batch.env_ids)
        start(env, "step", list(batch.env_ids))
    received.update(env.recv().env_ids)
    share = 4 // num_workers
    for first in range(0, 4, share):
        own = [turn for turn in map(turn_of, trace(tmp_path)[4:]) if turn in range(first, first + share)]
        assert own == (own[:share] * len(own))[: len(own)]
        assert Counter(own) == {env_id: received[env_id] for env_id in range(first, first + share)}


def turn_of(line: str) -> int:
    return int(line.split()[1])


def test_fast_workers_do_not_hide_results_of_slow_ones(concurrent_or_portable, build, tmp_path):
    """Results of a slow worker are returned although a fast worker always has results."""
    env = started(build(fleet(tmp_path, 2), concurrent_or_portable))
    hold(tmp_path, 0)
    start(env, "step", [0, 1])
    received: Counter[int] = Counter()
    while not received[0]:
        batch = env.recv(min_envs=1)
        received.update(batch.env_ids)
        if 1 in batch.env_ids:
            start(env, "step", [1])
            if received[1] == 100:
                release(tmp_path, 0)
        assert received[1] < 100_000


# `min_envs` and `timeout`


@pytest.mark.in_turn
@pytest.mark.parametrize("min_envs", [None, 0, 1])
def test_recv_with_nothing_in_flight(min_envs, backend_setup, build, tmp_path):
    """At the start, and after everything has been received."""
    env = build(fleet(tmp_path, 2), backend_setup)
    for _ in range(2):
        with pytest.raises(NoAsyncCallError):
            env.recv(min_envs=min_envs)
        env.reset_async()
        env.recv()
    with pytest.raises(NoAsyncCallError):
        env.recv(min_envs, timeout=0)


def test_wrong_arguments_of_recv(backend_setup, build, tmp_path):
    """No result is lost."""
    env = build(fleet(tmp_path, 3), backend_setup)
    env.reset_async(env_ids=[0, 2])
    for min_envs in (3, -1):
        with pytest.raises(ValueError, match="min_envs"):
            env.recv(min_envs=min_envs)
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            env.recv(timeout=timeout)
    for arguments in ({"min_envs": 1.0}, {"min_envs": "1"}, {"min_envs": [1]}, {"timeout": "1"}, {"timeout": True}):
        with pytest.raises(TypeError, match=next(iter(arguments))):
            env.recv(**arguments)
    assert env.pending == (0, 2)
    assert sorted(env.recv().env_ids) == [0, 2]


@pytest.mark.in_turn
@pytest.mark.parametrize("arguments", [{"min_envs": 0.0}, {"timeout": False}], ids=str)
def test_min_envs_must_be_an_integer(arguments, backend_setup, build, tmp_path):
    env = build(fleet(tmp_path, 1), backend_setup)
    env.reset_async()
    with pytest.raises(TypeError, match=next(iter(arguments))):
        env.recv(**arguments)


@pytest.mark.in_turn
@pytest.mark.parametrize("timeout", [None, 20, np.float32(20.0), Fraction(20), 1e15, float("inf")], ids=repr)
def test_long_timeouts(timeout, concurrent_or_portable, build, tmp_path):
    env = build(fleet(tmp_path, 1), concurrent_or_portable)
    env.reset_async()
    assert env.recv(timeout=timeout).env_ids == (0,)


@pytest.mark.parametrize("timeout", [0, 0.0, 0.05])
def test_timeout_loses_nothing(timeout, concurrent_or_portable, build, tmp_path):
    """It raises a `TimeoutError` of both kinds each time; results that are ready are returned by the next call."""
    env = started(build(fleet(tmp_path, 3), concurrent_or_portable))
    hold(tmp_path, 0)
    start(env, "step", [1, 2, 0])
    for min_envs in (None, 3, 3):
        with pytest.raises(TimeoutError) as caught:
            env.recv(min_envs, timeout=timeout)
        assert isinstance(caught.value, multiprocessing.TimeoutError)
        assert not isinstance(caught.value, ParallelEnvError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))
        assert env.pending == (0, 1, 2)
    batch = env.recv(min_envs=2)
    assert dict(zip(batch.env_ids, seen(batch.observations))) == {1: 1.0, 2: 2.0}
    with pytest.raises(TimeoutError):
        env.recv(timeout=timeout)
    release(tmp_path, 0)
    assert env.recv().env_ids == (0,)
    assert seen(env.step(acts(5.0, 6.0, 7.0))[0]) == [5.0, 6.0, 7.0]


def test_timeout_zero_returns_ready_results(backend_setup, build, tmp_path):
    """With "hybrid", this thread has steps of its own; `test_hybrid` says what becomes of them."""
    env_ids = [1] if backend_setup.backend == "hybrid" else [0, 1]
    env = started(build(fleet(tmp_path, 2), backend_setup))
    before = done(env)
    start(env, "step", env_ids)
    wait_for(lambda: done(env) == before + len(env_ids))
    time.sleep(0.2)  # the last message is in flight
    assert sorted(env.recv(timeout=0).env_ids) == env_ids


# Large and many messages


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
def test_large_messages(shared_memory, concurrent_or_portable, build, tmp_path):
    """Megabytes are sent while the worker is busy and its own messages have not been received."""
    size = 500_000
    env = build(fleet(tmp_path, 8, size=size), concurrent_or_portable, num_workers=1, shared_memory=shared_memory)
    env.reset()
    hold(tmp_path, 0)
    for env_id in range(4):
        env.send({env_id: acts(env_id, size=size)[0]})
    wait_for(lambda: trace(tmp_path)[8:] == ["step 0"])
    env.send(acts(4, 5, size=size), env_ids=[4, 5])
    assert trace(tmp_path)[8:] == ["step 0"]
    release(tmp_path, 0)
    wait_for(lambda: env.stats().steps > 0)
    env.send(acts(6, 7, size=size), env_ids=[6, 7])
    batch = env.recv()
    assert batch.env_ids == tuple(range(8))
    assert seen(batch.observations) == [*range(8)]


def test_many_environments_in_one_worker(concurrent_setup, build, tmp_path):
    """All in flight at once, sent one by one or together."""
    count = 2000
    env = build(fleet(tmp_path, count), concurrent_setup, num_workers=1)
    env.reset_async()
    received = list(env.recv(min_envs=1).env_ids)
    while env.pending:
        received += env.recv(min_envs=1).env_ids
    assert received == [*range(count)]
    hold(tmp_path, 0)
    for env_id in range(count):
        env.send({env_id: acts(env_id)[0]})
    assert env.pending == tuple(range(count))
    release(tmp_path, 0)
    batch = env.recv()
    assert batch.env_ids == tuple(range(count))
    assert seen(batch.observations) == [*range(count)]


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    """Limit the number of files that this process may still open."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(spare: int) -> None:
        used = set(map(int, os.listdir("/proc/self/fd")))
        free = (number for number in itertools.count() if number not in used)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, spare, None)), hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_large_messages_than_free_descriptors(few_descriptors, concurrent_or_portable, build, tmp_path):
    count, size = 500, 5_000
    env = started(build(fleet(tmp_path, count, size=size), concurrent_or_portable, num_workers=1, shared_memory=False))
    hold(tmp_path, 0)
    few_descriptors(50)
    before = len(os.listdir("/proc/self/fd"))
    for env_id in range(count):
        env.send({env_id: acts(env_id, size=size)[0]})
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # messages that wait leave room for those that come
    release(tmp_path, 0)
    received: list[float] = []
    while env.pending:
        received += seen(env.recv(min_envs=1).observations)
    assert received == [*range(count)]
