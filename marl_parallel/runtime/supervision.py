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
from marl_parallel.runtime.messages import Failure, Lost, Message, Reply, Request

logger = logging.getLogger("marl_parallel")

_LOOK_EVERY_S = 0.05
"""How often a wait with a limit looks whether something has passed it."""


class Crew:
    """The workers of one `ParallelEnv`, and the environments that each of them has.

    Args:
        backend: Started.
        shares: The environments of each worker.

    Attributes:
        in_flight: What has been sent and not yet received, by environment.
    """

    def __init__(self, backend: Backend, shares: Sequence[range]) -> None:
        self.backend, self.shares = backend, shares
        self.closed = False
        self.in_flight: dict[int, Message] = {}
        self._arrived: dict[int, tuple[float, Any]] = {}
        self._worker_of = [worker for worker, share in enumerate(shares) for _ in share]
        # Re-entrant: a signal handler or a finalizer may close in the middle of a call of the same thread.
        self._lock = threading.RLock()

    def run(self, requests: Mapping[int, Request], *, limit: float | None = None) -> dict[int, Any]:
        """Have requests carried out by the workers, side by side, while nothing else is in flight.

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
        failures: dict[int, Failure] = {}
        with self._lock:
            self.check_open()
            try:
                self.backend.post(requests, together=True)
                pending = set(requests)
                posted = time.monotonic() if limit is not None else 0.0
                while pending:
                    timeout = None if limit is None else min(limit, _LOOK_EVERY_S)
                    for worker, reply in self.backend.wait(timeout, len(pending)):
                        self._sort(worker, reply, results, failures)
                        pending.discard(worker)
                    self._check_still_open()
                    if limit is not None and pending:
                        self._check_limit(pending, limit, posted)
                if failures:
                    env_id = min(failures)
                    raise _env_error(env_id, self._worker_of[env_id], failures[env_id])
                return {env_id: _read(env_id, self._worker_of[env_id], result) for env_id, result in results.items()}
            except BaseException as error:
                self._shut_after(error)
                raise

    def send(self, message: Message, env_ids: Sequence[int], payload: Any = None) -> None:
        """Have one thing done in some environments, each to be replied for by itself, and do not wait for it.

        Args:
            message: What.
            env_ids: Where; of none of them anything is in flight.
            payload: As of `ask`.
        """
        with self._lock:
            self.check_open()
            try:
                self.backend.post(self._shared_out(message, env_ids, payload, each=True))
            except BaseException as error:
                self._shut_after(error)
                raise
            self.in_flight.update(dict.fromkeys(env_ids, message))

    def receive(self, at_least: int, timeout: float | None) -> dict[int, tuple[Message, Any]]:
        """Take from what is in flight all that is done, waiting for some of it.

        Args:
            at_least: How many environments to wait for.
            timeout: Seconds to wait at most; None for as long as it takes.

        Returns:
            By environment, in order of completion, what was done and what it has to say beyond what is in the block.

        Raises:
            TimeoutError: There were not so many in time; nothing is lost.
            ParallelEnvError: A worker or an environment failed; everything has been closed.
            ClosedEnvironmentError: Another thread has closed everything meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self.check_open()
            try:
                while True:
                    missing = at_least - len(self._arrived)
                    patience = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                    for worker, reply in self.backend.wait(0.0 if missing <= 0 else patience, max(missing, 1)):
                        self._arrive(worker, reply)
                    self._check_still_open()
                    if len(self._arrived) >= at_least:
                        break
                    if patience == 0.0:
                        raise TimeoutError(
                            f"{len(self._arrived)} of at least {at_least} environments were ready within {timeout:g} "
                            "s; nothing is lost, call recv again"
                        )
                # Ties by number.
                done = sorted((completed, env_id) for env_id, (completed, _) in self._arrived.items())
                taken = {
                    env_id: (self.in_flight[env_id], _read(env_id, self._worker_of[env_id], self._arrived[env_id][1]))
                    for _, env_id in done
                }
            except BaseException as error:
                self._shut_after(error)
                raise
            for env_id in taken:
                del self.in_flight[env_id], self._arrived[env_id]
            return taken

    def _arrive(self, worker: int, reply: Reply | Lost) -> None:
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        self._sort(worker, reply, results, failures)
        for env_id, failure in failures.items():
            raise _env_error(env_id, worker, failure)
        assert isinstance(reply, Reply)
        for env_id in reply.env_ids or ():
            self._arrived[env_id] = reply.completed, results.get(env_id)

    def _sort(self, worker: int, reply: Reply | Lost, results: dict[int, Any], failures: dict[int, Failure]) -> None:
        if isinstance(reply, Lost):
            raise self._crashed(worker, reply)
        if reply.results:
            results.update(reply.results)
        if reply.failures:
            failures.update(reply.failures)

    def check_open(self) -> None:
        """Raise `ClosedEnvironmentError` where everything has been closed."""
        if self.closed:
            raise ClosedEnvironmentError("the environments have been closed; make a new ParallelEnv")

    def _check_still_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("the environments were closed by another thread")

    def _shut_after(self, error: BaseException) -> None:
        """Close everything but where nothing has happened, or somebody else has done it."""
        if isinstance(error, ClosedEnvironmentError) or type(error) is TimeoutError:
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

    def ask(self, message: Message, env_ids: Iterable[int], payload: Any = None) -> dict[int, Any]:
        """Have one thing done in some environments; `run` says what comes back.

        Args:
            message: What.
            env_ids: Where, in this order within each worker.
            payload: The same for all, or a dict by environment, which is shared out with them.
        """
        return self.run(self._shared_out(message, env_ids, payload))

    def _shared_out(
        self, message: Message, env_ids: Iterable[int], payload: Any, *, each: bool = False
    ) -> dict[int, Request]:
        shares: dict[int, list[int]] = {}
        for env_id in env_ids:
            shares.setdefault(self._worker_of[env_id], []).append(env_id)
        if not isinstance(payload, dict):
            return {worker: Request(message, tuple(ids), payload, each) for worker, ids in shares.items()}
        return {
            worker: Request(message, tuple(ids), {i: payload[i] for i in ids if i in payload} or None, each)
            for worker, ids in shares.items()
        }

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
        for ledger in self.backend.ledgers:
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
        failures: dict[int, tuple[int, Failure]] = {}
        self.backend.post({worker: Request(Message.CLOSE) for worker in pending})
        while pending and (left := deadline - time.monotonic()) > 0:
            for worker, reply in self.backend.wait(left):
                if isinstance(reply, Lost):
                    pending.discard(worker)
                    continue
                if reply.answers is Message.CLOSE:  # what was still in flight before it is discarded
                    pending.discard(worker)
                    failures.update((env_id, (worker, failure)) for env_id, failure in reply.failures.items())
        return _env_error(min(failures), *failures[min(failures)]) if failures else None

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
