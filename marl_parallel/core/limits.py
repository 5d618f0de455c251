"""How long an environment may take, and who takes longer.

Limits run from the moment at which an environment begins something, which the worker's ledger tells; a worker that
does not begin at all is given the limit of what it was asked for. What happens to who is late is decided in
`supervision.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal, NamedTuple

from marl_parallel.core.backend import Backend
from marl_parallel.core.ledger import BEFORE_OR_AFTER, Activity, Running
from marl_parallel.core.messages import Message, Request

_LOOK_EVERY_S = 0.05
_UNMOVED_S = 0.02
_FROZEN_S = 0.25
"""A wait that ends so much later than it should means that this process, and likely all, did not run meanwhile."""
_STARTED_BY = (Message.ACCESS, Message.ATTACH, Message.REBUILD)
_MAY_RESET = (Message.STEP, Message.REBUILD, Message.STATE, Message.RENDER)


class Limits(NamedTuple):
    """Seconds; None for no limit.

    Attributes:
        step: For steps, calls, attributes, frames and states.
        reset: For resets, whoever asks for them.
        start: For constructors.
    """

    step: float | None
    reset: float | None
    start: float | None

    def of(self, activity: Activity) -> float | None:
        """The limit of an activity."""
        return getattr(self, limited_by(activity))  # type: ignore[no-any-return]


def limited_by(activity: Activity) -> Literal["step", "reset", "start"]:
    """Which of the limits holds for an activity; that argument of `ParallelEnv` is called so, and `_timeout`."""
    if activity is Activity.RESET:
        return "reset"
    return "start" if activity in BEFORE_OR_AFTER else "step"


class Watch:
    """Looks at the workers' ledgers.

    Time in which this process did not run while it waited, as when a virtual machine or a container is paused, does not
    count: the workers did not run either. Time between two waits, in which the caller does something else, counts.

    Args:
        backend: The workers.
        limits: For each environment.

    Attributes:
        asked: What workers have been asked for that has a limit; nobody can be late while there is nothing.
    """

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self._backend, self._limits = backend, limits
        self.asked: dict[int, list[Message]] = {}
        # Since when they have been expected to get on with it.
        self._since: dict[int, float] = {}
        self._suspects: dict[int, tuple[tuple[int, float], float]] = {}
        self._shortest = {message: self._shortest_of(message) for message in Message}
        self._steps_are_free = self._shortest[Message.STEP] is None
        self._back_by: float | None = None  # when the wait that has begun ends at the latest
        self._frozen: list[tuple[float, float]] = []

    def _shortest_of(self, message: Message) -> float | None:
        """Limits that may apply while a request is carried out, the shortest of them."""
        of = {self._limits.start if message in _STARTED_BY else self._limits.step}
        if message is Message.RESET:
            of = {self._limits.reset}
        elif message in _MAY_RESET:
            of.add(self._limits.reset)
        return min((limit for limit in of if limit is not None), default=None)

    def begin(self, requests: Mapping[int, Request]) -> None:
        """Note that workers have been asked for something."""
        for worker, request in requests.items():
            if request.message is Message.STEP and self._steps_are_free:
                return  # on this way every microsecond counts
            if self._shortest[request.message] is not None:
                self.asked.setdefault(worker, []).append(request.message)
                self._since.setdefault(worker, time.monotonic())

    def end(self, worker: int, message: Message) -> None:
        """Note that a request has been answered."""
        asked = self.asked.get(worker)
        if asked is None or message not in asked:
            return
        asked.remove(message)
        self._since[worker] = time.monotonic()
        if not asked:
            self.forget(worker)

    def forget(self, worker: int) -> None:
        """Note that nothing is expected of a worker any more."""
        self.asked.pop(worker, None)
        self._since.pop(worker, None)
        self._suspects.pop(worker, None)

    def patience(self) -> float | None:
        """For how long to wait at most before looking; None for as long as it takes. To be asked before each wait."""
        if not self.asked:
            return None
        limits = [self._shortest[message] for asked in self.asked.values() for message in asked]
        seconds = min(
            _UNMOVED_S if self._suspects else _LOOK_EVERY_S, *[limit for limit in limits if limit is not None]
        )
        self._back_by = time.monotonic() + seconds
        return seconds

    def late(self) -> list[int]:
        """Who takes too long, seen twice without anything having moved: else one may just have been about to."""
        back_by, self._back_by = self._back_by, None
        if not self.asked:
            return []
        late, now = [], time.monotonic()
        if back_by is not None and now - back_by > _FROZEN_S:
            first = min(self._since.values())
            self._frozen = [*(span for span in self._frozen if span[1] > first), (back_by, now)]
            self._suspects.clear()  # they have not had the time to move
        for worker, since in self._since.items():
            state = self._backend.ledgers[worker].state
            limit = self.overrun(worker)[2]
            begun = max(since, state[1])
            if limit is None or now - begun <= limit or self._passed(begun, now) <= limit:
                self._suspects.pop(worker, None)
                continue
            suspected, when = self._suspects.setdefault(worker, (state, now))
            if suspected != state:
                self._suspects[worker] = state, now
            elif now - when >= _UNMOVED_S:
                late.append(worker)
        return late

    def moved(self, worker: int) -> bool:
        """Whether a worker that `late` has named has begun or ended something since."""
        return self._backend.ledgers[worker].state != self._suspects[worker][0]

    def _passed(self, since: float, now: float) -> float:
        """Seconds that have passed, without those in which this process was frozen."""
        return now - since - sum(max(end - max(begin, since), 0.0) for begin, end in self._frozen)

    def overrun(self, worker: int) -> tuple[Running | None, Activity, float | None]:
        """What a worker is doing, and the limit of that."""
        running = self._backend.ledgers[worker].running
        if running is not None:
            return running, running.activity, self._limits.of(running.activity)
        message = self.asked[worker][0]
        doing = {Message.RESET: Activity.RESET}.get(
            message, Activity.START if message in _STARTED_BY else Activity.STEP
        )
        return None, doing, self._limits.of(doing)
