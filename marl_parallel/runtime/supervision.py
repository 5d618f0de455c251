"""What became of the work: waits for replies, and sees to what failed, died or hangs.

The `Crew` stands between `ParallelEnv`, which knows what is to be done, and a backend, which knows how to get it to
the workers. A fault is either raised, and everything closed, or its environments are built anew; what that means for
them is known to `restarts.py`, what an error says to `reports.py`, and how everything ends to `ownership.py`.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from marl_parallel.errors import EnvError, ParallelEnvError
from marl_parallel.runtime import reports
from marl_parallel.runtime.backend import Backend
from marl_parallel.runtime.batch import Made
from marl_parallel.runtime.engine import Taken
from marl_parallel.runtime.ledger import Activity, Running
from marl_parallel.runtime.limits import Limits, Watch
from marl_parallel.runtime.messages import Failure, Lost, Message, Reply, Request
from marl_parallel.runtime.ownership import Owner
from marl_parallel.runtime.payloads import Refusal
from marl_parallel.runtime.reports import logger
from marl_parallel.runtime.restarts import Kind, Restarts
from marl_parallel.stats import Stats, WorkerStats

_NEVER = Limits(None, None, None)
_ADVICE = ', or pass on_error="restart" to go on with a fresh copy'
_NO_WAY = '; a thread cannot be ended, so nothing could be restarted: backend="process" can'


class _Order(NamedTuple):
    """Environments that a worker steps in turn, and its ledger's state before it began."""

    env_ids: Sequence[int]
    before: tuple[int, float]


class Crew(Owner):
    """The workers of one `ParallelEnv`, and the environments that each of them has.

    Args:
        backend: Started.
        shares: The environments of each worker.
        limits: How long each environment may take.

    Attributes:
        in_flight: What has been sent and not yet received, by environment.
        restarts: Where faults are to be survived; None where they are raised.
        seeds_stale: Whether environments may use other seeds than when they were asked last.
    """

    seeded_at_start: ClassVar[bool] = False

    def __init__(self, backend: Backend, shares: Sequence[range], limits: Limits = _NEVER) -> None:
        super().__init__(backend, shares)
        self.in_flight: dict[int, Message] = {}
        self.restarts: Restarts | None = None
        self.seeds_stale = True
        self._worker_of = [worker for worker, share in enumerate(shares) for _ in share]
        self._watch = Watch(backend, limits if backend.enforces_timeouts else _NEVER)
        # Of what is in flight: what has come, and in which order whole shares are being stepped.
        self._arrived: dict[int, tuple[float, Any]] = {}
        self._order: dict[int, _Order] = {}
        self._past = [WorkerStats()] * len(shares)

    # -- asking ----------------------------------------------------------------------------------------------------

    def run(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        """Have requests carried out by the workers, side by side, while nothing else is in flight.

        Args:
            requests: By worker.

        Returns:
            By environment, the results of those that have something to say.

        Raises:
            ParallelEnvError: A worker or an environment failed; everything has been closed, or, where faults are
                survived, is there again.
            ClosedEnvironmentError: Another thread has closed everything meanwhile.
        """
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        with self._lock:
            self.check_open()
            try:
                if self.restarts is not None:
                    self._await_restarts()
                watch, wait = self._watch, self.backend.wait
                self.backend.post(requests, together=True)
                watch.begin(requests)
                pending = set(requests)
                faults: list[ParallelEnvError] = []
                while pending or (self.restarts is not None and self.restarts.faults):
                    for worker, reply in wait(watch.patience if watch.asked else None, len(pending) or 1):
                        if isinstance(reply, Lost):
                            faults.append(self._lost(worker, reply))
                            pending.discard(worker)
                            continue
                        if reply.answers is Message.REBUILD:
                            self._rebuilt(worker, reply)
                            continue
                        pending.discard(worker)
                        if reply.results:
                            results.update(reply.results)
                        if reply.failures:
                            failures.update(reply.failures)
                        if watch.asked:
                            watch.end(worker, reply.answers)
                    if self.closed:
                        self._check_still_open()
                    for late in watch.late() if watch.asked else ():
                        faults.append(self._late(late))
                        pending.discard(late)
                    for env_id in sorted(failures):
                        faults.append(self._failed(env_id, failures.pop(env_id)))
                if not faults:
                    return {i: self.read(i, result) for i, result in results.items()} if results else {}
            except BaseException as error:
                self._shut_after(error)
                raise
            raise faults[0]  # its environments are there again

    def ask(self, message: Message, env_ids: Iterable[int], payload: Any = None) -> dict[int, Any]:
        """Have one thing done in some environments; `run` says what comes back.

        Args:
            message: What.
            env_ids: Where, in this order within each worker.
            payload: The same for all, or a dict by environment, which is shared out with them.
        """
        return self.run(self._shared_out(message, env_ids, payload))

    # -- sending and receiving -------------------------------------------------------------------------------------

    def send(self, message: Message, env_ids: Sequence[int], payload: Any = None, *, each: bool = True) -> None:
        """Have one thing done in some environments, and do not wait for it.

        Args:
            message: `STEP` or `RESET`.
            env_ids: Where; of none of them anything is in flight.
            payload: As of `ask`.
            each: Whether each can be received as soon as it is done; else they come together, which is quicker.
        """
        with self._lock:
            self.check_open()
            try:
                self.in_flight.update(dict.fromkeys(env_ids, message))
                todo = env_ids
                if self.restarts is not None:
                    todo = self._unmarked(env_ids) if message is Message.STEP else self._to_reset(env_ids, payload)
                requests = self._shared_out(
                    message, todo, payload, each=each, prompt=self.restarts is not None and not each
                )
                if not each:
                    for worker, request in requests.items():
                        self._order[worker] = _Order(request.env_ids or (), self.backend.ledgers[worker].state)
                if requests:
                    self.backend.post(requests, together=not each)
                    self._watch.begin(requests)
            except BaseException as error:
                self._shut_after(error)
                raise

    def receive(self, at_least: int, timeout: float | None = None) -> Taken:
        """Take from what is in flight all that is done, waiting for some of it.

        Args:
            at_least: How many environments to wait for.
            timeout: Seconds to wait at most; None for as long as it takes.

        Returns:
            What was done; what is told is, by environment, what it has to say beyond what is in the block, or all of
            it.

        Raises:
            TimeoutError: There were not so many in time; nothing is lost.
            ParallelEnvError: A worker or an environment failed; everything has been closed.
            ClosedEnvironmentError: Another thread has closed everything meanwhile.
        """
        deadline, too_late = None if timeout is None else time.monotonic() + timeout, False
        with self._lock:
            self.check_open()
            try:
                while True:
                    missing = at_least - len(self._arrived)
                    patience = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                    self._take_in(patience if missing > 0 or self._order else 0.0, max(missing, 1))
                    self._check_still_open()
                    if len(self._arrived) >= at_least and not self._order:
                        break
                    if patience == 0.0:
                        too_late = True
                        break
                # Ties by number.
                done = [env_id for _, env_id in sorted((moment, i) for i, (moment, _) in self._arrived.items())]
                told = {env_id: more for env_id in done if (more := self._arrived[env_id][1]) is not None}
                resets = [env_id for env_id in done if self.in_flight[env_id] is Message.RESET]
            except BaseException as error:
                self._shut_after(error)
                raise
            if too_late:
                raise TimeoutError(
                    f"{len(self._arrived)} of at least {at_least} environments were ready within {timeout:g} s; "
                    "nothing is lost, call recv again"
                )
            for env_id in done:
                del self.in_flight[env_id], self._arrived[env_id]
            return Taken((*done,), resets, told)

    def _take_in(self, patience: float | None, missing: int) -> None:
        """Wait once, and see to what has come."""
        limit = self._watch.patience
        if limit is not None and (patience is None or limit < patience):
            patience = limit
        expected = len(self._order) if self._order and len(self._order) < missing else missing
        for worker, reply in self.backend.wait(patience, expected):
            if isinstance(reply, Lost):
                self._lost(worker, reply)
            else:
                self._hear(worker, reply)
        for worker in self._watch.late():
            self._late(worker)

    def _hear(self, worker: int, reply: Reply) -> None:
        if reply.answers is Message.REBUILD:
            self._rebuilt(worker, reply)
        else:
            self._arrive(worker, reply)

    def _arrive(self, worker: int, reply: Reply) -> None:
        for env_id in sorted(reply.failures):
            failure = reply.failures[env_id]
            if self.restarts is not None and self._kind_of(env_id, failure) is Kind.AUTO_RESET:
                self.restarts.latest[env_id] = reply.results.get(env_id)
            self._failed(env_id, failure)
        if self.restarts is not None and reply.env_ids == ():
            self.restarts.kept.update(reply.results)
        done = reply.env_ids
        if done is None:  # all of the request's, where they are no span and were sent together
            done = self._order[worker].env_ids if worker in self._order else ()
        for env_id in done:
            if env_id not in self._arrived and (self.restarts is None or env_id not in self.restarts.faults):
                self._finished(env_id, reply.completed, reply.results.get(env_id))
        if reply.last:
            self._order.pop(worker, None)
            self._watch.end(worker, reply.answers)

    def _finished(self, env_id: int, moment: float, result: Any) -> None:
        try:
            extras = self.read(env_id, result)
        except EnvError as error:
            self._survive(env_id, self._kind(env_id, in_reset=False), error)
            return
        if self.restarts is not None:
            self.restarts.told(env_id, result)
            if self.in_flight[env_id] is Message.RESET:
                extras = self.restarts.result_of_reset(env_id, extras)
        self._arrived[env_id] = moment, extras

    def _unmarked(self, env_ids: Sequence[int]) -> list[int]:
        """Those to be stepped; the others have their result already, or get it when they have been restarted."""
        assert self.restarts is not None
        todo = []
        for env_id in env_ids:
            if env_id in self.restarts.marks:
                self._arrived[env_id] = time.monotonic(), self.restarts.take_mark(env_id)
            elif env_id not in self.restarts.faults:
                todo.append(env_id)
        return todo

    def _to_reset(self, env_ids: Sequence[int], keywords: Mapping[int, bytes]) -> list[int]:
        """Those to be reset now; the others, when they have been restarted."""
        assert self.restarts is not None
        todo = []
        for env_id in env_ids:
            if env_id in self.restarts.faults:
                self.restarts.awaited[env_id] = keywords[env_id]
            else:
                self.restarts.resets[env_id] = keywords[env_id]
                todo.append(env_id)
        return todo

    def _reset_at_last(self, env_id: int) -> None:
        assert self.restarts is not None
        keywords = {env_id: self.restarts.awaited.pop(env_id)}
        self.restarts.resets.update(keywords)
        requests = self._shared_out(Message.RESET, [env_id], keywords, each=True)
        self.backend.post(requests)
        self._watch.begin(requests)

    def _await_restarts(self) -> None:
        """Wait until nobody is missing any more; what is sent to them now would meet with nobody."""
        while self.restarts is not None and self.restarts.faults:
            self._take_in(None, 1)
            self._check_still_open()

    # -- faults ----------------------------------------------------------------------------------------------------

    def _failed(self, env_id: int, failure: Failure) -> ParallelEnvError:
        """An environment has raised: raise it in turn, or have it built anew in its process."""
        worker = self._worker_of[env_id]
        return self._survive(
            env_id,
            self._kind_of(env_id, failure),
            reports.env_error(env_id, worker, failure, self._advice),  # in no variable: see there
            torn=failure.torn,
        )

    def _kind_of(self, env_id: int, failure: Failure) -> Kind:
        return self._kind(env_id, failure.method == Activity.RESET.method)

    def _survive(self, env_id: int, kind: Kind, error: EnvError, *, torn: bool = False) -> EnvError:
        if self.restarts is None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a cycle would keep everything from being freed
        self.restarts.blame([env_id], error)
        self._begin_restart(env_id, kind, error, torn)
        logger.warning("%s; it is restarted", reports.first_line(error))
        self._rebuild(self._worker_of[env_id], [env_id])
        return error

    def _lost(self, worker: int, lost: Lost) -> ParallelEnvError:
        """A worker has died."""
        running = self.backend.ledgers[worker].running
        return self._replace(worker, running, reports.crashed(worker, self.shares[worker], lost, running, self._advice))

    def _late(self, worker: int) -> ParallelEnvError:
        """A worker hangs."""
        running, doing, limit = self._watch.overrun(worker)
        assert limit is not None
        stack = self.backend.stack(worker)
        share = self.shares[worker]
        advice = self._advice if self.backend.can_kill else _NO_WAY
        error = reports.timed_out(worker, share, running, doing, limit, stack, advice)
        if self.restarts is not None and self.backend.can_kill:
            for reply in self.backend.end(worker):  # it may have gone on meanwhile
                if self.in_flight or reply.answers is Message.REBUILD:
                    self._hear(worker, reply)
        return self._replace(worker, self.backend.ledgers[worker].running, error)

    def _replace(self, worker: int, running: Running | None, error: ParallelEnvError) -> ParallelEnvError:
        """All environments of a worker are gone: raise, or have them built anew in another."""
        if self.restarts is None or not self.backend.can_kill:  # a thread that hangs cannot be ended
            try:
                raise error
            finally:
                del error  # as above
        self.restarts.blame(error.env_ids, error)
        logger.warning("%s; restarted: environments %s", reports.first_line(error), [*self.shares[worker]])
        for env_id in self._done_before(worker, running):
            if env_id not in self._arrived and env_id not in self.restarts.faults:
                self._finished(env_id, time.monotonic(), None)
        for env_id in self.shares[worker]:
            is_it = running is not None and running.env_id == env_id
            kind = self._kind(env_id, is_it and running is not None and running.activity is Activity.RESET)
            if env_id in self._arrived:
                self._arrived[env_id] = self._kept(env_id)
                kind = Kind.IDLE
            if kind is Kind.AUTO_RESET:
                self.restarts.latest[env_id] = self.restarts.kept.pop(env_id, None)
            self._begin_restart(env_id, kind, error, torn=is_it and running is not None and not running.inside)
        self._watch.forget(worker)
        self._past[worker] = self._stats_of(worker)
        self.backend.replace(worker)
        if self.tracer is not None:
            self.tracer.mark(worker, "replaced")
        self._rebuild(worker, self.shares[worker])
        return error

    def _done_before(self, worker: int, running: Running | None) -> Sequence[int]:
        """Of environments that were being stepped in turn, those that had had theirs."""
        ledger, order = self.backend.ledgers[worker], self._order.pop(worker, None)
        if order is None or ledger.state == order.before:
            return ()
        last = ledger.settled if running is None else running.env_id
        if last not in order.env_ids:
            return ()
        return order.env_ids[: order.env_ids.index(last) + (running is None)]

    def _kept(self, env_id: int) -> tuple[float, Any]:
        """What has come but not been taken, in memory of its own, since the record will be overwritten."""
        assert self.restarts is not None
        moment, extras = self._arrived[env_id]
        if self.in_flight[env_id] is Message.RESET:
            self.restarts.note_begun(env_id)
        return moment, extras if type(extras) is Made else self.restarts.peek(env_id, extras)

    def _kind(self, env_id: int, in_reset: bool) -> Kind:
        if env_id not in self.in_flight:
            return Kind.IDLE
        if self.in_flight[env_id] is Message.RESET:
            return Kind.RESET
        if in_reset and self.restarts is not None:
            return self.restarts.kind_of_reset
        return Kind.STEP

    def _begin_restart(self, env_id: int, kind: Kind, error: ParallelEnvError, torn: bool = False) -> None:
        assert self.restarts is not None
        self.restarts.begin(env_id, kind, error, torn)
        self.seeds_stale = True

    def _rebuild(self, worker: int, env_ids: Iterable[int]) -> None:
        assert self.restarts is not None
        payload = {env_id: self.restarts.request(env_id) for env_id in env_ids}
        requests = {worker: Request(Message.REBUILD, tuple(payload), payload, each=True)}
        self.backend.post(requests)
        self._watch.begin(requests)

    def _rebuilt(self, worker: int, reply: Reply) -> None:
        assert self.restarts is not None
        for env_id, failure in reply.failures.items():
            self._failed(env_id, failure)
        for env_id, result in reply.results.items():
            if isinstance(result, Refusal):
                self._failed(env_id, Failure("constructor", result.text, result.text, None))
                continue
            made = self.restarts.finish(env_id, result.told)
            if env_id in self.restarts.awaited:
                self._reset_at_last(env_id)
            if made is None and env_id not in self._arrived and self.in_flight.get(env_id) is Message.STEP:
                made = self.restarts.take_mark(env_id)  # it has been sent to meanwhile
            if made is not None and env_id in self.in_flight:
                self._arrived[env_id] = reply.completed, made
        if reply.last:
            self._watch.end(worker, Message.REBUILD)

    @property
    def batch_size(self) -> int:
        """All environments: results come in any number."""
        return len(self._worker_of)

    def ahead(self, worker: int) -> float:
        """Seconds that this clock is ahead of a worker's."""
        return self.backend.ahead(worker)

    def stats(self) -> Stats:
        """What has been done so far, also by workers that are gone."""
        if not self.closed:
            self.backend.look()
        return Stats.of(map(self._stats_of, range(len(self.shares))))

    def _stats_of(self, worker: int) -> WorkerStats:
        past, ledger = self._past[worker], self.backend.ledgers[worker]
        counts = self.restarts.counts if self.restarts is not None else ()
        return WorkerStats(
            steps=past.steps + ledger.steps,
            resets=past.resets + ledger.resets,
            restarts=sum(counts[env_id] for env_id in self.shares[worker]) if counts else 0,
            simulator_s=past.simulator_s + ledger.simulator_s,
            transport_s=past.transport_s + ledger.transport_s,
            waiting_s=past.waiting_s + ledger.waiting_s,
        )

    @property
    def _advice(self) -> str:
        return _ADVICE if self.restarts is None else ""

    # -- within ----------------------------------------------------------------------------------------------------

    def _shared_out(
        self,
        message: Message,
        env_ids: Iterable[int],
        payload: Any,
        *,
        each: bool = False,
        prompt: bool = False,
    ) -> dict[int, Request]:
        shares: dict[int, list[int]] = {}
        for env_id in env_ids:
            shares.setdefault(self._worker_of[env_id], []).append(env_id)
        if not isinstance(payload, dict):
            return {worker: Request(message, tuple(ids), payload, each, prompt) for worker, ids in shares.items()}
        return {
            worker: Request(message, tuple(ids), {i: payload[i] for i in ids if i in payload} or None, each, prompt)
            for worker, ids in shares.items()
        }

    def read(self, env_id: int, result: Any) -> Any:
        """What a worker sent; bytes are something of the simulator's, pickled."""
        if type(result) is not bytes:
            return result
        try:
            return pickle.loads(result)
        except Exception as error:
            raise reports.unreadable(env_id, self._worker_of[env_id], error) from error
