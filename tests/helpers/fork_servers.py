"""Fork servers that start quickly: they are forked from one process that has loaded their libraries.

A `ParallelEnv` with worker processes starts a fork server, which imports NumPy, Gymnasium and the package: 0.25 s of
CPU time, most of what a short test costs. Where the start itself is not tested, servers are forks of a *template*,
which has made these imports once. They get the same program, descriptors, variables and folder, and are children of
this process, as `subprocess.Popen` would make them. What a process inherits in other ways (limits, masks, the variables
that `/proc` shows) is the template's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pickle
import platform
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
AVAILABLE = sys.platform == "linux" and SYS_CLONE is not None
PRELOADED = (
    *("numpy", "gymnasium", "marl_parallel.core.worker.worker", "marl_parallel.backends.process"),  # as servers do
    *("psutil", "pytest", "hypothesis"),  # as the test files and simulators that workers import
)
_PID = struct.Struct("q")
_MOST_FDS = 16
_PART = 50_000  # bytes of a message
_FREE_FROM = 500  # descriptors above which received ones wait until their numbers are free


class Start(NamedTuple):
    """How a server starts; the descriptors of `targets` are sent with it, and stderr last."""

    text: str
    environ: Mapping[str, str]
    cwd: str
    targets: Sequence[int]


class ServerTemplate:
    """The template process, which starts with the first server. `popen` is called in place of `subprocess.Popen`."""

    def __init__(self) -> None:
        from marl_parallel.backends import interpreter

        self._process: subprocess.Popen[bytes] | None = None
        self._interpreter = interpreter.command("")[:-1]
        self._lock, self._owner = threading.Lock(), os.getpid()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = [sys.executable, __file__, str(theirs.fileno()), *sys.path]
        self._process = subprocess.Popen(
            command, env={**os.environ, **threads}, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], cwd: str, **other: Any
    ) -> Any:
        """Fork a server from the template; an object with its `pid`.

        Another interpreter, and the server of a test's child process, start as usual.
        """
        if command[:-1] != self._interpreter or os.getpid() != self._owner:
            return subprocess.Popen(command, env=env, pass_fds=pass_fds, cwd=cwd, **other)
        assert other["start_new_session"], "the server must lead a session"
        given = other["stderr"]
        stderr = (
            os.open(os.devnull, os.O_WRONLY) if given == subprocess.DEVNULL else os.dup(2 if given is None else given)
        )
        start = Start(command[-1], {**env}, cwd, [*pass_fds])
        try:
            with self._lock:
                return SimpleNamespace(pid=self._fork(start, [*pass_fds, stderr]))
        finally:
            os.close(stderr)

    def _fork(self, start: Start, fds: Sequence[int]) -> int:
        if self._process is None:
            self._start()
        message = pickle.dumps(start)
        try:
            socket.send_fds(self._socket, [_PID.pack(len(message))], fds)
            for first in range(0, len(message), _PART):
                self._socket.send(message[first : first + _PART])
            return int(_PID.unpack(self._socket.recv(_PID.size))[0])
        except BaseException:  # such as a signal's: the next answer would be that to this request
            self.close()
            raise

    def as_subprocess(self) -> Any:
        """What `launching` uses of the module `subprocess`."""
        return SimpleNamespace(Popen=self.popen, DEVNULL=subprocess.DEVNULL)

    def close(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.wait()
            self._process = None


def _main() -> None:
    number, *path = sys.argv[1:]
    sys.path[:] = path
    for module in PRELOADED:
        if importlib.util.find_spec(module.partition(".")[0]):
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(fileno=int(number)) as connection:
        while True:
            message, fds, _, _ = socket.recv_fds(connection, _PID.size, _MOST_FDS)
            if not message:
                return
            (left,), parts = _PID.unpack(message), []
            while left:
                parts.append(connection.recv(_PART))
                left -= len(parts[-1])
            if not (pid := _fork_sibling()):
                connection.close()
                _run(pickle.loads(b"".join(parts)), fds)
            for fd in fds:
                os.close(fd)
            connection.send(_PID.pack(pid))


def _fork_sibling() -> int:
    """As `os.fork`, but the new process is a child of this one's parent."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    libc.syscall.restype = ctypes.c_long
    pid: int = libc.syscall(SYS_CLONE, ctypes.c_long(CLONE_PARENT | signal.SIGCHLD), *[ctypes.c_long(0)] * 4)
    if pid:
        python.PyOS_AfterFork_Parent()
    else:
        python.PyOS_AfterFork_Child()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "cannot fork a server")
    return pid


def _run(start: Start, fds: Sequence[int]) -> None:
    """Be a server: what `Popen` sets, then its program."""
    import fcntl  # not on Windows

    exitcode = 1
    try:
        os.setsid()
        waiting = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FREE_FROM) for fd in fds]
        for fd in fds:
            os.close(fd)
        for fd, target in zip(waiting, [*start.targets, 2]):
            os.dup2(fd, target)
            os.close(fd)
        os.environ.clear()
        os.environ.update(start.environ)
        os.chdir(start.cwd)
        exec(start.text, {"__name__": "__main__"})
        exitcode = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exitcode)


if __name__ == "__main__":
    _main()
