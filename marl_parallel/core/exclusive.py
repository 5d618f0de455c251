"""A guard that allows one call of a `ParallelEnv` at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any, NoReturn, ParamSpec, TypeVar

from gymnasium.error import AlreadyPendingCallError

CALL = "call"
"""The only key of a `CallGuard`."""

P = ParamSpec("P")
R = TypeVar("R")


class CallGuard(dict[str, tuple[str, int]]):
    """The call in progress under the key `CALL`: its method and its thread; empty between calls.

    Without it, two threads that step the same environments would read each other's results. `check_open` raises if
    everything has been closed.
    """

    def __init__(self, check_open: Callable[[], None]) -> None:
        super().__init__()
        self._check_open = check_open

    def __missing__(self, key: str) -> None:
        return None

    def refuse(self, entry: tuple[str, int], first: tuple[str, int]) -> NoReturn:
        """Raise the error of the call `entry`, which came during the call `first`."""
        self._check_open()
        (name, thread), (first_name, first_thread) = entry, first
        if thread == first_thread:
            where = f"{name}() was called inside {first_name}() of the same thread, by a signal handler or a callback"
        else:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            here, other = (repr(names.get(ident, ident)) for ident in (thread, first_thread))
            where = f"{name}() was called in thread {here} while thread {other} is inside {first_name}()"
        raise AlreadyPendingCallError(
            f"{where}. Nothing was done. A ParallelEnv carries out one call at a time, and only close() may come in "
            "the middle of another call: put a lock around the calls, or give each thread a ParallelEnv of its own",
            name,
        )


def exclusive(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Guard a method with the `_guard` of its object; errors call the method `name`."""

    def decorator(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            # `setdefault` is atomic, and each entry is a new object. The `finally` calls nothing, so Python handles no
            # signal in it: Ctrl-C at any moment leaves the guard empty. With a lock, Ctrl-C between `acquire` and `try`
            # would leave the lock locked.
            owner: Any = args[0]
            guard, entry = owner._guard, (name, get_ident())
            try:
                if (first := guard.setdefault(CALL, entry)) is not entry:
                    guard.refuse(entry, first)
                return method(*args, **kwargs)
            finally:
                if guard[CALL] is entry:
                    del guard[CALL]

        return guarded

    return decorator
