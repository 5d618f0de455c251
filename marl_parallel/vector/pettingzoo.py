"""`PettingZooVecEnv`: the batch by agent, as PettingZoo's users think of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pettingzoo  # type: ignore[import-untyped]
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core.arrays import Arrays
from marl_parallel.core.exclusive import CallGuard, exclusive
from marl_parallel.core.transition import ALL
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.infos import infos_by_agent
from marl_parallel.vector.rows import handed_down, took_part
from marl_parallel.vector.stepper import ArrayStepper, ForwardedCalls

ByAgent = dict[AgentID, Any]


class PettingZooVecEnv(ForwardedCalls):
    """Many environments as one, of which everything is a dict by agent of arrays over all environments.

    Observations are in the form of the agent's batched space: an array `(num_envs, ...)`, or dicts and tuples of them.
    Rewards are float64 and flags bool, `(num_envs,)`; rewards that are vectors are `(num_envs, num_objectives)`, in the
    dtype of the agent's `single_reward_space`. Every agent is always there; in environments where it is absent its
    rows are zeros, and `present[agent]` says which rows are data, `acting[agent]` which want an action. Where an
    episode ends and an agent that took part has no flag of its own, it has its environment's. Infos are laid out by
    agent as in Gymnasium's vector environments; those of the environment, not an agent, are under their own key.

    Auto-reset is whatever the environment was made with. With `auto_reset=False`, PettingZoo's own loop over `agents`
    runs unchanged; it ends when nobody is left in any environment.

    Args:
        env: Nobody else may step it. With `copy=False`, observations are valid until the next step or reset.

    Attributes:
        env: As given.
        metadata: Of the first environment; `"autoreset_mode"` is there, too.
        possible_agents: All agents, in the environment's own order.
        num_envs: The number of environments.

    Raises:
        TypeError: `env` is no `ParallelEnv`.
        ValueError: Its agents are not known beforehand, or one declares no space.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from marl_parallel import ParallelEnv
        >>> parallel = ParallelEnv([simple_spread_v3.parallel_env] * 4, auto_reset=False, num_workers=2)
        >>> with PettingZooVecEnv(parallel) as env:
        ...     observations, infos = env.reset(seed=1)
        ...     while env.agents:
        ...         actions = {agent: env.action_space(agent).sample() for agent in env.agents}
        ...         observations, rewards, terminations, truncations, infos = env.step(actions)
        >>> observations["agent_0"].shape, truncations["agent_0"]
        ((4, 18), array([ True,  True,  True,  True]))
    """

    def __init__(self, env: ParallelEnv) -> None:
        self._stepper = ArrayStepper(env, self, vectors=True)
        self._guard = CallGuard(self._stepper.runner.check_open)
        self._view, self._batch = self._stepper.view, self._stepper.runner.batch
        self.env, self.num_envs = env, env.num_envs
        self.metadata = env.metadata
        self.possible_agents = env.possible_agents
        self._schema = schema = self._stepper.runner.schema
        self._single = schema.observation_spaces, schema.action_spaces
        self._batched = tuple(
            {agent: batch_space(declared[agent], self.num_envs) for agent in self.possible_agents}
            for declared in self._single
        )
        self._same_step = self._stepper.mode is AutoresetMode.SAME_STEP
        self._present = self._acting = np.zeros((self.num_envs, len(self.possible_agents)), np.bool_)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def agents(self) -> list[AgentID]:
        """Who is alive in any environment whose episode goes on."""
        alive = {agent for agents, over in zip(self._batch.alive, self._batch.over) if not over for agent in agents}
        return [agent for agent in self.possible_agents if agent in alive]

    @property
    def num_agents(self) -> int:
        """How many `agents` there are."""
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        """The number of possible agents."""
        return len(self.possible_agents)

    @property
    def render_mode(self) -> str | None:
        """The render mode of the first environment."""
        return self.env.render_mode

    @property
    def present(self) -> ByAgent:
        """By agent, in which environments its rows are data: `(num_envs,)`, bool."""
        return self._by_agent(self._present)

    @property
    def acting(self) -> ByAgent:
        """By agent, in which environments it should act next: `(num_envs,)`, bool."""
        return self._by_agent(self._acting)

    @property
    def over(self) -> NDArray[np.bool_]:
        """In which environments the episode has ended and no reset has followed."""
        return np.array(self._batch.over, np.bool_)

    def observation_space(self, agent: AgentID) -> Space[Any]:
        """Of one agent in all environments."""
        return self._batched[0][agent]

    def action_space(self, agent: AgentID) -> Space[Any]:
        """Of one agent in all environments."""
        return self._batched[1][agent]

    def single_observation_space(self, agent: AgentID) -> Space[Any]:
        """Of one agent in one environment."""
        return self._single[0][agent]

    def single_action_space(self, agent: AgentID) -> Space[Any]:
        """Of one agent in one environment."""
        return self._single[1][agent]

    def reward_space(self, agent: AgentID) -> Space[Any] | None:
        """Of one agent in all environments; None for an agent whose rewards are numbers."""
        space = self.single_reward_space(agent)
        return None if space is None else batch_space(space, self.num_envs)

    def single_reward_space(self, agent: AgentID) -> Space[Any] | None:
        """Of one agent in one environment; None for an agent whose rewards are numbers."""
        return self._schema.reward_spaces.get(agent)

    # -- stepping --------------------------------------------------------------------------------------------------

    @exclusive("reset")
    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        env_ids: Sequence[int] | None = None,
    ) -> tuple[ByAgent, ByAgent]:
        """Begin new episodes.

        Args:
            seed: As of `ParallelEnv.reset`: environment i gets `seed + i`.
            options: For each environment's own `reset`.
            env_ids: Which environments; None for all of them. The others' observations stay.

        Returns:
            Observations and infos, by agent.
        """
        arrays = self._stepper.reset(seed, options, env_ids)
        observations, _, _, _, infos = self._results(arrays)
        return observations, infos

    @exclusive("step")
    def step(self, actions: Mapping[AgentID, Any]) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Step all environments.

        Args:
            actions: By agent, in the form of its batched space. Rows of those who do not act are not looked at, and
                whoever acts in no environment may be left out.

        Returns:
            Observations, rewards, terminations, truncations and infos, by agent.

        Raises:
            TypeError: The actions are no dict. Nothing has been stepped.
            ValueError: Actions are missing or of another shape or dtype, and nothing has been stepped; or all has been
                stepped, but what came of it has no place in arrays: a reward that is no number, an unknown agent.
            ResetNeeded: `reset` has not been called. Nothing has been stepped.
            ParallelEnvError: A fault, as in `ParallelEnv.step`.
        """
        return self._results(self._stepper.step(_checked(actions)))

    @exclusive("step_async")
    def step_async(self, actions: Mapping[AgentID, Any]) -> None:
        """Begin to step all environments and return; `step_wait` has the results. Arguments and errors as of `step`."""
        self._stepper.send(_checked(actions))

    @exclusive("step_wait")
    def step_wait(self) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """The results of `step_async`.

        Raises:
            NoAsyncCallError: Nothing is on its way.
            ValueError: As of `step`, where that is after it.
            ParallelEnvError: A fault, as in `ParallelEnv.step`.
        """
        return self._results(self._stepper.receive())

    def _results(self, arrays: Arrays) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        self._present, self._acting = arrays.present, arrays.acting
        flags = arrays.terminations, arrays.truncations
        if not arrays.together and np.count_nonzero(
            (arrays.terminated | arrays.truncated)[:, None] > (arrays.terminations | arrays.truncations)
        ):
            flags = handed_down(arrays, took_part(arrays, self.possible_agents, same_step=self._same_step))
        terminations, truncations = flags
        return (
            self._view.by_agent(arrays.observations),
            {**self._by_agent(arrays.rewards), **arrays.vectors} if arrays.vectors else self._by_agent(arrays.rewards),
            self._by_agent(terminations),
            self._by_agent(truncations),
            infos_by_agent(arrays.infos, self.possible_agents, self.num_envs),
        )

    def _by_agent(self, array: NDArray[Any]) -> ByAgent:
        return dict(zip(self.possible_agents, array.T))

    # -- the rest --------------------------------------------------------------------------------------------------

    def single(self, env_id: int = 0) -> SingleEnv:
        """One environment as a PettingZoo `ParallelEnv` of its own.

        Raises:
            ValueError: The environment resets by itself, which PettingZoo's own do not: pass `auto_reset=False`.
        """
        return SingleEnv(self.env, env_id, self._stepper.note)

    def state(self) -> NDArray[Any]:
        """The global states, `(num_envs, *state_space.shape)`; raises as `ParallelEnv.state`."""
        return self.env.state()

    def close(self) -> None:
        """Close the environment; idempotent."""
        self._stepper.close()

    def __enter__(self) -> PettingZooVecEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.metadata.get('name', 'environment')} x {self.num_envs})"


class SingleEnv(pettingzoo.ParallelEnv):  # type: ignore[misc]
    """What PettingZoo's wrappers, tests and loops take; the other environments stay as they are.

    Args:
        env: Made with `auto_reset=False`.
        env_id: Which copy.
        note: Told of what it says, for whoever steps all environments: its number, observations and rewards.

    Raises:
        ValueError: It was not, or there is no such copy.
    """

    def __init__(self, env: ParallelEnv, env_id: int, note: Callable[[int, ByAgent, ByAgent], None]) -> None:
        runner = env.runner
        if runner.mode is not AutoresetMode.DISABLED:
            raise ValueError(
                "one copy as a PettingZoo environment wants a ParallelEnv with auto_reset=False, got "
                f"AutoresetMode.{runner.mode.name}"
            )
        if not 0 <= env_id < env.num_envs:
            raise ValueError(f"there is no copy {env_id!r}: they are numbered from 0 to {env.num_envs - 1}")
        self._env, self._runner, self._env_id, self._note = env, runner, env_id, note
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self.possible_agents = env.possible_agents
        self.observation_spaces = runner.schema.observation_spaces
        self.action_spaces = runner.schema.action_spaces
        self.reward_spaces = runner.schema.reward_spaces
        if env.state_space is not None:
            self.state_space = env.state_space

    @property
    def agents(self) -> list[AgentID]:
        """Who is alive; nobody once the episode is over."""
        batch = self._runner.batch
        return [] if batch.over[self._env_id] else [*batch.alive[self._env_id]]

    def observation_space(self, agent: AgentID) -> Space[Any]:
        """Of one agent."""
        return self.observation_spaces[agent]

    def action_space(self, agent: AgentID) -> Space[Any]:
        """Of one agent."""
        return self.action_spaces[agent]

    def reward_space(self, agent: AgentID) -> Space[Any]:
        """Of one agent whose rewards are vectors."""
        return self.reward_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[AgentID, Any], dict[AgentID, Any]]:
        """Begin a new episode; options are dropped where the simulator's own `reset` takes none."""
        if not self._runner.takes_options:
            options = None
        seeds = None if seed is None else [seed]
        (observations,), (infos,) = self._env.reset(seed=seeds, options=options, env_ids=[self._env_id])
        self._note(self._env_id, observations, {})
        return observations, infos

    def step(self, actions: dict[AgentID, Any]) -> tuple[dict[AgentID, Any], ...]:
        """Step once; `__all__` is left out, as PettingZoo knows no such key: who has no flag of its own has this."""
        results = self._env.step([actions], env_ids=[self._env_id])
        observations, rewards, terminateds, truncateds, infos = (dicts[0] for dicts in results)
        self._note(self._env_id, observations, rewards)
        left = self._runner.batch.alive[self._env_id] if terminateds[ALL] or truncateds[ALL] else []
        terminations, truncations = (
            {**{a: f for a, f in flags.items() if a != ALL}, **dict.fromkeys(left, flags[ALL])}
            for flags in (terminateds, truncateds)
        )
        return observations, rewards, terminations, truncations, infos

    def state(self) -> np.ndarray[Any, Any]:
        """The global state; raises as `ParallelEnv.state`."""
        state: np.ndarray[Any, Any] = self._env.state(env_ids=[self._env_id])[0]
        return state

    def render(self) -> Any:
        """A frame; None where `render_mode` is None."""
        frames = self._env.render(env_ids=[self._env_id])
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Close all environments: they live and end together."""
        self._env.close()


def _checked(actions: Mapping[AgentID, Any]) -> Mapping[AgentID, Any]:
    if not isinstance(actions, Mapping):
        raise TypeError(f"expected a dict of actions by agent, got {type(actions).__name__}")
    return actions
