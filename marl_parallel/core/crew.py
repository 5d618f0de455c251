"""What is asked of the workers, and what comes back.

The `Crew` stands between `ParallelEnv`, which knows what is to be done, and a backend, which knows how to get it to
the workers. What failed, died or hangs is seen to in `supervision.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from marl_parallel.core.engine import Taken
from marl_parallel.core.messages import Failure, Lost, Message, Request
from marl_parallel.core.supervision import Order, Supervisor
from marl_parallel.types import ParallelEnvError, Stats


class Crew(Supervisor):
    """The workers of one `ParallelEnv`, and the environments that each of them has."""

    seeded_at_start: ClassVar[bool] = False
    partial: ClassVar[bool] = True

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
                    for worker, reply in wait(watch.patience() if watch.asked else None, len(pending) or 1):
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
                        if (fault := self._late(late)) is not None:
                            faults.append(fault)
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
                        self._order[worker] = Order(request.env_ids or (), self.backend.ledgers[worker].state)
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

    def _await_restarts(self) -> None:
        """Wait until nobody is missing any more; what is sent to them now would meet with nobody."""
        while self.restarts is not None and self.restarts.faults:
            self._take_in(None, 1)
            self._check_still_open()

    # -- what there is ---------------------------------------------------------------------------------------------

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
