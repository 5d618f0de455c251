"""Workers that stop while they send or receive a large message: timeouts, `recv(timeout=)` and `close` still hold."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers.comparison import assert_same
from helpers.forked_steps import actions, plain_loop, stepped
from helpers.processes import gone, wait_for
from helpers.start_methods import arguments
from simulators.forking import Walk
from simulators.stopping import LargeInfos

from marl_parallel import ParallelEnv, WorkerTimeout
from marl_parallel.backends.process import Channel

pytestmark = pytest.mark.release_independent

AT_MOST_S = 60.0  # far more than any timeout here, even on a busy machine, and far less than forever

# A message in a file of its own, one that goes through the socket, and the portable backend's.
FILE = pytest.param("forkserver", {"moment": "file"}, id="forkserver-file")
SOCKET = pytest.param("forkserver", {"moment": "socket", "inline": True}, id="forkserver-socket")
PORTABLE = pytest.param("portable", {"moment": "connection"}, id="portable")
names = "start_method", "how"


def opened(start_method: str, make: Any, **more: Any) -> ParallelEnv:
    return ParallelEnv([make] * 2, num_workers=2, **arguments(start_method), **more)


def send_until_worker_stops(env: ParallelEnv, flag: Path, step: int = 0) -> None:
    """Send actions; return when the first worker has stopped in the middle of its message."""
    env.send(actions(step))
    wait_for(flag.exists, AT_MOST_S)
    time.sleep(0.1)


@pytest.mark.parametrize(
    ("start_method", "how", "fault"),
    [
        *(pytest.param(*sent.values, "stop", id=f"stop-{sent.id}") for sent in (FILE, PORTABLE)),
        # Not in the portable backend: its one system call for a message does not need the interpreter's lock.
        pytest.param(*SOCKET.values, "lock", id="lock-forkserver-socket"),
    ],
)
def test_step_timeout(start_method, how, fault, tmp_path):
    flag = tmp_path / "flag"
    env = opened(start_method, functools.partial(LargeInfos, fault, 1, flag=str(flag), **how), step_timeout=2.0)
    pids = {*env.call("pid")}
    env.reset()
    send_until_worker_stops(env, flag)
    began = time.monotonic()
    with pytest.raises(WorkerTimeout) as caught:
        env.recv()
    assert time.monotonic() - began < AT_MOST_S
    assert caught.value.worker == 0
    assert gone(pids)


@pytest.mark.parametrize(names, [SOCKET, PORTABLE])
def test_step_timeout_with_restarts(start_method, how, tmp_path):
    """The neighbour's results equal a plain loop's, and the stopped worker is replaced."""
    flag = tmp_path / "flag"
    make = functools.partial(LargeInfos, "stop", 2, flag=str(flag), **how)
    with opened(start_method, make, step_timeout=3.0, on_error="restart") as env:
        observations, _ = env.reset()
        history = [observations]
        for step in range(8):
            if step == 1:
                send_until_worker_stops(env, flag, step)
                batch = env.recv()
                place = batch.env_ids.index(0)
                assert batch.truncateds[place]["__all__"] is True
                assert batch.infos[place]["__common__"]["restarted"] is True
                order = [batch.env_ids.index(env_id) for env_id in range(2)]
                observations, rewards = (tuple(part[i] for i in order) for part in (batch[1], batch[2]))
            else:
                observations, rewards, *_ = env.step(actions(step))
            history.append((observations, rewards))
        assert env.stats().restarts == 1
    expected = plain_loop(Walk)
    assert_same(history[0][1], expected[0][1])
    for step in range(1, 9):
        assert_same(tuple(part[1] for part in history[step]), tuple(part[1] for part in expected[step]))


@pytest.mark.parametrize(names, [FILE, SOCKET, PORTABLE])
def test_recv_timeout(start_method, how, tmp_path):
    """Nothing is lost: once the worker continues, results equal a plain loop's."""
    flag = tmp_path / "flag"
    with opened(start_method, functools.partial(LargeInfos, "stop", 1, flag=str(flag), **how)) as env:
        worker = env.call("pid")[0]
        env.reset()
        send_until_worker_stops(env, flag)
        began = time.monotonic()
        for _ in range(2):
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


@pytest.mark.parametrize(names, [FILE, PORTABLE])
def test_close_from_another_thread(start_method, how, tmp_path):
    """Without a timeout: the blocked call raises `ClosedEnvironmentError`."""
    flag = tmp_path / "flag"
    env = opened(start_method, functools.partial(LargeInfos, "stop", 1, flag=str(flag), **how))
    pids = {*env.call("pid")}
    env.reset()
    send_until_worker_stops(env, flag)
    began = time.monotonic()
    timer = threading.Timer(0.5, env.close, kwargs={"timeout": 0.5})
    timer.start()
    with pytest.raises(ClosedEnvironmentError):
        env.recv()
    timer.join(AT_MOST_S)
    assert not timer.is_alive()
    assert time.monotonic() - began < AT_MOST_S
    assert gone(pids)


def test_large_requests_to_a_stopped_worker(start_method):
    """`send` does not wait for a worker that reads nothing, and the timeout holds."""
    env = opened(start_method, functools.partial(LargeInfos, ""), step_timeout=2.0)
    pids = env.call("pid")
    env.reset()
    os.kill(pids[0], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(WorkerTimeout):
        env.set_attr("map", [bytes(1 << 25)] * 2)
    assert time.monotonic() - began < AT_MOST_S
    assert gone(pids)


def test_large_messages_arrive_whole(start_method):
    """In both directions, at every size around the limits of files, sockets and pipes."""
    with opened(start_method, functools.partial(LargeInfos, "")) as env:
        for size in (1, 16_000, 16_384, 16_400, 65_536, 65_600, 300_000, 5_000_000):
            sent = os.urandom(size)
            env.set_attr("map", [sent] * 2)
            assert env.get_attr("map") == (sent, sent)
        assert_same(stepped(env, 1), plain_loop(Walk, 1))


# A channel by itself


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("inline", [False, True])
def test_channel_receives_a_message_packet_by_packet(size, inline, monkeypatch):
    """`receive_now` never blocks; it returns the message with its last packet."""
    if inline:  # no descriptor is left for a file
        monkeypatch.setattr("marl_parallel.backends.process._file_of", lambda body: -1)
    ours, middle = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = Channel(ours), Channel(sender)
    messages = [{"sent": os.urandom(size)}, "next"]
    for message in messages:
        ends[1].put(message)
        received = []
        theirs.setblocking(False)
        while not received:
            data, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 4)
            assert data
            socket.send_fds(middle, [data], fds)
            for fd in fds:
                os.close(fd)
            received = [one for one in [ends[0].receive_now()] if one is not None]
        assert received == [message]
        assert ends[0].receive_now() is None
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
    for end in (*ends, middle, theirs):
        end.close()
