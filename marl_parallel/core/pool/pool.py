"""The worker pool of one `ParallelEnv`: requests go out, results come back, and faults are raised or dealt with.

`send` and `recv` change the state of a slot; `run` is both in one call. `execute` carries out all requests except steps
and resets::

             send                     reply                     recv
      IDLE --------> BUSY -------------------------> DONE --------------> IDLE
                      |  an extension holds it back   ^
                      +-------------------------------+

`wait_once` waits for replies, applies them to slots, and lets extensions look at the time; all calls but the quickest
step repeat it. All other features are extensions (`extensions.py`): rebuilds and restarts, recycling, timeouts,
warnings of long calls, replays, traces. If no extension deals with a fault, its error is raised, and everything is
closed.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from gymnasium.error import ClosedEnvironmentError

from marl_parallel.core.backend import Backend
from marl_parallel.core.messages import STEP_ALL, STEPPED, Failure, Lost, Message, Reply, Request, name_of
from marl_parallel.core.objects.pickling import dumps, loads
from marl_parallel.core.pool.extensions import HELD, ORDER, Extension, Fault, Hooks
from marl_parallel.core.pool.replacement import Successor
from marl_parallel.core.pool.slots import (
    STEPS_AND_RESETS,
    OnReply,
    Pending,
    Results,
    Slot,
    Snapshot,
    State,
    WorkerQueue,
)
from marl_parallel.core.reports import reports
from marl_parallel.core.reports.reports import logger
from marl_parallel.core.source import Source
from marl_parallel.core.worker_status import SLICES, Running, Tracer
from marl_parallel.types import EnvError, NotReadyInTime, ParallelEnvError, Stats, WorkerStats, WorkerTimeout

ADVICE = ', or pass on_error="restart" to go on with a fresh environment'
_NO_LEFTOVERS: Mapping[int, Any] = {}
_WAITING_FOR = {message: f"waiting for {message.name.lower()}" for message in Message}  # names of slices in a trace
_FIRST_WAIT_S = 0.02  # for the replies to a step of all environments, before extensions look at the time
_CLOSE_IN_LINE_WITHIN_S = 1.0
_INTERRUPTED_WITHIN_S = 0.5  # the least time that `close` waits for a thread that it has interrupted in a call


class Pool(Source):
    """The workers of one `ParallelEnv`, with a slot for each environment.

    Args:
        backend: Started by the caller before the first request; closed here.
        shares: The environments that each worker has at first.

    Attributes:
        queues: The queue of requests of each worker.
        called: When the present or latest call began.
        survives_faults: Whether an extension replaces workers that are gone.
        advice: The advice about restarts in errors.
        tracer: Stores slices of calls and of workers; None if no trace is recorded.
        latest: By environment, the pickled leftovers of its latest record that had any.
        replaced: By environment, the pickled `Snapshot` that the caller has received in place of the record.
        unfinished: By environment, the pickled leftovers of the last step of an episode, while its automatic reset runs
            or after that has failed; only where there are some.
    """

    def __init__(self, backend: Backend, shares: Sequence[range]) -> None:
        super().__init__()
        self.name = f"a {type(backend).__name__}"
        self.backend, self.shares, self.clock = backend, shares, backend.clock
        self.slots = [Slot(env_id, worker) for worker, share in enumerate(shares) for env_id in share]
        self.queues = {worker: WorkerQueue(share, worker, share) for worker, share in enumerate(shares)}
        self.batch_size = len(self.slots)  # any number of results may arrive at once
        self.called = 0.0
        self.in_flight = 0  # how many environments have been sent and not received
        self.survives_faults = False
        self.advice = ADVICE
        self.seeds_stale = True
        self.tracer: Tracer | None = None
        self.closed = False
        self.freed = False  # whether everything has been freed
        self._final_stats: Stats | None = None  # once everything has been freed
        self._memory_dropped = False
        self._set_extensions([])
        self._past = [WorkerStats()] * len(shares)  # of workers that have been removed
        self._step_all = dict.fromkeys(range(len(shares)), STEP_ALL)
        self._done = 0  # how many slots are done
        self._by_worker: Mapping[int, Request] = {}  # a step of which only `WorkerQueue.posted` is recorded
        self.latest: dict[int, bytes] = {}
        self.replaced: dict[int, bytes] = {}
        self.unfinished: dict[int, bytes] = {}
        self._results: dict[int, Any] = {}  # of `execute`, by environment
        self._errors: list[ParallelEnvError] | None = None  # of faults that the present `execute` dealt with
        self._message = Message.CALL  # of the requests of the present `execute`
        self._counting = threading.RLock()  # held while statistics move from an ending worker: others may read them

    def extend(self, *extensions: Extension) -> None:
        """Add extensions."""
        self._set_extensions([*self._extensions, *extensions])

    def _set_extensions(self, extensions: list[Extension]) -> None:
        self._extensions, self._hooks = extensions, Hooks(extensions)
        self._at_begin = self._hooks.of(Extension.begin)
        self._watchers = self._hooks.with_any(Extension.before_send, Extension.on_result)
        self._posters = [one for one in self._hooks.with_any(Extension.before_post) if one not in self._watchers]

    def check_resets(self, env_ids: Sequence[int]) -> None:
        """Any environments can be reset at once."""

    # -- requests of the caller ------------------------------------------------------------------------------------

    def send(self, message: Message, env_ids: Sequence[int], payloads: Any = None, *, together: bool = False) -> None:
        """Send `STEP` or `RESET` to environments that are not in flight, and return.

        `payloads` are pickled, by environment. With `together`, all results are received at once, which is faster.
        """
        self.in_call(f"send {message.name.lower()}", self._send, message, env_ids, payloads, together)

    def recv(
        self,
        at_least: int,
        timeout: float | None = None,
        env_ids: Sequence[int] | None = None,
        *,
        window: float | None = None,
    ) -> Results:
        """Wait for the results of `at_least` environments, and take all that have come; or wait for all of `env_ids`.

        First wait up to `window` seconds for all in flight; after that, for `at_least`.

        Raises:
            TimeoutError: Fewer results came within `timeout` seconds. Nothing is lost.
            ParallelEnvError: A fault; everything has been closed.
            ClosedEnvironmentError: Another thread has closed everything.
        """
        slots = self.slots if env_ids is None else [self.slots[env_id] for env_id in env_ids]
        results: Results | None = self.in_call("waiting", self._recv, at_least, timeout, slots, window or 0.0)
        if results is None:
            raise NotReadyInTime(
                f"expected at least {at_least} environments to be ready within {timeout:g} s, got "
                f"{sum(slot.state is State.DONE for slot in slots)}. Nothing is lost: call recv() again"
            )
        return results

    def run(self, message: Message, env_ids: Sequence[int], payloads: Any = None) -> Mapping[int, Any]:
        """`send` and `recv` in one call, while nothing is in flight; returns the leftovers of the results.

        A step of all environments is the most frequent call. Unless an extension sees it, it is recorded by worker,
        and in slots only if a reply is not `STEPPED`, or does not come within the wait that follows. The frame is the
        same as in `in_call`.
        """
        if self.tracer is not None and (context := self.tracer.during(_WAITING_FOR[message])):
            with context:
                return self.run(message, env_ids, payloads)
        if self.closed:
            self.check_open()
        self.called = self.clock()
        try:
            for begin in self._at_begin:
                begin(self.called)
            requests, queues = self._step_all, self.queues
            by_worker = message is Message.STEP and not payloads and len(env_ids) == self.batch_size
            for one in self._watchers:  # a loop is quicker than `any`
                if one.sees_steps:
                    by_worker = False
            for queue in queues.values():
                if queue.requests:
                    by_worker = False
            if not by_worker or self.replaced:
                self._send(message, env_ids, payloads, together=True)
                return self._all_leftovers()
            for one in self._posters:
                if one.sees_steps:
                    for worker, request in requests.items():
                        one.before_post(worker, request)
            for worker in requests:
                queues[worker].posted += 1
            self._by_worker = requests
            if self.backend.step_all(requests, _FIRST_WAIT_S) and not self.closed:
                self._by_worker = _NO_LEFTOVERS
                return _NO_LEFTOVERS
            return self._finish_run(requests)
        except BaseException as error:
            self._close_after(error)
            raise

    def execute(self, requests: Mapping[int, Request], owner: OnReply | None = None) -> dict[int, Any]:
        """Carry out requests other than steps and resets, by worker, while nothing is in flight.

        Returns the results by environment, unless an `owner` gets the replies. If this raises a `ParallelEnvError`,
        everything has been closed, or the environments that failed have been rebuilt.
        """
        what = _WAITING_FOR[next(iter(requests.values())).message] if requests else ""
        results: dict[int, Any]
        results, errors = self.in_call(what, self._execute, requests, owner)
        if errors:
            raise errors.pop(0)  # its environments have been rebuilt; no variable holds it, as `fault` says
        return results

    def execute_in(self, message: Message, env_ids: Iterable[int], payload: Any = None) -> dict[int, Any]:
        """`execute` one request in environments; `payload` is the same for all, or a dict by environment."""
        return self.execute(self.requests(message, env_ids, payload))

    def begin_in(self, message: Message, env_ids: Iterable[int], payload: Any = None) -> None:
        """Begin a request as `execute_in` does, and return; the next call must be `finish_in`."""
        self.in_call("", self._begin, self.requests(message, env_ids, payload), None)

    def finish_in(self, timeout: float | None) -> dict[int, Any]:
        """Wait for the results of `begin_in`; `TimeoutError` after `timeout` seconds, which loses nothing."""
        results = self.in_call("waiting", self._finish_all, timeout)
        if results is None:
            raise NotReadyInTime(
                f"the calls did not finish within {timeout:g} s. Nothing is lost: call call_wait() again"
            )
        by_env, errors = results
        if errors:
            raise errors.pop(0)  # as in `execute`
        return cast("dict[int, Any]", by_env)

    def execute_in_each_worker(self, message: Message, payload: Any = None) -> dict[int, Any]:
        """`execute` one request in one environment of each worker."""
        return self.execute(
            {worker: Request(message, share[:1], payload) for worker, share in self.present_shares().items()}
        )

    def in_call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that changes the state of the pool, as a part `name` of the caller's call.

        Close everything if it raises. `guard` makes sure that no other call is in progress.
        """
        if self.tracer is not None and name and (context := self.tracer.during(name)):
            with context:
                return self.in_call(name, function, *arguments)
        if self.closed:
            self.check_open()
        self.called = self.clock()  # the time of the caller counts
        try:
            for begin in self._at_begin:
                begin(self.called)
            return function(*arguments)
        except BaseException as error:
            self._close_after(error)
            raise

    # -- sending and receiving -------------------------------------------------------------------------------------

    def _finish_run(self, requests: Mapping[int, Request]) -> Mapping[int, Any]:
        """Receive a step of all environments that is recorded by worker alone."""
        for worker, request in requests.items():
            queue = self.queues[worker]
            queue.requests.append(Pending(request, queue.posted, self.called, None, True))
            queue.since = self.called
        self._by_worker = _NO_LEFTOVERS
        replies = self.backend.wait(self._patience(None), len(requests))
        leftovers: dict[int, bytes] = {}
        complete, are_seen = len(replies) == len(requests) and not self.closed, self._hooks.of(Extension.on_result)
        for _, reply in replies:
            if reply is not STEPPED:
                complete = complete and not (are_seen or isinstance(reply, Lost) or reply.failures or not reply.last)
                leftovers.update(reply.results if complete and isinstance(reply, Reply) else {})
        if complete:
            for worker in requests:
                self.queues[worker].requests.clear()
            if not leftovers:
                return _NO_LEFTOVERS
            self.latest.update(leftovers)
            return {env_id: self.read(env_id, result) for env_id, result in leftovers.items()}
        # Without `before_send`: no extension sees steps now, so none holds one back.
        self._mark_sent(Message.STEP, range(self.batch_size))
        self.apply(replies)
        self._look()
        return self._all_leftovers()

    def _all_leftovers(self) -> Mapping[int, Any]:
        results = self._recv(self.in_flight, None, self.slots)
        assert results is not None  # there is no timeout
        leftovers: Mapping[int, Any] = results.leftovers
        return leftovers

    def _send(self, message: Message, env_ids: Sequence[int], payloads: Any, together: bool) -> None:
        self._mark_sent(message, env_ids)
        for before_send in self._hooks.of(Extension.before_send):
            env_ids = before_send(message, env_ids, payloads)
        alone = together and not any(queue.requests for queue in self.queues.values())
        self.post(self.requests(message, env_ids, payloads, each=not together), together=alone)

    def pass_on(self, extension: Extension, message: Message, env_ids: Sequence[int], payloads: Any) -> Sequence[int]:
        """Pass on a request that an extension held back; returns the env ids that later extensions let go out."""
        for later in self._extensions[self._extensions.index(extension) + 1 :]:
            env_ids = later.before_send(message, env_ids, payloads)
        return env_ids

    def _mark_sent(self, message: Message, env_ids: Sequence[int]) -> None:
        for env_id in env_ids:
            slot = self.slots[env_id]
            slot.request, slot.state = message, State.BUSY
        self.in_flight += len(env_ids)

    def requests(
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

    def post(
        self,
        requests: Mapping[int, Request],
        owner: OnReply | None = None,
        *,
        is_awaited: bool = True,
        together: bool = False,
    ) -> None:
        """Post requests, by worker; the replies go to `owner`, or to the slots or `execute`.

        Calls other than steps and resets wait for these requests if `is_awaited`.
        """
        if not requests:
            return
        now, posted = self.clock(), {}
        for worker, request in requests.items():
            for before_post in self._hooks.of(Extension.before_post):
                request = before_post(worker, request)
            posted[worker], queue = request, self.queues[worker]
            if not queue.requests:
                queue.since = now
            queue.requests.append(Pending(request, queue.posted + 1, now, owner, is_awaited))
            queue.posted += len(request.env_ids) if request.each and request.env_ids is not None else 1
        self.backend.post(posted, together=together)

    def _owes_extensions(self) -> bool:
        """Whether a worker owes a reply to an extension."""
        return any(one.owner is not None for queue in self.queues.values() for one in queue.requests)

    def _recv(self, at_least: int, timeout: float | None, slots: Sequence[Slot], window: float = 0.0) -> Results | None:
        """The results of all slots, or of some that are all waited for; None after the timeout."""
        if window:
            began = self.clock()
            self._wait_for(self.in_flight, window if timeout is None else min(window, timeout), self.slots)
            timeout = None if timeout is None else max(timeout - (self.clock() - began), 0.0)
        if not self._wait_for(at_least, timeout, slots):
            return None
        done = [slot for slot in slots if slot.state is State.DONE]
        done.sort(key=lambda slot: slot.completed)  # slots with equal times are sorted by number
        resets = [slot.env_id for slot in done if slot.request is Message.RESET]
        leftovers = {slot.env_id: slot.result for slot in done if slot.result is not None}
        for slot in done:
            slot.request, slot.state, slot.result = None, State.IDLE, None
        self.in_flight -= len(done)
        self._done -= len(done)
        return Results(tuple([slot.env_id for slot in done]), resets, leftovers)

    def _wait_for(self, at_least: int, timeout: float | None, slots: Sequence[Slot]) -> bool:
        """Wait for so many results of all slots, or of some that are all waited for; False after the timeout."""
        deadline = None if timeout is None else self.clock() + timeout
        ids = None if slots is self.slots else {slot.env_id for slot in slots}
        while True:
            queues = [*self.queues.values()]  # with workers that the slots have left
            missing = at_least - (self._done if ids is None else sum([slot.state is State.DONE for slot in slots]))
            patience = None if deadline is None else max(deadline - self.clock(), 0.0)
            batches = sum([queue.one_reply if ids is None else queue.owes_one_reply(ids) for queue in queues])
            if ids is not None and missing <= 0 and not batches:
                return True
            replies = 1 if self._owes_extensions() else max(min(missing, batches or missing), 1)
            self.wait_once(patience if missing > 0 or batches else 0.0, replies)
            if ids is None and self._done >= at_least and not sum([queue.one_reply for queue in self.queues.values()]):
                return True
            if patience == 0.0:
                return False

    def _execute(
        self, requests: Mapping[int, Request], owner: OnReply | None
    ) -> tuple[dict[int, Any], list[ParallelEnvError]]:
        self._begin(requests, owner)
        done = self._finish_all(None)
        assert done is not None  # there is no timeout
        return done

    def _begin(self, requests: Mapping[int, Request], owner: OnReply | None) -> None:
        while self._awaited():
            self.wait_once(None, 1)
        self._results, self._errors = {}, []
        self._message = next(iter(requests.values())).message if requests else Message.CALL
        self.post(requests, owner, together=True)

    def _finish_all(self, timeout: float | None) -> tuple[dict[int, Any], list[ParallelEnvError]] | None:
        """Wait for the requests of `_begin`; None after the timeout."""
        deadline, patience = None if timeout is None else self.clock() + timeout, None
        while busy := self._awaited():
            if patience == 0.0:
                return None
            patience = None if deadline is None else max(deadline - self.clock(), 0.0)
            self.wait_once(patience, 1 if self._owes_extensions() else busy)
        errors = self._errors
        assert errors is not None
        results, self._results, self._errors = self._results, {}, None
        if errors:
            return {}, errors
        return {env_id: self.read(env_id, results[env_id], self._message) for env_id in sorted(results)}, errors

    def _awaited(self) -> int:
        """How many workers have requests for which calls wait."""
        return sum(any(one.is_awaited for one in queue.requests) for queue in self.queues.values())

    # -- the loop --------------------------------------------------------------------------------------------------

    def wait_once(self, patience: float | None, at_least: int) -> None:
        """Wait for `at_least` replies and apply them; at most `patience` seconds, or until an extension must look."""
        self.apply(self.backend.wait(self._patience(patience), at_least))
        self._look()
        self._check_not_closed()  # by `on_restart`, say

    def _patience(self, limit: float | None) -> float | None:
        """How long to wait at most, as far as extensions and a limit say."""
        now = self.clock()
        for ask in self._hooks.of(Extension.patience):
            seconds = ask(now)
            if seconds is not None and (limit is None or seconds < limit):
                limit = seconds
        return None if limit is None else max(limit, 0.0)

    def _look(self) -> None:
        for look in self._hooks.of(Extension.look):
            look(self.clock())

    def apply(self, replies: Sequence[tuple[int, Reply | Lost]]) -> None:
        """Apply replies to slots: results first, then failures in the order of environments, then lost workers."""
        failures: dict[int, Failure] = {}
        for worker, reply in replies:
            queue = self.queues.get(worker)
            if isinstance(reply, Lost) or queue is None or not queue.requests:
                continue
            request, owner = queue.requests[0].request, queue.requests[0].owner
            if reply.last:
                queue.requests.popleft()
                if queue.requests:  # the worker could begin the next one then, which may be long ago
                    queue.since = max(reply.completed or self.clock(), queue.requests[0].posted)
            if owner is not None:
                owner(worker, reply, failures)
                continue
            failures.update(reply.failures)
            if reply.request is Message.STEP or reply.request is Message.RESET:
                self._apply_results(worker, request, reply, failures)
            else:
                self._results.update(reply.results)
        self._check_not_closed()
        for env_id in sorted(failures):
            self._check_not_closed()  # by `on_restart`
            failure, worker = failures[env_id], self.slots[env_id].worker
            running = Running(env_id, failure.activity, 0.0, inside=True)
            error = reports.env_error(env_id, worker, failure, self.advice)
            try:
                self.fault(Fault(worker, env_id, error, running, failure.kinds, failure))
            finally:
                del error  # as `fault` says
        for worker, reply in replies:
            if isinstance(reply, Lost) and worker in self.queues:
                self._check_not_closed()
                queue = self.queues[worker]
                share, last = queue.environments, queue.running(self.backend.statuses[worker])
                tail = self.backend.log_tail(worker)
                crash = reports.crashed(worker, share, reply, last, self.advice, tail)
                try:
                    self.fault(Fault(worker, None, crash, last))
                finally:
                    del crash

    def _check_not_closed(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("the environments were closed by another thread")

    def _apply_results(self, worker: int, request: Request, reply: Reply, failures: Mapping[int, Failure]) -> None:
        results = reply.results
        for env_id, leftovers in results.items():
            if env_id in reply.failures or reply.env_ids == ():  # the automatic reset failed or still runs
                self.unfinished[env_id] = leftovers
        env_ids = request.env_ids if reply.env_ids is None else reply.env_ids
        for env_id in self.queues[worker].share if env_ids is None else env_ids:
            slot = self.slots[env_id]
            if env_id not in failures and self.expects_result(slot):
                self.take_result(slot, results.get(env_id), reply.completed)

    def expects_result(self, slot: Slot) -> bool:
        """Whether the pool waits for a result of this slot from its worker."""
        return slot.state is State.BUSY and not slot.is_held

    def take_result(self, slot: Slot, leftovers: bytes | None, completed: float) -> None:
        """Take the result of a step or reset, with its pickled leftovers, unless an extension holds it back."""
        result = leftovers
        if self.unfinished:
            self.unfinished.pop(slot.env_id, None)
        if leftovers is not None:
            self.latest[slot.env_id] = leftovers
            try:
                result = self.read(slot.env_id, leftovers, slot.request or Message.STEP)
            except EnvError as error:
                self.unreadable(slot, error)
                return
        for on_result in self._hooks.of(Extension.on_result):
            result = on_result(slot, leftovers, result, completed)
            if result is HELD:
                return
        self.finish(slot, completed, result)

    def finish(self, slot: Slot, completed: float, result: Any) -> None:
        """Note that the result of a slot has come: its unpickled leftovers, or a `Snapshot`."""
        self._done += slot.state is not State.DONE
        if type(result) is Snapshot:
            self.replaced[slot.env_id] = dumps(result)
        elif self.replaced:
            self.replaced.pop(slot.env_id, None)
        slot.state, slot.completed, slot.result = State.DONE, completed, result

    def read(self, env_id: int, result: Any, message: Message = Message.STEP) -> Any:
        """Unpickle the result of a request `message`; bytes are a pickled value of the simulator."""
        if type(result) is not bytes:
            return result
        try:
            return loads(result)
        except Exception as error:
            method = "constructor" if message is Message.ACCESS else message.name.lower()
            raise reports.unreadable(env_id, self.slots[env_id].worker, method, error) from error

    # -- faults ----------------------------------------------------------------------------------------------------

    def fault(self, fault: Fault) -> None:
        """Let an extension deal with a fault, or raise its error.

        No caller may hold the error in a variable when this raises: its traceback would refer to the caller's frame,
        and the cycle would keep everything from being freed.
        """
        for on_fault in self._hooks.of(Extension.on_fault):
            if on_fault(fault):
                return
        try:
            raise fault.error
        finally:
            del fault

    def unreadable(self, slot: Slot, error: EnvError) -> None:
        """The result of an environment cannot be unpickled."""
        kinds = [name_of(kind) for kind in type(error.__cause__).__mro__]
        try:
            self.fault(Fault(slot.worker, slot.env_id, error, None, kinds))
        finally:
            del error  # as `fault` says

    def mark_handled(self, error: ParallelEnvError) -> None:
        """Record that environments are rebuilt after a fault; a call or restart that waits for them raises it."""
        self.seeds_stale = True
        if self._errors is not None:
            self._errors.append(error)

    def slots_of(self, worker: int) -> list[Slot]:
        return [self.slots[env_id] for env_id in self.queues[worker].share]

    def finished_before(self, worker: int, running: Running | None) -> Sequence[int]:
        """The environments of a batch that a worker had finished when it failed."""
        queue, status = self.queues[worker], self.backend.statuses[worker]
        if not queue.one_reply or status.parts < queue.requests[0].number:  # it had not begun
            return ()
        env_ids = queue.requests[0].request.env_ids
        env_ids = queue.share if env_ids is None else env_ids
        last = status.settled if running is None else running.env_id
        if last not in env_ids:
            return ()
        return env_ids[: env_ids.index(last) + (running is None)]

    def announce_rebuild(self, slots: Sequence[Slot], ends: Sequence[int]) -> None:
        """Call `on_rebuild`: environments are new, or will be; the caller still gets `ends` ends of older episodes."""
        for on_rebuild in self._hooks.of(Extension.on_rebuild):
            on_rebuild(slots, ends)
        self.seeds_stale = True

    def saved_by_extensions(self, slot: Slot) -> dict[str, Any]:
        """The states of extensions for an environment, by `Extension.saved_as`."""
        return {one.saved_as: one.save(slot) for one in self._extensions if one.saved_as}

    def load_extensions(self, slot: Slot, saved: Mapping[str, Any]) -> None:
        """Restore a result of `saved_by_extensions`."""
        for one in self._extensions:
            one.load(slot, saved.get(one.saved_as), self.latest.get(slot.env_id))
        self.seeds_stale = True

    # -- workers that come and go ----------------------------------------------------------------------------------

    def present_shares(self) -> dict[int, Sequence[int]]:
        """The environments of each worker; while environments move, more workers than usual."""
        return {worker: queue.share for worker, queue in self.queues.items() if queue.share}

    def position(self, worker: int) -> int:
        """The index of a worker in statistics and traces: its number, or the number of the worker that it replaced."""
        return self.queues[worker].position

    def set_share(self, worker: int, share: Sequence[int]) -> None:
        """Set the environments of a worker."""
        queue = self.queues[worker]
        queue.share = share
        step = STEP_ALL if tuple(share) == tuple(queue.built) else Request(Message.STEP, share)
        others = {other: request for other, request in self._step_all.items() if other != worker}
        self._step_all = {**others, worker: step} if share else others

    def replace(self, worker: int) -> None:
        """Start a new worker in the place of a worker that is gone."""
        queue = self.queues[worker]
        queue.requests.clear()
        queue.posted = 0
        with self._counting:
            queue.past = self._done_by(worker)
            self.backend.start_worker(worker, queue.built)
        self.set_share(worker, queue.share)
        if self.tracer is not None:
            self.tracer.mark_replaced(queue.position)

    def add(self, worker: int, env_ids: Sequence[int], beside: int) -> None:
        """Start one more worker, to which environments may move from the worker `beside`; the backend may raise."""
        self.backend.start_worker(worker, env_ids, beside)
        if self.closed:  # by another thread
            self.backend.remove(worker, kill=True)
            self.check_open()
        self.queues[worker] = WorkerQueue((), self.queues[beside].position, env_ids)

    def remove(self, worker: int, *, kill: bool) -> bool:
        """Free a worker without environments; returns False if it still runs and `kill` is False."""
        if not self.backend.remove(worker, kill=kill):
            return False
        with self._counting:
            done, queue = self._done_by(worker), self.queues.pop(worker)
            self._past[queue.position] += done
        return True

    # -- statistics ------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> tuple[int, ...]:
        """The environments in flight."""
        return tuple([slot.env_id for slot in self.slots if slot.request is not None])

    def stats(self) -> Stats:
        """Counts and times so far, including workers that have been replaced."""
        if self._final_stats is not None:
            return self._final_stats
        if not self.closed:
            self.backend.look()
        with self._counting:  # another thread may have closed everything meanwhile
            return self._final_stats or Stats.of(map(self._stats_of, range(len(self.shares))))

    def _stats_of(self, position: int) -> WorkerStats:
        workers = [worker for worker, queue in [*self.queues.items()] if queue.position == position]
        done = sum(map(self._done_by, workers), self._past[position])
        return sum([stats(self.shares[position]) for stats in self._hooks.of(Extension.stats)], done)

    def _done_by(self, worker: int) -> WorkerStats:
        """The steps, resets and seconds of a worker, and of the workers that it replaced after faults."""
        return self.queues[worker].past + self.backend.statuses[worker].stats

    def memory(self) -> list[int | None]:
        """Bytes of memory of each worker and its child processes; None if unknown."""
        found: list[int | None] = [None] * len(self.shares)
        for worker, queue in [*self.queues.items()]:
            nbytes = None if self.closed else self.backend.memory(worker)
            if nbytes is not None:
                found[queue.position] = nbytes + (found[queue.position] or 0)
        return found

    # -- the end ---------------------------------------------------------------------------------------------------

    def _close(self, ask: bool | Collection[int], timeout: float) -> EnvError | None:
        """Close all environments, end all workers and free everything.

        With `ask`, all workers, or these workers, close their environments first, within `timeout` seconds. Returns the
        first error that an environment raised while closing. Resources are freed in any case. If Ctrl-C interrupts this
        call, the next one frees the rest. If another thread does not leave its call in time, everything is freed
        nevertheless.
        """
        if self.freed:
            return None
        deadline = self.clock() + timeout
        ask = False if self.closed else ask  # a close that Ctrl-C has interrupted: the rest is freed now
        is_alone, error, patience = False, None, 0.0  # workers without a CLOSE do not end by themselves
        try:
            self.closed = True
            for status in getattr(self.backend, "statuses", ()):  # a backend that did not start has none
                status.discard()
            self.backend.interrupt()
            # A thread that waits for results leaves soon; a thread in `on_restart` or a log handler may not.
            seconds = max(timeout, _INTERRUPTED_WITHIN_S)
            is_alone = self._wait_for_call(seconds)
            if not is_alone:
                logger.warning("%s", reports.in_use(seconds, self.backend.capabilities.can_kill))
            elif ask:
                error = self._close_environments(deadline, self.queues if ask is True else ask)
                patience = max(deadline - self.clock(), 0.0) if ask is True else 0.0
        except KeyboardInterrupt as interrupt:
            if is_alone:
                self._on_error(interrupt)
            raise
        finally:
            self._free(patience)
        return error

    def _free(self, patience: float) -> None:
        """End all workers, after `patience` seconds to end by themselves, and free everything."""
        self.closed = True
        stuck = self.backend.stop(patience)
        # A signal handler may close in the middle of a call, whose `wait` must not go on for ever.
        self.backend.interrupt()
        self.freed = True
        if self.tracer is not None:
            try:
                self.tracer.finish()
            except OSError as unwritten:  # closing goes on
                logger.warning("the trace could not be written to %s: %s", self.tracer.path, unwritten)
        for worker in stuck:
            logger.warning(
                "worker %d could not be ended and keeps running, because a thread cannot be killed. Its stack:\n%s",
                worker, self.backend.stack(worker),
            )  # fmt: skip
        if hasattr(self.backend, "statuses"):  # else the backend did not start
            self._final_stats = self.stats()
        self._set_extensions([])  # extensions refer to this object

    def drop_memory(self) -> None:
        if self._final_stats is None:  # in a forked child process
            self._final_stats = self.stats()
        self.latest.clear()
        self.replaced.clear()
        self.unfinished.clear()
        for slot in self.slots:
            slot.owed = slot.owed_if_ended = None
        with self._counting:
            if not self._memory_dropped:
                self._memory_dropped = True
                self.backend.drop_memory()

    def _close_environments(self, deadline: float, workers: Collection[int]) -> EnvError | None:
        for worker, queue in [*self.queues.items()]:
            has_successors = any(self.slots[env_id].successor is not Successor.NONE for env_id in queue.built)
            if not queue.share and has_successors:  # it may be in a constructor
                self.remove(worker, kill=True)
        pending = {worker for worker, queue in self.queues.items() if queue.share and worker in workers}
        failures: dict[int, Failure] = {}
        for worker in pending:
            self.queues[worker].requests.clear()  # workers skip discarded requests
        self.post({worker: Request(Message.CLOSE) for worker in pending})
        while pending and (remaining := deadline - self.clock()) > 0:
            limits = [
                remaining,
                *[seconds for ask in self._hooks.of(Extension.patience) if (seconds := ask(self.clock())) is not None],
            ]
            for worker, reply in self.backend.wait(max(min(limits), 0.0)):
                if isinstance(reply, Lost):
                    pending.discard(worker)
                elif reply.request is Message.CLOSE:  # other replies were in flight, and are dropped
                    pending.discard(worker)
                    self.queues[worker].requests.clear()
                    failures.update(reply.failures)
                    self.add_last_slices(worker, reply)
            self._look()
        if pending:
            logger.warning(
                "worker %s did not close in time and was killed: %s",
                " and ".join(map(str, sorted(pending))),
                ", ".join(reports.environments(self.queues[worker].share) for worker in sorted(pending)),
            )
        if not failures:
            return None
        first = min(failures)
        return reports.env_error(first, self.slots[first].worker, failures[first])

    def add_slices(self, worker: int, slices: array[float]) -> None:
        """Add the slices of a worker to the trace, if one is recorded."""
        if self.tracer is not None:
            self.tracer.add(self.position(worker), slices, self.backend.statuses[worker].ahead)

    def add_last_slices(self, worker: int, reply: Reply) -> None:
        """Add the slices that a worker has sent when it had closed its environments."""
        if SLICES in reply.results:
            self.add_slices(worker, reply.results[SLICES])

    def _close_after(self, error: BaseException) -> None:
        """Close everything after an error, unless another thread has done so."""
        if isinstance(error, ClosedEnvironmentError):
            return
        while_closing, in_line = None, self.backend.in_line  # only a close frees what simulators hold in this process
        try:
            self.record_cause(error)
            self._on_error(error)
        finally:  # also after a second Ctrl-C
            if isinstance(error, WorkerTimeout):
                while_closing = self.close(ask=in_line, timeout=_CLOSE_IN_LINE_WITHIN_S if in_line else 0.0)
            elif isinstance(error, ParallelEnvError):
                while_closing = self.close()
            else:  # interrupted (Ctrl-C): it is unknown which replies will still come
                while_closing = self.close(ask=in_line if self.backend.capabilities.can_kill else True, timeout=1.0)
        if while_closing is not None:
            logger.warning("closing the environments after an error failed too: %s", while_closing)

    def _on_error(self, error: BaseException) -> None:
        for on_error in self._hooks.of(Extension.on_error):
            on_error(error)

    def check(self) -> None:
        """Raise `AssertionError` if values of the pool or its extensions do not fit each other.

        It holds before each wait for replies, and between two calls. Tests call it.
        """
        if self.closed:
            return
        slots, queues = self.slots, self.queues
        assert self.in_flight == sum([slot.state is not State.IDLE for slot in slots]), f"in flight: {self.in_flight}"
        assert self._done == sum([slot.state is State.DONE for slot in slots]), f"done: {self._done}"
        shares = [(env_id, worker) for worker, queue in queues.items() for env_id in queue.share]
        assert sorted(shares) == [(slot.env_id, slot.worker) for slot in slots], (
            f"the environments of workers: {shares}"
        )
        for worker, queue in queues.items():
            current = self.backend.capabilities.shares_memory
            owes = bool(queue.requests) or worker in self._by_worker
            queue.check(self.backend.statuses[worker], self.clock(), status_is_current=current, owes=owes)
            step = self._step_all.get(worker)  # without env ids, all environments for which the worker was started
            stepped = () if step is None else queue.built if step.env_ids is None else step.env_ids
            assert [*stepped] == [*queue.share], f"worker {worker} steps {[*stepped]} of {[*queue.share]}"
        for slot in slots:
            slot.check()
            is_owed = not self.expects_result(slot) or queues[slot.worker].owes(slot.env_id, None, STEPS_AND_RESETS)
            assert is_owed, f"nobody owes the result of {slot}"
            if slot.state is State.DONE and not slot.skips:
                is_replaced = slot.env_id in self.replaced
                assert is_replaced == (type(slot.result) is Snapshot), f"replaced is {is_replaced}: {slot}"
        names = [name for one in self._extensions if (name := type(one).__name__) in ORDER]
        assert names == sorted(names, key=ORDER.index), f"the order of extensions: {names}"
        for check in self._hooks.of(Extension.check):
            check()

    def abandon(self) -> None:
        """In a forked child process: count as closed, and touch nothing that the parent still uses."""
        self.mark_forked()
        self.closed = self.freed = True
        self.backend.abandon()
