"""What Ray's workers say, without Ray: packed for the way, and left where it is found if they die."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from marl_parallel.backends import ray_worker
from marl_parallel.backends.ray_worker import Parcel, packed, unpacked, what_was_said
from marl_parallel.core.ledger import Ledger
from marl_parallel.core.messages import Message, Reply

REPLIES = [
    Reply(Message.RESULT, Message.STEP, (number,), {number: b"more"}, {}, 1.5, number == 2) for number in range(3)
]


@pytest.mark.parametrize("results", [None, np.arange(12, dtype=np.uint8).reshape(3, 4)], ids=["none", "some"])
def test_small_parcels_are_bytes(results):
    told = packed(Parcel(REPLIES, b"ledger", results))
    assert type(told) is bytes
    replies, ledger, arrived = unpacked(told)
    assert (replies, ledger) == (REPLIES, b"ledger")
    np.testing.assert_array_equal(arrived, results)


def test_large_results_travel_beside_the_rest():
    """As an array, which Ray does not copy."""
    results = np.zeros((4, 1 << 19), np.uint8)
    told = packed(Parcel(REPLIES, bytes(Ledger.NBYTES), results))
    assert type(told) is tuple
    assert told[1] is results
    assert len(told[0]) < 10_000
    assert unpacked(told)[2] is results


@pytest.mark.parametrize("torn", [0, 1, 20])
def test_what_was_said_before_a_death(torn):
    """As much of it as is whole."""
    said = b"".join(pickle.dumps(one) for one in [17, *REPLIES])
    number, replies = what_was_said(said[: len(said) - torn])
    assert number == 17
    assert replies == (REPLIES[:2] if torn else REPLIES)


def test_nothing_was_said():
    assert what_was_said(b"") == (-1, [])


def test_it_is_left_in_a_file(monkeypatch, tmp_path):
    """Of the request that is being carried out, not of those before."""
    worker = object.__new__(ray_worker.RayWorker)
    with open(tmp_path / "said", "w+b") as file:
        worker._files = ray_worker.Files(-1, -1, file.fileno(), -1)
        worker._say(REPLIES, 1, begin=True)
        worker._say(REPLIES[:1], 2, begin=True)
        worker._say(REPLIES[1:2], 2, begin=False)
        assert what_was_said(os.pread(file.fileno(), 1 << 16, 0)) == (2, REPLIES[:2])
