"""Workers that share the memory of their node of a Ray cluster: the driver's side.

    RayNodesBackend --- one call per node and batch: requests, all actions in one array ---> RayNode, an actor of each
                    <-- all replies that are there, the results in one array ----------------    node (ray_node.py)
                    --- post, look, stack, end, ...: at any time --------------------------->

A node has at most one `exchange` in flight, which returns when there are enough replies. Requests that come meanwhile
go ahead with `post`. Replies that come while a result travels go with the next one, so that their number per call
grows with their rate.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import Any

import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from marl_parallel.backends import interpreter
from marl_parallel.backends.ray_backend import (
    POLL_S,
    STATUS_INTERVAL_S,
    Place,
    RayBackend,
    draining_nodes,
    later,
    ray_options,
    reason_of,
    results_of,
)
from marl_parallel.backends.ray_node import CONCURRENCY_GROUPS, Order, RayNode, Results, unpack
from marl_parallel.core.backend import most_workers, share_out
from marl_parallel.core.columns import Layout
from marl_parallel.core.messages import STEPPED, Lost, Message, Reply, Request
from marl_parallel.core.records import WITH_ACTIONS, RecordPlaces, RecordSlices
from marl_parallel.core.worker_status import WorkerStatus
from marl_parallel.types import ParallelEnvError

__doctest_requires__ = ["ray"]

_ANSWERS_WITHIN_S = 5.0
_ENDS_WITHIN_S = 30.0


class Node:
    """The driver's state of one node and its actor."""

    def __init__(self, handle: Any, bundle: int) -> None:
        self.handle, self.bundle = handle, bundle
        self.id = ""  # of the node, when it has started
        self.spare = False  # whether it was started beside others, so that the batch goes on if it cannot start
        self.exchange = handle.exchange.options(concurrency_group="exchange").remote
        self.post = handle.post.options(concurrency_group="control", num_returns=0).remote
        self.starting: Any = None  # reference to the result of its start; None once it has started, or is given up
        self.ready = math.inf  # when it was up, in seconds of this clock
        self.since = time.monotonic()  # when its start was requested, or that of the first one that it replaces
        self.waiting: list[tuple[dict[int, Request], bool]] = []  # requests to send once it has started
        self.in_flight: Any = None  # reference to the result of the exchange
        self.waits_for_more = False  # whether the exchange waits for more than one reply
        self.orders = 0  # how many were sent
        self.seen = 0  # the number of the last exchange whose results are here
        self.starts: list[tuple[int, int, Sequence[int]]] = []  # of workers, to be sent with the next order
        self.started: Counter[int] = Counter()  # how often each worker was started
        self.pending: dict[int, deque[Request]] = {}  # by worker
        self.closing: set[int] = set()  # workers that have got a CLOSE
        self.clock_offset = math.inf  # this machine's clock minus its own, in seconds, at most
        self.completed: dict[int, float] = {}  # by worker: when its last reply was completed, by this clock
        self.lost: str | None = None  # why it is gone
        self.memory: dict[int, tuple[Any, int | None]] = {}  # by worker: reference to the next answer, and the last one

    @property
    def owes(self) -> int:
        """How many requests its workers have not replied to."""
        return sum(map(len, self.pending.values()))

    def control(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method beside the exchange; returns a reference to its result."""
        return getattr(self.handle, method).options(concurrency_group="control").remote(*arguments, **keywords)


class RayNodesBackend(RayBackend):
    """A `RayBackend` with `num_nodes` or `workers_per_node`: an actor on each node, whose processes are the workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._nodes: list[Node] = []  # by bundle of the placement group
        self._node_of: dict[int, Node] = {}  # by worker
        self._by_node: list[range] = []  # the first workers of each
        self._successors: dict[tuple[Node, str], Node] = {}  # where workers move from a node, by target
        self._bundles: list[dict[str, float]] = []
        self._most_requests = 0
        self._record_places: RecordPlaces | None = None
        self._begun: set[Node] = set()  # nodes with an exchange that the present `wait` has begun
        self._looked = 0.0
        self._changed = True  # whether anything was sent or received since the last `look`

    # -- starting --------------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        if self._num_nodes is not None and self._workers_per_node is not None:
            return self._num_nodes * self._workers_per_node
        return super().capacity()

    def _workers_by_node(self, count: int) -> list[range]:
        num_nodes, most = self._num_nodes, self._workers_per_node
        if num_nodes is None:
            assert most is not None
            num_nodes = -(-count // most)
        if most is not None and count > num_nodes * most:
            raise ValueError(
                f"{count} workers do not fit num_nodes={num_nodes} with workers_per_node={most}; pass a larger number, "
                "or fewer workers (num_workers=)"
            )
        return share_out(count, min(num_nodes, count))

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        self._by_node = self._workers_by_node(len(shares))
        self._shares, self._most_requests = dict(enumerate(shares)), most_requests
        self._connect_or_start()
        try:
            self._bundles = [self._bundle(len(workers)) for workers in self._by_node]
            self._reserve(self._bundles, "nodes")
            assert self._group is not None
            self._places = {bundle: Place(self._group, bundle) for bundle in range(len(self._bundles))}
            self.statuses = [WorkerStatus(bytearray(WorkerStatus.NBYTES)) for _ in range(most_workers(shares))]
            for bundle, workers in enumerate(self._by_node):
                node = self._start_node(bundle, workers)
                self._nodes.append(node)
                self._node_of.update(dict.fromkeys(workers, node))
            # All workers are up before the first request, so that no constructor's time runs before it can begin.
            self.wait()
        except BaseException:
            self.stop(0.0)
            raise

    def _bundle(self, workers: int) -> dict[str, float]:
        """The resources of some workers; Ray wants whole numbers above 1."""
        amounts = {name: workers * amount for name, amount in self._resources.items()}
        return {name: math.ceil(amount) if amount > 1 else amount for name, amount in amounts.items()}

    def _start_node(self, bundle: int, workers: Iterable[int]) -> Node:
        actor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RayNode).options(
            **ray_options(self._bundles[bundle]),
            scheduling_strategy=self._places[bundle].strategy(),
            runtime_env=self._runtime_env,
            max_restarts=0,
        )
        path = [*map(os.path.abspath, sys.path)]
        node = Node(actor.remote(self._num_threads, path, interpreter.next_identity()), bundle)
        shares = {worker: self._shares[worker] for worker in workers}
        most = len(self.statuses)  # all may move there
        node.starting = node.control("start", shares, most, self._most_requests, self._record_places)
        node.pending = {worker: deque() for worker in shares}
        return node

    def _restart_node(self, old: Node) -> Node:
        """Start a node, without workers, in the place of one that is gone, or that could not start."""
        ray.kill(old.handle)
        new = self._nodes[old.bundle] = self._start_node(old.bundle, ())
        return new

    def replace(self, worker: int) -> None:
        if self._group is None or not ray.is_initialized():
            return  # closed meanwhile by a signal handler
        node = self._node_of[worker]
        if node.lost is not None:
            node = self._nodes[node.bundle]
        if node.lost is not None:
            node = self._restart_node(node)
        self._node_of[worker] = node
        self._start_worker(node, worker)

    def _start_worker(self, node: Node, worker: int) -> None:
        self._drop_orders(node, worker)
        node.started[worker] += 1
        node.starts.append((worker, node.started[worker], self._shares[worker]))
        node.pending[worker] = deque()
        node.memory.pop(worker, None)
        node.closing.discard(worker)
        self.statuses[worker] = WorkerStatus(bytearray(WorkerStatus.NBYTES))

    def add(self, worker: int, share: Sequence[int], beside: int | None = None) -> None:
        if self._group is None or not ray.is_initialized():
            return  # likewise
        assert beside is not None
        self._shares[worker], self._beside[worker] = share, beside
        node = self._nodes[self._node_of[beside].bundle]
        if beside in self.leaving():
            node = self._successor(node, self._targets.get(beside))
        self._node_of[worker] = node
        self._start_worker(node, worker)

    def _successor(self, old: Node, target: str | None) -> Node:
        """The node to which workers move from another one; started here for the first of them."""
        node = self._successors.get((old, target or ""))
        if node is None or node.lost is not None or node.id in draining_nodes():
            staying = [worker for worker in old.pending if worker not in old.closing]
            moving = [worker for worker in staying if self._targets.get(worker) == target]
            bundle = len(self._nodes)
            self._bundles.append(self._bundle(len(moving)))
            self._places[bundle] = self._place_elsewhere(self._bundles[bundle], target)
            node = self._successors[old, target or ""] = self._start_node(bundle, ())
            node.spare = True
            self._nodes.append(node)
        return node

    def _node_id(self, worker: int) -> str:
        node = self._node_of.get(worker)
        return "" if node is None else node.id

    def remove(self, worker: int, *, kill: bool) -> bool:
        node = self._node_of.get(worker)
        if node is None:
            return True
        if node.lost is None and node.starting is None and ray.is_initialized():
            removed = node.control("remove", worker, node.orders, node.started[worker], kill=kill)
            if _answer(removed) is False:
                return False
        self._drop_orders(node, worker)
        del self._node_of[worker]
        self._forget(worker)
        node.pending.pop(worker, None)
        node.closing.discard(worker)
        if node not in self._node_of.values() and self._nodes[node.bundle] is node:  # all have moved
            if node.lost is None and ray.is_initialized():
                ray.kill(node.handle)
            node.lost, node.starting = "its workers have moved", None
            self._free(self._places.pop(node.bundle))
        return True

    def _drop_orders(self, node: Node, worker: int) -> None:
        """Drop the starts and requests of a worker that have not been sent to its node."""
        node.starts = [start for start in node.starts if start[0] != worker]
        for requests, _ in node.waiting:
            requests.pop(worker, None)

    def allocate(self, layout: Layout) -> Any:
        block = mmap.mmap(-1, layout.nbytes)
        self._slices = RecordSlices(layout, block)
        self._record_places = RecordPlaces.of(layout)
        for allocated in [node.control("allocate", self._record_places) for node in self._nodes]:
            _answer(allocated, timeout=None)  # a death is noticed with the next request
        return block

    # -- requests and replies --------------------------------------------------------------------------------------

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        self._changed = True
        by_node: dict[Node, dict[int, Request]] = {}
        connected = ray.is_initialized()
        for worker, request in requests.items():
            node = self._node_of.get(worker)
            if node is None or not connected:
                self._lost.append((worker, Lost(None, "", "Ray has been shut down")))
            elif node.lost is not None:
                self._lost.append((worker, Lost(None, "", node.lost)))
            else:
                node.pending[worker].append(request)
                if request.message is Message.CLOSE:
                    node.closing.add(worker)
                by_node.setdefault(node, {})[worker] = request
        for node, part in by_node.items():
            if node.starting is not None:
                node.waiting.append((part, together))
            else:
                self._send(node, part, together=together)

    def _send(self, node: Node, requests: dict[int, Request], *, together: bool = False, at_least: int = 1) -> None:  # type: ignore[override]
        actions = None
        if self._slices is not None:
            env_ids: list[int] = []
            for worker, request in requests.items():
                if request.message in WITH_ACTIONS:
                    env_ids += self._shares[worker] if request.env_ids is None else request.env_ids
            if env_ids:
                actions = self._slices.actions(env_ids)
        if together:
            at_least = node.owes
        node.orders += 1
        order = Order(node.orders, node.starts, requests, actions, together, at_least)
        node.starts = []
        packed = pickle.dumps(tuple(order), pickle.HIGHEST_PROTOCOL)
        if node.in_flight is None:
            node.in_flight, node.waits_for_more = node.exchange(packed), at_least > 1
        else:
            node.post(packed)

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        replies, self._lost = self._lost, []
        self._begun.clear()
        while not self._interrupted and not any(isinstance(reply, Lost) for _, reply in replies):
            missing = at_least - len(replies)
            expected = self._expected(missing)
            if not expected:
                break
            left = max(deadline - time.monotonic(), 0.0)
            results = self._collect(expected, missing, min(left, POLL_S))
            replies += results[1]
            for node in self._nodes:
                replies += self._check_start(node)
            if missing <= 0 or (left == 0.0 and not results[0]):
                break
        self._interrupted = False
        if timeout is not None and len(replies) < at_least:
            in_flight = [node for node in self._nodes_in_use() if node.in_flight is not None]
            if any(node.waits_for_more for node in in_flight):
                self._look(hurry=True)
            # What an exchange brings that has just begun has been ready before.
            late = {node.in_flight: node for node in in_flight if node.waits_for_more or node in self._begun}
            if late:
                replies += self._collect(late, len(late), POLL_S)[1]
            else:
                self.look()
        return replies

    def _nodes_in_use(self) -> list[Node]:
        return [*dict.fromkeys([*self._nodes, *self._node_of.values()])]

    def _expected(self, missing: int) -> dict[Any, Node]:
        """The node of each reference to a next result; begins exchanges where none is in flight."""
        nodes = [node for node in self._nodes_in_use() if node.lost is None]
        owed = sum(node.owes for node in nodes)
        expected = {}
        for node in nodes:
            if node.starting is not None:
                expected[node.starting] = node
            elif node.owes:
                if node.in_flight is None:
                    self._send(node, {}, at_least=node.owes if missing >= owed else 1)
                    self._begun.add(node)
                expected[node.in_flight] = node
        return expected

    def _collect(self, expected: Mapping[Any, Node], missing: int, patience: float) -> tuple[int, list[Any]]:
        """Wait for results; returns how many there were, and the replies in them."""
        everything = missing >= sum(node.owes for node in expected.values())
        results = results_of([*expected], len(expected) if everything else min(missing, 1), patience)
        replies = []
        for ref, result in results:
            replies += self._receive_from(expected[ref], result)
        return len(results), replies

    def _receive_from(self, node: Node, packed: Any) -> list[tuple[int, Reply | Lost]]:
        """The replies in a result of a node, or the losses of its workers by Ray's error in the place of a result."""
        self._changed = True
        if isinstance(packed, RayTaskError) and node.starting is None:
            raise packed
        if isinstance(packed, RayError):
            return self._note_node_lost(node, packed)
        if node.starting is not None:
            node.id, now = packed
            node.starting, node.ready = None, time.monotonic()
            node.clock_offset = node.ready - now
            waiting, node.waiting = node.waiting, []
            for requests, together in waiting:
                if requests:
                    self._send(node, requests, together=together and len(waiting) == 1)
            return []
        results = unpack(packed)
        node.in_flight, node.seen = None, results.number
        replies = []
        for worker, start, reply in self._apply(node, results):
            if start != node.started[worker] or worker not in node.pending:
                continue  # of a process that has been replaced, so that `end` has returned it; or removed
            if isinstance(reply, Lost):
                node.pending[worker].clear()
            elif reply.last:
                node.pending[worker].popleft()
            replies.append((worker, reply))
        return replies

    def _apply(self, node: Node, results: Results) -> list[tuple[int, int, Reply | Lost]]:
        """Copy statuses and records; returns the replies, with this machine's time."""
        self._update(node, results.now, results.statuses)
        if self._slices is not None:
            if results.records is not None:
                self._put_results(node, results, results.records)
            if results.whole is not None:
                self._slices.put_records(*results.whole)
        replies: list[tuple[int, int, Reply | Lost]] = []
        for worker, start, reply in results.replies:
            if reply is None:
                reply = STEPPED
            elif not isinstance(reply, Lost):
                moment = later(reply.completed + node.clock_offset, node.completed.get(worker, -math.inf))
                reply = reply._replace(completed=moment)
                node.completed[worker] = moment
            replies.append((worker, start, reply))
        return replies

    def _put_results(self, node: Node, results: Results, records: NDArray[Any]) -> None:
        """Copy record slices, without those of processes that have been replaced since; `end` has returned these."""
        assert self._slices is not None
        env_ids = [*chain.from_iterable(results.env_ids)]
        current = [start == node.started[worker] for worker, start, _ in results.replies]
        if not all(current):
            copied = [is_current for is_current, ids in zip(current, results.env_ids) for _ in ids]
            env_ids, records = [*compress(env_ids, copied)], records[copied]
        if env_ids:
            self._slices.put_results(env_ids, records)

    def _note_node_lost(self, node: Node, error: RayError) -> list[tuple[int, Reply | Lost]]:
        """The losses of the workers of a node that is gone; one that has not started is started again."""
        reason = reason_of(error)
        if node.starting is None:
            node.lost, node.in_flight = reason, None
            busy = [worker for worker, requests in node.pending.items() if requests]
            node.pending.clear()
            return [(worker, Lost(None, "", reason)) for worker in busy]
        if node.spare:
            return self._give_up(node, reason)
        workers = [worker for worker, one in self._node_of.items() if one is node]
        if self._record_places is None:
            raise ParallelEnvError(f"worker {workers[0]} could not be started by Ray: {error}", worker=workers[0])
        # It has not begun, so this is no fault of its environments. Ray may not know yet that a machine is gone.
        self._check_start(node, reason)
        new = self._restart_node(node)
        new.since, new.waiting, new.pending = node.since, node.waiting, node.pending
        new.starts, new.started, new.closing = node.starts, node.started, node.closing
        self._node_of.update(dict.fromkeys(workers, new))
        return []

    def _check_start(self, node: Node, reason: str = "") -> list[tuple[int, Reply | Lost]]:
        """Raise if a node should have started by now; one beside others is given up."""
        if node.starting is None or time.monotonic() - node.since <= self._placement_timeout:
            return []
        worker = next(worker for worker, one in self._node_of.items() if one is node)
        text = self._never_started(worker, self._places[node.bundle], self._bundles[node.bundle], reason)
        if node.spare:
            return self._give_up(node, text)
        raise ParallelEnvError(text, env_ids=[*self._shares[worker]], worker=worker)

    def _give_up(self, node: Node, reason: str) -> list[tuple[int, Reply | Lost]]:
        """Give up a node that could not start; returns the losses of its workers, which have only spares."""
        ray.kill(node.handle)
        node.lost, node.starting = reason, None
        workers = [*node.pending]
        node.pending.clear()
        return [(worker, Lost(None, "", reason)) for worker in workers]

    # -- states and ends of workers --------------------------------------------------------------------------------

    def look(self) -> None:
        if self._changed or time.monotonic() - self._looked >= STATUS_INTERVAL_S:
            self._look(hurry=False)

    def _look(self, *, hurry: bool) -> None:
        """Copy all statuses; with `hurry`, exchanges that wait for more than one reply return with what is there."""
        self._looked, self._changed = time.monotonic(), False
        nodes = [node for node in self._nodes if node.lost is None and node.starting is None]
        for node, ref in [(node, node.control("look", hurry=hurry and node.waits_for_more)) for node in nodes]:
            if (answer := _answer(ref)) is not None:
                self._update(node, *answer)
        self.looking_s += time.monotonic() - self._looked

    def _update(self, node: Node, now: float, statuses: Mapping[int, tuple[int, bytes]]) -> None:
        node.clock_offset = min(node.clock_offset, time.monotonic() - now)
        for worker, (start, status) in statuses.items():
            if self._node_of.get(worker) is node and start == node.started[worker]:
                self.statuses[worker].copy_from(status, node.clock_offset)

    def ready_since(self, worker: int) -> float:
        node = self._node_of.get(worker)
        return 0.0 if node is None else node.ready

    def ahead(self, worker: int) -> float:
        return self._node_of[worker].clock_offset

    def memory(self, worker: int) -> int | None:
        """As of the last call, so that nobody waits for a machine; but the first call for a worker waits."""
        node = self._node_of.get(worker)
        if node is None or node.lost is not None or node.starting is not None or not ray.is_initialized():
            return None
        asked, last = node.memory.get(worker, (None, None))
        if asked is None or ray.wait([asked], timeout=0)[0]:
            last = _answer(asked or node.control("memory", worker))
            node.memory[worker] = node.control("memory", worker), last
        return last

    def stack(self, worker: int, *, harmless: bool = False) -> str:
        node = self._node_of.get(worker)
        if node is None or node.lost is not None or node.starting is not None or not ray.is_initialized():
            return ""
        return _answer(node.control("stack", worker, harmless=harmless)) or ""

    def end(self, worker: int) -> list[Reply]:
        node = self._node_of[worker]
        if node.lost is not None or node.starting is not None:
            return []
        ended = node.control("end", worker, node.orders, node.seen, node.started[worker])
        packed = _answer(ended, _ENDS_WITHIN_S)
        if packed is None:
            return []
        node.pending[worker].clear()
        return [reply for _, _, reply in self._apply(node, unpack(packed)) if not isinstance(reply, Lost)]

    def stop(self, timeout: float) -> list[int]:
        nodes, self._nodes, self._node_of = self._nodes_in_use(), [], {}
        if ray.is_initialized():
            able = [node for node in nodes if node.lost is None and node.starting is None]
            ends = [node.control("stop", timeout) for node in able]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=timeout + _ANSWERS_WITHIN_S)
            for node in nodes:
                ray.kill(node.handle)
        return super().stop(timeout)


def _answer(ref: Any, timeout: float | None = _ANSWERS_WITHIN_S) -> Any:
    """The result of a call beside the exchange; None if the node is gone, or does not answer in time."""
    try:
        return ray.get(ref, timeout=timeout)
    except RayTaskError:
        raise
    except RayError:
        return None
