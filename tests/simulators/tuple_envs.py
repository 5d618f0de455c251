"""Small simulators with the API of LBF, highway-env's multi-agent intersections, POGEMA and ma-gym."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

VIEW = spaces.Box(-np.inf, np.inf, (3,), np.float32)


class Foraging(gymnasium.Env):
    """Like level-based foraging: Tuple spaces, a list of rewards, one flag for all, an empty info."""

    observation_space: Any = spaces.Tuple([VIEW] * 3)
    action_space: Any = spaces.Tuple([spaces.Discrete(4)] * 3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.time, self.total = 0, 0
        self.length = int(self.np_random.integers(4, 8))
        return self.look(), {}

    def look(self) -> Any:
        return tuple(self.np_random.normal(size=(3, 3)).astype(np.float32) + self.total)

    def move(self, actions: Any) -> None:
        assert len(actions) == 3
        self.time += 1
        self.total += sum((place + 1) * int(action) for place, action in enumerate(actions))

    def step(self, actions: Any) -> tuple[Any, ...]:
        self.move(actions)
        return self.look(), [self.total, *map(float, actions[1:])], self.time == self.length, False, {}


class Intersection(Foraging):
    """Like `intersection-multi-agent-v1`: tuples only; a tuple of flags, one truncated flag, a shared info.

    The agents arrive one by one; actions of arrived agents count until the episode is over.
    """

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, Any]:
        seen, _ = super().reset(seed=seed)
        self.arrives = self.np_random.integers(2, 9, 3)
        return seen, {"speed": 10.0}

    def step(self, actions: Any) -> tuple[Any, ...]:
        assert isinstance(actions, tuple)
        self.move(actions)
        rewards = tuple(np.float64(action + self.total) for action in actions)
        terminated = tuple(bool(self.time >= time) for time in self.arrives)
        return self.look(), rewards, terminated, self.time >= 7, {"speed": float(self.total), "late": self.time > 3}


class Cooperative(Foraging):
    """Like `intersection-multi-agent-v0`: one reward and one flag of each kind for all."""

    def step(self, actions: Any) -> tuple[Any, ...]:
        self.move(actions)
        return self.look(), np.float64(self.total), np.bool_(self.time >= 6), self.time >= self.length, {"speed": 1.0}


class Pathfinding(Foraging):
    """Like POGEMA: the spaces of one agent, lists everywhere, an info for each agent; writes into its actions.

    Every step returns the same list of flags, as in ma-gym; rewards are an array.
    """

    observation_space: Any = VIEW
    action_space: Any = spaces.Discrete(4)

    def get_num_agents(self) -> int:
        return 3

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, Any]:
        seen, _ = super().reset(seed=seed)
        self.arrived = [False] * 3
        return [*seen], [{"active": True}] * 3

    def step(self, actions: Any) -> tuple[Any, ...]:
        assert type(actions) is list
        self.move(actions)
        actions[0] = 0
        for place in range(3):
            self.arrived[place] = self.arrived[place] or self.time > 2 * place + 1
        infos = [{"active": not arrived} for arrived in self.arrived]
        return [*self.look()], np.arange(3.0) + self.total, self.arrived, [self.time >= self.length] * 3, infos
