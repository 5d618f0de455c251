"""The worker pool of one `ParallelEnv`: requests go out, results come back, and faults are raised or lead to rebuilds.

`send` and `recv` change the state of a slot; `run` is both in one call, and `execute` carries out everything that is
neither a step nor a reset::

             send                    reply                    recv
      idle --------> busy ----------------------> done ----------------> idle
       |              |                             ^
       |  fault       |  fault                      |
       +-----------> rebuilding --------------------+        (or idle again: the next result reports the restart)

There is one loop: each call of `_wait_once` waits for replies, applies them to slots, and looks for workers that died
or are past their timeout. Without `on_error="restart"` every fault is raised, and everything is closed. A crash::

      Backend.wait returns Lost -> _apply -> _handle_fault -> Recovery.cut_off, begin    save what the callers receive
                                                           -> Backend.replace            a new worker
                                                           -> REBUILD requests; replies: _rebuilt

`recovery.py` says how often an environment may be rebuilt and what its caller receives, `slots.py` which workers are
late, `reports.py` writes the texts of errors, and `recycling.py` says which environments are replaced by spares.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode

from marl_parallel.core import reports
from marl_parallel.core.backend import Backend, most_workers
from marl_parallel.core.caller_settings import CallerSettings
from marl_parallel.core.episode import recycled, renewed
from marl_parallel.core.messages import (
    STEP_ALL,
    STEPPED,
    Ended,
    Failure,
    Lost,
    Message,
    Refusal,
    Reply,
    Request,
    name_of,
)
from marl_parallel.core.pickling import dumps, loads
from marl_parallel.core.recovery import Recovery
from marl_parallel.core.recycling import Recycler
from marl_parallel.core.replay import Histories
from marl_parallel.core.reports import logger
from marl_parallel.core.slots import Deadlines, Limits, LongCall, LongCalls, Slot, Snapshot, WorkerQueue
from marl_parallel.core.worker_status import SLICES, Activity, Running, Tracer
from marl_parallel.types import EnvError, NotReadyInTime, ParallelEnvError, Stats, WorkerStats, WorkerTimeout

_ADVICE = ', or pass on_error="restart" to go on with a fresh environment'
_EXCEPTIONS_ADVICE = ", or add its type to the exceptions of the RestartPolicy to go on with a fresh environment"
_REPLACED_ALREADY = "This worker's environments had already been replaced"
_LONG_AT_CTRL_C_S = 1.0
_LEAVES_WITHIN_S = 5.0
_INTERRUPTED_WITHIN_S = 0.5  # how long `close` waits at least for a thread that it has interrupted in a call
_FOR_SPARES = frozenset({Message.PREPARE, Message.ADOPT, Message.RETIRE, Message.CLOSE})
_THREAD_ADVICE = '; a thread cannot be ended, so nothing could be restarted: backend="process" can'


class Results(NamedTuple):
    """Results that the caller receives."""

    env_ids: tuple[int, ...]  # in order of completion
    resets: list[int]  # the environments that were reset
    extras: Any  # by environment, the values that are not in its record: the unpickled extras, or a `Snapshot`


class Pool:
    """The workers of one `ParallelEnv`, with a slot for each environment.

    Args:
        backend: Started by the caller before the first request; closed here.
        shares: The environments of each worker.
        limits: How long each environment may take.
        warn_after: After how many seconds in one call of an environment a warning says where it is; None for never.
        restarts: Whether `restart_on_faults` follows when all environments have been constructed.
    """

    partial = True

    def __init__(
        self,
        backend: Backend,
        shares: Sequence[range],
        limits: Limits = Limits(),  # noqa: B008
        *,
        warn_after: float | None = None,
        restarts: bool = False,
    ) -> None:
        self.backend, self.shares, self._clock = backend, shares, backend.clock
        now = self._clock()
        self.slots = [Slot(env_id, worker, built=now) for worker, share in enumerate(shares) for env_id in share]
        self.batch_size = len(self.slots)  # results come in any number
        self.rebuilder: Recovery | None = None  # set when all environments have been constructed
        self.recovery: Recovery | None = None  # the same, if environments that fail are rebuilt
        self.recycler: Recycler | None = None  # set if environments are replaced by spares
        self.histories: Histories | None = None  # set if failures can be replayed
        self.settings: CallerSettings | None = None  # set if there are workers in other processes
        self.in_flight = 0  # how many environments have been sent to and not received
        self.closed = False
        self._closing = False  # whether a thread is closing everything at present
        self.freed = False  # whether that has been done
        self.tracer: Tracer | None = None  # of the present trace
        self.seeds_stale = True  # whether environments may use other seeds than those they declared last
        self._queues = {worker: WorkerQueue(share, worker, share) for worker, share in enumerate(shares)}
        self._past = [WorkerStats()] * len(shares)  # of workers that have been removed
        self._for_spares = 0  # how many requests in flight are no steps or resets, nor of `execute`
        self._deadlines = Deadlines(backend, limits, self._queues)
        self._long_calls = LongCalls(backend, self._queues, warn_after)
        self._step_all = dict.fromkeys(range(len(shares)), STEP_ALL)
        self._reads_at_once = True  # whether results need nothing but to be read: no restarts, no recycling
        self._advice = reports.FIRST_CONSTRUCTION if restarts else _ADVICE
        self._all_idle = False  # whether every slot is idle, with nothing saved for a restart
        self._done = 0  # how many slots are done
        self._results: dict[int, Any] = {}  # of `execute`, by environment
        self._errors: list[ParallelEnvError] | None = None  # of environments rebuilt in the present `execute`
        # Re-entrant: a signal handler or a finalizer may close in the middle of a call of the same thread.
        self._lock = threading.RLock()
        self._counting = threading.RLock()  # held where statistics move from a worker that ends: others may read them

    def restart_on_faults(self) -> None:
        """From now on, rebuild environments that fail."""
        self.recovery, self._advice, self._reads_at_once = self.rebuilder, "", False

    # -- requests --------------------------------------------------------------------------------------------------

    def send(self, message: Message, env_ids: Sequence[int], payloads: Any = None, *, together: bool = False) -> None:
        """Send `STEP` or `RESET` to environments that are not in flight, and return.

        `payloads` are pickled, by environment. With `together`, all of them are received at once, which is faster.
        """
        self._call(self._send, message, env_ids, payloads, together)

    def recv(
        self,
        at_least: int,
        timeout: float | None = None,
        env_ids: Sequence[int] | None = None,
        *,
        window: float = 0.0,
    ) -> Results:
        """Wait for the results of so many environments, and take all that are here; or wait for all of `env_ids`.

        For `window` seconds, wait for all in flight.

        Raises:
            TimeoutError: There were fewer within `timeout` seconds. Nothing is lost.
            ParallelEnvError: A fault; everything has been closed.
            ClosedEnvironmentError: Another thread has closed everything.
        """
        slots = self.slots if env_ids is None else [self.slots[env_id] for env_id in env_ids]
        results: Results | None = self._call(self._recv, at_least, timeout, slots, window)
        if results is None:
            raise NotReadyInTime(
                f"{sum(slot.done for slot in slots)} of at least {at_least} environments were ready within "
                f"{timeout:g} s; nothing is lost, call recv again"
            )
        return results

    def run(self, message: Message, env_ids: Sequence[int], payloads: Any = None) -> Mapping[int, Any]:
        """`send` and `recv` in one call, while nothing is in flight; returns the extras of the results.

        When every environment steps with the actions in the block, no slot is touched, unless something fails or a
        result is saved for restarts.
        """
        with self._lock:
            if self.closed:
                self.check_open()
            self._deadlines.looked = now = self._clock()  # the time of the caller counts
            try:
                if self.recycler is not None:
                    self._look_to_recycle(self.recycler, now)
                    self._kill_too_large(self.recycler)
                step_all = message is Message.STEP and payloads is None and len(env_ids) == len(self.slots)
                if not step_all or not self._all_idle:
                    self._send(message, env_ids, payloads, together=True)
                else:
                    self._all_idle = False
                    limit = self._deadlines.shortest[Message.STEP]
                    patience = self._long_calls.warn_after
                    if self.recycler is not None and (patience is None or patience > self.recycler.next_look - now):
                        patience = max(self.recycler.next_look - now, 0.0)
                    for worker, request in self._step_all.items():
                        queue = self._queues[worker]
                        queue.posted += 1
                        queue.requests.append((request, queue.posted, limit))
                        queue.since = now
                    if self.histories is not None:
                        self.histories.note_steps(env_ids, None)
                    self.backend.post(self._step_all, together=True)
                    replies = self.backend.wait(self._deadlines.patience() if limit else patience, len(self._step_all))
                    extras: dict[int, Any] = {}
                    complete = 0
                    for _, reply in replies:
                        if reply is STEPPED:
                            complete += 1
                        elif self._reads_at_once and not isinstance(reply, Lost) and not reply.failures:
                            complete += 1
                            extras.update(reply.results)
                    if complete == len(replies) == len(self._step_all) and not self.closed:
                        if extras:
                            extras = {env_id: self.read(env_id, result) for env_id, result in extras.items()}
                        for worker in self._step_all:
                            queue = self._queues[worker]
                            queue.requests.clear()
                            queue.suspect = None
                        self._all_idle = True
                        return extras
                    self._note_sent(message, env_ids)
                    self._apply(replies)
                    self._look_for_late()
                results = self._recv(len(env_ids), None, self.slots)
                assert results is not None  # there is no timeout
                more: Mapping[int, Any] = results.extras
                return more
            except BaseException as error:
                self._close_after(error)
                raise

    def execute(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        """Carry out requests, by worker, other than steps and resets, while nothing is in flight.

        Returns the results by environment. After a `ParallelEnvError` everything has been closed, or the environments
        that failed have been rebuilt.
        """
        results: dict[int, Any]
        results, errors = self._call(self._execute, requests)
        if errors:
            raise errors[0]  # its environments have been rebuilt
        return results

    def execute_in(self, message: Message, env_ids: Iterable[int], payload: Any = None) -> dict[int, Any]:
        """As `execute`: one request to environments; `payload` is the same for all, or a dict by environment."""
        return self.execute(self._requests(message, env_ids, payload))

    def begin_in(self, message: Message, env_ids: Iterable[int], payload: Any = None) -> None:
        """Begin what `execute_in` does, and return; `finish` comes next, and nothing else before it."""
        self._call(self._begin, self._requests(message, env_ids, payload))

    def finish(self, timeout: float | None) -> dict[int, Any]:
        """The results of `begin_in`, as of `execute`; `TimeoutError` after so many seconds, which loses nothing."""
        results = self._call(self._finish_all, timeout)
        if results is None:
            raise NotReadyInTime(f"the calls were not finished within {timeout:g} s; nothing is lost, wait again")
        if results[1]:
            raise results[1][0]
        return cast("dict[int, Any]", results[0])

    def execute_in_each_worker(self, message: Message, payload: Any = None) -> dict[int, Any]:
        """As `execute`: one request to one environment of each worker."""
        return self.execute(
            {worker: Request(message, share[:1], payload) for worker, share in self.present_shares().items()}
        )

    def present_shares(self) -> dict[int, Sequence[int]]:
        """The environments of each worker; while spares take their places, some have moved to other workers."""
        return {worker: queue.share for worker, queue in self._queues.items() if queue.share}

    def position(self, worker: int) -> int:
        """The place of a worker in statistics and traces: its number, or that of the one it has replaced."""
        return self._queues[worker].position

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of this object alone; close everything if it raises."""
        with self._lock:
            self.check_open()
            self._deadlines.looked = self._clock()  # the time of the caller counts
            try:
                return function(*arguments)
            except BaseException as error:
                self._close_after(error)
                raise

    # -- sending and receiving -------------------------------------------------------------------------------------

    def _send(self, message: Message, env_ids: Sequence[int], payloads: Any, together: bool) -> None:
        self._all_idle = False
        if self.recycler is not None:
            self._look_to_recycle(self.recycler, self._clock())
        self._note_sent(message, env_ids)
        if message is Message.RESET and self.settings is not None and self.rebuilder is not None:
            settings = self.settings.pickled()
            if self.rebuilder.plan.settings is not settings:
                self.rebuilder.plan = self.rebuilder.plan._replace(settings=settings)
        if self.recovery is not None:
            env_ids = [env_id for env_id in env_ids if self._goes_out(self.slots[env_id], message, payloads)]
        if self.recycler is not None:
            env_ids = self._without_recycled(self.recycler, message, env_ids, payloads)
        alone = together and not any(queue.requests for queue in self._queues.values())
        requests = self._requests(message, env_ids, payloads, each=not together)
        if message is Message.RESET:
            requests = self._with_settings(requests)
        self._post(requests, together=alone)

    def _with_settings(self, requests: dict[int, Request]) -> dict[int, Request]:
        """Requests that take along the caller's settings of the last reset, unless the worker got them."""
        if self.settings is None or self.rebuilder is None:
            return requests
        settings = self.rebuilder.plan.settings
        for worker, request in requests.items():
            queue = self._queues[worker]
            if queue.settings is not settings:
                queue.settings, requests[worker] = settings, request._replace(settings=settings)
        return requests

    def _note_sent(self, message: Message, env_ids: Sequence[int]) -> None:
        for env_id in env_ids:
            self.slots[env_id].request = message
        self.in_flight += len(env_ids)

    def _goes_out(self, slot: Slot, message: Message, payloads: Any) -> bool:
        """Whether the worker gets a request; else the result is the report of a restart, or a rebuild comes first."""
        fault, rebuilding = slot.fault, slot.rebuilding
        if message is Message.RESET:
            if rebuilding:
                slot.waiting_reset = payloads[slot.env_id]
                if slot.has_reset and not slot.over:
                    slot.first_episode -= 1  # its caller receives no end of the episode that was interrupted
            else:
                slot.reset_keywords = payloads[slot.env_id]
            return not rebuilding
        if fault is not None and not rebuilding:
            slot.fault = None
            self._finish(slot, self._clock(), fault.next_result)
        return fault is None

    def _requests(
        self, message: Message, env_ids: Iterable[int], payload: Any, *, each: bool = False
    ) -> dict[int, Request]:
        """One request for each worker that has some of the environments."""
        shares: dict[int, list[int]] = {}
        for env_id in env_ids:
            shares.setdefault(self.slots[env_id].worker, []).append(env_id)
        requests = {}
        for worker, ids in shares.items():
            part = payload
            if isinstance(payload, dict):
                part = {env_id: payload[env_id] for env_id in ids if env_id in payload} or None
            requests[worker] = Request(message, tuple(ids), part, each)
        return requests

    def _post(self, requests: Mapping[int, Request], *, together: bool) -> None:
        if not requests:
            return
        now = self._clock()
        for worker, request in requests.items():
            queue = self._queues[worker]
            if not queue.requests:
                queue.since = now
            queue.requests.append((request, queue.posted + 1, self._deadlines.shortest[request.message]))
            queue.posted += len(request.env_ids) if request.each and request.env_ids is not None else 1
            self._for_spares += request.message in _FOR_SPARES
            if self.histories is not None:
                self.histories.note(worker, request)
        self.backend.post(requests, together=together)

    def _recv(self, at_least: int, timeout: float | None, slots: Sequence[Slot], window: float = 0.0) -> Results | None:
        """The results of all slots, or of some that are all waited for; None after the timeout."""
        if window:
            began = self._clock()
            self._wait_for(self.in_flight, window if timeout is None else min(window, timeout), self.slots)
            timeout = None if timeout is None else max(timeout - (self._clock() - began), 0.0)
        if not self._wait_for(at_least, timeout, slots):
            return None
        done = [slot for slot in slots if slot.done]
        done.sort(key=lambda slot: slot.completed)  # ties by number
        resets = [slot.env_id for slot in done if slot.request is Message.RESET]
        extras = {slot.env_id: slot.result for slot in done if slot.result is not None}
        for slot in done:
            slot.request, slot.done, slot.result = None, False, None
        self.in_flight -= len(done)
        self._done -= len(done)
        self._all_idle = len(done) == len(self.slots) and (
            self.recovery is None or not (extras or resets or self._rebuilding())
        )
        return Results(tuple([slot.env_id for slot in done]), resets, extras)

    def _wait_for(self, at_least: int, timeout: float | None, slots: Sequence[Slot]) -> bool:
        """Wait for so many results of all slots, or of some that are all waited for; False after the timeout."""
        deadline = None if timeout is None else self._clock() + timeout
        ids = None if slots is self.slots else {slot.env_id for slot in slots}
        while True:
            queues = [*self._queues.values()]
            if ids is not None:
                queues = [self._queues[worker] for worker in dict.fromkeys([slot.worker for slot in slots])]
            missing = at_least - (self._done if ids is None else sum([slot.done for slot in slots]))
            patience = None if deadline is None else max(deadline - self._clock(), 0.0)
            batches = sum([queue.one_reply if ids is None else queue.owes_one_reply(ids) for queue in queues])
            if ids is not None and missing <= 0 and not batches:
                return True
            replies = 1 if self._for_spares else max(min(missing, batches or missing), 1)
            self._wait_once(patience if missing > 0 or batches else 0.0, replies)
            if ids is None and self._done >= at_least and not sum([queue.one_reply for queue in self._queues.values()]):
                return True
            if patience == 0.0:
                return False

    def _execute(self, requests: Mapping[int, Request]) -> tuple[dict[int, Any], list[ParallelEnvError]]:
        self._begin(requests)
        done = self._finish_all(None)
        assert done is not None  # there is no timeout
        return done

    def _begin(self, requests: Mapping[int, Request]) -> None:
        while self._rebuilding():
            self._wait_once(None, 1)
        self._results, self._errors = {}, []
        self._post(requests, together=True)

    def _finish_all(self, timeout: float | None) -> tuple[dict[int, Any], list[ParallelEnvError]] | None:
        """Wait for the requests of `_begin`; None after the timeout."""
        deadline, patience = None if timeout is None else self._clock() + timeout, None
        while (busy := self._owed()) or self._rebuilding():
            if patience == 0.0:
                return None
            patience = None if deadline is None else max(deadline - self._clock(), 0.0)
            self._wait_once(patience, 1 if self._for_spares else busy or 1)
        errors = self._errors
        assert errors is not None
        results, self._results, self._errors = self._results, {}, None
        return {} if errors else {env_id: self.read(env_id, results[env_id]) for env_id in sorted(results)}, errors

    def _owed(self) -> int:
        """How many workers have requests that are not for spares."""
        return sum(
            any(request.message not in _FOR_SPARES for request, _, _ in queue.requests)
            for queue in self._queues.values()
        )

    def _rebuilding(self) -> bool:
        return self.recovery is not None and any(slot.rebuilding for slot in self.slots)

    # -- the loop --------------------------------------------------------------------------------------------------

    def _wait_once(self, patience: float | None, at_least: int) -> None:
        limits = [
            patience,
            self._deadlines.patience(),
            self._long_calls.patience(),
            None if self.recycler is None else max(self.recycler.next_look - self._clock(), 0.0),
        ]
        self._apply(self.backend.wait(min([one for one in limits if one is not None], default=None), at_least))
        self._look_for_late()
        if self.recycler is not None:
            self._look_to_recycle(self.recycler, self._clock())
            self._kill_too_large(self.recycler)
        self._warn_of_long_calls()

    def _warn_of_long_calls(self) -> None:
        """Log where workers are that have been in one call for long, if it is time to look for them."""
        patience = self._long_calls.patience()
        for long in self._long_calls.look() if patience is not None and patience <= 0.0 else ():
            limit = self._deadlines.limits.get(long.activity)
            to_do = f". Pass a {long.activity.timeout}_timeout= to end what hangs"
            if self.backend.ready_since(long.worker) > self._clock():
                to_do = ". It waits for room in the cluster, or for its process to start"
            elif self.closed:
                to_do = ". To limit this, pass close(timeout=...)"
            elif limit is not None:
                to_do = f". It times out after {limit:g} s"
            self._log_long_call(long, to_do)

    def _look_for_late(self) -> None:
        for worker in self._deadlines.late():
            if worker in self._queues:
                self._handle_late(worker)
            self._deadlines.looked = self._clock()

    def _log_long_call(self, long: LongCall, to_do: str = "") -> None:
        """Log where a worker is that has been in one call for long."""
        stack = self.backend.stack(long.worker, harmless=True)
        logger.warning("%s", reports.long_call(self._queues[long.worker].environments, long, stack, to_do))

    def _apply(self, replies: Sequence[tuple[int, Reply | Lost]]) -> None:
        """Apply replies to slots. Failures come after results, in the order of environments, deaths come last."""
        failures: dict[int, Failure] = {}
        for worker, reply in replies:
            if isinstance(reply, Lost) or worker not in self._queues:
                continue
            queue = self._queues[worker]
            if reply.message in _FOR_SPARES:
                if reply.last and queue.requests:
                    self._for_spares -= 1
                    queue.requests.popleft()
                    queue.since, queue.suspect = self._clock(), None
                self._apply_for_spares(worker, reply, failures)
                continue
            failures.update(reply.failures)
            if reply.message is Message.STEP or reply.message is Message.RESET:
                self._apply_results(queue, reply, failures)
            elif reply.message is Message.REBUILD:
                self._rebuilt(reply, failures)
            else:
                self._results.update(reply.results)
            if reply.last and queue.requests and queue.requests.popleft()[2] is not None:
                queue.since, queue.suspect = self._clock(), None
        if self.closed:
            raise ClosedEnvironmentError("the environments were closed by another thread")
        for env_id in sorted(failures):
            failure, worker = failures[env_id], self.slots[env_id].worker
            activity = Activity.RESET if failure.method == Activity.RESET.method else Activity.STEP
            running = Running(env_id, activity, 0.0, inside=not failure.partially_written)
            if self.recovery is not None and not self.recovery.is_restarted(failure.kinds):
                raise reports.env_error(env_id, worker, failure, _EXCEPTIONS_ADVICE)
            self._handle_fault(worker, env_id, reports.env_error(env_id, worker, failure, self._advice), running)
        for worker, reply in replies:
            if isinstance(reply, Lost) and worker in self._queues:
                share, last = self._queues[worker].environments, self.backend.statuses[worker].running
                tail = self.backend.log_tail(worker)
                self._handle_fault(worker, None, reports.crashed(worker, share, reply, last, self._advice, tail), last)

    def _apply_results(self, queue: WorkerQueue, reply: Reply, failures: Mapping[int, Failure]) -> None:
        results = reply.results
        if self.recovery is not None:
            for env_id, result in results.items():
                if env_id in reply.failures or reply.env_ids == ():  # the automatic reset failed, or has not ended yet
                    self.slots[env_id].saved = result
        env_ids = reply.env_ids
        if env_ids is None and queue.requests:
            env_ids = queue.requests[0][0].env_ids
        for env_id in queue.share if env_ids is None else env_ids:
            slot = self.slots[env_id]
            if env_id in failures:
                continue
            if slot.busy:
                self._apply_result(slot, reply.completed, results.get(env_id))
            elif slot.renewing and reply.message is Message.RESET and queue is self._queues[slot.worker]:
                self._apply_first(slot, reply.completed, results.get(env_id))

    def _apply_result(self, slot: Slot, completed: float, result: Any) -> None:
        ended = type(result) is Ended
        if ended:
            result = result.extras
        extras = result
        if result is not None:
            try:
                extras = self.read(slot.env_id, result)
            except EnvError as error:
                self._handle_unreadable(slot, error)
                return
        if ended:
            assert self.rebuilder is not None
            assert self.recycler is not None
            slot.ending, slot.renewing = self.rebuilder.batch.snapshot(slot.env_id, extras), True
            self._renew(self.recycler, slot)
            return
        if self.recovery is not None:
            self.recovery.note_result(slot, result)
            if slot.request is Message.RESET:
                extras = self.recovery.result_of_reset(slot, extras)
        self._finish(slot, completed, extras)

    def _finish(self, slot: Slot, completed: float, result: Any) -> None:
        self._done += not slot.done
        slot.done, slot.completed, slot.result = True, completed, result

    def read(self, env_id: int, result: Any) -> Any:
        """The result of a worker; bytes are a pickled value of the simulator."""
        if type(result) is not bytes:
            return result
        try:
            return loads(result)
        except Exception as error:
            raise reports.unreadable(env_id, self.slots[env_id].worker, error) from error

    # -- faults ----------------------------------------------------------------------------------------------------

    def _handle_late(self, worker: int) -> None:
        """Replace a worker that is past its timeout, or raise."""
        running, activity, limit = self._deadlines.overrun(worker)
        if limit is None:  # while another one was handled, it has begun something without a limit
            return
        queue, backend = self._queues[worker], self.backend
        advice = self._advice if backend.can_kill else _THREAD_ADVICE

        def error_here() -> WorkerTimeout:
            stack, tail = backend.stack(worker), backend.log_tail(worker)
            error = reports.timed_out(worker, queue.environments, running, activity, limit, stack, advice, tail)
            if self.histories is not None and queue.share:
                self.histories.save(error, running)
            return error

        if self.recovery is None or not backend.can_kill or not queue.share:
            self._handle_fault(worker, None, error_here(), running)
            return
        # Taking the stack continues a worker that was stopped, and it may finish what it was doing. That is late all
        # the same: what its caller receives is read from the block before.
        if running is not None:
            late = [slot for slot in [self.slots[running.env_id]] if slot.worker == worker]
        else:
            finished = self._finished_before(worker, running)
            late = [slot for slot in self._slots_of(worker) if slot.request is not None and slot.env_id not in finished]
        cut_off = [(slot, self.recovery.cut_off(slot, running)) for slot in late if not slot.done]
        if self._deadlines.changed(worker):
            return
        error = error_here()
        for slot, fault in cut_off:
            self.recovery.begin(slot, fault, error)
        ids = {slot.env_id for slot, _ in cut_off}
        replies = []
        for reply in backend.end(worker):
            applies = ids.isdisjoint(reply.env_ids or ()) if reply.message is Message.REBUILD else self.in_flight > 0
            if applies:
                results = {env_id: result for env_id, result in reply.results.items() if env_id not in ids}
                failures = {env_id: failure for env_id, failure in reply.failures.items() if env_id not in ids}
                replies.append((worker, reply._replace(results=results, failures=failures)))
        self._apply(replies)
        self._handle_fault(worker, None, error, backend.statuses[worker].running)

    def _handle_fault(self, worker: int, env_id: int | None, error: ParallelEnvError, running: Running | None) -> None:
        """Rebuild an environment of a worker, or for None all of them in a new worker; or raise the error.

        `running` is what the worker is doing, or was doing when it died. No caller may hold the error in a variable:
        its traceback would refer to the caller's frame, and the cycle would keep everything from being freed.
        """
        recovery, replaces = self.recovery, env_id is None
        if not self._queues[worker].share:
            self._lose_spares(worker, error)
            return
        if self.histories is not None:
            self.histories.save(error, running)
        if recovery is None or (replaces and not self.backend.can_kill):
            try:
                raise error
            finally:
                del error  # likewise
        recovery.count_fault([self.slots[env_id] for env_id in error.env_ids], error)
        where = f"restarted: environments {[*self._queues[worker].share]}" if replaces else "it is restarted"
        first, *more = str(error).splitlines()
        logger.warning("%s; %s%s", first, where, "\n".join(["", *more]))
        for finished in self._finished_before(worker, running) if replaces else ():
            if self.slots[finished].busy:
                self._apply_result(self.slots[finished], self._clock(), None)
        slots = self._slots_of(worker) if env_id is None else [self.slots[env_id]]
        for slot in slots:
            if slot.done:
                recovery.save_result(slot)
            fault = recovery.cut_off(slot, running)
            if slot.renewing and slot.waiting_reset is not None:
                slot.reset_keywords, slot.waiting_reset = slot.waiting_reset, None
            recovery.begin(slot, fault, error)
            slot.renewing, slot.awaits_spare, slot.reports_recycling, slot.ending = False, False, False, None
            self._note_built(slot, ends=recovery.ends_to_come(slot, fault))
        self._all_idle, self.seeds_stale = False, True
        if self._errors is not None:
            self._errors.append(error)
        if replaces:
            queue = self._queues[worker]
            queue.requests.clear()
            queue.posted, queue.suspect = 0, None
            queue.preparing.clear()
            with self._counting:
                queue.past = self._done_by(worker)
                self.backend.replace(worker)
            self._set_step_all(worker)
            if self.recycler is not None:
                self.recycler.forget(worker)
                self._for_spares = sum(
                    request.message in _FOR_SPARES
                    for queue in self._queues.values()
                    for request, _, _ in queue.requests
                )
            if self.tracer is not None:
                self.tracer.note_replaced(queue.position)
        payload = {slot.env_id: recovery.rebuild_request(slot, error) for slot in slots}
        self._post({worker: Request(Message.REBUILD, tuple(payload), payload, each=True)}, together=False)
        self._prepare_again(payload)
        for slot in self._with_spares_in(worker) if replaces else ():  # they died with it
            self._give_up_spare(slot)
        recovery.announce(payload, error)

    def _handle_unreadable(self, slot: Slot, error: EnvError) -> None:
        """Rebuild an environment whose result cannot be unpickled, or raise the error."""
        kinds = [name_of(kind) for kind in type(error.__cause__).__mro__]
        if self.recovery is not None and not self.recovery.is_restarted(kinds):
            raise error
        self._handle_fault(slot.worker, slot.env_id, error, None)

    def _slots_of(self, worker: int) -> list[Slot]:
        return [self.slots[env_id] for env_id in self._queues[worker].share]

    def _finished_before(self, worker: int, running: Running | None) -> Sequence[int]:
        """The environments of a batch that a worker had finished when it failed."""
        queue, status = self._queues[worker], self.backend.statuses[worker]
        if not queue.one_reply or status.parts < queue.requests[0][1]:  # it had not begun
            return ()
        env_ids = queue.requests[0][0].env_ids
        env_ids = queue.share if env_ids is None else env_ids
        last = status.settled if running is None else running.env_id
        if last not in env_ids:
            return ()
        return env_ids[: env_ids.index(last) + (running is None)]

    def _rebuilt(self, reply: Reply, failures: dict[int, Failure]) -> None:
        """Environments have been rebuilt; one whose spaces differ now is a failure."""
        assert self.rebuilder is not None
        assert reply.env_ids is not None
        for env_id in reply.env_ids:
            slot, result = self.slots[env_id], reply.results.get(env_id)
            if isinstance(result, Refusal):
                failures[env_id] = Failure("constructor", result.text, result.text, None)
            if env_id in failures or slot.fault is None:  # which is that of `rebuild`
                continue
            try:
                self.read(env_id, result)
            except EnvError as error:
                self._handle_unreadable(slot, error)
                continue
            snapshot = self.rebuilder.finish(slot, result)
            if slot.waiting_reset is not None:
                keywords = slot.reset_keywords = slot.waiting_reset
                slot.waiting_reset = None
                request = Request(Message.RESET, (env_id,), {env_id: keywords}, each=True)
                self._post(self._with_settings({slot.worker: request}), together=False)
            elif snapshot is None and not slot.done and slot.request is Message.STEP:  # sent to meanwhile
                assert slot.fault is not None
                snapshot, slot.fault = slot.fault.next_result, None
            if snapshot is not None and slot.request is not None:
                self._finish(slot, reply.completed, snapshot)

    def rebuild(self, env_ids: Sequence[int]) -> None:
        """Construct environments again, which are not in flight, and count them as never reset."""
        rebuilder = self.rebuilder
        assert rebuilder is not None
        payload = {}
        for slot in [self.slots[env_id] for env_id in env_ids]:
            slot.rebuilds += 1
            slot.restarts["request"] += 1
            payload[slot.env_id] = rebuilder.request(slot, slot.rebuilds)
            slot.fault = slot.latest = slot.saved = slot.reported = None
            self._note_built(slot, ends=0)
        rebuilder.batch.note_constructed(env_ids)
        self._all_idle, self.seeds_stale = False, True
        try:
            self.execute(self._requests(Message.REBUILD, env_ids, payload, each=True))
        finally:
            if not self.closed:
                self.prepare_again(env_ids)

    # -- spares ----------------------------------------------------------------------------------------------------

    def recycle(self, recycler: Recycler) -> None:
        """From now on, replace environments by spares as the recycler says."""
        self.recycler, self._reads_at_once = recycler, False

    def rebalance(self) -> int:
        """Let workers move to machines with more room, where episodes end; returns how many will."""
        with self._lock:
            self.check_open()
            moved = self.backend.rebalance([*self.present_shares()])
            if moved and self.recycler is not None:
                self.recycler.next_look = 0.0
            return moved

    def _look_to_recycle(self, recycler: Recycler, now: float) -> None:
        """Begin to make spares where they are due or soon will be, and remove workers that all have left."""
        if not recycler.looks(now):
            return
        recycler.measure([worker for worker, queue in self._queues.items() if queue.share], now)
        for worker in [worker for worker, queue in self._queues.items() if not queue.share and queue.ends_by is None]:
            if recycler.is_leaving(worker):
                for slot in self._drop_spares(worker):  # others are made elsewhere
                    self._postpone(slot)
                    if slot.awaits_spare:
                        self._renew(recycler, slot)
        for worker, queue in [*self._queues.items()]:
            if queue.ends_by is not None:
                late = now >= queue.ends_by
                if late:
                    logger.warning(
                        "worker %d, whose environments %s have been replaced, did not close in time, and is ended",
                        worker, [*queue.built],
                    )  # fmt: skip
                if self.backend.remove(worker, kill=late):
                    self._remove(worker)
        for share in self.shares:
            if self.closed:  # by another thread
                return
            self._look_at([self.slots[env_id] for env_id in share], recycler, now)
        assert self.rebuilder is not None
        if self.rebuilder.plan.mode is not AutoresetMode.SAME_STEP:
            self._all_idle &= not any(map(recycler.is_due, self.slots))
            return
        for worker, queue in [*self._queues.items()]:
            wanted = [slot for slot in self._slots_of(worker) if not slot.retiring and recycler.is_due(slot, after=1)]
            retiring = [slot for slot in wanted if slot.fault is None and not queue.is_retiring(slot.env_id)]
            if len(retiring) < len(wanted):
                recycler.look_again()
            for slot in retiring:
                slot.retiring = True
            if retiring:
                env_ids = tuple([slot.env_id for slot in retiring])
                self._post({worker: Request(Message.RETIRE, env_ids, True)}, together=False)

    def _look_at(self, slots: Sequence[Slot], recycler: Recycler, now: float) -> None:
        """Begin to make the spares of environments that have shared a worker, and let those move whose time it is.

        Where one of their present workers is past a limit, all move: otherwise they would share workers ever less.
        """
        workers = {slot.worker for slot in slots}
        past = [worker for worker in workers if recycler.is_past_limit(worker, self._slots_of(worker), now)]
        wanted = [slot for slot in slots if slot.spare is None and recycler.may_try(slot, now)]
        beside = [slot.worker for slot in wanted if slot.worker in past]
        if not beside and recycler.wants_spares(wanted, now):
            beside = [wanted[0].worker]
        if beside and self.backend.has_spares:
            self._add_spares(recycler, beside[0], now)
        ready = [slot for slot in slots if self._is_prepared(slot) or not self.backend.has_spares]
        # They move together, but none waits for one that could not be constructed.
        leaving = [slot for slot in slots if slot.worker in past]
        if any(slot in ready for slot in leaving) and all(
            slot in ready or (slot.spare is None and not recycler.may_try(slot, now)) for slot in leaving
        ):
            spares = {slot.spare for slot in leaving}
            for slot in ready:  # also neighbours whose spares are with those of the environments that leave
                with_others = self.backend.has_spares and slot.spare in spares
                slot.due |= with_others or recycler.is_past_limit(slot.worker, [slot], now)

    def _kill_too_large(self, recycler: Recycler) -> None:
        """Replace workers that have more memory than they may ever have."""
        for worker in recycler.to_be_killed():
            if worker not in self._queues or not self._queues[worker].share:
                continue
            megabytes, limit = recycler.memory_mb(worker), recycler.policy.kill_above_mb
            share = self._queues[worker].share
            self._apply([(worker, reply) for reply in self.backend.end(worker)])
            if worker not in self._queues:
                continue
            # With these replies, all environments may have moved to their spares.
            share, status = self._queues[worker].share or share, self.backend.statuses[worker]
            running, tail = status.running, self.backend.log_tail(worker)
            # Which environment has filled the memory is not known: the fault counts once, against the one that was
            # running, or that was running last.
            counted = status.settled if running is None else running.env_id
            env_id = counted if counted is not None and counted in share else share[0]
            error = reports.too_large(worker, share, env_id, megabytes, limit, running, tail)
            try:
                self._handle_fault(worker, None, error, running)
            finally:
                del error  # as `_handle_fault` says

    def _is_prepared(self, slot: Slot) -> bool:
        """Whether the spare of an environment is ready, and its worker constructs no others."""
        return slot.spare is not None and not self._queues[slot.spare].is_preparing

    def _with_spares_in(self, worker: int) -> list[Slot]:
        return [slot for slot in self.slots if slot.spare == worker]

    def _add_spares(self, recycler: Recycler, worker: int, now: float) -> None:
        """Start a worker and construct spares there: of another worker's environments, and those of workers like it."""
        position = self._queues[worker].position
        spare, slots = self._vacant(), [self.slots[env_id] for env_id in self.shares[position]]
        missing = [slot for slot in slots if slot.spare is None and recycler.may_try(slot, now)]
        if spare is None or not missing:
            return
        env_ids = tuple([slot.env_id for slot in missing])
        try:
            self.backend.add(spare, env_ids, worker)
        except (OSError, RuntimeError) as error:
            self._warn_of_spares(recycler, missing, str(error))
            return
        if self.closed:  # by another thread
            self.backend.remove(spare, kill=True)
            return
        self._queues[spare] = WorkerQueue((), position, env_ids)
        self._prepare(spare, env_ids)

    def _drop_spares(self, worker: int) -> list[Slot]:
        """Remove a worker that has nothing but spares; returns their slots, some of which may wait for them."""
        dropped = self._with_spares_in(worker)
        for slot in dropped:
            slot.spare = None
        self.backend.remove(worker, kill=True)
        self._remove(worker)
        return dropped

    def _vacant(self) -> int | None:
        """The number of a worker that may be added."""
        return next((number for number in range(most_workers(self.shares)) if number not in self._queues), None)

    def _prepare(self, worker: int, env_ids: Iterable[int]) -> None:
        """Construct spares in a worker, or the environments themselves; those that are there already are dropped.

        What is being constructed at present is constructed again after that, once.
        """
        assert self.rebuilder is not None
        queue, payload = self._queues[worker], {}
        for slot in [self.slots[env_id] for env_id in env_ids]:
            queue.preparing[slot.env_id] = min(queue.preparing.get(slot.env_id, 0) + 1, 2)
            if queue.preparing[slot.env_id] == 1:
                payload[slot.env_id] = self.rebuilder.request(slot, slot.rebuilds + 1)
            if slot.worker != worker:
                slot.spare = worker
        if payload:
            queue.prepared_since = self._clock()
            self._post({worker: Request(Message.PREPARE, tuple(payload), payload, each=True)}, together=False)

    def prepare_again(self, env_ids: Iterable[int] | None = None) -> None:
        """Construct the spares of environments, or of all, again: they have other seeds, or write other things, now."""
        self._call(self._prepare_again, env_ids)

    def _prepare_again(self, env_ids: Iterable[int] | None) -> None:
        spares: dict[int, list[int]] = defaultdict(list)
        for env_id in range(self.batch_size) if env_ids is None else env_ids:
            spare = self.slots[env_id].spare
            if spare is not None:
                spares[spare].append(env_id)
        for worker, chosen in spares.items():
            if not self._queues[worker].share:
                self._prepare(worker, chosen)
            else:  # others step there, and would wait for the constructor
                for env_id in chosen:
                    self._give_up_spare(self.slots[env_id])

    def _give_up_spare(self, slot: Slot) -> None:
        """Let another spare be constructed in a further worker, at once if it is waited for.

        The old one stays where it is until that worker ends.
        """
        worker, slot.spare = slot.spare, None
        assert worker is not None
        assert self.recycler is not None
        queue = self._queues[worker]
        if not queue.preparing.get(slot.env_id):
            queue.preparing.pop(slot.env_id, None)
        self.recycler.look_again()
        self._postpone(slot)
        if slot.awaits_spare:
            self._renew(self.recycler, slot)

    def _postpone(self, slot: Slot) -> None:
        """Let an environment go on until its spare is ready, unless it has had all its episodes."""
        assert self.recycler is not None
        slot.due = False
        is_due = slot.renewing or self.recycler.is_due(slot, after=1)
        if slot.retiring and not is_due and not self._queues[slot.worker].is_retiring(slot.env_id):
            slot.retiring = False
            self._post({slot.worker: Request(Message.RETIRE, (slot.env_id,), False)}, together=False)

    def _without_recycled(
        self, recycler: Recycler, message: Message, env_ids: Sequence[int], payloads: Any
    ) -> Sequence[int]:
        """Environments that go on, of those that are sent to; spares of the others begin the episode."""
        assert self.rebuilder is not None
        mode, going_on = self.rebuilder.plan.mode, []
        for env_id in env_ids:
            slot = self.slots[env_id]
            resets = message is Message.RESET
            if resets and slot.has_reset and not slot.over:
                slot.first_episode -= 1  # the reset ends an episode that does not end by itself
                recycler.look_again()
            begins = resets or (slot.over and mode is AutoresetMode.NEXT_STEP)
            if not begins or slot.fault is not None or not slot.has_reset or not recycler.is_due(slot):
                going_on.append(env_id)
                continue
            slot.renewing, slot.waiting_reset = True, payloads[env_id] if resets else None
            self._renew(recycler, slot)
        return going_on

    def _renew(self, recycler: Recycler, slot: Slot) -> None:
        """Begin the next episode of an environment in its spare, as soon as there is one."""
        if slot.spare is None and (not self.backend.has_spares or self._vacant() is None):
            slot.awaits_spare = False
            self._prepare(slot.worker, [slot.env_id])  # in its place
            return
        slot.awaits_spare = True
        if slot.spare is None:
            self._add_spares(recycler, slot.worker, self._clock())
        if slot.spare is None:
            self._go_on(slot)
        elif self._is_prepared(slot):
            self._move(slot, slot.spare)

    def _move(self, slot: Slot, worker: int) -> None:
        """Let the spare in a worker take the place of an environment, and begin the episode that is due."""
        slot.awaits_spare = False
        old, new = self._queues[slot.worker], self._queues[worker]
        if old is not new:
            del new.preparing[slot.env_id]
            left, slot.worker, slot.spare = slot.worker, worker, None
            old.share = tuple([env_id for env_id in old.share if env_id != slot.env_id])
            new.share = tuple(sorted([*new.share, slot.env_id]))
            self._set_step_all(left)
            self._set_step_all(worker)
            self._end_if_left(left)
        slot.rebuilds += 1
        slot.recycled += 1
        slot.reports_recycling, self.seeds_stale = True, True
        keywords = slot.waiting_reset
        self._note_built(slot, ends=slot.ending is not None)
        if self.histories is not None:
            assert self.rebuilder is not None
            self.histories.note_built(slot.env_id, self.rebuilder.request(slot, slot.rebuilds))
        if keywords is None or not loads(keywords):  # the first episode has begun with neither a seed nor options
            slot.waiting_reset = None
            request = Request(Message.ADOPT, (slot.env_id,), each=True)
        else:
            slot.reset_keywords, slot.waiting_reset = keywords, None
            request = Request(Message.RESET, (slot.env_id,), {slot.env_id: keywords}, each=True)
        # The spare may have been constructed before the last reset.
        self._post(self._with_settings({worker: request}), together=False)
        if old is new:
            self._prepare_again([slot.env_id])  # it was constructed in place, so that its spare has the same seed

    def _end_if_left(self, worker: int) -> None:
        """Let a worker end in which there are neither environments nor spares."""
        queue = self._queues[worker]
        if not queue.share and not queue.preparing and queue.ends_by is None:
            queue.ends_by = self._clock() + _LEAVES_WITHIN_S
            self._post({worker: Request(Message.CLOSE)}, together=False)

    def _go_on(self, slot: Slot) -> None:
        """Begin the next episode in the old environment, since there is no spare."""
        slot.awaits_spare = False
        if slot.retiring:
            self._post({slot.worker: Request(Message.RETIRE, (slot.env_id,), False)}, together=False)
        slot.retiring = slot.due = False
        keywords, slot.waiting_reset = slot.waiting_reset or dumps({}), None
        request = Request(Message.RESET, (slot.env_id,), {slot.env_id: keywords}, each=True)
        self._post(self._with_settings({slot.worker: request}), together=False)

    def _note_built(self, slot: Slot, *, ends: int) -> None:
        """Note that an environment has been constructed, and how many ends of the old one's episodes are to come."""
        slot.built, slot.due, slot.retiring = self._clock(), False, False
        if self.recycler is not None:
            slot.first_episode += self.recycler.episodes(slot) + ends
            self.recycler.look_again()

    def _set_step_all(self, worker: int) -> None:
        """Set the request that steps all environments of a worker."""
        queue = self._queues[worker]
        if not queue.share:
            self._step_all.pop(worker, None)
        elif tuple(queue.share) == tuple(queue.built):
            self._step_all[worker] = STEP_ALL
        else:
            self._step_all[worker] = Request(Message.STEP, queue.share)

    def _apply_for_spares(self, worker: int, reply: Reply, failures: dict[int, Failure]) -> None:
        """Apply the reply to a request of this section."""
        recycler, queue = self.recycler, self._queues[worker]
        assert recycler is not None
        for env_id, failed in reply.failures.items():
            if reply.message is Message.CLOSE:
                text = reports.first_line(reports.env_error(env_id, worker, failed))
                logger.warning("%s. %s", text, _REPLACED_ALREADY)
        if reply.message is Message.RETIRE or reply.message is Message.CLOSE:
            if self.tracer is not None and SLICES in reply.results:
                self.tracer.add(queue.position, reply.results[SLICES], self.backend.ahead(worker))
            return
        for env_id in reply.env_ids or ():
            slot, result = self.slots[env_id], reply.results.get(env_id)
            failure = reply.failures.get(env_id)
            if isinstance(result, Refusal):
                failure = Failure("constructor", result.text, result.text, None)
            if slot.worker == worker:  # it is no spare any more, or is constructed in place
                if failure is not None:
                    failures[env_id] = failure
                if reply.message is Message.ADOPT:
                    if failure is None and slot.renewing:
                        self._apply_first(slot, reply.completed, result)
                elif queue.note_prepared(env_id) and failure is None:
                    self._prepare(worker, [env_id])
                else:
                    del queue.preparing[env_id]
                    if failure is None and slot.renewing:
                        self._move(slot, worker)
                    self._move_waiting(worker)
            elif slot.spare != worker:  # it was given up meanwhile
                queue.preparing.pop(env_id, None)
                self._move_waiting(worker)
                self._end_if_left(worker)
            elif queue.note_prepared(env_id):
                self._prepare(worker, [env_id])
            else:
                if failure is not None:
                    del queue.preparing[env_id]
                    self._note_failed(recycler, [slot], [slot], reports.env_error(env_id, worker, failure))
                self._note_prepared(recycler, worker)

    def _note_prepared(self, recycler: Recycler, worker: int) -> None:
        """Note that spares in a worker are ready, or could not be made."""
        queue = self._queues[worker]
        if queue.is_preparing:
            return
        if slots := self._with_spares_in(worker):
            recycler.note_made(slots, worker, self._clock() - queue.prepared_since)
        recycler.next_look = 0.0
        self._move_waiting(worker)
        self._end_if_left(worker)

    def _move_waiting(self, worker: int) -> None:
        """Let the spares in a worker take their places, for which callers wait, if all of them are ready."""
        if not self._queues[worker].is_preparing:
            for slot in self._with_spares_in(worker):
                if slot.awaits_spare:
                    self._move(slot, worker)

    def _apply_first(self, slot: Slot, completed: float, result: Any) -> None:
        """The first transition of an episode that begins in a spare, or in the old environment if there is none."""
        assert self.rebuilder is not None
        try:
            extras = None if result is None else self.read(slot.env_id, result)
        except EnvError as error:
            self._handle_unreadable(slot, error)
            return
        self.rebuilder.note_result(slot, result)
        first: Snapshot = self.rebuilder.batch.snapshot(slot.env_id, extras)
        if slot.ending is not None:
            first = first._replace(dicts=renewed(slot.ending.dicts, first.dicts), over=False)
        if slot.reports_recycling:
            first = first._replace(dicts=recycled(first.dicts))
        slot.renewing = slot.reports_recycling = False
        slot.ending = None
        self._finish(slot, completed, first)

    def _lose_spares(self, worker: int, error: ParallelEnvError) -> None:
        """Remove a worker in which spares could not be made, or one that has died after all had left."""
        assert self.recycler is not None
        if self._queues[worker].ends_by is not None:
            logger.warning("%s. %s", reports.first_line(error), _REPLACED_ALREADY)
        if dropped := self._drop_spares(worker):
            failed = [slot for slot in dropped if slot.env_id in error.env_ids]
            self._note_failed(self.recycler, dropped, failed or dropped, error)

    def _note_failed(
        self, recycler: Recycler, dropped: Sequence[Slot], failed: Sequence[Slot], error: ParallelEnvError
    ) -> None:
        """Let environments go on whose spares could not be made; those that wait for lost ones get others at once.

        The next spares of those that failed have other seeds. While an environment has never been reset, it keeps the
        count of rebuilds, on which the seed of its first reset depends.
        """
        self._warn_of_spares(recycler, failed, str(error))
        for slot in failed:
            slot.rebuilds += slot.has_reset
        for slot in dropped:
            slot.spare = None
            self._postpone(slot)
        for slot in dropped:
            if slot.awaits_spare and slot in failed:
                self._go_on(slot)
            elif slot.awaits_spare:
                self._renew(recycler, slot)

    def _warn_of_spares(self, recycler: Recycler, slots: Sequence[Slot], error: str) -> None:
        seconds = recycler.note_failed(slots, self._clock())
        logger.warning(
            "environments %s could not be constructed in another worker; the present ones go on, and it is tried "
            "again in %.0f s. %s", [slot.env_id for slot in slots], seconds, error,
        )  # fmt: skip

    def _remove(self, worker: int) -> None:
        """Forget a worker that is gone."""
        assert self.recycler is not None
        with self._counting:
            done, queue = self._done_by(worker), self._queues.pop(worker)
            self._past[queue.position] += done
        self._for_spares -= sum(request.message in _FOR_SPARES for request, _, _ in queue.requests)
        self.recycler.forget(worker)

    # -- statistics ------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> tuple[int, ...]:
        """The environments in flight."""
        return tuple([slot.env_id for slot in self.slots if slot.request is not None])

    def stats(self) -> Stats:
        """Counts and times so far, with those of workers that have been replaced."""
        if not self.closed:
            self.backend.look()
        with self._counting:
            return Stats.of(map(self._stats_of, range(len(self.shares))))

    def _stats_of(self, position: int) -> WorkerStats:
        workers = [worker for worker, queue in [*self._queues.items()] if queue.position == position]
        done = sum(map(self._done_by, workers), self._past[position])
        slots = [self.slots[env_id] for env_id in self.shares[position]]
        kinds = sum([slot.restarts for slot in slots], Counter())
        faults, recycled = sum(slot.counted_faults for slot in slots), sum(slot.recycled for slot in slots)
        times = done.simulator_s, done.transport_s, done.waiting_s, done.step_times
        return WorkerStats(done.steps, done.resets, kinds.total(), faults, recycled, *times, kinds)

    def memory(self) -> list[int | None]:
        """Bytes of memory of each worker and what its simulators have started; None if that is not known."""
        found: list[int | None] = [None] * len(self.shares)
        for worker, queue in [*self._queues.items()]:
            nbytes = None if self.closed else self.backend.memory(worker)
            if nbytes is not None:
                found[queue.position] = nbytes + (found[queue.position] or 0)
        return found

    def _done_by(self, worker: int) -> WorkerStats:
        """The steps, resets and seconds of a worker and those that it has replaced after faults."""
        return self._queues[worker].past + self.backend.statuses[worker].stats

    # -- the end ---------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `ClosedEnvironmentError` if everything has been closed."""
        if self.closed:
            raise ClosedEnvironmentError("the environments have been closed; make a new ParallelEnv")

    def close(self, *, ask: bool = True, timeout: float = 5.0) -> EnvError | None:
        """Close all environments, end all workers and free everything. Idempotent.

        With `ask`, workers close their environments first, within `timeout` seconds. Returns the error of one that
        failed to close; everything has been freed all the same. If Ctrl-C interrupts it before that, the next call
        frees the rest. If another thread does not leave its call in time, all is freed beside it.
        """
        if self.freed or self._closing:
            return None  # `_closing`: by another thread, or by this one, which a signal handler has interrupted
        deadline = self._clock() + timeout
        ask = ask and not self.closed  # a close that Ctrl-C has interrupted: the rest is freed now
        locked, error, patience = False, None, 0.0  # a worker without a request to close does not end by itself
        try:
            self.closed = self._closing = True
            for status in getattr(self.backend, "statuses", ()):  # there are none if it did not start
                status.discard()
            self.backend.interrupt()
            # A thread that waits for results leaves soon; one in `on_restart` or a handler of logs may not.
            locked = self._lock.acquire(timeout=min(max(timeout, _INTERRUPTED_WITHIN_S), threading.TIMEOUT_MAX))
            if not locked:
                logger.warning("%s", reports.in_use(max(timeout, _INTERRUPTED_WITHIN_S), self.backend.can_kill))
            elif ask:
                error = self._close_environments(deadline)
                patience = max(deadline - self._clock(), 0.0)
        except KeyboardInterrupt:
            if locked:
                self._log_at_ctrl_c()
            raise
        finally:
            try:
                self._free(patience)
            finally:  # also after a second Ctrl-C
                self._closing = False
                if locked:
                    self._lock.release()
        return error

    def _free(self, patience: float) -> None:
        """End all workers, which have so many seconds to end by themselves, and free everything."""
        self.closed = True
        left = self.backend.stop(patience)
        # A signal handler may have closed in the middle of a call: its `wait` must not go on for ever.
        self.backend.interrupt()
        self.freed = True
        if (tracer := self.tracer) is not None:
            self.tracer = None
            try:
                tracer.finish()
            except OSError as unwritten:  # closing goes on
                logger.warning("the trace could not be written to %s: %s", tracer.path, unwritten)
        for worker in left:
            logger.warning(
                "worker %d could not be ended, it is left behind: a thread cannot be killed. It runs\n%s",
                worker, self.backend.stack(worker),
            )  # fmt: skip

    def _close_environments(self, deadline: float) -> EnvError | None:
        for worker in [worker for worker, queue in self._queues.items() if not queue.share and queue.ends_by is None]:
            self.backend.remove(worker, kill=True)  # it may be in a constructor
            self._remove(worker)
        pending = {worker for worker, queue in self._queues.items() if queue.ends_by is None}
        failures: dict[int, Failure] = {}
        for worker in pending:
            self._queues[worker].requests.clear()  # the workers leave them out
        self._post({worker: Request(Message.CLOSE) for worker in pending}, together=False)
        while pending and (left := deadline - self._clock()) > 0:
            self._warn_of_long_calls()
            patience = self._long_calls.patience()
            for worker, reply in self.backend.wait(left if patience is None else min(left, max(patience, 0.0))):
                if isinstance(reply, Lost):
                    pending.discard(worker)
                elif reply.message is Message.CLOSE:  # others were in flight: discarded
                    pending.discard(worker)
                    self._queues[worker].requests.clear()
                    failures.update(reply.failures)
                    if self.tracer is not None and SLICES in reply.results:
                        self.tracer.add(
                            self._queues[worker].position, reply.results[SLICES], self.backend.ahead(worker)
                        )
        if pending:
            logger.warning(
                "worker %s did not close in time, and is ended: %s",
                " and ".join(map(str, sorted(pending))),
                ", ".join(reports.environments(self._queues[worker].share) for worker in sorted(pending)),
            )
        if not failures:
            return None
        first = min(failures)
        return reports.env_error(first, self.slots[first].worker, failures[first])

    def _close_after(self, error: BaseException) -> None:
        """Close everything after an error, unless another thread has done so."""
        if isinstance(error, ClosedEnvironmentError):
            return
        if self.histories is not None and isinstance(error, EnvError):  # a result that cannot be unpickled, too
            self.histories.save(error, None)
        if isinstance(error, WorkerTimeout):
            while_closing = self.close(ask=False, timeout=0.0)
        elif isinstance(error, ParallelEnvError):
            while_closing = self.close()
        else:
            # Interrupted (Ctrl-C): it is not known which replies are still to come.
            try:
                if isinstance(error, KeyboardInterrupt):
                    self._log_at_ctrl_c()
            finally:  # also after a second Ctrl-C
                while_closing = self.close(ask=not self.backend.can_kill, timeout=1.0)
        if while_closing is not None:
            logger.warning("while closing after another error: %s", while_closing)

    def _log_at_ctrl_c(self) -> None:
        """Log where workers are that are in the middle of a call."""
        for long in self._long_calls.look(_LONG_AT_CTRL_C_S):
            self._log_long_call(long)

    def abandon(self) -> None:
        """In a forked child of the owner: count as closed, and touch nothing that the owner still uses."""
        self.closed = self.freed = True
        self.backend.abandon()
