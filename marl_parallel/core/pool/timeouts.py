"""Timeouts: finds workers past their timeout; these are killed and replaced, or an error is raised.

A timeout runs from the moment at which an environment begins an activity, as the worker's status shows. While a worker
has not begun a request, the timeout of the request runs from the moment at which the worker was free. Time in which a
constructor imports modules or unpickles does not count while it uses or waits for a CPU, up to `MOST_TIMES` the limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from marl_parallel.core.backend import Backend
from marl_parallel.core.messages import Message
from marl_parallel.core.pool.extensions import Extension, Fault
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.pool.restarts import Restarts
from marl_parallel.core.pool.slots import State, WorkerQueue
from marl_parallel.core.reports import reports
from marl_parallel.core.worker.loading import is_past
from marl_parallel.core.worker_status import Activity, Running

_THREAD_ADVICE = '; a thread cannot be ended, so nothing could be restarted: backend="process" can'
_POLL_S = 0.05
_UNCHANGED_S = 0.02
_FROZEN_S = 0.25
"""Seconds. A wait that ends this much too late means that this process, and probably all others, did not run."""

LIMITED_BY = dict.fromkeys(Message, (Activity.STEP,)) | {
    Message.ACCESS: (Activity.START,),
    Message.ATTACH: (Activity.START,),
    Message.CONSTRUCT: (Activity.START, Activity.RESET),
    Message.TAKE_OVER: (Activity.STEP, Activity.RESET, Activity.START),
    Message.CLOSE: (Activity.CLOSE,),
    Message.RESET: (Activity.RESET,),
    Message.STEP: (Activity.STEP, Activity.RESET),
    Message.STATE: (Activity.STEP, Activity.RESET),
    Message.RENDER: (Activity.STEP, Activity.RESET),
}
"""The activities of a request whose timeouts apply; before the request has begun, the first one applies.

Before `TAKE_OVER` has begun, a part of a step, a reset or `load_state`, the first one that has a limit applies.
"""


class Limits(NamedTuple):
    """Timeouts in seconds, see `Activity.timeout`; None for no limit."""

    step: float | None = None
    reset: float | None = None
    start: float | None = None


class Deadlines:
    """The timeouts of the requests in the queues of all workers.

    Time in which this process waited but did not run, such as while a virtual machine is paused, does not count: the
    workers did not run either. Time between two waits, in which the caller does other work, counts.
    """

    def __init__(self, backend: Backend, limits: Limits, queues: Mapping[int, WorkerQueue]) -> None:
        self._backend, self._all_queues, self._clock = backend, queues, backend.clock
        enforced = limits if backend.capabilities.enforces_timeouts else Limits()
        self.limits: dict[Activity, float | None] = {one: getattr(enforced, one.timeout) for one in Activity}
        self.shortest = {  # by kind of request, the shortest timeout that may apply while it is carried out
            message: min((limit for one in activities if (limit := self.limits[one]) is not None), default=None)
            for message, activities in LIMITED_BY.items()
        }
        self.looked = 0.0  # when the present call of the pool began, or `late` was last called in it
        self._wait_ends: float | None = None  # when the present wait ends at the latest
        self._seconds_in_look = 0.0  # the backend's `seconds_in_look` when that wait began
        self._frozen: list[tuple[float, float]] = []
        # By worker: a status past its timeout, and when it was first seen.
        self._suspects: dict[int, tuple[tuple[int, float], float]] = {}

    @property
    def _queues(self) -> Mapping[int, WorkerQueue]:
        """The queues of workers that can be late; workers in the caller's own thread have no timeouts."""
        if not (in_line := self._backend.in_line):
            return self._all_queues
        return {worker: queue for worker, queue in self._all_queues.items() if worker not in in_line}

    def patience(self) -> float | None:
        """How long to wait before the next call of `late`; None for no limit. Called before each wait."""
        shortest = self.shortest
        limits = [
            limit
            for queue in self._queues.values()
            for one in queue.requests
            if (limit := shortest[one.request.message]) is not None
        ]
        if not limits:
            self._wait_ends = None
            return None
        now = self._clock()
        awake = max(self.looked, self._backend.in_line_until)
        if now - awake > _FROZEN_S:
            self._add_frozen(awake, now)
        seconds = min(_UNCHANGED_S if self._suspects else _POLL_S, *limits)
        self._wait_ends, self._seconds_in_look = now + seconds, self._backend.seconds_in_look
        return seconds

    def late(self) -> list[int]:
        """Workers past their timeout whose status did not change between two polls, so none that was just finishing."""
        wait_ends, self._wait_ends = self._wait_ends, None
        self.looked = now = self._clock()  # the process may also freeze below
        if wait_ends is None:
            return []
        wait_ends += self._backend.seconds_in_look - self._seconds_in_look  # the workers ran meanwhile
        wait_ends = max(wait_ends, self._backend.in_line_until)  # also while this thread stepped environments
        if now - wait_ends > _FROZEN_S:
            self._add_frozen(wait_ends, now)
        late = []
        for worker, queue in self._queues.items():
            suspect = self._suspects.pop(worker, None)
            if self._limited(queue) is None:
                continue
            status, (_, activity, limit) = self._backend.statuses[worker], self.overrun(worker)
            state = status.state
            started = max(queue.since, state[1], status.ready_since)
            frozen = sum(max(end - max(begin, started), 0.0) for begin, end in self._frozen)
            elapsed = now - started - frozen
            if (
                limit is None
                or elapsed <= limit
                or not is_past(limit, elapsed, self._loading(worker, activity, elapsed))
            ):
                continue
            if suspect is None or suspect[0] != state:
                suspect = state, now
            elif now - suspect[1] >= _UNCHANGED_S:
                late.append(worker)
            self._suspects[worker] = suspect
        return late

    def _loading(self, worker: int, activity: Activity, elapsed: float) -> float:
        """Seconds of a worker's present activity in which it has imported or unpickled."""
        status, backend = self._backend.statuses[worker], self._backend
        if activity is Activity.CONSTRUCTOR:
            return status.loading(backend.cpu_seconds(worker))
        if activity is Activity.START and not status.parts and backend.capabilities.same_machine:
            used = backend.cpu_seconds(worker)  # its process imports this package
            return elapsed if used is None else used
        return 0.0

    def _add_frozen(self, begin: float, end: float) -> None:
        first = min((queue.since for queue in self._queues.values() if self._limited(queue) is not None), default=end)
        self._frozen = [*(span for span in self._frozen if span[1] > first), (begin, end)]
        self._suspects.clear()  # the workers have not had the time to change their statuses

    def _limited(self, queue: WorkerQueue) -> Message | None:
        """The oldest request that has a timeout."""
        messages = [one.request.message for one in queue.requests]
        return next((message for message in messages if self.shortest[message] is not None), None)

    def changed(self, worker: int) -> bool:
        """Whether a worker that `late` returned has begun or ended an activity since."""
        suspect = self._suspects.get(worker)
        return suspect is None or self._backend.statuses[worker].state != suspect[0]

    def overrun(self, worker: int) -> tuple[Running | None, Activity, float | None]:
        """The running activity of a worker, if its status shows it; the activity that has a limit, and the limit."""
        queue = self._all_queues[worker]
        running, request = queue.running(self._backend.statuses[worker]), self._limited(queue) or Message.STEP
        activity = LIMITED_BY[request][0] if running is None else running.activity
        if running is None and request is Message.TAKE_OVER and self.limits[activity] is None:
            activity = next(one for one in LIMITED_BY[request] if self.limits[one] is not None)
        return running, activity, self.limits[activity]


class Timeouts(Extension):
    """Ends workers that are late.

    Attributes:
        restarts: Deals with these workers; None to raise an error.
    """

    def __init__(self, pool: Pool, limits: Limits) -> None:
        self._pool = pool
        self._deadlines = Deadlines(pool.backend, limits, pool.queues)
        self.limits = self._deadlines.limits
        self.restarts: Restarts | None = None

    def patience(self, now: float) -> float | None:
        self._deadlines.looked = max(self._deadlines.looked, self._pool.called)  # the time of the caller counts
        return None if self._pool.closed else self._deadlines.patience()

    def look(self, now: float) -> None:
        if self._pool.closed:
            return
        for worker in self._deadlines.late():
            if worker in self._pool.queues:
                self._end(worker)
            self._deadlines.looked = self._pool.clock()

    def _end(self, worker: int) -> None:
        """Replace a worker that is late, or raise its error."""
        pool, (running, activity, limit) = self._pool, self._deadlines.overrun(worker)
        if limit is None:  # meanwhile it has begun an activity without a limit
            return
        queue, backend = pool.queues[worker], pool.backend

        def fault_here(running_last: Running | None) -> Fault:
            stack, tail = backend.stack(worker), backend.log_tail(worker)
            advice = pool.advice if backend.capabilities.can_kill else _THREAD_ADVICE
            imports = backend.statuses[worker].imports() if activity is Activity.CONSTRUCTOR else ""
            error = reports.timed_out(
                worker, queue.environments, running, activity, limit, stack, advice, tail, imports=imports
            )
            return Fault(worker, None, error, running_last)

        if self.restarts is None or not pool.survives_faults or not queue.share:
            pool.fault(fault_here(running))
            return
        # Taking the stack continues a stopped worker, which may then finish its activity. It still counts as
        # late: record the caller's result first.
        if running is not None:
            late = [slot for slot in [pool.slots[running.env_id]] if slot.worker == worker]
        else:
            finished = pool.finished_before(worker, running)
            late = [slot for slot in pool.slots_of(worker) if slot.request is not None and slot.env_id not in finished]
        late = [slot for slot in late if slot.state is not State.DONE]
        self.restarts.before_end(late, running)
        if self._deadlines.changed(worker):
            for slot in late:
                slot.owed_if_ended = None
            return
        fault = fault_here(None)
        ids, replies = {slot.env_id for slot in late}, []
        owners = deque(one.owner for one in queue.requests)
        for reply in backend.end(worker):
            owner = owners.popleft() if reply.last else owners[0]
            if not ids.isdisjoint(reply.env_ids or ()) if owner is not None else pool.in_flight == 0:
                reply = reply._replace(env_ids=(), results={}, failures={})
            results = {env_id: result for env_id, result in reply.results.items() if env_id not in ids}
            failures = {env_id: failure for env_id, failure in reply.failures.items() if env_id not in ids}
            replies.append((worker, reply._replace(results=results, failures=failures)))
        pool.apply(replies)
        fault = fault._replace(running=queue.running(backend.statuses[worker]))
        try:
            pool.fault(fault)
        finally:
            del fault  # as `Pool.fault` says
