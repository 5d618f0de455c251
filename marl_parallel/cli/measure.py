"""Measuring: a plain loop over bare environments against `ParallelEnv`, in turns, round after round.

Here live the loop, the contenders and what comes out, a list of `Measurement`. How `ParallelEnv` is stepped is in
`ways.py`, how results are shown or saved in `report.py`. The plain loops share no code with the package: they are what
a user writes without it.

Contenders take turns, so that a machine that slows down or gets busy hits all of them alike, and each is compared
with the loop's turn of the same round.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv  # type: ignore[import-untyped]

from marl_parallel.action_masks import KEY, for_sample
from marl_parallel.adapters import MultiAgentEnv, Rules, adapt
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.adapters.tuple_env import TupleEnv
from marl_parallel.cli.failures import CommandError
from marl_parallel.cli.ways import STEP, Actions, Constructor, Run, closed_after, repeatedly, stepping
from marl_parallel.core import stacking
from marl_parallel.core.sharing import usable_cpus
from marl_parallel.core.signatures import construct_one

StepAll = Callable[[Sequence[Actions]], object]
"""Steps every environment once, each with its own actions, and begins a new episode where one is over."""

LOOP = "loop"
BATCHES = 64
"""So many batches of actions are drawn beforehand and used in turn."""


class Contender(NamedTuple):
    """A backend of `ParallelEnv` with a number of workers, and how it is stepped; or the plain loop."""

    backend: str
    workers: int = 1
    way: str = STEP

    def __str__(self) -> str:
        alone = {LOOP: "plain loop", "serial": "serial"}
        who = alone.get(self.backend) or f"{self.backend} x {self.workers}"
        return who if self.way == STEP else f"{who}, {self.way}"


@dataclass(frozen=True)
class Measurement:
    """What one contender achieved on one environment.

    Attributes:
        environment: Its name.
        num_envs: How many copies of it were stepped.
        backend: `"loop"` for the plain loop, else a backend of `ParallelEnv`.
        workers: How many workers shared the copies.
        steps_per_second: Environment steps (one copy, all of its agents) per second: the median of the rounds.
        microseconds_per_step: Wall time per environment step, from that median.
        spread: Half the distance between the best and the worst round, as a share of the median.
        speedup: Over the plain loop: the median of the ratios within each round.
        efficiency: The speedup as a share of the ideal, which is min(workers, CPUs).
        rounds: Environment steps per second in each round.
        way: How it was stepped: `"step"`, `"async"`, or the name of a facade.
    """

    environment: str
    num_envs: int
    backend: str
    workers: int
    steps_per_second: float
    microseconds_per_step: float
    spread: float
    speedup: float
    efficiency: float
    rounds: list[float]
    way: str = STEP

    @property
    def contender(self) -> Contender:
        """Who it was."""
        return Contender(self.backend, self.workers, self.way)

    @property
    def kind(self) -> str:
        """The backend, and the way where it is not the usual one."""
        return self.backend if self.way == STEP else f"{self.backend}, {self.way}"


def contenders(
    backends: Sequence[str], workers: Sequence[int], num_envs: int, ways: Sequence[str] = (STEP,)
) -> list[Contender]:
    """Every backend with every number of workers that makes a difference to it, in every way.

    Example:
        >>> [*map(str, contenders(["serial", "process"], [1, 2, 16], num_envs=8, ways=["step", "async"]))]
        ['serial', 'serial, async', 'process x 1', 'process x 1, async', 'process x 2', 'process x 2, async', \
'process x 8', 'process x 8, async']
    """
    counts = sorted({min(count, num_envs) for count in workers})
    return [
        Contender(backend, number, way)
        for backend in dict.fromkeys(backends)
        for number in ([1] if backend == "serial" else counts)
        for way in ways
    ]


def turns(num_contenders: int, repeats: int) -> int:
    """How often `measure` reports progress: once for each contender made ready, once for each of its turns."""
    return (1 + num_contenders) * (1 + repeats)


def measure(
    environment: str,
    constructor: Constructor,
    num_envs: int,
    against: Sequence[Contender],
    *,
    seconds: float = 1.0,
    repeats: int = 5,
    on_turn: Callable[[str], None] = lambda label: None,
) -> list[Measurement]:
    """Measure the plain loop and each contender, in turns.

    Args:
        environment: The name to report it under.
        constructor: Makes one copy.
        num_envs: How many copies every contender steps.
        against: Who is compared with the loop.
        seconds: How long each turn lasts.
        repeats: How many rounds of turns there are.
        on_turn: Told who is up, before each of `turns(len(against), repeats)` turns.

    Returns:
        The plain loop's measurement, then one for each contender.

    Raises:
        CommandError: The environment is of a kind that random actions cannot step.
    """
    everyone = [Contender(LOOP), *against]
    rounds: dict[Contender, list[float]] = {contender: [] for contender in everyone}
    with ExitStack() as stack:
        on_turn(str(everyone[0]))
        envs = []
        for env_id in range(num_envs):
            envs.append(construct_one(constructor, seed=42 + env_id, env_id=env_id))
            stack.enter_context(closed_after(envs[-1]))
        traits = traits_of(envs[0])
        pool = draw_actions(traits.action_spaces, num_envs)
        runs = {everyone[0]: repeatedly(plain_loop(envs, traits), pool, num_envs)}
        rate(runs[everyone[0]], seconds / 4)
        for contender in against:
            on_turn(str(contender))
            backend, workers, way = contender
            made = stepping([constructor] * num_envs, pool, traits.rules, way, backend=backend, num_workers=workers)
            runs[contender] = stack.enter_context(made)
            rate(runs[contender], seconds / 4)  # what is slow the first time only is not measured
        for contender in everyone * repeats:
            on_turn(str(contender))
            rounds[contender].append(rate(runs[contender], seconds))
    loop = rounds[everyone[0]]
    return [_measurement(environment, num_envs, who, rates, loop) for who, rates in rounds.items()]


def _measurement(
    environment: str, num_envs: int, contender: Contender, rates: list[float], loop: Sequence[float]
) -> Measurement:
    median = statistics.median(rates)
    speedup = statistics.median(rate / reference for rate, reference in zip(rates, loop, strict=True))
    return Measurement(
        environment=environment,
        num_envs=num_envs,
        backend=contender.backend,
        workers=contender.workers,
        steps_per_second=median,
        microseconds_per_step=1e6 / median,
        spread=spread(rates),
        speedup=speedup,
        efficiency=speedup / min(contender.workers, usable_cpus()),
        rounds=rates,
        way=contender.way,
    )


def spread(rates: Sequence[float]) -> float:
    """Half the distance between the best and the worst round, as a share of the median."""
    return (max(rates) - min(rates)) / 2 / statistics.median(rates)


def rate(run: Run, seconds: float) -> float:
    """Environment steps per second, over at least so many seconds and at least one batch."""
    begun = time.perf_counter()
    deadline = begun + seconds
    steps = run(lambda: time.perf_counter() < deadline)
    return steps / (time.perf_counter() - begun)


# -- what is stepped ---------------------------------------------------------------------------------------------------


class Traits(NamedTuple):
    """What has to be known of an environment in order to step it."""

    rules: Rules
    single_agent: bool
    action_spaces: Mapping[Any, spaces.Space[Any]]
    seeded: bool
    sequence: Callable[[Iterable[Any]], Any] | None = None  # makes the actions of a tuple environment


def traits_of(env: Any) -> Traits:
    """What has to be known of an environment in order to step it.

    Raises:
        CommandError: It cannot be stepped with actions that were drawn beforehand.
    """
    if isinstance(env, AECEnv):
        raise CommandError(
            f"{env} is an AECEnv, whose agents take turns; measured are those whose agents act at once",
            "does its module have a `parallel_env`? name that: module:parallel_env",
        )
    if isinstance(env, MultiAgentEnv):
        raise CommandError("the plain loop cannot step a MultiAgentEnv", "name the simulator it adapts")
    adapted = adapt(env)
    masked = [agent for agent in adapted.observation_spaces if _is_masked(adapted, agent)]
    if masked:
        raise CommandError(
            f"agent {masked[0]!r} has an action mask, and actions are drawn before observations are known",
            "measure an environment whose actions are all legal at any time",
        )
    if not adapted.possible_agents or set(adapted.possible_agents) - set(adapted.action_spaces):
        raise CommandError(
            "some agents are not known, or declare no action space, so no actions can be drawn for them beforehand",
            "let the environment have `possible_agents` and an action space for each of them",
        )
    return Traits(
        adapted.rules,
        isinstance(adapted, GymnasiumEnv),
        adapted.action_spaces,
        "seed" in adapted.reset_keywords,
        adapted.sequence if isinstance(adapted, TupleEnv) else None,
    )


def _is_masked(env: MultiAgentEnv, agent: Any) -> bool:
    """Whether an agent observes a mask in the form of its action space; others say nothing about legal actions."""
    space, acts = env.observation_spaces[agent], env.action_spaces.get(agent)
    if acts is None or not isinstance(space, spaces.Dict) or KEY not in space.spaces:
        return False
    everything = stacking.each(np.ones_like, stacking.zeros(space.spaces[KEY], ()))
    return for_sample(acts, everything) is not None


def draw_actions(action_spaces: Mapping[Any, spaces.Space[Any]], num_envs: int) -> list[list[Actions]]:
    """Batches of random actions, the same each time; they are used again and again, so nobody may write into them."""
    own = copy.deepcopy(dict(action_spaces))
    for seed, space in enumerate(own.values()):
        space.seed(seed)
    return [[{agent: space.sample() for agent, space in own.items()} for _ in range(num_envs)] for _ in range(BATCHES)]


# -- the loops ---------------------------------------------------------------------------------------------------------


def plain_loop(envs: Sequence[Any], traits: Traits) -> StepAll:
    """The loop a user would write for this kind of environment, after its first reset."""
    first = [env.reset(**({"seed": 42 + i} if traits.seeded else {})) for i, env in enumerate(envs)]
    if traits.single_agent:
        return functools.partial(_step_gymnasium, envs)
    if traits.sequence is not None:
        return functools.partial(_step_tuples, envs, traits.sequence)
    if traits.rules is Rules.PETTINGZOO:
        return functools.partial(_step_pettingzoo, envs)
    return functools.partial(_step_dicts, envs, [list(observations) for observations, _ in first])


def _step_pettingzoo(envs: Sequence[Any], batch: Sequence[Actions]) -> None:
    for env, actions in zip(envs, batch, strict=True):
        if len(env.agents) != len(actions):
            actions = {agent: actions[agent] for agent in env.agents}
        env.step(actions)
        if not env.agents:
            env.reset()


def _step_gymnasium(envs: Sequence[Any], batch: Sequence[Actions]) -> None:
    for env, actions in zip(envs, batch, strict=True):
        _, _, terminated, truncated, _ = env.step(actions["agent_0"])
        if terminated or truncated:
            env.reset()


def _step_tuples(envs: Sequence[Any], sequence: Callable[[Iterable[Any]], Any], batch: Sequence[Actions]) -> None:
    for env, actions in zip(envs, batch, strict=True):
        _, _, terminated, truncated, _ = env.step(sequence(actions.values()))
        if np.all(np.logical_or(terminated, truncated)):
            env.reset()


def _step_dicts(envs: Sequence[Any], acting: list[list[Any]], batch: Sequence[Actions]) -> None:
    for i, (env, actions) in enumerate(zip(envs, batch, strict=True)):
        given = {agent: actions[agent] for agent in acting[i] if agent in actions}
        observations, _, terminateds, truncateds, _ = env.step(given)
        if type(terminateds) is bool:  # one flag for all agents
            terminateds, truncateds = {"__all__": terminateds}, {"__all__": truncateds}
        if terminateds.get("__all__") or truncateds.get("__all__"):
            observations, _ = env.reset()
            acting[i] = list(observations)
        else:
            acting[i] = [a for a in observations if not (terminateds.get(a) or truncateds.get(a))]
