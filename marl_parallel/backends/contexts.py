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
            "spawn": the same, but each worker is a fresh interpreter; costs more time and memory.
            "fork": workers are forked from this process, with all it has in memory; unsafe if this process
            has other threads.
        entry: The module whose `main(index, fds)` a worker runs. It must be importable with `sys.path`.
        wake: A block and the offset of a semaphore in it, which is posted each time a worker has died and
            `deaths` can tell; the block's descriptor stays open as long as the launcher. In the context
            "fork", and when the fork server itself has died, nobody posts: ask `deaths` from time to time.
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
