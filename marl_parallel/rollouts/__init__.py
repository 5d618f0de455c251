"""Around the loop: rollouts of a `StackedVecEnv`, advantages, sequences, evaluation. Nothing below imports it."""

from marl_parallel.rollouts.advantages import gae, vtrace
from marl_parallel.rollouts.ahead import Ahead, AheadStats
from marl_parallel.rollouts.arrays import Current, Extra, Policy, RolloutArrays
from marl_parallel.rollouts.evaluation import evaluate
from marl_parallel.rollouts.evaluation_result import EvaluationResult
from marl_parallel.rollouts.policies import Pairing, Policies, Rows, StartedEpisode, pfsp_weights
from marl_parallel.rollouts.rollout import Rollout
from marl_parallel.rollouts.sequences import Sequences, sequences

__all__ = [
    "Ahead",
    "AheadStats",
    "Current",
    "EvaluationResult",
    "Extra",
    "Pairing",
    "Policies",
    "Policy",
    "Rollout",
    "RolloutArrays",
    "Rows",
    "Sequences",
    "StartedEpisode",
    "evaluate",
    "gae",
    "pfsp_weights",
    "sequences",
    "vtrace",
]
