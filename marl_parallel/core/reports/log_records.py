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

import contextlib
import heapq
import itertools
import logging
import mmap
import os
import pickle
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from marl_parallel.core.objects.pickling import dumps, loads
from marl_parallel.core.reports.reports import logger as own_logger
from marl_parallel.core.worker.caller_settings import WorkerSettings
from marl_parallel.core.worker_status import WorkerStatus

Forwarding: TypeAlias = tuple[int, int, bool]
"""`RecordRings.start` and `RecordRings.most`, and whether the worker's stderr is a log."""

# -- queues in shared memory -------------------------------------------------------------------------------------------

RING_NBYTES = 1 << 18
"""Bytes for the records of one worker: some 500 records, or fewer long ones."""
_LONGEST_NBYTES = RING_NBYTES // 4
_MOST = 2**64 - 1  # of a number in the ring
_FRAME = struct.Struct("=2I")  # before each record: its size and checksum
_LATE_S = 0.001
_WRITTEN, _DROPPED, _READ = range(3)  # the numbers of a ring, 8 bytes each


class Ring:
    """The records of one worker: a circular buffer that one process writes and one reads.

    The worker writes `written` (bytes) and `dropped` (records), the caller writes `read` (bytes). A worker that
    replaces another goes on where that one has ended.
    """

    def __init__(self, buffer: mmap.mmap, start: int, most: int, worker: int) -> None:
        begin = start + 8 * 3 * most
        self.numbers = memoryview(buffer)[start:begin].cast("Q")[worker::most]
        self._bytes = memoryview(buffer)[begin + RING_NBYTES * worker :][:RING_NBYTES]
        self._lock, self._is_writing = threading.RLock(), False

    def write(self, record: bytes) -> None:
        """Add a record, or count it as dropped. Any thread may call this."""
        data, numbers = _FRAME.pack(len(record), zlib.crc32(record)) + record, self.numbers
        with self._lock:
            written = numbers[_WRITTEN]
            # A signal handler or a finalizer of this thread may log in the middle of this.
            end = written + len(data)
            # Numbers that a simulator has overwritten may be any.
            if self._is_writing or end > _MOST or not len(data) <= end - numbers[_READ] <= RING_NBYTES:
                numbers[_DROPPED] = min(numbers[_DROPPED] + 1, _MOST)
                return
            self._is_writing = True
            try:
                start = written % RING_NBYTES
                first = min(len(data), RING_NBYTES - start)
                self._bytes[start : start + first] = data[:first]
                self._bytes[: len(data) - first] = data[first:]
                numbers[_WRITTEN] = end  # last, so that a crash never leaves a partial record
            finally:
                self._is_writing = False

    def take(self) -> Iterator[bytes]:
        """Take all records in the ring; b"" in place of one that a faulty simulator has overwritten."""
        numbers = self.numbers
        while (read := numbers[_READ]) != (written := numbers[_WRITTEN]):
            end, record = self._record_at(read, written)
            if numbers[_READ] == read:  # else a signal handler has closed meanwhile, and has taken it
                numbers[_READ] = end
                yield record

    def _record_at(self, read: int, written: int) -> tuple[int, bytes]:
        """Where the record at `read` ends, and the record, or b"" if it is damaged."""
        for _ in range(2):
            nbytes, checksum = _FRAME.unpack(self._bytes_at(read, _FRAME.size))
            end = read + _FRAME.size + nbytes
            fits = nbytes > 0 and end <= written  # no record is empty: zeros are bytes that are not here
            record = self._bytes_at(read + _FRAME.size, nbytes) if fits else b""
            if fits and zlib.crc32(record) == checksum:
                return end, record
            time.sleep(_LATE_S)  # some processors show another process a count before the bytes that it counts
        return (end if fits else written), b""  # without its size, nobody knows where the next one begins

    def _bytes_at(self, position: int, nbytes: int) -> bytes:
        start = position % RING_NBYTES
        data = bytes(self._bytes[start : start + nbytes])
        return data + bytes(self._bytes[: nbytes - len(data)])


# -- in the caller's process -------------------------------------------------------------------------------------------


class RecordRings:
    """The rings of all workers, in a part of a buffer that begins at `start`: a multiple of 8.

    Workers have written or dropped records since `deliver` if `counts.tobytes()` differs from `seen`. Callers compare
    the two themselves, since a method call per batch would cost more.
    """

    def __init__(self, buffer: mmap.mmap, start: int, most: int) -> None:
        self.counts, self.seen = memoryview(buffer)[start : start + 16 * most].cast("Q"), bytes(16 * most)
        self.start, self.most = start, most
        self._rings = [Ring(buffer, start, most, worker) for worker in range(most)]
        # A heap of what loggers have not got yet: a time, a number, a record, whether the worker has printed it.
        self._records: list[tuple[float, int, logging.LogRecord, bool]] = []
        self._numbers = itertools.count()
        self._unreadable = 0  # how many records could not be read
        self._reported = 0  # how many dropped records the warning has named

    @staticmethod
    def nbytes(most: int) -> int:
        """The size of the rings of so many workers."""
        return most * (8 * 3 + RING_NBYTES)

    def deliver(self) -> None:
        """Hand all records to the loggers of this process, oldest first, and warn once if records were dropped.

        An exception of a handler is printed, as `logging` itself does.
        """
        self.seen = self.counts.tobytes()
        for worker, ring in enumerate(self._rings):
            for data in ring.take():
                try:
                    made, record, is_printed = _unpickled(data)
                except Exception as error:  # unpickling may raise anything
                    self._unreadable += 1
                    own_logger.debug("a log record of worker %d cannot be read: %s", worker, type(error).__name__)
                else:  # in place, since a signal handler that closes takes records, too
                    heapq.heappush(self._records, (made, next(self._numbers), record, is_printed))
        while True:
            try:
                _, _, record, is_printed = heapq.heappop(self._records)
            except IndexError:
                break
            try:
                logger = logging.getLogger(record.name)
                if is_printed and not logger.hasHandlers():
                    continue  # without handlers, `logging` would print it once more
                logger.handle(record)
            except Exception:
                _reporter.handleError(record)
        if self._reported or not (dropped := self._dropped()):
            return
        self._reported, causes = dropped, []
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
        self.deliver()
        if (dropped := self._dropped()) > self._reported:
            own_logger.info("%d log records of simulators were dropped in total", dropped)

    def _dropped(self) -> int:
        return self._unreadable + sum(self.counts[self.most :])


_reporter = logging.Handler()  # its `handleError` prints an exception as all handlers do


def _unpickled(data: bytes) -> tuple[float, logging.LogRecord, bool]:
    """When a record was made, the record, and whether the worker has printed it."""
    attributes, values, is_printed = loads(data)
    for names, value in values.items():
        with contextlib.suppress(Exception):  # if only the worker has its class, it stays text
            attributes.update(zip(names, loads(value), strict=True))
    record = logging.makeLogRecord(attributes)
    made = record.created
    return made if isinstance(made, int | float) else 0.0, record, is_printed  # made by hand, it may have no time


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

    def __init__(
        self, buffer: mmap.mmap, forwarding: Forwarding, worker: int, status: WorkerStatus, settings: WorkerSettings
    ) -> None:
        start, most, to_file = forwarding
        self._ring, self._worker = Ring(buffer, start, most, worker), worker
        self._status, self._settings = status, settings
        self._file: logging.Handler | None = None
        if to_file:
            self._file = logging.StreamHandler(sys.stderr)
            self._file.setFormatter(logging.Formatter(_LINE))

    def install(self) -> None:
        """Receive all records from now on, but not in processes that simulators fork."""
        self._settings.forwards = True
        original = logging.Logger.callHandlers

        def restore() -> None:
            logging.Logger.callHandlers = original  # type: ignore[method-assign]
            self._settings.leave_handlers()

        logging.Logger.callHandlers = lambda logger, record: self.send(logger, record)  # type: ignore[assignment,method-assign]
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
    attributes["exc_info"], values = None, dict[tuple[str, ...], bytes]()
    if record.exc_info and not record.exc_text:
        attributes["exc_text"] = _formatter.formatException(record.exc_info)
    args = [part for pair in record.args.items() for part in pair] if type(record.args) is dict else record.args or ()
    # Only this process may have the class of another mapping.
    if isinstance(args, Mapping) or any(type(value) not in _PLAIN for value in (record.msg, *args)):
        attributes.update(msg=record.getMessage(), args=())
        with contextlib.suppress(Exception):  # what does not pickle stays text
            values["msg", "args"] = dumps((record.msg, record.args))
    for name, value in attributes.items():
        if type(value) not in _PLAIN and name != "args":
            attributes[name] = repr(value)
            with contextlib.suppress(Exception):
                values[name,] = dumps((value,))
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
