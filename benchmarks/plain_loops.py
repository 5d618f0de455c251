"""Plain loops over bare PettingZoo environments: in this process, and side by side in processes of their own.

Plain loops side by side do not wait for each other. Where they meet at a spin barrier after each batch, they are the
limit of a synchronous step: whoever has all results of a batch has waited for the slowest process. The CPUs of a shared
machine differ from one millisecond to the next, so the barrier alone costs 4 to 25 %.

The barrier is a counter for each process in shared memory. A process adds 1 to its own and reads the others until none
is behind. Two processes on CPUs of their own notice each other within a microsecond, without compiled code.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import cloudpickle
from pettingzoo import AECEnv
from pettingzoo.utils.conversions import turn_based_aec_to_parallel

SEED = 42
BATCHES = 64
"""Number of batches of actions, which are drawn in advance and used in turn."""
CALL_S = 0.05
"""About how long `Loops` should step with each call, so that the call itself takes little of the time."""
SPINS = 1000
"""A process polls so often, for some 50 us, before it lets others run between polls; at once if there are more
processes than CPUs. Otherwise one that waits could keep the CPU from the one that it waits for, for milliseconds."""
APART = 16
"""Counters of 8 bytes from one process's counter to the next: each is in a cache line of its own."""


def drawn(action_spaces: Mapping[Any, Any], num_envs: int) -> list[list[dict[Any, Any]]]:
    """Batches of random actions, the same in each process: for each environment, one action of each agent."""
    spaces = copy.deepcopy(dict(action_spaces))
    for seed, space in enumerate(spaces.values()):
        space.seed(seed)
    return [
        [{agent: space.sample() for agent, space in spaces.items()} for _ in range(num_envs)] for _ in range(BATCHES)
    ]


def step_all(envs: Sequence[Any], batch: Sequence[dict[Any, Any]]) -> None:
    """Step each environment once, with the actions of agents that are alive; reset those without agents."""
    for env, actions in zip(envs, batch, strict=True):
        agents = env.agents
        if len(agents) != len(actions):
            actions = {agent: actions[agent] for agent in agents}
        env.step(actions)
        if not env.agents:
            env.reset()


@contextmanager
def opened_envs(constructor: Callable[[], Any], env_ids: Iterable[int]) -> Iterator[list[Any]]:
    """Environments as PettingZoo parallel environments, reset with the seeds that `ParallelEnv` uses."""
    with ExitStack() as stack:
        envs = []
        for env_id in env_ids:
            env = constructor()
            envs.append(turn_based_aec_to_parallel(env) if isinstance(env, AECEnv) else env)
            stack.callback(envs[-1].close)
            envs[-1].reset(seed=SEED + env_id)
        yield envs


def action_spaces(env: Any) -> dict[Any, Any]:
    return {agent: env.action_space(agent) for agent in env.possible_agents}


class Loops:
    """Plain loops side by side, each with its share of the environments in a process of its own.

    Args:
        constructor: Constructs a PettingZoo environment.
        num_envs: Number of environments, in all processes together.
        num_workers: Number of processes.
        barrier: Whether they meet at a spin barrier after each batch.
    """

    def __init__(self, constructor: Callable[[], Any], num_envs: int, num_workers: int, barrier: bool) -> None:
        from marl_parallel.core.backend import usable_cpus  # here: other versions use the rest of this module

        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        counters = context.RawArray("q", APART * num_workers) if barrier else None
        spins = SPINS if num_workers <= usable_cpus() else 0
        pickled = cloudpickle.dumps(constructor)
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self._timeout = 5.0
        for worker in range(num_workers):
            ours, theirs = context.Pipe()
            arguments = (pickled, num_envs, num_workers, worker, counters, spins, theirs)
            process = context.Process(target=_loop, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that its end is noticed here
            self.pipes.append(ours)
            self.processes.append(process)
        try:
            self._replies()  # all have constructed their environments: they begin the first batch together
        except BaseException:
            self.close()
            raise

    def step(self, batches: int) -> float:
        """Step `batches` batches and return the seconds, from the first to begin until the last has ended."""
        for pipe in self.pipes:
            pipe.send(batches)
        began, ended = zip(*self._replies())
        return float(max(ended) - min(began))

    def warm(self, seconds: float) -> int:
        """Step for some seconds, and return the number of batches that take about as long."""
        batches, took = 1, self.step(1)
        while took < seconds / 2:
            batches *= 2
            took = self.step(batches)
        return max(round(seconds / took * batches), 1)

    def _replies(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self.pipes]
        except EOFError:
            self._timeout = 0.0  # the others wait at the barrier
            raise RuntimeError("a process with a plain loop ended with an error; its traceback is above") from None

    def close(self) -> None:
        for pipe in self.pipes:
            with suppress(OSError):  # it has ended
                pipe.send(0)
            pipe.close()
        for process in self.processes:
            process.join(self._timeout)
            if process.is_alive():
                process.kill()
                process.join()


def _loop(
    pickled: bytes, num_envs: int, num_workers: int, worker: int, counters: Any, spins: int, requests: Any
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    constructor = cloudpickle.loads(pickled)
    env_ids = range(worker, num_envs, num_workers)
    with opened_envs(constructor, env_ids) as envs:
        batches = [[batch[env_id] for env_id in env_ids] for batch in drawn(action_spaces(envs[0]), num_envs)]
        mine, others = worker * APART, [other * APART for other in range(num_workers) if other != worker]
        done = 0
        requests.send(None)
        while count := requests.recv():
            began = time.monotonic()
            for number in range(count):
                step_all(envs, batches[number % BATCHES])
                if counters is not None:
                    done += 1
                    counters[mine] = done
                    for other in others:
                        polls = 0
                        while counters[other] < done:
                            polls += 1
                            if polls > spins:
                                _let_others_run()
            requests.send((began, time.monotonic()))


def _let_others_run() -> None:
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def _end_with_parent() -> None:
    """End this process when its parent has ended: at the barrier, it would notice nothing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
