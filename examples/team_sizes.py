"""Train teams of different sizes in one batch: small teams teach large ones.

    python examples/team_sizes.py

It needs `pip install -e .`, and takes a few seconds. Robots in a corridor are to stand on one spot at the same time;
only then, all get a reward. Four robots that move at random hardly ever do, so a batch of such teams learns nothing.
In a batch with teams of one to four robots, the small teams succeed at first, and what one robot has learned helps all:
the robots share the values of Q-learning, in NumPy.
"""

import argparse
import functools

import numpy as np
from gymnasium import spaces

from marl_parallel import ParallelEnv
from marl_parallel.vector import StackedVecEnv

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--steps", type=int, default=4000, help="steps of each environment")
parser.add_argument("--num-workers", type=int, default=2)
args = parser.parse_args()

LARGEST, LIMIT, EDGE, MOVES = 4, 30, 6, np.array([-1, 0, 1])


class Meeting:
    """A robot observes where it is in the corridor; the spot is at 0."""

    def __init__(self, size, seed=None):
        self.possible_agents = [f"robot_{place}" for place in range(size)]
        of_each = spaces.Box(-EDGE, EDGE, (1,), np.int64), spaces.Discrete(len(MOVES))
        self.observation_space, self.action_space = (
            spaces.Dict([(robot, space) for robot in self.possible_agents]) for space in of_each
        )
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed=None, options=None):
        self.places = {robot: self.rng.choice([-EDGE, EDGE]) for robot in self.possible_agents}
        self.time = 0
        return self.observed(), {}

    def observed(self):
        return {robot: np.array([place]) for robot, place in self.places.items()}

    def step(self, actions):
        self.time += 1
        for robot, action in actions.items():
            self.places[robot] = int(np.clip(self.places[robot] + MOVES[action], -EDGE, EDGE))
        met = not any(self.places.values())
        rewards = dict.fromkeys(self.places, float(met))
        return self.observed(), rewards, {"__all__": met}, {"__all__": self.time == LIMIT and not met}, {}


def train(sizes):
    """Train teams of these sizes; returns the share of the last episodes of the largest teams that succeed."""
    constructors = [functools.partial(Meeting, size) for size in sizes]
    env = StackedVecEnv(ParallelEnv(constructors, num_workers=args.num_workers, seed=1))
    rng = np.random.default_rng(1)
    values = np.zeros((2 * EDGE + 1, len(MOVES)))  # by place and action, of every robot
    are_largest, successes = np.array(sizes) == LARGEST, []
    observations, _ = env.reset()
    for _ in range(args.steps):
        places, acting = observations[..., 0], env.acting.copy()  # rows of robots that a team lacks never act
        best = (values[places] + rng.random((*places.shape, len(MOVES))) * 1e-9).argmax(-1)
        actions = np.where(rng.random(places.shape) < 0.2, rng.integers(len(MOVES), size=places.shape), best)
        observations, rewards, *_ = env.step(actions)
        # After an automatic reset, the last observations of the old episodes are apart.
        following = np.where(env.done[:, None], env.final_observations[..., 0], observations[..., 0])
        targets = np.where(env.terminated[:, None], rewards, rewards + 0.95 * values[following].max(-1))
        changes = 0.1 * (targets - values[places, actions])
        np.add.at(values, (places[acting], actions[acting]), changes[acting])
        successes += env.terminated[env.done & are_largest].tolist()
    env.close()
    return np.mean(successes[-40:])


for sizes in ([LARGEST] * 8, [1, 2, 3, LARGEST] * 2):
    print(f"teams of {sorted({*sizes})} robots: {train(sizes):.0%} of the last episodes with {LARGEST} robots succeed")
