"""`RLlibVectorMultiAgentEnv`: lists of dicts for RLlib's multi-agent env runner, and a runner that makes one."""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv
from ray.rllib.utils.error import ERR_MSG_INVALID_ENV_DESCRIPTOR, EnvError
from ray.rllib.utils.pre_checks.env import check_multiagent_environments
from ray.tune.registry import ENV_CREATOR, _global_registry

from marl_parallel.adapters import AgentID, GroupSpaces
from marl_parallel.adapters import Dicts as FiveDicts
from marl_parallel.core.backend import usable_cpus
from marl_parallel.core.exclusive import exclusive
from marl_parallel.core.pool.saved_states import to_bytes
from marl_parallel.core.source import Transitions
from marl_parallel.core.spaces import from_zero, leaves, starts_elsewhere, to_start, to_zero
from marl_parallel.core.transition import ALL, COMMON
from marl_parallel.core.worker.env_runner import dead_after
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.settings import NAMES
from marl_parallel.vector.drop_in import drop_in
from marl_parallel.vector.forwarding import OfParallelEnv
from marl_parallel.vector.saving import facades_with, key_of
from marl_parallel.vector.scalarize import Scalarize, as_number, reward_rules
from marl_parallel.vector.stepper import open_batch

__doctest_requires__ = ["ray", "tree", "torch"]

logger = logging.getLogger(__name__)

OPTIONS = "parallel_env"
"""The key of `env_config` with arguments for `ParallelEnv`."""

_RESERVED = ("env_constructors", "auto_reset", "seed", "copy")

EnvDicts = list[dict[Any, Any]]


class RLlibVectorMultiAgentEnv(OfParallelEnv, VectorMultiAgentEnv):  # type: ignore[misc]
    """Many environments as RLlib's `MultiAgentEnvRunner` steps them: lists of dicts in and out.

    `ParallelMultiAgentEnvRunner` makes one. The dicts are as in `ParallelEnv`, without entries of dead agents and
    without observations of agents whose turn it is not. `infos[i]["__common__"]`, such as the mark of a restart, is
    copied into the info of each agent that observes, as RLlib drops other keys. Choices of `Discrete(n, start=s)` and
    of `MultiDiscrete` count from 0, in spaces, actions and observations; the simulator gets and returns s, s + 1, ...

    Args:
        env: Made with `auto_reset="NEXT_STEP"` and `copy=True`, as RLlib stores observations. No other facade may step
            it. Agents need not be known beforehand.
        scalarize: Turns vector rewards into numbers, as in `FacadeStepper`; needed if agents declare a `reward_space`.

    Attributes:
        envs: A `MultiAgentEnv` for each environment, with its spaces and agents. It cannot be stepped.
        single_observation_spaces: By agent, if it declares one; `single_observation_space` is a `Dict` of them.
        single_action_spaces: By agent, if it declares one; `single_action_space` is a `Dict` of them.

    Raises:
        TypeError, ClosedEnvironmentError: `env` is not a `ParallelEnv`, or is closed.
        ValueError: It has another auto-reset mode, or `copy=False`; or `scalarize` does not fit the rewards.

    Example:
        >>> from marl_parallel import make
        >>> env = RLlibVectorMultiAgentEnv(make("mpe2.simple_spread_v3", 4, auto_reset="NEXT_STEP", num_workers=2))
        >>> observations, infos = env.reset(seed=1)
        >>> actions = [{agent: env.single_action_spaces[agent].sample() for agent in seen} for seen in observations]
        >>> observations, rewards, terminateds, truncateds, infos = env.step(actions)
        >>> len(observations), observations[0]["agent_0"].shape, truncateds[3]["__all__"]
        (4, (18,), False)
        >>> env.close()
    """

    saved_as = "RLlibVectorMultiAgentEnv"

    def __init__(self, env: ParallelEnv, *, scalarize: Scalarize | None = None) -> None:
        name = type(self).__name__
        batch = open_batch(env, name, [AutoresetMode.NEXT_STEP])
        self._stepper, self._guard, self._claim = env.stepper, batch.guard, weakref.ref(self)
        self._rules = reward_rules(name, scalarize, batch.schema.reward_spaces)
        if not batch.transitions.copies:
            raise ValueError("RLlib stores observations, so it needs a ParallelEnv with copy=True, got copy=False")
        self.env, self.num_envs = env, env.num_envs
        self.metadata, self.render_mode = env.metadata, env.render_mode
        seen, acts = batch.schema.observation_spaces, batch.schema.action_spaces
        self.single_observation_spaces, self.single_action_spaces = _from_zero(seen), _from_zero(acts)
        self.single_observation_space, self.single_action_space = _joined(seen), _joined(acts)
        self._seen = seen if any(map(starts_elsewhere, seen.values())) else None
        self._acts = acts if any(map(_is_converted, acts.values())) else None
        self.envs = [StandIn(env, env_id) for env_id in range(env.num_envs)]
        self._resumed: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}  # what the next `reset` returns
        self._came_back: list[tuple[int, AgentID]] = []  # environments and agents of the latest results, from filters
        self._filters = [EpisodeFilter(batch.transitions, env_id, self._came_back) for env_id in range(env.num_envs)]

    @exclusive("reset")
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvDicts, EnvDicts]:
        """Begin new episodes; returns observations and infos, one dict by agent for each environment.

        Arguments and errors are as in `ParallelEnv.reset`. Raises `RuntimeError` if another facade steps this
        environment. Results in flight are dropped.
        """
        self._stepper.batch.check_claim(self._claim)
        begun = self._resumed
        ids = [env_id for env_id in range(self.num_envs) if env_id not in begun]
        if ids:
            if begun and seed is not None and not isinstance(seed, int | np.integer):
                seed = [seed[env_id] for env_id in ids]
            some = ids if begun else None
            self._stepper.drain(seed, options, some)
            observed, *_, informed = self._stepper.reset(seed, options, some)
            results = zip(ids, self._observations(observed), informed)
            begun = begun | {env_id: self._filters[env_id].begin(*dicts) for env_id, *dicts in results}
        self._resumed = {}
        self._stepper.batch.claim(self._claim)
        observations, infos = map(list, zip(*[begun[env_id] for env_id in range(self.num_envs)]))
        return observations, infos

    @exclusive("save_state")
    def save_state(self, env_ids: Sequence[int] | None = None) -> list[bytes]:
        """Save environments, in the middle of their episodes; arguments and errors: see `ParallelEnv.save_state`.

        Returns:
            The state of each of `env_ids`.
        """
        saved = self._stepper.save(env_ids)
        return [to_bytes(state.with_facade(key_of(self), None)) for state in saved.values()]

    @exclusive("load_state")
    def load_state(self, states: Sequence[bytes], env_ids: Sequence[int] | None = None) -> tuple[EnvDicts, EnvDicts]:
        """Go on from what `save_state` has returned; arguments and errors are as in `ParallelEnv.load_state`.

        RLlib's runners begin with a `reset` of all environments. So the next `reset`, before any `step`, begins no new
        episodes in these environments, whatever its seed: it returns the same as this method. An episode that is over
        is reset. RLlib takes what is left of an episode for a whole one.

        Returns:
            Observations of the agents that act, and infos, one dict by agent for each of these environments.
        """
        self._stepper.batch.check_claim(self._claim)
        loaded, (observed, *_, informed) = self._stepper.load(states, env_ids, facades_with(key_of(self)))
        self._stepper.batch.claim(self._claim)
        transitions, begun = self._stepper.transitions, {}
        for env_id, seen, infos in zip(loaded, self._observations(observed), informed):
            dead = dead_after(transitions.events_in(env_id), transitions.alive[env_id])
            begun[env_id] = self._filters[env_id].resume(seen, infos, dead)
        others = {env_id: one for env_id, one in self._resumed.items() if env_id not in begun}
        going_on = {env_id: one for env_id, one in begun.items() if not transitions.over[env_id]}
        self._resumed = others | copy.deepcopy(going_on)  # the caller may change the returned ones
        return [observations for observations, _ in begun.values()], [infos for _, infos in begun.values()]

    @exclusive("step")
    def step(self, actions: Sequence[Mapping[AgentID, Any]]) -> tuple[EnvDicts, EnvDicts, EnvDicts, EnvDicts, EnvDicts]:
        """Step all environments; those whose episode is over begin the next one, with rewards 0.0 and flags False.

        Takes and returns one dict by agent for each environment, as `ParallelEnv.step`, and raises the same errors.
        Raises `RuntimeError` if another facade steps this environment. Raises `ValueError` if an agent has come back
        after its end while others went on: RLlib's episodes cannot hold this. All environments have been stepped then.
        """
        self._stepper.batch.claim(self._claim)
        were_over = [*self._stepper.transitions.over]
        observed, *rest = self._stepper.step(self._actions(actions))
        self._resumed = {}
        results = zip(self._filters, were_over, zip(self._observations(observed), *rest))
        rows = [episode_filter.step(was_over, dicts) for episode_filter, was_over, dicts in results]
        self._refuse_lives()
        observations, rewards, terminateds, truncateds, infos = map(list, zip(*rows))
        return observations, self._as_numbers(rewards), terminateds, truncateds, infos

    def _refuse_lives(self) -> None:
        """Raise `ValueError` if an agent has come back after its end."""
        if self._came_back:
            env_id, agent = self._came_back[0]
            self._came_back.clear()
            raise ValueError(
                f"environment {env_id}: agent {agent!r} has come back after its end, while its episode goes on. An "
                "episode of RLlib takes no data of an agent that is done. Give each life of an agent an id of its "
                f"own, such as {f'{agent}:2'!r}; or report its end only when it does not come back"
            )

    def _actions(self, actions: Any) -> Any:
        """Choices as the simulators count them, in the dtypes of their spaces."""
        if self._acts is None:
            return actions
        return [_converted(self._acts, of_env, to_start) for of_env in actions]

    def _observations(self, observations: Sequence[dict[Any, Any]]) -> Sequence[dict[Any, Any]]:
        """Observations whose choices count from 0."""
        if self._seen is None:
            return observations
        return [_converted(self._seen, of_env, to_zero) for of_env in observations]

    def _as_numbers(self, rewards: EnvDicts) -> EnvDicts:
        """Vector rewards as numbers."""
        if not self._rules:
            return rewards
        return [{a: as_number(self._rules, a, reward) for a, reward in of_env.items()} for of_env in rewards]

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment; called by `close`, once. Keywords are as in `ParallelEnv.close`."""
        self._stepper.batch.release()
        self.env.close(**kwargs)

    def __del__(self) -> None:
        """Nothing: the `ParallelEnv` may be used further, and closes when it is collected itself."""


def _is_converted(space: Space[Any]) -> bool:
    """Whether RLlib's actions, which are int64 and count from 0, must be converted for the simulator."""
    return starts_elsewhere(space) or any(
        isinstance(leaf, spaces.Discrete) and leaf.dtype != np.int64 for _, leaf in leaves(space)
    )


def _from_zero(declared: Mapping[AgentID, Space[Any]]) -> dict[AgentID, Space[Any]]:
    """Spaces by agent, whose choices count from 0; agents that share a space object still share one."""
    made = {id(space): from_zero(space) for space in declared.values()}
    return {agent: made[id(space)] for agent, space in declared.items()}


def _joined(declared: Mapping[AgentID, Space[Any]]) -> spaces.Dict:
    """The spaces of `_from_zero` as one `Dict`."""
    if isinstance(declared, GroupSpaces):
        return declared.mapped(from_zero).as_space()
    return spaces.Dict([*_from_zero(declared).items()])


def _converted(declared: Mapping[AgentID, Space[Any]], of_env: Any, convert: Callable[[Space[Any], Any], Any]) -> Any:
    """The values of one environment by agent, converted where the agent declares a space."""
    if not isinstance(of_env, Mapping):
        return of_env
    return {agent: convert(declared[agent], value) if agent in declared else value for agent, value in of_env.items()}


class EpisodeFilter:
    """Leaves out of one environment's dicts what RLlib's `MultiAgentEpisode` cannot take; see `docs/facades.md`.

    That class also needs a last observation of each truncated agent, and ignores the environment's flags.
    Agents that are alive again in an episode in which they have ended are added to `came_back`, with `env_id`.
    """

    def __init__(self, transitions: Transitions, env_id: int, came_back: list[tuple[int, AgentID]]) -> None:
        self._transitions, self._env_id, self._came_back = transitions, env_id, came_back
        self._forget()

    def begin(self, observations: dict[AgentID, Any], infos: dict[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        self._forget()
        observations = self._to_act(observations)
        self._seen.update(observations)
        self._has_begun = True
        return observations, _with_common(infos, observations)

    def resume(
        self, observations: dict[AgentID, Any], infos: dict[Any, Any], dead: Collection[AgentID]
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Begin an episode of RLlib with what is left of a loaded one, in which some agents are `dead`."""
        begun = self.begin({a: seen for a, seen in observations.items() if a not in dead}, infos)
        self._dead.update(dead)
        return begun

    def step(self, was_over: bool, dicts: FiveDicts) -> FiveDicts:
        """Filter the five dicts of a step; `was_over`: whether the next episode began in this step."""
        over = self._transitions.over[self._env_id]
        if was_over:
            # Over at once: restarted before it could begin. Its observations are the last of the old episode.
            observations, infos = self.begin({} if over else dicts[0], dicts[4])
            return observations, *dicts[1:4], infos
        if not self._has_begun and over:  # no observations either: RLlib's episode has ended before
            return {}, *dicts[1:]
        self._has_begun = True
        if self._dead and not over:
            alive = self._transitions.alive[self._env_id]
            self._came_back += [(self._env_id, agent) for agent in alive if agent in self._dead]
        observations, rewards, terminateds, truncateds, infos = (
            {agent: value for agent, value in of_agents.items() if agent not in self._dead} if self._dead else of_agents
            for of_agents in dicts
        )
        common = infos.get(COMMON)
        if not over:
            observations = self._to_act(observations)
        elif isinstance(common, dict) and common.get("restarted") is True:
            observations = {**{a: self._seen[a] for a in truncateds if a in self._seen}, **observations}
        infos = _with_common(infos, observations)
        ended = any(terminateds.values()) or any(truncateds.values())
        if ended:
            for flags in (terminateds, truncateds):
                self._dead.update(agent for agent, flag in flags.items() if flag and agent != ALL)
        if ended and self._seen.keys() <= self._dead:
            self._forget()
        else:
            self._seen.update(observations)
        return observations, rewards, terminateds, truncateds, infos

    def _forget(self) -> None:
        self._seen: dict[AgentID, Any] = {}  # with the last observation of each agent
        self._dead: set[AgentID] = set()
        self._has_begun = False  # RLlib's episode, which may end before the environment's

    def _to_act(self, observations: dict[AgentID, Any]) -> dict[AgentID, Any]:
        """The observations, without agents that are alive and do not act."""
        acting = self._transitions.acting[self._env_id]
        if len(acting) >= len(observations):
            return observations
        waiting = {*self._transitions.alive[self._env_id]}.difference(acting)
        return {agent: value for agent, value in observations.items() if agent not in waiting}


def _with_common(infos: dict[Any, Any], observations: dict[AgentID, Any]) -> dict[Any, Any]:
    """Infos, with the environment's infos copied into the info of each agent that observes."""
    if COMMON not in infos:
        return infos
    by_agent = {agent: infos.get(agent) or {} for agent in observations}
    return {
        **infos,
        **{a: {COMMON: infos[COMMON], **info} for a, info in by_agent.items() if isinstance(info, Mapping)},
    }


class StandIn(MultiAgentEnv):  # type: ignore[misc]
    """The agents and spaces of one environment, for RLlib; the environment itself lives in a worker."""

    def __init__(self, env: ParallelEnv, env_id: int) -> None:
        super().__init__()
        self._env, self._env_id = env, env_id
        own, schema = env.possible_agents_of(env_id), env.stepper.schema
        self.possible_agents, self.agents = own, [*own]
        seen, acts = schema.observation_spaces, schema.action_spaces
        if own != schema.possible_agents:
            seen, acts = ({agent: of_all[agent] for agent in own if agent in of_all} for of_all in (seen, acts))
        self.observation_spaces, self.action_spaces = _from_zero(seen), _from_zero(acts)
        self.observation_space = _joined(seen) if seen else None
        self.action_space = _joined(acts) if acts else None
        self.metadata, self.render_mode = env.metadata, env.render_mode

    def get_observation_space(self, agent_id: AgentID) -> Space[Any] | None:
        return self.observation_spaces.get(agent_id)

    def get_action_space(self, agent_id: AgentID) -> Space[Any] | None:
        return self.action_spaces.get(agent_id)

    def render(self) -> Any:
        frames = self._env.render(env_ids=[self._env_id])
        return None if frames is None else frames[0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise RuntimeError("a stand-in for one environment cannot be reset; reset the RLlibVectorMultiAgentEnv")

    def step(self, action_dict: Any) -> Any:
        raise RuntimeError("a stand-in for one environment cannot be stepped; step the RLlibVectorMultiAgentEnv")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a stand-in for one environment has no attribute {name!r}; if the environment has it, get_attr({name!r}) "
            "of the RLlibVectorMultiAgentEnv returns its value in each environment"
        )


class ParallelMultiAgentEnvRunner(MultiAgentEnvRunner):  # type: ignore[misc]
    """RLlib's multi-agent env runner, with environments that step in worker processes.

    `config.env` is a name registered with `ray.tune.register_env` or with Gymnasium, or a class. What it names is
    called with the `EnvContext`, whose `vector_index` is the number of the environment. It may make RLlib's
    `MultiAgentEnv` and anything else that `ParallelEnv` takes, such as a PettingZoo environment.
    `env_config["parallel_env"]` has arguments for `ParallelEnv` (`num_workers`, `on_error`, `step_timeout`, ...) and
    `scalarize`; the environments do not see it.
    By default remote runners share the CPUs of the machine evenly, or each uses `num_cpus_per_env_runner` if that is
    more; a local runner uses all. RLlib's check of each environment runs in its worker, unless `disable_env_checking`
    is set. `docs/facades.md` describes its seeds and restarts.

    Raises:
        ValueError: `env_config["parallel_env"]` has arguments that RLlib or the runner sets.
        TypeError: It has arguments that `ParallelEnv` does not know.
        EnvError: `config.env` is an unknown name (RLlib's), or a constructor raised (`marl_parallel`'s).

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from ray.rllib.algorithms.ppo import PPOConfig
        >>> from ray.tune import register_env
        >>> register_env("spread", lambda context: simple_spread_v3.parallel_env())
        >>> config = (
        ...     PPOConfig()
        ...     .environment("spread", env_config={"parallel_env": {}})
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
        """Close the present environment and make a new one; RLlib calls this at the start and after faults."""
        try:
            if self.env is not None:
                self.env.close()
        except Exception as error:
            logger.warning("closing the environments before they are rebuilt failed: %s", error)
        self.env: RLlibVectorMultiAgentEnv | None = None
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
        _check_options(options)
        seeds, scalarize = self._env_seeds(), options.pop("scalarize", None)
        constructor = _constructor(_creator(self.config.env), context, not self.config.disable_env_checking)
        self.env = drop_in(
            type(self).__name__,
            [constructor] * self.config.num_envs_per_env_runner,
            options,
            functools.partial(RLlibVectorMultiAgentEnv, scalarize=scalarize),
            defaults={} if "envs_per_worker" in options else {"num_workers": self._num_workers()},
            fixed={"auto_reset": AutoresetMode.NEXT_STEP, "copy": True, "seed": None if seeds is None else seeds[0]},
        )
        self.num_envs = self.env.num_envs
        self._needs_initial_reset = True
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_environment_created,
            kwargs={"env_runner": self, "metrics_logger": self.metrics, "env": self.env, "env_context": context},
        )

    def _num_workers(self) -> int:
        workers = usable_cpus()
        if self.worker_index:
            workers = max(workers // max(self.config.num_env_runners, 1), int(self.config.num_cpus_per_env_runner), 1)
        num_envs: int = self.config.num_envs_per_env_runner
        return min(workers, num_envs)

    def _env_seeds(self) -> list[int] | None:
        if self.config.seed is None:
            return None
        runner, evaluation = self.worker_index or 0, int(self.config.in_evaluation)
        keys = [(self.config.seed, runner, i, evaluation) for i in range(self.config.num_envs_per_env_runner)]
        return [int(np.random.SeedSequence(key).generate_state(1)[0] >> 1) for key in keys]

    def _try_env_reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        # RLlib's seed is the same for all of a runner's environments, and one more in the next runner.
        return super()._try_env_reset(seed=None if seed is None else self._env_seeds(), options=options)


def _check_options(options: Mapping[str, Any]) -> None:
    """Check the arguments in `env_config` that are for `ParallelEnv` and the facade."""
    if reserved := [name for name in _RESERVED if name in options]:
        raise ValueError(
            f"env_config[{OPTIONS!r}] may not have {', '.join(reserved)}: RLlib's config has the environment and "
            'the seed, and the runner needs auto_reset="NEXT_STEP" and copy=True'
        )
    known = {*NAMES, "scalarize"} - {*_RESERVED}
    if unknown := options.keys() - known:
        near = sorted({name for one in unknown for name in get_close_matches(str(one), known)})
        instead = f"; did you mean {', '.join(near)}?" if near else f"; it takes {', '.join(sorted(known))}"
        raise TypeError(
            f"env_config[{OPTIONS!r}] has arguments that ParallelEnv does not know: "
            f"{', '.join(sorted(map(str, unknown)))}{instead}"
        )


def _creator(env: Any) -> Callable[[Any], Any]:
    """The function of `config.env`, which makes an environment from its context."""
    if not env:
        raise ValueError("config.env is not set: name the environment with config.environment(...)")
    if callable(env) or _global_registry.contains(ENV_CREATOR, env):
        create: Callable[[Any], Any] = env if callable(env) else _global_registry.get(ENV_CREATOR, env)
        return create
    try:
        spec = gymnasium.spec(env)  # rather than the name, as workers lack the registrations of this process
    except gymnasium.error.Error:
        raise EnvError(ERR_MSG_INVALID_ENV_DESCRIPTOR.format(env)) from None
    return lambda context: gymnasium.make(spec, **context)


def _constructor(create: Callable[[Any], Any], context: Any, check: bool) -> Callable[[int], Any]:
    """The constructor that workers call for each of their environments."""

    def constructor(env_id: int) -> Any:
        env = create(context.copy_with_overrides(vector_index=env_id))
        base = getattr(env, "unwrapped", env)
        if check and isinstance(base, MultiAgentEnv):
            check_multiagent_environments(base)
        return env

    return constructor
