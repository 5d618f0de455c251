"""What the processes of `python -m tests.simulation` carry out."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from marl_parallel.core.block import codec
from simulation.backend import Stuck
from simulation.schedule import run

_MOST_S = 60  # for one history, which takes some hundredths of a second


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Let what takes longer, since it goes on for ever without a wait, raise `Stuck`; where there are alarms.

    It is raised again and again: what runs then may go on for ever, too.
    """

    def stop(number: int, frame: Any) -> None:
        raise Stuck("it goes on for ever, without a wait")

    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
    try:
        yield
    finally:
        if hasattr(signal, "SIGALRM"):
            signal.setitimer(signal.ITIMER_REAL, 0.0)


class Done(NamedTuple):
    """What has become of a group of histories."""

    first: int
    checked: int
    kinds: Counter[str]
    failed: dict[int, str]


def set_up(pure: bool) -> None:
    """Prepare a process: without compiled code, if that is asked for. Ctrl-C is the main process's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if pure:
        codec.Codec = None
    logging.getLogger("marl_parallel").setLevel(logging.CRITICAL)


def carry_out(first: int, last: int) -> Done:
    """Carry out histories."""
    done = Done(first, 0, Counter(), {})
    for number in range(first, last):
        with limited(_MOST_S):
            result = run(number)
        done = done._replace(checked=done.checked + result.checked)
        done.kinds.update(result.kinds)
        if result.error:
            done.failed[number] = result.error
    return done
