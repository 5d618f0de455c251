"""`Extension`: the hooks of the pool, and the base class of restarts, recycling, timeouts, replays and others.

The pool calls the hooks that an extension overrides, in the order in which the extensions were added. A hook that
none overrides costs nothing. The order matters: timeouts and warnings come first, then settings and rebuilds, then
replays, which change nothing, then recycling, which takes resets and ends of episodes before restarts see them.

A step of all environments together is the most frequent call. While no extension that overrides `before_send` or
`on_result` has `sees_steps`, the pool looks at no slot and calls neither of these hooks. After 20 ms, it asks
`patience`. If not all workers reply `STEPPED` within that, `on_result` follows for each result, and `look`.

The hooks at a fault that `Restarts` deals with, in this order::

    on_result                      for replies that came before the fault
    on_fault                       until one extension returns True
    on_result                      for neighbours whose results are complete in their records
    on_rebuild
    before_post                    for the request that constructs the environments again

If no extension deals with the fault, `on_error` follows `on_fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from marl_parallel.core.messages import Failure, Message, Request
from marl_parallel.core.pool.slots import Slot
from marl_parallel.core.worker_status import Running
from marl_parallel.types import ParallelEnvError, WorkerStats

P = ParamSpec("P")
R = TypeVar("R")
ORDER = (
    "Timeouts", "LongCalls", "SettingsAtResets", "Rebuilds", "Histories", "Recycling", "Restarts",
)  # fmt: skip
"""The names of the classes of extensions, in the order in which they are added."""
HELD: Any = object()
"""In place of a result: the caller gets it later."""


class Fault(NamedTuple):
    """A fault in a worker."""

    worker: int
    env_id: int | None  # the environment that failed; None if the whole worker is gone, or must be ended
    error: ParallelEnvError
    running: Running | None  # what the worker was doing
    kinds: Sequence[str] = ()  # of an exception, by `name_of`: its type and that type's bases
    failure: Failure | None = None  # the exception, if a worker has sent it


class Extension:
    """A feature of the pool. Every hook has a default that does nothing.

    Attributes:
        sees_steps: Whether the pool calls `before_send`, `before_post` and `on_result` also for steps of all
            environments in which nothing goes wrong; it may change at any time.
        saved_as: The key of the result of `save` in saved states, which stays if the class is renamed; empty if nothing
            is saved.
    """

    sees_steps: bool = True
    saved_as: str = ""

    def begin(self, now: float) -> None:
        """The caller begins a call of the pool."""

    def before_send(self, message: Message, env_ids: Sequence[int], payloads: Any) -> Sequence[int]:
        """The caller begins a step or reset of environments, whose slots are busy now; returns the env ids to send to.

        For each env id that is left out, this extension calls `Pool.finish` later, or sends the request then.
        """
        return env_ids

    def before_post(self, worker: int, request: Request) -> Request:
        """A request is about to be posted; returns the request to post.

        `request.env_ids` may be None: all environments of the worker. An extension that returns another request for
        steps, or posts requests here, also overrides `before_send` or `on_result`.
        """
        return request

    def on_result(self, slot: Slot, leftovers: bytes | None, result: Any, completed: float) -> Any:
        """A worker has carried out a step or reset; returns the caller's `result`, or `HELD` to hand it over later.

        Not called for results that extensions pass to `Pool.finish`. It may be called twice for one step: where
        recycling holds a result back, extensions before it get that result now, and a second one when it is released:
        the same one, or the first one of the new environment. With NEXT_STEP, a step that only resets is a STEP.

        Args:
            slot: The environment. `slot.request` is STEP or RESET.
            leftovers: The values that are not in the record, pickled; None if all are in the record.
            result: The same values unpickled, or the result of an earlier extension.
            completed: When the worker finished the request, in seconds of `Backend.clock`. All environments in
                one reply have the same time; with `Request.each`, each has its own. It is 0.0 if the reply is
                `STEPPED`.
        """
        return result

    def on_fault(self, fault: Fault) -> bool:
        """A fault has happened; returns whether this extension has dealt with it. If none has, the error is raised."""
        return False

    def on_rebuild(self, slots: Sequence[Slot], ends: Sequence[int]) -> None:
        """Environments are constructed again, or their successors take over.

        The caller will still receive `ends` ends of episodes of the old ones.
        """

    def patience(self, now: float) -> float | None:
        """The most seconds before the next call of `look`; called before each wait.

        A backend may wait for a step of all environments, for at most 20 ms, before that.
        """
        return None

    def look(self, now: float) -> None:
        """Do work that depends on the time; called after each wait."""

    def on_error(self, error: BaseException) -> None:
        """This error, or Ctrl-C, ends a call, and everything is about to be closed."""

    def save(self, slot: Slot) -> Any:
        """The state of this extension for an environment that is not in flight; must pickle. `load` restores it."""
        return None

    def load(self, slot: Slot, saved: Any, leftovers: bytes | None) -> None:
        """Restore a result of `save`, None if it had no such extension; the record has these leftovers."""

    def stats(self, env_ids: Sequence[int]) -> WorkerStats:
        """Additions to the statistics of some environments."""
        return WorkerStats()

    def check(self) -> None:
        """Raise `AssertionError` unless the values of this extension fit each other, and the pool; as `Pool.check`."""


class Hooks:
    """The hooks that extensions override, in the order of the extensions."""

    def __init__(self, extensions: Sequence[Extension] = ()) -> None:
        self._extensions = extensions
        self._by_hook = {
            hook: [getattr(one, name) for one in extensions if getattr(type(one), name) is not hook]
            for name, hook in vars(Extension).items()
            if callable(hook)
        }

    def of(self, hook: Callable[Concatenate[Any, P], R]) -> list[Callable[P, R]]:
        """The overridden hooks of one kind; `hook` is a method of `Extension`."""
        return self._by_hook[hook]

    def with_any(self, *hooks: Callable[..., Any]) -> list[Extension]:
        """The extensions that override one of these hooks."""
        return [one for one in self._extensions if any(getattr(type(one), hook.__name__) is not hook for hook in hooks)]
