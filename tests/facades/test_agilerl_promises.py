"""`AgileRLVecEnv` in the table of promises: dicts by agent, with NaN where an agent takes no part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.promises.driver import SAME_STEP, Driver, Read, at, observations, plain, row_info, with_common
from helpers.promises.games import AGENTS
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import Promises

from marl_parallel import ParallelEnv
from marl_parallel.vector import AgileRLVecEnv

pytestmark = pytest.mark.needs("agilerl")

NAN = float("nan")
OWN = ("final_obs", "final_info")


class AgileRLDriver(Driver):
    modes = (SAME_STEP,)
    masked_games = ()
    """Masks are a part of observations and infos, as the simulator reports them."""
    resets_some = False
    """AgileRL's `reset` takes only a seed and options."""
    copies = True
    scalarizes = keeps_rows = True

    def make(self, env: ParallelEnv, **own: Any) -> AgileRLVecEnv:
        return AgileRLVecEnv(env, **own)

    def reset(self, facade: AgileRLVecEnv, env_ids: list[int] | None = None) -> Any:
        seen, infos = facade.reset()
        return seen, None, None, None, infos

    def load(self, facade: AgileRLVecEnv, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        seen, infos = facade.load_state(states, env_ids)
        return seen, None, None, None, infos

    def actions(self, facade: AgileRLVecEnv, actions: list[ByAgent]) -> Any:
        return {agent: np.array([of_env[agent] for of_env in actions]) for agent in AGENTS}

    def send(self, facade: AgileRLVecEnv, actions: list[ByAgent]) -> None:
        """`step_async` passes actions on; AgileRL leaves those of agents that do not act out."""
        acting = facade.parallel_env.acting
        facade.step_async([{agent: of_env[agent] for agent in agents} for of_env, agents in zip(actions, acting)])

    def wrong_actions(self, facade: AgileRLVecEnv) -> list[Any]:
        right = {agent: np.zeros(3, np.int64) for agent in AGENTS}
        return [{**right, "agent_1": np.zeros(2, np.int64)}, {**right, "agent_1": np.full(3, 0.5)}, {}]

    def read(self, facade: AgileRLVecEnv, results: Any, env_id: int) -> Read:
        seen, rewards, terminations, truncations, infos = results

        def of_agents(values: Any) -> ByAgent:
            return {agent: plain(at(values[agent], env_id)) for agent in AGENTS}

        info_of = {agent: row_info(infos[agent], env_id) for agent in AGENTS}
        shown = {
            "observations": of_agents(seen),
            "present": of_agents(facade.present),
            "acting": of_agents(facade.acting),
            "infos": {a: {k: v for k, v in info.items() if k not in OWN} for a, info in info_of.items()},
        }
        if rewards is None:
            return shown
        return {
            **shown,
            "rewards": of_agents(rewards),
            "terminations": of_agents(terminations),
            "truncations": of_agents(truncations),
            "final": {agent: info.get("final_obs") for agent, info in info_of.items()},
            "final infos": {agent: info.get("final_info") for agent, info in info_of.items()},
        }

    def expected(self, moment: Moment) -> Read:
        """Flags are NaN for agents that take no part; observations are, too, if they are floats."""
        seen = observations(moment.observed, moment)
        absent = {agent: without(value) for agent, value in seen.items() if agent not in moment.observed}
        rewards = dict.fromkeys(moment.observed, 0.0) if moment.kind == "reset" else moment.rewards
        takes_part = moment.took_part | {*moment.flags[0], *moment.flags[1]}
        flags = [
            {agent: moment.inherited(agent)[kind] if agent in takes_part else NAN for agent in AGENTS}
            for kind in (0, 1)
        ]
        last = {agent: with_common(moment.infos, agent) for agent in AGENTS}
        infos, finals, final_infos = last, {}, dict.fromkeys(AGENTS)
        if moment.is_over:
            common = {"__common__": moment.infos["__common__"]} if "__common__" in moment.infos else {}
            infos = {agent: {**common, **moment.reset_infos.get(agent, {})} for agent in AGENTS}
            finals, final_infos = moment.final or {}, last
        return {
            "observations": {**seen, **absent},
            "present": {agent: agent in moment.observed or agent in rewards for agent in AGENTS},
            "acting": {agent: agent in moment.acting for agent in AGENTS},
            "infos": infos,
            "rewards": {agent: moment.rewards.get(agent, NAN) for agent in AGENTS},
            "terminations": flags[0],
            "truncations": flags[1],
            "final": {agent: finals.get(agent) for agent in AGENTS},
            "final infos": final_infos,
        }


def without(value: Any) -> Any:
    """The observation of an absent agent."""
    if isinstance(value, dict):
        return {key: without(part) for key, part in value.items()}
    return np.full_like(value, np.nan) if value.dtype.kind == "f" else value


class TestAgileRLVecEnv(Promises):
    driver = AgileRLDriver()
