"""Where workers hang and where they crashed, as launchers tell it."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from helpers.launching import Stage, linux_only
from helpers.processes import wait_for

pytestmark = [pytest.mark.release_independent, linux_only]


@pytest.mark.parametrize(
    ("target", "where"),
    [("busy", "_busy"), ("waits", "_waits"), ("locked", "_locked"), ("holds_gil", "_holds_gil")],
)
def test_stack_of_the_living(stage: Stage, target: str, where: str) -> None:
    pid = stage.launch(target)
    stage.hear()
    for _ in range(2):
        stack = stage.stack(pid)
        assert where in stack
        assert stack.count("most recent call first") == 1
    assert stage.crash_report(pid) == ""
    assert stage.deaths() == []


def test_stack_right_after_launch(stage: Stage) -> None:
    for _ in range(10):
        assert "most recent call first" in stage.stack(stage.launch("waits"))


def test_stack_of_the_stopped(stage: Stage) -> None:
    pid = stage.launch("waits")
    stage.hear()
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    assert "_waits" in stage.stack(pid)


def test_stack_of_one_that_blocks_signals(served: Stage) -> None:
    pid = served.launch("blocks_signals")
    served.hear()
    assert "_blocks_signals" in served.stack(pid, timeout=0.1)
    assert served.death() == (pid, -signal.SIGABRT)


def test_stack_of_the_dead(stage: Stage) -> None:
    pid = stage.launch("exits")
    stage.death()
    assert stage.stack(pid) == ""


def test_crash(stage: Stage) -> None:
    pid = stage.launch("segfaults")
    assert stage.death() == (pid, -signal.SIGSEGV)
    report = stage.crash_report(pid)
    assert "Segmentation fault" in report
    assert "_segfaults" in report


def test_crash_report_is_kept_until_it_is_read(stage: Stage) -> None:
    pids = [stage.launch("segfaults") for _ in range(3)]
    assert stage.wait_gone(pids, timeout=30.0) == set()
    assert all("_segfaults" in stage.crash_report(pid) for pid in pids)
