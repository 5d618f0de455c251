"""Around the loop: rollouts of a `StackedVecEnv`, advantages and sequences. Nothing below this folder knows of it."""

from marl_parallel.rollouts.advantages import gae, vtrace
from marl_parallel.rollouts.arrays import Current, Extra, Policy, RolloutArrays
from marl_parallel.rollouts.rollout import Rollout
from marl_parallel.rollouts.sequences import Sequences, sequences

__all__ = ["Current", "Extra", "Policy", "Rollout", "RolloutArrays", "Sequences", "gae", "sequences", "vtrace"]
