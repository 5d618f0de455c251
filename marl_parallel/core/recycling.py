"""Which environments are replaced by spares, as a `RecyclePolicy` and `Backend.leaving` say; `pool.py` does it.

An environment past a limit is replaced where an episode begins. Its spare has been constructed before, with the spares
of its neighbours, in a new worker, and its first episode has begun there::

    Recycler.wants_spare -> Backend.add, PREPARE         the spares of a worker
    Recycler.is_due      -> RETIRE                       with SAME_STEP: the worker does not begin the next episode
    end of the episode   -> ADOPT, or the caller's RESET, in the new worker
    all have moved       -> CLOSE, Backend.remove        the old worker ends

A spare is not constructed in a worker that steps others, which would wait. So an environment that is due again while
its neighbours have not moved gets a spare in one more worker. There is one exception: if some environments have moved
to a worker, and the seed of a spare that waits there changes, the spare is constructed again there.

A backend without further workers (`Backend.has_spares`) constructs the new environment in place; its caller waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from marl_parallel.core.backend import Backend
from marl_parallel.core.reports import logger
from marl_parallel.core.slots import Slot
from marl_parallel.types import RecyclePolicy

_LOOK_EVERY_S = 1.0
_LOOK_COSTS_AT_MOST = 0.01
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
        self._memory: dict[int, int] = {}  # by worker, in bytes, at the last look
        self._measures = not (policy.max_memory_mb is None and policy.kill_above_mb is None)
        self._has_warned = False
        self._leaving: frozenset[int] = frozenset()
        self._retry: dict[int, tuple[float, float]] = {}  # by position of a worker: when, and how long after a failure

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

    def measure(self, workers: Sequence[int], now: float) -> None:
        """Ask which workers leave their machines, and measure the memory of all if that is limited; once a second."""
        if now < self.next_look:
            return
        self.next_look = now + _LOOK_EVERY_S
        self._leaving = frozenset(self._backend.leaving())
        if self._measures:
            found = {worker: self._backend.memory(worker) for worker in workers}
            self._memory = {worker: nbytes for worker, nbytes in found.items() if nbytes is not None}
            self.next_look += (time.monotonic() - now) / _LOOK_COSTS_AT_MOST

    def memory_mb(self, worker: int) -> float:
        """The memory of a worker at the last measurement, in MB."""
        return self._memory.get(worker, 0) / _MB

    def forget(self, worker: int) -> None:
        """Forget the memory of a worker that has been replaced."""
        self._memory.pop(worker, None)

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

    def is_to_be_killed(self, worker: int) -> bool:
        """Whether a worker has more memory than it may ever have."""
        return self.policy.kill_above_mb is not None and self.memory_mb(worker) > self.policy.kill_above_mb

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

    def note_failed(self, position: int, now: float) -> float:
        """Note that spares could not be made; returns in how many seconds that is tried again."""
        seconds = min(2 * self._retry.get(position, (0.0, _RETRY_AFTER_S / 2))[1], _RETRY_AT_LEAST_EVERY_S)
        self._retry[position] = now + seconds, seconds
        return seconds

    def note_made(self, position: int, worker: int, seconds: float) -> None:
        """Note that a worker has made spares in so many seconds; warn, once, if it is past its limit already."""
        self._retry.pop(position, None)
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

    def may_try(self, position: int, now: float) -> bool:
        """Whether spares may be made now: not too soon after a failure."""
        return now >= self._retry.get(position, (0.0, 0.0))[0]
