"""Who else steps many copies of a simulator, each in its best setting; and how contenders are measured in turns.

A contender steps all copies once with each call, the same random actions for all of them, and begins a new episode
where one is over. Libraries are imported when they are started: not all of them fit one environment. Whoever cannot be
started is left out with the reason.

Contenders stay open while others are measured, and take turns in rounds, so that a machine that slows down or gets busy
hits all of them alike. Between its turns each of them waits for its next call, and uses no CPU.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
from gymnasium.vector.utils import batch_space

from marl_parallel.backends import threads
from marl_parallel.cli.measure import Actions, draw_actions

SEED = 42
DISTRIBUTIONS = ("mpe2", "SuperSuit", "stable-baselines3", "torch", "torchrl", "tensordict", "ray", "agilerl")
"""Whose versions matter, where they are installed."""

Step = Callable[[], object]
"""Steps all copies once, with the next actions."""


@dataclass(frozen=True)
class Case:
    """What is stepped: a PettingZoo environment whose agents are alike and live as long as their episode.

    Attributes:
        name: The environment's.
        constructor: Makes one copy.
        num_envs: How many copies.
        workers: How many processes share them, where a contender lets one choose.
        episode_steps: Steps in an episode.
    """

    name: str
    constructor: Callable[[], Any]
    num_envs: int
    workers: int
    episode_steps: int

    @functools.cached_property
    def agents(self) -> list[str]:
        return list(self._action_spaces)

    @functools.cached_property
    def by_copy(self) -> list[list[Actions]]:
        """Batches of actions, as dicts by agent, one for each copy."""
        return draw_actions(self._action_spaces, self.num_envs)

    @functools.cached_property
    def joint(self) -> list[np.ndarray]:
        """The same as arrays `(copies, agents, ...)`."""
        return [np.array([[acts[agent] for agent in self.agents] for acts in batch]) for batch in self.by_copy]

    @property
    def rows(self) -> list[np.ndarray]:
        """The same as arrays `(copies * agents, ...)`."""
        return [batch.reshape(-1, *batch.shape[2:]) for batch in self.joint]

    @property
    def by_agent(self) -> list[dict[str, np.ndarray]]:
        """The same as arrays `(copies, ...)`, by agent."""
        return [{agent: batch[:, place].copy() for place, agent in enumerate(self.agents)} for batch in self.joint]

    @functools.cached_property
    def _action_spaces(self) -> dict[str, Any]:
        with closing(self.constructor()) as env:
            return {agent: env.action_space(agent) for agent in env.possible_agents}


@dataclass(frozen=True)
class Contender:
    """Who steps.

    Attributes:
        name: In tables.
        start: Makes it ready, its first reset included; closed when the context ends.
        setting: How it is run, for a note.
        next_step: Whether its resets take a call of their own, which is not counted as a step.
        ours: Whether it is of this package: then errors are not put up with.
    """

    name: str
    start: Callable[[Case], AbstractContextManager[Step]]
    setting: str = ""
    next_step: bool = False
    ours: bool = False

    def counted(self, case: Case) -> float:
        """The environment steps in a call."""
        share = case.episode_steps / (case.episode_steps + 1) if self.next_step else 1.0
        return case.num_envs * share


# -- measuring ---------------------------------------------------------------------------------------------------------


def turns(contenders: Sequence[Contender], repeats: int) -> int:
    """How often `measure` reports progress."""
    return len(contenders) * (1 + repeats)


def measure(
    case: Case, contenders: Sequence[Contender], seconds: float, repeats: int, on_turn: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Measure in turns, after a turn of each that does not count.

    Returns:
        By contender, environment steps per second in each round; and of those who could not be started, why.
    """
    rounds: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        ready: list[tuple[Contender, Step]] = []
        for one in contenders:
            on_turn(f"{case.name}: {one.name} starts")
            try:
                ready.append((one, stack.enter_context(one.start(case))))
            except Exception as error:
                if one.ours and not isinstance(error, ImportError):
                    raise
                missing[one.name] = reason(error)
            else:
                _calls_per_second(ready[-1][1], seconds / 4)
        for one, step in ready * repeats:
            on_turn(f"{case.name}: {one.name}")
            rounds.setdefault(one.name, []).append(one.counted(case) * _calls_per_second(step, seconds))
    return rounds, missing


def reason(error: Exception) -> str:
    """In one line, without this machine's paths."""
    said = re.sub(r" \([^()]*[/\\][^()]*\)", "", str(error).strip().partition("\n")[0])
    return said if isinstance(error, ImportError) else f"{type(error).__name__}: {said}"


def _calls_per_second(step: Step, seconds: float) -> float:
    count = 0
    begun = now = time.perf_counter()
    while now < begun + seconds or not count:
        step()
        count += 1
        now = time.perf_counter()
    return count / (now - begun)


def one_thread_each() -> None:
    """Numerical libraries get one thread, here and in all processes started from here: processes share the CPUs."""
    os.environ.update(threads.variables(1))
    threads.set_loaded(1)


def stepping(step: Callable[[Any], object], batches: Iterable[Any]) -> Step:
    """Batches of actions, over and over."""
    endless = itertools.cycle(batches)
    return lambda: step(next(endless))


# -- the peers ---------------------------------------------------------------------------------------------------------


@contextmanager
def plain_loop(case: Case) -> Iterator[Step]:
    with ExitStack() as stack:
        envs = [stack.enter_context(closing(case.constructor())) for _ in range(case.num_envs)]
        for place, env in enumerate(envs):
            env.reset(seed=SEED + place)

        def step(batch: Sequence[Actions]) -> None:
            for env, actions in zip(envs, batch, strict=True):
                env.step(actions)
                if not env.agents:
                    env.reset()

        yield stepping(step, case.by_copy)


@contextmanager
def supersuit(case: Case) -> Iterator[Step]:
    from supersuit import concat_vec_envs_v1, pettingzoo_env_to_vec_env_v1

    rows = pettingzoo_env_to_vec_env_v1(case.constructor())
    with closing(concat_vec_envs_v1(rows, case.num_envs, num_cpus=case.workers)) as env:
        env.reset(seed=SEED)
        yield stepping(env.step, case.rows)


class Joint(gymnasium.Env):  # type: ignore[type-arg]
    """All agents of an environment as one that sees and does everything, and knows only the sum of rewards."""

    def __init__(self, constructor: Callable[[], pettingzoo.ParallelEnv]) -> None:
        self._env = constructor()
        self._agents = agents = self._env.possible_agents
        self.metadata = {**self._env.metadata, "render_modes": []}
        self.observation_space = batch_space(self._env.observation_space(agents[0]), len(agents))
        self.action_space = batch_space(self._env.action_space(agents[0]), len(agents))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, _ = self._env.reset(seed=seed, options=options)
        return self._stacked(observations), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observations, rewards, terminations, _, _ = self._env.step(dict(zip(self._agents, action, strict=True)))
        over = not self._env.agents
        terminated = over and all(terminations.values())
        return self._stacked(observations), sum(rewards.values()), terminated, over and not terminated, {}

    def close(self) -> None:
        self._env.close()

    def _stacked(self, observations: dict[str, Any]) -> Any:
        return np.stack([observations[agent] for agent in self._agents])


@contextmanager
def gymnasium_async(case: Case) -> Iterator[Step]:
    from gymnasium.vector import AsyncVectorEnv

    constructors = [functools.partial(Joint, case.constructor)] * case.num_envs
    with closing(AsyncVectorEnv(constructors, shared_memory=True, copy=False)) as env:
        env.reset(seed=SEED)
        yield stepping(env.step, case.joint)


@contextmanager
def sb3_subproc(case: Case) -> Iterator[Step]:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    with closing(SubprocVecEnv([functools.partial(Joint, case.constructor)] * case.num_envs)) as env:
        env.seed(SEED)
        env.reset()
        yield stepping(env.step, case.joint)


def torchrl_copy(constructor: Callable[[], Any]) -> Any:
    from torchrl.envs import PettingZooWrapper

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PettingZoo in TorchRL is tested using version")
        return PettingZooWrapper(constructor())


def torchrl_copies(constructor: Callable[[], Any], count: int) -> Any:
    from torchrl.envs import SerialEnv

    return SerialEnv(count, functools.partial(torchrl_copy, constructor))


@contextmanager
def torchrl_parallel(case: Case, shared: bool) -> Iterator[Step]:
    from torchrl.envs import ParallelEnv

    if shared:
        make = functools.partial(torchrl_copies, case.constructor, case.num_envs // case.workers)
    else:
        make = functools.partial(torchrl_copy, case.constructor)
    with closing(torchrl_copy(case.constructor)) as one:
        group_map = one.group_map
    with closing(ParallelEnv(case.workers if shared else case.num_envs, make)) as env:
        env.set_seed(SEED)
        yield torchrl_stepping(env, group_map, case)


def torchrl_stepping(env: Any, group_map: dict[str, list[str]], case: Case) -> Step:
    """Steps a TorchRL environment as its own loops do, resets included."""
    import torch

    places = {group: [case.agents.index(agent) for agent in agents] for group, agents in group_map.items()}
    batches = [
        {
            (group, "action"): torch.from_numpy(batch[:, own]).reshape(*env.batch_size, *batch[0, own].shape)
            for group, own in places.items()
        }
        for batch in case.joint
    ]
    latest = env.reset()

    def step(actions: dict[Any, Any]) -> None:
        nonlocal latest
        for key, action in actions.items():
            latest.set(key, action)
        _, latest = env.step_and_maybe_reset(latest)

    return stepping(step, batches)


@contextmanager
def agilerl_async(case: Case) -> Iterator[Step]:
    from agilerl.vector.pz_async_vec_env import AsyncPettingZooVecEnv

    with closing(AsyncPettingZooVecEnv([case.constructor] * case.num_envs)) as env:
        env.reset(seed=SEED)
        yield stepping(env.step, case.by_agent)


@contextmanager
def rllib_sync(case: Case) -> Iterator[Step]:
    from ray.rllib.env.vector.sync_vector_multi_agent_env import SyncVectorMultiAgentEnv
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv

    constructors = [lambda: ParallelPettingZooEnv(case.constructor())] * case.num_envs
    with closing(SyncVectorMultiAgentEnv(constructors, copy=False)) as env:
        env.reset(seed=SEED)
        yield stepping(env.step, case.by_copy)


LOOP = Contender("plain loop", plain_loop, "over bare environments, in one process")
SUPERSUIT = Contender(
    "SuperSuit", supersuit, "`pettingzoo_env_to_vec_env_v1`, then `concat_vec_envs_v1(num_cpus={workers})`"
)
GYMNASIUM = Contender(
    "Gymnasium AsyncVectorEnv",
    gymnasium_async,
    "all agents jointly, as one Gymnasium environment with the sum of rewards; `shared_memory=True, copy=False`; one "
    "process per copy, as it has no other way",
    next_step=True,
)
SB3 = Contender(
    "SB3 SubprocVecEnv", sb3_subproc, "the same joint environment; one process per copy, as it has no other way"
)
TORCHRL = Contender(
    "TorchRL ParallelEnv",
    functools.partial(torchrl_parallel, shared=False),
    "of a `PettingZooWrapper`, with its buffers in shared memory, one process per copy",
)
TORCHRL_SERIAL = Contender(
    "TorchRL ParallelEnv of SerialEnv",
    functools.partial(torchrl_parallel, shared=True),
    "the same, {workers} processes that share the copies",
)
AGILERL = Contender(
    "AgileRL AsyncPettingZooVecEnv", agilerl_async, "as it comes; one process per copy, as it has no other way"
)
RLLIB = Contender(
    "RLlib SyncVectorMultiAgentEnv",
    rllib_sync,
    "of `ParallelPettingZooEnv`s, `copy=False`; one process, as RLlib has no other way for multi-agent environments",
    next_step=True,
)
