"""An arena in arrays that steps all environments at once: how a simulator such as VMAS becomes a `NativeSimulator`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from marl_parallel.adapters.protocol import Schema
from marl_parallel.sources.native import EnvIds, NativeSimulator, Received

TANKS = ("tank_0", "tank_1")


class Arena(NativeSimulator):
    """Tanks drive as far as their action says; a scout at another place observes the number of actions.

    Args:
        num_envs: The number of environments; environment i starts at i.
    """

    LENGTH: ClassVar[int] = 3
    metadata: ClassVar[dict[str, Any]] = {}
    render_mode = None
    name = "the arena"

    def __init__(self, num_envs: int) -> None:
        self.num_envs = self.batch_size = num_envs
        self.seeds = [0] * num_envs
        self.abandoned = False
        scout = spaces.Dict({"at": spaces.Discrete(num_envs), "seen": spaces.Discrete(100)})
        tank = spaces.Tuple([spaces.Box(-np.inf, np.inf, (), np.float32)])
        go = spaces.Dict({"go": spaces.Discrete(3), "look": spaces.Box(0, 1, (2,), np.float32)})
        self.schema = Schema(
            ["tank_0", "scout", "tank_1"],
            {"tank_0": tank, "scout": scout, "tank_1": tank},
            {"tank_0": spaces.Discrete(5), "scout": go, "tank_1": spaces.Discrete(5)},
            None,
        )
        self._at = np.zeros((num_envs, 2), np.float32)
        self._moment = np.zeros(num_envs, np.int32)

    def reset(self, env_ids: EnvIds) -> None:
        self._at[env_ids], self._moment[env_ids] = env_ids[:, None], 0
        self._ids, self._rewards = env_ids, np.zeros((len(env_ids), 3))

    def send(self, actions: list[Any], env_ids: EnvIds) -> None:
        tanks, scouts = actions
        began = self._moment[env_ids] == self.LENGTH
        rewards = np.stack([tanks[:, 0], scouts["go"][:, 0] + scouts["look"][:, 0].sum(axis=1), tanks[:, 1]], axis=1)
        self._at[env_ids] += tanks
        self._moment[env_ids] += 1
        rewards[began] = 0
        self.reset(env_ids[began])
        self._ids, self._rewards = env_ids, rewards

    def receive(self) -> Received:
        ids = self._ids
        over = self._moment[ids] == self.LENGTH
        of_agents = np.repeat(over[:, None], 3, axis=1)
        tanks, scouts = (self._at[ids],), {"at": ids[:, None].copy(), "seen": 2 * self._moment[ids][:, None]}
        return Received(
            ids, [tanks, scouts], self._rewards, of_agents, np.zeros_like(of_agents), over, np.zeros_like(over),
            self._moment[ids], None, {}, {},
        )  # fmt: skip

    def render(self) -> Sequence[Any]:
        return [None] * self.num_envs

    def attribute(self, name: str) -> Any:
        return getattr(self, name)

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        self.abandoned = True
