"""A process beside a warden that outlives it: as soon as a worker has died, it ends what that has started.

Where the driver is killed, Ray ends its workers and its wardens, and nobody else is left to do that. Linux only.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys

from marl_parallel.backends import descendants
from marl_parallel.backends.interpreter import output, started_with

# Ray ends the children of its workers, but not theirs; so the process is nobody's child, and leads a session.
_PROGRAM = """import os
if os.fork():
    os._exit(0)
os.setsid()
from marl_parallel.backends.ray_survivor import survive
survive()
"""
_MOST_BYTES = 1024


class Survivor:
    """The warden's end. The process ends when this end is closed and all workers it knows have died."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, started_with(_PROGRAM) as (command, program):
            subprocess.run(
                command,
                check=True,
                pass_fds=[program],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=output(sys.stderr, 2),
            )

    def watch(self, handle: int, pid: int, marker: str) -> bool:
        """Have it wait for the death of a worker; says whether it is there to do so.

        Args:
            handle: A pidfd of the worker.
            pid: Its number, which is that of its process group.
            marker: What it has started can be recognised by.
        """
        try:
            socket.send_fds(self._socket, [f"{pid} {marker}".encode()], [handle])
        except OSError:
            return False
        return True


def survive() -> None:
    """Run the process; its standard input is the other end of a `Survivor`."""
    workers: dict[int, tuple[int, str]] = {}
    poll = select.poll()
    with socket.socket(fileno=0) as commands:
        poll.register(commands, select.POLLIN)
        listening = True
        while listening or workers:
            for fd, _ in poll.poll():
                if fd in workers:
                    poll.unregister(fd)
                    descendants.kill_left_behind(*workers.pop(fd))
                    os.close(fd)
                    continue
                told, handles, _, _ = socket.recv_fds(commands, _MOST_BYTES, 1)
                if not told:
                    poll.unregister(commands)
                    listening = False
                    continue
                pid, _, marker = told.decode().partition(" ")
                workers[handles[0]] = int(pid), marker
                poll.register(handles[0], select.POLLIN)
