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
late, `reports.py` writes the texts of errors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gymnasium.error import ClosedEnvironmentError

from marl_parallel.core import reports
from marl_parallel.core.backend import Backend
from marl_parallel.core.messages import (
    STEP_ALL,
    STEP_ALL_PROMPTLY,
    STEPPED,
    Failure,
    Lost,
    Message,
    Refusal,
    Reply,
    Request,
)
from marl_parallel.core.pickling import loads
from marl_parallel.core.recovery import Recovery
from marl_parallel.core.replay import Histories
from marl_parallel.core.reports import logger
from marl_parallel.core.slots import Deadlines, Limits, LongCall, LongCalls, Slot, WorkerQueue
from marl_parallel.core.worker_status import SLICES, Activity, Running, Tracer
from marl_parallel.types import EnvError, ParallelEnvError, Stats, WorkerStats, WorkerTimeout

_ADVICE = ', or pass on_error="restart" to go on with a fresh environment'
_EXCEPTIONS_ADVICE = ", or add its type to the exceptions of the RestartPolicy to go on with a fresh environment"
_LONG_AT_CTRL_C_S = 1.0
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
    """

    partial = True

    def __init__(
        self,
        backend: Backend,
        shares: Sequence[range],
        limits: Limits = Limits(),  # noqa: B008
        *,
        warn_after: float | None = None,
    ) -> None:
        self.backend, self.shares = backend, shares
        self.slots = [Slot(env_id, worker) for worker, share in enumerate(shares) for env_id in share]
        self.batch_size = len(self.slots)  # results come in any number
        self.recovery: Recovery | None = None  # set if environments that fail are rebuilt
        self.histories: Histories | None = None  # set if failures can be replayed
        self.in_flight = 0  # how many environments have been sent to and not received
        self.closed = False
        self.tracer: Tracer | None = None  # of the present trace
        self.seeds_stale = True  # whether environments may use other seeds than those they declared last
        self._queues = [WorkerQueue(share) for share in shares]
        self._deadlines = Deadlines(backend, limits, self._queues)
        self._long_calls = None if warn_after is None else LongCalls(backend, self._queues, warn_after)
        self._step_all = dict.fromkeys(range(len(shares)), STEP_ALL)
        self._advice = _ADVICE
        self._all_idle = False  # whether every slot is idle, with nothing saved for a restart
        self._done = 0  # how many slots are done
        self._results: dict[int, Any] = {}  # of `execute`, by environment
        self._errors: list[ParallelEnvError] | None = None  # of environments rebuilt in the present `execute`
        # Re-entrant: a signal handler or a finalizer may close in the middle of a call of the same thread.
        self._lock = threading.RLock()

    def restart_on_faults(self, recovery: Recovery) -> None:
        """From now on, rebuild environments that fail."""
        self.recovery, self._advice = recovery, ""
        self._step_all = dict.fromkeys(self._step_all, STEP_ALL_PROMPTLY)

    # -- requests --------------------------------------------------------------------------------------------------

    def send(self, message: Message, env_ids: Sequence[int], payloads: Any = None, *, together: bool = False) -> None:
        """Send `STEP` or `RESET` to environments that are not in flight, and return.

        `payloads` are pickled, by environment. With `together`, all of them are received at once, which is faster.
        """
        self._call(self._send, message, env_ids, payloads, together)

    def recv(self, at_least: int, timeout: float | None = None, env_ids: Sequence[int] | None = None) -> Results:
        """Wait for the results of so many environments, and take all that are here; or wait for all of `env_ids`.

        Raises:
            TimeoutError: There were fewer within `timeout` seconds. Nothing is lost.
            ParallelEnvError: A fault; everything has been closed.
            ClosedEnvironmentError: Another thread has closed everything.
        """
        slots = self.slots if env_ids is None else [self.slots[env_id] for env_id in env_ids]
        results: Results | None = self._call(self._recv, at_least, timeout, slots)
        if results is None:
            raise TimeoutError(
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
            self._deadlines.looked = now = time.monotonic()  # the time of the caller counts
            try:
                step_all = message is Message.STEP and payloads is None and len(env_ids) == len(self.slots)
                if not step_all or not self._all_idle:
                    self._send(message, env_ids, payloads, together=True)
                else:
                    self._all_idle = False
                    request, limit = self._step_all[0], self._deadlines.shortest[Message.STEP]
                    warn_after = None if self._long_calls is None else self._long_calls.warn_after
                    for queue in self._queues:
                        queue.posted += 1
                        queue.requests.append((request, queue.posted, limit))
                        queue.since = now
                    if self.histories is not None:
                        self.histories.note_steps(env_ids, None)
                    self.backend.post(self._step_all, together=True)
                    replies = self.backend.wait(
                        self._deadlines.patience() if limit else warn_after, len(self._step_all)
                    )
                    extras: dict[int, Any] = {}
                    complete = 0
                    for _, reply in replies:
                        if reply is STEPPED:
                            complete += 1
                        elif self.recovery is None and not isinstance(reply, Lost) and not reply.failures:
                            complete += 1
                            extras.update(reply.results)
                    if complete == len(replies) == len(self._step_all) and not self.closed:
                        if extras:
                            extras = {env_id: self.read(env_id, result) for env_id, result in extras.items()}
                        for queue in self._queues:
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

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of this object alone; close everything if it raises."""
        with self._lock:
            self.check_open()
            self._deadlines.looked = time.monotonic()  # the time of the caller counts
            try:
                return function(*arguments)
            except BaseException as error:
                self._close_after(error)
                raise

    # -- sending and receiving -------------------------------------------------------------------------------------

    def _send(self, message: Message, env_ids: Sequence[int], payloads: Any, together: bool) -> None:
        self._all_idle = False
        self._note_sent(message, env_ids)
        if self.recovery is not None:
            env_ids = [env_id for env_id in env_ids if self._goes_out(self.slots[env_id], message, payloads)]
        prompt = together and self.recovery is not None
        alone = together and not any(queue.requests for queue in self._queues)
        self._post(self._requests(message, env_ids, payloads, each=not together, prompt=prompt), together=alone)

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
            else:
                slot.reset_keywords = payloads[slot.env_id]
            return not rebuilding
        if fault is not None and not rebuilding:
            slot.fault = None
            self._finish(slot, time.monotonic(), fault.next_result)
        return fault is None

    def _requests(
        self, message: Message, env_ids: Iterable[int], payload: Any, *, each: bool = False, prompt: bool = False
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
            requests[worker] = Request(message, tuple(ids), part, each, prompt)
        return requests

    def _post(self, requests: Mapping[int, Request], *, together: bool) -> None:
        if not requests:
            return
        now = time.monotonic()
        for worker, request in requests.items():
            queue = self._queues[worker]
            if not queue.requests:
                queue.since = now
            queue.requests.append((request, queue.posted + 1, self._deadlines.shortest[request.message]))
            queue.posted += len(request.env_ids) if request.each and request.env_ids is not None else 1
            if self.histories is not None:
                self.histories.note(request)
        self.backend.post(requests, together=together)

    def _recv(self, at_least: int, timeout: float | None, slots: Sequence[Slot]) -> Results | None:
        """The results of all slots, or of some that are all waited for; None after the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        queues, ids = self._queues, None
        if slots is not self.slots:
            queues = [queues[worker] for worker in dict.fromkeys([slot.worker for slot in slots])]
            ids = {slot.env_id for slot in slots}
        while True:
            missing = at_least - (self._done if ids is None else sum([slot.done for slot in slots]))
            patience = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            batches = sum([queue.one_reply if ids is None else queue.owes_one_reply(ids) for queue in queues])
            if ids is not None and missing <= 0 and not batches:
                break
            self._wait_once(patience if missing > 0 or batches else 0.0, max(min(missing, batches or missing), 1))
            if ids is None and self._done >= at_least and not sum([queue.one_reply for queue in queues]):
                break
            if patience == 0.0:
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

    def _execute(self, requests: Mapping[int, Request]) -> tuple[dict[int, Any], list[ParallelEnvError]]:
        while self._rebuilding():
            self._wait_once(None, 1)
        errors: list[ParallelEnvError] = []
        self._results, self._errors = {}, errors
        self._post(requests, together=True)
        while (busy := sum(bool(queue.requests) for queue in self._queues)) or self._rebuilding():
            self._wait_once(None, busy or 1)
        results, self._results, self._errors = self._results, {}, None
        return {} if errors else {env_id: self.read(env_id, results[env_id]) for env_id in sorted(results)}, errors

    def _rebuilding(self) -> bool:
        return self.recovery is not None and any(slot.rebuilding for slot in self.slots)

    # -- the loop --------------------------------------------------------------------------------------------------

    def _wait_once(self, patience: float | None, at_least: int) -> None:
        limits = [
            patience,
            self._deadlines.patience(),
            None if self._long_calls is None else self._long_calls.patience(),
        ]
        self._apply(self.backend.wait(min([one for one in limits if one is not None], default=None), at_least))
        self._look_for_late()
        if self._long_calls is not None and self._long_calls.patience() <= 0.0:
            for long in self._long_calls.look():
                self._log_long_call(long, f". Pass a {long.activity.timeout}_timeout= to end what hangs")

    def _look_for_late(self) -> None:
        for worker in self._deadlines.late():
            self._handle_late(worker)
            self._deadlines.looked = time.monotonic()

    def _log_long_call(self, long: LongCall, to_do: str = "") -> None:
        """Log where a worker is that has been in one call for long."""
        stack = self.backend.stack(long.worker, harmless=True)
        logger.warning("%s", reports.long_call(self.shares[long.worker], long, stack, to_do))

    def _apply(self, replies: Sequence[tuple[int, Reply | Lost]]) -> None:
        """Apply replies to slots. Failures come after results, in the order of environments, deaths come last."""
        failures: dict[int, Failure] = {}
        for worker, reply in replies:
            if isinstance(reply, Lost):
                continue
            queue = self._queues[worker]
            failures.update(reply.failures)
            if reply.message is Message.STEP or reply.message is Message.RESET:
                self._apply_results(queue, reply, failures)
            elif reply.message is Message.REBUILD:
                self._rebuilt(reply, failures)
            else:
                self._results.update(reply.results)
            if reply.last and queue.requests and queue.requests.popleft()[2] is not None:
                queue.since, queue.suspect = time.monotonic(), None
        if self.closed:
            raise ClosedEnvironmentError("the environments were closed by another thread")
        for env_id in sorted(failures):
            failure, worker = failures[env_id], self.slots[env_id].worker
            activity = Activity.RESET if failure.method == Activity.RESET.method else Activity.STEP
            running = Running(env_id, activity, 0.0, inside=not failure.partially_written)
            if self.recovery is not None and not self.recovery.is_restarted(failure):
                raise reports.env_error(env_id, worker, failure, _EXCEPTIONS_ADVICE)
            self._handle_fault(worker, env_id, reports.env_error(env_id, worker, failure, self._advice), running)
        for worker, reply in replies:
            if isinstance(reply, Lost):
                share, last = self.shares[worker], self.backend.statuses[worker].running
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
            if slot.busy and env_id not in failures:
                self._apply_result(slot, reply.completed, results.get(env_id))

    def _apply_result(self, slot: Slot, completed: float, result: Any) -> None:
        extras = result
        if result is not None:
            try:
                extras = self.read(slot.env_id, result)
            except EnvError as error:
                self._handle_fault(slot.worker, slot.env_id, error, None)
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
        assert limit is not None
        share, backend = self.shares[worker], self.backend
        advice = self._advice if backend.can_kill else _THREAD_ADVICE

        def error_here() -> WorkerTimeout:
            stack, tail = backend.stack(worker), backend.log_tail(worker)
            error = reports.timed_out(worker, share, running, activity, limit, stack, advice, tail)
            if self.histories is not None:
                self.histories.save(error, running)
            return error

        if self.recovery is None or not backend.can_kill:
            self._handle_fault(worker, None, error_here(), running)
            return
        # Taking the stack continues a worker that was stopped, and it may finish what it was doing. That is late all
        # the same: what its caller receives is read from the block before.
        if running is not None:
            late = [self.slots[running.env_id]]
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
        if self.histories is not None:
            self.histories.save(error, running)
        if recovery is None or (replaces and not self.backend.can_kill):
            try:
                raise error
            finally:
                del error  # likewise
        recovery.count_fault([self.slots[env_id] for env_id in error.env_ids], error)
        where = f"restarted: environments {[*self.shares[worker]]}" if replaces else "it is restarted"
        first, *more = str(error).splitlines()
        logger.warning("%s; %s%s", first, where, "\n".join(["", *more]))
        for finished in self._finished_before(worker, running) if replaces else ():
            if self.slots[finished].busy:
                self._apply_result(self.slots[finished], time.monotonic(), None)
        slots = self._slots_of(worker) if env_id is None else [self.slots[env_id]]
        for slot in slots:
            if slot.done:
                recovery.save_result(slot)
            recovery.begin(slot, recovery.cut_off(slot, running), error)
        self._all_idle, self.seeds_stale = False, True
        if self._errors is not None:
            self._errors.append(error)
        if replaces:
            queue = self._queues[worker]
            queue.requests.clear()
            queue.past, queue.posted, queue.suspect = self._stats_of(worker), 0, None
            self.backend.replace(worker)
            if self.tracer is not None:
                self.tracer.note_replaced(worker)
        payload = {slot.env_id: recovery.rebuild_request(slot) for slot in slots}
        self._post({worker: Request(Message.REBUILD, tuple(payload), payload, each=True)}, together=False)
        recovery.announce(payload, error)

    def _slots_of(self, worker: int) -> list[Slot]:
        return [self.slots[env_id] for env_id in self.shares[worker]]

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
        assert self.recovery is not None
        assert reply.env_ids is not None
        for env_id in reply.env_ids:
            slot, result = self.slots[env_id], reply.results.get(env_id)
            if isinstance(result, Refusal):
                failures[env_id] = Failure("constructor", result.text, result.text, None)
            if env_id in failures:
                continue
            snapshot = self.recovery.finish(slot, result)
            if slot.waiting_reset is not None:
                keywords = slot.reset_keywords = slot.waiting_reset
                slot.waiting_reset = None
                request = Request(Message.RESET, (env_id,), {env_id: keywords}, each=True)
                self._post({slot.worker: request}, together=False)
            elif snapshot is None and not slot.done and slot.request is Message.STEP:  # sent to meanwhile
                assert slot.fault is not None
                snapshot, slot.fault = slot.fault.next_result, None
            if snapshot is not None and slot.request is not None:
                self._finish(slot, reply.completed, snapshot)

    # -- statistics ------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> tuple[int, ...]:
        """The environments in flight."""
        return tuple([slot.env_id for slot in self.slots if slot.request is not None])

    def stats(self) -> Stats:
        """Counts and times so far, with those of workers that have been replaced."""
        if not self.closed:
            self.backend.look()
        return Stats.of(map(self._stats_of, range(len(self.shares))))

    def _stats_of(self, worker: int) -> WorkerStats:
        done = Stats.of([self._queues[worker].past, self.backend.statuses[worker].stats])
        slots = self._slots_of(worker)
        restarts, faults = sum(slot.restarts for slot in slots), sum(slot.counted_faults for slot in slots)
        times = done.simulator_s, done.transport_s, done.waiting_s
        return WorkerStats(done.steps, done.resets, restarts, faults, *times)

    # -- the end ---------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `ClosedEnvironmentError` if everything has been closed."""
        if self.closed:
            raise ClosedEnvironmentError("the environments have been closed; make a new ParallelEnv")

    def close(self, *, ask: bool = True, timeout: float = 5.0) -> EnvError | None:
        """Close all environments, end all workers and free everything. Idempotent.

        With `ask`, workers close their environments first, within `timeout` seconds. Returns the error of one that
        failed to close; everything has been freed all the same.
        """
        if self.closed:
            return None
        self.closed = True
        for status in getattr(self.backend, "statuses", ()):  # there are none if it did not start
            status.discard()
        self.backend.interrupt()
        with self._lock:
            deadline = time.monotonic() + timeout
            error, patience = None, 0.0  # a worker without a request to close does not end by itself
            try:
                if ask:
                    error = self._close_environments(deadline)
                    patience = max(deadline - time.monotonic(), 0.0)
            finally:
                # Also after a second Ctrl-C: nothing else would free the rest.
                left = self.backend.stop(patience)
                # A signal handler may have closed in the middle of a call: its `wait` must not go on for ever.
                self.backend.interrupt()
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
            return error

    def _close_environments(self, deadline: float) -> EnvError | None:
        pending = set(range(len(self.shares)))
        failures: dict[int, Failure] = {}
        self.backend.post({worker: Request(Message.CLOSE) for worker in pending})
        while pending and (left := deadline - time.monotonic()) > 0:
            for worker, reply in self.backend.wait(left):
                if isinstance(reply, Lost):
                    pending.discard(worker)
                elif reply.message is Message.CLOSE:  # others were in flight: discarded
                    pending.discard(worker)
                    failures.update(reply.failures)
                    if self.tracer is not None and SLICES in reply.results:
                        self.tracer.add(worker, reply.results[SLICES], self.backend.ahead(worker))
        if pending:
            logger.warning(
                "worker %s did not close in time, and is ended: %s",
                " and ".join(map(str, sorted(pending))),
                ", ".join(reports.environments(self.shares[worker]) for worker in sorted(pending)),
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
                if isinstance(error, KeyboardInterrupt) and self._long_calls is not None:
                    for long in self._long_calls.look(_LONG_AT_CTRL_C_S):
                        self._log_long_call(long)
            finally:  # also after a second Ctrl-C
                while_closing = self.close(ask=not self.backend.can_kill, timeout=1.0)
        if while_closing is not None:
            logger.warning("while closing after another error: %s", while_closing)

    def abandon(self) -> None:
        """In a forked child of the owner: count as closed, and touch nothing that the owner still uses."""
        self.closed = True
        self.backend.abandon()
