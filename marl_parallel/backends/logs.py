"""Log files of worker processes: their stdout and stderr, and those of the processes that their simulators start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from marl_parallel.backends import interpreter
from marl_parallel.core.files import check_log, make_folder, open_log
from marl_parallel.core.reports.reports import logger

_TAIL_LINES = 20
_TAIL_NBYTES = 4096


class WorkerLog:
    """The log of one worker process, which appends to the log of the process before it.

    It is open while the process starts, until `close`. The process inherits the descriptor `fd`. Logs never make a run
    fail: if a file cannot be opened, a warning says so, and the process gets no log.

    Args:
        folder: The folder of the log file; None for no log.
        worker: The worker's number.
        share: The worker's environments.
    """

    def __init__(self, folder: Path | None, worker: int, share: Sequence[int]) -> None:
        self.fd: int | None = None
        self._name = interpreter.worker_name(worker, share)[0]
        self._path = None if folder is None else folder / f"worker-{worker}.log"
        self._start = 0  # where the output of this process begins
        self._header = ""
        if folder is not None:
            try:
                make_folder(folder)  # someone may have deleted it since the first start
                self._open()
            except OSError as error:
                self.close()
                logger.warning("%s has no log file and writes to the output of this program: %s", self._name, error)

    def _open(self) -> None:
        assert self._path is not None
        self.fd = open_log(self._path)
        self._start = os.lseek(self.fd, 0, os.SEEK_END)
        if self._start:
            os.lseek(self.fd, -1, os.SEEK_END)
            if os.read(self.fd, 1) != b"\n":  # the process before died in the middle of a line
                self._start += os.write(self.fd, b"\n")

    def mark_start(self, pid: int) -> None:
        """Write the line that marks the start of the process."""
        if self.fd is None:
            return
        self._header = f"=== {datetime.now().astimezone().isoformat(' ', 'seconds')} {self._name}, process {pid} ==="
        try:
            os.write(self.fd, f"{self._header}\n".encode())
        except OSError as error:
            logger.warning("the start of %s could not be written to %s: %s", self._name, self._path, error)

    def tail(self) -> str:
        """The file's path and the last lines that this process wrote; "" if there are none."""
        if self._path is None:
            return ""
        try:
            check_log(self._path)
            with open(self._path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = self._start if self._start <= size else 0  # someone has emptied it, such as logrotate
                begin = max(start, size - _TAIL_NBYTES)
                file.seek(begin)
                lines = file.read(_TAIL_NBYTES).decode(errors="replace").splitlines()
        except OSError:  # someone has deleted, moved or replaced it
            return ""
        if begin > start and len(lines) > 1:
            del lines[0]  # a part of a line
        written = [line for line in lines if line != self._header][-_TAIL_LINES:]
        return "\n".join([f"{self._path}:", *written]) if written else ""

    def close(self) -> None:
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)
