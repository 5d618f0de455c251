"""Workers started as fresh interpreters: the context "spawn".

Here lives `SpawnLauncher`, and what its workers do first. Nothing is forked, so nothing of the parent's memory, locks
or threads gets into a worker; each one loads everything itself, which costs a fraction of a second and memory of its
own. What such a worker does is not known here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from marl_parallel.backends import child
from marl_parallel.backends.interpreter import command, output
from marl_parallel.backends.own_children import OwnChildrenLauncher
from marl_parallel.backends.stacks import STACK_SIGNAL

# Born with all signals blocked, it must be able to tell its stack before it has loaded anything.
_PROGRAM = """import faulthandler, signal
faulthandler.enable({crash})
faulthandler.register({stack_signal}, {crash})
signal.pthread_sigmask(signal.SIG_SETMASK, ())
from marl_parallel.backends.spawning import run
run({payload}, {guard}, {crash}, {fds})
"""


class SpawnLauncher(OwnChildrenLauncher):
    """Starts one interpreter for each worker."""

    def _start_child(self, setting: child.Setting, guard: int, crash: int, fds: Sequence[int]) -> int:
        with setting.written() as payload:
            program = _PROGRAM.format(
                stack_signal=STACK_SIGNAL, payload=payload, guard=guard, crash=crash, fds=list(fds)
            )
            mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
            try:
                process = subprocess.Popen(
                    command(program),
                    env=setting.environ,
                    pass_fds=(payload, guard, crash, *fds),
                    stdin=subprocess.DEVNULL,
                    stdout=output(sys.stdout, 1),
                    stderr=output(sys.stderr, 2),
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        process.returncode = 0  # else it would be waited for when this object goes; that is our own business
        return process.pid


def run(payload: int, guard: int, crash: int, fds: Sequence[int]) -> None:
    """Be a worker; the arguments are the descriptors it was born with."""
    for fd in (payload, guard, crash, *fds):
        os.set_inheritable(fd, False)
    child.become_worker(lambda: _prepare(payload), fds, crash=crash, guards=[guard])


def _prepare(payload: int) -> child.Setting:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    setting = child.Setting.read(payload)
    setting.adopt()
    return setting
