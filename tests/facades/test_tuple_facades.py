"""Tuple environments in arrays equal a plain loop over the simulators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from simulators.tuple_envs import Cooperative, Foraging, Intersection, Pathfinding

from marl_parallel import ParallelEnv
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv

AGENTS = ["agent_0", "agent_1", "agent_2"]
COPIES = 2
KINDS = pytest.mark.parametrize("make", [Foraging, Intersection, Cooperative, Pathfinding])
HOWS = pytest.mark.parametrize("how", [{"backend": "serial"}, {"num_workers": 1}], ids=["serial", "process"])


def per_agent(values: Any) -> list[Any]:
    """One value for each agent, whether the simulator returns several or one."""
    return [*values] if isinstance(values, list | tuple | np.ndarray) else [values] * 3


class PlainLoop:
    """A plain loop; a finished agent gets action 0."""

    def __init__(self, make: Any, seed: int) -> None:
        self.env = make()
        self.sequence = list if make is Pathfinding else tuple
        self.seen, _ = self.env.reset(seed=seed)
        self.over = [False] * 3

    def step(self, actions: np.ndarray) -> tuple[list[Any], list[Any], list[Any]]:
        tuple_actions = [0 if over else int(action) for over, action in zip(self.over, actions)]
        self.seen, rewards, terminated, truncated, _ = self.env.step(self.sequence(tuple_actions))
        ended, cut_off = per_agent(terminated), per_agent(truncated)
        self.over = [bool(one or other) for one, other in zip(ended, cut_off)]
        return per_agent(rewards), ended, cut_off

    def begin_anew(self) -> None:
        self.seen, _ = self.env.reset()
        self.over = [False] * 3


@HOWS
@KINDS
def test_by_agent(make, how):
    rng = np.random.default_rng(1)
    loops = [PlainLoop(make, 5 + i) for i in range(COPIES)]
    ends = 0
    with PettingZooVecEnv(ParallelEnv([make] * COPIES, True, 5, **how)) as env:
        assert env.possible_agents == AGENTS
        env.reset()
        for _ in range(30):
            actions = rng.integers(0, 4, (COPIES, 3))
            observations, rewards, ended, cut_off, _ = env.step({a: actions[:, i] for i, a in enumerate(AGENTS)})
            for copy, loop in enumerate(loops):
                expected = loop.step(actions[copy])
                for place, agent in enumerate(AGENTS):
                    actual = rewards[agent][copy], ended[agent][copy], cut_off[agent][copy]
                    assert actual == tuple(part[place] for part in expected)
                if all(loop.over):
                    loop.begin_anew()
                    ends += 1
                for place, agent in enumerate(AGENTS):
                    np.testing.assert_array_equal(observations[agent][copy], loop.seen[place])
                    assert env.present[agent][copy]
                    assert env.acting[agent][copy] == (not loop.over[place])
    assert ends >= 4


@HOWS
@KINDS
def test_in_rows_through_a_wrapper(make, how):
    rng = np.random.default_rng(1)
    loops = [PlainLoop(make, 5 + i) for i in range(COPIES)]
    due = [False] * COPIES
    env = RecordEpisodeStatistics(GymnasiumVectorEnv(ParallelEnv([make] * COPIES, "NEXT_STEP", 5, **how)))
    env.reset()
    ends = 0
    for _ in range(30):
        actions = rng.integers(0, 4, COPIES * 3)
        observations, rewards, ended, cut_off, _ = env.step(actions)
        for copy, loop in enumerate(loops):
            rows = slice(3 * copy, 3 * copy + 3)
            # Rows of agents that are over are zeros until the episode of all is over, as for every kind.
            silent = [] if due[copy] else np.flatnonzero(loop.over)
            if due[copy]:
                loop.begin_anew()
                expected: tuple[list[Any], ...] = ([0.0] * 3, [False] * 3, [False] * 3)
            else:
                expected = loop.step(actions[rows])
            due[copy] = all(loop.over)
            ends += due[copy]
            seen = np.stack(loop.seen)
            seen[silent] = 0.0
            np.testing.assert_array_equal(observations[rows], seen)
            for actual, part in zip((rewards, ended, cut_off), expected):
                assert [*np.delete(actual[rows], silent)] == [*np.delete(part, silent)]
            assert not rewards[rows][silent].any()
    assert ends >= 4
    env.close()


def test_environment_infos_stay_common():
    with PettingZooVecEnv(ParallelEnv([Cooperative] * COPIES, True, 5, backend="serial")) as env:
        env.reset()
        *_, infos = env.step({agent: np.zeros(COPIES, int) for agent in AGENTS})
    np.testing.assert_array_equal(infos["__common__"]["speed"], [1.0, 1.0])
