"""Infos of many environments in one dict, laid out as Gymnasium's vector environments do.

Every key holds an array over all rows, and `_key` a mask of the rows that have it; dicts within are laid out likewise.
Unlike there, the result does not depend on whose info comes first: numbers of several types make an array that holds
them all, and values that do not fit one array make an array of objects. Infos that come in arrays stay in them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core import stacking
from marl_parallel.core.native import InfoColumns
from marl_parallel.core.spaces import tree_map
from marl_parallel.core.transition import COMMON, FINAL_OBS, RESET_INFO

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def vector_infos(infos: Iterable[tuple[int, Mapping[Any, Any]]], num_rows: int) -> dict[Any, Any]:
    """One dict of arrays over all rows, of some rows and their infos.

    Example:
        >>> vector_infos([(0, {"hits": 1}), (2, {"hits": 2.5})], 3)
        {'hits': array([1. , 0. , 2.5]), '_hits': array([ True, False,  True])}
    """
    by_key: dict[Any, tuple[list[int], list[Any]]] = {}
    for row, info in infos:
        for key, value in info.items():
            rows, values = by_key.setdefault(key, ([], []))
            rows.append(row)
            values.append(value)
    result: dict[Any, Any] = {}
    for key, (rows, values) in by_key.items():
        mask = np.zeros(num_rows, np.bool_)
        mask[rows] = True
        result[key], result[f"_{key}"] = _joined(key, rows, values, num_rows), mask
    return result


def _joined(key: Any, rows: Sequence[int], values: Sequence[Any], num_rows: int) -> Any:
    if key != FINAL_OBS:  # which is easier to use one by one
        if all(isinstance(value, dict) for value in values):
            return vector_infos(zip(rows, values), num_rows)
        if (array := _of_numbers(rows, values, num_rows)) is not None:
            return array
    objects = np.empty(num_rows, object)  # of None
    for row, value in zip(rows, values):
        objects[row] = value
    return objects


def _of_numbers(rows: Sequence[int], values: Sequence[Any], num_rows: int) -> NDArray[Any] | None:
    arrays = [np.asarray(value) for value in values if isinstance(value, (np.ndarray, *_NUMBERS))]
    if len(arrays) < len(values) or len({array.shape for array in arrays}) > 1:
        return None
    dtypes = {array.dtype for array in arrays}
    if len({isinstance(value, np.ndarray) for value in values}) > 1 or any(dtype.hasobject for dtype in dtypes):
        return None
    try:
        dtype = np.result_type(*dtypes)
    except TypeError:
        return None
    if not all(_holds(dtype, array) for array in arrays if array.dtype != dtype):
        return None
    joined = np.zeros((num_rows, *arrays[0].shape), dtype)
    joined[list(rows)] = arrays
    return joined


def _holds(dtype: np.dtype[Any], array: NDArray[Any]) -> bool:
    """Whether an array's values stay what they are: numbers numbers, and large whole ones the same."""
    if dtype.kind in "US":
        return array.dtype.kind == dtype.kind
    with np.errstate(invalid="ignore"):
        return array.dtype.kind not in "iu" or np.array_equal(array.astype(dtype).astype(array.dtype), array)


# -- the infos of agents -----------------------------------------------------------------------------------------------


def env_infos(infos: Mapping[Any, Any], agents: Sequence[AgentID]) -> dict[Any, Any]:
    """The infos of an environment itself: the entries under keys that are no agents."""
    known = {*agents}
    return {key: info for key, info in infos.items() if key not in known}


def own_infos(env_id: int, infos: Mapping[Any, Any], agent: AgentID) -> Mapping[Any, Any]:
    """The info of one agent; empty where it is missing or None. Raises `ValueError` where it is no dict."""
    own = infos.get(agent)
    if own is not None and not isinstance(own, Mapping):
        raise ValueError(f"environment {env_id}: the infos of agent {agent!r} must be a dict, got {own!r}")
    return own or {}


def agent_infos(
    env_id: int, infos: Mapping[Any, Any], agents: Sequence[AgentID], possible_agents: Sequence[AgentID]
) -> list[dict[Any, Any]]:
    """For each of some agents, the infos of its environment, copied, with its own on top."""
    of_env = env_infos(infos, possible_agents)
    return [{**{k: copy.copy(info) for k, info in of_env.items()}, **own_infos(env_id, infos, a)} for a in agents]


def reset_info(info: Mapping[Any, Any], of_env: Mapping[Any, Any]) -> dict[Any, Any]:
    """The info of the reset that followed in the same step: of `agent_infos` and of `env_infos`."""
    own = {key: info[RESET_INFO] for key, info in of_env.items() if isinstance(info, Mapping) and RESET_INFO in info}
    return {**own, **info.get(RESET_INFO, {})}


def next_episode_info(info: Mapping[Any, Any], of_env: Mapping[Any, Any]) -> dict[Any, Any]:
    """The info of a step that began the next episode: the reset's, with the old episode's last as `final_info`."""
    return {**of_env, **reset_info(info, of_env), "final_info": without_reset(info)}


def without_reset(info: Mapping[Any, Any]) -> dict[Any, Any]:
    """An info without the keys that an automatic reset has added to it."""
    return {key: value for key, value in info.items() if key not in (FINAL_OBS, RESET_INFO)}


def infos_by_agent(
    infos: Mapping[int, Mapping[Any, Any]], agents: Sequence[AgentID], num_envs: int
) -> dict[Any, dict[Any, Any]]:
    """Infos of all environments by agent, and by the keys that are no agents.

    A value under such a key that is no dict becomes an array under the key, with a mask beside it.
    """
    if isinstance(infos, InfoColumns):
        received = infos.received
        rows = None if len(received.env_ids) == num_envs else received.env_ids
        by_agent: dict[Any, dict[Any, Any]] = {}
        for place, agent in enumerate(agents):
            there = rows if received.present is None else received.env_ids[received.present[:, place]]
            by_agent[agent] = _placed(stacking.column(received.infos, place), rows, there, num_envs)
        return by_agent | ({COMMON: _placed(received.common, rows, rows, num_envs)} if received.common else {})
    if not infos:
        return {agent: {} for agent in agents}
    by_key: dict[Any, dict[Any, Any]] = {
        agent: vector_infos([(env_id, own_infos(env_id, own, agent)) for env_id, own in infos.items()], num_envs)
        for agent in agents
    }
    for key in dict.fromkeys([key for own in infos.values() for key in own if key not in by_key]):
        of_key = {env_id: own[key] for env_id, own in infos.items() if key in own}
        if all(isinstance(value, Mapping) for value in of_key.values()):
            by_key[key] = vector_infos(of_key.items(), num_envs)
        else:
            by_key |= vector_infos([(env_id, {key: value}) for env_id, value in of_key.items()], num_envs)
    return by_key


def infos_by_row(infos: InfoColumns, places: slice | list[int], agents: int, num_envs: int) -> dict[Any, Any]:
    """Infos by row, of infos that come in arrays; `places` are the columns of the agents that are rows."""

    def of_rows(array: NDArray[Any]) -> NDArray[Any]:
        return stacking.flat(array[:, places])

    received, num_rows = infos.received, num_envs * agents
    rows = there = None
    if len(received.env_ids) < num_envs or received.present is not None:
        rows = there = (received.env_ids[:, None] * agents + np.arange(agents)).ravel()
        if received.present is not None:
            there = rows[of_rows(received.present)]
    result = _placed(tree_map(of_rows, received.infos), rows, there, num_rows)
    if received.common:
        common = {COMMON: tree_map(lambda array: np.repeat(array, agents, axis=0), received.common)}
        result |= _placed(common, rows, rows, num_rows)
    return result


def _placed(
    columns: Mapping[str, Any], rows: NDArray[Any] | None, there: NDArray[Any] | None, num_rows: int
) -> dict[str, Any]:
    """Columns in the layout of `vector_infos`; `there` are those of `rows` that have the keys, None stands for all."""
    mask = np.ones(num_rows, np.bool_) if there is None else np.zeros(num_rows, np.bool_)
    if there is not None:
        mask[there] = True
    result: dict[str, Any] = {}
    for key, values in columns.items():
        if isinstance(values, dict):
            placed: Any = _placed(values, rows, there, num_rows)
        elif rows is None:
            placed = values
        else:
            placed = np.zeros((num_rows, *values.shape[1:]), values.dtype)
            placed[rows] = values
        result[key], result[f"_{key}"] = placed, mask.copy()
    return result
