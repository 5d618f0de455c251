"""Raise the difficulty of the environments while the agents learn: a curriculum by `set_reset_options`.

    python examples/curriculum.py

It needs `pip install -e .`, and takes a few seconds. Two robots stand in a corridor, each at some distance from its own
charger, and get a reward only when they reach it. At the full distance, a robot that moves at random hardly ever does,
so nothing is learned. With the curriculum, chargers are near at first. When most episodes succeed, the next ones begin
at a larger distance; episodes that are running end as they began. The robots learn by Q-learning in NumPy.
"""

import argparse

import numpy as np
from gymnasium import spaces

from marl_parallel import ParallelEnv
from marl_parallel.vector import StackedVecEnv

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--steps", type=int, default=6000, help="steps of each environment")
parser.add_argument("--num-envs", type=int, default=8)
parser.add_argument("--num-workers", type=int, default=2)
parser.add_argument("--distance", type=int, default=20, help="that the robots are to manage in the end")
args = parser.parse_args()

ROBOTS, LIMIT, MOVES = ("left", "right"), 40, np.array([-1, 0, 1])


class Corridor:
    """Each robot observes how far its charger is, and to which side. `reset` takes the distance as an option."""

    possible_agents = ROBOTS
    observation_space = spaces.Dict(dict.fromkeys(ROBOTS, spaces.Box(-99, 99, (1,), np.int64)))
    action_space = spaces.Dict(dict.fromkeys(ROBOTS, spaces.Discrete(3)))

    def __init__(self, seed=None):
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed=None, options=None):
        distance = (options or {}).get("distance", args.distance)
        self.offsets = {robot: distance * self.rng.choice([-1, 1]) for robot in ROBOTS}
        self.time = 0
        return self.observed(), {}

    def observed(self):
        return {robot: np.array([offset]) for robot, offset in self.offsets.items()}

    def step(self, actions):
        self.time += 1
        rewards = {}
        for robot, action in actions.items():
            was_there = self.offsets[robot] == 0
            self.offsets[robot] += 0 if was_there else MOVES[action]
            rewards[robot] = float(self.offsets[robot] == 0 and not was_there)
        done = not any(self.offsets.values())
        return self.observed(), rewards, {"__all__": done}, {"__all__": self.time == LIMIT and not done}, {}


def train(*, with_curriculum):
    """Train, and return the share of successful episodes at the full distance, among the last ones."""
    parallel_env = ParallelEnv([Corridor] * args.num_envs, num_workers=args.num_workers, seed=1)
    env, rng = StackedVecEnv(parallel_env), np.random.default_rng(1)
    values = np.zeros((2 * (args.distance + LIMIT) + 1, 3))  # by offset and action
    distance = 2 if with_curriculum else args.distance
    if with_curriculum:
        parallel_env.set_reset_options({"distance": distance})
    successes = []  # of the latest episodes
    observations, _ = env.reset()
    for _ in range(args.steps):
        states = observations[..., 0]
        explores, anything = rng.random(states.shape) < 0.2, rng.integers(3, size=states.shape)
        actions = np.where(explores, anything, best_of(values, states, rng))
        observations, rewards, _, _, _ = env.step(actions)
        # After an automatic reset, the last observations of the old episodes are apart.
        following = np.where(env.done[:, None], env.final_observations[..., 0], observations[..., 0])
        targets = rewards + 0.95 * np.where(following == 0, 0.0, values[following].max(-1))
        values[states, actions] += 0.5 * (targets - values[states, actions])
        successes += env.terminated[env.done].tolist()
        if with_curriculum and distance < args.distance and len(successes) >= 20 and np.mean(successes[-20:]) > 0.8:
            distance, successes = distance + 1, []
            parallel_env.set_reset_options({"distance": distance})
    env.close()
    return np.mean(successes[-40:] or [0.0]) if distance == args.distance else 0.0


def best_of(values, states, rng):
    """The best action in each state; any of the best ones."""
    noise = rng.random((*states.shape, 3)) * 1e-9
    return (values[states] + noise).argmax(-1)


for with_curriculum in (False, True):
    share = train(with_curriculum=with_curriculum)
    how = "with" if with_curriculum else "without"
    print(f"{how} a curriculum: {share:.0%} of the last episodes at distance {args.distance} succeed")
