"""The small block in which a parent and its worker processes wake each other.

Each worker has a desk in it: a semaphore and a ring of notes for what is asked of it, the same for what is done,
and its ledger. A note is one number; what does not go into one travels over the worker's channel (`channel.py`) and
the note says so. The parent waits on one semaphore for all workers; a countdown lets it sleep until the last worker
of a batch is done. Notes are written before the semaphore is posted and read after it is taken, so no order of
stores is relied upon.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

from marl_parallel.backends.semaphores import Semaphore
from marl_parallel.runtime.ledger import Ledger

NOTES = 4096
"""Notes that fit in a ring: more requests than this cannot be before one worker at a time."""

MAIL, STEP_ALL, STEP_ONE, PLAIN = 0, 1, 2, 3
"""What a note says: look into the channel; step all environments; step the one whose number is added; done."""
TOGETHER = 1 << 8
"""Added to a request: the parent wants to be woken by the last of the batch only."""
ENV_SHIFT = 16

_SEM, _LEDGER, _RING = Semaphore.SIZE, Ledger.NBYTES, 8 * NOTES
_DESK = 2 * _SEM + _LEDGER + 2 * _RING
_DESKS = 2 * _SEM
WAKE = 0
"""Where the semaphore is that the parent waits on."""


def control_nbytes(num_workers: int) -> int:
    """The size of the block."""
    return _DESKS + num_workers * _DESK


class Ring:
    """Notes that one process writes and one reads, in order.

    Attributes:
        signal: Counts the notes that have been written and not yet taken.
    """

    def __init__(self, buffer: mmap.mmap, semaphore: int, notes: int) -> None:
        self.signal = Semaphore(buffer, semaphore)
        self._notes = memoryview(buffer)[notes : notes + _RING].cast("Q")
        self._written = self._taken = 0

    def put(self, note: int) -> None:
        """Write a note and wake the reader."""
        self._notes[self._written % NOTES] = note
        self._written += 1
        self.signal.post()

    def taken(self) -> int:
        """The next note; only after `signal` has been taken."""
        note = self._notes[self._taken % NOTES]
        self._taken += 1
        return note


class Desk:
    """What one worker and the parent share.

    Attributes:
        asked: From the parent.
        done: To the parent.
        ledger: What the worker is doing.
    """

    def __init__(self, buffer: mmap.mmap, worker: int) -> None:
        start = _DESKS + worker * _DESK
        rings = start + 2 * _SEM + _LEDGER
        self.asked = Ring(buffer, start, rings)
        self.done = Ring(buffer, start + _SEM, rings + _RING)
        self.ledger = Ledger(memoryview(buffer)[start + 2 * _SEM : rings])


class Bell:
    """How the parent is woken.

    Attributes:
        wake: What it waits on.
    """

    def __init__(self, buffer: mmap.mmap) -> None:
        self.wake = Semaphore(buffer, WAKE)
        self._countdown = Semaphore(buffer, WAKE + _SEM)
        self.set_countdown: Callable[[int], None] = self._countdown.init

    def arrive(self, together: bool) -> None:
        """Tell the parent that something is done; of a batch, only the last one does."""
        if not together or not self._countdown.try_take():
            self.wake.post()


def initialise(buffer: mmap.mmap, num_workers: int) -> None:
    """Make all semaphores, before any worker is there."""
    for place in (WAKE, WAKE + _SEM):
        Semaphore(buffer, place).init()
    for worker in range(num_workers):
        start = _DESKS + worker * _DESK
        Semaphore(buffer, start).init()
        Semaphore(buffer, start + _SEM).init()
