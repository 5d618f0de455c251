"""The stacks of a worker, which it writes into a file of the caller: at a crash, on a signal, and in `os._exit`.

A thread of the worker also sends them over a connection when asked: simulators, which may use any signal, notice
nothing of that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import operator
import os
import re
import select
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import NoReturn

from marl_parallel.backends.descendants import state_of
from marl_parallel.backends.memory import anonymous_file, append_only

# A dump is many small writes without an end mark: it counts as complete when nothing is written for this long.
_COMPLETE_AFTER_S = 0.02
_ABORT_TIMEOUT_S = 0.5
_MOST_FRAMES = 100  # of a stack, as in `faulthandler`
_MOST_BYTES = 16_000  # of an answer, so that it is sent at once, and read without waiting
# `faulthandler` ends the report of a fatal signal with the names of all loaded extension modules: thousands of letters.
_EXTENSION_MODULES = re.compile(r"\n*^Extension modules: .*\n?", re.MULTILINE)
# The thread of `_AnsweringThread`; until it runs, it has no frames.
_ANSWERING_THREAD = re.compile(
    r"^Thread 0x\w+.* \(most recent call first\):\n"
    rf'(?:  <no Python frame>\n|(?:  File .*\n)*?  File "{re.escape(__file__)}", line \d+ in _run\n)\n?',
    re.MULTILINE,
)


# -- in the worker -----------------------------------------------------------------------------------------------------


def report_to(fd: int) -> int | None:
    """Have this process write its stacks to a file: at a native crash, on a signal, and at `os._exit`.

    The first byte of the file is the number of the signal, which is returned: a real-time signal with the default
    action, which simulators hardly use, or SIGUSR1 where there is none; None (0) on Windows.
    """
    number = _unused_signal()
    os.write(fd, bytes([number or 0]))
    faulthandler.enable(file=fd, all_threads=True)
    if number is not None and sys.platform != "win32":
        faulthandler.register(number, file=fd, all_threads=True)
    report_exits(fd)
    return number


def _unused_signal() -> int | None:
    if sys.platform == "win32":
        return None
    highest, lowest = getattr(signal, "SIGRTMAX", 0), getattr(signal, "SIGRTMIN", 1)
    unused = (number for number in range(highest, lowest - 1, -1) if signal.getsignal(number) == signal.SIG_DFL)
    return next(unused, signal.SIGUSR1)


def report_exits(fd: int) -> None:
    """Have `os._exit` write the stack of its caller before it ends this process; Python has no audit event for it.

    It writes nothing in children that this process forks, and nothing where this package ends the process.
    """
    pid, end = os.getpid(), os._exit

    @functools.wraps(end)
    def _exit(status: int) -> NoReturn:
        operator.index(status)  # else it raises, and the process goes on
        caller: FrameType | None = sys._getframe(1)
        if os.getpid() == pid and caller is not None and _package_of(caller) != "marl_parallel":
            text = "".join(["os._exit was called here (most recent call first):\n", *_lines_of(caller)])
            with contextlib.suppress(OSError):  # it must end the process all the same
                os.write(fd, text.encode(errors="backslashreplace"))
        end(status)

    _exit.__module__, _exit.__qualname__ = "os", "_exit"  # so that it is pickled by name
    os._exit = _exit


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _lines_of(frame: FrameType | None) -> Iterator[str]:
    """The lines of a stack as `faulthandler` writes them."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n'
        frame = frame.f_back


def answer_requests(connection: Connection) -> None:
    """Have a thread of this process send the Python stacks of the others for each message of `CrashFile.ask`."""
    _AnsweringThread(connection)


class _AnsweringThread:
    """The thread that sends stacks.

    It ends before a simulator forks this process and is started anew after that, since a fork of a process with several
    threads is unsafe, and Python warns of it. `threading` does not know it: simulators may count their threads. It
    blocks all signals, which must interrupt the simulator's threads.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ended = threading.Lock()  # held while the thread runs
        self._native_id = 0
        self._forks = hasattr(os, "register_at_fork")
        if self._forks:
            self._stop_fd, self._stop_end = os.pipe()
            os.register_at_fork(before=self._stop, after_in_parent=self._start, after_in_child=self._forget)
        self._start()

    def _start(self) -> None:
        if sys.platform == "win32" or not self._forks:
            start_new_thread(self._run, ())
            return
        if self._connection.closed or not self._ended.acquire(blocking=False):
            return  # in a forked child, or another thread has forked and started it
        is_started, before = False, signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            with contextlib.suppress(RuntimeError):  # at the limit of threads, long calls are reported without stacks
                start_new_thread(self._run, ())
                is_started = True
        finally:
            if not is_started:
                self._ended.release()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _stop(self) -> None:
        if self._ended.acquire(blocking=False):
            self._ended.release()  # it does not run
            return
        os.write(self._stop_end, b"x")
        with self._ended:
            os.read(self._stop_fd, 1)
        # The kernel counts the thread a little longer, and Python asks the kernel.
        while os.path.exists(f"/proc/self/task/{self._native_id}"):
            time.sleep(0)

    def _forget(self) -> None:
        self._ended = threading.Lock()  # another thread may have held it at the fork
        if self._connection.closed:
            return  # in a child of a forked child, which inherits the hooks
        self._connection.close()
        os.close(self._stop_fd)
        os.close(self._stop_end)

    def _run(self) -> None:
        try:
            self._native_id = threading.get_native_id()
            while self._is_asked():
                self._connection.recv_bytes()
                self._connection.send_bytes(_stacks_of_others().encode(errors="backslashreplace")[:_MOST_BYTES])
        except (EOFError, OSError):
            return  # the parent is gone
        finally:
            if self._forks:
                self._ended.release()

    def _is_asked(self) -> bool:
        """Wait for a request; False if the thread is to end."""
        if sys.platform == "win32" or not self._forks:
            return True
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._stop_fd, select.POLLIN)
        return all(fd != self._stop_fd for fd, _ in poll.poll())


def _stacks_of_others() -> str:
    """The Python stacks of all threads but this one, the main thread's first."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return ""  # without the GIL the threads run on, and reading their frames may crash the interpreter
    main, this = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        "".join([f"Thread 0x{ident:016x} (most recent call first):\n", *_lines_of(frame)])
        for ident, frame in frames
        if ident != this
    )


# -- in the parent -----------------------------------------------------------------------------------------------------


def _for_readers(text: str) -> str:
    """The text without lists of extension modules and without this package's own thread."""
    return _EXTENSION_MODULES.sub("\n", _ANSWERING_THREAD.sub("", text))


class CrashFile:
    """A file that one worker appends its stacks to, and a connection to ask it for them.

    A file, since a full pipe would block the dying process. `theirs` is the worker's end of the connection.
    """

    def __init__(self) -> None:
        self.fd = anonymous_file("marl_parallel-stacks")
        append_only(self.fd)  # the worker's descriptor is a copy of this one and shares its position
        self._start = 1  # after the number of the signal
        try:
            self._connection, self.theirs = Pipe()
        except OSError:  # no descriptors are left
            os.close(self.fd)
            raise
        self._is_asked = False

    def text(self) -> str:
        """What was written so far, without the stacks that `stack` has returned."""
        return _for_readers(self._read(self._start))

    def stack(self, pid: int, timeout: float = 1.0) -> str:
        """Have the living process `pid` write the stacks of its threads; "" if it cannot, even by `SIGABRT`.

        A stopped process is continued. A process that blocks the signal is aborted, which ends it: call this for a
        process that is to be killed, and `ask` for one that goes on.
        """
        deadline = time.monotonic() + timeout
        while (start := self._size()) == 0 and state_of(pid) and time.monotonic() < deadline:
            time.sleep(0.001)  # it has just been started
        if sys.platform == "win32" or not (number := ord(self._read(0)[:1] or "\0")):
            return ""  # it has ended, or this object is closed; Windows has no such signals
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            if state_of(pid) == "T":
                os.kill(pid, signal.SIGCONT)
            if self._wait_complete(start, timeout):
                text = self._read(start)
                self._start = start + len(text.encode(errors="surrogateescape"))
                return _for_readers(text)
            os.kill(pid, signal.SIGABRT)
            self._wait_complete(start, _ABORT_TIMEOUT_S)
        return _for_readers(self._read(start))

    def ask(self, pid: int, timeout: float = 1.0) -> str:
        """The stacks of the threads of the process `pid`, which goes on undisturbed; or why there are none."""
        try:
            if self._is_asked and self._connection.poll(0):
                self._connection.recv_bytes()  # it came too late for the request before
                self._is_asked = False
            if not self._is_asked:
                self._is_asked = True
                self._connection.send_bytes(b"?")
            if self._connection.poll(timeout):
                self._is_asked = False
                return self._connection.recv_bytes().decode(errors="replace")
        except (EOFError, OSError):  # it has ended, or this object is closed
            return ""
        if state_of(pid) in ("T", "t"):
            return f"The process {pid} is stopped (SIGSTOP).\n"
        reason = "native code probably holds Python's interpreter lock (GIL)"
        return f"The process {pid} did not answer within {timeout:g} s: {reason}.\n"

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            self._connection.close()
            self.theirs.close()

    def _wait_complete(self, start: int, timeout: float) -> bool:
        """Wait until something was written after `start` and no more follows; returns whether anything was."""
        deadline = time.monotonic() + timeout
        size, changed = start, time.monotonic()
        while True:
            now = time.monotonic()
            if (current := self._size()) != size:
                size, changed = current, now
            if (size > start and now - changed >= _COMPLETE_AFTER_S) or now >= deadline:
                return size > start
            time.sleep(0.001)

    def _size(self) -> int:
        return 0 if self.fd < 0 else os.fstat(self.fd).st_size

    def _read(self, start: int) -> str:
        if self.fd < 0:  # closed meanwhile by a signal handler
            return ""
        if sys.platform != "win32":
            data = os.pread(self.fd, max(0, self._size() - start), start)
        else:  # read after the worker's death only, so that the shared position does not matter
            os.lseek(self.fd, start, os.SEEK_SET)
            data = os.read(self.fd, max(0, self._size() - start))
        return data.decode(errors="surrogateescape")
