"""Measures how fast environments are stepped: by a plain loop, and by `ParallelEnv` in several ways.

The plain loop shares no code with the package: it is what a user writes without it. Contenders take turns, so that a
machine that slows down or gets busy hits all of them alike. Each is compared with the loop's turn of the same round.
"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict
from gymnasium.vector.utils import concatenate, create_empty_array
from pettingzoo import AECEnv  # type: ignore[import-untyped]

from marl_parallel.action_masks import KEY, for_sample
from marl_parallel.adapters import MultiAgentEnv, Rules, adapt
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.adapters.tuple_env import TupleEnv
from marl_parallel.cli.target import CommandError, in_brief
from marl_parallel.core import stacking
from marl_parallel.core.backend import usable_cpus
from marl_parallel.core.construction import construct_one
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv

Constructor: TypeAlias = Callable[..., Any]
Actions: TypeAlias = dict[Any, Any]
StepAll: TypeAlias = Callable[[Any], object]
"""Steps every environment once with a batch of actions, and begins a new episode where one is over."""
Run: TypeAlias = Callable[[Callable[[], bool]], int]
"""Steps environments while its argument returns True, once at least; returns the number of environment steps."""

LOOP = "loop"
STEP, ASYNC, PETTINGZOO, GYMNASIUM = "step", "async", "pettingzoo", "gymnasium"
FACADES = (PETTINGZOO, GYMNASIUM)
BATCHES = 64
"""How many batches of actions are drawn beforehand and used in turn."""


class Contender(NamedTuple):
    """The plain loop, or a backend of `ParallelEnv` with its number of workers and the way it is stepped."""

    backend: str
    workers: int = 1
    way: str = STEP

    def __str__(self) -> str:
        alone = {LOOP: "plain loop", "serial": "serial"}
        name = alone.get(self.backend) or f"{self.backend} x {self.workers}"
        return name if self.way == STEP else f"{name}, {self.way}"


@dataclass(frozen=True)
class Measurement:
    """What one contender achieved on one environment.

    Attributes:
        environment: Its name.
        num_envs: How many environments were stepped.
        backend: `"loop"` for the plain loop, else a backend of `ParallelEnv`.
        workers: How many workers shared the environments.
        steps_per_second: Environment steps (one environment, all of its agents) per second: the median of the rounds.
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
        """The contender."""
        return Contender(self.backend, self.workers, self.way)

    @property
    def kind(self) -> str:
        """The backend, and the way unless that is `step`."""
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
    """How often `measure` calls `on_turn`: once for each contender made ready, once for each of its turns."""
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
        environment: The name in the result.
        constructor: Makes one environment.
        num_envs: How many environments every contender steps.
        against: The contenders beside the loop.
        seconds: How long each turn lasts.
        repeats: The number of rounds.
        on_turn: Called with the name of the contender before each of `turns(len(against), repeats)` turns.

    Returns:
        The plain loop's measurement, then one for each contender.

    Raises:
        CommandError: Actions cannot be drawn for this kind of environment before its observations are known.
    """
    everyone = [Contender(LOOP), *against]
    rounds: dict[Contender, list[float]] = {contender: [] for contender in everyone}
    with ExitStack() as stack:
        on_turn(str(everyone[0]))
        envs = stack.enter_context(made(constructor, num_envs))
        traits = traits_of(envs[0])
        batches = draw_actions(traits.action_spaces, num_envs)
        runs = {everyone[0]: repeatedly(plain_loop(envs, traits), batches, num_envs)}
        rate(runs[everyone[0]], seconds / 4)  # the first steps are slower than all others
        for contender in against:
            on_turn(str(contender))
            options = {"backend": contender.backend, "num_workers": contender.workers}
            run = stepping([constructor] * num_envs, batches, traits.rules, contender.way, **options)
            runs[contender] = stack.enter_context(run)
            rate(runs[contender], seconds / 4)
        for contender in everyone * repeats:
            on_turn(str(contender))
            rounds[contender].append(rate(runs[contender], seconds))
    loop = rounds[everyone[0]]
    measurements = []
    for contender, rates in rounds.items():
        median = statistics.median(rates)
        speedup = statistics.median(map(float.__truediv__, rates, loop))
        efficiency = speedup / min(contender.workers, usable_cpus())
        backend, workers, way = contender
        measurements.append(
            Measurement(
                environment, num_envs, backend, workers, median, 1e6 / median, spread(rates), speedup, efficiency,
                rates, way,
            )
        )  # fmt: skip
    return measurements


def spread(rates: Sequence[float]) -> float:
    """Half the distance between the best and the worst round, as a share of the median."""
    return (max(rates) - min(rates)) / 2 / statistics.median(rates)


def rate(run: Run, seconds: float) -> float:
    """Environment steps per second, over at least so many seconds and at least one batch."""
    begun = time.perf_counter()
    deadline = begun + seconds
    steps = run(lambda: time.perf_counter() < deadline)
    return steps / (time.perf_counter() - begun)


def repeatedly(step_all: StepAll, batches: Sequence[Any], num_envs: int) -> Run:
    """A run of a function that steps all environments once."""

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
    """Close an environment at the end of the block; an exception of its `close` is a warning."""
    try:
        yield env
    finally:
        try:
            getattr(env, "close", lambda: None)()
        except (Exception, SystemExit) as error:
            warnings.warn(f"close raises {in_brief(error)}", RuntimeWarning, stacklevel=3)


@contextmanager
def made(constructor: Constructor, num_envs: int) -> Iterator[list[Any]]:
    """Bare environments, with the seeds that `ParallelEnv` gives."""
    with ExitStack() as stack:
        envs = []
        for env_id in range(num_envs):
            env = construct_one(constructor, seed=42 + env_id, env_id=env_id)
            envs.append(stack.enter_context(closed_after(env)))
        yield envs


# -- what is stepped ---------------------------------------------------------------------------------------------------


class Traits(NamedTuple):
    """What has to be known of an environment in order to step it."""

    rules: Rules
    single_agent: bool
    action_spaces: Mapping[Any, Space[Any]]
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
    if acts is None or not isinstance(space, Dict) or KEY not in space.spaces:
        return False
    everything = stacking.each(np.ones_like, stacking.zeros(space.spaces[KEY], ()))
    return for_sample(acts, everything) is not None


def draw_actions(action_spaces: Mapping[Any, Space[Any]], num_envs: int) -> list[list[Actions]]:
    """Batches of random actions, the same each time; they are used again and again, so nobody may write into them."""
    own = copy.deepcopy(dict(action_spaces))
    for seed, space in enumerate(own.values()):
        space.seed(seed)
    return [[{agent: space.sample() for agent, space in own.items()} for _ in range(num_envs)] for _ in range(BATCHES)]


# -- the plain loop ----------------------------------------------------------------------------------------------------


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
        observations, _, terminateds, truncateds, _ = env.step(_of(actions, acting[i]))
        if type(terminateds) is bool:  # one flag for all agents
            terminateds, truncateds = {"__all__": terminateds}, {"__all__": truncateds}
        if terminateds.get("__all__") or truncateds.get("__all__"):
            observations, _ = env.reset()
            acting[i] = list(observations)
        else:
            acting[i] = [a for a in observations if not (terminateds.get(a) or truncateds.get(a))]


def _of(actions: Actions, acting: Sequence[Any]) -> Actions:
    return {agent: actions[agent] for agent in acting if agent in actions}


# -- ParallelEnv and its facades ---------------------------------------------------------------------------------------


@contextmanager
def stepping(
    constructors: Sequence[Constructor],
    batches: Sequence[Sequence[Actions]],
    rules: Rules,
    way: str = STEP,
    **arguments: Any,
) -> Iterator[Run]:
    """A `ParallelEnv` with auto-reset, after its first reset, stepped in one of the ways.

    Args:
        constructors: One for each environment.
        batches: The actions, from `draw_actions`.
        rules: Those of the environment.
        way: `STEP`, `ASYNC`, or one of `FACADES`.
        arguments: For `ParallelEnv`.

    Raises:
        CommandError: The facade does not go with this environment.
    """
    with opened(constructors, **arguments) as env:
        yield run_of(env, batches, rules, way)


@contextmanager
def opened(constructors: Sequence[Constructor], **arguments: Any) -> Iterator[ParallelEnv]:
    """A `ParallelEnv` that may have more workers than there are CPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        env = ParallelEnv(constructors, **arguments)
    with closed_after(env):
        yield env


def run_of(env: ParallelEnv, batches: Sequence[Sequence[Actions]], rules: Rules, way: str) -> Run:
    """The run of a way; resets the environments. Arguments and errors as of `stepping`."""
    if way in FACADES:
        return _through_facade(env, batches, way)
    env.reset()
    if way == ASYNC:
        return _by_halves(env, batches, rules)
    if rules is Rules.PETTINGZOO:  # actions of those who are not acting are dropped
        return repeatedly(env.step, batches, env.num_envs)
    return repeatedly(lambda batch: env.step([*map(_of, batch, env.acting)]), batches, env.num_envs)


def _through_facade(env: ParallelEnv, batches: Sequence[Sequence[Actions]], way: str) -> Run:
    facade: Any
    if way == PETTINGZOO:
        facade = PettingZooVecEnv(env)
        space_of = facade.single_action_space
        arrays: list[Any] = [
            {agent: _stacked(space_of(agent), [own[agent] for own in batch]) for agent in env.possible_agents}
            for batch in batches
        ]
    else:
        try:
            facade = GymnasiumVectorEnv(env)
        except ValueError as error:
            hint = "--facade pettingzoo takes agents of all kinds"
            raise CommandError(f"--facade gymnasium: {error}", hint) from error
        space, agents = facade.single_action_space, facade.agents
        arrays = [_stacked(space, [own[agent] for own in batch for agent in agents]) for batch in batches]
    facade.reset()
    return repeatedly(facade.step, arrays, env.num_envs)


def _by_halves(env: ParallelEnv, batches: Sequence[Sequence[Actions]], rules: Rules) -> Run:
    """By `send` and `recv`: environments that are ready are sent on, as soon as they are half of all."""
    half = max(1, env.num_envs // 2)

    def send(batch: Sequence[Actions], env_ids: Sequence[int]) -> int:
        if rules is Rules.PETTINGZOO:
            env.send([batch[env_id] for env_id in env_ids], env_ids)
        else:
            acting = env.acting
            env.send([_of(batch[env_id], acting[env_id]) for env_id in env_ids], env_ids)
        return len(env_ids)

    def run(going: Callable[[], bool]) -> int:
        endless = itertools.cycle(batches)
        count = send(next(endless), range(env.num_envs))
        while going():
            count += send(next(endless), env.recv(half).env_ids)
        env.recv()
        return count

    return run


def _stacked(space: Space[Any], actions: Sequence[Any]) -> Any:
    out: Any = create_empty_array(space, len(actions))
    return concatenate(space, actions, out)
