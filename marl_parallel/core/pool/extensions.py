"""What a feature may do at each point of the pool: the base of restarts, recycling, timeouts, replays and others.

The pool calls the hooks that an extension overrides, in the order in which the extensions were added. A hook that
nobody overrides costs nothing. The order matters: timeouts and warnings come first, then settings and rebuilds, then
replays, which change nothing, then recycling, which takes resets and ends of episodes before restarts see them.

The fast path is a step of all environments in which nothing goes wrong, while every extension `is_quiet`. The pool
looks at no slot there. It calls `begin`, `before_step_all`, and `patience` of extensions whose `lean_patience` is None.
It does not call `before_send`, `before_post` and `on_result`.

The hooks at a fault that `Restarts` deals with, in this order::

    before_end                     only at a timeout; `on_end_called_off` follows if the worker was just finishing
    on_last_step, on_result        for replies that came before the fault
    on_fault                       until one extension returns True
    on_result                      for neighbours whose results are complete in their records
    what_is_interrupted
    on_rebuild
    on_replaced                    if the worker is gone
    before_post, on_outdated       for the request that constructs the environments again

If no extension deals with the fault, `on_raise` follows `on_fault` for an `EnvError`, then the hooks of closing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from marl_parallel.adapters.protocol import Dicts
from marl_parallel.core.messages import Failure, Message, Rebuild, Reply, Request
from marl_parallel.core.pool.slots import Slot
from marl_parallel.core.worker_status import Running
from marl_parallel.types import EnvError, ParallelEnvError, WorkerStats

P = ParamSpec("P")
R = TypeVar("R")
HELD: Any = object()
"""In place of a result: the caller gets it later."""


class Fault(NamedTuple):
    """What has gone wrong in a worker."""

    worker: int
    env_id: int | None  # that failed; None if the whole worker is gone, or has to go
    error: ParallelEnvError
    running: Running | None  # what the worker was doing
    kinds: Sequence[str] = ()  # of an exception, by `name_of`: its type and that type's bases
    failure: Failure | None = None  # the exception, if a worker has sent it


class Interrupted(NamedTuple):
    """What a fault has interrupted."""

    message: Message | None  # STEP, RESET (also one that was due); None for an idle environment
    dicts: Dicts  # that the caller receives, without what the fresh environment adds
    keywords: bytes | None = None  # of the caller's reset, pickled


class Extension:
    """A feature of the pool. Every hook has a default that does nothing.

    Attributes:
        lean_patience: Seconds. In the fast path, the pool calls `patience` only when the step has taken this long, or
            when something else has ended the fast path. With None, it calls `patience` before the step.
    """

    lean_patience: float | None = math.inf

    def begin(self, now: float) -> None:
        """The caller begins a call of the pool."""

    def before_step_all(self) -> None:
        """All environments are about to be stepped with the actions in the block, in the fast path."""

    def is_quiet(self) -> bool:
        """Return False if this extension must see each result of the next step.

        Then the step takes the slower path and calls `on_result`. The pool calls `is_quiet` when
        the caller has received all results of a slower step or a reset. After `Pool.extend` between two steps, call
        `Pool.see_results`: without it, steps stay in the fast path.
        """
        return True

    def before_send(self, message: Message, env_ids: Sequence[int], payloads: Any) -> Sequence[int]:
        """The caller begins a step or reset of environments, whose slots are busy now; returns those that go out.

        The results of the others come from this extension. Not called in the fast path.
        """
        return env_ids

    def before_post(self, worker: int, request: Request) -> Request:
        """A request is about to be posted; returns what is posted. Not called in the fast path.

        `request.env_ids` may be None: all environments of the worker.
        """
        return request

    def holds(self, slot: Slot) -> bool:
        """Whether the result of a busy slot comes from this extension. Then results of its worker do not count."""
        return False

    def on_result(self, slot: Slot, leftovers: bytes | None, result: Any, completed: float) -> Any:
        """A worker has carried out a step or reset; returns the caller's `result`, or `HELD` to hand it over later.

        Not called in the fast path, nor for results that extensions pass to `Pool.finish`. It may be called twice for
        one step: where recycling holds a result back, extensions before it get that result, and later the same one
        again or the first one of the new environment. With NEXT_STEP, a step that only resets is a STEP.

        Args:
            slot: The environment. `slot.request` is STEP or RESET.
            leftovers: The values that are not in the record, pickled; None if all are in the record.
            result: The same values unpickled, or what an earlier extension has returned.
            completed: When the worker had carried out the request, in seconds of `Backend.clock`. All environments in
                one reply have the same time; with `Request.each`, each has its own. It is 0.0 if the reply is
                `STEPPED`, which comes if something else has ended the fast path, such as a fault of another worker.
        """
        return result

    def on_last_step(self, slot: Slot, leftovers: bytes | None) -> None:
        """A worker has sent the leftovers of an episode's last step, whose automatic reset has failed or goes on."""

    def on_fault(self, fault: Fault) -> bool:
        """Something has gone wrong; returns whether it has been dealt with. Else the error is raised."""
        return False

    def what_is_interrupted(self, slot: Slot) -> Interrupted | None:
        """What a fault interrupts of an environment whose result this extension holds."""
        return None

    def before_end(self, slots: Sequence[Slot], running: Running | None) -> None:
        """A worker may be ended in the middle of these environments: note what their records hold now."""

    def on_end_called_off(self, slots: Sequence[Slot]) -> None:
        """The worker of `before_end` is not ended after all."""

    def on_rebuild(self, slots: Sequence[Slot], ends: Sequence[int]) -> None:
        """Environments are constructed again, and so many ends of their episodes are still to be received."""

    def on_outdated(self, env_ids: Sequence[int]) -> None:
        """What environments are constructed with has changed, such as their seeds."""

    def on_taken_over(self, slot: Slot, rebuild: Rebuild) -> None:
        """An environment that this request has constructed before takes the place of another one."""

    def on_replaced(self, worker: int) -> None:
        """A worker that was gone has been replaced by a new one with the same number."""

    def patience(self, now: float) -> float | None:
        """How many seconds may pass before `look` is called; asked before each wait."""
        return None

    def look(self, now: float) -> None:
        """Do what the time demands; called after each wait."""

    def on_raise(self, error: EnvError) -> None:
        """This error is about to be raised, and everything closed."""

    def on_ctrl_c(self) -> None:
        """The caller has pressed Ctrl-C, and everything is about to be closed."""

    def before_close(self) -> None:
        """All environments are about to be closed."""

    def on_close(self, worker: int, reply: Reply) -> None:
        """A worker has closed its environments, and is about to end."""

    def after_close(self) -> None:
        """All workers have ended."""

    def save(self, slot: Slot) -> Any:
        """What is known of an environment that is not in flight, for `load`; it must pickle."""
        return None

    def load(self, slot: Slot, saved: Any, leftovers: bytes | None) -> None:
        """Go on from what `save` has returned, None if there was no such extension; its record has these leftovers."""

    def stats(self, env_ids: Sequence[int]) -> WorkerStats:
        """What is to be added to the statistics of some environments."""
        return WorkerStats()


class Hooks:
    """The hooks that extensions override, in the order of the extensions."""

    def __init__(self, extensions: Sequence[Extension] = ()) -> None:
        self._by_hook = {
            hook: [getattr(one, name) for one in extensions if getattr(type(one), name) is not hook]
            for name, hook in vars(Extension).items()
            if callable(hook)
        }

    def of(self, hook: Callable[Concatenate[Any, P], R]) -> list[Callable[P, R]]:
        """Those of one kind; `hook` is a method of `Extension`."""
        return self._by_hook[hook]
