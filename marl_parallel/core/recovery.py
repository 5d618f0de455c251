"""Restarts: how often an environment may be rebuilt, with which seed, and what its caller receives.

`pool.py` decides when an environment is rebuilt and posts the requests::

    fault -> count_fault -> cut_off -> begin -> rebuild_request -> (the worker rebuilds) -> finish -> result
                                                                          or, if it was idle, Slot.fault.next_result

`episode.py` decides about the dicts of an interrupted step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium.vector import AutoresetMode

from marl_parallel.core.batch import Batch
from marl_parallel.core.episode import interrupted, renewed, with_report
from marl_parallel.core.messages import Message, Plan, Rebuild, Watch, name_of
from marl_parallel.core.pickling import dumps, loads
from marl_parallel.core.reports import first_line, logger
from marl_parallel.core.slots import Fault, Slot, Snapshot
from marl_parallel.core.transition import ALL
from marl_parallel.core.worker_status import Activity, Running
from marl_parallel.types import (
    EnvError,
    OnRestart,
    ParallelEnvError,
    RestartEvent,
    RestartLimitExceeded,
    RestartPolicy,
    WorkerTimeout,
)


@dataclass(slots=True, eq=False)
class Recovery:
    """What `on_error="restart"` adds to a pool."""

    slots: Sequence[Slot]
    policy: RestartPolicy
    plan: Plan  # the constructors of all environments, and what else workers need
    block: tuple[int, bool, bool]  # the payload of ATTACH
    batch: Batch
    clock: Callable[[], float]  # of the backend, for the rates of faults
    base_seed: int | None  # seeds are derived from it; changes with `reset(seed=)`. None: there are none
    options_last: bool  # whether environments remember the options of a reset
    on_restart: OnRestart | None = None  # called for each environment that is rebuilt
    traced: bool = False  # whether workers trace
    watch: Watch = Watch()  # noqa: RUF009  # what workers write besides the transitions

    def merged_options(self, env_id: int, options: Mapping[Any, Any]) -> Any:
        """The options of a reset, with earlier ones if the environment remembers them: it may have been rebuilt."""
        return {**self.slots[env_id].options, **options} if self.options_last else options

    def remember_options(self, env_id: int, options: dict[Any, Any]) -> bool:
        """Store merged options, if the environment remembers them; returns whether they are other ones than before."""
        if not self.options_last:
            return False
        slot = self.slots[env_id]
        before, slot.options = slot.options, options
        return dumps(options) != dumps(before)

    def is_restarted(self, kinds: Sequence[str]) -> bool:
        """Whether the policy restarts an environment after an exception of these classes."""
        restarted = self.policy.exceptions
        return restarted is None or not {*map(name_of, restarted)}.isdisjoint(kinds)

    def announce(self, rebuilds: Mapping[int, Rebuild], error: ParallelEnvError) -> None:
        """Call `on_restart` for environments that are being rebuilt. What it raises is logged: the run goes on."""
        if self.on_restart is None:
            return
        for env_id, rebuild in rebuilds.items():
            kind: Literal["fault", "neighbour"] = "fault" if env_id in error.env_ids else "neighbour"
            slot = self.slots[env_id]
            event = RestartEvent(env_id, slot.worker, kind, error, rebuild.plan.seeds[env_id], slot.restarts.total())
            try:
                self.on_restart(event)
            except Exception:
                logger.exception("on_restart=%r raised for environment %d", self.on_restart, env_id)

    def count_fault(self, slots: Iterable[Slot], error: ParallelEnvError) -> None:
        """Count a fault against environments; `RestartLimitExceeded` if the policy does not allow it for one."""
        now, policy = self.clock(), self.policy
        for slot in slots:
            recent = slot.recent_faults
            while recent and now - recent[0] > policy.rate_period_s:
                recent.popleft()
            limit = ""
            if policy.max_restarts is not None and slot.counted_faults >= policy.max_restarts:
                limit = f"max_restarts={policy.max_restarts}"
            elif policy.rate_limit is not None and len(recent) >= policy.rate_limit:
                limit = f"rate_limit={policy.rate_limit} within {policy.rate_period_s:g} s"
            if limit:
                text = (
                    f"environment {slot.env_id} has failed once more than its RestartPolicy allows ({limit}): "
                    f"{first_line(error)}\n\nWhat to do: fix the simulator, or pass a RestartPolicy with higher "
                    "limits. The error of the last failure is the cause of this one."
                )
                raise RestartLimitExceeded(text, env_ids=(slot.env_id,), worker=error.worker) from error
            slot.counted_faults += 1
            recent.append(now)

    def cut_off(self, slot: Slot, running: Running | None) -> Fault:
        """What a fault interrupts, and the dicts that the caller receives, without the report.

        `running` is what the worker is doing, or was doing when it died. The record, which is not overwritten yet, is
        partially written if the simulator has returned; then its observations are zeros.
        """
        idle = slot.request is None or slot.done
        if slot.fault is not None and (slot.rebuilding or idle):
            return slot.fault  # the first fault has interrupted it, and is not reported yet
        if slot.renewing:
            if slot.ending is None:
                return Fault(Message.RESET, ({}, {}, {}, {}, {}))
            return Fault(Message.STEP, slot.ending.dicts)
        activity, partially_written = None, False
        if running is not None and running.env_id == slot.env_id:
            activity, partially_written = running.activity, not running.inside
        auto_reset = not idle and activity is Activity.RESET and slot.request is Message.STEP
        same_step = self.plan.mode is AutoresetMode.SAME_STEP
        if not idle and (slot.request is Message.RESET or (auto_reset and not same_step)):
            return Fault(Message.RESET, ({}, {}, {}, {}, {}))
        if auto_reset and _can_be_read(slot.saved):
            slot.latest = slot.saved
        elif auto_reset and self.batch.layout.agents:
            slot.latest = None  # all but what cannot be unpickled is in the record
        else:
            auto_reset = False
        extras = None if slot.latest is None else loads(slot.latest)
        observations, alive = self.batch.last_known(slot, extras, partially_written=partially_written)
        if auto_reset:  # the step had ended
            dicts = self.batch.snapshot(slot.env_id, extras).dicts
            return Fault(Message.STEP, (observations, *dicts[1:]) if partially_written else dicts)
        if slot.reported is not None and not partially_written:
            observations = copy.deepcopy(slot.reported)
        spaces = self.batch.layout.schema.reward_spaces
        dicts = interrupted(observations, [] if slot.needs_reset else alive, spaces)
        return Fault(None if idle else Message.STEP, dicts)

    def ends_to_come(self, slot: Slot, fault: Fault) -> int:
        """How many ends of episodes the caller receives: in a result that is here (a `Snapshot`), and in the report."""
        if slot.waiting_reset is not None or fault.interrupted is Message.RESET:
            return 0
        ends, over = 0, slot.over
        if slot.done:
            _, _, terminateds, truncateds, _ = slot.result.dicts
            ends = int(not over and (terminateds[ALL] or truncateds[ALL]))
            over = slot.result.over
        return ends + (slot.has_reset and not over)

    def begin(self, slot: Slot, fault: Fault, error: ParallelEnvError) -> None:
        """Mark an environment as failed: the result of `cut_off`, and the error."""
        if fault is not slot.fault:
            report = str(error)
            dicts = fault.dicts if fault.interrupted is Message.RESET else with_report(fault.dicts, report)
            fault = fault._replace(dicts=dicts, report=report)
        slot.fault = fault._replace(next_result=None)

    def rebuild_request(self, slot: Slot, error: ParallelEnvError) -> Rebuild:
        """The request to rebuild an environment after a fault; counts the restart."""
        slot.rebuilds += 1
        slot.restarts[_kind_of(error) if slot.env_id in error.env_ids else "neighbour"] += 1
        request = self.request(slot, slot.rebuilds)
        keywords = slot.reset_keywords
        if slot.options:
            keywords = dumps({**({} if keywords is None else loads(keywords)), "options": slot.options})
        return request._replace(reset=self._resets_at_once(slot), keywords=keywords)

    def request(self, slot: Slot, rebuilds: int) -> Rebuild:
        """The request to construct an environment again, after which it has been constructed again `rebuilds` times.

        Its first reset comes later.
        """
        seed = None
        if self.base_seed is not None:
            source = np.random.SeedSequence((self.base_seed, slot.env_id, rebuilds))
            seed = int(source.generate_state(1)[0] >> 1)
        plan = self.plan._replace(
            traced=self.traced,
            constructors={slot.env_id: self.plan.constructors[slot.env_id]},
            seeds={slot.env_id: seed},
            rebuilds=rebuilds,
        )
        keywords = dumps({"options": slot.options}) if slot.options else None
        return Rebuild(plan, self.block, reset=False, keywords=keywords, watch=self.watch)

    def finish(self, slot: Slot, extras: bytes | None) -> Snapshot | None:
        """The result of the request that was interrupted; None for an idle environment, whose next result reports it.

        `extras` came with the reset of the environment that has been rebuilt.
        """
        fault = slot.fault
        assert fault is not None
        if self._resets_at_once(slot):
            self.note_result(slot, extras)
            fresh = self.batch.snapshot(slot.env_id, None if extras is None else loads(extras))
            if fault.interrupted is Message.RESET:
                result = fresh._replace(dicts=with_report(fresh.dicts, fault.report))
            else:
                result = fresh._replace(dicts=renewed(fault.dicts, fresh.dicts), over=False)
        else:
            result = Snapshot(fault.dicts, [], [], over=True)
            slot.needs_reset, slot.reported = True, copy.deepcopy(fault.dicts[0])  # these are the caller's
        if fault.interrupted is None:
            slot.fault = fault._replace(next_result=result)
            return None
        slot.fault = None
        return result

    def note_result(self, slot: Slot, extras: bytes | None) -> None:
        """Store the pickled extras of an environment's result: a fault may need the result again."""
        slot.latest, slot.saved = extras, None
        slot.reset_keywords, slot.needs_reset, slot.reported = None, False, None

    def result_of_reset(self, slot: Slot, extras: Any) -> Any:
        """The result of a reset; it reports the restart of an environment that was idle."""
        if slot.fault is None:
            return extras
        report, slot.fault = slot.fault.report, None
        snapshot = self.batch.snapshot(slot.env_id, extras)
        return snapshot._replace(dicts=with_report(snapshot.dicts, report))

    def save_result(self, slot: Slot) -> None:
        """Copy a result that the caller has not received out of the record, which is about to be overwritten."""
        if slot.request is Message.RESET:
            slot.has_reset = True
        if type(slot.result) is not Snapshot:
            slot.result = self.batch.snapshot(slot.env_id, slot.result)

    def _resets_at_once(self, slot: Slot) -> bool:
        """Whether the fresh environment's first observation is part of the result."""
        assert slot.fault is not None
        if slot.fault.interrupted is None and not slot.has_reset:
            return False
        return slot.fault.interrupted is Message.RESET or self.plan.mode is AutoresetMode.SAME_STEP


def _can_be_read(pickled: bytes | None) -> bool:
    """Whether extras that nobody has read yet can be unpickled here."""
    if pickled is None:
        return True
    try:
        loads(pickled)
    except Exception:
        return False
    return True


def _kind_of(error: ParallelEnvError) -> str:
    """The kind of a fault in `WorkerStats.restart_kinds`."""
    if isinstance(error, EnvError):
        return "exception"
    return "timeout" if isinstance(error, WorkerTimeout) else "death"
