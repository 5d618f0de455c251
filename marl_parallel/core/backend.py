"""`Backend`: where workers run, and how requests and replies travel. A new kind of worker is one subclass."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from marl_parallel.core.block.columns import Layout
from marl_parallel.core.messages import Lost, Reply, Request
from marl_parallel.core.worker_status import WorkerStatus


def usable_cpus() -> int:
    """Number of CPUs that this process may use: its affinity mask and the quota of its control groups, rounded up."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(math.ceil(min(cpus, cpu_quota())), 1)


def cpu_quota() -> float:
    """The CPU quota of this process's control groups, such as 1.5 CPUs; infinity without a quota."""
    return _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))


@functools.cache
def _quota(own_groups: Path, mounted: Path) -> float:
    """The lowest CPU quota of this process's control groups (version 1 or 2) and of the groups around them."""
    quotas = [math.inf]
    try:
        entries = [line.split(":", 2) for line in own_groups.read_text().splitlines()]
    except OSError:
        return math.inf
    for _, controllers, group in entries:
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mounted / controllers if controllers else mounted
        # In a container, the group's path is the path on the host, and the files of the group itself lie at the root.
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
    """Split neighbouring environments over workers as evenly as possible; the first workers may have one more.

    With `last_have_more`, the last workers have one more: for backends whose first worker has other work.
    """
    small, larger = divmod(num_envs, num_workers)
    equal = num_workers - larger if last_have_more else 0  # the workers before the larger shares
    bounds = [worker * small + min(max(worker - equal, 0), larger) for worker in range(num_workers + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def most_workers(shares: Sequence[Sequence[int]]) -> int:
    """The most workers at a time: each worker may have a standby."""
    return 2 * len(shares)


@dataclass(frozen=True)
class Capabilities:
    """What the workers of a backend can do. The defaults are those of workers in processes on any machine.

    Attributes:
        enforces_timeouts: Whether `wait` returns while a worker is busy, so that timeouts can be enforced.
        can_kill: Whether `stop` can kill busy workers, and the processes that they have started.
        side_by_side: Whether each worker needs a CPU of its own.
        shares_memory: Whether workers read and write all of the block that `allocate` returned.
        has_standbys: Whether `start_worker` can start more workers; worker numbers stay below `most_workers`.
        may_leave: Whether machines of workers may go, as `leaving` says.
        can_isolate_rng: Whether no two workers use the same process-wide generators at the same time.
        pickles: Whether workers are in other processes, and so get pickled constructors.
        same_machine: Whether workers in other processes are all on this machine, and get descriptors from `post`.
        keeps_logs: Whether the stdout and stderr of workers can go to files.
    """

    enforces_timeouts: bool = True
    can_kill: bool = True
    side_by_side: bool = True
    shares_memory: bool = False
    has_standbys: bool = False
    may_leave: bool = False
    can_isolate_rng: bool = True
    pickles: bool = True
    same_machine: bool = False
    keeps_logs: bool = False


class Backend(ABC):
    """The workers of one `ParallelEnv`, numbered from 0. Used once; never looks into requests and replies.

    Attributes:
        capabilities: What the workers can do.
        statuses: The status of each worker; readable at any time, and current after `look`.
        clock: Returns the time in seconds, and never goes back. The pool reads no other clock. `statuses` and
            `Reply.completed` use its seconds, and `wait` measures its timeout with it. A test may set another clock.
        seconds_in_look: Seconds that `look` has spent waiting for other machines so far.
        in_line: Workers in the caller's own thread, which carry out requests in `post`, `step_all` or `wait`. The pool
            never ends or replaces them; they have no timeouts and get no standby.
        in_line_until: When a worker in the caller's own thread last finished a request, in seconds of `clock`. This
            process was running until then, although it did not look for replies.
        log_dir: The folder of log files, set before `start` if the backend `keeps_logs`; None for the output of this
            program.
        forward_logs: Whether log records of workers in other processes go to the loggers of this process, in `wait`
            and `stop`; set before `start`. Backends that cannot forward log records ignore it.
    """

    capabilities: Capabilities = Capabilities()
    log_dir: Path | None = None
    forward_logs: bool = False
    in_line: Collection[int] = frozenset()
    in_line_until = 0.0
    clock: Callable[[], float] = time.monotonic
    seconds_in_look = 0.0
    statuses: list[WorkerStatus]

    @property
    def array_file(self) -> int | None:
        """The descriptor of a file that all workers, also later ones, can map, and that only the caller writes.

        It gets the large arrays of constructors. None if there is no such file: then these arrays are pickled.
        """
        return None

    @property
    def leaving(self) -> Collection[int]:
        """Workers whose machines will go, so that their environments move to others as their episodes end.

        Only if workers `may_leave`; called about once a second.
        """
        return ()

    def capacity(self) -> int:
        """How many workers can run side by side; called before `start`."""
        return usable_cpus()

    def cpu_seconds(self, worker: int) -> float | None:
        """Seconds in which a worker has used a CPU or waited for one; None if unknown, or if the worker is gone."""
        return None

    def memory(self, worker: int) -> int | None:
        """Bytes of memory of a worker's process and its child processes; None if unknown, or if the worker is gone.

        This is resident memory (`RES` in `top`): memory that two processes share counts once for each process.
        """
        return None

    @abstractmethod
    def start(self, shares: Sequence[range], most_requests: int) -> None:
        """Start a worker for each share of the environments; need not wait until the workers are up.

        At most `most_requests` requests and replies are in flight for one worker.
        """

    @abstractmethod
    def allocate(self, nbytes: int, layout: Layout | None = None) -> Any:
        """Return zeroed, writable memory, which stays readable as long as anything refers to it, even after `stop`.

        The first call is before the first request that uses the memory, and has the layout of the records in it. If the
        backend `shares_memory`, later calls ask for more bytes. Workers that attach to the block from then on get the
        new memory. Its first part may be other memory than the block before.
        """

    @abstractmethod
    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        """Send one request to each of some workers, and return at once if the backend can.

        A worker takes its requests in order. A worker that is gone gets nothing, and `wait` reports it as `Lost`. With
        `together`, the caller needs all replies at once, so the backend may wake it only once.
        """

    def step_all(self, requests: Mapping[int, Request], patience: float) -> bool:
        """Post requests, each to step all environments of a worker, and wait for at most `patience` seconds.

        Returns True if every worker has replied `STEPPED`, and takes these replies. Else `wait` returns the replies.
        The queues of all workers are empty before the call. Whenever the requests change, `requests` is a new object.
        """
        self.post(requests, together=True)
        return False

    @abstractmethod
    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        """Wait for `at_least` replies; returns all that have come, in the order of each worker's requests.

        Returns fewer after `timeout` seconds (None for no limit), after `interrupt`, or when a worker has died. A
        worker that died with requests in its queue is reported once, as `Lost`.
        """

    @abstractmethod
    def end(self, worker: int) -> Sequence[Reply]:
        """End a worker, even a busy one, so that it writes nothing more; only if the backend `can_kill`.

        Returns the replies of the worker that `wait` has not returned.
        """

    @abstractmethod
    def start_worker(self, worker: int, share: Sequence[int], beside: int | None = None) -> None:
        """Start a worker with a new status for some environments, without waiting until it is up.

        It takes the place of the worker with this number, which was ended or is lost, and whose requests are dropped;
        only if the backend `can_kill`. With `beside`, it is one more worker, to which the environments will move from
        the worker `beside`; only if it `has_standbys`.
        """

    def remove(self, worker: int, *, kill: bool) -> bool:
        """Free a worker without requests, and its number; only if `has_standbys`.

        With `kill`, a worker that still runs is killed. Else returns False for it: it ends soon after a CLOSE.
        """
        raise NotImplementedError

    def look(self) -> None:  # noqa: B027
        """Bring `statuses` up to date; does nothing if they are in shared memory."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make a `wait` in another thread return soon, with the replies that have come."""

    @abstractmethod
    def stack(self, worker: int, *, harmless: bool = False) -> str:
        """The Python stack of a worker as it is right now; empty if it is not available.

        With `harmless`, the worker keeps running undisturbed; else it may be continued (SIGCONT) or aborted.
        """

    def log_tail(self, worker: int) -> str:
        """The path of a worker's log, a colon, and the last lines that its process wrote; empty if there are none."""
        return ""

    @abstractmethod
    def stop(self, timeout: float) -> list[int]:
        """End all workers, and free everything except memory that is still in use. Idempotent.

        Workers that have carried out a CLOSE have `timeout` seconds to end by themselves; the others are killed if the
        backend can. Returns the workers that could not be ended.
        """

    def drop_memory(self) -> None:  # noqa: B027
        """Let go of the memory that workers shared, after `stop` or `abandon`: nothing calls this object any more."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child process: forget everything, and touch nothing that the parent still uses."""
