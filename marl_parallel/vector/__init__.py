"""Facades: a `ParallelEnv` with the interface of a training library, made as `Facade(env)`.

Facades reshape and rename, and decide nothing about episodes. They are imported on first use, so that each needs only
its own library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from marl_parallel.types import installed

if TYPE_CHECKING:
    from marl_parallel.vector.agilerl import AgileRLVecEnv as AgileRLVecEnv
    from marl_parallel.vector.gymnasium import GymnasiumVectorEnv as GymnasiumVectorEnv
    from marl_parallel.vector.pettingzoo import PettingZooVecEnv as PettingZooVecEnv
    from marl_parallel.vector.rllib import ParallelMultiAgentEnvRunner as ParallelMultiAgentEnvRunner
    from marl_parallel.vector.rllib import RLlibVectorMultiAgentEnv as RLlibVectorMultiAgentEnv
    from marl_parallel.vector.sb3 import SB3VecEnv as SB3VecEnv
    from marl_parallel.vector.stepper import Arrays as Arrays
    from marl_parallel.vector.stepper import ArrayStepper as ArrayStepper
    from marl_parallel.vector.stepper import Stacked as Stacked
    from marl_parallel.vector.torchrl import TorchRLEnv as TorchRLEnv

# The module of each name, and the libraries that it imports; Ray alone does not bring all that RLlib needs.
_WHERE = {
    "ArrayStepper": ("stepper", ()),
    "Arrays": ("stepper", ()),
    "Stacked": ("stepper", ()),
    "AgileRLVecEnv": ("agilerl", ("agilerl",)),
    "GymnasiumVectorEnv": ("gymnasium", ("gymnasium",)),
    "ParallelMultiAgentEnvRunner": ("rllib", ("ray", "tree")),
    "PettingZooVecEnv": ("pettingzoo", ("pettingzoo",)),
    "RLlibVectorMultiAgentEnv": ("rllib", ("ray", "tree")),
    "SB3VecEnv": ("sb3", ("stable_baselines3",)),
    "TorchRLEnv": ("torchrl", ("torchrl",)),
}

# Only names whose libraries are installed, so that `import *` works; the errors of the others say what to install.
__all__ = [name for name, (_, libraries) in _WHERE.items() if all(map(installed, libraries))]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name][0]}"), name)


def __dir__() -> list[str]:
    return sorted(_WHERE)
