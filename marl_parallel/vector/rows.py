"""`AgentRows`: agents of all environments as rows; and the flags that agents and environments share.

With k agents, row `i * k + j` is agent j of environment i: arrays `(num_envs, k, ...)` with the first two axes as one.
Whether an episode is over is decided in `core/episode.py`. Here, the end of an environment's episode is the end of each
of its agents that has not ended before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core import stacking
from marl_parallel.core.arrays import Arrays, ArrayView, Stacked
from marl_parallel.core.columns import evenly_spaced
from marl_parallel.core.schema import equal
from marl_parallel.core.spaces import check_form, tree_map
from marl_parallel.core.transition import FINAL_OBS
from marl_parallel.vector.stepper import ArrayStepper

Flags: TypeAlias = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""Terminations and truncations, `(num_envs, agents)`."""

Places: TypeAlias = slice | list[int]
"""Some columns of an array; a slice, which makes views, where they are evenly spaced."""


class AgentRows:
    """Agents of all environments as rows, and which of them have died in the present episode of their environment.

    A row is flagged when its agent dies, and once more when the episode of its environment ends. `places` are the
    columns of these agents among all agents; `dead` is `(num_envs, agents)`, bool. Raises `ValueError` with `advice`
    where agents have different spaces, and where they are unknown, doubled or none.
    """

    def __init__(self, stepper: ArrayStepper, agents: Sequence[AgentID], advice: str) -> None:
        schema, view = stepper.runner.schema, stepper.view
        self.agents, self.num_envs = tuple(agents), stepper.runner.num_envs
        if not {*agents} <= {*view.agents} or len({*agents}) < len(agents) or not agents:
            raise ValueError(f"agents={[*agents]} must be some of {[*view.agents]}, each at most once")
        for what, declared in (("observation", schema.observation_spaces), ("action", schema.action_spaces)):
            for agent in agents:
                if not equal(declared[agent], declared[agents[0]]):
                    raise ValueError(
                        f"rows must be alike, but the {what} space of {agent!r} is {declared[agent]}, that of "
                        f"{agents[0]!r} {declared[agents[0]]}; {advice}"
                    )
        self.places, self._group, self._members = located(view, agents)
        self._positions = view.groups[self._group].positions
        self.space, self.action_space = schema.observation_spaces[agents[0]], schema.action_spaces[agents[0]]
        self.dead = np.zeros((self.num_envs, len(agents)), np.bool_)
        self.any_dead = False

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """The columns of these agents, of an array `(num_envs, possible agents, ...)`."""
        return array[:, self.places]

    def actions(self, rows: Any) -> Stacked:
        """Actions in the form of the batched space; raises `ValueError` where they are not."""
        return Stacked(self.agents, stacked(self.action_space, rows, self.num_envs, len(self.agents)))

    def observations(self, arrays: Arrays) -> Any:
        """The observations of all rows: views, if all agents are rows."""

        def flat(array: NDArray[Any]) -> Any:
            rows = stacking.flat(array[:, self._members])
            return tuple(rows) if rows.dtype.hasobject else rows

        return tree_map(flat, arrays.observations[self._group])

    def observation(self, arrays: Arrays, row: int) -> Any:
        """The observation of one row, in arrays of the caller's own."""
        env_id, place = divmod(row, len(self.agents))

        def of_leaf(array: NDArray[Any]) -> Any:
            value = array[env_id, self._members][place]
            return value.copy() if isinstance(value, np.ndarray) else value

        return tree_map(of_leaf, arrays.observations[self._group])

    def clear_observations(self, arrays: Arrays, agents: NDArray[np.bool_]) -> None:
        """Put zeros where agents, `(num_envs, possible agents)`, have an observation."""
        stacking.clear(arrays.observations[self._group], agents[:, self._positions])

    def note_reset(self, env_ids: Sequence[int] | None = None) -> None:
        """Note that these environments have been reset; None for all."""
        self.dead[slice(None) if env_ids is None else [*env_ids]] = False
        self.any_dead = bool(self.dead.any())

    def flags(self, arrays: Arrays) -> Flags:
        """The flags of rows, from those of their agents and of their environments; deaths are noted."""
        terminations, truncations = self.of(arrays.terminations), self.of(arrays.truncations)
        over = (arrays.terminated | arrays.truncated)[:, None]
        flagged = terminations | truncations
        if not self.any_dead and not np.count_nonzero(flagged != over):
            return terminations, truncations  # each ends with its environment, or none does
        died = flagged & ~self.dead
        with_env = over & ~died
        self.dead = (self.dead | died) & ~over
        self.any_dead = bool(self.dead.any())
        return (
            (terminations & died) | (with_env & arrays.terminated[:, None]),
            (truncations & died) | (with_env & arrays.truncated[:, None]),
        )


def located(view: ArrayView, agents: Sequence[AgentID]) -> tuple[Places, int, Places]:
    """The columns of agents among all, the group that they are in, and their columns in that group's observations."""
    column_of = {agent: column for column, agent in enumerate(view.agents)}
    columns = [column_of[agent] for agent in agents]
    number, group = next((n, group) for n, group in enumerate(view.groups) if columns[0] in group.positions)
    member_of = {column: member for member, column in enumerate(group.positions)}
    members = [member_of[column] for column in columns]
    return evenly_spaced(columns) or columns, number, evenly_spaced(members) or members


def shared_reward_space(
    reward_spaces: Mapping[AgentID, Space[Any]], agents: Sequence[AgentID], facade: str
) -> Space[Any] | None:
    """The reward space that these agents share, None if rewards are numbers; raises `ValueError` if they differ."""
    first = reward_spaces.get(agents[0])
    for agent in agents:
        if reward_spaces.get(agent) != first:
            raise ValueError(
                f"{facade}: the rewards of agents side by side must be alike, but the reward_space of {agent!r} is "
                f"{reward_spaces.get(agent)}, that of {agents[0]!r} {first}; use PettingZooVecEnv, or other agents"
            )
    return first


def stacked(space: Space[Any], rows: Any, num_envs: int, agents: int) -> Any:
    """Rows in the form of a batched space as values `(num_envs, agents, ...)`; `ValueError` for another form."""

    def of_leaf(leaf: Space[Any], values: Any) -> NDArray[Any]:
        if isinstance(values, tuple) and leaf.shape is None:  # values that do not stack, one for each row
            array = np.full(len(values), None, object)
            array[:] = values
        else:
            array = np.asarray(values)
        if not array.ndim or len(array) != num_envs * agents:
            raise ValueError(f"expected actions for {num_envs * agents} rows, got shape {array.shape}")
        return array[:, None] if agents == 1 else array.reshape(num_envs, agents, *array.shape[1:])

    return tree_map(of_leaf, space, rows, form=check_form)


def idle_actions(space: Space[Any], num_envs: int) -> Any:
    """Zeros for all environments, or the actions nearest to them; `ValueError` for a space that has nothing like it."""

    def of_leaf(leaf: Any) -> NDArray[Any]:
        low: Any = 0
        high: Any = 0
        if isinstance(leaf, spaces.Box):
            low, high = leaf.low, leaf.high
        elif isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
            low = leaf.start
            high = low + (leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec) - 1
        elif not isinstance(leaf, spaces.MultiBinary):
            raise ValueError(f"nothing stands still in {leaf}; pass others= to act")
        one = np.clip(np.zeros(leaf.shape or (), leaf.dtype), low, high).astype(leaf.dtype)
        return np.repeat(one[None], num_envs, axis=0)

    return tree_map(of_leaf, space)


def took_part(arrays: Arrays, agents: Sequence[AgentID], *, same_step: bool) -> NDArray[np.bool_]:
    """The agents that took part in a step: `(num_envs, agents)`.

    `same_step`: where an episode is over, observations are those of the next one.
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


def with_env_flags(arrays: Arrays, agents: NDArray[np.bool_]) -> Flags:
    """The flags of agents; where some of `agents` have none of their own, those of their environment."""
    unflagged = agents & ~(arrays.terminations | arrays.truncations)
    return (
        arrays.terminations | (unflagged & arrays.terminated[:, None]),
        arrays.truncations | (unflagged & arrays.truncated[:, None]),
    )
