"""Restarts: how often an environment may be rebuilt, with which seed, and what its caller receives.

`pool.py` decides when an environment is rebuilt and posts the requests::

    fault -> count_fault -> cut_off -> begin -> rebuild_request -> (the worker rebuilds) -> finish -> result, or a mark

`episode.py` says what the dicts of an interrupted step contain.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from marl_parallel.core.worker_status import Activity, Running
from marl_parallel.types import ParallelEnvError, RestartLimitExceeded, RestartPolicy


@dataclass(slots=True, eq=False)
class Recovery:
    """What `on_error="restart"` adds to a pool; its functions work on slots."""

    slots: Sequence[Slot]
    policy: RestartPolicy
    plan: Plan  # the constructors of all environments, and what else workers need
    block: tuple[int, bool]  # the payload of ATTACH
    batch: Batch
    base_seed: int  # seeds are derived from it; changes with `reset(seed=)`
    options_last: bool  # whether environments keep the options of a reset
    traced: bool = False  # whether workers keep a trace

    def reset_options(self, env_id: int, options: dict[Any, Any]) -> dict[Any, Any]:
        """The options of a reset, with earlier ones where the environment keeps them: it may have been rebuilt."""
        if not self.options_last:
            return options
        kept = self.slots[env_id].options
        kept.update(options)
        return kept

    def count_fault(self, slots: Iterable[Slot], error: ParallelEnvError) -> None:
        """Count a fault against environments.

        Raises:
            RestartLimitExceeded: One of them has failed more often than the policy allows.
        """
        now, policy = time.monotonic(), self.policy
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

    def cut_off(self, slot: Slot, running: Running | None) -> tuple[Interrupted, Dicts]:
        """What a fault interrupts, and the five dicts that the caller receives, without the mark.

        Args:
            slot: The environment; its record is not overwritten yet.
            running: What its worker is doing, or was doing when it died. The record is partially written if that is
                this environment and its simulator has returned; then its observations are zeros.
        """
        if slot.fault is not None:  # its rebuild has failed: the first fault has interrupted it
            return slot.fault.interrupted, slot.fault.dicts
        if running is not None and running.env_id != slot.env_id:
            running = None
        partially_written = running is not None and not running.inside
        what = Interrupted.STEP
        if slot.request is None or slot.done:
            what = Interrupted.NOTHING
            if slot.mark is not None:
                return what, slot.mark[0].dicts
        elif slot.request is Message.RESET:
            what = Interrupted.RESET
        elif running is not None and running.activity is Activity.RESET:
            what = Interrupted.AUTO_RESET if self._same_step else Interrupted.RESET
        if what is Interrupted.RESET:
            return what, ({}, {}, {}, {}, {})
        if what is Interrupted.AUTO_RESET:
            slot.latest = slot.saved
        extras = _read(slot.latest)
        if what is Interrupted.AUTO_RESET:
            dicts = self.batch.snapshot(slot.env_id, extras).dicts
            if partially_written:
                dicts = (self.batch.last_known(slot, extras, partially_written=True)[0], *dicts[1:])
            return what, dicts
        observations, alive = self.batch.last_known(slot, extras, partially_written=partially_written)
        spaces = self.batch.layout.schema.reward_spaces
        return what, interrupted(observations, [] if slot.needs_reset else alive, spaces)

    def begin(self, slot: Slot, what: Interrupted, dicts: Dicts, error: ParallelEnvError) -> None:
        """Mark an environment as failed: `what` and `dicts` from `cut_off`, and what happened."""
        if slot.fault is not None:
            return
        if slot.mark is not None and what is Interrupted.NOTHING:
            (slot.fault, _), slot.mark = slot.mark, None
            return
        report = str(error)
        if what is Interrupted.RESET:
            slot.mark = None  # the episode that it would have ended is over
        else:
            dicts = marked(dicts, report)
        slot.fault = Fault(what, dicts, report)

    def rebuild_request(self, slot: Slot) -> Rebuild:
        """What the worker does to rebuild an environment; counts the restart."""
        slot.restarts += 1
        source = np.random.SeedSequence((self.base_seed, slot.env_id, slot.restarts))
        plan = self.plan._replace(
            traced=self.traced,
            constructors={slot.env_id: self.plan.constructors[slot.env_id]},
            seeds={slot.env_id: int(source.generate_state(1)[0] >> 1)},
            counts={slot.env_id: slot.restarts},
        )
        keywords = slot.reset_keywords
        if slot.options:
            keywords = dumps({**({} if keywords is None else loads(keywords)), "options": slot.options})
        return Rebuild(plan, self.block, reset=self._resets_at_once(slot), keywords=keywords)

    def finish(self, slot: Slot, extras: bytes | None) -> Snapshot | None:
        """Note that an environment has been rebuilt; `extras` came with its reset.

        Returns:
            The result of what the fault interrupted; None if the environment was idle, which has a mark now.
        """
        fault, at_once = slot.fault, self._resets_at_once(slot)
        assert fault is not None
        slot.fault = None
        if at_once:
            self.note_result(slot, extras)
            fresh = self.batch.snapshot(slot.env_id, _read(extras))
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

    def note_result(self, slot: Slot, extras: bytes | None) -> None:
        """Keep the pickled extras of an environment's result: it may be needed to make the result again."""
        slot.latest, slot.saved = extras, None
        slot.reset_keywords, slot.needs_reset = None, False

    def result_of_reset(self, slot: Slot, extras: Any) -> Any:
        """The result of a reset; with the mark of an environment that was restarted while it was idle."""
        if slot.mark is None:
            return extras
        (fault, _), slot.mark = slot.mark, None
        snapshot = self.batch.snapshot(slot.env_id, extras)
        return snapshot._replace(dicts=marked(snapshot.dicts, fault.report))

    def keep_result(self, slot: Slot) -> None:
        """Copy a result that the caller has not received out of the record, which is about to be overwritten."""
        if slot.request is Message.RESET:
            slot.has_reset = True
        if type(slot.result) is not Snapshot:
            slot.result = self.batch.snapshot(slot.env_id, slot.result)

    @property
    def _same_step(self) -> bool:
        return self.plan.mode is AutoresetMode.SAME_STEP

    def _resets_at_once(self, slot: Slot) -> bool:
        """Whether the fresh environment's first observation is part of the result."""
        assert slot.fault is not None
        if not slot.has_reset and slot.fault.interrupted is Interrupted.NOTHING:
            return False
        return slot.fault.interrupted is Interrupted.RESET or self._same_step


def _read(extras: bytes | None) -> Any:
    return None if extras is None else loads(extras)
