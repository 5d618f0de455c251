"""Standard output: kept for ourselves where a program reads it, and on terminals that know few letters."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def reserved(wanted: bool = True) -> Iterator[None]:
    """Have what others print meanwhile, here and in the processes that begin meanwhile, go to standard error.

    Args:
        wanted: False leaves everything as it is.
    """
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.platform != "win32":
            ctypes.CDLL(None).fflush(None)  # what native code has printed and still holds back
        os.dup2(kept, 1)
        os.close(kept)


def replace_unknown_letters() -> None:
    """Print `?` for what standard output cannot show."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
