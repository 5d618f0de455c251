"""Infos in arrays over environments; the dicts of each environment are made on first access."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core.block import stacking
from marl_parallel.core.transition import COMMON


class InfoArrays(NamedTuple):
    """Infos of `n` environments with `k` agents, one row for each environment; see `Received`.

    Attributes:
        env_ids: int32 `(n,)`: the environments.
        infos: Infos of agents: arrays `(n, k, ...)` by key, or dicts of such arrays; or a list of these for each agent.
        common: Infos of environments: `(n, ...)` by key.
        present: bool `(n, k)`: which agents have infos; None if all have.
        informed: bool `(n,)`: which rows have infos; None if all have.
        plain: The keys whose values in dicts are Python numbers, not NumPy numbers; None unless the infos are read from
            a block, whose dicts are the same as without compiled code.
    """

    env_ids: NDArray[np.int32]
    infos: dict[str, Any] | list[dict[str, Any]]
    common: dict[str, Any]
    present: NDArray[np.bool_] | None
    informed: NDArray[np.bool_] | None
    plain: Collection[str] | None = None

    def of_agent(self, position: int) -> dict[str, Any]:
        """The infos of one agent, by its position: arrays `(n, ...)` by key."""
        infos: dict[str, Any] = (
            self.infos[position] if isinstance(self.infos, list) else stacking.column(self.infos, position)
        )
        return infos


class InfoColumns(Mapping[int, dict[Any, Any]]):
    """The infos in `arrays` by env id; their dicts are made on first access."""

    def __init__(self, arrays: InfoArrays, agents: Sequence[AgentID]) -> None:
        self.arrays, self.agents = arrays, agents
        self._by_env: dict[int, dict[Any, Any]] = {}

    @property
    def are_alike(self) -> bool:
        """Whether all agents have infos of the same keys."""
        return isinstance(self.arrays.infos, dict)

    def __len__(self) -> int:
        return len(self._env_ids())

    def __iter__(self) -> Iterator[int]:
        return iter(self._env_ids().tolist())

    def _env_ids(self) -> NDArray[np.int32]:
        """The environments that have infos."""
        arrays = self.arrays
        infos = [arrays.infos] if isinstance(arrays.infos, dict) else arrays.infos
        if not (any(map(bool, infos)) or arrays.common):
            return arrays.env_ids[:0]
        return arrays.env_ids if arrays.informed is None else arrays.env_ids[arrays.informed]

    def __getitem__(self, env_id: int) -> dict[Any, Any]:
        if not self._by_env:
            self._by_env = dict(zip(self.arrays.env_ids.tolist(), self.rows()))
        return self._by_env[env_id]

    def rows(self) -> list[dict[Any, Any]]:
        """One new dict by agent for each row."""
        arrays = self.arrays
        columns = [arrays.of_agent(position) for position in range(len(self.agents))]
        if arrays.plain:
            columns = [
                {key: one.tolist() if key in arrays.plain else one for key, one in column.items()} for column in columns
            ]
        rows = by_agent(self.agents, len(arrays.env_ids), arrays.present, columns)
        informed = [True] * len(rows) if arrays.informed is None else arrays.informed.tolist()
        if arrays.common:
            for row, env_info, has_infos in zip(rows, stacking.one_by_one(arrays.common, len(rows)), informed):
                if has_infos:
                    row[COMMON] = env_info
        return [row if has_infos else {agent: {} for agent in row} for row, has_infos in zip(rows, informed)]


def by_agent(
    agents: Sequence[AgentID], num_rows: int, present: NDArray[np.bool_] | None, columns: Iterable[Any]
) -> list[dict[Any, Any]]:
    """One dict by agent for each row, from one stack of values for each agent. Absent agents have no entry."""
    values = [stacking.one_by_one(column, num_rows) for column in columns]
    if present is not None:
        is_present = present.tolist()
        return [dict(itertools.compress(zip(agents, row), mask)) for row, mask in zip(zip(*values), is_present)]
    if len(agents) == 1:
        return [{agents[0]: value} for value in values[0]]
    return [dict(zip(agents, row)) for row in zip(*values)]
