"""Teams of different sizes: the agents of an environment depend on an argument of its constructor."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

SIGHT = spaces.Box(-100, 100, (3,), np.float32)
MOVES = spaces.Discrete(4)


def names(*places: int) -> list[str]:
    return [f"agent_{place}" for place in places]


class Team(gymnasium.Env):
    """Dict rules. Rewards and observations depend on the seed, the actions and the time; agents may die and come back.

    Args:
        agents: The agents, in the environment's own order.
        length: The steps of an episode.
        dies: The agent that dies in the third step, if there is one.
        returns: Whether it comes back in the fifth step.
    """

    def __init__(
        self, agents: list[str], length: int = 7, dies: str | None = None, *, returns: bool = False, seed: int = 0
    ) -> None:
        self.possible_agents, self.length, self.dies, self.returns = agents, length, dies, returns
        self.observation_space = spaces.Dict([(agent, SIGHT) for agent in agents])
        self.action_space = spaces.Dict([(agent, MOVES) for agent in agents])
        self.state_space = spaces.Box(-1000, 1000, (len(agents), 2), np.float64)
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.sums = 0, dict.fromkeys(self.possible_agents, 0.0)
        return self.seen(), {agent: {"born": place} for place, agent in enumerate(self.possible_agents)}

    def alive(self) -> list[str]:
        is_away = self.time >= 3 and not (self.returns and self.time >= 5)
        return [agent for agent in self.possible_agents if not (is_away and agent == self.dies)]

    def seen(self) -> dict:
        return {agent: self.rng.normal(size=3).astype(np.float32) for agent in self.alive()}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.time += 1
        for agent, action in actions.items():
            self.sums[agent] += float(action)
        observations, over = self.seen(), self.time >= self.length
        if self.time == 3 and self.dies in self.possible_agents:
            observations[self.dies] = np.full(3, 9.0, np.float32)
        terminateds = {agent: agent == self.dies and self.time == 3 for agent in observations}
        rewards = {agent: self.sums[agent] for agent in observations}
        infos = {agent: {"time": self.time} for agent in observations if self.time % 2}
        return observations, rewards, {**terminateds, "__all__": over}, {"__all__": False}, infos

    def state(self) -> np.ndarray:
        return np.array([[self.time, self.sums[agent]] for agent in self.possible_agents], np.float64)


class PettingZooTeam(PettingZooEnv):
    """The same with PettingZoo's rules, without a return."""

    metadata = {"name": "team"}  # noqa: RUF012

    def __init__(self, agents: list[str], length: int = 7, dies: str | None = None, *, seed: int = 0) -> None:
        self.team = Team(agents, length, dies, seed=seed)
        self.possible_agents, self.agents = agents, []
        self.observation_spaces = dict.fromkeys(agents, SIGHT)
        self.action_spaces = dict.fromkeys(agents, MOVES)

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, _ = self.team.reset(seed=seed)
        self.agents = [*self.possible_agents]
        return observations, {agent: {} for agent in observations}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, terminateds, _, _ = self.team.step(actions)
        over = terminateds.pop("__all__")
        truncateds = dict.fromkeys(observations, over)
        self.agents = [agent for agent in observations if not (terminateds[agent] or over)]
        return observations, rewards, terminateds, truncateds, {agent: {} for agent in observations}


class Reporting(Team):
    """With action masks in infos, and rewards that are vectors."""

    def __init__(self, agents: list[str], **arguments: Any) -> None:
        super().__init__(agents, **arguments)
        self.reward_space = spaces.Dict([(agent, spaces.Box(-99, 99, (2,), np.float64)) for agent in agents])

    def with_masks(self, infos: dict) -> dict:
        masks = {agent: np.ones(4, np.int8) for agent in self.alive()}
        for place, mask in enumerate(masks.values()):
            mask[(self.time + place) % 4] = 0
        return {agent: {**infos.get(agent, {}), "action_mask": mask} for agent, mask in masks.items()}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, infos = super().reset(seed=seed, options=options)
        return observations, self.with_masks(infos)

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        observations, rewards, terminateds, truncateds, infos = super().step(actions)
        vectors = {agent: np.array([reward, self.time]) for agent, reward in rewards.items()}
        return observations, vectors, terminateds, truncateds, self.with_masks(infos)


class _Numbered:
    """Agents are numbered, not named. The first one may die after three steps."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.n_agents, self.rng = size, np.random.default_rng(seed)

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def begin(self) -> None:
        self.time, self.total, self.length = 0, 0, int(self.rng.integers(4, 8))

    def look(self) -> list[Any]:
        return [*(self.rng.normal(size=(self.n_agents, 3)).astype(np.float32) + self.total)]

    def move(self, actions: Any) -> bool:
        assert len(actions) == self.n_agents
        self.time += 1
        self.total += sum((place + 1) * int(np.asarray(action).item()) for place, action in enumerate(actions))
        return self.time >= self.length


class Foragers(_Numbered, gymnasium.Env):
    """As level-based foraging: tuples and lists."""

    def __init__(self, size: int, seed: int = 0) -> None:
        super().__init__(size, seed)
        self.observation_space: Any = spaces.Tuple([SIGHT] * size)
        self.action_space: Any = spaces.Tuple([MOVES] * size)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        if seed is not None:
            self.seed(seed)
        self.begin()
        return tuple(self.look()), {}

    def step(self, actions: Any) -> Any:
        over = self.move(actions)
        return tuple(self.look()), [self.total + place for place in range(self.n_agents)], over, False, {}


class Patrol(_Numbered):
    """With PyMARL's interface; states have one size for all teams."""

    episode_limit = 9

    def get_env_info(self) -> dict[str, Any]:
        sizes = {"state_shape": 2, "obs_shape": 3, "n_actions": 4}
        return {**sizes, "n_agents": self.n_agents, "episode_limit": self.episode_limit}

    def get_obs(self) -> Any:
        return self.seen

    def get_state(self) -> Any:
        return np.array([self.time, self.total], np.float32)

    def get_avail_actions(self) -> Any:
        is_dead = self.time > 3
        return [[1, 0, 0, 0] if is_dead and not place else [1, 1, self.time % 2, 1] for place in range(self.n_agents)]

    def get_total_actions(self) -> int:
        return 4

    def reset(self) -> Any:
        self.begin()
        self.seen = self.look()
        return self.seen, self.get_state()

    def step(self, actions: Any) -> Any:
        over = self.move(actions)
        self.seen = self.look()
        return float(self.total), over, {}


class Convoy(_Numbered):
    """With on-policy's interface: four values, one-hot actions from its runner."""

    def __init__(self, size: int, seed: int = 0) -> None:
        super().__init__(size, seed)
        self.observation_space = [SIGHT] * size
        self.share_observation_space = [spaces.Box(-100, 100, (3 * size,), np.float32)] * size
        self.action_space = [MOVES] * size

    def reset(self) -> Any:
        self.begin()
        return self.look()

    def step(self, actions: Any) -> Any:
        over = self.move([np.argmax(one) if np.size(one) > 1 else one for one in actions])
        return self.look(), [[float(self.total)]] * self.n_agents, [over] * self.n_agents, [{}] * self.n_agents
