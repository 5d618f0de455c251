"""Hides from this project what other systems lack: on `PYTHONPATH`, Python imports this module when it starts.

`OTHER_SYSTEM=win32` or `darwin` names the system. Only modules of this project see it.
"""

from __future__ import annotations

import builtins
import copyreg
import importlib
import io
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import PurePath
from types import ModuleType
from typing import Any

PROJECT = str(PurePath(__file__).parents[3])

LINUX_ONLY = {
    "os": """eventfd fork forkpty getrandom memfd_create pidfd_open pipe2 posix_fallocate register_at_fork
        sched_getaffinity sched_setaffinity waitid""",
    "signal": "SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    "socket": "SOCK_CLOEXEC SOCK_NONBLOCK SOCK_SEQPACKET",
}
"""And what other systems have, but this package must not need there."""
POSIX_ONLY = {
    "os": """O_CLOEXEC O_NOFOLLOW O_NONBLOCK WNOHANG chown fchmod fchown getegid geteuid getgid getpgid getpgrp getuid
        killpg lchown mkfifo nice set_blocking setpgid setsid statvfs uname wait waitpid""",
    "signal": """SIGALRM SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGTRAP SIGTSTP SIGTTIN
        SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm
        getitimer pthread_kill pthread_sigmask setitimer sigpending sigwait""",
    "socket": "AF_UNIX recv_fds send_fds",
}
MODULES = {"win32": {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios"}, "darwin": {"fcntl", "resource"}}
FILES = ("/proc", "/sys")


def in_project(depth: int) -> bool:
    """Whether the caller of the function at this depth is a module of this project."""
    file = sys._getframe(depth + 1).f_globals.get("__file__") or ""
    return file.startswith(PROJECT) and "site-packages" not in file


def hide_names(module: ModuleType, hidden: set[str], claims: dict[str, object]) -> None:
    class Other(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            if (name in hidden or name in claims) and in_project(1):
                if name in claims:
                    return claims[name]
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} on this system", name=name)
            return super().__getattribute__(name)

    module.__class__ = Other
    copyreg.pickle(Other, lambda other: (importlib.import_module, (other.__name__,)))  # cloudpickle asks for the type


def hide_modules(hidden: set[str]) -> None:
    real = builtins.__import__

    def imported(name: str, *arguments: Any, **keywords: Any) -> ModuleType:
        if name in hidden and in_project(1):
            raise ModuleNotFoundError(f"No module named {name!r} on this system", name=name)
        return real(name, *arguments, **keywords)

    builtins.__import__ = imported


def hide_files(module: Any, name: str) -> None:
    """From a function whose first argument is a path. Paths of `pathlib` come through these functions, too."""
    real: Callable[..., Any] = getattr(module, name)

    def function(path: Any = ".", *arguments: Any, **keywords: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(FILES):
            # `psutil` knows other ways on other systems.
            frame: Any = sys._getframe(1)
            while frame and not (frame.f_globals.get("__name__") or "").startswith(("psutil", "importlib")):
                frame = frame.f_back
            if frame is None:
                raise FileNotFoundError(2, "No such file or directory on this system", path)
        return real(path, *arguments, **keywords)

    setattr(module, name, function)


def hide(system: str) -> None:
    hidden = {name: set(names.split()) for name, names in LINUX_ONLY.items()}
    if system == "win32":
        hidden = {name: names | set(POSIX_ONLY[name].split()) for name, names in hidden.items()}
    hide_names(sys, set(), {"platform": system})
    hide_names(os, hidden["os"], {"name": "nt"} if system == "win32" else {})
    hide_names(signal, hidden["signal"], {})
    hide_names(socket, hidden["socket"], {})
    hide_modules(MODULES[system])
    for name in ["open", "listdir", "scandir", "readlink", "stat", "lstat"]:
        hide_files(os, name)
    hide_files(builtins, "open")
    hide_files(io, "open")


if os.environ.get("OTHER_SYSTEM"):
    hide(os.environ["OTHER_SYSTEM"])
