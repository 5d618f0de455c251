"""The batch as arrays over all environments: the other view, beside dicts, of what lies in the block.

Facades are made of it. Actions, and what lies in the block of transitions, cross between the block and arrays whole,
with no loop over environments; transitions of which more travels pickled than infos are taken from their dicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.runtime.batch import Batch
from marl_parallel.runtime.columns import Column, Mismatch
from marl_parallel.runtime.heads import BITS
from marl_parallel.runtime.layout import alike
from marl_parallel.runtime.transition import ALL, is_empty_info

_IN_INFOS = {"infos", "reset_infos"}
"""What may travel pickled of a transition without that anything but its infos is missing in the block."""

_OBSERVED, _REWARDED = BITS["observations"], BITS["rewards"]
_MASKS = np.array([_OBSERVED | _REWARDED, BITS["acting"], _OBSERVED, _REWARDED], np.uint8)

_ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)


class Group(NamedTuple):
    """Agents with equal observation spaces.

    Attributes:
        space: Theirs.
        positions: Theirs among the possible agents.
    """

    space: Space[Any]
    positions: list[int]


class Arrays(NamedTuple):
    """One transition of every environment, for `n` possible agents.

    Attributes:
        observations: For each group, what its agents see: arrays `(num_envs, agents of the group, ...)`, in the form of
            the space (dicts and tuples of them). What has no fixed form is an array of objects. Absent rows are zeros,
            or None.
        rewards: `(num_envs, n)`, float64; 0.0 where there is none.
        terminations: `(num_envs, n)`, bool; False where there is none.
        truncations: Likewise.
        terminated: `(num_envs,)`, bool: `terminateds["__all__"]`.
        truncated: Likewise.
        present: `(num_envs, n)`, bool: who was observed or rewarded.
        acting: `(num_envs, n)`, bool: who should act next.
        infos: By environment, its infos as they are in the dicts, where any of them says something.
        observed: `(num_envs, n)`, bool: whose observations are data.
        rewarded: `(num_envs, n)`, bool: who has a reward.
    """

    observations: list[Any]
    rewards: NDArray[np.float64]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    present: NDArray[np.bool_]
    acting: NDArray[np.bool_]
    infos: dict[int, dict[Any, Any]]
    observed: NDArray[np.bool_]
    rewarded: NDArray[np.bool_]


class Stacked(NamedTuple):
    """Actions of several agents with equal action spaces.

    Attributes:
        agents: Whose.
        values: Theirs, in the form of the space: arrays `(num_envs, agents, ...)`, dicts and tuples of them.
    """

    agents: tuple[AgentID, ...]
    values: Any


Actions: TypeAlias = Mapping[Any, Any] | Sequence[Stacked]
"""By agent, stacked in the form of its space: arrays `(num_envs, ...)`, dicts and tuples of them, or one value for each
environment; or of several agents at a time."""


class ArrayBatch:
    """Reads and writes a batch as arrays.

    Args:
        batch: Its schema names all agents, and a space for each of them.
        copy: Whether each observation is in arrays of the caller's own; else they are written again by the next `read`.

    Attributes:
        agents: The possible agents, in their order.
        groups: Who of them is observed in the same form.
    """

    def __init__(self, batch: Batch, *, copy: bool) -> None:
        self._batch, self._copy = batch, copy
        layout, schema = batch.layout, batch.layout.schema
        self.agents = list(schema.possible_agents)
        self.groups = [Group(*group) for group in alike(schema.observation_spaces, self.agents)]
        self._column = {agent: place for place, agent in enumerate(self.agents)}
        self._rows = {
            self.agents[position]: (group, row)
            for group, (_, positions) in enumerate(self.groups)
            for row, position in enumerate(positions)
        }
        self._ordered = [(agent, self._rows[agent]) for agent in self.agents]
        self._columns = [column for column, _ in layout.observations.groups]
        self._in_block = bool(layout.agents) and layout.observations.agents == self.agents
        self._actions_in_block = bool(layout.agents) and layout.actions.agents == self.agents and not batch.checks
        self._num_envs = layout.num_records
        self._shape = self._num_envs, len(self.agents)
        self._everybody, self._nobody = np.ones(self._shape, np.bool_), np.zeros(self._shape, np.bool_)
        self._observations: list[Any] = [None] * len(self.groups)
        self._row_agents: tuple[tuple[AgentID, ...], ...] | None = None
        self._row_places: list[tuple[Column, slice]] | None = None

    # -- actions ---------------------------------------------------------------------------------------------------

    def write(self, actions: Actions, env_ids: Sequence[int] | None = None) -> dict[int, bytes]:
        """Write the actions of everybody who acts; what is there for others is not looked at.

        Args:
            actions: By agent or by several agents; see `Actions`.
            env_ids: Which environments are to be stepped; None for all of them. Rows of the others are not looked at.

        Returns:
            By environment, what does not fit into the block, pickled.

        Raises:
            ValueError: An acting agent has none, somebody is unknown, or an array is not what its space declares.
        """
        everyone = self._batch.acting == [self.agents] * self._num_envs
        wanted = None if everyone else self.acting()
        try:
            if not isinstance(actions, Mapping):
                if self._write_rows(actions, wanted):
                    return {}
                actions = {a: _column(of.values, row) for of in actions for row, a in enumerate(of.agents)}
            unknown = [agent for agent in actions if agent not in self._column]
            if unknown:
                raise ValueError(f"actions for {unknown[0]!r}, which is none of the agents {self.agents}")
            ids = self._batch.env_ids if env_ids is None else env_ids
            if not everyone or len(actions) != len(self.agents):
                self._check_all_there(actions, ids)
            if self._actions_in_block:
                self._batch.actions.write_stacked(actions, wanted)
                return {}
        except Mismatch as error:
            raise ValueError(str(error)) from None
        schema = self._batch.layout.schema
        rows = [
            {agent: _at(schema.action_spaces[agent], actions[agent], env_id) for agent in self._batch.acting[env_id]}
            for env_id in ids
        ]
        return self._batch.write_actions(ids, rows)

    def _write_rows(self, actions: Sequence[Stacked], wanted: NDArray[np.bool_] | None) -> bool:
        """Write actions of several agents at a time; says whether it could, else they are to be taken apart."""
        places = tuple(of.agents for of in actions)
        if places != self._row_agents:
            self._row_agents, columns = places, self._batch.layout.actions
            complete = sorted(self._column.get(a, -1) for of in places for a in of) == [*range(len(self.agents))]
            found = [columns.rows_of(of) for of in places] if self._actions_in_block and complete else [None]
            self._row_places = [place for place in found if place is not None] if None not in found else None
        if self._row_places is None:
            return False
        rows = [(of.agents, *place, of.values) for of, place in zip(actions, self._row_places)]
        self._batch.actions.write_rows(rows, wanted)
        return True

    def acting(self) -> NDArray[np.bool_]:
        """Who should act next: `(num_envs, agents)`."""
        mask = np.zeros(self._shape, np.bool_)
        for env_id, acting in enumerate(self._batch.acting):
            mask[env_id, [self._column[agent] for agent in acting]] = True
        return mask

    def _check_all_there(self, actions: Mapping[AgentID, Any], env_ids: Sequence[int]) -> None:
        for env_id in env_ids:
            acting = self._batch.acting[env_id]
            for agent in acting:
                if agent not in actions:
                    raise ValueError(
                        f"environment {env_id}: no action for agent {agent!r}; expected one for each of {acting}, "
                        f"got actions of {[*actions]}"
                    )

    # -- transitions -----------------------------------------------------------------------------------------------

    def read(self, extras: Mapping[int, Any]) -> Arrays:
        """The transitions of all environments.

        Args:
            extras: By environment, what travelled pickled, or all of it.

        Raises:
            ValueError: Something has no place in an array, such as a vector of rewards or an agent that is unknown.
        """
        if not self._in_block:
            observations = [_zeros(space, (self._num_envs, len(of))) for space, of in self.groups]
            arrays = self._unflagged(observations, np.zeros(self._shape), self._nobody)
        elif not extras and self._batch.transitions.all_quiet():
            self._batch.note_quiet(range(self._num_envs))
            return self._unflagged(self._all_observations(), self._batch.transitions.all_rewards(), self._everybody)
        else:
            arrays = self._from_block()
        for env_id in range(self._num_envs):
            more = extras.get(env_id)
            if self._in_block and (more is None or (type(more) is dict and more.keys() <= _IN_INFOS)):
                self._note_infos(arrays, env_id, self._batch.read_rest(env_id, more))
            else:
                self._read_dicts(arrays, env_id, extras)
        return arrays

    def _unflagged(self, observations: list[Any], rewards: NDArray[np.float64], there: NDArray[np.bool_]) -> Arrays:
        """With these agents there and acting, and no flag set."""
        no = self._nobody
        of_all = no[:, 0]
        return Arrays(
            observations, rewards, no.copy(), no.copy(), of_all.copy(), of_all.copy(),
            there.copy(), there.copy(), {}, there.copy(), there.copy(),
        )  # fmt: skip

    def _from_block(self) -> Arrays:
        """All but the infos, as the block has it."""
        transitions, n = self._batch.transitions, len(self.agents)
        flags, (present, acting, observed, rewarded) = transitions.all_flags(), transitions.all_presence(_MASKS)
        observations = self._all_observations()
        self._clear_unobserved(observations, observed)
        return Arrays(
            observations, transitions.all_rewards(), flags[:, 0, :n], flags[:, 1, :n], flags[:, 0, n], flags[:, 1, n],
            present, acting, {}, observed, rewarded,
        )  # fmt: skip

    def _clear_unobserved(self, observations: list[Any], observed: NDArray[np.bool_]) -> None:
        """Put zeros where the block still has what was observed once."""
        if not observed.all():
            for stacked, (_, positions) in zip(observations, self.groups):
                _clear(stacked, ~observed[:, positions])

    def read_some(self, env_ids: Sequence[int], extras: Mapping[int, Any], before: Arrays) -> Arrays:
        """The transitions of some environments, among the observations of all.

        Args:
            env_ids: Whose; the others have no rewards, flags and infos.
            extras: As of `read`.
            before: What was read last.
        """
        observations = self._all_observations() if self._in_block else [_copied(one) for one in before.observations]
        if self._in_block:
            self._clear_unobserved(observations, before.observed)
        arrays = self._unflagged(observations, np.zeros(self._shape), self._nobody)._replace(
            present=before.present.copy(),
            acting=before.acting.copy(),
            observed=before.observed.copy(),
        )
        for env_id in env_ids:
            self._read_dicts(arrays, env_id, extras)
        return arrays

    def by_agent(self, observations: list[Any]) -> dict[Any, Any]:
        """What each agent sees, of the arrays of all groups: views of shape `(num_envs, ...)`."""
        return {agent: _column(observations[group], row) for agent, (group, row) in self._ordered}

    def _all_observations(self) -> list[Any]:
        """Everybody's, as they lie in the block."""
        observations = [column.copied(out) for column, out in zip(self._columns, self._observations)]
        if not self._copy:
            self._observations = observations
        return observations

    def _read_dicts(self, arrays: Arrays, env_id: int, extras: Mapping[int, Any]) -> None:
        (seen,), (rewards,), (terminateds,), (truncateds,), (infos,) = self._batch.read((env_id,), extras)
        for part in arrays:
            if part is not arrays.infos:
                _clear(part, env_id)
        for agent, observation in seen.items():
            group, row = self._rows[self._known(env_id, agent)]
            _put(arrays.observations[group], (env_id, row), observation, f"environment {env_id}: agent {agent!r}")
            arrays.observed[env_id, self._column[agent]] = True
        for agent, reward in rewards.items():
            place = env_id, self._column[self._known(env_id, agent)]
            arrays.rewarded[place] = True
            try:
                arrays.rewards[place] = reward
            except (TypeError, ValueError):
                raise ValueError(
                    f"environment {env_id}: the reward of agent {agent!r} is {reward!r}; in arrays, it must be a number"
                ) from None
        arrays.present[env_id] = arrays.observed[env_id] | arrays.rewarded[env_id]
        for flags, of_agents, of_all in (
            (terminateds, arrays.terminations, arrays.terminated),
            (truncateds, arrays.truncations, arrays.truncated),
        ):
            for agent, flag in flags.items():
                if agent == ALL:
                    of_all[env_id] = flag
                else:
                    of_agents[env_id, self._column[self._known(env_id, agent)]] = flag
        arrays.acting[env_id, [self._column[agent] for agent in self._batch.acting[env_id]]] = True
        self._note_infos(arrays, env_id, infos)

    @staticmethod
    def _note_infos(arrays: Arrays, env_id: int, infos: dict[Any, Any]) -> None:
        if not all(map(is_empty_info, infos.values())):
            arrays.infos[env_id] = infos

    def _known(self, env_id: int, agent: AgentID) -> AgentID:
        if agent not in self._column:
            raise ValueError(
                f"environment {env_id}: agent {agent!r} is none of the possible agents {self.agents}, "
                "so that arrays have no row for it"
            )
        return agent


# -- values of a space, stacked ------------------------------------------------------------------------------------


def _zeros(space: Space[Any], shape: tuple[int, ...]) -> Any:
    if type(space) is spaces.Dict:
        return {key: _zeros(child, shape) for key, child in space.spaces.items()}
    if type(space) is spaces.Tuple:
        return tuple(_zeros(child, shape) for child in space.spaces)
    if type(space) is spaces.Discrete:
        return np.zeros(shape, np.int64)
    if type(space) in _ARRAYS:
        return np.zeros((*shape, *(space.shape or ())), space.dtype)
    return np.full(shape, None, object)


def _put(stacked: Any, place: tuple[int, int], value: Any, whose: str) -> None:
    if isinstance(stacked, dict) and isinstance(value, dict) and stacked.keys() == value.keys():
        for key, child in stacked.items():
            _put(child, place, value[key], whose)
    elif isinstance(stacked, tuple) and isinstance(value, tuple) and len(stacked) == len(value):
        for child, part in zip(stacked, value):
            _put(child, place, part, whose)
    elif isinstance(stacked, np.ndarray) and (stacked.dtype == object or np.shape(value) == stacked.shape[2:]):
        stacked[place] = value
    else:
        raise ValueError(f"{whose} observed {value!r}, which is not of the form that its space declares")


def _clear(stacked: Any, place: Any) -> None:
    if isinstance(stacked, np.ndarray):
        stacked[place] = None if stacked.dtype == object else 0
    else:
        for child in stacked.values() if isinstance(stacked, dict) else stacked:
            _clear(child, place)


def _column(stacked: Any, row: int) -> Any:
    if isinstance(stacked, dict):
        return {key: _column(child, row) for key, child in stacked.items()}
    if isinstance(stacked, tuple):
        return tuple(_column(child, row) for child in stacked)
    return tuple(stacked[:, row]) if stacked.dtype.hasobject else stacked[:, row]


def _copied(stacked: Any) -> Any:
    if isinstance(stacked, dict):
        return {key: _copied(child) for key, child in stacked.items()}
    return tuple(map(_copied, stacked)) if isinstance(stacked, tuple) else stacked.copy()


def _at(space: Space[Any], stacked: Any, env_id: int) -> Any:
    """One environment's value."""
    if isinstance(space, spaces.Dict) and isinstance(stacked, Mapping):
        return {key: _at(child, stacked[key], env_id) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and isinstance(stacked, tuple) and len(stacked) == len(space.spaces):
        return tuple(_at(child, part, env_id) for child, part in zip(space.spaces, stacked))
    return stacked[env_id]
