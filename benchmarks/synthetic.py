"""A PettingZoo environment with a chosen step time, number of agents and size of observations.

A step does a fixed amount of work, not of time: with more processes than CPUs each becomes slower, like a real
simulator. Or a step waits, like a simulator on another machine. Everything else is prepared in advance, so that a step
without work takes next to no time.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from typing import Any

import numpy as np
import pettingzoo
from gymnasium import spaces

PREPARED = 16


def work(rounds: int) -> None:
    """Keep a CPU busy for a while."""
    for _ in itertools.repeat(None, rounds):
        pass


def _wait(microseconds: int) -> None:
    if microseconds:  # `time.sleep(0)` takes 50 us and more
        time.sleep(microseconds / 1e6)


@functools.cache
def rounds_per_microsecond() -> float:
    """Rounds of `work` per microsecond on this machine. Measure it once, on an idle machine."""
    rounds = 20_000
    took = []
    for _ in range(25):
        started = time.perf_counter()
        work(rounds)
        took.append(time.perf_counter() - started)
    return rounds / (statistics.median(took) * 1e6)


class Synthetic(pettingzoo.ParallelEnv):
    """All agents observe random numbers and act at once; after a number of steps all are truncated.

    Args:
        step_us: Microseconds of work in a step, on average.
        num_agents: Number of agents.
        observation_size: Number of float32 values that each agent observes.
        episode_steps: Steps of an episode; (min, max) draws a number for each episode.
        tail: (probability, factor): steps with this probability take `factor` times as long. The average stays.
        rounds_per_us: Rounds of `work` per microsecond; None measures it in the constructor.
        reset_us: Microseconds of work in a reset.
        waits: Whether steps and resets sleep instead of working.
        infos: Whether each agent's info holds one float; else it is empty.
    """

    metadata = {"name": "synthetic", "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(
        self,
        step_us: float = 0.0,
        num_agents: int = 3,
        observation_size: int = 18,
        episode_steps: int | tuple[int, int] = 100,
        tail: tuple[float, float] = (0.0, 1.0),
        rounds_per_us: float | None = None,
        reset_us: float = 0.0,
        waits: bool = False,
        infos: bool = False,
    ) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(num_agents)]
        self.agents: list[str] = []
        space = spaces.Box(-1.0, 1.0, (observation_size,), np.float32)
        self.observation_spaces = dict.fromkeys(self.possible_agents, space)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(5))
        self.episode_steps, self.infos = episode_steps, infos
        probability, factor = tail
        if waits:
            self._spend, per_us = _wait, 1.0
        else:
            self._spend = work
            per_us = (rounds_per_us or rounds_per_microsecond()) if step_us or reset_us else 0.0
        self._usual = round(step_us * per_us / (1 - probability + probability * factor))
        self._rare = round(self._usual * factor)
        self._reset_cost = round(reset_us * per_us)
        self._probability = probability
        self._prepare(0)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self._prepare(seed)
        self._spend(self._reset_cost)
        self._steps_left = next(self._lengths)
        self.agents = self.possible_agents.copy()
        return next(self._observations).copy(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        self._spend(next(self._costs))
        agents = self.agents
        self._steps_left -= 1
        over = self._steps_left <= 0
        if over:
            self.agents = []
        rewards = next(self._rewards)
        if self.infos:
            infos: dict[str, Any] = {agent: {"distance": rewards[agent]} for agent in agents}
        else:
            infos = {agent: {} for agent in agents}
        return (
            next(self._observations).copy(),
            rewards.copy(),
            dict.fromkeys(agents, False),
            dict.fromkeys(agents, over),
            infos,
        )

    def _prepare(self, seed: int) -> None:
        """Draw the values of all episodes, which are used in turn; `reset` and `step` return copies of these dicts."""
        rng = np.random.default_rng(seed)
        agents, size = self.possible_agents, self.observation_spaces[self.possible_agents[0]].shape[0]
        values = rng.uniform(-1.0, 1.0, (PREPARED, len(agents), size)).astype(np.float32)
        rewards = rng.normal(size=(PREPARED, len(agents))).tolist()
        self._observations = itertools.cycle([dict(zip(agents, rows, strict=True)) for rows in values])
        self._rewards = itertools.cycle([dict(zip(agents, row, strict=True)) for row in rewards])
        rare = rng.random(1000) < self._probability
        self._costs = itertools.cycle([self._rare if is_rare else self._usual for is_rare in rare])
        steps = self.episode_steps
        lengths = [steps] if isinstance(steps, int) else rng.integers(*steps, PREPARED, endpoint=True).tolist()
        self._lengths = itertools.cycle(lengths)


parallel_env = Synthetic
