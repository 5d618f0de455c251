"""The parent's side of the block: actions of many environments in, their transitions out, and the state of each one.

Actions are checked here, before any simulator is touched. The dicts of `ParallelEnv` are one view of the block, arrays
over all environments (`arrays.py`) are another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.action_masks import mask_of, own_mask
from marl_parallel.adapters import AgentID, Rules
from marl_parallel.core.array_view import StackedMasks, of_acting
from marl_parallel.core.codec import open_codec
from marl_parallel.core.columns import Layout
from marl_parallel.core.episode import add_to_infos, needs_actions
from marl_parallel.core.pickling import dumps_for_workers, in_order
from marl_parallel.core.pool.slots import Slot, Snapshot
from marl_parallel.core.records import BITS, ActionRecords, Columns, TransitionRecords
from marl_parallel.core.spaces import Mismatch, conform, zeros
from marl_parallel.core.statistics import EpisodeStatistics
from marl_parallel.core.transition import ALL, COMMON, EPISODE, FINAL_OBS, are_empty

Dicts: TypeAlias = tuple[dict[Any, Any], ...]
"""One dict for each environment."""


class Batch:
    """All environments' records, seen by the parent.

    Args:
        slots: The environments.
        layout: Of the block.
        buffer: The block.
        rules: Of the environments.
        mode: The auto-reset mode.
        copy: Whether observations are copies rather than views of the block (attribute `copies`).
        check_actions: Whether every action must be contained in its space (attribute `checks`).
        needs_all_actions: Whether an agent that acts but has no action is an error under dict rules too.
        local_modules: Modules that workers cannot import.
        episode_stats: Whether infos have the statistics of episodes.

    Attributes:
        codec: Compiled code for the block; None if there is none.
        apart: The environments of which records do not say who is alive and acts.
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
    ) -> None:
        layout.bind(buffer)
        self.layout, self.buffer = layout, buffer
        self.actions = ActionRecords(layout, buffer)
        self.statistics = EpisodeStatistics(
            layout.num_records, layout.agents, mode, vectors=layout.schema.reward_spaces, in_infos=episode_stats
        )
        self.codec: Any = open_codec(
            layout, buffer, infos_in_block=True, totals=self.statistics.totals, in_infos=episode_stats
        )
        self.transitions = TransitionRecords(layout, buffer, copy=copy, codec=self.codec)
        self._own = TransitionRecords(layout, buffer, codec=self.codec)
        self.rules, self.mode, self.copies, self.checks = rules, mode, copy, check_actions
        self._slots = slots
        self._places = {agent: place for place, agent in enumerate(layout.agents)}
        self._possible = {*layout.schema.possible_agents}
        self.env_ids = tuple(range(layout.num_records))
        self._pettingzoo = rules is Rules.PETTINGZOO
        self._needs_all = self._pettingzoo or needs_all_actions
        self._local_modules = local_modules
        self.around: Callable[[str], AbstractContextManager[None] | None] | None = None  # as of `Pool`
        self.apart = {*self.env_ids}

    # -- actions -------------------------------------------------------------------------------------------------------

    def write_actions(
        self, env_ids: Sequence[int], actions: Sequence[Mapping[Any, Any]], *, stacked: bool = False
    ) -> dict[int, bytes]:
        """Write one dict of actions for each environment; `stacked` if they come out of arrays over environments.

        Returns:
            By environment, what does not fit into the block, pickled.

        Raises:
            ValueError: An action is missing, or is not what its space declares; nothing has been stepped.
            TypeError: Something is not a dict, or cannot be pickled; likewise.
        """
        if self.around is not None and (context := self.around("write actions")):
            with context:
                return self.write_actions(env_ids, actions, stacked=stacked)
        pickled: dict[int, bytes] = {}
        codec, place = None if self.checks else self.codec, 0
        while place < len(env_ids):
            if codec is not None:
                place = codec.write(env_ids, actions, place, not self._pettingzoo, self._needs_all)
                if place == len(env_ids):
                    break
            env_id, of_env = env_ids[place], actions[place]
            slot = self._slots[env_id]
            if slot.over or type(of_env) is not dict or (self._needs_all and [*of_env] != slot.acting):
                of_env = self._actions_that_count(slot, of_env)
            if self.checks:
                self._check_contained(env_id, of_env)
            try:
                extras = self.actions.write(env_id, of_env)
            except Mismatch as error:
                raise ValueError(f"environment {env_id}: {error}") from None
            if extras is not None:
                what = f"environment {env_id}: its actions"
                pickled[env_id] = dumps_for_workers(extras, what, self._local_modules)
            place += 1
        if stacked:
            self.actions.mark_stacked(env_ids)
        return pickled

    def _actions_that_count(self, slot: Slot, actions: Any) -> dict[Any, Any]:
        """The actions that the environment receives."""
        if not needs_actions(self.rules, self.mode, slot.over):
            return {}
        if self._needs_all or not isinstance(actions, Mapping):
            acting = of_acting(slot.env_id, actions, slot.acting)  # raises if one is missing
        return acting if self._pettingzoo else dict(actions)

    def _check_contained(self, env_id: int, actions: Mapping[Any, Any]) -> None:
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

    def read(self, env_ids: Sequence[int], extras: Mapping[int, Any]) -> Columns:
        """The transitions of some environments, with their pickled extras or a `Snapshot`, by environment."""
        if self.around is not None and (context := self.around("read results")):
            with context:
                return self.read(env_ids, extras)
        if self.codec is None:
            rows = [self._read_one(env_id, extras.get(env_id)) for env_id in env_ids]
            return (*zip(*rows),) or ((),) * 5  # type: ignore[return-value]  # five tuples
        columns: Any
        columns, others = self.codec.read(env_ids, extras, self.copies)
        if others is not None:
            place_of = dict(zip(env_ids, range(len(env_ids))))

            def put(env_id: int, dicts: Sequence[dict[Any, Any]]) -> None:
                for column, values in zip(columns, dicts):
                    column[place_of[env_id]] = values

            here = {env_id: more for env_id, more in extras.items() if env_id in place_of}
            self._complete(others, here, put, lambda env_id: columns[4][place_of[env_id]])
            columns = tuple(map(tuple, columns))
        return columns  # type: ignore[no-any-return]

    def complete_infos(self, infos: dict[int, Any], others: Any, extras: Mapping[int, Any]) -> None:
        """Add those that `Codec.read_arrays` has left to the infos that it has found; the extras have nothing else."""

        def put(env_id: int, one: dict[Any, Any] | None) -> None:
            if one is not None:
                infos[env_id] = one

        self._complete(others, extras, put, infos.__getitem__, only_infos=True)

    def _complete(
        self, others: Any, extras: Mapping[int, Any], put: Callable[[int, Any], None],
        infos_of: Callable[[int], dict[Any, Any]], *, only_infos: bool = False,
    ) -> None:  # fmt: skip
        """Read what compiled code has left, and note what it has found; see `Codec.read`."""
        left, masked, changed = others
        if changed:
            self._note_changed(changed)
        for env_id in left:
            put(env_id, self._read_one(env_id, extras.get(env_id), only_infos=only_infos))
        for env_id in {*masked, *extras} - {*left}:
            infos = infos_of(env_id)
            self._note_masks(self._slots[env_id], {"infos": infos}, infos, ended=False)
            self.codec.report(env_id)  # the next result may have no masks

    def _note_changed(self, changed: Iterable[tuple[int, list[AgentID], list[AgentID] | None]]) -> None:
        """Note who acts and is alive in environments of which compiled code has read the records."""
        agents = self.layout.agents
        for env_id, acting, alive in changed:
            slot = self._slots[env_id]
            slot.acting = agents if acting == agents else acting
            if alive is not None:
                slot.alive = alive
                self.statistics.note_alive(env_id, alive)
            slot.over, slot.masks = False, None
            self.apart.discard(env_id)

    def _set_apart(self, env_id: int) -> None:
        self.apart.add(env_id)
        if self.codec is not None:
            self.codec.forget(env_id)

    def _read_one(self, env_id: int, extras: Any, *, only_infos: bool = False) -> Any:
        """The five dicts of one environment, or in the form of `read_infos`; updates the slot."""
        slot = self._slots[env_id]
        self._set_apart(env_id)
        stays_over = slot.over
        if type(extras) is Snapshot:
            dicts, slot.acting, slot.alive, slot.over, masks = extras
            slot.masks = {**dict.fromkeys(self.layout.agents), **masks}  # the block may have been overwritten
            add_to_infos(dicts[4], EPISODE, self._add_step(slot, dicts[1:4], dicts[4], stays_over))
            return dicts
        read: Any = self.transitions.read_infos if only_infos else self.transitions.read
        extras = extras or {}  # `read` adds to it
        result, slot.acting, slot.alive, ended = read(env_id, extras)
        infos = result if only_infos else result[4]
        outcome = self.transitions.outcome(env_id) if only_infos else result[1:4]
        parts = self._add_step(slot, outcome, infos, stays_over)
        slot.over = ended and self.mode is not AutoresetMode.SAME_STEP
        empty = are_empty(infos.values())
        self._note_masks(slot, extras or (None if empty else {"infos": infos}), infos, ended)
        add_to_infos(infos, EPISODE, parts)
        return None if only_infos and empty and not parts else result

    def _add_step(
        self, slot: Slot, outcome: Sequence[dict[Any, Any]], infos: Mapping[Any, Any], stays_over: bool
    ) -> dict[Any, Any]:
        """Count a step in the statistics, unless the episode was over before and still is; returns as they do."""
        rewards, terminateds, truncateds = outcome
        alive, over = slot.alive, terminateds[ALL] or truncateds[ALL]
        if stays_over and over:
            return {}
        if over and self.mode is AutoresetMode.SAME_STEP:  # these are alive in the next episode
            seen = () if self._pettingzoo else infos.items()  # else nobody was left in the one that has ended
            alive = [agent for agent, info in seen if isinstance(info, Mapping) and FINAL_OBS in info]
            alive = [agent for agent in alive if not (terminateds.get(agent) or truncateds.get(agent))]
        return self.statistics.add(slot.env_id, rewards, terminateds, truncateds, alive)

    def note_constructed(self, env_ids: Iterable[int]) -> None:
        """Note that these environments have been constructed again, and count as never reset."""
        for env_id in env_ids:
            slot = self._slots[env_id]
            slot.acting, slot.alive, slot.over, slot.has_reset, slot.masks = [], [], False, False, None
            self._set_apart(env_id)

    def snapshot(self, env_id: int, extras: Any) -> Snapshot:
        """The transition of one environment in memory of its own; does not update the slot."""
        extras = extras or {}  # `read` adds to it
        dicts, acting, alive, ended = self._own.read(env_id, extras)
        masks = self._pickled_masks(acting, dicts[0], extras, dicts[4], ended)
        return Snapshot(dicts, acting, alive, ended and self.mode is not AutoresetMode.SAME_STEP, masks)

    def has_next_episode(self, env_id: int) -> bool:
        """Whether the latest step of an environment has ended an episode and begun the next one."""
        return self.transitions.is_final(env_id)

    def ended(self, env_id: int, extras: Any) -> Snapshot:
        """As `snapshot`, where an environment `has_next_episode`: the last step of the old one."""
        return Snapshot(self._own.read_ended(env_id, extras or {}), [], [], over=True)

    def last_known(
        self, slot: Slot, extras: Any, *, partially_written: bool
    ) -> tuple[dict[AgentID, Any], list[AgentID]]:
        """The last observations in one environment, in memory of their own, and the agents alive.

        They are zeros if the record was only `partially_written` when the worker died.
        """
        if not slot.has_reset:
            return {}, []
        if partially_written:
            declared = self.layout.schema.observation_spaces
            return {agent: zeros(declared[agent]) for agent in slot.alive if agent in declared}, [*slot.alive]
        return self._own.last_known(slot.env_id, extras)

    # -- action masks --------------------------------------------------------------------------------------------------

    def masks(self, env_id: int) -> dict[AgentID, Any]:
        """By agent, the latest action masks that the simulator reported, in new arrays, also of agents that do not act.

        {} if the next action does not count.
        """
        slot = self._slots[env_id]
        if slot.request is not None or slot.skips or not slot.has_reset:  # in flight, or rebuilt
            return {}
        observed = self.transitions.observed(env_id)
        masks = {agent: seen.get(ACTION_MASK) for agent, seen in observed.items() if type(seen) is dict}
        masks |= slot.masks or {}
        reported = {agent: own_mask(mask) for agent, mask in masks.items() if mask is not None}
        return in_order(reported, self.layout.schema.possible_agents)

    def stacked_masks(self) -> tuple[StackedMasks, list[int]]:
        """The action masks by agent, and the environments in which only `masks` knows them."""
        columns, observed = self.layout.observations, (self.transitions.presence & BITS["observations"]) != 0
        found: StackedMasks = {}
        for column, positions in columns.groups:
            if type(column.array) is dict and ACTION_MASK in column.array:
                stacked = column.array[ACTION_MASK]
                for row, at in enumerate(positions):
                    agent, masks = columns.agents[at], stacked[:, row] if type(stacked) is np.ndarray else None
                    found[agent] = masks, observed[:, self._places[agent]]
        apart = [
            slot.env_id
            for slot in self._slots
            if slot.masks or slot.request is not None or slot.skips or not slot.has_reset
        ]
        return found, apart

    def _note_masks(self, slot: Slot, extras: Any, infos: Mapping[Any, Any], ended: bool) -> None:
        """Copy action masks out of infos, and out of observations that travelled pickled."""
        if not extras:
            slot.masks = None
        elif (
            # Most extras are infos without masks: they cost one look at each info.
            ended
            or slot.masks is not None
            or [*extras] != ["infos"]
            or any(type(info) is not dict or ACTION_MASK in info for info in infos.values())
        ):
            observations = extras.get("observations", {})
            slot.masks = self._pickled_masks(slot.acting, observations, extras, infos, ended) or None

    def _pickled_masks(
        self, acting: Sequence[AgentID], observations: Mapping[Any, Any], extras: Any, infos: Any, ended: bool
    ) -> dict[AgentID, Any]:
        """The masks in observations and infos; None for an agent whose observation is in `observations` without one."""
        if ended and self.mode is AutoresetMode.SAME_STEP:  # those infos are the finished episode's
            infos = extras.get("reset_infos", {})
        masks = {}
        for agent in {**dict.fromkeys(acting), **observations, **infos}:
            mask = mask_of(observations.get(agent), infos.get(agent))
            if mask is None:
                is_agent = agent in observations
            elif self._possible:
                is_agent = agent in self._possible or agent in acting or agent in observations
            else:
                is_agent = agent != COMMON
            if is_agent:
                masks[agent] = mask
        return masks

    # -- the state of each environment; callers must not change the lists ----------------------------------------------

    @property
    def acting(self) -> list[list[AgentID]]:
        return [slot.acting for slot in self._slots]

    def acting_in(self, env_id: int) -> list[AgentID]:
        return self._slots[env_id].acting

    @property
    def alive(self) -> list[list[AgentID]]:
        return [slot.alive for slot in self._slots]

    @property
    def over(self) -> list[bool]:
        return [slot.over for slot in self._slots]

    @property
    def has_reset(self) -> list[bool]:
        return [slot.has_reset for slot in self._slots]

    def begin(self, env_ids: Iterable[int]) -> None:
        env_ids = [*env_ids]
        self.statistics.begin(env_ids)
        for env_id in env_ids:
            self._slots[env_id].has_reset = True

    def states(self, env_ids: Sequence[int], pickled: Mapping[int, Any]) -> NDArray[Any]:
        """The global states, stacked: from the block, or from those that travelled pickled, by environment."""
        column = self.layout.state
        return np.stack([pickled[env_id] if column is None else column.array[env_id, 0] for env_id in env_ids])
