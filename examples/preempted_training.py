"""Train in a job that may be killed at any time, and go on: the learning curve is the same, bit for bit.

    python examples/preempted_training.py --output runs/preempted          # kill it, and run the same command again
    python examples/preempted_training.py --output runs/preempted --num-workers 1   # also with other workers

It needs `pip install -e ".[mpe]"`. After each update of the policy, one file is written that has everything: the
weights, the generator of random numbers, the curve, and the states of all environments, which are in the middle of
their episodes. A job that starts again, by Slurm's `--requeue` or on another spot machine, runs the same command again.
docs/clusters.md has a job script; docs/checkpoints.md says how to save at SIGTERM, too.

Three agents of simple_spread share a linear policy, which is trained by REINFORCE in NumPy.
"""

import argparse
import csv
import os
import pickle
from pathlib import Path

import numpy as np
from mpe2 import simple_spread_v3

from marl_parallel import Extra, ParallelEnv, Rollout
from marl_parallel.vector import StackedVecEnv

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--output", type=Path, default=Path("runs/preempted"), help="folder of checkpoint and curve")
parser.add_argument("--updates", type=int, default=150)
parser.add_argument("--num-envs", type=int, default=16)
parser.add_argument("--num-workers", type=int, default=2)
parser.add_argument("--num-steps", type=int, default=20, help="steps of each environment before an update")
args = parser.parse_args()

AGENTS, FEATURES, ACTIONS = 3, 19, 5
LEARNING_RATE, GAMMA = 1.0, 0.9
checkpoint = args.output / "checkpoint.pickle"


def save(update: int) -> None:
    """Write the checkpoint whole or not at all: the job may be killed in the middle of it."""
    everything = {"update": update, "weights": weights, "rng": rng, "curve": curve, "states": rollout.save_state()}
    partial = checkpoint.with_suffix(".partial")
    with partial.open("wb") as file:
        pickle.dump(everything, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, checkpoint)


def with_bias(observations: np.ndarray) -> np.ndarray:
    return np.concatenate([observations, np.ones((*observations.shape[:-1], 1), observations.dtype)], axis=-1)


def probabilities(observations: np.ndarray) -> np.ndarray:
    logits = with_bias(observations) @ weights
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def policy(current):
    """Sample an action of each agent, and return the probabilities of all of them for the update."""
    chances = probabilities(current.observations)
    draws = rng.random(chances.shape[:-1])[..., None]
    return (chances.cumsum(-1)[..., :-1] < draws).sum(-1), {"chances": chances}


def update(data) -> None:
    """REINFORCE: make actions more likely whose episode went on better than the average one."""
    returns, following = np.zeros_like(data.rewards), np.zeros(data.rewards.shape[1:], data.rewards.dtype)
    for time in reversed(range(args.num_steps)):
        following = data.rewards[time] + GAMMA * np.where(data.done[time][:, None], 0.0, following)
        returns[time] = following
    advantages = (returns - returns.mean((1, 2), keepdims=True)) / (returns.std() + 1e-6)
    gradient = (np.eye(ACTIONS)[data.actions] - data.extras["chances"]) * advantages[..., None]
    features = with_bias(data.observations[:-1])
    weights[...] += LEARNING_RATE * np.einsum("tnkf,tnka->fa", features, gradient) / advantages.size * AGENTS


env = ParallelEnv([simple_spread_v3.parallel_env] * args.num_envs, num_workers=args.num_workers, seed=1)
rollout = Rollout(StackedVecEnv(env), args.num_steps, extras={"chances": Extra((ACTIONS,))})
args.output.mkdir(parents=True, exist_ok=True)
if checkpoint.exists():
    loaded = pickle.loads(checkpoint.read_bytes())
    weights, rng, curve, first = loaded["weights"], loaded["rng"], loaded["curve"], loaded["update"] + 1
    rollout.load_state(loaded["states"])
    print(f"goes on after update {first}")
else:
    weights, rng, curve, first = np.zeros((FEATURES, ACTIONS)), np.random.default_rng(1), [], 0
    rollout.reset()

for number in range(first, args.updates):
    data = rollout.collect(policy)
    update(data)
    curve.append((number + 1, float(data.rewards.mean())))
    save(number)
    print(f"update {number + 1}: mean reward {curve[-1][1]:.3f}", flush=True)
env.close()

with (args.output / "curve.csv").open("w", newline="") as file:
    csv.writer(file).writerows([("update", "reward"), *curve])
few = max(len(curve) // 10, 1)
before, after = (np.mean([reward for _, reward in part]) for part in (curve[:few], curve[-few:]))
print(f"mean reward, first -> last updates: {before:.3f} -> {after:.3f}")
