"""The same batch in other shapes: facades over a `ParallelEnv`, for what training loops already speak.

Each is made as `Facade(env)`, reshapes and renames, and decides nothing about episodes. Those of other projects are
imported when they are asked for, so that each needs only its own.
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

# Where each is, and the libraries without which it cannot be imported; RLlib's own are not all there with Ray alone.
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

# All that can be imported here, that to import everything does not fail; the others say what to install.
__all__ = [name for name, (_, libraries) in _WHERE.items() if all(map(installed, libraries))]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name][0]}"), name)


def __dir__() -> list[str]:
    return sorted(_WHERE)
