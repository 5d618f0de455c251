"""`TianshouVecEnv` in the table of promises: all agents of an environment act as one."""

from __future__ import annotations

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
    resets_at_once = True
    """A step of an environment that is over raises: collectors reset it at once."""
    copies = True

    def make(self, env: ParallelEnv) -> TianshouVecEnv:
        return TianshouVecEnv(env)

    def reset(self, facade: TianshouVecEnv, env_ids: list[int] | None = None) -> Results:
        results = facade.reset(env_ids)
        return dict(zip(range(ENVS) if env_ids is None else env_ids, zip(*results)))

    def actions(self, facade: TianshouVecEnv, actions: list[ByAgent]) -> Any:
        return stacked(actions)

    def step_with(self, facade: TianshouVecEnv, actions: Any) -> Results:
        return dict(enumerate(zip(*facade.step(actions))))

    def load(self, facade: TianshouVecEnv, states: list[bytes], env_ids: list[int] | None = None) -> Results:
        observations, infos = facade.load_state(states, env_ids)
        for env_id, info in enumerate(infos):  # as those of a step, which may have been the latest call
            info["env_id"] = env_id if env_ids is None else env_ids[env_id]
        return dict(zip(range(ENVS) if env_ids is None else env_ids, zip(observations, infos)))

    def wrong_actions(self, facade: TianshouVecEnv) -> list[Any]:
        return [np.zeros((3, 2), np.int64), np.zeros((2, 3), np.int64), np.full((3, 3), 0.5)]

    def read(self, facade: TianshouVecEnv, results: Results, env_id: int) -> Read:
        observation, *rest, info = results[env_id]
        shown = {"observation": plain(observation), "info": plain(info)}
        if not rest:
            return shown
        return {**shown, "reward": plain(rest[0]), "over": (bool(rest[1]), bool(rest[2]))}

    def expected(self, moment: Moment) -> Read:
        seen: Any = observations(moment.observed, moment)
        if not isinstance(seen[AGENTS[0]], dict):
            seen = np.concatenate([*seen.values()])
        infos = {**moment.infos.get("__common__", {}), **{a: moment.infos[a] for a in AGENTS if a in moment.infos}}
        if moment.kind != "reset":
            infos["env_id"] = moment.env_id
        return {
            "observation": seen,
            "info": infos,
            "reward": sum(moment.rewards.values(), 0.0),
            "over": moment.over,
        }


class AsyncTianshouDriver(TianshouDriver):
    """Results come one by one."""

    passes_on = True
    """An exception: without `wait_num`, actions of absent agents are dropped, with it they reach the simulator."""

    steps_some = True

    def make(self, env: ParallelEnv) -> TianshouVecEnv:
        return TianshouVecEnv(env, wait_num=1)

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


class TestAsyncTianshouVecEnv(Promises):
    driver = AsyncTianshouDriver()
