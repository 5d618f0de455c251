"""`Backend`: where workers run, and how requests and replies travel. A new kind of worker is one subclass."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from marl_parallel.core.columns import Layout
from marl_parallel.core.messages import Lost, Reply, Request
from marl_parallel.core.worker_status import WorkerStatus


def usable_cpus() -> int:
    """How many CPUs this process may use, by its affinity mask and the quota of its control groups, rounded up."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(math.ceil(min(cpus, cpu_quota())), 1)


def cpu_quota() -> float:
    """The CPUs that the control groups of this process leave it, such as 1.5; infinity without a quota."""
    return _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))


@functools.cache
def _quota(own_groups: Path, mounted: Path) -> float:
    """The CPUs that the control groups of this process (version 1 or 2), and those around them, leave it."""
    quotas = [math.inf]
    try:
        entries = [line.split(":", 2) for line in own_groups.read_text().splitlines()]
    except OSError:
        return math.inf
    for _, controllers, group in entries:
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mounted / controllers if controllers else mounted
        # In a container, the group's path is that of the host, and the files of the group itself lie at the root.
        for folder in {root, *(root / group.strip("/")).parents, root / group.strip("/")}:
            with contextlib.suppress(OSError, ValueError):
                if controllers:
                    names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
                    quota, period = [(folder / name).read_text() for name in names]
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if float(quota) > 0:
                    quotas.append(float(quota) / float(period))
    return min(quotas)


def share_out(num_envs: int, num_workers: int, *, last_have_more: bool = False) -> list[range]:
    """The environments of each worker: neighbours, as evenly as possible; the first workers may have one more.

    Or the last ones, if the first one has other work.
    """
    small, larger = divmod(num_envs, num_workers)
    equal = num_workers - larger if last_have_more else 0  # before those that have one more
    bounds = [worker * small + min(max(worker - equal, 0), larger) for worker in range(num_workers + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def most_workers(shares: Sequence[Sequence[int]]) -> int:
    """How many workers there may be at a time: each may have a standby."""
    return 2 * len(shares)


class Backend(ABC):
    """Workers, numbered from 0, used by one `ParallelEnv`, once. It never looks into requests and replies.

    Attributes:
        statuses: The status of each worker; readable at any time, and current after `look`.
        enforces_timeouts: Whether `wait` returns while a worker is busy, so that timeouts can be enforced.
        can_kill: Whether `stop` ends workers, and the processes they have started, whatever they are doing.
        side_by_side: Whether each worker needs a CPU of its own.
        clock: Returns the time in seconds, and never goes back. The pool reads no other clock; `statuses`, and
            `Reply.completed` are in its seconds, and `wait` measures its timeout with it. A test may have its own.
        looking_s: Seconds that `look` has spent waiting for other machines so far.
        in_line: Workers in the caller's own thread, which carry out requests in `post`, `step_all` or `wait`: whatever
            they do, they are neither ended nor replaced, they have no timeouts and get no standby.
        awake: When a worker in the caller's own thread last had carried out a request, in seconds of `clock`: this
            process was running until then, although it did not look for replies.
        shares_memory: Whether workers read and write the very block that `allocate` returned, all of it.
        has_standbys: Whether `add` can start workers after `start`; their numbers are less than `most_workers`.
        moves: Whether workers can move to other machines, as `leaving` and `rebalance` say.
        can_isolate_rng: Whether environments of different workers do not use the same process-wide generators at once.
        pickles: Whether workers get pickled constructors, since they are in other processes.
        keeps_logs: Whether what workers write to stdout and stderr can go to files.
        log_dir: The folder of these files, set before `start`; None for the output of this program.
        forward_logs: Whether log records of workers in other processes are to reach the loggers of this one, in `wait`
            and `stop`; set before `start`. A backend that cannot do that ignores it.
    """

    enforces_timeouts: ClassVar[bool] = True
    can_kill: ClassVar[bool] = True
    side_by_side: ClassVar[bool] = True
    shares_memory: ClassVar[bool] = False
    has_standbys: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    can_isolate_rng: ClassVar[bool] = True
    pickles: ClassVar[bool] = True
    keeps_logs: ClassVar[bool] = False
    log_dir: Path | None = None
    forward_logs: bool = False
    in_line: Collection[int] = frozenset()
    awake = 0.0
    clock: Callable[[], float] = time.monotonic
    looking_s = 0.0
    statuses: list[WorkerStatus]
    _claimed = False

    def claim(self) -> None:
        """Take it into use; raises `ValueError` the second time."""
        if self._claimed:
            raise ValueError("a backend serves one ParallelEnv, once; create a new one for each")
        self._claimed = True

    def capacity(self) -> int:
        """How many workers can run side by side; called before `start`."""
        return usable_cpus()

    def cpu_seconds(self, worker: int) -> float | None:
        """Seconds in which a worker has used a CPU or waited for one; None if not known, or the worker is gone."""
        return None

    def memory(self, worker: int) -> int | None:
        """Bytes of memory of a worker's process and of those it has started; None if not known, or it is gone.

        These are resident, as `top` shows them in `RES`: what two processes share counts for each of them.
        """
        return None

    @abstractmethod
    def start(self, shares: Sequence[range], most_requests: int) -> None:
        """Start a worker for each share of the environments; need not wait until they are up.

        At most `most_requests` requests and replies are in flight for one worker.
        """

    def allocate(self, layout: Layout) -> Any:
        """Return zeroed, writable memory for a layout; called once, before the first request that uses it.

        It stays readable for as long as anything refers to it, also after `stop`.
        """
        return self.extend(layout.nbytes)

    def extend(self, nbytes: int) -> Any:
        """Return memory of this size, larger than that of `allocate`; only if `shares_memory`.

        Workers that attach to the block from now on get it, too. Its first part need not be that of `allocate`.
        """
        raise NotImplementedError

    def array_file(self) -> int | None:
        """The descriptor of a file that all workers can map, later ones too, and that only the caller writes.

        Large arrays of constructors are written there. None without such a file: constructors are pickled whole.
        """
        return None

    @abstractmethod
    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        """Send one request each to some of the workers, and return at once if the backend can.

        A worker takes its requests in order. One that is gone gets nothing, and `wait` reports it as `Lost`. With
        `together`, the caller waits until it has all the replies, so that it need be woken only once.
        """

    def step_all(self, requests: Mapping[int, Request], patience: float) -> bool:
        """Post requests, each to step all environments of a worker, and wait for at most `patience` seconds.

        Returns True if every worker has replied `STEPPED`, which it has taken then. Else `wait` returns the replies. No
        worker has any other request before it. `requests` is another object if there is anything else in it.
        """
        self.post(requests, together=True)
        return False

    @abstractmethod
    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        """Wait for `at_least` so many replies; returns all that are here, in the order of each worker's requests.

        Returns fewer after `timeout` seconds (None for no limit), after `interrupt`, or when a worker has died. A
        worker that died with requests before it is reported once, as `Lost`.
        """

    @abstractmethod
    def end(self, worker: int) -> Sequence[Reply]:
        """End a worker, whatever it is doing, so that it writes nothing more; only if the backend `can_kill`.

        Returns those of its replies that `wait` has not returned.
        """

    @abstractmethod
    def replace(self, worker: int) -> None:
        """Start a new worker, with a status of its own, in the place of one that was ended or is lost.

        Requests to the old one are dropped. Only if the backend `can_kill`.
        """

    def add(self, worker: int, share: Sequence[int], beside: int | None = None) -> None:
        """Start one more worker for some environments, without waiting until it is up; only if `has_standbys`.

        They will move there from the worker `beside`.
        """
        raise NotImplementedError

    def remove(self, worker: int, *, kill: bool) -> bool:
        """Free a worker that carries out no requests any more, and its number; only if `has_standbys`.

        Returns False if it has not ended yet, unless it is to be killed: one that has carried out a CLOSE ends soon.
        """
        raise NotImplementedError

    def leaving(self) -> Collection[int]:
        """Workers whose environments are to move to others where episodes end; asked about once a second."""
        return ()

    def rebalance(self, workers: Sequence[int]) -> int:
        """Let some of these workers move to machines with more room; returns how many. They are `leaving` then."""
        return 0

    def look(self) -> None:  # noqa: B027
        """Bring `statuses` up to date; there is nothing to do if they are in shared memory."""

    def ready_since(self, worker: int) -> float:
        """When a worker was up, in seconds of `clock`; infinity before. Its timeouts begin then."""
        return 0.0

    def ahead(self, worker: int) -> float:
        """Seconds that this clock is ahead of a worker's; 0 if they are the same."""
        return 0.0

    @abstractmethod
    def interrupt(self) -> None:
        """Make a `wait` in another thread return soon, with the replies that are here."""

    @abstractmethod
    def stack(self, worker: int, *, harmless: bool = False) -> str:
        """The Python stack of a worker as it is right now; empty if it is not available.

        With `harmless`, the worker goes on as if nothing had happened; else it may be continued or aborted.
        """

    def log_tail(self, worker: int) -> str:
        """The path of a worker's log, a colon, and the last lines of its present process; empty if there are none."""
        return ""

    @abstractmethod
    def stop(self, timeout: float) -> list[int]:
        """End all workers, and free everything but memory that is still referred to. Idempotent.

        Workers that have carried out a CLOSE have `timeout` seconds to end by themselves; the others are killed if the
        backend can. Returns the workers that could not be ended.
        """

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child of the owner: forget everything, and touch nothing that the owner still uses."""
