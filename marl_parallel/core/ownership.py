"""Who owns the workers, and how everything ends: whatever happens, `shut` frees it all, once.

What is done before that is in `supervision.py`, how workers are ended in the backends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from gymnasium.error import ClosedEnvironmentError

from marl_parallel.core import reports
from marl_parallel.core.backend import Backend
from marl_parallel.core.closable import Closable
from marl_parallel.core.messages import Failure, Lost, Message, Request
from marl_parallel.core.reports import logger
from marl_parallel.core.tracing import LAST_WORDS, Tracer
from marl_parallel.types import EnvError, ParallelEnvError, WorkerTimeout


class Owner(Closable):
    """Of a started backend.

    Args:
        backend: Started.
        shares: The environments of each worker.

    Attributes:
        tracer: Of the trace that is being kept, if one is.
    """

    def __init__(self, backend: Backend, shares: Sequence[range]) -> None:
        self.backend, self.shares = backend, shares
        self.tracer: Tracer | None = None
        # Re-entrant: a signal handler or a finalizer may close in the middle of a call of the same thread.
        self._lock = threading.RLock()

    def shut(self, *, ask: bool = True, timeout: float = 5.0) -> EnvError | None:
        """Close all environments, end all workers and free everything. Idempotent.

        Args:
            ask: Let the environments close themselves first.
            timeout: Seconds they are given for it.

        Returns:
            The error of an environment that failed to close; everything has been freed all the same.
        """
        if self.closed:
            return None
        self.closed = True
        for ledger in getattr(self.backend, "ledgers", ()):  # there are none where it did not start
            ledger.discard()  # what is in flight and not yet begun
        self.backend.interrupt()
        with self._lock:
            deadline = time.monotonic() + timeout
            error, patience = None, 0.0  # whoever was not asked has no reason to end by itself
            try:
                if ask:
                    error = self._ask_to_close(deadline)
                    patience = max(deadline - time.monotonic(), 0.0)
            finally:
                # Also after a second Ctrl-C: nobody would come back for what is left.
                left = self.backend.stop(patience)
                # A signal handler may have closed in the middle of a call: its `wait` must not go on for ever.
                self.backend.interrupt()
                self._finish_trace()
            for worker in left:
                logger.warning(
                    "worker %d could not be ended, it is left behind: a thread cannot be killed. It runs\n%s",
                    worker, self.backend.stack(worker),
                )  # fmt: skip
            return error

    def _finish_trace(self) -> None:
        if self.tracer is not None:
            tracer, self.tracer = self.tracer, None
            try:
                tracer.finish()
            except OSError as error:  # closing goes on
                logger.warning("the trace could not be written to %s: %s", tracer.path, error)

    def abandon(self) -> None:
        """In a forked child of the owner: count as closed, and touch nothing that the owner still uses."""
        self.closed = True
        self.backend.abandon()

    def _shut_after(self, error: BaseException) -> None:
        """Close everything but where somebody else has done it, nothing has happened, or it has been mended."""
        if isinstance(error, ClosedEnvironmentError):
            return
        if isinstance(error, WorkerTimeout):
            also = self.shut(ask=False, timeout=0.0)
        elif isinstance(error, ParallelEnvError):
            also = self.shut()
        else:
            # Interrupted half-way (Ctrl-C): which replies are still to come is not known any more.
            also = self.shut(ask=not self.backend.can_kill, timeout=1.0)
        if also is not None:
            logger.warning("while closing after another error: %s", also)

    def _ask_to_close(self, deadline: float) -> EnvError | None:
        pending = set(range(len(self.shares)))
        failures: dict[int, tuple[int, Failure]] = {}
        self.backend.post({worker: Request(Message.CLOSE) for worker in pending})
        while pending and (left := deadline - time.monotonic()) > 0:
            for worker, reply in self.backend.wait(left):
                if isinstance(reply, Lost):
                    pending.discard(worker)
                    continue
                if reply.answers is Message.CLOSE:  # what was still in flight before it is discarded
                    pending.discard(worker)
                    if self.tracer is not None and LAST_WORDS in reply.results:
                        self.tracer.add(worker, reply.results[LAST_WORDS], self.backend.ahead(worker))
                    failures.update((env_id, (worker, failure)) for env_id, failure in reply.failures.items())
        if pending:
            logger.warning(
                "worker %s did not close within the time given, and is ended: %s",
                " and ".join(map(str, sorted(pending))),
                ", ".join(f"environments {reports.listed(self.shares[worker])}" for worker in sorted(pending)),
            )
        return reports.env_error(min(failures), *failures[min(failures)]) if failures else None
