"""One exchange of codes with all workers, in compiled code."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from helpers.exchange import Exchange

pytestmark = [pytest.mark.needs("_codec"), pytest.mark.release_independent]

pytest.importorskip("marl_parallel.backends.process")


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_exchange(seconds):
    exchange = Exchange()

    def work() -> None:
        for worker, pair in enumerate(exchange.pairs):
            assert pair.requests.ready.take(5.0)
            assert pair.requests.take() == 7
            exchange.reply(worker, 9)

    for _ in range(20):  # more than there is room for
        thread = threading.Thread(target=work)
        thread.start()
        assert 0.0 <= exchange.run(seconds) < 5.0
        thread.join()
    assert not any(pair.replies.ready.try_take() for pair in exchange.pairs)


@pytest.mark.parametrize("when", ["before", "after"])
def test_exchange_in_two_calls(when):
    """The replies come before the second call, or in it; nothing is sent twice."""
    exchange = Exchange()
    for _ in range(20):
        exchange.send()
        for pair in exchange.pairs:
            assert pair.requests.ready.try_take()
            assert pair.requests.take() == 7
        assert exchange.wait(patience=0.001) == -1.0
        replies = threading.Thread(target=lambda: [exchange.reply(worker, 9) for worker in range(2)])
        replies.start()
        if when == "before":
            replies.join()
        assert exchange.wait() >= 0.0
        replies.join()
        assert not any(queue.ready.try_take() for pair in exchange.pairs for queue in (pair.requests, pair.replies))


@pytest.mark.parametrize("codes", [{}, {0: 9}, {1: 9}, {0: 9, 1: 5}, {0: 5, 1: 9}])
@pytest.mark.parametrize("rings", [False, True])
def test_exchange_takes_all_or_nothing(codes, rings):
    """Also if the doorbell rings for another reason, such as a death."""
    exchange = Exchange()
    for worker, code in codes.items():
        exchange.pairs[worker].replies.put(code)
    if rings:
        exchange.wake.post()
    began = time.monotonic()
    assert exchange.run(patience=0.03) == -1.0
    assert rings or time.monotonic() - began >= 0.03
    for worker, pair in enumerate(exchange.pairs):
        assert pair.requests.ready.try_take()
        assert pair.replies.ready.try_take() == (worker in codes)
        assert worker not in codes or pair.replies.take() == codes[worker]


def test_signal_ends_an_exchange():
    exchange, handled = Exchange(), []
    before = signal.signal(signal.SIGALRM, lambda *_: handled.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.monotonic()
        assert exchange.run(patience=30.0) == -1.0
        assert time.monotonic() - began < 20.0
        assert handled
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
