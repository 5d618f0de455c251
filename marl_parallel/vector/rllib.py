"""`RLlibVectorMultiAgentEnv`: the batch as RLlib's multi-agent env runner steps it, and a runner that makes one.

`EpisodeFilter` leaves out what RLlib's `MultiAgentEpisode` cannot take: it raises where a dead agent has an entry,
takes every observation for a request to act, wants a last observation of each truncated agent, and ends once all agents
it has seen are dead, whatever the environment says.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import AgentID
from marl_parallel.adapters import Dicts as FiveDicts
from marl_parallel.core.backend import usable_cpus
from marl_parallel.core.batch import Batch
from marl_parallel.core.exclusive import CallGuard, exclusive
from marl_parallel.core.native import NativePool
from marl_parallel.core.transition import ALL, COMMON
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.stepper import ForwardedCalls, Scalarize, as_number, open_runner, reward_rules

try:
    from ray.rllib.callbacks.utils import make_callback
    from ray.rllib.env.env_context import EnvContext
    from ray.rllib.env.multi_agent_env import MultiAgentEnv
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
    from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv
    from ray.rllib.utils.error import ERR_MSG_INVALID_ENV_DESCRIPTOR, EnvError
    from ray.rllib.utils.pre_checks.env import check_multiagent_environments
    from ray.tune.registry import ENV_CREATOR, _global_registry
except ImportError as error:
    raise ImportError(
        f'the facade for RLlib needs it: pip install "marl-parallel[rllib]" ({error})', name=error.name
    ) from error

__doctest_requires__ = ["ray", "tree", "torch"]

logger = logging.getLogger(__name__)

OPTIONS = "parallel_env"
"""Where in `env_config` the runner finds arguments for `ParallelEnv`."""

_OURS = ("env_constructors", "auto_reset", "seed", "copy")

EnvDicts = list[dict[Any, Any]]
"""One dict for each environment."""


class RLlibVectorMultiAgentEnv(ForwardedCalls, VectorMultiAgentEnv):  # type: ignore[misc]
    """Many environments as RLlib's `MultiAgentEnvRunner` steps them: lists of dicts in and out.

    Usually made by `ParallelMultiAgentEnvRunner`. What the core's dicts say arrives unchanged, but for what RLlib's
    episodes cannot take: entries of agents that are dead, and observations of agents whose turn it is not, are left
    out; `infos[i]["__common__"]` is copied into the info of each agent that observes, as RLlib keeps no other. Where a
    copy has been restarted (`on_error="restart"`), that is where `{"restarted": True, "error": ...}` is; its episode
    is truncated, and every agent in it has a last observation to bootstrap from.

    Args:
        env: Made with `auto_reset="NEXT_STEP"` and `copy=True`, as RLlib keeps observations. Nobody else may step it.
            Agents need not be known beforehand.
        scalarize: What makes numbers of rewards that are vectors: a weight for each objective, or a function that takes
            one vector and returns a number; or a dict of these by agent. Needed where agents declare a `reward_space`.

    Attributes:
        env: As given.
        envs: A stand-in for each environment, a `MultiAgentEnv` with its spaces and agents. It cannot be stepped.
        num_envs: The number of environments.
        single_observation_spaces: Of each agent that declares one; `single_observation_space` is their `Dict`.
        single_action_spaces: Likewise, with `single_action_space`.
        metadata: Of the first environment; `"autoreset_mode"` is there, too.
        render_mode: Of the first environment.

    Raises:
        TypeError: `env` is no `ParallelEnv`.
        ValueError: It has another auto-reset mode, or `copy=False`; or rewards are vectors and there is no `scalarize`,
            or it does not fit them.
        ClosedEnvironmentError: It has been closed.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from marl_parallel import ParallelEnv
        >>> parallel = ParallelEnv([simple_spread_v3.parallel_env] * 4, auto_reset="NEXT_STEP", num_workers=2)
        >>> env = RLlibVectorMultiAgentEnv(parallel)
        >>> observations, infos = env.reset(seed=1)
        >>> actions = [{agent: env.single_action_spaces[agent].sample() for agent in seen} for seen in observations]
        >>> observations, rewards, terminateds, truncateds, infos = env.step(actions)
        >>> len(observations), observations[0]["agent_0"].shape, truncateds[3]["__all__"]
        (4, (18,), False)
        >>> env.close()
    """

    def __init__(self, env: ParallelEnv, *, scalarize: Scalarize | None = None) -> None:
        name = type(self).__name__
        self._runner = runner = open_runner(env, name, [AutoresetMode.NEXT_STEP])
        self._guard, self._me = CallGuard(runner.check_open), weakref.ref(self)
        self._rules = reward_rules(name, scalarize, runner.schema.reward_spaces)
        if not runner.batch.copies:
            raise ValueError("RLlib keeps observations, so it wants a ParallelEnv with copy=True, got copy=False")
        self.env, self.num_envs = env, env.num_envs
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self.single_observation_spaces = {**runner.schema.observation_spaces}
        self.single_action_spaces = {**runner.schema.action_spaces}
        self.single_observation_space = env.observation_space or spaces.Dict()
        self.single_action_space = env.action_space or spaces.Dict()
        self.envs = [StandIn(env, env_id) for env_id in range(env.num_envs)]
        self._filters = [EpisodeFilter(runner.batch, env_id) for env_id in range(env.num_envs)]

    @exclusive("reset")
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvDicts, EnvDicts]:
        """Begin new episodes in all environments.

        Args:
            seed: As of `ParallelEnv.reset`: environment i gets `seed + i`, or its own of a sequence.
            options: For each environment's own `reset`.

        Returns:
            Observations and infos, one dict by agent for each environment.

        Raises:
            RuntimeError: Another facade steps this environment.
            ParallelEnvError: A fault, as in `ParallelEnv.reset`.
        """
        self._runner.claim(self._me)
        observations, infos = self.env.reset(seed=seed, options=options)
        results = [own.begin(*dicts) for own, dicts in zip(self._filters, zip(observations, infos))]
        return [dicts[0] for dicts in results], [dicts[1] for dicts in results]

    @exclusive("step")
    def step(self, actions: Sequence[Mapping[AgentID, Any]]) -> tuple[EnvDicts, EnvDicts, EnvDicts, EnvDicts, EnvDicts]:
        """Step all environments; those whose episode is over begin the next one, and their actions are not looked at.

        Args:
            actions: One dict by agent for each environment.

        Returns:
            Observations, rewards, terminateds, truncateds, infos, one dict by agent for each environment; rewards are
            0.0 and flags False where an episode has begun. The flags also have `"__all__"`.

        Raises:
            RuntimeError: Another facade steps this environment.
            ValueError: Actions are missing or are not what their space declares. Nothing has been stepped.
            ResetNeeded: `reset` has not been called. Nothing has been stepped.
            ParallelEnvError: A fault, as in `ParallelEnv.step`.
        """
        self._runner.claim(self._me)
        due = [*self._runner.batch.over]
        results = zip(*self.env.step(actions))
        rows = [own.step(was_over, dicts) for own, was_over, dicts in zip(self._filters, due, results)]
        observations, rewards, terminateds, truncateds, infos = map(list, zip(*rows))
        if self._rules:
            rewards = [{a: as_number(self._rules, a, reward) for a, reward in of_env.items()} for of_env in rewards]
        return observations, rewards, terminateds, truncateds, infos

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment; called by `close`, once. Keywords are those of `ParallelEnv.close`."""
        self._runner.release()
        self.env.close(**kwargs)

    def __del__(self) -> None:
        """Nothing: whoever holds the `ParallelEnv` may go on with it, and it closes when nobody does."""


class EpisodeFilter:
    """The agents of one environment, as RLlib's episode knows them.

    Args:
        batch: Says where each environment stands.
        env_id: The environment.
    """

    def __init__(self, batch: Batch | NativePool, env_id: int) -> None:
        self._batch, self._env_id = batch, env_id
        self._forget()

    def begin(self, observations: dict[AgentID, Any], infos: dict[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Begin an episode; returns its observations and infos."""
        self._forget()
        observations = self._to_act(observations)
        self._seen.update(observations)
        self._begun = True
        return observations, _with_common(infos, observations)

    def step(self, was_over: bool, dicts: FiveDicts) -> FiveDicts:
        """What the episode is given of a step.

        Args:
            was_over: Whether the environment's episode had ended before, so that the next one began in this step.
            dicts: Observations, rewards, terminateds, truncateds, infos.
        """
        over = self._batch.over[self._env_id]
        if was_over:
            # Over again: it was restarted before it could begin. The last observations known are no beginning.
            observations, infos = self.begin({} if over else dicts[0], dicts[4])
            return observations, *dicts[1:4], infos
        if not self._begun and over:  # no observation here either: RLlib's episode has ended before
            return {}, *dicts[1:]
        self._begun = True
        observations, rewards, terminateds, truncateds, infos = (
            {agent: value for agent, value in of_agents.items() if agent not in self._dead} if self._dead else of_agents
            for of_agents in dicts
        )
        common = infos.get(COMMON)
        if not over:
            observations = self._to_act(observations)
        elif isinstance(common, dict) and common.get("restarted"):
            observations = {**{a: self._seen[a] for a in truncateds if a in self._seen}, **observations}
        infos = _with_common(infos, observations)
        if any(terminateds.values()) or any(truncateds.values()):
            for flags in (terminateds, truncateds):
                self._dead.update(agent for agent, flag in flags.items() if flag and agent != ALL)
            if self._seen.keys() <= self._dead:
                self._forget()
                return observations, rewards, terminateds, truncateds, infos
        self._seen.update(observations)
        return observations, rewards, terminateds, truncateds, infos

    def _forget(self) -> None:
        self._seen: dict[AgentID, Any] = {}  # with the last observation of each agent
        self._dead: set[AgentID] = set()
        self._begun = False  # whether RLlib's episode has; it may end before the environment's

    def _to_act(self, observations: dict[AgentID, Any]) -> dict[AgentID, Any]:
        """The observations without those of agents who are alive and must wait."""
        acting = self._batch.acting[self._env_id]
        if len(acting) >= len(observations):
            return observations
        waiting = {*self._batch.alive[self._env_id]}.difference(acting)
        return {agent: value for agent, value in observations.items() if agent not in waiting}


def _with_common(infos: dict[Any, Any], observations: dict[AgentID, Any]) -> dict[Any, Any]:
    """The infos with that of the environment in the info of each agent that observes."""
    if COMMON not in infos:
        return infos
    own = {agent: infos.get(agent) or {} for agent in observations}
    return {**infos, **{a: {COMMON: infos[COMMON], **info} for a, info in own.items() if isinstance(info, Mapping)}}


class StandIn(MultiAgentEnv):  # type: ignore[misc]
    """What RLlib looks at of one environment: its agents and spaces. The environment itself lives in a worker.

    Args:
        env: All environments.
        env_id: Which this one is.
    """

    def __init__(self, env: ParallelEnv, env_id: int) -> None:
        super().__init__()
        self._env, self._env_id = env, env_id
        self.possible_agents, self.agents = env.possible_agents, env.possible_agents
        self.observation_spaces = {**env.runner.schema.observation_spaces}
        self.action_spaces = {**env.runner.schema.action_spaces}
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.metadata, self.render_mode = env.metadata, env.render_mode

    def get_observation_space(self, agent_id: AgentID) -> Space[Any] | None:
        """Of one agent; None where it declares none."""
        return self.observation_spaces.get(agent_id)

    def get_action_space(self, agent_id: AgentID) -> Space[Any] | None:
        """Of one agent; None where it declares none."""
        return self.action_spaces.get(agent_id)

    def render(self) -> Any:
        """A frame of this copy; None where `render_mode` is None."""
        frames = self._env.render(env_ids=[self._env_id])
        return None if frames is None else frames[0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError("a stand-in for one copy cannot be reset; reset the RLlibVectorMultiAgentEnv")

    def step(self, action_dict: Any) -> Any:
        """Raises RuntimeError."""
        raise RuntimeError("a stand-in for one copy cannot be stepped; step the RLlibVectorMultiAgentEnv")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a stand-in for one copy has no attribute {name!r}; if the copy has it, get_attr({name!r}) of the "
            "RLlibVectorMultiAgentEnv gives that of all copies"
        )


class ParallelMultiAgentEnvRunner(MultiAgentEnvRunner):  # type: ignore[misc]
    """RLlib's multi-agent env runner over a `ParallelEnv`: the environments of a runner step in worker processes.

    `config.env` is what it always is: a name registered with `ray.tune.register_env` or with Gymnasium, or a class or
    function of the `EnvContext`, whose `vector_index` says which copy it is for. Beside RLlib's own `MultiAgentEnv` it
    may make anything that `ParallelEnv` takes, such as a PettingZoo environment as it is. Arguments for `ParallelEnv`
    (`num_workers`, `on_error`, `step_timeout`, ...) are in `env_config["parallel_env"]`, which the environments do not
    see, and so is `scalarize` of `RLlibVectorMultiAgentEnv`, for rewards that are vectors. By default the CPUs of the
    machine are shared evenly by the remote runners, or each uses `num_cpus_per_env_runner` if that is more; a local
    runner uses all.

    With `config.seed`, environment e of runner r is seeded with
    `SeedSequence((config.seed, r, e, in_evaluation)).generate_state(1)[0] >> 1`, so that no two runners sample the
    same episodes. RLlib's check of each environment takes place in its worker; `disable_env_checking` leaves it out.

    A fault that `on_error="raise"` lets through is RLlib's business: with
    `fault_tolerance(restart_failed_sub_environments=True)` it makes all environments of the runner anew and drops
    their episodes; with `on_error="restart"` the failed one alone is made anew, and the others go on.

    Raises:
        ValueError: `env_config["parallel_env"]` has arguments that are RLlib's or the runner's to set.
        TypeError: It has others that `ParallelEnv` does not know.
        EnvError: An environment cannot be made (RLlib's), or its constructor raised (`marl_parallel`'s).

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from ray.rllib.algorithms.ppo import PPOConfig
        >>> config = (
        ...     PPOConfig()
        ...     .environment(lambda context: simple_spread_v3.parallel_env(), env_config={"parallel_env": {}})
        ...     .multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent, episode: "shared")
        ...     .env_runners(env_runner_cls=ParallelMultiAgentEnvRunner, num_envs_per_env_runner=8)
        ... )
        >>> runner = config.env_runner_cls(config=config)
        >>> episodes = runner.sample(num_timesteps=80)
        >>> runner.num_envs, sum(len(episode) for episode in episodes)
        (8, 80)
        >>> runner.stop()
    """

    def make_env(self) -> None:
        """Close the environment that is there and make a new one, as RLlib asks for at the start and after faults."""
        self._close_old()
        context, options = self._context_and_options()
        check = not self.config.disable_env_checking
        constructor = _constructor(_creator(self.config.env), context, check)
        seeds, scalarize = self._env_seeds(), options.pop("scalarize", None)
        parallel = ParallelEnv(
            [constructor] * self.config.num_envs_per_env_runner,
            AutoresetMode.NEXT_STEP,
            None if seeds is None else seeds[0],
            **options if "envs_per_worker" in options else {"num_workers": self._num_workers(), **options},
        )
        self.env: RLlibVectorMultiAgentEnv | None = self._facade(parallel, scalarize)
        self.num_envs = parallel.num_envs
        self._needs_initial_reset = True
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_environment_created,
            kwargs={
                "env_runner": self,
                "metrics_logger": self.metrics,
                "env": self.env,
                "env_context": context,
            },
        )

    @staticmethod
    def _facade(parallel: ParallelEnv, scalarize: Scalarize | None) -> RLlibVectorMultiAgentEnv:
        try:
            return RLlibVectorMultiAgentEnv(parallel, scalarize=scalarize)
        except BaseException:
            parallel.close(terminate=True)
            raise

    def _close_old(self) -> None:
        try:
            if self.env is not None:
                self.env.close()
        except Exception as error:
            logger.warning("while closing the environments that are made anew: %s", error)
        self.env = None

    def _context_and_options(self) -> tuple[Any, dict[str, Any]]:
        context = self.config.env_config
        if not isinstance(context, EnvContext):
            context = EnvContext(
                context,
                worker_index=self.worker_index,
                num_workers=self.config.num_env_runners,
                remote=self.config.remote_worker_envs,
            )
        context = context.copy_with_overrides()
        options = dict(context.pop(OPTIONS, None) or {})
        taken = [name for name in _OURS if name in options]
        if taken:
            raise ValueError(
                f"env_config[{OPTIONS!r}] may not have {', '.join(taken)}: RLlib's config has the environment and the "
                'seed, and the runner needs auto_reset="NEXT_STEP" and copy=True'
            )
        return context, options

    def _num_workers(self) -> int:
        workers = usable_cpus()
        if self.worker_index:
            workers = max(workers // max(self.config.num_env_runners, 1), int(self.config.num_cpus_per_env_runner), 1)
        num_envs: int = self.config.num_envs_per_env_runner
        return min(workers, num_envs)

    def _env_seeds(self) -> list[int] | None:
        if self.config.seed is None:
            return None
        who = self.config.seed, self.worker_index or 0
        sources = [
            np.random.SeedSequence((*who, env_id, int(self.config.in_evaluation)))
            for env_id in range(self.config.num_envs_per_env_runner)
        ]
        return [int(source.generate_state(1)[0] >> 1) for source in sources]

    def _try_env_reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        # RLlib's seed is the same for all of a runner's environments, and one more in the next runner.
        return super()._try_env_reset(seed=None if seed is None else self._env_seeds(), options=options)


def _creator(described: Any) -> Callable[[Any], Any]:
    """What makes an environment of its context.

    Raises:
        ValueError: There is none.
        EnvError: It is a name that nobody has registered.
    """
    if not described:
        raise ValueError("config.env is not set: name the environment with config.environment(...)")
    if callable(described):
        called: Callable[[Any], Any] = described
        return called
    if _global_registry.contains(ENV_CREATOR, described):
        registered: Callable[[Any], Any] = _global_registry.get(ENV_CREATOR, described)
        return registered
    try:
        # What the name stands for, as workers know nothing of what this process has registered.
        spec = gymnasium.spec(described)
    except gymnasium.error.Error:
        raise EnvError(ERR_MSG_INVALID_ENV_DESCRIPTOR.format(described)) from None
    return lambda context: gymnasium.make(spec, **context)


def _constructor(create: Callable[[Any], Any], context: Any, check: bool) -> Callable[[int], Any]:
    """What a worker calls for each of its environments."""

    def constructor(env_id: int) -> Any:
        env = create(context.copy_with_overrides(vector_index=env_id))
        base = getattr(env, "unwrapped", env)
        if check and isinstance(base, MultiAgentEnv):
            check_multiagent_environments(base)
        return env

    return constructor
