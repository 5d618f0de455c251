"""Facades: a `ParallelEnv` with the interface of a training library, made as `Facade(env)`.

Facades reshape and rename values, and decide nothing about episodes. They are imported on first use, so that each
needs only its own library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from marl_parallel.types import how_to_install, installed

if TYPE_CHECKING:
    from marl_parallel.vector.agilerl import AgileRLVecEnv as AgileRLVecEnv
    from marl_parallel.vector.facade import ArrayFacade as ArrayFacade
    from marl_parallel.vector.gymnasium import GymnasiumVectorEnv as GymnasiumVectorEnv
    from marl_parallel.vector.gymnasium import NormalizePresentObservation as NormalizePresentObservation
    from marl_parallel.vector.gymnasium import NormalizePresentReward as NormalizePresentReward
    from marl_parallel.vector.pettingzoo import PettingZooVecEnv as PettingZooVecEnv
    from marl_parallel.vector.pymarl import PyMARLConnection as PyMARLConnection
    from marl_parallel.vector.pymarl import PyMARLConnections as PyMARLConnections
    from marl_parallel.vector.pymarl import pymarl_connections as pymarl_connections
    from marl_parallel.vector.rllib import ParallelMultiAgentEnvRunner as ParallelMultiAgentEnvRunner
    from marl_parallel.vector.rllib import RLlibVectorMultiAgentEnv as RLlibVectorMultiAgentEnv
    from marl_parallel.vector.sb3 import SB3RolloutBuffer as SB3RolloutBuffer
    from marl_parallel.vector.sb3 import SB3VecEnv as SB3VecEnv
    from marl_parallel.vector.sb3 import SB3VecNormalize as SB3VecNormalize
    from marl_parallel.vector.sb3 import evaluate_policy as evaluate_policy
    from marl_parallel.vector.share import DummyVecEnv as DummyVecEnv
    from marl_parallel.vector.share import ShareDummyVecEnv as ShareDummyVecEnv
    from marl_parallel.vector.share import ShareInfos as ShareInfos
    from marl_parallel.vector.share import ShareSubprocVecEnv as ShareSubprocVecEnv
    from marl_parallel.vector.share import ShareVecEnv as ShareVecEnv
    from marl_parallel.vector.share import SubprocVecEnv as SubprocVecEnv
    from marl_parallel.vector.skrl import SkrlEnv as SkrlEnv
    from marl_parallel.vector.stacked import StackedVecEnv as StackedVecEnv
    from marl_parallel.vector.stepper import Arrays as Arrays
    from marl_parallel.vector.stepper import ArrayStepper as ArrayStepper
    from marl_parallel.vector.stepper import FacadeStepper as FacadeStepper
    from marl_parallel.vector.stepper import Stacked as Stacked
    from marl_parallel.vector.tianshou import TianshouVecEnv as TianshouVecEnv
    from marl_parallel.vector.torchrl import TorchRLEnv as TorchRLEnv
    from marl_parallel.vector.tuples import TupleVecEnv as TupleVecEnv

# By module: its names. If they need the extra of the module's name: the title and the packages of its library.
_MODULES: dict[str, tuple[list[str], str, list[str]]] = {
    "agilerl": (["AgileRLVecEnv"], "AgileRL", ["agilerl"]),
    "facade": (["ArrayFacade"], "", []),
    "gymnasium": (["GymnasiumVectorEnv", "NormalizePresentObservation", "NormalizePresentReward"], "", []),
    "pettingzoo": (["PettingZooVecEnv"], "", []),
    "pymarl": (["PyMARLConnection", "PyMARLConnections", "pymarl_connections"], "", []),
    # Ray alone does not install all that RLlib needs.
    "rllib": (["ParallelMultiAgentEnvRunner", "RLlibVectorMultiAgentEnv"], "RLlib", ["ray", "tree"]),
    "sb3": (
        ["SB3RolloutBuffer", "SB3VecEnv", "SB3VecNormalize", "evaluate_policy"],
        "Stable-Baselines3",
        ["stable_baselines3"],
    ),
    "share": (
        ["DummyVecEnv", "ShareDummyVecEnv", "ShareInfos", "ShareSubprocVecEnv", "ShareVecEnv", "SubprocVecEnv"],
        "",
        [],
    ),
    "skrl": (["SkrlEnv"], "skrl", ["skrl", "torch"]),  # skrl alone does not install torch
    "stacked": (["StackedVecEnv"], "", []),
    "stepper": (["ArrayStepper", "Arrays", "FacadeStepper", "Stacked"], "", []),
    "tianshou": (["TianshouVecEnv"], "Tianshou", ["tianshou"]),
    "torchrl": (["TorchRLEnv"], "TorchRL", ["torchrl"]),
    "tuples": (["TupleVecEnv"], "", []),
}
_MODULE_OF = {name: module for module, (names, *_) in _MODULES.items() for name in names}

# Only names whose libraries are installed, so that `import *` works; the errors of the others say what to install.
__all__ = [name for names, _, packages in _MODULES.values() if all(map(installed, packages)) for name in names]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULE_OF[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ImportError as error:
        title = _MODULES[module][1]
        if not title:
            raise
        raise ImportError(f"{name} needs {title}: {how_to_install(module)} ({error})", name=error.name) from error


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)
