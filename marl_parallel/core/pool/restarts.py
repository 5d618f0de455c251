"""Restarts: which faults environments survive, and which results the caller receives.

What happens at a fault::

    fault -> on_fault: how often it may fail -> the interrupted request -> Pool.replace, if the worker is gone
                       -> CONSTRUCT ... its reply -> _on_rebuilt: the result, or, if it was idle, with what comes next

`env_runner.py` decides about the dicts of an interrupted step.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gymnasium.vector import AutoresetMode

from marl_parallel.adapters.protocol import AgentID
from marl_parallel.core.block.block_transitions import BlockTransitions
from marl_parallel.core.messages import Begins, Construct, Failure, Message, Reply, Request, name_of
from marl_parallel.core.pool.extensions import Extension, Fault
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.pool.rebuilds import Rebuilds, refusals
from marl_parallel.core.pool.replacement import Event, Present
from marl_parallel.core.pool.slots import Mark, Owed, Slot, Snapshot, State
from marl_parallel.core.reports import reports
from marl_parallel.core.reports.reports import first_line, logger
from marl_parallel.core.transition import NOTHING, Transition
from marl_parallel.core.worker.env_runner import interrupted, is_over, joined, last_of, with_common
from marl_parallel.core.worker_status import Activity, Running
from marl_parallel.types import (
    EnvError,
    OnRestart,
    ParallelEnvError,
    RestartEvent,
    RestartInfos,
    RestartLimitExceeded,
    RestartPolicy,
    WorkerStats,
    WorkerTimeout,
)

_EXCEPTIONS_ADVICE = ", or add its type to the exceptions of the RestartPolicy to go on with a fresh environment"


@dataclass(slots=True, eq=False)
class _RestartState:
    """The restart state of one environment."""

    counted: int = 0  # how many faults count against it
    recent: deque[float] = field(default_factory=deque)  # the times of the latest of these faults
    needs_reset: bool = False  # whether it was rebuilt and has returned nothing since: then no agent is alive
    reported: dict[AgentID, Any] | None = (
        None  # with `needs_reset`: the observations last reported, in place of the record's
    )
    latest: bytes | None = None  # the pickled leftovers of the latest result: the unpickled ones belong to the caller
    keywords: bytes | None = None  # the pickled keywords of a reset in flight
    waiting_reset: bytes | None = (
        None  # the pickled keywords of a reset that begins when the environment has been rebuilt
    )


class _SavedRecord(NamedTuple):
    """The part of a `_RestartState` that is saved, between two steps."""

    fault: Owed | None = None
    counted: int = 0
    ages: Sequence[float] = ()  # how long ago the latest counted faults were, in seconds
    needs_reset: bool = False
    reported: dict[AgentID, Any] | None = None


class Restarts(Extension):
    """The extension of a pool for `on_error="restart"`.

    Args:
        pool: The pool.
        rebuilds: Makes the requests to construct environments again.
        transitions: The environments' records.
        policy: How often an environment may fail.
        on_restart: Called for each environment that is rebuilt.
        infos: `"last"` if the interrupted step has the infos of the step before; None if it has none.
    """

    saved_as = "Restarts"

    def __init__(
        self,
        pool: Pool,
        rebuilds: Rebuilds,
        transitions: BlockTransitions,
        policy: RestartPolicy,
        on_restart: OnRestart | None,
        infos: RestartInfos | None = None,
    ) -> None:
        self._pool, self._rebuilds, self._transitions = pool, rebuilds, transitions
        self._policy, self._on_restart, self._infos = policy, on_restart, infos
        self._same_step = transitions.mode is AutoresetMode.SAME_STEP
        self._records = [_RestartState() for _ in pool.slots]
        pool.advice, pool.survives_faults = "", pool.backend.capabilities.can_kill

    # -- results -------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        if self.sees_steps:
            self.sees_steps = self._may_change()

    def _may_change(self) -> bool:
        """Whether a step in which nothing goes wrong changes a record."""
        return any(slot.skips for slot in self._pool.slots) or any(
            record.latest is not None or record.keywords is not None or record.needs_reset for record in self._records
        )

    def before_send(self, message: Message, env_ids: Sequence[int], payloads: Any) -> Sequence[int]:
        self.sees_steps = True
        return [env_id for env_id in env_ids if self._goes_out(self._pool.slots[env_id], message, payloads)]

    def _goes_out(self, slot: Slot, message: Message, payloads: Any) -> bool:
        """Whether to send a request; else the result is the report of a restart, or a rebuild comes first."""
        record, is_rebuilding = self._records[slot.env_id], slot.present is Present.RESTARTS
        if message is Message.RESET:
            if is_rebuilding:
                record.waiting_reset = payloads[slot.env_id]
            else:
                record.keywords = payloads[slot.env_id]
            return not is_rebuilding
        if slot.present is Present.REPORTS:
            self._pool.finish(slot, self._pool.clock(), self._reported(slot).next_result)
            return False
        return not is_rebuilding

    def _reported(self, slot: Slot) -> Owed:
        """The report of an environment that has been constructed again while it was idle; the caller gets it now."""
        owed = slot.owed
        assert owed is not None
        slot.note(Event.REPORTED)
        return owed

    def on_result(self, slot: Slot, leftovers: bytes | None, result: Any, completed: float) -> Any:
        record = self._records[slot.env_id]
        self.sees_steps = True
        self._set_latest(record, leftovers)
        if slot.request is not Message.RESET or slot.present is not Present.REPORTS:
            return result
        report = self._reported(slot).report
        snapshot = self._transitions.snapshot(slot.env_id, result)
        return snapshot._replace(transition=_with_report(snapshot.transition, report), mark=Mark.RESTARTED)

    def _set_latest(self, record: _RestartState, leftovers: bytes | None) -> None:
        """Store the pickled leftovers of an environment's result: a fault may need the result again."""
        record.latest, record.keywords, record.needs_reset, record.reported = leftovers, None, False, None

    def save(self, slot: Slot) -> Any:
        record, now = self._records[slot.env_id], self._pool.clock()
        ages = [now - moment for moment in record.recent]
        return _SavedRecord(slot.owed, record.counted, ages, record.needs_reset, record.reported)

    def load(self, slot: Slot, saved: Any, leftovers: bytes | None) -> None:
        saved, now = saved or _SavedRecord(), self._pool.clock()
        recent = deque([now - age for age in saved.ages])
        self._records[slot.env_id] = _RestartState(saved.counted, recent, saved.needs_reset, saved.reported, leftovers)
        if saved.fault is not None:
            slot.note(Event.LOADED, saved.fault)
        self.sees_steps = True

    # -- faults --------------------------------------------------------------------------------------------------------

    def before_end(self, slots: Sequence[Slot], running: Running | None) -> None:
        """A worker may be ended while it runs these environments: save what their records say now."""
        if not self._pool.backend.capabilities.shares_memory:
            running = None  # what the worker has written arrives when it is ended
        for slot in slots:
            slot.owed_if_ended = self._owed_for_fault(slot, running)

    def on_fault(self, fault: Fault) -> bool:
        pool, worker = self._pool, fault.worker
        replaces = fault.env_id is None
        if replaces and not pool.survives_faults:
            return False
        is_exception = fault.kinds or fault.failure is not None
        if is_exception and not self._is_restarted(fault.kinds):
            if fault.failure is None or fault.env_id is None:
                return False
            raise reports.env_error(fault.env_id, worker, fault.failure, _EXCEPTIONS_ADVICE)
        self._count(fault.error)
        where = f"restarted: environments {[*pool.queues[worker].share]}" if replaces else "it is restarted"
        first, *more = str(fault.error).splitlines()
        logger.warning("%s; %s%s", first, where, "\n".join(["", *more]))
        for finished in pool.finished_before(worker, fault.running) if replaces else ():
            if pool.expects_result(pool.slots[finished]):
                pool.take_result(pool.slots[finished], None, pool.clock())
        slots = pool.slots_of(worker) if fault.env_id is None else [pool.slots[fault.env_id]]
        if not slots:  # after these results, all environments have left the worker
            pool.fault(fault)
            return True
        owed, ends = [], []
        for slot in slots:
            if slot.state is State.DONE:
                self._save_result(slot)
            owed.append(self._owed_for_fault(slot, fault.running))
            ends.append(self._ends_to_come(slot, owed[-1]))
        pool.announce_rebuild(slots, ends)
        for slot, of_slot in zip(slots, owed, strict=True):
            slot.note(Event.FAILS, _with_error(of_slot, fault.error))
        pool.mark_handled(fault.error)
        if replaces:
            pool.replace(worker)
        payload = {slot.env_id: self._request(slot, fault.error) for slot in slots}
        pool.post({worker: Request(Message.CONSTRUCT, tuple(payload), payload, each=True)}, self._on_rebuilt)
        self._rebuilds.outdate([*payload])
        self._announce(payload, fault.error)
        return True

    def on_rebuild(self, slots: Sequence[Slot], ends: Sequence[int]) -> None:
        for slot in slots:
            record = self._records[slot.env_id]
            record.latest = record.reported = slot.owed_if_ended = None
            self._pool.unfinished.pop(slot.env_id, None)
        self.sees_steps = True

    def _is_restarted(self, kinds: Sequence[str]) -> bool:
        """Whether the policy restarts an environment after an exception of these types."""
        restarted = self._policy.exceptions
        return restarted is None or not {*map(name_of, restarted)}.isdisjoint(kinds)

    def _count(self, error: ParallelEnvError) -> None:
        """Count a fault against environments; `RestartLimitExceeded` if the policy does not allow it for one."""
        now, policy = self._pool.clock(), self._policy
        for env_id in error.env_ids:
            record = self._records[env_id]
            while record.recent and now - record.recent[0] > policy.rate_period_s:
                record.recent.popleft()
            limit = ""
            if policy.max_restarts is not None and record.counted >= policy.max_restarts:
                limit = f"max_restarts={policy.max_restarts}"
            elif policy.rate_limit is not None and len(record.recent) >= policy.rate_limit:
                limit = f"rate_limit={policy.rate_limit} within {policy.rate_period_s:g} s"
            if limit:
                text = (
                    f"environment {env_id} has failed once more than its RestartPolicy allows ({limit}): "
                    f"{first_line(error)}\n\nWhat to do: fix the simulator, or pass a RestartPolicy with higher "
                    "limits. The error of the last failure is the cause of this one."
                )
                raise RestartLimitExceeded(text, env_ids=(env_id,), worker=error.worker) from error
            record.counted += 1
            record.recent.append(now)

    def _owed_for_fault(self, slot: Slot, running: Running | None) -> Owed:
        """What the caller gets for the request that a fault cuts short; the text of the error is added later.

        If the environment waits for its successor, the keywords of the due reset become `_RestartState.keywords`.

        `running` is the activity of the worker, now or when it died. The record is not overwritten yet. If the worker
        died while the result was being written, the record cannot be trusted: observations are zeros.
        """
        record, idle, owed = self._records[slot.env_id], slot.state is not State.BUSY, slot.owed
        saved = self._pool.unfinished.get(slot.env_id)
        if slot.owed_if_ended is not None:
            return slot.owed_if_ended
        if owed is not None and slot.present in (Present.WAITS, Present.MOVES):
            record.keywords = owed.keywords
            return Owed(owed.message, owed.transition)
        if owed is not None and (slot.present is Present.RESTARTS or idle):
            return owed  # the first fault interrupted it, and is not reported yet
        activity, partially_written = None, False
        if running is not None and running.env_id == slot.env_id:
            activity, partially_written = running.activity, not (running.inside or idle)
        states = self._transitions.states_in_block(slot.env_id)
        if (
            not idle and activity is Activity.STATE and slot.request is Message.STEP
            and self._transitions.has_next_episode(slot.env_id)
            and (last := self._transitions.known(slot.env_id, saved)) is not None
        ):  # the step and the automatic reset had ended  # fmt: skip
            return Owed(Message.STEP, last_of(last), state=None if states is None else states[1])
        auto_reset = not idle and activity is Activity.RESET and slot.request is Message.STEP
        if not idle and (slot.request is Message.RESET or (auto_reset and not self._same_step)):
            return Owed(Message.RESET, NOTHING)
        known = None
        if auto_reset:
            known = self._transitions.known(slot.env_id, saved)
            auto_reset = known is not None  # else the step is lost
        if not auto_reset and not partially_written:  # if its state has failed, the result came with the failure
            came = activity is Activity.STATE and saved is not None
            known = self._transitions.known(slot.env_id, saved if came else record.latest)
        observations, alive, events = self._transitions.last_known(slot, None if partially_written else known)
        if auto_reset:  # the step had ended
            assert known is not None
            last = last_of(known)
            return Owed(Message.STEP, last._replace(observations=observations) if partially_written else last)
        if record.reported is not None and not partially_written:
            observations = copy.deepcopy(record.reported)
        spaces = self._transitions.layout.schema.reward_spaces
        alive, events = ([], {}) if record.needs_reset else (alive, events)
        state = None if states is None else states[0]
        transition = interrupted(observations, alive, spaces, events)
        if self._infos == "last" and alive and known is not None:
            transition = transition._replace(infos=self._transitions.last_infos(slot, known))
        return Owed(None if idle else Message.STEP, transition, state=state)

    def _ends_to_come(self, slot: Slot, owed: Owed) -> int:
        """How many ends of episodes the caller still receives: in a result that has come, and in the report."""
        if self._records[slot.env_id].waiting_reset is not None or owed.message is Message.RESET:
            return 0
        ends, over = 0, self._transitions.is_over(slot.env_id)
        if slot.state is State.DONE:
            ends = int(not over and is_over(slot.result.transition))
            over = slot.result.over
        return ends + (slot.has_reset and not over)

    def _request(self, slot: Slot, error: ParallelEnvError) -> Construct:
        """The request to rebuild an environment after a fault; counts the restart."""
        self._rebuilds.add(slot.env_id, _kind_of(error) if slot.env_id in error.env_ids else "neighbour")
        return self._rebuilds.request(
            slot.env_id,
            self._rebuilds.count(slot.env_id),
            Begins.AT_ONCE if self._resets_at_once(slot) else Begins.WITH_RESET,
            self._records[slot.env_id].keywords,
        )

    def _save_result(self, slot: Slot) -> None:
        """Copy a result that the caller has not received out of the record, which is about to be overwritten."""
        if slot.request is Message.RESET:
            slot.has_reset = True
        if type(slot.result) is not Snapshot:
            states = self._transitions.states_in_block(slot.env_id)
            slot.result = self._transitions.snapshot(slot.env_id, slot.result)._replace(states=states)

    def _announce(self, rebuilds: Mapping[int, Construct], error: ParallelEnvError) -> None:
        """Call `on_restart` for environments that are being rebuilt. What it raises is logged: the run goes on."""
        if self._on_restart is None:
            return
        for env_id, rebuild in rebuilds.items():
            kind: Literal["fault", "neighbour"] = "fault" if env_id in error.env_ids else "neighbour"
            worker, seed = self._pool.slots[env_id].worker, rebuild.construction.seeds[env_id]
            event = RestartEvent(env_id, worker, kind, error, seed, self._rebuilds.restarts(env_id))
            try:
                self._on_restart(event)
            except Exception:
                logger.exception("on_restart=%r raised for environment %d", self._on_restart, env_id)

    # -- environments that have been rebuilt ---------------------------------------------------------------------------

    def _on_rebuilt(self, worker: int, reply: Reply, failures: dict[int, Failure]) -> None:
        failed = refusals(reply)
        failures.update(failed)
        for env_id in reply.env_ids or ():
            slot, record, leftovers = self._pool.slots[env_id], self._records[env_id], reply.results.get(env_id)
            if env_id in failed or slot.present is not Present.RESTARTS:  # `env.restart` has constructed it once more
                continue
            try:
                unpickled = self._pool.read(env_id, leftovers, Message.RESET)
            except EnvError as error:
                self._pool.unreadable(slot, error)
                continue
            result = self._finish(slot, leftovers, unpickled)
            if record.waiting_reset is not None:
                record.keywords, record.waiting_reset = record.waiting_reset, None
                request = Request(Message.RESET, (env_id,), {env_id: record.keywords}, each=True)
                self._pool.post({slot.worker: request})
            elif result is None and slot.state is State.BUSY and slot.request is Message.STEP:  # sent meanwhile
                result = self._reported(slot).next_result
            if result is not None and slot.request is not None:
                self._pool.finish(slot, reply.completed, result)

    def _finish(self, slot: Slot, pickled: bytes | None, leftovers: Any) -> Snapshot | None:
        """The result of the request that was interrupted; None for an idle environment, whose next result reports it.

        `leftovers` come from the reset of the rebuilt environment.
        """
        record, owed = self._records[slot.env_id], slot.owed
        assert owed is not None
        if self._resets_at_once(slot):
            self._set_latest(record, pickled)
            if pickled is not None:
                self._pool.latest[slot.env_id] = pickled
            fresh = self._transitions.snapshot(slot.env_id, leftovers)
            if owed.message is Message.RESET:
                transition = _with_report(fresh.transition, owed.report)
                result = fresh._replace(transition=transition, mark=Mark.RESTARTED)
            else:
                states = self._transitions.states_in_block(slot.env_id)
                if states is not None and owed.state is not None:
                    states = states[0], owed.state
                transition = joined(owed.transition, fresh.transition)
                result = Snapshot(transition, over=False, states=states, mark=Mark.RESTARTED)
        else:
            states = None if owed.state is None else (owed.state, owed.state)
            result = Snapshot(owed.transition, over=True, states=states, mark=Mark.RESTARTED)
            observations = copy.deepcopy(owed.transition.observations)  # the dicts belong to the caller
            record.needs_reset, record.reported = True, observations
        self.sees_steps = True
        if owed.message is None:
            slot.note(Event.RESTARTED_IDLE, owed._replace(next_result=result))
            return None
        slot.note(Event.RESTARTED)
        return result

    def _resets_at_once(self, slot: Slot) -> bool:
        """Whether the fresh environment's first observation is part of the result."""
        assert slot.owed is not None
        if slot.owed.message is None and not slot.has_reset:
            return False
        return slot.owed.message is Message.RESET or self._same_step

    def check(self) -> None:
        assert self.sees_steps or not self._may_change(), "it does not see the next results"
        for slot, record in zip(self._pool.slots, self._records, strict=True):
            busy = slot.state is State.BUSY
            assert slot.owed_if_ended is None, f"it is neither ended nor called off: {slot}, {record}"
            assert record.reported is None or record.needs_reset, f"observations of before a reset: {slot}, {record}"
            assert record.keywords is None or (busy and slot.request is Message.RESET), f"no reset: {slot}, {record}"
            if slot.present is Present.RESTARTS:
                queue = self._pool.queues[slot.worker]
                owed = queue.owes(slot.env_id, self._on_rebuilt, {Message.CONSTRUCT})
                assert owed, f"nobody rebuilds it: {slot}, {record}"
            elif slot.present is Present.REPORTS:
                reports_next = slot.owed is not None and slot.owed.message is None
                assert reports_next, f"a report that is not for the next result: {slot}, {record}"
                assert not busy or slot.request is Message.RESET, f"a step waits for its report: {slot}, {record}"
            if record.waiting_reset is not None:
                is_waiting = busy and slot.request is Message.RESET and slot.present is Present.RESTARTS
                assert is_waiting, f"a reset that waits for nothing: {slot}, {record}"

    def stats(self, env_ids: Sequence[int]) -> WorkerStats:
        return WorkerStats(faults=sum(self._records[env_id].counted for env_id in env_ids))


def _with_error(owed: Owed, error: ParallelEnvError) -> Owed:
    """What a caller is owed, with the report of the fault, unless an earlier fault has one."""
    if not owed.report:
        report, transition = str(error), owed.transition
        if owed.message is not Message.RESET:
            transition = _with_report(transition, report)
        owed = owed._replace(transition=transition, report=report)
    return owed._replace(next_result=None)


def _with_report(transition: Transition, report: str) -> Transition:
    return with_common(transition, restarted=True, error=report)


def _kind_of(error: ParallelEnvError) -> str:
    """The kind of a fault in `WorkerStats.restart_kinds`."""
    if isinstance(error, EnvError):
        return "exception"
    return "timeout" if isinstance(error, WorkerTimeout) else "death"
