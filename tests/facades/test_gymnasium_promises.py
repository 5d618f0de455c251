"""`GymnasiumVectorEnv` in the table of promises: one row for each agent of each environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.promises.driver import (
    SAME_STEP,
    Driver,
    Read,
    any_observation,
    at,
    observations,
    of_all,
    plain,
    row_info,
    with_common,
    zeros_like,
)
from helpers.promises.games import AGENTS
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import Promises

from marl_parallel import ParallelEnv
from marl_parallel.vector import GymnasiumVectorEnv

OWN = ("present", "acting", "final_obs", "final_info", "action_mask")


class GymnasiumDriver(Driver):
    shows_vectors = keeps_rows = True

    def make(self, env: ParallelEnv) -> GymnasiumVectorEnv:
        return GymnasiumVectorEnv(env)

    def reset(self, facade: GymnasiumVectorEnv, env_ids: list[int] | None = None) -> Any:
        options = {}
        if env_ids is not None:
            options = {"reset_mask": np.repeat([env_id in env_ids for env_id in range(3)], 3)}
        observed, infos = facade.reset(options=options)
        return observed, None, None, None, infos

    def load(self, facade: GymnasiumVectorEnv, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        observed, infos = facade.load_state(states, env_ids)
        return observed, None, None, None, infos

    def actions(self, facade: GymnasiumVectorEnv, actions: list[ByAgent]) -> Any:
        return np.array([of_env[agent] for of_env in actions for agent in AGENTS])

    def masks(self, facade: GymnasiumVectorEnv, results: Any, env_id: int) -> ByAgent:
        """Masks in infos are a part of infos: rows without infos have none, and everything is allowed there."""
        masks, has_mask = results[4]["action_mask"], results[4]["_action_mask"]
        rows = {agent: 3 * env_id + place for place, agent in enumerate(AGENTS)}
        return {agent: [bool(one) or not has_mask[row] for one in masks[row]] for agent, row in rows.items()}

    def wrong_actions(self, facade: GymnasiumVectorEnv) -> list[Any]:
        return [np.zeros(8, np.int64), np.full(9, 0.5), np.zeros((9, 2), np.int64)]

    def read(self, facade: GymnasiumVectorEnv, results: Any, env_id: int) -> Read:
        observed, rewards, terminations, truncations, infos = results
        rows = {agent: 3 * env_id + place for place, agent in enumerate(AGENTS)}

        def of_rows(values: Any) -> ByAgent:
            return {agent: plain(at(values, row)) for agent, row in rows.items()}

        row_infos = {agent: row_info(infos, row) for agent, row in rows.items()}
        shown = {
            "observations": of_rows(observed),
            "acting": of_rows(infos["acting"]),
            "infos": {a: {k: v for k, v in info.items() if k not in OWN} for a, info in row_infos.items()},
            "is over": bool(facade.over[3 * env_id]),
        }
        if rewards is None:
            return shown
        return {
            **shown,
            "present": of_rows(facade.present),
            "rewards": of_rows(rewards),
            "terminations": of_rows(terminations),
            "truncations": of_rows(truncations),
            "final": {agent: info.get("final_obs") for agent, info in row_infos.items()},
            "final infos": {agent: info.get("final_info") for agent, info in row_infos.items()},
        }

    def expected(self, moment: Moment) -> Read:
        """A dead agent is absent, whatever the simulator says of it, and its row ends once more with the episode."""
        same_step, over = moment.mode is SAME_STEP, moment.is_over
        absent = set() if same_step and over else moment.were_dead
        observed = {agent: value for agent, value in moment.observed.items() if agent not in absent}
        present = {*observed} | {agent for agent in moment.rewards if agent not in absent}
        last = {agent: with_common(moment.infos, agent) for agent in AGENTS}
        infos, final, final_infos = last, dict.fromkeys(AGENTS), dict.fromkeys(AGENTS)
        if same_step and over:
            common = {"__common__": moment.infos["__common__"]} if "__common__" in moment.infos else {}
            infos = {agent: {**common, **moment.reset_infos.get(agent, {})} for agent in AGENTS}
            final, final_infos = observations(moment.final or {}, moment), last
        elif same_step:
            none = zeros_like(any_observation(moment))
            final = {agent: moment.observed.get(agent, none) if agent in moment.died else None for agent in AGENTS}
            final_infos = {agent: last[agent] if agent in moment.died else None for agent in AGENTS}
        return {
            "observations": observations(observed, moment),
            "acting": {agent: agent in moment.acting for agent in AGENTS},
            "infos": {a: {k: v for k, v in info.items() if k != "action_mask"} for a, info in infos.items()},
            "is over": over and not same_step,
            "present": {agent: agent in present for agent in AGENTS},
            "rewards": {agent: 0.0 if a_dead else reward for agent, reward in of_all(moment.rewards, 0.0).items()
                        for a_dead in [agent in moment.were_dead]},
            "terminations": {agent: moment.of_life(agent)[0] for agent in AGENTS},
            "truncations": {agent: moment.of_life(agent)[1] for agent in AGENTS},
            "final": final,
            "final infos": final_infos,
        }  # fmt: skip


class TestGymnasiumVectorEnv(Promises):
    driver = GymnasiumDriver()
