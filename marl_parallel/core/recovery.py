"""Restarts: how often an environment may be rebuilt, with which seed, and what its caller receives.

`pool.py` decides when an environment is rebuilt and posts the requests. `episode.py` says what the dicts of an
interrupted step contain.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters.protocol import Dicts
from marl_parallel.core.batch import Batch
from marl_parallel.core.episode import interrupted, marked, renewed
from marl_parallel.core.messages import Message, Plan, Rebuild
from marl_parallel.core.pickling import dumps, loads
from marl_parallel.core.reports import first_line
from marl_parallel.core.slots import Fault, Interrupted, Slot, Snapshot
from marl_parallel.types import ParallelEnvError, RestartLimitExceeded, RestartPolicy


class Recovery:
    """Everything that `on_error="restart"` adds to a pool; its functions work on slots.

    Args:
        slots: The environments.
        policy: How often an environment may be rebuilt.
        plan: The constructors of all environments, and what else workers need.
        block: The payload of `ATTACH`.
        batch: The records, read by the parent.
        base_seed: What seeds are derived from.
        options_last: Whether environments keep the options of a reset.

    Attributes:
        base_seed: As given; changes with `reset(seed=)`.
        traced: Whether workers keep a trace.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        policy: RestartPolicy,
        plan: Plan,
        block: tuple[int, bool],
        batch: Batch,
        base_seed: int,
        options_last: bool,
    ) -> None:
        self._slots, self._policy, self._plan, self._block, self._batch = slots, policy, plan, block, batch
        self._same_step = plan.mode is AutoresetMode.SAME_STEP
        self.base_seed, self._options_last = base_seed, options_last
        self.traced = False

    def reset_options(self, env_id: int, options: dict[Any, Any]) -> dict[Any, Any]:
        """The options of a reset, with earlier ones where the environment keeps them: it may have been rebuilt."""
        if not self._options_last:
            return options
        kept = self._slots[env_id].options
        kept.update(options)
        return kept

    def is_rebuilt(self, env_id: int) -> bool:
        """Whether an environment has been rebuilt, with a seed of its own."""
        return self._slots[env_id].restarts > 0

    def count_fault(self, slots: Iterable[Slot], error: ParallelEnvError) -> None:
        """Count a fault against environments.

        Raises:
            RestartLimitExceeded: One of them has failed more often than the policy allows.
        """
        now, policy = time.monotonic(), self._policy
        for slot in slots:
            recent = slot.recent_faults
            while recent and now - recent[0] > policy.rate_period_s:
                recent.popleft()
            limit = None
            if policy.max_restarts is not None and slot.blamed >= policy.max_restarts:
                limit = f"max_restarts={policy.max_restarts}"
            elif policy.rate_limit is not None and len(recent) >= policy.rate_limit:
                limit = f"rate_limit={policy.rate_limit} within {policy.rate_period_s:g} s"
            if limit is not None:
                raise RestartLimitExceeded(
                    f"environment {slot.env_id} has failed once more than its RestartPolicy allows ({limit}): "
                    f"{first_line(error)}\n\nWhat to do: fix the simulator, or pass a RestartPolicy with higher "
                    "limits. The error of the last failure is the cause of this one.",
                    env_ids=(slot.env_id,),
                    worker=error.worker,
                ) from error
            slot.blamed += 1
            recent.append(now)

    # -- what a fault interrupts -----------------------------------------------------------------------------------

    def interrupted(self, slot: Slot, *, in_reset: bool) -> Interrupted:
        """What a fault in an environment interrupts.

        Args:
            slot: The environment.
            in_reset: Whether the simulator's `reset` was running.
        """
        if slot.request is None:
            return Interrupted.NOTHING
        if slot.request is Message.RESET:
            return Interrupted.RESET
        if in_reset:
            return Interrupted.AUTO_RESET if self._same_step else Interrupted.RESET
        return Interrupted.STEP

    def interrupted_dicts(self, slot: Slot, what: Interrupted, *, partially_written: bool) -> Dicts:
        """The five dicts of an interrupted environment, without the mark.

        Args:
            slot: The environment.
            what: What is interrupted.
            partially_written: Whether its record may be; then its observations are zeros.
        """
        if what is Interrupted.RESET:
            return {}, {}, {}, {}, {}
        extras = _read(slot.latest)
        if what is Interrupted.AUTO_RESET and not partially_written:
            return self._batch.snapshot(slot.env_id, extras).dicts
        observations, alive = self._batch.last_known(slot, extras, partially_written=partially_written)
        if what is Interrupted.AUTO_RESET:
            return (observations, *self._batch.snapshot(slot.env_id, extras).dicts[1:])
        spaces = self._batch.layout.schema.reward_spaces
        return interrupted(observations, [] if slot.needs_reset else alive, spaces)

    def begin(
        self,
        slot: Slot,
        what: Interrupted,
        error: ParallelEnvError,
        *,
        partially_written: bool = False,
        dicts: Dicts | None = None,
    ) -> None:
        """Keep what an environment was doing when it failed, before its record is overwritten.

        Args:
            slot: The environment.
            what: What the fault interrupts.
            error: What happened.
            partially_written: As of `interrupted_dicts`.
            dicts: What `interrupted_dicts` has returned, where the record may have changed since; None to read it now.
        """
        if slot.fault is not None:
            return  # its rebuild failed: what the first fault interrupted stays the same
        if slot.mark is not None and what is Interrupted.NOTHING:
            (slot.fault, _), slot.mark = slot.mark, None
            return
        if what is Interrupted.RESET:
            slot.mark = None  # the episode that it would have ended is over
        if dicts is None:
            dicts = self.interrupted_dicts(slot, what, partially_written=partially_written)
        report = str(error)
        slot.fault = Fault(what, dicts if what is Interrupted.RESET else marked(dicts, report), report)

    # -- rebuilding ------------------------------------------------------------------------------------------------

    def rebuild_request(self, slot: Slot) -> Rebuild:
        """What the worker does to rebuild an environment; counts the restart."""
        slot.restarts += 1
        source = np.random.SeedSequence((self.base_seed, slot.env_id, slot.restarts))
        plan = self._plan._replace(
            traced=self.traced,
            constructors={slot.env_id: self._plan.constructors[slot.env_id]},
            seeds={slot.env_id: int(source.generate_state(1)[0] >> 1)},
            counts={slot.env_id: slot.restarts},
        )
        keywords = slot.reset_keywords
        if slot.options:
            keywords = dumps({**({} if keywords is None else loads(keywords)), "options": slot.options})
        return Rebuild(plan, self._block, reset=self._resets_at_once(slot), keywords=keywords)

    def _resets_at_once(self, slot: Slot) -> bool:
        """Whether the fresh environment's first observation is part of the result."""
        assert slot.fault is not None
        if not slot.has_reset and slot.fault.interrupted is Interrupted.NOTHING:
            return False
        return slot.fault.interrupted is Interrupted.RESET or self._same_step

    def finish(self, slot: Slot, extras: bytes | None) -> Snapshot | None:
        """Note that an environment has been rebuilt.

        Args:
            slot: The environment.
            extras: What travelled pickled with its reset.

        Returns:
            The result of what the fault interrupted; None where the environment was idle, which has a mark now.
        """
        fault = slot.fault
        assert fault is not None
        at_once = self._resets_at_once(slot)
        slot.fault = None
        if at_once:
            self.note_result(slot, extras)
            fresh = self._batch.snapshot(slot.env_id, _read(extras))
            if fault.interrupted is Interrupted.RESET:
                snapshot = fresh._replace(dicts=marked(fresh.dicts, fault.report))
            else:
                snapshot = fresh._replace(dicts=renewed(fault.dicts, fresh.dicts), over=False)
        else:
            snapshot = Snapshot(fault.dicts, [], [], over=True)
            slot.needs_reset = True
        if fault.interrupted is Interrupted.NOTHING:
            slot.mark = fault, snapshot
            return None
        return snapshot

    @staticmethod
    def note_result(slot: Slot, extras: bytes | None) -> None:
        """Keep what travelled pickled with an environment's result: it may be needed to make the result again."""
        slot.latest, slot.saved = extras, None
        slot.reset_keywords, slot.needs_reset = None, False

    def result_of_reset(self, slot: Slot, extras: Any) -> Any:
        """The result of a reset; with the mark of an environment that was restarted while it was idle."""
        if slot.mark is None:
            return extras
        (fault, _), slot.mark = slot.mark, None
        snapshot = self._batch.snapshot(slot.env_id, extras)
        return snapshot._replace(dicts=marked(snapshot.dicts, fault.report))

    def keep_result(self, slot: Slot) -> None:
        """Copy a result that the caller has not received out of the record, which is about to be overwritten."""
        if slot.request is Message.RESET:
            slot.has_reset = True
        if type(slot.result) is not Snapshot:
            slot.result = self._batch.snapshot(slot.env_id, slot.result)


def _read(extras: bytes | None) -> Any:
    return None if extras is None else loads(extras)
