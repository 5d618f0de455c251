"""Agents as rows, infos as arrays over rows, and the flags that agents inherit from their environment.

With k agents, row `i * k + j` is agent j of environment i. `core/worker/env_runner.py` decides whose life ends.

Infos are laid out as in Gymnasium's vector environments: every key holds an array over all rows, and `_key` a mask of
the rows that have it, also in nested dicts. Unlike in Gymnasium, the result does not depend on the order of infos:
numbers of several types make an array that holds them all; values that do not fit one array make an array of objects.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Arrays, Stacked
from marl_parallel.core.block.columns import evenly_spaced
from marl_parallel.core.block.info_columns import InfoColumns
from marl_parallel.core.objects.pickling import same
from marl_parallel.core.schema import equal
from marl_parallel.core.spaces import check_form, tree_map
from marl_parallel.core.transition import BEGAN, COMMON, ENDED, FINAL_OBS, RESET_INFO, WAS_DEAD
from marl_parallel.vector.stepper import FacadeStepper

Flags: TypeAlias = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""Terminations and truncations, `(num_envs, agents)`."""

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)
# The most frequent types, with the kind of their dtype; integers of Python have several.
_KINDS = {bool: "b", np.bool_: "b", int: "i", np.int64: "i", float: "f", np.float64: "f", np.float32: "f"}


class AgentRows:
    """Agents with equal spaces, as rows or columns of arrays.

    Evenly spaced columns are indexed by a slice, which makes views. `vectors_for` names a facade that takes vector
    rewards.

    Attributes:
        agents: The agents.
        columns: Their columns among all agents: a slice, or a list.
        everyone: Whether these are all agents, in order.
        space, action_space: The spaces of one agent.
        reward_space: The space of one agent's vector reward; None if rewards are numbers.
        num_envs, num_rows: The number of environments, and of rows.
    """

    def __init__(
        self, stepper: FacadeStepper, agents: Sequence[AgentID], advice: str = "", vectors_for: str = ""
    ) -> None:
        schema, view = stepper.schema, stepper.view
        self.agents, self.num_envs = tuple(agents), stepper.num_envs
        self.num_rows = self.num_envs * len(agents)
        if not {*agents} <= {*view.agents} or len({*agents}) < len(agents) or not agents:
            raise ValueError(f"agents={[*agents]} must be some of {[*view.agents]}, each at most once")
        for what, declared in (("observation", schema.observation_spaces), ("action", schema.action_spaces)):
            for agent in agents:
                if not equal(declared[agent], declared[agents[0]]):
                    raise ValueError(
                        f"rows need equal spaces, but the {what} space of {agent!r} is {declared[agent]}, and of "
                        f"{agents[0]!r} it is {declared[agents[0]]}; {advice}"
                    )
        column_of = {agent: column for column, agent in enumerate(view.agents)}
        columns = [column_of[agent] for agent in agents]
        self._group, _ = view.group_rows[agents[0]]
        members = np.array([view.group_rows[agent][1] for agent in agents])
        self.columns = evenly_spaced(columns) or columns  # among all agents
        self._member_of, self._members = members, evenly_spaced(members.tolist()) or members  # among the group's agents
        self.everyone = columns == [*range(len(view.agents))]
        self._is_one_stack = self.everyone and view.is_one_stack
        self.space, self.action_space = schema.observation_spaces[agents[0]], schema.action_spaces[agents[0]]
        self.reward_space = schema.reward_spaces.get(agents[0]) if vectors_for else None
        for agent in agents if vectors_for else ():
            if (other := schema.reward_spaces.get(agent)) != self.reward_space:
                raise ValueError(
                    f"{vectors_for} stacks the rewards of {[*agents]}, but the reward_space of {agent!r} is {other}, "
                    f"and of {agents[0]!r} it is {self.reward_space}; use PettingZooVecEnv, or other agents"
                )

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """The columns of these agents, of an array `(num_envs, possible agents, ...)`."""
        return array[:, self.columns]

    def flat(self, array: NDArray[Any]) -> NDArray[Any]:
        """An array `(num_envs, possible agents, ...)` by row, `(rows, ...)`; a view if these are all agents."""
        array = array if self.everyone else array[:, self.columns]
        return array.reshape(self.num_rows, *array.shape[2:])

    def rewards(self, arrays: Arrays) -> NDArray[Any]:
        """The rewards: `(num_envs, agents)`, or `(num_envs, agents, num_objectives)` if they are vectors."""
        if self.reward_space is None:
            return self.of(arrays.rewards)
        return np.stack([arrays.vectors[agent] for agent in self.agents], axis=1)

    def by_env(self, values: Sequence[Any], what: str) -> list[Any]:
        """One value for each environment, from one for each, or from one for each row, equal within an environment."""
        per_env, num_rows = len(self.agents), self.num_rows
        if len(values) == self.num_envs:
            return [*values]
        if len(values) != num_rows:
            raise ValueError(f"expected {what} for {self.num_envs} environments or for {num_rows} rows, got {values!r}")
        for env_id in range(self.num_envs):
            of_env = [*values[env_id * per_env : (env_id + 1) * per_env]]
            if not all(same(value, of_env[0]) for value in of_env[1:]):
                raise ValueError(
                    f"{what} must be equal for all rows of an environment, but for environment {env_id} it is {of_env}"
                )
        return [*values[::per_env]]

    def actions(self, rows: Any) -> Stacked:
        """Actions in the form of the batched space; errors are as in `stacked`."""
        return Stacked(self.agents, stacked(self.action_space, rows, self.num_envs, len(self.agents)))

    def observations(self, observations: Sequence[Any]) -> Any:
        """These agents' observations, `(num_envs, agents, ...)`, from all groups'; views, if members are a slice."""
        return tree_map(lambda array: array[:, self._members], observations[self._group])

    def flat_observations(self, arrays: Arrays) -> Any:
        """The observations of all rows: views, if all agents are rows."""
        if self._is_one_stack and not (whole := arrays.observations[0]).dtype.hasobject:
            return whole.reshape(self.num_rows, *whole.shape[2:])

        def flat(array: NDArray[Any]) -> Any:
            rows = stacking.flat(array[:, self._members])
            return tuple(rows) if rows.dtype.hasobject else rows

        return tree_map(flat, arrays.observations[self._group])

    def observation(self, observations: Sequence[Any], row: int) -> Any:
        """The observation of one row from all groups', in new arrays."""
        index = row // len(self.agents), self._member_of[row % len(self.agents)]
        return tree_map(lambda array: copy.copy(array[index]), observations[self._group])

    def clear(self, arrays: Arrays, agents: NDArray[np.bool_]) -> None:
        """Make `agents`, a mask `(num_envs, agents)`, absent; their observations become zeros."""
        arrays.present[:, self.columns] &= ~agents
        env_ids, columns = np.nonzero(agents)
        stacking.clear(arrays.observations[self._group], (env_ids, self._member_of[columns]))

    def flags(self, arrays: Arrays) -> Flags:
        """The flags of rows, from the flags of agents and environments.

        A row is flagged whenever its agent dies, and once more when the episode of its environment ends.
        """
        terminations, truncations = self.of(arrays.terminations), self.of(arrays.truncations)
        if arrays.shared_flags:
            return terminations, truncations
        died = self.of(arrays.ended) & (terminations | truncations)
        terminated, truncated = arrays.terminated[:, None], arrays.truncated[:, None]
        return np.where(died, terminations, terminated), np.where(died, truncations, truncated)

    def infos(self, infos: InfoColumns) -> dict[Any, Any]:
        """Infos that come in arrays, by row."""

        def of_rows(array: NDArray[Any]) -> NDArray[Any]:
            return stacking.flat(self.of(array))

        arrays, per_env = infos.arrays, len(self.agents)
        rows = having = informed = None
        if len(arrays.env_ids) < self.num_envs or arrays.present is not None or arrays.informed is not None:
            rows = having = informed = (arrays.env_ids[:, None] * per_env + np.arange(per_env)).ravel()
            mask = np.ones(len(rows), np.bool_)
            if arrays.informed is not None:
                mask = np.repeat(arrays.informed, per_env)
                informed = rows[mask]
            having = rows[mask if arrays.present is None else mask & of_rows(arrays.present)]
        result = _placed(tree_map(of_rows, arrays.infos), rows, having, self.num_envs * per_env)
        if arrays.common:
            common = {COMMON: tree_map(lambda array: np.repeat(array, per_env, axis=0), arrays.common)}
            result |= _placed(common, rows, informed, self.num_envs * per_env)
        return result


# -- spaces, actions and flags -----------------------------------------------------------------------------------------


def stacked(space: Space[Any], rows: Any, num_envs: int, agents: int) -> Any:
    """Rows in the form of a batched space as values `(num_envs, agents, ...)`.

    Whole numbers may be floats, as in `stacking.whole`. Raises `ValueError` for another form, and `TypeError` for what
    cannot be iterated, as Gymnasium's `iterate`.
    """
    shape = num_envs, agents
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return _stacked_leaf(shape, space, rows)

    def check_rows(part: Any, others: Iterable[Any]) -> None:
        for other in others:
            if not isinstance(other, Iterable):
                raise TypeError(f"expected actions for {num_envs * agents} rows, got {other!r:.200}")
        check_form(part, others)

    return tree_map(partial(_stacked_leaf, shape), space, rows, form=check_rows)


def _stacked_leaf(shape: tuple[int, int], leaf: Space[Any], values: Any) -> NDArray[Any]:
    num_rows = shape[0] * shape[1]
    if isinstance(values, tuple) and leaf.shape is None:  # values that do not stack, one for each row
        array = np.full(len(values), None, object)
        array[:] = values
    else:
        array = np.asarray(values)
    if not array.ndim:
        raise TypeError(f"expected actions for {num_rows} rows, got {values!r:.200}")
    if len(array) != num_rows:
        raise ValueError(f"expected actions for {num_rows} rows, got shape {array.shape}")
    if array.dtype.kind == "f":
        array = stacking.whole(leaf, array)
    return array[:, None] if shape[1] == 1 else array.reshape(*shape, *array.shape[1:])


def bounds(leaf: Any) -> tuple[Any, Any]:
    """The least and the greatest values of a space of arrays or of whole numbers."""
    if isinstance(leaf, spaces.Box):
        return leaf.low, leaf.high
    if isinstance(leaf, spaces.MultiBinary):
        return 0, 1
    return leaf.start, leaf.start + (leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec) - 1


def with_the_dead(arrays: Arrays, stepper: FacadeStepper) -> Arrays:
    """The arrays of a reset or load, which also say who is dead in the environments that stay as they were."""
    if arrays.plain:
        return arrays
    were_dead, ended = arrays.were_dead.copy(), arrays.ended.copy()
    transitions, column = stepper.transitions, {agent: at for at, agent in enumerate(stepper.view.agents)}
    for env_id in range(len(were_dead)):
        for agent, events in transitions.events_in(env_id).items():
            if agent in column and not events & BEGAN:  # of the next episode, too
                were_dead[env_id, column[agent]] |= bool(events & WAS_DEAD)
                ended[env_id, column[agent]] |= bool(events & ENDED)
    return arrays.changed(were_dead=were_dead, ended=ended)


def inherited_flags(arrays: Arrays, agents: NDArray[np.bool_] | None = None) -> Flags:
    """The flags of agents; at the end of an episode, `agents` without a flag of their own inherit the environment's.

    `agents` is a mask `(num_envs, agents)`; None for those that took part in the step.
    """
    if arrays.shared_flags:
        return arrays.terminations, arrays.truncations
    unflagged = (arrays.took_part if agents is None else agents) & ~(arrays.terminations | arrays.truncations)
    return (
        arrays.terminations | (unflagged & arrays.terminated[:, None]),
        arrays.truncations | (unflagged & arrays.truncated[:, None]),
    )


def reset_mask(
    options: Mapping[str, Any] | None, num_rows: int
) -> tuple[dict[str, Any] | None, NDArray[np.bool_] | None]:
    """Options of a reset without `"reset_mask"`, and this mask of the rows to reset, or None.

    Raises `TypeError` or `ValueError` if the mask is not bool `(num_rows,)`, or selects no row.
    """
    options = dict(options or {})
    mask = options.pop("reset_mask", None)
    if mask is not None:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise TypeError(f"options['reset_mask'] must be a numpy array of bool, got {type(mask).__name__}")
        if mask.shape != (num_rows,):
            raise ValueError(f"options['reset_mask'] must have shape ({num_rows},), got {mask.shape}")
        if not mask.any():
            raise ValueError("options['reset_mask'] must have at least one True")
    return options or None, mask


# -- infos in arrays ---------------------------------------------------------------------------------------------------


def vector_infos(infos: Iterable[tuple[int, Mapping[Any, Any]]], num_rows: int) -> dict[Any, Any]:
    """One dict of arrays over all rows, from some rows and their infos."""
    by_key: dict[Any, tuple[list[int], list[Any]]] = {}
    for row, info in infos:
        for key, value in info.items():
            if key not in by_key:
                by_key[key] = [], []
            rows, values = by_key[key]
            rows.append(row)
            values.append(value)
    result: dict[Any, Any] = {}
    for key, (rows, values) in by_key.items():
        mask = np.zeros(num_rows, np.bool_)
        mask[rows] = True
        joined: Any = None
        if key != FINAL_OBS:  # last observations are easier to use one by one
            types = {*map(type, values)}
            if all(issubclass(one, dict) for one in types):
                joined = vector_infos(zip(rows, values), num_rows)
            elif all(issubclass(one, np.ndarray) for one in types) or all(issubclass(one, _NUMBERS) for one in types):
                joined = _of_numbers(rows, values, types, num_rows)
        if joined is None:
            joined = np.empty(num_rows, object)  # of None
            for row, value in zip(rows, values):
                joined[row] = value
        result[key], result[f"_{key}"] = joined, mask
    return result


def _of_numbers(rows: list[int], values: list[Any], types: set[type], num_rows: int) -> NDArray[Any] | None:
    """An array of numbers, or of arrays of one shape; None if one array cannot hold the values unchanged."""
    kind = _KINDS.get(type(values[0])) if len(types) == 1 else None
    arrays: Any = None if kind is None else np.asarray(values)
    if kind is None or arrays.dtype.kind != kind:
        arrays = [np.asarray(value) for value in values]
        if len({array.shape for array in arrays}) > 1 or any(array.dtype.hasobject for array in arrays):
            return None
        try:
            dtype = np.result_type(*{array.dtype for array in arrays})
        except TypeError:
            return None
        for array in arrays:  # numbers must stay numbers, and large whole ones the same
            if dtype.kind in "US" and array.dtype.kind != dtype.kind:
                return None
            if array.dtype.kind in "iu" and array.dtype != dtype:
                with np.errstate(invalid="ignore"):
                    if not np.array_equal(array.astype(dtype).astype(array.dtype), array):
                        return None
        arrays = np.array(arrays, dtype)
    joined = np.zeros((num_rows, *arrays.shape[1:]), arrays.dtype)
    joined[rows] = arrays
    return joined


def infos_by_agent(
    infos: Mapping[int, Mapping[Any, Any]], agents: Sequence[AgentID], num_envs: int
) -> dict[Any, dict[Any, Any]]:
    """Infos of all environments by agent, and by other keys, whose values need not be dicts."""
    if isinstance(infos, InfoColumns):
        arrays = infos.arrays
        rows = None if len(arrays.env_ids) == num_envs else arrays.env_ids
        informed = rows if arrays.informed is None else arrays.env_ids[arrays.informed]
        by_key: dict[Any, dict[Any, Any]] = {}
        for column, agent in enumerate(agents):
            having = informed
            if arrays.present is not None:
                mask = arrays.present[:, column]
                if arrays.plain is not None and not mask.any():
                    by_key[agent] = {}
                    continue
                having = arrays.env_ids[mask if arrays.informed is None else mask & arrays.informed]
            by_key[agent] = _placed(arrays.of_agent(column), rows, having, num_envs)
        return by_key | ({COMMON: _placed(arrays.common, rows, informed, num_envs)} if arrays.common else {})
    if not infos:
        return {agent: {} for agent in agents}
    by_key = {
        agent: vector_infos(
            [(env_id, agent_info(env_id, env_infos, agent)) for env_id, env_infos in infos.items()], num_envs
        )
        for agent in agents
    }
    for key in dict.fromkeys([key for env_infos in infos.values() for key in env_infos if key not in by_key]):
        values = {env_id: env_infos[key] for env_id, env_infos in infos.items() if key in env_infos}
        if all(isinstance(value, Mapping) for value in values.values()):
            by_key[key] = vector_infos(values.items(), num_envs)
        else:
            by_key |= vector_infos([(env_id, {key: value}) for env_id, value in values.items()], num_envs)
    return by_key


def _placed(
    columns: Mapping[str, Any], rows: NDArray[Any] | None, having: NDArray[Any] | None, num_rows: int
) -> dict[str, Any]:
    """Columns of some `rows` in the layout of `vector_infos`, with masks that are True for `having`; None for all."""
    mask = np.zeros(num_rows, np.bool_)
    mask[... if having is None else having] = True
    result: dict[str, Any] = {}
    for key, values in columns.items():
        if isinstance(values, dict):
            placed: Any = _placed(values, rows, having, num_rows)
        elif rows is None:
            placed = values  # not copied
        else:
            placed = np.zeros((num_rows, *values.shape[1:]), values.dtype)
            placed[rows] = values
        result[key], result[f"_{key}"] = placed, mask.copy()
    return result


# -- infos of one environment ------------------------------------------------------------------------------------------


def agent_info(env_id: int, infos: Mapping[Any, Any], agent: AgentID) -> Mapping[Any, Any]:
    """The info of one agent; empty if it is missing or None. Raises `ValueError` if it is not a dict."""
    info = infos.get(agent)
    if type(info) is not dict and info is not None and not isinstance(info, Mapping):
        raise ValueError(f"environment {env_id}: the infos of agent {agent!r} must be a dict, got {info!r}")
    return info or {}


def env_infos(infos: Mapping[Any, Any], agents: Sequence[AgentID]) -> dict[Any, Any]:
    """The infos of an environment itself: the entries under keys that are not agents."""
    known = {*agents}
    return {key: info for key, info in infos.items() if key not in known}


def common_info(common: Any) -> dict[Any, Any]:
    """What `__common__` has for the infos of agents: not the text of a report, since loggers average every key."""
    if not isinstance(common, Mapping):
        return {}
    return {key: value for key, value in common.items() if key != "error" or common.get("restarted") is not True}


def agent_infos(
    env_id: int,
    infos: Mapping[Any, Any],
    agents: Sequence[AgentID],
    possible_agents: Sequence[AgentID],
    *,
    next_episode: bool = False,
) -> list[dict[Any, Any]]:
    """For each of some agents, the infos of its environment, copied, updated with its own.

    If the step began the `next_episode`: the reset's infos, with `final_info` and, if any, `final_obs` of the old one.
    """
    of_env = env_infos(infos, possible_agents)
    rows = [{**{k: copy.copy(info) for k, info in of_env.items()}, **agent_info(env_id, infos, a)} for a in agents]
    for index, info in enumerate(rows if next_episode else ()):
        last, of_reset = divided(info, of_env)
        final = {FINAL_OBS: info[FINAL_OBS]} if FINAL_OBS in info else {}
        rows[index] = {**of_env, **of_reset, "final_info": last, **final}
    return rows


def divided(info: Mapping[Any, Any], of_env: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Divide a row of `agent_infos`: the last info of an episode, and the info of the reset in the same step."""
    last = {key: value for key, value in info.items() if key not in (FINAL_OBS, RESET_INFO)}
    final = {
        key: value[RESET_INFO] for key, value in of_env.items() if isinstance(value, Mapping) and RESET_INFO in value
    }
    return last, {**final, **info.get(RESET_INFO, {})}
