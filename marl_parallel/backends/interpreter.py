"""Fresh Python interpreters that import what this process imports, but run nothing of its script.

Here live their command line and their output. What is run in one, and why, is decided by the launchers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing.spawn
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

from marl_parallel.backends.memory import anonymous_file

_logger = logging.getLogger("marl_parallel")


def executable() -> str:
    """The Python interpreter that new processes run.

    Raises:
        RuntimeError: This program embeds Python and there is none that belongs to it.
    """
    given: str | bytes | None = sys.executable or multiprocessing.spawn.get_executable()
    if given:
        return os.fsdecode(given)
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


def flags() -> list[str]:
    """The options of this interpreter, for another one."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined, no-any-return]


def with_path(program: str, path: list[str] | None = None) -> str:
    """A program that has this `sys.path`, or this process's.

    The path goes into the program, since in a variable it would be inherited by whatever the simulator starts.
    """
    entries = [entry for entry in (sys.path if path is None else path) if isinstance(entry, str)]
    return f"import sys\nsys.path[:] = {entries!a}\n{program}"


def program_file(text: str) -> int:
    """A descriptor, at its start, of a file without a name that holds a program."""
    fd = anonymous_file("marl_parallel-program")
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode("ascii"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def command(fd: int) -> list[str]:
    """The command line of an interpreter with this one's flags that runs an inherited `program_file`.

    A command line cannot hold the program itself: Linux limits an argument to 128 kB, which `sys.path` may exceed.
    """
    run = f"with open({fd}, encoding='ascii') as file: program = file.read()\nexec(program)"
    return [executable(), *flags(), "-c", run]


@contextlib.contextmanager
def started_with(program: str) -> Iterator[tuple[list[str], int]]:
    r"""The command line of an interpreter that runs `program` with this process's `sys.path`; a descriptor to pass on.

    Example:
        >>> with started_with("print(1 + 1)") as (arguments, fd):
        ...     subprocess.run(arguments, pass_fds=[fd], capture_output=True).stdout
        b'2\n'
    """
    fd = program_file(with_path(program))
    try:
        yield command(fd), fd
    finally:
        os.close(fd)


def from_stdin(program: str) -> tuple[list[str], bytes]:
    """The command line of an interpreter that runs `program` likewise, and what it must find first in its stdin.

    For systems on which a process cannot be handed other descriptors; what follows in stdin is left to `program`.
    """
    text = with_path(program).encode("ascii")
    run = (
        f"import os\nprogram = b''\nwhile len(program) < {len(text)}:\n"
        f"    part = os.read(0, {len(text)} - len(program))\n    assert part\n    program += part\nexec(program)"
    )
    return [executable(), *flags(), "-c", run], text


def working_directory() -> str:
    """Where a worker starts: this process's working directory, or "/" if that was removed.

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
    """The descriptor behind `sys.stdout` or `sys.stderr`; replaced ones (in notebooks) may have none.

    Args:
        stream: What this process has.
        usual: The descriptor it usually has, taken where `stream` has none.
        null: What to take where that is closed.
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
