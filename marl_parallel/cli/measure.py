"""Measure how fast environments are stepped: by a plain loop, and by `ParallelEnv` in several ways.

The plain loop is what a user writes without this package. The two share only the code that draws actions by action
masks, and adapters where any loop has to convert: with masks, all contenders draw actions as they go; otherwise actions
are drawn beforehand. `measure` (for `bench`) and `compare` (for `tune`) measure contenders in short turns, round after
round, so that a machine that slows down or gets busy affects all contenders equally. `search` finds the best numbers of
workers and environments by successive halving.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import psutil
from gymnasium import Space
from gymnasium.vector.utils import concatenate, create_empty_array
from pettingzoo.utils import conversions  # type: ignore[import-untyped]

from marl_parallel.action_masks import KEY, ActionSampler, mask_of
from marl_parallel.adapters import MultiAgentEnv, Rules, adapt
from marl_parallel.adapters.dict_env import DictEnv, RLlibEnv
from marl_parallel.adapters.gymnasium_env import AGENT, GymnasiumEnv
from marl_parallel.adapters.pettingzoo_env import ParallelizableAECEnv, PettingZooEnv, TurnBasedAECEnv
from marl_parallel.adapters.tuple_env import TupleEnv
from marl_parallel.cli.target import CommandError, in_brief
from marl_parallel.core.backend import usable_cpus
from marl_parallel.core.transition import ALL
from marl_parallel.core.worker.constructors import construct_one
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector import GymnasiumVectorEnv, PettingZooVecEnv

Constructor: TypeAlias = Callable[..., Any]
Actions: TypeAlias = dict[Any, Any]
Batches: TypeAlias = Sequence[Sequence[Actions]]
# Steps every environment once with a batch of actions, and resets those whose episode is over.
StepAll: TypeAlias = Callable[[Any], object]
# The observations and infos of the agents that act next.
Seen: TypeAlias = tuple[Mapping[Any, Any], Mapping[Any, Any]]
# The keywords of a reset.
Seed: TypeAlias = Mapping[str, int]
# Steps one environment, and resets it if its episode is over; at first, the actions are None, and it only resets it.
Follow: TypeAlias = Callable[..., Seen]
# Steps environments while its argument returns True, at least once; returns the number of environment steps.
Run: TypeAlias = Callable[[Callable[[], bool]], int]

LOOP = "loop"
STEP, ASYNC, PETTINGZOO, GYMNASIUM = "step", "async", "pettingzoo", "gymnasium"
FACADES = (PETTINGZOO, GYMNASIUM)
NO_SEED: Seed = MappingProxyType({})
BATCHES = 64  # of actions, drawn beforehand and used in turn


# -- environments, and actions that are drawn beforehand ---------------------------------------------------------------


def _close(env: Any) -> None:
    """Close an environment; an exception of its `close` becomes a warning."""
    try:
        getattr(env, "close", lambda: None)()
    except (Exception, SystemExit) as error:
        warnings.warn(f"close raises {in_brief(error)}", RuntimeWarning, stacklevel=2)


@contextmanager
def simulators(constructor: Constructor, num_envs: int) -> Iterator[list[Any]]:
    """Construct environments without a `ParallelEnv`, with the seeds that it would use."""
    with ExitStack() as stack:
        envs = []
        for env_id in range(num_envs):
            envs.append(construct_one(constructor, seed=42 + env_id, env_id=env_id))
            stack.callback(_close, envs[-1])
        yield envs


def adapted_for_loop(env: Any) -> MultiAgentEnv:
    """Adapt an environment; a `CommandError` if the plain loop cannot step it, or no actions can be drawn."""
    if isinstance(env, MultiAgentEnv):
        raise CommandError("the plain loop cannot step a MultiAgentEnv", "name the simulator it adapts")
    adapted = adapt(env)
    if not adapted.possible_agents or set(adapted.possible_agents) - set(adapted.action_spaces):
        raise CommandError(
            "some agents are not known, or declare no action space, so no actions can be drawn for them",
            "let the environment have `possible_agents` and an action space for each of them",
        )
    return adapted


def draw_actions(action_spaces: Mapping[Any, Space[Any]], num_envs: int) -> list[list[Actions]]:
    """Batches of random actions, the same in each call; they are reused, so no one may write into them."""
    spaces = copy.deepcopy(dict(action_spaces))
    for seed, space in enumerate(spaces.values()):
        space.seed(seed)
    return [
        [{agent: space.sample() for agent, space in spaces.items()} for _ in range(num_envs)] for _ in range(BATCHES)
    ]


# -- the plain loop ----------------------------------------------------------------------------------------------------


def plain_loop(envs: Sequence[Any], adapted: MultiAgentEnv) -> StepAll:
    """Reset environments; returns the loop body that a user would write for the kind of `adapted`.

    Adapters are only stepped where any loop has to convert actions and results. If there are action masks after the
    reset, actions are drawn by them, as `ParallelEnv.sample_actions` does.
    """
    if isinstance(adapted, TupleEnv):
        follow: Follow = functools.partial(_follow_tuples, adapted.possible_agents, adapted.sequence)
    else:
        follow = _FOLLOW.get(type(adapted), _follow_adapter)
    if isinstance(adapted, ParallelizableAECEnv):
        envs = [conversions.aec_to_parallel(env) for env in envs]
    elif follow is _follow_adapter:
        envs = [*map(adapt, envs)]
    seeded = "seed" in adapted.reset_keywords
    latest = [follow(env, None, {"seed": 42 + i} if seeded else NO_SEED) for i, env in enumerate(envs)]
    masked = any(mask is not None for seen, infos in latest for mask in _masks(seen, infos).values())
    samplers = [ActionSampler(adapted.action_spaces, (42 + i, i)) for i in range(len(envs) * masked)]

    def step_all(batch: Sequence[Actions]) -> None:
        for i, (env, actions) in enumerate(zip(envs, batch, strict=True)):
            observations, infos = latest[i]
            if masked:
                actions = samplers[i].sample(observations, _masks(observations, infos))
            elif observations.keys() != actions.keys():
                actions = _of(actions, observations)
            latest[i] = follow(env, actions)

    return step_all


def _masks(observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> dict[Any, Any]:
    return {agent: mask_of(seen, infos.get(agent)) for agent, seen in observations.items()}


def _follow_adapter(env: MultiAgentEnv, actions: Actions | None, seed: Seed = NO_SEED) -> Seen:
    if actions is not None:
        observations, _, terminateds, truncateds, infos = env.step(actions)
    if actions is None or terminateds.get(ALL) or truncateds.get(ALL):
        observations, infos = env.reset(**seed)
    if env.mask_spaces:
        infos = {agent: {KEY: mask} for agent, mask in env.masks().items()}
    return observations, infos


def _follow_dicts(env: Any, actions: Actions | None, seed: Seed = NO_SEED) -> Seen:
    if actions is not None:
        observations, _, terminateds, truncateds, infos = env.step(actions)
        if type(terminateds) is bool:  # one flag for all agents
            terminateds, truncateds = {ALL: terminateds}, {ALL: truncateds}
        if not (terminateds.get(ALL) or truncateds.get(ALL)):
            acting = {a: o for a, o in observations.items() if not (terminateds.get(a) or truncateds.get(a))}
            return acting, infos
    return env.reset(**seed)  # type: ignore[no-any-return]


def _follow_pettingzoo(env: Any, actions: Actions | None, seed: Seed = NO_SEED) -> Seen:
    if actions is not None:
        observations, _, terminations, truncations, infos = env.step(actions)
        agents = env.agents  # some simulators keep agents there that have ended
        if not all(terminations.get(agent) or truncations.get(agent) for agent in agents):
            acting = observations if [*observations] == agents else {agent: observations.get(agent) for agent in agents}
            return acting, infos
    return env.reset(**seed)  # type: ignore[no-any-return]


def _follow_gymnasium(env: Any, actions: Actions | None, seed: Seed = NO_SEED) -> Seen:
    if actions is not None:
        observation, _, terminated, truncated, info = env.step(actions[AGENT])
    if actions is None or terminated or truncated:
        observation, info = env.reset(**seed)
    return {AGENT: observation}, {AGENT: info}


def _follow_tuples(
    agents: Sequence[Any], sequence: Callable[[Any], Any], env: Any, actions: Actions | None, seed: Seed = NO_SEED
) -> Seen:
    if actions is not None:
        observations, _, terminated, truncated, _ = env.step(sequence(actions.values()))
    if actions is None or np.all(np.logical_or(terminated, truncated)):
        observations, _ = env.reset(**seed)
    return dict(zip(agents, observations)), {}


def _follow_turns(env: Any, actions: Actions | None, seed: Seed = NO_SEED) -> Seen:
    if actions is None:
        env.reset(**seed)
    else:
        env.step(actions[env.agent_selection])
    while True:
        if not env.agents:
            env.reset()
        observation, _, terminated, truncated, info = env.last()
        if not (terminated or truncated):
            return {env.agent_selection: observation}, {env.agent_selection: info}
        env.step(None)  # removes the agent


_FOLLOW: dict[type[MultiAgentEnv], Follow] = {
    DictEnv: _follow_dicts, RLlibEnv: _follow_dicts, GymnasiumEnv: _follow_gymnasium, TurnBasedAECEnv: _follow_turns,
    PettingZooEnv: _follow_pettingzoo, ParallelizableAECEnv: _follow_pettingzoo,
}  # fmt: skip


def _of(actions: Actions, acting: Iterable[Any]) -> Actions:
    return {agent: actions[agent] for agent in acting if agent in actions}


# -- ParallelEnv and its facades ---------------------------------------------------------------------------------------


@contextmanager
def stepping(
    constructors: Sequence[Constructor], batches: Batches, rules: Rules, ways: Sequence[str] = (STEP,), **arguments: Any
) -> Iterator[list[Run]]:
    """Open a `ParallelEnv` with these arguments; yields, for each way, the function that steps it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of more workers than CPUs
        env = ParallelEnv(constructors, **{"seed": 42, **arguments})  # several are open at a time
    try:
        yield [_run_of(env, batches, rules, way) for way in ways]
    finally:
        _close(env)


def _run_of(env: ParallelEnv, batches: Batches, rules: Rules, way: str) -> Run:
    """Reset environments; returns the function that steps them: by `STEP`, `ASYNC`, or through one of `FACADES`."""
    if way in FACADES:
        return _through_facade(env, batches, way)
    env.reset()
    masked = any(env.action_masks)
    if way == ASYNC:
        return _by_halves(env, batches, rules, masked)
    if masked:
        return repeatedly(lambda _: env.step(env.sample_actions()), batches, env.num_envs)
    if rules is Rules.PETTINGZOO:  # ParallelEnv ignores the actions of agents that are not acting
        return repeatedly(env.step, batches, env.num_envs)
    return repeatedly(lambda batch: env.step([*map(_of, batch, env.acting)]), batches, env.num_envs)


def _through_facade(env: ParallelEnv, batches: Batches, way: str) -> Run:
    def stacked(space: Space[Any], actions: list[Any]) -> Any:
        return concatenate(space, actions, create_empty_array(space, len(actions)))  # type: ignore[arg-type]

    facade: Any
    if way == PETTINGZOO:
        facade = PettingZooVecEnv(env)
        spaces = {agent: facade.single_action_space(agent) for agent in env.possible_agents}

        def arrays_of(batch: Sequence[Actions]) -> Any:
            return {agent: stacked(space, [actions[agent] for actions in batch]) for agent, space in spaces.items()}

    else:
        try:
            facade = GymnasiumVectorEnv(env)
        except ValueError as error:
            hint = "--facade pettingzoo takes agents of all kinds"
            raise CommandError(f"--facade gymnasium: {error}", hint) from error
        space, agents = facade.single_action_space, facade.agents

        def arrays_of(batch: Sequence[Actions]) -> Any:
            return stacked(space, [actions[agent] for actions in batch for agent in agents])

    facade.reset()
    if any(env.action_masks):

        def step(batch: Sequence[Actions]) -> None:  # rows of agents that do not act need an action too
            facade.step(arrays_of([drawn | legal for drawn, legal in zip(batch, env.sample_actions())]))

        return repeatedly(step, batches, env.num_envs)
    return repeatedly(facade.step, [*map(arrays_of, batches)], env.num_envs)


def _by_halves(env: ParallelEnv, batches: Batches, rules: Rules, masked: bool) -> Run:
    """Step by `send` and `recv`: as soon as half of all environments are ready, they get their next actions."""
    half = max(1, env.num_envs // 2)

    def send(batch: Sequence[Actions], env_ids: Sequence[int]) -> int:
        if masked:
            actions = env.sample_actions(env_ids)
        elif rules is Rules.PETTINGZOO:
            actions = [batch[env_id] for env_id in env_ids]
        else:
            acting = env.acting
            actions = [_of(batch[env_id], acting[env_id]) for env_id in env_ids]
        env.send(actions, env_ids)
        return len(env_ids)

    def run(going: Callable[[], bool]) -> int:
        endless = itertools.cycle(batches)
        count = send(next(endless), range(env.num_envs))
        while going():
            count += send(next(endless), env.recv(half).env_ids)
        env.recv()
        return count

    return run


def repeatedly(step_all: StepAll, batches: Sequence[Any], num_envs: int) -> Run:
    """The `Run` that calls `step_all`, which steps all environments once, again and again."""

    def run(going: Callable[[], bool]) -> int:
        endless = itertools.cycle(batches)
        step_all(next(endless))
        count = 1
        while going():
            step_all(next(endless))
            count += 1
        return count * num_envs

    return run


def rate(run: Run, seconds: float) -> float:
    """Environment steps per second, over at least so many seconds and at least one batch."""
    started = time.perf_counter()
    deadline = started + seconds
    steps = run(lambda: time.perf_counter() < deadline)
    return steps / (time.perf_counter() - started)


def warm(run: Run, seconds: float) -> Run:
    """Step for a quarter of the time of a measurement: the first steps are slower than all others."""
    rate(run, seconds / 4)
    return run


def spread(rates: Sequence[float]) -> float:
    """Half the distance between the best and the worst round, as a share of the median."""
    return (max(rates) - min(rates)) / 2 / statistics.median(rates)


# -- contenders in turns, for `bench` ----------------------------------------------------------------------------------


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
    """The result of one contender on one environment; a step is one step of one environment with all its agents."""

    environment: str
    num_envs: int
    backend: str  # "loop" for the plain loop, else a backend of `ParallelEnv`
    workers: int
    steps_per_second: float  # the median of the rounds
    microseconds_per_step: float  # wall time, from that median
    spread: float  # half the distance between the best and the worst round, as a share of the median
    speedup: float  # over the plain loop: the median of the ratios within each round
    efficiency: float  # the speedup as a share of the ideal, which is min(workers, CPUs)
    rounds: list[float]  # steps per second in each round
    way: str = STEP  # or "async", or the name of a facade

    @property
    def contender(self) -> Contender:
        return Contender(self.backend, self.workers, self.way)

    @property
    def kind(self) -> str:
        return self.backend if self.way == STEP else f"{self.backend}, {self.way}"


def contenders(
    backends: Sequence[str], workers: Sequence[int], num_envs: int, ways: Sequence[str] = (STEP,)
) -> list[Contender]:
    """Every backend with every number of workers that makes a difference to it, in every way.

    Example:
        >>> [*map(str, contenders(["serial", "process"], [1, 16], num_envs=8, ways=["step", "async"]))]
        ['serial', 'serial, async', 'process x 1', 'process x 1, async', 'process x 8', 'process x 8, async']
    """
    counts = sorted({min(count, num_envs) for count in workers})
    return [
        Contender(backend, number, way)
        for backend in dict.fromkeys(backends)
        for number in ([1] if backend == "serial" else counts)
        for way in ways
    ]


def num_turns(num_contenders: int, repeats: int) -> int:
    """How often `measure` calls `on_turn`: once to warm up each contender, once for each of its turns."""
    return (1 + num_contenders) * (1 + repeats)


def measure(
    environment: str,
    constructor: Constructor,
    num_envs: int,
    against: Sequence[Contender],
    *,
    others: Mapping[Contender, Callable[[], AbstractContextManager[Run]]] = MappingProxyType({}),
    seconds: float = 1.0,
    repeats: int = 5,
    on_turn: Callable[[str], None] = lambda label: None,
) -> list[Measurement]:
    """Measure the plain loop, whose measurement comes first, and each contender in turns of so many seconds.

    `others` are contenders without a `ParallelEnv`, each with the function that opens it; they are opened first.
    `on_turn` gets the name of the contender before each of `num_turns(len(others) + len(against), repeats)` turns.
    """
    loop = Contender(LOOP)
    everyone = [loop, *others, *against]
    rounds: dict[Contender, list[float]] = {contender: [] for contender in everyone}
    with ExitStack() as stack:
        on_turn(str(loop))
        envs = stack.enter_context(simulators(constructor, num_envs))
        adapted = adapted_for_loop(envs[0])
        batches = draw_actions(adapted.action_spaces, num_envs)
        runs = {loop: warm(repeatedly(plain_loop(envs, adapted), batches, num_envs), seconds)}
        for contender, opened_by in others.items():
            on_turn(str(contender))
            runs[contender] = warm(stack.enter_context(opened_by()), seconds)
        for contender in against:
            on_turn(str(contender))
            backend, workers, way = contender
            options = {"backend": backend, "num_workers": workers}
            opened = stepping([constructor] * num_envs, batches, adapted.rules, [way], **options)
            (run,) = stack.enter_context(opened)
            runs[contender] = warm(run, seconds)
        for contender in everyone * repeats:
            on_turn(str(contender))
            rounds[contender].append(rate(runs[contender], seconds))
    measurements = []
    for (backend, workers, way), rates in rounds.items():
        median = statistics.median(rates)
        speedup = statistics.median(map(operator.truediv, rates, rounds[loop]))
        numbers = median, 1e6 / median, spread(rates), speedup, speedup / min(workers, usable_cpus())
        measurements.append(Measurement(environment, num_envs, backend, workers, *numbers, rates, way))
    return measurements


# -- the search of `tune` ----------------------------------------------------------------------------------------------

RUNGS = ((1.0, 1), (0.5, 2), (0.25, 3))  # of the search: the share of all settings, and the number of rounds
FINALISTS = 3  # the smallest number of settings in a rung
AS_GOOD = 0.02  # `search` chooses the smallest of the settings that are at most this share slower than the fastest
PLAIN_LOOP, SERIAL, WORKERS = "plain loop", "serial", "workers"
ROUNDS = 3  # of `compare`


class Setting(NamedTuple):
    """The number of workers, the number of environments in each, and the way they are stepped: `STEP` or `ASYNC`."""

    num_workers: int
    envs_per_worker: int
    way: str = STEP

    @property
    def num_envs(self) -> int:
        return self.num_workers * self.envs_per_worker

    def exceeds(self, other: Setting) -> bool:
        """Whether neither number is smaller than the other setting's, and one is larger."""
        return self[:2] != other[:2] and self[0] >= other[0] and self[1] >= other[1]


# Measures settings that differ only in the way: environment steps per second of each, and bytes that workers use.
MeasureAlike: TypeAlias = Callable[[Sequence[Setting]], tuple[list[float], int]]


@dataclass
class Trial:
    """The results of a setting: steps per second in each round, the most memory in bytes, and whether that fits."""

    setting: Setting
    rounds: list[float] = field(default_factory=list)
    memory: int = 0
    fits: bool = True

    @property
    def steps_per_second(self) -> float:
        return statistics.median(self.rounds)

    def as_json(self) -> dict[str, Any]:
        """The numbers of the setting and of the trial in one dict."""
        numbers = {"num_envs": self.setting.num_envs, "steps_per_second": self.steps_per_second}
        return {**self.setting._asdict(), **numbers, "rounds": self.rounds, "memory": self.memory, "fits": self.fits}


def grid(workers: Sequence[int], envs_per_worker: Sequence[int], max_envs: int) -> list[Setting]:
    """All settings with at most `max_envs` environments; a single environment is stepped by `step` only."""
    settings = {Setting(*one) for one in itertools.product(workers, envs_per_worker, (STEP, ASYNC))}
    return sorted(one for one in settings if one.num_envs <= max_envs and (one.way == STEP or one.num_envs > 1))


def search(settings: Sequence[Setting], measure: MeasureAlike, limit: float = math.inf) -> tuple[Trial, list[Trial]]:
    """Search the fastest setting with at most `limit` bytes of memory; returns the best trial, and all trials."""
    if not settings:
        raise CommandError("every setting has more environments than --max-envs", "allow more with --max-envs")
    trials: dict[Setting, Trial] = {}
    candidates = list(settings)
    for share, rounds in RUNGS:
        rung = sorted(candidates[: _size_of_rung(share, settings)], key=lambda one: (one.num_envs, one))
        groups = [[*group] for _, group in itertools.groupby(rung, key=operator.itemgetter(0, 1))]
        for group in groups * rounds:
            if any(group[0].exceeds(trial.setting) for trial in trials.values() if not trial.fits):
                continue
            rates, memory = measure(group)
            for setting, steps_per_second in zip(group, rates):
                trial = trials.setdefault(setting, Trial(setting))
                trial.rounds.append(steps_per_second)
                trial.memory = max(trial.memory, memory)
                trial.fits = trial.memory <= limit
        fitting = sorted((trial for trial in trials.values() if trial.fits), key=lambda one: -one.steps_per_second)
        if not fitting:
            least = in_size(min(trial.memory for trial in trials.values()))
            hint = "allow more, or try fewer environments with --workers and --envs-per-worker"
            raise CommandError(f"no setting fits into --memory: the smallest one that was measured uses {least}", hint)
        candidates = [trial.setting for trial in fitting if trial.setting in rung] or [one.setting for one in fitting]
    finalists = [trials[setting] for setting in candidates]
    enough = (1 - AS_GOOD) * max(trial.steps_per_second for trial in finalists)
    as_good = [trial for trial in finalists if trial.steps_per_second >= enough]
    best = min(as_good, key=lambda one: (one.setting.num_envs, one.setting[:2], one.setting.way != STEP))
    return best, list(trials.values())


def max_turns(settings: Sequence[Setting]) -> int:
    """The largest number of measurements that `search` makes."""
    return sum(rounds * _size_of_rung(share, settings) for share, rounds in RUNGS)


def _size_of_rung(share: float, settings: Sequence[Setting]) -> int:
    return min(max(FINALISTS, math.ceil(share * len(settings))), len(settings))


def in_size(nbytes: float) -> str:
    """Bytes in a unit that fits: 83 MB or 2.2 GB."""
    return f"{nbytes / 1e6:,.0f} MB" if nbytes < 1e9 else f"{nbytes / 1e9:,.1f} GB"


def measure_alike(
    constructor: Constructor,
    adapted: MultiAgentEnv,
    seconds: float,
    on_turn: Callable[[str], None],
    settings: Sequence[Setting],
) -> tuple[list[float], int]:
    """Measure settings in the same new worker processes; see `MeasureAlike`. `on_turn` gets the name of each."""
    for workers, envs_per_worker, way in settings:
        on_turn(f"{workers} workers x {envs_per_worker}, {way}")
    num_envs, ways = settings[0].num_envs, [setting.way for setting in settings]
    before = {*psutil.Process().children(recursive=True)}
    batches, options = draw_actions(adapted.action_spaces, num_envs), {"num_workers": settings[0].num_workers}
    with stepping([constructor] * num_envs, batches, adapted.rules, ways, **options) as runs:
        rates, nbytes = [rate(warm(run, seconds), seconds) for run in runs], 0
        for process in {*psutil.Process().children(recursive=True)} - before:
            with suppress(psutil.NoSuchProcess):
                memory = process.memory_full_info()
                nbytes += getattr(memory, "pss", memory.rss)  # shared pages count once where the system reports that
    return rates, nbytes


def compare(
    constructor: Constructor, adapted: MultiAgentEnv, seconds: float, best: Trial, measure: MeasureAlike
) -> dict[str, list[float]]:
    """Measure a plain loop, `backend="serial"` and the best setting in turns; returns their rates in each round.

    The plain loop and the serial backend step as many environments as one worker of the best setting has: one process
    can have that many, and their memory fits.
    """
    num_envs = best.setting.envs_per_worker
    batches = draw_actions(adapted.action_spaces, num_envs)
    rounds: dict[str, list[float]] = {PLAIN_LOOP: [], SERIAL: [], WORKERS: []}
    for _ in range(ROUNDS):
        with simulators(constructor, num_envs) as envs:
            loop = warm(repeatedly(plain_loop(envs, adapted), batches, num_envs), seconds)
            rounds[PLAIN_LOOP].append(rate(loop, seconds))
        with stepping([constructor] * num_envs, batches, adapted.rules, backend="serial") as (run,):
            rounds[SERIAL].append(rate(warm(run, seconds), seconds))
        rounds[WORKERS].append(measure([best.setting])[0][0])
    return rounds
