"""While the very first reset is in flight, calls are refused because it is, not because nothing has been reset.

Facades promise it in the table: `test_waits_that_time_out`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ResetNeeded
from mpe2 import simple_spread_v3

from marl_parallel import ParallelEnv
from marl_parallel.vector import ArrayStepper

IDLE = {f"agent_{i}": np.zeros(2, np.int64) for i in range(3)}
Call = Callable[[Any], Any]


class Plain:
    """The smallest facade: what every other one does with its `ArrayStepper`."""

    def __init__(self, env: ParallelEnv) -> None:
        self.parallel_env, self.stepper = env, ArrayStepper(env, self)


FACADES: dict[str, tuple[Callable[[ParallelEnv], Any], list[Call]]] = {
    "dicts": (lambda env: env, [
        lambda env: env.send([dict.fromkeys(IDLE, 0)] * 2),
        lambda env: env.send([dict.fromkeys(IDLE, 0)], env_ids=[1]),
        lambda env: env.step([dict.fromkeys(IDLE, 0)] * 2),
        lambda env: env.step([dict.fromkeys(IDLE, 0)], env_ids=[1]),
    ]),
    "ArrayStepper": (Plain, [
        lambda env: env.stepper.step(IDLE),
        lambda env: env.stepper.send(IDLE),
        lambda env: env.stepper.send_some([dict.fromkeys(IDLE, 0)], [1]),
        lambda env: env.stepper.send_dicts([dict.fromkeys(IDLE, 0)] * 2),
        lambda env: env.stepper.reset(env_ids=[1]),
        lambda env: env.stepper.send_reset(env_ids=[1]),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("kind", FACADES)
@pytest.mark.parametrize("begin", ["facade", "ParallelEnv"])
def test_calls_during_the_first_reset(kind, begin):
    """Whether the facade or the `ParallelEnv` below it has begun the reset; before that, one is needed."""
    make_facade, calls = FACADES[kind]
    with ParallelEnv([simple_spread_v3.parallel_env] * 2, False, backend="serial") as env:
        facade = make_facade(env)
        for call in calls:
            with pytest.raises(ResetNeeded):
                call(facade)
        begins = getattr(facade, "stepper", facade)
        start = getattr(begins, "send_reset", None) or getattr(begins, "reset_async", None)
        if begin == "ParallelEnv" or start is None:
            start = env.reset_async
        start()
        for call in calls:
            with pytest.raises(AlreadyPendingCallError, match="in flight"):
                call(facade)
        assert env.pending == (0, 1)
