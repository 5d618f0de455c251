"""`SB3VecEnv`: every agent of every environment as one environment of a Stable-Baselines3 `VecEnv`."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from marl_parallel.action_masks import choices_of
from marl_parallel.adapters import attributes
from marl_parallel.arguments import base_seed
from marl_parallel.core.block import stacking
from marl_parallel.core.block.array_view import Arrays, Stacked
from marl_parallel.core.exclusive import exclusive
from marl_parallel.core.spaces import from_zero, starts_elsewhere, to_start, to_zero, tree_map, unfit_leaf, zeros
from marl_parallel.core.warn import warn
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.vector.facade import ArrayFacade
from marl_parallel.vector.rows import AgentRows, agent_infos, divided, env_infos, with_the_dead
from marl_parallel.vector.scalarize import Scalarize

__doctest_requires__ = ["stable_baselines3"]

Indices = int | Iterable[int] | None
"""Numbers of rows; None for all rows."""

_ADVICE = "make them equal with a wrapper, or use PettingZooVecEnv"

StepReturn = tuple[Any, NDArray[np.float64], NDArray[np.bool_], list[dict[str, Any]]]


class _LastInfo(dict[str, Any]):
    """The info of a row that is done. Its `episode` is final: `VecMonitor` takes every end for the end of an episode.

    The `info_keywords` that a `VecMonitor` adds to `episode` are kept.

    Attributes:
        complete: Whether `SB3VecEnv` has written everything; what is set from then on comes from a wrapper.
        without_own: Whether the simulator returned nothing for this row in this step: its agent took no part, or a
            fault interrupted the step.
    """

    complete = without_own = False

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "episode" or not self.complete:
            super().__setitem__(key, value)
        elif isinstance(self.get("episode"), dict):
            super().__setitem__("episode", {**value, **self["episode"]})

    def __missing__(self, key: str) -> None:
        """None if the simulator returned nothing for the row: a `VecMonitor` reads its `info_keywords` there, too."""
        if not (self.complete and self.without_own):
            raise KeyError(key)

    def copy(self) -> _LastInfo:
        same = _LastInfo(self)
        same.complete, same.without_own = self.complete, self.without_own
        return same


class SB3VecEnv(ArrayFacade[NDArray[Any], StepReturn, tuple[Any, list[dict[str, Any]]]], VecEnv):
    """A `VecEnv` with a row for each agent of each environment, for parameter sharing.

    With k agents, row `i * k + j` is agent j of environment i. Actions and observations are in the form of the agents'
    space, batched: an array `(num_envs, ...)`, or a dict of them. Whole numbers may be floats, as in
    Stable-Baselines3's samples of `MultiBinary` spaces. Choices of `Discrete(n, start=s)` and of `MultiDiscrete`
    count from 0, in actions and observations; the simulator gets and returns s, s + 1, ... Rewards are float64 and
    dones bool, `(num_envs,)`, infos a list of dicts. All arrays are the caller's own, also if `env` has
    `copy=False`.

    A row is done when its agent dies, and when its environment's episode ends. Then its info has the agent's last
    observation as `terminal_observation`, and the observation that is returned is the new episode's first, or zeros
    if the environment goes on without the agent. Infos of the environment, such as the mark of a restart in
    `infos[row]["__common__"]`, are in the info of each of its rows. The infos of a reset are in `reset_infos`.

    When an agent's own episode ends, by its death or with its environment's episode, its info has the return and length
    as `episode`, in the form of Stable-Baselines3's `Monitor`. The second end of a dead agent's row has no `episode`,
    also inside a `VecMonitor`, which keeps `episode` and adds its `info_keywords`. These are None in rows for which the
    simulator returned nothing, as in a step that a restart ended. The row of an agent that comes back after its end is
    data again, and its next end has a return and a length of its own.

    **Rows of absent agents are trained on**, as episodes of return 0, unless `SB3RolloutBuffer` leaves them out; see
    `docs/facades.md`.

    Args:
        env: Made with `auto_reset=True`. No other facade may step it.
        scalarize: Turns vector rewards into numbers, as in `FacadeStepper`; needed if agents declare a `reward_space`.

    Attributes:
        agents: The agents with rows, in the environment's own order.
        present: `(num_envs,)`, bool: the agents that were observed or rewarded at the last reset or step.
        acting: `(num_envs,)`, bool: the agents that act next.
        observed: `(num_envs,)`, bool: the rows of the latest observations that are data.
        rewarded: `(num_envs,)`, bool: the rows of the latest rewards that are data.

    Raises:
        TypeError, ValueError: As `FacadeStepper`, or the agents' spaces differ.

    Example:
        >>> from stable_baselines3 import PPO
        >>> from marl_parallel import make
        >>> env = SB3VecEnv(make("mpe2.simple_spread_v3", num_envs=4, num_workers=2))
        >>> env.num_envs, env.reset().shape
        (12, (12, 18))
        >>> model = PPO("MlpPolicy", env, n_steps=16, batch_size=64, n_epochs=1, device="cpu").learn(192)
        >>> env.close()
    """

    saved_as = "SB3VecEnv"

    def __init__(self, env: ParallelEnv, *, scalarize: Scalarize | None = None) -> None:
        ArrayFacade.__init__(self, env, AutoresetMode.SAME_STEP, copy=True, scalarize=scalarize)
        self.agents = env.possible_agents
        for agent, space in self._stepper.schema.observation_spaces.items():
            if unfit := unfit_leaf(space):
                raise ValueError(
                    f"rows must be arrays, but agent {agent!r} observes {space}, which has a part without a fixed "
                    f"size: {unfit}; {_ADVICE}"
                )
        self._rows = AgentRows(self._stepper, self.agents, _ADVICE)
        self._per_env = len(self.agents)
        self._has_choices = choices_of(self._rows.action_space) is not None
        # Stable-Baselines3 counts choices from 0.
        self._seen_elsewhere, self._acts_elsewhere = map(starts_elsewhere, (self._rows.space, self._rows.action_space))
        declared = from_zero(self._rows.space), from_zero(self._rows.action_space)
        VecEnv.__init__(self, env.num_envs * self._per_env, *declared)
        self.present = self.acting = self.observed = self.rewarded = np.zeros(self.num_envs, np.bool_)
        self._returns, self._lengths = np.zeros((2, env.num_envs, self._per_env))  # of rows, since their episode began
        self._has_stats = self._stepper.transitions.statistics.in_infos  # of rewards before `scalarize`
        self._start = time.time()

    # -- stepping --------------------------------------------------------------------------------------------------

    @exclusive("reset")
    def reset(self) -> Any:  # type: ignore[override]
        """Begin new episodes, with the seed of `seed` and the options of `set_options`; discards a step in flight.

        Returns observations of all rows; infos are in `reset_infos`. Errors are as in `ParallelEnv.reset`.
        """
        seed, options = self._reset_arguments()
        if self._stepper.in_flight:
            self._stepper.batch.resets.check(self._stepper.env_ids, seed, options)  # wrong arguments discard nothing
            self._stepper.discard()
        return self._begun(self._stepper.reset(seed, options))

    @exclusive("reset_async")
    def reset_async(self) -> None:  # type: ignore[override]
        """Begin to reset and return; `reset_wait` returns the results. Errors are as in `reset`."""
        self._stepper.send_reset(*self._reset_arguments())

    @exclusive("reset_wait")
    def reset_wait(self, timeout: float | None = None) -> Any:
        """The results of `reset_async`, in the form of `reset`; arguments and errors are as in `step_wait`."""
        return self._begun(self._stepper.receive_reset(timeout))

    def _reset_arguments(self) -> tuple[int | None, list[dict[str, Any] | None] | None]:
        by_env = [options or None for options in self._options[:: self._per_env]]
        return self._seeds[0], by_env if any(by_env) else None

    def _begun(self, arrays: Arrays) -> Any:
        self._reset_seeds()
        self._reset_options()
        self._returns[...] = self._lengths[...] = 0.0
        self.reset_infos = self._infos(arrays)
        return self._observations(arrays)

    render = VecEnv.render
    step = VecEnv.step  # calls `step_async` and `step_wait`, which users of Stable-Baselines3 replace and wrap

    def _actions(self, actions: NDArray[Any]) -> list[Stacked]:
        actions = stacking.whole(self.action_space, actions)
        return [self._rows.actions(to_start(self._rows.action_space, actions) if self._acts_elsewhere else actions)]

    def _observations(self, arrays: Arrays) -> Any:
        """The observations of all rows; choices count from 0, and rows of agents that are not observed are zeros."""
        observations = self._rows.flat_observations(arrays)
        if not self._seen_elsewhere:
            return observations
        observations = to_zero(self._rows.space, observations)
        stacking.clear(observations, np.flatnonzero(~arrays.observed.ravel()))
        return tree_map(lambda leaf, array: array.astype(leaf.dtype, copy=False), self._rows.space, observations)

    def _first(self, arrays: Arrays) -> tuple[Any, Any]:
        return super()._first(with_the_dead(arrays, self._stepper))

    def _results(self, arrays: Arrays) -> StepReturn:
        infos = self._infos(arrays)
        for info in infos:
            info["TimeLimit.truncated"] = False
        observations = self._observations(arrays)
        self._returns += arrays.rewards
        if arrays.plain:
            self._lengths += 1
            return observations, arrays.rewards.ravel(), np.zeros(self.num_envs, np.bool_), infos
        over = arrays.terminated | arrays.truncated
        terminations, truncations = self._rows.flags(arrays)
        were_dead, dead = arrays.were_dead, (arrays.were_dead | arrays.ended) & ~arrays.alive & ~over[:, None]
        took_part = arrays.rewarded | arrays.terminations | arrays.truncations
        self._lengths += took_part
        self._returns[were_dead] = self._lengths[were_dead] = 0.0  # another life may begin
        self.observed = (arrays.observed & ~dead).ravel()
        self.rewarded = (arrays.rewarded & ~were_dead).ravel()
        dones, truncated = terminations | truncations, truncations & ~terminations & ~were_dead
        of_envs = {int(i): env_infos(arrays.infos.get(int(i), {}), self.agents) for i in np.flatnonzero(over)}
        for row in np.flatnonzero(dones).tolist():
            index = divmod(row, self._per_env)
            last: tuple[Sequence[Any], NDArray[np.bool_]] = arrays.observations, arrays.observed
            if over[index[0]]:
                infos[row], self.reset_infos[row] = divided(infos[row], of_envs[index[0]])
                last = arrays.final_observations, arrays.finally_observed
            known = bool(last[1][index]) and not were_dead[index]
            terminal = self._rows.observation(last[0], row) if known else zeros(self.observation_space)
            if known and self._seen_elsewhere:
                terminal = to_zero(self._rows.space, terminal)
            infos[row]["terminal_observation"] = terminal
            infos[row]["TimeLimit.truncated"] = bool(truncated[index]) and known
            last_info = _LastInfo(infos[row])
            if self._lengths[index] and not were_dead[index] and (self._has_stats or "episode" not in last_info):
                seconds = round(time.time() - self._start, 6)
                last_info["episode"] = {"r": float(self._returns[index]), "l": int(self._lengths[index]), "t": seconds}
            last_info.without_own = bool(were_dead[index]) or not took_part[index] or bool(arrays.restarted[index[0]])
            last_info.complete, infos[row] = True, last_info
        self._returns[dones] = self._lengths[dones] = 0.0
        arrays.rewards[were_dead] = 0.0
        stacking.clear(observations, np.flatnonzero(dead))
        return observations, arrays.rewards.ravel(), dones.ravel(), infos

    def load_state(self, states: Sequence[bytes], env_ids: Sequence[int] | None = None) -> tuple[Any, Any]:
        observations, infos = super().load_state(states, env_ids)
        for info in infos:
            info.pop("episode", None)  # the caller has had it
        return observations, infos

    def _own_state(self, env_id: int) -> Any:
        sums = self._returns[env_id].tolist(), self._lengths[env_id].tolist()
        return {
            agent: of_agent for agent, *of_agent in zip(self.agents, *sums, self.reset_infos[self._rows_of(env_id)])
        }

    def _set_own_states(self, states: Mapping[int, Any]) -> None:
        for env_id, state in states.items():
            first = self._rows_of(env_id).start
            self._returns[env_id] = self._lengths[env_id] = 0.0
            for column, agent in enumerate(self.agents):
                if state is not None and agent in state:
                    self._returns[env_id, column], self._lengths[env_id, column], infos = state[agent]
                    self.reset_infos[first + column] = infos

    def _rows_of(self, env_id: int) -> slice:
        return slice(env_id * self._per_env, (env_id + 1) * self._per_env)

    def action_masks(self) -> NDArray[np.bool_]:
        """The action masks of all rows, for `sb3_contrib.MaskablePPO`: bool `(num_envs, num_choices)`, True = allowed.

        Rows of agents for which the simulator reports no mask are all True. Shapes and errors are as in
        `FacadeStepper.action_masks`.
        """
        return stacking.flat(self._stepper.action_masks(self.agents))

    def _infos(self, arrays: Arrays) -> list[dict[str, Any]]:
        """The infos of each row, from its agent and its environment; records which agents are present and act."""
        self.present, self.acting = arrays.present.ravel(), arrays.acting.ravel()
        self.observed, self.rewarded = arrays.observed.ravel(), arrays.rewarded.ravel()
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
        """Get an attribute of each row's environment; a method is called, as in `ParallelEnv.get_attr`."""
        try:
            return self.env_method(attr_name, indices=indices)
        except AttributeError:
            if attr_name != "render_mode":  # simulators need not declare one, and Stable-Baselines3 reads it
                raise
            return [self.env.render_mode for _ in self._env_ids(indices)]

    def has_attr(self, attr_name: str) -> bool:
        """Whether all environments have an attribute, which may be a method; it is not called.

        `action_masks` is a method of this class, for action spaces of which it knows the choices.
        """
        if attr_name == "action_masks" and self._has_choices:
            return True
        return all(self.env.call(attributes.has, attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of the environments of these rows."""
        if env_ids := [*dict.fromkeys(self._env_ids(indices))]:
            self.env.set_attr(attr_name, [value] * len(env_ids), env_ids=env_ids)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method once in each environment of these rows; returns a result for each row.

        For `action_masks`, which `sb3_contrib` calls, the results are the rows of this class's `action_masks`.
        """
        if method_name == "action_masks" and self._has_choices:
            return [*self.action_masks()[[*self._get_indices(indices)]]]
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
            warn(f"there are images only with render_mode='rgb_array', not with {self.render_mode!r}")
            return [None] * self.env.num_envs
        return list(self.env.render())

    def __reduce__(self) -> tuple[type[NotSaved], tuple[()]]:
        """Only a placeholder is pickled: `model.save` pickles the `acting_in` of an `SB3RolloutBuffer`, too."""
        return NotSaved, ()

    def __copy__(self) -> None:
        copy.copy(self.env)  # raises

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        copy.copy(self.env)

    def _env_ids(self, indices: Indices) -> list[int]:
        """The environment of each row of `indices`; raises `IndexError` for an unknown row."""
        rows = [*self._get_indices(indices)]
        unknown = [row for row in rows if not -self.num_envs <= row < self.num_envs]
        if unknown:
            raise IndexError(f"there is no row {unknown[0]}: there are {self.num_envs} rows")
        return [row % self.num_envs // self._per_env for row in rows]


class NotSaved:
    """The placeholder for the `SB3VecEnv` in a saved model."""
