"""Small simulators with the interface of the MAPPO and HARL projects, and their workers' loop without processes.

`Particles` and `Pitch` return four values, as on-policy's particle and football environments; `Squad` six, as its SMAC;
`Swimmers` and `Pilots` six, as HARL's continuous ones and its air combat; `Wings` and `Drones` five, as forks without
available actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

AGENTS = ["agent_0", "agent_1", "agent_2"]
K = 3


class OldSpace:
    """Stands for `gym.Space`, of which this environment has no release."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __str__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"


def old(kind: str, module: str = "gym.spaces.space", **attributes: Any) -> Any:
    """A space of OpenAI's gym."""
    base = type("Space", (OldSpace,), {"__module__": "gym.spaces.space"})
    return type(kind, (base,), {"__module__": module})(**attributes)


def old_box(size: int, bound: float = np.inf) -> Any:
    low, high = np.full(size, -bound, np.float32), np.full(size, bound, np.float32)
    return old("Box", low=low, high=high, shape=(size,), dtype=np.dtype(np.float32))


class Simulator:
    """What they have in common: generators, lengths of episodes, noise as observations."""

    obs_size: Sequence[int] = (4, 4, 4)
    limit = 8

    def __init__(self, seed: int | None = None) -> None:
        self.seed(1 if seed is None else seed)
        self.time, self.total = -1, 0.0

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def begin(self) -> None:
        self.time, self.total = 0, 0.0
        self.length = int(self.rng.integers(3, self.limit + 4))
        self.noise = [self.rng.normal(size=size) for size in self.obs_size]

    def look(self) -> list[Any]:
        return [noise + self.time + self.total / 9 for noise in self.noise]

    def move(self, numbers: Any) -> None:
        self.time += 1
        self.total += float(sum((place + 1) * number for place, number in enumerate(numbers)))

    def close(self) -> None:
        """Frees nothing."""


class Particles(Simulator):
    """As on-policy's particle environments: one-hot actions, 64-bit observations, four values, spaces of gym."""

    discrete_action_input = False  # "if true, action is a number, otherwise a one-hot vector"
    limit = 5

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.n = K
        self.observation_space = [old_box(4) for _ in range(K)]
        self.share_observation_space = [old_box(12) for _ in range(K)]
        self.action_space: Any = [old("Discrete", n=5) for _ in range(K)]

    def chosen(self, actions: Any) -> list[int]:
        assert actions.shape == (K, 5)
        assert actions.dtype == np.float64
        assert ((actions == 0) | (actions == 1)).all()
        assert (actions.sum(axis=1) == 1).all()
        return [int(action.argmax()) for action in actions]

    def reset(self) -> Any:
        self.begin()
        return self.look()

    def step(self, actions: Any) -> Any:
        self.move(self.chosen(actions))
        infos = [{"individual_reward": float(place)} for place in range(K)]
        return self.look(), [[self.total]] * K, [self.time >= self.limit] * K, infos


class Speakers(Particles):
    """Particles that move and speak: gym's old MultiDiscrete, with bounds; two one-hot vectors, one after the other."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        space = old("MultiDiscrete", "onpolicy.envs.mpe.multi_discrete", low=np.zeros(2, int), high=np.array([4, 2]))
        self.action_space = [space] * K

    def chosen(self, actions: Any) -> list[int]:
        assert actions.shape == (K, 8)
        assert (actions[:, :5].sum(axis=1) == 1).all()
        assert (actions[:, 5:].sum(axis=1) == 1).all()
        return [int(row[:5].argmax()) * 3 + int(row[5:].argmax()) for row in actions]


class Pitch(Simulator):
    """As on-policy's football: actions as integers `(agents,)`, one info, arrays, the own view as share observation."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.num_agents = K
        self.observation_space = [spaces.Box(-99, 99, (4,), np.float32)] * K
        self.share_observation_space = [spaces.Box(-99, 99, (4,), np.float32)] * K
        self.action_space = [spaces.Discrete(6)] * K

    def reset(self) -> Any:
        self.begin()
        return np.stack(self.look()).astype(np.float32)

    def step(self, actions: Any) -> Any:
        assert actions.shape == (K,)
        assert actions.dtype.kind == "i"
        self.move(actions)
        done = self.time >= self.length
        rewards = np.array([[self.total], [0.5], [-1.0]])
        return (
            np.stack(self.look()).astype(np.float32),
            rewards,
            np.array([done] * K),
            {"score": self.time, "won": done},
        )


class Squad(Simulator):
    """As on-policy's SMAC: plain sizes, deaths, masks, a share observation for each agent, `bad_transition`.

    It has PyMARL's methods, too, as that one.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.n_agents = K
        self.observation_space = [[4, [2, 2], [1, 3]]] * K
        self.share_observation_space = [[9, [3, 3]]] * K
        self.action_space = [old("Discrete", n=5)] * K

    def begin(self) -> None:
        super().begin()
        self.deaths = self.rng.integers(2, self.limit + 5, K)

    def dead(self, place: int) -> bool:
        return bool(self.time >= self.deaths[place])

    def get_env_info(self) -> Any:
        return {"n_agents": K, "n_actions": 5, "obs_shape": 4, "state_shape": 9, "episode_limit": self.limit}

    def get_obs(self) -> Any:
        seen = self.look()
        return [np.zeros(4, np.float32) if self.dead(place) else seen[place].astype(np.float32) for place in range(K)]

    def get_state(self, place: int = -1) -> Any:
        state = np.full(9, self.time, np.float32)
        state[:K], state[-1] = self.deaths, place
        return state

    def get_avail_actions(self) -> Any:
        living = [[0, 1, *(int((self.time + place + action) % 3 > 0) for action in range(3))] for place in range(K)]
        return [[1, 0, 0, 0, 0] if self.dead(place) else living[place] for place in range(K)]

    def shares(self) -> Any:
        return [self.get_state(place) for place in range(K)]

    def reset(self) -> Any:
        self.begin()
        return self.get_obs(), self.shares(), self.get_avail_actions()

    def step(self, actions: Any) -> Any:
        numbers = [int(action[0]) for action in actions]
        assert actions.shape == (K, 1)
        masks = self.get_avail_actions()
        for place, number in enumerate(numbers):
            assert masks[place][number], f"agent {place} cannot do {number} at {self.time}"
        self.move(numbers)
        lost = all(map(self.dead, range(K)))
        limit = self.time >= self.limit and not lost
        dones = np.array([lost or limit or self.dead(place) for place in range(K)])
        infos = [{"bad_transition": limit, "won": False, "battles_game": 3} for _ in range(K)]
        return self.get_obs(), self.shares(), [[self.total]] * K, dones, infos, self.get_avail_actions()


class Swimmers(Simulator):
    """As HARL's continuous environments: no masks, observations of different sizes, `bad_transition` at limits only."""

    obs_size = (4, 6, 3)

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.n_agents = K
        self.observation_space = [old_box(size) for size in self.obs_size]
        self.share_observation_space = tuple(old_box(7) for _ in range(K))
        self.action_space = tuple(old_box(2, 1.0) for _ in range(K))

    def shares(self) -> Any:
        state = np.full(7, self.time + self.total)
        return [state for _ in range(K)]

    def reset(self) -> Any:
        self.begin()
        return self.look(), self.shares(), None

    def step(self, actions: Any) -> Any:
        assert np.shape(actions) == (K, 2)
        self.move(np.sum(actions, axis=1))
        limit = self.time >= self.limit
        over = limit or self.time >= self.length
        info = {"bad_transition": True} if limit else {}
        return self.look(), self.shares(), [[np.float64(self.total)]] * K, [over] * K, [info] * K, None


class Pilots(Swimmers):
    """As HARL's air combat: MultiDiscrete actions, one flag for all, arrays `(agents, 1)` of rewards, no masks.

    Its share observations differ in length.
    """

    obs_size = (5, 5, 5)

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.share_observation_space = tuple(spaces.Box(-np.inf, np.inf, (size,), np.float64) for size in (2, 4, 3))
        self.action_space = tuple(spaces.MultiDiscrete([3, 5, 2]) for _ in range(K))

    def shares(self) -> Any:
        return [np.full(size, self.time + self.total) for size in (2, 4, 3)]

    def step(self, actions: Any) -> Any:
        assert actions.shape == (K, 3)
        assert actions.dtype.kind == "i"
        self.move(np.sum(actions, axis=1))
        rewards = np.arange(K, dtype=np.float32).reshape(K, 1) + np.float32(self.total)
        over = bool(self.time >= self.length)
        return np.stack(self.look()), self.shares(), rewards, over, [{"step": self.time}] * K, [None] * K


class Wings(Pilots):
    """As a fork of on-policy for air combat: no available actions at all, arrays `(agents, 1)` of flags, one info."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.share_observation_space = tuple(spaces.Box(-np.inf, np.inf, (6,), np.float64) for _ in range(K))

    def shares(self) -> Any:
        return np.arange(6.0 * K).reshape(K, 6) + self.time + self.total

    def reset(self) -> Any:
        return super().reset()[:2]

    def step(self, actions: Any) -> Any:
        observations, share, rewards, over, _, _ = super().step(actions)
        return observations, share, rewards, np.full((K, 1), over), {"current_step": self.time}


class Drones(Squad):
    """Integers in columns, and one flag for all; the share observation of all agents is one array."""

    def shares(self) -> Any:
        return self.get_state()

    def get_avail_actions(self) -> Any:
        return [[1] * 5] * K

    def reset(self) -> Any:
        return super().reset()[:2]

    def step(self, actions: Any) -> Any:
        observations, share, rewards, _, _, _ = super().step(actions)
        limit = self.time >= self.limit
        infos = [{"bad_transition": limit, "agent": place} for place in range(K)]
        return observations, share, rewards, [limit] * K, infos


class WorkersLoop:
    """Simulators, stepped and reset as by the projects' workers: an episode follows the other in the same step."""

    def __init__(self, make: Any, seeds: Sequence[int]) -> None:
        self.simulators = [make(seed) for seed in seeds]
        self.latest = [self.reset(place) for place in range(len(seeds))]
        """Observations, share observations and available actions of each."""

    def reset(self, place: int) -> tuple[Any, Any, Any]:
        result = self.simulators[place].reset()
        return (*result, None)[:3] if isinstance(result, tuple) else (result, None, None)

    def step(self, place: int, actions: Any) -> tuple[Any, tuple[Any, Any, Any], bool]:
        """Rewards, dones, infos; observations, share observations and masks before a reset; whether it is over."""
        result = self.simulators[place].step(actions)
        if len(result) == 4:
            result = result[0], None, *result[1:], None
        elif len(result) == 5:
            result = *result, None
        observations, share, *outcome, available = result
        last = observations, share, available
        over = bool(np.all(outcome[1]))
        self.latest[place] = self.reset(place) if over else last
        return outcome, last, over
