"""Step many multi-agent environments in parallel.

`ParallelEnv` takes constructors and returns batches of dicts; `make` takes the name of a module instead.
"""

from typing import TYPE_CHECKING, Any

from gymnasium.vector import AutoresetMode

from marl_parallel.adapters import MultiAgentEnv, Rules
from marl_parallel.core.backend import Backend
from marl_parallel.core.block.codec import codec
from marl_parallel.making import make
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.recording import record_video
from marl_parallel.rollouts import (
    Current,
    EvaluationResult,
    Extra,
    Pairing,
    Policies,
    Rollout,
    RolloutArrays,
    Rows,
    Sequences,
    StartedEpisode,
    evaluate,
    gae,
    pfsp_weights,
    sequences,
    vtrace,
)
from marl_parallel.sources.native import NativeSimulator, Received
from marl_parallel.types import (
    EnvError,
    FinishedEpisode,
    NoSpaceDeclared,
    ParallelEnvError,
    RecyclePolicy,
    RestartEvent,
    RestartLimitExceeded,
    RestartPolicy,
    Stats,
    StepBatch,
    StepTimes,
    WorkerCrashed,
    WorkerStats,
    WorkerTimeout,
    installed,
)

if TYPE_CHECKING:
    from marl_parallel.backends.ray_backend import RayBackend

__version__ = "0.2.0"

__all__ = [
    "AutoresetMode",
    "Backend",
    "Current",
    "EnvError",
    "EvaluationResult",
    "Extra",
    "FinishedEpisode",
    "MultiAgentEnv",
    "NativeSimulator",
    "NoSpaceDeclared",
    "Pairing",
    "ParallelEnv",
    "ParallelEnvError",
    "Policies",
    "Received",
    "RecyclePolicy",
    "RestartEvent",
    "RestartLimitExceeded",
    "RestartPolicy",
    "Rollout",
    "RolloutArrays",
    "Rows",
    "Rules",
    "Sequences",
    "StartedEpisode",
    "Stats",
    "StepBatch",
    "StepTimes",
    "WorkerCrashed",
    "WorkerStats",
    "WorkerTimeout",
    "codec",
    "evaluate",
    "gae",
    "make",
    "pfsp_weights",
    "record_video",
    "sequences",
    "vtrace",
]
if installed("ray"):  # without Ray, `from marl_parallel import *` would fail
    __all__ += ["RayBackend"]


def __getattr__(name: str) -> Any:
    if name == "RayBackend":  # Ray is imported only on first use
        from marl_parallel.backends.ray_backend import RayBackend

        return RayBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
