"""Start Python interpreters that import what this process imports, but do not run its script.

Here are their command line, working directory and output streams, and the number of threads that their numerical
libraries may use.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing.spawn
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TextIO

from marl_parallel.backends.memory import anonymous_file

_logger = logging.getLogger("marl_parallel")

_THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_SET_BY_THREADPOOLCTL = "KMP_DUPLICATE_LIB_OK"


def executable() -> str:
    """The Python interpreter that new processes run."""
    known: str | bytes | None = sys.executable or multiprocessing.spawn.get_executable()
    if known:
        return os.fsdecode(known)
    name = "python.exe" if sys.platform == "win32" else f"bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    found = os.path.join(sys.exec_prefix, name)
    if os.access(found, os.X_OK):
        return found
    raise RuntimeError(
        f"Worker processes need a Python interpreter, but sys.executable is {sys.executable!r}, "
        f"and there is no {found}. "
        "Set sys.executable (or call multiprocessing.set_executable) with the path of a Python "
        f"{sys.version_info[0]}.{sys.version_info[1]} that has the same packages, "
        'or pass context="fork" or backend="thread", which need none.'
    )


def command(code: str) -> list[str]:
    """The command line of an interpreter with this one's flags that runs short code."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [executable(), *flags, "-c", code]


def program(text: str, path: Sequence[str]) -> tuple[list[str], int]:
    r"""The command line of an interpreter that sets `sys.path` and runs `text`; a descriptor that it must inherit.

    Both are in a file without a name: Linux limits an argument to 128 kB, and whatever the simulator starts would
    inherit a variable.

    Example:
        >>> arguments, fd = program("print(1 + 1)", sys.path)
        >>> subprocess.run(arguments, pass_fds=[fd], capture_output=True).stdout
        b'2\n'
        >>> os.close(fd)
    """
    entries = [entry for entry in path if isinstance(entry, str)]
    executable()  # raises before there is a file
    fd = anonymous_file("marl_parallel-program")
    with open(fd, "wb", closefd=False) as file:
        file.write(f"import sys\nsys.path[:] = {entries!a}\n{text}".encode("ascii"))
    os.lseek(fd, 0, os.SEEK_SET)
    return command(f"with open({fd}, encoding='ascii') as file: text = file.read()\nexec(text)"), fd


def working_directory() -> str:
    """The directory in which a worker starts: this process's, or "/" if that was removed.

    In a folder that does not exist, `os.getcwd` fails, and with it the import of some libraries (PettingZoo's).
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        _warn_of_removed_folder()
        return os.sep


@functools.cache
def _warn_of_removed_folder() -> None:
    _logger.warning(
        "The working directory of this program has been removed; worker processes start in %s from now on. "
        "Relative paths in simulators lead there: use absolute ones, or call os.chdir with a folder that exists.",
        os.sep,
    )


def output(stream: TextIO | None, usual: int, null: int = subprocess.DEVNULL) -> int:
    """The descriptor behind `sys.stdout` or `sys.stderr`.

    It is the `usual` one where the stream has none (as in notebooks), and `null` where that is closed.
    """
    if (sys.__stdout__ if usual == 1 else sys.__stderr__) is None and stream is None:
        return null  # closed when this program started: the number may be another file's by now
    try:
        fd = usual if stream is None else stream.fileno()
    except (AttributeError, OSError, ValueError):
        fd = usual
    try:
        os.fstat(fd)
    except OSError:
        return null
    return fd


def thread_variables(threads: int | None) -> dict[str, str]:
    """The environment variables that give numerical libraries not loaded yet this number of threads; None: none."""
    return {} if threads is None else dict.fromkeys(_THREAD_VARIABLES, str(threads))


def default_threads(environ: Mapping[str, str]) -> int:
    """The number of threads that a BLAS library uses by itself: the one in the variables, else one per CPU."""
    for name in _THREAD_VARIABLES[:2]:
        if (value := environ.get(name, "")).isdecimal() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0))


def limit_loaded_libraries(threads: int) -> None:
    """Set the number of threads in numerical libraries already loaded, which do not read the environment again."""
    duplicates_allowed = os.environ.get(_SET_BY_THREADPOOLCTL)
    import threadpoolctl  # here, since most workers are started with the right number

    if duplicates_allowed is None:
        os.environ.pop(_SET_BY_THREADPOOLCTL, None)  # simulators and what they start get the caller's environment
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of combinations of OpenMP libraries, which are the simulator's choice
        threadpoolctl.threadpool_limits(threads)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
