"""The batch as arrays over all environments; facades use this view of it, `ParallelEnv` the one as dicts.

`ArrayBatch` is the `ArrayView` of a block, which arrays enter and leave whole, without a loop over environments. Only
environments of which more than infos travelled pickled are read from their dicts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core import stacking
from marl_parallel.core.columns import write_stacked
from marl_parallel.core.records import BITS, FLAG_BITS, VECTOR_TAG
from marl_parallel.core.schema import alike
from marl_parallel.core.spaces import Mismatch, copied, is_vector, tree_map
from marl_parallel.core.transition import ALL, are_empty

if TYPE_CHECKING:
    from marl_parallel.core.batch import Batch


class Group(NamedTuple):
    """Agents with equal observation spaces, by their positions among the possible agents."""

    space: Space[Any]
    positions: list[int]


class Arrays(NamedTuple):
    """One transition of every environment, for `n` possible agents.

    Attributes:
        observations: For each group, what its agents see: arrays `(num_envs, agents of the group, ...)`, in the form of
            the space (dicts and tuples of them). Values without a fixed form are an array of objects. Absent rows are
            zeros, or None.
        rewards: `(num_envs, n)`, float64; 0.0 if there is none.
        terminations: `(num_envs, n)`, bool; False if there is none.
        truncations: Likewise.
        terminated: `(num_envs,)`, bool: `terminateds["__all__"]`.
        truncated: Likewise.
        present: `(num_envs, n)`, bool: which agents were observed or rewarded.
        acting: `(num_envs, n)`, bool: which agents act next.
        infos: By environment, the infos of its dict, unless all are empty. Not to be changed.
        observed: `(num_envs, n)`, bool: which agents have an observation. Not to be changed.
        rewarded: `(num_envs, n)`, bool: which agents have a reward. Not to be changed.
        flagged: `(num_envs, n)`, bool: which agents have a flag, True or False. Not to be changed.
        plain: If True, all agents are present and act, no flag is set and all infos are empty, as in most steps.
        shared_flags: If True, each agent has the flags of its environment.
        vectors: By agent, rewards that are vectors: `(num_envs, *shape)` in the dtype of its reward space, zeros if
            there is none. Its column in `rewards` is 0.0. Empty if no agent declares a reward space.
        vectored: `(num_envs, n)`, bool: which rewards are in `vectors`; None if that is empty.
    """

    observations: list[Any]
    rewards: NDArray[np.float64]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    present: NDArray[np.bool_]
    acting: NDArray[np.bool_]
    infos: Mapping[int, dict[Any, Any]]
    observed: NDArray[np.bool_]
    rewarded: NDArray[np.bool_]
    flagged: NDArray[np.bool_]
    plain: bool = False
    shared_flags: bool = False
    vectors: Mapping[AgentID, NDArray[Any]] = MappingProxyType({})
    vectored: NDArray[np.bool_] | None = None


class Stacked(NamedTuple):
    """Actions of several agents with equal action spaces.

    Attributes:
        agents: The agents.
        values: Their actions in the form of the space: arrays `(num_envs, agents, ...)`, dicts and tuples of them.
    """

    agents: tuple[AgentID, ...]
    values: Any


Actions: TypeAlias = Mapping[Any, Any] | list[Stacked]
"""By agent, stacked in the form of its space: arrays `(num_envs, ...)`, dicts and tuples of them, or one value for each
environment; or of several agents at a time. Those of `Discrete` spaces reach simulators as int64."""


def of_acting(env_id: int, actions: Any, acting: Sequence[AgentID]) -> dict[AgentID, Any]:
    """The actions of the agents that act; `TypeError` unless `actions` is a dict, `ValueError` if one is missing."""
    if not isinstance(actions, Mapping):
        kind = type(actions).__name__
        raise TypeError(f"environment {env_id}: expected a dict of actions keyed by agent, got {kind}")
    for agent in acting:
        if agent not in actions:
            raise ValueError(
                f"environment {env_id}: no action for agent {agent!r}; expected one for each of {[*acting]}, "
                f"got actions of {[*actions]}"
            )
    return {agent: actions[agent] for agent in acting}


class ArrayView:
    """The agents of a batch that is read and written as arrays; the schema names them all, and a space for each."""

    def __init__(self, schema: Schema) -> None:
        self.agents = list(schema.possible_agents)
        self.groups = [Group(*group) for group in alike(schema.observation_spaces, self.agents)]
        self._column = {agent: place for place, agent in enumerate(self.agents)}
        rows = {at: (group, row) for group, (_, of) in enumerate(self.groups) for row, at in enumerate(of)}
        self.places = {agent: rows[place] for agent, place in self._column.items()}  # the group, and the row in it

    def by_agent(self, observations: list[Any]) -> dict[Any, Any]:
        """The observations of each agent, of the arrays of all groups: views of shape `(num_envs, ...)`."""
        return {agent: stacking.column(observations[group], row) for agent, (group, row) in self.places.items()}

    def _checked(self, actions: Actions, acting: list[list[AgentID]], env_ids: Sequence[int]) -> Mapping[AgentID, Any]:
        """Actions by agent; `ValueError` if an agent is unknown, or an acting one has none."""
        if isinstance(actions, list):
            actions = {a: stacking.column(of.values, row) for of in actions for row, a in enumerate(of.agents)}
        if actions.keys() != self._column.keys():
            for agent in actions:
                if agent not in self._column:
                    raise ValueError(f"actions for {agent!r}, which is none of the agents {self.agents}")
            for env_id in env_ids:
                of_acting(env_id, actions, acting[env_id])
        return actions


_INFOS = {"infos", "reset_infos"}
_OBSERVED, _REWARDED = BITS["observations"], BITS["rewards"]
_MASKS = np.array([_OBSERVED | _REWARDED, BITS["acting"], _OBSERVED, _REWARDED, FLAG_BITS], np.uint8)[:, None, None]


class ArrayBatch(ArrayView):
    """The arrays of a block; without `copy`, the next `read` writes to the same observations again."""

    def __init__(self, batch: Batch, *, copy: bool) -> None:
        layout, schema = batch.layout, batch.layout.schema
        super().__init__(schema)
        self._batch, self._copy = batch, copy
        self._in_block = bool(layout.agents) and layout.observations.agents == self.agents
        self._actions_in_block = bool(layout.agents) and layout.actions.agents == self.agents and not batch.checks
        self._num_envs = layout.num_records
        self._shape = self._num_envs, len(self.agents)
        self._observations: list[Any] | None = None
        # Of environments that were read from dicts: their last observations, and which agents were present.
        self._from_dicts: dict[int, tuple[Mapping[Any, Any], NDArray[np.bool_]]] = {}
        self._reward_spaces = {a: schema.reward_spaces[a] for a in self.agents if a in schema.reward_spaces}
        self._no, self._no_env = np.zeros(self._shape, np.bool_), np.zeros(self._num_envs, np.bool_)  # to be copied
        self._everywhere = np.ones(self._shape, np.bool_)
        self._everywhere.flags.writeable = False
        self._slices_of = functools.lru_cache(8)(layout.actions.slices_of)

    def write(self, actions: Actions, env_ids: Sequence[int] | None = None) -> dict[int, bytes]:
        """Write the actions of the agents that act, and ignore all others; returns the payload of the step.

        Raises `ValueError` if one of these has none, an agent is unknown, or an array is not what its space declares.
        """
        batch = self._batch
        everyone = batch.all_act or batch.acting == [self.agents] * self._num_envs
        acting = None if everyone else self.acting()
        ids = batch.env_ids if env_ids is None else env_ids
        try:
            if isinstance(actions, list) and self._actions_in_block:
                slices = self._slices_of(tuple(tuple(of.agents) for of in actions))
                if slices is not None:
                    for (agents, values), (column, rows) in zip(actions, slices):
                        write_stacked(column, rows, values, agents)
                    batch.actions.mark_present(acting)
                    return {}
            by_agent = self._checked(actions, batch.acting, ids)
            if self._actions_in_block:
                try:
                    batch.layout.actions.write_stacked(by_agent)
                    batch.actions.mark_present(acting)
                    return {}
                except Mismatch:
                    if everyone:
                        raise
                    # The wrong ones may be of agents that do not act.
            return batch.write_actions(ids, self._by_env(by_agent, ids))
        except Mismatch as error:
            raise ValueError(str(error)) from None

    def _by_env(self, actions: Mapping[AgentID, Any], ids: Sequence[int]) -> list[dict[AgentID, Any]]:
        """For each environment, the actions of the agents that act."""
        declared, acting = self._batch.layout.schema.action_spaces, self.acting()[[*ids]]
        by_env: dict[int, dict[AgentID, Any]] = {env_id: {} for env_id in ids}
        for place, agent in enumerate(self.agents):
            rows = [ids[row] for row in np.flatnonzero(acting[:, place]).tolist()]
            try:
                values = stacking.picked(declared[agent], actions.get(agent), rows, self._num_envs)
            except Mismatch as error:
                raise Mismatch(f"the actions of agent {agent!r}: {error}") from error
            for env_id, action in zip(rows, values):
                by_env[env_id][agent] = action
        return [*by_env.values()]

    def acting(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._shape, np.bool_)
        for env_id, acting in enumerate(self._batch.acting):
            mask[env_id, [self._column[agent] for agent in acting]] = True
        return mask

    def read(self, extras: Mapping[int, Any]) -> Arrays:
        """The transitions of all environments, with the extras of the step or reset.

        Raises `ValueError` if something has no place in an array, such as an undeclared vector of rewards or an unknown
        agent. All environments have been stepped, and their state is known.
        """
        batch = self._batch
        if self._in_block and not extras and batch.transitions.all_plain():
            batch.note_plain(range(self._num_envs))
            self._from_dicts.clear()
            no, of_envs, everywhere = self._no.copy, self._no_env.copy, self._everywhere
            return self._with_vectors(Arrays(
                self._all_observations(), batch.transitions.rewards.copy(), no(), no(), of_envs(), of_envs(),
                everywhere.copy(), everywhere.copy(), {}, everywhere, everywhere, everywhere, True, True,
            ))  # fmt: skip
        if not self._in_block:
            return self.read_some(batch.env_ids, extras, self._empty())
        left = {env_id for env_id, more in extras.items() if type(more) is not dict or more.keys() - _INFOS}
        ids = tuple([env_id for env_id in batch.env_ids if env_id not in left]) if left else batch.env_ids
        arrays = self._from_block()
        infos = {env_id: infos for env_id, infos in zip(ids, batch.read_infos(ids, extras)) if infos is not None}
        self._from_dicts = {env_id: self._from_dicts[env_id] for env_id in self._from_dicts.keys() & left}
        return self.read_some(sorted(left), extras, arrays._replace(infos=infos))

    def _empty(self, observations: list[Any] | None = None) -> Arrays:
        """No agent is present; the observations are zeros unless passed."""
        if observations is None:
            observations = [stacking.zeros(space, (self._num_envs, len(of))) for space, of in self.groups]
        vectors = {a: np.zeros((self._num_envs, *(s.shape or ())), s.dtype) for a, s in self._reward_spaces.items()}
        terminations, truncations, present, acting, observed, rewarded, flagged = np.zeros((7, *self._shape), np.bool_)
        return Arrays(
            observations, np.zeros(self._shape), terminations, truncations, self._no_env.copy(), self._no_env.copy(),
            present, acting, {}, observed, rewarded, flagged,
            vectors=vectors, vectored=self._no.copy() if vectors else None,
        )  # fmt: skip

    def _from_block(self) -> Arrays:
        """All but the infos, as they are in the block."""
        transitions, n = self._batch.transitions, len(self.agents)
        flags = (transitions.flags & 1).view(np.bool_)
        present, acting, observed, rewarded, flagged = (transitions.presence & _MASKS) != 0
        observations = self._all_observations()
        if not observed.all():  # the block still has earlier observations
            for stacked, (_, positions) in zip(observations, self.groups):
                stacking.clear(stacked, ~observed[:, positions])
        return self._with_vectors(Arrays(
            observations, transitions.rewards.copy(), flags[:, 0, :n], flags[:, 1, :n], flags[:, 0, n], flags[:, 1, n],
            present, acting, {}, observed, rewarded, flagged,
        ))  # fmt: skip

    def _all_observations(self) -> list[Any]:
        columns = [column.array for column, _ in self._batch.layout.observations.groups]
        if self._observations is None:
            observations: list[Any] = copied(columns)
            self._observations = None if self._copy else observations
            return observations
        tree_map(np.copyto, self._observations, columns)
        return self._observations

    def _with_vectors(self, arrays: Arrays) -> Arrays:
        """With the vector rewards that are in the block."""
        if not self._reward_spaces:
            return arrays
        transitions, columns = self._batch.transitions, self._batch.layout.rewards
        there = (transitions.tags == VECTOR_TAG) & ((transitions.presence & _REWARDED) != 0)
        values = {}
        for column, positions in columns.groups:
            stacked = copied(column.array)
            for row, position in enumerate(positions):
                agent = columns.agents[position]
                values[agent] = stacked[:, row]
                values[agent][~there[:, self._column[agent]]] = 0
        return arrays._replace(vectors=values, vectored=there)

    def last(self) -> Arrays:
        """The last observations, and which agents are present and act; for `read_some`, before a step."""
        seen = self._from_block() if self._in_block else self._empty()
        arrays = self._empty(seen.observations)._replace(
            present=seen.present, acting=seen.acting, observed=seen.observed
        )
        for env_id, (observations, present) in self._from_dicts.items():
            self._clear(arrays, env_id)
            self._put_observations(arrays, env_id, observations)
            arrays.present[env_id] = present
            arrays.acting[env_id, [self._column[agent] for agent in self._batch.acting[env_id]]] = True
        return arrays

    def read_some(self, env_ids: Sequence[int], extras: Mapping[int, Any], last: Arrays) -> Arrays:
        """As `read`, of some environments, written into `last`; the others have no rewards, flags and infos."""
        errors: list[ValueError] = []
        for env_id in env_ids:  # all of them, before something that has no place in an array is an error
            try:
                self._put(last, env_id, [rows[0] for rows in self._batch.read((env_id,), extras)])
            except ValueError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return last

    def note(self, env_id: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> None:
        """Note the transition of one environment that was stepped or reset by dicts, for `last`."""
        seen = {**observations, **rewards}
        self._from_dicts[env_id] = copied(observations), np.array([agent in seen for agent in self.agents], np.bool_)

    def _put(self, arrays: Arrays, env_id: int, dicts: Sequence[dict[Any, Any]]) -> None:
        """Put the dicts of one environment in place of its entries in the arrays."""
        observations, rewards, terminateds, truncateds, infos = dicts
        self._clear(arrays, env_id)
        self._put_observations(arrays, env_id, observations)
        for agent, reward in rewards.items():
            place = env_id, self._column[self._known(env_id, agent)]
            arrays.rewarded[place] = True
            if agent in arrays.vectors and is_vector(reward):
                assert arrays.vectored is not None
                arrays.vectors[agent][env_id], arrays.vectored[place] = reward, True
                continue
            try:
                if reward is None or isinstance(reward, str | bytes):  # NumPy would make a number of them
                    raise TypeError
                arrays.rewards[place] = reward
            except (TypeError, ValueError):
                raise ValueError(
                    f"environment {env_id}: the reward of agent {agent!r} is {reward!r}; in arrays, it must be a "
                    "number, or a vector of the agent's reward_space, if it declares one"
                ) from None
        arrays.present[env_id] = arrays.observed[env_id] | arrays.rewarded[env_id]
        self._from_dicts[env_id] = observations, arrays.present[env_id].copy()
        for flags, of_agents, of_env in (
            (terminateds, arrays.terminations, arrays.terminated),
            (truncateds, arrays.truncations, arrays.truncated),
        ):
            for agent, flag in flags.items():
                if agent == ALL:
                    of_env[env_id] = flag
                else:
                    place = env_id, self._column[self._known(env_id, agent)]
                    of_agents[place], arrays.flagged[place] = flag, True
        arrays.acting[env_id, [self._column[agent] for agent in self._batch.acting[env_id]]] = True
        if not are_empty(infos.values()):
            assert isinstance(arrays.infos, dict)
            arrays.infos[env_id] = infos

    @staticmethod
    def _clear(arrays: Arrays, env_id: int) -> None:
        for part in (*arrays, *arrays.vectors.values()):
            if isinstance(part, list | np.ndarray):
                stacking.clear(part, env_id)

    def _put_observations(self, arrays: Arrays, env_id: int, observations: Mapping[Any, Any]) -> None:
        for agent, observation in observations.items():
            group, row = self.places[self._known(env_id, agent)]
            whose = f"environment {env_id}: the observation of agent {agent!r}"
            stacking.put(arrays.observations[group], (env_id, row), observation, whose)
            arrays.observed[env_id, self._column[agent]] = True

    def _known(self, env_id: int, agent: AgentID) -> AgentID:
        if agent not in self._column:
            raise ValueError(
                f"environment {env_id}: agent {agent!r} is none of the possible agents {self.agents}, "
                "so that arrays have no row for it"
            )
        return agent
