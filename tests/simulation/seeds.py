"""Which seed each constructor and each reset must get. It shares no code with the package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from marl_parallel.core.messages import Message, Request
from simulation.requests import Purpose, purpose_of

if TYPE_CHECKING:
    from simulation.simulator import Life

_EARLY = (Purpose.PREPARE, Message.STATE, Message.RENDER)  # their resets begin no episode yet


def derived(*numbers: int) -> int:
    """The seed that follows from others: of restart n of environment i with the base seed b, from (b, i, n)."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


class Seeds:
    """The seeds of all environments.

    Args:
        num_envs: How many there are.
        base: The seed of the first one.
        derives: Whether resets without a seed get a derived one.

    Attributes:
        base: The seed from which those of environments that are constructed again follow.
        wrong: What has been noticed.
    """

    def __init__(self, num_envs: int, base: int, *, derives: bool) -> None:
        self.base, self._first, self._derives = base, base, derives
        self.wrong: list[str] = []
        # By environment: from which number its present seed may be derived, and how many numbers may have been used up
        # since, by environments that could not be constructed beside it.
        self._numbers = [{0} for _ in range(num_envs)]
        self._used_up = [0] * num_envs
        self._reserved: dict[int, set[int]] = {}  # likewise, the numbers of a restart that the caller has requested
        # By environment and request: the seeds that a rebuild may use, with their numbers; and the request, which lives
        # as long.
        self._rebuilds: dict[tuple[int, int], tuple[dict[int, int], Request]] = {}
        self.latest: dict[int, set[int]] = {}  # by environment, those of its latest rebuild

    def saved(self, env_id: int) -> tuple[set[int], int]:
        """The numbers of an environment, for `load`."""
        return {*self._numbers[env_id]}, self._used_up[env_id]

    def load(self, env_id: int, saved: tuple[set[int], int]) -> None:
        """Note that a saved environment has replaced the present one."""
        self._numbers[env_id], self._used_up[env_id] = {*saved[0]}, saved[1]

    def _next(self, env_id: int) -> dict[int, int]:
        """The seeds that the next environment may use, with their numbers."""
        most = self._used_up[env_id]
        numbers = {number + 1 + more for number in self._numbers[env_id] for more in range(most + 1)}
        numbers |= self._reserved.get(env_id, set())
        return {derived(self.base, env_id, number): number for number in numbers}

    def note_used_up(self, env_ids: Iterable[int]) -> None:
        """Note that numbers may have been used up."""
        for env_id in env_ids:
            self._used_up[env_id] += 1

    def reserve(self, env_ids: Iterable[int]) -> None:
        """Note that the caller restarts environments while others are rebuilt: more faults may come before that."""
        for env_id in env_ids:
            self._reserved[env_id] = {number + 1 for number in self._numbers[env_id]}
            self._used_up[env_id] += 1

    def free(self) -> None:
        """Note that the restart has ended."""
        self._reserved.clear()

    def note_rebuild(self, env_id: int, request: Request) -> None:
        """Note that an environment is to be constructed again, in place of the present one."""
        seeds = self._next(env_id)
        self._rebuilds[env_id, id(request)] = seeds, request
        self._numbers[env_id], self._used_up[env_id] = {*seeds.values()}, 0
        self.latest[env_id] = {*seeds}

    def was_requested(self, env_id: int, seed: int) -> bool:
        """Whether an environment was to be constructed again with a seed."""
        return any(seed in seeds for (of_env, _), (seeds, _) in self._rebuilds.items() if of_env == env_id)

    def check_constructed(self, life: Life, request: Request) -> None:
        """Check the keywords of a constructor; those of an environment beside the present one are checked later."""
        if request.message is Message.ACCESS:
            self._check(life, {self._first + life.env_id: 0})
        elif purpose_of(request) is Purpose.REBUILD:
            self._check(life, self._rebuilds[life.env_id, id(request)][0])

    def check_moved(self, life: Life) -> None:
        """Check an environment that takes the place of the present one."""
        seeds = self._next(life.env_id)
        self._check(life, seeds)
        self._numbers[life.env_id], self._used_up[life.env_id] = {seeds.get(life.seed, 0)}, 0

    def _check(self, life: Life, seeds: dict[int, int]) -> None:
        if seeds.get(life.seed) != life.restarts:
            got = f"seed={life.seed}, restarts={life.restarts}"
            self.wrong.append(f"environment {life.env_id} is constructed with {got} in place of {seeds}")

    def check_reset(self, life: Life, request: Request, seed: int | None, passed: int | None) -> None:
        """Check the seed of a reset; `passed` is what the caller has passed to it, if it is the caller's."""
        life.last_episode, life.actions = (life.actions, life.seeding), []
        expected = passed if request.message is Message.RESET else None
        if expected is not None:
            life.current_seed = expected
        elif not life.begun:
            expected = life.seed
        life.begun = purpose_of(request) not in _EARLY
        if expected is not None:
            life.seeding = expected, 0
        elif self._derives:
            base, number = life.seeding
            life.seeding, expected = (base, number + 1), derived(base, number + 1)
        if seed != expected:
            self.wrong.append(f"environment {life.env_id} is reset with seed {seed} in place of {expected}")
