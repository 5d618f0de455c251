"""Gymnasium: the facade, and what normalises its observations and rewards."""

from marl_parallel.vector.gymnasium.normalize import NormalizePresentObservation as NormalizePresentObservation
from marl_parallel.vector.gymnasium.normalize import NormalizePresentReward as NormalizePresentReward
from marl_parallel.vector.gymnasium.vector_env import GymnasiumVectorEnv as GymnasiumVectorEnv
