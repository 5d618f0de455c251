"""A normaliser, a rollout buffer and an evaluation for an `SB3VecEnv`, which leave the rows of absent agents out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize

from marl_parallel.action_masks import choices_of
from marl_parallel.core.warn import warn
from marl_parallel.types import installed
from marl_parallel.vector.sb3.vec_env import NotSaved, SB3VecEnv

__doctest_requires__ = ["stable_baselines3"]

_BUFFER = "SB3RolloutBuffer"


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
        if _innermost(acting_in) is not None and not isinstance(_innermost(acting_in), NotSaved):
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
