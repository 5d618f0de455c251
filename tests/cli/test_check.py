"""`marl-parallel check`: for each bug in `buggy`, the report names the bug and the fix."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from gymnasium import spaces
from helpers import SIMULATORS
from helpers.processes import gone
from mpe2 import simple_spread_v3
from pettingzoo.classic import tictactoe_v3
from pettingzoo.utils import BaseParallelWrapper
from simulators import buggy
from simulators.deterministic import Hunt
from simulators.failing import LockedError, PickyError
from simulators.mappo_envs import Squad
from simulators.masked_actions import by_infos
from simulators.pymarl_envs import Skirmish
from simulators.variable_agents import VariableAgents, VariableDictAgents
from typer.testing import CliRunner

from marl_parallel.adapters import adapt
from marl_parallel.adapters.attributes import layers
from marl_parallel.cli.app import app
from marl_parallel.cli.check import Job, RandomActions, Solo, examine, line_of, run_probes
from marl_parallel.cli.check_findings import (
    Traits,
    first_difference,
    is_flag,
    mismatch,
    pickling_error,
    reward_error,
)
from marl_parallel.cli.check_texts import Examination, Finding, Question, Severity, in_words
from marl_parallel.core.worker import loading
from marl_parallel.fingerprints import fingerprint

BUGGY = SIMULATORS / "buggy.py"
BRIEF = {"timeout": 8.0, "seconds": 0.05, "steps": 25}
PROBLEM, REMARK = Severity.PROBLEM, Severity.REMARK


def job(name: str) -> Job:
    return Job("alone", f"{BUGGY}:{name}", "{}", **BRIEF)


# By simulator: the failed check, the severity, words of the finding, words of the advice.
ALONE = {
    "WrongShape": (Question.SPACES, PROBLEM,
        "the observation of agent_0: expected an array of shape (4,) and dtype float32, got shape (3,)",
        "return arrays of shape (4,) and dtype float32"),
    "WrongShapeInDict": (Question.SPACES, PROBLEM,
        "the observation of agent_0['eyes'][1]: expected an array of shape (4,) and dtype float32, got shape (3,)",
        "return arrays of shape (4,) and dtype float32"),
    "UnreadableObservation": (Question.SPACES, PROBLEM,
        "expected an array of shape (4,) and dtype float32, got Unreadable (call detach() first)", "return arrays of"),
    "WrongDtype": (Question.SPACES, REMARK, "dtype float64, but its space says float32", ".astype(np.float32)"),
    "OutOfBounds": (Question.SPACES, REMARK, "its space says -1.0 to 1.0", "widen the space's bounds, or clip"),
    "NotANumber": (Question.SPACES, PROBLEM, "contains NaN", "division by zero"),
    "RewardOfNone": (Question.API, PROBLEM, "the reward of agent_0 is None", "return a float"),
    "FlagsOfNone": (Question.API, PROBLEM, "the termination of agent_0 is of type NoneType", "True or False"),
    "UnreadableReward": (Question.API, PROBLEM,
        "the reward of agent 'agent_0' must be a number, got <Unreadable instance at", "float(reward)"),
    "UnreadableFlag": (Question.API, PROBLEM,
        "the terminated flag of agent 'agent_0' must be True or False, got <Unreadable", "let step return that"),
    "SeveralFlags": (Question.API, PROBLEM,
        "the truncated flag of agent 'agent_0' must be True or False, got one value of type ndarray and shape (2,)",
        "let step return that"),
    "UnpicklableInfo": (Question.PICKLING, PROBLEM, "the info of agent_0 cannot be pickled", "plain numbers"),
    "ArrayAsInfo": (Question.API, PROBLEM, "the info of agent 'agent_0' must be a dict", "let step return that"),
    "UnpicklableException": (Question.PICKLING, REMARK, "CollisionError cannot be pickled and unpickled", "super()"),
    "unpicklable_constructor": (Question.PICKLING, PROBLEM, "constructor cannot be pickled", "create what does not"),
    "SeedIgnored": (Question.DETERMINISM, PROBLEM, "the seed is ignored", "make a new generator in `reset`"),
    "NoSeed": (Question.DETERMINISM, PROBLEM, "takes no seed", "let `reset` take a `seed`"),
    "TuplesAndLists": (Question.COST, REMARK, "observations, masks and rewards come as tuples and lists, not as arrays",
        "return NumPy arrays of the space's dtype; tuples and lists are converted one by one, which takes tens of"),
    "LeavesAProcess": (Question.PROCESSES, PROBLEM, "leaves 1 process behind: ", "end them in `close`"),
    "CrashesInReset": (Question.RUNS, PROBLEM, "reset ends the process, at line", 'on_error="restart"'),
    "ExitsInStep": (Question.RUNS, PROBLEM, "step ends the process, at line", "os._exit"),
    "AbortsAtNonsense": (Question.API, REMARK, "first reset ends the process, at line", "native code"),
    "RaisesInStep": (Question.RUNS, PROBLEM, "CollisionError: agent_0 at 7.0", "fix that line"),
    "HangsInStep": (Question.RUNS, PROBLEM, "step did not finish within 8 s; it is at line", "--timeout"),
    "HangsInConstructor": (Question.RUNS, PROBLEM, "the constructor did not finish within", "--timeout"),
    "FourValues": (Question.API, PROBLEM, "must return five dicts", "let step return that"),
    "NoActionSpace": (Question.API, PROBLEM, "'agent_1' declares no action space", "a space for each of them"),
    "PropertyRaises": (Question.RUNS, PROBLEM, "state_space raises, at line", "fix state_space, which must"),
    "nothing": (Question.API, PROBLEM, "returned None", "docs/environments.md"),
    "NoLastObservation": (Question.API, REMARK, "in the step that truncates them: agent_0, agent_1", "a critic of"),
    "Slow": (Question.API, REMARK, "lacks the key '__all__'", "set '__all__' in every step"),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    """The findings of each check without the others."""
    outcomes = run_probes([job(name) for name in ["Healthy", *ALONE]], 4, lambda job: None)
    return {done.environment.rpartition(":")[2]: outcome for done, outcome in outcomes}


@pytest.mark.rest
@pytest.mark.parametrize("name", ALONE)
def test_bug_is_reported_with_a_fix(name, alone):
    question, severity, what, advice = ALONE[name]
    found = [one for one in alone[name].findings if one.question is question]
    assert [one.severity for one in found] == [severity]
    assert what in found[0].what
    assert advice in found[0].advice


@pytest.mark.rest
@pytest.mark.parametrize("name", ALONE)
def test_one_bug_causes_one_finding(name, alone):
    """Except an exception, which is unpicklable as well."""
    others = {one.question for one in alone[name].findings} - {ALONE[name][0]}
    assert others == ({Question.PICKLING} if name == "RaisesInStep" else set())


# By simulator: the method, or the constructor, where the finding says that the fault is.
PLACES = {
    **dict.fromkeys(("WrongShape", "WrongDtype", "OutOfBounds", "NotANumber"), ("reset", buggy.Healthy.reset)),
    "WrongShapeInDict": ("reset", buggy.Healthy.reset),
    **dict.fromkeys(("UnreadableObservation", "UnreadableReward"), ("step", buggy.Returns.step)),
    **dict.fromkeys(("UnreadableFlag", "SeveralFlags"), ("step", buggy.Returns.step)),
    "RewardOfNone": ("step", buggy.RewardOfNone.step),
    "FlagsOfNone": ("step", buggy.FlagsOfNone.step),
    "UnpicklableInfo": ("step", buggy.UnpicklableInfo.step),
    "ArrayAsInfo": ("step", buggy.ArrayAsInfo.step),
    "UnpicklableException": ("raised at", buggy.UnpicklableException.step),
    "unpicklable_constructor": ("the constructor", buggy.Healthy.__init__),
    "SeedIgnored": ("reset", buggy.SeedIgnored.reset),
    "NoSeed": ("reset", buggy.NoSeed.reset),
    "TuplesAndLists": ("step", buggy.TuplesAndLists.step),
    "LeavesAProcess": ("started by the constructor", buggy.LeavesAProcess.__init__),
    "CrashesInReset": ("reset ends the process, at", buggy.CrashesInReset.reset),
    "ExitsInStep": ("step ends the process, at", buggy.ExitsInStep.step),
    "AbortsAtNonsense": ("a step before the first reset ends the process, at", buggy.AbortsAtNonsense.step),
    "RaisesInStep": ("step raises, at", buggy.RaisesInStep.step),
    "HangsInStep": ("step did not finish within 8 s; it is at", buggy.HangsInStep.step),
    "HangsInConstructor": ("the constructor did not finish within 8 s; it is at", buggy.HangsInConstructor.__init__),
    "FourValues": ("step", buggy.FourValues.step),
    "NoActionSpace": ("action_space", buggy.Healthy.action_space),
    "PropertyRaises": ("state_space raises, at", buggy.PropertyRaises.state_space.fget),
    "nothing": ("the constructor", buggy.nothing),
    "NoLastObservation": ("step", buggy.NoLastObservation.step),
    "Slow": ("step", buggy.Slow.step),
}


@pytest.mark.rest
@pytest.mark.parametrize("name", ALONE)
def test_finding_says_where(name, alone):
    """A line of the method or constructor with the fault, in the file of the simulator."""
    (found,) = (one for one in alone[name].findings if one.question is ALONE[name][0])
    text, function = PLACES[name]
    where = found.where or found.what
    lines, first = inspect.getsourcelines(function)
    named = re.search(rf"{re.escape(text)},? line (\d+) of {re.escape(str(BUGGY))}", where)
    assert named is not None, where
    assert int(named[1]) in range(first, first + len(lines))


def test_place_of_a_wrapped_simulator():
    """That of the outermost method which is no library's; if all are, that of the simulator itself."""

    class Wrapper(BaseParallelWrapper):
        def step(self, actions):
            return super().step(actions)

    def lines(env):
        methods = ("reset", "step", "close")
        return [line_of(inspect.getattr_static(layer, name, None) for layer in layers(env)) for name in methods]

    ours, theirs = lines(Wrapper(buggy.Healthy())), lines(BaseParallelWrapper(simple_spread_v3.parallel_env()))
    line = buggy.Healthy.reset.__code__.co_firstlineno
    assert ours[0] == f"line {line} of {BUGGY}"
    assert ours[1] == f"line {Wrapper.step.__code__.co_firstlineno} of {__file__}"
    assert "pettingzoo" in ours[2]
    assert all(re.search(r"line \d+ of .*mpe2.*\.py", line) for line in theirs[:2]), theirs
    assert line_of([functools.partial(buggy.unpicklable_constructor, a=1)]) == line_of([buggy.Healthy])
    assert line_of([None, len]) == ""


@pytest.mark.rest
def test_no_findings_for_correct_simulators(alone):
    assert not alone["Healthy"].findings
    assert (alone["Healthy"].facts["reward_types"], alone["Healthy"].facts["flag_types"]) == (["float"], ["bool"])
    assert alone["Healthy"].checked >= {Question.RUNS, Question.SPACES, Question.PICKLING, Question.PROCESSES}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("pymarl_envs.py:Skirmish", "A PyMARL environment"), ("mappo_envs.py:Squad", "A MAPPO environment")],
)
def test_kinds_with_masks_of_their_own_are_checked_with_legal_actions(name, kind):
    """Both assert that actions are allowed; the runs alone and in a `ParallelEnv` are compared, masks included."""
    found = examine(Job("alone", f"{SIMULATORS}/{name}", "{}", **BRIEF), ["serial"])
    assert [one.what for one in found.findings if one.severity is PROBLEM] == []
    assert found.checked >= {Question.RUNS, Question.API, Question.SPACES, Question.DETERMINISM, Question.SERIAL}
    assert found.facts["kind"] == kind
    assert found.facts["masked_agents"] == ["agent_0", "agent_1", "agent_2"]


@pytest.mark.rest
def test_crash_and_hang_show_the_simulators_line(alone):
    lines = BUGGY.read_text().splitlines()
    for name, code in (
        ("CrashesInReset", "signal.SIGSEGV"),
        ("HangsInStep", "time.sleep(0.1)"),
        ("RaisesInStep", "raise"),
    ):
        (found,) = (one.what for one in alone[name].findings if one.question is Question.RUNS)
        number = re.search(rf"line (\d+) of {re.escape(str(BUGGY))}", found)
        assert number is not None
        assert code in lines[int(number[1]) - 1]


@pytest.mark.rest
def test_step_and_reset_times(alone):
    facts = alone["Slow"].facts
    assert facts["step"]["count"] >= 1
    assert 2e-3 <= facts["step"]["median_s"] <= facts["step"]["p99_s"]
    assert 20e-3 <= facts["reset"]["median_s"] <= facts["reset"]["p99_s"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (by_infos, "action masks (guest, host); no state; no agents that join late; "
         "agents that end before others (guest)"),
        (VariableAgents, "no action masks; a state, Box(-inf, inf, (2,), float64); no agents that join late; "
         "agents that end before others (a, b)"),
        (VariableDictAgents, "no action masks; no state; agents that join late (c); "
         "agents that end before others (a, b)"),
        (Skirmish, "action masks (agent_0, agent_1, agent_2); a state, Box(-inf, inf, (11,), float32); "
         "no agents that join late; no agents that end before others"),
        (Squad, "action masks (agent_0, agent_1, agent_2); a state, Box(-inf, inf, (3, 9), float32); "
         "no agents that join late; agents that end before others (agent_0, agent_1, agent_2)"),
        (tictactoe_v3.raw_env, "action masks (player_1, player_2); no state; no agents that join late; "
         "no agents that end before others; agents take turns"),
    ],
)  # fmt: skip
def test_what_is_seen_of_agents(make, text):
    """Masks, agents that come and go, turns and the state."""
    solo, traits = Solo(adapt(make())), Traits()
    solo.inspect = functools.partial(traits.add, solo.env)
    actor = RandomActions(solo.env.action_spaces, 0)
    for seed in range(5):
        now = solo.begin(seed)
        for _ in range(12):
            if not now.acting:
                break
            now = solo.runner.step(actor(now.acting, now.observations, now.infos))
    state = None if solo.env.state_space is None else str(solo.env.state_space)
    assert in_words({**traits.facts(), "state": state}) == text


NO, YES = {"a": False, "b": False, "__all__": False}, {"a": False, "b": False, "__all__": True}


@pytest.mark.parametrize(
    ("steps", "unseen"),
    [
        ([("ab", NO, YES)], set()),
        ([("", NO, YES)], {"a", "b"}),
        ([("", YES, NO)], set()),
        ([("a", NO, {**NO, "b": True})], {"b"}),
        ([("a", {**NO, "b": True}, NO), ("a", NO, YES)], set()),
        ([("a", {**NO, "b": True}, NO), ("", NO, YES)], {"a"}),
        ([("a", NO, NO), ("b", NO, YES)], {"a"}),  # `b` was waiting
    ],
    ids=["all seen", "nobody seen", "terminated", "one agent", "terminated before", "the other one", "turns"],
)
def test_agents_without_a_last_observation(steps, unseen):
    """Those that are truncated by themselves, or by `__all__` after they were to act."""
    env, traits = adapt(VariableDictAgents()), Traits()
    traits.add(env, [{"a": 0, "b": 0}, {}])
    for seen, terminateds, truncateds in steps:
        traits.add(env, [dict.fromkeys(seen, 0), {}, terminateds, truncateds, {}])
    assert traits.unseen == unseen


@pytest.mark.rest
def test_no_process_is_left(alone):
    """Not even the simulator's own processes."""
    assert "LeavesAProcess" in alone
    mine = [pid for pid in psutil.pids() if b"sleep(611)" in _command(pid)]
    assert gone(mine)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# -- what takes more than one run --------------------------------------------------------------------------------------


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "question", "what", "advice"),
    [
        ("NotDeterministic", Question.DETERMINISM, "two runs with the same seed and actions differ", "without a seed"),
        (
            "GlobalGenerator",
            Question.DETERMINISM,
            "two runs with the same seed and actions differ",
            "pass isolate_rng=True to ParallelEnv, so that each environment has states of its own, from its seed; or",
        ),
        (
            "SharedState",
            Question.SERIAL,
            "together with others, environment 0 gives other results than alone",
            "share nothing",
        ),
    ],
)
def test_bug_that_only_a_comparison_shows(name, question, what, advice):
    found = examine(job(name), ["serial"])
    assert not found.healthy
    assert found.answers()[question] == "no"
    own = [one for one in found.findings if one.question is question and what in one.what]
    assert len(own) == 1
    assert advice in own[0].advice
    method = "step" if name == "SharedState" else "reset"
    line = getattr(getattr(buggy, name), method).__code__.co_firstlineno
    assert own[0].where == f"{method}, line {line} of {BUGGY}"
    assert found.facts["generators"] == (["random"] if name == "GlobalGenerator" else [])
    assert ("; it uses random" in own[0].what) == (name == "GlobalGenerator")
    remarks = [one for one in found.findings if one.question is Question.DETERMINISM and one.severity is REMARK]
    assert all("parallel_seed_test fails" in one.what for one in remarks)


def test_agents_without_observation_spaces_are_a_remark():
    found = examine(job("NoObservationSpaces"), ["serial"])
    assert found.healthy, found.findings
    assert found.answers()[Question.SERIAL] == "yes"
    assert "declares no observation space" in " ".join(one.what for one in found.findings)


def test_generators_of_the_process_are_named():
    """Alone, the simulator is deterministic; together with others it is not."""
    found = examine(job("SeedsGlobalGenerator"), ["serial"])
    assert found.facts["generators"] == ["numpy.random"]
    (remark,) = (one for one in found.findings if "which all environments of a process share" in one.what)
    assert (remark.question, remark.severity) == (Question.DETERMINISM, REMARK)
    assert "it draws from, or seeds, numpy.random, which" in remark.what
    assert remark.advice.startswith("pass isolate_rng=True to ParallelEnv")
    (shared,) = (one for one in found.findings if one.question is Question.SERIAL)
    assert shared.advice.startswith("it uses numpy.random: pass isolate_rng=True; let environments share nothing")


def named(file: str, name: str) -> Job:
    return Job("alone", f"{BUGGY.with_name(file)}:{name}", "{}", **BRIEF)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["UnseededReset", "SlowUnseededReset", "LateUnseededReset"])
def test_unseeded_reset_is_reported_as_such(name):
    """Also for slow simulators; episodes that start with a seed are equal everywhere."""
    found = examine(named("unseeded_resets.py", name), ["serial"])
    (own,) = (one for one in found.findings if one.question is Question.DETERMINISM)
    assert own.severity is PROBLEM
    assert "an episode that begins with a seed can be repeated, but one that begins without" in own.what
    assert "make a new generator only if a seed is passed" in own.advice
    assert found.answers()[Question.SERIAL] == "yes"
    assert not found.healthy


def test_unseeded_reset_that_draws_from_the_global_generator():
    found = examine(named("unseeded_resets.py", "DrawsFromGlobalGenerator"), [])
    (own,) = (one for one in found.findings if one.question is Question.DETERMINISM)
    assert own.severity is PROBLEM
    assert "two runs with the same seed and actions differ" in own.what
    assert own.advice.startswith("pass isolate_rng=True to ParallelEnv, ")
    assert "not from `random` or `np.random`" in own.advice


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("RaisesIfNotAlone", "the constructor raises, at line"),
        ("HangsIfNotAlone", "the constructor did not finish within 8 s; it is at line"),
        ("OnlyLatestSteps", "step ends the process, at line"),
    ],
)
def test_one_simulation_per_process(name, what):
    """A remark only: each worker process can have one."""
    found = examine(named("one_per_process.py", name), ["serial", "thread", "process"])
    (remark,) = (one for one in found.findings if one.question is Question.RUNS)
    assert remark.severity is REMARK
    assert remark.what.startswith(f"with another environment open in the same process, {what}")
    assert "one simulation per process: pass envs_per_worker=1" in remark.advice
    answers = found.answers()
    assert [answers[Question.of_backend(backend)] for backend in ("serial", "thread", "process")] == [
        "not checked",
        "not checked",
        "yes",
    ]
    assert found.healthy
    assert found.facts["tests"] == ["pettingzoo.test.parallel_api_test"]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("DeadAgentsStay", "parallel_api_test fails: AssertionError"),
        ("DiesInApiTest", "pettingzoo.test.parallel_api_test ends the process, at line"),
        ("HangsInApiTest", "pettingzoo.test.parallel_api_test did not finish"),
    ],
)
def test_failing_test_of_another_project(name, what):
    """The other tests still run."""
    found = examine(replace(named("failing_api_tests.py", name), timeout=3.0), ["serial"])
    (remark,) = (one for one in found.findings if one.question is Question.API)
    assert (remark.severity, remark.what.startswith(what)) == (REMARK, True)
    assert remark.advice.startswith("nothing breaks here")
    assert found.healthy
    assert found.answers()[Question.DETERMINISM] == "yes"
    assert "pettingzoo.test.parallel_seed_test" in found.facts["tests"]


@pytest.mark.rest
def test_tests_of_other_projects_match_the_kind():
    single = examine(job("Single"), [])
    turns = examine(Job("alone", "pettingzoo.classic.tictactoe_v3", "{}", **BRIEF), [])
    assert single.facts["tests"] == ["gymnasium.utils.env_checker.check_env"]
    (remark,) = (one for one in single.findings if one.question is Question.API)
    assert remark.severity is REMARK
    assert remark.what.startswith("check_env ")
    assert "not within the observation space" in remark.what
    assert turns.facts["tests"] == ["pettingzoo.test.api_test", "pettingzoo.test.seed_test"]
    assert all(one.severity is REMARK for one in turns.findings)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def check(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    brief = [text for name, value in BRIEF.items() for text in (f"--{name}", str(value))]
    return lambda *arguments: runner.invoke(app, ["check", *arguments, *brief])


def test_exit_status_of_a_correct_simulator(check):
    result = check("mpe2.simple_spread_v3", "--env-kwargs", '{"N": 2}')
    assert result.exit_code == 0, result.output
    assert "2 agents" in result.stdout
    for question in Question:
        (line,) = (line for line in result.stdout.splitlines() if question.value in line)
        assert (" yes" in line) is (question is not Question.COST), line
    for text in (
        "rewards float; flags bool",
        "step",
        "reset",
        "(median)",
        "(p99)",
        "parallel_api_test",
        "parallel_seed_test",
    ):
        assert text in result.stdout
    assert "problem" not in result.stdout


def test_exit_status_of_a_buggy_simulator(check):
    result = check(f"{BUGGY}:WrongShape", "--backends", "serial,process")
    assert result.exit_code == 1
    assert f"problem: {ALONE['WrongShape'][2]}" in result.stdout
    line = buggy.Healthy.reset.__code__.co_firstlineno
    assert f"where: reset, line {line} of {BUGGY}" in result.stdout
    assert "what to do: return arrays of shape (4,)" in result.stdout
    assert "(backend: serial, process)" in result.stdout
    shown = sum(line.startswith("problem: ") for line in result.stdout.splitlines())
    assert shown == 2  # one for both backends
    assert f"fix the {shown} problems above, then run" in result.stdout
    (line,) = (line for line in result.stdout.splitlines() if Question.THREAD.value in line)
    assert "not checked" in line


def test_json_output(check):
    result = check(f"{BUGGY}:RaisesInStep", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["healthy"] is False
    assert report["facts"]["agents"] == ["agent_0", "agent_1"]
    assert [(one["question"], one["severity"]) for one in report["findings"]] == [
        ("runs", "problem"),
        ("pickling", "remark"),
    ]
    assert {one["name"]: one["answer"] for one in report["questions"]}["runs"] == "no"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mpe2.simple_spred_v3"], ["mpe2.simple_spred_v3", "module[:attribute]"]),
        ([f"{BUGGY}:Helthy"], ["Helthy", "Healthy"]),
        (["no/such/file.py:env"], ["no/such/file.py"]),
        (["mpe2.simple_spread_v3", "--backends", "greenlet"], ["greenlet", "thread"]),
        (["mpe2.simple_spread_v3", "--backends", "ray"], ["'ray' to choose here", "serial, thread, process"]),
        (["mpe2.simple_spread_v3", "--env-kwargs", "[5]"], ["JSON object"]),
    ],
)
def test_errors_are_one_line_and_a_hint(check, arguments, words):
    result = check(*arguments)
    assert result.exit_code == 1
    assert not result.stdout
    error, hint = result.stderr.strip().splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert all(word in result.stderr for word in words)


def test_help_has_an_example(check):
    assert "marl-parallel check mpe2.simple_spread_v3" in check("--help").stdout


# -- single values -----------------------------------------------------------------------------------------------------

BOX = spaces.Box(0.0, 1.0, (2,), np.float32)
EXPECTED = "expected an array of shape (2,) and dtype float32, got"


@pytest.mark.parametrize(
    ("value", "space", "what"),
    [
        (np.zeros((2, 1), np.float32), BOX, f"{EXPECTED} shape (2, 1)"),
        (np.zeros(2), BOX, "has dtype float64, but its space says float32"),
        (np.array([0.0, 1.5], np.float32), BOX, "is 1.5 at [1], but its space says 0.0 to 1.0"),
        (np.array(["a", "b"]), BOX, f"{EXPECTED} dtype <U1, which cannot be cast to it"),
        (["a", "b"], BOX, f"{EXPECTED} dtype <U1, which cannot be cast to it"),
        ({"observation": 1, "action_mask": [1]}, BOX, f"{EXPECTED} a dict with the keys 'observation', "),
        (None, BOX, f"{EXPECTED} None of type NoneType"),
        (np.array([0, 7]), spaces.MultiDiscrete([3, 3]), "is 7 at [1], but its space says 0 to 2"),
        (np.array([0, 2], np.int8), spaces.MultiBinary(2), "is 2 at [1], but its space says 0 to 1"),
        (5, spaces.Discrete(5), "is 5 (int), which is not in Discrete(5)"),
        ({"a": 0}, spaces.Dict(b=spaces.Discrete(2)), "expected a dict with the keys ['b'], got the keys ['a']"),
        ({"a": {"b": 2}}, spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2))), "['a']['b'] is 2 (int), which"),
        ((0, np.zeros(2)), spaces.Tuple((spaces.Discrete(2), BOX)), "[1] has dtype float64"),
        ((np.zeros(2), [0.0]), spaces.Tuple((BOX, BOX)), f"[1]: {EXPECTED} shape (1,)"),
        (np.array([1]), spaces.Discrete(5), "expected an integer, or an array of shape () and dtype int64, got shape"),
        ((0,), spaces.Tuple((spaces.Discrete(2), BOX)), "expected a tuple of 2, got (0,)"),
        (3, spaces.Text(4), "is 3 (int), which is not in Text"),
    ],
)  # fmt: skip
def test_values_outside_a_space(value, space, what):
    found = mismatch(value, space)
    assert found is not None
    assert found.what.startswith(what)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of casts
        assert not space.contains(value)


class OwnDict(spaces.Dict):
    """Of a class of its own, which `tree_map` does not look into."""


def test_spaces_of_derived_classes_are_looked_into():
    """`ParallelEnv` takes such a value as it is: it travels pickled."""
    inside = mismatch({"a": np.zeros(2)}, OwnDict(a=BOX))
    assert inside is not None
    assert (inside.severity.name, inside.what) == ("REMARK", "['a'] has dtype float64, but its space says float32")
    assert mismatch({"a": np.zeros(2, np.float32)}, OwnDict(a=BOX)) is None


@pytest.mark.parametrize("seed", range(5))
def test_samples_fit_their_space(seed):
    space = spaces.Dict(
        box=spaces.Box(-3, 3, (2, 3), np.int16),
        discrete=spaces.Discrete(4, start=-2),
        both=spaces.Tuple((spaces.MultiBinary((2, 2)), spaces.MultiDiscrete([3, 9], start=[-1, 5]))),
        text=spaces.Text(5),
        unbounded=spaces.Box(-np.inf, np.inf, (3,), np.float32),
    )
    space.seed(seed)
    assert mismatch(space.sample(), space) is None


def test_integers_that_their_dtype_can_hold_are_a_remark():
    """`ParallelEnv` takes 200 as an int64, but not 300."""
    space = spaces.Box(0, 255, (1,), np.uint8)
    found = [mismatch(np.array([number]), space) for number in (200, 300)]
    assert [one.what for one in found] == [
        "has dtype int64, but its space says uint8",
        "expected an array of shape (1,) and dtype uint8, got int64 values that uint8 cannot hold",
    ]
    assert [one.severity for one in found] == [REMARK, PROBLEM]


def test_first_difference_of_two_runs():
    one, other = [(True, {"reward of a": "0f"})], [(True, {"reward of a": "1e"}), (False, {})]
    assert first_difference(one, other) == (0, "the reward of a, in step 1")
    assert first_difference(one, one + other) is None


def test_rewards_and_flags():
    assert [reward_error(one) for one in (1, 0.5, np.float32(2), True, np.ones(3), [1, 2.0])] == [None] * 6
    assert all(reward_error(one) for one in (math.nan, math.inf, np.float64("-inf"), None, "1", {}))
    assert [is_flag(one) for one in (True, np.bool_(False), 1, None)] == [True, True, False, False]


def test_pickling():
    assert pickling_error({"a": np.ones(3), "f": lambda: 1}) is None
    assert "PickyError" in pickling_error(PickyError(3, "here"))
    assert "lock" in pickling_error(LockedError("it"))
    assert "lock" in pickling_error({"a": [threading.Lock()]})


def test_bitwise_equality():
    alike = [{"a": np.ones(3), "b": (1, {"c"})}, {"a": np.ones(3), "b": (1, {"c"})}]
    assert fingerprint(alike[0]) == fingerprint(alike[1])
    values = [1, 1.0, True, "1", np.float64(1), np.float32(1), np.ones(1), [1], (1,), None, {1: 1}, -0.0, 0.0, math.nan]
    assert len({*map(fingerprint, values)}) == len(values)
    assert fingerprint(math.nan) == fingerprint(math.nan)
    parts = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))
    assert fingerprint({"a": 0, "b": 1}, parts) == fingerprint({"b": 1, "a": 0}, parts)
    assert fingerprint({"a": 0, "b": 1}) != fingerprint({"b": 1, "a": 0})
    loops: list[list] = [[], []]
    for loop in loops:
        loop.append(loop)
    assert fingerprint(loops[0]) == fingerprint(loops[1]) != fingerprint([[]])
    box = spaces.Box(0, 1, (1,), np.float32)
    assert fingerprint(np.ones(1), box) == fingerprint(np.ones(1, np.float32), box)


def test_actor_follows_masks_and_acting_agents():
    act = RandomActions({"a": spaces.Discrete(5), "b": spaces.Discrete(5)}, seed=0)
    for kind in (np.int8, np.bool_, np.int64) * 4:
        mask = np.array([0, 0, 0, 1, 0], kind)
        assert act(["a"], {"a": {"action_mask": mask}}, {}) == {"a": 3}
        assert act(["b"], {}, {"b": {"action_mask": mask}}) == {"b": 3}
    one, other = (RandomActions(adapt(Hunt()).action_spaces, 7) for _ in range(2))
    agents = Hunt().possible_agents
    for _ in range(5):
        assert fingerprint(one(agents, {}, {})) == fingerprint(other(agents, {}, {}))


def test_findings_are_sorted_and_unique():
    remark = Finding(Question.RUNS, REMARK, "a", "b")
    problem = Finding(Question.COST, PROBLEM, "c", "d")
    found = Examination("it")
    found.add([remark, problem])
    found.add([remark])
    assert found.findings == [problem, remark]
    assert not found.healthy


def test_answer_about_costs():
    found = Examination("it", checked={Question.COST})
    assert found.answers()[Question.COST] == "even"
    found.add([
        Finding(Question.COST, REMARK, what, "") for what in ("uneven steps (p99 is 59x the median)", "long resets")
    ])  # fmt: skip
    assert found.answers()[Question.COST] == "uneven steps (p99 is 59x the median); long resets"


def test_masks_of_another_form_are_a_remark():
    """It is the only finding."""
    simulators = SIMULATORS / "masked_actions.py"
    found = examine(Job("alone", f"{simulators}:mask_of_another_form", "{}", **BRIEF), ["serial"])
    (remark,) = [one for one in found.findings if "mask" in one.what]
    assert remark.severity is REMARK
    assert "the action mask of agent_0 does not match its action space, Box" in remark.what
    assert Question.RUNS in found.checked
    assert Question.SERIAL in found.checked
    assert found.healthy


@pytest.mark.parametrize(
    ("acts", "seen", "mask", "found"),
    [
        (spaces.Discrete(3), np.zeros(2), np.ones(3), {}),
        (spaces.Discrete(3), [0.0, 1.0], np.ones(3), {"observations": {"list"}}),
        (spaces.Discrete(3), np.zeros(2), (1, 0, 1), {"masks": {"tuple"}}),
        (spaces.MultiDiscrete([2, 3]), np.zeros(2), (np.ones(2), np.ones(3)), {}),
        (spaces.MultiDiscrete([2, 3]), np.zeros(2), ([1, 1], [1, 0, 1]), {"masks": {"list"}}),
        (spaces.Box(0, 1), np.zeros(2), [1, 1], {}),  # no mask of this space
    ],
)
@pytest.mark.parametrize("where", ["observation", "info"])
def test_lists_in_place_of_arrays(acts, seen, mask, found, where):
    """In observations, which are dicts with a tuple here, and in masks; tuples that a space or a mask has are none."""
    inner = spaces.Box(-1, 1, (2,))
    parts: dict = {"at": inner, "pair": spaces.Tuple((inner, spaces.Discrete(2)))}
    value = {"at": np.zeros(2), "pair": (seen, 1)}
    env = adapt(VariableDictAgents())
    env.observation_spaces, env.action_spaces = {"a": spaces.Dict(parts)}, {"a": acts}
    own = {"action_mask": mask}
    traits = Traits()
    traits.add(env, [{"a": value | (own if where == "observation" else {})}, {"a": own if where == "info" else {}}])
    assert traits.lists == found


def test_declared_vector_rewards_are_no_finding():
    simulators = SIMULATORS / "vector_rewards.py"
    ((_, outcome),) = run_probes([Job("alone", f"{simulators}:TreasureHunt", "{}", **BRIEF)], 1, lambda job: None)
    assert not [one for one in outcome.findings if "reward" in one.what]


def test_long_imports_are_named(tmp_path):
    """Modules that a worker process imports for more than a second of CPU time, what they import included."""
    burn = "import time\nbegan = time.thread_time()\nwhile time.thread_time() - began < 1.1:\n    pass\n"
    (tmp_path / "costly_to_import.py").write_text(burn)
    (tmp_path / "imports_it.py").write_text("import costly_to_import")
    simulator = tmp_path / "simulator.py"
    simulator.write_text(
        f"import sys\nimport gymnasium\n\n\ndef make():\n    sys.path.insert(0, {str(tmp_path)!r})\n"
        '    import imports_it\n    return gymnasium.make("CartPole-v1")\n'
    )
    probe = Job("parallel", f"{simulator}:make", "{}", **BRIEF, backend="process")
    ((_, result),) = run_probes([probe], 1)
    (finding,) = [one for one in result.findings if one.question is Question.COST]
    assert finding.severity is REMARK
    named = r"imports_it \d\.\d s, costly_to_import \d\.\d s"
    assert re.fullmatch(rf"long imports \({named}, of CPU time in each worker process\)", finding.what)
    assert "preload=('imports_it', 'costly_to_import')" in finding.advice


@pytest.mark.parametrize(
    ("imported", "expected"),
    [
        ({"torch": 8.0, "torch.nn": 2.0, "torch._C": 1.5}, {"torch"}),
        ({"simulator": 9.0, "torch": 8.0, "numpy": 0.2}, {"simulator", "torch"}),
        ({"package": 0.3, "package.part": 3.0}, {"package.part"}),
        ({"numpy": 0.9}, set()),
    ],
)
def test_parts_of_packages_are_left_out(imported, expected, monkeypatch):
    monkeypatch.setattr(loading, "_imported", imported)
    assert loading.imported_for_long(None, 1.0).keys() == expected
