"""Reports of restarts: in the log, with what is restarted in the first line, and in the infos of the step."""

from __future__ import annotations

import logging

import pytest
from helpers.setups import Setup
from simulators.counting import ACTIONS, Counting
from simulators.crashing import Fate, crashing
from simulators.failing import SimulatorError

pytestmark = pytest.mark.release_independent

APART, PACKED = Setup("process", True, 2), Setup("process", True, 1)
PORTABLE = Setup("portable", True, 2)
RAISED = "environment 1 (worker {worker}) raised in step, at line "
DIED = "worker {worker} ({share}) died in step of environment 1"
HUNG = "environment 1 (worker {worker}) has not finished its step within 1 s"


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged so far: warnings of this package."""
    for record in caplog.records:
        assert (record.name, record.levelno) == ("marl_parallel", logging.WARNING)
    return [record.getMessage() for record in caplog.records]


def log_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The first lines of what was logged so far."""
    return [text.splitlines()[0] for text in logged(caplog)]


@pytest.mark.parametrize(
    ("fault", "setup", "what", "more"),
    [
        ("raise", Setup("serial", True, 2), RAISED, "Traceback"),
        ("raise", Setup("thread", True, 2), RAISED, "Traceback"),
        ("raise", APART, RAISED, "Traceback"),
        ("raise", PACKED, RAISED, "Traceback"),
        ("SIGKILL", APART, DIED, "memory"),
        ("SIGKILL", PACKED, DIED, "memory"),
        ("SIGKILL", PORTABLE, DIED, "memory"),
        ("SIGSEGV", APART, DIED, "in step"),
        ("SIGSEGV", PACKED, DIED, "in step"),
        ("loop", APART, HUNG, "in forever"),
        ("loop", PACKED, HUNG, "in forever"),
        ("loop", PORTABLE, HUNG, "in forever"),
    ],
    ids=str,
)
def test_restart_logs_one_report(fault, setup, what, more, build, caplog):
    """However many environments shared the process."""
    timeout = {} if setup.backend == "serial" else {"step_timeout": 1.0}
    env = build([crashing(Counting, {(1, 0): Fate(fault, "step", 1)})] * 2, setup, on_error="restart", **timeout)
    env.reset()
    env.step([ACTIONS] * 2)
    assert log_lines(caplog) == []
    infos = env.step([ACTIONS] * 2)[4]
    for _ in range(3):
        env.step([ACTIONS] * 2)
    (notice,) = log_lines(caplog)
    share, worker = ("environments 0 to 1", 0) if setup.num_workers == 1 else ("environment 1", 1)
    assert notice.startswith(what.format(worker=worker, share=share))
    assert "restarted" in notice
    report = infos[1]["__common__"]["error"]
    first, _, to_do, *rest = report.splitlines()
    assert notice.startswith(first)
    assert to_do.startswith("What to do: ")
    assert more in "\n".join([to_do, *rest])
    (text,) = logged(caplog)
    assert text.partition("\n")[2] == report.partition("\n")[2].rstrip()


@pytest.mark.parametrize("fault", ["raise", "SIGKILL"])
def test_failed_restarts_log_one_report_each(fault, build, caplog):
    """Each failed restart."""
    fates = {(1, 0): Fate(fault), (1, 1): Fate(fault, "constructor"), (1, 2): Fate(fault, "reset")}
    env = build([crashing(Counting, fates)] * 2, APART, on_error="restart")
    env.reset()
    infos = env.step([ACTIONS] * 2)[4]
    lines = log_lines(caplog)
    assert env.stats().restarts == len(lines) == 3
    for place, notice in zip(("step", "constructor", "reset"), lines, strict=True):
        assert f" in {place}" in notice
    assert lines[0].startswith(infos[1]["__common__"]["error"].splitlines()[0])


def test_exception_text_of_several_lines(build, caplog):
    def act(self: Counting, actions: dict) -> None:
        raise SimulatorError("bad terrain:\r\n  a river\n  a wall")

    env = build([type("Talkative", (Counting,), {"step": act})] * 2, APART, on_error="restart")
    env.reset()
    infos = env.step([ACTIONS] * 2)[4]
    lines = log_lines(caplog)
    assert [notice.partition("SimulatorError: ")[2] for notice in lines] == ["bad terrain:; it is restarted"] * 2
    assert all("  a river\n  a wall" in info["__common__"]["error"] for info in infos)


def test_raised_faults_are_not_logged(build, caplog):
    env = build([crashing(Counting, {(1, 0): Fate("SIGKILL")})] * 2, APART)
    env.reset()
    with pytest.raises(RuntimeError, match="SIGKILL"):
        env.step([ACTIONS] * 2)
    assert log_lines(caplog) == []
