"""The batch of a native simulator as arrays: what it hands out, placed among all environments.

Where all have been stepped, as they mostly are, nothing is copied that is the receiver's own already. Infos are left as
the arrays they come in: `InfoColumns` makes dicts of them for whoever looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core import stacking
from marl_parallel.core.arrays import Actions, Arrays, ArrayView
from marl_parallel.core.native import Received, action_groups
from marl_parallel.core.spaces import Mismatch
from marl_parallel.core.transition import COMMON

if TYPE_CHECKING:
    from marl_parallel.core.native_batch import NativeBatch


class InfoColumns(Mapping[int, dict[Any, Any]]):
    """Infos by environment, as in the dicts, out of arrays over all rows that were received.

    Args:
        received: Where they are from.
        agents: The possible agents.

    Attributes:
        received: As given.
        agents: As given.
    """

    def __init__(self, received: Received, agents: Sequence[AgentID]) -> None:
        self.received, self.agents = received, agents
        self._dicts: dict[int, dict[Any, Any]] | None = None

    def __len__(self) -> int:
        return len(self.received.env_ids) if self.received.infos or self.received.common else 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._all() if self else ())

    def __getitem__(self, env_id: int) -> dict[Any, Any]:
        return self._all()[env_id]

    def _all(self) -> dict[int, dict[Any, Any]]:
        if self._dicts is None:
            self._dicts = dict(zip(self.received.env_ids.tolist(), self.rows()))
        return self._dicts

    def rows(self) -> list[dict[Any, Any]]:
        """One dict by agent for each row; each row's own."""
        count = len(self.received.env_ids)
        columns = [
            stacking.one_by_one(stacking.column(self.received.infos, place), count) for place in range(len(self.agents))
        ]
        rows = by_row(self.agents, columns, self.received.present)
        if self.received.common:
            for row, common in zip(rows, stacking.one_by_one(self.received.common, count)):
                row[COMMON] = common
        return rows


def by_row(
    agents: Sequence[AgentID], columns: Sequence[Sequence[Any]], present: NDArray[np.bool_] | None
) -> list[dict[Any, Any]]:
    """Dicts by agent, one for each row, of columns with the values of each agent; who is absent is left out."""
    if present is None:
        if len(agents) == 1:
            (agent,), (values,) = agents, columns
            return [{agent: value} for value in values]
        return [dict(zip(agents, row)) for row in zip(*columns)]
    return [dict(compress(zip(agents, row), there)) for row, there in zip(zip(*columns), present.tolist())]


class NativeArrays(ArrayView):
    """The arrays of what a native simulator hands out.

    Args:
        batch: Notes where each environment stands.
    """

    def __init__(self, batch: NativeBatch) -> None:
        super().__init__(batch.schema)
        self._batch = batch
        self._action_groups = action_groups(batch.schema)
        self._acting_together = [tuple(self.agents[place] for place in places) for _, places in self._action_groups]
        self._num_envs = len(batch.env_ids)
        self._alone = len(self.agents) == 1  # who lives as long as the episode, as `NativeBatch` notes it
        self._everybody = np.ones((self._num_envs, len(self.agents)), np.bool_)
        # Groups whose values are not in the dtype that arrays have.
        self._to_cast = [place for place, (space, _) in enumerate(self.groups) if _has_discrete(space)]

    # -- actions ---------------------------------------------------------------------------------------------------

    def write(self, actions: Actions, env_ids: Sequence[int] | None = None) -> list[Any]:
        """For each group of agents with equal action spaces, their values; see `ArrayView`."""
        groups = self._grouped(actions) or self._regrouped(actions, env_ids)
        if env_ids is None or env_ids is self._batch.env_ids:
            return groups
        rows = np.array(env_ids)
        return [stacking.each(lambda array: array[rows], group) for group in groups]

    def _grouped(self, actions: Actions) -> list[Any] | None:
        """Their values where they come in just these groups, and nothing is wrong with them."""
        if not isinstance(actions, list) or [of.agents for of in actions] != self._acting_together:
            return None
        try:
            return [
                stacking.conform(space, of.values, (self._num_envs, len(of.agents)))
                for (space, _), of in zip(self._action_groups, actions)
            ]
        except Mismatch:
            return None  # one by one finds whose it is

    def _regrouped(self, actions: Actions, env_ids: Sequence[int] | None) -> list[Any]:
        if isinstance(actions, list):
            actions = {a: stacking.column(of.values, row) for of in actions for row, a in enumerate(of.agents)}
        if actions.keys() != self._column.keys():
            self._check_known(actions)
            self._check_all_there(actions, self._batch.acting, self._batch.env_ids if env_ids is None else env_ids)
        return [self._group(places, space, actions) for space, places in self._action_groups]

    def _group(self, places: Sequence[int], space: Any, actions: Mapping[AgentID, Any]) -> Any:
        columns = []
        for place in places:
            agent = self.agents[place]
            given = actions[agent] if agent in actions else stacking.zeros(space, (self._num_envs,))
            try:
                columns.append(stacking.conform(space, given, (self._num_envs,)))
            except Mismatch as error:
                raise ValueError(f"the actions of agent {agent!r}: {error}") from None
        if len(columns) == 1:
            return stacking.each(_as_group, columns[0])
        return stacking.together(lambda *arrays: np.stack(arrays, axis=1), *columns)

    # -- transitions -----------------------------------------------------------------------------------------------

    def read(self, told: Received) -> Arrays:
        """Of what was received; see `ArrayView`."""
        if not self._batch.note(told):
            told = told.at(np.argsort(told.env_ids))
        # Who is observed is rewarded and flagged, too.
        present = (self._everybody if told.present is None else told.present).copy()
        self._latest = Arrays(
            self._observations(told),
            told.rewards.astype(np.float64),
            told.terminations,
            told.truncations,
            told.terminated,
            told.truncated,
            present,
            self._batch.acting_now.copy(),
            InfoColumns(told, self.agents),
            present,
            present,
            present,
            together=self._alone and told.present is None,
        )
        return self._latest

    def last(self) -> Arrays:
        """As `ArrayView` has it; what was handed out, as it is now: to keep another would cost every step a copy."""
        return self._latest

    def read_some(self, env_ids: Sequence[int], told: Received, last: Arrays) -> Arrays:
        self._batch.note(told)
        ids = told.env_ids
        present = self._everybody[ids] if told.present is None else told.present
        stepped = stacking.placed(np.zeros_like(last.rewarded), ids, present)

        def placed(whole: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
            return stacking.placed(whole, ids, rows)

        self._latest = Arrays(
            [
                stacking.together(placed, whole, rows)
                for whole, rows in zip(last.observations, self._observations(told))
            ],
            placed(np.zeros_like(last.rewards), told.rewards),
            placed(np.zeros_like(last.terminations), told.terminations),
            placed(np.zeros_like(last.truncations), told.truncations),
            placed(np.zeros_like(last.terminated), told.terminated),
            placed(np.zeros_like(last.truncated), told.truncated),
            placed(last.present, present),
            self._batch.acting_now.copy(),
            InfoColumns(told, self.agents),
            placed(last.observed, present),
            stepped,
            stepped,
        )
        return self._latest

    def note(self, env_id: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> None:
        """Nothing: environments that reset by themselves are not stepped one at a time."""

    def _observations(self, told: Received) -> list[Any]:
        observations = told.observations
        for place in self._to_cast:
            space, positions = self.groups[place]
            shape = len(told.env_ids), len(positions)
            observations = [*observations]
            observations[place] = stacking.conform(space, observations[place], shape)
        return observations


def _as_group(of_one: NDArray[Any]) -> NDArray[Any]:
    return of_one[:, None]


def _has_discrete(space: Any) -> bool:
    if isinstance(space, spaces.Dict):
        return any(map(_has_discrete, space.spaces.values()))
    return (
        any(map(_has_discrete, space.spaces)) if isinstance(space, spaces.Tuple) else isinstance(space, spaces.Discrete)
    )
