"""State of a process that modules may change when they are imported.

With `preload=`, the fork server imports modules, and each worker then copies this state from the caller. `Changes`
makes the modules' changes again in the worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

T = TypeVar("T")


class _State(NamedTuple):
    environ: dict[str, str]
    path: list[str]
    cwd: str
    filters: list[Any]
    float_errors: dict[str, str]
    recursion_limit: int

    @classmethod
    def now(cls) -> _State:
        float_errors = cast("dict[str, str]", np.geterr())
        limit = sys.getrecursionlimit()
        return cls({**os.environ}, [*sys.path], _working_directory(), [*warnings.filters], float_errors, limit)


class Changes:
    """What changes from the creation of this object until `end` is called; `make` makes the same changes."""

    def __init__(self) -> None:
        self._before = self._after = _State.now()

    def end(self) -> None:
        self._after = _State.now()

    def make(self) -> None:
        before, after = self._before, self._after
        for name in before.environ.keys() - after.environ.keys():
            os.environ.pop(name, None)
        os.environ.update({k: value for k, value in after.environ.items() if value != before.environ.get(k)})
        sys.path[:] = _changed(sys.path, before.path, after.path)
        if after.cwd not in ("", before.cwd):
            os.chdir(after.cwd)
        if after.filters != before.filters:
            filters = _changed(warnings.filters, before.filters, after.filters)
            warnings.resetwarnings()  # also clears the decisions that Python has cached for the old filters
            cast("Any", warnings.filters).extend(filters)
        modes = {kind: mode for kind, mode in after.float_errors.items() if mode != before.float_errors[kind]}
        np.seterr(**cast("Any", modes))
        if after.recursion_limit != before.recursion_limit:
            sys.setrecursionlimit(after.recursion_limit)


def _working_directory() -> str:
    with contextlib.suppress(FileNotFoundError):  # it has been removed
        return os.getcwd()
    return ""


def _changed(now: Sequence[T], before: Sequence[T], after: Sequence[T]) -> list[T]:
    """The list `now`, changed as `before` was changed to `after`.

    What was added or moved to the front comes first, what was added elsewhere comes last, unless nothing else differs.
    """
    if [*now] == [*before]:
        return [*after]
    start = 0
    while not _is_part([one for one in after[start:] if one in before], before):
        start += 1
    while start < len(after) and after[start] not in before:
        start += 1
    first, last = after[:start], [one for one in after[start:] if one not in before]
    kept = [one for one in now if one not in (*first, *last) and (one in after or one not in before)]
    return [*first, *kept, *last]


def _is_part(some: Sequence[T], everything: Sequence[T]) -> bool:
    """Whether one list is another one from which items may have been removed."""
    rest = iter(everything)
    return all(one in rest for one in some)
