"""One worker's open book: what it is doing right now, and what it has done so far.

The worker writes, the parent reads, at any time and without asking: the book is a few numbers in memory that both
can see. That is how the parent knows which environment was running when a process died, for how long one has been
running, and what `stats()` says. Each number is written whole; there is no lock, so two of them may be read a
moment apart. One number is the parent's to write: that nothing new is to be begun.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple
from weakref import WeakSet

from marl_parallel.core.exclusive import end_returning_copy


class Activity(IntEnum):
    """What an environment can be doing; the name in lower case is the `method` of an error."""

    START = 0
    CONSTRUCTOR = 1
    RESET = 2
    STEP = 3
    STATE = 4
    RENDER = 5
    CALL = 6
    CLOSE = 7

    @property
    def method(self) -> str:
        """The name that errors use."""
        return self.name.lower()


BEFORE_OR_AFTER = (Activity.START, Activity.CONSTRUCTOR, Activity.CLOSE)
"""What is no part of any episode."""


class Running(NamedTuple):
    """An environment in the middle of something.

    Attributes:
        env_id: Which.
        activity: Doing what.
        since: The moment it began, in seconds of `time.monotonic`.
        inside: Whether the simulator has not returned yet; else what it has said is being told.
    """

    env_id: int
    activity: Activity
    since: float
    inside: bool


_RUNNING = struct.Struct("=qqd")
_SUMS = struct.Struct(f"=3dq{len(Activity)}q")
_SETTLED = 1 << 40


class Ledger:
    """The book over a buffer of `NBYTES` zeroed bytes, aligned to 8.

    Args:
        buffer: Writable memory, shared with whoever reads it.
    """

    NBYTES = 128

    # Places of 8 bytes: what runs now and since when; whether all is discarded; then what `_SUMS` packs: sums of
    # seconds, how many parts of requests have been begun, and how often each activity has ended. The first holds an
    # environment's number plus one: as it is while the simulator runs, negative until the next one's does, with a bit
    # added once the worker is done with all; 0 where nothing has been begun yet.
    _ENV, _ACTIVITY, _SINCE, _DISCARDED, _SIMULATOR, _BUSY, _WAITING, _PARTS, _ENDED = 0, 1, 2, 3, 4, 5, 6, 7, 8

    def __init__(self, buffer: Any) -> None:
        view = memoryview(buffer).cast("B")[: self.NBYTES]
        self._view, self._ints, self._floats = view, view.cast("q"), view.cast("d")
        self._changed = time.monotonic()  # when the worker last took up work, or laid it down
        self._entered = self._inside = self._busy = self._waited = 0.0
        self._parts = 0
        self._ended = [0] * len(Activity)
        _of_this_process.add(self)

    def enter(self, env_id: int, activity: int) -> None:
        """Note that an environment begins something, now."""
        now = self._entered = time.monotonic()
        _RUNNING.pack_into(self._view, 0, env_id + 1, activity, now)

    def leave(self) -> None:
        """Note that it has returned, or raised; sums and counts are written by `lay_down`."""
        self._inside += time.monotonic() - self._entered
        ints = self._ints
        ints[0] = -ints[0]
        self._ended[ints[1]] += 1

    @contextmanager
    def during(self, env_id: int, activity: Activity) -> Iterator[None]:
        """`enter` and `leave` around a block of code."""
        self.enter(env_id, activity)
        try:
            yield
        finally:
            self.leave()

    def take_up(self) -> None:
        """Note that the worker begins to work on a request, now."""
        now = time.monotonic()
        ints = self._ints
        ints[0] = ints[1] = 0
        self._parts += 1
        ints[7] = self._parts
        self._waited += now - self._changed
        self._floats[self._WAITING] = self._waited
        self._changed = now

    def lay_down(self) -> float:
        """Note that the worker is done with it; returns the moment."""
        now = time.monotonic()
        ints = self._ints
        if (env := ints[0]) < 0:
            ints[0] = _SETTLED - env
        self._busy += now - self._changed
        sums = (self._inside, self._busy, self._waited, self._parts, *self._ended)
        _SUMS.pack_into(self._view, 8 * self._SIMULATOR, *sums)
        self._changed = now
        return now

    def discard(self) -> None:
        """The parent's: from now on nothing is to be begun but a CLOSE; nobody waits for what is discarded."""
        self._ints[self._DISCARDED] = 1

    def mirror(self, told: bytes, ahead: float) -> None:
        """Become what another machine's ledger was; what is the parent's to write stays.

        Args:
            told: The other's bytes.
            ahead: Seconds that this machine's clock is ahead of that one's.
        """
        discarded = self._ints[self._DISCARDED]
        self._view[:] = told
        self._floats[self._SINCE] += ahead
        self._ints[self._DISCARDED] = discarded

    @property
    def discarded(self) -> bool:
        """Whether the parent has said so."""
        return self._ints[self._DISCARDED] != 0

    @property
    def latest(self) -> Activity:
        """What was begun last in the present request, whether it has ended or not; `START` where nothing was."""
        return Activity(self._ints[self._ACTIVITY])

    @property
    def since(self) -> float:
        """The moment at which that began, in seconds of `time.monotonic`; 0 before anything has."""
        return float(self._floats[self._SINCE])

    @property
    def running(self) -> Running | None:
        """What is going on in the worker's environments, None where nothing is."""
        env, activity, since = self._ints[self._ENV], self._ints[self._ACTIVITY], self.since
        if env == 0 or env >= _SETTLED:
            return None
        return Running(abs(env) - 1, Activity(activity), since, env > 0)

    @property
    def settled(self) -> int | None:
        """The environment that was running last, where all has been told that it and others had to say."""
        env = self._ints[self._ENV]
        return env - _SETTLED - 1 if env >= _SETTLED else None

    @property
    def state(self) -> tuple[int, float]:
        """What changes whenever anything begins or ends."""
        return self._ints[self._ENV], self.since

    @property
    def parts(self) -> int:
        """How many parts of requests the worker has begun.

        A request has one part for each environment that gets a reply of its own, else one part.
        """
        return int(self._ints[self._PARTS])

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return int(self._ints[self._ENDED + Activity.STEP])

    @property
    def resets(self) -> int:
        """Episodes begun so far."""
        return int(self._ints[self._ENDED + Activity.RESET])

    @property
    def simulator_s(self) -> float:
        """Seconds spent inside the simulators."""
        return float(self._floats[self._SIMULATOR])

    @property
    def transport_s(self) -> float:
        """Seconds spent by the worker on requests, but outside the simulators."""
        return max(float(self._floats[self._BUSY]) - self.simulator_s, 0.0)

    @property
    def waiting_s(self) -> float:
        """Seconds spent by the worker without anything to do."""
        return float(self._floats[self._WAITING])


_of_this_process: WeakSet[Ledger] = WeakSet()


def _guard_in_forked_child() -> None:
    """In a forked child: end it as soon as it comes back from a simulator to a worker of its parent.

    A worker writes to its ledger whenever a method of a simulator is entered or left, and nobody but the worker does.
    Replacing these methods here costs nothing in a step.
    """
    for ledger in list(_of_this_process):
        vars(ledger).update(dict.fromkeys(("enter", "leave", "take_up", "lay_down"), end_returning_copy))
    _of_this_process.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guard_in_forked_child)
