"""Ends copies of this process that a simulator forks and that come back to code of this package.

A simulator may fork to execute another program. If that fails, the child has the whole worker, or the whole training
program, in memory, and the exception climbs out of the simulator's method in the child as well. Two processes would
then take requests from one queue and write to the same shared memory. `end_forked_copy` ends the child instead.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn


def end_forked_copy(error: BaseException | None) -> NoReturn:
    """End this process without any cleanup, which is its parent's: print why to stderr, and call `os._exit`.

    Args:
        error: The exception that came out of the simulator's method; None if the method returned. `SystemExit` sets
            the exit code, any other exception is printed with its traceback.
    """
    code, text = 1, ""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF
        else:
            text = f"{error.code}\n"
    else:
        how = "the child returned from the method" if error is None else "the exception below came out of it"
        text = (
            f"marl_parallel: a simulator's method forked process {os.getpid()}, and {how}. Only the parent goes on, so "
            "the child ends here with exit code 1. A child must end itself with os._exit(), also where it fails to "
            "execute a program.\n"
        )
        if error is not None:
            text += "".join(traceback.format_exception(error))
    # Not through sys.stderr: another thread may have held its lock at the fork.
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
    os._exit(code)


def end_returning_copy(*_: object) -> NoReturn:
    """End this process, in place of a function of ours that is called when a simulator's method is left."""
    error, caller = sys.exc_info()[1], sys._getframe(1)
    # The innermost exception that is being handled may have been raised before the method was called.
    if error is not None and (error.__traceback__ is None or error.__traceback__.tb_frame is not caller):
        error = None
    end_forked_copy(error)
