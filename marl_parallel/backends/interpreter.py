"""Command line, names, directory, output and thread limits of the Python interpreters that run workers."""

from __future__ import annotations

import ctypes
import functools
import logging
import multiprocessing.process
import multiprocessing.spawn
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from marl_parallel.backends.memory import anonymous_file
from marl_parallel.core.reports.reports import runs

_warn_once = functools.cache(logging.getLogger("marl_parallel").warning)

_THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_SET_BY_THREADPOOLCTL = "KMP_DUPLICATE_LIB_OK"
_PR_SET_NAME = 15
_ARG_START, _ARG_END = 45, 46  # in /proc/self/stat, of the fields after the name


def executable() -> str:
    """The Python interpreter that new processes run."""
    known: str | bytes | None = sys.executable or multiprocessing.spawn.get_executable()
    if known:
        return os.fsdecode(known)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    path = os.path.join(sys.exec_prefix, "python.exe" if sys.platform == "win32" else f"bin/python{version}")
    if os.access(path, os.X_OK):
        return path
    raise RuntimeError(
        f"Worker processes need a Python interpreter, but sys.executable is {sys.executable!r}, and there is no "
        f"{path}. Set sys.executable (or call multiprocessing.set_executable) with the path of a Python {version} that "
        'has the same packages, or pass backend="thread", which needs none.'
    )


def command(code: str) -> list[str]:
    """The command line of an interpreter with this one's flags that runs short code."""
    # Private, but what multiprocessing uses; no public function returns the flags.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [executable(), *flags, "-c", code]


def program(text: str, path: Sequence[str]) -> tuple[list[str], int]:
    """The command line of an interpreter that sets `sys.path` and runs `text`, and a descriptor that it must inherit.

    Path and text are in a file: Linux limits an argument to 128 kB, and simulators' processes would inherit a variable.
    """
    entries = [entry for entry in path if isinstance(entry, str)]
    executable()  # raises before there is a file
    fd = anonymous_file("marl_parallel-program")
    with open(fd, "wb", closefd=False) as file:
        file.write(f"import sys\nsys.path[:] = {entries!a}\n{text}".encode("ascii"))
    os.lseek(fd, 0, os.SEEK_SET)
    return command(f"with open({fd}, encoding='ascii') as file: text = file.read()\nexec(text)"), fd


def worker_name(worker: int, share: Sequence[int]) -> tuple[str, str]:
    """The name of a worker process in lists of processes, and a short one."""
    envs = ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs(share))
    return f"marl_parallel worker {worker}" + (f" (env {envs})" if envs else ""), f"marl worker {worker}"


def show_name(name: str, short: str) -> None:
    """Have lists of processes show a name instead of the command line, and the short one (15 characters); on Linux.

    `sys.argv` stays. The command lines of workers and servers are longer than their names.
    """
    if sys.platform != "linux":
        return
    # The memory of the command line; zeros where the system hides it. The byte after the name must be 0, or Linux takes
    # the variables of the environment, which lie behind it, for a part of the name.
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:  # there is no /proc, which portable workers do without
        return
    start, nbytes = int(fields[_ARG_START]), int(fields[_ARG_END]) - int(fields[_ARG_START])
    if nbytes > 0:
        ctypes.memmove(start, name.encode()[: nbytes - 1].ljust(nbytes, b"\0"), nbytes)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, short.encode(), 0, 0, 0)


class Identity(NamedTuple):
    """What `multiprocessing` says about a worker process."""

    numbers: tuple[int, ...]  # `current_process()._identity`
    parent_name: str
    parent_pid: int
    authkey: bytes  # for its managers; never in a command line, an environment variable or a file with a name


def next_identity() -> Identity:
    """The identity of the next worker: its number differs from all other processes that this process starts.

    Simulators choose ports and files by it, as they do in a `multiprocessing.Process`.
    """
    process: Any = multiprocessing.process  # neither the counter nor `_identity` is public
    current = process.current_process()
    numbers = (*current._identity, next(process._process_counter))
    return Identity(numbers, current.name, os.getpid(), bytes(current.authkey))


def take_identity(identity: Identity, sentinel: int | None = None) -> None:
    """Have `multiprocessing` see this process as a child of the caller: name, number, key and `parent_process()`.

    `sentinel` is a descriptor that is ready when the caller has ended. Without one, Windows has the caller's handle.
    Other systems get one that is never ready: this process is killed when the caller ends.
    """
    process: Any = multiprocessing.process
    current = process.current_process()
    current._identity = identity.numbers
    current.authkey = identity.authkey
    current.name = f"ParallelEnvWorker-{':'.join(map(str, identity.numbers))}"
    if sentinel is None and sys.platform == "win32":
        import _winapi

        sentinel = _winapi.OpenProcess(0x00100000, False, identity.parent_pid)  # SYNCHRONIZE
    elif sentinel is None:
        sentinel, _ = os.pipe()
    process._parent_process = process._ParentProcess(identity.parent_name, identity.parent_pid, sentinel)


def working_directory() -> str:
    """The directory in which a worker starts: this process's, or "/" if it was removed.

    In a removed directory the import of some libraries fails (PettingZoo's).
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        _warn_once(
            "The working directory of this program has been removed; worker processes start in %s from now on. "
            "Relative paths in simulators lead there: use absolute ones, or call os.chdir with a folder that exists.",
            os.sep,
        )
        return os.sep


def output(stream: TextIO | None, standard: int, null: int = subprocess.DEVNULL) -> int:
    """The descriptor of `sys.stdout` or `sys.stderr`; `standard` if it has none (in notebooks), `null` if closed."""
    if (sys.__stdout__ if standard == 1 else sys.__stderr__) is None and stream is None:
        return null  # closed when this program started: another file may have the number by now
    try:
        fd = standard if stream is None else stream.fileno()
    except (AttributeError, OSError, ValueError):
        fd = standard
    try:
        os.fstat(fd)
    except OSError:
        return null
    return fd


def thread_variables(threads: int | None) -> dict[str, str]:
    """The environment variables that limit the threads of numerical libraries not loaded yet; None for no limit."""
    return {} if threads is None else dict.fromkeys(_THREAD_VARIABLES, str(threads))


def default_threads(environ: Mapping[str, str]) -> int:
    """The number of threads that a BLAS library uses by default: from the variables, else one per CPU."""
    for name in _THREAD_VARIABLES[:2]:
        if (value := environ.get(name, "")).isdecimal() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0))


def limit_loaded_libraries(threads: int) -> None:
    """Set the number of threads in numerical libraries that are already loaded."""
    duplicates_allowed = os.environ.get(_SET_BY_THREADPOOLCTL)
    import threadpoolctl  # here, since most workers are started with the right number

    if duplicates_allowed is None:
        os.environ.pop(_SET_BY_THREADPOOLCTL, None)  # simulators and what they start get the caller's environment
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of combinations of OpenMP libraries, which are the simulator's choice
        threadpoolctl.threadpool_limits(threads)
