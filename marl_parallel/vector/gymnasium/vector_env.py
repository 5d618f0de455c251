"""`GymnasiumVectorEnv`: every agent of every environment as a row, for parameter sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from marl_parallel.action_masks import KEY as ACTION_MASK
from marl_parallel.action_masks import declares_mask
from marl_parallel.adapters import AgentID
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Arrays, Stacked
from marl_parallel.core.block.info_columns import InfoColumns
from marl_parallel.core.exclusive import exclusive
from marl_parallel.core.spaces import fits_block, tree_map
from marl_parallel.core.transition import EPISODE, FINAL_OBS
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.facade import ArrayFacade
from marl_parallel.vector.forwarding import simulators
from marl_parallel.vector.rows import (
    AgentRows,
    agent_infos,
    bounds,
    divided,
    reset_mask,
    stacked,
    vector_infos,
    with_the_dead,
)

Others = Callable[[AgentID, Any], Any]
"""Acts for an agent that has no rows: takes it and its observations in all environments, and returns its actions."""

FirstReturn = tuple[Any, dict[str, Any]]
StepReturn = tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]


class _WithOthers(NamedTuple):
    """The actions of rows, and those of the agents without rows."""

    own: Any
    of_others: list[Stacked]


class GymnasiumVectorEnv(ArrayFacade[Any, StepReturn, FirstReturn], gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A Gymnasium vector environment with a row for each agent of each environment.

    With k agents, row `i * k + j` is agent j of environment i. Observations and actions are in the form of the agents'
    space, batched; whole numbers may be floats in actions. Rewards are float64, flags bool. Vector rewards are
    `(num_envs, num_objectives)`, in the dtype of `reward_space`, as in MO-Gymnasium.

    The row of an absent agent is zeros; `infos["present"]` marks the rows that are data, `infos["acting"]` those that
    need an action. If the observation space declares an `action_mask`, or the kind of environment has masks of its own,
    as PyMARL's, `infos["action_mask"]` has the masks of all rows, as in `FacadeStepper.action_masks`: bool
    `(num_envs, num_choices)`. A row is done when its agent dies, and all rows of an environment are when its episode
    ends. With `auto_reset="NEXT_STEP"` all of Gymnasium's vector wrappers apply. With `True` (SAME_STEP) infos are the
    reset's, with `final_obs` and `final_info` in rows that are done, as in Gymnasium. With `False` (DISABLED) the rows
    of an environment whose episode is over are zeros and stay done until `reset(options={"reset_mask": env.over})`.
    With the `episode_stats` of `env`, `infos["episode"]` has the returns `"r"` and lengths `"l"` of rows whose agent's
    own part of an episode ends, in the form of Gymnasium's `RecordEpisodeStatistics`.

    Args:
        env: No other facade may step it. With `copy=False`, observations are valid until the next step or reset.
        agents: The agents with rows, in this order; None for all.
        others: Acts for the agents without rows. By default their actions are zeros, or the values nearest to zero in
            their action space.

    Attributes:
        parallel_env: The `ParallelEnv`, also available as `env`.
        agents: The agents with rows.
        present: bool `(num_envs,)`: the rows that are data, as in the latest infos.
        envs: With `backend="serial"`, the simulators; else an `AttributeError`.
        over: bool `(num_envs,)`: the rows of environments whose episode is over and that have not been reset.
        reward_space: The space of one row's vector reward; None if rewards are numbers.

    Raises:
        TypeError, ValueError: As `FacadeStepper`, or the agents' spaces differ.

    Example:
        >>> from gymnasium.wrappers.vector import RecordEpisodeStatistics
        >>> from marl_parallel import make
        >>> parallel = make("mpe2.simple_spread_v3", num_envs=4, auto_reset="NEXT_STEP", num_workers=2)
        >>> env = RecordEpisodeStatistics(GymnasiumVectorEnv(parallel))
        >>> observations, infos = env.reset(seed=1)
        >>> for _ in range(25):
        ...     observations, rewards, terminations, truncations, infos = env.step(env.action_space.sample())
        >>> observations.shape, infos["episode"]["l"].tolist() == [25] * 12
        ((12, 18), True)
        >>> env.close()
    """

    saved_as = "GymnasiumVectorEnv"

    def __init__(self, env: ParallelEnv, agents: Sequence[AgentID] | None = None, others: Others | None = None) -> None:
        super().__init__(env, vectors=True)
        self.agents = list(env.possible_agents if agents is None else agents)
        self._rows = AgentRows(self._stepper, self.agents, "choose some with agents=[...]", type(self).__name__)
        self._others = [agent for agent in env.possible_agents if agent not in self._rows.agents]
        self._act = others
        self.num_envs = env.num_envs * len(self.agents)
        self.single_observation_space, self.single_action_space = self._rows.space, self._rows.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.reward_space = self._rows.reward_space
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self._has_masks = declares_mask(self._rows.space, self._rows.action_space) or (
            {*self.agents} <= {*self._stepper.schema.mask_spaces}
        )
        self.present = np.zeros(self.num_envs, np.bool_)
        self._same_step = self._stepper.mode is AutoresetMode.SAME_STEP
        self._has_stats = self._stepper.transitions.statistics.in_infos

    @exclusive("reset")
    def reset(  # type: ignore[override]
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes; returns observations of all rows, and infos of those that were reset.

        Args:
            seed: Environment i gets `seed + i`; a sequence has one for each environment, or for each row.
            options: `"reset_mask"`, bool `(num_envs,)`, selects the rows to reset, all or none of each environment; the
                rest is for each environment's own `reset`.

        Raises:
            TypeError, ValueError: Seeds or a mask have another form, or differ between the rows of an environment.
        """
        seed, options, env_ids = self._reset_arguments(seed, options)
        return self._first(self._stepper.reset(seed, options, env_ids))

    def reset_async(  # type: ignore[override]
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin to reset and return; `reset_wait` returns the results. Arguments and errors are as in `reset`."""
        seed, options, env_ids = self._reset_arguments(seed, options)
        super().reset_async(seed, options, env_ids)

    @property
    def envs(self) -> list[Any]:
        """The simulators, one for each environment, as `SyncVectorEnv.envs`; only with `backend="serial"`.

        Do not step or reset them: the vector environment would not know. A restart replaces them.

        Raises:
            AttributeError: They run in other processes or threads.
        """
        return simulators(self)

    @property
    def over(self) -> NDArray[np.bool_]:
        return np.repeat(np.array(self._stepper.transitions.over, np.bool_), len(self.agents))

    def _reset_arguments(
        self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> tuple[int | Sequence[int | None] | None, dict[str, Any] | None, list[int] | None]:
        """Seeds by environment, options without the mask, and the environments of the mask."""
        options, mask = reset_mask(options, self.num_envs)
        env_ids: list[int] | None = None
        if mask is not None:
            env_ids = np.flatnonzero(self._rows.by_env(mask.tolist(), "options['reset_mask']")).tolist()
        if seed is not None and not isinstance(seed, int | np.integer):
            seed = self._rows.by_env([*seed], "seeds")
            seed = seed if env_ids is None else [seed[env_id] for env_id in env_ids]
        return seed, options, env_ids

    def render(self) -> tuple[Any, ...] | None:
        """A frame for each row, which is its environment's; None if `render_mode` is None."""
        frames = super().render()
        return None if frames is None else tuple(frame for frame in frames for _ in self.agents)

    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The seed of each row's environment."""
        return tuple(seed for seed in self.env.seed() for _ in self.agents)

    close = gymnasium.vector.VectorEnv.close  # sets the library's `closed`, and calls `close_extras` once

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment; keywords are as in `ParallelEnv.close`."""
        self._stepper.close(**kwargs)

    def __del__(self) -> None:
        """Nothing: the `ParallelEnv` may be used further, and closes when it is collected itself."""

    def step(self, actions: Any) -> StepReturn:
        """Step all environments; actions have one row for each agent of each environment. Errors: see `ArrayFacade`."""
        return super().step(self._with_others(actions) if self._others else actions)

    def step_async(self, actions: Any) -> None:
        """Begin to step all environments and return; `step_wait` returns the results."""
        super().step_async(self._with_others(actions) if self._others else actions)

    def _actions(self, actions: Any) -> list[Stacked]:
        if isinstance(actions, _WithOthers):
            return [actions.own, *actions.of_others]
        return [self._rows.actions(actions)]

    def _with_others(self, actions: Any) -> _WithOthers:
        """The actions with those of the other agents, before the step begins: `others` may use the `ParallelEnv`."""
        own, by_agents = self._rows.actions(actions), list[Stacked]()  # wrong actions of the caller's come first
        latest, num_envs = self._stepper.latest, self._rows.num_envs
        seen = self._stepper.view.by_agent(latest.observations) if latest is not None else {}
        for agent in self._others:
            space = self._stepper.schema.action_spaces[agent]
            try:
                drawn = self._act(agent, seen.get(agent)) if self._act else _nearest_to_zero(space, num_envs)
                by_agents.append(Stacked((agent,), stacked(space, drawn, num_envs, 1)))
            except (TypeError, ValueError) as error:
                kind = ValueError if isinstance(error, ValueError) else TypeError
                raise kind(f"others, for agent {agent!r}: {error}") from error
        return _WithOthers(own, by_agents)

    def _first(self, arrays: Arrays) -> tuple[Any, dict[str, Any]]:
        return super()._first(with_the_dead(arrays, self._stepper))

    def _results(self, arrays: Arrays) -> StepReturn:
        rows = self._rows
        rewards = rows.flat(arrays.rewards) if rows.reward_space is None else stacking.flat(rows.rewards(arrays))
        if arrays.plain:
            terminations, truncations = np.zeros((2, self.num_envs), np.bool_)
        else:
            terminations, truncations = map(np.ravel, rows.flags(arrays))
        if not arrays.plain and (were_dead := rows.of(arrays.were_dead)).any():  # whatever the simulator returned
            rewards[were_dead.ravel()] = 0
            if self._same_step:  # the agents are back in environments whose next episode has begun
                were_dead = were_dead & ~(arrays.terminated | arrays.truncated)[:, None]
            rows.clear(arrays, were_dead)
        done = np.flatnonzero(terminations | truncations).tolist() if self._same_step and not arrays.plain else []
        infos = self._infos(arrays, done)
        return rows.flat_observations(arrays), rewards, terminations, truncations, infos

    def _infos(self, arrays: Arrays, done: Sequence[int] = ()) -> dict[str, Any]:
        """Infos by row; rows that are `done` have the last observation and info, as in Gymnasium's SAME_STEP."""
        infos: dict[str, Any] = {}
        if not done and type(arrays.infos) is InfoColumns and arrays.infos.are_alike:
            infos = self._rows.infos(arrays.infos)
        elif arrays.infos or done:
            per_env, possible_agents = len(self.agents), self._stepper.view.agents
            over = np.flatnonzero(arrays.terminated | arrays.truncated).tolist() if done else []
            rows: dict[int, dict[Any, Any]] = {}
            for env_id in {**arrays.infos, **dict.fromkeys(over)}:
                of_env, next_episode = arrays.infos.get(env_id, {}), env_id in over
                of_agents = agent_infos(env_id, of_env, self.agents, possible_agents, next_episode=next_episode)
                rows |= enumerate(of_agents, env_id * per_env)
            for row in done:
                observations: Sequence[Any] = arrays.observations
                if row // per_env in over:
                    last, observations = rows[row]["final_info"], arrays.final_observations
                    if self._has_stats and EPISODE in last:
                        rows[row][EPISODE] = last[EPISODE]
                else:  # the environment goes on without this agent
                    last, _ = divided(rows.get(row, {}), {})
                    rows[row] = {**last, "final_info": last}
                rows[row][FINAL_OBS] = self._rows.observation(observations, row)
            infos = vector_infos(sorted(rows.items()), self.num_envs)
        if self._has_masks:
            masks = stacking.flat(self._stepper.action_masks(self.agents))
            infos[ACTION_MASK], infos[f"_{ACTION_MASK}"] = masks, np.ones(self.num_envs, np.bool_)
        for key, mask in (("present", arrays.present), ("acting", arrays.acting)):
            infos[key], infos[f"_{key}"] = self._rows.flat(mask), np.ones(self.num_envs, np.bool_)
        self.present = infos["present"]
        return infos


def _nearest_to_zero(space: Any, num_envs: int) -> Any:
    """For all environments, the actions nearest to zero; `ValueError` if a part of the space has no such action."""

    def of_leaf(leaf: Any) -> NDArray[Any]:
        if not fits_block(leaf):
            raise ValueError(f"no action of {leaf} is nearest to zero; pass others= to act")
        one = np.clip(np.zeros(leaf.shape or (), leaf.dtype), *bounds(leaf)).astype(leaf.dtype)
        return np.repeat(one[None], num_envs, axis=0)

    return tree_map(of_leaf, space)
