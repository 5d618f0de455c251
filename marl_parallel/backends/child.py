"""What a worker process does before and after its main: it becomes a process of its own.

Here lives `become_worker`, which each launcher's child calls first, and `Setting`, what a worker takes over from its
parent. What it then works on is not known here.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import os
import pickle
import select
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from marl_parallel.backends import descendants, interpreter, threads
from marl_parallel.backends.memory import anonymous_file
from marl_parallel.backends.stacks import report_to


@dataclass(frozen=True)
class Setting:
    """What a worker is to find as its parent has it at the moment of the start.

    Attributes:
        index: The worker's number.
        entry: The module whose `main(index, fds)` it runs.
        token: Of the launcher, for the marker that descendants are known by.
        threads: How many its numerical libraries may use; None leaves them alone.
        path: `sys.path`.
        argv: `sys.argv`.
        environ: The environment variables.
        cwd: The working directory.
    """

    index: int
    entry: str
    token: str
    threads: int | None
    path: list[str]
    argv: list[str]
    environ: dict[str, str]
    cwd: str

    @classmethod
    def here(cls, index: int, entry: str, token: str, limit: int | None) -> Setting:
        """Take it from this process."""
        environ = {**os.environ, descendants.MARKER: descendants.marker_value(token, 0)}
        if limit is not None:
            environ.update(threads.variables(limit))
        argv = list(getattr(sys, "argv", []))
        return cls(index, entry, token, limit, list(sys.path), argv, environ, interpreter.working_directory())

    @contextlib.contextmanager
    def written(self) -> Iterator[int]:
        """The descriptor of a file it is written to, since a large environment does not fit a message."""
        with open(anonymous_file("marl_parallel-setting"), "w+b") as file:
            pickle.dump(self, file)
            file.seek(0)  # which writes all out
            yield file.fileno()

    @staticmethod
    def read(fd: int) -> Setting:
        """Read it from such a file's descriptor, which is closed."""
        with open(fd, "rb") as file:
            setting: Setting = pickle.load(file)
        return setting

    def adopt(self) -> None:
        """Bring this process to it (the threads of libraries already loaded excepted)."""
        os.chdir(self.cwd)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        for name in os.environ.keys() - self.environ.keys():
            del os.environ[name]
        for name, value in self.environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


def become_worker(prepare: Callable[[], Setting], fds: Sequence[int], *, crash: int, guards: Sequence[int]) -> NoReturn:
    """Turn the process just started into a worker, run its main, exit. Nothing returns or escapes from here.

    Whoever forked it has blocked all signals before: they wait until this process can handle them.

    Args:
        prepare: Lets go of what was inherited and brings the process to the setting it returns.
        fds: What the worker's main is given.
        crash: Where `faulthandler` writes.
        guards: Read ends of pipes nobody writes to; the worker is killed when the last write end of one goes.
    """
    exitcode = 1
    try:
        if os.getsid(0) != os.getpid():  # a new interpreter is born with a session of its own
            os.setsid()
        report_to(crash)
        _reset_signals()
        setting = prepare()
        for guard in guards:
            _arm(guard)
        _mark(setting.token)
        # The caller's script is no business of a worker; least of all of one whose simulator starts
        # processes by multiprocessing's spawn, which runs the file that `__main__` came from again.
        sys.modules["__main__"] = types.ModuleType("__main__")
        exitcode = _exitcode_of(lambda: importlib.import_module(setting.entry).main(setting.index, list(fds)))
        _finish()
    except BaseException:
        exitcode = 1
        traceback.print_exc()
    finally:
        _leave(exitcode)


def _reset_signals() -> None:
    """Undo what the parent's Python code has installed, then let the signals in."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # A program started in the background ignores these; a simulator and its children must not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Libraries install handlers in C, of which Python knows nothing: SDL, say, makes an event of this one.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _arm(guard: int) -> None:
    """Have the kernel kill this process's group when the last write end of the pipe is closed.

    A thread that watches would not run while the GIL is held or the process is stopped.
    """
    # Owner and signal belong to the open file, which all workers share; opened anew it is this one's own.
    own = os.open(f"/proc/self/fd/{guard}", os.O_RDONLY | os.O_NONBLOCK)
    os.close(guard)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    poll = select.poll()  # unlike `select.select`, it takes any number of descriptors
    poll.register(own, select.POLLIN)
    if poll.poll(0):  # the other end was gone before
        os.killpg(0, signal.SIGKILL)


def _mark(token: str) -> None:
    """Make this process and what it starts recognisable from outside, in `/proc/PID/environ`."""
    value = descendants.marker_value(token, os.getpid())
    descendants.show_marker(value)
    os.environ[descendants.MARKER] = value


def _exitcode_of(main: Callable[[], object]) -> int:
    try:
        main()
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        print(exit_.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _finish() -> None:
    """Do what the interpreter does at its end, short of taking itself apart: simulators rely on it."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _leave(exitcode: int) -> NoReturn:
    try:
        for stream in (sys.stdout, sys.stderr):
            # The reader of a pipe may be gone, and the simulator may have closed or replaced the stream.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
    finally:
        os._exit(exitcode)
