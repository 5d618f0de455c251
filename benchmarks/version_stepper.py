"""Steps `ParallelEnv` of one checkout, or plain loops, on request; `versions.py` starts one such process for each.

    python benchmarks/version_stepper.py CHECKOUT FD

Of another version it uses only what every version has: `ParallelEnv` with `reset`, `step`, `action_space` and `close`.
Requests contain the simulators, from this checkout.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from pettingzoo import AECEnv
from pettingzoo.utils.conversions import turn_based_aec_to_parallel

CALL_S = 0.05
"""About how long `Loops` should step with each call, so that the call itself takes little of the time."""
BATCHES = 64
"""Number of batches of actions, which are drawn in advance and used in turn."""


class Stepper:
    """A `ParallelEnv`, or its facade `PettingZooVecEnv`, and its actions.

    A version that does not have `backend="auto"` uses its default instead.
    """

    def __init__(
        self, constructor: Callable[..., Any], num_envs: int, arguments: dict[str, Any], arrays: bool = False
    ) -> None:
        import marl_parallel
        from marl_parallel import ParallelEnv
        from marl_parallel.vector import PettingZooVecEnv

        has_plan = Path(marl_parallel.__file__).with_name("planning.py").is_file()
        if arguments.get("backend") == "auto" and not has_plan:
            arguments = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # more workers than CPUs are measured on purpose
            self.env: Any = ParallelEnv([constructor] * num_envs, True, 42, **arguments)
        space = self.env.action_space
        space.seed(0)
        batches = [[space.sample() for _ in range(num_envs)] for _ in range(BATCHES)]
        self.actions: list[Any] = batches
        if arrays:
            self.env = PettingZooVecEnv(self.env)
            self.actions = [{agent: np.array([acts[agent] for acts in batch]) for agent in space} for batch in batches]
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


class Loops:
    """Plain loops side by side, each with its share of the environments in a process of its own.

    With `barrier`, they wait for each other after each batch, as the workers of a `ParallelEnv` must.
    """

    def __init__(self, constructor: Callable[..., Any], num_envs: int, num_workers: int, barrier: bool) -> None:
        context = multiprocessing.get_context("fork")
        counters = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self.pipes = []
        for worker in range(num_workers):
            ours, theirs = context.Pipe()
            share = len(range(worker, num_envs, num_workers))
            mine = counters[: num_workers if barrier else 0]
            context.Process(target=_loop, args=(constructor, share, mine, worker, theirs), daemon=True).start()
            self.pipes.append(ours)

    def step(self, batches: int) -> float:
        """Step `batches` batches and return the seconds, from the first to begin until the last has ended."""
        for pipe in self.pipes:
            pipe.send(batches)
        began, ended = zip(*[pipe.recv() for pipe in self.pipes])
        return float(max(ended) - min(began))

    def warm(self, seconds: float) -> int:
        """Step for some seconds, and return the number of batches that take about as long."""
        batches, took = 1, self.step(1)
        while took < seconds / 2:
            batches *= 2
            took = self.step(batches)
        return max(round(seconds / took * batches), 1)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(0)
            pipe.close()


def _loop(constructor: Callable[..., Any], num_envs: int, counters: Any, worker: int, requests: Any) -> None:
    from marl_parallel.adapters import adapt
    from marl_parallel.cli.measure import draw_actions, plain_loop, simulators

    with simulators(constructor, num_envs) as envs:
        if isinstance(envs[0], AECEnv):
            envs = [turn_based_aec_to_parallel(env) for env in envs]
        adapted = adapt(envs[0])
        actions = draw_actions(adapted.action_spaces, num_envs)
        step = plain_loop(envs, adapted)
        while batches := requests.recv():
            began = time.monotonic()
            for number in range(batches):
                step(actions[number % len(actions)])
                if counters:
                    counters[worker] += 1
                    while min(counters) < counters[worker]:
                        os.sched_yield()
            requests.send((began, time.monotonic()))


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
