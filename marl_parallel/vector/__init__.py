"""The same batch in other shapes: facades over a `ParallelEnv`, for what training loops already speak.

Each is made as `Facade(env)`, reshapes and renames, and decides nothing about episodes. Those of other projects are
imported when they are asked for, so that each needs only its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_parallel.vector.agilerl import AgileRLVecEnv
    from marl_parallel.vector.gymnasium import GymnasiumVectorEnv
    from marl_parallel.vector.pettingzoo import PettingZooVecEnv
    from marl_parallel.vector.rllib import ParallelMultiAgentEnvRunner, RLlibVectorMultiAgentEnv
    from marl_parallel.vector.sb3 import SB3VecEnv
    from marl_parallel.vector.torchrl import TorchRLEnv

_WHERE = {
    "AgileRLVecEnv": "agilerl",
    "GymnasiumVectorEnv": "gymnasium",
    "ParallelMultiAgentEnvRunner": "rllib",
    "PettingZooVecEnv": "pettingzoo",
    "RLlibVectorMultiAgentEnv": "rllib",
    "SB3VecEnv": "sb3",
    "TorchRLEnv": "torchrl",
}

__all__ = [
    "AgileRLVecEnv",
    "GymnasiumVectorEnv",
    "ParallelMultiAgentEnvRunner",
    "PettingZooVecEnv",
    "RLlibVectorMultiAgentEnv",
    "SB3VecEnv",
    "TorchRLEnv",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
