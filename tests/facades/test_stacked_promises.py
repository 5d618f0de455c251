"""`ArrayStepper` and `StackedVecEnv` in the table of promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.promises.driver import (
    Driver,
    Read,
    by_agent,
    observations,
    of_all,
    plain,
    stacked,
    without_finals,
)
from helpers.promises.games import AGENTS
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import Promises

from marl_parallel import ParallelEnv
from marl_parallel.vector import ArrayStepper, Stacked, StackedVecEnv

pytestmark = pytest.mark.release_independent


class OwnFacade:
    """A facade of a user, on an `ArrayStepper`; its results are `Arrays`."""

    def __init__(self, env: ParallelEnv, **own: Any) -> None:
        self.stepper = ArrayStepper(env, self, **own)


class StepperDriver(Driver):
    waits = forwards = takes_options = False
    """A part of facades, with methods of other names; simulators are reached by its `env`."""
    scalarizes = keeps_rows = True

    def make(self, env: ParallelEnv, **own: Any) -> OwnFacade:
        return OwnFacade(env, **own)

    def reset(self, facade: OwnFacade, env_ids: list[int] | None = None) -> Any:
        return facade.stepper.reset(env_ids=env_ids)

    def actions(self, facade: OwnFacade, actions: list[ByAgent]) -> Any:
        return [Stacked(tuple(AGENTS), stacked(actions))]

    def step_with(self, facade: OwnFacade, actions: Any) -> Any:
        return facade.stepper.step(actions)

    def env_of(self, facade: OwnFacade) -> ParallelEnv:
        return facade.stepper.env

    def send(self, facade: OwnFacade, actions: list[ByAgent]) -> None:
        facade.stepper.send(self.actions(facade, actions))

    def receive(self, facade: OwnFacade) -> Any:
        return facade.stepper.receive()

    def save(self, facade: OwnFacade) -> list[bytes]:
        return facade.stepper.save_state()

    def load(self, facade: OwnFacade, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        return facade.stepper.load_state(states, env_ids)[0]

    def close(self, facade: OwnFacade) -> None:
        facade.stepper.close()

    def masks(self, facade: OwnFacade, results: Any, env_id: int) -> ByAgent:
        return dict(zip(AGENTS, facade.stepper.action_masks(AGENTS)[env_id].tolist()))

    def wrong_actions(self, facade: OwnFacade) -> list[Any]:
        return [
            [Stacked(tuple(AGENTS), np.zeros((2, 3), np.int64))],
            [Stacked(tuple(AGENTS[:2]), np.zeros((3, 2), int))],
        ]

    def read(self, facade: OwnFacade, arrays: Any, env_id: int) -> Read:
        (seen,) = arrays.observations
        marks = {
            name: by_agent(getattr(arrays, name), env_id) for name in ("observed", "rewarded", "present", "acting")
        }
        return {
            "observations": by_agent(seen, env_id),
            "rewards": by_agent(arrays.rewards, env_id),
            "terminations": by_agent(arrays.terminations, env_id),
            "truncations": by_agent(arrays.truncations, env_id),
            "over": (bool(arrays.terminated[env_id]), bool(arrays.truncated[env_id])),
            "infos": without_finals(arrays.infos.get(env_id, {})),
            **marks,
        }

    def expected(self, moment: Moment) -> Read:
        """After a reset, agents that are observed have the reward 0.0, as in a step that begins an episode."""
        rewards = dict.fromkeys(moment.observed, 0.0) if moment.kind == "reset" else moment.rewards
        return {
            "observations": observations(moment.observed, moment),
            "rewards": of_all(rewards, 0.0),
            "terminations": {agent: moment.own(agent)[0] for agent in AGENTS},
            "truncations": {agent: moment.own(agent)[1] for agent in AGENTS},
            "over": moment.over,
            "infos": moment.infos,
            "observed": {agent: agent in moment.observed for agent in AGENTS},
            "rewarded": {agent: agent in rewards for agent in AGENTS},
            "present": {agent: agent in moment.observed or agent in rewards for agent in AGENTS},
            "acting": {agent: agent in moment.acting for agent in AGENTS},
        }


class StackedDriver(Driver):
    scalarizes = shows_vectors = keeps_rows = True

    def make(self, env: ParallelEnv, **own: Any) -> StackedVecEnv:
        with_state = env.state_space is not None if isinstance(env, ParallelEnv) else False
        return StackedVecEnv(env, with_state=with_state, **own)

    def reset(self, facade: StackedVecEnv, env_ids: list[int] | None = None) -> Any:
        observed, infos = facade.reset(env_ids=env_ids)
        return observed, None, None, None, infos

    def load(self, facade: StackedVecEnv, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        observed, infos = facade.load_state(states, env_ids)
        return observed, None, None, None, infos

    def actions(self, facade: StackedVecEnv, actions: list[ByAgent]) -> Any:
        return stacked(actions)

    def masks(self, facade: StackedVecEnv, results: Any, env_id: int) -> ByAgent:
        return dict(zip(AGENTS, facade.action_masks[env_id].tolist()))

    def wrong_actions(self, facade: StackedVecEnv) -> list[Any]:
        return [np.zeros((2, 3), np.int64), np.zeros((3, 2), np.int64), np.zeros((3, 3)), {"agent": 1}]

    def read(self, facade: StackedVecEnv, results: Any, env_id: int) -> Read:
        observed, rewards, terminations, truncations, infos = results
        shown = {
            "observations": by_agent(observed, env_id),
            "present_next": by_agent(facade.present_next, env_id),
            "acting": by_agent(facade.acting, env_id),
            "infos": without_finals(infos.get(env_id, {})),
            "state": None if facade.state is None else plain(facade.state[env_id]),
        }
        if rewards is None:
            return shown
        done = bool(facade.done[env_id])
        return {
            **shown,
            "rewards": by_agent(rewards, env_id),
            "terminations": by_agent(terminations, env_id),
            "truncations": by_agent(truncations, env_id),
            "over": (bool(facade.terminated[env_id]), bool(facade.truncated[env_id])),
            "done": done,
            "present": by_agent(facade.present, env_id),
            "final": by_agent(facade.final_observations, env_id) if done else None,
            "present_final": by_agent(facade.present_final, env_id) if done else None,
            "final_state": plain(facade.final_state[env_id]) if done and facade.final_state is not None else None,
        }

    def expected(self, moment: Moment) -> Read:
        over, final = moment.is_over, moment.final or {}
        return {
            "observations": observations(moment.observed, moment),
            "present_next": {agent: agent in moment.observed for agent in AGENTS},
            "acting": {agent: agent in moment.acting for agent in AGENTS},
            "infos": moment.infos,
            "rewards": of_all(moment.rewards, 0.0),
            "terminations": {agent: moment.inherited(agent)[0] for agent in AGENTS},
            "truncations": {agent: moment.inherited(agent)[1] for agent in AGENTS},
            "over": moment.over,
            "done": over,
            "present": {agent: agent in moment.rewards for agent in AGENTS},
            "final": observations(final, moment) if over else None,
            "present_final": {agent: agent in final for agent in AGENTS} if over else None,
            "state": moment.state,
            "final_state": (moment.state if moment.final is None else moment.final_state) if over else None,
        }


class TestArrayStepper(Promises):
    driver = StepperDriver()


class TestStackedVecEnv(Promises):
    driver = StackedDriver()
