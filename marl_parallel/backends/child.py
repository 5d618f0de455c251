"""What a worker process does before and after its main function: it becomes a process of its own.

`Setting` holds what a worker takes over from its parent; `become_worker` is the first thing that a worker process
calls, whether it was forked or is a fresh interpreter.
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

from marl_parallel.backends.descendants import MARKER
from marl_parallel.backends.interpreter import limit_loaded_libraries, thread_variables, working_directory
from marl_parallel.backends.memory import anonymous_file
from marl_parallel.backends.stacks import report_to


@dataclass(frozen=True)
class Setting:
    """What a worker takes over from its parent as it is at the moment of the start.

    Attributes:
        index: The worker's number.
        entry: The module whose `main(index, fds)` it runs.
        loaded_threads: Threads for the numerical libraries that it finds loaded; None leaves them alone.
        path: `sys.path`.
        argv: `sys.argv`.
        environ: The environment variables.
        cwd: The working directory.
    """

    index: int
    entry: str
    loaded_threads: int | None
    path: list[str]
    argv: list[str]
    environ: dict[str, str]
    cwd: str

    @classmethod
    def here(cls, index: int, entry: str, token: str, threads: int | None, loaded_threads: int | None) -> Setting:
        """Take it from this process.

        Args:
            index: As above.
            entry: As above.
            token: What the worker's descendants are marked with.
            threads: Threads for numerical libraries that it loads; None leaves the variables alone.
            loaded_threads: As above.
        """
        environ = {**os.environ, MARKER: token}
        if threads is not None:
            environ.update(thread_variables(threads))
        argv = list(getattr(sys, "argv", []))
        return cls(index, entry, loaded_threads, list(sys.path), argv, environ, working_directory())

    @contextlib.contextmanager
    def written(self) -> Iterator[int]:
        """The descriptor of a file that holds it, since a large environment does not fit a message."""
        with open(anonymous_file("marl_parallel-setting"), "w+b") as file:
            pickle.dump(self, file)
            file.seek(0)  # which writes all out
            yield file.fileno()

    @staticmethod
    def read(fd: int) -> Setting:
        """Read it from such a descriptor, which is closed."""
        with open(fd, "rb") as file:
            setting: Setting = pickle.load(file)
        return setting

    def adopt(self) -> None:
        """Change this process so that it has all of this."""
        os.chdir(self.cwd)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        for name in os.environ.keys() - self.environ.keys():
            del os.environ[name]
        for name, value in self.environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if self.loaded_threads is not None:
            limit_loaded_libraries(self.loaded_threads)


def become_worker(payload: int, fds: Sequence[int], *, crash: int, guards: Sequence[int]) -> NoReturn:
    """Turn the process just started into a worker, run its main function, exit. Nothing returns or escapes from here.

    All signals are blocked when this is called: they wait until this process can handle them.

    Args:
        payload: Descriptor of the `Setting`.
        fds: Descriptors that the worker's main function gets.
        crash: Descriptor that `faulthandler` writes to.
        guards: Read ends of pipes nobody writes to; the worker is killed when the last write end of one is closed.
    """
    exitcode = 1
    try:
        if os.getsid(0) != os.getpid():  # a fresh interpreter has a session of its own already
            os.setsid()
        report_to(crash)
        reset_signals()
        for fd in (crash, *fds):  # a fresh interpreter has inherited them
            os.set_inheritable(fd, False)
        _open_output()
        setting = Setting.read(payload)
        setting.adopt()
        for guard in guards:
            _arm(guard)
        # The caller's script is not part of a worker. A simulator that starts processes by multiprocessing's spawn
        # would run the file that `__main__` came from again.
        sys.modules["__main__"] = types.ModuleType("__main__")
        exitcode = _exitcode_of(lambda: importlib.import_module(setting.entry).main(setting.index, list(fds)))
        # What the interpreter does at its end, short of taking itself apart; simulators rely on it.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        exitcode = 1
        traceback.print_exc()
    finally:
        _leave(exitcode)


def reset_signals() -> None:
    """Undo what the parent's Python code has installed, then unblock all signals."""
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


def _open_output() -> None:
    """Have `sys.stdout` and `sys.stderr` write to descriptors 1 and 2, whatever they are in a parent that forked."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, f"__{name}__")
        if stream is None or stream.closed:
            stream = open(fd, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


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
    if poll.poll(0):  # the other end was closed before
        os.killpg(0, signal.SIGKILL)


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


def _leave(exitcode: int) -> NoReturn:
    try:
        for stream in (sys.stdout, sys.stderr):
            # The reader of a pipe may be gone, and the simulator may have closed or replaced the stream.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
    finally:
        os._exit(exitcode)
