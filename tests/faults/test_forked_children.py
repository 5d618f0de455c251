"""Simulators that fork: the child never runs the package's own code, whatever it does."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from helpers import SIMULATORS, TESTS
from helpers.comparison import assert_same
from helpers.forked_steps import NUM_ENVS, STEPS, actions, plain_loop, stepped
from helpers.setups import Setup
from helpers.start_methods import arguments
from simulators.forking import ENDINGS, Forking, Helped, Walk

from marl_parallel.cli.check import Job, run_probes
from marl_parallel.cli.check_texts import Severity

pytestmark = pytest.mark.release_independent

EXIT_CODES = {"exec": 1, "exit": 3, "raise": 1, "return": 1}
LIMITS = {"step_timeout": 30.0, "reset_timeout": 30.0}


@pytest.mark.parametrize(
    ("place", "ending", "on_error"),
    [
        ("reset", "exec", "restart"),
        ("reset", "exit", "raise"),
        *(("step", ending, "raise") for ending in ENDINGS),
        ("step", "exec", "restart"),
    ],
)
def test_returning_children_do_not_change_results(place, ending, on_error, build, capfd):
    """The batch equals a plain loop's without forks; each child exits with its own exit code."""
    make = functools.partial(Forking, place, ending)
    env = build([make] * NUM_ENVS, Setup("process", True, 1), on_error=on_error, **LIMITS)
    assert_same(stepped(env), plain_loop(Walk))
    codes = env.call("exit_codes")
    forks = STEPS if place == "step" else 2  # the first reset, and the automatic one
    assert codes == ([EXIT_CODES[ending]] * forks,) * NUM_ENVS
    assert env.stats().restarts == 0
    env.close()
    stderr = capfd.readouterr().err
    expected = {"exec": "FileNotFoundError", "exit": "", "raise": "lost in the child", "return": "forked"}
    assert expected[ending] in stderr


def test_returning_children_of_two_workers(start_method):
    from marl_parallel import ParallelEnv

    make = functools.partial(Forking, "step", "exec")
    with ParallelEnv([make] * NUM_ENVS, num_workers=2, **arguments(start_method), **LIMITS) as env:
        assert_same(stepped(env), plain_loop(Walk))
        assert env.call("exit_codes") == ([1] * STEPS,) * NUM_ENVS


@pytest.mark.parametrize(
    ("place", "ending"), [("constructor", "exec"), ("render", "return"), ("call", "exec"), ("close", "exec")]
)
def test_returning_children_of_other_methods(place, ending, build, tmp_path):
    codes = tmp_path / "codes"
    make = functools.partial(Forking, place, ending, str(codes))
    env = build([make] * NUM_ENVS, Setup("process", True, 1), **LIMITS)
    history = stepped(env)
    assert len(env.render()) == NUM_ENVS
    assert env.call("act") == ("acted",) * NUM_ENVS
    env.close()
    assert_same(history, plain_loop(Walk))
    assert codes.read_text().split() == ["1"] * NUM_ENVS


SCRIPT = """
    import functools, os, sys
    sys.path.insert(0, {tests!r})
    from simulators.forking import Forking
    from marl_parallel import ParallelEnv

    make = functools.partial(Forking, "step", {ending!r})
    with ParallelEnv([make] * 2, num_workers=2, backend={backend!r}) as env:
        env.reset()
        try:
            raise ValueError("of the training program, while a child comes back")
        except ValueError:
            for _ in range(3):
                env.step([{{"a": 0, "b": 1}}] * 2)
        codes = env.call("exit_codes")
    print("trained in", os.getpid(), codes, flush=True)
"""


@pytest.mark.parametrize(
    ("backend", "ending"), [*(("serial", ending) for ending in ENDINGS), ("thread", "exec"), ("thread", "return")]
)
def test_returning_children_do_not_run_the_training_loop(backend, ending):
    """With serial workers, the child is a copy of the whole training program."""
    text = textwrap.dedent(SCRIPT).format(tests=str(TESTS), ending=ending, backend=backend)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("trained")]
    assert line.endswith(f"({[EXIT_CODES[ending]] * 3}, {[EXIT_CODES[ending]] * 3})")
    expected = {"exec": "FileNotFoundError", "exit": "", "raise": "lost in the child", "return": "forked"}
    assert expected[ending] in done.stderr
    if ending == "return":
        assert "of the training program" not in done.stderr


FORKS_BY_ITSELF = """
    import os, sys
    sys.path.insert(0, {tests!r})
    from simulators.forking import Walk
    from gymnasium.error import ClosedEnvironmentError
    from marl_parallel import ParallelEnv

    actions = [{{"a": 0, "b": 1}}] * 2
    env = ParallelEnv([Walk] * 2, num_workers=2, backend={backend!r})
    env.reset()
    child = os.fork()
    if child == 0:
        try:
            env.step(actions)
        except ClosedEnvironmentError:
            print("closed in the child", flush=True)
        with ParallelEnv([Walk] * 2, num_workers=2, backend="serial") as own:
            own.reset()
            own.step(actions)
        print("the child has its own", flush=True)
        os._exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    env.step(actions)
    env.close()
"""


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_training_program_that_forks(backend):
    """In its child, environments count as closed, and new ones can be created."""
    text = textwrap.dedent(FORKS_BY_ITSELF).format(tests=str(TESTS), backend=backend)
    # From Python 3.12 on, a fork in a process with threads, such as those of this backend, warns.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["closed in the child", "the child has its own", "5"]


def test_simulators_with_multiprocessing_children(backend_setup, build):
    env = build([Helped] * NUM_ENVS, backend_setup)
    env.reset()
    for step in range(3):
        *_, infos = env.step(actions(step))
        assert [info["a"] for info in infos] == [{"squared": step**2, "exit code": 0}] * NUM_ENVS


@pytest.mark.parametrize("name", ["ExecsMissing", "ExecsMissingInReset"])
def test_check_of_a_forking_simulator_finishes(name):
    """Alone, in the tests of other projects, and in a `ParallelEnv`."""
    environment = f"{SIMULATORS / 'forking.py'}:{name}"
    jobs = [
        Job(probe, environment, "{}", timeout=20.0, seconds=0.05, steps=12, backend=backend)
        for probe, backend in (("alone", "serial"), ("parallel", "serial"), ("parallel", "process"))
    ]
    traces = []
    for _, outcome in run_probes(jobs, 3, lambda job: None):
        assert [one for one in outcome.findings if one.severity is Severity.PROBLEM] == []
        traces.append(outcome.traces[0])
    common = min(map(len, traces))  # a run ends when its time is up
    assert common > 1
    assert traces[0][:common] == traces[1][:common] == traces[2][:common]


def test_reference_values_differ_between_steps():
    """Otherwise the comparisons above would prove nothing."""
    history = plain_loop(Walk)
    places = [step[0][0]["a"] for step in history[1:]]
    assert len({np.asarray(place).tobytes() for place in places}) == STEPS
