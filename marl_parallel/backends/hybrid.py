"""Worker 0 in the caller's own thread, the others in processes: no CPU is idle, and worker 0 needs no wake-up.

    post()      requests of the other workers go out; that of worker 0 is queued
    wait()      carries out what is queued, then waits for the other workers

The other workers, and the memory of all, are those of `WorkerProcesses`. With `send` and `recv`, `wait` looks for
replies of the others before each environment of worker 0, and leaves the rest for later once there are enough. No
environment of worker 0 waits for long: once the result of a later request has come, the environment is stepped first.

Worker 0 behaves as with `backend="serial"`: Ctrl-C in a simulator interrupts the caller, worker 0 cannot be killed, and
a crash ends the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marl_parallel.backends.worker_processes import Link, WorkerProcesses
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.messages import STEP_ALL, STEPPED, Lost, Reply, Request
from marl_parallel.core.worker.worker import Worker

_OWN = 0  # the number of the worker in the caller's thread


class _Part(NamedTuple):
    """A request to worker 0, or the part of it that gets a reply of its own."""

    request: Request
    number: int  # of the call of `post`
    is_last: bool  # whether it is the last part of its request
    together: bool  # whether the caller waits for all replies


class HybridBackend(WorkerProcesses):
    """One worker in the caller's own thread, the others in processes."""

    in_line = frozenset({_OWN})

    def __init__(self, link: Link[Any]) -> None:
        super().__init__(link)
        self._worker: Worker | None = None  # None before `start`, and once everything is freed
        self._block: Any = None
        self._parts: deque[_Part] = deque()  # that worker 0 has not begun
        self._replies: list[tuple[int, Reply | Lost]] = []  # of worker 0
        self._posts = 0  # how many calls of `post` there have been
        self._numbers: dict[int, deque[int]] = {}  # by other worker, the numbers of its requests without a last reply
        self._latest = 0  # the highest number of a request with a reply
        self._divided: tuple[Mapping[int, Request], dict[int, Request]] | None = None  # see `_others_of`

    def start(self, shares: Sequence[Sequence[int]], most_requests: int, most: int | None = None) -> None:
        super().start(shares, most_requests, most)
        arrays = self._arrays
        self._worker = Worker(self.statuses[_OWN], lambda _: self._block, in_line=True, arrays=lambda: arrays.fd)

    def simulators(self) -> dict[int, Any]:
        """By environment of worker 0, the object that its constructor has returned."""
        return {} if self._worker is None else self._worker.simulators()

    def allocate(self, nbytes: int, layout: Layout | None = None) -> Any:
        self._block = super().allocate(nbytes, layout)
        return self._block

    # -- requests and replies ------------------------------------------------------------------------------------------

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        others = self._others_of(requests)
        if others:
            super().post(others, together=together)
        self._count_post(others)
        request = requests.get(_OWN)
        if request is not None:
            ids = request.env_ids
            parts = [(env_id,) for env_id in ids] if request.each and ids is not None else [ids]
            for position, part in enumerate(parts, 1):
                self._parts.append(_Part(request._replace(env_ids=part), self._posts, position == len(parts), together))

    def _others_of(self, requests: Mapping[int, Request]) -> dict[int, Request]:
        """The requests of the other workers; the same dict for the same `requests`, as `step_all` needs it."""
        if self._divided is None or self._divided[0] is not requests:
            others = {worker: request for worker, request in requests.items() if worker != _OWN}
            self._divided = requests, others
        return self._divided[1]

    def _count_post(self, others: Mapping[int, Request]) -> None:
        self._posts += 1
        for worker in others:
            self._numbers.setdefault(worker, deque()).append(self._posts)

    def step_all(
        self, requests: Mapping[int, Request], patience: float, meanwhile: Callable[[], bool] | None = None
    ) -> bool:
        if requests.get(_OWN) is not STEP_ALL:
            self.post(requests, together=True)
            return False
        others = self._others_of(requests)
        complete = super().step_all(others, patience, self._step_own) if others else self._step_own()
        if complete:
            self._replies.clear()
            return True
        self._count_post(others)
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
        replies = super().wait(timeout, at_least)
        for worker, reply in replies:
            numbers = self._numbers.get(worker)
            if isinstance(reply, Lost):
                self._numbers.pop(worker, None)
            elif numbers:
                self._latest = max(self._latest, numbers.popleft() if reply.last else numbers[0])
        return replies

    # -- workers -------------------------------------------------------------------------------------------------------

    def start_worker(self, worker: int, share: Sequence[int], beside: int | None = None) -> None:
        self._numbers.pop(worker, None)
        super().start_worker(worker, share, beside)

    def stop(self, timeout: float) -> list[int]:
        self._forget_own()
        return super().stop(timeout)

    def abandon(self) -> None:
        self._forget_own()
        super().abandon()

    def _forget_own(self) -> None:
        self._worker = self._block = self._divided = None
        self._parts.clear()
