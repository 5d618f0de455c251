"""Stacks of hanging workers and crash reports of dead ones, from launchers."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from helpers.launching import LauncherHarness, linux_only
from helpers.processes import wait_for

pytestmark = [pytest.mark.release_independent, linux_only]


@pytest.mark.parametrize(
    ("target", "where"),
    [("busy", "_busy"), ("waits", "_waits"), ("locked", "_locked"), ("holds_gil", "_holds_gil")],
)
def test_stack_of_a_live_worker(harness: LauncherHarness, target: str, where: str) -> None:
    pid = harness.launch(target)
    harness.receive()
    for _ in range(2):
        stack = harness.stack(pid)
        assert where in stack
        assert stack.count("most recent call first") == 1
    assert harness.crash_report(pid) == ""
    assert harness.deaths() == []


def test_stack_right_after_launch(harness: LauncherHarness) -> None:
    for _ in range(10):
        assert "most recent call first" in harness.stack(harness.launch("waits"))


def test_stack_of_a_stopped_worker(harness: LauncherHarness) -> None:
    pid = harness.launch("waits")
    harness.receive()
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    assert "_waits" in harness.stack(pid)


def test_stack_of_a_worker_that_blocks_signals(harness: LauncherHarness) -> None:
    pid = harness.launch("blocks_signals")
    harness.receive()
    stack = harness.stack(pid, timeout=0.1)
    assert "_blocks_signals" in stack
    assert "Extension modules" not in stack
    assert harness.death() == (pid, -signal.SIGABRT)


def test_stack_of_a_dead_worker(harness: LauncherHarness) -> None:
    pid = harness.launch("exits")
    harness.death()
    assert harness.stack(pid) == ""


def test_crash_report(harness: LauncherHarness) -> None:
    pid = harness.launch("segfaults")
    assert harness.death() == (pid, -signal.SIGSEGV)
    report = harness.crash_report(pid)
    assert "Segmentation fault" in report
    assert report.rstrip().splitlines()[-1].startswith("  File")  # the names of all extension modules are left out
    assert "_segfaults" in report


def test_crash_report_is_kept_until_it_is_read(harness: LauncherHarness) -> None:
    pids = [harness.launch("segfaults") for _ in range(3)]
    assert harness.wait_gone(pids, timeout=30.0) == set()
    assert all("_segfaults" in harness.crash_report(pid) for pid in pids)
