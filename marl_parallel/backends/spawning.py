"""Workers started as fresh interpreters: the context "spawn".

A server of its own starts them, as in the context "forkserver", but executes an interpreter in each: nothing of the
parent's memory, locks or threads gets into a worker. Each one loads everything itself, which costs a fraction of a
second and memory of its own. What such a worker does is not known here.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from marl_parallel.backends import child, interpreter
from marl_parallel.backends.stacks import STACK_SIGNAL

# Started with all signals blocked, it must be able to write its stack before it has loaded anything.
_PROGRAM = """import faulthandler, signal
faulthandler.enable({crash})
faulthandler.register({stack_signal}, {crash})
signal.pthread_sigmask(signal.SIG_SETMASK, ())
{with_path}"""
_RUN = """from marl_parallel.backends.spawning import run
run({payload}, {crash}, {guards}, {fds})
"""


def execute(payload: int, crash: int, guards: Sequence[int], fds: Sequence[int]) -> NoReturn:
    """Become a fresh interpreter that becomes a worker.

    Args:
        payload: Descriptor of a `Setting`.
        crash: Descriptor that `faulthandler` writes to.
        guards: As of `child.become_worker`.
        fds: What the worker's main is given.
    """
    try:
        os.setsid()
        setting = child.Setting.read(os.dup(payload))
        os.lseek(payload, 0, os.SEEK_SET)
        run_ = _RUN.format(payload=payload, crash=crash, guards=list(guards), fds=list(fds))
        program = interpreter.program_file(
            _PROGRAM.format(stack_signal=STACK_SIGNAL, crash=crash, with_path=interpreter.with_path(run_, setting.path))
        )
        for fd in (program, payload, crash, *guards, *fds):
            os.set_inheritable(fd, True)
        command = interpreter.command(program)
        # A folder that was removed would keep the interpreter from importing some libraries.
        os.chdir(setting.cwd)
        # Python ignores these signals in itself, not in programs that it executes.
        for name in ("SIGPIPE", "SIGXFSZ"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execve(command[0], command, setting.environ)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def run(payload: int, crash: int, guards: Sequence[int], fds: Sequence[int]) -> None:
    """Be a worker; the arguments are the descriptors it was born with."""
    for fd in (payload, crash, *guards, *fds):
        os.set_inheritable(fd, False)
    child.become_worker(lambda: _prepare(payload), fds, crash=crash, guards=guards)


def _prepare(payload: int) -> child.Setting:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    setting = child.Setting.read(payload)
    setting.adopt()
    return setting
