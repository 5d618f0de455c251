"""What became of the work: hears what workers say, and sees to what failed, died or hangs.

A fault is either raised, and everything closed, or its environments are built anew; what that means for them is known
to `restarts.py`, what an error says to `reports.py`, and how everything ends to `ownership.py`. What workers are asked,
and what comes back, is the business of `crew.py`.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from marl_parallel.adapters.protocol import Dicts
from marl_parallel.core import reports
from marl_parallel.core.backend import Backend
from marl_parallel.core.batch import Made
from marl_parallel.core.ledger import Activity, Running
from marl_parallel.core.limits import Limits, Watch
from marl_parallel.core.messages import Failure, Lost, Message, Reply, Request
from marl_parallel.core.ownership import Owner
from marl_parallel.core.payloads import Refusal
from marl_parallel.core.pickling import loads
from marl_parallel.core.reports import logger
from marl_parallel.core.restarts import Kind, Restarts
from marl_parallel.types import EnvError, ParallelEnvError, WorkerStats

_NEVER = Limits(None, None, None)
_ADVICE = ', or pass on_error="restart" to go on with a fresh copy'
_NO_WAY = '; a thread cannot be ended, so nothing could be restarted: backend="process" can'


class Order(NamedTuple):
    """Environments that a worker steps in turn, and its ledger's state before it began."""

    env_ids: Sequence[int]
    before: tuple[int, float]


class Supervisor(Owner):
    """Of the workers of one `ParallelEnv`.

    Args:
        backend: Started.
        shares: The environments of each worker.
        limits: How long each environment may take.

    Attributes:
        in_flight: What has been sent and not yet received, by environment.
        restarts: Where faults are to be survived; None where they are raised.
        seeds_stale: Whether environments may use other seeds than when they were asked last.
    """

    def __init__(self, backend: Backend, shares: Sequence[range], limits: Limits = _NEVER) -> None:
        super().__init__(backend, shares)
        self.in_flight: dict[int, Message] = {}
        self.restarts: Restarts | None = None
        self.seeds_stale = True
        self._worker_of = [worker for worker, share in enumerate(shares) for _ in share]
        self._watch = Watch(backend, limits if backend.enforces_timeouts else _NEVER)
        # Of what is in flight: what has come, and in which order whole shares are being stepped.
        self._arrived: dict[int, tuple[float, Any]] = {}
        self._order: dict[int, Order] = {}
        self._past = [WorkerStats()] * len(shares)

    # -- hearing ---------------------------------------------------------------------------------------------------

    def _take_in(self, patience: float | None, missing: int) -> None:
        """Wait once, and see to what has come."""
        limit = self._watch.patience()
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

    def read(self, env_id: int, result: Any) -> Any:
        """What a worker sent; bytes are something of the simulator's, pickled."""
        if type(result) is not bytes:
            return result
        try:
            return loads(result)
        except Exception as error:
            raise reports.unreadable(env_id, self._worker_of[env_id], error) from error

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

    def _late(self, worker: int) -> ParallelEnvError | None:
        """A worker hangs: raise, or have it replaced; None if it has just gone on after all."""
        running, doing, limit = self._watch.overrun(worker)
        assert limit is not None
        share = self.shares[worker]
        advice = self._advice if self.backend.can_kill else _NO_WAY
        if self.restarts is None or not self.backend.can_kill:
            stack = self.backend.stack(worker)
            return self._replace(
                worker, running, reports.timed_out(worker, share, running, doing, limit, stack, advice)
            )
        # Taking the stack continues a worker that was stopped, and it may finish what it was doing. That is late all
        # the same: what its caller gets is read from the block before.
        cut_off = self._cut_off(worker, running)
        if self._watch.moved(worker):
            return None
        error = reports.timed_out(worker, share, running, doing, limit, self.backend.stack(worker), advice)
        for env_id, (kind, dicts) in cut_off.items():
            self._begin_restart(env_id, kind, error, cut_off=dicts)
        for reply in self.backend.end(worker):
            if self.in_flight or reply.answers is Message.REBUILD:
                self._hear(worker, _without(reply, cut_off))
        return self._replace(worker, self.backend.ledgers[worker].running, error)

    def _cut_off(self, worker: int, running: Running | None) -> dict[int, tuple[Kind, Dicts]]:
        """The environments of a worker that are late, with what is interrupted and what their callers get.

        That is the one that is running; where none is, those in flight that have not finished.
        """
        assert self.restarts is not None
        if running is not None:
            late = [running.env_id]
        else:
            finished = {*self._done_before(worker, running)}
            late = [env_id for env_id in self.shares[worker] if env_id in self.in_flight and env_id not in finished]
        cut_off = {}
        for env_id in late:
            if env_id in self._arrived:
                continue
            if env_id in self.restarts.faults:  # it is being built anew: what that interrupted is known already
                fault = self.restarts.faults[env_id]
                cut_off[env_id] = fault.kind, fault.told
                continue
            kind = self._kind(env_id, running is not None and running.activity is Activity.RESET)
            if kind is Kind.AUTO_RESET:
                self.restarts.latest[env_id] = self.restarts.kept.get(env_id)
            torn = running is not None and not running.inside
            cut_off[env_id] = kind, self.restarts.cut_off(env_id, kind, torn=torn)
        return cut_off

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
            if kind is Kind.AUTO_RESET and env_id not in self.restarts.faults:
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

    def _begin_restart(
        self, env_id: int, kind: Kind, error: ParallelEnvError, torn: bool = False, cut_off: Dicts | None = None
    ) -> None:
        assert self.restarts is not None
        self.restarts.begin(env_id, kind, error, torn, cut_off)
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

    def _reset_at_last(self, env_id: int) -> None:
        assert self.restarts is not None
        keywords = {env_id: self.restarts.awaited.pop(env_id)}
        self.restarts.resets.update(keywords)
        requests = {self._worker_of[env_id]: Request(Message.RESET, (env_id,), keywords, each=True)}
        self.backend.post(requests)
        self._watch.begin(requests)

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


def _without(reply: Reply, env_ids: Container[int]) -> Reply:
    """The same reply without what some environments have to say in it."""
    return reply._replace(
        results={env_id: result for env_id, result in reply.results.items() if env_id not in env_ids},
        failures={env_id: failure for env_id, failure in reply.failures.items() if env_id not in env_ids},
    )
