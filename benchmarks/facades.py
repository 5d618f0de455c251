"""`ParallelEnv` and its facades as contenders. A facade raises ImportError on start if its library is missing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from contest import Case, Contender, Step, stepping
from peers import torchrl_stepping
from plain_loops import SEED

import marl_parallel.vector
from marl_parallel import ParallelEnv


def parallel_env(case: Case, auto_reset: bool | str = True) -> ParallelEnv:
    return ParallelEnv([case.constructor] * case.num_envs, auto_reset, SEED, num_workers=case.workers)


@contextmanager
def dicts(case: Case) -> Iterator[Step]:
    with parallel_env(case) as env:
        env.reset()
        yield stepping(env.step, case.by_env)


@contextmanager
def facade(case: Case, name: str, auto_reset: bool | str, actions: str) -> Iterator[Step]:
    """A facade whose `step` takes actions in a form that `Case` has."""
    make_facade = _found(name)
    with parallel_env(case, auto_reset) as parallel:
        env = make_facade(parallel)
        env.reset()
        yield stepping(env.step, getattr(case, actions))


@contextmanager
def torchrl(case: Case) -> Iterator[Step]:
    make_facade = _found("TorchRLEnv")
    with parallel_env(case, auto_reset=False) as parallel:
        env = make_facade(parallel)
        yield torchrl_stepping(env, env.group_map, case)


def _found(name: str) -> Any:
    try:
        return getattr(marl_parallel.vector, name)
    except AttributeError as error:
        raise ImportError(str(error)) from None


def _contender(name: str, auto_reset: bool | str, actions: str) -> Contender:
    start = functools.partial(facade, name=name, auto_reset=auto_reset, actions=actions)
    return Contender(name, start, next_step=auto_reset == "NEXT_STEP", ours=True)


DICTS = Contender("ParallelEnv", dicts, ours=True)
PETTINGZOO = _contender("PettingZooVecEnv", True, "by_agent")
GYMNASIUM = _contender("GymnasiumVectorEnv", "NEXT_STEP", "rows")
SB3 = _contender("SB3VecEnv", True, "rows")
TORCHRL = Contender("TorchRLEnv", torchrl, ours=True)
RLLIB = _contender("RLlibVectorMultiAgentEnv", "NEXT_STEP", "by_env")
AGILERL = _contender("AgileRLVecEnv", True, "by_agent")
