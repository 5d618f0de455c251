"""Train with evolution strategies in NumPy: each environment plays an episode with its own weights for all its agents.

    python examples/gymnasium_evolution.py            about half a minute on two CPUs
    python examples/gymnasium_evolution.py --generations 3

It needs `pip install -e ".[mpe]"`.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from gymnasium.spaces import flatdim
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv
from marl_parallel.vector import GymnasiumVectorEnv

STEPS = 25


class Linear:
    """A linear policy for each environment: agents take the action with the highest score."""

    def __init__(self, observation_size: int, actions: int) -> None:
        self.mean = np.zeros((observation_size + 1, actions))

    def act(self, weights: np.ndarray, observations: np.ndarray) -> np.ndarray:
        """Actions of all rows `(num_envs * agents,)`, by the weights `(num_envs, size + 1, actions)`."""
        seen = observations.reshape(len(weights), -1, observations.shape[-1])
        ones = np.ones((*seen.shape[:2], 1))
        return (np.concatenate([seen, ones], axis=2) @ weights).argmax(axis=2).ravel()


def episode(env: RecordEpisodeStatistics, policy: Linear, weights: np.ndarray, seed: int) -> np.ndarray:
    """The return of each environment, summed over its agents; all environments play the same episode."""
    seeds: Any = [seed] * len(weights)  # one for each environment, which Gymnasium's annotation lacks
    observations, _ = env.reset(seed=seeds)
    for _ in range(STEPS):
        observations, _, _, _, infos = env.step(policy.act(weights, observations))
    return infos["episode"]["r"].reshape(len(weights), -1).sum(axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=300)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    # No automatic reset is needed after an episode: the next generation begins with a reset.
    parallel = ParallelEnv([simple_spread_v3.parallel_env] * options.num_envs, "NEXT_STEP", seed=options.seed)
    env = RecordEpisodeStatistics(GymnasiumVectorEnv(parallel))
    policy = Linear(flatdim(env.single_observation_space), flatdim(env.single_action_space))
    history = []
    for generation in range(options.generations):
        half = rng.normal(size=(options.num_envs // 2, *policy.mean.shape))
        noise = np.concatenate([half, -half])
        returns = episode(env, policy, policy.mean + 0.3 * noise, seed=options.seed + generation)
        ranks = returns.argsort().argsort() / (len(returns) - 1) - 0.5
        policy.mean += np.tensordot(ranks, noise, axes=1) / len(returns)
        history.append(returns.mean())
        if generation % 50 == 49 or generation == options.generations - 1:
            print(f"generation {generation + 1}: mean return {np.mean(history[-50:]):.1f}")
    print(f"{parallel.stats().steps:,} environment steps; mean return of the first 20: {np.mean(history[:20]):.1f}")
    env.close()


if __name__ == "__main__":
    main()
