"""Who is in an episode of RLlib's, and what it may therefore be told.

RLlib's `MultiAgentEpisode` raises where an agent that is dead has an entry, takes every observation for a request to
act, wants a last observation of each agent that is truncated, and ends once all agents it has seen are dead, whatever
the environment says. Nothing here imports RLlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from marl_parallel.adapters import AgentID
from marl_parallel.adapters import Dicts as FiveDicts
from marl_parallel.core.engine import BatchView
from marl_parallel.core.transition import ALL, COMMON


class Cast:
    """The agents of one environment, as RLlib's episode knows them.

    Args:
        batch: Where each environment stands.
        env_id: Which one this is.
    """

    def __init__(self, batch: BatchView, env_id: int) -> None:
        self._batch, self._env_id = batch, env_id
        self._seen: dict[AgentID, Any] = {}  # with what each has observed last
        self._dead: set[AgentID] = set()
        self._begun = False  # whether RLlib's episode has; it may end before the environment's

    def begin(self, observations: dict[AgentID, Any], infos: dict[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """An episode begins; returns the observations and infos that it is told."""
        self._forget()
        observations = self._to_act(observations)
        self._seen.update(observations)
        self._begun = True
        return observations, _with_common(infos, observations)

    def step(self, was_over: bool, told: FiveDicts) -> FiveDicts:
        """What the episode is told of a step.

        Args:
            was_over: Whether the environment's episode had ended before, so that the next one has begun in this step.
            told: Observations, rewards, terminateds, truncateds, infos.
        """
        over = self._batch.over[self._env_id]
        if was_over:
            # Over again: it was restarted before it could begin. What was observed last is no beginning.
            observations, infos = self.begin({} if over else told[0], told[4])
            return observations, *told[1:4], infos
        if not self._begun and over:  # nor is it here, where RLlib's has ended before
            return {}, *told[1:]
        self._begun = True
        if self._dead:
            told = _without(self._dead, told)
        observations, rewards, terminateds, truncateds, infos = told
        if not over:
            observations = self._to_act(observations)
        elif _restarted(infos):
            observations = {**{a: self._seen[a] for a in truncateds if a in self._seen}, **observations}
        infos = _with_common(infos, observations)
        if any(terminateds.values()) or any(truncateds.values()):
            self._dead.update(_flagged(terminateds), _flagged(truncateds))
            if self._seen.keys() <= self._dead:
                self._forget()
                return observations, rewards, terminateds, truncateds, infos
        self._seen.update(observations)
        return observations, rewards, terminateds, truncateds, infos

    def _forget(self) -> None:
        self._seen, self._dead, self._begun = {}, set(), False

    def _to_act(self, observations: dict[AgentID, Any]) -> dict[AgentID, Any]:
        """The observations without those of agents who are alive and must wait."""
        acting = self._batch.acting[self._env_id]
        if len(acting) >= len(observations):
            return observations
        waiting = {*self._batch.alive[self._env_id]}.difference(acting)
        return {agent: value for agent, value in observations.items() if agent not in waiting}


def _flagged(flags: dict[Any, Any]) -> Iterable[AgentID]:
    return [agent for agent, flag in flags.items() if flag and agent != ALL]


def _without(dead: set[AgentID], told: FiveDicts) -> FiveDicts:
    observations, rewards, terminateds, truncateds, infos = (
        {agent: value for agent, value in values.items() if agent not in dead} for values in told
    )
    return observations, rewards, terminateds, truncateds, infos


def _with_common(infos: dict[Any, Any], observations: dict[AgentID, Any]) -> dict[Any, Any]:
    """The infos with what is said of the environment in each agent's that observes."""
    if COMMON not in infos:
        return infos
    own = {agent: infos.get(agent) or {} for agent in observations}
    return {**infos, **{a: {COMMON: infos[COMMON], **info} for a, info in own.items() if isinstance(info, Mapping)}}


def _restarted(infos: dict[Any, Any]) -> bool:
    common = infos.get(COMMON)
    return isinstance(common, dict) and bool(common.get("restarted"))
