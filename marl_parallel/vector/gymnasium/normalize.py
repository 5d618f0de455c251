"""Gymnasium's normalisers for a `GymnasiumVectorEnv`: rows of absent agents do not count."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.wrappers import vector as wrappers
from numpy.typing import NDArray


class NormalizePresentObservation(wrappers.NormalizeObservation):
    """Gymnasium's `NormalizeObservation` around a `GymnasiumVectorEnv`: rows of absent agents do not count.

    Arguments and attributes are as in Gymnasium.

    Example:
        >>> from marl_parallel import make
        >>> env = NormalizePresentObservation(make("mpe2.simple_spread_v3", 4, facade="gymnasium", num_workers=2))
        >>> observations, infos = env.reset(seed=1)
        >>> observations.shape, round(env.obs_rms.count)
        ((12, 18), 12)
        >>> env.close()
    """

    def observations(self, observations: NDArray[Any]) -> NDArray[Any]:
        """Normalise observations `(rows, ...)`, and update the statistics with those that are data."""
        present = self.unwrapped.present  # type: ignore[attr-defined]
        update, self._update_running_mean = self._update_running_mean, False
        if update and present.any():
            self.obs_rms.update(observations[present])  # type: ignore[no-untyped-call,unused-ignore]
        try:
            return super().observations(observations)
        finally:
            self._update_running_mean = update


class NormalizePresentReward(wrappers.NormalizeReward):
    """Gymnasium's `NormalizeReward` around a `GymnasiumVectorEnv`: rows of absent agents do not count.

    Steps that only reset a row (`NEXT_STEP`) do not count, either. Arguments and attributes are as in Gymnasium.

    Example:
        >>> from marl_parallel import make
        >>> env = NormalizePresentReward(make("mpe2.simple_spread_v3", 4, facade="gymnasium", num_workers=2))
        >>> observations, infos = env.reset(seed=1)
        >>> observations, rewards, *_ = env.step(env.action_space.sample())
        >>> rewards.shape
        (12,)
        >>> env.close()
    """

    def __init__(self, env: Any, gamma: float = 0.99, epsilon: float = 1e-8) -> None:
        super().__init__(env, gamma, epsilon)
        self._over = np.zeros(self.num_envs, np.bool_)

    def reset(self, **keywords: Any) -> tuple[Any, dict[str, Any]]:
        self._over[:] = False
        return super().reset(**keywords)

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        self.accumulated_reward = self.accumulated_reward * self.gamma * ~self._over + rewards
        counts = infos["present"] & ~self._over
        if self.update_running_mean and counts.any():
            self.return_rms.update(self.accumulated_reward[counts])  # type: ignore[no-untyped-call,unused-ignore]
        self._over = terminations | truncations
        normalised = rewards / np.sqrt(self.return_rms.var + self.epsilon)
        return observations, normalised, terminations, truncations, infos
