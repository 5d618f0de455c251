"""`Workers`: the worker pool of a `ParallelEnv`, with its helpers."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from marl_parallel.core.block.block_transitions import BlockTransitions
from marl_parallel.core.pool.pool import Pool
from marl_parallel.core.pool.rebuilds import Rebuilds


class Workers(NamedTuple):
    """The worker pool and its helpers; only environments in workers have these.

    Attributes:
        pool: The pool.
        transitions: Their transitions, in the block.
        rebuilds: Constructs environments again.
        local_modules: Modules that workers cannot import.
    """

    pool: Pool
    transitions: BlockTransitions
    rebuilds: Rebuilds
    local_modules: list[ModuleType]
