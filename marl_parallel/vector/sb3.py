"""`SB3VecEnv`: every agent of every environment as one environment of a Stable-Baselines3 `VecEnv`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from marl_parallel.adapters import attributes
from marl_parallel.arguments import base_seed
from marl_parallel.core import stacking
from marl_parallel.core.arrays import Arrays, Stacked
from marl_parallel.core.exclusive import exclusive
from marl_parallel.core.spaces import unfit_leaf, zeros
from marl_parallel.core.transition import FINAL_OBS
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.rows import AgentRows, agent_infos, divided, env_infos
from marl_parallel.vector.stepper import ArrayFacade, Scalarize

__doctest_requires__ = ["stable_baselines3"]

Indices = int | Iterable[int] | None
"""Of rows; None for all of them."""

_ADVICE = "make them equal with a wrapper, or use PettingZooVecEnv"

Results = tuple[Any, NDArray[np.float64], NDArray[np.bool_], list[dict[str, Any]]]


class SB3VecEnv(ArrayFacade[NDArray[Any], Results], VecEnv):
    """A `VecEnv` with a row for each agent of each environment, for parameter sharing.

    With k agents, row `i * k + j` is agent j of environment i. Actions and observations are in the form of the agents'
    space, batched: an array `(num_envs, ...)`, or a dict of them. Whole numbers may come as floats, as
    Stable-Baselines3 samples those of `MultiBinary` spaces. Rewards are float64 and dones bool, `(num_envs,)`, infos a
    list of dicts. All arrays are the caller's own, also with the `copy=False` of `env`.

    A row is done when its agent dies, and when its environment's episode ends. Then its info has the agent's last
    observation as `terminal_observation`, and the observation that is returned is the new episode's first, or zeros
    if the environment goes on without the agent. Infos of the environment, such as the mark of a restart in
    `infos[row]["__common__"]`, are in the info of each of its rows. The infos of a reset are in `reset_infos`.

    **Rows of absent agents are trained on**, as episodes of return 0; see `docs/facades.md`.

    Args:
        env: Made with `auto_reset=True`. No other facade may step it.
        scalarize: Turns vector rewards into numbers, as in `ArrayStepper`; needed if agents declare a `reward_space`.

    Attributes:
        agents: The agents with rows, in the environment's own order.
        present: `(num_envs,)`, bool: the agents that were observed or rewarded at the last reset or step.
        acting: `(num_envs,)`, bool: the agents that act next.

    Raises:
        TypeError, ValueError: As `ArrayStepper`, or the agents' spaces differ.

    Example:
        >>> from stable_baselines3 import PPO
        >>> from marl_parallel import make
        >>> env = SB3VecEnv(make("mpe2.simple_spread_v3", num_envs=4, num_workers=2))
        >>> env.num_envs, env.reset().shape
        (12, (12, 18))
        >>> model = PPO("MlpPolicy", env, n_steps=16, batch_size=64, n_epochs=1, device="cpu").learn(192)
        >>> env.close()
    """

    def __init__(self, env: ParallelEnv, *, scalarize: Scalarize | None = None) -> None:
        ArrayFacade.__init__(self, env, AutoresetMode.SAME_STEP, copy=True, scalarize=scalarize)
        self.agents = env.possible_agents
        for agent, space in self._stepper.runner.schema.observation_spaces.items():
            if unfit := unfit_leaf(space):
                raise ValueError(
                    f"rows must be arrays, but agent {agent!r} observes {space}, which has a part without a fixed "
                    f"size: {unfit}; {_ADVICE}"
                )
        self._rows = AgentRows(self._stepper, self.agents, _ADVICE)
        self._per_env = len(self.agents)
        VecEnv.__init__(self, env.num_envs * self._per_env, self._rows.space, self._rows.action_space)
        self.present = self.acting = np.zeros(self.num_envs, np.bool_)

    # -- stepping --------------------------------------------------------------------------------------------------

    @exclusive("reset")
    def reset(self) -> Any:
        """Begin new episodes, with the seed of `seed` and the options of `set_options`; discards a step in flight.

        Returns observations of all rows; infos are in `reset_infos`. Errors are those of `ParallelEnv.reset`.
        """
        by_env = [options or None for options in self._options[:: self._per_env]]
        if self._stepper.in_flight:
            self._stepper.receive()
        arrays = self._stepper.reset(self._seeds[0], by_env if any(by_env) else None)
        self._reset_seeds()
        self._reset_options()
        self._rows.note_reset()
        self.reset_infos = self._infos(arrays)
        return self._rows.flat_observations(arrays)

    step = VecEnv.step  # calls `step_async` and `step_wait`, which users of Stable-Baselines3 replace and wrap

    def _actions(self, actions: NDArray[Any]) -> list[Stacked]:
        return [self._rows.actions(stacking.whole(self.action_space, actions))]

    def _results(self, arrays: Arrays) -> Results:
        infos = self._infos(arrays)
        for info in infos:
            info["TimeLimit.truncated"] = False
        observations = self._rows.flat_observations(arrays)
        if arrays.plain and not self._rows.any_dead:
            return observations, arrays.rewards.ravel(), np.zeros(self.num_envs, np.bool_), infos
        over, were_dead = arrays.terminated | arrays.truncated, self._rows.dead
        terminations, truncations = self._rows.flags(arrays)
        dones, truncated = terminations | truncations, truncations & ~terminations & ~were_dead
        of_envs = {int(i): env_infos(arrays.infos.get(int(i), {}), self.agents) for i in np.flatnonzero(over)}
        for row in np.flatnonzero(dones).tolist():
            place, last = divmod(row, self._per_env), None
            if over[place[0]]:
                last = infos[row].get(FINAL_OBS)
                infos[row], self.reset_infos[row] = divided(infos[row], of_envs[place[0]])
            elif arrays.observed[place]:
                last = self._rows.observation(arrays, row)
            known = last is not None and not were_dead[place]
            infos[row]["terminal_observation"] = self._stepper.own(last) if known else zeros(self.observation_space)
            infos[row]["TimeLimit.truncated"] = bool(truncated[place]) and known
        arrays.rewards[were_dead] = 0.0
        stacking.clear(observations, np.flatnonzero(self._rows.dead))
        return observations, arrays.rewards.ravel(), dones.ravel(), infos

    def _infos(self, arrays: Arrays) -> list[dict[str, Any]]:
        """The infos of each row: its agent's, and those of its environment; notes which agents are present and act."""
        self.present, self.acting = arrays.present.ravel(), arrays.acting.ravel()
        rows: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for env_id, infos in arrays.infos.items():
            first = env_id * self._per_env
            rows[first : first + self._per_env] = agent_infos(env_id, infos, self.agents, self.agents)
        return rows

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seed environment i with `seed + i` at the next reset; None draws a seed, as Stable-Baselines3 does.

        Returns the seed of each row, which is its environment's. A wrong seed is a `TypeError` or `ValueError`.
        """
        first = base_seed(np.random.randint(2**31 - self.env.num_envs) if seed is None else seed)
        self._seeds = [first + row // self._per_env for row in range(self.num_envs)]
        return self._seeds

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Pass options to each environment's own `reset` at the next reset.

        Args:
            options: For all environments; or a list with one for each environment, or for each row and equal within an
                environment (else `ValueError`).
        """
        if isinstance(options, list):
            options = [of_env for of_env in self._rows.by_env(options, "options") for _ in self.agents]
        super().set_options(options)

    # -- calls to environments -------------------------------------------------------------------------------------

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of each row's environment; a method is called, as by `ParallelEnv.get_attr`."""
        try:
            return self.env_method(attr_name, indices=indices)
        except AttributeError:
            if attr_name != "render_mode":  # simulators need not declare one, and Stable-Baselines3 reads it
                raise
            return [self.env.render_mode for _ in self._env_ids(indices)]

    def has_attr(self, attr_name: str) -> bool:
        """Whether all environments have an attribute, which may be a method; it is not called."""
        return all(self.env.call(attributes.has, attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of the environments of these rows."""
        if env_ids := [*dict.fromkeys(self._env_ids(indices))]:
            self.env.set_attr(attr_name, [value] * len(env_ids), env_ids=env_ids)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method once in each environment of these rows; returns a result for each row."""
        of_rows = self._env_ids(indices)
        if not of_rows:
            return []
        env_ids = [*dict.fromkeys(of_rows)]
        results = dict(zip(env_ids, self.env.call(method_name, *method_args, env_ids=env_ids, **method_kwargs)))
        return [results[env_id] for env_id in of_rows]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """Whether each row's environment is wrapped in such a wrapper."""
        wrapped = self.env.call(attributes.is_wrapped, (wrapper_class.__module__, wrapper_class.__qualname__))
        return [wrapped[env_id] for env_id in self._env_ids(indices)]

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        """A frame of each environment, for `render` to tile; None if there are no frames."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"there are images only with render_mode='rgb_array', not with {self.render_mode!r}", stacklevel=2
            )
            return [None] * self.env.num_envs
        return list(self.env.render())

    def close(self) -> None:
        """Close the environment; idempotent. Discards a step in flight."""
        self._stepper.close()

    def _env_ids(self, indices: Indices) -> list[int]:
        """The environment of each row of `indices`; raises `IndexError` for an unknown row."""
        rows = [*self._get_indices(indices)]
        unknown = [row for row in rows if not -self.num_envs <= row < self.num_envs]
        if unknown:
            raise IndexError(f"there is no row {unknown[0]}: there are {self.num_envs}")
        return [row % self.num_envs // self._per_env for row in rows]
