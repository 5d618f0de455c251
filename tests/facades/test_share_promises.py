"""`ShareVecEnv` and its drop-ins in the table of promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from helpers.promises.driver import SAME_STEP, Driver, Read, by_agent, observations, of_all, plain, stacked
from helpers.promises.games import AGENTS
from helpers.promises.loop import ByAgent, Moment, mask_of
from helpers.promises.table import Promises

from marl_parallel import ParallelEnv
from marl_parallel.vector import DummyVecEnv, ShareDummyVecEnv, ShareSubprocVecEnv, ShareVecEnv, SubprocVecEnv

pytestmark = pytest.mark.release_independent

ORIGINALS = ("original_obs", "original_state", "original_avail_actions")
OF_ONE_STEP = ("action_mask", "reset_info", "restarted")


class ShareDriver(Driver):
    modes = (SAME_STEP,)
    resets_some = False
    """`reset` takes no arguments in the trainers' vector environments."""
    scalarizes = True

    def make(self, env: ParallelEnv, **own: Any) -> ShareVecEnv:
        return ShareVecEnv(env, **own)

    def reset(self, facade: ShareVecEnv, env_ids: list[int] | None = None) -> Any:
        seen, share, available = facade.reset()
        return seen, share, None, None, None, available

    def load(self, facade: ShareVecEnv, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        seen, share, available = facade.load_state(states, env_ids)
        return seen, share, None, None, None, available

    def actions(self, facade: ShareVecEnv, actions: list[ByAgent]) -> Any:
        return stacked(actions)[..., None]

    def close(self, facade: ShareVecEnv) -> None:
        facade.close()
        assert facade.closed

    def wrong_actions(self, facade: ShareVecEnv) -> list[Any]:
        return [
            np.zeros((3, 2, 1)),
            np.zeros((3, 3, 2)),
            np.full((3, 3, 1), 0.5),
            np.full((3, 3, 1), 3),
            None,
            [None] * 3,
        ]

    def masks(self, facade: ShareVecEnv, results: Any, env_id: int) -> ByAgent:
        available = results[5][env_id]
        assert available.dtype == np.int64
        return {agent: mask.astype(bool).tolist() for agent, mask in zip(AGENTS, available)}

    def read(self, facade: ShareVecEnv, results: Any, env_id: int) -> Read:
        seen, share, rewards, dones, infos, _ = results
        shown = {"observations": by_agent(seen, env_id), "share": by_agent(share, env_id)}
        return shown if rewards is None else {**shown, **self.read_step(rewards, dones, infos, env_id)}

    def read_step(self, rewards: Any, dones: Any, infos: Any, env_id: int) -> Read:
        first, *_ = of_agents = infos[env_id]
        return {
            "rewards": by_agent(rewards[..., 0], env_id),
            "dones": by_agent(dones, env_id),
            "originals": {key: plain(first[key]) for key in ORIGINALS if key in first},
            "infos": [{key: value for key, value in plain(info).items() if key not in ORIGINALS} for info in of_agents],
        }

    def expected(self, moment: Moment) -> Read:
        """Agents that are not alive are done until the end; if nobody is, nobody is done: that would be the end."""
        over = moment.is_over
        dones = {agent: over or agent not in moment.alive for agent in AGENTS}
        if all(dones.values()) and not over:
            dones = dict.fromkeys(AGENTS, False)
        seen = view(observations(moment.observed, moment))
        return {
            "observations": seen,
            "share": share(moment.state, seen),
            "rewards": of_all(moment.rewards, 0.0),
            "dones": dones,
            "originals": self.originals(moment),
            "infos": [self.info(moment, agent) for agent in AGENTS],
        }

    def originals(self, moment: Moment) -> Read:
        """The last values of an episode, for all agents."""
        if moment.final is None:
            return {}
        final = view(observations(moment.final, moment))
        masks = [mask_of(moment.final.get(agent), moment.infos.get(agent, {})) for agent in AGENTS]
        return {
            "original_obs": np.stack([*final.values()]),
            "original_state": np.stack([*share(moment.final_state, final).values()]),
            "original_avail_actions": np.array(masks, np.int64),
        }

    def info(self, moment: Moment, agent: str) -> ByAgent:
        of_env = {**moment.infos.get("__common__", {}), **moment.infos.get(agent, {})}
        if moment.is_over and moment.reset_infos.get(agent):
            of_env["reset_info"] = moment.reset_infos[agent]
        terminated, truncated = moment.of_life(agent)
        is_bad = moment.is_over and truncated and not terminated
        return {"bad_transition": is_bad, **self.repeated_infos(moment, agent), **of_env}

    def repeated_infos(self, moment: Moment, agent: str) -> ByAgent:
        """An exception of this facade: a restart has the infos of the step before, as trainers read counters there.

        In the first step of an episode, they are blank: trainers have counted them.
        """
        if not (moment.restarted and moment.is_over):
            return {}
        last = moment.before
        while last is not None and (last.kind == "reset" or last.interrupted):
            last = last.before
        if last is None:
            return {}
        known = {**last.infos.get("__common__", {}), **last.infos.get(agent, {})}
        known = {key: value for key, value in known.items() if key not in OF_ONE_STEP}
        return blank(known) if moment.is_first else known


def blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: blank(part) for key, part in value.items()}
    return value if isinstance(value, str) else type(value)(0)


def view(seen: ByAgent) -> ByAgent:
    """Observations without masks."""
    return {agent: value["observation"] if isinstance(value, dict) else value for agent, value in seen.items()}


def share(state: Any, seen: ByAgent) -> ByAgent:
    """The state for each agent; without one, all observations one after the other."""
    return dict.fromkeys(AGENTS, np.concatenate([*seen.values()]) if state is None else state)


class DropInDriver(ShareDriver):
    """Makes its own `ParallelEnv`."""

    is_drop_in = True
    # The rest is the code of `ShareVecEnv`: one game of each kind.
    games = ("agents_die", "agents_join", "corpses_return", "turns", "masks")
    restarted_games = ("all_live", "agents_join")
    pickled_games = ("corpses_return",)
    saved_games = ("agents_die",)
    masked_games = ("masks",)

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def open(self, constructors: Sequence[Any], mode: AutoresetMode, **arguments: Any) -> Any:
        return self.kind(constructors, auto_reset=mode, **{"isolate_rng": False, **arguments})


class FourValuesDriver(DropInDriver):
    """`step` returns observations, rewards, dones and infos."""

    masked_games = ()
    """It shows no masks."""

    def reset(self, facade: SubprocVecEnv, env_ids: list[int] | None = None) -> Any:
        return facade.reset(), None, None, None

    def load(self, facade: SubprocVecEnv, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        return facade.load_state(states, env_ids), None, None, None

    def read(self, facade: SubprocVecEnv, results: Any, env_id: int) -> Read:
        seen, rewards, dones, infos = results
        shown = {"observations": by_agent(seen, env_id)}
        return shown if rewards is None else {**shown, **self.read_step(rewards, dones, infos, env_id)}

    def expected(self, moment: Moment) -> Read:
        expected = super().expected(moment)
        del expected["share"]
        expected["originals"] = {key: value for key, value in expected["originals"].items() if key == "original_obs"}
        return expected


class TestShareVecEnv(Promises):
    driver = ShareDriver()


class TestShareSubprocVecEnv(Promises):
    driver = DropInDriver(ShareSubprocVecEnv)


class TestShareDummyVecEnv(Promises):
    driver = DropInDriver(ShareDummyVecEnv)


class TestSubprocVecEnv(Promises):
    driver = FourValuesDriver(SubprocVecEnv)


class TestDummyVecEnv(Promises):
    driver = FourValuesDriver(DummyVecEnv)
