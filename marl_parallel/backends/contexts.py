"""The ways in which worker processes can start on Linux, by name."""

from __future__ import annotations

from marl_parallel.backends.forking import ForkLauncher
from marl_parallel.backends.forkserver import ForkServerLauncher
from marl_parallel.backends.launching import Launcher
from marl_parallel.backends.memory import Block


def open_launcher(
    context: str, *, entry: str, wake: tuple[Block, int] | None = None, threads: int | None = None
) -> Launcher:
    """Get ready to start workers; returns at once.

    Args:
        context: "forkserver": workers are forked from a small process that has the usual libraries loaded.
            "spawn": each worker is an interpreter of its own; costs more time and memory. What has left the group of
            a worker outlives this process if that is killed.
            "fork": workers are forked from this process, with all it has in memory; unsafe if this process
            has other threads, and weaker in what it finds of the children of dead workers.
        entry: The module whose `main(index, fds)` a worker runs. It must be importable with `sys.path`.
        wake: A block and the offset of a semaphore in it, which is posted each time a worker has died and
            `deaths` can tell; the block's descriptor stays open as long as the launcher. In the contexts
            "spawn" and "fork", and when the fork server itself has died, nobody posts: ask `deaths` from time to time.
        threads: How many threads the numerical libraries of a worker may use; None leaves them alone.

    Raises:
        ValueError: There is no such context.
    """
    if context == "forkserver":
        return ForkServerLauncher(entry, threads, wake)
    if context == "spawn":
        return ForkServerLauncher(entry, threads, wake, fresh=True)
    if context == "fork":
        return ForkLauncher(entry, threads)
    raise ValueError(f'workers are started by "forkserver", "spawn" or "fork", not by {context!r}')
