"""`sys.stdout` and `sys.stderr` that are no files: workers print where the caller's own `print` goes."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gymnasium.error import ClosedEnvironmentError
from helpers import ROOT, TESTS
from helpers.interruptions import calling_at
from helpers.launching import linux_only
from helpers.leaks import HeldResources, nothing_more
from helpers.processes import wait_for
from helpers.setups import Setup
from helpers.start_methods import also_portable, arguments, chosen
from simulators.counting import ACTIONS
from simulators.talking import Talking

from marl_parallel import ParallelEnv, WorkerCrashed, backends
from marl_parallel.backends.relay import Relay, is_file

pytestmark = pytest.mark.release_independent

WAYS = {"stdout": ["child", "descriptor", "stdout"], "stderr": ["child-stderr", "stderr"]}


@pytest.fixture(autouse=True)
def whole_lines(monkeypatch) -> None:
    """Else lines of two workers may mix."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@pytest.fixture
def talk(build, request) -> Callable[..., ParallelEnv]:
    def create(num_envs: int = 3, **more: Any) -> ParallelEnv:
        env: ParallelEnv = build([Talking] * num_envs, Setup("process", True, 2), **chosen(request), **more)
        env.reset()
        return env

    return create


@contextlib.contextmanager
def replaced(stdout: Any, stderr: Any = None) -> Iterator[None]:
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(sys.stderr if stderr is None else stderr):
        yield


def exits() -> None:
    print("last words")
    os._exit(3)


class Tee:
    """As programs write it that want their output in a log too."""

    def __init__(self, *streams: Any) -> None:
        self.streams, self.log = streams, io.StringIO()

    def write(self, text: str) -> None:
        for stream in (*self.streams, self.log):
            stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.streams[0], name)


@also_portable
def test_everything_is_there_when_the_call_returns(talk, capfd):
    with replaced(io.StringIO(), io.StringIO()):
        env = talk()
        for word in ("hello", "größer"):
            for name in WAYS:
                getattr(sys, name).truncate(0)
                getattr(sys, name).seek(0)
            env.call("say_in_all_ways", word, env_ids=[0, 2])
            for name, ways in WAYS.items():
                assert sorted(getattr(sys, name).getvalue().splitlines()) == sorted(f"{word} {way}" for way in ways * 2)
    assert capfd.readouterr() == ("", "")


def test_objects_of_other_libraries(talk, capfd):
    tee = Tee(sys.stdout)
    with replaced(tee):
        talk().call("say", "twice", env_ids=[2])
    assert capfd.readouterr().out == tee.log.getvalue() == "twice\n"


def test_write_is_replaced(talk, capfd, monkeypatch):
    """As trackers of experiments do."""
    seen: list[str] = []
    with open(os.dup(1), "w") as stream:
        stream.write = seen.append  # type: ignore[method-assign,assignment]
        with replaced(stream):
            talk().call("say", "hello", env_ids=[2])
    assert "".join(seen) == "hello\n"


def test_the_stream_of_the_moment(talk):
    first, second = io.StringIO(), io.StringIO()
    with replaced(first):
        env = talk()
        env.call("say", "one", env_ids=[2])
        with replaced(second):
            env.call("say", "two", env_ids=[2])
        env.call("say", "three", env_ids=[2])
    assert (first.getvalue(), second.getvalue()) == ("one\nthree\n", "two\n")


def test_streams_that_are_slower_than_workers():
    """A call of the caller ends all the same: children of simulators may print without end."""
    stop, writes = threading.Event(), 0
    of_caller = threading.current_thread()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            nonlocal writes
            stop.wait(0.002)
            writes += threading.current_thread() is of_caller
            if writes > 1000:
                stop.set()
            return len(text)

    def print_without_end(descriptor: int) -> None:
        while not stop.is_set():
            os.write(descriptor, b"x" * 65536)

    relay = Relay()
    try:
        with replaced(Slow(), Slow()):
            descriptor, _ = relay.descriptors()
            assert descriptor is not None
            writer = threading.Thread(target=print_without_end, args=(descriptor,))
            writer.start()
            while writes <= 3:  # the relay's own thread may be quicker
                relay.bring()
            ended_by_itself = not stop.is_set()
            stop.set()
            wait_for(lambda: relay.bring() or not writer.is_alive())
            relay.close()
    finally:
        stop.set()
    assert ended_by_itself


@also_portable
@linux_only
def test_signal_handlers_that_close_while_output_is_written(talk):
    """The handler does not wait for its own call, which raises the error of closed environments."""
    seconds: list[float] = []

    class Signals(io.StringIO):
        armed = False

        def write(self, text: str) -> int:
            if self.armed and threading.current_thread() is threading.main_thread():
                self.armed = False
                time.sleep(0.2)  # the thread that passes on output waits for this one
                signal.raise_signal(signal.SIGUSR2)
            return super().write(text)

    def close(*_: object) -> None:
        began = time.monotonic()
        env.close()
        seconds.append(time.monotonic() - began)

    before = signal.signal(signal.SIGUSR2, close)
    try:
        with replaced(Signals()):
            env = talk()
            sys.stdout.armed = True  # type: ignore[attr-defined]
            with pytest.raises(ClosedEnvironmentError):
                env.call("say", "hello", "hello again")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(seconds) == 1
    assert seconds[0] < 4


def test_closing_in_the_middle_of_a_call_that_brings_output():
    """As a signal handler may do: nothing is lost, and the relay raises nothing."""
    closed_in = set[str]()
    for number in itertools.count(1):
        relay, stream = Relay(), io.StringIO()
        with replaced(stream):
            descriptor, _ = relay.descriptors()
            assert descriptor is not None
            os.write(descriptor, b"hello")
            with calling_at(number, backends.relay, relay.close) as functions:
                relay.bring()
            relay.close()
        assert stream.getvalue() == "hello", functions
        closed_in.update(functions)
        if not functions:
            break
    assert closed_in >= {"bring", "pass_on", "has_output"}


def test_closed_streams_do_not_lose_output(talk, capfd):
    stream = io.StringIO()
    with replaced(stream):
        env = talk()
        stream.close()
        env.call("say", "still here", env_ids=[2])
    assert capfd.readouterr().out == "still here\n"


@also_portable
def test_output_before_a_death_comes_before_its_error(talk):
    stream = io.StringIO()
    with replaced(stream):
        env = talk()
        env.set_attr("fault", [None, None, exits])
        with pytest.raises(WorkerCrashed):
            env.step([ACTIONS] * 3)
        assert stream.getvalue() == "last words\n"


@also_portable
def test_new_workers_write_there_too(talk):
    stream = io.StringIO()
    with replaced(stream):
        env = talk(on_error="restart")
        env.set_attr("fault", [None, None, exits])
        env.step([ACTIONS] * 3)
        env.call("say", "again", env_ids=[2])
        assert stream.getvalue() == "last words\nagain\n"


@also_portable
def test_much_output(talk):
    """More than a pipe holds, while nobody but the thread reads; characters of several bytes stay whole."""
    stream = io.StringIO()
    line = 999 * "é"
    with replaced(stream):
        env = talk()
        env.set_attr("fault", [None, None, lambda: [print(line) for _ in range(2000)]])
        env.send([ACTIONS], [2])
        wait_for(lambda: len(stream.getvalue()) > 1_000_000)
        env.recv()
        assert stream.getvalue() == 2000 * f"{line}\n"


@also_portable
def test_what_is_printed_while_it_closes(talk):
    stream = io.StringIO()
    with replaced(stream):
        env = talk()
        env.call("configure_close", "closed", env_ids=[2])
        env.close()
        assert stream.getvalue() == "closed\n"


@linux_only
@pytest.mark.whole_machine
def test_nothing_is_left(talk, start_method):
    def cycle() -> None:
        with replaced(io.StringIO(), io.StringIO()):
            with ParallelEnv([Talking] * 2, num_workers=2, on_error="restart", **arguments(start_method)) as env:
                env.reset()
                env.set_attr("fault", [exits, None])
                env.step([ACTIONS] * 2)
                assert {"marl_parallel-stdout", "marl_parallel-stderr"} <= {one.name for one in threading.enumerate()}
            dropped = ParallelEnv([Talking], **arguments(start_method))
            dropped.reset()

    cycle()
    before = HeldResources.now()
    for _ in range(2):
        cycle()
    nothing_more(before)


PROGRAM = """
import io, os, sys
sys.path.insert(0, {tests!r})
from helpers.start_methods import arguments
from simulators.talking import Talking
from marl_parallel import ParallelEnv

class Window(io.TextIOBase):
    "An editor's: without a file. There is no sys.__stdout__ in programs without a console."
    def write(self, text):
        os.write(1, text.upper().encode())

sys.stdout, sys.__stdout__ = Window(), None
env = ParallelEnv([Talking], **arguments({start_method!r}))
env.reset()
if os.fork() == 0:
    os._exit(0)  # a child that never uses it
os.wait()
env.call("say", "hello")
env.call("configure_close", "at the end")
"""


@linux_only
def test_programs_without_a_console_that_end_without_closing(start_method):
    text = PROGRAM.format(tests=str(TESTS), start_method=start_method)
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (b"HELLO\nAT THE END\n", b"")


def test_which_streams_are_files(tmp_path):
    with open(tmp_path / "log", "w") as file:
        assert is_file(file)
        assert not is_file(Tee(file))
    assert is_file(None)  # handled as before: the descriptor of the number, if it is open
    assert is_file(file)
    assert not is_file(io.StringIO())
    assert not is_file(io.TextIOWrapper(io.BytesIO()))
    assert not is_file(object())
