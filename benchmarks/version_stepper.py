"""Steps `ParallelEnv` of one checkout, or plain loops, on request; `versions.py` starts one such process for each.

    python benchmarks/version_stepper.py CHECKOUT FD

Of another version it uses only what every version has: `ParallelEnv` with `reset`, `step`, `action_space` and `close`.
Requests contain the simulators, from this checkout.
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
import numpy as np
from plain_loops import BATCHES, SEED, Loops, drawn

STEP, PETTINGZOO, STACKED = "step", "pettingzoo", "stacked"
"""Ways to step: dicts, or arrays through the facades `PettingZooVecEnv` and `StackedVecEnv`."""


class Stepper:
    """A `ParallelEnv`, or a facade of it, and its actions.

    A version that does not have `backend="auto"` uses its default instead.
    """

    def __init__(
        self, constructor: Callable[..., Any], num_envs: int, arguments: dict[str, Any], way: str = STEP
    ) -> None:
        import marl_parallel
        from marl_parallel import ParallelEnv, vector

        has_plan = Path(marl_parallel.__file__).with_name("planning.py").is_file()
        if arguments.get("backend") == "auto" and not has_plan:
            arguments = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # more workers than CPUs are measured on purpose
            self.env: Any = ParallelEnv([constructor] * num_envs, True, SEED, **arguments)
        space = self.env.action_space
        batches = drawn(space.spaces, num_envs)
        self.actions: list[Any] = batches
        if way == PETTINGZOO:
            self.env = vector.PettingZooVecEnv(self.env)
            self.actions = [{agent: np.array([acts[agent] for acts in batch]) for agent in space} for batch in batches]
        elif way == STACKED:
            self.env = vector.StackedVecEnv(self.env)
            self.actions = [np.array([[acts[agent] for agent in space] for acts in batch]) for batch in batches]
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

    def close(self) -> None:
        self.env.close()


def main(checkout: Path, requests: Connection) -> None:
    """Serve requests until the other end closes."""
    import marl_parallel

    found = Path(marl_parallel.__file__).resolve()
    if not found.is_relative_to(checkout.resolve()):
        raise ImportError(f"marl_parallel was imported from {found.parent}, expected from {checkout}")
    stepper: Stepper | Loops | None = None
    try:
        while True:
            name, *arguments = cloudpickle.loads(requests.recv_bytes())
            if name in ("Stepper", "Loops"):
                stepper = {"Stepper": Stepper, "Loops": Loops}[name](*arguments)
                requests.send(None)
            elif name == "close":
                stepper.close()
                stepper = None
                requests.send(None)
            else:
                requests.send(getattr(stepper, name)(*arguments))
    except EOFError:
        pass  # the benchmark has ended
    finally:
        if stepper is not None:
            stepper.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Connection(int(sys.argv[2])))
