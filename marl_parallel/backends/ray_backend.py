"""Workers in Ray actors, on any number of machines.

Each actor has a `Worker` with several environments and a block of its own; what a step takes there and back is one
call with the actions of all of them and one array with what they say. Ray places, carries, and tells who has died.
Here lives the driver's end of all of them; of one worker it is in `ray_host.py`. The actors are in `ray_worker.py` and
`ray_warden.py`, the cluster in `ray_cluster.py`.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import sys
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

try:
    import ray
except ImportError as error:
    raise ImportError(f'backend="ray" needs Ray: pip install "marl-parallel[ray]" ({error})') from error
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from marl_parallel.backends.ray_cluster import Connection, NoneAnnounced, Room
from marl_parallel.backends.ray_host import RayHost, end, look_at
from marl_parallel.backends.ray_worker import Packed, RayWorker
from marl_parallel.core.backend import Backend
from marl_parallel.core.columns import Layout
from marl_parallel.core.messages import Lost, Reply, Request
from marl_parallel.core.parcels import Parcels
from marl_parallel.core.sharing import usable_cpus
from marl_parallel.types import ParallelEnvError

PLACEMENTS = ("SPREAD", "PACK")
_LOOK_EVERY_S = 0.1  # whether `wait` is to return
_LOOK_AGAIN_S = 0.01


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
        placement_timeout: Seconds to wait for a cluster to have room, and for it to start the workers; also those that
            take the place of others. Where a cluster grows by itself, give it the time.
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
        numbers = [("placement_timeout", placement_timeout, Real, "a number")]
        if num_threads is not None:
            numbers.append(("num_threads", num_threads, Integral, "None or an integer"))
        for name, number, kind, what in numbers:
            if isinstance(number, bool) or not isinstance(number, kind) or not number > 0:
                raise ValueError(f"{name} must be {what} more than 0, got {number!r}")
        self._address, self._placement, self._num_threads = address, placement, num_threads
        self._placement_timeout = placement_timeout
        self._runtime_env = dict(runtime_env) if runtime_env else None
        self._connection: Connection | None = None
        self._room: Room | None = None
        self._hosts: list[RayHost] = []
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
            except NoneAnnounced:
                if self._address is not None:
                    raise
        here = max(int(usable_cpus() / self._wanted["CPU"]), 1)
        return here if self._connection is None else self._connection.room_for(self._wanted)

    def _connect(self, *, alone: bool = False) -> Connection:
        self._connection = connection = Connection(self._address, alone=alone)
        weakref.finalize(self, connection.release)
        return connection

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        self._shares = shares
        connection = self._connection or self._connect(alone=True)
        self._wanted = connection.wanted(self._wanted)
        try:
            self._room = Room(self._wanted, len(shares), self._placement, self._placement_timeout)
            for node in self._room.nodes():
                connection.warden_of(node, self._runtime_env)  # it starts beside the workers
            self._hosts = [self._new(worker) for worker in range(len(shares))]
            self.ledgers = [host.ledger for host in self._hosts]
            self._await_arrivals(time.monotonic() + self._placement_timeout)
        except BaseException:
            self.stop(0.0)
            raise

    def _await_arrivals(self, deadline: float) -> None:
        """Wait until all workers are up, so that no constructor's time runs before it can begin."""
        while missing := {host.next: worker for worker, host in enumerate(self._hosts) if not host.is_here}:
            arrived, _ = ray.wait([*missing], timeout=max(deadline - time.monotonic(), 0.0))
            if not arrived:
                raise ParallelEnvError(
                    f"{len(missing)} of {len(self._hosts)} workers were not up in the Ray cluster within "
                    f"{self._placement_timeout:g} s; raise RayBackend(placement_timeout=) where they need longer"
                )
            worker = missing[arrived[0]]
            try:
                self._hosts[worker].arrive(None)
            except RayError as error:
                raise ParallelEnvError(
                    f"worker {worker} could not be started by Ray: {error}", worker=worker
                ) from error

    def _new(self, worker: int) -> RayHost:
        assert self._room is not None
        assert self._connection is not None
        share, path = self._shares[worker], [*map(os.path.abspath, sys.path)]
        options = ray.remote(RayWorker).options(
            num_cpus=self._wanted.get("CPU", 0),
            num_gpus=self._wanted.get("GPU", 0),
            resources={name: amount for name, amount in self._wanted.items() if name not in ("CPU", "GPU")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._room.group, placement_group_bundle_index=worker),
            runtime_env=self._runtime_env,
            max_restarts=0,
        )
        actor = options.remote(share, self._num_threads, self._token, path)
        return RayHost(actor, share, self._connection, self._runtime_env)

    def replace(self, worker: int) -> None:
        if self._room is None or not ray.is_initialized():
            return  # closed meanwhile by a signal handler
        old = self._hosts[worker]
        end([old])
        self._hosts[worker] = self._new(worker)
        if not old.is_here:
            self._hosts[worker].wanted_since = old.wanted_since
        self.ledgers[worker] = self._hosts[worker].ledger

    def allocate(self, layout: Layout) -> Any:
        block = mmap.mmap(-1, layout.nbytes)
        self._parcels = Parcels(layout, block)
        return block

    # -- there and back --------------------------------------------------------------------------------------------

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        for worker, request in requests.items():
            if not self._hosts or not ray.is_initialized():
                self._lost.append((worker, Lost(None, "", "Ray has been shut down")))
            elif (lost := self._hosts[worker].lost) is not None:
                self._lost.append((worker, lost))
            else:
                self._hosts[worker].ask(request, self._parcels)

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        replies, self._lost = self._lost, []
        somebody_lost = bool(replies)
        while not (somebody_lost or self._interrupted):
            expected = {host.next: worker for worker, host in enumerate(self._hosts) if host.next is not None}
            if not expected:
                break
            missing = at_least - len(replies)
            told = self._told(expected.values(), deadline) if missing >= len(expected) else {}
            left = max(deadline - time.monotonic(), 0.0)
            if told:
                ready = [*told]
            else:
                wanted = min(missing, len(expected)) if missing > 0 else len(expected)
                some_time = min(left, _LOOK_EVERY_S) if missing > 0 else 0.0
                answers, _ = ray.wait([*expected], num_returns=wanted, timeout=some_time)
                ready = [expected[answer] for answer in answers]
                told = self._told(ready, deadline)
            for worker in ready:
                for said in self._hosts[worker].take(self._parcels, told.get(worker)):
                    somebody_lost |= isinstance(said, Lost)
                    replies.append((worker, said))
            if missing <= 0 or (left == 0.0 and not ready):
                break
            if not ready:
                self._check_on_those_to_come()
        self._interrupted = False
        if timeout is not None and len(replies) < at_least:
            self.look()
        return replies

    def _check_on_those_to_come(self) -> None:
        """Raise where somebody has been waited for too long: all others would wait with it, and for ever."""
        assert self._room is not None
        for worker, host in enumerate(self._hosts):
            if not host.is_here and time.monotonic() - host.wanted_since > self._placement_timeout:
                raise ParallelEnvError(
                    f"worker {worker} could not be replaced within {self._placement_timeout:g} s: "
                    f"{self._room.shortage(1)}. Add nodes, or raise RayBackend(placement_timeout=)",
                    env_ids=[*self._shares[worker]],
                    worker=worker,
                )

    def _told(self, workers: Collection[int], deadline: float) -> dict[int, Packed]:
        """What several workers say, where each says it in one parcel: to ask for all at once is quicker.

        Returns:
            By worker; nothing where there is more to it, one of them is gone, or they take too long.
        """
        hosts = [self._hosts[worker] for worker in workers]
        if not hosts or not all(host.parcel_to_come for host in hosts):
            return {}
        some_time = min(max(deadline - time.monotonic(), 0.0), _LOOK_EVERY_S)
        with contextlib.suppress(RayError, GetTimeoutError):  # one by one finds whose, and who is ready
            return dict(zip(workers, ray.get([host.next for host in hosts], timeout=some_time)))
        return {}

    def interrupt(self) -> None:
        self._interrupted = True

    # -- looking, and ending ---------------------------------------------------------------------------------------

    def look(self) -> None:
        now = time.monotonic()
        if now - self._looked >= _LOOK_AGAIN_S:
            self._looked = now
            look_at(self._hosts)

    def stack(self, worker: int) -> str:
        return self._hosts[worker].stack()

    def end(self, worker: int) -> list[Reply]:
        return self._hosts[worker].salvage(self._parcels, kill=True)[0]

    def ahead(self, worker: int) -> float:
        return self._hosts[worker].ahead

    def stop(self, timeout: float) -> list[int]:
        hosts, self._hosts = self._hosts, []
        room, self._room = self._room, None
        if ray.is_initialized():
            ends = [host.actor.__ray_terminate__.remote() for host in hosts if host.closed]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=timeout)
            end(hosts)
            if room is not None:
                room.free()
        if self._connection is not None:
            self._connection.release()
        return []

    def abandon(self) -> None:
        if self._connection is not None:
            self._connection.abandon()
