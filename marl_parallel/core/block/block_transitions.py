"""The parent's side of the block: writes actions, reads transitions, and knows the state of each environment.

Actions are checked here, before any simulator is touched. `ParallelEnv` reads the block as dicts; `arrays.py` reads it
as arrays over all environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.action_masks import mask_of, own_mask
from marl_parallel.adapters import AgentID, Rules
from marl_parallel.core.block.array_view import of_acting
from marl_parallel.core.block.codec import open_codec
from marl_parallel.core.block.columns import Layout, damaged
from marl_parallel.core.block.records import BITS, ActionRecords, Columns, TransitionRecords
from marl_parallel.core.block.statistics import EpisodeStatistics
from marl_parallel.core.objects.pickling import dumps_for_workers, in_order, loads
from marl_parallel.core.pool.slots import Mark, Slot, Snapshot, States
from marl_parallel.core.source import StackedMasks, Transitions
from marl_parallel.core.spaces import Mismatch, conform, zeros
from marl_parallel.core.transition import (
    ALL,
    COMMON,
    EPISODE,
    FINAL_OBS,
    RESET_INFO,
    WAS_DEAD,
    Transition,
    are_empty,
)
from marl_parallel.core.view import check_one_for_each
from marl_parallel.core.worker.env_runner import (
    add_to_infos,
    dead_after,
    dicts_of,
    interrupted_events,
    is_over,
    needs_actions,
)
from marl_parallel.core.worker_status import Tracer

DictPerEnv: TypeAlias = tuple[dict[Any, Any], ...]
"""One dict for each environment."""


OF_ONE_STEP = frozenset({ACTION_MASK, EPISODE, FINAL_OBS, RESET_INFO})
"""The keys of infos that say nothing about a later step."""


class Latest(NamedTuple):
    """What the latest transition of an environment says that compiled code has not read; the lists are read-only."""

    acting: Sequence[AgentID]
    alive: Sequence[AgentID]
    over: bool  # whether the episode has ended and no reset has followed
    events: Mapping[AgentID, int] = MappingProxyType({})
    dead: Sequence[AgentID] = ()  # the agents that have ended in this episode and not come back
    mark: Mark | None = None
    states: States | None = None  # the global states, if they are not in the block
    masks: Mapping[AgentID, Any] | None = None  # all action masks; None if the record has them


_BITS_OF_STATES = {"alive": BITS["alive"], "acting": BITS["acting"], "dead": 1}  # see `Codec.agents_of`
_UNKNOWN = Latest((), (), over=False)


class BlockTransitions(Transitions):
    """The records of all environments, as the parent reads and writes them.

    Args:
        slots: The environments.
        layout: The layout of the block.
        buffer: The block.
        rules: The rules of the environments.
        mode: The auto-reset mode.
        copy: Whether observations are copies; else views of the block (attribute `copies`).
        check_actions: Whether every action must be contained in its space (attribute `checks`).
        needs_all_actions: Whether an agent that acts but has no action is an error under dict rules too.
        local_modules: Modules that workers cannot import.
        episode_stats: Whether infos have the statistics of episodes.
        agents: By environment, its own agents; only of environments that do not have all agents.

    Attributes:
        codec: Compiled code for the block; None if it is missing.
        latest: The environments whose latest transition compiled code has not read.
        with_joint: The environments whose records have `JOINT` actions.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        layout: Layout,
        buffer: Any,
        rules: Rules,
        mode: AutoresetMode,
        *,
        copy: bool,
        check_actions: bool,
        needs_all_actions: bool,
        local_modules: Sequence[ModuleType],
        episode_stats: bool,
        agents: Mapping[int, Sequence[AgentID]] = MappingProxyType({}),
    ) -> None:
        layout.bind(buffer)
        self._own_agents = agents
        self.layout, self.buffer = layout, buffer
        self.action_records = ActionRecords(layout, buffer)
        self.statistics = EpisodeStatistics(
            layout.num_records, layout.agents, mode, vectors=layout.schema.reward_spaces, in_infos=episode_stats
        )
        self.codec: Any = open_codec(
            layout, buffer, infos_in_block=True, totals=self.statistics.totals, in_infos=episode_stats,
            same_step=mode is AutoresetMode.SAME_STEP,
        )  # fmt: skip
        self.records = TransitionRecords(layout, buffer, copy=copy, codec=self.codec)
        self._own = TransitionRecords(layout, buffer, codec=self.codec)
        self.rules, self.mode, self.copies, self.checks = rules, mode, copy, check_actions
        self._slots = slots
        self._column_of = {agent: column for column, agent in enumerate(layout.agents)}
        self._possible = {*layout.schema.possible_agents}
        self.env_ids = tuple(range(layout.num_records))
        self._pettingzoo = rules is Rules.PETTINGZOO
        self._needs_all = self._pettingzoo or needs_all_actions
        self._local_modules = local_modules
        self.tracer: Tracer | None = None  # as of `Pool`
        self.latest: dict[int, Latest] = {}
        self.with_joint: set[int] = set()
        self._masks: dict[int, Mapping[AgentID, Any]] = {}  # masks in infos, beside those in records
        self._last_masks: list[dict[AgentID, Any]] | None = None  # of each environment, once the block is dropped

    # -- actions -------------------------------------------------------------------------------------------------------

    def write(
        self, actions: Sequence[Mapping[Any, Any]], env_ids: Sequence[int], *, stacked: bool = False
    ) -> dict[int, bytes]:
        """Write one dict of actions for each environment; `stacked` if they come from arrays over environments.

        Returns:
            By environment, the pickled actions that do not fit into the block.

        Raises:
            ValueError: There is not one dict for each environment; or an action is missing, or does not match its
                space; nothing has been stepped.
            TypeError: The actions are not a dict, or cannot be pickled; nothing has been stepped.
        """
        if self.tracer is not None and (context := self.tracer.during("write actions")):
            with context:
                return self.write(actions, env_ids, stacked=stacked)
        if type(actions) is not list or len(actions) != len(env_ids):  # a quick check first
            check_one_for_each(actions, env_ids)
        if self.with_joint:
            self.clear_joint(env_ids)
        pickled: dict[int, bytes] = {}
        codec, index = None if self.checks else self.codec, 0
        while index < len(env_ids):
            if codec is not None:
                index = codec.write(env_ids, actions, index, not self._pettingzoo, self._needs_all)
                if index == len(env_ids):
                    break
            env_id, of_env = env_ids[index], actions[index]
            acting, over = self.acting_in(env_id), self.is_over(env_id)
            if over or type(of_env) is not dict or (self._needs_all and [*of_env] != acting):
                of_env = self._actions_that_count(env_id, of_env, acting, over)
            if self.checks:
                self.check_contained(env_id, of_env)
            try:
                unwritten = self._put_actions(env_id, of_env)
            except Mismatch as error:
                raise ValueError(f"environment {env_id}: {error}") from None
            if unwritten is not None:
                unwritten = self.action_records.scalars(unwritten) if stacked else unwritten
                what = f"environment {env_id}: its actions"
                pickled[env_id] = dumps_for_workers(unwritten, what, self._local_modules)
            index += 1
        if stacked:
            self.action_records.mark_stacked(env_ids)
        return pickled

    def _put_actions(self, env_id: int, actions: Mapping[Any, Any]) -> dict[Any, Any] | None:
        """Write the actions of one environment; returns those that do not fit the block: all, or None."""
        if not actions:
            self.action_records.write_none(env_id)
            return None
        if self.codec is not None and self.codec.put_actions(env_id, actions):
            return None
        fitting = self.action_records.fitting(actions)
        return None if self.codec is not None and self.codec.put_actions(env_id, fitting) else fitting

    def _actions_that_count(self, env_id: int, actions: Any, acting: Sequence[AgentID], over: bool) -> dict[Any, Any]:
        """The actions that the environment receives."""
        if not needs_actions(self.rules, self.mode, over):
            return {}
        if self._needs_all or not isinstance(actions, Mapping):
            of_those = of_acting(env_id, actions, acting)  # raises if one is missing
        return of_those if self._pettingzoo else dict(actions)

    def mark_joint(self, env_ids: Sequence[int]) -> None:
        """Record that these environments have `JOINT` actions."""
        if len(self.with_joint) < self.layout.num_records:
            self.with_joint.update(env_ids)

    def clear_joint(self, env_ids: Sequence[int]) -> None:
        """Remove the `JOINT` actions of these environments, whose actions are about to be written by agent."""
        self.action_records.clear_joint([*env_ids])
        self.with_joint.difference_update(env_ids)

    def check_contained(self, env_id: int, actions: Mapping[Any, Any]) -> None:
        """Raise `ValueError` for an action outside its space."""
        for agent, action in actions.items():
            space = self.layout.schema.action_spaces.get(agent)
            try:
                contained = space is None or space.contains(conform(space, action))
            except Mismatch:
                contained = False
            if not contained:
                raise ValueError(
                    f"environment {env_id}: the action of agent {agent!r} is outside its space: "
                    f"expected an element of {space}, got {action!r}"
                )

    # -- transitions ---------------------------------------------------------------------------------------------------

    def read(self, env_ids: Sequence[int], leftovers: Mapping[int, Any], last: Any = None, /) -> Columns:
        """The transitions of some environments, with their pickled leftovers or a `Snapshot`, by environment."""
        if self.tracer is not None and (context := self.tracer.during("read results")):
            with context:
                return self.read(env_ids, leftovers)
        if self.codec is None:
            rows = [self._read_one(env_id, leftovers.get(env_id)) for env_id in env_ids]
            return (*zip(*rows),) or ((),) * 5  # five tuples
        columns: Any
        columns, others = self.codec.read(env_ids, leftovers, self.copies)
        if self.latest or self._masks or self.statistics.dead:
            self._forget_read(env_ids, others)
        if others is not None:
            index_of = dict(zip(env_ids, range(len(env_ids))))

            def put(env_id: int, dicts: Sequence[dict[Any, Any]]) -> None:
                for column, values in zip(columns, dicts):
                    column[index_of[env_id]] = values

            here = {env_id: more for env_id, more in leftovers.items() if env_id in index_of}
            self._complete(others, env_ids, here, put, lambda env_id: columns[4][index_of[env_id]])
            columns = tuple(map(tuple, columns))
        return columns  # type: ignore[no-any-return]

    @property
    def must_forget(self) -> bool:
        """Whether anything is stored here that `_forget_read` drops."""
        return bool(self.latest or self._masks or self.statistics.dead)

    def read_infos(
        self,
        infos: dict[int, Any],
        others: Any,
        env_ids: Sequence[int],
        leftovers: Mapping[int, Any],
        excluded: Sequence[int],
    ) -> None:
        """Record what `Codec.read_arrays` has found, and add the infos that it has left, except those `excluded`.

        The leftovers contain only infos.
        """
        if self.must_forget:
            self._forget_read([env_id for env_id in env_ids if env_id not in excluded], others)
        if others is not None:
            others = [env_id for env_id in others[0] if env_id not in excluded], *others[1:]

            def put(env_id: int, dicts: Sequence[dict[Any, Any]]) -> None:
                if not are_empty(dicts[4].values()):
                    infos[env_id] = dicts[4]

            self._complete(others, env_ids, leftovers, put, lambda env_id: infos.get(env_id, {}))

    def _complete(
        self,
        others: Any,
        env_ids: Sequence[int],
        leftovers: Mapping[int, Any],
        put: Callable[[int, Sequence[dict[Any, Any]]], None],
        infos_of: Callable[[int], dict[Any, Any]],
    ) -> None:
        """Read the environments that compiled code has left, and record what it has found; see `Codec.read`."""
        unread, masked, ended = others
        if not unread:
            self.statistics.finish(ended)
        else:  # in the order of environments
            ends = {end[0]: end for end in ended}
            for env_id in sorted({*ends, *unread}, key=env_ids.index) if ends else unread:
                if env_id in ends:
                    self.statistics.finish([ends[env_id]])
                else:
                    put(env_id, self._read_one(env_id, leftovers.get(env_id)))
        for env_id in {*masked, *leftovers} - {*unread}:
            self._copy_masks(env_id, infos_of(env_id))

    def _forget_read(self, env_ids: Sequence[int], others: Any) -> None:
        """Forget the states of environments that compiled code has read, and knows; it has left `others`."""
        for env_id in env_ids if others is None else {*env_ids} - {*others[0]}:
            self.latest.pop(env_id, None)
            self._masks.pop(env_id, None)
            self.statistics.update_dead(env_id, self.alive_in(env_id))

    def _set_latest(self, env_id: int, latest: Latest) -> None:
        self.latest[env_id] = latest
        if self.codec is not None:
            self.codec.forget(env_id, latest.over)

    def _read_one(self, env_id: int, leftovers: Any) -> tuple[dict[Any, Any], ...]:
        """The five dicts of one environment; records its state."""
        stays_over = self.is_over(env_id)
        states = mark = masks = None
        if type(leftovers) is Snapshot:
            transition, over, states, mark = leftovers
            masks = transition.masks or {}
        else:
            transition = self._whole(self.records, env_id, leftovers)
            over = is_over(transition) and self.mode is not AutoresetMode.SAME_STEP
            masks = self._all_masks(env_id, transition) if type(leftovers) is Transition else None
        events, ended = transition.events or {}, is_over(transition)
        dead = [] if ended else dead_after(events, transition.alive)
        latest = Latest(transition.acting, transition.alive, over, events, dead, mark, states, masks)
        self._set_latest(env_id, latest)
        if masks is None:
            self._copy_masks(env_id, self._infos_with_masks(transition))
        else:
            self._masks.pop(env_id, None)
        dicts = dicts_of(transition)
        parts = self._add_step(env_id, dicts[1:4], stays_over)
        add_to_infos(dicts[4], EPISODE, parts)
        return dicts

    def _whole(self, records: TransitionRecords, env_id: int, leftovers: Any) -> Transition:
        """The transition in a record; `ValueError` if it has no flags of the whole environment."""
        transition = records.read(env_id, leftovers)
        if ALL not in transition.terminateds or ALL not in transition.truncateds:
            raise damaged(env_id)
        return transition

    def _add_step(self, env_id: int, outcome: Sequence[dict[Any, Any]], stays_over: bool) -> dict[Any, Any]:
        """Count a step in the statistics, unless the episode was over before and still is; returns what infos get."""
        rewards, terminateds, truncateds = outcome
        if stays_over and (terminateds[ALL] or truncateds[ALL]):
            return {}
        were_dead = {agent for agent, bits in self.events_in(env_id).items() if bits & WAS_DEAD}
        return self.statistics.add(env_id, rewards, terminateds, truncateds, were_dead)

    def mark_constructed(self, env_ids: Iterable[int]) -> None:
        """Record that these environments have been constructed again, and count as never reset."""
        for env_id in env_ids:
            self._slots[env_id].has_reset = False
            self._masks.pop(env_id, None)
            self._set_latest(env_id, _UNKNOWN)

    def snapshot(self, env_id: int, leftovers: Any) -> Snapshot:
        """A copy of the transition of one environment; the state of the environment is not recorded."""
        transition = self._whole(self._own, env_id, leftovers)
        over = is_over(transition) and self.mode is not AutoresetMode.SAME_STEP
        return Snapshot(transition._replace(masks=self._all_masks(env_id, transition)), over)

    def transition(self, env_id: int, leftovers: Any) -> Transition:
        """A copy of the transition in the record of an environment, with its leftovers."""
        return self._own.read(env_id, leftovers)

    def put(self, env_id: int, transition: Transition) -> Any:
        """Write a record, as a worker does; returns the leftovers."""
        return self._own.write(env_id, transition)

    def has_next_episode(self, env_id: int) -> bool:
        """Whether the latest step of an environment has ended an episode and begun the next one."""
        return self.records.is_final(env_id)

    def known(self, env_id: int, pickled: bytes | None) -> Transition | None:
        """A copy of the transition in the record of an environment, with its pickled leftovers, after a fault.

        Without infos if these do not unpickle, or do not go with the record; None if all is lost, or not written yet.
        """
        try:
            leftovers = None if pickled is None else loads(pickled)
        except Exception:
            leftovers = None
        no_infos: dict[str, Any] = {"infos": {}}
        possible = [one for one in (leftovers, None, no_infos) if self._own.goes_with(env_id, one)]
        try:
            return self._whole(self._own, env_id, possible[0]) if possible else None
        except ValueError:  # it is partially written
            return None

    def last_known(
        self, slot: Slot, known: Transition | None
    ) -> tuple[dict[AgentID, Any], Sequence[AgentID], dict[AgentID, int]]:
        """The last observations of one environment, the agents alive, and their events if it ends now.

        `known` is its latest transition; without one, the observations are zeros.
        """
        if not slot.has_reset:
            return {}, [], {}
        if known is None:
            declared, alive = self.layout.schema.observation_spaces, self.alive_in(slot.env_id)
            (dead,) = self._agents((slot.env_id,), "dead")
            observations = {agent: zeros(declared[agent]) for agent in alive if agent in declared}
            return observations, [*alive], interrupted_events(alive, dead)
        observations, alive = known.observations, known.alive
        ended = is_over(known)
        if ended and self.mode is not AutoresetMode.SAME_STEP:  # all lives have ended
            return observations, alive, {}
        return observations, alive, interrupted_events(alive, [] if ended else dead_after(known.events, alive))

    def final_observations(self, env_id: int, leftovers: Any) -> Mapping[AgentID, Any]:
        """The last observations of an episode that has ended in the step in which the next one has begun."""
        is_snapshot = type(leftovers) is Snapshot
        transition = leftovers.transition if is_snapshot else self.records.read(env_id, leftovers)
        return transition.final_observations or {}

    def last_infos(self, slot: Slot, last: Transition) -> dict[AgentID, dict[Any, Any]]:
        """The latest infos of one environment's agents, of which those of an automatic reset come last.

        What the package adds to infos, and action masks, which are of that step only, are left out. `last` is its
        latest transition.
        """
        if not slot.has_reset:
            return {}
        latest: dict[AgentID, dict[Any, Any]] = {}
        for agent in last.alive:
            of_agent = (infos.get(agent) for infos in (last.infos, last.reset_infos or {}))
            latest[agent] = {
                key: value for info in of_agent if isinstance(info, Mapping) for key, value in info.items()
                if key not in OF_ONE_STEP
            }  # fmt: skip
        return latest

    # -- action masks --------------------------------------------------------------------------------------------------

    def masks(self, env_id: int) -> dict[AgentID, Any]:
        if self._last_masks is not None:
            return {agent: own_mask(mask) for agent, mask in self._last_masks[env_id].items()}
        slot = self._slots[env_id]
        if slot.request is not None or slot.skips or not slot.has_reset:  # in flight, or rebuilt
            return {}
        latest = self.latest.get(env_id)
        if latest is not None and latest.masks is not None:
            masks = {**latest.masks}
        else:
            observed = self.records.observed(env_id)
            masks = {agent: seen.get(ACTION_MASK) for agent, seen in observed.items() if type(seen) is dict}
            masks |= self.layout.masks.reported(env_id)
            masks |= self._masks.get(env_id, {})
        reported = {agent: own_mask(mask) for agent, mask in masks.items() if mask is not None}
        return in_order(reported, self.layout.schema.possible_agents)

    def stacked_masks(self) -> tuple[StackedMasks, list[int]]:
        columns, observed = self.layout.observations, (self.records.presence & BITS["observations"]) != 0
        found: StackedMasks = {}
        for column, positions in columns.groups:
            if type(column.array) is dict and ACTION_MASK in column.array:
                stacked = column.array[ACTION_MASK]
                for row, at in enumerate(positions):
                    agent, masks = columns.agents[at], stacked[:, row] if type(stacked) is np.ndarray else None
                    found[agent] = masks, observed[:, self._column_of[agent]]
        found |= self.layout.masks.stacked()
        return found, self._unrecorded_masks()

    def mask_array(self, agents: Sequence[AgentID]) -> tuple[NDArray[np.int8], list[int]] | None:
        array = self.layout.masks.array_of([*agents])
        return None if array is None else (array, self._unrecorded_masks())

    def _unrecorded_masks(self) -> list[int]:
        return [
            slot.env_id
            for slot in self._slots
            if slot.env_id in self._masks
            or slot.request is not None
            or slot.skips
            or not slot.has_reset
            or ((latest := self.latest.get(slot.env_id)) is not None and latest.masks is not None)
        ]

    def _copy_masks(self, env_id: int, infos: Mapping[Any, Any]) -> None:
        """Copy action masks out of the infos of an environment that compiled code has read."""
        masks = self._masks_in(infos, self.acting_in(env_id))
        if masks and self.layout.masks.agents:  # they may be the masks that are also in the block
            reported = self.layout.masks.reported(env_id)
            if masks.keys() <= reported.keys() and all(
                np.array_equal(mask, reported[agent]) for agent, mask in masks.items()
            ):
                masks = {}
        if masks:
            self._masks[env_id] = masks
        else:
            self._masks.pop(env_id, None)

    def _all_masks(self, env_id: int, transition: Transition) -> dict[AgentID, Any]:
        """Copies of the masks of a transition: in infos, else of `MultiAgentEnv.masks`, else in observations."""
        observations, infos, masks = transition.observations, self._infos_with_masks(transition), transition.masks
        if masks is None:
            masks = self.layout.masks.reported(env_id)
        found = {
            agent: mask
            for agent, seen in observations.items()
            if type(seen) is not np.ndarray and (mask := mask_of(seen, None)) is not None
        }
        found |= {agent: own_mask(mask) for agent, mask in masks.items() if mask is not None}
        return found | self._masks_in(infos, [*transition.acting, *observations])

    def _infos_with_masks(self, transition: Transition) -> Mapping[Any, Any]:
        """The infos that belong to the observations: not those of an episode that has ended, if the next has begun."""
        next_has_begun = is_over(transition) and self.mode is AutoresetMode.SAME_STEP
        return (transition.reset_infos or {}) if next_has_begun else transition.infos

    def _masks_in(self, infos: Mapping[Any, Any], agents: Sequence[AgentID]) -> dict[AgentID, Any]:
        """Copies of the masks in infos; `agents` are known to be agents."""
        found = {}
        for agent, info in infos.items():
            has_none = type(info) is dict and ACTION_MASK not in info  # most: they cost one look at each
            if not has_none and (mask := mask_of(None, info)) is not None:
                is_agent = agent in self._possible or agent in agents if self._possible else agent != COMMON
                if is_agent:
                    found[agent] = mask
        return found

    # -- the state of each environment; callers must not change the lists ----------------------------------------------

    def possible_agents_of(self, env_id: int) -> Sequence[AgentID]:
        return self._own_agents.get(env_id, self.layout.schema.possible_agents)

    @property
    def acting(self) -> list[Sequence[AgentID]]:
        return self._agents(self.env_ids, "acting")

    def acting_in(self, env_id: int) -> Sequence[AgentID]:
        return self._agents((env_id,), "acting")[0]

    @property
    def alive(self) -> list[Sequence[AgentID]]:
        return self._agents(self.env_ids, "alive")

    def alive_in(self, env_id: int) -> Sequence[AgentID]:
        return self._agents((env_id,), "alive")[0]

    def _agents(self, env_ids: Sequence[int], which: str) -> list[Sequence[AgentID]]:
        """The agents that are alive, act or are dead (a field of `Latest`), in neighbouring environments."""
        bounds, lists = (env_ids[0], env_ids[-1] + 1), list[Sequence[AgentID]]()
        codec = self.codec
        lists = [()] * len(env_ids) if codec is None else codec.agents_of(*bounds, _BITS_OF_STATES[which])
        for env_id in env_ids if self.latest else ():
            if (latest := self.latest.get(env_id)) is not None:
                lists[env_id - env_ids[0]] = getattr(latest, which)
        return lists

    @property
    def over(self) -> list[bool]:
        return [*map(self.is_over, self.env_ids)]

    def events_in(self, env_id: int) -> Mapping[AgentID, int]:
        """The events of the latest transition of an environment that has been read."""
        latest = self.latest.get(env_id)
        return self.records.events_in(env_id) if latest is None else latest.events

    def mark_of(self, env_id: int) -> Mark | None:
        """Why an environment is another one than before its latest transition; None if it is not."""
        latest = self.latest.get(env_id)
        return None if latest is None else latest.mark

    def is_over(self, env_id: int) -> bool:
        codec = self.codec
        if codec is None or env_id in self.latest:
            return self.latest.get(env_id, _UNKNOWN).over
        over: bool = codec.is_over(env_id)
        return over

    @property
    def has_reset(self) -> list[bool]:
        return [slot.has_reset for slot in self._slots]

    def drop_memory(self) -> None:
        if self._last_masks is not None:
            return
        self._last_masks = [*map(self.masks, self.env_ids)]
        every = enumerate(zip(self.acting, self.alive, self.over))
        self.latest = {env_id: Latest(acting, alive, over) for env_id, (acting, alive, over) in every}
        layout = self.layout
        self.layout = Layout(layout.schema, layout.num_records, arrays=bool(layout.agents))  # without the block
        self.codec = None
        del self.buffer, self.records, self.action_records, self._own

    def begin(self, env_ids: Iterable[int]) -> None:
        env_ids = [*env_ids]
        self.statistics.begin(env_ids)
        for env_id in env_ids:
            self._slots[env_id].has_reset = True

    def states(self, env_ids: Sequence[int]) -> NDArray[Any]:
        """New arrays of the states that workers have written."""
        assert self.layout.state is not None
        states: NDArray[Any] = self.layout.state.array[[*env_ids], 0]
        return states

    def states_in_block(self, env_id: int) -> States | None:
        """Copies of the states of one environment; None if it has none."""
        state, final_state = self.layout.state, self.layout.final_state
        if state is None or final_state is None:
            return None
        return state.array[env_id, 0].copy(), final_state.array[env_id, 0].copy()

    def states_seen(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The current states, and the last states of finished episodes, `(num_envs, *state_space.shape)`."""
        state, final_state = self.layout.state, self.layout.final_state
        assert state is not None
        assert final_state is not None
        current, final = state.array[:, 0], final_state.array[:, 0]
        unrecorded = {env_id: one.states for env_id, one in self.latest.items() if one.states is not None}
        if unrecorded:
            current, final = current.copy(), final.copy()
            for env_id, (latest, latest_final) in unrecorded.items():
                current[env_id], final[env_id] = latest, latest_final
        return current, final
