"""Signal handlers at every moment at which Python may call them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any


@contextlib.contextmanager
def calling_at(number: int, module: ModuleType, handler: Callable[[], object]) -> Iterator[list[str]]:
    """Call a handler at so many calls and returns in the functions of a module, which is where signal handlers run.

    Yields a list, which gets the name of the function in which it was called.
    """
    functions: list[str] = []

    def count(frame: FrameType, *_: Any) -> None:
        nonlocal number
        if frame.f_code.co_filename == module.__file__:
            number -= 1
            if number == 0:
                functions.append(frame.f_code.co_name)
                handler()

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield functions
    finally:
        sys.setprofile(before)
