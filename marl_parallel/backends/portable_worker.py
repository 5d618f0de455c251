"""What runs in a worker process of the portable backend. The parent's side is `portable.py`."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import threading
import time
from multiprocessing.connection import Listener
from queue import SimpleQueue

from marl_parallel.backends import portable_ends
from marl_parallel.backends.portable_ends import NamedMemory, Start, receive
from marl_parallel.backends.stacks import report_to
from marl_parallel.core.ledger import Ledger
from marl_parallel.core.messages import Message, Request
from marl_parallel.core.worker import Worker

_CLEARED_WITHIN_S = 1.0


def main() -> None:
    """Serve until told to close, or until the parent is gone."""
    if sys.platform != "win32":
        # What the program that started the parent has blocked or ignored is no concern of a simulator.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    pipe = _taken_from_stdin()
    start: Start = receive(pipe)
    requests: SimpleQueue[Request] = SimpleQueue()
    intake = threading.Thread(target=_take_in, args=(pipe, requests, start.folder), daemon=True)
    intake.start()
    try:
        _serve(start, requests)
    except OSError:
        # Perhaps the parent has gone, and the thread that noticed is clearing away what was needed here.
        intake.join(_CLEARED_WITHIN_S)
        raise


def _serve(start: Start, requests: SimpleQueue[Request]) -> None:
    report_to(open(start.crash_path, "ab", buffering=0))  # noqa: SIM115  # for as long as the process lives
    sys.argv[:] = start.argv
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    board, records = (
        NamedMemory(start.folder, name, fd)
        for name, fd in zip(("board", "records"), start.memory or (None, None), strict=True)
    )
    ledgers = memoryview(board.map(start.num_workers * Ledger.NBYTES))
    worker = Worker(
        Ledger(ledgers[start.worker * Ledger.NBYTES :]), lambda layout: records.map(layout.nbytes), own_process=True
    )
    with Listener(start.address, authkey=start.key) as listener:
        connection = listener.accept()
    with connection:
        connection.send_bytes(b"here")
        send = (
            connection.send if sys.platform == "win32" else functools.partial(portable_ends.send, connection.fileno())
        )
        while True:
            request = requests.get()
            worker.execute(request, send)
            if request.message is Message.CLOSE:
                return


def _taken_from_stdin() -> int:
    """The pipe from the parent, out of reach of simulators that read from their standard input."""
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return pipe


def _take_in(pipe: int, requests: SimpleQueue[Request], folder: str) -> None:
    """Take requests as they come, so that the parent never has to wait; and notice when it has gone."""
    try:
        while True:
            requests.put(receive(pipe))
    finally:
        _clear_away(folder)
        if sys.platform != "win32":
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def _clear_away(folder: str) -> None:
    """Remove what the parent has not had the time to; again while workers that are starting still add to it."""
    deadline = time.monotonic() + _CLEARED_WITHIN_S
    while os.path.isdir(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
