"""Episodes of `DyingAgents` by a plain loop, in which all agents always take action 1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulators.dying_agents import DyingAgents

ENVS, SEED = 3, 5


class PlainLoop:
    """One environment; `mode` is the auto-reset mode, by name. Sums rewards and counts steps by agent."""

    def __init__(self, env_id: int, mode: str, seed: int | None = None) -> None:
        self.env, self.env_id, self.mode = DyingAgents(), env_id, mode
        self.reset(SEED + env_id if seed is None else seed)

    def reset(self, seed: int | None = None) -> None:
        observations, _ = self.env.reset(seed=seed)
        self.alive, self.over = [*observations], False
        self.returns: dict[str, float] = {}
        self.lengths: dict[str, int] = {}

    def step(self) -> tuple[dict[str, dict[str, Any]], tuple[Any, ...] | None]:
        """The statistics of the agents that end in this step, and the `FinishedEpisode` if the episode ends."""
        if self.over:
            self.reset()
            return {}, None
        _, rewards, terminateds, truncateds, _ = self.env.step(dict.fromkeys(self.alive, 1))
        for agent, reward in rewards.items():
            self.returns[agent] = self.returns.get(agent, 0.0) + reward
            self.lengths[agent] = self.lengths.get(agent, 0) + 1
        ends = [agent for agent in rewards if terminateds[agent] or truncateds[agent]]
        self.alive = [agent for agent in self.alive if agent not in ends]
        parts = {agent: {"r": self.returns[agent], "l": self.lengths[agent]} for agent in ends}
        if not terminateds["__all__"]:
            return parts, None
        episode = self.env_id, self.returns, self.lengths, self.env.time, True, False
        self.over = True
        if self.mode == "SAME_STEP":
            self.reset()
        return parts, episode


def ended(loops: Iterable[PlainLoop]) -> tuple[list[dict[str, dict[str, Any]]], list[tuple[Any, ...]]]:
    """A step of all loops: the parts that end in each, and the episodes that end."""
    results = [loop.step() for loop in loops]
    return [parts for parts, _ in results], [episode for _, episode in results if episode is not None]
