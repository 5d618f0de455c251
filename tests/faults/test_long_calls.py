"""`warn_after`: reports of calls that take long, without timeouts, and at Ctrl-C."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
from helpers.setups import CONCURRENT_OR_PORTABLE, Setup
from simulators.counting import ACTIONS, Counting

from marl_parallel import ParallelEnv

pytestmark = pytest.mark.release_independent

THREAD, APART, PACKED = Setup("thread", True, 2), Setup("process", True, 2), Setup("process", True, 1)
PROCESSES = [setup for setup in CONCURRENT_OR_PORTABLE if setup.backend != "thread"]
RAY = [setup for setup in PROCESSES if setup.backend == "ray"]
WAITS_S = 1.0


class Slow(Counting):
    """Environment 1 waits in the methods `where`, until a file is there or `WAITS_S` have passed."""

    def __init__(self, where: str, env_id: int, seed: int, go_on: str = "") -> None:
        super().__init__(seed=seed)
        self.where, self.env_id, self.go_on = where, env_id, go_on
        self.wait("constructor")

    def wait(self, place: str) -> None:
        # Its module is imported in the same call, before the constructor: on a busy machine, for seconds.
        until = time.monotonic() + WAITS_S * (3 if place == "constructor" else 1)
        while place == self.where and self.env_id == 1:
            if os.path.exists(self.go_on) if self.go_on else time.monotonic() >= until:
                break
            time.sleep(0.01)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self.wait("reset")
        return super().reset(seed, options)

    def step(self, actions: dict) -> Any:
        self.wait("step")
        return super().step(actions)

    def restore_default(self) -> None:
        for number in {*signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)


def slow(where: str, **arguments: Any) -> list[functools.partial[Slow]]:
    return [functools.partial(Slow, where, **arguments)] * 2


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def waiting_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of calls that wait in `Slow`; on a busy machine, there are others."""
    return [text for text in warnings_of(caplog) if re.search(r'test_long_calls.py", line \d+,? in wait\n', text)]


@pytest.mark.parametrize("setup", [*CONCURRENT_OR_PORTABLE, PACKED], ids=str)
@pytest.mark.parametrize("place", ["constructor", "reset", "step"])
def test_long_calls_are_reported(place, setup, build, caplog):
    """After 0.2 s, 0.4 s, 0.8 s; with the stack; and nothing else changes."""
    env = build(slow(place), setup, warn_after=0.2)
    if place == "constructor":
        texts = waiting_of(caplog)
    caplog.clear()
    observations, _ = env.reset()
    if place == "reset":
        texts = waiting_of(caplog)
    caplog.clear()
    results = env.step([ACTIONS] * 2)
    if place == "step":
        texts = waiting_of(caplog)
    else:
        assert waiting_of(caplog) == []
    worker = setup.num_workers - 1
    taken = [float(text.partition(" for ")[2].partition(" s;")[0]) for text in texts]
    assert taken == sorted(taken)
    assert 1 <= len(texts) <= math.log2(taken[-1] / 0.2) + 2  # each after twice as long
    for text in texts:
        first = text.splitlines()[0]
        assert first.startswith(f"environment 1 (worker {worker}) has been in {place} for ")
        assert "; it is at line " in first
        assert "test_long_calls.py" in first
        ends = "It times out after 60 s" if place == "constructor" else "_timeout= to end calls that hang"
        assert ends in first
    plain = build([Counting] * 2, Setup("serial", True, 1))
    plain.reset()
    expected = plain.step([ACTIONS] * 2)
    assert [{**one} for one in results[1]] == [{**one} for one in expected[1]]
    assert observations[1]["long"].tolist() == [43, 1, 0]


@pytest.mark.parametrize("setup", [THREAD, APART, *RAY], ids=str)
def test_receiving_again_and_again(setup, build, caplog):
    """Each `recv` is shorter than `warn_after`."""
    env = build(slow("step"), setup, warn_after=0.2)
    env.reset()
    caplog.clear()
    env.send([ACTIONS] * 2)
    while env.pending:
        try:
            env.recv(timeout=0.05)
        except TimeoutError:
            continue
    assert waiting_of(caplog)[0].startswith("environment 1 (worker 1) has been in step for ")


@pytest.mark.parametrize("setup", [THREAD, APART, PACKED, *RAY], ids=str)
def test_no_warnings_of_short_calls(setup, build, caplog):
    env = build(slow(""), setup, warn_after=0.5)
    env.reset()
    caplog.clear()  # modules may take long to load
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        env.step([ACTIONS] * 2)
    time.sleep(0.6)
    env.step([ACTIONS] * 2)
    assert warnings_of(caplog) == []


def test_no_warnings_if_turned_off(build, caplog):
    env = build(slow("step"), APART, warn_after=None)
    env.reset()
    env.step([ACTIONS] * 2)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("setup", PROCESSES, ids=str)
def test_stopped_worker_is_not_continued(setup, build, caplog):
    env = build([Counting] * 2, setup, warn_after=0.2)
    env.reset()
    caplog.clear()
    pid = env.call(lambda env: os.getpid())[1]
    os.kill(pid, signal.SIGSTOP)
    env.send([ACTIONS] * 2)
    with pytest.raises(TimeoutError):
        env.recv(timeout=1.5)
    os.kill(pid, signal.SIGCONT)
    assert len(env.recv().env_ids) >= 1
    assert any(text.startswith("worker 1 (environment 1) has been waiting for ") for text in warnings_of(caplog))


@pytest.mark.parametrize("setup", PROCESSES, ids=str)
def test_simulator_that_ignores_no_signal(setup, build, caplog):
    """No signal asks for a stack: it would end a process without a handler."""
    env = build(slow("step"), setup, warn_after=0.2)
    env.reset()
    env.call("restore_default")
    caplog.clear()
    env.step([ACTIONS] * 2)
    texts = [text for text in warnings_of(caplog) if text.startswith("environment 1 (worker 1) has been in step")]
    assert texts
    assert all("Stack now" in text for text in texts)


@pytest.mark.parametrize("setup", [*CONCURRENT_OR_PORTABLE, PACKED], ids=str)
def test_ctrl_c_reports_where_it_hangs(setup, build, caplog, tmp_path):
    env = build(slow("step", go_on=str(tmp_path / "go on")), setup)
    env.reset()
    timers = [threading.Timer(1.3, os.kill, (os.getpid(), signal.SIGINT))]
    if setup.backend == "thread":  # which cannot be killed
        timers.append(threading.Timer(2.0, (tmp_path / "go on").touch))
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        env.step([ACTIONS] * 2)
    for timer in timers:
        timer.join()
    text = waiting_of(caplog)[0]
    assert text.startswith(f"environment 1 (worker {setup.num_workers - 1}) has been in step for 1.")
    assert " s; it is at line " in text


@pytest.mark.parametrize("setup", [APART, *RAY], ids=str)
def test_ctrl_c_reports_it_without_warnings(setup, build, caplog, tmp_path):
    """`warn_after=None` is about warnings."""
    env = build(slow("step", go_on=str(tmp_path / "go on")), setup, warn_after=None)
    env.reset()
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        env.step([ACTIONS] * 2)
    timer.join()
    assert waiting_of(caplog)[0].startswith("environment 1 (worker 1) has been in step for ")


class ClosesSlowly(Counting):
    def __init__(self, seconds: float, seed: int) -> None:
        super().__init__(seed=seed)
        self.seconds = seconds

    def close(self) -> None:
        time.sleep(self.seconds)


@pytest.mark.parametrize("setup", [APART, *RAY], ids=str)
def test_closing_is_reported(setup, build, caplog):
    """`close` without a limit that waits for a simulator says so; at Ctrl-C, too."""
    env = build([functools.partial(ClosesSlowly, 1.5), Counting], setup, warn_after=0.5)
    env.reset()
    env.close(timeout=None)
    text = next(text for text in warnings_of(caplog) if " in close for " in text)
    assert text.startswith("environment 0 (worker 0) has been in close for ")
    assert "To limit this, pass close(timeout=...)" in text
    caplog.clear()
    env = build([functools.partial(ClosesSlowly, 60.0), Counting], setup, warn_after=None)
    env.reset()
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        env.close(timeout=None)
    timer.join()
    assert warnings_of(caplog)[0].startswith("environment 0 (worker 0) has been in close for ")


def test_results_that_nobody_waits_for_are_not_reported(build, caplog):
    """`close` while results wait to be received, long after the steps."""
    env = build([Counting] * 2, THREAD, warn_after=0.3)
    env.reset()
    env.send([ACTIONS] * 2)
    time.sleep(0.6)
    env.close()
    assert "has been waiting" not in caplog.text


@pytest.mark.parametrize(("seconds", "error"), [(0, ValueError), (-1.0, ValueError), ("60", TypeError)], ids=str)
def test_wrong_times(seconds, error):
    with pytest.raises(error, match="warn_after"):
        ParallelEnv([Counting], warn_after=seconds)
