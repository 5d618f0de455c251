"""The small block in which a parent and its worker processes wake each other.

Each worker has a desk in it: a semaphore and a ring of notes for what is asked of it, the same for what is done,
and its ledger. A note is a number and a moment; what does not go into one travels over the worker's channel
(`channel.py`) and the note says so. The parent waits on one semaphore for all workers; a countdown lets it sleep until
as many replies are there as it wants. Notes are written before the semaphore is posted and read after it is taken, so
no order of stores is relied upon.
"""

from __future__ import annotations

import mmap

from marl_parallel.backends.semaphores import Semaphore
from marl_parallel.core.ledger import Ledger

MAIL, STEP, PLAIN = 0, 1, 2
"""What a note is about: something in the channel; stepping the environments it names; these being done."""
KIND = 3
LAST = EACH = 1 << 2
PROMPT = 1 << 3
"""Added to a note: no other reply to the request follows; each environment, or what it says, is to be replied for."""
_COUNT_SHIFT, _FIRST_SHIFT, _COUNT_MASK = 8, 32, (1 << 24) - 1

_SEM, _LEDGER = Semaphore.SIZE, Ledger.NBYTES
_DESKS = 2 * _SEM
WAKE = 0
"""Where the semaphore is that the parent waits on."""


def note_of(kind: int, env_ids: range | None = None) -> int:
    """One number for a kind of note, with what is added to it, and the environments it is about; None: all of them."""
    return kind if env_ids is None else kind | len(env_ids) << _COUNT_SHIFT | env_ids.start << _FIRST_SHIFT


def env_ids_of(note: int) -> range | None:
    """The environments that a note is about.

    Example:
        >>> env_ids_of(note_of(STEP | EACH, range(4, 6)))
        range(4, 6)
    """
    count, first = note >> _COUNT_SHIFT & _COUNT_MASK, note >> _FIRST_SHIFT
    return range(first, first + count) if count else None


def control_nbytes(num_workers: int, capacity: int) -> int:
    """The size of the block.

    Args:
        num_workers: How many desks.
        capacity: How many notes there may be in a ring at a time.
    """
    return _DESKS + num_workers * _desk_nbytes(capacity)


def _desk_nbytes(capacity: int) -> int:
    return 2 * _SEM + _LEDGER + 2 * _ring_nbytes(capacity)


def _ring_nbytes(capacity: int) -> int:
    return -(-16 * capacity // 64) * 64


class Ring:
    """Notes that one process writes and one reads, in order.

    Attributes:
        signal: Counts the notes that have been written and not yet taken.
        capacity: How many notes there may be at a time.
        notes: The notes.
        moments: What came with each.
        written: How many this process has written.
        read: How many this process has taken.
    """

    __slots__ = ("capacity", "moments", "notes", "read", "signal", "written")

    def __init__(self, buffer: mmap.mmap, semaphore: int, notes: int, capacity: int) -> None:
        self.signal = Semaphore(buffer, semaphore)
        self.capacity = capacity
        view = memoryview(buffer)[notes : notes + 16 * capacity]
        self.notes, self.moments = view[: 8 * capacity].cast("Q"), view[8 * capacity :].cast("d")
        self.written = self.read = 0

    def put(self, note: int, moment: float = 0.0) -> None:
        """Write a note and wake the reader; the writer knows that there is room."""
        place = self.written % self.capacity
        self.notes[place], self.moments[place] = note, moment
        self.written += 1
        self.signal.post()

    def taken(self) -> int:
        """The next note; only after `signal` has been taken."""
        note = self.notes[self.read % self.capacity]
        self.read += 1
        return note

    @property
    def moment(self) -> float:
        """What came with the note that was taken last."""
        return self.moments[(self.read - 1) % self.capacity]


class Desk:
    """What one worker and the parent share.

    Attributes:
        asked: From the parent.
        done: To the parent.
        ledger: What the worker is doing.
    """

    def __init__(self, buffer: mmap.mmap, worker: int, capacity: int) -> None:
        start = _DESKS + worker * _desk_nbytes(capacity)
        rings = start + 2 * _SEM + _LEDGER
        self.asked = Ring(buffer, start, rings, capacity)
        self.done = Ring(buffer, start + _SEM, rings + _ring_nbytes(capacity), capacity)
        self.ledger = Ledger(memoryview(buffer)[start + 2 * _SEM : rings])


class Bell:
    """How the parent is woken: by every reply, but for as many as it has said it can do without.

    Attributes:
        wake: What it waits on.
        set_countdown: So many replies from now on will not wake it. Where some come at the very moment of setting,
            it may be woken too early, never too late.
    """

    def __init__(self, buffer: mmap.mmap) -> None:
        self.wake = Semaphore(buffer, WAKE)
        self._countdown = Semaphore(buffer, WAKE + _SEM)
        self.set_countdown = self._countdown.init

    def arrive(self) -> None:
        """Tell the parent that a reply is there."""
        if self._countdown.try_wait():
            self.wake.post()

    def hush(self) -> None:
        """Forget what it has rung for so far; the parent looks for itself."""
        while self.wake.try_take():
            pass


def initialise(buffer: mmap.mmap, num_workers: int, capacity: int) -> None:
    """Make all semaphores, before any worker is there."""
    for place in (WAKE, WAKE + _SEM):
        Semaphore(buffer, place).init(0)
    for worker in range(num_workers):
        clear_desk(buffer, worker, capacity)


def clear_desk(buffer: mmap.mmap, worker: int, capacity: int) -> None:
    """Make a desk as if it were new; nobody may be at it."""
    start = _DESKS + worker * _desk_nbytes(capacity)
    buffer[start + 2 * _SEM : start + 2 * _SEM + _LEDGER] = bytes(_LEDGER)
    Semaphore(buffer, start).init(0)
    Semaphore(buffer, start + _SEM).init(0)
