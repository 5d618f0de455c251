"""Replies of Ray workers, without Ray: their form, and the saved replies of a worker that died."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from marl_parallel.backends.ray_worker import Result, pack, save_reply, saved_replies, unpack
from marl_parallel.core.messages import Message, Reply
from marl_parallel.core.worker_status import WorkerStatus

REPLIES = [Reply(Message.STEP, (number,), {number: b"more"}, {}, 1.5, number == 2) for number in range(3)]


@pytest.mark.parametrize("records", [None, np.arange(12, dtype=np.uint8).reshape(3, 4)], ids=["none", "some"])
def test_small_results_are_bytes(records):
    packed = pack(Result(REPLIES, b"status", records))
    assert type(packed) is bytes
    replies, status, arrived = unpack(packed)
    assert (replies, status) == (REPLIES, b"status")
    np.testing.assert_array_equal(arrived, records)


def test_large_records_are_separate_arrays():
    """Ray does not copy arrays."""
    records = np.zeros((4, 1 << 19), np.uint8)
    packed = pack(Result(REPLIES, bytes(WorkerStatus.NBYTES), records))
    assert type(packed) is tuple
    assert packed[1] is records
    assert len(packed[0]) < 10_000
    assert unpack(packed)[2] is records


@pytest.mark.parametrize("cut", [0, 1, 20])
def test_replies_saved_before_a_death(cut):
    """Only complete replies."""
    saved = [*enumerate(REPLIES, 17)]
    data = b"".join(map(pickle.dumps, saved))
    assert saved_replies(data[: len(data) - cut]) == (saved[:2] if cut else saved)


def test_no_saved_replies():
    assert saved_replies(b"") == []


def test_replies_are_saved_in_a_file(tmp_path):
    """Only those of the current request."""
    with open(tmp_path / "replies", "w+b") as file:
        for reply in REPLIES:
            save_reply(file.fileno(), 1, reply, first=reply is REPLIES[0])
        save_reply(file.fileno(), 2, REPLIES[0], first=True)
        save_reply(file.fileno(), 3, REPLIES[1], first=False)
        data = os.pread(file.fileno(), 1 << 16, 0)
    assert saved_replies(data) == [(2, REPLIES[0]), (3, REPLIES[1])]
