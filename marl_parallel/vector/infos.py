"""Infos of many environments in one dict, laid out as Gymnasium's vector environments do.

Every key holds an array over all rows, and `_key` a mask that says which of them are data; dicts go on in the same way
within. Unlike there, nothing depends on whose info comes first: numbers of several types make an array that holds them
all, and what does not go into one array, an array of objects. Infos that come in arrays stay in them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core import stacking
from marl_parallel.core.native_arrays import InfoColumns
from marl_parallel.core.transition import COMMON, FINAL_OBS, RESET_INFO

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def vector_infos(infos: Iterable[tuple[int, Mapping[Any, Any]]], num_rows: int) -> dict[Any, Any]:
    """One dict of arrays over all rows.

    Args:
        infos: Rows that have an info, and theirs.
        num_rows: How many rows there are.

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


def own_infos(env_id: int, infos: Mapping[Any, Any], agent: AgentID) -> Mapping[Any, Any]:
    """What an environment says of one agent; nothing where that is None.

    Raises:
        ValueError: It is no dict.
    """
    own = infos.get(agent)
    if own is not None and not isinstance(own, Mapping):
        raise ValueError(f"environment {env_id}: the infos of agent {agent!r} must be a dict, got {own!r}")
    return own or {}


def about_copy(infos: Mapping[Any, Any], agents: Sequence[AgentID]) -> dict[Any, Any]:
    """What an environment says of itself: all that is under a key that is none of its agents."""
    known = {*agents}
    return {key: info for key, info in infos.items() if key not in known}


def with_copys(
    env_id: int, infos: Mapping[Any, Any], agents: Sequence[AgentID], possible_agents: Sequence[AgentID]
) -> list[dict[Any, Any]]:
    """What an environment says of each of some agents and, where that leaves a key free, of itself."""
    of_copy = about_copy(infos, possible_agents)
    return [
        {**{key: copy.copy(info) for key, info in of_copy.items()}, **own_infos(env_id, infos, agent)}
        for agent in agents
    ]


def of_reset(told: Mapping[Any, Any], of_copy: Mapping[Any, Any]) -> dict[Any, Any]:
    """What the reset has said that followed in the same step, of an agent and of its copy.

    Args:
        told: Of the agent, as of `with_copys`.
        of_copy: As of `about_copy`.
    """
    said = {k: i[RESET_INFO] for k, i in of_copy.items() if isinstance(i, Mapping) and RESET_INFO in i}
    return {**said, **told.get(RESET_INFO, {})}


def begun_anew(told: Mapping[Any, Any], of_copy: Mapping[Any, Any]) -> dict[Any, Any]:
    """An info of a step in which the next episode has begun: the reset's, with the last of the old one as `final_info`.

    Args:
        told: Of an agent, as of `with_copys`.
        of_copy: As of `about_copy`; what the reset says nothing of stays.
    """
    return {**of_copy, **of_reset(told, of_copy), "final_info": last_of(told)}


def last_of(told: Mapping[Any, Any]) -> dict[Any, Any]:
    """An info without what an automatic reset has added to it."""
    return {key: value for key, value in told.items() if key not in (FINAL_OBS, RESET_INFO)}


def infos_by_agent(
    infos: Mapping[int, Mapping[Any, Any]], agents: Sequence[AgentID], num_envs: int
) -> dict[Any, dict[Any, Any]]:
    """By agent, or under whatever other key there is, what all environments have to say.

    What is no dict of an environment's own is an array under its key, with a mask beside it.

    Args:
        infos: By environment and agent.
        agents: Who is there in any case.
        num_envs: How many environments there are.
    """
    if isinstance(infos, InfoColumns):
        told = infos.received
        rows = None if len(told.env_ids) == num_envs else told.env_ids
        by_agent: dict[Any, dict[Any, Any]] = {}
        for place, agent in enumerate(agents):
            there = rows if told.present is None else told.env_ids[told.present[:, place]]
            by_agent[agent] = _placed(stacking.column(told.infos, place), rows, there, num_envs)
        return by_agent | ({COMMON: _placed(told.common, rows, rows, num_envs)} if told.common else {})
    if not infos:
        return {agent: {} for agent in agents}
    told_of: dict[Any, dict[Any, Any]] = {
        agent: vector_infos(((env_id, own_infos(env_id, of_env, agent)) for env_id, of_env in infos.items()), num_envs)
        for agent in agents
    }
    for key in dict.fromkeys([key for of_env in infos.values() for key in of_env if key not in told_of]):
        of_key = {env_id: of_env[key] for env_id, of_env in infos.items() if key in of_env}
        if all(isinstance(value, Mapping) for value in of_key.values()):
            told_of[key] = vector_infos(of_key.items(), num_envs)
        else:
            told_of |= vector_infos([(env_id, {key: value}) for env_id, value in of_key.items()], num_envs)
    return told_of


def infos_by_row(infos: InfoColumns, which: slice | list[int] | None, several: int, num_envs: int) -> dict[Any, Any]:
    """What agents in rows have to say, of what comes in arrays: row `i * several + j` is agent j of environment i.

    Args:
        infos: Of which environments they may be.
        which: The places of these agents among all; None where they are all, in order.
        several: How many they are.
        num_envs: How many environments there are.
    """

    def of_rows(array: NDArray[Any]) -> NDArray[Any]:
        return stacking.flat(array if which is None else array[:, which])

    told = infos.received
    rows = there = None
    if len(told.env_ids) < num_envs or told.present is not None:
        rows = there = (told.env_ids[:, None] * several + np.arange(several)).ravel()
    if rows is not None and told.present is not None:
        there = rows[of_rows(told.present)]

    result = _placed(stacking.each(of_rows, told.infos), rows, there, num_envs * several)
    if told.common:
        common = {COMMON: stacking.each(lambda array: np.repeat(array, several, axis=0), told.common)}
        result |= _placed(common, rows, rows, num_envs * several)
    return result


@functools.lru_cache
def _everywhere(num_rows: int) -> NDArray[np.bool_]:
    return np.ones(num_rows, np.bool_)


def _placed(
    columns: Mapping[str, Any], rows: NDArray[Any] | None, there: NDArray[Any] | None, num_rows: int
) -> dict[str, Any]:
    """Columns in the layout of `vector_infos`.

    Args:
        columns: With a value for each of `rows`.
        rows: Which these are; None for all, in order.
        there: Those of them that are data; None for all.
        num_rows: How many rows there are.
    """
    if there is None:
        mask = _everywhere(num_rows)
    else:
        mask = np.zeros(num_rows, np.bool_)
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


def _joined(key: Any, rows: Sequence[int], values: Sequence[Any], num_rows: int) -> Any:
    if key != FINAL_OBS:  # which is easier to take one by one
        if all(isinstance(value, dict) for value in values):
            return vector_infos(zip(rows, values), num_rows)
        array = _of_numbers(rows, values, num_rows)
        if array is not None:
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
