"""One `Slot` per environment: all that the parent knows of it, and `WorkerQueue`, the requests before one worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from marl_parallel.adapters.protocol import AgentID, Dicts
from marl_parallel.core.messages import Message, Request
from marl_parallel.types import WorkerStats


class State(Enum):
    """What an environment is doing, seen from the parent."""

    IDLE = "idle"
    BUSY = "busy"
    """A step or reset has been sent, and no result is here yet."""
    DONE = "done"
    """A result is here that the caller has not received yet."""
    REBUILDING = "rebuilding"
    """The environment has failed, and its worker constructs it again."""


class Interrupted(Enum):
    """What a fault interrupts."""

    STEP = "step"
    AUTO_RESET = "auto-reset"
    """The reset within the step that ended an episode."""
    RESET = "reset"
    """A reset that the caller sent, or that was due."""
    NOTHING = "nothing"
    """The environment was idle: its next result carries the mark of the restart."""


class Fault(NamedTuple):
    """Why an environment is being rebuilt.

    Attributes:
        interrupted: What the fault interrupted.
        dicts: The five dicts that the caller receives, without what the fresh environment adds.
        report: The text of the error.
    """

    interrupted: Interrupted
    dicts: Dicts
    report: str


class Snapshot(NamedTuple):
    """A transition in memory of its own, and the state in which it leaves its environment.

    Attributes:
        dicts: Observations, rewards, terminateds, truncateds, infos.
        acting: The agents that act next.
        alive: The agents that have been seen and are neither terminated nor truncated.
        over: Whether the episode has ended and no reset has followed.
        masks: The action masks of the agents that act; None for an agent without one.
    """

    dicts: Dicts
    acting: list[AgentID]
    alive: list[AgentID]
    over: bool
    masks: dict[AgentID, Any] = {}  # noqa: RUF012  # nobody writes into it


@dataclass(slots=True, eq=False)
class Slot:
    """One environment, as the parent knows it.

    Attributes:
        env_id: Its number.
        worker: The number of its worker.
        request: `STEP` or `RESET` from `send` until the caller has received the result; else None.
        done: Whether the result is here.
        result: With `done`, what travelled pickled, read; or a `Snapshot`. None where all is in the record.
        completed: With `done`, when, in seconds of `time.monotonic`.
        acting: The agents that act next; a list that nobody may change.
        alive: The agents seen in this episode and neither terminated nor truncated; likewise.
        over: Whether the episode has ended and no reset has followed.
        has_reset: Whether the environment has been reset at least once.
        masks: Action masks that do not lie in the record, by agent; None where there are none.
        fault: Set while the environment is being rebuilt.
        mark: After the restart of an idle environment: the fault, and the next result.
        restarts: How often the environment has been rebuilt.
        blamed: How often a fault has counted against it.
        recent_faults: When the latest of these were, in seconds of `time.monotonic`.
        needs_reset: Whether the environment has been rebuilt and has returned nothing since, so that no agent is alive.
        latest: What travelled pickled with the latest result, as bytes: what the caller has received is the caller's.
        saved: Likewise of the last step of an episode whose automatic reset has not ended yet.
        reset_keywords: The pickled keywords of a reset in flight.
        waiting_reset: Likewise of a reset that begins when the environment has been rebuilt.
        options: The options of earlier resets, for environments that keep them.
    """

    env_id: int
    worker: int
    request: Message | None = None
    done: bool = False
    result: Any = None
    completed: float = 0.0
    acting: list[AgentID] = field(default_factory=list)
    alive: list[AgentID] = field(default_factory=list)
    over: bool = False
    has_reset: bool = False
    masks: dict[AgentID, Any] | None = None
    fault: Fault | None = None
    mark: tuple[Fault, Snapshot] | None = None
    restarts: int = 0
    blamed: int = 0
    recent_faults: deque[float] = field(default_factory=deque)
    needs_reset: bool = False
    latest: bytes | None = None
    saved: bytes | None = None
    reset_keywords: bytes | None = None
    waiting_reset: bytes | None = None
    options: dict[Any, Any] = field(default_factory=dict)

    @property
    def state(self) -> State:
        """What the environment is doing; a result that waits for the caller survives a rebuild."""
        if self.fault is not None:
            return State.REBUILDING
        if self.request is None:
            return State.IDLE
        return State.DONE if self.done else State.BUSY


@dataclass(slots=True, eq=False)
class WorkerQueue:
    """The requests before one worker, seen from the parent.

    Attributes:
        share: Its environments.
        requests: Those without a last reply, oldest first, each with the number of parts posted up to its beginning.
        posted: How many parts of requests have been posted to this process; see `WorkerStatus.parts`.
        since: When the worker was last expected to begin something, in seconds of `time.monotonic`.
        suspect: When its status was first seen past a limit, and that status.
        past: The statistics of the processes that it has replaced.
    """

    share: Sequence[int]
    requests: deque[tuple[Request, int]] = field(default_factory=deque)
    posted: int = 0
    since: float = 0.0
    suspect: tuple[tuple[int, float], float] | None = None
    past: WorkerStats = WorkerStats()  # noqa: RUF009  # it is immutable

    def in_progress(self) -> Request | None:
        """The request that the worker carries out, or is about to begin."""
        return self.requests[0][0] if self.requests else None
