"""Agents of all environments as rows, and the flags that agents and environments share.

Whether an episode is over is decided in the core. Here, the end of an environment's episode is the end of each of its
agents who has not ended before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core import stacking
from marl_parallel.core.arrays import Arrays, Group
from marl_parallel.core.transition import FINAL_OBS

Flags: TypeAlias = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""Terminations and truncations, `(num_envs, agents)`."""


def chosen(
    groups: Sequence[Group],
    possible_agents: Sequence[AgentID],
    agents: Sequence[AgentID],
    action_spaces: Mapping[AgentID, Space[Any]],
    advice: str = "choose some with agents=[...]",
) -> tuple[int, list[int] | None]:
    """The group of the agents that are to be rows, and their places in it; None where they are all of it.

    Raises:
        ValueError: They are unknown, doubled or none, or their spaces differ.
    """
    if not {*agents} <= {*possible_agents} or len(set(agents)) < len(agents) or not agents:
        raise ValueError(f"agents={[*agents]} must be some of {[*possible_agents]}, each at most once")
    place_of = {
        possible_agents[position]: (number, row)
        for number, group in enumerate(groups)
        for row, position in enumerate(group.positions)
    }
    first = agents[0]
    group = place_of[first][0]
    for agent in agents:
        own = groups[place_of[agent][0]].space, action_spaces[agent]
        for what, space, other in zip(("observation", "action"), own, (groups[group].space, action_spaces[first])):
            if space is not other and space != other:
                raise ValueError(
                    f"rows must be alike, but the {what} space of {agent!r} is {space}, that of {first!r} {other}; "
                    f"{advice}"
                )
    places = [place_of[agent][1] for agent in agents]
    return group, None if places == [*range(len(groups[group].positions))] else places


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


def rows_of(group: Any, places: Sequence[int] | None) -> Any:
    """A group's values `(num_envs, agents, ...)` as rows `(num_envs * agents, ...)`: views, if all agents are rows."""

    def flat(array: NDArray[Any]) -> Any:
        rows = stacking.flat(array if places is None else array[:, places])
        return tuple(rows) if rows.dtype.hasobject else rows

    return stacking.each(flat, group)


def row_of(space: Space[Any], rows: Any, row: int) -> Any:
    """The value of one row, of rows in the form of a batched space: arrays of the caller's own."""
    if isinstance(space, spaces.Dict) and isinstance(rows, Mapping):
        return {key: row_of(child, rows[key], row) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(row_of(child, part, row) for child, part in zip(space.spaces, rows))
    return rows[row].copy() if isinstance(rows[row], np.ndarray) else rows[row]


def stacked(space: Space[Any], rows: Any, num_envs: int, agents: int) -> Any:
    """Rows in the form of a batched space as values `(num_envs, agents, ...)`: views, where they are arrays.

    Raises:
        ValueError: There are not `num_envs * agents` rows, or they are of another form.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(rows, Mapping) or rows.keys() != space.spaces.keys():
            raise ValueError(f"expected actions as a dict with the keys {[*space.spaces]}, got {type(rows).__name__}")
        return {key: stacked(child, rows[key], num_envs, agents) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(rows, tuple | list) or len(rows) != len(space.spaces):
            raise ValueError(f"expected actions as a tuple of {len(space.spaces)}, got {type(rows).__name__}")
        return tuple(stacked(child, part, num_envs, agents) for child, part in zip(space.spaces, rows))
    if isinstance(rows, tuple) and space.shape is None:  # values that do not stack, one for each row
        array = np.full(len(rows), None, object)
        array[:] = rows
    else:
        array = np.asarray(rows)
    if not array.ndim or len(array) != num_envs * agents:
        raise ValueError(f"expected actions for {num_envs * agents} rows, got shape {array.shape}")
    return array[:, None] if agents == 1 else array.reshape(num_envs, agents, *array.shape[1:])


def still(space: Space[Any], num_envs: int) -> Any:
    """Zeros for all environments, or what is nearest to them in the space.

    Raises:
        ValueError: The space has nothing like zeros.
    """
    if isinstance(space, spaces.Dict):
        return {key: still(child, num_envs) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(still(child, num_envs) for child in space.spaces)
    low: Any = 0
    high: Any = 0
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        low = space.start
        high = low + (space.n if isinstance(space, spaces.Discrete) else space.nvec) - 1
    elif not isinstance(space, spaces.MultiBinary):
        raise ValueError(f"nothing stands still in {space}; pass others= to act")
    one = np.clip(np.zeros(space.shape or (), space.dtype), low, high).astype(space.dtype)
    return np.repeat(one[None], num_envs, axis=0)


class Deaths:
    """The agents that have died in the present episode of their environment, where each agent has a row.

    A row is flagged when its agent dies, and once more when the episode of its environment ends.

    Attributes:
        dead: `(num_envs, agents)`, bool.
        any: Whether any agent has died.
    """

    def __init__(self, num_envs: int, agents: int) -> None:
        self.dead = np.zeros((num_envs, agents), np.bool_)
        self.any = False

    def forget(self, env_ids: Sequence[int] | None = None) -> None:
        """Note that these environments have been reset; None for all."""
        self.dead[slice(None) if env_ids is None else [*env_ids]] = False
        self.any = bool(self.dead.any())

    def flags(self, flags: Flags, arrays: Arrays) -> Flags:
        """The flags of rows, of those of their agents, `flags`, and of the environments; deaths are noted."""
        terminations, truncations = flags
        over = (arrays.terminated | arrays.truncated)[:, None]
        flagged = terminations | truncations
        if not self.any and not np.count_nonzero(flagged != over):
            return flags  # each ends with its environment, or none does
        died = flagged & ~self.dead
        with_env = over & ~died
        self.dead = (self.dead | died) & ~over
        self.any = bool(self.dead.any())
        return (
            (terminations & died) | (with_env & arrays.terminated[:, None]),
            (truncations & died) | (with_env & arrays.truncated[:, None]),
        )


def took_part(arrays: Arrays, agents: Sequence[AgentID], *, same_step: bool) -> NDArray[np.bool_]:
    """The agents that took part in a step: `(num_envs, agents)`.

    Args:
        arrays: Of the step.
        agents: All possible agents.
        same_step: Whether observations of an environment whose episode is over are those of the next one.
    """
    there = arrays.rewarded | arrays.terminations | arrays.truncations
    if not same_step:
        return there | arrays.observed
    over = arrays.terminated | arrays.truncated
    there |= arrays.observed & ~over[:, None]
    for env_id in np.flatnonzero(over).tolist():
        infos = arrays.infos.get(env_id, {})
        there[env_id] |= [isinstance(infos.get(agent), Mapping) and FINAL_OBS in infos[agent] for agent in agents]
    return there


def handed_down(arrays: Arrays, agents: NDArray[np.bool_]) -> Flags:
    """The flags of agents; where some of `agents` have none of their own, those of their environment."""
    unflagged = agents & ~(arrays.terminations | arrays.truncations)
    return (
        arrays.terminations | (unflagged & arrays.terminated[:, None]),
        arrays.truncations | (unflagged & arrays.truncated[:, None]),
    )
