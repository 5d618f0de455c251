"""`SB3VecEnv`: every agent of every environment as one environment of a Stable-Baselines3 `VecEnv`.

The module also has a normaliser, a rollout buffer and an evaluation, which leave the rows of absent agents out.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize

from marl_parallel.action_masks import choices_of
from marl_parallel.adapters import attributes
from marl_parallel.arguments import base_seed
from marl_parallel.core import stacking
from marl_parallel.core.array_view import Arrays, Stacked
from marl_parallel.core.exclusive import exclusive
from marl_parallel.core.spaces import from_zero, starts_elsewhere, to_start, to_zero, tree_map, unfit_leaf, zeros
from marl_parallel.core.warn import warn
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.types import installed
from marl_parallel.vector.rows import AgentRows, agent_infos, divided, env_infos
from marl_parallel.vector.stepper import ArrayFacade, Scalarize

__doctest_requires__ = ["stable_baselines3"]

Indices = int | Iterable[int] | None
"""Numbers of rows; None for all rows."""

_BUFFER = "SB3RolloutBuffer"
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


class SB3VecEnv(ArrayFacade[NDArray[Any], StepReturn], VecEnv):
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
        scalarize: Turns vector rewards into numbers, as in `ArrayStepper`; needed if agents declare a `reward_space`.

    Attributes:
        agents: The agents with rows, in the environment's own order.
        present: `(num_envs,)`, bool: the agents that were observed or rewarded at the last reset or step.
        acting: `(num_envs,)`, bool: the agents that act next.
        observed: `(num_envs,)`, bool: the rows of the latest observations that are data.
        rewarded: `(num_envs,)`, bool: the rows of the latest rewards that are data.

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

    saved_as = "SB3VecEnv"

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
        self._has_choices = choices_of(self._rows.action_space) is not None
        # Stable-Baselines3 counts choices from 0.
        self._seen_elsewhere, self._acts_elsewhere = map(starts_elsewhere, (self._rows.space, self._rows.action_space))
        declared = from_zero(self._rows.space), from_zero(self._rows.action_space)
        VecEnv.__init__(self, env.num_envs * self._per_env, *declared)
        self.present = self.acting = self.observed = self.rewarded = np.zeros(self.num_envs, np.bool_)
        self._returns, self._lengths = np.zeros((2, env.num_envs, self._per_env))  # of rows, since their episode began
        self._has_stats = self._stepper.runner.transitions.statistics.in_infos  # of rewards before `scalarize`
        self._start = time.time()

    # -- stepping --------------------------------------------------------------------------------------------------

    @exclusive("reset")
    def reset(self) -> Any:
        """Begin new episodes, with the seed of `seed` and the options of `set_options`; discards a step in flight.

        Returns observations of all rows; infos are in `reset_infos`. Errors are as in `ParallelEnv.reset`.
        """
        by_env = [options or None for options in self._options[:: self._per_env]]
        options = by_env if any(by_env) else None
        if self._stepper.in_flight:
            self._stepper.runner.check_reset(self._seeds[0], options, None)  # wrong arguments discard nothing
            self._stepper.receive()
        arrays = self._stepper.reset(self._seeds[0], options)
        self._reset_seeds()
        self._reset_options()
        self._returns[...] = self._lengths[...] = 0.0
        self.reset_infos = self._infos(arrays)
        return self._observations(arrays)

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
            place, last, seen = divmod(row, self._per_env), arrays.observations, arrays.observed
            if over[place[0]]:
                infos[row], self.reset_infos[row] = divided(infos[row], of_envs[place[0]])
                last, seen = arrays.final_observations or [], arrays.finally_observed
            known = bool(seen[place]) and not were_dead[place]
            terminal = self._rows.observation(last, row) if known else zeros(self.observation_space)
            if known and self._seen_elsewhere:
                terminal = to_zero(self._rows.space, terminal)
            infos[row]["terminal_observation"] = terminal
            infos[row]["TimeLimit.truncated"] = bool(truncated[place]) and known
            last_info = _LastInfo(infos[row])
            if self._lengths[place] and not were_dead[place] and (self._has_stats or "episode" not in last_info):
                seconds = round(time.time() - self._start, 6)
                last_info["episode"] = {"r": float(self._returns[place]), "l": int(self._lengths[place]), "t": seconds}
            last_info.without_own = bool(were_dead[place]) or not took_part[place] or bool(arrays.restarted[place[0]])
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
        return *sums, self.reset_infos[self._rows_of(env_id)]

    def _set_own_states(self, states: Mapping[int, Any]) -> None:
        for env_id, state in states.items():
            self._returns[env_id], self._lengths[env_id] = (0.0, 0.0) if state is None else state[-3:-1]
            if state is not None:
                self.reset_infos[self._rows_of(env_id)] = state[-1]

    def _rows_of(self, env_id: int) -> slice:
        return slice(env_id * self._per_env, (env_id + 1) * self._per_env)

    def action_masks(self) -> NDArray[np.bool_]:
        """The action masks of all rows, for `sb3_contrib.MaskablePPO`: bool `(num_envs, num_choices)`, True = allowed.

        Rows of agents for which the simulator reports no mask are all True. Shapes and errors are as in
        `ArrayStepper.action_masks`.
        """
        return stacking.flat(self._stepper.action_masks(self.agents))

    def _infos(self, arrays: Arrays) -> list[dict[str, Any]]:
        """The infos of each row, from its agent and its environment; notes which agents are present and act."""
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

    def close(self) -> None:
        """Close the environment; idempotent. Discards a step in flight."""
        self._stepper.close()

    def __reduce__(self) -> tuple[type[_NotSaved], tuple[()]]:
        """Only a placeholder is pickled: `model.save` pickles the `acting_in` of an `SB3RolloutBuffer`, too."""
        return _NotSaved, ()

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


# -- training and evaluation without the rows of absent agents ---------------------------------------------------------


class _NotSaved:
    """The placeholder for the `SB3VecEnv` in a saved model."""


def _innermost(env: Any) -> Any:
    while isinstance(env, VecEnvWrapper):
        env = vars(env).get("venv")  # None in a `VecNormalize` from a file
    return env


def _check_rows(what: str, argument: str, env: Any) -> None:
    """Raise `TypeError` unless this is an `SB3VecEnv`, or a wrapper around one."""
    if not isinstance(_innermost(env), SB3VecEnv):
        raise TypeError(
            f"{what} takes as {argument} an SB3VecEnv, or a wrapper around one, got {type(env).__name__}: make it with "
            'make(..., facade="sb3")'
        )


class SB3VecNormalize(VecNormalize):
    """A `VecNormalize` around an `SB3VecEnv` whose means and variances leave the rows of absent agents out.

    Arguments, methods and files are as in `VecNormalize`.

    Example:
        >>> from marl_parallel import make
        >>> from marl_parallel.vector import SB3VecEnv
        >>> env = SB3VecNormalize(SB3VecEnv(make("mpe2.simple_spread_v3", num_envs=4, num_workers=2)))
        >>> env.reset().shape, int(env.obs_rms.count)
        ((12, 18), 12)
        >>> env.close()
    """

    def __init__(self, venv: VecEnv, *arguments: Any, **keywords: Any) -> None:
        _check_rows("SB3VecNormalize", "venv", venv)
        super().__init__(venv, *arguments, **keywords)

    def reset(self) -> Any:
        self.old_obs = self.venv.reset()
        self.returns = np.zeros(self.num_envs)
        self._update_observations()
        return self.normalize_obs(self.old_obs)

    def step_wait(self) -> Any:
        self.old_obs, self.old_reward, dones, infos = self.venv.step_wait()
        self._update_observations()
        if self.training:
            self._update_reward(self.old_reward)
        for row in np.flatnonzero(dones):
            infos[row]["terminal_observation"] = self.normalize_obs(infos[row]["terminal_observation"])
        self.returns[dones] = 0
        return self.normalize_obs(self.old_obs), self.normalize_reward(self.old_reward), dones, infos

    def _update_observations(self) -> None:
        observed: NDArray[np.bool_] = self.venv.observed
        if not self.training or not self.norm_obs or not observed.any():
            return
        if isinstance(self.obs_rms, dict):
            for key, statistics in self.obs_rms.items():
                statistics.update(self.old_obs[key][observed])
        else:
            self.obs_rms.update(self.old_obs[observed])

    def _update_reward(self, reward: NDArray[Any]) -> None:
        rewarded: NDArray[np.bool_] = self.venv.rewarded
        self.returns = self.returns * self.gamma + reward
        if rewarded.any():
            self.ret_rms.update(self.returns[rewarded])


class SB3RolloutBuffer(RolloutBuffer):
    """A rollout buffer for PPO, A2C and MaskablePPO that leaves the rows of agents that do not act out of training.

    It is a `DictRolloutBuffer`, too, if observations are dicts; and a `MaskableRolloutBuffer` or
    `MaskableDictRolloutBuffer` if `sb3_contrib` is installed and actions are `Discrete` or `MultiDiscrete`.

    A saved model does not keep `acting_in`. To train it further, load it with
    `PPO.load(path, env, rollout_buffer_kwargs={"acting_in": env})`. After `model.set_env(env)`, set
    `model.rollout_buffer.acting_in = env`.

    Args:
        buffer_size: As in `RolloutBuffer`; the algorithm passes it, and all arguments but `acting_in`.
        observation_space: As in `RolloutBuffer`.
        action_space: As in `RolloutBuffer`.
        *arguments: As in `RolloutBuffer`.
        acting_in: The `SB3VecEnv` that the model steps, or a wrapper around it. Stable-Baselines3 can save only models
            with an `SB3VecEnv` or a `VecNormalize` here; another wrapper causes a warning.
        **keywords: As `arguments`.

    Raises:
        TypeError: `acting_in` is something else.
        ValueError: It has another number of rows; or, in training, the model does not step it.

    Example:
        >>> from stable_baselines3 import PPO
        >>> from marl_parallel import make
        >>> from marl_parallel.vector import SB3VecEnv
        >>> env = SB3VecEnv(make("mpe2.simple_spread_v3", num_envs=4, num_workers=2))
        >>> buffer = {"rollout_buffer_class": SB3RolloutBuffer, "rollout_buffer_kwargs": {"acting_in": env}}
        >>> model = PPO("MlpPolicy", env, n_steps=16, batch_size=64, n_epochs=1, device="cpu", **buffer).learn(192)
        >>> env.close()
    """

    _acting: NDArray[np.bool_]

    def __new__(
        cls,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *_: Any,
        **__: Any,
    ) -> Any:
        storage: Any = DictRolloutBuffer if isinstance(observation_space, spaces.Dict) else RolloutBuffer
        if choices_of(action_space) is not None and installed("sb3_contrib"):
            from sb3_contrib.common.maskable import buffers

            storage = getattr(buffers, f"Maskable{storage.__name__}")
        return object.__new__(type(cls.__name__, (cls, storage), {}))

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *arguments: Any,
        acting_in: VecEnv | None = None,
        **keywords: Any,
    ) -> None:
        if acting_in is None:
            raise TypeError(f'{_BUFFER} needs the environment: pass rollout_buffer_kwargs={{"acting_in": env}}')
        self._acting_in: SB3VecEnv | None = None
        super().__init__(buffer_size, observation_space, action_space, *arguments, **keywords)
        if _innermost(acting_in) is not None and not isinstance(_innermost(acting_in), _NotSaved):
            self.acting_in = acting_in

    @property
    def acting_in(self) -> VecEnv | None:
        """The `SB3VecEnv` that the model steps; None in a model that was loaded without one."""
        return self._acting_in

    @acting_in.setter
    def acting_in(self, env: VecEnv) -> None:
        _check_rows(_BUFFER, "acting_in", env)
        if not isinstance(env, SB3VecEnv | VecNormalize):  # others cannot be pickled
            warn(
                f"Stable-Baselines3 cannot save a model whose acting_in is a {type(env).__name__}: pass the SB3VecEnv "
                "inside it",
            )
        if env.num_envs != self.n_envs:
            raise ValueError(
                f"the acting_in of an {_BUFFER} is the environment that the model steps, with {self.n_envs} rows; got "
                f"one with {env.num_envs}"
            )
        self._acting_in = _innermost(env)
        self._acting = self._acting_in.acting

    def reset(self) -> None:
        super().reset()
        self._acted = np.zeros((self.buffer_size, self.n_envs), np.bool_)
        if self._acting_in is not None:
            self._acting = self._acting_in.acting  # the agents that act on the next observations

    def add(self, *arguments: Any, **keywords: Any) -> None:
        if self._acting_in is None:
            raise ValueError(
                f"a model that was loaded does not have the acting_in of its {_BUFFER}: to train it, pass "
                'rollout_buffer_kwargs={"acting_in": env} to load, too'
            )
        acting = self._acting_in.acting
        if acting is self._acting:  # each step and reset makes a new array
            raise ValueError(
                f"the model does not step the acting_in of its {_BUFFER}: pass the environment that it steps; after "
                "model.set_env(env), set model.rollout_buffer.acting_in = env"
            )
        self._acted[self.pos], self._acting = self._acting, acting
        super().add(*arguments, **keywords)

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Batches of the rows that acted, in random order."""
        if not self.generator_ready:
            next(super().get(1))  # puts all steps of a row side by side
        rows = np.random.permutation(np.flatnonzero(self._acted.swapaxes(0, 1)))
        for start in range(0, len(rows), batch_size or len(rows)):
            yield self._get_samples(rows[start : start + (batch_size or len(rows))])


def evaluate_policy(
    model: Any,
    env: VecEnv,
    n_eval_episodes: int = 10,
    deterministic: bool = True,
    callback: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
    reward_threshold: float | None = None,
    return_episode_rewards: bool = False,
    use_masking: bool = True,
) -> Any:
    """Evaluate a model as Stable-Baselines3 and `sb3_contrib` do, with the true returns of agents that die.

    Args:
        model: Has a method `predict`.
        env: An `SB3VecEnv`, or a wrapper around it. Make it with another `seed=` than the one that is trained on.
        n_eval_episodes: The number of episodes of environments; each environment plays as many as the others, or one
            more. Each agent that takes part in an episode has a return; one for each life if it comes back after its
            end.
        deterministic: Whether actions are the most likely ones.
        callback: Called after each step with `locals()` and `globals()`.
        reward_threshold: Raise `AssertionError` if the mean return is not above this.
        return_episode_rewards: Whether to return the returns and lengths of all agents' episodes, two lists.
        use_masking: Whether to pass the action masks to `predict`, if it takes `action_masks` as in `MaskablePPO`.

    Returns:
        The mean and the standard deviation of the returns; or two lists.

    Example:
        >>> from stable_baselines3 import PPO
        >>> from marl_parallel import make
        >>> from marl_parallel.vector import SB3VecEnv
        >>> env = SB3VecEnv(make("mpe2.simple_spread_v3", num_envs=4, num_workers=2, seed=1))
        >>> returns, lengths = evaluate_policy(PPO("MlpPolicy", env, device="cpu"), env, 4, return_episode_rewards=True)
        >>> lengths == [25] * 12
        True
        >>> env.close()
    """
    _check_rows("evaluate_policy", "env", env)
    rows: SB3VecEnv = _innermost(env)
    masked = use_masking and choices_of(rows.action_space) is not None
    masked = masked and "action_masks" in inspect.signature(model.predict).parameters
    per_env = len(env.agents)
    num_envs = env.num_envs // per_env
    remaining = np.array([(n_eval_episodes + env_id) // num_envs for env_id in range(num_envs)])
    episode_rewards: list[float] = []
    episode_lengths: list[int] = []
    observations, states = env.reset(), None
    episode_starts = np.ones(env.num_envs, np.bool_)
    while remaining.any():
        masks = {"action_masks": rows.action_masks()} if masked else {}
        actions, states = model.predict(
            observations, state=states, episode_start=episode_starts, deterministic=deterministic, **masks
        )
        observations, _, dones, infos = env.step(actions)
        episode_starts = dones
        for row in np.flatnonzero(dones).tolist():
            if remaining[row // per_env] and "episode" in infos[row]:
                episode_rewards.append(infos[row]["episode"]["r"])
                episode_lengths.append(infos[row]["episode"]["l"])
        for finished in rows.env.finished_episodes:  # before that, all agents may die and come back
            remaining[finished.env_id] = max(remaining[finished.env_id] - 1, 0)
        if callback is not None:
            callback(locals(), globals())
    mean = float(np.mean(episode_rewards))
    if reward_threshold is not None:
        assert mean > reward_threshold, f"mean return {mean:.2f} is not above reward_threshold={reward_threshold:.2f}"
    return (episode_rewards, episode_lengths) if return_episode_rewards else (mean, float(np.std(episode_rewards)))
