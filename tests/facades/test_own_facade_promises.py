"""The facade of the page about extending in the table of promises: what `ArrayFacade` promises to its subclasses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import ROOT
from helpers.promises.driver import Driver, Read, observations, plain, stacked, without_finals
from helpers.promises.games import GAMES
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import Promises

from marl_parallel import ParallelEnv

pytestmark = pytest.mark.release_independent

PAGE = (ROOT / "docs" / "extending.md").read_text()
CODE = next(block for block in PAGE.split("```python\n") if "class JointVecEnv" in block).partition("\nenv = ")[0]
FACADE = CODE[CODE.index("class JointVecEnv") :]
NAMES: dict[str, Any] = {"__name__": "own_facade"}
exec(compile(CODE, "extending.md", "exec"), NAMES)
JointVecEnv: Any = NAMES["JointVecEnv"]


class JointDriver(Driver):
    games = tuple(name for name, script in GAMES.items() if script.masks != "observations")
    """It joins observations that are arrays."""
    masked_games = ()
    """It shows no masks."""
    saved_games = ("agents_die", "agents_return", "corpses_return")
    """Those without masks."""

    def make(self, env: ParallelEnv) -> Any:
        return JointVecEnv(env)

    def reset(self, facade: Any, env_ids: list[int] | None = None) -> Any:
        return facade.reset(env_ids=env_ids)

    def actions(self, facade: Any, actions: list[ByAgent]) -> Any:
        return stacked(actions)

    def load(self, facade: Any, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        return facade.load_state(states, env_ids)

    def wrong_actions(self, facade: Any) -> list[Any]:
        return [np.zeros((3, 2), np.int64), np.zeros((2, 3), np.int64), np.full((3, 3), 0.5)]

    def read(self, facade: Any, results: Any, env_id: int) -> Read:
        seen, *rest, infos = results
        shown = {"observation": plain(seen[env_id]), "info": without_finals(infos[env_id])}
        if not rest:
            return shown
        rewards, terminated, truncated = rest
        over = bool(terminated[env_id]), bool(truncated[env_id])
        final = plain(facade.final_observations[env_id]) if any(over) else None
        return {**shown, "reward": plain(rewards[env_id]), "over": over, "final": final}

    def expected(self, moment: Moment) -> Read:
        final = moment.observed if moment.final is None else moment.final
        return {
            "observation": np.concatenate([*observations(moment.observed, moment).values()]),
            "info": moment.infos,
            "reward": float(sum(moment.rewards.values())),
            "over": moment.over,
            "final": np.concatenate([*observations(final, moment).values()]) if any(moment.over) else None,
        }


class TestOwnFacade(Promises):
    driver = JointDriver()


def test_it_is_short():
    assert len(FACADE.strip().splitlines()) <= 40
