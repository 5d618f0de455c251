"""Workers in Ray actors, on any number of machines.

Each actor has a `Worker` with several environments and a block of its own; what a step takes there and back is one
call with the actions of all of them and one array with what they say. Ray places, carries, and tells who has died.
Here lives the driver's end; the actors are in `ray_worker.py` and `ray_warden.py`, the cluster in `ray_cluster.py`.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import secrets
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

try:
    import ray
except ImportError as error:
    raise ImportError(f'backend="ray" needs Ray: pip install "marl-parallel[ray]" ({error})') from error
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from marl_parallel.backends.ray_cluster import Connection, NoCluster, Room
from marl_parallel.backends.ray_warden import Remains
from marl_parallel.backends.ray_worker import Greeting, Parcel, RayWorker, what_was_said
from marl_parallel.errors import ParallelEnvError
from marl_parallel.runtime.backend import Backend
from marl_parallel.runtime.layout import Layout
from marl_parallel.runtime.ledger import Ledger
from marl_parallel.runtime.messages import Lost, Message, Reply, Request
from marl_parallel.runtime.parcels import WITH_ACTIONS, Parcels
from marl_parallel.runtime.reports import logger
from marl_parallel.runtime.sharing import usable_cpus

PLACEMENTS = ("SPREAD", "PACK")
_LOOK_EVERY_S = 0.1  # whether `wait` is to return
_LOOK_AGAIN_S = 0.01
_ANSWERED_WITHIN_S = 5.0  # by a warden, which has nothing else to do


@dataclass
class _Asked:
    """A request on its way.

    Attributes:
        number: Of all that the worker was asked.
        request: What it was.
        answer: An `ObjectRef` of one `Parcel`, or a generator of several.
        heard: How many replies have come.
    """

    number: int
    request: Request
    answer: Any
    heard: int = 0


@dataclass
class _Hosted:
    """A worker as the driver knows it.

    Attributes:
        key: Its number among all that were ever started.
        actor: Its handle.
        arriving: What is to come before anything can be asked: its greeting, then that its warden holds it.
        waiting: What it will be asked then.
        before: What it was asked and has not answered.
        warden: The one of its node; None where not known.
        ahead: Seconds that this machine's clock is ahead of its own, at most.
        lost: How it ended, once it has.
        asked: How many requests it has had.
        closed: Whether it has closed its environments.
    """

    key: int
    actor: Any
    arriving: Any
    waiting: list[Request] = field(default_factory=list)
    before: deque[_Asked] = field(default_factory=deque)
    warden: Any = None
    ahead: float = 0.0
    lost: Lost | None = None
    asked: int = 0
    closed: bool = False


class RayBackend(Backend):
    """Actors of a Ray cluster.

    Connects to the cluster that this process uses, else to the one that `address`, `RAY_ADDRESS` or this machine
    tells, else starts one on this machine; stops what it started, and nothing else.

    Args:
        address: Of a cluster, such as `"10.0.0.1:6379"`; None as above.
        num_cpus: CPUs that Ray sets aside for each worker; simulators that mostly wait need less than one.
        resources: What else each worker wants, by name, such as `{"GPU": 0.25}`.
        placement: `"SPREAD"` puts workers on as many nodes as can be, `"PACK"` on as few.
        runtime_env: Of the actors, as Ray takes it: packages, files, environment variables.
        placement_timeout: Seconds to wait for a cluster to have room, and for it to start the workers.
        num_threads: BLAS, OpenMP and torch threads in each worker; None leaves them alone.

    Raises:
        ValueError: An argument is not as it should be.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from marl_parallel import ParallelEnv
        >>> backend = RayBackend(num_cpus=0.5)
        >>> with ParallelEnv([simple_spread_v3.parallel_env] * 4, backend=backend, num_workers=2) as env:
        ...     observations, infos = env.reset()
        >>> len(observations)
        4
    """

    def __init__(
        self,
        address: str | None = None,
        num_cpus: float = 1,
        resources: Mapping[str, float] | None = None,
        placement: str = "SPREAD",
        runtime_env: Mapping[str, Any] | None = None,
        *,
        placement_timeout: float = 60.0,
        num_threads: int | None = 1,
    ) -> None:
        if placement not in PLACEMENTS:
            raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}")
        self._wanted = {"CPU": num_cpus, **(resources or {})}
        for name, amount in self._wanted.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0:
                raise ValueError(
                    f"each worker must want more than nothing of {name}, got {amount!r}; for simulators that mostly "
                    "wait, num_cpus=0.1 will do"
                )
        self._address, self._placement, self._num_threads = address, placement, num_threads
        self._placement_timeout = placement_timeout
        self._runtime_env = dict(runtime_env) if runtime_env else None
        self._connection: Connection | None = None
        self._room: Room | None = None
        self._workers: list[_Hosted] = []
        self._parcels: Parcels | None = None
        self._lost: list[tuple[int, Reply | Lost]] = []
        self._interrupted = False
        self._token = secrets.token_hex(8)
        self._looked = 0.0

    # -- starting --------------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        if self._connection is None:
            try:
                self._connect()
            except NoCluster:
                if self._address is not None:
                    raise
        here = max(int(usable_cpus() / self._wanted["CPU"]), 1)
        return here if self._connection is None else self._connection.room_for(self._wanted)

    def _connect(self, *, alone: bool = False) -> Connection:
        self._connection = connection = Connection(self._address, alone=alone)
        weakref.finalize(self, connection.release)
        return connection

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        self.ledgers = [Ledger(bytearray(Ledger.NBYTES)) for _ in shares]
        self._shares = shares
        connection = self._connection or self._connect(alone=True)
        self._wanted = connection.wanted(self._wanted)
        try:
            self._room = Room(self._wanted, len(shares), self._placement, self._placement_timeout)
            for node in self._room.nodes():
                self._warden_of(node)
            self._workers = [self._new(worker) for worker in range(len(shares))]
            self._await_arrivals(time.monotonic() + self._placement_timeout)
        except BaseException:
            self.stop(0.0)
            raise

    def _await_arrivals(self, deadline: float) -> None:
        """Wait until all workers are up, so that no constructor's time runs before it can begin."""
        while missing := {hosted.arriving: worker for worker, hosted in enumerate(self._workers) if hosted.arriving}:
            left = deadline - time.monotonic()
            arrived, _ = ray.wait([*missing], timeout=max(left, 0.0))
            if not arrived:
                raise ParallelEnvError(
                    f"{len(missing)} of {len(self._workers)} workers were not up in the Ray cluster within "
                    f"{self._placement_timeout:g} s; raise RayBackend(placement_timeout=) where they need longer"
                )
            worker = missing[arrived[0]]
            try:
                self._arrive(worker, self._workers[worker])
            except RayError as error:
                raise ParallelEnvError(
                    f"worker {worker} could not be started by Ray: {error}", worker=worker
                ) from error

    def _new(self, worker: int) -> _Hosted:
        assert self._room is not None
        strategy = PlacementGroupSchedulingStrategy(self._room.group, placement_group_bundle_index=worker)
        others = {name: amount for name, amount in self._wanted.items() if name not in ("CPU", "GPU")}
        actor = (
            ray.remote(RayWorker)
            .options(
                num_cpus=self._wanted.get("CPU", 0),
                num_gpus=self._wanted.get("GPU", 0),
                resources=others,
                scheduling_strategy=strategy,
                runtime_env=self._runtime_env,
                max_restarts=0,
            )
            .remote(self._shares[worker], self._num_threads, self._token, [*map(os.path.abspath, sys.path)])
        )
        return _Hosted(secrets.randbits(48), actor, actor.greet.remote())

    def _warden_of(self, node: str) -> Any:
        assert self._connection is not None
        return self._connection.warden_of(node, self._runtime_env)

    def replace(self, worker: int) -> None:
        if self._room is None or not ray.is_initialized():
            return  # closed meanwhile by a signal handler
        self._end([self._workers[worker]])
        self.ledgers[worker] = Ledger(bytearray(Ledger.NBYTES))
        self._workers[worker] = self._new(worker)

    def allocate(self, layout: Layout) -> Any:
        block = mmap.mmap(-1, layout.nbytes)
        self._parcels, self._stride = Parcels(layout, block), layout.stride
        return block

    # -- there and back --------------------------------------------------------------------------------------------

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        for worker, request in requests.items():
            hosted = self._workers[worker] if worker < len(self._workers) else None
            if hosted is None or hosted.lost is not None or not ray.is_initialized():
                gone = Lost(None, "", "Ray has been shut down")
                self._lost.append((worker, (hosted.lost if hosted is not None else None) or gone))
            elif hosted.arriving is not None:
                hosted.waiting.append(request)
            else:
                self._ask(worker, hosted, request)

    def _ask(self, worker: int, hosted: _Hosted, request: Request) -> None:
        if request.message is Message.CLOSE and hosted.warden is not None:
            hosted.warden.discard.remote(hosted.key)
        actions = None
        if self._parcels is not None and request.message in WITH_ACTIONS:
            actions = self._parcels.actions(self._of(worker, request))
        number = hosted.asked = hosted.asked + 1
        method = hosted.actor.each.options(num_returns="streaming") if request.each else hosted.actor.execute
        hosted.before.append(_Asked(number, request, method.remote(number, request, actions)))

    def _of(self, worker: int, request: Request) -> Sequence[int]:
        return self._shares[worker] if request.env_ids is None else request.env_ids

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        replies, self._lost = self._lost, []
        somebody_lost = bool(replies)
        while not (somebody_lost or self._interrupted):
            expected = {answer: worker for worker, answer in enumerate(map(self._next, self._workers)) if answer}
            if not expected:
                break
            missing, left = at_least - len(replies), max(deadline - time.monotonic(), 0.0)
            ready, _ = ray.wait(
                [*expected],
                num_returns=min(missing, len(expected)) if missing > 0 else len(expected),
                timeout=min(left, _LOOK_EVERY_S) if missing > 0 else 0.0,
            )
            for answer in ready:
                taken = self._take(expected[answer])
                somebody_lost |= any(isinstance(reply, Lost) for _, reply in taken)
                replies += taken
            if missing <= 0 or (left == 0.0 and not ready):
                break
        self._interrupted = False
        if timeout is not None and len(replies) < at_least:
            self._look()
        return replies

    @staticmethod
    def _next(hosted: _Hosted) -> Any:
        if hosted.arriving is not None:
            return hosted.arriving
        return hosted.before[0].answer if hosted.before else None

    def _take(self, worker: int) -> list[tuple[int, Reply | Lost]]:
        """What has come from a worker of which something has."""
        hosted = self._workers[worker]
        try:
            if hosted.arriving is not None:
                self._arrive(worker, hosted)
                return []
            asked = hosted.before[0]
            parcel: Parcel = ray.get(next(asked.answer) if asked.request.each else asked.answer)
        except StopIteration:  # the rest is discarded
            hosted.before.popleft()
            return []
        except RayTaskError:
            raise
        except RayError as error:
            return self._bury(worker, error)
        return self._unpack(worker, hosted, asked, parcel)

    def _arrive(self, worker: int, hosted: _Hosted) -> None:
        if hosted.warden is None:
            greeting: Greeting = ray.get(hosted.arriving)
            hosted.ahead = time.monotonic() - greeting.now
            hosted.warden = self._warden_of(greeting.node)
            hosted.arriving = hosted.warden.hold.remote(hosted.key, greeting)
            return
        try:
            ray.get(hosted.arriving)
        except RayError as error:  # then it is not held: little will be known of its death
            logger.warning("the warden of worker %d is gone: %s", worker, _said_by(error))
            assert self._connection is not None
            self._connection.forget(hosted.warden)
            hosted.warden = None
        hosted.arriving = None
        waiting, hosted.waiting = hosted.waiting, []
        for request in waiting:
            self._ask(worker, hosted, request)

    def _unpack(self, worker: int, hosted: _Hosted, asked: _Asked, parcel: Parcel) -> list[tuple[int, Reply | Lost]]:
        replies = parcel.replies
        if parcel.results is not None and self._parcels is not None:
            about = replies[-1].env_ids if asked.request.each else asked.request.env_ids
            self._parcels.put_results(self._shares[worker] if about is None else about, parcel.results)
        hosted.ahead = min(hosted.ahead, time.monotonic() - replies[-1].completed)
        self.ledgers[worker].mirror(parcel.ledger, hosted.ahead)
        asked.heard += len(replies)
        if replies[-1].last:
            hosted.before.popleft()
            hosted.closed |= replies[-1].answers is Message.CLOSE
        return [(worker, _here(reply, hosted.ahead)) for reply in replies]

    def interrupt(self) -> None:
        self._interrupted = True

    # -- looking, and ending ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Bring the ledgers of those that are busy up to date."""
        now = time.monotonic()
        if now - self._looked < _LOOK_AGAIN_S:
            return
        self._looked = now
        busy = {hosted.key: worker for worker, hosted in enumerate(self._workers) if hosted.before and hosted.warden}
        looks = {
            warden: warden.look.remote([key for key, worker in busy.items() if self._workers[worker].warden is warden])
            for warden in {self._workers[worker].warden for worker in busy.values()}
        }
        for look in looks.values():
            seen = self._asked(look)
            if seen is None:
                continue
            moment, ledgers = seen
            for key, ledger in ledgers.items():
                hosted = self._workers[busy[key]]
                hosted.ahead = min(hosted.ahead, time.monotonic() - moment)
                self.ledgers[busy[key]].mirror(ledger, hosted.ahead)

    def stack(self, worker: int) -> str:
        hosted = self._workers[worker]
        return self._asked(hosted.warden.stack.remote(hosted.key)) or "" if hosted.warden is not None else ""

    def salvage(self, worker: int) -> list[Reply]:
        return self._salvage(worker, dead=False)[0]

    def _salvage(self, worker: int, *, dead: bool) -> tuple[list[Reply], Remains | None]:
        """What a worker has said and not yet been heard to say, and all that it has left."""
        hosted, share, places = self._workers[worker], self._shares[worker], None
        if self._parcels is not None:
            places = share.start * self._stride, share.stop * self._stride
        remains: Remains | None = None
        if hosted.warden is not None:
            remains = self._asked(hosted.warden.remains.remote(hosted.key, places, dead=dead))
        if remains is None:
            return [], None
        self.ledgers[worker].mirror(remains.ledger, hosted.ahead)
        if self._parcels is not None and remains.records:
            self._parcels.put_records(share, remains.records)
        number, said = what_was_said(remains.said)
        asked = hosted.before[0] if hosted.before else None
        if asked is None or asked.number != number:
            return [], remains
        unheard, asked.heard = said[asked.heard :], len(said)
        return [_here(reply, hosted.ahead) for reply in unheard], remains

    def _bury(self, worker: int, error: RayError) -> list[tuple[int, Reply | Lost]]:
        """What a worker that has died has still said, and that it is gone."""
        replies, remains = self._salvage(worker, dead=True)
        hosted, reason = self._workers[worker], _said_by(error)
        exitcode, stack = (None, "") if remains is None else (remains.exitcode, remains.stack)
        hosted.lost = lost = Lost(exitcode, stack, "" if reason == _PROCESS_DIED else reason)
        hosted.arriving = None
        hosted.before.clear()
        hosted.waiting.clear()
        return [*((worker, reply) for reply in replies), (worker, lost)]

    @staticmethod
    def _asked(answer: Any) -> Any:
        """What a warden says; None where it cannot be asked any more."""
        try:
            return ray.get(answer, timeout=_ANSWERED_WITHIN_S)
        except (RayError, GetTimeoutError):
            return None

    def _end(self, workers: Iterable[_Hosted]) -> None:
        workers = [*workers]
        held: dict[Any, list[int]] = {hosted.warden: [] for hosted in workers if hosted.warden is not None}
        for hosted in workers:
            if hosted.warden is not None:
                held[hosted.warden].append(hosted.key)
        ends = [warden.end.remote(keys) for warden, keys in held.items()]
        for hosted in workers:
            ray.kill(hosted.actor)
        for end in ends:
            self._asked(end)

    def stop(self, timeout: float) -> list[int]:
        workers, self._workers = self._workers, []
        room, self._room = self._room, None
        if ray.is_initialized():
            ends = [hosted.actor.__ray_terminate__.remote() for hosted in workers if hosted.closed]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=timeout)
            self._end(workers)
            if room is not None:
                room.free()
        if self._connection is not None:
            self._connection.release()
        return []

    def abandon(self) -> None:
        if self._connection is not None:
            self._connection.abandon()


def _here(reply: Reply, ahead: float) -> Reply:
    """The same by this machine's clock."""
    return reply._replace(completed=reply.completed + ahead)


_PROCESS_DIED = "its worker process has died"  # as Ray puts it where it knows nothing more
_BECAUSE = re.compile(r"\bbecause (.+?)[.](?:\s|$)")


def _said_by(error: RayError) -> str:
    """What Ray says of a death, in one line."""
    text = str(error).strip()
    because = _BECAUSE.search(text)
    return because[1] if because else text.partition("\n")[0].rstrip(".") or type(error).__name__
