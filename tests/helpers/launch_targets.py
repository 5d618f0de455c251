"""Main functions of worker processes for the tests of launchers, selected by the variable `TARGET`."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]


def main(index: int, fds: list[int]) -> None:
    _TARGETS[os.environ["TARGET"]](index, fds)


def _say(fd: int, **values: object) -> None:
    os.write(fd, json.dumps(values).encode() + b"\n")


def _blas_threads() -> int:
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if "openblas" in line)
    library = ctypes.CDLL(path)
    names = ("openblas_get_num_threads", "scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_")
    return int(next(getattr(library, name) for name in names if hasattr(library, name))())


def _open_files() -> list[str]:
    """Targets of this process's descriptors, without that of the listing itself, which is closed by then."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.lexists(link)]


def _returns(index: int, fds: list[int]) -> None:
    atexit.register(_say, fds[0], atexit=index)
    threading.Thread(target=lambda: (time.sleep(0.1), _say(fds[0], thread=index))).start()


def _tells(index: int, fds: list[int]) -> None:
    import numpy as np

    np.ones((400, 400)) @ np.ones((400, 400))
    main_module = sys.modules["__main__"]
    print("printed by the worker", flush=True)
    _say(
        fds[0],
        index=index,
        path=sys.path,
        argv=sys.argv,
        cwd=os.getcwd(),
        environ=dict(os.environ),
        main=[name for name in vars(main_module) if not name.startswith("__")],
        main_file=getattr(main_module, "__file__", None),
        leads=os.getpid() == os.getsid(0) == os.getpgrp(),
        terminated=subprocess.run(["sh", "-c", "kill -TERM $$; exit 4"]).returncode,
        interrupt=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        stdin=os.readlink("/proc/self/fd/0"),
        blas_threads=_blas_threads(),
        threads=len(os.listdir("/proc/self/task")),
        open_files=_open_files(),
    )


def _waits(index: int, fds: list[int]) -> None:
    if fds:
        _say(fds[0], ready=os.getpid())
    time.sleep(300)


def _raises(index: int, fds: list[int]) -> None:
    raise ValueError("raised by the worker")


def _segfaults(index: int, fds: list[int]) -> None:
    ctypes.string_at(1)


def _has_children(index: int, fds: list[int]) -> None:
    """Start one child in its own group, and others outside: by fork, by exec, and without environment variables."""
    plain = subprocess.Popen(SLEEPER).pid
    executed = subprocess.Popen(SLEEPER, start_new_session=True).pid
    cleared = subprocess.Popen(SLEEPER, start_new_session=True, env={}).pid
    in_background = ["sh", "-c", "env -i sleep 300 > /dev/null & echo $!"]
    started = subprocess.run(in_background, stdout=subprocess.PIPE, text=True, check=True, start_new_session=True)
    orphaned = int(started.stdout)
    if (forked := os.fork()) == 0:
        os.setsid()
        time.sleep(300)
        os._exit(0)
    # Orphaned while the worker lives, as launchers of game engines do it.
    if (between := os.fork()) == 0:
        os.setsid()
        if daemon := os.fork():
            _say(fds[0], pids=[os.getppid(), plain, executed, cleared, orphaned, forked, daemon])
            os._exit(0)
        time.sleep(300)
        os._exit(0)
    os.waitpid(between, 0)
    time.sleep(300)


def _busy(index: int, fds: list[int]) -> None:
    _say(fds[0], ready=os.getpid())
    while True:
        pass


def _locked(index: int, fds: list[int]) -> None:
    lock = threading.Lock()
    lock.acquire()
    _say(fds[0], ready=os.getpid())
    lock.acquire()


def _holds_gil(index: int, fds: list[int]) -> None:
    _say(fds[0], ready=os.getpid())
    while True:  # a signal interrupts it
        ctypes.PyDLL(None).sleep(300)


def _blocks_signals(index: int, fds: list[int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - {signal.SIGABRT})
    _say(fds[0], ready=os.getpid())
    time.sleep(300)


def _exits(index: int, fds: list[int]) -> None:
    os._exit(7)


def _sys_exits(index: int, fds: list[int]) -> None:
    sys.exit(5)


_TARGETS: dict[str, Callable[[int, list[int]], None]] = {
    target.__name__.removeprefix("_"): target
    for target in (
        _returns,
        _tells,
        _waits,
        _raises,
        _segfaults,
        _has_children,
        _busy,
        _locked,
        _holds_gil,
        _blocks_signals,
        _exits,
        _sys_exits,
    )
}
