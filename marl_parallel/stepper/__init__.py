"""`Stepper`: resets and steps a batch of environments, below `ParallelEnv` and facades.

```
ParallelEnv        StackedVecEnv, SB3VecEnv, ...       facades: their library's form
     |                  |
DictStepper       FacadeStepper       both are a `Stepper`, with a `View` of dicts or of arrays
     |                  |
     +----- Batch ------+             what they share: checks, seeds and options of resets, one call at a time
              |
           Source                     carries out requests: a pool of workers, or a simulator of many environments
```
"""

from marl_parallel.stepper.batch import Batch
from marl_parallel.stepper.calls import Calls
from marl_parallel.stepper.outputs import NO_STATE
from marl_parallel.stepper.resets import Options, ResetArguments, Seeds
from marl_parallel.stepper.stepper import DictStepper, Stepper
from marl_parallel.stepper.workers import Workers

__all__ = ["NO_STATE", "Batch", "Calls", "DictStepper", "Options", "ResetArguments", "Seeds", "Stepper", "Workers"]
