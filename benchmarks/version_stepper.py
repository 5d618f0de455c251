"""Steps `ParallelEnv` of one checkout on request; `versions.py` starts one such process for each version.

    python benchmarks/version_stepper.py CHECKOUT FD

It uses only the part of the package that every version has: `ParallelEnv` with `reset`, `step`, `action_space` and
`close`. Requests contain the simulators, from this checkout.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

BATCHES = 64
"""Number of batches of actions, which are drawn in advance and used in turn."""


class Stepper:
    """The open environments and their actions."""

    def __init__(self, constructor: Callable[..., Any], num_envs: int, arguments: dict[str, Any]) -> None:
        from marl_parallel import ParallelEnv

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # more workers than CPUs are measured on purpose
            self.env = ParallelEnv([constructor] * num_envs, True, 42, **arguments)
        space = self.env.action_space
        space.seed(0)
        self.actions = [[space.sample() for _ in range(num_envs)] for _ in range(BATCHES)]
        self.done = 0
        self.env.reset()

    def step(self, batches: int) -> float:
        """Step `batches` batches and return the seconds."""
        self._batch()  # wakes up workers that went to sleep between two rounds
        started = time.perf_counter()
        for _ in range(batches):
            self._batch()
        return time.perf_counter() - started

    def warm(self, seconds: float) -> int:
        """Step for some seconds, and return the number of batches that take about as long."""
        deadline, batches = time.perf_counter() + seconds, 0
        while time.perf_counter() < deadline:
            self._batch()
            batches += 1
        started = time.perf_counter()
        self.step(max(1, batches // 4))
        return round(seconds / (time.perf_counter() - started) * max(1, batches // 4))

    def _batch(self) -> None:
        self.env.step(self.actions[self.done % BATCHES])
        self.done += 1


def main(checkout: Path, requests: Connection) -> None:
    """Serve requests until the other end closes."""
    import marl_parallel

    found = Path(marl_parallel.__file__).resolve()
    if not found.is_relative_to(checkout.resolve()):
        raise ImportError(f"marl_parallel was imported from {found.parent}, expected from {checkout}")
    stepper: Stepper | None = None
    try:
        while True:
            name, *arguments = cloudpickle.loads(requests.recv_bytes())
            if name == "open":
                stepper = Stepper(*arguments)
                requests.send(None)
            elif name == "close":
                stepper.env.close()
                stepper = None
                requests.send(None)
            else:
                requests.send(getattr(stepper, name)(*arguments))
    except EOFError:
        pass  # the benchmark has ended
    finally:
        if stepper is not None:
            stepper.env.close(terminate=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Connection(int(sys.argv[2])))
