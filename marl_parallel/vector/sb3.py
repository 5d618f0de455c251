"""`SB3VecEnv`: every agent of every environment as an environment of Stable-Baselines3's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marl_parallel.adapters import attributes
from marl_parallel.arguments import base_seed
from marl_parallel.core import stacking
from marl_parallel.core.arrays import Arrays
from marl_parallel.core.exclusive import CallGuard, exclusive
from marl_parallel.core.spaces import unfit_leaf, zeros
from marl_parallel.core.transition import FINAL_OBS, RESET_INFO
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.infos import agent_infos, env_infos, reset_info
from marl_parallel.vector.rows import AgentRows
from marl_parallel.vector.stepper import ArrayStepper, Scalarize

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise ImportError(
        f'SB3VecEnv needs Stable-Baselines3: pip install "marl-parallel[sb3]" ({error})', name=error.name
    ) from error

__doctest_requires__ = ["stable_baselines3"]

Indices = int | Iterable[int] | None
"""Of rows; None for all of them."""

_ADVICE = "have their simulator wrapped so that they are, or use PettingZooVecEnv"


class SB3VecEnv(VecEnv):
    """A `VecEnv` with a row for each agent of each environment, for parameter sharing.

    With k agents, row `i * k + j` is agent j of environment i. Observations are in the form of the agents' space,
    batched: an array `(num_envs, ...)`, or a dict of them. Rewards are float64 and dones bool, `(num_envs,)`, infos a
    list of dicts. All are the caller's own, also where `env` was made with `copy=False`.

    A row is done when its agent dies, and when its environment's episode ends. Then its info has the agent's last
    observation as `terminal_observation`, and the observation that is returned is the next one: the new episode's
    first, or zeros where the environment goes on without the agent. Every info has `TimeLimit.truncated`: whether the
    row is done and was cut off rather than ended.

    **Rows of absent agents are trained on.** From an agent's death until its environment's episode ends, its row is
    zeros: the observations, rewards, and actions that nobody carries out. It is done once more when the environment's
    episode ends, with zeros as its `terminal_observation` and never as truncated, so that returns do not run across
    episodes; statistics of episodes count these as episodes of return 0. The same holds for agents that have not come
    yet. `present` and `acting` tell these rows from others.

    Infos of the environment rather than of an agent, such as the mark of a restart in `infos[row]["__common__"]`, are
    in the info of each of its rows; an agent's own key goes first. The infos of a reset are in `reset_infos`.

    Args:
        env: Made with `auto_reset=True`. Nobody else may step it.
        scalarize: Makes numbers of vector rewards, as of `ArrayStepper`; needed where agents declare a `reward_space`.

    Attributes:
        agents: The agents with rows, in the environment's own order.
        present: `(num_envs,)`, bool: the agents that were observed or rewarded at the last reset or step.
        acting: `(num_envs,)`, bool: the agents whose actions count next.

    Raises:
        TypeError: `env` is no `ParallelEnv`.
        ValueError: Its auto-reset is another one, the agents' spaces differ, or one declares none; or `scalarize` is
            missing or does not fit the rewards.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from stable_baselines3 import PPO
        >>> from marl_parallel import ParallelEnv
        >>> env = SB3VecEnv(ParallelEnv([simple_spread_v3.parallel_env] * 4, num_workers=2))
        >>> env.num_envs, env.reset().shape
        (12, (12, 18))
        >>> model = PPO("MlpPolicy", env, n_steps=16, batch_size=64, n_epochs=1, device="cpu").learn(192)
        >>> env.close()
    """

    def __init__(self, env: ParallelEnv, *, scalarize: Scalarize | None = None) -> None:
        self._stepper = ArrayStepper(env, self, AutoresetMode.SAME_STEP, copy=True, scalarize=scalarize)
        self._guard = CallGuard(self._stepper.runner.check_open)
        self.env, self.agents = env, env.possible_agents
        for agent, space in self._stepper.runner.schema.observation_spaces.items():
            if unfit := unfit_leaf(space):
                raise ValueError(
                    f"rows must be arrays, but agent {agent!r} observes {space}, which has a part without a fixed "
                    f"size: {unfit}; {_ADVICE}"
                )
        self._rows = AgentRows(self._stepper, self.agents, _ADVICE)
        self._per_env = len(self.agents)
        self._first_seed: int | None = None
        self._waiting = False
        rows = env.num_envs * self._per_env
        self.present, self.acting = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
        super().__init__(rows, self._rows.space, self._rows.action_space)

    # -- stepping --------------------------------------------------------------------------------------------------

    @exclusive("reset")
    def reset(self) -> Any:
        """Begin new episodes, with the seed of `seed` and the options of `set_options`; a step in flight is dropped.

        Returns observations of all rows; infos are in `reset_infos`. Errors are those of `ParallelEnv.reset`.
        """
        by_env = [options or None for options in self._options[:: self._per_env]]
        if self._waiting:
            self._receive()
        arrays = self._stepper.reset(self._first_seed, by_env if any(by_env) else None)
        self._reset_seeds()
        self._reset_options()
        self._rows.note_reset()
        self.reset_infos = self._noted(arrays)
        return self._rows.observations(arrays)

    @exclusive("step_async")
    def step_async(self, actions: NDArray[Any]) -> None:
        """Begin to step all environments and return.

        Args:
            actions: `(num_envs, ...)`; rows of agents that do not act are ignored. Whole numbers may come as floats, as
                Stable-Baselines3 samples those of `MultiBinary` spaces. Errors are those of `ArrayStepper.send`.
        """
        self._stepper.send([self._rows.actions(stacking.whole(self.action_space, actions))])
        self._waiting = True

    @exclusive("step_wait")
    def step_wait(self) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], list[dict[str, Any]]]:
        """The observations, rewards, dones and infos of all rows; errors as of `ArrayStepper.receive`."""
        return self._receive()

    def _receive(self) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], list[dict[str, Any]]]:
        self._waiting = False
        arrays = self._stepper.receive()
        infos = self._noted(arrays)
        for info in infos:
            info["TimeLimit.truncated"] = False
        observations = self._rows.observations(arrays)
        if arrays.plain and not self._rows.any_dead:
            dones = np.zeros(self.num_envs, np.bool_)
        else:
            dones = self._end(arrays, observations, infos)
        return observations, arrays.rewards.ravel(), dones, infos

    def _end(self, arrays: Arrays, observations: Any, infos: list[dict[str, Any]]) -> NDArray[np.bool_]:
        """Complete the infos of rows that are done, and put zeros in rows of the dead; returns the dones."""
        over, were_dead = arrays.terminated | arrays.truncated, self._rows.dead
        terminations, truncations = self._rows.flags(arrays)
        dones, cut_off = terminations | truncations, truncations & ~terminations & ~were_dead
        of_envs = {int(i): env_infos(arrays.infos.get(int(i), {}), self.agents) for i in np.flatnonzero(over)}
        for row in np.flatnonzero(dones).tolist():
            place, info, last = divmod(row, self._per_env), infos[row], None
            if over[place[0]]:
                last = info.pop(FINAL_OBS, None)
                self.reset_infos[row] = reset_info(info, of_envs[place[0]])
                info.pop(RESET_INFO, None)
            elif arrays.observed[place]:
                last = self._rows.observation(arrays, row)
            known = last is not None and not were_dead[place]
            info["terminal_observation"] = self._stepper.own(last) if known else zeros(self.observation_space)
            info["TimeLimit.truncated"] = bool(cut_off[place]) and known
        arrays.rewards[were_dead] = 0.0
        stacking.clear(observations, np.flatnonzero(self._rows.dead))
        return dones.ravel()

    def _noted(self, arrays: Arrays) -> list[dict[str, Any]]:
        """Note who is present and acts; returns an info for each row: its agent's, and those of its environment."""
        self.present, self.acting = arrays.present.ravel(), arrays.acting.ravel()
        rows: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for env_id, infos in arrays.infos.items():
            first = env_id * self._per_env
            rows[first : first + self._per_env] = agent_infos(env_id, infos, self.agents, self.agents)
        return rows

    # -- before a reset --------------------------------------------------------------------------------------------

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Have the next reset give environment i the seed `seed + i`; None draws one, as Stable-Baselines3 does.

        Returns the seed of each row, which is its environment's. Raises `TypeError` for a seed that is no integer,
        `ValueError` for a negative one.
        """
        self._first_seed = base_seed(np.random.randint(2**31 - self.env.num_envs) if seed is None else seed)
        self._seeds = [self._first_seed + row // self._per_env for row in range(self.num_envs)]
        return self._seeds

    def _reset_seeds(self) -> None:
        super()._reset_seeds()
        self._first_seed = None

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Have the next reset give these to each environment's own.

        Args:
            options: For all environments; a list has one for each environment, or for each row, those of one
                environment equal (else `ValueError`).
        """
        if isinstance(options, list) and len(options) == self.env.num_envs != self.num_envs:
            options = [own for own in options for _ in self.agents]
        if isinstance(options, list):
            firsts = [options[row - row % self._per_env] for row in range(len(options))]
            if len(options) != self.num_envs or options != firsts:
                raise ValueError(
                    f"expected one dict of options for each of {self.env.num_envs} copies, or for each of "
                    f"{self.num_envs} rows, equal within a copy; got {options!r}"
                )
        super().set_options(options)

    # -- the rest --------------------------------------------------------------------------------------------------

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of each row's environment; as `ParallelEnv.get_attr`, which returns a method called."""
        try:
            return self.env_method(attr_name, indices=indices)
        except AttributeError:
            if attr_name != "render_mode":  # simulators need not declare one, and Stable-Baselines3 reads it
                raise
            return [self.env.render_mode for _ in self._checked(indices)]

    def has_attr(self, attr_name: str) -> bool:
        """Whether all environments have an attribute, which may be a method; it is not called."""
        return all(self.env.call(attributes.has, attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of each environment that one of the rows belongs to."""
        env_ids = self._env_ids(self._checked(indices))
        if env_ids:
            self.env.set_attr(attr_name, [value] * len(env_ids), env_ids=env_ids)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method once of each environment that one of the rows belongs to; returns a result for each row."""
        rows = self._checked(indices)
        env_ids = self._env_ids(rows)
        if not env_ids:
            return []
        results = dict(zip(env_ids, self.env.call(method_name, *method_args, env_ids=env_ids, **method_kwargs)))
        return [results[row // self._per_env] for row in rows]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """Whether each row's environment is wrapped in such a wrapper."""
        wrapped = self.env.call(attributes.is_wrapped, (wrapper_class.__module__, wrapper_class.__qualname__))
        return [wrapped[row // self._per_env] for row in self._checked(indices)]

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        """A frame of each environment, which `render` tiles; None where there are no frames."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"there are images with render_mode='rgb_array' only, not with {self.render_mode!r}", stacklevel=2
            )
            return [None] * self.env.num_envs
        return list(self.env.render())

    def close(self) -> None:
        """Close the environment; idempotent. A step in flight is dropped."""
        self._stepper.close()

    def _checked(self, indices: Indices) -> list[int]:
        """The rows of indices; raises `IndexError` for one that there is not."""
        rows = [*self._get_indices(indices)]
        unknown = [row for row in rows if not -self.num_envs <= row < self.num_envs]
        if unknown:
            raise IndexError(f"there is no row {unknown[0]}: there are {self.num_envs}")
        return [row % self.num_envs for row in rows]

    def _env_ids(self, rows: Sequence[int]) -> list[int]:
        return [*dict.fromkeys(row // self._per_env for row in rows)]
