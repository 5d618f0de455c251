"""`GymnasiumVectorEnv`: every agent of every environment as a row, as parameter sharing wants it."""

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
from marl_parallel.core.columns import evenly_spaced
from marl_parallel.core.exclusive import CallGuard, exclusive
from marl_parallel.core.native import InfoColumns
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
from marl_parallel.vector.rows import Deaths, chosen, row_of, rows_of, shared_reward_space, stacked, still
from marl_parallel.vector.stepper import ArrayStepper

Others = Callable[[AgentID, Any], Any]
"""Acts for an agent that has no rows: takes it and its observations in all environments, and returns its actions."""


class GymnasiumVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A Gymnasium vector environment with a row for each agent of each environment.

    Row `i * agents + j` is agent j of environment i.

    Observations and actions are in the form of the agents' space, batched; rewards are float64, flags bool. Rewards
    that are vectors are `(num_envs, num_objectives)`, in the dtype of `reward_space`, as in MO-Gymnasium. Where an
    agent is absent, its row is zeros; `infos["present"]` says which rows are data, `infos["acting"]` which want an
    action. No black-death wrapper is needed: a row's flag is True when its agent dies, and for all rows, the absent
    ones too, when their environment's episode ends. So a wrapper that counts episodes counts, for an agent that died
    early, a second one of nothing but zeros until its environment's end; and one that normalises takes zero rows into
    account.

    With `auto_reset="NEXT_STEP"` all of Gymnasium's vector wrappers apply. With `True` (SAME_STEP) infos are laid out
    as Gymnasium does: `final_obs` and `final_info` for rows that are done, the reset's infos on top.

    Args:
        env: Nobody else may step it. With `copy=False`, observations are valid until the next step or reset.
        agents: Who has rows, in this order; None for all.
        others: Acts for those who have none; None lets them stand still: zeros, or what is nearest to that in their
            space.

    Attributes:
        parallel_env: As given.
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
        self._view = self._stepper.view
        self.parallel_env, self._copies = env, env.num_envs
        schema = self._stepper.runner.schema
        self.agents = list(env.possible_agents if agents is None else agents)
        self._group, self._members = chosen(self._view.groups, env.possible_agents, self.agents, schema.action_spaces)
        self._row_agents = tuple(self.agents)
        place_of = {agent: place for place, agent in enumerate(env.possible_agents)}
        self._places = [place_of[agent] for agent in self.agents]
        everybody = self._places == [*range(len(place_of))]
        self._which = None if everybody else evenly_spaced(self._places) or self._places
        chosen_agents = {*self.agents}
        self._others = [agent for agent in place_of if agent not in chosen_agents]
        self._act = others or self._stand_still
        self.num_envs = self._copies * len(self.agents)
        self.single_observation_space = schema.observation_spaces[self.agents[0]]
        self.single_action_space = schema.action_spaces[self.agents[0]]
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.reward_space = shared_reward_space(schema.reward_spaces, self.agents, type(self).__name__)
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self._everywhere = np.ones(self.num_envs, np.bool_)
        self._same_step = self._stepper.mode is AutoresetMode.SAME_STEP
        self._deaths = Deaths(self._copies, len(self.agents))

    @exclusive("reset")
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes.

        Args:
            seed: Environment i gets `seed + i`; a sequence has one for each environment, or for each row.
            options: `"reset_mask"`, bool `(num_envs,)`, has only these rows reset, of each environment all or none; the
                rest is for each environment's own `reset`.

        Returns:
            Observations of all rows, and infos of those that were reset.

        Raises:
            ValueError: A mask or seeds of another length, that take an environment apart, or a mask of nothing.
            TypeError: A mask that is no array of bool.
        """
        options = dict(options or {})
        mask = options.pop("reset_mask", None)
        env_ids = None if mask is None else self._masked(mask)
        arrays = self._stepper.reset(self._seeds(seed, env_ids), options or None, env_ids)
        self._deaths.forget(env_ids)
        return self._seen(arrays), self._infos(arrays, None)

    @exclusive("step")
    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all environments.

        Args:
            actions: In the form of `action_space`; rows of those who do not act are not looked at.

        Returns:
            Observations, rewards, terminations, truncations and infos.

        Raises:
            ValueError: Actions of another shape or dtype, and nothing has been stepped; or all has been stepped, but
                what came of it has no place in arrays, such as a reward that is no number.
            ResetNeeded: `reset` has not been called. Nothing has been stepped.
            ParallelEnvError: A fault, as in `ParallelEnv.step`.
        """
        return self._results(self._stepper.step(self._by_agents(actions)))

    @exclusive("step_async")
    def step_async(self, actions: Any) -> None:
        """Begin to step all environments and return; `step_wait` has the results. Arguments and errors as of `step`."""
        self._stepper.send(self._by_agents(actions))

    @exclusive("step_wait")
    def step_wait(self) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """The results of `step_async`; raises `NoAsyncCallError` where nothing is on its way."""
        return self._results(self._stepper.receive())

    # -- the rest --------------------------------------------------------------------------------------------------

    def render(self) -> tuple[Any, ...] | None:
        """A frame for each row, which is its environment's; None where `render_mode` is None."""
        frames = self.parallel_env.render()
        return None if frames is None else tuple(frame for frame in frames for _ in self.agents)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each row's environment."""
        seeds = self.parallel_env.seed()
        return tuple(seed for seed in seeds for _ in self.agents)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment; one entry for each environment, as `ParallelEnv.call`."""
        return self.parallel_env.call(name, *args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of each environment; one entry for each environment, as `ParallelEnv.get_attr`."""
        return self.parallel_env.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each environment; as `ParallelEnv.set_attr`."""
        self.parallel_env.set_attr(name, values)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment; keywords as of `ParallelEnv.close`."""
        self._stepper.close(**kwargs)

    def __del__(self) -> None:
        """Nothing: whoever holds the `ParallelEnv` may go on with it, and it closes when nobody does."""

    # -- into the core ---------------------------------------------------------------------------------------------

    def _by_agents(self, actions: Any) -> list[Stacked]:
        of_rows = stacked(self.single_action_space, actions, self._copies, len(self.agents))
        by_agents = [Stacked(self._row_agents, of_rows)]
        if self._others:
            latest = self._stepper.latest
            seen = self._view.by_agent(latest.observations) if latest is not None else {}
            by_agents += [Stacked((agent,), self._of_other(agent, seen.get(agent))) for agent in self._others]
        return by_agents

    def _of_other(self, agent: AgentID, seen: Any) -> Any:
        try:
            return stacked(self._stepper.runner.schema.action_spaces[agent], self._act(agent, seen), self._copies, 1)
        except ValueError as error:
            raise ValueError(f"others, for agent {agent!r}: {error}") from error

    def _stand_still(self, agent: AgentID, _: Any) -> Any:
        return still(self._stepper.runner.schema.action_spaces[agent], self._copies)

    def _masked(self, mask: Any) -> list[int]:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise TypeError(f"options['reset_mask'] must be a numpy array of bool, got {type(mask).__name__}")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"options['reset_mask'] must have shape ({self.num_envs},), got {mask.shape}")
        rows = mask.reshape(self._copies, len(self.agents))
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
        if seed is None or isinstance(seed, int | np.integer):
            return seed
        seeds, per_copy = list(seed), len(self.agents)
        if len(seeds) == self.num_envs != self._copies:
            by_copy = [seeds[first : first + per_copy] for first in range(0, len(seeds), per_copy)]
            if any(len(set(own)) > 1 for own in by_copy):
                raise ValueError("seeds of all rows must be equal within each copy; pass one for each copy")
            seeds = [own[0] for own in by_copy]
        if len(seeds) != self._copies:
            raise ValueError(f"expected {self._copies} seeds, one for each copy, got {len(seeds)}")
        return seeds if env_ids is None else [seeds[env_id] for env_id in env_ids]

    # -- out of the core -------------------------------------------------------------------------------------------

    def _seen(self, arrays: Arrays) -> Any:
        return rows_of(arrays.observations[self._group], self._members)

    def _flat(self, array: NDArray[Any]) -> NDArray[Any]:
        return self._of_rows(array).ravel()

    def _of_rows(self, array: NDArray[Any]) -> NDArray[Any]:
        return array if self._which is None else array[:, self._which]

    def _results(self, arrays: Arrays) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        flags = self._of_rows(arrays.terminations), self._of_rows(arrays.truncations)
        if not arrays.together or self._deaths.any:
            were_dead = self._deaths.dead if self._deaths.any else None
            flags = self._deaths.flags(flags, arrays)
            if were_dead is not None:
                self._silence(arrays, were_dead)
        terminations, truncations = flags[0].ravel(), flags[1].ravel()
        observations = self._seen(arrays)
        infos = self._infos(arrays, terminations | truncations if self._same_step else None, observations)
        return observations, self._rewards(arrays), terminations, truncations, infos

    def _rewards(self, arrays: Arrays) -> NDArray[Any]:
        if self.reward_space is None:
            return self._flat(arrays.rewards)
        return stacking.flat(np.stack([arrays.vectors[agent] for agent in self.agents], axis=1))

    def _silence(self, arrays: Arrays, dead: NDArray[np.bool_]) -> None:
        """Have nothing said of rows that were dead before, whatever their simulator says of them."""
        silent = np.zeros(arrays.rewards.shape, np.bool_)
        silent[:, self._places] = dead
        arrays.rewards[silent] = 0.0
        for agent, vectors in arrays.vectors.items():
            vectors[silent[:, self._view.agents.index(agent)]] = 0
        if self._same_step:  # where the next episode has begun, they are there again
            silent &= ~(arrays.terminated | arrays.truncated)[:, None]
        arrays.present[silent] = False
        stacking.clear(arrays.observations[self._group], silent[:, self._view.groups[self._group].positions])

    def _infos(self, arrays: Arrays, done: NDArray[np.bool_] | None, observations: Any = None) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        if done is None and type(arrays.infos) is InfoColumns:
            infos = infos_by_row(arrays.infos, self._which, len(self.agents), self._copies)
        elif arrays.infos or (done is not None and done.any()):
            infos = self._infos_of_rows(arrays, done, observations)
        infos["present"], infos["_present"] = self._flat(arrays.present), self._everywhere.copy()
        infos["acting"], infos["_acting"] = self._flat(arrays.acting), self._everywhere.copy()
        return infos

    def _infos_of_rows(self, arrays: Arrays, done: NDArray[np.bool_] | None, observations: Any) -> dict[str, Any]:
        """Infos by row; those of rows that are done have the last observation and info, as Gymnasium's SAME_STEP."""
        rows: dict[int, dict[Any, Any]] = {}
        for env_id, infos in arrays.infos.items():
            rows |= enumerate(agent_infos(env_id, infos, self.agents, self._view.agents), env_id * len(self.agents))
        if done is not None:
            space, over = self.single_observation_space, np.flatnonzero(arrays.terminated | arrays.truncated).tolist()
            of_envs = {env_id: env_infos(arrays.infos.get(env_id, {}), self._view.agents) for env_id in over}
            for row in np.flatnonzero(done).tolist():
                own, env_id = rows.get(row, {}), row // len(self.agents)
                if env_id in of_envs:
                    final = own[FINAL_OBS] if FINAL_OBS in own else row_of(space, stacking.zeros(space, (1,)), 0)
                    rows[row] = {**next_episode_info(own, of_envs[env_id]), FINAL_OBS: final}
                else:  # the environment goes on without this agent
                    last = without_reset(own)
                    rows[row] = {**last, "final_info": last, FINAL_OBS: row_of(space, observations, row)}
        return vector_infos(sorted(rows.items()), self.num_envs)
