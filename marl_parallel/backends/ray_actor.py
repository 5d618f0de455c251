"""An actor on a node of a Ray cluster. Its workers are processes of a `ProcessBackend`, whose memory they share.

    caller                 --- exchange: requests, all actions in one array -----> RayActor --- queues ---> worker
    (ray_exchange.py)      <-- all replies that are here, results in one array ---          <-- queues ---    processes
                           --- post, look, stack, end, ... at any time ---------->

`exchange` runs in a thread of its own and returns when there are enough replies. All other methods run beside it, in
other threads; one at a time uses the `ProcessBackend`. Orders are carried out by number, since calls that run in
different threads may begin in any order.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import ray
from numpy.typing import NDArray

from marl_parallel.backends import interpreter
from marl_parallel.backends.process import ProcessBackend
from marl_parallel.core.block.records import WITH_ACTIONS, WITH_RESULTS, RecordOffsets, RecordSlices
from marl_parallel.core.messages import STEPPED, Begins, Construct, Lost, Message, Reply, Request

__doctest_requires__ = ["ray"]

NODE_VARIABLE = "RAY_NODE_ID"
"""The environment variable with the id of a worker's node: workers are not processes of Ray."""
CONCURRENCY_GROUPS = {"exchange": 1, "control": 4}
_LARGE_NBYTES = 1 << 20
_ORDER_WITHIN_S = 60.0


class Order(NamedTuple):
    """What an actor is to do: start workers, then pass on requests."""

    number: int  # from 1
    # Workers, new or in the place of others: each with how often it was started, and its environments.
    starts: Sequence[tuple[int, int, Sequence[int]]]
    requests: Mapping[int, Request]  # by worker
    actions: NDArray[Any] | None  # of the requests that have some, in the order of their environments
    together: bool  # whether the caller waits for all replies to these requests, and there are no others
    at_least: int  # how many replies an exchange waits for


class ActorResults(NamedTuple):
    """The replies, statuses and records of an actor's workers since the last exchange."""

    number: int  # of the exchange, from 1; `end` returns 0
    now: float  # `time.monotonic` on its machine
    # Each with its worker, and how often that was started; None stands for `STEPPED`.
    replies: list[tuple[int, int, Reply | Lost | None]]
    # By worker, how often it was started, and its status; of workers that are busy or lost, or did more than steps.
    statuses: dict[int, tuple[int, bytes]]
    env_ids: Sequence[Sequence[int]]  # for each reply, the environments of its record slices
    records: NDArray[Any] | None  # the record slices, in this order
    whole: tuple[Sequence[int], bytes] | None  # environments of lost workers, and their whole records


Packed: TypeAlias = bytes | tuple[bytes, NDArray[Any]]


def pack(results: ActorResults) -> Packed:
    """Pickle results in the fastest form for Ray: one `bytes`; large records are a separate array without a copy."""
    if results.records is None or results.records.nbytes < _LARGE_NBYTES:
        return pickle.dumps(tuple(results), pickle.HIGHEST_PROTOCOL)
    return pickle.dumps(tuple(results._replace(records=None)), pickle.HIGHEST_PROTOCOL), results.records


def unpack(packed: Packed) -> ActorResults:
    """Undo `pack`."""
    if isinstance(packed, bytes):
        return ActorResults(*pickle.loads(packed))
    return ActorResults(*pickle.loads(packed[0]))._replace(records=packed[1])


class _Turns:
    """A lock with priority: `exchange` holds it while it waits, and lets all other methods go first.

    Args:
        interrupt: Makes `exchange` return soon from what it does with the lock.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._next, self._lock = threading.Lock(), threading.Lock()
        self._is_last = False  # whether `exchange` has the lock

    @contextmanager
    def first(self) -> Iterator[None]:
        with self._next:
            if self._is_last:
                self._interrupt()
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def last(self) -> Iterator[None]:
        with self._next:
            self._lock.acquire()
            self._is_last = True
        try:
            yield
        finally:
            self._is_last = False
            self._lock.release()


class RayActor:
    """The workers of one actor; folders of the caller's module search path that exist here are searched last."""

    def __init__(self, num_threads: int | None, path: Sequence[str], identity: interpreter.Identity) -> None:
        interpreter.take_identity(identity)  # its workers add a number to it
        sys.path += [folder for folder in path if folder not in sys.path and os.path.exists(folder)]
        os.environ[NODE_VARIABLE] = self._node = ray.get_runtime_context().get_node_id()
        self._backend = ProcessBackend(threads=num_threads)
        self._turns = _Turns(self._backend.interrupt)
        self._shares: dict[int, Sequence[int]] = {}  # by worker, as the caller numbers them
        self._numbers: dict[int, int] = {}  # by worker, its number in the `ProcessBackend`
        self._workers: dict[int, int] = {}  # by its number there, the worker
        self._starts: dict[int, int] = {}  # how often each worker was started
        self._owed: dict[int, int] = {}  # how many requests each worker has not replied to
        self._owners: dict[int, int] = {}  # the worker that has written an environment's record last
        self._beside: dict[int, set[int]] = {}  # by worker: environments that it has beside the present ones
        self._slices: RecordSlices | None = None
        self._writes_states = False
        self._carried_out = 0  # the number of the last order that was carried out
        self._order_done = threading.Condition()
        self._exchanges = 0
        self._replies: list[tuple[int, int, Reply | Lost]] = []  # that no exchange has returned
        self._returned: list[tuple[int, int, Reply | Lost]] = []  # by the last exchange
        self._waits = False  # whether an exchange waits for replies
        self._hurries = False  # whether it is to return at once
        self._failure: BaseException | None = None  # of an order in a call whose result nobody waits for

    # -- starting --------------------------------------------------------------------------------------------------

    def start(
        self, shares: Mapping[int, Sequence[int]], most: int, most_requests: int, record_offsets: RecordOffsets | None
    ) -> tuple[str, float]:
        """Start workers, at `most` so many at a time; returns the id of the node, and `time.monotonic` there."""
        if record_offsets is not None:
            self.allocate(record_offsets)
        self._backend.start([*shares.values()], most_requests, most)
        for number, (worker, share) in enumerate(shares.items()):
            self._shares[worker], self._owed[worker], self._starts[worker] = share, 0, 0
            self._numbers[worker], self._workers[number] = number, worker
        return self._node, time.monotonic()

    def allocate(self, record_offsets: RecordOffsets) -> None:
        with self._turns.first():
            self._slices = RecordSlices(record_offsets, self._backend.allocate(record_offsets.nbytes))

    def _start(self, worker: int, start: int, share: Sequence[int]) -> None:
        """Start a worker, or another one in its place."""
        self._shares[worker], self._owed[worker], self._starts[worker] = share, 0, start
        if (number := self._numbers.get(worker)) is None:
            number = next(n for n in range(len(self._backend.statuses)) if n not in self._workers)
        self._backend.start_worker(number, share)
        self._numbers[worker], self._workers[number] = number, worker

    # -- requests and replies --------------------------------------------------------------------------------------

    def exchange(self, packed: bytes) -> Packed:
        """Carry out an order, and wait for replies; returns all that are here."""
        order = Order(*pickle.loads(packed))
        self._carry_out(order)
        self._waits = True
        while True:
            with self._turns.last():
                if self._failure is not None:
                    raise self._failure
                missing = order.at_least - len(self._replies)
                if missing > 0 and not self._hurries:
                    self._receive(self._backend.wait(None, missing))
                lost = any(isinstance(reply, Lost) for _, _, reply in self._replies)
                if lost or self._hurries or len(self._replies) >= order.at_least:
                    self._exchanges += 1
                    self._returned, self._replies = self._replies, []
                    self._waits = self._hurries = False
                    return pack(self._results(self._returned, self._exchanges))

    def post(self, packed: bytes) -> None:
        """Carry out an order while an exchange waits."""
        try:
            self._carry_out(Order(*pickle.loads(packed)))
        except BaseException as error:
            self._failure = error
            self._backend.interrupt()

    def _carry_out(self, order: Order) -> None:
        with self._order_done:
            self._await_order(order.number - 1)
            with self._turns.first():
                for worker, start, share in order.starts:
                    self._start(worker, start, share)
                    self._hurries = self._waits  # maybe for replies that will not come
                self._pass_on(order)
            self._carried_out = order.number
            self._order_done.notify_all()

    def _pass_on(self, order: Order) -> None:
        requests = {self._numbers[worker]: request for worker, request in order.requests.items()}
        if not requests:
            return
        with_actions: list[int] = []
        for worker, request in order.requests.items():
            env_ids = self._shares[worker] if request.env_ids is None else request.env_ids
            message = request.message
            self._owed[worker] += 1
            if message in WITH_ACTIONS:
                with_actions += env_ids
            elif message in WITH_RESULTS:
                beside, writes = self._beside.setdefault(worker, set()), {*env_ids}
                if message is Message.CONSTRUCT:
                    new: Mapping[int, Construct] = request.payload
                    self._writes_states = any(one.outputs.states for one in new.values())
                    writes = {env_id for env_id, one in new.items() if one.begins is not Begins.BESIDE}
                elif message is Message.TAKE_OVER and request.payload is False:
                    writes.clear()
                beside.difference_update(writes)
                beside.update({*env_ids} - writes)
                self._owners.update(dict.fromkeys(writes, worker))
            if message is Message.OUTPUTS:
                self._writes_states = request.payload.states
            elif message is Message.CLOSE:
                self._backend.statuses[self._numbers[worker]].discard()
        if order.actions is not None and self._slices is not None:
            self._slices.put_actions(with_actions, order.actions)
        self._backend.post(requests, together=order.together)

    def _receive(self, replies: Iterable[tuple[int, Reply | Lost]]) -> None:
        for number, reply in replies:
            worker = self._workers[number]
            if isinstance(reply, Lost):
                self._owed[worker] = 0
            else:
                self._owed[worker] -= reply.last
            self._replies.append((worker, self._starts[worker], reply))

    def _results(self, replies: Sequence[tuple[int, int, Reply | Lost]], number: int = 0) -> ActorResults:
        statuses = {worker: self._status(worker) for worker, owed in self._owed.items() if owed}
        env_ids: list[Sequence[int]] = []
        lost: list[int] = []
        states, replied = self._writes_states, []
        for worker, start, reply in replies:
            written: Sequence[int] = ()
            if isinstance(reply, Lost):
                lost += [env_id for env_id in self._shares[worker] if self._owners.get(env_id) == worker]
                statuses[worker] = self._status(worker)
            elif reply.request in WITH_RESULTS:
                written = self._shares[worker] if reply.env_ids is None else reply.env_ids
                if reply.request in (Message.CONSTRUCT, Message.TAKE_OVER):
                    written = [env_id for env_id in written if env_id not in self._beside[worker]]
                states |= reply.request is Message.STATE
            if not isinstance(reply, Lost) and reply.request is not Message.STEP:
                statuses[worker] = self._status(worker)
            replied.append((worker, start, None if reply is STEPPED else reply))
            env_ids.append(written)
        records = whole = None
        if self._slices is not None:
            if rows := [*chain.from_iterable(env_ids)]:
                records = self._slices.results(rows, Message.STEP, states=states)
            if lost:
                whole = lost, self._slices.records(lost)
        return ActorResults(number, time.monotonic(), replied, statuses, env_ids, records, whole)

    # -- states and ends of workers --------------------------------------------------------------------------------

    def _status(self, worker: int) -> tuple[int, bytes]:
        return self._starts[worker], self._backend.statuses[self._numbers[worker]].copy()

    def look(self, *, hurry: bool) -> tuple[float, dict[int, tuple[int, bytes]]]:
        """`time.monotonic` on this machine, and the status of each worker; with `hurry`, the exchange returns."""
        with self._turns.first():
            self._hurries |= hurry and self._waits
            return time.monotonic(), {worker: self._status(worker) for worker in self._numbers}

    def memory(self, worker: int) -> int | None:
        """Bytes of memory of a worker, None if unknown; takes no turn, since reading is slow."""
        number = self._numbers.get(worker)
        return None if number is None else self._backend.memory(number)

    def stack(self, worker: int, *, harmless: bool) -> str:
        with self._turns.first():
            return self._backend.stack(self._numbers[worker], harmless=harmless)

    def end(self, worker: int, after: int, seen: int, start: int) -> Packed:
        """End a worker, after the order of a number; returns all its replies that the caller has not seen.

        `seen` is the number of the last exchange whose results the caller has, `start` how often the worker was
        started: if the caller did not wait for this call, the worker may have been started again.
        """
        with self._order_done:
            self._await_order(after)
        with self._turns.first():
            if worker not in self._numbers or self._starts[worker] != start:
                return pack(self._results([]))
            returned = self._returned if seen < self._exchanges else []
            replies = [one for one in [*returned, *self._replies] if one[:2] == (worker, start)]
            self._replies = [one for one in self._replies if one[0] != worker]
            replies += [(worker, start, reply) for reply in self._backend.end(self._numbers[worker])]
            self._owed[worker], self._hurries = 0, self._waits
            return pack(self._results([*replies, (worker, start, Lost(None, ""))]))

    def remove(self, worker: int, after: int, start: int, *, kill: bool) -> bool:
        """Free a worker after the order `after`; returns False if it has not ended yet.

        Does nothing and returns True if the worker was not started `start` times: it is another one, or is gone.
        """
        with self._order_done:
            self._await_order(after)
        with self._turns.first():
            if worker not in self._numbers or start != self._starts[worker]:
                return True
            if not self._backend.remove(self._numbers[worker], kill=kill):
                return False
            del self._workers[self._numbers.pop(worker)], self._shares[worker], self._owed[worker]
            self._replies = [one for one in self._replies if one[0] != worker]
            return True

    def stop(self, timeout: float) -> None:
        """End all workers, closed ones by themselves within `timeout` seconds; a waiting exchange may never return."""
        with self._turns.first():
            self._backend.stop(timeout)

    def _await_order(self, number: int) -> None:
        """Wait, with `_order_done`, until an order has been carried out. The order has been sent, so it comes soon."""
        if not self._order_done.wait_for(lambda: self._carried_out >= number, _ORDER_WITHIN_S):
            raise TimeoutError(f"order {number} has not been carried out within {_ORDER_WITHIN_S:g} s")
