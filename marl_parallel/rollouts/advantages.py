"""`gae` and `vtrace`: advantages, and targets of critics, from the data of a rollout."""

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
    advantages, _ = _estimates(data, values, final_values, gamma, None, lam)
    return advantages, _targets(data, values, advantages)


def vtrace(
    data: RolloutArrays,
    values: NDArray[Any],
    final_values: NDArray[Any],
    ratios: NDArray[Any],
    gamma: float,
    *,
    lam: float = 1.0,
    max_weight: float = 1.0,
    max_trace: float = 1.0,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """V-trace: advantages, and targets of a critic, from the data of an older policy.

    Where episodes and lives end, which value counts after a step, and how rewards between two actions are added: as in
    `gae`. Only the ratios at an agent's own actions count. With all ratios 1 and `lam=1`, both results are those of
    `gae` with `lam=1`.

    Args:
        data: The data of a rollout; with several groups, of one `group`.
        values: `(T + 1, N, k)`, as in `gae`: values of the present critic.
        final_values: `(number of ended episodes, k)`, as in `gae`.
        ratios: `(T, N, k)`: the probability of each action under the present policy, divided by that under the policy
            that acted, such as `np.exp(log_probs - data.extras["log_probs"])`.
        gamma: The discount factor.
        lam: The weight of longer estimates, from 0 to 1.
        max_weight: The largest weight of a temporal difference (rho bar): below infinity, the targets are values of a
            policy between the two.
        max_trace: The largest weight of what follows (c bar): smaller values have less variance and converge slower.

    Returns:
        Advantages of the policy gradient, which include the weight of their action, and targets of the critic: float32
        `(T, N, k)`, zero where an agent does not act. Train on `data.acting[:-1]`.

    Raises:
        ValueError: Values or ratios have another shape.

    Reference: Espeholt et al., IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
    Architectures (2018), https://arxiv.org/abs/1802.01561, equation 1 and section 4.2.
    """
    _check_shape("ratios", ratios, data.rewards.shape)
    weights, traces = (np.minimum(ratios, most).astype(np.float32) for most in (max_weight, max_trace))
    differences, advantages = _estimates(data, values, final_values, gamma, (weights, traces), lam)
    return advantages, _targets(data, values, differences)


def _estimates(
    data: RolloutArrays, values: Any, final_values: Any, gamma: float, ratios: tuple[Any, Any] | None, lam: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """How far targets of values are from the values, and advantages of actions; zero where an agent does not act.

    At each action of an agent, with `next` for its next action in the same life, and the temporal difference `error`::

        difference = weight * error + gamma * lam * trace * difference[next]
        advantage  = weight * (error + gamma * difference[next])

    `ratios` are the weights and traces `(T, N, k)`; with None, all are 1, and both results are the differences.
    """
    steps, acting = len(data.rewards), data.acting
    _check_shape("values", values, acting.shape)
    _check_shape("final_values", final_values, (int(data.done.sum()), *acting.shape[2:]))
    after_end = np.zeros(data.rewards.shape, np.float32)
    after_end[data.done] = final_values
    differences = np.zeros(data.rewards.shape, np.float32)
    advantages = np.zeros_like(differences)
    # Of the agent's next action: its value (NaN if that is not known), its difference, and the rewards until then.
    next_value = np.where(data.observed[steps], values[steps], np.float32(np.nan))
    next_difference, later_rewards = np.zeros((2, *next_value.shape), np.float32)
    for t in reversed(range(steps)):
        done, terminated, truncated = data.done[t][:, None], data.terminations[t], data.truncations[t]
        next_value = np.where(done, after_end[t], np.where(truncated, values[t + 1], next_value))
        next_value = np.where(terminated, np.float32(0.0), next_value)
        goes_on = ~(done | terminated | truncated)
        rewards = data.rewards[t] + goes_on * later_rewards
        after = np.where(np.isnan(next_value), values[t], next_value)
        error, acts = rewards + gamma * after - values[t], acting[t]
        if ratios is None:
            difference = error + gamma * lam * goes_on * next_difference
        else:
            weights, traces = ratios[0][t], ratios[1][t]
            difference = weights * error + gamma * lam * goes_on * traces * next_difference
            advantage = weights * (error + gamma * goes_on * next_difference)
            advantages[t] = np.where(acts, advantage, np.float32(0.0))
        differences[t] = np.where(acts, difference, np.float32(0.0))
        next_value = np.where(acts, values[t], next_value)
        next_difference = np.where(acts, difference, goes_on * next_difference)
        later_rewards = np.where(acts, np.float32(0.0), rewards)
    return differences, differences if ratios is None else advantages


def _targets(data: RolloutArrays, values: Any, differences: NDArray[np.float32]) -> NDArray[np.float32]:
    targets: NDArray[np.float32] = np.where(data.acting[:-1], differences + values[:-1], np.float32(0.0))
    return targets.astype(np.float32, copy=False)


def _check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if np.shape(array) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {np.shape(array)}")
