"""What worker processes print and log, on its way to the caller's `sys.stdout`, `sys.stderr` and loggers.

Workers write straight to the files of `sys.stdout` and `sys.stderr` where these are files: terminals, pipes, logs. In a
notebook, in IDLE, or when a test captures output, they are other objects. Then workers write into a pipe, from which
this process writes to the object that `sys.stdout` or `sys.stderr` is at the moment::

    workers ---> pipe ---> the caller's thread, in each call of `Backend.wait`   ---> sys.stdout.write
                      ---> a thread, for what is printed between and during calls
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import locale
import os
import select
import sys
import threading
import time
from typing import Any

from marl_parallel.backends.memory import fill_standard
from marl_parallel.core.reports.advice import naming_limits
from marl_parallel.core.reports.log_records import RecordRings

_NBYTES = 1 << 16
_PIPE_NBYTES = 1 << 20  # at most; workers wait when a pipe is full
_CALLER_FIRST_S = 0.02  # the thread lets the caller's thread read first: notebooks show its output in the right cell
_LOOK_EVERY_S = 0.02  # on Windows, and for a signal handler that closes
_JOINED_WITHIN_S = 5.0


def is_file(stream: Any) -> bool:
    """Whether all that is written to a standard stream goes to the file of its descriptor; also if it is closed."""
    if stream is None or getattr(stream, "closed", False) is True:
        return True
    kind = type(stream)
    if not isinstance(stream, io.TextIOWrapper) or kind.write is not io.TextIOWrapper.write or "write" in vars(stream):
        return False
    try:
        stream.fileno()
    except (OSError, ValueError):  # it has no file
        return False
    return True


class _Pipe:
    """The pipe to `sys.stdout` or `sys.stderr`."""

    def __init__(self, name: str) -> None:
        fill_standard()
        self.name = name
        self.read_end, self.write_end = os.pipe()
        if sys.platform != "win32":
            os.set_blocking(self.read_end, False)
        with contextlib.suppress(ImportError, AttributeError, OSError):  # the pipe keeps its size
            import fcntl

            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
        encoding = getattr(getattr(sys, f"__{name}__"), "encoding", None) or locale.getpreferredencoding(False)
        self._decoder = codecs.getincrementaldecoder(encoding)(errors="replace")

    def has_output(self, wait: bool = False) -> bool:
        """Whether workers have written something."""
        if self.read_end < 0:
            return False
        if sys.platform == "win32":
            import _winapi
            import msvcrt

            while not _winapi.PeekNamedPipe(msvcrt.get_osfhandle(self.read_end), 0)[0]:
                if not wait:
                    return False
                time.sleep(_LOOK_EVERY_S)
            return True
        poll = select.poll()  # unlike `select.select`, it takes any number of descriptors
        poll.register(self.read_end, select.POLLIN)
        return bool(poll.poll(None if wait else 0))

    def pass_on(self) -> None:
        """Write all that is here to the caller's stream, or to the descriptor 1 or 2 if the stream fails.

        Output that comes meanwhile may stay in the pipe: workers may write faster than the stream takes it.
        """
        passed_on = 0
        while passed_on < _PIPE_NBYTES and self.has_output():
            data = os.read(self.read_end, _NBYTES)
            passed_on += len(data)
            try:
                getattr(sys, self.name).write(self._decoder.decode(data))
            except Exception:  # the stream is closed, None, or of somebody's own class: the output is not lost
                with contextlib.suppress(OSError):  # a program without output must not fail for it
                    os.write(1 if self.name == "stdout" else 2, data)

    def close(self) -> None:
        ends = self.read_end, self.write_end
        self.read_end = self.write_end = -1
        for end in ends:
            os.close(end)


class Relay:
    """Brings what workers print and log to the caller's process. It holds nothing until `descriptors` needs a pipe.

    Attributes:
        rings: The log records of workers; None if they are not forwarded.
        pipes: What workers print, by stream, where the caller's is not a file.
    """

    def __init__(self) -> None:
        self.rings: RecordRings | None = None
        self.pipes: dict[str, _Pipe] = {}
        self._threads: list[threading.Thread] = []
        # Re-entrant: a signal handler may close in the middle of a call.
        self._lock = threading.RLock()
        self._is_open = True

    @naming_limits()
    def descriptors(self) -> tuple[int | None, int | None]:
        """Where a worker that starts now writes stdout and stderr; None for the file of the caller's stream."""
        return self._descriptor("stdout"), self._descriptor("stderr")

    def _descriptor(self, name: str) -> int | None:
        if is_file(getattr(sys, name)):
            return None
        if name not in self.pipes:
            pipe = self.pipes[name] = _Pipe(name)
            thread = threading.Thread(target=self._run, args=(pipe,), name=f"marl_parallel-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self.pipes[name].write_end

    def _run(self, pipe: _Pipe) -> None:
        while pipe.has_output(wait=True) and self._is_open:
            time.sleep(_CALLER_FIRST_S)
            # Not for ever: a signal handler may close in the middle of a `bring`, which has the lock until it returns.
            if self._lock.acquire(timeout=_LOOK_EVERY_S):
                try:
                    if self._is_open:
                        pipe.pass_on()
                finally:
                    self._lock.release()

    def bring(self) -> None:
        """Pass on what has come since the last time. Only the caller's thread calls this, inside a call."""
        if self.pipes:
            try:
                with self._lock:
                    for pipe in [*self.pipes.values()]:
                        pipe.pass_on()
            except (OSError, ValueError) as error:
                # A signal handler may have passed on the rest and closed the pipes; what it raises itself is raised.
                if self._is_open or (isinstance(error, OSError) and error.errno != errno.EBADF):
                    raise
        rings = self.rings
        if rings is not None and rings.counts.tobytes() != rings.seen:
            rings.deliver()

    def close(self) -> None:
        """Pass on the rest, when no worker writes any more, and free everything."""
        if self._is_open:
            self.bring()
            rings, self.rings = self.rings, None
            if rings is not None:
                rings.finish()
        with self._lock:
            self._is_open = False
            for pipe in self.pipes.values():
                if not pipe.has_output():
                    os.write(pipe.write_end, b"\n")  # wakes the thread, which does not read it
        for thread in self._threads:
            if thread is not threading.current_thread():  # where the garbage collector may close
                thread.join(_JOINED_WITHIN_S)
        self._free()

    def abandon(self) -> None:
        """In a forked child of the owner: another thread may have held the lock."""
        self._is_open, self.rings = False, None
        self._free()

    def _free(self) -> None:
        self._threads = []
        while self.pipes:
            self.pipes.popitem()[1].close()
