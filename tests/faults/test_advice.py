"""Advice that fits: no terminal, not the main thread, a limit of the system by its name and command."""

from __future__ import annotations

import errno
import functools
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import TESTS
from helpers.launching import linux_only
from helpers.setups import KILLABLE_SETUPS, Setup
from simulators import demanding
from simulators.demanding import NEED_A_TERMINAL, NEED_NEITHER, NEED_THE_MAIN_THREAD, REACH_A_LIMIT
from simulators.deterministic import Hunt
from simulators.failing import Fragile, hard_exit, system_exit

from marl_parallel import EnvError, ParallelEnv, RecyclePolicy
from marl_parallel.backends import launching, memory, spawn
from marl_parallel.core.reports import advice

pytestmark = pytest.mark.release_independent

SERIAL = 'workers have no terminal: use backend="serial"'
PROCESS = 'use backend="process"'
USUAL = "fix the simulator, or its arguments"
PORTABLE = Setup("portable", True, 2)
WORKERS = [*KILLABLE_SETUPS, Setup("hybrid", True, 2), PORTABLE]
"""Setups in which environment 2 of three is in a process of its own."""


def named(table: str, name: str) -> Any:
    """Carry out a call of one of the tables."""
    call = getattr(demanding, table)[name]
    return (call[0] if isinstance(call, tuple) else call)()


def envs(notes: Path, place: str, table: str, name: str) -> list[Any]:
    fault = {place: functools.partial(named, table, name)}
    return [functools.partial(Fragile, fault if env_id == 2 else {}, notes) for env_id in range(3)]


def message_of(make: Callable[[], ParallelEnv]) -> str:
    """The error of the first reset and step."""

    def play() -> None:
        with make() as env:
            env.reset()
            env.step([{"a": 0, "b": 0}] * 3)

    with pytest.raises(EnvError) as caught:
        play()
    assert caught.value.env_ids == (2,)
    return str(caught.value)


def what_to_do(text: str) -> str:
    return text.partition("\n\nWhat to do: ")[2].partition("\n\n")[0]


# -- terminals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEED_A_TERMINAL)
def test_no_terminal(name, tmp_path):
    text = message_of(lambda: ParallelEnv(envs(tmp_path, "step", "NEED_A_TERMINAL", name), num_workers=1))
    assert what_to_do(text).startswith(SERIAL)


@pytest.mark.in_turn
@pytest.mark.parametrize("setup", WORKERS, ids=str)
@pytest.mark.parametrize("place", ["constructor", "reset", "step"])
@pytest.mark.parametrize("name", ["break_here", "ask"])
def test_no_terminal_in_workers(name, place, setup, build, tmp_path):
    text = message_of(lambda: build(envs(tmp_path, place, "NEED_A_TERMINAL", name), setup))
    assert what_to_do(text).startswith(SERIAL)
    assert f"raised in {place}" in text


@pytest.mark.parametrize("name", NEED_NEITHER)
def test_errors_that_resemble_those_of_a_terminal(name, tmp_path):
    text = message_of(lambda: ParallelEnv(envs(tmp_path, "step", "NEED_NEITHER", name), num_workers=1))
    assert what_to_do(text).startswith(USUAL)


SCRIPT = """
    from simulators.deterministic import Hunt
    from marl_parallel import ParallelEnv

    class Asks(Hunt):
        def reset(self, **keywords):
            print("got", input())
            return super().reset(**keywords)

    with ParallelEnv([Asks] * 2, backend={backend!r}, num_workers=1) as env:
        env.reset()
        env.reset()
"""


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_the_terminal_of_the_program(backend):
    """It is the simulator's too; at the end of the input, the advice is not the one for workers."""
    done = run(SCRIPT.format(backend=backend), input="one\ntwo\nthree\n")
    assert [line for line in done.stdout.splitlines() if line] == ["got one", "got two", "got three"]
    assert "EOFError: EOF when reading a line" in done.stderr
    assert USUAL in done.stderr
    assert "terminal" not in done.stderr


def run(script: str, **more: Any) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environ, **more)


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["constructor", "reset", "step"])
@pytest.mark.parametrize("name", NEED_THE_MAIN_THREAD)
def test_not_the_main_thread(name, place, build, tmp_path):
    setup = Setup("thread", True, 2)
    text = message_of(lambda: build(envs(tmp_path, place, "NEED_THE_MAIN_THREAD", name), setup))
    assert PROCESS in what_to_do(text)


@pytest.mark.parametrize("backend", ["serial", "hybrid"])
def test_not_the_main_thread_of_the_program(backend, tmp_path):
    """Another thread of the program makes and steps the environments."""
    texts = []
    fault = {"reset": functools.partial(named, "NEED_THE_MAIN_THREAD", "handle_a_signal")}

    def work() -> None:
        with ParallelEnv([functools.partial(Fragile, fault, tmp_path)] * 2, backend=backend, num_workers=2) as env:
            try:
                env.reset()
            except EnvError as error:
                texts.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert PROCESS in what_to_do(texts[0])


@pytest.mark.in_turn
@pytest.mark.parametrize("name", NEED_THE_MAIN_THREAD)
@pytest.mark.parametrize("setup", [Setup("serial", True, 1), *WORKERS], ids=str)
def test_the_main_thread_of_a_process(name, setup, build, tmp_path):
    env = build(envs(tmp_path, "step", "NEED_THE_MAIN_THREAD", name), setup)
    env.reset()
    env.step([{"a": 0, "b": 0}] * 3)


# -- limits that simulators reach --------------------------------------------------------------------------------------


@pytest.mark.in_turn
@pytest.mark.parametrize("name", REACH_A_LIMIT)
@pytest.mark.parametrize("place", ["constructor", "step"])
def test_limits_that_simulators_reach(name, place, backend_setup, build, tmp_path):
    text = message_of(lambda: build(envs(tmp_path, place, "REACH_A_LIMIT", name), backend_setup))
    assert REACH_A_LIMIT[name][1] in what_to_do(text)


# -- limits that this package reaches ----------------------------------------------------------------------------------

SWEEP = """
    import gc, os, resource, sys, warnings
    warnings.simplefilter("ignore")
    from simulators.deterministic import Hunt
    from marl_parallel import ParallelEnv
    from marl_parallel.backends.spawn import PortableProcessBackend

    def attempt():
        backend = PortableProcessBackend() if {backend!r} == "portable" else {backend!r}
        with ParallelEnv([Hunt] * 2, backend=backend, num_workers=2) as env:
            env.reset()

    attempt()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in range(5, 60, {step}):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            attempt()
            text = "works"
        except Exception as error:
            text = f"{{type(error).__name__}}: {{error}}"
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.collect()
        left = len(os.listdir("/proc/self/fd")) - before
        print(limit, left, text, sep="|", flush=True)
        if text == "works":
            break
"""


@linux_only
@pytest.mark.parametrize(("backend", "step"), [("process", 2), ("portable", 3), ("hybrid", 4)])
def test_too_few_descriptors_to_start(backend, step):
    """With any limit, the start succeeds, or its error names the limit; no descriptor is left open."""
    done = run(SWEEP.format(backend=backend, step=step))
    lines = [line.split("|", 2) for line in done.stdout.splitlines() if "|" in line]
    assert lines[-1][2] == "works", done.stdout + done.stderr
    assert len(lines) >= 3
    for limit, left, text in lines[:-1]:
        assert text.startswith("OSError: [Errno 24]"), text
        assert f"raise the limit of open files (`ulimit -n`, now {limit}, at most " in text
        assert int(left) <= 0, text


SIZES = """
    import functools, resource
    import gymnasium
    import numpy as np
    from marl_parallel import ParallelEnv, Rollout
    from marl_parallel.backends.spawn import PortableProcessBackend
    from marl_parallel.vector import StackedVecEnv

    def cart_pole(table=None):
        return gymnasium.make("CartPole-v1")

    def make(count=2, constructor=cart_pole):
        backend = PortableProcessBackend() if {backend!r} == "portable" else {backend!r}
        return ParallelEnv([constructor] * count, "NEXT_STEP", backend=backend, num_workers=2)

    def report(what, function):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            function()
            print(what, "works")
        except Exception as error:
            print(what, type(error).__name__, error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def start():
        make(200).close()

    report("start", start)
    report("arrays", lambda: make(2, functools.partial(cart_pole, np.zeros(100_000))).close())
    with StackedVecEnv(make()) as env:
        env.reset()
        report("enlarge", lambda: Rollout(env, 10_000))
        print("goes on", env.reset()[0].shape)
"""


@pytest.mark.parametrize("backend", ["process", "portable", "hybrid"])
def test_files_that_are_too_large(backend):
    done = run(SIZES.format(backend=backend))
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["start", "arrays", "enlarge", "goes"], done.stderr
    for line in lines[:-1]:
        assert "[Errno 27]" in line
        assert "`ulimit -f`, now 4, at most " in line


def refusing(number: int) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


COMMANDS = {
    errno.EAGAIN: "`ulimit -u`",
    errno.EMFILE: "`ulimit -n`",
    errno.ENFILE: "`sysctl fs.file-max`",
    errno.EFBIG: "`ulimit -f`",
    errno.ENOMEM: "`ulimit -v`",
    errno.ENOSPC: "`df`",
}
PLACES = [
    pytest.param(memory.os, "ftruncate", "process", [errno.EFBIG, errno.ENOMEM, errno.ENOSPC], id="allocate"),
    pytest.param(spawn.subprocess, "Popen", "portable", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE], id="portable"),
    pytest.param(launching.subprocess, "Popen", "process", [errno.EAGAIN, errno.ENOMEM], id="server", marks=linux_only),
    pytest.param(memory.socket, "socketpair", "process", [errno.EMFILE, errno.ENFILE], id="sockets", marks=linux_only),
    pytest.param(memory.os, "memfd_create", "serial", [errno.EMFILE, errno.ENFILE], id="memory", marks=linux_only),
    pytest.param(memory.mmap, "mmap", "thread", [errno.ENOMEM], id="block"),
]


@pytest.mark.starts_anew
@pytest.mark.parametrize(("module", "name", "backend", "numbers"), PLACES)
def test_limits_at_the_start(module, name, backend, numbers, build, monkeypatch):
    for number in numbers:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, refusing(number))
            with pytest.raises(type(OSError(number, "")), match="What to do") as caught:
                build([Hunt] * 2, Setup(backend, True, 2))
            assert caught.value.errno == number
            assert COMMANDS[number] in str(caught.value)
            assert str(caught.value).count("What to do") == 1


@pytest.mark.parametrize("setup", [Setup("thread", True, 2), PORTABLE], ids=str)
def test_no_more_threads(setup, build, monkeypatch):
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match=r"can't start new thread.*`ulimit -u`"):
            build([Hunt] * 2, setup)
    build([Hunt] * 2, setup).reset()


def refuse_forks(patched: Any) -> None:
    """The fork server answers that it cannot fork."""
    request, asked = launching._Server.request, []

    def note(server: Any, number: int, *more: Any) -> None:
        asked.append(number)

    def reply(_: Any, timeout: float) -> Any:
        return (launching.ServerReply.FAILED, asked.pop(), errno.EAGAIN) if asked else None

    assert callable(request)
    patched.setattr(launching._Server, "request", note)
    patched.setattr(launching._Server, "reply", reply)


@linux_only
def test_no_more_processes_at_the_start(monkeypatch):
    refuse_forks(monkeypatch)
    with pytest.raises(BlockingIOError, match=r"cannot fork a worker: .*`ulimit -u`, now .*pids\.max"):
        ParallelEnv([Hunt] * 2)


def test_no_more_processes_at_a_restart(start_method, build, monkeypatch, tmp_path):
    setup = PORTABLE if start_method == "portable" else Setup("process", True, 2)
    env = build([functools.partial(Fragile, {"step": hard_exit}, tmp_path)] * 2, setup, on_error="restart")
    env.reset()
    with monkeypatch.context() as patched:
        if start_method == "portable":
            patched.setattr(spawn.subprocess, "Popen", refusing(errno.EAGAIN))
        else:
            refuse_forks_of_restarts(patched)
        with pytest.raises(BlockingIOError, match=r"`ulimit -u`"):
            env.step([{"a": 0, "b": 0}] * 2)


def refuse_forks_of_restarts(patched: Any) -> None:
    """Requests for further workers fail; replies about those that live are real."""
    reply, asked = launching._Server.reply, []

    def note(server: Any, number: int, *more: Any) -> None:
        asked.append(number)

    def refuse(server: Any, timeout: float) -> Any:
        return (launching.ServerReply.FAILED, asked.pop(), errno.EAGAIN) if asked else reply(server, timeout)

    patched.setattr(launching._Server, "request", note)
    patched.setattr(launching._Server, "reply", refuse)


def test_no_more_processes_for_recycling(start_method, build, monkeypatch, caplog, tmp_path):
    """The environments go on, and the warning names the limit."""
    setup = PORTABLE if start_method == "portable" else Setup("process", True, 2)
    env = build([functools.partial(Fragile, {}, tmp_path, length=2)] * 2, setup, recycle=RecyclePolicy(max_episodes=1))
    env.reset()
    if start_method == "portable":
        monkeypatch.setattr(spawn.subprocess, "Popen", refusing(errno.EAGAIN))
    else:
        refuse_forks_of_restarts(monkeypatch)
    with caplog.at_level(logging.WARNING, "marl_parallel"):
        for _ in range(5):
            env.step([{"a": 0, "b": 0}] * 2)
    assert "`ulimit -u`" in caplog.text


def test_a_limit_is_named_once():
    import resource  # not on Windows

    error = OSError(errno.EMFILE, "no room")
    for _ in range(3):
        advice.name_limit(error)
    assert str(error).count("`ulimit -n`") == 1
    assert str(error).startswith("[Errno 24] no room. What to do: raise the limit of open files (`ulimit -n`, now ")
    assert str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) in str(error)


@pytest.mark.parametrize("error", [OSError("no errno"), FileNotFoundError(2, "no map"), RuntimeError("no road")])
def test_other_errors_stay_as_they_are(error):
    text = str(error)
    assert str(advice.name_limit(error)) == text


def test_usual_advice(backend_setup, build, tmp_path):
    text = message_of(
        lambda: build(
            [functools.partial(Fragile, {"step": system_exit} if i == 2 else {}, tmp_path) for i in range(3)],
            backend_setup,
        )
    )
    assert what_to_do(text).startswith(USUAL)


# -- flags of absl -----------------------------------------------------------------------------------------------------

# What absl-py 2.5 does with flags that are not defined, not parsed, or pickled.
ABSL = """
class UnparsedFlagAccessError(Exception): pass
class UnrecognizedFlagError(Exception): pass

class FlagValues:
    def __init__(self):
        self.__dict__.update(parsed=False, defaults={})

    def __getattr__(self, name):
        if name not in self.defaults:
            raise AttributeError(name)
        if not self.parsed:
            raise UnparsedFlagAccessError(f"Trying to access flag --{name} before flags were parsed.")
        return self.defaults[name]

    def __call__(self, argv, known_only=False):
        for one in argv[1:]:
            name = one.lstrip("-").partition("=")[0]
            if name not in self.defaults and not known_only:
                raise UnrecognizedFlagError(f"Unknown command line flag '{name}'")
        self.__dict__["parsed"] = True

    def __getstate__(self):
        raise TypeError("can't pickle FlagValues")

FLAGS = FlagValues()

class FlagHolder:
    def __init__(self, name):
        self._flagvalues, self._name = FLAGS, name

    @property
    def value(self):
        return getattr(self._flagvalues, self._name)

def DEFINE_integer(name, default, help):
    FLAGS.defaults[name] = default
    return FlagHolder(name)
"""
PROGRAM = """
from absl import flags
import functools, sys

FLAGS, SIZE = flags.FLAGS, flags.DEFINE_integer("size", 3, "in the program")
FLAGS(["program"])

def reads_a_global():
    return Hunt(FLAGS.size)

def reads_a_holder():
    return Hunt(SIZE.value)

class Keeps:
    def __init__(self):
        self.flags = FLAGS

    def __call__(self):
        return Hunt(self.flags.size)

keeps = Keeps()

def not_defined():
    from absl import flags
    return Hunt(flags.FLAGS.size)

def not_parsed():
    from absl import flags
    flags.DEFINE_integer("of_library", 3, "")
    return Hunt(flags.FLAGS.of_library)

def unknown():
    from absl import flags
    flags.FLAGS(["program", "--size=3"])

def parses_known_ones():
    from absl import flags
    flags.DEFINE_integer("of_library", 3, "")
    flags.FLAGS(["program", "--size=3"], known_only=True)
    assert flags.FLAGS.of_library == 3
    return Hunt()

with_values = functools.partial(lambda size: Hunt(), size=FLAGS.size)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The definitions of a script that uses absl's flags."""
    (tmp_path / "absl").mkdir()
    (tmp_path / "absl" / "__init__.py").touch()
    (tmp_path / "absl" / "flags").mkdir()
    (tmp_path / "absl" / "flags" / "__init__.py").write_text("from absl.flags._flagvalues import *\n")
    (tmp_path / "absl" / "flags" / "_flagvalues.py").write_text(ABSL)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("absl", "absl.flags", "absl.flags._flagvalues"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    names = {"__name__": "__main__", "Hunt": Hunt}
    exec(PROGRAM, names)
    return names


@pytest.mark.parametrize("constructor", ["reads_a_global", "reads_a_holder", "keeps"])
def test_flags_that_cannot_be_pickled(program, constructor):
    with pytest.raises(TypeError, match="can't pickle FlagValues") as caught:
        ParallelEnv([program[constructor]] * 2)
    text = str(caught.value)
    assert f"What to do: {advice.FLAGS}; backend=" in text
    assert "into a module" not in text


@pytest.mark.parametrize("backend", ["process", "hybrid"])
@pytest.mark.parametrize("constructor", ["not_defined", "not_parsed", "unknown"])
def test_flags_that_workers_do_not_have(program, backend, constructor):
    constructors = [program["with_values"], program[constructor]]  # the second one in a worker process
    with pytest.raises(EnvError, match=r"Flag|AttributeError: size") as caught:
        ParallelEnv(constructors, backend=backend, num_workers=2)
    assert f"What to do: {advice.FLAGS}.\n" in str(caught.value)


def test_what_the_advice_about_flags_says_works(program):
    ParallelEnv([program["with_values"], program["parses_known_ones"]], num_workers=2).close()
