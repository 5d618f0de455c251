"""A worker by itself, without a pool."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from mpe2 import simple_spread_v3
from pettingzoo.utils.wrappers import BaseParallelWrapper

from marl_parallel.core.block.records import ActionRecords
from marl_parallel.core.messages import STEP_ALL, BlockSettings, Construction, Message, Reply, Request
from marl_parallel.core.objects.pickling import dumps
from marl_parallel.core.worker.worker import Worker
from marl_parallel.core.worker_status import WorkerStatus


def test_a_step_of_all_is_in_the_order_of_the_environments():
    """Also if they were constructed in another one, as in a worker that takes the places of another one by one."""
    stepped = []

    class Recorded(BaseParallelWrapper[Any, Any, Any]):
        def step(self, actions: Any) -> Any:
            stepped.append(self.env_id)
            return super().step(actions)

    def construct(env_id: int) -> Any:
        env = Recorded(simple_spread_v3.parallel_env())
        env.env_id = env_id
        return env

    def block(layout: Any) -> Any:
        buffer = bytearray(layout.nbytes)
        layout.bind(buffer)
        layout.actions.write_stacked({f"agent_{place}": np.zeros(2, np.int64) for place in range(3)})
        ActionRecords(layout, buffer).mark_present(None)
        return buffer

    replies: list[Reply] = []
    worker = Worker(WorkerStatus(bytearray(WorkerStatus.NBYTES)), block)
    for env_id in (1, 0):
        construction = Construction({env_id: construct}, {env_id: env_id}, AutoresetMode.SAME_STEP, None)
        worker.execute(Request(Message.ACCESS, (env_id,), construction), replies.append)
    worker.execute(
        Request(Message.ATTACH, None, BlockSettings(2, arrays=True, compiled=True, infos=True)), replies.append
    )
    worker.execute(Request(Message.RESET, (1, 0), dict.fromkeys((0, 1), dumps({}))), replies.append)
    worker.execute(STEP_ALL, replies.append)
    failures = [failure.traceback for reply in replies for failure in reply.failures.values()]
    assert not failures, failures[0]
    assert stepped == [0, 1]
