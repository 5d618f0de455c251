"""`RLlibVectorMultiAgentEnv` in the table of promises: lists of dicts, as RLlib's episodes take them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from helpers.promises.driver import NEXT_STEP, Driver, Read, plain
from helpers.promises.games import AGENTS, GAMES
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import Promises, Run

from marl_parallel import ParallelEnv
from marl_parallel.vector import RLlibVectorMultiAgentEnv

pytestmark = pytest.mark.needs("ray", "tree", "torch")

RETURNING = ("agents_return", "corpses_return", "listed_again")


class RLlibDriver(Driver):
    modes = (NEXT_STEP,)
    games = tuple(name for name in GAMES if name not in RETURNING)
    """RLlib's episodes cannot hold an agent that comes back while others go on: `test_returning_agents`."""
    pickled_games = ("agents_join", "corpses", "nobody_for_a_step")
    masked_games = ()
    """Masks are a part of observations and infos, as the simulator reports them."""
    sends = resets_some = waits = False
    """RLlib's runners call `step`, and `reset` for all environments."""
    copies = True
    takes_views = False
    """RLlib's episodes keep observations."""
    loads_some_first = True
    """The next `reset` begins episodes in the others."""
    saved_games = ("agents_die", "agents_join", "masks_of_the_dead")

    scalarizes = True

    def make(self, env: ParallelEnv, **own: Any) -> RLlibVectorMultiAgentEnv:
        return RLlibVectorMultiAgentEnv(env, **own)

    def reset(self, facade: RLlibVectorMultiAgentEnv, env_ids: list[int] | None = None) -> Any:
        seen, infos = facade.reset()
        return seen, None, None, None, infos

    def actions(self, facade: RLlibVectorMultiAgentEnv, actions: list[ByAgent]) -> Any:
        """Those of agents that act, as policies do that see only their observations."""
        acting = facade.parallel_env.acting
        return [{agent: of_env[agent] for agent in agents} for of_env, agents in zip(actions, acting)]

    def load(self, facade: RLlibVectorMultiAgentEnv, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        """Only what a new episode of RLlib begins with, so the steps after it are compared."""
        facade.load_state(states, env_ids)
        return None

    def wrong_actions(self, facade: RLlibVectorMultiAgentEnv) -> list[Any]:
        right = [dict.fromkeys(AGENTS, 0)] * 2
        return [right, [*right, {}], [*right, None]]

    def read(self, facade: RLlibVectorMultiAgentEnv, results: Any, env_id: int) -> Read:
        if results is None:
            return {}
        seen, rewards, terminateds, truncateds, infos = (None if part is None else part[env_id] for part in results)
        shown = {"observations": plain(seen), "infos": {key: info for key, info in plain(infos).items() if info}}
        if rewards is None:
            return shown
        return {**shown, "rewards": plain(rewards), "terminateds": plain(terminateds), "truncateds": plain(truncateds)}

    def expected(self, moment: Moment) -> Read:
        """Nothing of dead agents; observations only of agents that act, but the last ones of all."""
        dead = moment.were_dead
        seen = {agent: value for agent, value in moment.observed.items() if agent not in dead}
        if not moment.is_over:
            waits = moment.alive - moment.acting
            seen = {agent: value for agent, value in seen.items() if agent not in waits}
        common = {"__common__": moment.infos["__common__"]} if "__common__" in moment.infos else {}
        infos = {agent: {**common, **moment.infos.get(agent, {})} for agent in seen}
        others = {key: info for key, info in moment.infos.items() if key not in (*seen, *dead)}
        flags = [
            {**{agent: flag for agent, flag in of_kind.items() if agent not in dead}, "__all__": over}
            for of_kind, over in zip(moment.flags, moment.over)
        ]
        return {
            "observations": seen,
            "infos": {key: info for key, info in {**others, **infos}.items() if info},
            "rewards": {agent: reward for agent, reward in moment.rewards.items() if agent not in dead},
            "terminateds": flags[0],
            "truncateds": flags[1],
        }


class TestRLlibVectorMultiAgentEnv(Promises):
    driver = RLlibDriver()

    @pytest.mark.parametrize("returning", RETURNING)
    def test_returning_agents(self, returning, runs):
        run: Run = runs(self.driver, returning, NEXT_STEP)
        with pytest.raises(ValueError, match=r"^environment \d: agent 'agent_\d' has come back after its end"):
            for _ in run.play():
                pass
        run.reset()  # nothing is closed
        run.step()

    def test_the_first_reset_after_loading_goes_on(self, runs):
        """RLlib's runners begin with a reset, with a seed."""
        driver = RLlibDriver()
        first, other = (runs(driver, "agents_join", NEXT_STEP) for _ in range(2))
        first.reset()
        first.step()
        states = driver.save(first.facade)
        other.loops, other.time = copy.deepcopy(first.loops), first.time
        driver.load(other.facade, states)
        seen, infos = other.facade.reset(seed=[5, 6, 7])
        other.compare((seen, None, None, None, infos), what="loaded at")
        other.step()
        other.reset()  # begins new episodes, as any other
        other.step()
        over = next(number for number, _ in enumerate(first.play(20)) if first.over and number)
        assert over
        other.loops = copy.deepcopy(first.loops)
        driver.load(other.facade, driver.save(first.facade))
        seen, infos = other.facade.reset()
        for env_id in other.over:
            other.loops[env_id].reset()
        other.compare((seen, None, None, None, infos), what="loaded at")
        other.step()
