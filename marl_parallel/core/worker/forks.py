"""Ends child processes that a simulator's method forked and that return from the method; the parent goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn


def end_forked_copy(error: BaseException | None) -> NoReturn:
    """End this process, which a simulator's method forked and then left with this error, or by returning.

    Else two processes would read one queue and write to one block. Writes the reason to stderr; cleans nothing up.
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
            f"execute a program.\n{''.join(traceback.format_exception(error)) if error is not None else ''}"
        )
    # Not through sys.stderr: another thread may have held its lock at the fork.
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
    os._exit(code)


def end_returning_copy(*_: object) -> NoReturn:
    """End this forked process; replaces a function that workers call when a simulator's method returns or raises."""
    error, caller = sys.exc_info()[1], sys._getframe(1)
    # The innermost exception being handled may be older than the call of the method.
    if error is not None and (error.__traceback__ is None or error.__traceback__.tb_frame is not caller):
        error = None
    end_forked_copy(error)
