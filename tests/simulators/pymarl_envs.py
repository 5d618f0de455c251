"""Small simulators with the methods of PyMARL's `MultiAgentEnv`, and a plain loop that reads them as its workers do.

Each has deaths, masks, a state and a limit of steps; they differ in what `reset` and `step` return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

AGENTS = ["agent_0", "agent_1", "agent_2"]
N_AGENTS, N_ACTIONS, OBS, STATE = 3, 6, 7, 11
NO_OP = [1, 0, 0, 0, 0, 0]


class Skirmish:
    """As SMAC: `reset` returns (observations, state), `step` (reward, terminated, info).

    A living soldier must not choose "no-op", and a dead one has nothing else, as SMAC asserts. The first soldier dies
    at a random time; battles end when all are dead, or at the limit.
    """

    def __init__(self, seed: int | None = None, episode_limit: int = 9) -> None:
        self.rng = np.random.default_rng(seed)
        self.n_agents, self.episode_limit = N_AGENTS, episode_limit
        self.battles, self.limits, self.replays = 0, 0, 0
        self.time = -1

    def get_env_info(self) -> dict[str, Any]:
        return {
            "state_shape": self.get_state_size(), "obs_shape": self.get_obs_size(),
            "n_actions": self.get_total_actions(), "n_agents": self.n_agents, "episode_limit": self.episode_limit,
        }  # fmt: skip

    def get_obs_size(self) -> Any:
        return OBS

    def get_state_size(self) -> Any:
        return STATE

    def get_total_actions(self) -> int:
        return N_ACTIONS

    def begin(self) -> None:
        self.time = 0
        self.deaths = self.rng.integers(2, self.episode_limit + 6, N_AGENTS)
        self.noise = self.rng.normal(size=(N_AGENTS, OBS)).astype(np.float32)
        self.total = 0

    def is_alive(self, place: int) -> bool:
        return bool(self.time < self.deaths[place])

    def get_obs(self) -> Any:
        return [
            self.noise[place] + self.time if self.is_alive(place) else np.zeros(OBS, np.float32)
            for place in range(N_AGENTS)
        ]

    def get_state(self) -> Any:
        state = np.full(STATE, self.time, np.float32)
        state[:N_AGENTS] = self.deaths - self.time
        state[-1] = self.total
        return state

    def get_avail_agent_actions(self, place: int) -> Any:
        if not self.is_alive(place):
            return [*NO_OP]
        return [0, 1, *(int((self.time + place + action) % 3 > 0) for action in range(N_ACTIONS - 2))]

    def get_avail_actions(self) -> Any:
        return [self.get_avail_agent_actions(place) for place in range(N_AGENTS)]

    def advance(self, actions: Any) -> tuple[float, bool, bool]:
        """One step: the reward, whether the battle is over, and whether the limit has been reached."""
        assert isinstance(actions, np.ndarray), "PyMARL's runners send arrays"
        assert actions.shape == (N_AGENTS,)
        assert actions.dtype.kind == "i"
        for place, action in enumerate(actions):
            assert self.get_avail_agent_actions(place)[action], f"agent {place} cannot do {action} at {self.time}"
        self.time += 1
        self.total += sum((place + 1) * int(action) for place, action in enumerate(actions))
        lost = not any(map(self.is_alive, range(N_AGENTS)))
        over = lost or self.time >= self.episode_limit
        self.battles += over
        self.limits += over and not lost
        return self.total / 7, lost, over and not lost

    def reset(self) -> Any:
        self.begin()
        return self.get_obs(), self.get_state()

    def step(self, actions: Any) -> Any:
        reward, lost, limit = self.advance(actions)
        info = {"battle_won": False, "dead_allies": N_AGENTS - sum(map(self.is_alive, range(N_AGENTS)))}
        return reward, lost or limit, {**info, "episode_limit": True} if limit else info

    def get_stats(self) -> dict[str, float]:
        return {"battles_game": self.battles, "timeouts": self.limits}

    def save_replay(self) -> None:
        self.replays += 1

    def seed(self, seed: int | None = None) -> Any:
        self.rng = np.random.default_rng(seed)
        return [seed]

    def render(self) -> None:
        """Draws in a window of its own."""

    def close(self) -> None:
        """Frees nothing."""


class Wrapped(Skirmish):
    """As EPyMARL's wrappers: `reset(seed, options)` returns (observations, info), `step` five values; not one space.

    Masks are arrays of floats, as SMAClite's. The limit is the truncated flag, as of Gymnasium's `TimeLimit`.
    """

    def get_avail_actions(self) -> Any:
        return [np.array(mask, np.float64) for mask in super().get_avail_actions()]

    def reset(self, seed: int | None = None, options: dict | None = None) -> Any:
        if seed is not None:
            self.seed(seed)
        self.begin()
        return self.get_obs(), {"weather": 3.0} if options is None else dict(options)

    def step(self, actions: Any) -> Any:
        reward, lost, limit = self.advance(actions)
        return tuple(self.get_obs()), reward, lost, limit, {}


class Independent(Wrapped):
    """As EPyMARL with `common_reward=False`: a list of rewards, and observations of 64-bit floats."""

    def get_obs(self) -> Any:
        return [seen.astype(np.float64) for seen in super().get_obs()]

    def step(self, actions: Any) -> Any:
        seen, reward, lost, limit, info = super().step(actions)
        return seen, [reward, -reward, float(actions[2])], lost, limit, info


class Silent(Skirmish):
    """`reset` returns nothing; observations and masks are one array for all, the reward an array of one."""

    def get_obs(self) -> Any:
        return np.stack(super().get_obs())

    def get_avail_actions(self) -> Any:
        return np.array(super().get_avail_actions(), bool)

    def reset(self) -> None:
        self.begin()

    def step(self, actions: Any) -> Any:
        reward, over, info = super().step(actions)
        return np.array([reward]), np.bool_(over), info


class Forwarding:
    """A wrapper of one's own that forwards what it lacks, as SMACv2's does."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)


class Gymma:
    """As EPyMARL's wrapper of the same name around Gymnasium's environments with lists; it has no spaces of its own."""

    def __init__(self, key: str, seed: int | None, common_reward: bool) -> None:
        self._env = gymnasium.wrappers.TimeLimit(gymnasium.make(key), 30)
        self.n_agents, self.common_reward = self._env.unwrapped.n_agents, common_reward  # type: ignore[attr-defined]
        self.reset(seed)

    def get_env_info(self) -> dict[str, Any]:
        acts, seen = self._env.action_space[0], self._env.observation_space[0]  # type: ignore[index]
        sizes = {"obs_shape": seen.shape[0], "state_shape": seen.shape[0] * self.n_agents, "n_actions": acts.n}
        return {**sizes, "n_agents": self.n_agents, "episode_limit": 30}

    def get_obs(self) -> Any:
        return self._seen

    def get_state(self) -> Any:
        return np.concatenate(self._seen)

    def get_avail_actions(self) -> Any:
        return [[1] * space.n for space in self._env.action_space]  # type: ignore[attr-defined]

    def reset(self, seed: int | None = None, options: dict | None = None) -> Any:
        self._seen, info = self._env.reset(seed=seed, options=options)
        return self._seen, info

    def step(self, actions: Any) -> Any:
        self._seen, rewards, done, truncated, info = self._env.step([int(action) for action in actions])
        return self._seen, float(sum(rewards)) if self.common_reward else rewards, done, truncated, info  # type: ignore[arg-type]


class PlainLoop:
    """Simulators in a plain loop, stepped and read as by PyMARL's workers; episodes follow each other.

    `observations`, `states` and `masks` are the latest ones of each, as lists of lists or arrays.
    """

    def __init__(self, make: Any, seeds: Sequence[int], reset_seeds: bool) -> None:
        self.simulators = [make(seed) for seed in seeds]
        self.over = [False] * len(seeds)
        self.observations: list[Any] = [None] * len(seeds)
        self.states, self.masks = [*self.observations], [*self.observations]
        for place, seed in enumerate(seeds):
            self.reset(place, {"seed": seed} if reset_seeds else {})

    def reset(self, place: int, keywords: dict[str, Any]) -> None:
        self.simulators[place].reset(**keywords)
        self.over[place] = False
        self.read(place)

    def read(self, place: int) -> None:
        simulator = self.simulators[place]
        self.states[place] = np.array(simulator.get_state(), np.float32)
        self.masks[place] = np.array(simulator.get_avail_actions()).astype(bool)
        self.observations[place] = np.array(simulator.get_obs(), np.float32)

    def step(self, place: int, actions: Any) -> tuple[Any, bool, bool, dict[str, Any]]:
        """Reward, terminated, truncated, info, as the interface describes them."""
        result = self.simulators[place].step(np.array(actions))
        self.read(place)
        if len(result) == 5:
            _, reward, terminated, truncated, info = result
        else:
            reward, terminated, info = result
            truncated = bool(terminated and info.get("episode_limit", False))
            terminated = bool(terminated) and not truncated
        self.over[place] = terminated or truncated
        return reward, terminated, truncated, info

    def choose(self, rng: np.random.Generator) -> list[list[int]]:
        """A random allowed action of each agent, for all simulators."""
        return [[int(rng.choice(np.flatnonzero(mask))) for mask in masks] for masks in self.masks]
