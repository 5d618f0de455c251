"""Agents that come back after their end: statistics, restarts and compiled code agree with a plain loop."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.setups import BACKEND_SETUPS, Setup
from simulators.crashing import Fate, crashing
from simulators.returning_agents import AGENTS, LENGTH, ReturningAgents, ReturningPettingZooAgents

from marl_parallel import ParallelEnv
from marl_parallel.core.block import codec
from marl_parallel.vector import GymnasiumVectorEnv, StackedVecEnv

pytestmark = [pytest.mark.release_independent, pytest.mark.in_turn]

ENVS, SEED, STEPS = 3, 5, 40
MODES = pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
MAKERS = {
    "dict rules": ReturningAgents,
    "corpses": functools.partial(ReturningAgents, corpses=True),
    "nobody left": functools.partial(ReturningAgents, none_left=True),
    "pettingzoo": ReturningPettingZooAgents,
    "ghosts": functools.partial(ReturningPettingZooAgents, ghosts=True),
}


@pytest.fixture(params=["compiled", "python"])
def any_codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With compiled code, and without: in the caller's process and in workers of the backend "serial"."""
    if request.param == "python":
        monkeypatch.setattr(codec, "Codec", None)
    return request.param


class LifeCounter:
    """One environment in a plain loop, which knows from the simulator who is dead; all agents take action 1."""

    def __init__(self, make: Any, mode: str, seed: int) -> None:
        self.env, self.mode = make(), mode
        self.pettingzoo = isinstance(self.env, ReturningPettingZooAgents)
        self.reset(seed)

    def reset(self, seed: int | None = None) -> None:
        self.env.reset(seed=seed)
        self.own = self.env.own if self.pettingzoo else self.env
        self.over, self.alive = False, {*AGENTS}
        self.lives: dict[str, list[tuple[float, int]]] = {agent: [(0.0, 0)] for agent in AGENTS}
        self.between: dict[str, tuple[float, int]] = dict.fromkeys(AGENTS, (0.0, 0))

    def acting(self) -> list[str]:
        return self.env.agents if self.pettingzoo else [*self.alive]

    def step(self) -> tuple[dict[str, Any], tuple[dict, dict] | None]:
        """The lives that end, by agent, and the returns and lengths of an episode that ends."""
        if self.over:
            self.reset()
            return {}, None
        observations, rewards, terminateds, truncateds, _ = self.env.step(dict.fromkeys(self.acting(), 1))
        parts = {}
        over = self.own.time == self.own.length
        for agent in observations:
            flagged = terminateds[agent] or truncateds[agent]
            if agent not in self.alive and not flagged and (not self.pettingzoo or agent in self.env.agents):
                self.alive.add(agent)
                self.lives[agent].append((0.0, 0))
            if agent not in self.alive:
                total, steps = self.between[agent]
                self.between[agent] = total + rewards[agent], steps + 1
                continue
            total, steps = self.lives[agent][-1]
            self.lives[agent][-1] = total + rewards[agent], steps + 1
            if flagged or over:
                parts[agent] = {"r": self.lives[agent][-1][0], "l": self.lives[agent][-1][1]}
                self.alive.discard(agent)
        if not over:
            return parts, None
        sums = {agent: [*self.lives[agent], self.between[agent]] for agent in AGENTS}
        episode = {a: sum(r for r, _ in s) for a, s in sums.items()}, {a: sum(n for _, n in s) for a, s in sums.items()}
        parts["__common__"] = {"r": sum(episode[0].values()), "l": self.own.time}
        self.over = True
        if self.mode == "SAME_STEP":
            self.reset()
        return parts, episode


def statistics_in(infos: dict[str, Any]) -> dict[str, Any]:
    return {key: info["episode"] for key, info in infos.items() if "episode" in info}


def check(env: ParallelEnv, infos: Any, expected: list[tuple[dict[str, Any], Any]]) -> int:
    """Compare a step with those of plain loops; returns the number of episodes that have ended."""
    for env_id, (parts, _) in enumerate(expected):
        found = infos.get(env_id, {}) if isinstance(infos, dict) else infos[env_id]
        assert statistics_in(found) == parts
    finished = {one.env_id: (one.returns, one.lengths) for one in env.finished_episodes}
    assert finished == {env_id: episode for env_id, (_, episode) in enumerate(expected) if episode is not None}
    return len(finished)


@MODES
@pytest.mark.parametrize("name", MAKERS)
def test_each_life_has_statistics_of_its_own(name, mode, any_codec):
    """In dicts, and in arrays, which are read by other code."""
    for arrays in (False, True):
        loops = [LifeCounter(MAKERS[name], mode, SEED + env_id) for env_id in range(ENVS)]
        with ParallelEnv([MAKERS[name]] * ENVS, mode, SEED, backend="serial", episode_stats=True) as env:
            facade = StackedVecEnv(env) if arrays else env
            facade.reset()
            ended = 0
            for _ in range(STEPS):
                if arrays:
                    # Dict rules: the simulator gets the actions of agents that act only.
                    infos = facade.step(np.ones((ENVS, len(AGENTS)), np.int64))[4]
                else:
                    infos = env.step([dict.fromkeys(loop.acting(), 1) for loop in loops])[4]
                ended += check(env, infos, [loop.step() for loop in loops])
                if mode == "DISABLED" and (over := [env_id for env_id, loop in enumerate(loops) if loop.over]):
                    facade.reset(env_ids=over)
                    for env_id in over:
                        loops[env_id].reset()
            assert ended >= 2 * ENVS


@pytest.mark.parametrize("setup", [*BACKEND_SETUPS, Setup("process", False, 2)], ids=str)
def test_statistics_of_lives_on_every_backend(setup, build):
    loops = [LifeCounter(ReturningPettingZooAgents, "SAME_STEP", SEED + env_id) for env_id in range(ENVS)]
    env = build([ReturningPettingZooAgents] * ENVS, setup, True, SEED, episode_stats=True)
    env.reset()
    ended = 0
    for _ in range(STEPS):
        infos = env.step([dict.fromkeys(loop.acting(), 1) for loop in loops])[4]
        ended += check(env, infos, [loop.step() for loop in loops])
    assert ended >= 2 * ENVS


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_rows_of_gymnasium_have_an_episode_for_each_life(mode):
    loops = [LifeCounter(ReturningPettingZooAgents, mode, SEED + env_id) for env_id in range(ENVS)]
    with ParallelEnv([ReturningPettingZooAgents] * ENVS, mode, SEED, backend="serial", episode_stats=True) as parallel:
        env, found = GymnasiumVectorEnv(parallel), 0
        env.reset()
        for _ in range(STEPS):
            infos = env.step(np.ones(ENVS * len(AGENTS), np.int64))[4]
            for env_id, (parts, _) in enumerate([loop.step() for loop in loops]):
                for place, agent in enumerate(AGENTS):
                    row = env_id * len(AGENTS) + place
                    has = "episode" in infos and bool(infos["_episode"][row])
                    assert has == (agent in parts)
                    if has:
                        found += 1
                        assert {key: infos["episode"][key][row] for key in "rl"} == parts[agent]
        assert found > 3 * ENVS * len(AGENTS)


def check_restarts(times: list[int], fault: str, mode: str, **how: Any) -> None:
    """One environment for each of these times, at which it fails."""
    makers = [crashing(ReturningAgents, {(env_id, 0): Fate(fault, "step", t)}, SEED) for env_id, t in enumerate(times)]
    loops = [ReturningAgents() for _ in times]
    with ParallelEnv(makers, mode, SEED, on_error="restart", **how) as env:
        env.reset()
        for env_id, loop in enumerate(loops):
            loop.reset(seed=SEED + env_id)
        for env_id, loop in enumerate(loops):
            for time in range(times[env_id] + 1):
                alive = {agent for agent in AGENTS if not loop.is_dead(agent, time) and not loop.ends(agent, time)}
                results = env.step([dict.fromkeys(AGENTS, 1)], env_ids=[env_id])
                if time < times[env_id]:
                    loop.step(dict.fromkeys(AGENTS, 1))
            _, (rewards,), (terminateds,), (truncateds,), (infos,) = results
            assert infos["__common__"]["restarted"]
            assert truncateds == {**dict.fromkeys(alive, True), "__all__": True}
            assert terminateds == dict.fromkeys([*alive, "__all__"], False)
            assert rewards == dict.fromkeys(alive, 0.0)


@MODES
def test_restarts_truncate_those_who_are_alive(mode, any_codec):
    """In every step of an episode: also those that have come back, and not those that have not."""
    check_restarts([*range(LENGTH)], "raise", mode, backend="serial")


@pytest.mark.filterwarnings("ignore:.*workers share:ResourceWarning")
def test_crashes_truncate_those_who_are_alive():
    check_restarts([2, 4, 7], "os._exit", "SAME_STEP", num_workers=3)
