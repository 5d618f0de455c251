"""The package compared with `restart_reference` while simulators fail."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from mpe2 import simple_spread_v3
from simulators.crashing import Fate, Fates, crashing
from simulators.deterministic import Hunt, Skirmish
from simulators.every_space import draw

from helpers.comparison import spoil
from helpers.reference import ReferenceEnv
from helpers.restart_reference import RestartReference, assert_acting, assert_same_with_reports
from helpers.setups import Setup
from marl_parallel import ParallelEnv, ParallelEnvError, RestartPolicy

OFTEN = RestartPolicy(rate_limit=None)

SIMULATORS: dict[str, Callable[..., Any]] = {
    "skirmish": Skirmish,
    "hunt": Hunt,
    "spread": functools.partial(simple_spread_v3.parallel_env, max_cycles=7),
}


@functools.cache
def _agents(make: Callable[..., Any]) -> list[tuple[Any, Any]]:
    one = ReferenceEnv(make, 0, 0, AutoresetMode.SAME_STEP)
    return [(agent, one.space("action_space", agent)) for agent in one.env.possible_agents]


def actions_for(make: Callable[..., Any], rng: np.random.Generator) -> dict[Any, Any]:
    """An action for every possible agent, since the acting agents after a restart are not compared."""
    return {agent: draw(space, rng) for agent, space in _agents(make)}


class RestartComparison:
    """A `ParallelEnv` in lockstep with a `RestartReference`.

    Args:
        env: The `ParallelEnv`, which restarts environments.
        world: The reference.
        make: The constructor of the simulators.
        mode: The auto-reset mode of both.
        seed: The seed of the actions.
        views: Whether results are views, which must not be overwritten.
    """

    def __init__(
        self,
        env: ParallelEnv,
        world: RestartReference,
        make: Callable[..., Any],
        mode: AutoresetMode,
        *,
        seed: int = 7,
        views: bool = False,
    ) -> None:
        self.env, self.world, self.make, self.mode, self.views = env, world, make, mode, views
        self.rng = np.random.default_rng(seed)
        self.over: list[bool] = [False] * len(env)
        self.time = 0

    def reset(self, env_ids: list[int] | None = None) -> tuple[Any, ...]:
        expected = self.world.reset(env_ids)
        actual = self.env.reset(env_ids=env_ids)
        self._compare(actual, expected, f"reset {env_ids} at {self.time}")
        for i in range(len(self.env)) if env_ids is None else env_ids:
            self.over[i] = False
        self.settle()
        return expected

    def step(self, env_ids: list[int] | None = None) -> tuple[Any, ...]:
        ids = list(range(len(self.env))) if env_ids is None else env_ids
        self.time += 1
        actions = [actions_for(self.make, self.rng) for _ in ids]
        expected = self.world.step(actions, env_ids)
        actual = self.env.step(actions, env_ids)
        self._compare(actual, expected, f"step {self.time} of {env_ids}")
        for i, terminated, truncated in zip(ids, expected[2], expected[3], strict=True):
            self.over[i] = bool(terminated["__all__"] or truncated["__all__"])
        self.settle()
        return expected

    def settle(self) -> None:
        """Restart idle environments before the next step; otherwise the order of the two would be random."""
        for _ in range(100):
            with contextlib.suppress(ParallelEnvError):  # a worker may die during the restart
                assert self.env.seed() == self.world.seeds
                return
        raise AssertionError("always something else")

    def go(self, steps: int, parts: bool = True) -> None:
        """Reset all, then step; sometimes only some, and reset finished environments in DISABLED mode."""
        self.reset()
        for _ in range(steps):
            some = [2, 0] if parts and self.time % 5 == 3 else None
            self.step(some)
            over = [i for i, one in enumerate(self.over) if one]
            if self.mode is AutoresetMode.DISABLED and over and self.time % 3 == 2:
                self.reset(over[::-1])

    def check_counts(self) -> None:
        """Check the restart counts and the seeds."""
        stats = self.env.stats()
        assert stats.restarts == sum(self.world.restarts)
        assert [worker.restarts for worker in stats.workers] == self.world.restarts_of_workers()
        assert self.env.seed() == self.world.seeds

    def _compare(self, actual: tuple[Any, ...], expected: tuple[Any, ...], path: str) -> None:
        assert_same_with_reports(actual, expected, path)
        assert_acting(self.env, self.world, path)
        if not self.views:
            spoil(actual)  # not used any more


def many_fates(first: str, second: str) -> Fates:
    """Lives that end in every method with two kinds of faults; only environment 0 has none."""
    return {
        (1, 0): Fate(first, "step", 4),
        (1, 1): Fate(second, "step", 2),
        (1, 2): Fate(first, "reset", 1),
        (1, 3): Fate(second, "constructor"),
        (1, 4): Fate(second, "reset"),
        (2, 0): Fate(second, "reset"),
        (2, 1): Fate(first, "step"),
        (2, 2): Fate(second, "step", 9),
        (3, 0): Fate(second, "step", 4),
        (3, 1): Fate(first, "constructor"),
    }


def play(
    build, setup: Setup, name: str, mode: AutoresetMode, fates: Fates, steps: int = 40, **more
) -> RestartComparison:
    """Run both to the end; every scheduled restart must have happened."""
    make = SIMULATORS[name]
    env = build([crashing(make, fates)] * 4, setup, mode, on_error="restart", restart_policy=OFTEN, **more)
    world = RestartReference(make, 4, setup.num_workers, mode, fates)
    going = RestartComparison(env, world, make, mode, views=not more.get("copy", True))
    going.go(steps)
    going.check_counts()
    env.close()
    return going
