"""Uses marl_parallel to step many copies of Knights-Archers-Zombies in worker processes, and trains on all at once.

1. Dicts: one per environment, as PettingZoo's parallel API returns them. Agents die at different times.
2. Arrays: all environments and agents in one array, with masks of the agents that are alive and that act.
3. Learning: a linear policy in NumPy, shared by all agents, learns to kill zombies.
4. Crashes: an environment that segfaults is constructed again, and the others continue.
5. Time: the same steps in a plain loop.

It runs on Linux, without a GPU, a display, a compiler or a deep learning library. It takes about a minute of CPU time.

Author: The marl_parallel developers
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from pettingzoo import make
from pettingzoo.utils import BaseParallelWrapper

from marl_parallel import Current, ParallelEnv, Rollout, gae
from marl_parallel.vector import StackedVecEnv

NUM_ENVS = 16
NUM_UPDATES = 40  # of the policy, in part 3
NUM_STEPS = 64  # of each environment, between updates
TIMED_STEPS = 300  # of each environment, in part 5


def make_env() -> Any:
    """Construct one environment. Workers call this function; they do not import this script."""
    return make("parallel", "butterfly/knights_archers_zombies-v11", max_cycles=300)


# -- 1. dicts, and agents that die -------------------------------------------------------------------------------------


def show_dicts() -> None:
    """Step four environments until agents have died."""
    env = ParallelEnv([make_env] * 4, seed=1)  # by default, one worker for each CPU
    observations, _ = env.reset()  # a dict by agent for each environment
    for _ in range(150):
        # `env.acting[i]` lists the agents of environment i that act next: dead agents are not in it.
        actions = [dict.fromkeys(acting, 5) for acting in env.acting]  # 5: do nothing
        observations, rewards, _terminations, _truncations, _infos = env.step(actions)
    for number, agents in enumerate(env.acting):
        print(f"environment {number}: {agents}, rewards {rewards[number]}")
        assert list(observations[number]) == agents
    env.close()


# -- 2. arrays, and masks ----------------------------------------------------------------------------------------------


def show_arrays() -> None:
    """The same environments as arrays `(environments, agents, ...)`: rows of dead agents are zeros."""
    with StackedVecEnv(ParallelEnv([make_env] * 4, seed=1)) as env:
        observations, _ = env.reset()
        for _ in range(150):
            observations, rewards, *_ = env.step(np.full((4, 4), 5))
        print(f"observations {observations.shape} {observations.dtype}, rewards {rewards.shape}")
        print(f"agents {env.parallel_env.possible_agents}; acting:\n{env.acting.astype(int)}")


# -- 3. learning -------------------------------------------------------------------------------------------------------


def features(observations: np.ndarray) -> np.ndarray:
    """What the policy sees: where the nearest zombie is, by the agent's heading; in other columns for knights."""
    own, zombies = observations[..., 0, :], observations[..., -10:, :]
    distances = np.where(zombies[..., 0] > 0, zombies[..., 0], np.inf)
    nearest = np.take_along_axis(zombies, distances.argmin(-1)[..., None, None], axis=-2)[..., 0, :]
    x, y = nearest[..., 1] * 1280 / 720, nearest[..., 2]  # in heights of the screen
    distance = np.hypot(x, y) + 1e-6  # zero if there is no zombie
    ahead = (own[..., 3] * x + own[..., 4] * y) / distance
    aside = (own[..., 3] * y - own[..., 4] * x) / distance
    there = (nearest[..., 0] > 0).astype(float)
    seen = np.stack([np.ones_like(x), there, distance, ahead, aside, np.abs(aside), own[..., 2]], axis=-1)
    is_knight = np.array([0, 0, 1, 1])[:, None]  # archer_0, archer_1, knight_0, knight_1
    return np.concatenate([seen * is_knight, seen * (1 - is_knight)], axis=-1)


def train() -> None:
    """Natural policy gradients: a linear softmax policy, a linear critic, and generalised advantage estimates."""
    rng = np.random.default_rng(1)
    policy, critic = np.zeros((14, 6)), np.zeros(14)

    def probabilities(seen: np.ndarray) -> np.ndarray:
        scores = seen @ policy
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return scores / scores.sum(axis=-1, keepdims=True)

    def act(current: Current) -> np.ndarray:
        cumulated = probabilities(features(current.observations)).cumsum(axis=-1)
        return (cumulated > rng.random((*cumulated.shape[:-1], 1))).argmax(axis=-1)

    with StackedVecEnv(ParallelEnv([make_env] * NUM_ENVS, seed=100)) as env:
        rollout, episodes = Rollout(env, NUM_STEPS), []
        for update in range(1, NUM_UPDATES + 1):
            data = rollout.collect(act)  # arrays `(steps, environments, agents, ...)`
            episodes += rollout.finished_episodes
            seen, final = features(data.observations), features(data.final_observations[data.done])
            advantages, returns = gae(data, seen @ critic, final @ critic, gamma=0.98, lam=0.95)
            acting = data.acting[:-1]  # dead agents are left out
            seen, actions, advantages = seen[:-1][acting], data.actions[acting], advantages[acting]
            # A step along the gradient, in a direction and of a length that do not depend on the scale of features.
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            gradient = seen.T @ ((np.eye(6)[actions] - probabilities(seen)) * advantages[:, None]) / len(seen)
            products = seen.T @ seen / len(seen) + 1e-4 * np.eye(14)
            direction = np.linalg.solve(products, gradient)
            policy = policy + 0.3 * direction / (np.sqrt((gradient * direction).sum()) + 1e-8)
            critic = np.linalg.solve(products, seen.T @ returns[acting] / len(seen))
            if len(episodes) >= 20 or update == NUM_UPDATES:
                killed = np.mean([sum(episode.returns.values()) for episode in episodes])
                print(f"update {update}: {killed:.1f} zombies killed, mean of {len(episodes)} episodes", flush=True)
                episodes = []


# -- 4. crashes --------------------------------------------------------------------------------------------------------


class Crashing(BaseParallelWrapper):
    """Crashes its process at step 50: what an engine written in C++ may do once a day."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.steps = 0

    def step(self, actions: Any) -> Any:
        """Step the environment, or segfault."""
        self.steps += 1
        if self.steps == 50:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step(actions)


def make_crashing_env(env_id: int, restarts: int) -> Any:
    """Environment 2 crashes, until it is constructed again."""
    env = make_env()
    return Crashing(env) if env_id == 2 and restarts == 0 else env


def survive_a_crash() -> None:
    """With `on_error="raise"`, the default, the same crash is an exception in this process."""
    with ParallelEnv([make_crashing_env] * 4, seed=1, num_workers=2, on_error="restart") as env:
        env.reset()
        for _ in range(100):
            env.step([dict.fromkeys(acting, 5) for acting in env.acting])
        print(f"100 steps of {env.num_envs} environments, {env.stats().restarts} environments constructed again")


# -- 5. time -----------------------------------------------------------------------------------------------------------


def compare_times() -> None:
    """Random actions, in parallel and in a plain loop."""
    rng = np.random.default_rng(1)
    with ParallelEnv([make_env] * NUM_ENVS, seed=1) as env:
        env.reset()
        start = time.perf_counter()
        for _ in range(TIMED_STEPS):
            env.step([{agent: rng.integers(6) for agent in acting} for acting in env.acting])
        parallel = time.perf_counter() - start
        print(f"in parallel: {TIMED_STEPS * NUM_ENVS / parallel:,.0f} environment steps/s, {env.num_workers} workers")

    envs = [make_env() for _ in range(NUM_ENVS)]
    for number, one in enumerate(envs):
        one.reset(seed=1 + number)
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        for one in envs:
            one.step({agent: rng.integers(6) for agent in one.agents})
            if not one.agents:
                one.reset()
    loop = time.perf_counter() - start
    print(f"plain loop:  {TIMED_STEPS * NUM_ENVS / loop:,.0f} environment steps/s")
    print(f"in parallel, steps are {loop / parallel:.2f} times as fast")


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")  # a crash is a line of the log
    for part in (show_dicts, show_arrays, train, survive_a_crash, compare_times):
        print(f"\n-- {part.__name__.replace('_', ' ')}", flush=True)
        part()
