"""The queues of two workers, for tests of the exchange of codes."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


class Exchange:
    """The queues of two workers, which this process has at both ends."""

    def __init__(self) -> None:
        from marl_parallel.backends import process  # not on Windows

        self._codec: Any = process.codec
        buffer = mmap.mmap(-1, process.control_nbytes(2, 8))
        self.wake, self.countdown = process.Semaphore(buffer, 0), process.Semaphore(buffer, process.Semaphore.SIZE)
        self.wake.init(0)
        self.pairs = [process.QueuePair(buffer, worker, 8, new=True) for worker in range(2)]
        addresses = [pair.requests.addresses + pair.replies.addresses for pair in self.pairs]
        self.addresses = np.array(addresses, np.int64)

    def reply(self, worker: int, code: int) -> None:
        self.pairs[worker].replies.put(code)
        if self.countdown.try_wait():
            self.wake.post()

    def run(self, seconds: float = 0.0, patience: float = 5.0) -> float:
        arguments = self.wake.address, self.countdown.address, 7, 9, seconds, patience
        waited: float = self._codec.exchange(self.addresses, *arguments)
        return waited

    def send(self) -> None:
        arguments = self.wake.address, self.countdown.address, 7, 9, 0.0, -1.0
        assert self._codec.exchange(self.addresses, *arguments) == 0.0

    def wait(self, patience: float = 5.0) -> float:
        arguments = self.wake.address, self.countdown.address, 0, 9, 0.0, patience
        waited: float = self._codec.exchange(self.addresses, *arguments)
        return waited
