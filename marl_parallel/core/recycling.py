"""Which environments are replaced by spares, as a `RecyclePolicy` and `Backend.leaving` say; `pool.py` does it.

An environment past a limit is replaced where an episode begins. Its spare has been constructed before, with the spares
of its neighbours, in a new worker, and its first episode has begun there::

    Recycler.wants_spares -> Backend.add, PREPARE        the spares of a worker
    Recycler.is_due      -> RETIRE                       with SAME_STEP: the worker does not begin the next episode
    end of the episode   -> ADOPT, or the caller's RESET, in the new worker
    all have moved       -> CLOSE, Backend.remove        the old worker ends

A spare is not constructed in a worker that steps others, which would wait. So an environment that is due again while
its neighbours have not moved gets a spare in one more worker. So does one whose spare is of no use any more, since its
seed has changed, while others have moved to the spare's worker. The environments of a share that have parted like this
are all replaced when one of their workers is past a limit of memory or age, so that they share a worker again.

A backend without further workers (`Backend.has_spares`) constructs the new environment in place; its caller waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from marl_parallel.core.backend import Backend
from marl_parallel.core.reports import logger
from marl_parallel.core.slots import Slot
from marl_parallel.types import RecyclePolicy

_LOOK_EVERY_S = 1.0
_MEASURING_COSTS_AT_MOST, _MEASURE_AT_LEAST_EVERY_S = 0.01, 10.0
_RETRY_AFTER_S, _RETRY_AT_LEAST_EVERY_S = 1.0, 60.0
_MB = 1e6


class Recycler:
    """The limits of a `RecyclePolicy`, and what they are compared with.

    Args:
        policy: The limits.
        backend: Knows the memory of workers.
        ended: By environment, how many episodes have ended (`EpisodeStatistics.ended`).
        build_s: How long it took to start all workers and construct their environments.
    """

    def __init__(self, policy: RecyclePolicy, backend: Backend, ended: Sequence[int], build_s: float) -> None:
        self.policy, self._backend, self._ended = policy, backend, ended
        self.build_s = build_s
        self.next_look = 0.0
        self._episodes_seen = -1
        self._next_measurement = 0.0
        self._memory: dict[int, int] = {}  # by worker, in bytes, at the last measurement
        self._measures = not (policy.max_memory_mb is None and policy.kill_above_mb is None)
        self._has_warned = False
        self._leaving: frozenset[int] = frozenset()
        self._retry: dict[int, tuple[float, float]] = {}  # by environment: when, and how long after a failure

    def episodes(self, slot: Slot) -> int:
        """How many episodes of the present environment have ended, as far as its caller has received results."""
        return self._ended[slot.env_id] - slot.first_episode

    def looks(self, now: float) -> bool:
        """Whether episodes have ended since the last look, or the time for one has come; it is one then."""
        episodes = sum(self._ended)
        if episodes == self._episodes_seen and now < self.next_look:
            return False
        self._episodes_seen = episodes
        return True

    def look_again(self) -> None:
        """Let the next call of `looks` return True: environments or their episodes have changed."""
        self._episodes_seen = -1

    def measure(self, workers: Sequence[int], now: float) -> None:
        """Ask which workers leave their machines, and measure the memory of all if that is limited; once a second.

        Memory is measured more rarely if that takes long.
        """
        if now < self.next_look:
            return
        self.next_look = now + _LOOK_EVERY_S
        self._leaving = frozenset(self._backend.leaving())
        if self._measures and now >= self._next_measurement:
            began = self._backend.clock()
            found = {worker: self._backend.memory(worker) for worker in workers}
            self._memory = {worker: nbytes for worker, nbytes in found.items() if nbytes is not None}
            rests_s = (self._backend.clock() - began) / _MEASURING_COSTS_AT_MOST
            self._next_measurement = now + min(rests_s, _MEASURE_AT_LEAST_EVERY_S)

    def memory_mb(self, worker: int) -> float:
        """The memory of a worker at the last measurement, in MB."""
        return self._memory.get(worker, 0) / _MB

    def forget(self, worker: int) -> None:
        """Forget a worker that has been replaced or removed: another one may get its number."""
        self._memory.pop(worker, None)
        self._leaving -= {worker}

    def is_past_limit(self, worker: int, slots: Sequence[Slot], now: float) -> bool:
        """Whether a worker with these environments is past its limit of memory or age, or leaves its machine."""
        policy = self.policy
        if worker in self._leaving:
            return True
        if policy.max_memory_mb is not None and self.memory_mb(worker) > policy.max_memory_mb:
            return True
        return policy.max_age_s is not None and any(now - slot.built > policy.max_age_s for slot in slots)

    def is_leaving(self, worker: int) -> bool:
        """Whether a worker leaves its machine."""
        return worker in self._leaving

    def to_be_killed(self) -> list[int]:
        """Workers that have more memory than they may ever have."""
        limit = self.policy.kill_above_mb
        return [] if limit is None else [worker for worker in self._memory if self.memory_mb(worker) > limit]

    def wants_spares(self, slots: Sequence[Slot], now: float) -> bool:
        """Whether spares must be constructed now so that they are there when an environment has had its episodes."""
        limit = self.policy.max_episodes
        if limit is None:
            return False
        for slot in slots:
            episodes = self.episodes(slot)
            if episodes >= limit - 1:
                return True
            if episodes > 0 and (now - slot.built) / episodes * (limit - episodes) <= 2 * self.build_s + _LOOK_EVERY_S:
                return True
        return False

    def is_due(self, slot: Slot, *, after: int = 0) -> bool:
        """Whether an environment is replaced where its next episode begins, or after so many more episodes."""
        limit = self.policy.max_episodes
        return slot.due or (limit is not None and self.episodes(slot) + after >= limit)

    def note_failed(self, slots: Sequence[Slot], now: float) -> float:
        """Note that spares could not be made; returns in how many seconds that is tried again."""
        last = max(self._retry.get(slot.env_id, (0.0, _RETRY_AFTER_S / 2))[1] for slot in slots)
        seconds = min(2 * last, _RETRY_AT_LEAST_EVERY_S)
        self._retry.update({slot.env_id: (now + seconds, seconds) for slot in slots})
        return seconds

    def note_made(self, slots: Sequence[Slot], worker: int, seconds: float) -> None:
        """Note that a worker has made spares in so many seconds; warn, once, if it is past its limit already."""
        for slot in slots:
            self._retry.pop(slot.env_id, None)
        self.build_s = seconds
        limit = self.policy.max_memory_mb
        megabytes = 0.0 if limit is None else (self._backend.memory(worker) or 0) / _MB
        if limit is not None and megabytes > limit and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "max_memory_mb=%g of the RecyclePolicy is too low: worker %d has %.0f MB of memory as soon as its "
                "environments have been constructed, so that they are replaced again and again",
                limit, worker, megabytes,
            )  # fmt: skip

    def may_try(self, slot: Slot, now: float) -> bool:
        """Whether the spare of an environment may be made now: not too soon after a failure."""
        return now >= self._retry.get(slot.env_id, (0.0, 0.0))[0]
