"""The state of the caller's side: one `Slot` per environment, one `WorkerQueue` per worker.

A slot is in one of these states; `-` is None or False::

    state   request   result      skips
    IDLE    -         -           -       the caller has its latest result
    IDLE    -         -           True    it has failed since: the next step or reset reports that
    BUSY    STEP      -           -       its worker, or its successor, owes the result
    BUSY    RESET     -           -       likewise
    BUSY    STEP      -           True    it is being rebuilt: the result is the report
    BUSY    RESET     -           True    likewise; or it failed while it was idle, and the reset reports that
    DONE    either    leftovers   -       the result is here
    DONE    either    a copy      -       the result is here: the report of a restart, or the end of a move
    DONE    either    a copy      True    the result is here, and it has failed since

`has_reset` becomes True with the first result of a reset, and False when `env.restart` has constructed the environment
again. `check` compares a slot with this table. How an environment is replaced, and what `skips` follows from, is the
table in `replacement.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from marl_parallel.core.messages import Failure, Message, Reply, Request
from marl_parallel.core.pool.replacement import CHANGES_OWED, Action, Event, Present, Successor, after
from marl_parallel.core.transition import Transition
from marl_parallel.core.worker_status import Running, WorkerStatus
from marl_parallel.types import WorkerStats

States: TypeAlias = tuple[NDArray[Any], NDArray[Any]]
"""The global state of one environment, and the last state of an episode that has ended."""


class Mark(Enum):
    """Why an environment in a result is another one than before; the value is the field of `Arrays`."""

    RESTARTED = "restarted"
    RECYCLED = "recycled"


class Snapshot(NamedTuple):
    """A copy of a transition, and what else its caller receives."""

    transition: Transition  # with all action masks that were reported; read-only
    over: bool  # whether the episode has ended and no reset has followed
    states: States | None = None  # set only if the states in the block may have been overwritten
    mark: Mark | None = None


class Owed(NamedTuple):
    """What a caller receives for a request that is held back, or that a fault has interrupted."""

    message: Message | None  # STEP, or RESET (also a reset that was due); None if no result was due
    transition: Transition  # of the environment before, without the beginning of an episode in the new one
    keywords: bytes | None = None  # of the caller's reset, pickled
    state: NDArray[Any] | None = None  # the last known state, if the step did not end; None without states
    report: str = ""  # the text of the error, after a fault
    next_result: Snapshot | None = None  # if no result was due, once it has been constructed again
    request: Request | None = None  # which the present environment gets if it has no successor
    result: tuple[bytes | None, float] = None, 0.0  # if none is held: the result for a move that is called off


class Results(NamedTuple):
    """Results that the caller receives."""

    env_ids: tuple[int, ...]  # in order of completion
    resets: list[int]  # the environments that were reset
    leftovers: Any  # by environment, the values that are not in its record: the unpickled leftovers, or a `Snapshot`


class State(Enum):
    """The progress of an environment's step or reset, as its caller sees it."""

    IDLE = 1  # nothing has been sent
    BUSY = 2  # it has been sent, and its result has not come yet
    DONE = 3  # its result has come, and the caller has not received it


@dataclass(slots=True, eq=False)
class Slot:
    """One environment. "Leftovers" are what a worker sends pickled, beyond the record."""

    env_id: int
    worker: int
    state: State = State.IDLE
    request: Message | None = None  # STEP or RESET, from `send` until the caller has received the result
    result: Any = None  # the unpickled leftovers, or a `Snapshot`; None if everything is in the record
    completed: float = 0.0  # when the worker finished, in seconds of `Backend.clock`
    has_reset: bool = False  # whether the environment has been reset at least once
    present: Present = Present.GOES_ON
    successor: Successor = Successor.NONE
    owed: Owed | None = None  # except with `GOES_ON`
    owed_if_ended: Owed | None = None  # what is owed if the worker, which is late, is ended

    @property
    def skips(self) -> bool:
        """Whether the next result reports a restart; the action of that step is ignored."""
        return self.present is Present.RESTARTS or self.present is Present.REPORTS

    @property
    def is_held(self) -> bool:
        """Whether results of its worker do not count: the caller's result comes from somewhere else."""
        if self.owed_if_ended is not None:
            return True
        return not (self.present is Present.GOES_ON or self.present is Present.REPORTS)

    def note(self, event: Event, owed: Owed | None = None) -> Action:
        """Apply an event of the tables in `replacement.py`; returns what is to be done.

        `owed` replaces what is owed, also by None, except with `TAKES_OVER` and events of successors.
        """
        self.present, self.successor, action = after(self.present, self.successor, event)
        if event in CHANGES_OWED:
            self.owed = owed
        return action

    def check(self) -> None:
        """Raise `AssertionError` unless this is one of the states in the table."""
        assert (self.request is None) == (self.state is State.IDLE), f"a state without its request: {self}"
        assert self.result is None or self.state is State.DONE, f"a result that has not come: {self}"
        assert (self.owed is None) == (self.present is Present.GOES_ON), f"owed without a reason, or nothing: {self}"
        if self.state is State.DONE and self.skips:
            assert type(self.result) is Snapshot, f"a result whose record is overwritten: {self}"


OnReply: TypeAlias = Callable[[int, Reply, dict[int, Failure]], None]
"""A callback of an extension for replies to a request that it has posted. It may add failures."""


class Pending(NamedTuple):
    """A request without a last reply."""

    request: Request
    number: int  # of its first part, see `WorkerStatus.parts`
    posted: float  # when it was posted, in seconds of `Backend.clock`
    owner: OnReply | None  # gets its replies in place of the pool
    is_awaited: bool  # whether calls other than steps and resets wait for it


STEPS_AND_RESETS = frozenset({Message.STEP, Message.RESET})
"""Requests that have the results of slots; all results of a request may come in one reply."""


@dataclass(slots=True, eq=False)
class WorkerQueue:
    """The queue of requests of one worker."""

    share: Sequence[int]  # its environments
    position: int  # of the worker, or of the first one that it has replaced, in statistics
    built: Sequence[int] = ()  # environments for which it was started: some may have moved, or not moved in yet
    requests: deque[Pending] = field(default_factory=deque)  # oldest first
    posted: int = 0  # how many parts of requests have been posted to this process
    since: float = 0.0  # when the worker could begin the oldest request, in seconds of `Backend.clock`
    past: WorkerStats = WorkerStats()  # noqa: RUF009  # of the processes that the present one has replaced

    @property
    def environments(self) -> Sequence[int]:
        """The environments of the worker; if it has none, the environments for which it was started."""
        return self.share or self.built

    def running(self, status: WorkerStatus) -> Running | None:
        """The activity of the worker; None if its status is damaged, and names an environment of another worker."""
        running = status.running
        return running if running is None or running.env_id in (*self.share, *self.built) else None

    @property
    def one_reply(self) -> bool:
        """Whether the worker carries out a step or reset with one reply for all environments."""
        if not self.requests:
            return False
        request = self.requests[0].request
        return not request.each and request.message in STEPS_AND_RESETS

    def owes(self, env_id: int, owner: OnReply | None, messages: Container[Message]) -> bool:
        """Whether the worker has a request with one of these messages for an environment, whose reply `owner` gets."""
        return any(
            one.request.message in messages
            and one.owner == owner
            and (one.request.env_ids is None or env_id in one.request.env_ids)
            for one in self.requests
        )

    def check(self, status: WorkerStatus, now: float, *, status_is_current: bool, owes: bool) -> None:
        """Raise `AssertionError` if the requests do not fit the status of the worker, which may be an older one."""
        parts, numbers = status.parts, [one.number for one in self.requests]
        which = f"the worker of environments {[*self.environments]}"
        assert parts <= self.posted, f"{which} has begun {parts} of {self.posted} parts of requests"
        assert owes or parts == self.posted or not status_is_current, (
            f"{which} owes no reply, with {parts} of {self.posted} parts begun"
        )
        assert [*numbers, self.posted] == sorted([*numbers, self.posted]), f"{which} has {numbers} of {self.posted}"
        assert not self.requests or 0.0 < self.since <= now, f"{which} begins at {self.since}, now {now}"
        assert {*self.share} <= {*self.built}, f"{which} was started for {[*self.built]}"

    def owes_one_reply(self, env_ids: Container[int]) -> bool:
        """Whether the queue has a request with one reply for environments in `env_ids`."""
        return any(
            one.request.message in STEPS_AND_RESETS
            and not one.request.each
            and one.request.env_ids is not None
            and one.request.env_ids[0] in env_ids
            for one in self.requests
        )
