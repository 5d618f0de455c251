"""Recycling: replaces environments at the ends of their episodes, by new ones that were constructed beside them.

A worker past a limit gets one standby worker with the same environments. When these are ready, each environment moves
at its next end of an episode, or at the caller's reset; with `max_episodes`, after its last episode::

    look -> Pool.add, CONSTRUCT        the standby worker constructs and resets its environments
    end of the episode -> TAKE_OVER    or the caller's RESET: the first result of the new one is the caller's
    all have moved -> CLOSE            the old worker ends

The next standby starts only after the old worker has ended. If neighbours were still in the old worker when the call
began, an environment that is past its limit again stays where it is. This is decided once per call, so results do not
depend on which reply comes first. If all have moved, an environment that has had its `max_episodes` waits for the end
of the old worker.

Environments of workers that leave their machines (`Backend.leaving`) move in the same way. Workers in the caller's own
thread keep their environments.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.vector import AutoresetMode

from marl_parallel.core.block.block_transitions import BlockTransitions
from marl_parallel.core.messages import Begins, Failure, Message, Reply, Request
from marl_parallel.core.objects.pickling import loads
from marl_parallel.core.pool.extensions import HELD, Extension, Fault
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.pool.rebuilds import Rebuilds, refusals
from marl_parallel.core.pool.replacement import Action, Event, Present, Successor
from marl_parallel.core.pool.slots import Mark, Owed, Slot, State
from marl_parallel.core.reports import reports
from marl_parallel.core.reports.reports import first_line, logger
from marl_parallel.core.transition import NOTHING
from marl_parallel.core.worker.env_runner import joined, last_of, with_common
from marl_parallel.types import RecyclePolicy, WorkerStats

_REPLACED_ALREADY = "This worker's environments had already been replaced"
_LOOK_EVERY_S, _LOOK_FOR_ENDS_EVERY_S = 1.0, 0.02
_MEASURING_COSTS_AT_MOST, _MEASURE_AT_LEAST_EVERY_S = 0.01, 10.0
_RETRY_AFTER_S, _RETRY_AT_LEAST_EVERY_S = 1.0, 60.0
_LEAVES_WITHIN_S = 5.0
_MB = 1e6


@dataclass(slots=True, eq=False)
class _RecyclingState:
    """One environment."""

    built: float  # when the present environment was constructed, or took its place
    first_episode: int = 0  # the number of ended episodes at that time
    recycled: int = 0


@dataclass(slots=True, eq=False)
class _Standby:
    """A worker with the successors of the environments of another one."""

    worker: int
    of: Sequence[Slot]  # all environments of that worker; those that have moved have no successor
    since: float = 0.0  # when the latest request to construct one was posted
    past_limit: bool = False  # whether all move at the next ends of episodes, whatever `max_episodes` says

    @property
    def left(self) -> list[Slot]:
        """The environments that have not moved."""
        return [slot for slot in self.of if slot.successor is not Successor.NONE]

    @property
    def is_ready(self) -> bool:
        """Whether nothing is being constructed."""
        return not any(slot.successor in (Successor.BEING_BUILT, Successor.OUTDATED) for slot in self.of)


class Recycling(Extension):
    """Replaces environments as a `RecyclePolicy` and `Backend.leaving` require.

    Args:
        pool: The pool.
        rebuilds: Makes the requests to construct environments.
        transitions: The environments' records.
        policy: The limits.
        build_s: How long it took to start all workers and construct their environments.
    """

    saved_as = "Recycling"

    def __init__(
        self, pool: Pool, rebuilds: Rebuilds, transitions: BlockTransitions, policy: RecyclePolicy, build_s: float
    ) -> None:
        self._pool, self._rebuilds, self._transitions, self._policy = pool, rebuilds, transitions, policy
        self._backend, self._ended, self._build_s = pool.backend, transitions.statistics.ended, build_s
        now = pool.clock()
        self._records = [_RecyclingState(now) for _ in pool.slots]
        self._standbys: dict[int, _Standby] = {}  # by the position of the workers whose environments move
        self._closing: dict[int, tuple[int, float]] = {}  # by worker without environments: its position, its deadline
        self._split: frozenset[int] = frozenset()  # positions of half-done moves when the present call began
        self._next_look, self._episodes_seen, self._next_asked, self._next_measurement = 0.0, -1, 0.0, 0.0
        self._may_move = False  # whether one of the next results may be an end at which an environment moves
        self._memory: dict[int, int] = {}  # by worker, in bytes, at the last measurement
        self._measures = not (policy.max_memory_mb is None and policy.kill_above_mb is None)
        self._leaving: frozenset[int] = frozenset()
        self._retry: dict[int, tuple[float, float]] = {}  # by position: when, and how long after a failure
        self._has_warned = False
        rebuilds.renewal = weakref.WeakMethod(self.renew)  # this object refers to `rebuilds`, too

    # -- when environments move ----------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        queues = self._pool.queues
        self._split = frozenset([one for one, standby in self._standbys.items() if queues[standby.worker].share])
        self._look_at_limits(now)
        if too_large := self._too_large():
            self._next_look = 0.0  # `look` ends them, since hooks of `send` must not raise faults
        is_due = any(standby.past_limit for standby in self._standbys.values())
        self.sees_steps = bool(too_large) or is_due or self._may_move

    def patience(self, now: float) -> float | None:
        return None if self._pool.closed else max(self._next_look - now, 0.0)

    def look(self, now: float) -> None:
        if not self._pool.closed:
            self._look_at_limits(now)
            self._kill_too_large()

    def _look_at_limits(self, now: float) -> None:
        """Begin standbys that are due, now or soon, and remove workers that all environments have left."""
        episodes = sum(self._ended)
        if episodes == self._episodes_seen and now < self._next_look:
            return
        self._episodes_seen = episodes
        self._measure(now)
        for worker, (_, deadline) in [*self._closing.items()]:
            if now >= deadline and self._pool.queues[worker].requests:
                logger.warning(
                    "worker %d, whose environments %s have been replaced, did not close in time and was killed",
                    worker, [*self._pool.queues[worker].built],
                )  # fmt: skip
            self._remove_closed(worker, kill=now >= deadline)
        for position, share in enumerate(self._pool.shares):
            slots = [self._pool.slots[env_id] for env_id in share]
            standby = self._standbys.get(position)
            if standby is not None and standby.worker in self._leaving and not self._pool.queues[standby.worker].share:
                self._give_up(position)  # a new standby begins elsewhere
                standby = None
            workers = {slot.worker for slot in slots}
            past = any(self._is_past_limit(worker, now) for worker in workers)
            if standby is None and self._may_have_standbys(position) and self._may_begin(position, now):
                if past or self._waiting(slots) or self._is_soon(slots, now):
                    self._begin_standby(position)
                standby = self._standbys.get(position)
            if standby is not None:
                standby.past_limit |= standby.is_ready and past
                if standby.is_ready:
                    missing = [slot for slot in slots if slot.successor is Successor.MISSING]
                    again = missing if self._may_try(position, now) else self._waiting(missing)
                    self._apply_event(standby, again, Event.BEGINS)
        limit = self._policy.max_episodes
        self._may_move = any(
            (limit is not None and self._episodes(slot) + 1 >= limit) or self._is_past_age(slot, now)
            for slot in self._pool.slots
            if self._may_have_standbys(self._pool.position(slot.worker))
        )
        is_ending = any(not self._pool.queues[worker].requests for worker in self._closing)
        self._next_look = now + (_LOOK_FOR_ENDS_EVERY_S if is_ending else _LOOK_EVERY_S)

    @staticmethod
    def _waiting(slots: Iterable[Slot]) -> list[Slot]:
        """Which of some environments wait for a new one."""
        return [slot for slot in slots if slot.present is Present.WAITS]

    def _episodes(self, slot: Slot) -> int:
        """How many episodes of the present environment have ended in results that the caller has received."""
        return self._ended[slot.env_id] - self._records[slot.env_id].first_episode

    def _is_past_age(self, slot: Slot, now: float) -> bool:
        limit = self._policy.max_age_s
        return limit is not None and now - self._records[slot.env_id].built > limit

    def _is_past_limit(self, worker: int, now: float) -> bool:
        """Whether a worker is past its limit of memory or age, or leaves its machine."""
        limit = self._policy.max_memory_mb
        if worker in self._leaving or (limit is not None and self._memory_mb(worker) > limit):
            return True
        return any(self._is_past_age(slot, now) for slot in self._pool.slots_of(worker))

    def _is_soon(self, slots: Sequence[Slot], now: float) -> bool:
        """Whether a standby must begin now to be ready when one of these environments has had its episodes."""
        limit = self._policy.max_episodes
        if limit is None:
            return False
        for slot in slots:
            episodes, age = self._episodes(slot), now - self._records[slot.env_id].built
            if episodes >= limit - 1:
                return True
            if episodes > 0 and age / episodes * (limit - episodes) <= 2 * self._build_s + _LOOK_EVERY_S:
                return True
        return False

    def _begin_if_due(self, slot: Slot, *, ends: int) -> bool:
        """Start the standby of an environment that has had its `max_episodes`; returns whether it moves now.

        `ends` ended episodes are not counted yet.
        """
        position, now = self._pool.position(slot.worker), self._pool.clock()
        if not self._may_have_standbys(position):
            return False
        limit = self._policy.max_episodes
        has_had_all = limit is not None and self._episodes(slot) + ends >= limit
        standby = self._standbys.get(position)
        if standby is None and has_had_all and position not in self._split:
            if self._may_begin(position, now):
                self._begin_standby(position)
            elif self._may_try(position, now):
                return True  # it waits for the end of the worker that all have left
            standby = self._standbys.get(position)
        if standby is None or slot.successor in (Successor.NONE, Successor.MISSING):
            return False
        return has_had_all or (standby.past_limit and standby.is_ready)

    # -- standbys ------------------------------------------------------------------------------------------------------

    def _may_have_standbys(self, position: int) -> bool:
        """Whether the environments of a worker can move to another one."""
        return position not in self._backend.in_line

    def _may_try(self, position: int, now: float) -> bool:
        """Whether enough time has passed since a failure."""
        return now >= self._retry.get(position, (0.0, 0.0))[0]

    def _may_begin(self, position: int, now: float) -> bool:
        """Whether a worker may get a standby: not while the previous worker of this position still runs."""
        busy = [worker for worker, queue in self._pool.queues.items() if queue.position == position]
        return len(busy) == 1 and self._may_try(position, now)

    def _begin_standby(self, position: int) -> None:
        """Start a worker beside another worker, and construct the same environments there."""
        worker = next(one for one, queue in self._pool.queues.items() if queue.position == position)
        number, env_ids = 2 * position + len(self._pool.shares) - worker, tuple(self._pool.shares[position])
        try:
            self._pool.add(number, env_ids, worker)
        except (OSError, RuntimeError) as error:
            self._warn(position, env_ids, str(error))
            for slot in [self._pool.slots[env_id] for env_id in env_ids]:
                self._stay(slot)
            return
        self._standbys[position] = standby = _Standby(number, [self._pool.slots[env_id] for env_id in env_ids])
        self._apply_event(standby, standby.of, Event.BEGINS)

    def _apply_event(self, standby: _Standby, slots: Iterable[Slot], event: Event) -> None:
        """Pass an event to successors, and construct those that must be constructed after it, which may be none."""
        payload = {}
        for slot in slots:
            if slot.note(event) is Action.CONSTRUCT:
                count = self._rebuilds.count(slot.env_id) + 1
                payload[slot.env_id] = self._rebuilds.request(slot.env_id, count, Begins.BESIDE)
        if payload:
            standby.since = self._pool.clock()
            request = Request(Message.CONSTRUCT, tuple(payload), payload, each=True)
            self._pool.post({standby.worker: request}, self._on_constructed, is_awaited=False)

    def renew(self, env_ids: Sequence[int]) -> None:
        """Construct the successors of some environments anew, in standbys that exist."""
        for standby in self._standbys.values():
            self._apply_event(standby, [slot for slot in standby.left if slot.env_id in env_ids], Event.CHANGES)

    def _on_constructed(self, worker: int, reply: Reply, failures: dict[int, Failure]) -> None:
        position, failed = self._pool.position(worker), refusals(reply)
        standby = self._standbys.get(position)
        if standby is None or standby.worker != worker:
            return
        for slot in [self._pool.slots[env_id] for env_id in reply.env_ids or ()]:
            was_outdated = slot.successor is Successor.OUTDATED
            self._apply_event(standby, [slot], Event.REFUSED if slot.env_id in failed else Event.BUILT)
            if slot.env_id in failed and not was_outdated:
                self._keep_present(position, [slot], str(reports.env_error(slot.env_id, worker, failed[slot.env_id])))
                if position not in self._standbys:
                    return
        if standby.is_ready:
            self._move_ready(position, standby)

    def _move_ready(self, position: int, standby: _Standby) -> None:
        self._build_s = self._pool.clock() - standby.since
        if not any(slot.successor is Successor.MISSING for slot in standby.of):
            self._retry.pop(position, None)
        self._next_look = 0.0
        limit = self._policy.max_memory_mb
        megabytes = 0.0 if limit is None else (self._backend.memory(standby.worker) or 0) / _MB
        if limit is not None and megabytes > limit and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "max_memory_mb=%g of the RecyclePolicy is too low: worker %d has %.0f MB of memory as soon as its "
                "environments have been constructed, so that they are replaced again and again",
                limit, standby.worker, megabytes,
            )  # fmt: skip
        for slot in self._waiting(standby.left):
            if slot.successor is Successor.READY:  # else the standby worker has died meanwhile, and it is built again
                self._move(slot, standby)

    def _keep_present(self, position: int, slots: Sequence[Slot], error: str) -> None:
        """Keep environments whose replacements could not be constructed; the next attempt has other seeds.

        If no environment has moved there, the whole standby is given up. A failed attempt counts as a rebuild only
        after the first reset: else the seed of that reset would change.
        """
        self._warn(position, [slot.env_id for slot in slots], error)
        for slot in slots:
            if slot.has_reset:
                self._rebuilds.add(slot.env_id)
        if not self._pool.queues[self._standbys[position].worker].share:
            self._give_up(position)
            return
        for slot in slots:
            self._stay(slot)

    def _give_up(self, position: int) -> None:
        """Remove a standby to which no environment has moved; environments that wait for it go on."""
        standby = self._standbys.pop(position)
        self._pool.remove(standby.worker, kill=True)
        self._forget(standby.worker)
        for slot in standby.left:
            slot.note(Event.GIVEN_UP)
            self._stay(slot)

    def _warn(self, position: int, env_ids: Sequence[int], error: str) -> None:
        last = self._retry.get(position, (0.0, _RETRY_AFTER_S / 2))[1]
        seconds = min(2 * last, _RETRY_AT_LEAST_EVERY_S)
        self._retry[position] = self._pool.clock() + seconds, seconds
        logger.warning(
            "could not build replacements for environments %s; the current ones keep running; next attempt in %.0f s. "
            "%s", [*env_ids], seconds, error,
        )  # fmt: skip

    # -- moves ---------------------------------------------------------------------------------------------------------

    def before_send(self, message: Message, env_ids: Sequence[int], payloads: Any) -> Sequence[int]:
        going_on = []
        for env_id in env_ids:
            slot, resets, over = self._pool.slots[env_id], message is Message.RESET, self._transitions.is_over(env_id)
            if resets and slot.has_reset and not over:  # the reset ends a running episode
                self._records[env_id].first_episode -= 1
                self._episodes_seen = -1
            begins = resets or (over and self._transitions.mode is AutoresetMode.NEXT_STEP)
            if not begins or slot.skips or not slot.has_reset or not self._begin_if_due(slot, ends=0):
                going_on.append(env_id)
                continue
            part = {env_id: payloads[env_id]} if payloads and env_id in payloads else None
            keywords = part[env_id] if part is not None and resets else None
            held = Request(message, (env_id,), part, each=True)
            # A reset is due, also if the caller sends a step (NEXT_STEP).
            self._begin_move(slot, Owed(Message.RESET, NOTHING, keywords, request=held))
        return going_on

    def on_result(self, slot: Slot, leftovers: bytes | None, result: Any, completed: float) -> Any:
        owed = slot.owed
        if owed is not None and slot.present is Present.WAITS:  # it has no successor
            slot.note(Event.STAYS)
            return result
        if owed is not None and slot.present is Present.MOVES:
            slot.note(Event.BEGAN)
            first = self._transitions.snapshot(slot.env_id, result)
            transition, over = first.transition, first.over
            if owed.message is Message.STEP:
                transition, over = joined(owed.transition, transition), False
            return first._replace(transition=with_common(transition, recycled=True), over=over, mark=Mark.RECYCLED)
        if slot.request is not Message.STEP or not self._transitions.has_next_episode(slot.env_id):
            return result
        if not self._begin_if_due(slot, ends=1):
            return result
        last = last_of(self._transitions.transition(slot.env_id, result))
        self._begin_move(slot, Owed(Message.STEP, last, result=(leftovers, completed)))
        return HELD

    def _begin_move(self, slot: Slot, owed: Owed) -> None:
        """Let the next episode of an environment begin in the new one, as soon as that is ready."""
        slot.note(Event.DUE, owed)
        standby = self._standbys.get(self._pool.position(slot.worker))
        if standby is not None and standby.is_ready:
            self._move(slot, standby)

    def _move(self, slot: Slot, standby: _Standby) -> None:
        """Replace the present environment by the new one in a standby."""
        pool, old_worker = self._pool, slot.worker
        slot.note(Event.TAKES_OVER)
        slot.worker = standby.worker
        pool.set_share(old_worker, tuple([env_id for env_id in pool.queues[old_worker].share if env_id != slot.env_id]))
        pool.set_share(standby.worker, tuple(sorted([*pool.queues[standby.worker].share, slot.env_id])))
        if not standby.left:
            del self._standbys[pool.position(old_worker)]
            self._closing[old_worker] = pool.position(old_worker), pool.clock() + _LEAVES_WITHIN_S
            pool.post({old_worker: Request(Message.CLOSE)}, self._on_closed, is_awaited=False)
        self._take_over(slot)

    def _take_over(self, slot: Slot) -> None:
        """Begin the due episode in the new environment."""
        assert slot.owed is not None
        self._records[slot.env_id].recycled += 1
        self._rebuilds.add(slot.env_id)
        self._pool.announce_rebuild([slot], [int(slot.owed.message is Message.STEP)])
        keywords = slot.owed.keywords
        if keywords is None or _is_empty(keywords):  # the first episode began without seed and options
            request = Request(Message.TAKE_OVER, (slot.env_id,), each=True)
        else:
            request = Request(Message.RESET, (slot.env_id,), {slot.env_id: keywords}, each=True)
        self._pool.post({slot.worker: request}, self._on_first)

    def _on_first(self, worker: int, reply: Reply, failures: dict[int, Failure]) -> None:
        """The first transition of a new environment has come."""
        failures.update(reply.failures)
        for env_id in reply.env_ids or ():
            slot = self._pool.slots[env_id]
            if env_id not in reply.failures and slot.present is Present.MOVES:
                self._pool.take_result(slot, reply.results.get(env_id), reply.completed)

    def _stay(self, slot: Slot) -> None:
        """Let the next episode begin in the old environment, if the caller waits for it in a new one."""
        owed = slot.owed
        if owed is None or slot.present is not Present.WAITS:
            return
        if owed.request is None:
            self._pool.take_result(slot, *owed.result)
            return
        slot.note(Event.STAYS)
        request = owed.request
        if self._pool.pass_on(self, request.message, (slot.env_id,), request.payload):
            self._pool.post({slot.worker: request})

    # -- the old worker ------------------------------------------------------------------------------------------------

    def _on_closed(self, worker: int, reply: Reply, failures: dict[int, Failure]) -> None:
        for env_id, failed in reply.failures.items():
            text = first_line(reports.env_error(env_id, worker, failed))
            logger.warning("%s. %s", text, _REPLACED_ALREADY)
        self._pool.add_last_slices(worker, reply)
        self._next_look = 0.0

    def _remove_closed(self, worker: int, *, kill: bool) -> None:
        if not kill and self._pool.queues[worker].requests:
            return  # no reply yet; if it has died, the backend reports that
        if self._pool.remove(worker, kill=kill):
            del self._closing[worker]
            self._next_look = 0.0
            self._forget(worker)

    # -- faults --------------------------------------------------------------------------------------------------------

    def on_fault(self, fault: Fault) -> bool:
        queue = self._pool.queues[fault.worker]
        if queue.share:
            standby = self._standbys.get(queue.position)
            if standby is not None and standby.worker == fault.worker:
                failed = [slot for slot in standby.left if slot.env_id in fault.error.env_ids]
                if failed:
                    self._mark_dead(queue.position, failed, first_line(fault.error))
                if fault.env_id is None:
                    for slot in standby.left:
                        slot.note(Event.DIES)
                    self._episodes_seen = -1  # they are constructed again after the rebuilds
            if fault.env_id is None:
                self._forget(fault.worker)
            return False
        if fault.worker in self._closing:
            logger.warning("%s. %s", first_line(fault.error), _REPLACED_ALREADY)
            self._remove_closed(fault.worker, kill=True)
        else:
            slots = [self._pool.slots[env_id] for env_id in fault.error.env_ids]
            self._mark_dead(queue.position, slots, str(fault.error))
        return True

    def _mark_dead(self, position: int, slots: Sequence[Slot], error: str) -> None:
        """Record that successors have died with their worker, or will."""
        for slot in slots:
            slot.note(Event.DIES)
        self._keep_present(position, slots, error)

    def on_rebuild(self, slots: Sequence[Slot], ends: Sequence[int]) -> None:
        for slot, more in zip(slots, ends, strict=True):
            record = self._records[slot.env_id]
            record.built = self._pool.clock()
            record.first_episode = self._ended[slot.env_id] + more
        self._episodes_seen = -1

    # -- memory --------------------------------------------------------------------------------------------------------

    def _measure(self, now: float) -> None:
        """Ask which workers leave their machines, and measure the memory of all if it is limited; once a second.

        Memory is measured less often if measuring takes long.
        """
        if now < self._next_asked:
            return
        self._next_asked = now + _LOOK_EVERY_S
        self._leaving = frozenset(self._backend.leaving)
        if self._measures and now >= self._next_measurement:
            began = self._pool.clock()
            found = {worker: self._backend.memory(worker) for worker in self._pool.present_shares()}
            self._memory = {worker: nbytes for worker, nbytes in found.items() if nbytes is not None}
            rests_s = (self._pool.clock() - began) / _MEASURING_COSTS_AT_MOST
            self._next_measurement = now + min(rests_s, _MEASURE_AT_LEAST_EVERY_S)

    def _memory_mb(self, worker: int) -> float:
        """The memory of a worker at the last measurement, in MB."""
        return self._memory.get(worker, 0) / _MB

    def _forget(self, worker: int) -> None:
        """Forget the measurements of a worker that is gone: another worker may get its number."""
        self._memory.pop(worker, None)
        self._leaving -= {worker}

    def _too_large(self) -> list[int]:
        """Workers with environments that use more memory than `kill_above_mb`."""
        limit, queues = self._policy.kill_above_mb, self._pool.queues
        if limit is None:
            return []
        return [one for one in self._memory if self._memory_mb(one) > limit and one in queues and queues[one].share]

    def _kill_too_large(self) -> None:
        """Replace workers that use more memory than `kill_above_mb`."""
        pool = self._pool
        for worker in self._too_large():
            if worker not in self._too_large():
                continue  # all environments left it while another worker was replaced
            megabytes, share = self._memory_mb(worker), pool.queues[worker].share
            pool.apply([(worker, reply) for reply in self._backend.end(worker)])
            if worker not in pool.queues:
                continue
            # With these replies, all environments may have moved to their standby.
            share, status = pool.queues[worker].share or share, self._backend.statuses[worker]
            running, tail = pool.queues[worker].running(status), self._backend.log_tail(worker)
            # It is unknown which environment filled the memory: the fault counts once, against the environment that was
            # running, or that ran last.
            counted = status.settled if running is None else running.env_id
            env_id = counted if counted is not None and counted in share else share[0]
            error = reports.too_large(worker, share, env_id, megabytes, self._policy.kill_above_mb, running, tail)
            try:
                pool.fault(Fault(worker, None, error, running))
            finally:
                del error  # as `Pool.fault` says

    def save(self, slot: Slot) -> Any:
        return self._episodes(slot), self._records[slot.env_id].recycled

    def load(self, slot: Slot, saved: Any, leftovers: bytes | None) -> None:
        episodes, recycled_before = saved or (0, 0)
        ended, now = self._ended[slot.env_id], self._pool.clock()
        self._records[slot.env_id] = _RecyclingState(now, ended - episodes, recycled_before)
        self._episodes_seen = -1

    def check(self) -> None:
        queues, positions = self._pool.queues, range(len(self._pool.shares))
        for position in positions:
            workers = {worker for worker, queue in queues.items() if queue.position == position}
            leaving = {worker for worker, (of, _) in self._closing.items() if of == position}
            standby = self._standbys.get(position)
            beside = leaving if standby is None else {*leaving, standby.worker}
            others = workers - beside
            assert len(others) == 1, f"the workers of {position}: {workers}, of which {beside} come or go"
            assert len(workers) == 1 + len(beside) <= 2, f"the workers of {position}: {workers}, not {beside}"
            assert not any(queues[worker].share for worker in leaving), f"environments in {leaving}"
            if standby is not None:
                self._check_standby(position, standby)
        for slot, record in zip(self._pool.slots, self._records, strict=True):
            assert slot.successor is Successor.NONE or self._pool.position(slot.worker) in self._standbys, (
                f"a successor without a standby: {slot}, {record}"
            )
            self._check_move(slot)

    def _check_standby(self, position: int, standby: _Standby) -> None:
        """The environments of a standby are its worker's, or have not moved; one that is constructed is requested."""
        queue, left = self._pool.queues[standby.worker], standby.left
        assert left, f"all have moved: {standby}"
        both = sorted([*[slot.env_id for slot in left], *queue.share])
        assert both == [*self._pool.shares[position]], f"the environments of {standby}: {both}"
        for slot in left:
            is_requested = queue.owes(slot.env_id, self._on_constructed, {Message.CONSTRUCT})
            is_there = slot.successor in (Successor.READY, Successor.MISSING)
            assert is_there or is_requested, f"nobody constructs the successor: {slot}"

    def _check_move(self, slot: Slot) -> None:
        """An environment whose move the caller waits for has a due result, and a worker that will bring it."""
        if slot.present not in (Present.WAITS, Present.MOVES):
            return
        env_id, position, queue = slot.env_id, self._pool.position(slot.worker), self._pool.queues[slot.worker]
        assert slot.state is State.BUSY, f"nobody waits for its move: {slot}"
        if slot.present is Present.MOVES:
            is_owed = queue.owes(env_id, self._on_first, {Message.TAKE_OVER, Message.RESET})
        else:
            standby = self._standbys.get(position)  # the next one begins when the worker that all have left has ended
            is_leaving = any(of == position for of, _ in self._closing.values())
            is_owed = is_leaving if standby is None else slot.successor is not Successor.NONE
        assert is_owed, f"nobody brings its first result: {slot}"

    def stats(self, env_ids: Sequence[int]) -> WorkerStats:
        return WorkerStats(recycled=sum(self._records[env_id].recycled for env_id in env_ids))


def _is_empty(keywords: bytes) -> bool:
    """Whether the caller has passed nothing to a reset; the worker reports keywords that do not unpickle."""
    try:
        return not loads(keywords)
    except Exception:
        return False
