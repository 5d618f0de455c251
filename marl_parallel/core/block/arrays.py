"""The batch as arrays over all environments, for facades; `ParallelEnv` itself reads it as dicts.

`BlockArrays` is the `ArrayView` of a block. It reads and writes arrays without a loop over environments. Only an
environment whose pickled leftovers have more than infos is read from its dicts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.action_masks import binary_rows, choices_of, flat_mask
from marl_parallel.adapters import AgentID
from marl_parallel.adapters.protocol import JOINT, Schema
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import EVENTS, Actions, Arrays, ArrayView, Joint, ResultDoesNotFit
from marl_parallel.core.block.block_transitions import BlockTransitions
from marl_parallel.core.block.codec import LargeArrays
from marl_parallel.core.block.info_columns import InfoArrays, InfoColumns
from marl_parallel.core.block.records import BITS, VECTOR_TAG, ActionRecords, TransitionRecords
from marl_parallel.core.source import Transitions
from marl_parallel.core.spaces import Mismatch, copied, is_vector, tree_map
from marl_parallel.core.transition import ALL, are_empty


def action_masks(transitions: Transitions, schema: Schema, agents: Sequence[AgentID]) -> NDArray[np.bool_]:
    """Action masks as an array; see `FacadeStepper.action_masks`."""
    if not agents:
        raise ValueError("agents is empty: pass at least one agent")
    for agent in agents:
        if agent not in schema.action_spaces:
            raise ValueError(f"no action masks of agent {agent!r}: expected an agent of {[*schema.action_spaces]}")
    space, counts = schema.action_spaces[agents[0]], choices_of(schema.action_spaces[agents[0]])
    for agent in agents:
        of_agent = schema.action_spaces[agent]
        if counts is None or (of_agent is not space and of_agent != space):
            raise ValueError(
                "action masks in one array need agents with equal Discrete or one-dimensional MultiDiscrete action "
                f"spaces, but agent {agents[0]!r} has {space} and agent {agent!r} has {schema.action_spaces[agent]}"
            )
    assert counts is not None
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    shape = len(transitions.env_ids), len(agents), sum(counts)
    together = transitions.mask_array(agents)
    if together is not None and together[0].shape == shape and (together[0].view(np.uint8) <= 1).all():
        masks, others = together[0].astype(np.bool_), together[1]
        masks[others] = True
    else:
        masks, others = _masks_by_agent(transitions, agents, shape)
    for env_id in others:
        of_env = transitions.masks(env_id)
        for column, agent in enumerate(agents):
            mask = flat_mask(space, of_env.get(agent))
            if mask is not None:
                masks[env_id, column] = mask
    return masks


def _masks_by_agent(
    transitions: Transitions, agents: Sequence[AgentID], shape: tuple[int, int, int]
) -> tuple[NDArray[np.bool_], list[int]]:
    """Action masks as an array of this shape, and the environments whose masks are missing in it."""
    masks = np.ones(shape, np.bool_)
    stacked, others = transitions.stacked_masks()
    for column, agent in enumerate(agents):
        if agent not in stacked:
            continue
        values, reported = stacked[agent]
        if values is None or values.shape[1:] != masks.shape[2:]:
            others = [*transitions.env_ids]
            continue
        used = binary_rows(values) & reported
        used[others] = False
        masks[used, column] = values[used]
    return masks, others


_REWARDED, _FINALLY_OBSERVED = BITS["rewards"], BITS["final_observations"]
_INTEGERS_OF_64_BITS = np.dtype(int).itemsize == 8  # NumPy's default; the block has 64 bits
_FINALS = Arrays._fields.index("final_observations")  # this field and the next one have a meaning in some steps only
_AGENTS, _VALUES = operator.itemgetter(0), operator.itemgetter(1)  # of `Stacked`


def _put_rows(rows: Sequence[int], whole: NDArray[Any], values: NDArray[Any]) -> None:
    whole[rows] = values[rows]


class BlockArrays(ArrayView):
    """The arrays of neighbouring environments of a block; row 0 is the first one, and arguments are env ids.

    Without `copy`, the next `read` writes to the same observations again.
    """

    def __init__(self, transitions: BlockTransitions, *, copy: bool, env_ids: range | None = None) -> None:
        env_ids = range(len(transitions.env_ids)) if env_ids is None else env_ids
        layout, schema = transitions.layout, transitions.layout.schema
        super().__init__(schema)
        self._transitions, self._copy = transitions, copy
        self._first, self._span, self._env_ids = env_ids.start, env_ids, tuple(env_ids)
        self._action_records, self._records = transitions.action_records, transitions.records
        if len(env_ids) < layout.num_records:
            layout = layout.part(env_ids, transitions.buffer)
            self._action_records, self._records = (
                ActionRecords(layout, transitions.buffer), TransitionRecords(layout, transitions.buffer)
            )  # fmt: skip
        self._layout = layout
        # Compiled code reads and writes all environments at once; without it, dicts are read and written one by one.
        in_block = bool(layout.agents) and layout.observations.agents == self.agents
        self._codec: Any = transitions.codec if in_block else None
        self._actions_in_block = bool(layout.agents) and layout.actions.agents == self.agents and not transitions.checks
        self._num_envs = layout.num_records
        self._shape = self._num_envs, len(self.agents)
        self._observations: list[Any] | None = None
        # Environments that were read from dicts: their last observations, and which agents were present.
        self._from_dicts: dict[int, tuple[Mapping[Any, Any], NDArray[np.bool_]]] = {}
        self._reward_spaces = {a: schema.reward_spaces[a] for a in self.agents if a in schema.reward_spaces}
        self._large = LargeArrays()
        self._leaves: tuple[tuple[NDArray[Any], tuple[int, ...]], ...] = ()  # what compiled code stacks
        self._are_leaves = True  # whether the observations are these leaves; else they are dicts or tuples of leaves
        for column, positions in layout.observations.groups if self._codec is not None else ():
            tree_map(functools.partial(self._add_leaf, tuple(positions)), column.array)
            self._are_leaves &= isinstance(column.array, np.ndarray)
        self._is_composed = not (self._are_leaves and copy) or bool(self._reward_spaces)
        self._targets_of = functools.lru_cache(8)(layout.actions.targets_of)
        self._nothing = np.zeros(self._shape, np.bool_), np.zeros(self._num_envs, np.bool_)  # of a plain step
        for field in self._nothing:
            field.flags.writeable = False

    def _add_leaf(self, columns: tuple[int, ...], view: NDArray[Any]) -> None:
        self._leaves += ((view, columns),)
        if self._copy:
            self._large.add(view)

    def write(self, actions: Actions, env_ids: Sequence[int]) -> dict[int, bytes]:
        transitions = self._transitions
        if transitions.tracer is not None and (context := transitions.tracer.during("write actions")):
            with context:
                return self.write(actions, env_ids)
        if type(actions) is Joint:
            return self._write_joint(actions, env_ids)
        if transitions.with_joint:
            transitions.clear_joint(env_ids)
        acting = None if self._codec is None else self._codec.acting(self._span.start, self._span.stop)
        if transitions.latest:
            acting = self.acting()
            acting = None if acting.all() else acting
        if self.writes_all:
            acting = None
        if self._codec is not None and self._actions_in_block:
            if isinstance(actions, list):
                targets = self._targets_of(tuple(map(_AGENTS, actions)))
                values = [*map(_VALUES, actions)]
            else:
                targets = self._targets_of(None) if [*actions] == self.agents else None
                values = [*actions.values()]
            span = self._span
            if targets is not None and self._codec.write_arrays(span.start, span.stop, targets, values, acting):
                return {}
        try:
            by_agent = self._checked(actions, transitions, env_ids)
            if self._actions_in_block:
                try:
                    self._layout.actions.write_stacked(by_agent)
                    self._action_records.mark_present(acting)
                    return {}
                except Mismatch:
                    if acting is None:
                        raise
                    # The actions that do not match may be of agents that do not act.
            return transitions.write(self._by_env(by_agent, env_ids), env_ids, stacked=True)
        except Mismatch as error:
            raise ValueError(str(error)) from None

    def _write_joint(self, actions: Joint, ids: Sequence[int]) -> dict[int, bytes]:
        transitions, (values, by_agent, lists) = self._transitions, actions
        if transitions.checks:
            try:
                by_env = self._by_env(self._checked(by_agent(), transitions, ids), ids)
            except Mismatch as error:
                raise ValueError(str(error)) from None
            for env_id, of_env in zip(ids, by_env):
                transitions.check_contained(env_id, of_env)
        is_all = ids is self._env_ids or tuple(ids) == self._env_ids  # else they may be permuted
        rows = slice(None) if is_all else [env_id - self._first for env_id in ids]
        if self._action_records.write_joint(rows, values, lists=lists):
            transitions.mark_joint(ids)
            return {}
        return transitions.write([{JOINT: [*value] if lists else value} for value in values], ids)

    def _by_env(self, actions: Mapping[AgentID, Any], ids: Sequence[int]) -> list[dict[AgentID, Any]]:
        """For each environment, the actions of the agents that act."""
        declared, acting = self._layout.schema.action_spaces, self.acting() | self.writes_all
        by_env: dict[int, dict[AgentID, Any]] = {env_id: {} for env_id in ids}
        for column, agent in enumerate(self.agents):
            rows = [env_id - self._first for env_id in ids if acting[env_id - self._first, column]]
            try:
                values = stacking.picked(declared[agent], actions.get(agent), rows, self._num_envs)
            except Mismatch as error:
                raise Mismatch(f"the actions of agent {agent!r}: {error}") from error
            for row, action in zip(rows, values):
                by_env[self._first + row][agent] = action
        return [*by_env.values()]

    def acting(self) -> NDArray[np.bool_]:
        codec, span = self._codec, self._span
        mask = np.zeros(self._shape, np.bool_) if codec is None else codec.acting(span.start, span.stop)
        if mask is None:
            mask = np.ones(self._shape, np.bool_)
        for env_id in self._transitions.latest:
            if env_id in span:
                columns = [self._column[agent] for agent in self._transitions.acting_in(env_id)]
                mask[env_id - self._first] = False
                mask[env_id - self._first, columns] = True
        return mask

    def _alive(self) -> NDArray[np.bool_]:
        alive = np.zeros(self._shape, np.bool_)
        for row, agents in enumerate(self._transitions.alive[self._span.start : self._span.stop]):
            alive[row, [self._column[agent] for agent in agents if agent in self._column]] = True
        return alive

    def read(self, env_ids: Sequence[int], leftovers: Mapping[int, Any], last: Arrays | None = None, /) -> Arrays:
        transitions = self._transitions
        if transitions.tracer is not None and (context := transitions.tracer.during("read results")):
            with context:
                return self.read(env_ids, leftovers, last)
        if last is not None:
            return self._read_some(env_ids, leftovers, last)
        if self._codec is None:
            return self._read_some(self._env_ids, leftovers, self._empty())
        fields, others = self._read_block(leftovers, track=True)
        incomplete: list[int] = []
        if others is not None or transitions.must_forget:
            of_infos = {env_id: more for env_id, more in leftovers.items() if type(more) is dict}
            incomplete = sorted(leftovers.keys() - of_infos.keys())
            transitions.read_infos(fields[8], others, self._env_ids, of_infos, incomplete)
        if type(fields[8]) is tuple:
            table, plain, is_plain = fields[8]
            present = None if is_plain.all() else is_plain
            infos = InfoArrays(np.array(self._env_ids, np.int32), table, {}, present, None, plain)
            fields[8] = InfoColumns(infos, self.agents)
        if self._from_dicts:
            self._from_dicts = {env_id: self._from_dicts[env_id] for env_id in self._from_dicts.keys() & incomplete}
        arrays: Arrays = self._complete(fields) if self._is_composed else tuple.__new__(Arrays, fields)
        arrays = arrays if arrays.none_over else self._with_finals(arrays)
        if not incomplete:
            return arrays
        restarted, recycled = np.zeros((2, self._num_envs), np.bool_)
        last = arrays._replace(none_over=False, restarted=restarted, recycled=recycled)
        return self._read_some(incomplete, leftovers, last)

    def _read_block(self, leftovers: Mapping[int, Any], *, track: bool) -> Any:
        """The result of `Codec.read_arrays`; observations are in the arrays of `write_to`, or in the previous ones."""
        span, targets = self._span, self._observations if self._target is None else self._target
        if targets is not None and not self._are_leaves:
            leaves: list[Any] = []
            for tree in targets:
                tree_map(leaves.append, tree)
            targets = leaves
        as_table = self.wants_info_arrays and _INTEGERS_OF_64_BITS
        written = self._rollout is not None and self._target is not None and self._rollout.is_written(span)
        return self._codec.read_arrays(
            span.start, span.stop, self._leaves, targets, written, leftovers, self._transitions.copies, as_table, track,
            *self._nothing,
        )  # fmt: skip

    def _complete(self, fields: list[Any]) -> Arrays:
        """The fields from compiled code, with observations in the forms of their spaces, and vector rewards."""
        if not self._are_leaves:
            leaves = iter(fields[0])
            columns = [column.array for column, _ in self._layout.observations.groups]
            fields[0] = [tree_map(lambda _: next(leaves), column) for column in columns]
        if self._target is None and not self._copy:
            self._observations = fields[0]
        arrays: Arrays = tuple.__new__(Arrays, fields)
        return self._with_vectors(arrays) if self._reward_spaces else arrays

    def _empty(self, observations: list[Any] | None = None) -> Arrays:
        """Arrays in which no agent is present; observations are zeros unless passed."""
        if observations is None and self._target is not None:
            observations = self._target
            stacking.clear(observations, ...)
        elif observations is None:
            observations = [stacking.zeros(space, (self._num_envs, len(columns))) for space, columns in self.groups]
        vectors = {a: np.zeros((self._num_envs, *(s.shape or ())), s.dtype) for a, s in self._reward_spaces.items()}
        terminations, truncations, present, acting, observed, rewarded, flagged, alive, *events = np.zeros(
            (13, *self._shape), np.bool_
        )
        terminated, truncated, restarted, recycled = np.zeros((4, self._num_envs), np.bool_)
        arrays = Arrays(
            observations, np.zeros(self._shape), terminations, truncations, terminated, truncated,
            present, acting, {}, observed, rewarded, flagged,
            vectors=vectors, vectored=np.zeros(self._shape, np.bool_) if vectors else None, alive=alive,
            restarted=restarted, recycled=recycled,
        )  # fmt: skip
        by_name: dict[str, Any] = dict(zip(EVENTS, events))
        return arrays._replace(**by_name)

    def _with_vectors(self, arrays: Arrays) -> Arrays:
        """The same arrays with the vector rewards in the block."""
        records, columns = self._records, self._layout.rewards
        vectored = (records.tags == VECTOR_TAG) & ((records.presence & _REWARDED) != 0)
        values = {}
        for column, positions in columns.groups:
            stacked = copied(column.array)
            for row, position in enumerate(positions):
                agent = columns.agents[position]
                values[agent] = stacked[:, row]
                values[agent][~vectored[:, self._column[agent]]] = 0
        return arrays._replace(vectors=values, vectored=vectored)

    def last(self) -> Arrays:
        """The last observations, and which agents are present and act."""
        seen = self._empty()
        if self._codec is not None:
            seen = self._complete(self._read_block({}, track=False)[0])
        arrays = self._empty(seen.observations)._replace(
            present=seen.present, acting=self.acting(), observed=seen.observed, alive=self._alive()
        )
        for env_id, (observations, present) in self._from_dicts.items():
            self._clear(arrays, env_id)
            self._put_observations(arrays, env_id, observations)
            arrays.present[env_id - self._first] = present
            self._put_acting(arrays, env_id)
        return arrays

    def _read_some(self, env_ids: Sequence[int], leftovers: Mapping[int, Any], last: Arrays) -> Arrays:
        """Read some environments into the arrays `last`; the others have no rewards, flags and infos."""
        errors: dict[int, str] = {}
        for env_id in env_ids:  # all of them, before a value that does not fit an array raises
            try:
                self._put(last, env_id, [rows[0] for rows in self._transitions.read((env_id,), leftovers)])
                last = self._put_finals(last, env_id, leftovers.get(env_id))
            except ValueError as error:
                errors[env_id] = str(error)
        if errors:
            raise ResultDoesNotFit(next(iter(errors.values())), [*errors], last)
        return last

    def _with_finals(self, arrays: Arrays) -> Arrays:
        """The same arrays with the last observations in the records of environments whose episode has ended."""
        over = np.flatnonzero(arrays.terminated | arrays.truncated).tolist()
        if self._transitions.mode is not AutoresetMode.SAME_STEP:
            return arrays._replace(final_observations=arrays.observations, finally_observed=arrays.observed)
        arrays = self._with_no_finals(arrays)
        observed = arrays.finally_observed
        observed[over] = self._records.presence[over] & _FINALLY_OBSERVED
        for whole, (column, columns) in zip(arrays.final_observations, self._layout.final_observations.groups):
            tree_map(functools.partial(_put_rows, over), whole, column.array)
            stacking.clear(whole, np.nonzero(~observed[:, columns]))
        return arrays

    def _with_no_finals(self, arrays: Arrays) -> Arrays:
        final = [stacking.zeros(space, (self._num_envs, len(columns))) for space, columns in self.groups]
        return arrays._replace(final_observations=final, finally_observed=np.zeros(self._shape, np.bool_))

    def _put_finals(self, arrays: Arrays, env_id: int, leftovers: Any) -> Arrays:
        """The same arrays with the last observations of one environment, if its episode has ended."""
        row = env_id - self._first
        same_step = self._transitions.mode is AutoresetMode.SAME_STEP
        is_over = arrays.terminated[row] or arrays.truncated[row]
        if not is_over and not (same_step and arrays.final_observations):
            return arrays
        if not same_step:
            return arrays._replace(final_observations=arrays.observations, finally_observed=arrays.observed)
        arrays = arrays if arrays.final_observations else self._with_no_finals(arrays)
        arrays.finally_observed[row] = False
        for of_group in arrays.final_observations:
            stacking.clear(of_group, row)
        if not is_over:  # the record still had those of an earlier step
            return arrays
        for agent, observation in self._transitions.final_observations(env_id, leftovers).items():
            if observation is not None:
                group, member = self.group_rows[self._known(env_id, agent)]
                whose = f"environment {env_id}: the last observation of agent {agent!r}"
                stacking.put(arrays.final_observations[group], (row, member), observation, whose)
                arrays.finally_observed[row, self._column[agent]] = True
        return arrays

    def drop_memory(self) -> None:
        super().drop_memory()
        self._codec, self._leaves, self._observations = None, (), None
        self._large, self._layout = LargeArrays(), self._transitions.layout
        del self._action_records, self._records, self._targets_of

    def record_dicts(self, env_id: int, observations: Mapping[Any, Any], rewards: Mapping[Any, Any]) -> None:
        """Record the transition of one environment that was stepped or reset by dicts, for `last`."""
        seen = {**observations, **rewards}
        self._from_dicts[env_id] = copied(observations), np.array([agent in seen for agent in self.agents], np.bool_)

    def _put(self, arrays: Arrays, env_id: int, dicts: Sequence[dict[Any, Any]]) -> None:
        """Put the dicts of one environment in place of its entries in the arrays."""
        observations, rewards, terminateds, truncateds, infos = dicts
        row = env_id - self._first
        self._clear(arrays, env_id)
        self._put_observations(arrays, env_id, observations)
        self._from_dicts[env_id] = observations, arrays.observed[row].copy()  # also if a reward raises
        for agent, reward in rewards.items():
            index = row, self._column[self._known(env_id, agent)]
            arrays.rewarded[index] = True
            if agent in arrays.vectors and is_vector(reward):
                assert arrays.vectored is not None
                arrays.vectors[agent][row], arrays.vectored[index] = reward, True
                continue
            try:
                if reward is None or isinstance(reward, str | bytes):  # NumPy would turn these into a number
                    raise TypeError
                one_element = isinstance(reward, np.ndarray) and reward.shape == (1,)
                arrays.rewards[index] = reward[0] if one_element else reward
            except Exception:  # whatever an object's `__float__` or `__array__` raises
                raise ValueError(
                    f"environment {env_id}: the reward of agent {agent!r} is {reward!r}; in arrays, it must be a "
                    "number, or a vector of the agent's reward_space, if it declares one"
                ) from None
        arrays.present[row] = arrays.observed[row] | arrays.rewarded[row]
        self._from_dicts[env_id] = observations, arrays.present[row].copy()
        for flags, of_agents, of_env in (
            (terminateds, arrays.terminations, arrays.terminated),
            (truncateds, arrays.truncations, arrays.truncated),
        ):
            for agent, flag in flags.items():
                if agent == ALL:
                    of_env[row] = flag
                else:
                    index = row, self._column[self._known(env_id, agent)]
                    of_agents[index], arrays.flagged[index] = flag, True
        self._put_acting(arrays, env_id)
        if (mark := self._transitions.mark_of(env_id)) is not None:
            getattr(arrays, mark.value)[row] = True
        for agent, bits in self._transitions.events_in(env_id).items():
            if agent in self._column:
                for name, bit in EVENTS.items():
                    if bits & bit:
                        getattr(arrays, name)[row, self._column[agent]] = True
        if not are_empty(infos.values()):
            assert isinstance(arrays.infos, dict)
            arrays.infos[env_id] = infos

    def _clear(self, arrays: Arrays, env_id: int) -> None:
        for part in (*arrays[:_FINALS], *arrays.vectors.values()):
            if isinstance(part, list | np.ndarray):
                stacking.clear(part, env_id - self._first)

    def _put_acting(self, arrays: Arrays, env_id: int) -> None:
        row, transitions = env_id - self._first, self._transitions
        for agents, mask in (
            (transitions.acting_in(env_id), arrays.acting), (transitions.alive_in(env_id), arrays.alive)
        ):  # fmt: skip
            mask[row, [self._column[agent] for agent in agents if agent in self._column]] = True

    def _put_observations(self, arrays: Arrays, env_id: int, observations: Mapping[Any, Any]) -> None:
        for agent, observation in observations.items():
            group, row = self.group_rows[self._known(env_id, agent)]
            whose = f"environment {env_id}: the observation of agent {agent!r}"
            stacking.put(arrays.observations[group], (env_id - self._first, row), observation, whose)
            arrays.observed[env_id - self._first, self._column[agent]] = True

    def _known(self, env_id: int, agent: AgentID) -> AgentID:
        if agent not in self._column:
            raise ValueError(
                f"environment {env_id}: agent {agent!r} is not one of the possible agents {self.agents}, "
                "so the arrays have no row for it"
            )
        return agent
