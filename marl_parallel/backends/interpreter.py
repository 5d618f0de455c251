"""Fresh Python interpreters that import what this process imports, but run nothing of its script.

Here live their command line and their output. What is run in one, and why, is decided by the launchers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TextIO


def command(program: str) -> list[str]:
    """The command line of an interpreter with this one's flags and `sys.path` that runs `program`.

    The path goes into the program, since in a variable it would be inherited by whatever the simulator starts.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", f"import sys\nsys.path[:] = {path!a}\n{program}"]


def output(stream: TextIO | None, usual: int, null: int = subprocess.DEVNULL) -> int:
    """The descriptor behind `sys.stdout` or `sys.stderr`; replaced ones (in notebooks) may have none.

    Args:
        stream: What this process has.
        usual: The descriptor it usually has, taken where `stream` has none.
        null: What to take where that is closed.
    """
    try:
        fd = usual if stream is None else stream.fileno()
    except (AttributeError, OSError, ValueError):
        fd = usual
    try:
        os.fstat(fd)
    except OSError:
        return null
    return fd
