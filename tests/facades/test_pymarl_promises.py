"""`PyMARLConnections` in the table of promises: messages of each environment, in place of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.promises.driver import DISABLED, Driver, Read, plain
from helpers.promises.games import AGENTS, TERMINATED, Script
from helpers.promises.loop import ByAgent, Moment
from helpers.promises.table import ENVS, Promises

from marl_parallel import ParallelEnv
from marl_parallel.vector import PyMARLConnections

GAMES = {"limit": Script("team"), "victory": Script("team", end=TERMINATED, length=2)}


class PyMARLDriver(Driver):
    """Its replies are lists with a dict for each environment; None for those that were not reset."""

    modes = (DISABLED,)
    """The runner sends `reset` for each new episode."""
    games = tuple(GAMES)
    """Games with PyMARL's interface: their teams have one reward, masks and a state."""
    restarted_games = pickled_games = tuple(GAMES)
    masked_games = vector_games = ()
    """Masks are a part of each reply; its rewards are one number, or a list with one for each agent."""
    refuses_reset_in_flight = False
    """The runner may send a reset before it has received the reply to a step; replies come in this order."""
    resets_at_once = True
    """An environment that is over has no step."""
    waits = takes_options = False
    """Its calls are messages: replies are waited for by `poll(timeout)`, and `reset` has no arguments."""
    copies = True
    saved_games = tuple(GAMES)

    def script(self, game: str) -> Script:
        return GAMES[game]

    def make(self, env: ParallelEnv) -> PyMARLConnections:
        return PyMARLConnections(env)

    def reset(self, facade: PyMARLConnections, env_ids: list[int] | None = None) -> Any:
        ids = range(ENVS) if env_ids is None else env_ids
        for env_id in ids:
            facade[env_id].send(("reset", None))
        replies: list[Any] = [None] * ENVS
        for env_id in ids:
            reply = facade[env_id].recv()
            replies[env_id] = facade[env_id].recv() if "reward" in reply else reply  # of a step before
        return replies

    def actions(self, facade: PyMARLConnections, actions: list[ByAgent]) -> Any:
        return [[of_env[agent] for agent in AGENTS] for of_env in actions]

    def step_with(self, facade: PyMARLConnections, actions: Any) -> Any:
        for connection, of_env in zip(facade, actions):
            connection.send(("step", of_env))
        return [connection.recv() for connection in facade]

    def send(self, facade: PyMARLConnections, actions: list[ByAgent]) -> None:
        for connection, of_env in zip(facade, self.actions(facade, actions)):
            connection.send(("step", of_env))

    def receive(self, facade: PyMARLConnections) -> Any:
        return [connection.recv() for connection in facade]

    steps_some = True

    def step_some(self, facade: PyMARLConnections, actions: dict[int, ByAgent]) -> tuple[Any, list[int]]:
        for env_id, of_env in actions.items():
            facade[env_id].send(("step", [of_env[agent] for agent in AGENTS]))
        latest = [*actions][-1]  # its reply is left for the next call
        replies = {one.env_id: one.recv() for one in facade if one.poll() and one.env_id != latest}
        return replies, [*replies]

    def load(self, facade: PyMARLConnections, states: list[bytes], env_ids: list[int] | None = None) -> Any:
        replies = facade.load_state(states, env_ids)
        return dict(zip(range(ENVS) if env_ids is None else env_ids, replies))

    def wrong_actions(self, facade: PyMARLConnections) -> list[Any]:
        return [[[0, 0]] * 3, [None] * 3, [["a", "b", "c"]] * 3]

    def read(self, facade: PyMARLConnections, replies: Any, env_id: int) -> Read:
        return plain(replies[env_id])

    def expected(self, moment: Moment) -> Read:
        """A restart is an end at the limit of steps, which repeats the reply before it."""
        shown = moment
        if moment.interrupted:
            assert moment.before is not None
            shown = moment.before
        info = {"episode_limit": True, "restarted": True} if moment.interrupted else moment.infos.get("__common__", {})
        return {
            "obs": np.stack([shown.observed[agent] for agent in AGENTS]),
            "state": shown.state,
            "avail_actions": np.array([shown.masks[agent] for agent in AGENTS], np.int64),
            "reward": moment.rewards.get(AGENTS[0], 0.0),
            "terminated": moment.is_over,
            "info": info,
        }


class TestPyMARLConnections(Promises):
    driver = PyMARLDriver()
