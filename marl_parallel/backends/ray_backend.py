"""Workers in Ray actors, on any number of machines: the driver's side, and its connection to the cluster.

    RayBackend --- one call per worker and batch: the request, all actions in one array ---> RayWorker
               <-- the replies, the worker status, the results in the records ---------------
               --- statuses, stack, last state of a dead worker, end -----------------------> RayNodeMonitor

Each end has a block of its own with the same layout; record slices carry what one end has written to the other. The
actors are in `ray_worker.py`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import pickle
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from marl_parallel.types import ParallelEnvError, how_to_install

try:
    import ray
except ImportError as error:
    raise ImportError(f'backend="ray" needs Ray: {how_to_install("ray")} ({error})') from error
from ray._private.state import available_resources_per_node
from ray._private.state import state as global_state
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from marl_parallel.backends import interpreter
from marl_parallel.backends.ray_worker import ProcessInfo, RayNodeMonitor, RayWorker, unpack
from marl_parallel.core.backend import Backend, most_workers, usable_cpus
from marl_parallel.core.columns import Layout
from marl_parallel.core.messages import Lost, Message, Reply, Request
from marl_parallel.core.records import WITH_ACTIONS, WITH_RESULTS, RecordSlices
from marl_parallel.core.reports import logger
from marl_parallel.core.worker_status import WorkerStatus

__doctest_requires__ = ["ray"]

POLL_S = 0.1  # how often `wait` checks whether it is interrupted
STATUS_INTERVAL_S = 0.01
_MONITOR_TIMEOUT_S = 5.0  # a monitor has nothing else to do
_WARN_AFTER_S = 3.0
_CONNECT_TIMEOUT_S = 10.0
_SLOT, _SLOTS = "marl_parallel_worker", 10_000
"""In a cluster started for one program alone, each worker takes one of these resources instead of CPUs."""
_ANYWHERE = {"memory": 1}
"""What a worker without CPUs takes, since a placement group has to reserve something: a byte."""
_NODE_LABEL = "ray.io/node-id"  # which Ray gives each node
_WITH_OPTIONS = frozenset({"CPU", "GPU", "memory"})
_PROCESS_DIED = "its worker process has died"  # Ray's reason if it has no better one
_BECAUSE = re.compile(r"\bbecause (.+?)[.](?:\s|$)")


class Pending(NamedTuple):
    """An order in flight: a request, or a part of one."""

    number: int
    request: Request
    last: bool  # whether it is the last part of the request
    ref: Any  # to its result


class Place(NamedTuple):
    """Where a worker runs, and what is set aside for it there: a bundle of a placement group.

    A spare is `shared`: it has the CPUs of the worker that it will replace.
    """

    group: PlacementGroup
    bundle: int
    shared: bool = False

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)


class Actor:
    """The driver's state of one worker."""

    def __init__(self, handle: Any, *, spare: bool = False) -> None:
        self.handle = handle
        self.spare = spare  # whether it was started beside the others, so that the batch goes on if it cannot start
        # References to its `ProcessInfo`, then to its node monitor's reply; None once it has started.
        self.starting = handle.process_info.remote()
        self.since = time.monotonic()  # when it was requested, or the first one that it replaces and never started
        self.ready = math.inf  # when it was up, in seconds of this clock
        self.node = ""  # the id of its node, when it is up
        self.key = secrets.randbits(48)  # its number at its node monitor
        self.monitor: Any = None  # the handle of its node monitor; None if none watches it
        self.waiting: list[Request] = []  # requests to send once it has started
        self.pending: deque[Pending] = deque()
        self.sent = 0  # how many orders were sent
        self.status = WorkerStatus(bytearray(WorkerStatus.NBYTES))  # from the latest result or `look`
        self.clock_offset = 0.0  # this machine's clock minus its own, in seconds, at most
        self.completed = -math.inf  # when its last reply was completed, by this clock
        self.memory: int | None = None  # bytes
        self.memory_asked: Any = None  # reference to the monitor's next answer
        self.closed = False  # whether it has closed its environments

    def update(self, status: bytes, now: float) -> None:
        """Copy the status, read at the time `now` of the other machine's clock."""
        self.clock_offset = min(self.clock_offset, time.monotonic() - now)
        self.status.copy_from(status, self.clock_offset)

    def localized(self, reply: Reply, pending: Pending) -> Reply:
        """A reply with this machine's time; it is the last one only if its order is."""
        self.completed = later(reply.completed + self.clock_offset, self.completed)
        return reply._replace(completed=self.completed, last=reply.last and pending.last)


class RayBackend(Backend):
    """Workers in the actors of a Ray cluster.

    It uses the cluster that this process is connected to, else the one at `address`, else the one that `RAY_ADDRESS`
    or this machine names, else starts one on this machine. It stops what it started, and nothing else.

    Args:
        address: Address of the cluster, such as `"10.0.0.1:6379"`; None finds one as above.
        num_cpus: CPUs that Ray sets aside for each worker; simulators that mostly wait need less than one. With 0,
            workers start even where all CPUs are set aside for others.
        resources: Other resources for each worker, by name, such as `{"GPU": 0.25}`.
        placement: `"SPREAD"` puts workers on as many nodes as possible, `"PACK"` on as few.
        runtime_env: Ray's `runtime_env` of the actors: packages, files, environment variables.
        placement_timeout: Seconds to wait for room in the cluster and for workers to start, replacements included.
            For a cluster that grows by itself, allow enough time for that.
        num_nodes: Number of nodes that workers are shared out to. With this or `workers_per_node`, the workers of a
            node are processes that share its memory, served by one actor, and a batch is one call for each node: for
            many workers. Else each worker is an actor of its own.
        workers_per_node: Number of workers on each node; None shares all workers out to `num_nodes`. Without
            `num_nodes`, there are as many nodes as the workers need.
        num_threads: BLAS, OpenMP and torch threads in each worker; None leaves them alone.

    Raises:
        ValueError: An argument has a value that is not allowed.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from marl_parallel import ParallelEnv
        >>> backend = RayBackend(num_cpus=0.5)
        >>> with ParallelEnv([simple_spread_v3.parallel_env] * 4, backend=backend, num_workers=2) as env:
        ...     observations, infos = env.reset()
        >>> len(observations)
        4
    """

    has_spares = True
    moves = True

    def __new__(cls, *args: Any, num_nodes: Any = None, workers_per_node: Any = None, **kwargs: Any) -> RayBackend:
        if cls is RayBackend and not (num_nodes is None and workers_per_node is None):
            from marl_parallel.backends.ray_nodes import RayNodesBackend

            cls = RayNodesBackend
        return super().__new__(cls)

    def __init__(
        self,
        address: str | None = None,
        num_cpus: float = 1,
        resources: Mapping[str, float] | None = None,
        placement: str = "SPREAD",
        runtime_env: Mapping[str, Any] | None = None,
        *,
        num_nodes: int | None = None,
        workers_per_node: int | None = None,
        placement_timeout: float = 60.0,
        num_threads: int | None = 1,
    ) -> None:
        if placement not in ("SPREAD", "PACK"):
            raise ValueError(f"placement must be one of SPREAD, PACK, got {placement!r}")
        self._resources = {"CPU": num_cpus, **(resources or {})}
        for name, amount in self._resources.items():
            is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
            if not is_number or not (amount > 0 or (name == "CPU" and amount == 0)):
                raise ValueError(
                    f"each worker needs a positive amount of {name}, got {amount!r}; for simulators that mostly wait, "
                    "num_cpus=0.1 is enough, and num_cpus=0 sets none aside"
                )
        if num_cpus == 0:
            self._resources = {**_ANYWHERE, **self._resources}
        _check_positive("placement_timeout", placement_timeout, Real, "a number")
        counts = {"num_nodes": num_nodes, "workers_per_node": workers_per_node, "num_threads": num_threads}
        for name, number in counts.items():
            if number is not None:
                _check_positive(name, number, Integral, "None or an integer")
        self._address, self._placement, self._num_threads = address, placement, num_threads
        self._num_nodes, self._workers_per_node = num_nodes, workers_per_node
        self._placement_timeout = placement_timeout
        self._runtime_env = dict(runtime_env) if runtime_env else None
        self._disconnect: weakref.finalize[..., Any] | None = None
        self._group: PlacementGroup | None = None
        self._actors: dict[int, Actor] = {}  # by worker
        self._shares: dict[int, Sequence[int]] = {}
        self._places: dict[int, Place] = {}  # by worker; with one actor for each node, by bundle
        self._targets: dict[int, str] = {}  # by worker, the node that it moves to
        self._beside: dict[int, int] = {}  # by worker that was added, the one whose environments move there
        self._owners: dict[int, int] = {}  # the worker that has written an environment's record last
        self._ends: list[Any] = []  # references of ends that nobody has waited for
        self._slices: RecordSlices | None = None
        self._lost: list[tuple[int, Reply | Lost]] = []
        self._interrupted = False
        self._token = secrets.token_hex(8)
        self._statuses_read = 0.0

    # -- starting --------------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        if not self._connect(start=False):
            return max(int(usable_cpus() / (self._resources["CPU"] or 1)), 1)
        total = ray.cluster_resources()
        return max(int(min(total.get(name, 0) / (amount or 1) for name, amount in self._resources.items())), 1)

    def _connect(self, *, start: bool) -> bool:
        if self._disconnect is None and connect(self._address, start=start):
            self._disconnect = weakref.finalize(self, disconnect)
        return self._disconnect is not None

    def _connect_or_start(self) -> None:
        self._connect(start=True)
        if _connection.own_cluster:
            self._resources = {_SLOT: 1, **{name: n for name, n in self._resources.items() if name != "CPU"}}

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        self._shares = dict(enumerate(shares))
        self._connect_or_start()
        try:
            count = len(shares)
            self._reserve([dict(self._resources)] * count, "workers")
            assert self._group is not None
            self._places = {worker: Place(self._group, worker) for worker in self._shares}
            for node in {*placement_group_table(self._group)["bundles_to_node_id"].values()} - {None, ""}:
                _monitor_of(node, self._runtime_env)  # so that it starts at the same time as the workers
            self.statuses = [WorkerStatus(bytearray(WorkerStatus.NBYTES)) for _ in range(most_workers(shares))]
            for worker in self._shares:
                self._set_actor(worker)
            # All workers are up before the first request, so that no constructor's time runs before it can begin.
            for worker, lost in self.wait():
                assert isinstance(lost, Lost)
                raise ParallelEnvError(f"worker {worker} could not be started by Ray: {lost.reason}", worker=worker)
        except BaseException:
            self.stop(0.0)
            raise

    def _reserve(self, bundles: list[dict[str, float]], of: str) -> None:
        """Set resources aside, and wait until there is room; there is a bundle for each of the workers or nodes."""
        timeout = self._placement_timeout
        self._group = placement_group(bundles, strategy=self._placement)
        before_warning = min(_WARN_AFTER_S, timeout)
        if not self._group.wait(before_warning):
            shortage = functools.partial(shortage_of, bundles[0], len(bundles), of)
            logger.warning("waiting for room in the Ray cluster: %s", shortage())
            if not self._group.wait(timeout - before_warning):
                raise ParallelEnvError(
                    f"the Ray cluster has no room after {timeout:g} s: {shortage()}. Ask for fewer workers "
                    "(num_workers=) or less for each (RayBackend(num_cpus=, resources=)), or add nodes"
                )

    def _set_actor(self, worker: int, *, spare: bool = False) -> Actor:
        """Start the actor of a worker.

        One beside the first ones takes no CPUs: its bundle has those of the worker that it will replace. Other
        resources cannot be shared, so with those it is placed anywhere.
        """
        resources, place = dict(self._resources), self._places[worker]
        strategy: Any = place.strategy()
        if place.shared:
            for name in ("CPU", _SLOT):
                resources.pop(name, None)
            if resources == _ANYWHERE:
                resources = {}
            elif resources:
                strategy = "DEFAULT"
        actor = ray.remote(RayWorker).options(
            **ray_options(resources),
            scheduling_strategy=strategy,
            runtime_env=self._runtime_env,
            max_restarts=0,
        )
        path = [*map(os.path.abspath, sys.path)]
        identity = interpreter.next_identity()
        handle = actor.remote(self._shares[worker], self._num_threads, self._token, path, identity)
        self._actors[worker] = new = Actor(handle, spare=spare)
        self.statuses[worker] = new.status
        return new

    def replace(self, worker: int) -> None:
        if self._group is None or not ray.is_initialized():
            return  # closed meanwhile by a signal handler
        old = self._actors[worker]
        for end in _kill([old]):
            _monitor_result(end)
        new = self._set_actor(worker)
        if old.starting is not None:
            new.since = old.since

    def add(self, worker: int, share: Sequence[int], beside: int | None = None) -> None:
        if self._group is None or not ray.is_initialized():
            return  # likewise
        assert beside is not None
        self._shares[worker], self._beside[worker] = share, beside
        if beside in self.leaving():
            self._places[worker] = self._place_elsewhere(dict(self._resources), self._targets.get(beside))
        else:
            self._places[worker] = self._places[beside]._replace(shared=True)
        self._set_actor(worker, spare=True)

    def remove(self, worker: int, *, kill: bool) -> bool:
        if worker not in self._actors:
            return True
        if not kill and not self._actors[worker].closed:
            return False
        actor = self._actors.pop(worker)
        if ray.is_initialized():
            self._ends += _kill([actor])
            _, self._ends = ray.wait(self._ends, num_returns=len(self._ends), timeout=0)
        self._free(self._places.pop(worker))
        self._forget(worker)
        return True

    def _forget(self, worker: int) -> None:
        """Forget a worker that is gone."""
        del self._shares[worker]
        self._targets.pop(worker, None)
        if (old := self._beside.pop(worker, None)) is not None and old in self._shares:
            self._targets.pop(old, None)  # it could not move there
        self._beside = {added: old for added, old in self._beside.items() if old != worker}

    def _free(self, place: Place) -> None:
        """Free what is set aside at a place, unless others are there, or it was set aside for all at the start."""
        groups = [self._group, *[other.group for other in self._places.values()]]
        if ray.is_initialized() and all(group is not place.group for group in groups):
            remove_placement_group(place.group)

    # -- moving to other nodes -------------------------------------------------------------------------------------

    def leaving(self) -> Collection[int]:
        if not ray.is_initialized():
            return ()
        draining = draining_nodes()
        return {worker for worker in self._shares if worker in self._targets or self._node_id(worker) in draining}

    def _node_id(self, worker: int) -> str:
        """The id of the node of a worker; empty if it is not known yet."""
        actor = self._actors.get(worker)
        return "" if actor is None else actor.node

    def rebalance(self, workers: Sequence[int]) -> int:
        if self._group is None or not ray.is_initialized():
            return 0
        nodes = {worker: self._node_id(worker) for worker in workers if worker not in self._targets}
        where = {worker: node for worker, node in nodes.items() if node}
        moves = moves_between(where, self._room(self._resources))
        self._targets.update(moves)
        return len(moves)

    def _room(self, resources: Mapping[str, float]) -> dict[str, int]:
        """By node that stays, for how many more of these resources there is room."""
        free, draining = available_resources_per_node(), draining_nodes()
        return {
            node["NodeID"]: int(
                min(free[node["NodeID"]].get(name, 0) / amount for name, amount in resources.items() if amount)
            )
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] in free and node["NodeID"] not in draining
        }

    def _place_elsewhere(self, resources: dict[str, float], node: str | None) -> Place:
        """A place with these resources of its own, on a node, or on any that stays; Ray waits for room."""
        where: dict[str, Any] = {} if node is None else {"bundle_label_selector": [{_NODE_LABEL: node}]}
        return Place(placement_group([resources], strategy=self._placement, **where), 0)

    def memory(self, worker: int) -> int | None:
        """As of the last call, so that nobody waits for a machine; but the first call for an actor waits."""
        actor = self._actors.get(worker)
        if actor is None or actor.monitor is None or not ray.is_initialized():
            return None
        if actor.memory_asked is None or ray.wait([actor.memory_asked], timeout=0)[0]:
            ref = actor.memory_asked or actor.monitor.memory.remote(actor.key)
            actor.memory = _monitor_result(ref)
            actor.memory_asked = actor.monitor.memory.remote(actor.key)
        return actor.memory

    def allocate(self, layout: Layout) -> Any:
        block = mmap.mmap(-1, layout.nbytes)
        self._slices = RecordSlices(layout, block)
        return block

    # -- requests and replies --------------------------------------------------------------------------------------

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        for worker, request in requests.items():
            if not self._actors or not ray.is_initialized():
                self._lost.append((worker, Lost(None, "", "Ray has been shut down")))
            elif self._actors[worker].starting is not None:
                self._actors[worker].waiting.append(request)
            else:
                self._send(worker, request)

    def _send(self, worker: int, request: Request) -> None:
        actor = self._actors[worker]
        if request.message is Message.CLOSE and actor.monitor is not None:
            actor.monitor.discard.remote(actor.key)
        env_ids = self._env_ids(worker, request)
        if request.message in WITH_RESULTS:
            self._owners.update(dict.fromkeys(env_ids, worker))
        # One order for each environment if each gets a reply of its own as soon as it is done, else one for all.
        parts = [request._replace(env_ids=(env_id,)) for env_id in env_ids] if request.each else [request]
        for place, part in enumerate(parts, 1):
            actions = None
            if self._slices is not None and request.message in WITH_ACTIONS:
                actions = self._slices.actions(self._env_ids(worker, part))
            actor.sent += 1
            order = pickle.dumps((actor.sent, part, actions, place == 1), pickle.HIGHEST_PROTOCOL)
            ref = actor.handle.execute.remote(order)
            actor.pending.append(Pending(actor.sent, part, place == len(parts), ref))

    def _env_ids(self, worker: int, request: Request) -> Sequence[int]:
        return self._shares[worker] if request.env_ids is None else request.env_ids

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        replies, self._lost = self._lost, []
        while not self._interrupted and not any(isinstance(reply, Lost) for _, reply in replies):
            expected, starting = {}, False  # the worker of each reference to a next result
            for worker, actor in self._actors.items():
                if actor.starting is not None:
                    expected[actor.starting], starting = worker, True
                elif actor.pending:
                    expected[actor.pending[0].ref] = worker
            if not expected:
                break
            missing = at_least - len(replies)
            left = max(deadline - time.monotonic(), 0.0)
            results = results_of([*expected], missing, min(left, POLL_S))
            for ref, result in results:
                replies += [(expected[ref], reply) for reply in self._receive(expected[ref], result)]
            if starting:
                replies += self._late_starts()
            if missing <= 0 or (left == 0.0 and not results):
                break
        self._interrupted = False
        if timeout is not None and len(replies) < at_least:
            self.look()
        return replies

    def _late_starts(self) -> list[tuple[int, Lost]]:
        """Raise if a worker should have started by now, since all would wait for it; a spare is lost."""
        lost = []
        for worker, actor in self._actors.items():
            if actor.starting is not None and time.monotonic() - actor.since > self._placement_timeout:
                text = self._never_started(worker, self._places[worker], self._resources)
                if not actor.spare:
                    raise ParallelEnvError(text, env_ids=[*self._shares[worker]], worker=worker)
                lost.append((worker, Lost(None, "", text)))
        return lost

    def _never_started(self, worker: int, place: Place, resources: Mapping[str, float], reason: str = "") -> str:
        to_do = "Add nodes, or raise RayBackend(placement_timeout=)"
        if not reason and not place.shared and placement_group_table(place.group)["state"] == "CREATED":
            reason = "Ray has set aside what it needs, but its process is not ready yet"
            to_do = (
                "Raise RayBackend(placement_timeout=), as the node may be busy or install a runtime_env, or read Ray's "
                "logs on that node"
            )
        started = "started" if self._slices is None else "replaced"
        return (
            f"worker {worker} could not be {started} within {self._placement_timeout:g} s: "
            f"{reason or shortage_of(resources, 1)}. {to_do}"
        )

    def _receive(self, worker: int, packed: Any) -> list[Reply | Lost]:
        """The replies of a worker, from its result or from Ray's error in its place."""
        actor = self._actors[worker]
        if isinstance(packed, RayTaskError) and actor.starting is None:
            raise packed
        if isinstance(packed, RayError):
            return self._note_death(worker, packed)
        if isinstance(packed, ProcessInfo):  # it is up, and a node monitor has to watch it
            actor.clock_offset, actor.node = time.monotonic() - packed.now, packed.node
            actor.monitor = _monitor_of(packed.node, self._runtime_env)
            actor.starting = actor.monitor.watch.remote(actor.key, packed)
            return []
        if actor.starting is not None:
            self._note_start(worker, watched=packed)
            return []
        result, pending = unpack(packed), actor.pending.popleft()
        if not result.replies:
            return []  # discarded
        if result.records is not None and self._slices is not None:
            self._slices.put_results(self._env_ids(worker, pending.request), result.records)
        actor.update(result.status, result.replies[-1].completed)
        actor.closed |= pending.request.message is Message.CLOSE
        return [actor.localized(reply, pending) for reply in result.replies]

    def _note_start(self, worker: int, *, watched: bool) -> None:
        """Send the requests that waited for the start of a worker."""
        actor = self._actors[worker]
        actor.starting, actor.ready = None, time.monotonic()
        if not watched:  # if it dies, the error has no exit code and no stack
            actor.monitor = None
        waiting, actor.waiting = actor.waiting, []
        for request in waiting:
            self._send(worker, request)

    def interrupt(self) -> None:
        self._interrupted = True

    # -- states and deaths of workers ------------------------------------------------------------------------------

    def look(self) -> None:
        now = time.monotonic()
        if now - self._statuses_read < STATUS_INTERVAL_S:
            return
        self._statuses_read = now
        busy = {actor.key: actor for actor in [*self._actors.values()] if actor.pending}
        for ref in [monitor.statuses.remote(keys) for monitor, keys in _by_monitor(busy.values()).items()]:
            moment, statuses = _monitor_result(ref) or (0.0, {})
            for key, status in statuses.items():
                busy[key].update(status, moment)
        self.looking_s += time.monotonic() - now

    def ready_since(self, worker: int) -> float:
        actor = self._actors.get(worker)
        return 0.0 if actor is None else actor.ready

    def ahead(self, worker: int) -> float:
        return self._actors[worker].clock_offset

    def stack(self, worker: int, *, harmless: bool = False) -> str:
        monitor, key = self._actors[worker].monitor, self._actors[worker].key
        return "" if monitor is None else _monitor_result(monitor.stack.remote(key, harmless=harmless)) or ""

    def end(self, worker: int) -> list[Reply]:
        return self._fetch_last_state(worker, kill=True)[0]

    def _fetch_last_state(self, worker: int, *, kill: bool) -> tuple[list[Reply], Lost]:
        """Copy the records of a dead worker; returns its replies that have not arrived, and how it died."""
        actor, slices = self._actors[worker], self._slices
        share = [env_id for env_id in self._shares[worker] if self._owners.get(env_id) == worker]
        places = [] if slices is None else [slices.place(env_id) for env_id in share]
        last_state = None
        if actor.monitor is not None:
            last_state = _monitor_result(actor.monitor.last_state.remote(actor.key, places, kill=kill))
        if last_state is None:
            return [], Lost(None, "")
        status, records, saved, lost = last_state
        actor.status.copy_from(status, actor.clock_offset)
        if slices is not None and records:
            slices.put_records(share, records)
        pending = {order.number: order for order in actor.pending}
        return [actor.localized(reply, pending[number]) for number, reply in saved if number in pending], lost

    def _note_death(self, worker: int, error: RayError) -> list[Reply | Lost]:
        """The last replies of a worker that is dead, or whose monitor is, by Ray's error."""
        actor, text, reason = self._actors[worker], str(error).strip(), reason_of(error)
        if actor.starting is not None and actor.monitor is not None:
            logger.warning("the node monitor of environments %s is dead: %s", [*self._shares[worker]], reason)
            with _lock:  # `_monitor_of` starts another one
                monitors = _connection.monitors
                _connection.monitors = {key: one for key, one in monitors.items() if one is not actor.monitor}
            self._note_start(worker, watched=False)
            return []
        if actor.starting is not None and self._slices is not None and not actor.spare:
            # It has not begun, so this is no fault of its environments. Ray may not know yet that a machine is gone.
            if time.monotonic() - actor.since > self._placement_timeout:
                why = self._never_started(worker, self._places[worker], self._resources, reason)
                raise ParallelEnvError(why, env_ids=[*self._shares[worker]], worker=worker)
            self.replace(worker)
            self._actors[worker].waiting = actor.waiting
            return []
        replies, lost = self._fetch_last_state(worker, kill=False)
        if actor.starting is not None:
            reason = text
        actor.starting = None
        actor.pending.clear()
        actor.waiting.clear()
        return [*replies, lost._replace(reason="" if reason == _PROCESS_DIED else reason)]

    def stop(self, timeout: float) -> list[int]:
        actors, self._actors = [*self._actors.values()], {}
        group, self._group = self._group, None
        if ray.is_initialized():
            ends = [actor.handle.__ray_terminate__.remote() for actor in actors if actor.closed]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=timeout)
            for end in [*self._ends, *_kill(actors)]:
                _monitor_result(end)
            for one in {group, *[place.group for place in self._places.values()]} - {None}:
                remove_placement_group(one)
        if self._disconnect is not None:
            self._disconnect()
        return []

    def abandon(self) -> None:
        if self._disconnect is not None:
            self._disconnect.detach()


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
        return [(ref, _get(ref)) for ref in ready]


def later(moment: float, than: float) -> float:
    """The time of a reply, later than that of the worker's last one, even if `clock_offset` has decreased since."""
    return max(moment, math.nextafter(than, math.inf))


def reason_of(error: RayError) -> str:
    """Why an actor is dead, by Ray's error."""
    text = str(error).strip()
    because = _BECAUSE.search(text)
    return because[1] if because else text.partition("\n")[0].rstrip(".") or type(error).__name__


def _get(ref: Any, timeout: float | None = None) -> Any:
    """A result, or Ray's error in its place."""
    try:
        return ray.get(ref, timeout=timeout)
    except RayError as error:
        return error


def _monitor_result(ref: Any) -> Any:
    """The result of a node monitor; None if it is dead."""
    result = _get(ref, _MONITOR_TIMEOUT_S)
    return None if isinstance(result, RayError) else result


def _kill(actors: Sequence[Actor]) -> list[Any]:
    """Kill workers, whatever they are doing; returns references to the ends of all processes that they have started."""
    ends = [monitor.end.remote(keys) for monitor, keys in _by_monitor(actors).items()]
    for actor in actors:
        ray.kill(actor.handle)
    return ends


def _by_monitor(actors: Iterable[Actor]) -> dict[Any, list[int]]:
    """The keys of workers by the handle of their node monitor."""
    keys: dict[Any, list[int]] = {}
    for actor in actors:
        if actor.monitor is not None:
            keys.setdefault(actor.monitor, []).append(actor.key)
    return keys


def _check_positive(name: str, number: Any, kind: type[Any], expected: str) -> None:
    if isinstance(number, bool) or not isinstance(number, kind) or not number > 0:
        raise ValueError(f"{name} must be {expected} more than 0, got {number!r}")


# -- the cluster ---------------------------------------------------------------------------------------------------


@dataclass
class _Connection:
    """This process's connection, which all its backends share; the last one ends all that they have started."""

    users: int = 0
    started_here: bool = False
    own_cluster: bool = False
    monitors: dict[tuple[str, str], Any] = field(default_factory=dict)  # by node and runtime_env


_lock = threading.RLock()  # a finalizer may disconnect in the middle of anything
_connection = _Connection()


def connect(address: str | None, *, start: bool = False) -> bool:
    """Connect this process to a cluster, if it is not; one `disconnect` must follow each True.

    None or "auto" finds the cluster by `RAY_ADDRESS` or on this machine. If there is none, None starts one with
    `start`, else returns False.
    """
    with _lock:
        if ray.is_initialized():
            connected = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", connected):
                raise ValueError(
                    f"RayBackend(address={address!r}): this process is connected to the Ray cluster at {connected} "
                    "already; call ray.shutdown() first, or leave the address out"
                )
        elif (found := _announced() if address in (None, "auto") else address) is not None:
            if found.startswith("ray://"):
                raise ValueError(
                    f"the address {found!r} is that of a Ray Client, which cannot run these workers; run this program "
                    "on a node of the cluster, without an address"
                )
            try:
                _check_reachable(found)
                ray.init(address=found)
            except (OSError, RuntimeError, RayError) as error:
                reason = str(error).strip().partition("\n")[0].rstrip(".")
                to_do = "Start one with `ray start --head`, or leave the address, and RAY_ADDRESS, out"
                if type(error).__name__ == "AuthenticationError":  # older releases have none
                    to_do = "It wants a token: set RAY_AUTH_MODE=token, as docs/clusters.md says under Access"
                raise ConnectionError(f"no Ray cluster can be reached at {found}: {reason}. {to_do}") from error
            _connection.started_here, _connection.own_cluster = True, False
        elif address is not None:
            raise ConnectionError("no Ray cluster runs on this machine, and RAY_ADDRESS names none: `ray start --head`")
        elif start:
            ray.init(address="local", resources={_SLOT: _SLOTS}, include_dashboard=False)
            _connection.started_here = _connection.own_cluster = True
        else:
            return False
        _connection.users += 1
        return True


def disconnect() -> None:
    """Undo one `connect`."""
    global _connection
    with _lock:
        _connection.users -= 1
        if _connection.users:
            return
        old, _connection = _connection, _Connection()
        if ray.is_initialized():
            for monitor in old.monitors.values():
                ray.kill(monitor)
            if old.started_here:
                ray.shutdown()


def _announced() -> str | None:
    """The address in RAY_ADDRESS, else of the cluster of `ray start` on this machine, not of another program's own."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto"):
        return None if address == "local" else address
    on_linux = os.environ.get("TMPDIR") if sys.platform == "linux" else None
    default = tempfile.gettempdir() if sys.platform == "win32" else "/tmp"
    file = Path(os.environ.get("RAY_TMPDIR") or on_linux or default, "ray", "ray_current_cluster")
    try:
        address = file.read_text().strip()
        _check_reachable(address)
    except OSError:  # there is no file, or its cluster is gone
        return None
    return address or None


def _check_reachable(address: str) -> None:
    """Raise an `OSError` if nothing listens at an address: Ray itself would retry for a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S):
            pass


def draining_nodes() -> Collection[str]:
    """The ids of nodes that are about to go, such as preemptible machines that have got their notice."""
    nodes: Collection[str] = global_state.get_draining_nodes()  # Ray has no public function for it
    return nodes


def moves_between(workers: Mapping[int, str], room: Mapping[str, int]) -> dict[int, str]:
    """Which workers have to move where so that nodes have equal numbers, as far as there is room.

    Args:
        workers: By worker, the id of its node.
        room: By node, for how many more workers there is room.
    """
    counts, left = Counter(workers.values()), {**room}
    moves: dict[int, str] = {}
    while True:
        goals = [node for node, more in left.items() if more > 0]
        if not counts or not goals:
            return moves
        fullest, goal = max(counts, key=lambda node: counts[node]), min(goals, key=lambda node: counts[node])
        if counts[fullest] - counts[goal] < 2:
            return moves
        worker = next(worker for worker, node in workers.items() if node == fullest and worker not in moves)
        moves[worker] = goal
        counts[fullest] -= 1
        counts[goal] += 1
        left[goal] -= 1


def ray_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """The options of an actor that takes these resources: Ray has arguments of their own for some."""
    named = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "memory": resources.get("memory"),
    }
    return {**named, "resources": {name: amount for name, amount in resources.items() if name not in _WITH_OPTIONS}}


def shortage_of(resources: Mapping[str, float], count: int, of: str = "workers") -> str:
    """What so many workers or nodes want, and what the cluster has."""
    total, free = ray.cluster_resources(), ray.available_resources()
    resources = {name: amount for name, amount in resources.items() if name != _SLOT} or resources
    each = ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
    there = ", ".join(f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in resources)
    needed = f"it wants {each}" if count == 1 else f"{count} {of} want {each} each"
    nodes = sum(node["Alive"] for node in ray.nodes())
    return f"{needed}, the {nodes} node{'s have' if nodes != 1 else ' has'} {there} together"


def _monitor_of(node: str, runtime_env: dict[str, Any] | None) -> Any:
    """The handle of the `RayNodeMonitor` on a node, started here if there is none."""
    key = node, repr(runtime_env)
    with _lock:
        if key not in _connection.monitors:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            monitor = ray.remote(RayNodeMonitor)
            options = monitor.options(num_cpus=0, scheduling_strategy=strategy, runtime_env=runtime_env)
            _connection.monitors[key] = options.remote()
        return _connection.monitors[key]
