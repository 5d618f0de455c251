"""One call at a time: a call that comes in the middle of another one, from a second thread, raises an error.

Without this, two threads that step the same environments would read each other's results. `close` is not guarded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from gymnasium.error import AlreadyPendingCallError

CALL = "call"
"""The only key of a `CallGuard`."""

P = ParamSpec("P")
R = TypeVar("R")


class CallGuard(dict[str, tuple[str, int]]):
    """The call in progress: its method and its thread, under the key `CALL`; empty where there is none.

    A method enters and leaves like this::

        entry = ("step", get_ident())
        try:
            if (first := guard.setdefault(CALL, entry)) is not entry:
                guard.refuse(entry, first)
            ...
        finally:
            if guard[CALL] is entry:
                del guard[CALL]

    `setdefault` is atomic, and the entry is a new object for each call. The `finally` calls nothing, so that Python
    handles no signal in it: Ctrl-C at any moment leaves the guard empty. A lock would stay locked where Ctrl-C comes
    between `acquire` and `try`.

    Args:
        check_open: Raises where everything has been closed, which is then the error of a refused call.
    """

    def __init__(self, check_open: Callable[[], None]) -> None:
        super().__init__()
        self._check_open = check_open

    def __missing__(self, key: str) -> None:
        return None

    def refuse(self, entry: tuple[str, int], first: tuple[str, int]) -> NoReturn:
        """Raise the error of a call that came in the middle of another.

        Args:
            entry: The call that is refused.
            first: The call in progress.

        Raises:
            ClosedEnvironmentError: Everything has been closed.
            AlreadyPendingCallError: In all other cases.
        """
        self._check_open()
        (name, thread), (first_name, first_thread) = entry, first
        if thread == first_thread:
            where = f"{name}() was called inside {first_name}() of the same thread, by a signal handler or a callback"
        else:
            where = f"{name}() was called in {_named(thread)} while {_named(first_thread)} is inside {first_name}()"
        raise AlreadyPendingCallError(
            f"{where}. Nothing was done. A ParallelEnv carries out one call at a time, and only close() may come in "
            "the middle of another call: put a lock around the calls, or give each thread a ParallelEnv of its own",
            name,
        )


def _named(ident: int) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return f"thread {names.get(ident, ident)!r}"


class Guarded(Protocol):
    """An object whose calls are guarded."""

    @property
    def _guard(self) -> CallGuard: ...


G = TypeVar("G", bound=Guarded)


def exclusive(name: str) -> Callable[[Callable[Concatenate[G, P], R]], Callable[Concatenate[G, P], R]]:
    """Guard a method with the `_guard` of its object. Methods on the hot path do the same in their own body.

    Args:
        name: What errors call the method.
    """

    def decorator(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R]:
        @functools.wraps(method)
        def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            guard, entry = self._guard, (name, get_ident())
            try:
                if (first := guard.setdefault(CALL, entry)) is not entry:
                    guard.refuse(entry, first)
                return method(self, *args, **kwargs)
            finally:
                if guard[CALL] is entry:
                    del guard[CALL]

        return guarded

    return decorator
