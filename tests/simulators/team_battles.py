"""Teams that fight: simulators with deaths, action masks, share observations and a limit, as MAPPO and HARL have them.

`TeamBattle` has HARL's interface, with lists. `DictBattle` and `ParallelBattle` are the same battles under dict rules
and under PettingZoo's. A battle refuses actions that its masks forbid.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

SIZE, ACTIONS, LIMIT = 3, 5, 7
NO_OP, REST = 0, 1
AGENTS = [f"agent_{number}" for number in range(SIZE)]
OBSERVATION, STATE = spaces.Box(-9, 9, (6,), np.float32), spaces.Box(-9, 9, (8,), np.float32)


class BattleError(Exception):
    """A scheduled fault."""


class TeamBattle:
    """A team of three against three enemies; the dead can do nothing, and stay in all lists.

    Args:
        seed: Of its own generator.
        fails_at: The step since its construction, counted from 1, that raises; None for none.
    """

    def __init__(self, seed: int, fails_at: int | None = None) -> None:
        self.n_agents = SIZE
        self.observation_space = [OBSERVATION] * SIZE
        self.share_observation_space = [STATE] * SIZE
        self.action_space = [spaces.Discrete(ACTIONS)] * SIZE
        self.rng, self.fails_at, self.steps = np.random.default_rng(seed), fails_at, 0
        self.won = self.battles = 0

    def reset(self) -> tuple[list[Any], list[Any], list[Any]]:
        self.time = 0
        self.health, self.enemies = np.full(SIZE, 3.0), np.full(SIZE, 4.0)
        self.noise = self.rng.normal(size=(SIZE, 4)).astype(np.float32)
        return self.observe(), self.share(), self.masks()

    def step(self, actions: Any) -> tuple[Any, ...]:
        self.steps += 1
        if self.steps == self.fails_at:
            raise BattleError(f"step {self.steps}")
        chosen = np.asarray(actions).reshape(SIZE).astype(int)
        for mask, action in zip(self.masks(), chosen):
            assert mask[action], f"{chosen} is not allowed by {self.masks()}"
        self.time += 1
        before = self.enemies.sum()
        for action in chosen[chosen > REST]:
            self.enemies[action - 2] = max(self.enemies[action - 2] - 1, 0)
        shots = self.rng.random(SIZE) < 0.3 * (self.enemies > 0)
        self.health = np.maximum(
            self.health - np.bincount(self.rng.integers(SIZE, size=SIZE)[shots], minlength=SIZE), 0
        )
        self.noise = self.rng.normal(size=(SIZE, 4)).astype(np.float32)
        won, lost = not self.enemies.any(), not self.health.any()
        at_limit = self.time == LIMIT and not (won or lost)
        over = won or lost or at_limit
        self.battles, self.won = self.battles + over, self.won + won
        reward = float(before - self.enemies.sum()) / 4 + 5.0 * won
        dones = [bool(over or health == 0) for health in self.health]
        infos = [{"bad_transition": at_limit, "battles_won": self.won, "health": float(h)} for h in self.health]
        return self.observe(), self.share(), [[reward]] * SIZE, dones, infos, self.masks()

    def observe(self) -> list[np.ndarray]:
        common = [self.time / LIMIT]
        return [np.array([health, *common, *noise], np.float32) for health, noise in zip(self.health, self.noise)]

    def share(self) -> list[np.ndarray]:
        """One for each agent, which begins with its number."""
        return [np.array([number, *self.health, *self.enemies, self.time], np.float32) for number in range(SIZE)]

    def masks(self) -> list[list[int]]:
        attacks = [int(enemy > 0) for enemy in self.enemies]
        return [[0, 1, *attacks] if health > 0 else [1, 0, 0, 0, 0] for health in self.health]

    def close(self) -> None:
        pass


class DictBattle(gymnasium.Env):
    """Under dict rules: dead agents stay in all dicts, with their flag in every step. Masks are in infos.

    The dead need no action.
    """

    def __init__(self, seed: int = 0, fails_at: int | None = None) -> None:
        self.battle = TeamBattle(seed, fails_at)
        self.possible_agents = AGENTS
        self.observation_space = spaces.Dict([(agent, OBSERVATION) for agent in AGENTS])
        self.action_space = spaces.Dict([(agent, spaces.Discrete(ACTIONS)) for agent in AGENTS])
        self.state_space = STATE

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, _, masks = self.battle.reset()
        return dict(zip(AGENTS, observations)), self.infos([{}] * SIZE, masks)

    def infos(self, infos: list[dict], masks: list[list[int]]) -> dict:
        return {a: {**info, "action_mask": np.array(mask, np.int8)} for a, info, mask in zip(AGENTS, infos, masks)}

    def step(self, actions: dict) -> tuple[dict, ...]:
        observations, _, rewards, dones, infos, masks = self.battle.step(
            [actions.get(agent, NO_OP) for agent in AGENTS]
        )
        at_limit = infos[0]["bad_transition"]
        terminated = {agent: done and not at_limit for agent, done in zip(AGENTS, dones)}
        truncated = {agent: done and at_limit for agent, done in zip(AGENTS, dones)}
        terminated["__all__"], truncated["__all__"] = all(dones) and not at_limit, all(dones) and at_limit
        paid = {agent: reward[0] for agent, reward in zip(AGENTS, rewards)}
        return dict(zip(AGENTS, observations)), paid, terminated, truncated, self.infos(infos, masks)

    def state(self) -> np.ndarray:
        """The same for all agents."""
        return self.battle.share()[0]


class ParallelBattle(PettingZooEnv):
    """Under PettingZoo's rules: dead agents leave. Masks are in observations; no info says how an episode ended."""

    metadata = {"name": "battle"}  # noqa: RUF012

    def __init__(self, seed: int = 0, fails_at: int | None = None) -> None:
        self.battle = TeamBattle(seed, fails_at)
        self.possible_agents, self.agents, self.state_space = AGENTS, [], STATE

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Dict(observation=OBSERVATION, action_mask=spaces.MultiBinary(ACTIONS))

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(ACTIONS)

    def observe(self, observations: list[Any], masks: list[Any], agents: list[str]) -> dict:
        seen = zip(AGENTS, observations, masks)
        return {a: {"observation": o, "action_mask": np.array(m, np.int8)} for a, o, m in seen if a in agents}

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        observations, _, masks = self.battle.reset()
        self.agents = [*AGENTS]
        return self.observe(observations, masks, self.agents), {agent: {} for agent in AGENTS}

    def step(self, actions: dict) -> tuple[dict, ...]:
        acted = self.agents
        result = self.battle.step([int(actions[agent]) if agent in acted else NO_OP for agent in AGENTS])
        observations, _, rewards, dones, infos, masks = result
        at_limit = infos[0]["bad_transition"]
        done = {agent: done for agent, done in zip(AGENTS, dones) if agent in acted}
        self.agents = [agent for agent in acted if not done[agent]]
        return (
            self.observe(observations, masks, acted),
            {agent: reward[0] for agent, reward in zip(AGENTS, rewards) if agent in acted},
            {agent: flag and not at_limit for agent, flag in done.items()},
            {agent: flag and at_limit for agent, flag in done.items()},
            {agent: {} for agent in acted},
        )

    def state(self) -> np.ndarray:
        return self.battle.share()[0]
