"""What the processes of `python -m tests.simulation` carry out."""

from __future__ import annotations

import logging
import signal
from collections import Counter
from typing import NamedTuple

from marl_parallel.core import codec
from simulation.schedule import run


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
        result = run(number)
        done = done._replace(checked=done.checked + result.checked)
        done.kinds.update(result.kinds)
        if result.error:
            done.failed[number] = result.error
    return done
