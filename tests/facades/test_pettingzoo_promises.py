"""`PettingZooVecEnv` in the table of promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.promises.driver import (
    SAME_STEP,
    Driver,
    Read,
    at,
    observations,
    of_all,
    plain,
    row_info,
)
from helpers.promises.games import AGENTS
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import Promises

from marl_parallel import ParallelEnv
from marl_parallel.vector import PettingZooVecEnv

pytestmark = pytest.mark.release_independent


class PettingZooDriver(Driver):
    shows_vectors = keeps_rows = True

    def make(self, env: ParallelEnv) -> PettingZooVecEnv:
        return PettingZooVecEnv(env)

    def reset(self, facade: PettingZooVecEnv, env_ids: list[int] | None = None) -> Any:
        observed, infos = facade.reset(env_ids=env_ids)
        return observed, None, None, None, infos

    def load(self, facade: PettingZooVecEnv, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        observed, infos = facade.load_state(states, env_ids)
        return observed, None, None, None, infos

    def actions(self, facade: PettingZooVecEnv, actions: list[ByAgent]) -> Any:
        return {agent: np.array([of_env[agent] for of_env in actions]) for agent in AGENTS}

    masked_games = ()
    """Masks are a part of observations and infos, as in PettingZoo; `env.action_masks` has them by environment."""

    def wrong_actions(self, facade: PettingZooVecEnv) -> list[Any]:
        right = {agent: np.zeros(3, np.int64) for agent in AGENTS}
        wrong = [np.zeros(2, np.int64), np.zeros(4, np.int64), np.full(3, 0.5), 1, None]
        return [*({**right, "agent_1": one} for one in wrong), {}]

    def read(self, facade: PettingZooVecEnv, results: Any, env_id: int) -> Read:
        observed, rewards, terminations, truncations, infos = results

        def of_agents(values: Any) -> ByAgent:
            return {agent: plain(at(values[agent], env_id)) for agent in AGENTS}

        infos_of_env = {key: row_info(of_key, env_id) for key, of_key in infos.items()}
        shown = {
            "observations": of_agents(observed),
            "acting": of_agents(facade.acting),
            "is over": bool(facade.over[env_id]),
            "infos": {key: info for key, info in map(without_finals, infos_of_env.items()) if info},
        }
        if rewards is None:
            return shown
        flags = {"terminations": of_agents(terminations), "truncations": of_agents(truncations)}
        return {**shown, "rewards": of_agents(rewards), "present": of_agents(facade.present), **flags}

    def expected(self, moment: Moment) -> Read:
        return {
            "observations": observations(moment.observed, moment),
            "acting": {agent: agent in moment.acting for agent in AGENTS},
            "is over": moment.is_over and moment.mode is not SAME_STEP,
            "infos": moment.infos,
            "rewards": of_all(moment.rewards, 0.0),
            "present": {agent: agent in moment.observed or agent in moment.rewards for agent in AGENTS},
            "terminations": {agent: moment.inherited(agent)[0] for agent in AGENTS},
            "truncations": {agent: moment.inherited(agent)[1] for agent in AGENTS},
        }


def without_finals(item: tuple[str, Any]) -> tuple[str, Any]:
    key, info = item
    return key, {name: value for name, value in info.items() if name not in ("final_obs", "reset_info")}


class TestPettingZooVecEnv(Promises):
    driver = PettingZooDriver()
