"""Sends log records of worker processes to the loggers of the same names in the caller's process.

    worker                                                     caller
    Logger.callHandlers -> RecordSender -> Ring, in shared --- RecordRings.deliver -> getLogger(name).handle(record)
                                           memory

A ring is a queue that outlives its worker, so records from before a crash can be read after it. The worker never waits:
a record that finds no room is dropped and counted.

The worker replaces `callHandlers`, since a handler of the root logger would miss loggers that do not propagate, and
simulators remove handlers (`basicConfig(force=True)`, `dictConfig`).
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import mmap
import operator
import os
import pickle
import struct
import sys
import threading
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from marl_parallel.core.caller_settings import WorkerSettings, has_handlers
from marl_parallel.core.pickling import dumps, loads
from marl_parallel.core.reports import logger as own_logger
from marl_parallel.core.worker_status import WorkerStatus

# -- queues in shared memory -------------------------------------------------------------------------------------------

RING_NBYTES = 1 << 18
"""Bytes for the records of one worker: some 500 records, or fewer long ones."""
_LONGEST_NBYTES = RING_NBYTES // 4
_FRAME = struct.Struct("=2I")  # before each record: its size and checksum
_NUMBERS = 3  # of each ring, 8 bytes each


class Ring:
    """The records of one worker: a circular buffer that one process writes and one reads.

    The worker writes `written` (bytes) and `dropped` (records), the caller writes `read` (bytes). Some processors show
    another process a count before the bytes that it counts, hence the checksums. Such a record is read later; a record
    that is still bad then was overwritten by a faulty simulator, and is skipped.
    """

    def __init__(self, buffer: mmap.mmap, start: int, most: int, worker: int) -> None:
        self._numbers = memoryview(buffer)[start : start + 8 * _NUMBERS * most].cast("Q")
        begin = start + 8 * _NUMBERS * most + RING_NBYTES * worker
        self._bytes = memoryview(buffer)[begin : begin + RING_NBYTES]
        self._written, self._dropped, self._read = worker, most + worker, 2 * most + worker
        self._bad_at: int | None = None  # the position of a record that was bad when it was last looked at
        self._lock, self._is_writing = threading.RLock(), False

    def write(self, record: bytes) -> None:
        """Add a record, or count it as dropped. Any thread may call this."""
        numbers, nbytes = self._numbers, _FRAME.size + len(record)
        with self._lock:
            written = numbers[self._written]
            # A signal handler or a finalizer of this thread may log in the middle of this.
            if self._is_writing or nbytes > RING_NBYTES - (written - numbers[self._read]):
                numbers[self._dropped] += 1
                return
            self._is_writing = True
            try:
                data = _FRAME.pack(len(record), zlib.crc32(record)) + record
                place = written % RING_NBYTES
                first = min(nbytes, RING_NBYTES - place)
                self._bytes[place : place + first] = data[:first]
                self._bytes[: nbytes - first] = data[first:]
                numbers[self._written] = written + nbytes  # last, so that a crash never leaves a partial record
            finally:
                self._is_writing = False

    def take(self, *, last: bool = False) -> tuple[list[bytes], int]:
        """Take all records in the ring; returns them, and how many bad ones were skipped.

        A bad record is skipped if it was bad in the last call, too, or if this is the `last` call.
        """
        records, skipped, numbers = [], 0, self._numbers
        while (read := numbers[self._read]) < (written := numbers[self._written]):
            nbytes, checksum = _FRAME.unpack(self._bytes_at(read, _FRAME.size))
            end = read + _FRAME.size + nbytes
            fits = nbytes > 0 and end <= written  # no record is empty: zeros are bytes that are not here
            record = self._bytes_at(read + _FRAME.size, nbytes) if fits else b""
            is_whole = fits and zlib.crc32(record) == checksum
            if numbers[self._read] != read:
                continue  # a signal handler has closed meanwhile, and has taken this record
            if is_whole:
                numbers[self._read] = end
                records.append(record)
            elif last or self._bad_at == read:
                numbers[self._read] = end if fits else written  # without its size, where the next one begins is unknown
                skipped += 1
            else:
                self._bad_at = read
                break
        return records, skipped

    @property
    def is_read(self) -> bool:
        """Whether the ring has nothing more to read."""
        return self._numbers[self._read] >= self._numbers[self._written]

    def _bytes_at(self, position: int, nbytes: int) -> bytes:
        place = position % RING_NBYTES
        data = bytes(self._bytes[place : place + nbytes])
        return data + bytes(self._bytes[: max(min(nbytes, RING_NBYTES) - len(data), 0)])

    @property
    def dropped(self) -> int:
        """How many records found no room."""
        return int(self._numbers[self._dropped])

    def clear(self) -> int:
        """Empty the ring for another worker; returns how many records the last worker has dropped."""
        dropped = self.dropped
        for number in (self._written, self._dropped, self._read):
            self._numbers[number] = 0
        self._bad_at = None
        return dropped


# -- in the caller's process -------------------------------------------------------------------------------------------


class RecordRings:
    """The rings of all workers, in a part of a buffer that begins at `start`: a multiple of 8.

    Workers have written or dropped records since `deliver` if `counts.tobytes()` differs from `seen`. Callers compare
    the two themselves, since a method call per batch would cost more.
    """

    def __init__(self, buffer: mmap.mmap, start: int, most: int) -> None:
        self.counts, self.seen = memoryview(buffer)[start : start + 16 * most], bytes(16 * most)
        self.start, self.most = start, most
        self._rings = [Ring(buffer, start, most, worker) for worker in range(most)]
        self._records: list[_Taken] = []  # not handed to loggers yet, oldest first
        self._dropped_before = 0  # by workers that have been replaced
        self._unreadable = 0  # how many records could not be read
        self._reported = 0  # how many dropped records a message has named

    @staticmethod
    def nbytes(most: int) -> int:
        """The size of the rings of so many workers."""
        return most * (8 * _NUMBERS + RING_NBYTES)

    def clear(self, worker: int) -> None:
        """Prepare the ring for a new worker; the next `deliver` hands out the records of the worker before."""
        self._take(worker, last=True)
        self._dropped_before += self._rings[worker].clear()

    def _take(self, worker: int, *, last: bool) -> None:
        """Take the records of a worker, and count those that cannot be read."""
        pickled, skipped = self._rings[worker].take(last=last)
        if skipped:
            self._unreadable += skipped
            own_logger.debug("%d log records of worker %d are damaged", skipped, worker)
        for record in pickled:
            try:
                taken = _unpickled(record)
            except Exception as error:  # unpickling may raise anything
                self._unreadable += 1
                own_logger.debug("a log record of worker %d cannot be read: %s", worker, type(error).__name__)
            else:  # in place, since a signal handler that closes takes records, too
                bisect.insort(self._records, taken, key=operator.attrgetter("time"))

    def deliver(self, *, warn: bool, last: bool = False) -> None:
        """Hand all records to the loggers of this process, oldest first.

        With `warn`, warn once if records were dropped; pass False during a call, when more may follow. Pass `last` if
        no worker writes any more. An exception of a handler is printed, as `logging` itself does.
        """
        self.seen = self.counts.tobytes()
        for worker in range(self.most):
            self._take(worker, last=last)
        if not all(ring.is_read for ring in self._rings):
            self.seen = b""  # so that the next `deliver` looks again
        while True:
            try:
                record, is_printed, _ = self._records.pop(0)
            except IndexError:
                break
            try:
                logger = logging.getLogger(record.name)
                if is_printed and not has_handlers(logger):
                    continue  # without handlers, `logging` would print it once more
                logger.handle(record)
            except Exception:
                _reporter.handleError(record)
        if self._reported or not (dropped := self._dropped()):
            return
        if not warn:
            self.seen = b""  # so that the next `deliver` warns
        else:
            self._reported = dropped
            causes = []
            if dropped > self._unreadable:
                causes.append(
                    "workers log faster than this program takes their records (in each of its calls). Raise the levels "
                    "of their loggers, or pass log_dir= to write all records to files"
                )
            if self._unreadable:
                causes.append(f"{self._unreadable} could not be read (messages of level DEBUG of this logger say why)")
            own_logger.warning("%d log records of simulators were dropped so far: %s", dropped, "; ".join(causes))

    def finish(self) -> None:
        """`deliver` for the last time, when no worker writes any more."""
        self.deliver(warn=True, last=True)
        if (dropped := self._dropped()) > self._reported:
            own_logger.info("%d log records of simulators were dropped in total", dropped)
            self._reported = dropped

    def _dropped(self) -> int:
        return self._dropped_before + self._unreadable + sum([ring.dropped for ring in self._rings])


_MESSAGE = "message"  # a key in place of an attribute: the message with its arguments
_reporter = logging.Handler()  # its `handleError` prints an exception as all handlers do


class _Taken(NamedTuple):
    """A record that has been taken from a ring."""

    record: logging.LogRecord
    is_printed: bool  # whether the worker has printed it
    time: float  # when it was made; 0 if a simulator made it by hand without a time


def _unpickled(data: bytes) -> _Taken:
    attributes, values, is_printed = loads(data)
    for name, value in values.items():
        with contextlib.suppress(Exception):  # if only the worker has its class, it stays text
            if name == _MESSAGE:
                attributes["msg"], attributes["args"] = loads(value)
            else:
                attributes[name] = loads(value)
    record = logging.makeLogRecord(attributes)
    made = record.created
    return _Taken(record, is_printed, made if isinstance(made, int | float) else 0.0)


# -- in the worker -----------------------------------------------------------------------------------------------------

_PLAIN = (str, int, float, bool, bytes, type(None))
_STANDARD = frozenset([*vars(logging.makeLogRecord({})), "env_id", "worker"])
_MOST_CHARACTERS = 4096  # of a message and a stack in a record that is too long
_formatter = logging.Formatter()
_LINE = "%(asctime)s %(levelname)s %(name)s (env %(env_id)s): %(message)s"


class RecordSender:
    """Writes the records of this process into a ring, and calls the handlers that simulators have configured.

    Handlers for stdout and stderr are left out if handlers in the caller's process show the record. With `to_file`,
    stdout and stderr are a file, which gets a line for each record.
    """

    def __init__(self, ring: Ring, worker: int, status: WorkerStatus, settings: WorkerSettings, to_file: bool) -> None:
        self._ring, self._worker, self._status, self._settings = ring, worker, status, settings
        self._file: logging.Handler | None = None
        if to_file:
            self._file = logging.StreamHandler(sys.stderr)
            self._file.setFormatter(logging.Formatter(_LINE))

    def install(self) -> None:
        """Receive all records from now on, but not in processes that simulators fork."""
        self._settings.forwards = True
        original = logging.Logger.callHandlers

        def call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
            self.send(logger, record)

        def restore() -> None:
            logging.Logger.callHandlers = original  # type: ignore[method-assign]
            self._settings.leave_handlers()

        logging.Logger.callHandlers = call_handlers  # type: ignore[assignment,method-assign]
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=restore)

    def send(self, logger: logging.Logger, record: logging.LogRecord) -> None:
        running = self._status.running
        vars(record).setdefault("env_id", None if running is None else running.env_id)
        vars(record).setdefault("worker", self._worker)
        handlers = [handler for handler in _handlers_of(logger) if record.levelno >= handler.level]
        printing = [handler for handler in handlers if _is_standard(handler)]
        if self._file is not None and not printing:
            handlers.append(self._file)
        elif self._file is None and self._settings.shows(logger.name):
            handlers = [handler for handler in handlers if handler not in printing]
            printing = []
        try:
            data = _pickled(record, is_printed=self._file is None and bool(printing))
        except Exception:  # such as a `__str__` that raises
            _reporter.handleError(record)
        else:
            self._ring.write(data)
        for handler in handlers:
            handler.handle(record)


def _handlers_of(logger: logging.Logger) -> list[logging.Handler]:
    """The handlers that `callHandlers` would call, whatever their levels."""
    handlers = []
    current: logging.Logger | None = logger
    while current is not None:
        handlers += current.handlers
        current = current.parent if current.propagate else None
    return handlers


def _is_standard(handler: logging.Handler) -> bool:
    """Whether a handler writes to stdout or stderr; rich's has a console with a file."""
    stream = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)
    return stream is not None and any(stream is one for one in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))


def _pickled(record: logging.LogRecord, *, is_printed: bool) -> bytes:
    """A record for `_unpickled`: an exception is text; a value that is not plain is text, and pickled by itself."""
    attributes = {str(name): value for name, value in vars(record).items()}
    attributes["exc_info"], values = None, dict[str, bytes]()
    if record.exc_info and not record.exc_text:
        attributes["exc_text"] = _formatter.formatException(record.exc_info)
    args = [part for pair in record.args.items() for part in pair] if type(record.args) is dict else record.args or ()
    # Only this process may have the class of another mapping.
    if isinstance(args, Mapping) or any(type(value) not in _PLAIN for value in (record.msg, *args)):
        attributes.update(msg=record.getMessage(), args=())
        with contextlib.suppress(Exception):  # what does not pickle stays text
            values[_MESSAGE] = dumps((record.msg, record.args))
    for name, value in attributes.items():
        if type(value) not in _PLAIN and name != "args":
            attributes[name] = repr(value)
            with contextlib.suppress(Exception):
                values[name] = dumps(value)
    data = pickle.dumps((attributes, values, is_printed), pickle.HIGHEST_PROTOCOL)
    if len(data) > _LONGEST_NBYTES:
        attributes = {name: attributes[name] for name in attributes if name in _STANDARD}
        for name in ("exc_text", "stack_info"):
            attributes[name] = attributes[name] and attributes[name][-_MOST_CHARACTERS:]
        message = record.getMessage()
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[:_MOST_CHARACTERS]}... ({len(message)} characters)"
        attributes.update(msg=message, args=())
        data = pickle.dumps((attributes, {}, is_printed), pickle.HIGHEST_PROTOCOL)
    return data
