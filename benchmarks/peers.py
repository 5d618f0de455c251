"""Other packages that step many environments, each with its best setting. `contest.py` measures them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
from contest import Actions, Batches, Case, Contender, Step, stepping
from gymnasium.vector.utils import CloudpickleWrapper, batch_space
from plain_loops import CALL_S, SEED, Loops, opened_envs, step_all

PUFFERLIB_POLLS_S = 0.6
"""Its workers poll without pause for half a second after a step, then every 10 ms."""


@contextmanager
def plain_loop(case: Case) -> Iterator[Step]:
    with opened_envs(case.constructor, range(case.num_envs)) as envs:
        yield stepping(functools.partial(step_all, envs), case.by_env)


@contextmanager
def loops(case: Case, workers: int | None = None, barrier: bool = False) -> Iterator[Step]:
    with closing(Loops(case.constructor, case.num_envs, workers or case.workers, barrier)) as processes:
        yield Batches(processes.step, processes.warm(CALL_S))


@contextmanager
def supersuit(case: Case) -> Iterator[Step]:
    from supersuit import black_death_v3, concat_vec_envs_v1, pettingzoo_env_to_vec_env_v1

    env = case.constructor()
    rows = pettingzoo_env_to_vec_env_v1(black_death_v3(env) if case.deaths else env)
    with closing(concat_vec_envs_v1(rows, case.num_envs, num_cpus=case.workers)) as env:
        env.reset(seed=SEED)
        yield stepping(env.step, case.rows)


def of_living(env: pettingzoo.ParallelEnv, actions: Actions) -> Actions:
    """The actions of agents that are alive."""
    agents = env.agents
    return actions if len(agents) == len(actions) else {agent: actions[agent] for agent in agents}


class Joint(gymnasium.Env):  # type: ignore[type-arg]
    """All agents of an environment as one agent, with all observations and actions and the sum of rewards.

    Dead agents observe zeros.
    """

    def __init__(self, constructor: Callable[[], pettingzoo.ParallelEnv]) -> None:
        self._env = constructor()
        self._agents = agents = self._env.possible_agents
        self.metadata = {**self._env.metadata, "render_modes": []}
        self.observation_space = batch_space(self._env.observation_space(agents[0]), len(agents))
        self.action_space = batch_space(self._env.action_space(agents[0]), len(agents))
        self._nothing = np.zeros_like(self._env.observation_space(agents[0]).sample())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, _ = self._env.reset(seed=seed, options=options)
        return self._stacked(observations), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        actions = of_living(self._env, dict(zip(self._agents, action, strict=True)))
        observations, rewards, terminations, _, _ = self._env.step(actions)
        over = not self._env.agents
        terminated = over and all(terminations.values())
        return self._stacked(observations), sum(rewards.values()), terminated, over and not terminated, {}

    def close(self) -> None:
        self._env.close()

    def _stacked(self, observations: dict[str, Any]) -> Any:
        return np.stack([observations.get(agent, self._nothing) for agent in self._agents])


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


def torchrl_env(constructor: Callable[[], Any], seed: int | None = None, deaths: bool = False) -> Any:
    from torchrl.envs import PettingZooWrapper

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PettingZoo in TorchRL is tested using version")
        env = PettingZooWrapper(constructor(), **({"use_mask": True, "done_on_any": False} if deaths else {}))
    if seed is not None:
        env.set_seed(seed)
    return env


def torchrl_envs(constructor: Callable[[], Any], count: int, deaths: bool = False) -> Any:
    from torchrl.envs import SerialEnv

    return SerialEnv(count, functools.partial(torchrl_env, constructor, deaths=deaths))


@contextmanager
def torchrl_parallel(case: Case, shared: bool) -> Iterator[Step]:
    from torchrl.envs import ParallelEnv

    if shared:
        make = functools.partial(torchrl_envs, case.constructor, case.num_envs // case.workers, deaths=case.deaths)
    else:
        make = functools.partial(torchrl_env, case.constructor, deaths=case.deaths)
    with closing(ParallelEnv(case.workers if shared else case.num_envs, make)) as env:
        env.set_seed(SEED)
        yield torchrl_stepping(env, torchrl_groups(case), case)


@contextmanager
def torchrl_async(case: Case) -> Iterator[Step]:
    from torchrl.envs import AsyncEnvPool

    # The pool cannot set seeds, and pickles constructors without cloudpickle.
    makers = [
        CloudpickleWrapper(functools.partial(torchrl_env, case.constructor, SEED + place, case.deaths))
        for place in range(case.num_envs)
    ]
    options = {"backend": "multiprocessing", "exchange": "shm", "envs_per_worker": case.num_envs // case.workers}
    with closing(AsyncEnvPool(makers, **options)) as env:
        yield torchrl_stepping(env, torchrl_groups(case), case)


def torchrl_groups(case: Case) -> dict[str, list[str]]:
    """The agents of each group into which TorchRL's wrapper divides them."""
    with closing(torchrl_env(case.constructor, deaths=case.deaths)) as env:
        return dict(env.group_map)


def torchrl_stepping(env: Any, group_map: dict[str, list[str]], case: Case) -> Step:
    """A function that steps a TorchRL environment as TorchRL's own loops do, resets included."""
    import torch

    places = {group: [case.agents.index(agent) for agent in agents] for group, agents in group_map.items()}
    batches = [
        {
            (group, "action"): torch.from_numpy(batch[:, columns]).reshape(*env.batch_size, *batch[0, columns].shape)
            for group, columns in places.items()
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
        yield stepping(env.step, case.by_env)


class WithAll(gymnasium.Env):  # type: ignore[type-arg]
    """A PettingZoo environment whose flags have `__all__`, which SMARTS expects."""

    def __init__(self, constructor: Callable[[], pettingzoo.ParallelEnv]) -> None:
        self._env = constructor()
        agents = self._env.possible_agents
        self.observation_space = gymnasium.spaces.Dict([(a, self._env.observation_space(a)) for a in agents])
        self.action_space = gymnasium.spaces.Dict([(a, self._env.action_space(a)) for a in agents])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, infos = self._env.reset(seed=seed, options=options)
        return observations, dict(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminations, truncations, infos = self._env.step(of_living(self._env, actions))
        over = not self._env.agents
        # SMARTS reads only one of the two.
        return observations, rewards, {**terminations, "__all__": over}, {**truncations, "__all__": over}, dict(infos)

    def close(self) -> None:
        self._env.close()


@contextmanager
def smarts_parallel(case: Case) -> Iterator[Step]:
    from smarts.env.gymnasium.wrappers.parallel_env import ParallelEnv

    def constructor(seed: int) -> WithAll:
        env = WithAll(case.constructor)
        env.reset(seed=seed)
        return env

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it has no other way than one process per environment
        env = ParallelEnv([constructor] * case.num_envs, auto_reset=True, seed=SEED)
    try:
        env.reset()
        yield stepping(env.step, case.by_env)
    finally:
        env.close(terminate=True)


def pufferlib_env(constructor: Callable[[], Any], **options: Any) -> Any:
    from pufferlib.emulation import PettingZooPufferEnv
    from pufferlib.pufferlib import MeanOverAgents

    return PettingZooPufferEnv(MeanOverAgents(constructor()), **options)


@contextmanager
def pufferlib_envs(case: Case, **options: Any) -> Iterator[Any]:
    from pufferlib.vector import Multiprocessing, make

    create = functools.partial(pufferlib_env, case.constructor)
    options = {"backend": Multiprocessing, "num_workers": case.workers, **options}
    with closing(make(create, num_envs=case.num_envs, **options)) as env:
        yield env


@contextmanager
def pufferlib_multiprocessing(case: Case) -> Iterator[Step]:
    with pufferlib_envs(case) as env:
        env.reset(seed=SEED)
        yield stepping(env.step, case.rows)


@contextmanager
def tianshou_subproc(case: Case) -> Iterator[Step]:
    from tianshou.env import SubprocVectorEnv

    constructors = [functools.partial(Joint, case.constructor)] * case.num_envs
    with closing(SubprocVectorEnv(constructors, share_memory=True)) as env:
        env.reset(seed=SEED)

        def step(actions: Any) -> None:
            _, _, terminated, truncated, _ = env.step(actions)
            if (over := np.flatnonzero(terminated | truncated)).size:
                env.reset(over)

        yield stepping(step, case.joint)


class PlainActor:
    """A first version with plain Ray: one actor per environment, dicts as arguments and results."""

    def __init__(self, constructor: Callable[[], Any]) -> None:
        self._env = constructor()

    def reset(self, seed: int) -> Any:
        return self._env.reset(seed=seed)

    def step(self, actions: Any) -> Any:
        result = self._env.step(of_living(self._env, actions))
        return result if self._env.agents else (self._env.reset()[0], *result[1:])


@contextmanager
def ray_actors(case: Case) -> Iterator[Step]:
    import ray

    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    actors = [ray.remote(PlainActor).options(num_cpus=0).remote(case.constructor) for _ in range(case.num_envs)]
    try:
        ray.get([actor.reset.remote(SEED + place) for place, actor in enumerate(actors)])

        def step(batch: Sequence[Actions]) -> None:
            ray.get([actor.step.remote(actions) for actor, actions in zip(actors, batch, strict=True)])

        yield stepping(step, case.by_env)
    finally:
        for actor in actors:
            ray.kill(actor)


LOOP = Contender("plain loop", plain_loop, "over bare environments, in one process")
LOOPS = Contender(
    "plain loops side by side", loops, "{workers} processes, which do not wait for each other: the limit of the machine"
)
SUPERSUIT = Contender(
    "SuperSuit",
    supersuit,
    "`pettingzoo_env_to_vec_env_v1`, then `concat_vec_envs_v1(num_cpus={workers})`",
    with_deaths="`black_death_v3` before that, whose episodes take one call more if they end by truncation",
)
GYMNASIUM = Contender(
    "Gymnasium AsyncVectorEnv",
    gymnasium_async,
    "all agents jointly, as one Gymnasium environment with the sum of rewards; `shared_memory=True, copy=False`; one "
    "process per environment (no other setting)",
    next_step=True,
)
SB3 = Contender(
    "SB3 SubprocVecEnv", sb3_subproc, "the same joint environment; one process per environment (no other setting)"
)
TORCHRL = Contender(
    "TorchRL ParallelEnv",
    functools.partial(torchrl_parallel, shared=False),
    "of a `PettingZooWrapper`, with its buffers in shared memory, one process per environment",
    with_deaths="`use_mask=True, done_on_any=False`",
)
TORCHRL_SERIAL = Contender(
    "TorchRL ParallelEnv of SerialEnv",
    functools.partial(torchrl_parallel, shared=True),
    "the same, in {workers} processes with several environments each",
    with_deaths="`use_mask=True, done_on_any=False`",
)
TORCHRL_ASYNC = Contender(
    "TorchRL AsyncEnvPool",
    torchrl_async,
    'of `PettingZooWrapper`s; `backend="multiprocessing", exchange="shm"`; in {workers} processes with several '
    "environments each (`envs_per_worker`), which are threads; all are stepped at once, and the call waits for all",
    with_deaths="`use_mask=True, done_on_any=False`",
)
AGILERL = Contender(
    "AgileRL AsyncPettingZooVecEnv", agilerl_async, "default settings; one process per environment (no other setting)"
)
RLLIB = Contender(
    "RLlib SyncVectorMultiAgentEnv",
    rllib_sync,
    "of `ParallelPettingZooEnv`s, `copy=False`; one process (RLlib has no other setting for multi-agent environments)",
    next_step=True,
)
SMARTS = Contender(
    "SMARTS ParallelEnv", smarts_parallel, "default settings; one process per environment (no other setting)"
)
PUFFERLIB = Contender(
    "PufferLib Multiprocessing",
    pufferlib_multiprocessing,
    "`PettingZooPufferEnv` of its `MeanOverAgents`, so that empty infos need no message; `num_workers={workers}`, its "
    "buffers in shared memory; the process that calls it and its workers poll without sleeping while they wait; "
    "PufferLib 3 from the distribution `pufferlib-core`, unchanged",
    next_step=True,
    polls_s=PUFFERLIB_POLLS_S,
)
TIANSHOU = Contender(
    "Tianshou SubprocVectorEnv",
    tianshou_subproc,
    "all agents jointly, as one Gymnasium environment with the sum of rewards; `share_memory=True`; one process per "
    "environment (no other setting); the caller resets environments",
    with_deaths="dead agents observe zeros",
)
RAY_ACTORS = Contender("Ray, an actor per environment", ray_actors, "dicts as arguments and results, all calls at once")
