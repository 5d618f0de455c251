"""Adds up the returns and lengths of episodes as transitions are read."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters.protocol import AgentID
from marl_parallel.core.transition import ALL, COMMON
from marl_parallel.types import FinishedEpisode

_FLOATS = {float, np.float64}


class Sums(NamedTuple):
    """The statistics of one environment's running episode."""

    agents: list[AgentID]  # in the order of `totals`
    totals: list[float]
    ended: int
    others: dict[AgentID, list[Any]] | None
    dead: set[AgentID] | None
    earlier: dict[AgentID, tuple[Any, int]] | None


class EpisodeStatistics:
    """The running episode of each environment, and the episodes that the latest step has finished.

    An agent takes part in a step if it has a reward or its flag is set. Compiled code adds the steps that it reads.
    `vectors` are the agents whose rewards are vectors; for others, an array of one number counts as that number.

    An agent that comes back after its end begins another life in the same episode. With `in_infos`, the totals belong
    to the present life, and the sums of earlier lives are stored apart; an episode has the sums of all lives.

    Attributes:
        totals: float64 `(num_envs, 2 * agents + 1)`: each agent's sum of rewards, each agent's number of steps, and
            the number of steps. Both kinds of counts are -1 if the next transition is a reset, which does not count.
        ended: By environment, how many episodes have ended.
        any_finished: Whether `finished` has episodes.
        dead: By environment, the agents whose statistics have been in infos; they may come back.
        in_infos: Whether infos have the statistics of each agent that ends, once for each life.
        listeners: Called with each episode that has ended.
    """

    def __init__(
        self,
        num_envs: int,
        agents: Sequence[AgentID],
        mode: AutoresetMode,
        *,
        vectors: Container[AgentID] = (),
        in_infos: bool = False,
    ) -> None:
        self._finished: list[FinishedEpisode] = []
        self._columns: list[tuple[Any, ...]] = []  # ended episodes in arrays; `finished` converts them when it is read
        self.any_finished = False
        self.ended = [0] * num_envs
        self.listeners: list[Callable[[FinishedEpisode], None]] = []
        self.in_infos = in_infos
        self._agents, self._vectors = [*agents], vectors
        self._start = -1 if mode is AutoresetMode.NEXT_STEP else 0  # whether a reset is next after an episode's end
        self._positions = {agent: position for position, agent in enumerate(agents)}
        n = len(agents)
        self.totals = np.zeros((num_envs, 2 * n + 1))
        self._returns, self._lengths, self._steps = self.totals[:, :n], self.totals[:, n:-1], self.totals[:, -1]
        self._first = np.array([0.0] * n + [float(self._start)] * (n + 1))  # totals after an episode's end
        # Sums and steps of agents that are not declared, and of rewards that are vectors.
        self._others: dict[int, dict[AgentID, list[Any]]] = {}
        self.dead: dict[int, set[AgentID]] = {}  # the agents whose statistics have been in infos; they may come back
        # Sums and steps of the earlier lives of agents, and of rewards that they had between two lives.
        self._earlier: dict[int, dict[AgentID, tuple[Any, int]]] = {}
        self._loaded: dict[int, Sums] = {}  # sums from `load`, which count after the next transition

    @property
    def finished(self) -> list[FinishedEpisode]:
        """The episodes that ended in the latest step; the stepper makes it empty before each."""
        for columns in self._columns:
            for env_id, totals, terminated, truncated in zip(*(column.tolist() for column in columns)):
                sums = self._sums(env_id, totals)
                self._finished.append(FinishedEpisode(env_id, *sums, int(totals[-1]), terminated, truncated))
        self._columns = []
        return self._finished

    @finished.setter
    def finished(self, episodes: list[FinishedEpisode]) -> None:
        self._finished, self._columns, self.any_finished = episodes, [], bool(episodes)

    def begin(self, env_ids: Sequence[int]) -> None:
        """Note that the next transition of some environments is a reset."""
        for env_id in env_ids:
            self._reset(env_id, -1)
            self._loaded.pop(env_id, None)

    def save(self, env_id: int) -> Sums:
        """All sums of an environment, as they are."""
        others, dead, earlier = self._others.get(env_id), self.dead.get(env_id), self._earlier.get(env_id)
        return Sums(self._agents, self.totals[env_id].tolist(), self.ended[env_id], others, dead, earlier)

    def load(self, env_id: int, sums: Sums) -> None:
        """Set the sums of an environment, after its next transition, which does not count."""
        self._reset(env_id, -1)
        self.ended[env_id], self._loaded[env_id] = sums.ended, sums

    def _put(self, env_id: int, sums: Sums) -> None:
        totals, n = sums.totals, len(sums.agents)
        others = copy.deepcopy(sums.others) or {}
        if totals[-1] < 0:
            self._reset(env_id, -1)
            return
        self._steps[env_id] = totals[-1]
        for position, agent in enumerate(sums.agents):
            now = self._positions.get(agent)
            if now is not None:
                self._returns[env_id, now], self._lengths[env_id, now] = totals[position], totals[n + position]
            elif totals[n + position]:  # the agent has no entry in the block here
                others[agent] = [totals[position], int(totals[n + position])]
        for of_envs, value in ((self._others, others), (self.dead, sums.dead), (self._earlier, sums.earlier)):
            if value:
                cast("dict[int, Any]", of_envs)[env_id] = copy.deepcopy(value)

    def _reset(self, env_id: int, steps: int) -> None:
        self._returns[env_id], self._lengths[env_id], self._steps[env_id] = 0.0, steps, steps
        for of_envs in (self._others, self.dead, self._earlier):
            if of_envs:
                of_envs.pop(env_id, None)

    def add(
        self,
        env_id: int,
        rewards: Mapping[Any, Any],
        terminateds: Mapping[Any, Any],
        truncateds: Mapping[Any, Any],
        were_dead: Collection[AgentID],
    ) -> dict[Any, dict[str, Any]]:
        """Add a step of one environment, whose episode may have ended; `were_dead` are agents that had ended before.

        Returns the additions to its infos, by key; an empty dict unless `in_infos`.
        """
        totals: list[float] = self.totals[env_id].tolist()
        if totals[-1] < 0:
            self._reset(env_id, 0)
            if self._loaded and (sums := self._loaded.pop(env_id, None)) is not None:
                self._put(env_id, sums)
            return {}
        totals[-1] += 1
        n = len(self._agents)
        if dead := self.dead.get(env_id):
            # Dead agents with steps came back in a step that compiled code has added.
            dead -= {agent for agent in dead if agent not in were_dead or self._life(env_id, agent, totals)[1]}
        everyone = [*rewards] == self._agents and len({**rewards, **terminateds, **truncateds}) == n + 1
        if everyone and {*map(type, rewards.values())} <= _FLOATS:  # the most frequent case
            totals[:n] = map(float, map(operator.add, totals, rewards.values()))
            totals[n:-1] = [steps + 1 for steps in totals[n:-1]]
        else:
            self._add_some(env_id, totals, rewards, _flagged(terminateds, truncateds))
        for agent in dead or ():
            self._end_life(env_id, agent, totals)
        terminated, truncated = bool(terminateds[ALL]), bool(truncateds[ALL])
        over, parts = terminated or truncated, {}
        if self.in_infos and (over or (flagged := _flagged(terminateds, truncateds))):
            parts = self._parts(env_id, totals, None if over else flagged)
        if over:
            self._finish(env_id, totals, terminated, truncated)
        else:
            self.totals[env_id] = totals
        return parts

    def update_dead(self, env_id: int, alive: Collection[AgentID]) -> None:
        """Remove the agents from `dead` that have come back in a step that compiled code has added."""
        if dead := self.dead.get(env_id):
            dead.difference_update(alive)

    def finish(self, ended: Sequence[tuple[int, int, int]]) -> None:
        """Record episodes that have ended with steps that compiled code has added.

        Each is its environment and the flags of `__all__`.
        """
        if self.listeners or self._others or self.dead or self._earlier:
            for env_id, terminated, truncated in ended:
                self._finish(env_id, self.totals[env_id].tolist(), bool(terminated), bool(truncated))
        elif ended:
            env_ids, terminated, truncated = np.array(ended).T
            self._finish_all(env_ids, terminated != 0, truncated != 0)

    def _add_some(
        self, env_id: int, totals: list[float], rewards: Mapping[Any, Any], flagged: Sequence[AgentID]
    ) -> None:
        """Add the rewards of the agents that take part, in place: to `totals`, or to `_others`."""
        for agent in {**rewards, **dict.fromkeys(flagged)}:
            reward, position = _summand(rewards.get(agent)), self._positions.get(agent)
            if np.shape(reward) == (1,) and agent not in self._vectors:
                reward = float(reward[0])
            if position is not None and (type(reward) is float or np.ndim(reward) == 0):
                totals[position] += float(reward)
                totals[len(self._agents) + position] += 1
            else:
                total = self._others.setdefault(env_id, {}).setdefault(agent, [0.0, 0])
                same = total[1] == 0 or np.shape(total[0]) == np.shape(reward)
                total[0], total[1] = total[0] + reward if same else np.nan, total[1] + 1

    def add_arrays(self, received: Any, ends: NDArray[np.bool_], *, in_order: bool) -> None:
        """Add the steps in a `Received` of a native simulator, in which an `elapsed` of zero is a reset.

        `ends` marks the episodes that end; `in_order` says that the rows are all environments, in order.
        """
        ids, present, rewards = received.env_ids, received.present, received.rewards
        rows = slice(None) if in_order else ids  # in place, which is several times faster
        self._returns[rows] += rewards if present is None else np.where(present, rewards, 0.0)
        self._lengths[rows] += 1 if present is None else present
        self._steps[rows] += 1
        begun, over = ids[received.elapsed == 0], np.flatnonzero(ends)
        if not self.listeners:  # all at once
            if len(begun):
                self.totals[begun] = 0.0
            if len(over):
                self._finish_all(ids[over], received.terminated[over], received.truncated[over])
            return
        for env_id in begun.tolist():
            self._reset(env_id, 0)
        for row in over.tolist():
            terminated, truncated = bool(received.terminated[row]), bool(received.truncated[row])
            self._finish(int(ids[row]), self.totals[ids[row]].tolist(), terminated, truncated)

    def _finish_all(
        self, env_ids: NDArray[np.integer[Any]], terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]
    ) -> None:
        """Note the ends of episodes whose statistics are all in `totals`; without listeners."""
        self._columns.append((env_ids, self.totals[env_ids], terminated, truncated))
        self.any_finished = True
        self.totals[env_ids] = self._first
        for env_id in env_ids.tolist():
            self.ended[env_id] += 1

    def _finish(self, env_id: int, totals: Sequence[float], terminated: bool, truncated: bool) -> None:
        """Note the end of an episode; the next one begins in the same step, or with a reset."""
        self.ended[env_id] += 1
        returns, lengths = self._sums(env_id, totals)
        episode = FinishedEpisode(env_id, returns, lengths, int(totals[-1]), terminated, truncated)
        self.finished.append(episode)
        self.any_finished = True
        for listener in self.listeners:
            listener(episode)
        self._reset(env_id, self._start)

    def _sums(self, env_id: int, totals: Sequence[float]) -> tuple[dict[AgentID, Any], dict[AgentID, int]]:
        """The returns and lengths of the agents that have taken part in the running episode."""
        returns: dict[AgentID, Any] = {}
        lengths: dict[AgentID, int] = {}
        earlier, others = self._earlier.get(env_id, {}), self._others.get(env_id, {})
        for agent in dict.fromkeys([*self._agents, *earlier, *others]):
            total, steps = _sum(earlier.get(agent, _NOTHING), self._life(env_id, agent, totals))
            if steps:
                returns[agent], lengths[agent] = total, steps
        return returns, lengths

    def _life(self, env_id: int, agent: AgentID, totals: Sequence[float]) -> tuple[Any, int]:
        """The return and the length of an agent's present life."""
        position, others = self._positions.get(agent), self._others.get(env_id, {}).get(agent, _NOTHING)
        if position is None:
            return others[0], others[1]
        return _sum((totals[position], int(totals[len(self._agents) + position])), (others[0], others[1]))

    def _end_life(self, env_id: int, agent: AgentID, totals: list[float]) -> None:
        """Move an agent's sums from `totals` to its earlier lives."""
        earlier = self._earlier.setdefault(env_id, {})
        earlier[agent] = _sum(earlier.get(agent, _NOTHING), self._life(env_id, agent, totals))
        self._others.get(env_id, {}).pop(agent, None)
        if (position := self._positions.get(agent)) is not None:
            totals[position] = totals[len(self._agents) + position] = 0.0

    def _parts(self, env_id: int, totals: list[float], flagged: Sequence[AgentID] | None) -> dict[Any, dict[str, Any]]:
        """The statistics of the `flagged` agents, of each once in a life; at the episode's end (None), of all others
        that have taken part since, and the environment's own.

        The return of an environment is the sum over its agents; NaN if these are vectors of different lengths.
        """
        parts: dict[Any, dict[str, Any]] = {}
        dead = self.dead.setdefault(env_id, set())
        if flagged is None:
            returns, _ = self._sums(env_id, totals)
            one_shape = len({np.shape(total) for total in returns.values()}) <= 1
            parts[COMMON] = {"r": sum(returns.values()) if one_shape else np.nan, "l": int(totals[-1])}
            flagged = [*returns]
        for agent in flagged:
            total, steps = self._life(env_id, agent, totals)
            if agent not in dead and steps:
                dead.add(agent)
                parts[agent] = {"r": total, "l": steps}
                self._end_life(env_id, agent, totals)
        return parts


_NOTHING: tuple[float, int] = (0.0, 0)


def _sum(one: tuple[Any, int], other: tuple[Any, int]) -> tuple[Any, int]:
    """The sum of two returns, and of their lengths; NaN for vectors of different lengths."""
    if not (one[1] and other[1]):
        return one if one[1] else other
    one_shape = len({np.shape(total) for total in (one[0], other[0])} - {()}) <= 1
    return one[0] + other[0] if one_shape else np.nan, one[1] + other[1]


def _flagged(terminateds: Mapping[Any, Any], truncateds: Mapping[Any, Any]) -> list[AgentID]:
    """The agents with a flag that is True."""
    return [agent for flags in (terminateds, truncateds) for agent, flag in flags.items() if flag and agent != ALL]


def _summand(reward: Any) -> Any:
    """A reward as a number or an array of numbers; 0.0 for None, and NaN for a value that cannot be added."""
    if type(reward) is float:
        return reward
    try:
        return 0.0 if reward is None else np.array(reward, np.float64)[()]
    except Exception:  # `__float__` and `__array__` may raise anything
        return np.nan
