"""The ways in which copies are stepped, each as a `Run`: by `step`, by `send` and `recv`, through a facade.

How long a run is and what comes of it is decided in `measure.py`; actions are drawn beforehand, and brought beforehand
into the form that a way wants.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from gymnasium import Space
from gymnasium.vector.utils import concatenate, create_empty_array

from marl_parallel.adapters import Rules
from marl_parallel.cli.failures import CommandError
from marl_parallel.core.reports import first_line
from marl_parallel.core.transition import ALL
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv

Constructor: TypeAlias = Callable[..., Any]
Actions: TypeAlias = dict[Any, Any]
Pool: TypeAlias = Sequence[Sequence[Actions]]
"""Batches of actions, a dict for each copy; they are used in turn, again and again, so nobody may write into them."""

Run: TypeAlias = Callable[[Callable[[], bool]], int]
"""Steps copies for as long as it is told to, once at least; returns the number of environment steps."""

STEP, ASYNC, PETTINGZOO, GYMNASIUM = "step", "async", "pettingzoo", "gymnasium"
FACADES = (PETTINGZOO, GYMNASIUM)


def repeatedly(step_all: Callable[[Any], object], batches: Sequence[Any], num_envs: int) -> Run:
    """A run of a function that steps all copies once, each with its own actions."""

    def run(going: Callable[[], bool]) -> int:
        endless = itertools.cycle(batches)
        step_all(next(endless))
        count = 1
        while going():
            step_all(next(endless))
            count += 1
        return count * num_envs

    return run


@contextmanager
def closed_after(env: Any) -> Iterator[Any]:
    """Something that may have a `close`, closed in the end; that it fails to is a warning: it takes nothing back."""
    try:
        yield env
    finally:
        try:
            getattr(env, "close", lambda: None)()
        except (Exception, SystemExit) as error:
            warnings.warn(f"close raises {type(error).__name__}: {first_line(error)}", RuntimeWarning, stacklevel=3)


@contextmanager
def stepping(
    constructors: Sequence[Constructor], pool: Pool, rules: Rules, way: str = STEP, **arguments: Any
) -> Iterator[Run]:
    """A `ParallelEnv` with auto-reset, after its first reset, stepped in one of the ways.

    Args:
        constructors: One for each copy.
        pool: The actions.
        rules: Those of the environment.
        way: `STEP`, `ASYNC`, or one of `FACADES`.
        arguments: For `ParallelEnv`.

    Raises:
        CommandError: The facade does not go with this environment.
    """
    with warnings.catch_warnings():
        # More workers than CPUs, where they are asked for, are what is to be measured.
        warnings.simplefilter("ignore", ResourceWarning)
        env = ParallelEnv(constructors, **arguments)
    with closed_after(env):
        yield run_of(env, pool, rules, way)


def run_of(env: ParallelEnv, pool: Pool, rules: Rules, way: str = STEP) -> Run:
    """The run of a way; resets the environment. Arguments and errors as of `stepping`."""
    if way == PETTINGZOO:
        by_agent = PettingZooVecEnv(env)
        by_agent.reset()
        batches = [
            {a: _stacked(by_agent.single_action_space(a), [own[a] for own in batch]) for a in env.possible_agents}
            for batch in pool
        ]
        return repeatedly(by_agent.step, batches, env.num_envs)
    if way == GYMNASIUM:
        rows = _rows(env)
        rows.reset()
        stacked = [
            _stacked(rows.single_action_space, [own[agent] for own in batch for agent in rows.agents]) for batch in pool
        ]
        return repeatedly(rows.step, stacked, env.num_envs)
    env.reset()
    if way == ASYNC:
        return _by_halves(env, pool, rules)
    if rules is Rules.PETTINGZOO:  # actions of those who are not acting are dropped
        return repeatedly(env.step, pool, env.num_envs)
    return repeatedly(lambda batch: env.step([*map(_of, batch, env.acting)]), pool, env.num_envs)


def _rows(env: ParallelEnv) -> GymnasiumVectorEnv:
    try:
        return GymnasiumVectorEnv(env)
    except ValueError as error:
        raise CommandError(f"--facade gymnasium: {error}", "--facade pettingzoo takes agents of all kinds") from error


def _by_halves(env: ParallelEnv, pool: Pool, rules: Rules) -> Run:
    """By `send` and `recv`: whoever is ready is sent on, as soon as that is half of the copies."""
    half = max(1, env.num_envs // 2)
    acting = list(env.acting)

    def actions(batch: Sequence[Actions], env_ids: Sequence[int]) -> list[Actions]:
        return [
            batch[env_id] if rules is Rules.PETTINGZOO else _of(batch[env_id], acting[env_id]) for env_id in env_ids
        ]

    def receive(min_envs: int | None) -> tuple[int, ...]:
        env_ids, observations, _, terminateds, truncateds, _ = env.recv(min_envs)
        if rules is Rules.DICT:
            for env_id, *told in zip(env_ids, observations, terminateds, truncateds):
                acting[env_id] = _acting(*told)
        return env_ids

    def run(going: Callable[[], bool]) -> int:
        batches = itertools.cycle(pool)
        env.send(actions(next(batches), range(env.num_envs)))
        count = env.num_envs
        while going():
            env_ids = receive(half)
            env.send(actions(next(batches), env_ids), env_ids)
            count += len(env_ids)
        receive(None)
        return count

    return run


def _acting(observations: Actions, terminateds: Actions, truncateds: Actions) -> list[Any]:
    if terminateds[ALL] or truncateds[ALL]:  # a new episode has begun
        return list(observations)
    return [agent for agent in observations if not (terminateds.get(agent) or truncateds.get(agent))]


def _of(actions: Actions, acting: Sequence[Any]) -> Actions:
    return {agent: actions[agent] for agent in acting if agent in actions}


def _stacked(space: Space[Any], actions: Sequence[Any]) -> Any:
    out: Any = create_empty_array(space, len(actions))
    return concatenate(space, actions, out)
