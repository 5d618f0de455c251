"""Worker 0 in the caller's own thread, the others in processes: no CPU is idle, and worker 0 needs no wake-up.

    post()      requests of the other workers go out; that of worker 0 is queued
    wait()      carries out what is queued, then waits for the other workers

A backend of processes has the other workers and the shared memory of all. With `send` and `recv`, `wait` looks for
replies of the others before each environment of worker 0, and leaves the rest for later once there are enough. No
environment of worker 0 waits for long: once the result of a later request has come, the environment is stepped first.

Worker 0 behaves as with `backend="serial"`: Ctrl-C in a simulator interrupts the caller, worker 0 cannot be killed, and
a crash ends the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from marl_parallel.core.backend import Backend, Capabilities
from marl_parallel.core.columns import Layout
from marl_parallel.core.messages import STEP_ALL, STEPPED, Lost, Reply, Request
from marl_parallel.core.worker import Worker

if TYPE_CHECKING:
    from marl_parallel.backends.process import ProcessBackend
    from marl_parallel.backends.spawn import PortableProcessBackend

_OWN = 0  # the number of the worker in the caller's thread


class _Part(NamedTuple):
    """A request to worker 0, or the part of it that gets a reply of its own."""

    request: Request
    number: int  # of the call of `post`
    is_last: bool  # whether it is the last part of its request
    together: bool  # whether the caller waits for all replies


class HybridBackend(Backend):
    """One worker in the caller's own thread, the others in processes.

    Args:
        processes: The other workers' backend, not yet started.
    """

    capabilities = Capabilities(shares_memory=True, has_standbys=True, same_machine=True, keeps_logs=True)
    in_line = frozenset({_OWN})

    def __init__(self, processes: ProcessBackend | PortableProcessBackend) -> None:
        self._processes = processes
        self._worker: Worker | None = None  # None before `start`, and once everything is freed
        self._block: Any = None
        self._parts: deque[_Part] = deque()  # that worker 0 has not begun
        self._replies: list[tuple[int, Reply | Lost]] = []  # of worker 0
        self._posts = 0  # how many calls of `post` there have been
        self._numbers: dict[int, deque[int]] = {}  # by other worker, the numbers of its requests without a last reply
        self._latest = 0  # the highest number of a request with a reply
        self._divided: tuple[Mapping[int, Request], dict[int, Request]] | None = None  # see `_others_of`

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        processes = self._processes
        processes.log_dir, processes.forward_logs = self.log_dir, self.forward_logs
        processes.start(shares, most_requests, left_out=self.in_line)
        self.statuses = processes.statuses  # the list itself, which also gets the statuses of later workers

        def arrays() -> int:
            fd = processes.array_file
            return -1 if fd is None else fd

        self._worker = Worker(self.statuses[_OWN], lambda _: self._block, in_line=True, arrays=arrays)

    def simulators(self) -> dict[int, Any]:
        """By environment of worker 0, the object that its constructor has returned."""
        return {} if self._worker is None else self._worker.simulators()

    def allocate(self, nbytes: int, layout: Layout | None = None) -> Any:
        self._block = self._processes.allocate(nbytes)
        return self._block

    @property
    def array_file(self) -> int | None:
        return self._processes.array_file

    # -- requests and replies ------------------------------------------------------------------------------------------

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        others = self._others_of(requests)
        if others:
            self._processes.post(others, together=together)
        self._note_posted(others)
        request = requests.get(_OWN)
        if request is not None:
            ids = request.env_ids
            parts = [(env_id,) for env_id in ids] if request.each and ids is not None else [ids]
            for place, part in enumerate(parts, 1):
                self._parts.append(_Part(request._replace(env_ids=part), self._posts, place == len(parts), together))

    def _others_of(self, requests: Mapping[int, Request]) -> dict[int, Request]:
        """The requests of the other workers; the same dict for the same `requests`, as `step_all` needs it."""
        if self._divided is None or self._divided[0] is not requests:
            others = {worker: request for worker, request in requests.items() if worker != _OWN}
            self._divided = requests, others
        return self._divided[1]

    def _note_posted(self, others: Mapping[int, Request]) -> None:
        self._posts += 1
        for worker in others:
            self._numbers.setdefault(worker, deque()).append(self._posts)

    def step_all(self, requests: Mapping[int, Request], patience: float) -> bool:
        if requests.get(_OWN) is not STEP_ALL:
            return super().step_all(requests, patience)
        others = self._others_of(requests)
        complete = self._processes.step_all(others, patience, self._step_own) if others else self._step_own()
        if complete:
            self._replies.clear()
            return True
        self._note_posted(others)
        self.in_line_until = self.clock()
        return False

    def _step_own(self) -> bool:
        """Step all environments of worker 0; returns whether its reply is `STEPPED`."""
        if self._worker is not None:  # else closed meanwhile by a signal handler
            self._worker.execute(STEP_ALL, self._keep)
        return len(self._replies) == 1 and self._replies[0][1] is STEPPED

    def _keep(self, reply: Reply) -> None:
        self._replies.append((_OWN, reply))

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        deadline = None if timeout is None else self.clock() + timeout
        replies = self._kept()
        while self._parts:
            if not self._parts[0].together:
                replies += self._replies_of_others(0.0, 1)
                if any(type(reply) is Lost for _, reply in replies):
                    return replies
                if len(replies) >= at_least and self._parts[0].number >= self._latest:
                    return replies
            self._carry_out(self._parts.popleft())
            replies += self._kept()
            if deadline is not None and self.clock() >= deadline:
                break
        missing = at_least - len(replies)
        if missing > 0:
            remaining = None if deadline is None else max(deadline - self.clock(), 0.0)
            replies += self._replies_of_others(remaining, missing)
        return replies

    def _kept(self) -> list[tuple[int, Reply | Lost]]:
        """Take the replies of worker 0."""
        replies, self._replies = self._replies, []
        return replies

    def _carry_out(self, part: _Part) -> None:
        def keep(reply: Reply) -> None:
            self._keep(reply if part.is_last else reply._replace(last=False))

        if self._worker is not None:
            self._worker.execute(part.request, keep)
        self.in_line_until = self.clock()

    def _replies_of_others(self, timeout: float | None, at_least: int) -> list[tuple[int, Reply | Lost]]:
        replies = self._processes.wait(timeout, at_least)
        for worker, reply in replies:
            numbers = self._numbers.get(worker)
            if isinstance(reply, Lost):
                self._numbers.pop(worker, None)
            elif numbers:
                self._latest = max(self._latest, numbers.popleft() if reply.last else numbers[0])
        return replies

    def interrupt(self) -> None:
        self._processes.interrupt()

    # -- workers -------------------------------------------------------------------------------------------------------

    def cpu_seconds(self, worker: int) -> float | None:
        return None if worker == _OWN else self._processes.cpu_seconds(worker)

    def memory(self, worker: int) -> int | None:
        return None if worker == _OWN else self._processes.memory(worker)

    def end(self, worker: int) -> Sequence[Reply]:
        self._check_process(worker)
        return self._processes.end(worker)

    def replace(self, worker: int) -> None:
        self._check_process(worker)
        self._numbers.pop(worker, None)
        self._processes.replace(worker)

    def add(self, worker: int, share: Sequence[int], beside: int | None = None) -> None:
        self._processes.add(worker, share, beside)

    def remove(self, worker: int, *, kill: bool) -> bool:
        self._check_process(worker)
        removed = self._processes.remove(worker, kill=kill)
        if removed:
            self._numbers.pop(worker, None)
        return removed

    def _check_process(self, worker: int) -> None:
        if worker == _OWN:
            raise NotImplementedError(f"worker {worker} runs in the caller's own thread and cannot be killed")

    def stack(self, worker: int, *, harmless: bool = False) -> str:
        return "" if worker == _OWN else self._processes.stack(worker, harmless=harmless)

    def log_tail(self, worker: int) -> str:
        return "" if worker == _OWN else self._processes.log_tail(worker)

    def stop(self, timeout: float) -> list[int]:
        self._forget_own()
        return self._processes.stop(timeout)

    def drop_memory(self) -> None:
        self._processes.drop_memory()

    def abandon(self) -> None:
        self._forget_own()
        self._processes.abandon()

    def _forget_own(self) -> None:
        self._worker = self._block = self._divided = None
        self._parts.clear()
