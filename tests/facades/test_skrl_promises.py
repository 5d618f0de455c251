"""`SkrlEnv` in the table of promises: dicts by agent of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.promises.driver import NEXT_STEP, SAME_STEP, Driver, Read, observations, of_all, without_finals
from helpers.promises.games import AGENTS
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import Promises

from marl_parallel import ParallelEnv
from marl_parallel.vector import SkrlEnv

pytestmark = pytest.mark.needs("skrl", "torch")

OWN = ("episode", "transition")


class SkrlDriver(Driver):
    """By default, every end is `terminated`."""

    modes = (SAME_STEP, NEXT_STEP)
    masked_games = ()
    """Masks are a part of observations and infos, as the simulator reports them."""
    scalarizes = keeps_rows = copies = True
    bootstraps = False

    def make(self, env: ParallelEnv, **own: Any) -> SkrlEnv:
        return SkrlEnv(env, "cpu", bootstrap_truncated=self.bootstraps, **own)

    def reset(self, facade: SkrlEnv, env_ids: list[int] | None = None) -> Any:
        observed, infos = facade.reset(env_ids=env_ids)
        return observed, None, None, None, infos

    def load(self, facade: SkrlEnv, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        observed, infos = facade.load_state(states, env_ids)
        return observed, None, None, None, infos

    def actions(self, facade: SkrlEnv, actions: list[ByAgent]) -> Any:
        return {agent: torch.tensor([[of_env[agent]] for of_env in actions]) for agent in AGENTS}

    def wrong_actions(self, facade: SkrlEnv) -> list[Any]:
        right = {agent: torch.zeros(3, 1, dtype=torch.int64) for agent in AGENTS}
        wrong = [torch.zeros(2, 1), torch.zeros(3, 2), torch.full((3, 1), 0.5), torch.tensor(0)]
        return [*({**right, "agent_1": one} for one in wrong), {"agent_0": right["agent_0"]}, {}, torch.zeros(3, 3)]

    def parts(self, results: Any) -> Iterator[np.ndarray]:
        for part in results:
            for value in part.values() if isinstance(part, dict) else ():
                if torch.is_tensor(value):
                    yield value.numpy()
                elif isinstance(value, dict):
                    yield from self.parts([value])

    def read(self, facade: SkrlEnv, results: Any, env_id: int) -> Read:
        observed, rewards, terminated, truncated, infos = results
        own = {key: infos[key] for key in OWN if key in infos}

        def of_agents(values: Any) -> ByAgent:
            return {agent: values[agent][env_id].item() for agent in AGENTS}

        shown = {
            "observations": {agent: observed[agent][env_id].numpy().copy() for agent in AGENTS},
            "present": of_agents(facade.present),
            "acting": of_agents(facade.acting),
            "infos": without_finals(infos.get(env_id, {})),
            "states": [number(facade.state()[agent], env_id) for agent in AGENTS],
        }
        if rewards is None:
            assert not own
            return shown
        assert infos.keys() - {*range(3)} <= {*OWN}
        assert ("transition" in own) == self.bootstraps
        transition = own.get("transition", {"next_observations": observed, "next_states": facade.state()})
        return {
            **shown,
            "rewards": of_agents(rewards),
            "terminated": of_agents(terminated),
            "truncated": of_agents(truncated),
            "next observations": {agent: transition["next_observations"][agent][env_id].numpy() for agent in AGENTS},
            "next states": [number(transition["next_states"][agent], env_id) for agent in AGENTS],
        }

    def expected(self, moment: Moment) -> Read:
        rewards = dict.fromkeys(moment.observed, 0.0) if moment.kind == "reset" else moment.rewards
        last, last_state = moment.observed, moment.state
        if self.bootstraps and moment.final is not None:
            last, last_state = moment.final, moment.final_state
        flags = {agent: self.flags(moment, agent, last) for agent in AGENTS}
        has_begun = moment.is_over and moment.mode is SAME_STEP
        alive = {*moment.observed} if has_begun else moment.alive - ({*AGENTS} if moment.is_over else set())
        shown = {agent: value for agent, value in moment.observed.items() if agent in alive}
        if self.bootstraps:  # the last observations of those who die, too
            last = {agent: value for agent, value in last.items() if agent not in moment.were_dead}
        else:
            last = shown
        seen, before_resets = ({a: flat(value) for a, value in observations(o, moment).items()} for o in (shown, last))
        return {
            "observations": seen,
            "present": {agent: agent in moment.observed or agent in rewards for agent in AGENTS},
            "acting": {agent: agent in moment.acting for agent in AGENTS},
            "infos": moment.infos,
            "states": [number(moment.state)] * len(AGENTS),
            "rewards": of_all(moment.rewards, 0.0),
            "terminated": {agent: terminated for agent, (terminated, _) in flags.items()},
            "truncated": {agent: truncated for agent, (_, truncated) in flags.items()},
            "next observations": before_resets,
            "next states": [number(last_state)] * len(AGENTS),
        }

    def flags(self, moment: Moment, agent: str, last: ByAgent) -> tuple[bool, bool]:
        """Once in a life, and for all at the end of an episode, and in a step that begins one."""
        if moment.kind == "begin":
            return True, False
        terminated, truncated = moment.of_life(agent)
        if not self.bootstraps:
            return terminated or truncated, False
        is_valued = agent in last and agent not in moment.were_dead
        return terminated or (truncated and not is_valued), truncated and is_valued and not terminated


class BootstrappingDriver(SkrlDriver):
    modes = (SAME_STEP,)
    bootstraps = True


def flat(value: Any) -> np.ndarray:
    """An observation as skrl flattens it: float32, the parts of a dict by name."""
    parts = [value[key] for key in sorted(value)] if isinstance(value, dict) else [value]
    return np.concatenate([np.asarray(part, np.float32).ravel() for part in parts])


def number(states: Any, *index: int) -> list[float] | None:
    return None if states is None else np.asarray(states[index] if index else states, np.float32).ravel().tolist()


class TestSkrlEnv(Promises):
    driver = SkrlDriver()


class TestBootstrapTruncated(Promises):
    driver = BootstrappingDriver()
