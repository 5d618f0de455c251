"""Wrappers of simulators whose API is of no kind that this package knows: each makes a dict environment of one.

`real.py` names them as constructors. The libraries are imported when one is made.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class DictEnv:
    """A dict environment; subclasses set agents and spaces."""

    def __init__(self, agents: list[Any], observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
        self.possible_agents = agents
        self.observation_space = spaces.Dict([(agent, observation_space) for agent in agents])
        self.action_space = spaces.Dict([(agent, action_space) for agent in agents])

    def close(self) -> None:
        pass

    def flags(self, flag: bool) -> dict[Any, bool]:
        return {**dict.fromkeys(self.possible_agents, flag), "__all__": flag}


class Lasers(DictEnv):
    """The Laser Learning Environment: masks in infos, one reward for all agents."""

    def __init__(self, level: int) -> None:
        import lle

        self.env = lle.level(level).obs_type("layered").build()
        agents = [f"agent_{place}" for place in range(self.env.n_agents)]
        seen = spaces.Box(-1, 1, self.env.observation_shape, np.float32)
        super().__init__(agents, seen, spaces.Discrete(self.env.n_actions))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        observation, _ = self.env.reset(seed=seed)
        return self.by_agent(observation)

    def by_agent(self, observation: Any) -> tuple[dict, dict]:
        masks = [{"action_mask": np.array(mask, np.int8)} for mask in observation.available_actions]
        seen = np.array(observation.data, np.float32)
        return dict(zip(self.possible_agents, seen)), dict(zip(self.possible_agents, masks))

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        step = self.env.step([int(actions[agent]) for agent in self.possible_agents])
        observations, infos = self.by_agent(step.obs)
        rewards = dict.fromkeys(self.possible_agents, float(step.reward[0]))
        return observations, rewards, self.flags(bool(step.done)), self.flags(bool(step.truncated)), infos


class Kitchen(DictEnv):
    """Overcooked-AI: observations are the grid's layers."""

    def __init__(self, layout: str, horizon: int) -> None:
        from overcooked_ai_py.mdp.actions import Action
        from overcooked_ai_py.mdp.overcooked_env import OvercookedEnv
        from overcooked_ai_py.mdp.overcooked_mdp import OvercookedGridworld

        self.names = Action.INDEX_TO_ACTION
        self.grid = OvercookedGridworld.from_layout_name(layout)
        self.env = OvercookedEnv.from_mdp(self.grid, horizon=horizon)
        shape = np.shape(self.layers()["cook_0"])
        super().__init__(["cook_0", "cook_1"], spaces.Box(0, 255, shape, np.float32), spaces.Discrete(len(self.names)))

    def layers(self) -> dict:
        seen = self.grid.lossless_state_encoding(self.env.state)
        return {f"cook_{place}": np.array(layers, np.float32) for place, layers in enumerate(seen)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.env.reset()
        return self.layers(), {agent: {} for agent in self.possible_agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        _, reward, done, _ = self.env.step(tuple(self.names[actions[agent]] for agent in self.possible_agents))
        infos: dict = {agent: {} for agent in self.possible_agents}
        rewards = dict.fromkeys(self.possible_agents, float(reward))
        return self.layers(), rewards, self.flags(False), self.flags(bool(done)), infos


class Cards(DictEnv):
    """A game of RLCard: only the player whose turn it is gets an observation, and acts."""

    def __init__(self, game: str, seed: int) -> None:
        import rlcard

        self.env = rlcard.make(game, config={"seed": seed})
        seen = spaces.Box(0, 255, tuple(self.env.state_shape[0]), np.float32)
        super().__init__([*range(self.env.num_players)], seen, spaces.Discrete(self.env.num_actions))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        if seed is not None:
            self.env.seed(seed)
        return self.turn(*self.env.reset())

    def turn(self, state: dict, player: int) -> tuple[dict, dict]:
        mask = np.zeros(self.env.num_actions, np.int8)
        mask[[*state["legal_actions"]]] = 1
        return {player: np.array(state["obs"], np.float32)}, {player: {"action_mask": mask}}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        (action,) = actions.values()
        observations, infos = self.turn(*self.env.step(int(action)))
        over = bool(self.env.is_over())
        payoffs = map(float, self.env.get_payoffs()) if over else [0.0] * self.env.num_players
        return observations, dict(enumerate(payoffs)), self.flags(over), self.flags(False), infos


class Jax(DictEnv):
    """An environment of JaxMARL: pure functions of a key and a state."""

    def __init__(self, name: str) -> None:
        import jax
        import jaxmarl

        env = jaxmarl.make(name)
        # Its `step` would begin the next episode.
        self.random, self.begin, self.advance = jax.random, jax.jit(env.reset), jax.jit(env.step_env)
        self.key, agents = self.random.PRNGKey(0), env.agents
        seen, acted = env.observation_space(agents[0]), env.action_space(agents[0])
        super().__init__(agents, spaces.Box(-np.inf, np.inf, seen.shape, np.float32), spaces.Discrete(int(acted.n)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        if seed is not None:
            self.key = self.random.PRNGKey(seed)
        self.key, key = self.random.split(self.key)
        observations, self.game = self.begin(key)
        return self.arrays(observations), {agent: {} for agent in self.possible_agents}

    def arrays(self, observations: dict) -> dict:
        return {agent: np.array(observations[agent], np.float32) for agent in self.possible_agents}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.key, key = self.random.split(self.key)
        observations, self.game, rewards, dones, _ = self.advance(key, self.game, actions)
        given = {agent: float(rewards[agent]) for agent in self.possible_agents}
        infos: dict = {agent: {} for agent in self.possible_agents}
        return self.arrays(observations), given, self.flags(bool(dones["__all__"])), self.flags(False), infos


class ConnectX(DictEnv):
    """Kaggle's Connect X: only the player whose turn it is gets an observation, and acts."""

    def __init__(self) -> None:
        import kaggle_environments

        self.env = kaggle_environments.make("connectx")
        self.columns, cells = (
            self.env.configuration.columns,
            self.env.configuration.columns * self.env.configuration.rows,
        )
        super().__init__([0, 1], spaces.Box(0, 2, (cells,), np.float32), spaces.Discrete(self.columns))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.env.reset(2)
        return self.turn()

    def turn(self) -> tuple[dict, dict]:
        board = np.array(self.env.state[0].observation.board, np.float32)
        mask = (board[: self.columns] == 0).astype(np.int8)
        players = [player for player in self.possible_agents if self.env.state[player].status == "ACTIVE"]
        return dict.fromkeys(players, board), {player: {"action_mask": mask} for player in players}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.env.step([int(actions[player]) if player in actions else None for player in self.possible_agents])
        over = bool(self.env.done)
        rewards = {player: float(self.env.state[player].reward or 0) for player in self.possible_agents}
        observations, infos = self.turn()
        return observations, rewards, self.flags(over), self.flags(False), infos
