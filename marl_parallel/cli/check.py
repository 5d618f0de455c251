"""`marl-parallel check`: does an environment work with this package, and with others that use its API?

A probe is a generator that runs in the worker of its own `ParallelEnv`. Before each call of the simulator, it yields
the finding to report if that call crashes or hangs. So each such call is one call of the worker, with a timeout::

    run_probes                            worker process
    env.call("advance")  -------------->  Probe.advance: the probe runs to its next `yield`
                         <--------------  the new findings, and the finding that the next call may become

If the simulator then crashes or hangs, `ParallelEnv` raises `WorkerCrashed` or `WorkerTimeout`, and all earlier
findings have arrived. The probes:

`alone`     one environment by itself: spaces, types, pickling, processes left behind, costs; then two in one process
`again`     the same run in a fresh process, for comparison
`official`  the tests that PettingZoo and Gymnasium have for their environments
`parallel`  three environments in a `ParallelEnv`, for comparison
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import itertools
import math
import os
import re
import shlex
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from enum import Enum
from numbers import Real
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import pettingzoo  # type: ignore[import-untyped]
import psutil
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from marl_parallel.action_masks import KEY, ActionSampler, allows_nothing, for_sample, mask_of
from marl_parallel.adapters import AgentID, InvalidAgents, LookupFailed, MultiAgentEnv, NotAnEnvironment, Rules, adapt
from marl_parallel.adapters.attributes import layers
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.backends import descendants
from marl_parallel.cli.target import DEBUG_HINT, CommandError, constructor_of, in_brief
from marl_parallel.core import generators
from marl_parallel.core.advice import FLAGS, is_of_flags
from marl_parallel.core.backend import usable_cpus
from marl_parallel.core.constructors import construct_one
from marl_parallel.core.episode import Episode
from marl_parallel.core.forks import end_forked_copy
from marl_parallel.core.messages import Lost
from marl_parallel.core.pickling import dumps, loads, where_unpicklable
from marl_parallel.core.reports import first_line, is_of_a_library, manner_of_death, place
from marl_parallel.core.spaces import ARRAY_SPACES, Mismatch, as_array, is_vector
from marl_parallel.core.transition import ALL, Transition, is_empty_info
from marl_parallel.core.worker_status import WorkerStatus
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.settings import START_TIMEOUT_S
from marl_parallel.types import EnvError, ParallelEnvError, WorkerCrashed, WorkerTimeout
from marl_parallel.vector.rows import bounds

SEED = 42
AFTER = -1  # the key, in place of an environment's number, of the trace of a second, unseeded episode
BACKENDS = ("serial", "thread", "process")
SEED_TESTS = ("pettingzoo.test.seed_test", "pettingzoo.test.parallel_seed_test")  # need two environments in a process
_GYMNASIUM_TEST = "gymnasium.utils.env_checker.check_env"
# The tests of other projects, by the class of the simulator or of its adapter; there are none for dict environments.
_TESTS: dict[type, tuple[str, ...]] = {
    pettingzoo.AECEnv: ("pettingzoo.test.api_test", SEED_TESTS[0]),
    pettingzoo.ParallelEnv: ("pettingzoo.test.parallel_api_test", SEED_TESTS[1]),
    GymnasiumEnv: (_GYMNASIUM_TEST,),
}
_NUM_ENVS, _RESETS = 3, 8
_STRETCH_S = 0.1  # of steps that are timed in one call of the worker: after each call, the next steps are slower
_STARTUP_S, _GONE_WITHIN_S = 10.0, 2.0
_starting = threading.Lock()  # held while a worker starts, with environment variables of its own

# -- findings ----------------------------------------------------------------------------------------------------------


class Severity(str, Enum):
    """How bad a finding is: a problem breaks something that training loops rely on, a remark is good to know."""

    PROBLEM = "problem"
    REMARK = "remark"


PROBLEM, REMARK = Severity.PROBLEM, Severity.REMARK


class Question(str, Enum):
    """The questions of `check`. A text is true if nothing is found; `COST` is a topic, and its answer is in words."""

    RUNS = "It runs alone: constructor, reset, step and close"
    API = "It keeps to its API"
    SPACES = "Observations keep to their spaces"
    DETERMINISM = "The same seed and actions give the same results"
    PICKLING = "Constructor, infos and exceptions pickle"
    PROCESSES = "It leaves no processes behind"
    SERIAL = 'Several environments give the same results with backend="serial"'
    THREAD = 'Several environments give the same results with backend="thread"'
    PROCESS = 'Several environments give the same results with backend="process"'
    COST = "Step and reset times"

    @classmethod
    def of_backend(cls, backend: str) -> Question:
        return cls[backend.upper()]


class Finding(NamedTuple):
    """A fault of the simulator, and the advice: a sentence or a phrase each.

    `where` is the method with the fault and the line where it begins, unless `what` has the line already.
    """

    question: Question
    severity: Severity
    what: str
    advice: str
    where: str = ""


_IN_RESET = "draw from a generator that is made in `reset` from its seed (gymnasium.utils.seeding.np_random)"
_ISOLATED = "pass isolate_rng=True to ParallelEnv, so that each environment has states of its own, from its seed"
_PICKLED = "it then works, but travels pickled, which is slower"
_ONE_PER_PROCESS = (
    "one simulation per process: pass envs_per_worker=1 to ParallelEnv, so that each environment has a worker process "
    'of its own; backend="serial" and "thread" have one process for all'
)
_SHARES = (
    "let environments share nothing: no globals, class attributes that change, files or ports of one name; or pass "
    "envs_per_worker=1, so that each has a process of its own"
)
_UNKNOWN_TO_WORKERS = (
    "this may come from what the script did before, which workers do not know, such as attributes that it has set in "
    "modules and defaults of libraries: do it in the constructor or in the module (docs/script_state.md)"
)
# By name: the question, the severity, the fault and the advice, with fields to fill in.
# fmt: off
_TEXTS: dict[str, tuple[Question, Severity, str, str]] = {
    "unpicklable constructor": (Question.PICKLING, PROBLEM,
        "the constructor cannot be pickled ({reason}), so it cannot be sent to a worker process",
        "create what does not pickle (locks, connections, windows, open files) when the constructor is called, or move "
        "the class or function that uses it into a module"),
    "unpicklable info": (Question.PICKLING, PROBLEM, "the info of {key} cannot be pickled ({reason})",
        "put plain numbers, texts and arrays into infos, not the simulator's own objects"),
    "unpicklable exception": (Question.PICKLING, REMARK,
        "its exception {name} cannot be pickled and unpickled ({reason})",
        "let {name}.__init__ pass all of its arguments to super().__init__, and hold plain values only; "
        "else errors arrive as text, without the exception as their __cause__"),
    "no environment": (Question.API, PROBLEM, "it is not an environment: {error}",
        "return one of the kinds that docs/environments.md lists"),
    "ambiguous agents": (Question.API, PROBLEM, "its agents cannot be told apart: {error}",
        "give every agent a name of its own"),
    "no action space": (Question.API, PROBLEM,
        "{whose} no action space, so there are no actions to step it with",
        "let it have `possible_agents`, and a space for each of them"),
    "unknown agent": (Question.API, REMARK, "agent {agent!r} is not among possible_agents",
        f"add it there, with its spaces; {_PICKLED}"),
    "no observation space": (Question.API, REMARK, "agent {agent!r} declares no observation space",
        f"declare one; {_PICKLED}"),
    "mask of another form": (Question.API, REMARK,
        "the action mask of {agent} does not match its action space, {space}",
        "actions are drawn without it: report masks in the form that the space's `sample` takes, or under another key"),
    "undeclared vector": (Question.API, REMARK, "the reward of {agent} is of type {kind}, not one number",
        "return a float, or declare `reward_space` if vectors are meant; vectors travel pickled without it"),
    "flag": (Question.API, PROBLEM, "the {name} of {agent} is of type {kind}, not bool", "return True or False"),
    "no last observation": (Question.API, REMARK,
        "agents get no last observation in the step that truncates them: {agents}",
        "return it in that step: a critic of observations needs it to estimate the rewards after a truncation. Without "
        "it, pass values of states or NaN to gae of a Rollout"),
    "no __all__": (Question.API, REMARK, f"terminateds lacks the key {ALL!r}, which says when the episode is over",
        f"set {ALL!r} in every step; without it, the episode counts as going on"),
    "unreadable": (Question.RUNS, PROBLEM, "the values that it returns cannot be read: {error}",
        "return what its spaces say, and plain numbers and dicts"),
    "not reset": (Question.DETERMINISM, REMARK,
        f"reset(seed={SEED}) begins another episode in a used environment than in a fresh one: {{where}}",
        "reset the whole state in `reset`, including counters and generators"),
    "seed ignored": (Question.DETERMINISM, PROBLEM,
        "the seed is ignored: episodes without a seed differ, but `reset` with any seed begins the same episode",
        "make a new generator in `reset` if a seed is passed (gymnasium.utils.seeding.np_random)"),
    "no seed": (Question.DETERMINISM, PROBLEM,
        "`reset` takes no seed: an environment's episodes differ, but all environments play the same ones",
        "let `reset` take a `seed`, and make the generator from it (gymnasium.utils.seeding.np_random)"),
    "random": (Question.DETERMINISM, PROBLEM, "two runs with the same seed and actions differ: {where}",
        f"{_IN_RESET}; look for default_rng() without a seed, for the time, for threads"),
    "random of the process": (Question.DETERMINISM, PROBLEM,
        "two runs with the same seed and actions differ: {where}",
        f"{_IN_RESET}, not from `random` or `np.random`, which belong to the whole process, and sort sets"),
    "process-wide generators": (Question.DETERMINISM, REMARK,
        "it draws from, or seeds, {names}, which all environments of a process share",
        f"{_ISOLATED}; or {_IN_RESET}"),
    "random without a seed": (Question.DETERMINISM, PROBLEM,
        "an episode that begins with a seed can be repeated, but one that begins without, as after an automatic "
        "reset, cannot: two runs with the same seed and actions differ from {where} on",
        "in `reset`, make a new generator only if a seed is passed, and else go on with the present one "
        "(`super().reset(seed=seed)` and `self.np_random` of gymnasium.Env do that)"),
    "processes left": (Question.PROCESSES, PROBLEM, "{after}() leaves {count} behind: {first}",
        "end them in `close`, and wait for them: each restart would leave more of them"),
    "not alone": (Question.RUNS, REMARK, "{what}", _ONE_PER_PROCESS),
    "no test": (Question.API, REMARK, "{name} cannot be imported: {error}",
        "install what {name} needs, if it is wanted"),
    "shared": (Question.SERIAL, PROBLEM,
        "together with others, environment {env_id} gives other results than alone: {where}", _SHARES),
    "unlike the script": (Question.PROCESS, PROBLEM,
        "in a worker process, environment {env_id} gives other results than in the process of its script: {where}",
        f"{_UNKNOWN_TO_WORKERS}; or environments of a worker share something: {_SHARES}"),
    "uneven steps": (Question.COST, REMARK, "uneven steps (p99 is {ratio:.0f}x the median)",
        "`step` waits for the slowest environment; send and recv(min_envs=...) go on with the others"),
    "long resets": (Question.COST, REMARK, "long resets (as long as {ratio:.0f} steps)",
        "`step` waits for environments that are reset; send and recv(min_envs=...) go on with the others"),
    "lists": (Question.COST, REMARK, "{parts} come as {kinds}, not as arrays",
        "return NumPy arrays of the space's dtype; tuples and lists are converted one by one, which takes tens of "
        "microseconds a step"),
    "short steps": (Question.COST, REMARK, "short steps ({us:.0f} µs, less than it takes to wake a worker)",
        'a plain loop or backend="serial" is usually faster; `marl-parallel tune` compares them'),
}
# fmt: on


def _finding(name: str, /, **fields: Any) -> Finding:
    question, severity, what, advice = _TEXTS[name]
    return Finding(question, severity, what.format(**fields), advice.format(**fields))


# For each reset and step: whether it is a step, and the fingerprints of its values, such as "reward of agent_0".
Trace: TypeAlias = list[tuple[bool, dict[str, str]]]


@dataclass
class Examination:
    """The results of one probe or of several."""

    environment: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # problems first, then remarks, in the order of the questions
    checked: set[Question] = field(default_factory=set)  # the questions that were examined to the end
    traces: dict[int, Trace] = field(default_factory=dict)  # by the number of the environment, or `AFTER`

    @property
    def healthy(self) -> bool:
        return all(finding.severity is not PROBLEM for finding in self.findings)

    def add(self, findings: Iterable[Finding]) -> None:
        unique, order = dict.fromkeys([*self.findings, *findings]), [*Question]
        self.findings = sorted(unique, key=lambda one: (one.severity is not PROBLEM, order.index(one.question)))

    def merge(self, other: Examination) -> None:
        self.facts |= other.facts
        self.checked |= other.checked
        self.traces |= other.traces
        self.add(other.findings)

    def answers(self) -> Mapping[Question, str]:
        """By question: "yes", "no", "yes, with a remark" where there are remarks only, or "not checked".

        The answer about costs is "even", or what has been found.
        """
        answers = {}
        for question in Question:
            about = [finding for finding in self.findings if finding.question is question]
            severities = {finding.severity for finding in about}
            if PROBLEM in severities:
                answers[question] = "no"
            elif question not in self.checked:
                answers[question] = "not checked"
            elif question is Question.COST:
                answers[question] = "; ".join(finding.what for finding in about) or "even"
            else:
                answers[question] = "yes, with a remark" if severities else "yes"
        return answers

    def as_json(self) -> dict[str, Any]:
        """Everything but the traces, in values that JSON has."""
        answers = self.answers().items()
        return {
            "environment": self.environment,
            "healthy": self.healthy,
            "facts": self.facts,
            "questions": [{"name": q.name.lower(), "question": q.value, "answer": answer} for q, answer in answers],
            "findings": [
                {**one._asdict(), "question": one.question.name.lower(), "severity": one.severity.value}
                for one in self.findings
            ],
        }


# -- running probes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A probe and its settings."""

    probe: str  # a key of `PROBES`
    environment: str  # as named on the command line
    env_kwargs: str
    timeout: float  # seconds that each call of the simulator may take
    seconds: float  # the most seconds that a run lasts
    steps: int  # the most steps that a run has
    generators: int = 0  # selects seeds of the process-wide generators, and of the order of sets of strings
    backend: str = "serial"  # of the `ParallelEnv` that the probe `parallel` makes
    cycles: int = 100  # the number of steps of a test of another project
    test: str = ""  # the test of another project that the probe `official` runs
    shares_process: bool = True  # whether several environments can live in one process

    @property
    def name(self) -> str:
        return self.backend if self.probe == "parallel" else self.probe

    @property
    def limit_s(self) -> float:
        """The timeout of each call of the worker: a test, or a call of `ParallelEnv`, calls the simulator often."""
        longer = {"official": self.timeout + 20 * self.seconds, "parallel": _NUM_ENVS * self.timeout + _STARTUP_S}
        return longer.get(self.probe, self.timeout)

    @property
    def question(self) -> Question:
        """The question that a crash or a hang answers, unless the probe has another one."""
        if self.probe == "parallel":
            return Question.of_backend(self.backend)
        return {"official": Question.API, "again": Question.DETERMINISM}.get(self.probe, Question.RUNS)

    def doing(self, what: str) -> Finding:
        """The start of a finding: the next call of the simulator; in a test of another project, it is a remark."""
        return Finding(self.question, REMARK if self.probe == "official" else PROBLEM, what, "")


def run_probes(
    jobs: Iterable[Job], at_once: int, on_start: Callable[[str], None] = lambda name: None
) -> Iterator[tuple[Job, Examination]]:
    """Run probes, at most `at_once` at the same time, and yield their results as they end.

    Raises `CommandError` if there is no such environment, or it cannot be imported.
    """
    running: set[ParallelEnv] = set()
    stopping = threading.Event()

    def run(job: Job) -> Examination:
        on_start(job.name)
        result, doing = Examination(job.environment), job.doing("starting")
        with _starting:  # workers inherit the environment variables of this process
            before = os.environ.get("PYTHONHASHSEED")
            os.environ["PYTHONHASHSEED"] = str(job.generators)
            try:
                limit = job.limit_s + _STRETCH_S
                env = ParallelEnv([functools.partial(Probe, job)], seed=SEED, adapter="dict", step_timeout=limit)
            finally:
                del os.environ["PYTHONHASHSEED"]
                os.environ.update({} if before is None else {"PYTHONHASHSEED": before})
        running.add(env)
        try:
            while doing is not None and not stopping.is_set():
                ((new, doing),) = env.call("advance")
                result.merge(new)
        except (WorkerCrashed, WorkerTimeout) as error:
            assert doing is not None
            result.add([_fault(error, doing, job, result.facts.get("defined", {}))])
        except EnvError as error:
            if isinstance(error.__cause__, CommandError):
                raise CommandError(*error.__cause__.args) from error
            raise
        finally:
            running.discard(env)
            env.close(terminate=True)
        return result

    pool = ThreadPoolExecutor(at_once)
    try:
        futures = {pool.submit(run, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        stopping.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for env in [*running]:
            env.close(terminate=True)


def _fault(error: WorkerCrashed | WorkerTimeout, doing: Finding, job: Job, defined: Mapping[str, str]) -> Finding:
    """The finding that a worker has crashed or hung in a call of the simulator, whose methods are `defined` there."""
    where = place(error.stack)
    if isinstance(error, WorkerTimeout):
        what = f"did not finish within {job.limit_s:g} s{f'; it is at {where}' if where else ''}"
        advice = "if it needs longer, raise --timeout; else fix what hangs there"
    else:
        manner, _ = manner_of_death(Lost(error.exitcode, ""))
        what = f"ends the process{f', at {where}' if where else ''}: {manner}"
        advice = (
            "find what ends it, native code or os._exit, and fix it; until then, workers in processes with "
            'on_error="restart" survive it'
        )
    of_method = "" if where else _method(doing.what, defined)
    return doing._replace(what=f"{doing.what} {what}", advice=doing.advice or advice, where=of_method)


# -- probes in a worker ------------------------------------------------------------------------------------------------

# A probe or a part of one: it yields the finding to report if the next call of the simulator crashes or hangs.
Steps: TypeAlias = Generator[Finding, None, Any]
# Calls a function of the simulator after such a `yield`; returns what the function returns.
Calling: TypeAlias = Callable[[str, Callable[[], Any]], Steps]
Constructor: TypeAlias = Callable[..., Any]
Spaces: TypeAlias = Mapping[Any, Space[Any]]


class Stopped(Exception):
    """The probe cannot go on; a finding gives the reason."""


class Probe:
    """The environment in a probe's worker: it is never stepped, only its `advance` is called."""

    possible_agents = ("nobody",)
    observation_space = action_space = spaces.Dict({"nobody": spaces.Discrete(1)})

    def __init__(self, job: Job) -> None:
        self.job, self.result = job, Examination(job.environment)  # the results since the last `advance`
        self.elapsed_s = 0.0  # of the latest call of the simulator
        self.seeded: dict[str, int] = {}  # the `fingerprints` of process-wide generators before the latest constructor
        self.defined: dict[str, str] = {}  # by method: the line of the simulator where it begins; and "the constructor"
        self._pid, self._kinds = os.getpid(), set[str]()
        self._steps = self._run()
        with open(os.devnull, "wb") as null:  # nothing that simulators print is shown
            for output in (1, 2):
                os.dup2(null.fileno(), output)
        if sys.platform == "linux":
            descendants.adopt_orphans()  # to see whether the simulator leaves some

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, actions: Any) -> Any:
        raise NotImplementedError

    def _run(self) -> Steps:
        yield self.job.doing("the import")
        try:
            constructor = constructor_of(self.job.environment, self.job.env_kwargs)
        except CommandError:
            raise
        except (Exception, SystemExit) as error:
            raise CommandError(in_brief(error), DEBUG_HINT) from error
        self.define("the constructor", [constructor])
        yield from PROBES[self.job.probe](self, constructor)

    def advance(self) -> tuple[Examination, Finding | None]:
        """Run the probe to its next `yield`; returns the new results, and the value of `yield` (None at the end)."""
        doing = None
        try:
            doing = next(self._steps, None)
        except Stopped:
            pass  # a finding gives the reason
        except CommandError:
            raise
        except (Exception, SystemExit) as error:
            self.add(_finding("unreadable", error=in_brief(error))._replace(question=self.job.question))
        result, self.result = self.result, Examination(self.job.environment)
        return result, doing

    def define(self, name: str, functions: Iterable[Any]) -> None:
        """Note the line where a method of the simulator, or its constructor, begins."""
        if line := line_of(functions):
            self.defined[name] = line
            self.result.facts["defined"] = {**self.defined}

    def find(self, name: str, method: str = "", /, **fields: Any) -> None:
        """Add a finding, about this method of the simulator or its constructor."""
        self.add(_finding(name, **fields)._replace(where=_method(method, self.defined)))

    def add(self, finding: Finding, kind: str = "") -> None:
        """Add a finding, unless there has been one of its kind."""
        if (kind or finding.what) not in self._kinds:
            self._kinds.add(kind or finding.what)
            self.result.add([finding])

    def calling(self, doing: str, function: Callable[[], Any]) -> Steps:
        """Call the simulator; an exception becomes a finding, and ends the probe with `Stopped`."""
        yield self.job.doing(doing)
        try:
            return self.call(function)
        except (Exception, SystemExit, GeneratorExit) as error:
            question, what, where = self.job.question, _raises(doing, error), ""
            to_do = FLAGS if is_of_flags(error) else 'fix that line, or let runs go on with on_error="restart"'
            if isinstance(error, TypeError) and not _place_of(error):
                # The adapter raises it because of what the simulator returned; or Python, because of how it was called.
                last = traceback.extract_tb(error.__traceback__)[-1].line or ""
                returned = last.startswith("raise ") and not isinstance(error.__cause__, TypeError)
                to_do = f"let {doing} return that" if returned else f"let {doing} take what it is called with"
                question, what, where = Question.API, str(error), _method(doing, self.defined)
            else:
                self.check_exception(error)
            self.add(Finding(question, PROBLEM, what, f"{to_do}; what comes after it was not checked", where))
            raise Stopped from error

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the simulator, and end this process if it is a forked copy that the simulator lets return."""
        started, raised = time.perf_counter(), None
        try:
            return function()
        except BaseException as error:
            raised = error
            raise
        finally:
            self.elapsed_s = time.perf_counter() - started
            if os.getpid() != self._pid:
                end_forked_copy(raised)

    def check_exception(self, error: BaseException) -> None:
        if (reason := pickling_error(error)) is not None:
            finding = _finding("unpicklable exception", name=type(error).__name__, reason=reason)
            place = _place_of(error)
            self.add(finding._replace(where=place and f"raised at {place}"), finding.what)


def line_of(functions: Iterable[Any]) -> str:
    """Where the first function outside of libraries begins, else the last function: "line 12 of sim.py", or ""."""
    line = ""
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        if isinstance(function, type):
            function = inspect.getattr_static(function, "__init__")
        with contextlib.suppress(ValueError):  # a cycle of wrapped functions
            function = inspect.unwrap(function)
        if (code := getattr(function, "__code__", None)) is not None:
            line = f"line {code.co_firstlineno} of {code.co_filename}"
            if not is_of_a_library(code.co_filename):
                break
    return line


def _method(name: str, defined: Mapping[str, str]) -> str:
    """A method of the simulator and the line where it begins, such as "step, line 12 of sim.py"; or ""."""
    return f"{name}, {defined[name]}" if name in defined else ""


def _place_of(error: BaseException) -> str:
    return place("".join(traceback.format_exception(error)))


def _raises(doing: str, error: BaseException) -> str:
    where = _place_of(error)
    return f"{doing} raises{f', at {where}' if where else ''}: {in_brief(error)}"


# -- runs --------------------------------------------------------------------------------------------------------------


class Actor(ActionSampler):
    """Draws the actions of one environment, by its action masks; the same seed draws the same actions."""

    def __call__(self, acting: Sequence[AgentID], observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> Any:
        """Actions of the acting agents that declare a space, in the order of these."""
        rank = {agent: number for number, agent in enumerate(self.spaces)}
        declared = [agent for agent in acting if self.spaces.get(agent) is not None]  # `in` of a `Dict` is about values
        agents = sorted(declared, key=lambda agent: rank.get(agent, len(rank)))
        return self.sample(agents, {agent: mask_of(observations.get(agent), infos.get(agent)) for agent in agents})


class Solo:
    """One environment by itself: an adapted simulator and its `Episode`, as in a worker, without the transport.

    `Episode`, which decides who acts and when an episode is over, calls this in place of the adapter, so that each call
    is timed, and its results are passed to `inspect` before anything is added to them.
    """

    inspect: Callable[[Sequence[dict[Any, Any]]], None] | None = None

    def __init__(self, env: MultiAgentEnv) -> None:
        self.env, as_env = env, cast(MultiAgentEnv, self)
        self.seconds: dict[str, list[float]] = {"reset": [], "step": []}  # of each call
        self.episode = Episode(as_env, 0, AutoresetMode.DISABLED, WorkerStatus(bytearray(WorkerStatus.NBYTES)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def _timed(self, method: str, *args: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        dicts = getattr(self.env, method)(*args, **keywords)
        self.seconds[method].append(time.perf_counter() - started)
        if self.env.mask_spaces:
            dicts = (*dicts[:-1], _with_masks(dicts[-1], self.env.masks()))
        if self.inspect is not None:
            self.inspect(dicts)
        return dicts

    reset, step = functools.partialmethod(_timed, "reset"), functools.partialmethod(_timed, "step")

    def begin(self, seed: int | None = None) -> Transition:
        """Begin an episode, with the seed if the simulator takes one."""
        return self.episode.reset({"seed": seed} if seed is not None and "seed" in self.env.reset_keywords else {})


def _with_masks(infos: Mapping[Any, Any], masks: Mapping[AgentID, Any]) -> dict[Any, Any]:
    """Infos that also have the masks of `env.masks()`, under the key that other environments use."""
    as_infos = {agent: {KEY: np.asarray(mask, np.int8), **infos.get(agent, {})} for agent, mask in masks.items()}
    return {**infos, **as_infos}


def _run_alone(probe: Probe, solo: Solo, seed: int | None, steps: int, seconds: float) -> Steps:
    """Step an environment from a reset with this seed; returns its trace."""
    seeds, actor = itertools.chain([seed], itertools.repeat(None)), Actor(solo.env.action_spaces, seed or SEED)
    (trace,) = yield from _run(
        probe.calling,
        lambda _: [solo.begin(next(seeds))],
        lambda actions: [solo.episode.step(*actions)],
        [actor],
        solo.env.observation_spaces,
        steps,
        seconds,
    )
    return trace


def _run(
    calling: Calling, begin: Any, act: Any, actors: Sequence[Actor], space_of: Spaces, steps: int, seconds: float
) -> Steps:
    """Step environments until there are so many steps or seconds, but at least once; returns the trace of each.

    `begin` resets environments by their numbers, `act` steps all with the actions of each, which `actors` draw. Both
    return a list of `Transition`.
    """

    def record(env_id: int, now: Transition, is_step: bool) -> None:
        latest[env_id] = now
        entry = {f"observation of {key}": fingerprint(one, space_of.get(key)) for key, one in now.observations.items()}
        entry |= {f"info of {key}": fingerprint(info) for key, info in now.infos.items()}
        if is_step:
            for part, values in (("reward", now[1]), ("termination", now[2]), ("truncation", now[3])):
                entry |= {f"{part} of {key}": fingerprint(value) for key, value in values.items() if key != ALL}
        traces[env_id].append((is_step, entry))

    latest: dict[int, Transition] = {}
    traces: list[Trace] = [[] for _ in actors]
    deadline = time.monotonic() + seconds
    over = [*range(len(actors))]
    for count in itertools.count():
        if over:
            for env_id, now in zip(over, (yield from calling("reset", functools.partial(begin, over)))):
                record(env_id, now, False)
        if count == steps or (count and time.monotonic() > deadline):
            return traces
        actions = [actor(now.acting, now.observations, now.infos) for actor, now in zip(actors, latest.values())]
        for env_id, now in enumerate((yield from calling("step", functools.partial(act, actions)))):
            record(env_id, now, True)
        over = [env_id for env_id, now in latest.items() if _is_over(now)]


def _is_over(now: Transition) -> bool:
    return bool(now.terminateds.get(ALL) or now.truncateds.get(ALL))


def first_difference(one: Trace, other: Trace) -> tuple[int, str] | None:
    """The index and text of the first difference of two runs with the same actions, as far as the shorter one goes."""
    for index, ((is_step, mine), (_, theirs)) in enumerate(zip(one, other)):
        for what in {**mine, **theirs}:
            if mine.get(what) != theirs.get(what):
                steps = sum(is_step for is_step, _ in one[: index + 1])
                return index, f"the {what}, in {f'step {steps}' if is_step else f'reset {index + 1 - steps}'}"
    return None


# -- the probe `alone` -------------------------------------------------------------------------------------------------


def alone(probe: Probe, constructor: Constructor) -> Steps:
    """One environment by itself: whether it works, what it returns, what it costs, which processes it leaves behind."""
    job, before = probe.job, _started()
    yield Finding(Question.PICKLING, PROBLEM, "pickling the constructor", "")
    if (reason := probe.call(lambda: pickling_error(constructor))) is not None:
        finding = _finding("unpicklable constructor", reason=reason)
        if "FlagValues" in reason:
            finding = finding._replace(advice=FLAGS)
        probe.add(finding._replace(where=_method("the constructor", probe.defined)))
    solo: Solo = yield from _construct(probe, constructor)
    constructed = _started()
    env, types = solo.env, {"reward": set[str](), "flag": set[str]()}
    takes_seed = "seed" in env.reset_keywords
    probe.result.facts |= {
        "kind": getattr(type(env), "kind", type(env).__name__),
        "rules": env.rules.value,
        "agents": [str(agent) for agent in env.possible_agents],
        "takes_seed": takes_seed,
        "state": None if env.state_space is None else str(env.state_space),
        "official": next(
            (tests for kind, tests in _TESTS.items() if isinstance(env.source, kind) or isinstance(env, kind)), ()
        ),
        "construct_s": probe.elapsed_s,
    }
    unknown = [agent for agent in env.possible_agents if agent not in env.action_spaces]
    if unknown or not env.action_spaces:
        whose, method = (f"agent {unknown[0]!r} declares" if unknown else "its agents declare"), "action_space"
        probe.find("no action space", method if method in probe.defined else "the constructor", whose=whose)
        return

    traits = Traits()

    def inspect(dicts: Sequence[dict[Any, Any]]) -> None:
        step = len(solo.seconds["step"])
        traits.note(env, dicts)
        for one in _findings_in(env, dicts, types):
            what = f"{one.what} ({f'in step {step}' if step else 'at the first reset'})"
            where = _method("step" if step else "reset", probe.defined)
            probe.add(one._replace(what=what, where=where), f"{one.question} {one.advice}")

    solo.inspect = inspect
    trace = yield from again(probe, constructor, solo, job.seconds)
    solo.inspect = None
    drawn = [name for name, state in generators.fingerprints().items() if probe.seeded[name] != state]
    probe.result.facts["generators"] = drawn
    if drawn:
        probe.find("process-wide generators", names=" and ".join(drawn))
    probe.result.facts |= {"steps": sum(is_step for is_step, _ in trace)}
    probe.result.facts |= {f"{part}_types": sorted(names) for part, names in types.items()}
    probe.result.facts |= traits.facts()
    if traits.unseen:
        probe.find("no last observation", "step", agents=_few(sorted(traits.unseen)))
    if traits.lists:
        probe.find("lists", "step", **traits.in_place_of_arrays())
    probe.result.checked.add(Question.SPACES)
    used = yield from _run_alone(probe, solo, SEED, min(job.steps, 20), job.seconds)
    if takes_seed and (where := first_difference(used, trace)) is not None:
        probe.find("not reset", "reset", where=where[1])
    unseeded, seeded = set[str](), set[str]()  # the first observations of episodes
    for beginnings, seeds in ((unseeded, [None] * _RESETS), (seeded, range(SEED, SEED + _RESETS))):
        for seed in seeds:
            now: Transition = yield from probe.calling("reset", functools.partial(solo.begin, seed))
            beginnings.add(fingerprint(now.observations))
    yield from _measure_cost(probe, solo)
    yield from probe.calling("close", env.close)
    probe.result.checked.add(Question.RUNS)
    _check_nothing_left(probe, before, "close", constructed)
    other: Solo = yield from _construct(probe, constructor, 1)
    other_trace = yield from _run_alone(probe, other, SEED + 1, job.steps, job.seconds)
    probe.result.traces[1] = other_trace
    if len(unseeded) > 1 and len(seeded) == 1:
        probe.find("seed ignored", "reset")
    elif len(unseeded) > 1 and trace[0] == other_trace[0]:
        probe.find("no seed", "reset")
    yield from _check_two_in_one_process(probe, other, constructor)
    yield from _provoke_exceptions(probe, constructor)
    probe.result.checked.add(Question.PICKLING)


def _construct(probe: Probe, constructor: Constructor, env_id: int = 0) -> Steps:
    """Construct an environment; returns a `Solo`."""
    seed = SEED + env_id
    of_process = seed + 1_000_003 * probe.job.generators
    generators.seed_generators(of_process)
    seeded = generators.fingerprints()
    make = functools.partial(construct_one, constructor, seed=seed, env_id=env_id)
    simulator = yield from probe.calling("the constructor", make)
    construct_s = probe.elapsed_s
    if "torch" not in seeded:  # it may have been loaded
        generators.seed_torch(of_process)
    probe.seeded = {**generators.fingerprints(), **seeded}
    yield probe.job.doing("reading its spaces")
    try:
        env = probe.call(lambda: adapt(simulator))
    except (NotAnEnvironment, InvalidAgents) as error:
        name = "ambiguous agents" if isinstance(error, InvalidAgents) else "no environment"
        probe.find(name, "the constructor", error=error)
        raise Stopped from error
    except LookupFailed as error:
        what = _raises(error.method, error.__cause__ or error)
        probe.add(Finding(probe.job.question, PROBLEM, what, error.to_do))
        raise Stopped from error
    for name in ("reset", "step", "close", "action_space", "observation_space"):
        probe.define(name, [inspect.getattr_static(layer, name, None) for layer in layers(simulator)])
    probe.elapsed_s = construct_s
    return Solo(env)


def _measure_cost(probe: Probe, solo: Solo) -> Steps:
    """Time steps and resets, many of them in each call of the worker."""
    solo.seconds = {"step": [], "reset": []}
    actor, now = Actor(solo.env.action_spaces, SEED), (yield from probe.calling("reset", solo.begin))
    deadline = time.perf_counter() + probe.job.seconds

    def stretch() -> None:
        nonlocal now
        pause = min(time.perf_counter() + _STRETCH_S, deadline)
        while True:
            now = solo.begin() if _is_over(now) else solo.episode.step(actor(now.acting, now.observations, now.infos))
            if time.perf_counter() > pause:
                return

    while time.perf_counter() < deadline or not solo.seconds["step"]:
        yield from probe.calling("a step or reset", stretch)
    for method, seconds in solo.seconds.items():
        median, p99 = map(float, np.percentile(seconds, (50, 99)))
        probe.result.facts[method] = {"count": len(seconds), "median_s": median, "p99_s": p99}
    probe.result.checked.add(Question.COST)


def _check_two_in_one_process(probe: Probe, first: Solo, constructor: Constructor) -> Steps:
    """Make and step a second environment while the first is open; the fact `shares_process` is whether that works."""
    probe.result.facts["shares_process"] = False
    doing = ""

    def calling(method: str, function: Callable[[], Any]) -> Steps:
        nonlocal doing
        doing = f"with another environment open in the same process, {method}"
        yield _finding("not alone", what=doing)
        return probe.call(function)

    try:
        make = functools.partial(construct_one, constructor, seed=SEED + 2, env_id=2)
        both = [Solo(first.env), Solo(adapt((yield from calling("the constructor", make))))]
        started = []
        for solo in both:
            started.append((yield from calling("reset", functools.partial(solo.begin, SEED))))
        for solo, now in zip(both, started):
            actions = Actor(solo.env.action_spaces, SEED)(now.acting, now.observations, now.infos)
            yield from calling("step", functools.partial(solo.episode.step, actions))
        yield from calling("close", both[1].env.close)
    except (Exception, SystemExit) as error:
        probe.find("not alone", what=_raises(doing, error))
    else:
        probe.result.facts["shares_process"] = True
    yield from probe.calling("close", first.env.close)


def _provoke_exceptions(probe: Probe, constructor: Constructor) -> Steps:
    """Step an environment before its first reset, and with invalid actions, to see the exceptions that it raises."""
    for doing, reset in (("a step before the first reset", False), ("a step with actions that make no sense", True)):
        solo: Solo = yield from _construct(probe, constructor, 2)
        if reset:
            yield from probe.calling("reset", functools.partial(solo.begin, SEED))
        actions: dict[Any, Any] = dict.fromkeys(solo.env.possible_agents, object())
        yield Finding(Question.API, REMARK, doing, "")
        try:
            probe.call(functools.partial(solo.env.step, actions))
        except (Exception, SystemExit) as error:
            probe.check_exception(error)
        with contextlib.suppress(Exception):  # such a step may have broken it
            probe.call(solo.env.close)


def _started() -> dict[psutil.Process, str]:
    """Live descendants and their command lines, without helpers of `multiprocessing`, which end by themselves."""
    lines = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            line = " ".join(process.cmdline()).strip()[:80]
            helper = re.search(r"multiprocessing\.(resource_tracker|forkserver)", line)
            if not helper and process.status() != psutil.STATUS_ZOMBIE:
                lines[process] = line
    return lines


def _check_nothing_left(
    probe: Probe, before: Collection[psutil.Process], after: str, constructed: Collection[psutil.Process] = ()
) -> None:
    """Add a finding if processes are left that are not in `before`; the constructor has started `constructed`."""
    deadline = time.monotonic() + _GONE_WITHIN_S
    new = _started().keys() - before
    while (leaked := {one: line for one, line in _started().items() if one in new}) and time.monotonic() < deadline:
        time.sleep(0.02)
    if leaked:
        count = f"{len(leaked)} process{'es' * (len(leaked) > 1)}"
        first, line = next(iter(leaked.items()))
        finding, starts = _finding("processes left", after=after, count=count, first=line), ""
        if constructed:
            starts = _method("the constructor", probe.defined) if first in constructed else "reset or step"
        probe.add(finding._replace(where=starts and f"started by {starts}"))
    probe.result.checked.add(Question.PROCESSES)


# -- the other probes --------------------------------------------------------------------------------------------------


def again(probe: Probe, constructor: Constructor, solo: Solo | None = None, seconds: float = math.inf) -> Steps:
    """Run an environment with a seed, then without one, for comparison; returns the trace of the seeded run."""
    solo = solo or (yield from _construct(probe, constructor))
    trace = yield from _run_alone(probe, solo, SEED, probe.job.steps, seconds)
    after = yield from _run_alone(probe, solo, None, 1, seconds)
    probe.result.traces |= {0: trace, AFTER: after}
    return trace


def parallel(probe: Probe, constructor: Constructor) -> Steps:
    """Three environments in a `ParallelEnv`, two of them in the same worker if a process can have two."""
    job, before = probe.job, _started()
    limit = None if job.backend == "serial" else job.timeout
    options: dict[str, Any] = {"num_workers": 2} if job.shares_process else {"envs_per_worker": 1}
    options |= {
        "backend": job.backend,
        "step_timeout": limit,
        "reset_timeout": limit,
        "start_timeout": limit or START_TIMEOUT_S,
    }

    def calling(method: str, function: Callable[[], Any]) -> Steps:
        yield job.doing(f'ParallelEnv(backend="{job.backend}"){method and "."}{method}')
        return probe.call(function)

    def make() -> ParallelEnv:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of more workers than CPUs
            return ParallelEnv([constructor] * _NUM_ENVS, False, SEED, **options)

    def with_masks(infos: Sequence[dict[Any, Any]], env_ids: Iterable[int]) -> Iterable[dict[Any, Any]]:
        if not env.runner.schema.mask_spaces:
            return infos
        masks = env.action_masks
        return [_with_masks(of_env, masks[env_id]) for of_env, env_id in zip(infos, env_ids)]

    def begin(env_ids: Sequence[int]) -> list[Transition]:
        observations, infos = env.reset(env_ids=env_ids)
        resets = zip(env_ids, observations, with_masks(infos, env_ids))
        return [Transition(seen, {}, {}, {}, info, (), env.acting[i]) for i, seen, info in resets]

    def act(actions: Sequence[Any]) -> list[Transition]:
        *dicts, infos = env.step(actions)
        results = zip(*dicts, with_masks(infos, range(_NUM_ENVS)), env.acting)
        return [Transition(*dicts, (), acting) for *dicts, acting in results]  # type: ignore[call-arg]

    try:
        env: ParallelEnv = yield from calling("", make)
        try:
            actors = [Actor(env.action_space or {}, SEED + env_id) for env_id in range(_NUM_ENVS)]
            space_of: Spaces = env.observation_space or {}
            traces = yield from _run(calling, begin, act, actors, space_of, job.steps, job.seconds)
            probe.result.traces |= dict(enumerate(traces))
        finally:
            yield from calling("close", env.close)
    except (ParallelEnvError, TypeError, ValueError, OSError) as error:
        to_do = str(error).partition("What to do: ")[2].partition(".\n")[0]
        what = re.sub(r" at 0x[0-9a-f]+", "", first_line(error))
        advice = to_do or "fix what it says; ParallelEnv raised this error"
        if isinstance(error, EnvError) and job.backend == "process":  # alone, it did not raise
            advice = f"{advice}. {_UNKNOWN_TO_WORKERS[0].upper()}{_UNKNOWN_TO_WORKERS[1:]}"
        probe.add(Finding(job.question, PROBLEM, f"in a ParallelEnv: {what}", advice))
    else:
        _check_nothing_left(probe, before, "ParallelEnv.close")


def official(probe: Probe, constructor: Constructor) -> Steps:
    """Run a test of the environment's own project; its failure and its warnings become findings."""
    solo: Solo = yield from _construct(probe, constructor)
    path, source = probe.job.test, solo.env.source
    module, _, name = path.rpartition(".")
    yield probe.job.doing(f"the import of {path}")
    try:
        test = getattr(importlib.import_module(module), name)
    except ImportError as error:
        probe.find("no test", name=path, error=error)
        probe.result.checked.add(Question.API)
        return
    if path == _GYMNASIUM_TEST:
        test = functools.partial(test, source.unwrapped, skip_render_check=True)
    else:
        tested = functools.partial(construct_one, constructor, seed=SEED, env_id=0) if path in SEED_TESTS else source
        test = functools.partial(test, tested, probe.job.cycles)
    question = Question.DETERMINISM if path in SEED_TESTS else Question.API
    breaks = f"nothing breaks here; other libraries may rely on what {path} asks for"
    doing = Finding(question, REMARK, path, f"{breaks}: run it by itself, with a debugger")
    yield doing
    outcomes = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            probe.call(test)
        except AssertionError as error:
            asserted = str(traceback.extract_tb(error.__traceback__)[-1].line)
            outcomes = [f"fails: {in_brief(error) if str(error) else asserted}"]
        except (Exception, SystemExit) as error:
            outcomes = [_raises("", error).replace(" raises", "fails", 1)]
    texts = dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, UserWarning))
    if texts:  # without Gymnasium's colours
        plain = [re.sub(r"^(\x1b\[33m)?(WARN: )?|\x1b\[0m$", "", text) for text in texts]
        outcomes.append(f"warns: {'; '.join(plain)}")
    for outcome in outcomes:
        probe.add(doing._replace(what=f"{name} {outcome}"))
    probe.result.checked.add(Question.API)


PROBES: dict[str, Callable[[Probe, Constructor], Steps]] = {
    "alone": alone, "again": again, "official": official, "parallel": parallel,
}  # fmt: skip


# -- the values that a simulator returns -------------------------------------------------------------------------------


@dataclass
class Traits:
    """Traits of the agents that were seen in a run."""

    masked: set[str] = field(default_factory=set)  # have action masks
    late: set[str] = field(default_factory=set)  # join an episode after its reset
    early: set[str] = field(default_factory=set)  # end while others go on
    unseen: set[str] = field(default_factory=set)  # have no observation in the step that truncates them
    lists: dict[str, set[str]] = field(default_factory=dict)  # by part: types of values in place of arrays
    takes_turns: bool = False
    _agents: set[Any] = field(default_factory=set)  # the agents of the present episode
    _ended: set[Any] = field(default_factory=set)
    _latest: set[Any] = field(default_factory=set)  # observed in the step before

    def note(self, env: MultiAgentEnv, dicts: Sequence[dict[Any, Any]]) -> None:
        """Note the two dicts of a reset or the five of a step."""
        observations, *results, infos = dicts
        if not results:
            self._agents, self._ended = {*observations}, set()
        self.late |= {str(agent) for agent in observations.keys() - self._agents}
        self._agents |= observations.keys()
        if results:
            flagged = [{agent for agent, flag in flags.items() if is_flag(flag) and flag} for flags in results[1:]]
            cut_off = flagged[1] | (self._latest - flagged[0] if ALL in flagged[1] else set())
            seen = {agent for agent, observation in observations.items() if observation is not None}
            self.unseen |= {str(agent) for agent in cut_off - self._ended - seen - {ALL}}
            self._ended |= (flagged[0] | flagged[1]) - {ALL}
            if self._agents - self._ended:
                self.early |= {str(agent) for agent in self._ended}
        self._latest = {*observations}
        self.masked |= {
            str(agent) for agent in observations if mask_of(observations[agent], infos.get(agent)) is not None
        }
        self.takes_turns |= env.turn() is not None
        self._note_lists(env, observations, results[0] if results else {}, infos)

    def _note_lists(
        self, env: MultiAgentEnv, observations: Mapping[Any, Any], rewards: Mapping[Any, Any], infos: Mapping[Any, Any]
    ) -> None:
        found: list[tuple[str, Iterator[str]]] = []
        for agent, seen in observations.items():
            acts = env.action_spaces.get(agent)
            if acts is not None and for_sample(acts, mask_of(seen, infos.get(agent))) is not None:
                sources = [source for source in (seen, infos.get(agent)) if isinstance(source, Mapping)]
                found += [("masks", _lists_in(source.get(KEY))) for source in sources]
            if isinstance(seen, Mapping):
                seen = {key: value for key, value in seen.items() if key != KEY}
            found.append(("observations", _lists_of(seen, env.observation_spaces.get(agent))))
        found += [("rewards", _lists_of(reward, env.reward_spaces.get(agent))) for agent, reward in rewards.items()]
        for part, kinds in found:
            for kind in kinds:
                self.lists.setdefault(part, set()).add(kind)

    def in_place_of_arrays(self) -> dict[str, str]:
        """The fields of the finding "lists"."""
        kinds = sorted(set[str]().union(*self.lists.values()), reverse=True)
        parts = [part for part in ("observations", "masks", "rewards") if part in self.lists]
        return {"parts": " and ".join(", ".join(parts).rsplit(", ", 1)), "kinds": " and ".join(f"{k}s" for k in kinds)}

    def facts(self) -> dict[str, Any]:
        """For `Examination.facts`."""
        agents = {"masked_agents": self.masked, "late_agents": self.late, "early_agents": self.early}
        return {**{name: sorted(found) for name, found in agents.items()}, "takes_turns": self.takes_turns}


def _lists_of(value: Any, space: Space[Any] | None) -> Iterator[str]:
    """The types of tuples and lists in a value at places where its space expects an array."""
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items() if isinstance(value, Mapping) else ():
            yield from _lists_of(value.get(key), child)
    elif not isinstance(value, tuple | list):
        return
    elif isinstance(space, ARRAY_SPACES):
        yield "tuple" if isinstance(value, tuple) else "list"
    elif isinstance(space, spaces.Tuple):
        for part, child in zip(value, space.spaces):
            yield from _lists_of(part, child)


def _lists_in(mask: Any) -> Iterator[str]:
    """The types of tuples and lists of numbers in a mask; a tuple of arrays is a form of masks."""
    if isinstance(mask, Mapping):
        for part in mask.values():
            yield from _lists_in(part)
    elif isinstance(mask, tuple | list):
        if any(isinstance(part, Mapping | tuple | list | np.ndarray) for part in mask):
            for part in mask:
                yield from _lists_in(part)
        elif any(part is not None for part in mask):
            yield "tuple" if isinstance(mask, tuple) else "list"


def _few(agents: Sequence[str]) -> str:
    """The names of up to three agents, or how many there are."""
    return ", ".join(agents) if len(agents) <= 3 else f"{len(agents)} agents"


def in_words(facts: Mapping[str, Any]) -> str:
    """Describe the findings of `Traits`, and the state."""

    def which(text: str, agents: Sequence[str]) -> str:
        return f"{text} ({_few(agents)})" if agents else f"no {text}"

    return "; ".join([
        which("action masks", facts["masked_agents"]),
        "no state" if facts["state"] is None else f"a state, {facts['state']}",
        which("agents that join late", facts["late_agents"]),
        which("agents that end before others", facts["early_agents"]),
        *(["agents take turns"] if facts["takes_turns"] else []),
    ])  # fmt: skip


def _findings_in(env: MultiAgentEnv, dicts: Sequence[dict[Any, Any]], types: dict[str, set[str]]) -> Iterator[Finding]:
    """Findings about the two dicts of a reset or the five of a step; adds names of types to `types`."""
    observations, *results, infos = dicts
    for agent, observation in observations.items():
        space = env.observation_spaces.get(agent)
        if env.possible_agents and agent not in env.possible_agents:
            yield _finding("unknown agent", agent=agent)
        elif space is None:
            yield _finding("no observation space", agent=agent)
        elif (finding := mismatch(observation, space, f"the observation of {agent}")) is not None:
            yield finding
    for agent, space in env.action_spaces.items():
        mask = mask_of(observations.get(agent), infos.get(agent))
        if not allows_nothing(mask) and for_sample(space, mask) is None:
            yield _finding("mask of another form", agent=agent, space=space)
    if results:
        rewards, terminateds, truncateds = results
        types["reward"] |= {type(reward).__name__ for reward in rewards.values()}
        types["flag"] |= {type(flag).__name__ for flags in results[1:] for flag in flags.values()}
        for agent, reward in rewards.items():
            name, space = f"the reward of {agent}", env.reward_spaces.get(agent)
            if (error := reward_error(reward)) is not None:
                yield Finding(Question.API, PROBLEM, f"{name} {error[0]}", error[1])
            elif space is None and is_vector(reward):
                yield _finding("undeclared vector", agent=agent, kind=type(reward).__name__)
            elif space is not None and (finding := mismatch(reward, space, name)) and finding.severity is PROBLEM:
                yield finding._replace(advice=f"{finding.advice} (reward_space)")
        for name, flags in (("termination", terminateds), ("truncation", truncateds)):
            for agent, flag in flags.items():
                if not is_flag(flag):
                    finding = _finding("flag", name=name, agent=agent, kind=type(flag).__name__)
                    yield finding._replace(severity=REMARK if isinstance(flag, int) else PROBLEM)
        if env.rules is Rules.DICT and ALL not in terminateds:
            yield _finding("no __all__")
    for key, info in infos.items():
        if not is_empty_info(info) and (reason := pickling_error(info)) is not None:
            yield _finding("unpicklable info", key=key, reason=reason)


_KNOWN = (spaces.Dict, spaces.Tuple, spaces.Discrete, *ARRAY_SPACES)


def mismatch(value: Any, space: Space[Any], name: str = "") -> Finding | None:
    """The finding that a value does not fit a space: a problem if it stops a `ParallelEnv` or ruins training."""

    def finding(what: str, advice: str, severity: Severity = PROBLEM) -> Finding:
        return Finding(Question.SPACES, severity, f"{name} {what}".lstrip(), advice)

    if type(space) not in _KNOWN and space.contains(value):
        return None  # the simulator's own class of space decides
    if isinstance(space, ARRAY_SPACES):
        parts = _array_mismatch(value, space)
        return parts and finding(*parts)
    if isinstance(space, spaces.Dict):
        keys = list(space.spaces)
        if not isinstance(value, Mapping):
            return finding(f"is {_brief(value)}, but its space says a dict", f"return a dict with {keys}")
        if value.keys() != space.spaces.keys():
            return finding(f"has the keys {list(value)}, but its space says {keys}", "return exactly these keys")
        children: Iterable[tuple[Any, Space[Any]]] = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            got = f"{len(value)} values" if isinstance(value, tuple | list) else type(value).__name__
            return finding(f"is {got}, but its space says a tuple of {len(space.spaces)}", "return such a tuple")
        children = enumerate(space.spaces)
    elif space.contains(value):
        return None
    else:
        advice = "return what is in the space, or declare another one"
        return finding(f"is {_brief(value)}, which is not in {space}", advice)
    inside = [mismatch(value[key], child, f"{name}[{key!r}]") for key, child in children]
    return min(filter(None, inside), key=lambda one: one.severity is not PROBLEM, default=None)


def _array_mismatch(value: Any, space: Any) -> tuple[str, str, Severity] | None:
    """How an array does not fit a space: the end of a sentence, the advice, and the severity; None if it fits."""
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, value))
        return f"is a dict with the keys {keys}", f"declare a spaces.Dict with these keys in place of {space}", PROBLEM
    try:
        array = np.asarray(value)
    except ValueError:
        return f"is {_brief(value)}, which is not an array", "return an array of one dtype", PROBLEM
    if array.shape != space.shape:
        advice = f"return arrays of shape {space.shape}, or declare a space of shape {array.shape}"
        return f"has shape {array.shape}, but its space says {space.shape}", advice, PROBLEM
    is_array, severity = isinstance(value, np.ndarray | np.generic), REMARK
    try:
        as_array(value, space.dtype, space.shape)
    except Mismatch:
        is_array, severity = True, PROBLEM
    if is_array and not np.can_cast(array.dtype, space.dtype):
        advice = f"return arrays of this dtype, as with .astype(np.{space.dtype}), or declare dtype=np.{array.dtype}"
        return f"has dtype {array.dtype}, but its space says {space.dtype}", advice, severity
    if array.dtype.kind == "f" and np.isnan(array).any():
        return "contains NaN", "find where it comes from, such as a division by zero", PROBLEM
    low, high = (np.broadcast_to(bound, array.shape) for bound in bounds(space))
    outside = np.argwhere((array < low) | (array > high))
    if not len(outside):
        return None
    first = tuple(map(int, outside[0]))
    what = f"is {array[first]}{f' at {list(first)}' if first else ''}, but its space says {low[first]} to {high[first]}"
    return what, "widen the space's bounds, or clip what is returned", REMARK


def reward_error(reward: Any) -> tuple[str, str] | None:
    """What is wrong with a reward, and the advice; None if it is a finite number, or an array of several."""
    if isinstance(reward, Real | np.bool_):
        advice = "find where it comes from: one such number ruins what is trained with it"
        return None if math.isfinite(reward) else (f"is {reward}", advice)
    if isinstance(reward, np.ndarray | list | tuple) and np.asarray(reward).dtype.kind in "biuf":
        return None
    return f"is {_brief(reward)}, which is not a number", "return a float for each agent"


def is_flag(flag: Any) -> bool:
    """Whether it is a bool, Python's or NumPy's."""
    return isinstance(flag, bool | np.bool_)


def pickling_error(value: Any) -> str | None:
    """Why a value cannot be pickled and unpickled; None if it can."""
    try:
        pickled = dumps(value)
    except Exception as error:  # a simulator's class may raise anything
        return in_brief(error) + where_unpicklable(value)
    try:
        loads(pickled)
    except Exception as error:
        return in_brief(error)
    return None


def _brief(value: Any) -> str:
    text, kind = repr(value), type(value).__name__
    return f"{text} ({kind})" if len(text) <= 40 and text[:1] != "<" else f"of type {kind}"


def fingerprint(value: Any, space: Space[Any] | None = None) -> str:
    """A text that is the same for values that are the same to the bit, types included.

    Arrays count in the dtype of the space, as `ParallelEnv` returns them; other objects by type and attributes.
    """
    return hashlib.blake2b(b"".join(_bytes_of(value, space)), digest_size=8).hexdigest()


def _bytes_of(value: Any, space: Space[Any] | None, above: tuple[int, ...] = ()) -> Iterator[bytes]:
    """The bytes of a fingerprint; `above` has the ids of the containers of the value, to end cycles."""
    if id(value) in above:
        yield f"^{above.index(id(value))}".encode()
        return
    if isinstance(space, ARRAY_SPACES) and np.asarray(value).dtype.kind in "biuf":
        value = np.asarray(value).astype(space.dtype)
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        yield f"{type(value).__name__}{value.dtype.str}{value.shape}".encode()
        yield value.tobytes()
        return
    within = (*above, id(value))
    yield f"{type(value).__name__}(".encode()
    if isinstance(value, Mapping):
        children = space.spaces if isinstance(space, spaces.Dict) else {}
        # The order of keys is the space's if there is one; else it counts.
        for key in dict.fromkeys([*(key for key in children if key in value), *value]):
            yield repr(key).encode()
            yield from _bytes_of(value[key], children.get(key), within)
    elif isinstance(value, list | tuple | np.ndarray):
        parts = space.spaces if isinstance(space, spaces.Tuple) else ()
        for part, child in itertools.zip_longest(value, parts[: len(value)]):
            yield from _bytes_of(part, child, within)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, int | float | str | bytes | complex | None.__class__):
        yield (value.hex() if isinstance(value, float) else repr(value)).encode()
    elif len(above) < 10:
        # An object's own text may show its address in memory.
        yield from _bytes_of(getattr(value, "__dict__", None), None, within)
    yield b")"


# -- all probes of one environment -------------------------------------------------------------------------------------


def examine(job: Job, backends: list[str], on_start: Callable[[str], None] = lambda name: None) -> Examination:
    """Run all probes, `job` first, and compare their runs; `on_start` gets the name of each probe that starts."""
    ((_, result),) = run_probes([job], 1, on_start)
    if Question.RUNS not in result.checked:
        return result
    facts, first = result.facts, {**result.traces}
    defined = facts.get("defined", {})
    step_s, p99_s, reset_s = facts["step"]["median_s"], facts["step"]["p99_s"], facts["reset"]["median_s"]
    shares_process = facts.get("shares_process", True)
    job = replace(job, shares_process=shares_process)
    again = replace(job, probe="again", steps=facts["steps"])
    # Each test of another project runs by itself, so that the others run if one hangs or crashes, with as many steps as
    # take about as long as the other probes. Its timeout is for all of its calls together.
    cycles = int(min(max(job.seconds / step_s, 10), 500))
    seconds = max(job.seconds, cycles * step_s + 10 * reset_s + facts["construct_s"])
    test = replace(job, probe="official", cycles=cycles, seconds=seconds)
    others = [replace(again, generators=1)]
    others += [replace(test, test=name) for name in facts.pop("official") if shares_process or name not in SEED_TESTS]
    # Environments that need a process each can only live in workers that are processes.
    others += [replace(job, probe="parallel", backend=one) for one in backends if shares_process or one == "process"]
    result.checked.add(Question.API)
    traces: dict[str, dict[int, Trace]] = {}
    for done, outcome in run_probes(others, usable_cpus(), on_start):
        result.merge(outcome)
        if outcome.traces:
            traces[done.name] = outcome.traces
        facts |= {"defined": defined}  # the probe `parallel` sees the constructor only
        if Question.API in outcome.checked:  # a test of another project came to its end
            facts["tests"] = sorted([*facts.get("tests", ()), done.test])
    if (repeated := traces.pop("again", None)) is not None:
        result.checked.add(Question.DETERMINISM)
        if (difference := _difference(first, repeated)) is not None:
            index, where = difference
            first_episodes = {}
            for env_id, trace in first.items():
                resets = [index for index, (is_step, _) in enumerate(trace) if not is_step]
                first_episodes[env_id] = trace[: resets[1]] if len(resets) > 1 else trace
            unseeded = index >= len(first_episodes[0]) and facts["takes_seed"]
            # Then remarks on determinism add nothing, and only the repeatable part of a run is compared.
            result.findings = [one for one in result.findings if one[:2] != (Question.DETERMINISM, REMARK)]
            ((_, third),) = run_probes([again], 1, on_start)
            of_process = third.traces and _difference(first, third.traces) is None
            name = "random of the process" if of_process else "random without a seed" if unseeded else "random"
            of_generators = of_process and facts["generators"]
            if of_generators:
                where += f"; it uses {' and '.join(facts['generators'])}"
            finding = _finding(name, where=where)
            if of_generators:
                finding = finding._replace(advice=f"{_ISOLATED}; or {finding.advice}")
            if not facts["takes_seed"]:
                finding = finding._replace(advice=f"let `reset` take a `seed`; {finding.advice}")
            finding = finding._replace(where=_method("reset", defined))
            result.add([finding])
            first, traces = first_episodes, traces if unseeded else {}
    # Environments of "serial" run in the process that has loaded the script.
    of_serial = traces.get("serial", {})
    serial_differs = any(first_difference(first[one], of_serial[one]) for one in first.keys() & of_serial.keys())
    for backend, together in traces.items():
        question = Question.of_backend(backend)
        result.checked.add(question)
        for env_id in first.keys() & together.keys():
            if (difference := first_difference(first[env_id], together[env_id])) is not None:
                name = "unlike the script" if backend == "process" and not serial_differs else "shared"
                finding = _finding(name, env_id=env_id, where=difference[1])
                if facts.get("generators"):
                    names = " and ".join(facts["generators"])
                    finding = finding._replace(advice=f"it uses {names}: pass isolate_rng=True; {finding.advice}")
                method = "step" if re.search(r", in step \d+$", difference[1]) else "reset"
                result.add([finding._replace(question=question, where=_method(method, defined))])
                break
    if p99_s > max(5 * step_s, 1e-3):
        result.add([_finding("uneven steps", ratio=p99_s / step_s)])
    if reset_s > max(20 * step_s, 1e-2):
        result.add([_finding("long resets", ratio=reset_s / step_s)])
    if step_s < 20e-6:
        result.add([_finding("short steps", us=1e6 * step_s)])
    return result


def _difference(first: dict[int, Trace], again: dict[int, Trace]) -> tuple[int, str] | None:
    """The first difference of two runs with the same number of steps, and of what follows them."""
    return first_difference(first[0] + first[AFTER], again[0] + again.get(AFTER, []))


# -- the report in the terminal ----------------------------------------------------------------------------------------


def entries(result: Examination) -> list[tuple[Finding, list[str]]]:
    """The findings as `show` prints them, with backends: the same finding about several backends is one entry."""
    groups: dict[Any, tuple[Finding, list[str]]] = {}
    for one in result.findings:
        name = one.question.name.lower()
        about_backend = name in BACKENDS
        _, backends = groups.setdefault((one.severity, one.what) if about_backend else one, (one, []))
        backends.extend([name] * about_backend)
    return [*groups.values()]


def next_step(result: Examination) -> str:
    """What to do next."""
    problems = sum(finding.severity is PROBLEM for finding, _ in entries(result))
    name = shlex.quote(result.environment)
    if problems:
        what = "the problem" if problems == 1 else f"the {problems} problems"
        return f"fix {what} above, then run marl-parallel check {name} again"
    return f"run marl-parallel tune {name} to find the number of workers"


def show(result: Examination) -> None:
    """Print the answers, the cost of steps, and each finding with its advice."""
    console, facts, title = Console(highlight=False, soft_wrap=True), result.facts, result.environment
    if "kind" in facts:
        count = len(facts["agents"])
        agents = f"{count} agent{'s' * (count != 1)}" if count else "agents not known beforehand"
        title += f": {facts['kind'][0].lower()}{facts['kind'][1:]}, {agents}"
    console.print(f"[bold]{escape(title)}")
    table = Table(show_header=False)
    colours = {"yes": "green", "even": "green", "no": "red", "not checked": "dim"}
    for question, answer in result.answers().items():
        table.add_row(question.value, f"[{colours.get(answer, 'yellow')}]{answer}")
    console.print(table)
    if "step" in facts:
        costs = [
            f"{method} {_duration(facts[method]['median_s'])} (median), {_duration(facts[method]['p99_s'])} (p99)"
            for method in ("step", "reset")
        ]
        console.print(f"It costs: {'; '.join([*costs, 'constructor ' + _duration(facts['construct_s'])])}")
    if "reward_types" in facts:
        rewards, flags = (", ".join(facts[f"{part}_types"]) for part in ("reward", "flag"))
        console.print(f"Types: rewards {rewards}; flags {flags}")
        console.print(f"Seen: {escape(in_words(facts))}", soft_wrap=True)
    if facts.get("tests"):
        console.print(f"Tests run: {', '.join(facts['tests'])}")
    for one, backends in entries(result):
        where = f" (backend: {', '.join(backends)})" if backends else ""
        colour = "red" if one.severity is PROBLEM else "yellow"
        console.print(f"\n[{colour}]{one.severity.value}[/]: {escape(one.what)}{where}")
        if one.where:
            console.print(f"  where: {escape(one.where)}")
        console.print(f"  what to do: {escape(one.advice)}")
    if result.findings:
        console.print()


def _duration(seconds: float) -> str:
    """Seconds in a unit that fits: 0.0213 is 21.3 ms."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
