"""Worker processes: their life cycle, which is the same on all systems.

    WorkerProcesses   a table of `Handle`s, one for each process; memory, logs and output of the processes
    Link              starts processes, and carries requests and replies: queues in shared memory (`process.py`, Linux)
                      or pipes (`spawn.py`, all systems)

A signal handler, or another thread, may close everything in the middle of any method. From then on the link is no
longer open.
"""

from __future__ import annotations

import contextlib
import mmap
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from marl_parallel.backends.logs import WorkerLog
from marl_parallel.backends.memory import Block, fill_standard
from marl_parallel.backends.relay import Relay
from marl_parallel.core.backend import Backend, Capabilities, most_workers
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.messages import Lost, Reply, Request
from marl_parallel.core.reports import reports
from marl_parallel.core.reports.log_records import Forwarding, RecordRings
from marl_parallel.core.worker_status import WorkerStatus

UNKNOWN = Lost(None, "")
"""The loss of a worker of which no more is known."""
_TERMINATED_WITHIN_S = 0.5


@dataclass(eq=False, kw_only=True)
class Handle(ABC):
    """A worker process, as the parent sees it; the backend asks it for `memory`, `cpu_seconds` and `stack`.

    Attributes:
        worker: Its number.
        share: The environments for which it was started.
        log: Its log file.
        status: Its status, in memory that it shares.
        expected: How many requests it has not replied to.
        lost: How it died; None while it lives, as far as the parent has noticed.
    """

    worker: int
    share: Sequence[int]
    log: WorkerLog
    status: WorkerStatus
    expected: int = 0
    lost: Lost | None = None

    @abstractmethod
    def memory(self) -> int | None: ...

    def cpu_seconds(self) -> float | None:
        return None

    @abstractmethod
    def stack(self, *, harmless: bool = False) -> str: ...

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the process and its group; nothing happens if it has died."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process, and wait until it is gone. What it has sent can still be received."""

    @abstractmethod
    def free(self) -> None:
        """Close what this process has of it. Idempotent."""


class Output(NamedTuple):
    """Where the output of a worker goes."""

    log: WorkerLog
    descriptors: tuple[int | None, int | None]  # for stdout and stderr; None for the file of the caller's stream
    forwarding: Forwarding | None  # None if log records stay in the worker


H = TypeVar("H", bound=Handle)


class Link(ABC, Generic[H]):
    """How processes are started, and how requests and replies travel. Used once.

    The backend hands its calls of `post`, `step_all`, `wait`, `interrupt` and `drop_memory` on to it.

    Attributes:
        handles: The processes, by worker; the backend adds and removes them.
        is_open: Whether processes may be started and used; False once `stop` or `abandon` has begun.
        relay: Brings what workers print and log, while `wait` waits.
    """

    def __init__(self) -> None:
        self.handles: dict[int, H] = {}
        self.is_open = True
        self.relay = Relay()

    @abstractmethod
    def control_nbytes(self, most: int, most_requests: int) -> int:
        """The bytes that at most so many workers need in the control block, for their statuses and more."""

    @abstractmethod
    def open(self, control: Block, buffer: mmap.mmap, num_workers: int, num_processes: int) -> None:
        """Prepare for processes, with the control block and its memory."""

    @abstractmethod
    def launch(self, worker: int, share: Sequence[int], fds: Sequence[int], output: Output) -> H:
        """Start a process with a cleared status; `fds`: the control block, records, arrays."""

    def wait_started(self) -> None:
        """Wait until the first processes are up, or raise an error."""

    @abstractmethod
    def post(self, requests: Mapping[int, Request], *, together: bool) -> None: ...

    def step_all(
        self, requests: Mapping[int, Request], patience: float, meanwhile: Callable[[], bool] | None = None
    ) -> bool:
        """Call `meanwhile` once the requests are posted; return False at once if it does."""
        self.post(requests, together=True)
        if meanwhile is not None:
            meanwhile()
        return False

    @abstractmethod
    def wait(self, timeout: float | None, at_least: int) -> list[tuple[int, Reply | Lost]]: ...

    @abstractmethod
    def receive_from(self, handle: H, replies: list[tuple[int, Reply | Lost]]) -> None:
        """Take the replies of one worker that have come, then its loss if it died with unanswered requests."""

    @abstractmethod
    def interrupt(self) -> None: ...

    @abstractmethod
    def alive(self, handles: Sequence[H], timeout: float) -> list[H]:
        """Wait until these processes have ended; returns those that still run after `timeout` seconds."""

    @abstractmethod
    def close(self, *, forked: bool = False) -> None:
        """Kill all processes; with `forked`, in a forked child, only let go of them. Idempotent."""

    @abstractmethod
    def drop_memory(self) -> None: ...


class WorkerProcesses(Backend):
    """One process for each worker, on this machine."""

    capabilities = Capabilities(shares_memory=True, has_standbys=True, same_machine=True, keeps_logs=True)

    def __init__(self, link: Link[Any]) -> None:
        self._link, self._handles, self._relay = link, link.handles, link.relay
        self._control, self._records, self._arrays = Block(), Block(), Block()

    def start(self, shares: Sequence[Sequence[int]], most_requests: int, most: int | None = None) -> None:
        """Start the workers that are not `in_line`; `most` is the largest number of workers at a time."""
        link, most = self._link, most_workers(shares) if most is None else most
        try:
            nbytes = link.control_nbytes(most, most_requests)
            buffer = self._control.allocate(nbytes + self.forward_logs * RecordRings.nbytes(most))
            if self.forward_logs:
                self._relay.rings = RecordRings(buffer, nbytes, most)
            self.statuses = [WorkerStatus(bytearray(WorkerStatus.NBYTES)) for _ in range(most)]
            link.open(self._control, buffer, len(shares), len(shares) - len(self.in_line))
            for worker, share in enumerate(shares):
                if worker not in self.in_line:
                    self.start_worker(worker, share)
            link.wait_started()
        except BaseException:
            self.stop(0.0)
            raise

    @property
    def array_file(self) -> int | None:
        return self._arrays.fd

    def allocate(self, nbytes: int, layout: Layout | None = None) -> Any:
        return self._records.allocate(nbytes)

    # -- requests and replies ------------------------------------------------------------------------------------------

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        self._link.post(requests, together=together)

    def step_all(
        self, requests: Mapping[int, Request], patience: float, meanwhile: Callable[[], bool] | None = None
    ) -> bool:
        if not self._link.step_all(requests, patience, meanwhile):
            return False
        relay = self._relay
        # Whether there is something, without a call: this is in every step.
        if relay.pipes or ((rings := relay.rings) is not None and rings.counts.tobytes() != rings.seen):
            relay.bring()
        return True

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        replies = self._link.wait(timeout, at_least)
        self._relay.bring()
        return replies

    def interrupt(self) -> None:
        self._link.interrupt()

    # -- workers -------------------------------------------------------------------------------------------------------

    def start_worker(self, worker: int, share: Sequence[int], beside: int | None = None) -> None:
        self._check_process(worker)
        link, rings = self._link, self._relay.rings
        if link.is_open and (old := self._handles.get(worker)) is not None:
            old.kill()
            old.free()
        if not link.is_open:
            return
        fill_standard()  # else what is opened here may get the numbers of closed standard streams
        fds = [self._control.fd, self._records.fd, self._arrays.fd]
        try:
            with contextlib.closing(WorkerLog(self.log_dir, worker, share)) as log:
                descriptors = (log.fd, log.fd) if log.fd is not None else self._relay.descriptors()
                forwarding = None if rings is None else (rings.start, rings.most, log.fd is not None)
                handle = link.launch(worker, share, fds, Output(log, descriptors, forwarding))
        except (OSError, RuntimeError):
            if link.is_open:
                raise
            link.close()  # closed while it was launched, perhaps before all was open
            return
        if not link.is_open:
            handle.kill()
            handle.free()
            link.close()
            return
        self._handles[worker] = handle
        self.statuses[worker] = handle.status

    def remove(self, worker: int, *, kill: bool) -> bool:
        self._check_process(worker)
        if not self._link.is_open:
            return True
        handle = self._handles[worker]
        if not kill and self._link.alive([handle], 0.0):
            return False
        handle.kill()
        handle.free()
        self._handles.pop(worker, None)
        return True

    def end(self, worker: int) -> list[Reply]:
        self._check_process(worker)
        if not self._link.is_open:
            return []
        handle, replies = self._handles[worker], list[tuple[int, Reply | Lost]]()
        handle.kill()
        self._link.receive_from(handle, replies)
        return [reply for _, reply in replies if type(reply) is Reply]

    def _check_process(self, worker: int) -> None:
        if worker in self.in_line:
            raise NotImplementedError(f"worker {worker} runs in the caller's own thread and cannot be killed")

    def memory(self, worker: int) -> int | None:
        handle = self._handles.get(worker)
        return None if handle is None else handle.memory()

    def cpu_seconds(self, worker: int) -> float | None:
        handle = self._handles.get(worker)
        return None if handle is None else handle.cpu_seconds()

    def stack(self, worker: int, *, harmless: bool = False) -> str:
        handle = self._handles.get(worker)
        return "" if handle is None or not self._link.is_open else handle.stack(harmless=harmless)

    def log_tail(self, worker: int) -> str:
        handle = self._handles.get(worker)
        return "" if handle is None else handle.log.tail()

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self, timeout: float) -> list[int]:
        link, handles = self._link, [*self._handles.values()]
        link.is_open = False
        for handle in handles:
            handle.lost = handle.lost or UNKNOWN
        link.interrupt()
        with contextlib.ExitStack() as at_last:  # also after a second Ctrl-C
            at_last.callback(self._free)
            at_last.callback(self._relay.close)
            at_last.callback(link.close)
            for handle in link.alive(handles, timeout):
                if timeout >= reports.WARNS_AFTER_S:
                    text = reports.still_running(handle.worker, handle.share, timeout, handle.stack())
                    reports.logger.warning("%s", text)
                handle.status.end()
                handle.signal(signal.SIGTERM)
            link.alive(handles, _TERMINATED_WITHIN_S)
        return [handle.worker for handle in link.alive(handles, 0.0)]

    def _free(self) -> None:
        for handle in [*self._handles.values()]:
            handle.free()
        for block in (self._control, self._records, self._arrays):
            block.close_fd()

    def drop_memory(self) -> None:
        self._handles.clear()
        self.statuses.clear()
        self._link.drop_memory()

    def abandon(self) -> None:
        self._link.is_open = False
        self._link.close(forked=True)
        self._relay.abandon()
        self._free()
