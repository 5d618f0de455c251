"""Contenders who step many copies of a simulator, and how they are measured in turns. Who they are is in `peers.py`.

A contender steps all copies once with each call, the same random actions for all of them, and begins a new episode
where one is over. Libraries are imported when they are started: not all of them fit one environment. Whoever cannot be
started is left out with the reason.

Contenders stay open while others are measured, and take turns in rounds, so that a machine that slows down or gets busy
hits all of them alike. Between its turns each of them waits for its next call, and uses no CPU.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from marl_parallel.backends import interpreter
from marl_parallel.cli.measure import Actions, draw_actions

SEED = 42
DISTRIBUTIONS = (
    "mpe2", "SuperSuit", "stable-baselines3", "torch", "torchrl", "tensordict", "ray", "agilerl", "smarts", "pufferlib",
    "tianshou", "envpool",
)  # fmt: skip
"""Whose versions matter, where they are installed."""

Step = Callable[[], object]
"""Steps all copies once, with the next actions."""


@dataclass(frozen=True)
class Case:
    """What is stepped: a PettingZoo environment whose agents are alike and live as long as their episode.

    Attributes:
        name: The environment's.
        constructor: Makes one copy.
        num_envs: How many copies.
        workers: How many processes share them, where a contender lets one choose.
        episode_steps: Steps in an episode.
    """

    name: str
    constructor: Callable[[], Any]
    num_envs: int
    workers: int
    episode_steps: int

    @functools.cached_property
    def agents(self) -> list[str]:
        return list(self._action_spaces)

    @functools.cached_property
    def by_copy(self) -> list[list[Actions]]:
        """Batches of actions, as dicts by agent, one for each copy."""
        return draw_actions(self._action_spaces, self.num_envs)

    @functools.cached_property
    def joint(self) -> list[np.ndarray]:
        """The same as arrays `(copies, agents, ...)`."""
        return [np.array([[acts[agent] for agent in self.agents] for acts in batch]) for batch in self.by_copy]

    @property
    def rows(self) -> list[np.ndarray]:
        """The same as arrays `(copies * agents, ...)`."""
        return [batch.reshape(-1, *batch.shape[2:]) for batch in self.joint]

    @property
    def by_agent(self) -> list[dict[str, np.ndarray]]:
        """The same as arrays `(copies, ...)`, by agent."""
        return [{agent: batch[:, place].copy() for place, agent in enumerate(self.agents)} for batch in self.joint]

    @functools.cached_property
    def _action_spaces(self) -> dict[str, Any]:
        with closing(self.constructor()) as env:
            return {agent: env.action_space(agent) for agent in env.possible_agents}


@dataclass(frozen=True)
class Contender:
    """Who steps.

    Attributes:
        name: In tables.
        start: Makes it ready, its first reset included; closed when the context ends.
        setting: How it is run, for a note.
        next_step: Whether its resets take a call of their own, which is not counted as a step.
        ours: Whether it is of this package: then errors are not put up with.
    """

    name: str
    start: Callable[[Case], AbstractContextManager[Step]]
    setting: str = ""
    next_step: bool = False
    ours: bool = False

    def counted(self, case: Case) -> float:
        """The environment steps in a call."""
        share = case.episode_steps / (case.episode_steps + 1) if self.next_step else 1.0
        return case.num_envs * share


# -- measuring ---------------------------------------------------------------------------------------------------------


def turns(contenders: Sequence[Contender], repeats: int) -> int:
    """How often `measure` reports progress."""
    return len(contenders) * (1 + repeats)


def measure(
    case: Case, contenders: Sequence[Contender], seconds: float, repeats: int, on_turn: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Measure in turns, after a turn of each that does not count.

    Returns:
        By contender, environment steps per second in each round; and of those who could not be started, or fail when
        they step, why.
    """
    rounds: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        ready: list[tuple[Contender, Step]] = []
        for one in contenders:
            on_turn(f"{case.name}: {one.name} starts")
            try:
                step = stack.enter_context(one.start(case))
                _calls_per_second(step, seconds / 4)
            except Exception as error:
                if one.ours and not isinstance(error, ImportError):
                    raise
                missing[one.name] = reason(error)
            else:
                ready.append((one, step))
        for one, step in ready * repeats:
            on_turn(f"{case.name}: {one.name}")
            rounds.setdefault(one.name, []).append(one.counted(case) * _calls_per_second(step, seconds))
    return rounds, missing


def reason(error: Exception) -> str:
    """In one line, without this machine's paths."""
    said = re.sub(r" \([^()]*[/\\][^()]*\)", "", str(error).strip().partition("\n")[0])
    return said if isinstance(error, ImportError) else f"{type(error).__name__}: {said}"


def _calls_per_second(step: Step, seconds: float) -> float:
    count = 0
    begun = now = time.perf_counter()
    while now < begun + seconds or not count:
        step()
        count += 1
        now = time.perf_counter()
    return count / (now - begun)


def one_thread_each() -> None:
    """For scripts: numerical libraries get one thread, here and in what is started from here; they share the CPUs."""
    os.environ.update(interpreter.thread_variables(1))
    interpreter.limit_loaded_libraries(1)


def stepping(step: Callable[[Any], object], batches: Iterable[Any]) -> Step:
    """Batches of actions, over and over."""
    endless = itertools.cycle(batches)
    return lambda: step(next(endless))
