"""Warnings about long calls of environments."""

from __future__ import annotations

import math
from collections.abc import Mapping

from marl_parallel.core.pool.extensions import Extension
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.pool.timeouts import LIMITED_BY
from marl_parallel.core.reports import reports
from marl_parallel.core.reports.reports import LongCall, logger
from marl_parallel.core.worker_status import Activity

_LOOK_EVERY_S = 1.0
_LONG_AT_CTRL_C_S = 1.0


class LongCalls(Extension):
    """Warns of calls of environments that take longer than `warn_after` seconds, then twice as long, and so on.

    With None, it warns only at Ctrl-C, of all calls that have lasted for some time.

    Args:
        pool: The pool.
        warn_after: Seconds, or None.
        limits: The timeout of each activity, for the text of the warnings.
    """

    def __init__(self, pool: Pool, warn_after: float | None, limits: Mapping[Activity, float | None]) -> None:
        self._pool, self._limits, self._warns = pool, limits, warn_after is not None
        self._after = math.inf if warn_after is None else warn_after
        self._next_look = pool.clock() + self._after
        self._next: dict[int, tuple[tuple[int, float], float]] = {}  # by worker: its state, and seconds until a warning

    def patience(self, now: float) -> float | None:
        return self._next_look - now if self._warns else None

    def look(self, now: float) -> None:
        for long in self._found(now) if self._warns and now >= self._next_look else ():
            limit = self._limits.get(long.activity)
            to_do = f". Pass {long.activity.timeout}_timeout= to end calls that hang"
            if self._pool.backend.statuses[long.worker].ready_since > now:
                to_do = ". Its process has not started yet; the cluster may lack free resources"
            elif self._pool.closed:
                to_do = ". To limit this, pass close(timeout=...)"
            elif limit is not None:
                to_do = f". It times out after {limit:g} s"
            self._log(long, to_do)

    def on_error(self, error: BaseException) -> None:
        for long in self._found(self._pool.clock(), _LONG_AT_CTRL_C_S) if isinstance(error, KeyboardInterrupt) else ():
            self._log(long)

    def _found(self, now: float, seconds: float | None = None) -> list[LongCall]:
        """The calls to warn of now; with `seconds`, all calls that have lasted longer."""
        self._next_look = now + min(self._after, _LOOK_EVERY_S)
        backend, found = self._pool.backend, []
        backend.look()
        for worker, queue in self._pool.queues.items():
            if not queue.requests:
                self._next.pop(worker, None)
                continue
            status = backend.statuses[worker]
            state, running = status.state, queue.running(status)
            if running is None and status.settled is not None and status.parts >= queue.posted:
                continue  # its reply has come, or is on its way
            if running is None and worker in backend.in_line:
                continue  # it waits for the caller's own thread
            elapsed = now - max(queue.since, state[1])
            known, after = self._next.get(worker, (state, self._after))
            if known != state:
                after = self._after
            if elapsed >= (after if seconds is None else seconds):
                message = queue.requests[0].request.message
                activity = LIMITED_BY[message][0] if running is None else running.activity
                found.append(LongCall(worker, running, activity, elapsed))
                while after <= elapsed:
                    after *= 2
            self._next[worker] = state, after
        return found

    def _log(self, long: LongCall, to_do: str = "") -> None:
        """Log the stack of a worker that has been in one call for a long time."""
        stack = self._pool.backend.stack(long.worker, harmless=True)
        logger.warning("%s", reports.long_call(self._pool.queues[long.worker].environments, long, stack, to_do))
