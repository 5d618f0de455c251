"""The semaphore in shared memory, and the memory it lies in."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from mmap import mmap

import numpy as np
import pytest

from marl_parallel.backends.memory import Block, Semaphore, has_semaphores, mapped

pytestmark = [
    pytest.mark.release_independent,
    pytest.mark.skipif(not has_semaphores(), reason="no process-shared semaphores here"),
]


@pytest.fixture
def block() -> mmap:
    return Block().allocate(4096)


def make(block: mmap, offset: int = 0, value: int = 0) -> Semaphore:
    semaphore = Semaphore(block, offset)
    semaphore.init(value)
    return semaphore


def test_counts(block: mmap) -> None:
    semaphore = make(block, 64, value=2)
    assert semaphore.try_take()
    assert semaphore.take()
    assert not semaphore.try_take()
    semaphore.post()
    assert semaphore.take(timeout=0)
    assert not semaphore.take(timeout=0)


def test_init_resets_the_count(block: mmap) -> None:
    semaphore = make(block, value=3)
    semaphore.init(0)
    assert not semaphore.try_take()


@pytest.mark.parametrize("timeout", [0.0, 0.05, 1.2])
def test_timeout(block: mmap, timeout: float) -> None:
    semaphore = make(block)
    start = time.monotonic()
    assert not semaphore.take(timeout)
    assert timeout <= time.monotonic() - start < timeout + 0.5


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_waits_until_posted_longer_than_one_slice(block: mmap, timeout: float | None) -> None:
    semaphore = make(block)
    timer = threading.Timer(1.2, semaphore.post)
    timer.start()
    assert semaphore.take(timeout)
    timer.join()


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_ctrl_c_interrupts(block: mmap, timeout: float | None) -> None:
    semaphore = make(block)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        semaphore.take(timeout)
    assert time.monotonic() - start < 1.0
    timer.join()


def test_interrupt_outside_a_system_call_is_not_lost(block: mmap) -> None:
    semaphore = make(block)
    timer = threading.Timer(0.1, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        semaphore.take()
    timer.join()


def test_other_signals_do_not_end_the_wait(block: mmap) -> None:
    semaphore = make(block)
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: (seen.append(number), semaphore.post()))
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2))
    try:
        timer.start()
        assert semaphore.take(timeout=10)
        assert seen == [signal.SIGUSR2]
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)


def test_waiting_lets_other_threads_run(block: mmap) -> None:
    semaphore = make(block)
    thread = threading.Thread(target=semaphore.take, args=(5.0,))
    thread.start()
    semaphore.post()
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_no_post_between_processes_is_lost(block: mmap) -> None:
    there, back = make(block, 0), make(block, 64)
    counter = np.frombuffer(block, dtype=np.int64, count=1, offset=128)
    hand_offs = 100_000
    if (pid := os.fork()) == 0:
        for _ in range(hand_offs):
            if not there.take(30):
                os._exit(1)
            counter[0] += 1
            back.post()
        os._exit(0)
    for done in range(hand_offs):
        assert counter[0] == done
        there.post()
        assert back.take(30)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert counter[0] == hand_offs
    assert not there.try_take()
    assert not back.try_take()


def test_misaligned(block: mmap) -> None:
    for offset in (-64, 4, 4096 - 32, 5000):
        with pytest.raises(ValueError, match="no room for a semaphore"):
            Semaphore(block, offset)


def test_semaphore_keeps_its_memory(block: mmap) -> None:
    semaphore = make(block)
    with pytest.raises(BufferError):
        block.close()
    del block
    semaphore.post()
    assert semaphore.try_take()


def test_block_is_shared_through_its_descriptor() -> None:
    block = Block()
    buffer = block.allocate(4096)
    other = mapped(block.fd)
    make(buffer, 64)
    Semaphore(buffer, 64).post()
    assert Semaphore(other, 64).try_take()


def test_views_outlive_the_block() -> None:
    block = Block()
    array = np.frombuffer(block.allocate(64), dtype=np.uint8)
    array[:] = 7
    block.close_fd()
    block.close_fd()
    assert block.fd == -1
    del block
    assert array.sum() == 7 * 64


@pytest.mark.whole_machine
def test_blocks_leave_nothing_open() -> None:
    def leftovers() -> tuple[int, list[str]]:
        return len(os.listdir("/proc/self/fd")), os.listdir("/dev/shm")

    before = leftovers()
    for _ in range(50):
        make(Block().allocate(1 << 20))
    with pytest.raises(ValueError, match="empty file"):
        Block().allocate(0)
    assert leftovers() == before
