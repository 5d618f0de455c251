"""A timeline of what workers and parent do, in the format that Perfetto and Chrome's `chrome://tracing` read.

A worker's ledger keeps slices of time while it is told to; the parent collects them, keeps its own, and writes a file.
While nothing is traced, nothing here runs. When a trace begins and ends is decided by `ParallelEnv`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from marl_parallel.core.ledger import Activity, Ledger

MOST_SLICES = 1_000_000
"""So many are kept of each lane; what comes later is left out, so that a forgotten trace does not fill the memory."""

LAST_WORDS = -1
"""In place of an environment's number: what a worker that closes has kept."""

_FIELDS = 4  # of a slice: environment, activity, begin, end; both in seconds of `time.monotonic`
_BUSY = -1.0  # in place of an activity: the worker was at work on a request
_PARENT = 0  # the lane; workers have those from 1 on


class TracedLedger(Ledger):
    """A ledger that keeps slices.

    Attributes:
        slices: Of `_FIELDS` numbers each.
    """

    slices: array[float]

    def leave(self) -> None:
        super().leave()
        self._keep(-self._ints[self._ENV] - 1, self._ints[self._ACTIVITY], self._entered, time.monotonic())

    def lay_down(self) -> float:
        begun = self._changed
        moment = super().lay_down()
        self._keep(-1, _BUSY, begun, moment)
        return moment

    def _keep(self, *slice_: float) -> None:
        if len(self.slices) < _FIELDS * MOST_SLICES:
            self.slices.extend(slice_)


def begin(ledger: Ledger) -> None:
    """Have a ledger keep slices from now on."""
    if not isinstance(ledger, TracedLedger):
        ledger.__class__ = TracedLedger
        ledger.slices = array("d")  # type: ignore[attr-defined]


def end(ledger: Ledger) -> array[float] | None:
    """Have it keep no more; returns those it has kept, None where there was no trace."""
    if not isinstance(ledger, TracedLedger):
        return None
    slices, ledger.slices = ledger.slices, array("d")
    ledger.__class__ = Ledger  # type: ignore[assignment]
    return slices


class Tracer:
    """The parent's side of one trace.

    Args:
        path: Of the file.
        shares: The environments of each worker.
    """

    def __init__(self, path: Path, shares: Sequence[range]) -> None:
        self.path, self._shares = path, shares
        self._begun = time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._own: list[tuple[str, float, float]] = []
        self._watched: list[tuple[Any, str]] = []
        self._doing: set[str] = set()

    def watch(self, owner: Any, method: str, name: Callable[..., str]) -> None:
        """Keep a slice of each call of an object's method, until `finish`; none within another of the same name.

        Args:
            owner: The object.
            method: Which.
            name: What to call the slice, of the call's arguments.
        """
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def watched(*args: Any, **kwargs: Any) -> Any:
            doing = name(*args)
            if doing in self._doing:
                return inner(*args, **kwargs)
            self._doing.add(doing)
            begun = time.monotonic()
            try:
                return inner(*args, **kwargs)
            finally:
                self._doing.discard(doing)
                if len(self._own) < MOST_SLICES:
                    self._own.append((doing, begun, time.monotonic()))

        self._replace(owner, method, watched)

    def watch_batch(self, batch: Any) -> None:
        """Keep a slice whenever actions are written to a batch or results read from it, also through its arrays.

        Args:
            batch: Whose `views` are those that it has handed out by `arrays`.
        """
        make = batch.arrays

        @functools.wraps(make)
        def arrays(**keywords: Any) -> Any:
            view = make(**keywords)
            self._watch_view(view)
            return view

        self._replace(batch, "arrays", arrays)
        self.watch(batch, "write_actions", lambda *_: "write actions")
        self.watch(batch, "read", lambda *_: "read results")
        for view in [*batch.views]:
            self._watch_view(view)

    def _watch_view(self, view: Any) -> None:
        self.watch(view, "write", lambda *_: "write actions")
        for method in ("read", "read_some"):
            self.watch(view, method, lambda *_: "read results")

    def _replace(self, owner: Any, method: str, by: Callable[..., Any]) -> None:
        setattr(owner, method, by)
        self._watched.append((owner, method))

    def add(self, worker: int, slices: array[float], ahead: float) -> None:
        """Add what a worker has kept.

        Args:
            worker: Which.
            slices: What `end` has returned.
            ahead: Seconds that this clock is ahead of the worker's.
        """
        rows = sorted(zip(*[iter(slices)] * _FIELDS), key=lambda row: (row[2], -row[3]))
        inside = [row for row in rows if row[1] != _BUSY]
        busy = [(begun, ended) for _, activity, begun, ended in rows if activity == _BUSY]
        for env_id, activity, begun, ended in inside:
            name = Activity(int(activity)).method
            self._slice(worker + 1, name, "simulator", begun + ahead, ended + ahead, env_id=int(env_id))
        for begun, ended in _between(busy, [(begun, ended) for _, _, begun, ended in inside]):
            self._slice(worker + 1, "transport", "worker", begun + ahead, ended + ahead)
        for (_, begun), (ended, _) in pairwise(busy):
            self._slice(worker + 1, "waiting", "worker", begun + ahead, ended + ahead)

    def mark(self, worker: int, what: str) -> None:
        """Mark this moment in a worker's lane."""
        moment = self._microseconds(time.monotonic())
        self._events.append({"ph": "i", "s": "t", "name": what, "pid": 1, "tid": worker + 1, "ts": moment})

    def finish(self) -> None:
        """Watch nothing any more, and write the file, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        for owner, method in self._watched:
            delattr(owner, method)  # the class's own is found again
        self._watched.clear()
        for name, begun, ended in self._own:
            self._slice(_PARENT, name, "parent", begun, ended)
        names = {_PARENT: "parent"} | {
            worker + 1: f"worker {worker} (environments {[*share]})" for worker, share in enumerate(self._shares)
        }
        lanes = [
            {"ph": "M", "name": kind, "pid": 1, "tid": lane, "args": value}
            for lane, name in names.items()
            for kind, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": lane}))
        ]
        with _written(self.path) as file:
            json.dump({"traceEvents": [*lanes, *self._events], "displayTimeUnit": "ms"}, file)

    def _slice(self, lane: int, name: str, category: str, begun: float, ended: float, **arguments: Any) -> None:
        span = {"ts": self._microseconds(begun), "dur": round(1e6 * (ended - begun), 3)}
        self._events.append(
            {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": lane, **span, "args": arguments}
        )

    def _microseconds(self, moment: float) -> float:
        return round(1e6 * (moment - self._begun), 3)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[TextIO]:
    """A file that takes a path's place once it is whole; what is no regular file is written to as it is."""
    target = path.resolve()
    if (path.exists() and not path.is_file()) or not os.access(target.parent, os.W_OK):
        with path.open("w") as file:
            yield file
        return
    part = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        with part.open("w") as file:
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _between(
    whole: Sequence[tuple[float, float]], parts: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """What is left of some spans of time without others that lie within them; all in order.

    Example:
        >>> [*_between([(0, 5), (7, 9)], [(1, 2), (2, 3), (7, 9)])]
        [(0, 1), (3, 5)]
    """
    rest = iter([*parts, (float("inf"), float("inf"))])
    part = next(rest)
    for begun, ended in whole:
        while part[0] < ended:
            if part[0] > begun:
                yield begun, part[0]
            begun = max(begun, part[1])
            part = next(rest)
        if begun < ended:
            yield begun, ended
