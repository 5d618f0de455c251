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

_MODULES = {
    "AgileRLVecEnv": "agilerl",
    "ArrayStepper": "stepper",
    "Arrays": "stepper",
    "GymnasiumVectorEnv": "gymnasium",
    "ParallelMultiAgentEnvRunner": "rllib",
    "PettingZooVecEnv": "pettingzoo",
    "RLlibVectorMultiAgentEnv": "rllib",
    "SB3VecEnv": "sb3",
    "Stacked": "stepper",
    "TorchRLEnv": "torchrl",
}
# What modules need beyond our own requirements, which is installed by the extra of the module's name.
_LIBRARIES = {
    "agilerl": ("AgileRL", ["agilerl"]),
    "rllib": ("RLlib", ["ray", "tree"]),  # Ray alone does not install all that RLlib needs
    "sb3": ("Stable-Baselines3", ["stable_baselines3"]),
    "torchrl": ("TorchRL", ["torchrl"]),
}

# Only names whose libraries are installed, so that `import *` works; the errors of the others say what to install.
__all__ = [name for name, module in _MODULES.items() if all(map(installed, _LIBRARIES.get(module, ("", []))[1]))]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ImportError as error:
        if module not in _LIBRARIES:
            raise
        install = f'pip install "marl-parallel[{module}]"'
        raise ImportError(f"{name} needs {_LIBRARIES[module][0]}: {install} ({error})", name=error.name) from error


def __dir__() -> list[str]:
    return sorted(_MODULES)
