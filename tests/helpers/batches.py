"""Helpers for facades: rows of batched values, compared with the core's dicts."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


def at(value: Any, row: int) -> Any:
    """One row of a value of a batched space."""
    if isinstance(value, dict):
        return {key: at(child, row) for key, child in value.items()}
    return tuple(at(child, row) for child in value) if isinstance(value, tuple) else value[row]


def same(actual: Any, expected: Any) -> bool:
    """Equal in form, dtype and every number."""
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(same(actual[key], expected[key]) for key in expected)
    if isinstance(expected, tuple):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return np.array_equal(actual, expected) and np.asarray(actual).dtype == np.asarray(expected).dtype


def all_zero(value: Any) -> bool:
    """All values are zero."""
    if isinstance(value, dict | tuple):
        return all(map(all_zero, value.values() if isinstance(value, dict) else value))
    return not np.any(value)


def assert_vector_info(vector: dict[str, Any], info: dict[str, Any], row: int) -> None:
    """One row of vector infos equals this info."""
    there = {key for key in vector if f"_{key}" in vector and vector[f"_{key}"][row]}
    assert there == info.keys()
    for key, value in info.items():
        if isinstance(value, dict) and key != "final_obs":
            assert_vector_info(vector[key], value, row)
        else:
            assert same(vector[key][row], value) or vector[key][row] == value


def as_dicts(actions: dict[str, Any], acting: tuple[list[str], ...]) -> list[dict[str, Any]]:
    """Actions by agent, for all environments, as dicts for the core."""
    return [{agent: at(actions[agent], env_id) for agent in agents} for env_id, agents in enumerate(acting)]


def sample_rows(space: spaces.Space, rows: int) -> Any:
    """Random batched actions with this many rows."""
    drawn = [space.sample() for _ in range(rows)]
    if isinstance(space, spaces.Dict):
        return {key: np.array([one[key] for one in drawn]) for key in space.spaces}
    return np.array(drawn)


def grouped_actions(env: Any, rng: np.random.Generator) -> Any:
    """Random actions of all agents of a `StackedVecEnv`."""

    def of(space: Any, agents: int) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: of(part, agents) for key, part in space.items()}
        if isinstance(space, spaces.Discrete):
            return rng.integers(space.n, size=(env.num_envs, agents))
        return rng.uniform(-1, 1, (env.num_envs, agents, *space.shape)).astype(space.dtype)

    by_group = env.by_group(env.single_action_space)
    return env.grouped({name: of(space, len(env.group_map[name])) for name, space in by_group.items()})
