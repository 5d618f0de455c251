"""The parent's view: one `Slot` per environment, one `WorkerQueue` per worker, and which workers are late.

A timeout runs from the moment at which an environment begins something, as the worker's status shows. While a worker
has not begun a request, the request's own timeout runs from when the worker was free.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from marl_parallel.adapters.protocol import AgentID, Dicts
from marl_parallel.core.backend import Backend
from marl_parallel.core.messages import Message, Request
from marl_parallel.core.worker_status import Activity, Running
from marl_parallel.types import WorkerStats


class Snapshot(NamedTuple):
    """A transition in memory of its own, and the state in which it leaves its environment."""

    dicts: Dicts
    acting: list[AgentID]
    alive: list[AgentID]
    over: bool
    masks: dict[AgentID, Any] = {}  # noqa: RUF012  # all action masks that were reported; read-only


class Fault(NamedTuple):
    """Why an environment is rebuilt, until a result reports it."""

    interrupted: Message | None  # STEP, RESET (also one that was due); None for an idle environment
    dicts: Dicts  # that the caller receives, without what the fresh environment adds
    report: str = ""  # the text of the error
    next_result: Snapshot | None = None  # of an environment that was idle, once it has been rebuilt


@dataclass(slots=True, eq=False)
class Slot:
    """One environment, as the parent knows it. "Extras" are what a worker sends pickled, beyond the record."""

    env_id: int
    worker: int
    request: Message | None = None  # STEP or RESET, from `send` until the caller has received the result

    done: bool = False  # whether the result is here
    result: Any = None  # the unpickled extras, or a `Snapshot`; None if everything is in the record
    completed: float = 0.0  # when the worker had the result, in seconds of `Backend.clock`

    acting: list[AgentID] = field(default_factory=list)  # who acts next; read-only
    alive: list[AgentID] = field(default_factory=list)  # seen in this episode and not ended yet; read-only
    over: bool = False  # whether the episode has ended and no reset has followed
    has_reset: bool = False  # whether the environment has been reset at least once
    masks: dict[AgentID, Any] | None = None  # action masks that are not in the record; None in place of those there

    fault: Fault | None = None  # that is not reported yet
    rebuilds: int = 0  # how often the environment has been constructed again, for whatever reason
    restarts: Counter[str] = field(default_factory=Counter)  # after faults and on request, by `restart_kinds`
    recycled: int = 0  # how often it has been replaced by a spare
    counted_faults: int = 0  # those that count against it
    recent_faults: deque[float] = field(default_factory=deque)  # when the latest of these were
    needs_reset: bool = False  # whether it has been rebuilt and has returned nothing since, so that no agent is alive
    reported: dict[AgentID, Any] | None = None  # until then, its last known observations: the record may be torn

    latest: bytes | None = None  # the pickled extras of the latest result: the unpickled ones belong to the caller
    saved: bytes | None = None  # likewise of the last step of an episode whose automatic reset has not ended yet
    reset_keywords: bytes | None = None  # the pickled keywords of a reset in flight
    waiting_reset: bytes | None = None  # likewise of a reset that begins when the environment has been rebuilt
    options: dict[Any, Any] = field(default_factory=dict)  # of earlier resets, if the environment remembers them

    built: float = 0.0  # when the present environment was constructed
    first_episode: int = 0  # its number of ended episodes was this when the present one was constructed
    spare: int | None = None  # the worker that has its spare, or constructs it
    due: bool = False  # whether its worker is past a limit, and the spares are ready
    retiring: bool = False  # whether its worker does not begin another episode with it
    renewing: bool = False  # whether the episode that is due begins in a spare, or in the old one if there is none
    awaits_spare: bool = False  # whether that has not been requested yet, since the spare is not ready
    ending: Snapshot | None = None  # likewise, with `SAME_STEP`: the last step of the old environment
    reports_recycling: bool = False  # whether the next result has the mark

    @property
    def rebuilding(self) -> bool:
        """Whether the environment has failed, and its worker constructs it again; a result may wait for the caller."""
        return self.fault is not None and self.fault.next_result is None

    @property
    def busy(self) -> bool:
        """Whether a step or reset has been sent, and its result is not here yet."""
        return self.request is not None and not self.done and not self.rebuilding and not self.renewing


_WITH_ONE_REPLY = frozenset({Message.STEP, Message.RESET})
"""Requests whose results may come together."""


@dataclass(slots=True, eq=False)
class WorkerQueue:
    """The requests before one worker, seen from the parent."""

    share: Sequence[int]  # its environments
    position: int  # of the worker, or of the first one that it has replaced, in statistics
    built: Sequence[int] = ()  # for which it was started: some may have moved, be spares, or have died with a process
    # Environments that are or will be constructed here before an episode begins in them, as spares or in place; with
    # 0 if that has been done, 1 if the request is in flight, 2 if it will have to be repeated then.
    preparing: dict[int, int] = field(default_factory=dict)
    prepared_since: float = 0.0  # when the latest of these requests was posted
    ends_by: float | None = None  # when it is killed at the latest, since all environments have left
    # Requests without a last reply, oldest first; each with the number of its first part (see `WorkerStatus.parts`),
    # and the shortest timeout that may apply to it, in seconds.
    requests: deque[tuple[Request, int, float | None]] = field(default_factory=deque)
    posted: int = 0  # how many parts of requests have been posted to this process
    since: float = 0.0  # when the worker was last expected to begin something, in seconds of `Backend.clock`
    suspect: tuple[tuple[int, float], float] | None = None  # a status past its timeout, and when it was first seen
    past: WorkerStats = WorkerStats()  # noqa: RUF009  # of the processes that this one has replaced
    settings: bytes = b""  # of the caller's process, as its last reset has sent them

    @property
    def environments(self) -> Sequence[int]:
        """Its environments; if it has none, those whose spares it has, or that have left it."""
        return self.share or self.built

    @property
    def is_preparing(self) -> bool:
        """Whether environments are being constructed that will be needed later."""
        return any(self.preparing.values())

    def note_prepared(self, env_id: int) -> bool:
        """Note that a request to construct an environment was carried out; returns whether it must be repeated."""
        repeats = self.preparing[env_id] == 2
        self.preparing[env_id] = 0
        return repeats

    @property
    def one_reply(self) -> bool:
        """Whether the worker carries out a step or reset with one reply for all environments."""
        if not self.requests:
            return False
        request = self.requests[0][0]
        return not request.each and request.message in _WITH_ONE_REPLY

    def owes_one_reply(self, env_ids: Container[int]) -> bool:
        """Whether a request with one reply is in the queue, of environments that are in `env_ids`."""
        return any(
            request.message in _WITH_ONE_REPLY
            and not request.each
            and request.env_ids is not None
            and request.env_ids[0] in env_ids
            for request, _, _ in self.requests
        )

    def is_retiring(self, env_id: int) -> bool:
        """Whether a `RETIRE` of an environment is in the queue: a second one waits, so that they cannot fill it."""
        return any(
            request.message is Message.RETIRE and request.env_ids is not None and env_id in request.env_ids
            for request, _, _ in self.requests
        )

    @property
    def limited(self) -> Message | None:
        """The oldest request that has a timeout."""
        return next((request.message for request, _, limit in self.requests if limit is not None), None)


_POLL_S = 0.05
_UNCHANGED_S = 0.02
_FROZEN_S = 0.25
"""A wait that ends so much later than it should means that this process, and likely all, did not run meanwhile."""
_LIMITED_BY = dict.fromkeys(Message, (Activity.STEP,)) | {
    Message.ACCESS: (Activity.START,),
    Message.ATTACH: (Activity.START,),
    Message.REBUILD: (Activity.START, Activity.RESET),
    Message.PREPARE: (Activity.START, Activity.RESET),
    Message.CLOSE: (Activity.CLOSE,),
    Message.RESET: (Activity.RESET,),
    Message.STEP: (Activity.STEP, Activity.RESET),
    Message.STATE: (Activity.STEP, Activity.RESET),
    Message.RENDER: (Activity.STEP, Activity.RESET),
}
"""The activities of a request whose timeouts apply; the first one before it has begun."""


class Limits(NamedTuple):
    """Timeouts in seconds, see `Activity.timeout`; None for no limit."""

    step: float | None = None
    reset: float | None = None
    start: float | None = None


class Deadlines:
    """The timeouts of the requests before all workers.

    Time in which this process waited but did not run, as when a virtual machine is paused, does not count: the workers
    did not run either. Time between two waits, in which the caller does something else, counts.
    """

    def __init__(self, backend: Backend, limits: Limits, queues: Mapping[int, WorkerQueue]) -> None:
        self._backend, self._queues, self._clock = backend, queues, backend.clock
        enforced = limits if backend.enforces_timeouts else Limits()
        self.limits: dict[Activity, float | None] = {one: getattr(enforced, one.timeout) for one in Activity}
        self.shortest = {  # by kind of request, the shortest timeout that may apply while it is carried out
            message: min((limit for one in activities if (limit := self.limits[one]) is not None), default=None)
            for message, activities in _LIMITED_BY.items()
        }
        self.looked = 0.0  # when the present call of the pool began, or `late` was last called in it
        self._wait_ends: float | None = None  # when the present wait ends at the latest
        self._looking_s = 0.0  # the backend's `looking_s` when it began
        self._frozen: list[tuple[float, float]] = []

    def patience(self) -> float | None:
        """How long to wait before the next call of `late`; None for no limit. Called before each wait."""
        limits = [limit for queue in self._queues.values() for _, _, limit in queue.requests if limit is not None]
        if not limits:
            self._wait_ends = None
            return None
        now = self._clock()
        if now - self.looked > _FROZEN_S:
            self._note_frozen(self.looked, now)
        suspected = any(queue.suspect is not None for queue in self._queues.values())
        seconds = min(_UNCHANGED_S if suspected else _POLL_S, *limits)
        self._wait_ends, self._looking_s = now + seconds, self._backend.looking_s
        return seconds

    def late(self) -> list[int]:
        """Workers past their timeout whose status did not change between two polls: none that was just finishing."""
        wait_ends, self._wait_ends = self._wait_ends, None
        self.looked = now = self._clock()  # it may be frozen below, too
        if wait_ends is None:
            return []
        wait_ends += self._backend.looking_s - self._looking_s  # the workers did run meanwhile
        if now - wait_ends > _FROZEN_S:
            self._note_frozen(wait_ends, now)
        late = []
        for worker, queue in self._queues.items():
            if queue.limited is None:
                continue
            state, limit = self._backend.statuses[worker].state, self.overrun(worker)[2]
            started = max(queue.since, state[1], self._backend.ready_since(worker))
            frozen = sum(max(end - max(begin, started), 0.0) for begin, end in self._frozen)
            if limit is None or now - started - frozen <= limit:
                queue.suspect = None
            elif queue.suspect is None or queue.suspect[0] != state:
                queue.suspect = state, now
            elif now - queue.suspect[1] >= _UNCHANGED_S:
                late.append(worker)
        return late

    def _note_frozen(self, begin: float, end: float) -> None:
        first = min((queue.since for queue in self._queues.values() if queue.limited is not None), default=end)
        self._frozen = [*(span for span in self._frozen if span[1] > first), (begin, end)]
        for queue in self._queues.values():
            queue.suspect = None  # the workers have not had the time to change it

    def changed(self, worker: int) -> bool:
        """Whether a worker that `late` has returned has begun or ended something since."""
        suspect = self._queues[worker].suspect
        return suspect is None or self._backend.statuses[worker].state != suspect[0]

    def overrun(self, worker: int) -> tuple[Running | None, Activity, float | None]:
        """What a worker is doing, if its status shows it; the activity that has a limit, and the limit."""
        running, request = self._backend.statuses[worker].running, self._queues[worker].limited or Message.STEP
        activity = _LIMITED_BY[request][0] if running is None else running.activity
        return running, activity, self.limits[activity]


# -- calls that take long ----------------------------------------------------------------------------------------------

_LOOK_EVERY_S = 1.0


class LongCall(NamedTuple):
    """An environment, or a worker, that has been in the same call for long."""

    worker: int
    running: Running | None  # None if the worker has not begun what was requested
    activity: Activity
    seconds: float


class LongCalls:
    """Finds calls of environments that take longer than `warn_after` seconds, then twice as long, and so on.

    With None, it finds them only if it is asked for all that have lasted for some time.
    """

    def __init__(self, backend: Backend, queues: Mapping[int, WorkerQueue], warn_after: float | None) -> None:
        self._backend, self._queues, self._clock = backend, queues, backend.clock
        self.warn_after = warn_after
        self._after = math.inf if warn_after is None else warn_after
        self._next_look = self._clock() + self._after
        self._next: dict[int, tuple[tuple[int, float], float]] = {}  # by worker: its state, and seconds until a warning

    def patience(self) -> float | None:
        """Seconds until the next `look`; None if there is none."""
        return None if self.warn_after is None else self._next_look - self._clock()

    def look(self, seconds: float | None = None) -> list[LongCall]:
        """The calls to warn of now; with `seconds`, all that have lasted longer."""
        now = self._clock()
        self._next_look = now + min(self._after, _LOOK_EVERY_S)
        self._backend.look()
        found = []
        for worker, queue in self._queues.items():
            if not queue.requests:
                self._next.pop(worker, None)
                continue
            status = self._backend.statuses[worker]
            state, running = status.state, status.running
            if running is None and status.settled is not None and status.parts >= queue.posted:
                continue  # its reply is here, or on its way
            elapsed = now - max(queue.since, state[1])
            known, after = self._next.get(worker, (state, self._after))
            if known != state:
                after = self._after
            if elapsed >= (after if seconds is None else seconds):
                message = queue.requests[0][0].message
                activity = _LIMITED_BY[message][0] if running is None else running.activity
                found.append(LongCall(worker, running, activity, elapsed))
                while after <= elapsed:
                    after *= 2
            self._next[worker] = state, after
        return found
