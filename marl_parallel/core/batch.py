"""The parent's side of the block: actions of many environments in, their transitions out, and where each one stands.

Here it is decided which of the caller's actions are taken and which are refused, before any simulator is touched. The
dicts of `ParallelEnv` are one view of the block, arrays over all environments (`arrays.py`) are another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import ModuleType
from typing import Any, ClassVar, TypeAlias, cast
from weakref import WeakSet

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.action_masks import mask_of, own_mask
from marl_parallel.adapters import AgentID, Rules
from marl_parallel.core.arrays import ArrayBatch
from marl_parallel.core.columns import Layout, span_of
from marl_parallel.core.episode import needs_actions
from marl_parallel.core.pickling import dumps_for_workers
from marl_parallel.core.records import ActionRecords, Columns, TransitionRecords
from marl_parallel.core.slots import Slot, Snapshot
from marl_parallel.core.spaces import Mismatch, conform, zeros

Dicts: TypeAlias = tuple[dict[Any, Any], ...]
"""One dict for each environment."""

_WORTH_WHILE = 3
"""Fewer records than these are written and read one by one."""


class Batch:
    """All environments' records, seen by the parent.

    Args:
        slots: The environments.
        layout: Of the block.
        buffer: The block.
        rules: Of the environments.
        mode: When episodes begin anew.
        copy: Whether observations are handed out as arrays of the caller's own (attribute `copies`).
        check_actions: Whether every action must be contained in its space (attribute `checks`).
        needs_all_actions: Whether an agent that acts and is given no action is an error under dict rules too.
        local_modules: Modules that workers cannot import.
    """

    mode_is_fixed: ClassVar[bool] = False

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
    ) -> None:
        layout.bind(buffer)
        self.layout = layout
        self.actions = ActionRecords(layout, buffer)
        self.transitions = TransitionRecords(layout, buffer, copy=copy)
        self._own = TransitionRecords(layout, buffer)
        self.rules, self.mode, self.copies, self.checks = rules, mode, copy, check_actions
        self._slots = slots
        self.env_ids = tuple(range(layout.num_records))
        self._everywhere = range(layout.num_records)
        self._pettingzoo = rules is Rules.PETTINGZOO
        self._needs_all = self._pettingzoo or needs_all_actions
        self._local_modules = local_modules
        self.views: WeakSet[ArrayBatch] = WeakSet()
        self._all_act = False  # whether every slot is known to be as `note_usual` leaves it

    # -- actions -------------------------------------------------------------------------------------------------------

    def write_actions(self, env_ids: Sequence[int], actions: Sequence[Mapping[Any, Any]]) -> dict[int, bytes]:
        """Write one dict of actions for each environment.

        Returns:
            By environment, what does not fit into the block, pickled.

        Raises:
            ValueError: An action is missing, or is not what its space declares; nothing has been stepped.
            TypeError: Something is not a dict, or cannot be pickled; likewise.
        """
        span = self._everywhere if env_ids is self.env_ids else self._span(env_ids)
        if span is not None and self._all_alike(span, actions) and self.actions.write_span(span, actions):
            return {}
        outside: dict[int, bytes] = {}
        for env_id, given in zip(env_ids, actions, strict=True):
            slot = self._slots[env_id]
            if slot.over or type(given) is not dict or (self._needs_all and [*given] != slot.acting):
                given = self._wanted(slot, given)
            if self.checks:
                self._check_contained(env_id, given)
            try:
                extras = self.actions.write(env_id, given)
                if extras is not None:
                    outside[env_id] = dumps_for_workers(
                        extras, f"environment {env_id}: its actions", self._local_modules
                    )
            except Mismatch as error:
                raise ValueError(f"environment {env_id}: {error}") from None
        return outside

    def _span(self, env_ids: Sequence[int]) -> range | None:
        """The environments as a range, if they are neighbours and enough of them."""
        return span_of(env_ids) if len(env_ids) >= _WORTH_WHILE else None

    def _all_alike(self, span: range, actions: Sequence[Mapping[Any, Any]]) -> bool:
        """Whether each has an action for every agent, in order, and all of them act: nothing is left to be decided."""
        if self.checks or [*map(type, actions)] != [dict] * len(span):
            return False
        slots, everyone = self._slots[span.start : span.stop], [self.layout.agents] * len(span)
        if not self._all_act and (
            any(slot.over for slot in slots) or (self._pettingzoo and [slot.acting for slot in slots] != everyone)
        ):
            return False
        return [*map(list, actions)] == everyone

    def _wanted(self, slot: Slot, given: Any) -> dict[Any, Any]:
        """The actions that the environment gets, of those given."""
        if not needs_actions(self.rules, self.mode, slot.over):
            return {}
        if self._pettingzoo or not isinstance(given, Mapping):
            return of_acting(slot.env_id, given, slot.acting)
        if self._needs_all:
            of_acting(slot.env_id, given, slot.acting)  # raises where one is missing
        return dict(given)

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
        """The transitions of some environments, given what travelled pickled, or all of it, by environment."""
        span = self._everywhere if env_ids is self.env_ids else self._span(env_ids)
        apart = {env_id for env_id, more in extras.items() if type(more) is Snapshot} if extras else ()
        columns: list[Columns] = []
        runs: Any = [(env_ids, 0)] if span is None else self.transitions.runs(span, apart)
        for run, code in runs:
            if not code or len(run) < _WORTH_WHILE:
                rows = [self._read_one(env_id, extras.get(env_id)) for env_id in run]
                columns.append(cast(Columns, (*zip(*rows),) or ((),) * 5))
                continue
            columns.append(self.transitions.read_span(run, code, extras))
            self.note_usual(run)
            if extras:
                self._all_act = False
                for env_id, infos in zip(run, columns[-1][4]):
                    self._note_masks(self._slots[env_id], extras.get(env_id), infos, ended=False)
        return columns[0] if len(columns) == 1 else cast(Columns, tuple((*chain(*parts),) for parts in zip(*columns)))

    def _read_one(self, env_id: int, more: Any) -> Dicts:
        """The transition of one environment; its slot is brought up to date."""
        slot = self._slots[env_id]
        self._all_act = False
        if type(more) is Snapshot:
            dicts, slot.acting, slot.alive, slot.over, slot.masks = more
            return dicts
        dicts, slot.acting, slot.alive, ended = self.transitions.read(env_id, more)
        slot.over = ended and self.mode is not AutoresetMode.SAME_STEP
        self._note_masks(slot, more, dicts[4], ended)
        return dicts

    def read_rest(self, env_id: int, extras: Any) -> dict[Any, Any]:
        """The infos of one environment of which nothing else travelled pickled; all else is read from the block."""
        slot = self._slots[env_id]
        infos, slot.acting, slot.alive, ended = self.transitions.read_infos(env_id, extras or {})
        slot.over = ended and self.mode is not AutoresetMode.SAME_STEP
        self._all_act = False
        self._note_masks(slot, extras, infos, ended)
        return infos

    def note_usual(self, span: range) -> None:
        """Note that in these environments every agent acts next and nothing is over."""
        if self._all_act:
            return
        for slot in self._slots[span.start : span.stop]:
            slot.acting = slot.alive = self.transitions.agents
            slot.over, slot.masks = False, None
        self._all_act = len(span) == len(self._slots)

    def snapshot(self, env_id: int, extras: Any) -> Snapshot:
        """The transition of one environment in memory of its own; the slot stays as it is."""
        dicts, acting, alive, ended = self._own.read(env_id, extras)
        # An agent of whom nothing was observed has none: what the block holds of it may be overwritten meanwhile.
        masks = {**dict.fromkeys(acting), **self._pickled_masks(acting, dicts[0], extras or {}, dicts[4], ended)}
        return Snapshot(dicts, acting, alive, ended and self.mode is not AutoresetMode.SAME_STEP, masks)

    def last_known(
        self, slot: Slot, extras: Any, *, partially_written: bool
    ) -> tuple[dict[AgentID, Any], list[AgentID]]:
        """The last observations in one environment, in memory of their own, and who is alive.

        They are zeros if the record was only `partially_written` when the worker died.
        """
        if not slot.has_reset:
            return {}, []
        if partially_written:
            declared = self.layout.schema.observation_spaces
            return {agent: zeros(declared[agent]) for agent in slot.acting if agent in declared}, [*slot.acting]
        return self._own.last_known(slot.env_id, extras)

    # -- action masks --------------------------------------------------------------------------------------------------

    def masks(self, env_id: int) -> dict[AgentID, Any]:
        """By agent, the action masks of those who act next in one environment that is not in flight; new arrays."""
        slot, seen = self._slots[env_id], self.transitions.observed(env_id)
        found = {agent: seen[agent].get(ACTION_MASK) for agent in slot.acting if type(seen.get(agent)) is dict}
        found |= slot.masks or {}
        return {agent: own_mask(found[agent]) for agent in slot.acting if found.get(agent) is not None}

    def _note_masks(self, slot: Slot, extras: Any, infos: Mapping[Any, Any], ended: bool) -> None:
        """Copy the masks of the agents that act out of infos and observations that travelled pickled."""
        if not extras:
            slot.masks = None
        elif (
            # As with most infos: nothing but them, and no mask so far. One look at each has to do.
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
        """The masks of those who act; None for one whose observation is among `observations` and has no mask."""
        if ended and self.mode is AutoresetMode.SAME_STEP:  # those infos are the finished episode's
            infos = extras.get("reset_infos", {})
        masks = {}
        for agent in acting:
            mask = mask_of(observations.get(agent), infos.get(agent))
            if mask is not None or agent in observations:
                masks[agent] = mask
        return masks

    # -- where each environment stands; callers must not change the lists ----------------------------------------------

    @property
    def acting(self) -> list[list[AgentID]]:
        return [slot.acting for slot in self._slots]

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
        for env_id in env_ids:
            self._slots[env_id].has_reset = True

    def arrays(self, *, copy: bool) -> ArrayBatch:
        """The same as arrays; `copy` says whether observations are arrays of the caller's own."""
        view = ArrayBatch(self, copy=copy)
        self.views.add(view)
        return view

    def states(self, env_ids: Sequence[int], outside: Mapping[int, Any]) -> NDArray[Any]:
        """The global states, stacked: those that workers have written, and those that travelled pickled, by id."""
        column = self.layout.state
        return np.stack([column.records[env_id][0] if column is not None else outside[env_id] for env_id in env_ids])


def of_acting(env_id: int, given: Any, acting: Sequence[AgentID]) -> dict[AgentID, Any]:
    """The actions of those who act, of all that are given.

    Raises:
        TypeError: They are not given by agent.
        ValueError: One is missing.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"environment {env_id}: expected a dict of actions keyed by agent, got {type(given).__name__}")
    missing = [agent for agent in acting if agent not in given]
    if missing:
        raise ValueError(
            f"environment {env_id}: no action for agent {missing[0]!r}; expected one for each of {[*acting]}, "
            f"got {list(given)}"
        )
    return {agent: given[agent] for agent in acting}
