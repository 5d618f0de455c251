"""The batch as arrays over all environments: the other view of it, beside dicts.

Facades use an `ArrayView`. `ArrayBatch` is that of a block: actions and transitions cross between the block and arrays
whole, without a loop over environments, except for environments of which more than infos travelled pickled: their
transitions are taken from their dicts. The view of a native simulator is in `native.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.adapters.protocol import Schema
from marl_parallel.core import stacking
from marl_parallel.core.columns import Column, write_stacked
from marl_parallel.core.records import BITS
from marl_parallel.core.schema import alike
from marl_parallel.core.spaces import Mismatch, copied, is_vector
from marl_parallel.core.transition import ALL, INFOS, VECTOR_TAG, is_empty_info

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
            the space (dicts and tuples of them). What has no fixed form is an array of objects. Absent rows are zeros,
            or None.
        rewards: `(num_envs, n)`, float64; 0.0 where there is none.
        terminations: `(num_envs, n)`, bool; False where there is none.
        truncations: Likewise.
        terminated: `(num_envs,)`, bool: `terminateds["__all__"]`.
        truncated: Likewise.
        present: `(num_envs, n)`, bool: who was observed or rewarded.
        acting: `(num_envs, n)`, bool: who should act next.
        infos: By environment, its infos as they are in the dicts, where any of them is not empty; not to be changed.
        observed: `(num_envs, n)`, bool: whose observations are data.
        rewarded: `(num_envs, n)`, bool: who has a reward.
        flagged: `(num_envs, n)`, bool: who has a flag, True or False. Not to be changed.
        quiet: True only where all agents are present and act, no flag is set and all infos are empty, as in most steps;
            False says nothing.
        together: True only where each agent has the flags of its environment; False says nothing.
        vectors: By agent, rewards that are vectors: `(num_envs, *shape)` in the dtype of its reward space, zeros where
            there is none. Its column in `rewards` is 0.0. Empty where no agent declares a reward space.
        vectored: `(num_envs, n)`, bool: whose rewards are in `vectors`; None where that is empty.
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
    quiet: bool = False
    together: bool = False
    vectors: Mapping[AgentID, NDArray[Any]] = MappingProxyType({})
    vectored: NDArray[np.bool_] | None = None


class Stacked(NamedTuple):
    """Actions of several agents with equal action spaces.

    Attributes:
        agents: Whose.
        values: Theirs, in the form of the space: arrays `(num_envs, agents, ...)`, dicts and tuples of them.
    """

    agents: tuple[AgentID, ...]
    values: Any


Actions: TypeAlias = Mapping[Any, Any] | list[Stacked]
"""By agent, stacked in the form of its space: arrays `(num_envs, ...)`, dicts and tuples of them, or one value for each
environment; or of several agents at a time. Those of `Discrete` spaces reach simulators as int64."""


class ArrayView(ABC):
    """Reads and writes a batch as arrays; its schema names all agents, and a space for each of them.

    Attributes:
        agents: The possible agents, in their order.
        groups: Who of them is observed in the same form.
    """

    def __init__(self, schema: Schema) -> None:
        self.agents = list(schema.possible_agents)
        self.groups = [Group(*group) for group in alike(schema.observation_spaces, self.agents)]
        self._column = {agent: place for place, agent in enumerate(self.agents)}
        rows = {at: (group, row) for group, (_, of) in enumerate(self.groups) for row, at in enumerate(of)}
        self._rows = {agent: rows[place] for agent, place in self._column.items()}

    @abstractmethod
    def write(self, actions: Actions, env_ids: Sequence[int] | None = None) -> Any:
        """Write the actions of the agents that act; those of other agents are ignored.

        Args:
            actions: By agent or by several agents; see `Actions`.
            env_ids: The environments to step; None for all of them. Rows of the others are ignored.

        Returns:
            The payload of the step.

        Raises:
            ValueError: An acting agent has none, an agent is unknown, or an array is not what its space declares.
        """

    @abstractmethod
    def read(self, told: Any) -> Arrays:
        """The transitions of all environments.

        Args:
            told: The result of the step or reset.

        Raises:
            ValueError: Something has no place in an array, such as an undeclared vector of rewards or an unknown agent.
                All environments have been stepped, and their state is known.
        """

    @abstractmethod
    def last(self) -> Arrays:
        """The last observations of all environments, and who is present and acts; for `read_some`, before a step."""

    @abstractmethod
    def read_some(self, env_ids: Sequence[int], told: Any, last: Arrays) -> Arrays:
        """As `read`, of some environments, written into `last`; the others have no rewards, flags and infos."""

    @abstractmethod
    def note(self, env_id: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> None:
        """Note the transition of one environment that was stepped or reset by dicts, for `last`."""

    def by_agent(self, observations: list[Any]) -> dict[Any, Any]:
        """The observations of each agent, of the arrays of all groups: views of shape `(num_envs, ...)`."""
        return {agent: stacking.column(observations[group], row) for agent, (group, row) in self._rows.items()}

    def _check_known(self, actions: Mapping[AgentID, Any]) -> None:
        if not actions.keys() <= self._column.keys():
            unknown = next(agent for agent in actions if agent not in self._column)
            raise ValueError(f"actions for {unknown!r}, which is none of the agents {self.agents}")

    @staticmethod
    def _check_all_there(
        actions: Mapping[AgentID, Any], acting: Sequence[Sequence[AgentID]], env_ids: Sequence[int]
    ) -> None:
        for env_id in env_ids:
            for agent in acting[env_id]:
                if agent not in actions:
                    raise ValueError(
                        f"environment {env_id}: no action for agent {agent!r}; expected one for each of "
                        f"{acting[env_id]}, got actions of {[*actions]}"
                    )


_IN_INFOS = {"infos", "reset_infos"}
"""Extras of a transition that leave nothing but its infos missing in the block."""

_OBSERVED, _REWARDED = BITS["observations"], BITS["rewards"]
_FLAGGED = BITS["terminateds"] | BITS["truncateds"]
_MASKS = np.array([_OBSERVED | _REWARDED, BITS["acting"], _OBSERVED, _REWARDED, _FLAGGED], np.uint8)[:, None, None]


class ArrayBatch(ArrayView):
    """The arrays of what lies in a block; without `copy`, the next `read` writes to the same observations again."""

    def __init__(self, batch: Batch, *, copy: bool) -> None:
        layout, schema = batch.layout, batch.layout.schema
        super().__init__(schema)
        self._batch, self._copy = batch, copy
        self._columns = [column for column, _ in layout.observations.groups]
        self._in_block = bool(layout.agents) and layout.observations.agents == self.agents
        self._actions_in_block = bool(layout.agents) and layout.actions.agents == self.agents and not batch.checks
        self._num_envs = layout.num_records
        self._shape = self._num_envs, len(self.agents)
        self._everybody, self._nobody = np.ones(self._shape, np.bool_), np.zeros(self._shape, np.bool_)
        self._observations: list[Any] = [None] * len(self.groups)
        # Of environments that were not read from the block: what they have observed last, and who was present.
        self._apart: dict[int, tuple[Mapping[Any, Any], NDArray[np.bool_]]] = {}
        self._reward_spaces = {a: schema.reward_spaces[a] for a in self.agents if a in schema.reward_spaces}
        # Where the actions of agents lie that came together last.
        self._together: tuple[tuple[AgentID, ...], ...] | None = None
        self._places: list[tuple[Column, slice]] | None = None

    # -- actions ---------------------------------------------------------------------------------------------------

    def write(self, actions: Actions, env_ids: Sequence[int] | None = None) -> dict[int, bytes]:
        """By environment, what does not fit into the block, pickled; see `ArrayView`."""
        batch = self._batch
        everyone = batch.acting == [self.agents] * self._num_envs
        wanted = None if everyone else self.acting()
        ids = batch.env_ids if env_ids is None else env_ids
        try:
            if isinstance(actions, list):
                together = tuple(of.agents for of in actions)
                if together != self._together:
                    self._together, self._places = together, self._find_places(together)
                if self._places is not None:
                    for (agents, values), (group, rows) in zip(actions, self._places):
                        write_stacked(group, rows, values, agents)
                    batch.actions.mark_present(wanted)
                    return {}
                actions = {a: stacking.column(of.values, row) for of in actions for row, a in enumerate(of.agents)}
            self._check_known(actions)
            if not everyone or len(actions) != len(self.agents):
                self._check_all_there(actions, batch.acting, ids)
            if not self._write_stacked(actions, wanted):
                return batch.write_actions(ids, self._one_by_one(actions, ids))
            return {}
        except Mismatch as error:
            raise ValueError(str(error)) from None

    def _find_places(self, together: tuple[tuple[AgentID, ...], ...]) -> list[tuple[Column, slice]] | None:
        """Where the actions lie in the block; None unless they are those of all agents, each lot side by side."""
        columns = sorted(self._column.get(agent, -1) for agents in together for agent in agents)
        if not self._actions_in_block or columns != [*range(len(self.agents))]:
            return None
        found = [self._batch.layout.actions.rows_of(agents) for agents in together]
        places = [place for place in found if place is not None]
        return places if len(places) == len(found) else None

    def _write_stacked(self, actions: Mapping[AgentID, Any], wanted: NDArray[np.bool_] | None) -> bool:
        """Write actions into the block; says whether it could."""
        if not self._actions_in_block:
            return False
        try:
            self._batch.layout.actions.write_stacked(actions)
        except Mismatch:
            if wanted is None:
                raise
            return False  # it may be those that nobody looks at
        self._batch.actions.mark_present(wanted)
        return True

    def _one_by_one(self, actions: Mapping[AgentID, Any], ids: Sequence[int]) -> list[dict[AgentID, Any]]:
        """For each environment, the actions of those who act."""
        declared, acting = self._batch.layout.schema.action_spaces, self._batch.acting
        given: dict[int, dict[AgentID, Any]] = {env_id: {} for env_id in ids}
        envs_of: dict[AgentID, list[int]] = {agent: [] for agent in self.agents}
        for env_id in ids:
            for agent in acting[env_id]:
                if agent in envs_of:
                    envs_of[agent].append(env_id)
        for agent, rows in envs_of.items():
            try:
                values = stacking.picked(declared[agent], actions.get(agent), rows, self._num_envs)
            except Mismatch as error:
                raise Mismatch(f"the actions of agent {agent!r}: {error}") from error
            for env_id, action in zip(rows, values):
                given[env_id][agent] = action
        return [*given.values()]

    def acting(self) -> NDArray[np.bool_]:
        """Who should act next: `(num_envs, agents)`."""
        mask = np.zeros(self._shape, np.bool_)
        for env_id, acting in enumerate(self._batch.acting):
            mask[env_id, [self._column[agent] for agent in acting]] = True
        return mask

    # -- transitions -----------------------------------------------------------------------------------------------

    def read(self, told: Mapping[int, Any]) -> Arrays:
        """Of what travelled pickled, or all of it, by environment, and of what lies in the block; see `ArrayView`."""
        if self._in_block and not told:
            (_, code), *others = self._batch.transitions.runs(range(self._num_envs))
            if code and not others and not code & INFOS:
                self._batch.note_usual(range(self._num_envs))
                self._apart.clear()
                return self._with_vectors(self._unflagged(self._all_observations(), self._everybody, quiet=True))
        arrays = self._from_block() if self._in_block else self._unobserved()
        apart = []
        for env_id in range(self._num_envs):
            more = told.get(env_id)
            if self._in_block and (more is None or (type(more) is dict and more.keys() <= _IN_INFOS)):
                self._note_infos(arrays, env_id, self._batch.read_rest(env_id, more))
                self._apart.pop(env_id, None)
            else:
                apart.append(env_id)
        return self.read_some(apart, told, arrays)

    def _unobserved(self) -> Arrays:
        observations = [stacking.zeros(space, (self._num_envs, len(of))) for space, of in self.groups]
        return self._unflagged(observations, self._nobody)

    def _unflagged(self, observations: list[Any], there: NDArray[np.bool_], *, quiet: bool = False) -> Arrays:
        """With these agents there and acting, and no flag set; with the rewards in the block, if `quiet`."""
        no = self._nobody
        rewards = self._batch.transitions.rewards.copy() if quiet else np.zeros(self._shape)
        vectors = {
            agent: np.zeros((self._num_envs, *(space.shape or ())), space.dtype)
            for agent, space in self._reward_spaces.items()
        }
        return Arrays(
            observations, rewards, no.copy(), no.copy(), no[:, 0].copy(), no[:, 0].copy(),
            there.copy(), there.copy(), {}, there.copy(), there.copy(), there if quiet else there.copy(), quiet, quiet,
            vectors, no.copy() if vectors else None,
        )  # fmt: skip

    def _with_vectors(self, arrays: Arrays) -> Arrays:
        """With the vector rewards that lie in the block."""
        if not self._reward_spaces:
            return arrays
        transitions, columns = self._batch.transitions, self._batch.layout.rewards
        there = (transitions.tags == VECTOR_TAG) & ((transitions.presence & _REWARDED) != 0)
        values = {}
        for group in columns.groups:
            stacked = copied(group.column.array)
            for row, position in enumerate(group.positions):
                agent = columns.agents[position]
                values[agent] = stacked[:, row]
                values[agent][~there[:, self._column[agent]]] = 0
        return arrays._replace(vectors=values, vectored=there)

    def _from_block(self) -> Arrays:
        """All but the infos, as the block has it."""
        transitions, n = self._batch.transitions, len(self.agents)
        flags = (transitions.flags & 1).view(np.bool_)
        present, acting, observed, rewarded, flagged = (transitions.presence & _MASKS) != 0
        observations = self._all_observations()
        if not observed.all():  # zeros where the block still has what was observed once
            for stacked, (_, positions) in zip(observations, self.groups):
                stacking.clear(stacked, ~observed[:, positions])
        return self._with_vectors(Arrays(
            observations, transitions.rewards.copy(), flags[:, 0, :n], flags[:, 1, :n], flags[:, 0, n], flags[:, 1, n],
            present, acting, {}, observed, rewarded, flagged,
        ))  # fmt: skip

    def _all_observations(self) -> list[Any]:
        """Everybody's, as they lie in the block."""
        observations = [copied(column.array) for column in self._columns]
        if not self._copy:
            self._observations = observations
        return observations

    def last(self) -> Arrays:
        if self._in_block:
            seen = self._from_block()
            arrays = self._unflagged(seen.observations, self._nobody)._replace(
                present=seen.present, acting=seen.acting, observed=seen.observed
            )
        else:
            arrays = self._unobserved()
        for env_id, (own, present) in self._apart.items():
            self._clear(arrays, env_id)
            self._put_observations(arrays, env_id, own)
            arrays.present[env_id] = present
            self._put_acting(arrays, env_id)
        return arrays

    def read_some(self, env_ids: Sequence[int], told: Mapping[int, Any], last: Arrays) -> Arrays:
        wrong: list[ValueError] = []
        for env_id in env_ids:  # all of them, before something that has no place in an array is an error
            try:
                self._read_dicts(last, env_id, told)
            except ValueError as error:
                wrong.append(error)
        if wrong:
            raise wrong[0]
        return last

    def note(self, env_id: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> None:
        present = self._nobody[env_id].copy()
        present[[self._column[agent] for agent in {**observations, **rewards} if agent in self._column]] = True
        self._apart[env_id] = copied(observations), present

    def _read_dicts(self, arrays: Arrays, env_id: int, extras: Mapping[int, Any]) -> None:
        """Put the dicts of one environment in place of what the arrays have of it."""
        (seen,), (rewards,), (terminateds,), (truncateds,), (infos,) = self._batch.read((env_id,), extras)
        self._clear(arrays, env_id)
        self._put_observations(arrays, env_id, seen)
        self._put_rewards(arrays, env_id, rewards)
        arrays.present[env_id] = arrays.observed[env_id] | arrays.rewarded[env_id]
        self._apart[env_id] = seen, arrays.present[env_id].copy()
        for flags, of_agents, of_all in (
            (terminateds, arrays.terminations, arrays.terminated),
            (truncateds, arrays.truncations, arrays.truncated),
        ):
            for agent, flag in flags.items():
                if agent == ALL:
                    of_all[env_id] = flag
                else:
                    place = env_id, self._column[self._known(env_id, agent)]
                    of_agents[place], arrays.flagged[place] = flag, True
        self._put_acting(arrays, env_id)
        self._note_infos(arrays, env_id, infos)

    @staticmethod
    def _clear(arrays: Arrays, env_id: int) -> None:
        for part in arrays:
            if isinstance(part, list | np.ndarray):
                stacking.clear(part, env_id)
        for vectors in arrays.vectors.values():
            vectors[env_id] = 0

    def _put_observations(self, arrays: Arrays, env_id: int, seen: Mapping[Any, Any]) -> None:
        for agent, observation in seen.items():
            group, row = self._rows[self._known(env_id, agent)]
            whose = f"environment {env_id}: the observation of agent {agent!r}"
            stacking.put(arrays.observations[group], (env_id, row), observation, whose)
            arrays.observed[env_id, self._column[agent]] = True

    def _put_rewards(self, arrays: Arrays, env_id: int, rewards: Mapping[Any, Any]) -> None:
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

    def _put_acting(self, arrays: Arrays, env_id: int) -> None:
        arrays.acting[env_id, [self._column[agent] for agent in self._batch.acting[env_id]]] = True

    @staticmethod
    def _note_infos(arrays: Arrays, env_id: int, infos: dict[Any, Any]) -> None:
        if not all(map(is_empty_info, infos.values())):
            assert isinstance(arrays.infos, dict)
            arrays.infos[env_id] = infos

    def _known(self, env_id: int, agent: AgentID) -> AgentID:
        if agent not in self._column:
            raise ValueError(
                f"environment {env_id}: agent {agent!r} is none of the possible agents {self.agents}, "
                "so that arrays have no row for it"
            )
        return agent
