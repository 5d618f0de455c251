"""The caller's end of a Ray actor, without a cluster: how results are packed, and how they are copied."""

from __future__ import annotations

import time
from collections import deque
from unittest.mock import MagicMock

import numpy as np
import pytest

from marl_parallel.backends.ray_actor import ActorResults, pack, unpack
from marl_parallel.backends.ray_exchange import ActorState
from marl_parallel.backends.ray_placement import Bundle
from marl_parallel.core.block.records import RecordOffsets, RecordSlices
from marl_parallel.core.messages import Message, Request, answer
from marl_parallel.core.worker_status import WorkerStatus

pytestmark = pytest.mark.needs("ray")

REPLIES = [(0, 1, answer(Message.STEP, (number,), {number: b"more"}, {}, 1.5, last=number == 2)) for number in range(3)]


def results(replies, env_ids, records=None, number=1, now=0.0) -> ActorResults:
    return ActorResults(number, now, replies, {}, env_ids, records, None)


def actor_with(pending: dict[int, deque[Request]]) -> ActorState:
    actor = ActorState(MagicMock(), Bundle(MagicMock(), 0, len(pending)), pending)
    actor.pending = pending
    return actor


@pytest.mark.parametrize("records", [None, np.arange(12, dtype=np.uint8).reshape(3, 4)], ids=["none", "some"])
def test_small_results_are_bytes(records):
    packed = pack(results(REPLIES, [(0,), (1,), (2,)], records))
    assert type(packed) is bytes
    arrived = unpack(packed)
    assert (arrived.replies, arrived.env_ids) == (REPLIES, [(0,), (1,), (2,)])
    np.testing.assert_array_equal(arrived.records, records)


def test_large_records_are_separate_arrays():
    """Ray does not copy arrays."""
    records = np.zeros((4, 1 << 19), np.uint8)
    packed = pack(results(REPLIES, [(0,), (1,), (2,)], records))
    assert type(packed) is tuple
    assert packed[1] is records
    assert len(packed[0]) < 10_000
    assert unpack(packed).records is records


def test_replies_of_a_replaced_process_keep_out_nothing_else():
    """Results that have travelled while another process got the number of their worker: only its own are left out."""
    block = bytearray(4 * 8)
    slices = RecordSlices(RecordOffsets(num_records=4, stride=8, nbytes=32, transition_header=0, step_end=8), block)
    actor = actor_with({0: deque(), 2: deque([Request(Message.RESET, (3,))])})
    actor.started.update({0: 1, 2: 1})  # worker 0 has closed, and its number is that of another one now
    stepped, reset = [answer(message, (3,), {}, {}, 0.0) for message in (Message.STEP, Message.RESET)]
    records = np.repeat(np.array([[1], [2]], np.uint8), 8, axis=1)
    replies = [(0, 0, answer(Message.CLOSE, None, {}, {}, 0.0)), (0, 0, stepped), (2, 1, reset)]
    received = actor.receive(pack(results(replies, [(), (3,), (3,)], records)), slices, [])
    assert [(worker, reply.request) for worker, reply in received] == [(2, Message.RESET)]
    assert block == bytes(24) + bytes([2] * 8)


def test_order_of_replies_while_the_difference_of_clocks_becomes_known():
    """A slow result makes the difference seem larger; a later reply of the worker stays later."""
    actor = actor_with({0: deque([Request(Message.STEP, (2, 0), each=True)])})
    actor.clock_offset = 1000.0
    moments = []
    for number, env_id in enumerate((2, 0), 1):
        reply = answer(Message.STEP, (env_id,), {}, {}, 5.0 + number / 1000, last=env_id == 0)
        now = time.monotonic() - actor.clock_offset + number
        ((_, received),) = actor.receive(pack(results([(0, 0, reply)], [()], None, number, now)), None, [])
        moments.append(received.completed)
    assert actor.clock_offset < 999
    assert moments == sorted({*moments})


def test_statuses_of_a_replaced_process_are_left_out():
    actor = actor_with({0: deque()})
    actor.started[0] = 1
    status = WorkerStatus(bytearray(WorkerStatus.NBYTES))
    for start in (0, 1):
        other = bytes([start + 1]) * WorkerStatus.NBYTES
        actor.copy_statuses(time.monotonic(), {0: (start, other)}, [status])
        assert any(status.copy()) == (start == 1)


def test_what_an_actor_hands_over_to_others():
    """Each gets the requests of its own workers, and nothing is left."""
    requests = {worker: Request(Message.STEP, (worker,)) for worker in range(3)}
    old = actor_with({})
    for worker in range(3):
        old.start_worker(worker, (worker,))
    old.take_requests(requests)
    old.waiting.append((dict(requests), True))
    news = [actor_with({}), actor_with({})]
    for new, workers in zip(news, [(0, 2), (1,)], strict=True):
        old.hand_over(new, workers)
        assert new.pending == {worker: deque([requests[worker]]) for worker in workers}
        assert new.waiting == [({worker: requests[worker] for worker in workers}, True)]
        assert new.since == old.since
        new.start_worker(7, (7,))  # and what it has already stays
        assert {*new.pending} == {*workers, 7}
    assert not old.pending
    assert old.waiting == [({}, True)]
