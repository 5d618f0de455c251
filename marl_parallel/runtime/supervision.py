"""What became of the work: waits for replies, and turns what failed, died or hangs into the error the caller gets.

The `Crew` stands between `ParallelEnv`, which knows what is to be done, and a backend, which knows how to get it to
the workers. It owns the end of both: whatever happens, `shut` frees everything, once.
"""

from __future__ import annotations

import logging
import pickle
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from gymnasium.error import ClosedEnvironmentError

from marl_parallel.errors import EnvError, ParallelEnvError, WorkerCrashed, WorkerTimeout
from marl_parallel.runtime.backend import Backend
from marl_parallel.runtime.messages import Failure, Lost, Message, Request

logger = logging.getLogger("marl_parallel")

_LOOK_EVERY_S = 0.05
"""How often a wait with a limit looks whether something has passed it."""


class Crew:
    """The workers of one `ParallelEnv`, and the environments that each of them has.

    Args:
        backend: Started.
        shares: The environments of each worker.
    """

    def __init__(self, backend: Backend, shares: Sequence[range]) -> None:
        self.backend, self.shares = backend, shares
        self.closed = False
        self._worker_of = [worker for worker, share in enumerate(shares) for _ in share]
        # Re-entrant: a signal handler or a finalizer may close in the middle of a call of the same thread.
        self._lock = threading.RLock()

    def run(self, requests: Mapping[int, Request], *, limit: float | None = None) -> dict[int, Any]:
        """Have requests carried out by the workers, side by side.

        Args:
            requests: By worker.
            limit: How long each environment may take, in seconds.

        Returns:
            By environment, the results of those that have something to say.

        Raises:
            ParallelEnvError: A worker or an environment failed; everything has been closed.
            ClosedEnvironmentError: Another thread has closed everything meanwhile.
        """
        results: dict[int, Any] = {}
        failures: dict[int, tuple[int, Failure]] = {}
        with self._lock:
            if self.closed:
                raise ClosedEnvironmentError("the environments have been closed; make a new ParallelEnv")
            try:
                self.backend.post(requests, together=True)
                pending = set(requests)
                posted = time.monotonic() if limit is not None else 0.0
                while pending:
                    replies = self.backend.wait(None if limit is None else min(limit, _LOOK_EVERY_S))
                    for worker, reply in replies:
                        if isinstance(reply, Lost):
                            raise self._crashed(worker, reply)
                        pending.discard(worker)
                        if reply.results:
                            results.update(reply.results)
                        if reply.failures:
                            failures.update((env_id, (worker, f)) for env_id, f in reply.failures.items())
                    if self.closed:
                        raise ClosedEnvironmentError("the environments were closed by another thread")
                    if limit is not None and pending:
                        self._check_limit(pending, limit, posted)
                if failures:
                    env_id = min(failures)
                    raise _env_error(env_id, *failures[env_id])
                return {env_id: _read(env_id, self._worker_of[env_id], result) for env_id, result in results.items()}
            except ClosedEnvironmentError:
                raise
            except WorkerTimeout:
                self._shut_after_failure(ask=False, timeout=0.0)
                raise
            except ParallelEnvError:
                self._shut_after_failure(ask=True)
                raise
            except BaseException:
                # Interrupted half-way (Ctrl-C): which replies are still to come is not known any more.
                self._shut_after_failure(ask=not self.backend.can_kill, timeout=1.0)
                raise

    def _shut_after_failure(self, *, ask: bool, timeout: float = 5.0) -> None:
        error = self.shut(ask=ask, timeout=timeout)
        if error is not None:
            logger.warning("while closing after another error: %s", error)

    def ask(self, message: Message, env_ids: Iterable[int], payload: Any = None) -> dict[int, Any]:
        """Have one thing done in some environments; `run` says what comes back.

        Args:
            message: What.
            env_ids: Where, in this order within each worker.
            payload: The same for all, or a dict by environment, which is shared out with them.
        """
        shares: dict[int, list[int]] = {}
        for env_id in env_ids:
            shares.setdefault(self._worker_of[env_id], []).append(env_id)
        if not isinstance(payload, dict):
            requests = {worker: Request(message, tuple(ids), payload) for worker, ids in shares.items()}
        else:
            requests = {
                worker: Request(message, tuple(ids), {i: payload[i] for i in ids if i in payload} or None)
                for worker, ids in shares.items()
            }
        return self.run(requests)

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
            for worker in left:
                logger.warning(
                    "worker %d could not be ended, it is left behind: a thread cannot be killed. It runs\n%s",
                    worker, self.backend.stack(worker),
                )  # fmt: skip
            return error

    def abandon(self) -> None:
        """In a forked child of the owner: count as closed, and touch nothing that the owner still uses."""
        self.closed = True
        self.backend.abandon()

    def _ask_to_close(self, deadline: float) -> EnvError | None:
        pending = set(range(len(self.shares)))
        error: EnvError | None = None
        self.backend.post({worker: Request(Message.CLOSE) for worker in pending})
        while pending and (left := deadline - time.monotonic()) > 0:
            for worker, reply in self.backend.wait(left):
                if isinstance(reply, Lost):
                    pending.discard(worker)
                    continue
                if reply.answers is Message.CLOSE:  # what was still in flight before it is discarded
                    pending.discard(worker)
                    for env_id, failure in reply.failures.items():
                        error = _env_error(env_id, worker, failure)
        return error

    def _crashed(self, worker: int, lost: Lost) -> WorkerCrashed:
        running = self.backend.ledgers[worker].running
        env_ids = tuple(self.shares[worker]) if running is None else (running.env_id,)
        during = "" if running is None else f" in {running.activity.method} of environment {running.env_id}"
        stack = f"\n\nIts stack:\n{lost.stack}" if lost.stack else ""
        return WorkerCrashed(
            f"worker {worker} (environments {_listed(self.shares[worker])}) died{during}: "
            f"{_manner_of_death(lost.exitcode)}. Run the environment alone to see why.{stack}",
            env_ids=env_ids,
            worker=worker,
            exitcode=lost.exitcode,
            stack=lost.stack,
        )

    def _check_limit(self, pending: Iterable[int], limit: float, posted: float) -> None:
        now = time.monotonic()
        for worker in pending:
            if now - max(posted, self.backend.ledgers[worker].since) > limit:
                self._timed_out(worker, limit)

    def _timed_out(self, worker: int, limit: float) -> NoReturn:
        running = self.backend.ledgers[worker].running
        stack = self.backend.stack(worker)
        if running is None:
            env_ids, method, who = tuple(self.shares[worker]), "start", f"worker {worker}"
        else:
            env_ids, method = (running.env_id,), running.activity.method
            who = f"environment {running.env_id} (worker {worker})"
        where = f"\n\nIt was here:\n{stack}" if stack else ""
        raise WorkerTimeout(
            f"{who} has not finished its {method} within {limit:g} s. If it needs longer, raise start_timeout; "
            f"else the stack says where it hangs.{where}",
            env_ids=env_ids,
            worker=worker,
            method=method,
            stack=stack,
        )


def _env_error(env_id: int, worker: int, failure: Failure) -> EnvError:
    error = EnvError(
        f"environment {env_id} (worker {worker}) raised in {failure.method}: {failure.summary}\n\n"
        f"Where it happened:\n{failure.traceback}",
        env_ids=(env_id,),
        worker=worker,
        method=failure.method,
        remote_traceback=failure.traceback,
    )
    if failure.exception is not None:
        try:
            error.__cause__ = pickle.loads(failure.exception)
        except Exception as reason:
            # It could be made again in the worker, but not here; its text is in the message in any case.
            logger.debug("the exception of environment %d does not unpickle: %s", env_id, reason)
    return error


def _read(env_id: int, worker: int, result: Any) -> Any:
    """What a worker sent; bytes are something of the simulator's, pickled."""
    if type(result) is not bytes:
        return result
    try:
        return pickle.loads(result)
    except Exception as error:
        raise EnvError(
            f"environment {env_id} (worker {worker}) sent something that pickles in the worker, but cannot be "
            f"unpickled here: {type(error).__name__}: {error}. Its infos, observations or results must do both.",
            env_ids=(env_id,),
            worker=worker,
            method="unpickle",
        ) from error


def _manner_of_death(exitcode: int | None) -> str:
    if exitcode is None:
        return "how is not known"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "a signal"
    hint = ", which is also how the kernel ends a process when memory runs out" if name == "SIGKILL" else ""
    return f"{name} (signal {-exitcode}){hint}"


def _listed(env_ids: Sequence[int]) -> str:
    return str(env_ids[0]) if len(env_ids) == 1 else f"{env_ids[0]} to {env_ids[-1]}"
