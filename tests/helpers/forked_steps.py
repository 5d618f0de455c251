"""Steps of simulators that fork: actions, a plain loop, and a `ParallelEnv`."""

from __future__ import annotations

from typing import Any

SEED, NUM_ENVS, STEPS = 42, 2, 8


def actions(step: int) -> list[dict[str, int]]:
    return [{"a": (step + env_id) % 3, "b": step % 2} for env_id in range(NUM_ENVS)]


def plain_loop(make: Any, steps: int = STEPS) -> list[Any]:
    """The results of a plain loop: the first observations, then (observations, rewards) of each step."""
    envs = [make(seed=SEED + env_id) for env_id in range(NUM_ENVS)]
    history: list[Any] = [tuple(env.reset(seed=SEED + env_id)[0] for env_id, env in enumerate(envs))]
    for step in range(steps):
        observed, rewarded = [], []
        for env, env_actions in zip(envs, actions(step), strict=True):
            observations, rewards, *_ = env.step(env_actions)
            if not env.agents:
                observations = env.reset()[0]
            observed.append(observations)
            rewarded.append(rewards)
        history.append((tuple(observed), tuple(rewarded)))
    return history


def stepped(env: Any, steps: int = STEPS) -> list[Any]:
    """The same from a `ParallelEnv`."""
    history: list[Any] = [env.reset()[0]]
    return history + [env.step(actions(step))[:2] for step in range(steps)]
