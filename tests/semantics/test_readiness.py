"""When results of `recv` come: each as soon as it is there, in order, nobody's withheld, however much is on its way.

What the results are is tested in `test_async`.
"""

from __future__ import annotations

import itertools
import os
import resource
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

from marl_parallel import ParallelEnv, StepBatch
from marl_parallel.backends.local import SerialBackend
from marl_parallel.core.messages import Lost, Reply

pytestmark = pytest.mark.release_independent

PACKINGS = pytest.mark.parametrize("num_workers", [1, 2, 4])


def started(env: ParallelEnv) -> ParallelEnv:
    env.reset()
    return env


def begin(env: ParallelEnv, what: str, env_ids: list[int]) -> None:
    """Send these environments an action, or have them reset."""
    if what == "step":
        env.send(acts(*env_ids), env_ids=env_ids)
    else:
        env.reset_async(env_ids=env_ids)


def done(env: ParallelEnv) -> int:
    """How many steps and resets have been carried out so far."""
    return env.stats().steps + env.stats().resets


# In which order


@pytest.mark.parametrize("what", ["step", "reset"])
def test_order_of_completion(what, beside, build, tmp_path):
    env = started(build(fleet(tmp_path, 2), beside))
    before = done(env)
    hold(tmp_path, 0)
    begin(env, what, [0, 1])
    wait_for(lambda: done(env) == before + 1)
    release(tmp_path, 0)
    assert env.recv().env_ids == (1, 0)


def test_order_within_a_worker(each, build, tmp_path):
    """They are stepped in the order in which they were sent."""
    env = started(build(fleet(tmp_path, 4), each, num_workers=1))
    env.send(acts(2.0, 0.0, 3.0), env_ids=[2, 0, 3])
    env.reset_async(env_ids=[1])
    assert env.recv().env_ids == (2, 0, 3, 1)
    assert trace(tmp_path)[4:] == ["step 2", "step 0", "step 3", "reset 1"]


class Simultaneous(SerialBackend):
    """Whose clock stands still."""

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        replies = super().wait(timeout, at_least)
        return [(worker, reply._replace(completed=1.0)) for worker, reply in replies if isinstance(reply, Reply)]


def test_ties_go_by_number(tmp_path):
    with ParallelEnv(fleet(tmp_path, 4), backend=Simultaneous(), num_workers=2) as env:
        env.reset_async(env_ids=[3, 1, 0, 2])
        assert env.recv().env_ids == (0, 1, 2, 3)
        env.send(acts(3.0, 1.0, 2.0), env_ids=[3, 1, 2])
        batch = env.recv()
        assert (batch.env_ids, seen(batch.observations)) == ((1, 2, 3), [1.0, 2.0, 3.0])


# As soon as it is there


def test_serial_computes_at_send(tmp_path):
    with ParallelEnv(fleet(tmp_path, 2), backend="serial") as env:
        env.reset_async()
        assert trace(tmp_path) == ["reset 0", "reset 1"]
        env.recv()
        env.send(acts(1), env_ids=[1])
        assert trace(tmp_path)[2:] == ["step 1"]


@pytest.mark.parametrize("what", ["step", "reset"])
def test_a_slow_neighbour_holds_nothing_back(what, beside, build, tmp_path):
    """One worker: what is done comes while the neighbour still runs, and goes on before the neighbour's next turn."""
    env = started(build(fleet(tmp_path, 2), beside, num_workers=1))
    for _ in range(3):
        hold(tmp_path, 0)
        begin(env, "step", [1])
        begin(env, what, [0])
        assert env.recv(min_envs=1).env_ids == (1,)
        wait_for(lambda: trace(tmp_path)[-1] == f"{what} 0")
        begin(env, "step", [1])
        release(tmp_path, 0)
        assert env.recv(min_envs=1).env_ids[0] == 0
        begin(env, what, [0])
        env.recv()
        assert trace(tmp_path)[-4:] == ["step 1", f"{what} 0", "step 1", f"{what} 0"]


def test_recv_waits_for_as_many_as_asked(beside, build, tmp_path):
    env = started(build(fleet(tmp_path, 4), beside))
    hold(tmp_path, 1)
    begin(env, "step", [2, 0, 1, 3])
    assert sorted(env.recv(min_envs=3).env_ids) == [0, 2, 3]
    release(tmp_path, 1)
    assert env.recv(min_envs=1).env_ids == (1,)


def test_recv_of_none_waits_for_none(beside, build, tmp_path):
    env = started(build(fleet(tmp_path, 2), beside))
    hold(tmp_path, 0, 1)
    begin(env, "step", [0, 1])
    for timeout in (None, 0, 5.0):
        assert env.recv(min_envs=0, timeout=timeout) == StepBatch((), (), (), (), (), ())
    assert env.pending == (0, 1)
    release(tmp_path, 0, 1)
    assert sorted(env.recv().env_ids) == [0, 1]


def test_recv_of_none_takes_what_is_there(each, build, tmp_path):
    env = started(build(fleet(tmp_path, 2), each))
    begin(env, "step", [0, 1])
    received: list[int] = []
    wait_for(lambda: received.extend(env.recv(min_envs=0).env_ids) or len(received) == 2)
    assert sorted(received) == [0, 1]


# Nobody starves


def kept_waiting(lines: list[str], share: int) -> list[int]:
    """How many steps of neighbours came between the sending of each action and its step."""
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
def test_nobody_starves(num_workers, each, build, tmp_path):
    """Whatever the caller sends when, each of the neighbours in a worker goes ahead once at most."""
    env = started(build(fleet(tmp_path, 4), each, num_workers=num_workers))
    rng = np.random.default_rng(num_workers)
    sent = 0
    while sent < 300:
        idle = [env_id for env_id in range(4) if env_id not in env.pending]
        if chosen := some_of(idle, rng):
            for env_id in chosen:
                note(tmp_path, f"sent {env_id}")
            begin(env, "step", chosen)
            sent += len(chosen)
        if env.pending:
            env.recv(min_envs=1)
    if env.pending:
        env.recv()
    waiting = kept_waiting(trace(tmp_path)[4:], 4 // num_workers)
    assert len(waiting) == sent
    assert max(waiting) < 4 // num_workers


@PACKINGS
def test_everybody_has_the_same_share(num_workers, each, build, tmp_path):
    """What is received is sent again at once, and each worker's environments take turns, one after the other."""
    env = started(build(fleet(tmp_path, 4), each, num_workers=num_workers))
    begin(env, "step", [2, 0, 3, 1])
    received: Counter[int] = Counter()
    for _ in range(200):
        batch = env.recv(min_envs=1)
        received.update(batch.env_ids)
        begin(env, "step", list(batch.env_ids))
    received.update(env.recv().env_ids)
    share = 4 // num_workers
    for first in range(0, 4, share):
        own = [turn for turn in map(turn_of, trace(tmp_path)[4:]) if turn in range(first, first + share)]
        assert own == (own[:share] * len(own))[: len(own)]
        assert Counter(own) == {env_id: received[env_id] for env_id in range(first, first + share)}


def turn_of(line: str) -> int:
    return int(line.split()[1])


def test_the_slow_are_not_crowded_out_by_the_fast(beside, build, tmp_path):
    """What a slow worker has done is delivered, though a fast one always has something that is ready."""
    env = started(build(fleet(tmp_path, 2), beside))
    hold(tmp_path, 0)
    begin(env, "step", [0, 1])
    received: Counter[int] = Counter()
    while not received[0]:
        batch = env.recv(min_envs=1)
        received.update(batch.env_ids)
        if 1 in batch.env_ids:
            begin(env, "step", [1])
            if received[1] == 100:
                release(tmp_path, 0)
        assert received[1] < 100_000


# How much is asked for, and how long


@pytest.mark.parametrize("min_envs", [None, 0, 1])
def test_nothing_is_in_flight(min_envs, each, build, tmp_path):
    """Neither in the beginning nor after everything has been received."""
    env = build(fleet(tmp_path, 2), each)
    for _ in range(2):
        with pytest.raises(NoAsyncCallError):
            env.recv(min_envs=min_envs)
        env.reset_async()
        env.recv()
    with pytest.raises(NoAsyncCallError):
        env.recv(min_envs, timeout=0)


def test_arguments_that_recv_refuses(each, build, tmp_path):
    """Nothing is lost."""
    env = build(fleet(tmp_path, 3), each)
    env.reset_async(env_ids=[0, 2])
    for min_envs in (3, -1):
        with pytest.raises(ValueError, match="min_envs"):
            env.recv(min_envs=min_envs)
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            env.recv(timeout=timeout)
    for asked in ({"min_envs": 1.0}, {"min_envs": "1"}, {"min_envs": [1]}, {"timeout": "1"}, {"timeout": True}):
        with pytest.raises(TypeError, match=next(iter(asked))):
            env.recv(**asked)
    assert env.pending == (0, 2)
    assert sorted(env.recv().env_ids) == [0, 2]


@pytest.mark.parametrize("asked", [{"min_envs": 0.0}, {"timeout": False}], ids=str)
def test_what_only_looks_like_zero(asked, each, build, tmp_path):
    env = build(fleet(tmp_path, 1), each)
    env.reset_async()
    with pytest.raises(TypeError, match=next(iter(asked))):
        env.recv(**asked)


@pytest.mark.parametrize("timeout", [None, 20, np.float32(20.0), Fraction(20), 1e15, float("inf")], ids=repr)
def test_timeouts_that_are_long_enough(timeout, beside, build, tmp_path):
    env = build(fleet(tmp_path, 1), beside)
    env.reset_async()
    assert env.recv(timeout=timeout).env_ids == (0,)


@pytest.mark.parametrize("timeout", [0, 0.0, 0.05])
def test_a_timeout_loses_nothing(timeout, beside, build, tmp_path):
    """It is a plain `TimeoutError`, again and again; what had come already is there at the next call."""
    env = started(build(fleet(tmp_path, 3), beside))
    hold(tmp_path, 0)
    begin(env, "step", [1, 2, 0])
    for min_envs in (None, 3, 3):
        with pytest.raises(TimeoutError) as caught:
            env.recv(min_envs, timeout=timeout)
        assert type(caught.value) is TimeoutError
        assert env.pending == (0, 1, 2)
    batch = env.recv(min_envs=2)
    assert dict(zip(batch.env_ids, seen(batch.observations))) == {1: 1.0, 2: 2.0}
    with pytest.raises(TimeoutError):
        env.recv(timeout=timeout)
    release(tmp_path, 0)
    assert env.recv().env_ids == (0,)
    assert seen(env.step(acts(5.0, 6.0, 7.0))[0]) == [5.0, 6.0, 7.0]


def test_a_timeout_of_zero_takes_what_is_there(each, build, tmp_path):
    env = started(build(fleet(tmp_path, 2), each))
    before = done(env)
    begin(env, "step", [0, 1])
    wait_for(lambda: done(env) == before + 2)
    time.sleep(0.2)  # the last of them is on its way
    assert sorted(env.recv(timeout=0).env_ids) == [0, 1]


# Much on the way


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared", "pickled"])
def test_large_messages(shared_memory, beside, build, tmp_path):
    """Megabytes are sent while the worker is busy, and while what it has to say has not been received."""
    size = 500_000
    env = build(fleet(tmp_path, 8, size=size), beside, num_workers=1, shared_memory=shared_memory)
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


def test_many_environments_in_one_worker(beside, build, tmp_path):
    """All in flight at a time, sent one by one or all at once."""
    count = 2000
    env = build(fleet(tmp_path, count), beside, num_workers=1)
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
    """Limits how many files more this process may open, until the test is over."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(spare: int) -> None:
        taken = set(map(int, os.listdir("/proc/self/fd")))
        free = (number for number in itertools.count() if number not in taken)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, spare, None)), hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_large_messages_than_files_may_be_open(few_descriptors, beside, build, tmp_path):
    count, size = 500, 5_000
    env = started(build(fleet(tmp_path, count, size=size), beside, num_workers=1, shared_memory=False))
    hold(tmp_path, 0)
    few_descriptors(50)
    for env_id in range(count):
        env.send({env_id: acts(env_id, size=size)[0]})
    release(tmp_path, 0)
    received: list[float] = []
    while env.pending:
        received += seen(env.recv(min_envs=1).observations)
    assert received == [*range(count)]
