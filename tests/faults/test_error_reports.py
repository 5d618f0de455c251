"""Error messages: what happened and in which line, then what to do, then the stack."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.signals import SIGKILL

import marl_parallel
from marl_parallel.core.messages import Failure, Lost
from marl_parallel.core.reports import reports
from marl_parallel.core.worker_status import Activity, Running

pytestmark = pytest.mark.release_independent

OURS = f"{Path(marl_parallel.__file__).parent}/core/worker.py"
ADVICE = ', or pass on_error="restart"'


def faulthandler_dump(*frames):
    """In the form that `faulthandler` writes: the innermost frame first."""
    return "\n".join(f'  File "{path}", line {line} in {name}' for path, line, name in frames) + "\n"


def traced(*frames):
    lines = [f'  File "{path}", line {line}, in {name}\n    pass\n' for path, line, name in reversed(frames)]
    return "Traceback (most recent call last):\n" + "".join(lines) + "ValueError: no road\n"


STEP = ("/sim/road.py", 12, "step")
BELOW = (OURS, 9, "_advance")


@pytest.mark.parametrize("written", [faulthandler_dump, traced])
@pytest.mark.parametrize(
    ("frames", "place"),
    [
        ([STEP, BELOW], "line 12 of /sim/road.py"),
        ([("/sim/map.py", 3, "load"), STEP, BELOW], "line 3 of /sim/map.py"),
        ([(json.__file__, 7, "loads"), (np.__file__, 8, "load"), STEP, BELOW], "line 12 of /sim/road.py"),
        ([(json.__file__, 7, "loads"), (np.__file__, 8, "load"), BELOW], f"line 8 of {np.__file__}"),
        ([("<stdin>", 5, "step"), BELOW], "line 5 of <stdin>"),
        ([BELOW, STEP], ""),
        ([], ""),
    ],
)
def test_message_shows_the_simulators_line(frames, place, written):
    """The innermost frame outside Python and installed libraries; none if our own code is to blame."""
    assert reports.code_line(written(*frames)) == place


def test_message_shows_the_workers_thread():
    theirs = "Thread 0x01 (most recent call first):\n" + faulthandler_dump(("/sim/reader.py", 1, "poll"))
    main = "Current thread 0x02 (most recent call first):\n" + faulthandler_dump(STEP, BELOW)
    for stack in (theirs + "\n" + main, main + "\n" + theirs, "Fatal Python error: Aborted\n\n" + main):
        assert reports.code_line(stack) == "line 12 of /sim/road.py"


def test_message_uses_the_last_traceback():
    cause = traced(("/sim/cause.py", 1, "load"))
    text = f"{cause}\nThe above exception was the direct cause of the following exception:\n\n{traced(STEP)}"
    assert reports.code_line(text) == "line 12 of /sim/road.py"


def test_message_of_an_exception():
    error = reports.env_error(3, 1, Failure("step", "ValueError: no road", traced(STEP), None), ADVICE)
    first, _, to_do, *_ = str(error).splitlines()
    assert first == "environment 3 (worker 1) raised in step, at line 12 of /sim/road.py: ValueError: no road"
    assert to_do.endswith(ADVICE + ".")


@pytest.mark.parametrize(
    ("exitcode", "manner", "to_do"),
    [
        (7, "exit code 7", "os._exit"),
        (-SIGKILL, "SIGKILL (signal 9)", "out-of-memory kill"),
        (-signal.SIGSEGV, "SIGSEGV (signal 11)", "native code"),
        (-signal.SIGTERM, "SIGTERM (signal 15)", "which simulator calls signal.signal"),
        (None, "cause unknown", "alone"),
    ],
)
def test_message_of_a_crash(exitcode, manner, to_do):
    running = Running(2, Activity.STEP, 0.0, True)
    error = reports.crashed(0, range(4), Lost(exitcode, faulthandler_dump(STEP, BELOW)), running, ADVICE)
    first, _, advice, *_ = str(error).splitlines()
    where = "worker 0 (environments 0 to 3) died in step of environment 2, at line 12 of /sim/road.py: "
    assert first.startswith(where + manner)
    assert to_do in advice
    assert advice.endswith(ADVICE + ".")


@pytest.mark.parametrize(
    ("doing", "argument"),
    [(Activity.STEP, "step_timeout"), (Activity.CALL, "step_timeout"), (Activity.RESET, "reset_timeout")],
)
def test_message_of_a_timeout(doing, argument):
    running = Running(2, doing, 0.0, True)
    error = reports.timed_out(0, range(4), running, doing, 1.5, faulthandler_dump(STEP, BELOW), ADVICE)
    first, _, to_do, *_ = str(error).splitlines()
    assert first.startswith(
        f"environment 2 (worker 0) has not finished its {doing.method} within 1.5 s; it is at line 12"
    )
    assert f"raise {argument}" in to_do
    assert to_do.endswith(ADVICE + ".")


def test_no_restart_advice_where_restarts_do_not_apply():
    """Failures of the first construction and of `close` raise in any case."""
    running = Running(2, Activity.CONSTRUCTOR, 0.0, True)
    errors = [
        reports.env_error(2, 0, Failure("constructor", "ValueError: no road", traced(STEP), None), ADVICE),
        reports.crashed(0, range(4), Lost(7, ""), running, ADVICE),
        reports.timed_out(0, range(4), running, Activity.CONSTRUCTOR, 60.0, "", ADVICE),
    ]
    assert not any("on_error" in str(error) for error in errors)
    assert "start_timeout" in str(errors[-1])


SCRIPT = """\
from pettingzoo.utils.env import ParallelEnv as PettingZooEnv
from gymnasium.spaces import Discrete
from marl_parallel import EnvError, ParallelEnv

class Broken(PettingZooEnv):
    possible_agents = agents = ["a"]
    def observation_space(self, agent): return Discrete(2)
    action_space = observation_space
    def reset(self, seed=None, options=None):
        raise LookupError("no map")  # the line that is shown

def lengthened(): return Broken()

with ParallelEnv([lengthened] * 2, num_workers=2) as env:
    try:
        env.reset()
    except EnvError as error:
        print(error)
"""


def test_simulator_of_a_script(tmp_path):
    """Its definitions travel by value; the stack names the script and shows its lines all the same."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=True)
    assert f"line 10 of {script}" in done.stdout
    assert (
        f'File "{script}", line 10, in reset\n    raise LookupError("no map")  # the line that is shown' in done.stdout
    )
