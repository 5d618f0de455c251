"""Measure contenders that step many environments, in turns. The contenders are in `peers.py` and `facades.py`.

With each call, a contender steps all environments once and begins a new episode where one is over. All contenders take
the same random actions. Libraries are imported when a contender starts, since they cannot all be installed into one
virtual environment. A contender that cannot start is left out, with the reason.

Contenders stay open while others are measured, and alternate in rounds, so that a slow or busy machine affects all of
them. Between its turns, a contender waits for its next call and uses no CPU: where its processes go on polling after a
call, the next turn starts when they have stopped.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from frame import rounds

from marl_parallel.backends import interpreter
from marl_parallel.cli.measure import Actions, draw_actions

DISTRIBUTIONS = (
    "mpe2", "SuperSuit", "stable-baselines3", "torch", "torchrl", "tensordict", "ray", "agilerl", "smarts",
    "pufferlib-core", "tianshou", "envpool",
)  # fmt: skip
"""Distributions whose versions are saved, if they are installed."""

Step = Callable[[], object]
"""Steps all environments once, with the next actions; or as often as its `batches` says, if it has that."""


class Batches:
    """A `Step` of several batches, for a contender whose calls take longer than a batch of a fast simulator."""

    def __init__(self, step: Callable[[int], object], batches: int) -> None:
        self._step, self.batches = step, batches

    def __call__(self) -> None:
        self._step(self.batches)


@dataclass(frozen=True)
class Case:
    """A PettingZoo environment whose agents have the same spaces.

    Attributes:
        name: The environment's name.
        constructor: Constructs one environment.
        num_envs: Number of environments.
        workers: Number of worker processes, for contenders that have a choice.
        episode_steps: Steps in an episode.
        deaths: Whether agents die before the episode ends; else all stay until then.
    """

    name: str
    constructor: Callable[[], Any]
    num_envs: int = 8
    workers: int = 2
    episode_steps: int = 100
    deaths: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return self.name

    @functools.cached_property
    def agents(self) -> list[str]:
        return list(self._action_spaces)

    @functools.cached_property
    def by_env(self) -> list[list[Actions]]:
        """Batches of actions: one dict by agent for each environment."""
        return draw_actions(self._action_spaces, self.num_envs)

    @functools.cached_property
    def joint(self) -> list[np.ndarray]:
        """The same as arrays `(num_envs, agents, ...)`."""
        return [np.array([[acts[agent] for agent in self.agents] for acts in batch]) for batch in self.by_env]

    @property
    def rows(self) -> list[np.ndarray]:
        """The same as arrays `(num_envs * agents, ...)`."""
        return [batch.reshape(-1, *batch.shape[2:]) for batch in self.joint]

    @property
    def by_agent(self) -> list[dict[str, np.ndarray]]:
        """The same as arrays `(num_envs, ...)`, by agent."""
        return [{agent: batch[:, place].copy() for place, agent in enumerate(self.agents)} for batch in self.joint]

    @functools.cached_property
    def _action_spaces(self) -> dict[str, Any]:
        with closing(self.constructor()) as env:
            return {agent: env.action_space(agent) for agent in env.possible_agents}


@dataclass(frozen=True)
class Contender:
    """A vectorised environment of some package.

    Attributes:
        name: Its name in tables.
        start: Returns a context in which it is open and has been reset.
        setting: Its settings, for a note.
        next_step: Whether a reset takes a call of its own, which is not counted as a step.
        polls_s: Seconds for which its processes poll after a call, and use CPUs that the next contender needs.
        ours: Whether it belongs to this package; then its errors are raised.
        with_deaths: Its settings for environments whose agents die, for a note.
    """

    name: str
    start: Callable[[Case], AbstractContextManager[Step]]
    setting: str = ""
    next_step: bool = False
    polls_s: float = 0.0
    ours: bool = False
    with_deaths: str = ""

    def __str__(self) -> str:
        return self.name

    def counted(self, case: Case) -> float:
        """Environment steps per batch."""
        share = case.episode_steps / (case.episode_steps + 1) if self.next_step else 1.0
        return case.num_envs * share


def settings(contenders: Iterable[Contender], shown: Collection[str], workers: int) -> str:
    """A sentence for each of the contenders that are shown and have a setting."""
    chosen = [one for one in contenders if one.setting and one.name in shown]
    return " ".join(f"{one.name}: {one.setting.format(workers=workers)}." for one in chosen)


# -- measuring ---------------------------------------------------------------------------------------------------------


def turns(contenders: Sequence[Contender], repeats: int) -> int:
    """The number of times that `measure` reports progress."""
    return len(contenders) * (1 + repeats)


def measure(
    case: Case, contenders: Sequence[Contender], seconds: float, repeats: int, on_turn: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Measure contenders in turns, after a warm-up of each.

    Returns:
        Environment steps per second in each round, by contender; and the reasons why contenders could not start or
        step, by contender.
    """
    ready: dict[str, Callable[[], float]] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        for one in contenders:
            on_turn(f"{case.name}: {one.name} starts")
            try:
                step = stack.enter_context(one.start(case))
                _batches_per_second(step, seconds / 4)
            except Exception as error:
                if one.ours and not isinstance(error, ImportError):
                    raise
                missing[one.name] = reason(error)
            else:
                ready[one.name] = functools.partial(_turn, one, case, step, seconds)
                time.sleep(one.polls_s)
        return rounds(ready, repeats, on_turn, lambda name: f"{case.name}: {name}"), missing


def _turn(contender: Contender, case: Case, step: Step, seconds: float) -> float:
    """Environment steps per second."""
    rate = contender.counted(case) * _batches_per_second(step, seconds)
    time.sleep(contender.polls_s)
    return rate


def reason(error: Exception) -> str:
    """The error in one line, without this machine's paths."""
    text = re.sub(r" \([^()]*[/\\][^()]*\)", "", str(error).strip().partition("\n")[0])
    return text if isinstance(error, ImportError) else f"{type(error).__name__}: {text}"


def _batches_per_second(step: Step, seconds: float) -> float:
    count, batches = 0, getattr(step, "batches", 1)
    started = now = time.perf_counter()
    while now < started + seconds or not count:
        step()
        count += batches
        now = time.perf_counter()
    return count / (now - started)


def one_thread_each() -> None:
    """Give numerical libraries one thread, in this process and its children, which share the CPUs. For scripts."""
    os.environ.update(interpreter.thread_variables(1))
    interpreter.limit_loaded_libraries(1)


def stepping(step: Callable[[Any], object], batches: Iterable[Any]) -> Step:
    """A function that steps with the batches of actions, over and over."""
    endless = itertools.cycle(batches)
    return lambda: step(next(endless))
