"""The caller's end of an actor of a Ray cluster.

    RayBackend --- one call per actor and batch: requests, all actions in one array ---> RayActor    (ray_actor.py)
               <-- all replies that are there, the results in one array ----------------
               --- post, look, stack, end, ...: at any time ---------------------------->

An actor has at most one `exchange` in flight, which returns when there are enough replies. Requests that come meanwhile
are sent with `post`. Replies that come while a result travels go with the next one, so that their number per call
grows with their rate. Each end has a block of its own with the same layout; record slices carry what one end has
written to the other.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import Any

import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from marl_parallel.backends.ray_actor import ActorResults, Order, Packed, unpack
from marl_parallel.backends.ray_placement import Bundle
from marl_parallel.core.block.records import RecordSlices
from marl_parallel.core.messages import STEPPED, Lost, Message, Reply, Request
from marl_parallel.core.worker_status import WorkerStatus

__doctest_requires__ = ["ray"]

ANSWERS_WITHIN_S = 5.0
_BECAUSE = re.compile(r"\bbecause (.+?)[.](?:\s|$)")


class ActorState:
    """The caller's state of an actor and its workers.

    Attributes:
        node: The id of its node; empty until it has started.
        starting: A reference to the result of its start; None once it has started, or is given up.
        ready: When it was up, in seconds of this clock.
        since: When its start was requested for a worker, or the start of the first actor that it replaces.
        is_standby: Whether it was started beside others, so that the batch goes on if it cannot start.
        waiting: Requests to send once it has started, and whether the caller waits for all of them.
        in_flight: A reference to the result of the exchange; None without one.
        waits_for_more: Whether the exchange waits for more than one reply.
        orders: How many orders were sent.
        pending: By worker, the requests that it has not replied to.
        started: How often each worker was started.
        closing: Workers that have received a CLOSE request.
        lost: Why the actor is gone; None while it lives.
        lost_at: When its loss was noticed, in seconds of this clock.
    """

    def __init__(self, handle: Any, bundle: Bundle, workers: Iterable[int] = ()) -> None:
        self.handle, self.bundle = handle, bundle
        self.node = ""
        self.starting: Any = None
        self.ready = math.inf
        self.since = time.monotonic()
        self.is_standby = False
        self.waiting: list[tuple[dict[int, Request], bool]] = []
        self.in_flight: Any = None
        self.waits_for_more = False
        self.orders = 0
        self.pending: dict[int, deque[Request]] = {worker: deque() for worker in workers}
        self.started: Counter[int] = Counter()
        self.closing: set[int] = set()
        self.lost: str | None = None
        self.lost_at = 0.0
        self.clock_offset = math.inf  # this machine's clock minus the actor's, in seconds: an upper bound
        self._exchange = handle.exchange.options(concurrency_group="exchange").remote
        self._post = handle.post.options(concurrency_group="control", num_returns=0).remote
        self._seen = 0  # the number of the last exchange whose results are here
        self._starts: list[tuple[int, int, Sequence[int]]] = []  # of workers, to be sent with the next order
        self._completed: dict[int, float] = {}  # by worker: when its last reply was completed, by this clock
        self._memory: dict[int, tuple[Any, int | None]] = {}  # by worker: reference to the next answer, the last one

    @property
    def owes(self) -> int:
        """How many requests its workers have not replied to."""
        return sum(map(len, self.pending.values()))

    @property
    def is_up(self) -> bool:
        return self.lost is None and self.starting is None

    def control(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method beside the exchange; returns a reference to its result."""
        return getattr(self.handle, method).options(concurrency_group="control").remote(*arguments, **keywords)

    # -- workers ---------------------------------------------------------------------------------------------------

    def start_worker(self, worker: int, share: Sequence[int]) -> None:
        """Start a worker, or another one in its place, with the next order."""
        self.forget(worker)
        if not self.pending:
            self.since = time.monotonic()
        self.started[worker] += 1
        self._starts.append((worker, self.started[worker], share))
        self.pending[worker] = deque()

    def forget(self, worker: int) -> None:
        """Forget a worker, with its starts and requests that have not been sent."""
        self._starts = [start for start in self._starts if start[0] != worker]
        for requests, _ in self.waiting:
            requests.pop(worker, None)
        self.pending.pop(worker, None)
        self._memory.pop(worker, None)
        self.closing.discard(worker)

    def hand_over(self, new: ActorState, workers: Sequence[int]) -> None:
        """Hand some workers, with their starts and requests, to another actor that has not started either."""
        chosen = {*workers}
        new.since = min(self.since, new.since)
        new.started.update({worker: self.started[worker] for worker in workers})
        new.pending.update({worker: self.pending.pop(worker) for worker in workers})
        new.closing |= self.closing & chosen
        new._starts += [start for start in self._starts if start[0] in chosen]
        self._starts = [start for start in self._starts if start[0] not in chosen]
        for requests, together in self.waiting:
            if of_new := {worker: requests.pop(worker) for worker in workers if worker in requests}:
                new.waiting.append((of_new, together))

    def removed(self, worker: int, *, kill: bool) -> bool:
        """Have a worker end; returns False if it has not ended yet."""
        answer = answer_of(self.control("remove", worker, self.orders, self.started[worker], kill=kill))
        return answer is not False

    def ended(self, worker: int, timeout: float) -> Packed | None:
        """End a worker; returns the packed `ActorResults` with what has not arrived, None if the actor is gone."""
        ended = self.control("end", worker, self.orders, self._seen, self.started[worker])
        packed: Packed | None = answer_of(ended, timeout)
        if packed is not None:
            self.pending[worker].clear()
        return packed

    def memory(self, worker: int) -> int | None:
        """Bytes of memory as of the last call, so that the caller does not wait; the first call for a worker waits."""
        asked, last = self._memory.get(worker, (None, None))
        if asked is None or ray.wait([asked], timeout=0)[0]:
            last = answer_of(asked or self.control("memory", worker))
            self._memory[worker] = self.control("memory", worker), last
        return last

    # -- requests and replies --------------------------------------------------------------------------------------

    def take_requests(self, requests: Mapping[int, Request]) -> None:
        """Queue requests that are to be sent."""
        for worker, request in requests.items():
            self.pending[worker].append(request)
            if request.message is Message.CLOSE:
                self.closing.add(worker)

    def send(self, requests: dict[int, Request], actions: NDArray[Any] | None, together: bool, at_least: int) -> None:
        """Send requests, with an exchange if there is none in flight."""
        self.orders += 1
        order = Order(self.orders, self._starts, requests, actions, together, at_least)
        self._starts = []
        packed = pickle.dumps(tuple(order), pickle.HIGHEST_PROTOCOL)
        if self.in_flight is None:
            self.in_flight, self.waits_for_more = self._exchange(packed), at_least > 1
        else:
            self._post(packed)

    def mark_started(self, node: str, now: float) -> list[tuple[dict[int, Request], bool]]:
        """Mark it as started on a node, at the time `now` there; returns the requests that have waited for it."""
        self.node, self.starting, self.ready = node, None, time.monotonic()
        self.clock_offset = self.ready - now
        waiting, self.waiting = self.waiting, []
        return [(requests, together and len(waiting) == 1) for requests, together in waiting if requests]

    def mark_lost(self, reason: str) -> list[tuple[int, Lost]]:
        """Mark it as lost; returns the losses of its workers with unanswered requests."""
        self.lost, self.lost_at, self.starting, self.in_flight = reason, time.monotonic(), None, None
        busy = [worker for worker, requests in self.pending.items() if requests]
        self.pending.clear()
        return [(worker, Lost(None, "", reason)) for worker in busy]

    def give_up(self, reason: str) -> list[tuple[int, Lost]]:
        """Kill the actor, which could not start; returns the losses of all its workers."""
        ray.kill(self.handle)
        workers = [*self.pending]
        self.mark_lost(reason)
        return [(worker, Lost(None, "", reason)) for worker in workers]

    def receive(
        self, packed: Packed, slices: RecordSlices | None, statuses: Sequence[WorkerStatus]
    ) -> list[tuple[int, Reply | Lost]]:
        """The replies in the result of the exchange; copies its records and statuses."""
        results = unpack(packed)
        self.in_flight, self._seen = None, results.number
        replies = []
        for worker, start, reply in self.copy_from(results, slices, statuses):
            if start != self.started[worker] or worker not in self.pending:
                continue  # from a replaced process, so `end` has returned it; or from a removed worker
            if isinstance(reply, Lost):
                self.pending[worker].clear()
            elif reply.last:
                self.pending[worker].popleft()
            replies.append((worker, reply))
        return replies

    def copy_from(
        self, results: ActorResults, slices: RecordSlices | None, statuses: Sequence[WorkerStatus]
    ) -> list[tuple[int, int, Reply | Lost]]:
        """Copy statuses and records; returns the replies, with this machine's time, and the starts of their workers."""
        self.copy_statuses(results.now, results.statuses, statuses)
        if slices is not None:
            if results.records is not None:
                self._copy_records(results, results.records, slices)
            if results.whole is not None:
                slices.put_records(*results.whole)
        replies: list[tuple[int, int, Reply | Lost]] = []
        for worker, start, reply in results.replies:
            if reply is None:
                reply = STEPPED
            elif not isinstance(reply, Lost):
                # Later than its last one, even if `clock_offset` has decreased since.
                last = math.nextafter(self._completed.get(worker, -math.inf), math.inf)
                reply = reply._replace(completed=max(reply.completed + self.clock_offset, last))
                self._completed[worker] = reply.completed
            replies.append((worker, start, reply))
        return replies

    def copy_statuses(self, now: float, new: Mapping[int, tuple[int, bytes]], statuses: Sequence[WorkerStatus]) -> None:
        """Copy the statuses of its workers, read at the time `now` of its machine's clock."""
        self.clock_offset = min(self.clock_offset, time.monotonic() - now)
        for worker, (start, status) in new.items():
            if worker in self.pending and start == self.started[worker]:
                statuses[worker].copy_from(status, self.clock_offset)

    def _copy_records(self, results: ActorResults, records: NDArray[Any], slices: RecordSlices) -> None:
        """Copy record slices, without those of processes that have been replaced since; `end` has returned these."""
        env_ids = [*chain.from_iterable(results.env_ids)]
        current = [start == self.started[worker] for worker, start, _ in results.replies]
        if not all(current):
            copied = [is_current for is_current, ids in zip(current, results.env_ids) for _ in ids]
            env_ids, records = [*compress(env_ids, copied)], records[copied]
        if env_ids:
            slices.put_results(env_ids, records)


# -- results of Ray ----------------------------------------------------------------------------------------------------


def answer_of(ref: Any, timeout: float | None = ANSWERS_WITHIN_S) -> Any:
    """The result of a call beside the exchange; None if the actor is gone, or does not answer in time."""
    try:
        return ray.get(ref, timeout=timeout)
    except RayTaskError:
        raise
    except RayError:
        return None


def results_of(refs: list[Any], count: int, timeout: float) -> list[tuple[Any, Any]]:
    """Wait for at most `count` results (0: all that are ready); returns references with results or Ray's errors."""
    if count >= len(refs):
        with contextlib.suppress(RayError):  # one is late or lost
            return [*zip(refs, ray.get(refs, timeout=timeout))]
    most = min(count, len(refs)) if count > 0 else len(refs)
    ready, _ = ray.wait(refs, num_returns=most, timeout=timeout if count > 0 else 0.0)
    try:
        return [*zip(ready, ray.get(ready))]
    except RayError:
        return [(ref, _result_or_error(ref)) for ref in ready]


def _result_or_error(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return error


def reason_of(error: RayError) -> str:
    """Why an actor is dead, by Ray's error."""
    text = str(error).strip()
    because = _BECAUSE.search(text)
    return because[1] if because else text.partition("\n")[0].rstrip(".") or type(error).__name__
