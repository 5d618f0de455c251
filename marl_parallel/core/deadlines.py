"""Timeouts: how long an environment may take, and which workers are past their limit.

A limit runs from the moment at which an environment begins something, which the worker's status says. A worker that
does not begin at all has the limit of the request before it. `pool.py` decides what happens to a worker that is late.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from marl_parallel.core.backend import Backend
from marl_parallel.core.ledger import BEFORE_OR_AFTER, Activity, Running
from marl_parallel.core.messages import Message
from marl_parallel.core.slots import WorkerQueue

_POLL_S = 0.05
_UNCHANGED_S = 0.02
_FROZEN_S = 0.25
"""A wait that ends so much later than it should means that this process, and likely all, did not run meanwhile."""
_CONSTRUCTING = (Message.ACCESS, Message.ATTACH, Message.REBUILD)
_MAY_RESET = (Message.STEP, Message.REBUILD, Message.STATE, Message.RENDER)


class Limits(NamedTuple):
    """Seconds; None for no limit.

    Attributes:
        step: For steps, calls, attributes, frames and states.
        reset: For resets, automatic ones too.
        start: For constructors.
    """

    step: float | None = None
    reset: float | None = None
    start: float | None = None

    def of(self, activity: Activity) -> float | None:
        """The limit of an activity."""
        return getattr(self, limited_by(activity))  # type: ignore[no-any-return]

    def shortest(self, message: Message) -> float | None:
        """The shortest of the limits that may apply while a request is carried out."""
        limits = {self.start if message in _CONSTRUCTING else self.step}
        if message is Message.RESET:
            limits = {self.reset}
        elif message in _MAY_RESET:
            limits.add(self.reset)
        return min((limit for limit in limits if limit is not None), default=None)


def limited_by(activity: Activity) -> Literal["step", "reset", "start"]:
    """The name of the limit of an activity; the argument of `ParallelEnv` is this name with `_timeout`."""
    if activity is Activity.RESET:
        return "reset"
    return "start" if activity in BEFORE_OR_AFTER else "step"


class Deadlines:
    """The timeouts of the requests before all workers.

    Time in which this process did not run while it waited, as when a virtual machine or a container is paused, does not
    count: the workers did not run either. Time between two waits, in which the caller does something else, counts.

    Args:
        backend: The workers.
        limits: For each environment.
        queues: The requests before each worker.

    Attributes:
        shortest: By kind of request, the shortest limit that applies; None for none.
        limited: How many requests with a limit are before workers; `pool.py` counts them.
    """

    def __init__(self, backend: Backend, limits: Limits, queues: Sequence[WorkerQueue]) -> None:
        self._backend, self._queues = backend, queues
        self._limits = limits if backend.enforces_timeouts else Limits()
        self.shortest = {message: self._limits.shortest(message) for message in Message}
        self.limited = 0
        self._wait_ends: float | None = None  # when the wait that has begun ends at the latest
        self._frozen: list[tuple[float, float]] = []

    def patience(self) -> float | None:
        """How long to wait before the next call of `late`; None for no limit. Called before each wait."""
        if not self.limited:
            return None
        limits = [
            limit
            for queue in self._queues
            for request, _ in queue.requests
            if (limit := self.shortest[request.message]) is not None
        ]
        suspected = any(queue.suspect is not None for queue in self._queues)
        seconds = min(_UNCHANGED_S if suspected else _POLL_S, *limits)
        self._wait_ends = time.monotonic() + seconds
        return seconds

    def late(self) -> list[int]:
        """Workers past their timeout.

        A worker counts as late only if its status did not change between two polls, so that one that was just
        finishing is not killed.
        """
        wait_ends, self._wait_ends = self._wait_ends, None
        if not self.limited:
            return []
        now = time.monotonic()
        expected = {worker: queue for worker, queue in enumerate(self._queues) if self._limited_request(queue)}
        if wait_ends is not None and now - wait_ends > _FROZEN_S:
            first = min(queue.since for queue in expected.values())
            self._frozen = [*(span for span in self._frozen if span[1] > first), (wait_ends, now)]
            for queue in self._queues:
                queue.suspect = None  # they have not had the time to change it
        late = []
        for worker, queue in expected.items():
            state = self._backend.ledgers[worker].state
            limit = self.overrun(worker)[2]
            begun = max(queue.since, state[1])
            if limit is None or now - begun <= limit or self._elapsed(begun, now) <= limit:
                queue.suspect = None
            elif queue.suspect is None or queue.suspect[0] != state:
                queue.suspect = state, now
            elif now - queue.suspect[1] >= _UNCHANGED_S:
                late.append(worker)
        return late

    def changed(self, worker: int) -> bool:
        """Whether a worker that `late` has returned has begun or ended something since."""
        suspect = self._queues[worker].suspect
        return suspect is None or self._backend.ledgers[worker].state != suspect[0]

    def overrun(self, worker: int) -> tuple[Running | None, Activity, float | None]:
        """What a worker is doing, as far as its status says; the activity that has a limit, and the limit."""
        running = self._backend.ledgers[worker].running
        if running is not None:
            return running, running.activity, self._limits.of(running.activity)
        message = self._limited_request(self._queues[worker])
        activity = Activity.STEP
        if message is Message.RESET:
            activity = Activity.RESET
        elif message in _CONSTRUCTING:
            activity = Activity.START
        return None, activity, self._limits.of(activity)

    def _limited_request(self, queue: WorkerQueue) -> Message | None:
        """The oldest request that has a limit."""
        for request, _ in queue.requests:
            if self.shortest[request.message] is not None:
                return request.message
        return None

    def _elapsed(self, since: float, now: float) -> float:
        """Seconds since a moment, without those in which this process was frozen."""
        return now - since - sum(max(end - max(begin, since), 0.0) for begin, end in self._frozen)
