"""Simulators that report action masks for agents that do not act, as StarCraft's do for the dead."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv as PettingZooEnv

AGENTS = ("scout", "medic", "guard")
LENGTH = 5
DIES_AT = {"scout": 2, "medic": 3}
NO_OP = np.array([1, 0, 0, 0], np.int8)


class Squad:
    """Three soldiers, of whom two die. The masks of the dead allow only "no-op", to the last step and in it.

    Flags and `agents` follow PettingZoo's rules; `DictSquad` follows those of dicts.

    Args:
        where: Where masks are: "infos"; "observations", in which the dead are, too; "both", where infos have those of
            the dead; or "large infos", which do not fit the block.
    """

    metadata = {"name": "squad"}  # noqa: RUF012
    possible_agents = [*AGENTS]  # noqa: RUF012
    render_mode = None

    def __init__(self, where: str = "infos", env_id: int = 0) -> None:
        self.where, self.shift, self.episode = where, env_id, 0

    def observation_space(self, agent: str) -> spaces.Space:
        seen = spaces.Box(0, 100, (2,), np.float32)
        return seen if self.where.endswith("infos") else spaces.Dict(seen=seen, action_mask=spaces.MultiBinary(4))

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(4)

    def is_dead(self, agent: str) -> bool:
        return self.time >= DIES_AT.get(agent, 100)

    def mask(self, agent: str) -> np.ndarray:
        if self.is_dead(agent):
            return NO_OP
        mask = np.ones(4, np.int8)
        mask[[0, 1 + (self.time + self.episode + self.shift + AGENTS.index(agent)) % 3]] = 0
        return mask

    def observed(self) -> dict[str, Any]:
        """The dead are observed where observations have masks, except with masks in both places."""
        seen = np.full(2, self.time, np.float32)
        if self.where.endswith("infos"):
            return {agent: seen for agent in AGENTS if not self.is_dead(agent)}
        observed = {agent: {"seen": seen, "action_mask": self.mask(agent)} for agent in AGENTS}
        return observed if self.where == "observations" else {a: observed[a] for a in AGENTS if not self.is_dead(a)}

    def infos(self) -> dict[str, Any]:
        """With an info of the environment itself, which is no agent's."""
        if self.where == "observations":
            return {}
        more = {"map": np.zeros(4000)} if self.where == "large infos" else {}
        return {**{a: {"action_mask": self.mask(a), **more} for a in AGENTS}, "weather": {"action_mask": NO_OP}}

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.time, self.episode, self.agents = 0, self.episode + 1, [*AGENTS]
        return self.observed(), self.infos()

    def step(self, actions: dict) -> tuple[dict, ...]:
        acted = self.agents
        for agent in acted:
            assert self.mask(agent)[actions[agent]], f"{agent} chose {actions[agent]} at {self.time}"
        self.time += 1
        over = self.time == LENGTH
        terminated = {agent: over or self.is_dead(agent) for agent in acted}
        self.agents = [agent for agent in acted if not terminated[agent]]
        return self.observed(), dict.fromkeys(acted, 1.0), terminated, dict.fromkeys(acted, False), self.infos()


class PettingZooSquad(Squad, PettingZooEnv):
    """Under PettingZoo's rules."""


class DictSquad(Squad):
    """Under the rules of dicts: the simulator says itself when the episode is over, and the dead keep their flags."""

    def __init__(self, where: str = "infos", env_id: int = 0) -> None:
        super().__init__(where, env_id)
        self.observation_space = spaces.Dict({agent: Squad.observation_space(self, agent) for agent in AGENTS})  # type: ignore[method-assign]
        self.action_space = spaces.Dict({agent: spaces.Discrete(4) for agent in AGENTS})  # type: ignore[method-assign]

    def step(self, actions: dict) -> tuple[dict, ...]:
        *dicts, terminated, truncated, infos = super().step(actions)
        over = self.time == LENGTH
        terminated |= {agent: True for agent in AGENTS if self.is_dead(agent)}  # else they would have come back
        return *dicts, {**terminated, "__all__": over}, {**truncated, "__all__": False}, infos


class OpenSquad(DictSquad):
    """Agents that are not known beforehand, and declare no spaces."""

    def __init__(self, where: str = "infos", env_id: int = 0) -> None:
        super().__init__(where, env_id)
        self.possible_agents = []
        self.observation_space = self.action_space = None  # type: ignore[method-assign]

    def infos(self) -> dict[str, Any]:
        infos = super().infos()
        return {"__common__": infos.pop("weather", {}), **infos}
