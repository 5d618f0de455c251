"""Run PettingZoo's own loop over several environments, in which agents die at different times, without auto-reset.

    python examples/pettingzoo_episodes.py --episodes 3

It needs `pip install -e ".[mpe]" "pettingzoo[butterfly]"`.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies

from marl_parallel import FinishedEpisode, ParallelEnv
from marl_parallel.vector import PettingZooVecEnv

SHOOT = 4


def policy(agent: str, observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Actions of one agent in all environments `(num_envs,)`; rows of dead agents are ignored."""
    actions = rng.integers(0, 5, size=len(observations))
    return np.where(rng.random(len(observations)) < 0.5, SHOOT, actions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=3, help="episodes of each environment")
    parser.add_argument("--num-envs", type=int, default=8, help="number of environments")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    constructors = [knights_archers_zombies.parallel_env] * options.num_envs
    with PettingZooVecEnv(ParallelEnv(constructors, auto_reset=False, seed=1)) as env:
        started, steps = time.perf_counter(), 0
        for episode in range(options.episodes):
            observations, _ = env.reset(seed=100 * episode)
            finished: list[FinishedEpisode] = []
            while env.agents:  # until no agent is left in any environment
                steps += int((~env.over).sum())
                actions = {agent: policy(agent, observations[agent], rng) for agent in env.agents}
                observations, *_ = env.step(actions)
                finished += env.parallel_env.finished_episodes
            for agent in env.possible_agents:
                returns, lengths = ([getattr(one, name)[agent] for one in finished] for name in ("returns", "lengths"))
                print(
                    f"episode {episode} {agent}: return {np.mean(returns):.2f}, "
                    f"lived {min(lengths)} to {max(lengths)} steps"
                )
        rate = steps / (time.perf_counter() - started)
        print(f"{options.num_envs} environments in {env.env.num_workers} workers: {rate:,.0f} steps per second")


if __name__ == "__main__":
    main()
