"""The portable backend: alone, and on systems without what the fork server needs."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
from gymnasium.vector import AutoresetMode
from helpers import ROOT, TESTS
from helpers.processes import wait_for
from simulators.counting import Counting

from marl_parallel import ParallelEnv, ParallelEnvError, WorkerCrashed, backends
from marl_parallel.backends import spawn
from marl_parallel.backends.spawn import PortableProcessBackend
from marl_parallel.core.backend import Backend
from marl_parallel.core.messages import Construction, Lost, Message, Pickled, Reply, Request

pytestmark = pytest.mark.release_independent


# By itself


@pytest.fixture
def portable() -> Iterator[PortableProcessBackend]:
    backend = PortableProcessBackend()
    backend.start([range(1), range(1, 2)], 8)
    yield backend
    assert backend.stop(0.0) == []


def received(backend: PortableProcessBackend, count: int) -> list[tuple[int, Reply | Lost]]:
    replies: list[tuple[int, Reply | Lost]] = []
    while len(replies) < count:
        new = backend.wait(10.0)
        assert new
        replies += new
    return replies


def test_large_messages_in_both_directions(portable):
    """Requests are sent while a large reply has not been read."""

    def constructor(text: str = "x" * 1_000_000) -> None:
        raise ValueError(text)

    pickled, adapter = Pickled(cloudpickle.dumps(constructor)), Pickled(cloudpickle.dumps(None))
    construction = Construction({7: pickled}, {7: 0}, AutoresetMode.SAME_STEP, adapter)
    for _ in range(3):
        portable.post(dict.fromkeys((0, 1), Request(Message.ACCESS, (7,), construction)))
    replies = received(portable, 6)
    assert sorted(worker for worker, _ in replies) == [0, 0, 0, 1, 1, 1]
    assert all(isinstance(reply, Reply) and len(reply.failures[7].summary) > 1_000_000 for _, reply in replies)


def test_each_death_is_reported_once(portable):
    portable.interrupt()
    assert portable.wait() == []
    assert "spawn.py" in portable.stack(0)
    portable.post({1: Request(Message.CLOSE)})
    ((worker, reply),) = received(portable, 1)
    assert (worker, reply.request) == (1, Message.CLOSE)
    portable.post(dict.fromkeys((0, 1), Request(Message.CLOSE)))
    replies = dict(received(portable, 2))
    assert portable.stack(1) == ""
    assert replies[1] == Lost(0, "")
    assert portable.wait(0.05) == []
    portable.post({1: Request(Message.CLOSE)})
    assert portable.wait(1.0) == [(1, Lost(0, ""))]


def test_replies_that_were_there_already_do_not_end_later_waits(portable):
    """A long run would slow down: each of millions of such replies would end one wait."""
    count, replies = 50_000, []
    portable.post({0: Request(Message.TRACE, (0,) * count, False, each=True)})
    wait_for(lambda: len(replies) == count or replies.extend(portable.wait(0.0)), 60.0)
    began = time.thread_time()
    assert portable.wait(0.3) == []
    assert time.thread_time() - began < 0.03


def test_an_interrupt_is_not_lost_among_replies(portable):
    for _ in range(3):
        portable.post({0: Request(Message.TRACE, (0,), False)})
        portable.interrupt()
        replies = portable.wait(10.0, 2)
        assert len(replies) <= 1
        assert len(replies) + len(portable.wait(10.0) if not replies else []) == 1


class Unreadable:
    """Raises when it is unpickled."""

    def __init__(self, kind: type[BaseException], *arguments: Any) -> None:
        self.raised = kind, arguments

    def __reduce__(self) -> Any:
        return _raise, self.raised


def _raise(kind: type[BaseException], arguments: tuple[Any, ...]) -> Any:
    raise kind(*arguments)


def unreadable(request: Request) -> bytes:
    """Pickled, with functions of this module by value."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def link() -> Iterator[tuple[Any, Any, Any]]:
    """The program's end of a connection, the worker's end, and the worker's socket for descriptors."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        end = spawn._socket_of(theirs)
        yield ours, theirs, end
        if end is not None:
            end.close()


UNREADABLE = [ValueError, EOFError, ConnectionRefusedError, SystemExit, KeyboardInterrupt, RecursionError]
"""`EOFError` and `ConnectionError` must not be taken for the end of the program."""


@pytest.mark.parametrize("with_constructors", [False, True])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_message_that_cannot_be_unpickled(kind, with_constructors, link):
    """It becomes the loss of the worker, with cause and traceback; the next message is in order."""
    ours, theirs, end = link
    for request in (Request(Message.CALL, (0,), Unreadable(kind, "no such map")), Request(Message.CLOSE)):
        if with_constructors:
            ours.send_bytes(b"0")
        ours.send_bytes(unreadable(request))
    lost = spawn._receive_request(theirs, end)
    assert isinstance(lost, Lost)
    assert lost.reason.startswith(f"it could not read a request: {kind.__name__}")
    assert "no such map" in lost.reason
    assert "in _raise" in lost.stack
    assert spawn._receive_request(theirs, end) == Request(Message.CLOSE)
    ours.close()
    with pytest.raises((EOFError, ConnectionError)):
        spawn._receive_request(theirs, end)


@pytest.mark.skipif(sys.platform == "win32", reason="no descriptors are sent there")
def test_descriptor_that_is_lost(link):
    """As when the worker has too many files open: the loss names the limit, and the next message is in order."""
    ours, theirs, end = link
    ours.send_bytes(b"2")
    sending = spawn._socket_of(ours)
    read, write = os.pipe()
    socket.send_fds(sending, [b"\0"], [read])
    socket.send_fds(sending, [b"\0"], [])
    for _ in range(2):
        ours.send_bytes(pickle.dumps(Request(Message.CLOSE)))
    os.close(read)
    lost = spawn._receive_request(theirs, end)
    assert isinstance(lost, Lost)
    assert "a descriptor was lost" in lost.reason
    assert spawn._receive_request(theirs, end) == Request(Message.CLOSE)
    with pytest.raises(BrokenPipeError):
        os.write(write, b"x")  # the other descriptor has been closed
    os.close(write)
    sending.close()


def test_request_that_cannot_be_unpickled(portable, monkeypatch):
    """The loss says so; the other worker goes on, and a new one can take the place."""
    worker = portable._handles[0]
    pickled = unreadable(Request(Message.CALL, (0,), Unreadable(EOFError, "no such map")))
    with monkeypatch.context() as patched:
        patched.setattr(spawn.pickle, "dumps", lambda *_: pickled)
        worker.post(Request(Message.TRACE, (0,), False))
    ((index, lost),) = received(portable, 1)
    assert index == 0
    assert isinstance(lost, Lost)
    assert lost.reason.startswith("it could not read a request: EOFError: no such map")
    assert worker.exitcode() is not None
    portable.start_worker(0, range(1))
    portable.post(dict.fromkeys((0, 1), Request(Message.CLOSE)))
    assert all(isinstance(reply, Reply) for _, reply in received(portable, 2))


def test_request_that_cannot_be_pickled(portable):
    """The error is raised where the request is posted."""
    text = r"worker 1 \(environment 1\): a request for CALL cannot be pickled: TypeError: cannot pickle"
    with pytest.raises(ParallelEnvError, match=text) as caught:
        portable.post({1: Request(Message.CALL, (1,), threading.Lock())})
    assert (caught.value.env_ids, caught.value.worker) == ((1,), 1)


@pytest.mark.parametrize("thread", ["_send", "_receive"])
def test_thread_of_a_connection_that_fails(thread, portable, monkeypatch):
    """Whatever it raises, the worker counts as lost, and says why."""
    worker = portable._handles[0]

    class Broken:
        def __getattr__(self, name: str) -> Any:
            if name == "send_bytes":
                raise RuntimeError("out of order")
            return getattr(connection, name)

    connection = worker._connection
    if thread == "_send":
        worker._connection = Broken()
        portable.post({0: Request(Message.TRACE, (0,), False)})
    else:
        monkeypatch.setattr(worker, "_report", fails_once(worker._report))
        portable.post({0: Request(Message.TRACE, (0,), False)})
        received(portable, 1)  # the thread has waited for it in the method before
        portable.post({0: Request(Message.TRACE, (0,), False)})
    ((index, lost),) = received(portable, 1)
    assert index == 0
    assert isinstance(lost, Lost)
    assert "RuntimeError: out of order" in lost.reason
    worker._connection = connection


def fails_once(report: Callable[[Any], None]) -> Callable[[Any], None]:
    calls: list[Any] = []

    def failing(reply: Any) -> None:
        calls.append(reply)
        if len(calls) == 1:
            raise RuntimeError("out of order")
        report(reply)

    return failing


def test_error_names_worker_and_environment(monkeypatch):
    monkeypatch.setattr(spawn, "dumps_request", lambda *_: (b"\x80\x04no pickle", []))
    with pytest.raises(
        WorkerCrashed, match=r"worker 0 \(environment 0\) died.*: it could not read a request: "
    ) as caught:
        ParallelEnv([Counting], backend=PortableProcessBackend(), num_workers=1)
    assert caught.value.env_ids == (0,)
    assert "Traceback" in caught.value.stack


def test_replacement_that_dies_during_its_start(portable, monkeypatch):
    """It counts as lost, and can be replaced again."""
    with monkeypatch.context() as patched:
        start_with(patched, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        portable.start_worker(1, range(1, 2))
    portable.post({1: Request(Message.CLOSE)})
    assert received(portable, 1) == [(1, Lost(-signal.SIGKILL, ""))]
    portable.start_worker(1, range(1, 2))
    portable.post({1: Request(Message.CLOSE)})
    ((worker, reply),) = received(portable, 1)
    assert (worker, reply.request) == (1, Message.CLOSE)


def start_with(monkeypatch, program):
    """Workers run this program instead of their own."""
    monkeypatch.setattr(spawn, "_PROGRAM", program)


def test_worker_that_cannot_start(monkeypatch, capfd):
    start_with(monkeypatch, "import no_such_module")
    backend = PortableProcessBackend()
    with pytest.raises(RuntimeError, match="worker 0 ended with exit code 1"):
        backend.start([range(1), range(1, 2)], 8)
    assert "no_such_module" in capfd.readouterr().err
    backend.post({1: Request(Message.CLOSE)})
    assert backend.wait(1.0) == [(1, Lost(None, ""))]
    assert backend.stop(0.0) == []


def test_worker_that_does_not_start_in_time(monkeypatch):
    start_with(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr("marl_parallel.backends.spawn._STARTED_WITHIN_S", 0.2)
    with pytest.raises(TimeoutError, match="worker 0"):
        PortableProcessBackend().start([range(1), range(1, 2)], 8)


STOPS_IN_START = """
import os, signal
from multiprocessing import connection
connection.{kind}({handle}).recv()
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_worker_that_stops_during_its_start(monkeypatch):
    """It has received its first message and sends nothing."""
    start_with(monkeypatch, STOPS_IN_START)
    monkeypatch.setattr("marl_parallel.backends.spawn._STARTED_WITHIN_S", 5.0)
    with pytest.raises(TimeoutError, match="worker 0"):
        PortableProcessBackend().start([range(1), range(1, 2)], 8)


# By the environment variable


@pytest.fixture
def opened(monkeypatch) -> Callable[..., Backend]:
    """The backend of `backend="process"` with this value of the variable; None for no variable."""

    def open_with(value: str | None, **arguments: Any) -> Backend:
        if value is None:
            monkeypatch.delenv(backends.PORTABLE, raising=False)
        else:
            monkeypatch.setenv(backends.PORTABLE, value)
        backend = backends.open_backend("process", worker_threads=1, **arguments)
        assert backend.stop(0.0) == []
        return backend

    return open_with


def test_variable_chooses_the_portable_processes(opened):
    assert type(opened("1")) is PortableProcessBackend


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_linux_has_processes_of_its_own(value, opened):
    assert type(opened(value)).__name__ == "ProcessBackend"


@pytest.mark.parametrize("value", ["yes", "true", "2", " 1"])
def test_wrong_values_of_the_variable(value, opened):
    with pytest.raises(ValueError, match=f'MARL_PARALLEL_PORTABLE must be "1" or "0", got {value!r}'):
        opened(value)


def test_what_the_portable_processes_do_not_have(opened):
    with pytest.raises(ValueError, match='wait="spin" needs Linux; with MARL_PARALLEL_PORTABLE=1'):
        opened("1", wait="spin")


STARTS_LATE = """
import os, time
while not os.path.exists({flag!r}):
    time.sleep(0.01)
"""


def test_replacements_start_while_others_work(portable, monkeypatch, tmp_path):
    """`start_worker` does not wait; requests are carried out when the replacement has started."""
    flag = tmp_path / "start"
    with monkeypatch.context() as patched:
        start_with(patched, STARTS_LATE.replace("{flag!r}", repr(str(flag))) + spawn._PROGRAM)
        portable.start_worker(1, range(1, 2))
    portable.post(dict.fromkeys((0, 1), Request(Message.CLOSE)))
    assert [worker for worker, _ in received(portable, 1)] == [0]
    assert portable.wait(0.05) == []
    flag.touch()
    ((worker, reply),) = received(portable, 1)
    assert (worker, reply.request) == (1, Message.CLOSE)


def test_workers_import_the_package_of_their_parent(tmp_path, monkeypatch):
    """Also if another copy comes first on the path that an interpreter starts with."""
    (tmp_path / "marl_parallel").mkdir()
    (tmp_path / "marl_parallel" / "__init__.py").write_text("raise ImportError('another copy')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    backend = PortableProcessBackend()
    try:
        backend.start([range(1)], 8)
    finally:
        assert backend.stop(0.0) == []


# On other systems


# Removes features that other systems lack from every interpreter that has this on its path.
ELSEWHERE = """
import os, signal, socket, sys
sys.modules["fcntl"] = None
lacking = {
    os: "fork memfd_create pidfd_open waitid sched_getaffinity register_at_fork setsid".split(),
    signal: "pidfd_send_signal sigwaitinfo".split(),
    socket: "SOCK_SEQPACKET".split(),
}
for module, names in lacking.items():
    for name in names:
        vars(module).pop(name, None)
"""
ON_IT = """
import sys
sys.path.insert(0, {tests!r})
from unittest import mock
from marl_parallel import ParallelEnv
assert not any(name.startswith("marl_parallel.backends.memory") for name in sys.modules)
from simulators.deterministic import Hunt
with mock.patch("marl_parallel.backends.memory.has_semaphores", return_value=False):
    with ParallelEnv([Hunt] * 2, num_workers=2) as env:
        observations, _ = env.reset()
        env.step([{{agent: env.action_space[agent].sample() for agent in acting}} for acting in env.acting])
        assert type(env.stepper.source.backend).__name__ == "PortableProcessBackend"
        print(len(set(env.call("pid"))))
    try:
        ParallelEnv([Hunt], wait="spin")
    except ValueError as error:
        print(error)
"""


def test_other_operating_systems(tmp_path):
    """Simulated: neither imports nor a batch need anything specific to Linux."""
    (tmp_path / "sitecustomize.py").write_text(ELSEWHERE)
    done = subprocess.run(
        [sys.executable, "-c", ON_IT.format(tests=str(TESTS))],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    spin = 'wait="spin" needs Linux; on this system processes sleep while they wait'
    assert done.stdout.splitlines() == ["2", spin]
