"""Signals to all processes of a job, as batch systems and users send them: the main program decides, workers survive.

What simulators do with signals themselves has its usual effect. `test_sigterm.py` has the same for SIGTERM.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import ROOT, TESTS
from helpers.processes import gone, wait_for
from helpers.signals import number_of
from helpers.start_methods import arguments
from simulators.counting import ACTIONS, Counting

from marl_parallel import EnvError, ParallelEnv, WorkerCrashed
from marl_parallel.backends.signals import JOB_SIGNALS, KNOWS_SENDERS, blocked

pytestmark = [
    pytest.mark.release_independent,
    pytest.mark.starts_anew,
    pytest.mark.skipif(sys.platform == "win32", reason="no such signals"),
]

NAMES = ["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGALRM", "SIGPROF", "SIGVTALRM", "SIGQUIT", "SIGINT"]
SIGNALS = [number_of(name) for name in NAMES]
if hasattr(signal, "SIGRTMIN"):
    SIGNALS += [signal.SIGRTMIN + 3, signal.SIGRTMAX - 2, signal.SIGRTMAX]
IN_CALLS = [number for number in SIGNALS if KNOWS_SENDERS or number != signal.SIGINT]


def children() -> set[psutil.Process]:
    return {*psutil.Process().children(recursive=True)}


def send(processes: set[psutil.Process], number: int) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


class Slow(Counting):
    """A step takes half a second, in which signals come; a file says that it has begun."""

    def __init__(self, folder: Path, seed: int, env_id: int) -> None:
        super().__init__(seed=seed)
        self.file = folder / f"in step {env_id}"

    def step(self, actions: Any) -> Any:
        self.file.touch()
        time.sleep(0.5)
        return super().step(actions)


def plain_steps(count: int) -> list[Any]:
    env = Counting(seed=1)
    env.reset(seed=1)
    return [env.step(ACTIONS)[1] for _ in range(count)]


def test_signals_to_all_processes(start_method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """While they are idle, and in the middle of a step; nothing is restarted, lost or printed."""
    before, ours = children(), {one for one in children() if "resource_tracker" in " ".join(one.cmdline())}
    with ParallelEnv(
        [functools.partial(Slow, tmp_path)] * 2, seed=1, num_workers=2, on_error="restart", **arguments(start_method)
    ) as env:
        env.reset()
        rewards = []
        others = children() - before
        assert len(others | ours) == {"forkserver": 6, "portable": 3}[start_method]
        for number in SIGNALS:
            send(others, number)
        rewards.append(env.step([ACTIONS] * 2)[1][0])
        for path in tmp_path.glob("in step *"):
            path.unlink()
        env.send([ACTIONS] * 2)
        wait_for(lambda: len([*tmp_path.glob("in step *")]) == 2)
        for number in IN_CALLS:
            send(others, number)
        rewards.append(env.recv().rewards[0])
        assert env.stats().restarts == 0
        assert children() >= others
        expected = plain_steps(2)
        assert [{**one} for one in rewards] == [{**one} for one in expected]
    assert gone(one.pid for one in others - ours if "resource_tracker" not in " ".join(cmdline(one)))
    assert "Traceback" not in capfd.readouterr().err


def test_signals_that_come_all_at_once(start_method: str) -> None:
    """As to a worker that gets no CPU for a while: their handlers do not run inside of each other."""
    with ParallelEnv([Counting] * 2, seed=1, num_workers=2, on_error="restart", **arguments(start_method)) as env:
        env.reset()
        for pid in env.call(lambda _: os.getpid()):
            os.kill(pid, signal.SIGSTOP)
            for number in IN_CALLS:
                os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
        rewards = env.step([ACTIONS] * 2)[1][0]
        assert env.stats().restarts == 0
        assert [{**rewards}] == [{**one} for one in plain_steps(1)]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_signals_while_workers_start(start_method: str) -> None:
    """Also before they can handle them."""
    started, before = threading.Event(), children()

    def sends() -> None:
        while not started.is_set():
            for number in IN_CALLS:
                send(children() - before, number)
            time.sleep(0.001)

    sender = threading.Thread(target=sends)
    sender.start()
    try:
        with ParallelEnv([Counting] * 2, num_workers=2, **arguments(start_method)) as env:
            env.reset()
            started.set()
            sender.join()
            env.step([ACTIONS] * 2)
    finally:
        started.set()
        sender.join()


# What the program that gets SIGUSR1 does: nothing, so that it dies; or it handles the signal, later than its workers.
PROGRAM = """
import signal, sys, time
sys.path.insert(0, {tests!r})
from helpers.start_methods import arguments
from simulators.counting import ACTIONS, Counting
from marl_parallel import ParallelEnv
env = ParallelEnv([Counting] * 2, num_workers=2, **arguments(sys.argv[1]))
env.reset()
came = []
if sys.argv[2] == "handles":
    signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
print("ready", flush=True)
while not came:
    time.sleep(0.01)
env.step([ACTIONS] * 2)
env.close()
print("done")
"""


@pytest.mark.parametrize("program_does", ["handles", "dies"])
def test_the_program_decides(start_method: str, program_does: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(tests=str(TESTS)), start_method, program_does],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        everyone = {psutil.Process(program.pid), *psutil.Process(program.pid).children(recursive=True)}
        send(everyone, signal.SIGUSR1)
        out, _ = program.communicate(timeout=60)
    handles = program_does == "handles"
    assert (program.returncode, out) == ((0, "done\n") if handles else (-signal.SIGUSR1, ""))
    assert gone(one.pid for one in everyone)


# -- what simulators do with signals -----------------------------------------------------------------------------------


class Signalling(Counting):
    """A simulator whose step calls a function."""

    def __init__(self, function: Callable[[], object], seed: int) -> None:
        super().__init__(seed=seed)
        self.function = function

    def step(self, actions: Any) -> Any:
        self.function()
        return super().step(actions)


@contextlib.contextmanager
def stepping(function: Callable[[], object], start_method: str) -> Iterator[ParallelEnv]:
    constructors = [functools.partial(Signalling, function)]
    with ParallelEnv(constructors, num_workers=1, **arguments(start_method)) as env:
        env.reset()
        yield env


def alarm() -> None:
    signal.alarm(1)
    time.sleep(30)


def timer_of_cpu_time() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0.2)
    while True:
        pass


def limit_of_cpu_time() -> None:
    import resource

    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1, int(used) + 20))
    while True:
        pass


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(30)


def kill_its_thread() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
    time.sleep(30)


@pytest.mark.needs("_codec")
@pytest.mark.parametrize(
    ("function", "number"),
    [
        (alarm, number_of("SIGALRM")),
        (timer_of_cpu_time, number_of("SIGPROF")),
        (limit_of_cpu_time, number_of("SIGXCPU")),
        (kill_itself, number_of("SIGUSR1")),
        (kill_its_thread, number_of("SIGUSR2")),
    ],
)
def test_signals_of_the_kernel_and_of_itself(function: Callable[[], object], number: int, start_method: str) -> None:
    """Without a handler they end the process, as anywhere else."""
    with (
        stepping(function, start_method) as env,
        pytest.raises(WorkerCrashed, match=signal.Signals(number).name) as raised,
    ):
        env.step([ACTIONS])
    assert raised.value.exitcode == -number
    advice = {signal.SIGXCPU: "ulimit -t", signal.SIGALRM: "signal.alarm", signal.SIGPROF: "signal.setitimer"}
    assert advice.get(number, "unless a simulator sets a handler for it") in str(raised.value)


@pytest.mark.needs("_codec")
@pytest.mark.parametrize("interrupt", [_thread.interrupt_main, lambda: os.kill(os.getpid(), signal.SIGINT)])
def test_a_simulator_that_interrupts_itself(interrupt: Callable[[], object], start_method: str) -> None:
    """As some do to limit the time of a call."""

    def interrupted() -> None:
        threading.Timer(0.2, interrupt).start()
        for _ in range(3000):
            time.sleep(0.01)

    with stepping(interrupted, start_method) as env, pytest.raises(EnvError, match="KeyboardInterrupt"):
        env.step([ACTIONS])


def test_handlers_of_simulators(start_method: str, tmp_path: Path) -> None:
    """They count for signals of any process; and `signal.getsignal` knows of no others."""

    def handle() -> None:
        assert signal.getsignal(signal.SIGUSR2) != signal.SIG_IGN
        signal.signal(signal.SIGUSR2, lambda *_: (tmp_path / "came").touch())

    with stepping(handle, start_method) as env:
        env.step([ACTIONS])
        (pid,) = env.call(lambda _: os.getpid())
        os.kill(pid, signal.SIGUSR2)
        wait_for((tmp_path / "came").exists)
        env.step([ACTIONS])


def default_signals() -> list[int]:
    """Signals that this program does not ignore: `nohup` has SIGHUP ignored, also in what simulators start."""
    numbers = (signal.SIGUSR1, signal.SIGHUP, signal.SIGALRM, signal.SIGRTMAX, signal.SIGRTMIN)
    return [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]


def exit_codes(numbers: list[int]) -> list[int | None]:
    """Of a program and of forked processes that get a signal as soon as they have been started."""
    codes: list[int | None] = []
    for number in numbers:
        program = subprocess.Popen(["sleep", "60"])
        program.send_signal(number)
        codes.append(program.wait(30))
        for _ in range(3):
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
            child.start()
            os.kill(child.pid or 0, number)
            child.join(30)
            codes.append(child.exitcode)
    return codes


def test_processes_of_simulators(start_method: str) -> None:
    """They have the default handlers, block nothing and ignore nothing."""
    numbers = default_signals()
    assert len(numbers) >= 4
    with ParallelEnv([Counting], num_workers=1, **arguments(start_method)) as env:
        (codes,) = env.call(lambda _: exit_codes(numbers))
        assert codes == [-number for number in numbers for _ in range(4)]
        status = "print([line for line in open('/proc/self/status') if line[:6] in ('SigIgn', 'SigBlk')])"
        command = [sys.executable, "-S", "-c", status]
        in_worker = env.call(lambda _: subprocess.run(command, capture_output=True, text=True, check=True).stdout)[0]
        assert in_worker == subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_sigint_to_a_forked_process(start_method: str) -> None:
    """It is interrupted as usual, also while its worker is idle."""

    def sleep(begun: Any) -> None:
        begun.set()
        time.sleep(60)

    def start(env: Any) -> int | None:
        context = multiprocessing.get_context("fork")
        begun = context.Event()
        env.child = context.Process(target=sleep, args=(begun,), daemon=True)
        env.child.start()
        begun.wait(60)
        return env.child.pid

    with ParallelEnv([Counting], num_workers=1, **arguments(start_method)) as env:
        (pid,) = env.call(start)
        os.kill(pid, signal.SIGINT)
        assert env.call(lambda env: (env.child.join(30), env.child.exitcode)[1]) == (1,)


INTERRUPTED = """
import os, signal, time
from marl_parallel.backends.signals import take_signals
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))
take_signals(None, os.getppid())
pid = os.fork()
if not pid:
    time.sleep(60)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("pure", ["0", "1"])
def test_sigint_during_a_fork(pure: str) -> None:
    """It ends the child, whose hooks still run: an exception there would be lost."""
    environ = {**os.environ, "MARL_PARALLEL_PURE": pure}
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], env=environ, capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == (f"{-signal.SIGINT}\n", "")


# -- reports of stacks -------------------------------------------------------------------------------------------------


def test_reports_of_long_calls_use_no_signal(start_method: str, caplog: pytest.LogCaptureFixture) -> None:
    """A simulator may have a handler for each signal, and blocks, ignores or counts them."""
    came: list[int] = []

    def count() -> None:
        for number in JOB_SIGNALS - {signal.SIGTERM}:
            signal.signal(number, lambda number, _: came.append(number))
        time.sleep(1.5)

    with ParallelEnv(
        [functools.partial(Signalling, count)], num_workers=1, warn_after=0.2, **arguments(start_method)
    ) as env:
        env.reset()
        env.step([ACTIONS])
        (numbers,) = env.call(lambda env: env.function.__closure__[0].cell_contents)
    assert numbers == []
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in texts if " in count\n" in text]) >= 2


def test_report_while_the_interpreter_lock_is_held(start_method: str, caplog: pytest.LogCaptureFixture) -> None:
    def hold() -> None:
        import ctypes

        ctypes.PyDLL(None).sleep(3)

    with ParallelEnv(
        [functools.partial(Signalling, hold)], num_workers=1, warn_after=0.5, **arguments(start_method)
    ) as env:
        env.reset()
        env.step([ACTIONS])
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("native code probably holds Python's interpreter lock" in text for text in texts)


def test_signals_of_a_job_add_nothing_to_the_report_of_a_crash(start_method: str) -> None:
    def crash() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with ParallelEnv([functools.partial(Signalling, crash)], num_workers=1, **arguments(start_method)) as env:
        env.reset()
        (pid,) = env.call(lambda _: os.getpid())
        # The highest one asks for a stack before a kill: without compiled code, its sender is unknown.
        for number in [signal.SIGUSR1, signal.SIGUSR2, *range(signal.SIGRTMIN, signal.SIGRTMAX)]:
            os.kill(pid, number)
        time.sleep(0.3)
        with pytest.raises(WorkerCrashed) as raised:
            env.step([ACTIONS])
    assert raised.value.stack == ""


# -- forks, threads and event loops ------------------------------------------------------------------------------------


def fork_in_a_fork(path: Path) -> None:
    """A forked child opens descriptors and forks again; its child uses them."""
    child = os.fork()
    if not child:
        opened = [os.pipe() for _ in range(8)]
        grandchild = os.fork()
        if not grandchild:
            try:
                for _, end in opened:
                    os.write(end, b"x")
                path.write_text("written")
            finally:
                os._exit(0)
        os.waitpid(grandchild, 0)
        os._exit(0)
    os.waitpid(child, 0)


def test_forks_in_forked_processes(start_method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with stepping(lambda: fork_in_a_fork(tmp_path / "file"), start_method) as env:
        env.step([ACTIONS])
    assert (tmp_path / "file").read_text() == "written"
    assert "Exception ignored" not in capfd.readouterr().err


def test_no_thread_is_left_while_a_simulator_forks(start_method: str) -> None:
    """Python warns of forks in processes with several threads, from 3.12 on; and the child has one thread."""

    def count() -> None:
        read, write = os.pipe()
        if not (child := os.fork()):
            os.write(write, bytes([len(os.listdir("/proc/self/task"))]))
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1) == b"\x01"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with stepping(count, start_method) as env:
            env.step([ACTIONS])
    assert not [one for one in caught if "fork" in str(one.message)]


def test_handler_that_raises_while_signals_are_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at Ctrl-C in that moment: no signal stays blocked."""
    before, sigmask = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.pthread_sigmask

    def interrupted(how: int, mask: Any) -> Any:
        result = sigmask(how, mask)
        if how == signal.SIG_BLOCK and mask:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
    with pytest.raises(KeyboardInterrupt), blocked():
        pass
    monkeypatch.undo()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
