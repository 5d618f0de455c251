"""Agents of all copies as rows: who may be, how their values are laid out, and how rows are taken apart by agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from marl_parallel.adapters import AgentID
from marl_parallel.core import stacking
from marl_parallel.core.arrays import Group


def chosen(
    groups: Sequence[Group],
    possible_agents: Sequence[AgentID],
    agents: Sequence[AgentID],
    action_spaces: Mapping[AgentID, Space[Any]],
    advice: str = "choose some with agents=[...]",
) -> tuple[int, list[int] | None]:
    """The group that agents who are to be rows belong to, and their places in it; None where they are all of it.

    Raises:
        ValueError: They are unknown, doubled or none, or their spaces differ.
    """
    known = {*possible_agents}
    unknown = [agent for agent in agents if agent not in known]
    if unknown or len(set(agents)) < len(agents) or not agents:
        raise ValueError(f"agents={[*agents]} must be some of {[*possible_agents]}, each at most once")
    group_of = {possible_agents[p]: number for number, group in enumerate(groups) for p in group.positions}
    first = agents[0]
    for agent in agents:
        if group_of[agent] != group_of[first]:
            what, own, other = "observation", groups[group_of[agent]].space, groups[group_of[first]].space
        elif action_spaces[agent] != action_spaces[first]:
            what, own, other = "action", action_spaces[agent], action_spaces[first]
        else:
            continue
        raise ValueError(
            f"rows must be alike, but the {what} space of {agent!r} is {own}, that of {first!r} {other}; {advice}"
        )
    members = [possible_agents[p] for p in groups[group_of[first]].positions]
    place_of = {agent: place for place, agent in enumerate(members)}
    places = [place_of[agent] for agent in agents]
    return group_of[first], None if places == [*range(len(members))] else places


def shared_reward_space(
    reward_spaces: Mapping[AgentID, Space[Any]], agents: Sequence[AgentID], facade: str
) -> Space[Any] | None:
    """The reward space that these agents share; None if their rewards are numbers.

    Raises:
        ValueError: They differ.
    """
    first = reward_spaces.get(agents[0])
    for agent in agents:
        if reward_spaces.get(agent) != first:
            raise ValueError(
                f"{facade}: the rewards of agents side by side must be alike, but the reward_space of {agent!r} is "
                f"{reward_spaces.get(agent)}, that of {agents[0]!r} {first}; use PettingZooVecEnv, or other agents"
            )
    return first


def rows_of(stacked: Any, places: Sequence[int] | None) -> Any:
    """A group's values `(copies, agents, ...)` as rows `(copies * agents, ...)`: views, where all agents are there."""
    if isinstance(stacked, dict):
        return {key: rows_of(child, places) for key, child in stacked.items()}
    if isinstance(stacked, tuple):
        return tuple(rows_of(child, places) for child in stacked)
    if places is not None:
        stacked = stacked[:, places]
    rows = stacking.flat(stacked)
    return tuple(rows) if rows.dtype.hasobject else rows


def row_of(space: Space[Any], rows: Any, row: int) -> Any:
    """One row's value, of rows in the form of a batched space: arrays of the caller's own."""
    if isinstance(space, spaces.Dict) and isinstance(rows, Mapping):
        return {key: row_of(child, rows[key], row) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(row_of(child, part, row) for child, part in zip(space.spaces, rows))
    return rows[row].copy() if isinstance(rows[row], np.ndarray) else rows[row]


def stacked(space: Space[Any], rows: Any, copies: int, agents: int) -> Any:
    """Rows in the form of a batched space as values `(copies, agents, ...)`: views, where they are arrays.

    Raises:
        ValueError: There are not `copies * agents` rows, or they are of another form.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(rows, Mapping) or rows.keys() != space.spaces.keys():
            raise ValueError(f"expected actions as a dict with the keys {[*space.spaces]}, got {type(rows).__name__}")
        return {key: stacked(child, rows[key], copies, agents) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(rows, tuple | list) or len(rows) != len(space.spaces):
            raise ValueError(f"expected actions as a tuple of {len(space.spaces)}, got {type(rows).__name__}")
        return tuple(stacked(child, part, copies, agents) for child, part in zip(space.spaces, rows))
    if isinstance(rows, tuple) and space.shape is None:  # values that do not stack, one for each row
        array = np.full(len(rows), None, object)
        array[:] = rows
    else:
        array = np.asarray(rows)
    if not array.ndim or len(array) != copies * agents:
        raise ValueError(f"expected actions for {copies * agents} rows, got shape {array.shape}")
    return array[:, None] if agents == 1 else array.reshape(copies, agents, *array.shape[1:])


def still(space: Space[Any], copies: int) -> Any:
    """Zeros for all copies, or what is nearest to them in the space.

    Raises:
        ValueError: The space has nothing like zeros.
    """
    if isinstance(space, spaces.Dict):
        return {key: still(child, copies) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(still(child, copies) for child in space.spaces)
    if isinstance(space, spaces.Box):
        one = np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
    elif isinstance(space, spaces.Discrete):
        one = np.asarray(np.clip(0, space.start, space.start + space.n - 1), space.dtype)
    elif isinstance(space, spaces.MultiDiscrete):
        one = np.clip(0, space.start, space.start + space.nvec - 1).astype(space.dtype)
    elif isinstance(space, spaces.MultiBinary):
        one = np.zeros(space.shape, space.dtype)
    else:
        raise ValueError(f"nothing stands still in {space}; pass others= to act")
    return np.repeat(one[None], copies, axis=0)
