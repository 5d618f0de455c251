"""`GymnasiumVectorEnv`: every agent of every environment as a row, for parameter sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from marl_parallel.adapters import AgentID
from marl_parallel.core import stacking
from marl_parallel.core.arrays import Arrays, Stacked
from marl_parallel.core.exclusive import CallGuard, exclusive
from marl_parallel.core.native import InfoColumns
from marl_parallel.core.spaces import tree_map
from marl_parallel.core.transition import FINAL_OBS
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.infos import (
    agent_infos,
    env_infos,
    infos_by_row,
    next_episode_info,
    vector_infos,
    without_reset,
)
from marl_parallel.vector.rows import AgentRows, idle_actions, shared_reward_space, stacked
from marl_parallel.vector.stepper import ArrayStepper, ForwardedCalls

Others = Callable[[AgentID, Any], Any]
"""Acts for an agent that has no rows: takes it and its observations in all environments, and returns its actions."""


class GymnasiumVectorEnv(ForwardedCalls, gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A Gymnasium vector environment with a row for each agent of each environment.

    With k agents, row `i * k + j` is agent j of environment i. Observations and actions are in the form of the agents'
    space, batched; rewards are float64, flags bool. Vector rewards are `(num_envs, num_objectives)`, in the dtype of
    `reward_space`, as in MO-Gymnasium.

    The row of an absent agent is zeros; `infos["present"]` says which rows are data, `infos["acting"]` which want an
    action. No black-death wrapper is needed: a row's flag is True when its agent dies, and for all rows, the absent
    ones too, when their environment's episode ends. So a wrapper that counts episodes counts a second one of zeros for
    an agent that died early, and one that normalises takes zero rows into account.

    With `auto_reset="NEXT_STEP"` all of Gymnasium's vector wrappers apply. With `True` (SAME_STEP) infos are laid out
    as Gymnasium does: `final_obs` and `final_info` for rows that are done, the reset's infos on top.

    Args:
        env: Nobody else may step it. With `copy=False`, observations are valid until the next step or reset.
        agents: Who has rows, in this order; None for all.
        others: Acts for those who have none; None: zeros, or what is nearest to zero in their action space.

    Attributes:
        parallel_env: The `ParallelEnv`, also available as `env`.
        agents: Who has rows.
        reward_space: Of one row, where rewards are vectors; None where they are numbers.

    Raises:
        TypeError: `env` is no `ParallelEnv`.
        ValueError: It was made with `auto_reset=False`; the agents' spaces differ, or one declares none.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from gymnasium.wrappers.vector import RecordEpisodeStatistics
        >>> from marl_parallel import ParallelEnv
        >>> parallel = ParallelEnv([simple_spread_v3.parallel_env] * 4, "NEXT_STEP", num_workers=2)
        >>> env = RecordEpisodeStatistics(GymnasiumVectorEnv(parallel))
        >>> observations, infos = env.reset(seed=1)
        >>> for _ in range(25):
        ...     observations, rewards, terminations, truncations, infos = env.step(env.action_space.sample())
        >>> observations.shape, infos["episode"]["l"].tolist() == [25] * 12
        ((12, 18), True)
        >>> env.close()
    """

    def __init__(self, env: ParallelEnv, agents: Sequence[AgentID] | None = None, others: Others | None = None) -> None:
        self._stepper = ArrayStepper(env, self, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, vectors=True)
        self._guard = CallGuard(self._stepper.runner.check_open)
        self.env = self.parallel_env = env
        self.agents = list(env.possible_agents if agents is None else agents)
        self._rows = AgentRows(self._stepper, self.agents, "choose some with agents=[...]")
        self._others = [agent for agent in env.possible_agents if agent not in self._rows.agents]
        self._act = others
        self.num_envs = env.num_envs * len(self.agents)
        self.single_observation_space, self.single_action_space = self._rows.space, self._rows.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        reward_spaces = self._stepper.runner.schema.reward_spaces
        self.reward_space = shared_reward_space(reward_spaces, self.agents, type(self).__name__)
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self._same_step = self._stepper.mode is AutoresetMode.SAME_STEP

    @exclusive("reset")
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes; returns observations of all rows, and infos of those that were reset.

        Args:
            seed: Environment i gets `seed + i`; a sequence has one for each environment, or for each row.
            options: `"reset_mask"`, bool `(num_envs,)`, has only these rows reset, of each environment all or none; the
                rest is for each environment's own `reset`.

        Raises:
            ValueError: Seeds or a mask of another length, or not the same for all rows of an environment; no row is to
                be reset.
            TypeError: A mask that is no array of bool.
        """
        options = dict(options or {})
        mask = options.pop("reset_mask", None)
        env_ids = None if mask is None else self._masked(mask)
        arrays = self._stepper.reset(self._seeds(seed, env_ids), options or None, env_ids)
        self._rows.note_reset(env_ids)
        return self._rows.observations(arrays), self._infos(arrays, None)

    @exclusive("step")
    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all environments; returns observations, rewards, terminations, truncations and infos.

        Args:
            actions: In the form of `action_space`; rows of agents that do not act are ignored. Errors are those of
                `ArrayStepper.step`.
        """
        return self._results(self._stepper.step(self._by_agents(actions)))

    @exclusive("step_async")
    def step_async(self, actions: Any) -> None:
        """Begin to step all environments and return; `step_wait` has the results. Arguments and errors as of `step`."""
        self._stepper.send(self._by_agents(actions))

    @exclusive("step_wait")
    def step_wait(self) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """The results of `step_async`; raises `NoAsyncCallError` where no step is on its way."""
        return self._results(self._stepper.receive())

    # -- the rest --------------------------------------------------------------------------------------------------

    def render(self) -> tuple[Any, ...] | None:
        """A frame for each row, which is its environment's; None where `render_mode` is None."""
        frames = super().render()
        return None if frames is None else tuple(frame for frame in frames for _ in self.agents)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each row's environment."""
        return tuple(seed for seed in self.env.seed() for _ in self.agents)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment; keywords as of `ParallelEnv.close`."""
        self._stepper.close(**kwargs)

    def __del__(self) -> None:
        """Nothing: the `ParallelEnv` may be used further, and closes when it is collected itself."""

    # -- arguments -------------------------------------------------------------------------------------------------

    def _by_agents(self, actions: Any) -> list[Stacked]:
        by_agents = [self._rows.actions(actions)]
        if self._others:
            latest = self._stepper.latest
            seen = self._stepper.view.by_agent(latest.observations) if latest is not None else {}
            by_agents += [Stacked((agent,), self._of_other(agent, seen.get(agent))) for agent in self._others]
        return by_agents

    def _of_other(self, agent: AgentID, seen: Any) -> Any:
        space, num_envs = self._stepper.runner.schema.action_spaces[agent], self.env.num_envs
        try:
            actions = self._act(agent, seen) if self._act else idle_actions(space, num_envs)
            return stacked(space, actions, num_envs, 1)
        except ValueError as error:
            raise ValueError(f"others, for agent {agent!r}: {error}") from error

    def _masked(self, mask: Any) -> list[int]:
        """The environments of a mask of rows."""
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise TypeError(f"options['reset_mask'] must be a numpy array of bool, got {type(mask).__name__}")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"options['reset_mask'] must have shape ({self.num_envs},), got {mask.shape}")
        rows = mask.reshape(self.env.num_envs, len(self.agents))
        apart = np.flatnonzero(rows.any(axis=1) & ~rows.all(axis=1))
        if len(apart):
            raise ValueError(
                f"options['reset_mask'] must have all rows of a copy or none, but of copy {apart[0]} it has "
                f"{rows[apart[0]].tolist()}"
            )
        if not mask.any():
            raise ValueError("options['reset_mask'] must have at least one True")
        return [int(env_id) for env_id in np.flatnonzero(rows[:, 0])]

    def _seeds(
        self, seed: int | Sequence[int | None] | None, env_ids: Sequence[int] | None
    ) -> int | Sequence[int | None] | None:
        """Seeds by environment, for those of `env_ids`."""
        if seed is None or isinstance(seed, int | np.integer):
            return seed
        seeds, per_env, num_envs = list(seed), len(self.agents), self.env.num_envs
        if len(seeds) == self.num_envs != num_envs:
            if any(own != seeds[row - row % per_env] for row, own in enumerate(seeds)):
                raise ValueError("seeds of all rows must be equal within each environment; pass one for each of these")
            seeds = seeds[::per_env]
        if len(seeds) != num_envs:
            raise ValueError(f"expected {num_envs} seeds, one for each environment, got {len(seeds)}")
        return seeds if env_ids is None else [seeds[env_id] for env_id in env_ids]

    # -- results ---------------------------------------------------------------------------------------------------

    def _results(self, arrays: Arrays) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        rows = self._rows
        flags = rows.of(arrays.terminations), rows.of(arrays.truncations)
        if not arrays.shared_flags or rows.any_dead:
            were_dead = rows.dead if rows.any_dead else None
            flags = rows.flags(arrays)
            if were_dead is not None:
                self._silence(arrays, were_dead)
        terminations, truncations = flags[0].ravel(), flags[1].ravel()
        if self.reward_space is None:
            rewards = rows.of(arrays.rewards).ravel()
        else:
            rewards = stacking.flat(np.stack([arrays.vectors[agent] for agent in self.agents], axis=1))
        infos = self._infos(arrays, terminations | truncations if self._same_step else None)
        return rows.observations(arrays), rewards, terminations, truncations, infos

    def _silence(self, arrays: Arrays, dead: NDArray[np.bool_]) -> None:
        """Put zeros in rows that were dead before, whatever their simulator returned for them."""
        silent = np.zeros(arrays.rewards.shape, np.bool_)
        silent[:, self._rows.places] = dead
        arrays.rewards[silent] = 0.0
        column_of = {agent: column for column, agent in enumerate(self._stepper.view.agents)} if arrays.vectors else {}
        for agent, vectors in arrays.vectors.items():
            vectors[silent[:, column_of[agent]]] = 0
        if self._same_step:  # where the next episode has begun, they are there again
            silent &= ~(arrays.terminated | arrays.truncated)[:, None]
        arrays.present[silent] = False
        self._rows.clear_observations(arrays, silent)

    def _infos(self, arrays: Arrays, done: NDArray[np.bool_] | None) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        if done is None and type(arrays.infos) is InfoColumns:
            infos = infos_by_row(arrays.infos, self._rows.places, len(self.agents), self.env.num_envs)
        elif arrays.infos or (done is not None and done.any()):
            infos = self._infos_of_rows(arrays, done)
        for key, mask in (("present", arrays.present), ("acting", arrays.acting)):
            infos[key], infos[f"_{key}"] = self._rows.of(mask).ravel(), np.ones(self.num_envs, np.bool_)
        return infos

    def _infos_of_rows(self, arrays: Arrays, done: NDArray[np.bool_] | None) -> dict[str, Any]:
        """Infos by row; those of rows that are done have the last observation and info, as Gymnasium's SAME_STEP."""
        agents, everybody = self.agents, self._stepper.view.agents
        rows: dict[int, dict[Any, Any]] = {}
        for env_id, infos in arrays.infos.items():
            rows |= enumerate(agent_infos(env_id, infos, agents, everybody), env_id * len(agents))
        over = arrays.terminated | arrays.truncated
        of_envs = {int(i): env_infos(arrays.infos.get(int(i), {}), everybody) for i in np.flatnonzero(over)}
        for row in [] if done is None else np.flatnonzero(done).tolist():
            own, env_id = rows.get(row, {}), row // len(agents)
            if over[env_id]:
                final = own[FINAL_OBS] if FINAL_OBS in own else self._zeros()
                rows[row] = {**next_episode_info(own, of_envs[env_id]), FINAL_OBS: final}
            else:  # the environment goes on without this agent
                last = without_reset(own)
                rows[row] = {**last, "final_info": last, FINAL_OBS: self._rows.observation(arrays, row)}
        return vector_infos(sorted(rows.items()), self.num_envs)

    def _zeros(self) -> Any:
        return tree_map(lambda array: array[0], stacking.zeros(self.single_observation_space, (1,)))
