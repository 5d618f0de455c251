"""Workers that stop while they send or receive a large message: deadlines, `recv(timeout=)` and `close` always win."""

from __future__ import annotations

import functools
import os
import signal
import socket
import struct
import threading
import time
from typing import Any

import psutil
import pytest
from comparison import assert_same
from forking import Walk
from gymnasium.error import ClosedEnvironmentError
from liveness import gone, wait_for
from stopping import LargeInfos
from test_forked_children import actions, plain_loop, stepped
from ways import arguments

from marl_parallel import ParallelEnv, WorkerTimeout
from marl_parallel.backends.channel import Channel
from marl_parallel.backends.portable_ends import Inbox, packed

AT_MOST_S = 60.0  # far more than any limit here, also where the machine is busy; far less than for ever

# A message in a file of its own, one that goes through the socket, and the portable backend's.
SENDING = [
    ("forkserver", {"during": "_file_of"}),
    ("forkserver", {"during": "flush", "inline": True}),
    ("portable", {"during": "send"}),
]
sending = pytest.mark.parametrize(("way", "how"), SENDING, ids=str)


def opened(way: str, make: Any, **more: Any) -> ParallelEnv:
    return ParallelEnv([make] * 2, num_workers=2, **arguments(way), **more)


def stopped(env: ParallelEnv) -> Any:
    """Waits until the first worker is stopped."""
    process = psutil.Process(env.call("pid")[0])
    return lambda: process.status() == psutil.STATUS_STOPPED


@sending
@pytest.mark.parametrize("fault", ["stop", "lock"])
def test_step_timeout(way, how, fault):
    env = opened(way, functools.partial(LargeInfos, fault, **how), step_timeout=2.0)
    pids = {*env.call("pid")}
    env.reset()
    env.step(actions(0))
    began = time.monotonic()
    with pytest.raises(WorkerTimeout) as caught:
        env.step(actions(1))
    assert time.monotonic() - began < AT_MOST_S
    assert caught.value.worker == 0
    assert gone(pids)


@sending
def test_step_timeout_with_restarts(way, how):
    """The neighbour's results are those of a plain loop, and the worker that stopped is replaced."""
    make = functools.partial(LargeInfos, "stop", **how)
    with opened(way, make, step_timeout=2.0, on_error="restart") as env:
        observations, _ = env.reset()
        history = [observations]
        for step in range(8):
            observations, rewards, _, truncateds, infos = env.step(actions(step))
            history.append((observations, rewards))
            if step == 1:
                assert truncateds[0]["__all__"] is True
                assert infos[0]["__common__"]["restarted"] is True
        assert env.stats().restarts == 1
    expected = plain_loop(Walk)
    assert_same(history[0][1], expected[0][1])
    for step in range(1, 9):
        assert_same(tuple(part[1] for part in history[step]), tuple(part[1] for part in expected[step]))


@sending
def test_recv_timeout(way, how):
    """Nothing is lost: when the worker is continued, the results are those of a plain loop."""
    with opened(way, functools.partial(LargeInfos, "stop", at=1, **how)) as env:
        worker, is_stopped = env.call("pid")[0], stopped(env)
        env.reset()
        env.send(actions(0))
        began = time.monotonic()
        wait_for(is_stopped, AT_MOST_S)
        with pytest.raises(TimeoutError):
            env.recv(timeout=0.5)
        assert time.monotonic() - began < AT_MOST_S
        os.kill(worker, signal.SIGCONT)
        batch = env.recv()
    place = batch.env_ids.index(0)
    observations, rewards = plain_loop(Walk, 1)[1]
    assert_same(batch.observations[place], observations[0])
    assert_same(batch.rewards[place], rewards[0])
    assert batch.infos[place]["a"] == {"image": bytes(1 << 25)}


@sending
def test_close_from_another_thread(way, how):
    """No limit is set: the blocked call ends with `ClosedEnvironmentError`."""
    env = opened(way, functools.partial(LargeInfos, "stop", at=1, **how))
    pids, is_stopped = {*env.call("pid")}, stopped(env)
    env.reset()

    def close() -> None:
        wait_for(is_stopped, AT_MOST_S)
        time.sleep(0.2)
        env.close(timeout=0.5)

    thread = threading.Thread(target=close)
    began = time.monotonic()
    thread.start()
    with pytest.raises(ClosedEnvironmentError):
        env.step(actions(0))
    thread.join(AT_MOST_S)
    assert not thread.is_alive()
    assert time.monotonic() - began < AT_MOST_S
    assert gone(pids)


@pytest.mark.parametrize("way", ["forkserver", "portable"])
def test_large_requests_to_a_stopped_worker(way):
    """`send` does not wait for a worker that takes nothing in, and the limit holds."""
    env = opened(way, functools.partial(LargeInfos, ""), step_timeout=2.0)
    pids = env.call("pid")
    env.reset()
    os.kill(pids[0], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(WorkerTimeout):
        env.set_attr("map", [bytes(1 << 25)] * 2)
    assert time.monotonic() - began < AT_MOST_S
    assert gone(pids)


@pytest.mark.parametrize("way", ["forkserver", "portable"])
def test_large_messages_arrive_whole(way):
    """Both ways, at every size around the limits of files, sockets and pipes."""
    with opened(way, functools.partial(LargeInfos, "")) as env:
        for size in (1, 16_000, 16_384, 16_400, 65_536, 65_600, 300_000, 5_000_000):
            sent = os.urandom(size)
            env.set_attr("map", [sent] * 2)
            assert env.get_attr("map") == (sent, sent)
        assert_same(stepped(env, 1), plain_loop(Walk, 1))


# The two ends by themselves


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_channel_takes_a_message_byte_by_byte(size):
    """However much has come, `receive_now` returns; the message is there with its last byte, and so is the next."""
    ours, middle = socket.socketpair()
    sender, theirs = socket.socketpair()
    ends = Channel(ours), Channel(sender)
    messages = [{"sent": os.urandom(size)}, "next"]
    for message in messages:
        ends[1].put(message)
        taken = []
        theirs.setblocking(False)
        while not taken:
            data, fds, _, _ = socket.recv_fds(theirs, 1, 4)
            assert data
            socket.send_fds(middle, [data], fds) if fds else middle.sendall(data)
            for fd in fds:
                os.close(fd)
            taken = [one for one in [ends[0].receive_now()] if one is not None]
        assert taken == [message]
        assert ends[0].receive_now() is None
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
    for end in (*ends, middle, theirs):
        end.close()


def test_an_inbox_takes_a_message_byte_by_byte():
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    inbox = Inbox(reading)
    for message in ({"sent": b"x" * 1000}, "next"):
        data = b"".join(packed(message))
        assert struct.calcsize("=Q") < len(data)
        for place in range(len(data)):
            assert inbox.receive_now() is None
            os.write(writing, data[place : place + 1])
        assert inbox.receive_now() == message
    os.close(writing)
    with pytest.raises(EOFError):
        inbox.receive_now()
    os.close(reading)
