"""`finished_episodes`: returns and lengths equal sums over the dicts that a plain loop receives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from helpers.comparison import assert_same as assert_equal
from helpers.setups import BACKEND_SETUPS, Setup
from mpe2 import simple_spread_v3
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from pettingzoo.classic import tictactoe_v3
from simulators import returning_agents
from simulators.counting import ACTIONS, Counting
from simulators.crashing import Fate, crashing
from simulators.dying_agents import ReturningAgents, TwoAgents
from simulators.variable_agents import VariableAgents, VariableDictAgents
from simulators.vector_rewards import Couriers

from marl_parallel import ParallelEnv, vector

pytestmark = [pytest.mark.release_independent, pytest.mark.in_turn]

ENVS = 4
MAKERS: dict[str, Callable[..., Any]] = {
    "spread": functools.partial(simple_spread_v3.parallel_env, max_cycles=7),
    "knights": functools.partial(knights_archers_zombies.parallel_env, max_cycles=15),
    "variable": VariableAgents,
    "dict rules": VariableDictAgents,
    "rewarded when dead": ReturningAgents,
    "vectors": Couriers,
    "returning": returning_agents.ReturningPettingZooAgents,
    "returning dicts": functools.partial(returning_agents.ReturningAgents, corpses=True),
    "tictactoe": tictactoe_v3.env,
}


class Counter:
    """Sums of one environment, from the dicts of its steps."""

    def __init__(self, mode: str) -> None:
        self.mode, self.due, self.over = mode, False, False
        self.begin()

    def begin(self) -> None:
        self.returns: dict[Any, Any] = {}
        self.lengths: dict[Any, int] = {}
        self.length = 0

    def reset(self) -> None:
        self.due = self.over = False
        self.begin()

    def step(self, rewards: dict, terminateds: dict, truncateds: dict) -> tuple | None:
        """The episode that has ended: returns, lengths, length, flags."""
        if self.due:
            self.reset()
            return None
        ends = terminateds["__all__"] or truncateds["__all__"]
        if self.over and ends:
            return None
        self.over = False
        self.length += 1
        flagged = [a for flags in (terminateds, truncateds) for a in flags if flags[a] and a != "__all__"]
        for agent in {*rewards, *flagged}:
            self.returns[agent] = self.returns.get(agent, 0.0) + rewards.get(agent, 0.0)
            self.lengths[agent] = self.lengths.get(agent, 0) + 1
        if not ends:
            return None
        found = self.returns, self.lengths, self.length, bool(terminateds["__all__"]), bool(truncateds["__all__"])
        self.begin()
        self.due, self.over = self.mode == "NEXT_STEP", self.mode == "DISABLED"
        return found


def assert_same(finished: tuple[Any, ...], expected: dict[int, tuple]) -> None:
    assert sorted(one.env_id for one in finished) == sorted(expected)
    for one in finished:
        returns, lengths, length, terminated, truncated = expected[one.env_id]
        assert one.lengths == lengths
        assert (one.length, one.terminated, one.truncated) == (length, terminated, truncated)
        assert one.returns.keys() == returns.keys()
        for agent, value in returns.items():
            assert np.allclose(one.returns[agent], value, atol=1e-5)
            assert np.shape(one.returns[agent]) == np.shape(value)


def drawn(env: ParallelEnv, env_ids: Any, rng: np.random.Generator) -> list[dict[Any, Any]]:
    actions = []
    for env_id in env_ids:
        masks = env.action_masks[env_id]
        of_env = {}
        for agent in env.acting[env_id]:
            space = env.action_space[agent]
            if agent in masks:
                of_env[agent] = int(rng.choice(np.flatnonzero(masks[agent])))
            elif isinstance(space, spaces.Discrete):
                of_env[agent] = int(rng.integers(space.n))
            else:
                of_env[agent] = space.sample()
        actions.append(of_env)
    return actions


def arguments_of(setup: Setup) -> dict[str, Any]:
    arguments = setup._asdict()
    if setup.backend == "serial":
        del arguments["num_workers"]
    return arguments


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("setup", [*BACKEND_SETUPS, Setup("process", False, 2)], ids=str)
def test_statistics_equal_sums_of_dicts(setup, name, mode):
    rng, ended = np.random.default_rng(0), 0
    with ParallelEnv([MAKERS[name]] * ENVS, mode, seed=7, **arguments_of(setup)) as env:
        counters = [Counter(mode) for _ in range(ENVS)]
        assert env.finished_episodes == ()
        env.reset()
        for number in range(40):
            env_ids = [*range(ENVS)] if number % 4 else rng.permutation(ENVS)[:3].tolist()
            actions = drawn(env, env_ids, rng)
            if number % 3:
                results = [*env.step(actions, env_ids)]
            else:
                env.send(actions, env_ids)
                batch = env.recv()
                env_ids, results = batch.env_ids, [*batch[1:]]
            expected = {}
            for env_id, rewards, terminateds, truncateds in zip(env_ids, *results[1:4]):
                if (one := counters[env_id].step(rewards, terminateds, truncateds)) is not None:
                    expected[env_id] = one
            assert_same(env.finished_episodes, expected)
            ended += len(expected)
            if number == 20 or (mode == "DISABLED" and number % 6 == 0):
                again = [0, 2] if number == 20 else [e for e in range(ENVS) if counters[e].over]
                if again:
                    env.reset(env_ids=again)
                    assert env.finished_episodes == ()
                    for env_id in again:
                        counters[env_id].reset()
        assert ended > 2


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("name", ["spread", "knights", "variable", "dict rules", "vectors"])
def test_statistics_of_array_facades(name, mode):
    rng = np.random.default_rng(0)
    with (
        ParallelEnv([MAKERS[name]] * ENVS, mode, seed=7, num_workers=2) as parallel,
        ParallelEnv([MAKERS[name]] * ENVS, mode, seed=7, backend="serial") as plain,
    ):
        env = vector.PettingZooVecEnv(parallel)
        counters = [Counter(mode) for _ in range(ENVS)]
        env.reset()
        plain.reset()
        for _ in range(30):
            actions = {agent: env.action_space(agent).sample() for agent in env.possible_agents}
            by_env = [
                {agent: row(actions[agent], env_id) for agent in acting} for env_id, acting in enumerate(plain.acting)
            ]
            _, *results, _ = plain.step(by_env)
            env.step(actions)
            expected = {}
            for env_id, dicts in enumerate(zip(*results)):
                if (one := counters[env_id].step(*dicts)) is not None:
                    expected[env_id] = one
            assert_same(parallel.finished_episodes, expected)
    assert rng is not None


@pytest.mark.rest
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize("name", [name for name in MAKERS if not name.startswith("returning")])
@pytest.mark.parametrize("setup", [*BACKEND_SETUPS, Setup("process", False, 2)], ids=str)
def test_infos_have_statistics_where_parts_of_agents_end(setup, name, mode):
    """All else in the infos is as without `episode_stats`. `test_returning_agents` has agents that live twice."""
    rng, ended = np.random.default_rng(0), 0
    with (
        ParallelEnv([MAKERS[name]] * ENVS, mode, seed=7, episode_stats=True, **arguments_of(setup)) as env,
        ParallelEnv([MAKERS[name]] * ENVS, mode, seed=7, backend="serial") as plain,
    ):
        counters, reported = [Counter(mode) for _ in range(ENVS)], [set[Any]() for _ in range(ENVS)]
        assert_equal(env.reset(), plain.reset())
        for number in range(40):
            actions = drawn(plain, range(ENVS), rng)
            *_, rewards, terminateds, truncateds, expected = plain.step(actions)
            if number % 2:
                *_, infos = env.step(actions)
            else:
                env.send(actions)
                batch = env.recv()
                infos = [batch.infos[batch.env_ids.index(env_id)] for env_id in range(ENVS)]
            for env_id, dicts in enumerate(zip(rewards, terminateds, truncateds)):
                one = counters[env_id].step(*dicts)
                returns, lengths = one[:2] if one else (counters[env_id].returns, counters[env_id].lengths)
                flagged = {a for flags in dicts[1:] for a, flag in flags.items() if flag and a != "__all__"}
                agents = {*returns} if one else flagged
                parts = {a: {"r": returns[a], "l": lengths[a]} for a in agents - reported[env_id]}
                reported[env_id] |= agents
                if one:
                    parts["__common__"] = {"r": sum(returns.values()), "l": one[2]}
                    reported[env_id].clear()
                found = {key: info.pop("episode") for key, info in infos[env_id].items() if "episode" in (info or {})}
                assert found.keys() == parts.keys()
                for key, part in parts.items():
                    assert found[key]["l"] == part["l"]
                    assert np.allclose(found[key]["r"], part["r"], atol=1e-5)
                for key in parts.keys() - expected[env_id].keys():
                    assert infos[env_id].pop(key) == {}
                ended += len(parts)
            assert_equal([*infos], [*expected])
            if mode == "DISABLED" and (over := [env_id for env_id in range(ENVS) if counters[env_id].over]):
                assert_equal(env.reset(env_ids=over), plain.reset(env_ids=over))
                for env_id in over:
                    counters[env_id].reset()
        assert ended > 4


def row(value: Any, env_id: int) -> Any:
    return {key: part[env_id] for key, part in value.items()} if isinstance(value, dict) else value[env_id]


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize(("fault", "in_infos"), [("raise", False), ("SIGKILL", False), ("SIGKILL", True)])
def test_a_restart_truncates_the_episode(fault, in_infos, mode):
    make = crashing(functools.partial(VariableAgents, plain=True), {(1, 0): Fate(fault, "step", 2)})
    with ParallelEnv([make] * 2, mode, num_workers=2, on_error="restart", episode_stats=in_infos) as env:
        counters = [Counter(mode) for _ in range(2)]
        env.reset()
        restarted = None
        for number in range(25):
            _, *results, infos = env.step([dict.fromkeys(acting, 1) for acting in env.acting])
            expected = {}
            for env_id, dicts in enumerate(zip(*results)):
                if (one := counters[env_id].step(*dicts)) is not None:
                    expected[env_id] = one
            assert_same(env.finished_episodes, expected)
            if "restarted" in infos[1].get("__common__", {}) and restarted is None:
                (restarted,) = env.finished_episodes
                assert (restarted.env_id, restarted.length, restarted.truncated) == (1, 3, True)
                assert infos[1]["__common__"].get("episode", {}).get("l") == (3 if in_infos else None)
                for agent, total in restarted.returns.items() if in_infos else ():
                    assert infos[1][agent]["episode"] == {"r": total, "l": restarted.lengths[agent]}
            if mode == "DISABLED" and number % 6 == 0:
                for env_id, counter in enumerate(counters):
                    if counter.over:
                        env.reset(env_ids=[env_id])
                        counter.reset()
        assert restarted is not None


def test_an_environment_that_was_over_when_its_worker_died():
    """The report, which is not the end of another episode, does not count as a step of the next one."""
    fates = {(0, 0): Fate("SIGKILL", "step", 3)}
    makes = [crashing(functools.partial(Counting, length), fates) for length in (100, 3)]
    with ParallelEnv(makes, "NEXT_STEP", seed=42, num_workers=1, on_error="restart") as env:
        env.reset()
        ended = []
        for step in range(1, 17):
            env.step([ACTIONS] * 2)
            ended += [(step, episode.length) for episode in env.finished_episodes if episode.env_id == 1]
    assert ended == [(3, 3), (8, 3), (12, 3), (16, 3)]


def test_statistics_of_a_simulator_stay():
    with ParallelEnv([WithItsOwn] * 2, backend="serial", episode_stats=True) as env:
        env.reset()
        for _ in range(20):
            *_, infos = env.step([dict.fromkeys(acting, 0) for acting in env.acting])
        assert infos[0]["long"]["episode"] == "its own"
        assert infos[0]["__common__"] == "no dict"


class WithItsOwn(TwoAgents):
    """Has `episode` in its infos."""

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        *results, infos = super().step(actions)
        return (*results, {**{agent: {"episode": "its own"} for agent in infos}, "__common__": "no dict"})


def test_the_dead_count_until_their_death():
    with ParallelEnv([TwoAgents] * 2, num_workers=2) as env:
        env.reset()
        for _ in range(20):
            env.step([dict.fromkeys(acting, 0) for acting in env.acting])
        for one in env.finished_episodes:
            assert one.returns == {"long": 20.0, "short": 5.0}
            assert one.lengths == {"long": 20, "short": 5}
            assert one.length == 20
        assert np.mean([total for one in env.finished_episodes for total in one.returns.values()]) == 12.5
