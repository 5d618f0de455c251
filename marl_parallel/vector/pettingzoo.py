"""`PettingZooVecEnv`: dicts by agent of arrays, with PettingZoo's names; `SingleEnv`: one environment of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pettingzoo  # type: ignore[import-untyped]
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core.block.array_view import Arrays
from marl_parallel.core.transition import ALL
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.facade import ArrayFacade
from marl_parallel.vector.rows import infos_by_agent, inherited_flags

ByAgent = dict[AgentID, Any]
FiveByAgent = tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]


class PettingZooVecEnv(ArrayFacade[Mapping[AgentID, Any], FiveByAgent, tuple[ByAgent, ByAgent]]):
    """Many environments as one, with dicts by agent of arrays over all environments.

    Actions and observations are in the form of the agent's batched space: an array `(num_envs, ...)`, or dicts and
    tuples of them. Agents that act in no environment need no actions. Rewards are float64 and flags bool,
    `(num_envs,)`; vector rewards are `(num_envs, num_objectives)`, in the dtype of `single_reward_space`. All possible
    agents are in every dict. The rows of environments without the agent are zeros: `present[agent]` marks those that
    are data, `acting[agent]` the rows that need an action. When an episode ends, agents that were observed or rewarded
    in this step and have no flag of their own get the environment's. Infos are laid out by agent as in Gymnasium's
    vector environments; infos of the environment, not an agent, are under their own key.

    With `auto_reset=False`, PettingZoo's own loop over `agents` runs unchanged; it ends when no agent is left in any
    environment.

    Args:
        env: No other facade may step it. With `copy=False`, observations are valid until the next step or reset.

    Raises:
        TypeError, ValueError: As `FacadeStepper`.

    Example:
        >>> from marl_parallel import make
        >>> with PettingZooVecEnv(make("mpe2.simple_spread_v3", 4, auto_reset=False, num_workers=2)) as env:
        ...     observations, infos = env.reset(seed=1)
        ...     while env.agents:
        ...         actions = {agent: env.action_space(agent).sample() for agent in env.agents}
        ...         observations, rewards, terminations, truncations, infos = env.step(actions)
        >>> observations["agent_0"].shape, truncations["agent_0"]
        ((4, 18), array([ True,  True,  True,  True]))
    """

    def __init__(self, env: ParallelEnv) -> None:
        super().__init__(env, vectors=True)
        self._stepper.view.wants_info_arrays = True
        self.possible_agents = env.possible_agents
        self.max_num_agents = len(self.possible_agents)
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self._batched = tuple(
            {agent: batch_space(declared[agent], self.num_envs) for agent in self.possible_agents}
            for declared in (self._stepper.schema.observation_spaces, self._stepper.schema.action_spaces)
        )
        self._present = self._acting = np.zeros((self.num_envs, len(self.possible_agents)), np.bool_)

    @property
    def agents(self) -> list[AgentID]:
        """The agents alive in any environment whose episode goes on."""
        transitions = self._stepper.transitions
        alive = {agent for agents, over in zip(transitions.alive, transitions.over) if not over for agent in agents}
        return [agent for agent in self.possible_agents if agent in alive]

    @property
    def num_agents(self) -> int:
        return len(self.agents)

    @property
    def present(self) -> ByAgent:
        """By agent, the environments in which its row is data: `(num_envs,)`, bool."""
        return self._by_agent(self._present)

    @property
    def acting(self) -> ByAgent:
        """By agent, the environments in which it should act next: `(num_envs,)`, bool."""
        return self._by_agent(self._acting)

    @property
    def over(self) -> NDArray[np.bool_]:
        """The environments whose episode has ended and that have not been reset: `(num_envs,)`, bool."""
        return np.array(self._stepper.transitions.over, np.bool_)

    def observation_space(self, agent: AgentID) -> Space[Any]:
        """The batched observation space of one agent, for all environments."""
        return self._batched[0][agent]

    def action_space(self, agent: AgentID) -> Space[Any]:
        """The batched action space of one agent, for all environments."""
        return self._batched[1][agent]

    def single_observation_space(self, agent: AgentID) -> Space[Any]:
        """The observation space of one agent in one environment; other `single_` methods are similar."""
        return self._stepper.schema.observation_spaces[agent]

    def single_action_space(self, agent: AgentID) -> Space[Any]:
        return self._stepper.schema.action_spaces[agent]

    def reward_space(self, agent: AgentID) -> Space[Any] | None:
        """The batched reward space of one agent, for all environments; None if its rewards are numbers."""
        space = self.single_reward_space(agent)
        return None if space is None else batch_space(space, self.num_envs)

    def single_reward_space(self, agent: AgentID) -> Space[Any] | None:
        return self._stepper.schema.reward_spaces.get(agent)

    # -- stepping --------------------------------------------------------------------------------------------------

    def _actions(self, actions: Mapping[AgentID, Any]) -> Mapping[AgentID, Any]:
        if type(actions) is not dict and not isinstance(actions, Mapping):
            raise TypeError(f"expected a dict of actions by agent, got {type(actions).__name__}")
        return actions

    def _results(self, arrays: Arrays) -> FiveByAgent:
        self._present, self._acting = arrays.present, arrays.acting
        flags, agents = (arrays.terminations, arrays.truncations), self.possible_agents
        if not (arrays.shared_flags or arrays.none_over):
            flags = inherited_flags(arrays)
        if self._stepper.view.is_one_stack:
            observations = dict(zip(agents, arrays.observations[0].swapaxes(0, 1)))
        else:
            observations = self._stepper.view.by_agent(arrays.observations)
        return (
            observations,
            {**dict(zip(agents, arrays.rewards.T)), **arrays.vectors},
            dict(zip(agents, flags[0].T)),
            dict(zip(agents, flags[1].T)),
            infos_by_agent(arrays.infos, agents, self.num_envs),
        )

    def _by_agent(self, array: NDArray[Any]) -> ByAgent:
        return dict(zip(self.possible_agents, array.T))

    def single(self, env_id: int = 0) -> SingleEnv:
        """One environment as a PettingZoo `ParallelEnv`; `ValueError` unless `env` has `auto_reset=False`."""
        return SingleEnv(self.env, env_id, self._stepper.note)

    def state(self) -> NDArray[Any]:
        """The global states, `(num_envs, *state_space.shape)`; raises as `ParallelEnv.state`."""
        return self.env.state()


class SingleEnv(pettingzoo.ParallelEnv):  # type: ignore[misc]
    """One environment for PettingZoo's wrappers, tests and loops; `record` is called with the result of each call."""

    def __init__(self, env: ParallelEnv, env_id: int, record: Callable[[int, ByAgent, ByAgent], None]) -> None:
        stepper = env.stepper
        if stepper.mode is not AutoresetMode.DISABLED:
            raise ValueError(
                f"single() needs a ParallelEnv with auto_reset=False, got AutoresetMode.{stepper.mode.name}"
            )
        if not 0 <= env_id < env.num_envs:
            raise ValueError(f"there is no environment {env_id!r}; env_id must be 0 to {env.num_envs - 1}")
        self._env, self._stepper, self._env_id, self._record = env, stepper, env_id, record
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self.possible_agents = env.possible_agents_of(env_id)
        schema, own = stepper.schema, {*self.possible_agents}
        self.observation_spaces, self.action_spaces, self.reward_spaces = (
            of_all if len(own) == len(schema.possible_agents) else {a: one for a, one in of_all.items() if a in own}
            for of_all in (schema.observation_spaces, schema.action_spaces, schema.reward_spaces)
        )
        if env.state_space is not None:
            self.state_space = env.state_space

    @property
    def agents(self) -> list[AgentID]:
        """The agents alive; none once the episode is over."""
        transitions = self._stepper.transitions
        return [] if transitions.over[self._env_id] else [*transitions.alive[self._env_id]]

    def observation_space(self, agent: AgentID) -> Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: AgentID) -> Space[Any]:
        return self.action_spaces[agent]

    def reward_space(self, agent: AgentID) -> Space[Any]:
        return self.reward_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[AgentID, Any], dict[AgentID, Any]]:
        """Begin a new episode; options are dropped if the simulator's own `reset` takes none."""
        seeds, resets = None if seed is None else [seed], self._stepper.batch.resets
        if not resets.takes_options or self._env_id in resets.no_options:
            options = None
        (observations,), (infos,) = self._env.reset(seed=seeds, options=options, env_ids=[self._env_id])
        self._record(self._env_id, observations, {})
        return observations, infos

    def step(self, actions: dict[AgentID, Any]) -> tuple[dict[AgentID, Any], ...]:
        """Step once; when the episode ends, agents still alive get the flag of `__all__`, which is left out."""
        results = self._env.step([actions], env_ids=[self._env_id])
        observations, rewards, terminateds, truncateds, infos = (dicts[0] for dicts in results)
        self._record(self._env_id, observations, rewards)
        alive = self._stepper.transitions.alive[self._env_id] if terminateds[ALL] or truncateds[ALL] else []
        terminations, truncations = (
            {**{a: f for a, f in flags.items() if a != ALL}, **dict.fromkeys(alive, flags[ALL])}
            for flags in (terminateds, truncateds)
        )
        return observations, rewards, terminations, truncations, infos

    def state(self) -> np.ndarray[Any, Any]:
        """The global state; raises as `ParallelEnv.state`."""
        state: np.ndarray[Any, Any] = self._env.state(env_ids=[self._env_id])[0]
        return state

    def render(self) -> Any:
        frames = self._env.render(env_ids=[self._env_id])
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Close all environments."""
        self._env.close()
