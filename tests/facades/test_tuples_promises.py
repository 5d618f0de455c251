"""`TupleVecEnv` in the table of promises: a tuple with an array for each agent."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.promises.driver import SAME_STEP, Driver, Read, at, observations, of_all, plain, row_info
from helpers.promises.games import AGENTS
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import Promises

from marl_parallel import ParallelEnv
from marl_parallel.vector import TupleVecEnv

FINAL = ("final_obs", "final_info")
MASK = "action_mask"


class TupleDriver(Driver):
    """With flags by agent; `test_tuples.py` has those of environments."""

    keeps_rows = scalarizes = True
    saved_games = ("agents_die", "masks_of_the_dead")
    """It adds nothing to saved states."""

    def make(self, env: ParallelEnv, **own: Any) -> TupleVecEnv:
        return TupleVecEnv(env, flags_by_agent=True, **own)

    def reset(self, facade: TupleVecEnv, env_ids: list[int] | None = None) -> Any:
        mask = {} if env_ids is None else {"reset_mask": np.array([env_id in env_ids for env_id in range(3)])}
        observed, infos = facade.reset(options=mask)
        return observed, None, None, None, infos

    def load(self, facade: TupleVecEnv, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        observed, infos = facade.load_state(states, env_ids)
        return observed, None, None, None, infos

    def actions(self, facade: TupleVecEnv, actions: list[ByAgent]) -> Any:
        return [[of_env[agent] for of_env in actions] for agent in AGENTS]

    def masks(self, facade: TupleVecEnv, results: Any, env_id: int) -> ByAgent:
        return {agent: results[4][MASK][env_id, place].tolist() for place, agent in enumerate(AGENTS)}

    def wrong_actions(self, facade: TupleVecEnv) -> list[Any]:
        arrays = [np.zeros((2, 3), np.int64), np.zeros((3, 2), np.int64), np.full((3, 3), 0.5), np.zeros(3, np.int64)]
        return [*arrays, 1, None, dict.fromkeys(AGENTS, np.zeros(3, np.int64))]

    def read(self, facade: TupleVecEnv, results: Any, env_id: int) -> Read:
        observed, rewards, terminations, truncations, infos = results
        assert isinstance(observed, tuple)

        def of_agents(array: np.ndarray) -> ByAgent:
            return dict(zip(AGENTS, array[env_id].tolist(), strict=True))

        of_env = {key: value for key, value in row_info(infos, env_id).items() if key != MASK}
        shown = {
            "observations": {agent: plain(at(of_agent, env_id)) for agent, of_agent in zip(AGENTS, observed)},
            "acting": of_agents(facade.acting),
            "infos": {key: value for key, value in of_env.items() if key not in FINAL},
        }
        if rewards is None:
            return shown
        final_obs = of_env.get("final_obs")
        return {
            **shown,
            "present": of_agents(facade.present),
            "rewards": of_agents(rewards),
            "terminations": of_agents(terminations),
            "truncations": of_agents(truncations),
            "final": None if final_obs is None else dict(zip(AGENTS, final_obs, strict=True)),
            "final info": of_env.get("final_info"),
        }

    def expected(self, moment: Moment) -> Read:
        infos, final, final_info = moment.infos, None, None
        if moment.mode is SAME_STEP and moment.is_over:
            final, final_info = observations(moment.final or {}, moment), merged(infos)
            marks = {key: mark for key, mark in infos.get("__common__", {}).items() if mark is True}
            infos = {**moment.reset_infos, "__common__": marks}
        return {
            "observations": observations(moment.observed, moment),
            "acting": {agent: agent in moment.acting for agent in AGENTS},
            "infos": merged(infos),
            "present": {agent: agent in moment.observed or agent in moment.rewards for agent in AGENTS},
            "rewards": of_all(moment.rewards, 0.0),
            "terminations": {agent: moment.inherited(agent)[0] for agent in AGENTS},
            "truncations": {agent: moment.inherited(agent)[1] for agent in AGENTS},
            "final": final,
            "final info": final_info,
        }


def merged(infos: ByAgent) -> ByAgent:
    """Infos of the environment at the top, beside those of agents."""
    return {**infos.get("__common__", {}), **{key: info for key, info in infos.items() if key != "__common__"}}


class TestTupleVecEnv(Promises):
    driver = TupleDriver()
