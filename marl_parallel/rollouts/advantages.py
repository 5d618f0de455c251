"""`gae`: advantages for learners, from the data of a rollout."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_parallel.rollouts.arrays import RolloutArrays


def gae(
    data: RolloutArrays, values: NDArray[Any], final_values: NDArray[Any], gamma: float, lam: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Generalised advantage estimates, and returns, the targets of a critic.

    An agent's episode ends where the agent is terminated or truncated, or its environment's episode ends. An agent that
    comes back begins another episode. A truncated episode could have continued, so the value of its last observation or
    state counts; after a termination, no value counts. Rewards between two actions of an agent, as in turn-based games,
    are added to the reward of the first action.

    Values after a truncation are used as they are passed, also for agents that have no last observation (`observed`,
    `present_final`), since a critic of states has a value for them. Pass NaN where there is no value, as with a critic
    that would read zeros: then the value at the agent's last action is used.

    Args:
        data: The data of a rollout; with several groups, of one `group`.
        values: `(T + 1, N, k)`: the critic's values of `data.observations` or `data.states`.
        final_values: `(number of ended episodes, k)`: the critic's values of the last observations or states, such as
            `critic(data.final_observations)[data.done]`.
        gamma: The discount factor.
        lam: The weight of longer estimates, from 0 to 1.

    Returns:
        Advantages, and returns (advantages + values): float32 `(T, N, k)`, zero where an agent does not act. Train on
        `data.acting[:-1]`.

    Raises:
        ValueError: Values have another shape.

    Reference: Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation (2016),
    https://arxiv.org/abs/1506.02438, equation 16.
    """
    steps, acting = len(data.rewards), data.acting
    for name, array, shape in (
        ("values", values, acting.shape),
        ("final_values", final_values, (int(data.done.sum()), *acting.shape[2:])),
    ):
        if np.shape(array) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {np.shape(array)}")
    after_end = np.zeros(data.rewards.shape, np.float32)
    after_end[data.done] = final_values
    advantages = np.zeros(data.rewards.shape, np.float32)
    # Of the agent's next action: its value (NaN if that is not known), its advantage, and the rewards until then.
    next_value = np.where(data.observed[steps], values[steps], np.float32(np.nan))
    next_advantage, later_rewards = np.zeros((2, *next_value.shape), np.float32)
    for t in reversed(range(steps)):
        done, terminated, truncated = data.done[t][:, None], data.terminations[t], data.truncations[t]
        next_value = np.where(done, after_end[t], np.where(truncated, values[t + 1], next_value))
        next_value = np.where(terminated, np.float32(0.0), next_value)
        goes_on = ~(done | terminated | truncated)
        rewards = data.rewards[t] + goes_on * later_rewards
        after = np.where(np.isnan(next_value), values[t], next_value)
        advantage = rewards + gamma * after - values[t] + gamma * lam * goes_on * next_advantage
        acts = acting[t]
        advantages[t] = np.where(acts, advantage, np.float32(0.0))
        next_value = np.where(acts, values[t], next_value)
        next_advantage = np.where(acts, advantage, goes_on * next_advantage)
        later_rewards = np.where(acts, np.float32(0.0), rewards)
    return advantages, np.where(acting[:steps], advantages + values[:steps], np.float32(0.0))
