"""How a command fails: one line that says what is wrong, one that says what to do next, no traceback unless asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """What the user asked for cannot be done.

    Attributes:
        hint: What to try instead.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@contextmanager
def told_briefly(debug: bool) -> Iterator[None]:
    """End the process with status 1 and two lines on standard error where something within raises, or exits.

    Args:
        debug: Let the traceback through instead.

    Example:
        >>> with told_briefly(debug=False):
        ...     raise CommandError("no such file: a.py", "is it in another directory?")
        Traceback (most recent call last):
        SystemExit: 1
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if debug and isinstance(error, Exception):
            raise
        if debug:
            raise RuntimeError(f"{_one_line(error)}: {_EXITS}") from error
        hint = "--debug shows the whole traceback"
        if isinstance(error, CommandError):
            hint = error.hint
        elif isinstance(error, SystemExit):
            hint = f"{_EXITS}; {hint}"
        print(f"error: {_one_line(error)}\nhint: {hint}", file=sys.stderr)
        raise SystemExit(1) from None


_EXITS = "the simulator, or a module it imports, calls sys.exit"


def _one_line(error: BaseException) -> str:
    text = next(filter(None, map(str.strip, str(error).splitlines())), "")
    if isinstance(error, CommandError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
