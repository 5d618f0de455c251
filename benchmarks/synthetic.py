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
ACTIONS = 5
CALIBRATION_S = 1.0


def work(rounds: int) -> None:
    """Keep a CPU busy for a while."""
    for _ in itertools.repeat(None, rounds):
        pass


def _wait(microseconds: int) -> None:
    if microseconds:  # `time.sleep(0)` takes 50 us and more
        time.sleep(microseconds / 1e6)


@functools.cache
def rounds_per_microsecond() -> float:
    """Rounds of `work` per microsecond on this machine. Measure it once, on an idle machine.

    An idle CPU takes a while to reach its full speed, at which the contenders run. So this takes a second, and uses
    the second half of it.
    """
    rounds = 20_000
    took = []
    began = time.perf_counter()
    while (started := time.perf_counter()) < began + CALIBRATION_S:
        work(rounds)
        if started > began + CALIBRATION_S / 2:
            took.append(time.perf_counter() - started)
    return rounds / (statistics.median(took) * 1e6)


class Synthetic(pettingzoo.ParallelEnv):
    """All agents observe random numbers and act at once; after a number of steps those alive are truncated.

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
        dying: Number of agents that die in the first step of each episode: which ones, the seed decides.
        masks: Whether agents observe an action mask, too. Actions that it forbids have no effect either.
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
        dying: int = 0,
        masks: bool = False,
    ) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(num_agents)]
        self.agents: list[str] = []
        space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (observation_size,), np.float32)
        if masks:
            space = spaces.Dict({"observation": space, "action_mask": spaces.MultiBinary(ACTIONS)})
        self.observation_spaces = dict.fromkeys(self.possible_agents, space)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(ACTIONS))
        self.observation_size, self.episode_steps = observation_size, episode_steps
        self.infos, self.dying, self.masks = infos, dying, masks
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
        self._observations, self._rewards = self._of_everybody
        self.agents = self.possible_agents.copy()
        return next(self._observations).copy(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        if not self.agents:
            return {}, {}, {}, {}, {}
        self._spend(next(self._costs))
        agents = self.agents
        observations, rewards = next(self._observations), next(self._rewards)
        terminations = dict.fromkeys(agents, False)
        if self.dying and len(agents) == len(self.possible_agents):
            terminations.update(self._deaths)
            self.agents = self._alive.copy()
            self._observations, self._rewards = self._of_alive
        self._steps_left -= 1
        over = self._steps_left <= 0
        if over:
            self.agents = []
        if self.infos:
            infos: dict[str, Any] = {agent: {"distance": rewards[agent]} for agent in agents}
        else:
            infos = {agent: {} for agent in agents}
        return (
            observations.copy(),
            rewards.copy(),
            terminations,
            dict.fromkeys(agents, over),
            infos,
        )

    def _prepare(self, seed: int) -> None:
        """Draw the values of all episodes, which are used in turn; `reset` and `step` return copies of these dicts."""
        rng = np.random.default_rng(seed)
        agents = self.possible_agents
        values = rng.uniform(-1.0, 1.0, (PREPARED, len(agents), self.observation_size)).astype(np.float32)
        rewards = rng.normal(size=(PREPARED, len(agents))).tolist()
        rare = rng.random(1000) < self._probability
        self._costs = itertools.cycle([self._rare if is_rare else self._usual for is_rare in rare])
        steps = self.episode_steps
        lengths = [steps] if isinstance(steps, int) else rng.integers(*steps, PREPARED, endpoint=True).tolist()
        self._lengths = itertools.cycle(lengths)
        observations: Any = values
        if self.masks:
            allowed = rng.integers(2, size=(PREPARED, len(agents), ACTIONS), dtype=np.int8)
            allowed[..., 0] = 1
            observations = [
                [{"observation": row, "action_mask": mask} for row, mask in zip(*both, strict=True)]
                for both in zip(values, allowed, strict=True)
            ]
        everybody = [[dict(zip(agents, row, strict=True)) for row in rows] for rows in (observations, rewards)]
        dying = {agents[place] for place in rng.permutation(len(agents))[: self.dying]}
        self._deaths = dict.fromkeys(dying, True)
        self._alive = [agent for agent in agents if agent not in dying]
        alive = [[{agent: row[agent] for agent in self._alive} for row in rows] for rows in everybody]
        self._of_everybody = [*map(itertools.cycle, everybody)]
        self._of_alive = [*map(itertools.cycle, alive)]
        self._observations, self._rewards = self._of_everybody


parallel_env = Synthetic
