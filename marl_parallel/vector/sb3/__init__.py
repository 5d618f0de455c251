"""Stable-Baselines3: the facade, and what trains and evaluates without the rows of absent agents.

Saved models name their classes by this module.
"""

from marl_parallel.vector.sb3.training import SB3RolloutBuffer as SB3RolloutBuffer
from marl_parallel.vector.sb3.training import SB3VecNormalize as SB3VecNormalize
from marl_parallel.vector.sb3.training import evaluate_policy as evaluate_policy
from marl_parallel.vector.sb3.vec_env import NotSaved as _NotSaved  # noqa: F401  # the name in saved models
from marl_parallel.vector.sb3.vec_env import SB3VecEnv as SB3VecEnv

__doctest_requires__ = ["stable_baselines3"]
