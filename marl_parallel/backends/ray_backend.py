"""Workers on the nodes of a Ray cluster, on any number of machines: the backend in the caller's process.

Beside it, `ray_cluster.py` connects to the cluster, `ray_assignment.py` starts actors and assigns workers to
them, `ray_placement.py` says where they are, and `ray_exchange.py` sends requests and receives results.
`ray_actor.py` runs in the actors.
"""

from __future__ import annotations

import math
import mmap
import sys
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from marl_parallel.types import ParallelEnvError, how_to_install

try:
    import ray
except ImportError as error:
    raise ImportError(f'backend="ray" needs Ray: {how_to_install("ray")} ({error})') from error
from ray.exceptions import RayError, RayTaskError

from marl_parallel.backends.ray_actor import unpack
from marl_parallel.backends.ray_assignment import Assignment
from marl_parallel.backends.ray_cluster import connect, disconnect, has_own_cluster
from marl_parallel.backends.ray_exchange import ANSWERS_WITHIN_S, ActorState, answer_of, reason_of, results_of
from marl_parallel.backends.ray_placement import Placement
from marl_parallel.core.backend import Backend, Capabilities, most_workers, usable_cpus
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.block.records import WITH_ACTIONS, RecordOffsets, RecordSlices
from marl_parallel.core.messages import Lost, Reply, Request
from marl_parallel.core.worker_status import WorkerStatus

__doctest_requires__ = ["ray"]

_POLL_S = 0.1  # how often `wait` checks whether it is interrupted
_STATUS_INTERVAL_S = 0.01
_ENDS_WITHIN_S = 30.0


class RayBackend(Backend):
    """Workers on the nodes of a Ray cluster: processes of actors, each with one or more workers.

    It uses the cluster that this process is connected to, else the cluster at `address`, at `RAY_ADDRESS`, or of
    `ray start` on this machine, else starts a cluster on this machine. It stops only what it started. All nodes must
    run Linux.

    Args:
        address: Address of the cluster, such as `"10.0.0.1:6379"`; None finds one as above.
        num_cpus: CPUs that Ray sets aside for each worker; simulators that mostly wait need less than one. With 0,
            workers start even where all CPUs are set aside for others.
        resources: Other resources for each worker, by name, such as `{"GPU": 0.25}`.
        placement: `"PACK"` puts workers on as few nodes as possible, so that a batch takes as few calls as possible.
            `"SPREAD"` puts them on as many nodes as possible.
        runtime_env: Ray's `runtime_env` of the actors: packages, files, environment variables. Workers inherit it.
        placement_timeout: Seconds to wait for room in the cluster and for workers to start, replacements included.
            If the cluster grows by itself, allow enough time for that.
        workers_per_node: The most workers of an actor; with 1, each worker has its own actor. None: as many as Ray
            finds CPUs for on the actor's node.
        num_threads: BLAS, OpenMP and torch threads in each worker; None leaves them alone.

    Raises:
        ValueError: An argument has a value that is not allowed.
        RuntimeError: This machine does not run Linux.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from marl_parallel import ParallelEnv
        >>> backend = RayBackend(num_cpus=0.5)
        >>> with ParallelEnv([simple_spread_v3.parallel_env] * 4, backend=backend, num_workers=2) as env:
        ...     observations, infos = env.reset()
        >>> len(observations)
        4
    """

    capabilities = Capabilities(has_standbys=True, may_leave=True)

    def __init__(
        self,
        address: str | None = None,
        num_cpus: float = 1,
        resources: Mapping[str, float] | None = None,
        placement: str = "PACK",
        runtime_env: Mapping[str, Any] | None = None,
        *,
        workers_per_node: int | None = None,
        placement_timeout: float = 60.0,
        num_threads: int | None = 1,
    ) -> None:
        if sys.platform != "linux":
            raise RuntimeError(
                f'backend="ray" needs Linux on this machine and on all nodes, and this is {sys.platform}; use '
                'backend="process" here'
            )
        if placement not in ("SPREAD", "PACK"):
            raise ValueError(f"placement must be one of SPREAD, PACK, got {placement!r}")
        of_each = {"CPU": num_cpus, **(resources or {})}
        _check_amounts(of_each)
        _check_positive("placement_timeout", placement_timeout, Real, "a number")
        for name, number in {"workers_per_node": workers_per_node, "num_threads": num_threads}.items():
            if number is not None:
                _check_positive(name, number, Integral, "None or an integer")
        self._address, self._num_cpus = address, num_cpus
        self._placement = Placement(of_each, placement, workers_per_node, placement_timeout)
        self._workers = Assignment(self._placement, runtime_env, num_threads)
        self._disconnect: weakref.finalize[..., Any] | None = None
        self._is_open = False
        self._slices: RecordSlices | None = None
        self._lost: list[tuple[int, Lost]] = []
        self._interrupted = False
        self._begun: set[ActorState] = set()  # with an exchange that the present `wait` has begun
        self._looked = 0.0
        self._changed = True  # whether anything was sent or received since the last `look`

    # -- starting --------------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        if not self._connect(start=False):
            return max(int(usable_cpus() / (self._num_cpus or 1)), 1)
        return self._placement.capacity()

    def _connect(self, *, start: bool) -> bool:
        if self._disconnect is None and connect(self._address, start=start):
            self._disconnect = weakref.finalize(self, disconnect)
        return self._disconnect is not None

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        most = most_workers(shares)
        self.statuses = [_ActorStatus(self._workers, worker) for worker in range(most)]
        self._connect(start=True)
        if has_own_cluster():
            self._placement.take_slots()
        try:
            self._is_open = True
            self._workers.start(shares, most, most_requests)
            # Wait until all workers are up: a constructor's timeout must not run before the constructor can begin.
            self.wait()
        except BaseException:
            self.stop(0.0)
            raise

    def allocate(self, nbytes: int, layout: Layout | None = None) -> Any:
        assert layout is not None
        block = mmap.mmap(-1, nbytes)
        self._slices = RecordSlices(layout, block)
        self._workers.record_offsets = RecordOffsets.of(layout)
        allocated = [actor.control("allocate", self._workers.record_offsets) for actor in self._workers.actors]
        timeout = self._placement.timeout
        _, missing = ray.wait(allocated, num_returns=len(allocated), timeout=timeout)
        if missing:
            actor = self._workers.actors[allocated.index(missing[0])]
            workers = [*actor.pending]
            raise ParallelEnvError(
                f"the actor on node {actor.node[:8]} of the Ray cluster, which has workers {workers}, did not allocate "
                f"memory within {timeout:g} s. The node may be frozen, overloaded, or cut off from the network: "
                "see Ray's logs on that node, or raise RayBackend(placement_timeout=)",
                env_ids=[env_id for worker in workers for env_id in self._workers.shares[worker]],
                worker=workers[0],
            )
        for ref in allocated:
            answer_of(ref)  # a death is noticed with the next request
        return block

    # -- workers in the place of others, and more of them ------------------------------------------------------------

    def start_worker(self, worker: int, share: Sequence[int], beside: int | None = None) -> None:
        if self._is_connected():  # else closed meanwhile by a signal handler
            if beside is None:
                self._workers.replace(worker)
            else:
                self._workers.add(worker, share, beside)
            self.statuses[worker] = _ActorStatus(self._workers, worker)

    def remove(self, worker: int, *, kill: bool) -> bool:
        return self._workers.remove(worker, kill=kill)

    @property
    def leaving(self) -> Collection[int]:
        return self._workers.leaving() if ray.is_initialized() else ()

    def _is_connected(self) -> bool:
        return self._is_open and ray.is_initialized()  # without a connection, Ray would start again

    # -- requests and replies --------------------------------------------------------------------------------------

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        self._changed = True
        by_actor: dict[ActorState, dict[int, Request]] = {}
        connected = ray.is_initialized()
        for worker, request in requests.items():
            actor = self._workers.actor_of(worker)
            if actor is None or not connected:
                self._lost += self._unknown([(worker, Lost(None, "", "Ray has been shut down"))])
            elif actor.lost is not None:
                self._lost += self._unknown([(worker, Lost(None, "", actor.lost))])
            else:
                by_actor.setdefault(actor, {})[worker] = request
        for actor, part in by_actor.items():
            actor.take_requests(part)
            if actor.starting is not None:
                actor.waiting.append((part, together))
            else:
                self._send(actor, part, together=together)

    def _send(
        self, actor: ActorState, requests: dict[int, Request], *, together: bool = False, at_least: int = 1
    ) -> None:
        actions = None
        if self._slices is not None:
            env_ids: list[int] = []
            for worker, request in requests.items():
                if request.message in WITH_ACTIONS:
                    env_ids += self._workers.shares[worker] if request.env_ids is None else request.env_ids
            if env_ids:
                actions = self._slices.actions(env_ids)
        actor.send(requests, actions, together, actor.owes if together else at_least)

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        replies: list[tuple[int, Reply | Lost]] = [*self._lost]
        self._lost.clear()
        self._begun.clear()
        while not self._interrupted and not any(isinstance(reply, Lost) for _, reply in replies):
            missing = at_least - len(replies)
            expected = self._expected(missing)
            if not expected:
                break
            remaining = max(deadline - time.monotonic(), 0.0)
            count, new = self._collect(expected, missing, min(remaining, _POLL_S))
            replies += new
            for actor in [*self._workers.actors]:
                replies += self._check_start(actor)
            if missing <= 0 or (remaining == 0.0 and not count):
                break
        self._interrupted = False
        if timeout is not None and len(replies) < at_least:
            replies += self._hurry()
        return replies

    def _expected(self, missing: int) -> dict[Any, ActorState]:
        """The actor of each reference to a next result; begins exchanges where none is in flight."""
        actors = [actor for actor in self._workers.actors if actor.lost is None]
        owed = sum(actor.owes for actor in actors)
        expected = {}
        for actor in actors:
            if actor.starting is not None:
                expected[actor.starting] = actor
            elif owes := actor.owes:
                if actor.in_flight is None:
                    self._send(actor, {}, at_least=owes if missing >= owed else 1)
                    self._begun.add(actor)
                expected[actor.in_flight] = actor
        return expected

    def _collect(
        self, expected: Mapping[Any, ActorState], missing: int, patience: float
    ) -> tuple[int, list[tuple[int, Reply | Lost]]]:
        """Wait for results; returns how many there were, and the replies in them."""
        everything = missing >= sum(actor.owes for actor in expected.values())
        results = results_of([*expected], len(expected) if everything else min(missing, 1), patience)
        replies: list[tuple[int, Reply | Lost]] = []
        for ref, result in results:
            replies += self._receive(expected[ref], result)
        return len(results), replies

    def _hurry(self) -> list[tuple[int, Reply | Lost]]:
        """After a timeout, collect the replies of exchanges that wait for more; without any, look at the statuses."""
        in_flight = [actor for actor in self._workers.actors if actor.in_flight is not None]
        if any(actor.waits_for_more for actor in in_flight):
            self._look(hurry=True)
        # The replies of an exchange that has just begun were ready before.
        late = {actor.in_flight: actor for actor in in_flight if actor.waits_for_more or actor in self._begun}
        if late:
            return self._collect(late, len(late), _POLL_S)[1]
        self.look()
        return []

    def _receive(self, actor: ActorState, result: Any) -> Sequence[tuple[int, Reply | Lost]]:
        """The replies in an actor's result; the losses of its workers if the result is an error of Ray."""
        self._changed = True
        if isinstance(result, RayTaskError) and actor.starting is None:
            raise result
        if isinstance(result, RayError):
            return self._handle_lost(actor, result)
        if actor.starting is not None:
            node, now = result
            self._workers.separate(actor, node)
            for requests, together in actor.mark_started(node, now):
                self._send(actor, requests, together=together)
            return []
        return actor.receive(result, self._slices, self.statuses)

    def interrupt(self) -> None:
        self._interrupted = True

    # -- starts that fail ------------------------------------------------------------------------------------------

    def _handle_lost(self, actor: ActorState, error: RayError) -> Sequence[tuple[int, Reply | Lost]]:
        """The losses of the workers of an actor that is gone; one that has not started is started again."""
        reason = reason_of(error)
        if actor.starting is None:
            return self._unknown(actor.mark_lost(reason))
        if actor.is_standby:
            return actor.give_up(reason)
        if self._workers.record_offsets is None:
            worker = next(iter(actor.pending))
            raise ParallelEnvError(f"worker {worker} could not be started by Ray: {error}", worker=worker)
        # The actor has not started, so its environments are not at fault. Ray may not know yet that a machine is gone.
        self._check_start(actor, reason)
        self._workers.start_again(actor, reason)
        return []

    def _unknown(self, losses: Sequence[tuple[int, Lost]]) -> Sequence[tuple[int, Lost]]:
        """These losses; what the workers were doing is unknown, since what they had written is lost, too."""
        for worker, _ in losses:
            self.statuses[worker].forget_activity()
        return losses

    def _check_start(self, actor: ActorState, reason: str = "") -> Sequence[tuple[int, Reply | Lost]]:
        """Raise an error if an actor has not started in time; a standby actor is given up instead."""
        if actor.starting is None or not actor.pending:
            return []
        if time.monotonic() - actor.since <= self._placement.timeout:
            return []
        worker = next(iter(actor.pending))
        started = "started" if self._workers.record_offsets is None else "replaced"
        text = f"worker {worker} could not be {started} {self._placement.why_not_started(actor.bundle, reason)}"
        if actor.is_standby:
            return actor.give_up(text)
        raise ParallelEnvError(text, env_ids=[*self._workers.shares[worker]], worker=worker)

    # -- states and ends of workers --------------------------------------------------------------------------------

    def look(self) -> None:
        due = self._changed or time.monotonic() - self._looked >= _STATUS_INTERVAL_S
        if due and ray.is_initialized():  # else Ray would start again
            self._look(hurry=False)

    def _look(self, *, hurry: bool) -> None:
        """Copy all statuses; with `hurry`, exchanges that wait for more than one reply return with what is there."""
        self._looked, self._changed = time.monotonic(), False
        actors = [actor for actor in self._workers.actors if actor.is_up]
        for actor, ref in [(one, one.control("look", hurry=hurry and one.waits_for_more)) for one in actors]:
            if (answer := answer_of(ref)) is not None:
                now, statuses = answer
                actor.copy_statuses(now, statuses, self.statuses)
        self.seconds_in_look += time.monotonic() - self._looked

    def _actor_that_answers(self, worker: int) -> ActorState | None:
        actor = self._workers.actor_of(worker)
        return actor if actor is not None and actor.is_up and ray.is_initialized() else None

    def memory(self, worker: int) -> int | None:
        actor = self._actor_that_answers(worker)
        return None if actor is None else actor.memory(worker)

    def stack(self, worker: int, *, harmless: bool = False) -> str:
        actor = self._actor_that_answers(worker)
        return "" if actor is None else answer_of(actor.control("stack", worker, harmless=harmless)) or ""

    def end(self, worker: int) -> list[Reply]:
        actor = self._actor_that_answers(worker)
        if actor is None or (packed := actor.ended(worker, _ENDS_WITHIN_S)) is None:
            self.statuses[worker].forget_activity()
            return []
        replies = actor.copy_from(unpack(packed), self._slices, self.statuses)
        return [reply for _, _, reply in replies if not isinstance(reply, Lost)]

    def stop(self, timeout: float) -> list[int]:
        self._is_open = False
        try:
            if ray.is_initialized():
                ends = [actor.control("stop", timeout) for actor in self._workers.actors if actor.is_up]
                if ends:
                    ray.wait(ends, num_returns=len(ends), timeout=timeout + ANSWERS_WITHIN_S)
        finally:  # also after a second Ctrl-C
            try:
                self._workers.end_all()
            finally:
                if self._disconnect is not None:
                    self._disconnect()
        return []

    def abandon(self) -> None:
        if self._disconnect is not None:
            self._disconnect.detach()


class _ActorStatus(WorkerStatus):
    """The latest known status of a worker."""

    def __init__(self, workers: Assignment, worker: int) -> None:
        super().__init__(bytearray(self.NBYTES))
        self._workers, self._worker = workers, worker

    @property
    def ready_since(self) -> float:
        actor = self._workers.actor_of(self._worker)
        return 0.0 if actor is None else actor.ready

    @property
    def ahead(self) -> float:
        actor = self._workers.actor_of(self._worker)
        return 0.0 if actor is None else actor.clock_offset


def _check_amounts(resources: Mapping[str, float]) -> None:
    for name, amount in resources.items():
        is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not is_number or not (amount > 0 or (name == "CPU" and amount == 0)):
            raise ValueError(
                f"each worker needs a positive amount of {name}, got {amount!r}; for simulators that mostly wait, "
                "num_cpus=0.1 is enough, and num_cpus=0 sets none aside"
            )


def _check_positive(name: str, number: Any, kind: type[Any], expected: str) -> None:
    if isinstance(number, bool) or not isinstance(number, kind) or not number > 0:
        raise ValueError(f"{name} must be {expected} greater than 0, got {number!r}")
