"""A pool in EnvPool's layout, for a game whose players join and leave; EnvPool's wheels have no such task.

The players at a time follow from the numbers of environment and player. There is one row per player;
`players.env_id` is its environment. As in EnvPool, an array of an undeclared shape or dtype ends the process.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium import spaces

PLAYERS = 3
ACTIONS = 5


class Row(NamedTuple):
    """The results of one player."""

    seen: np.ndarray
    reward: float
    leaves: bool


class Game:
    """One environment of the pool."""

    def __init__(self, env_id: int) -> None:
        self.env_id, self.length = env_id, 4 + env_id % 3
        self.reset()

    def reset(self) -> None:
        self.moment, self.done = 0, {}

    def step(self, actions: dict[int, int]) -> None:
        self.moment, self.done = self.moment + 1, actions

    @property
    def over(self) -> bool:
        return self.moment == self.length

    @property
    def truncated(self) -> bool:
        return self.over and self.env_id % 2 == 1

    def players(self) -> dict[int, Row]:
        """Present players by number. From the fifth step on there may be none."""
        rows = {}
        for player in range(PLAYERS):
            comes, leaves = player % 2, 2 + player + self.env_id % 2
            if comes <= self.moment <= leaves:
                action = self.done.get(player, 0)
                seen = np.array([self.env_id, player, self.moment, action], np.float32)
                rows[player] = Row(seen, 0.5 * action + player, self.moment == leaves)
        return rows


def spec(dtype: Any, shape: list[int]) -> Any:
    return SimpleNamespace(dtype=dtype, shape=shape)


class Pool:
    """A pool of environments.

    Args:
        num_envs: The number of environments.
        batch_size: The number of results per batch; never fewer, as in EnvPool with several players. If it is less than
            `num_envs`, the environment that was sent to last comes first.
        named: Whether the infos have `players.id` and `players.done`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    render_mode = None
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def __init__(self, num_envs: int, batch_size: int | None = None, named: bool = True) -> None:
        self.config = {"num_envs": num_envs, "batch_size": batch_size or num_envs, "max_num_players": PLAYERS}
        self.named = named
        self.copies = [Game(env_id) for env_id in range(num_envs)]
        self.ready: list[int] = []
        states = {
            "info:env_id": spec(np.int32, []),
            "info:players.env_id": spec(np.int32, [-1]),
            "info:score": spec(np.int32, []),
            "elapsed_step": spec(np.int32, []),
            "done": spec(np.bool_, []),
            "reward": spec(np.float32, [-1]),
            "trunc": spec(np.bool_, []),
            "obs": spec(np.float32, [-1, 4]),
        }
        actions = {
            "env_id": spec(np.int32, []),
            "players.env_id": spec(np.int32, [-1]),
            "players.action": spec(np.int32, [-1]),
        }
        of_players = {"env_id": spaces.Box(0, 9, (), np.int32), "action": spaces.Discrete(ACTIONS)}
        if named:
            states |= {"info:players.id": spec(np.int32, [-1]), "info:players.done": spec(np.bool_, [-1])}
            actions["players.id"] = spec(np.int32, [-1])
            of_players["id"] = spaces.Discrete(PLAYERS)
        self._state_keys, self._action_keys = [*states], [*actions]
        self.spec = SimpleNamespace(state_array_spec=states, action_array_spec=actions)
        one = spaces.Discrete(ACTIONS)
        whole = spaces.Dict({"env_id": spaces.Box(0, 9, (), np.int32), "players": spaces.Dict(of_players)})
        self.action_space = whole if named else one

    def _reset(self, env_ids: np.ndarray) -> None:
        self._begin(env_ids)
        for env_id in env_ids.tolist():
            self.copies[env_id].reset()

    def _send(self, arrays: list[np.ndarray]) -> None:
        arguments = dict(zip(self._action_keys, arrays, strict=True))
        self._begin(arguments["env_id"])
        whose, actions = arguments["players.env_id"], arguments["players.action"]
        rows = sum(len(self.copies[env_id].players()) for env_id in arguments["env_id"].tolist())
        for array in (whose, actions, arguments.get("players.id", whose)):
            assert (array.dtype, array.shape) == (np.int32, (rows,))
        for env_id in arguments["env_id"].tolist():
            copy, own = self.copies[env_id], whose == env_id
            there = [*copy.players()]
            if self.named:
                assert arguments["players.id"][own].tolist() == there
            if copy.over:
                copy.reset()
            else:
                copy.step(dict(zip(there, actions[own].tolist(), strict=True)))

    def _begin(self, env_ids: np.ndarray) -> None:
        assert env_ids.dtype == np.int32
        assert not {*env_ids.tolist()} & {*self.ready}
        whole = self.config["batch_size"] == len(self.copies)
        self.ready += env_ids.tolist() if whole else env_ids.tolist()[::-1]

    def _recv(self) -> list[np.ndarray]:
        size = self.config["batch_size"]
        assert len(self.ready) >= size, "this would wait for ever"
        ids, self.ready = self.ready[:size], self.ready[size:]
        copies = [self.copies[env_id] for env_id in ids]
        rows = [(copy.env_id, player, row) for copy in copies for player, row in copy.players().items()]
        values: dict[str, Any] = {
            "info:env_id": ids,
            "info:players.env_id": [env_id for env_id, _, _ in rows],
            "info:score": [10 * copy.moment for copy in copies],
            "elapsed_step": [copy.moment for copy in copies],
            "done": [copy.over for copy in copies],
            "reward": [row.reward for _, _, row in rows],
            "trunc": [copy.truncated for copy in copies],
            "obs": np.array([row.seen for _, _, row in rows]).reshape(-1, 4),
            "info:players.id": [player for _, player, _ in rows],
            "info:players.done": [row.leaves for _, _, row in rows],
        }
        specs = self.spec.state_array_spec
        return [np.array(values[name], specs[name].dtype) for name in self._state_keys]
