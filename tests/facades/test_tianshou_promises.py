"""`TianshouVecEnv` in the table of promises: all agents of an environment act as one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from helpers.promises.driver import DISABLED, Driver, Read, observations, plain, stacked
from helpers.promises.games import AGENTS
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import ENVS, Promises

from marl_parallel import ParallelEnv
from marl_parallel.vector import TianshouVecEnv

pytestmark = pytest.mark.needs("tianshou")

Results = dict[int, tuple[Any, ...]]
"""By environment: observation, reward, flags and info; of a reset, observation and info."""


class TianshouDriver(Driver):
    modes = (DISABLED,)
    masked_games = ()
    """Masks are a part of observations and infos, as the simulator reports them."""
    sends = False
    """Steps without waiting are those with `wait_num` or `timeout`."""
    resets_at_once = True
    """A step of an environment that is over raises: collectors reset it at once."""
    copies = True
    waits = takes_options = False
    """Tianshou's `BaseVectorEnv` has no calls in halves, and gives all environments the same seed."""
    scalarizes = True

    def make(self, env: ParallelEnv, **own: Any) -> TianshouVecEnv:
        return TianshouVecEnv(env, **own)

    def reset(self, facade: TianshouVecEnv, env_ids: list[int] | None = None) -> Results:
        results = facade.reset(env_ids)
        return dict(zip(range(ENVS) if env_ids is None else env_ids, zip(*results)))

    def actions(self, facade: TianshouVecEnv, actions: list[ByAgent]) -> Any:
        return stacked(actions)

    def step_with(self, facade: TianshouVecEnv, actions: Any) -> Results:
        return dict(enumerate(zip(*facade.step(actions))))

    def load(self, facade: TianshouVecEnv, states: list[bytes], env_ids: list[int] | None = None) -> Results:
        results = facade.load_state(states, env_ids)
        return dict(zip(range(ENVS) if env_ids is None else env_ids, zip(*results, strict=True)))

    def wrong_actions(self, facade: TianshouVecEnv) -> list[Any]:
        return [np.zeros((3, 2), np.int64), np.zeros((2, 3), np.int64), np.full((3, 3), 0.5)]

    def read(self, facade: TianshouVecEnv, results: Results, env_id: int) -> Read:
        observation, *rest, info = results[env_id]
        own = {key: value for key, value in plain(info).items() if key != "env_id"}
        shown = {"observation": plain(observation), "info": own}
        if not rest:
            return shown
        shown["env_id"] = info["env_id"]
        return {**shown, "reward": plain(rest[0]), "over": (bool(rest[1]), bool(rest[2]))}

    def expected(self, moment: Moment) -> Read:
        seen: Any = observations(moment.observed, moment)
        if not isinstance(seen[AGENTS[0]], dict):
            seen = np.concatenate([*seen.values()])
        infos = {**moment.infos.get("__common__", {}), **{a: moment.infos[a] for a in AGENTS if a in moment.infos}}
        return {
            "observation": seen,
            "info": infos,
            "env_id": moment.env_id,
            "reward": sum(moment.rewards.values(), 0.0),
            "over": moment.over,
        }


class AsyncTianshouDriver(TianshouDriver):
    """Results come one by one."""

    passes_on = True
    """An exception: without `wait_num`, actions of absent agents are dropped, with it they reach the simulator."""

    steps_some = True

    def make(self, env: ParallelEnv, **own: Any) -> TianshouVecEnv:
        return TianshouVecEnv(env, wait_num=1, **own)

    def step_some(self, facade: TianshouVecEnv, actions: dict[int, ByAgent]) -> tuple[Results, list[int]]:
        rows = zip(*facade.step(stacked([*actions.values()]), [*actions]))
        results = {row[4]["env_id"]: row for row in rows}
        return results, [*results]

    def step_with(self, facade: TianshouVecEnv, actions: Any) -> Results:
        results: Results = {}
        while len(results) < ENVS:
            rows = [*zip(*facade.step(None if results else actions))]
            results |= {row[4]["env_id"]: row for row in rows}
        return results


class TestTianshouVecEnv(Promises):
    driver = TianshouDriver()

    def test_the_first_reset_after_loading_goes_on(self, runs):
        """Collectors begin with a reset."""
        driver = TianshouDriver()
        first, other, some = (runs(driver, "agents_die", DISABLED) for _ in range(3))
        first.reset()
        first.step()
        states = driver.save(first.facade)
        for run in (other, some):
            run.loops, run.time = copy.deepcopy(first.loops), first.time
            driver.load(run.facade, states)
        other.compare(driver.reset(other.facade), what="loaded at")
        other.step()
        other.reset()  # begins new episodes, as any other
        other.step()
        with pytest.raises(ValueError, match="expected an action for each"):
            some.facade.step(np.zeros((2, 3), np.int64))
        some.compare(driver.reset(some.facade, [1]), [1], what="loaded at")  # nothing had been stepped
        some.reset([0, 1])  # only the first one goes on
        some.step()
        for _ in first.play(20):
            if first.over:
                break
        some.loops = copy.deepcopy(first.loops)
        driver.load(some.facade, states)
        driver.load(some.facade, driver.save(first.facade))  # these count, and what is over is reset
        results = driver.reset(some.facade)
        for env_id in some.over:
            some.loops[env_id].reset()
        some.compare(results, what="loaded at")
        some.step()
        driver.load(other.facade, states)
        other.facade.reset(seed=5)
        for env_id, loop in enumerate(other.loops):
            assert other.facade.parallel_env.seed()[env_id] == 5, loop


class TestAsyncTianshouVecEnv(Promises):
    driver = AsyncTianshouDriver()
