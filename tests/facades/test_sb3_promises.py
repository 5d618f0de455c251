"""`SB3VecEnv` in the table of promises: one row for each agent of each environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.promises.driver import (
    SAME_STEP,
    Driver,
    Read,
    any_observation,
    at,
    observations,
    of_all,
    plain,
    with_common,
    zeros_like,
)
from helpers.promises.games import AGENTS
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import ENVS, Promises

from marl_parallel import ParallelEnv
from marl_parallel.vector import SB3VecEnv

pytestmark = pytest.mark.needs("stable_baselines3")

OWN = ("terminal_observation", "TimeLimit.truncated", "episode")


class SB3Driver(Driver):
    modes = (SAME_STEP,)
    resets_some = False
    """A `VecEnv` resets all environments."""
    refuses_reset_in_flight = False
    """A reset discards a step in flight, as in Stable-Baselines3."""
    copies = True
    forwards = takes_options = False
    """Values are by row; seeds and options have calls of their own: `test_sb3`."""

    scalarizes = keeps_rows = True

    def make(self, env: ParallelEnv, **own: Any) -> SB3VecEnv:
        return SB3VecEnv(env, **own)

    def reset(self, facade: SB3VecEnv, env_ids: list[int] | None = None) -> Any:
        return facade.reset(), None, None, facade.reset_infos

    def load(self, facade: SB3VecEnv, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        return facade.load_state(states, env_ids)[0], None, None, None

    def actions(self, facade: SB3VecEnv, actions: list[ByAgent]) -> Any:
        return np.array([of_env[agent] for of_env in actions for agent in AGENTS])

    def wrong_actions(self, facade: SB3VecEnv) -> list[Any]:
        rows = [np.zeros(8, np.int64), np.full(9, 0.5), np.full(9, "x")]
        return [*rows, np.zeros((9, 2), np.int64), np.zeros((3, 3), np.int64)]

    def masks(self, facade: SB3VecEnv, results: Any, env_id: int) -> ByAgent:
        return dict(zip(AGENTS, facade.action_masks().reshape(ENVS, 3, 3)[env_id].tolist()))

    def read(self, facade: SB3VecEnv, results: Any, env_id: int) -> Read:
        seen, rewards, dones, infos = results
        rows = {agent: 3 * env_id + place for place, agent in enumerate(AGENTS)}

        def of_rows(values: Any) -> ByAgent:
            return {agent: plain(at(values, row)) for agent, row in rows.items()}

        shown = {"observations": of_rows(seen)}
        shown |= {name: of_rows(getattr(facade, name)) for name in ("present", "acting", "observed", "rewarded")}
        if infos is None:
            return shown
        of_agents = {agent: infos[row] for agent, row in rows.items()}
        if rewards is None:
            return {**shown, "infos": plain(of_agents)}
        episodes = {agent: info.get("episode") for agent, info in of_agents.items()}
        return {
            **shown,
            "infos": {a: {k: plain(v) for k, v in info.items() if k not in OWN} for a, info in of_agents.items()},
            "rewards": of_rows(rewards),
            "dones": of_rows(dones),
            "last": {agent: plain(info.get("terminal_observation")) for agent, info in of_agents.items()},
            "truncated": {agent: info["TimeLimit.truncated"] for agent, info in of_agents.items()},
            "returns": {agent: one and (one["r"], one["l"]) for agent, one in episodes.items()},
        }

    def expected(self, moment: Moment) -> Read:
        """A dead agent is absent, whatever the simulator says of it, and its row ends once more with the episode."""
        over, dead = moment.is_over, moment.were_dead
        observed = {a: value for a, value in moment.observed.items() if over or a not in dead | moment.died}
        rewards = dict.fromkeys(moment.observed, 0.0) if moment.kind == "reset" else moment.rewards
        lasts = (moment.final or {}) if over else {a: value for a, value in moment.observed.items() if a in moment.died}
        lasts = {agent: value for agent, value in lasts.items() if agent not in dead}
        dones = {agent: any(moment.of_life(agent)) for agent in AGENTS}
        truncated = {agent: agent in lasts and moment.of_life(agent) == (False, True) for agent in AGENTS}
        none = zeros_like(any_observation(moment))
        return {
            "observations": observations(observed, moment),
            "present": {agent: agent in moment.observed or agent in rewards for agent in AGENTS},
            "acting": {agent: agent in moment.acting for agent in AGENTS},
            "observed": {agent: agent in observed for agent in AGENTS},
            "rewarded": {agent: agent in rewards and agent not in dead for agent in AGENTS},
            "infos": {agent: with_common(moment.infos, agent) for agent in AGENTS},
            "rewards": of_all({agent: reward for agent, reward in rewards.items() if agent not in dead}, 0.0),
            "dones": dones,
            "last": {agent: lasts.get(agent, none) if dones[agent] else None for agent in AGENTS},
            "truncated": truncated,
            "returns": {agent: moment.returns.get(agent) for agent in AGENTS},
        }


class TestSB3VecEnv(Promises):
    driver = SB3Driver()
