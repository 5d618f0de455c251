"""The probes of `marl-parallel check`: what they look at, what they can find, and how they run in a worker.

A probe is a generator that runs in the worker process of a `ParallelEnv`. It yields a `Doing` before each call of the
simulator, so that each such call is one call of the worker::

    check.py                              worker process
    env.call("advance")  -------------->  Probe.advance: the probe runs to its next `yield`
                         <--------------  what it has found, and what it does next

If the simulator then crashes or hangs, `ParallelEnv` raises `WorkerCrashed` or `WorkerTimeout`, and everything that
was found before has arrived. The probes:

`alone`     one environment by itself: spaces, types, pickling, processes left behind, costs; then two in one process
`again`     the same run in a fresh process, for comparison
`official`  the tests that PettingZoo and Gymnasium have for their environments
`parallel`  three environments in a `ParallelEnv`, for comparison
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
import os
import pickle
import random
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import gymnasium
import numpy as np
import pettingzoo  # type: ignore[import-untyped]
import psutil
from gymnasium import Space, spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from marl_parallel.action_masks import allows_nothing, for_sample, mask_of
from marl_parallel.adapters import AgentID, InvalidAgents, MultiAgentEnv, NotAnEnvironment, Rules, adapt
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.backends import descendants
from marl_parallel.cli.target import CommandError, constructor_of, in_brief
from marl_parallel.core.construction import construct_one
from marl_parallel.core.episode import Episode
from marl_parallel.core.exclusive import end_forked_copy
from marl_parallel.core.ledger import Ledger
from marl_parallel.core.pickling import dumps
from marl_parallel.core.reports import first_line, place
from marl_parallel.core.spaces import is_vector
from marl_parallel.core.transition import ALL, Transition, is_empty_info
from marl_parallel.parallel_env import START_TIMEOUT_S, ParallelEnv
from marl_parallel.types import ParallelEnvError

STRETCH_S = 0.1
"""How long steps are timed in one call of the worker: one call for each would show in what short steps cost."""
AFTER = -1
"""The key, in place of an environment's number, of the trace of what follows the first run."""
_GONE_WITHIN_S = 2.0
_STARTUP_S = 10.0
_RESETS = 8
_NUM_ENVS = 3
_MULTIPROCESSING = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that `multiprocessing` keeps until its interpreter ends."""


# -- findings ----------------------------------------------------------------------------------------------------------


class Severity(str, Enum):
    """How bad a finding is: a problem breaks something that training loops rely on, a remark is good to know."""

    PROBLEM = "problem"
    REMARK = "remark"


PROBLEM, REMARK = Severity.PROBLEM, Severity.REMARK


class Question(str, Enum):
    """What `check` asks; the text is true if nothing is found."""

    RUNS = "It runs alone: constructor, reset, step and close"
    API = "It keeps to its API"
    SPACES = "Observations keep to their spaces"
    DETERMINISM = "The same seed and actions give the same results"
    PICKLING = "Constructor, infos and exceptions pickle"
    PROCESSES = "It leaves no processes behind"
    SERIAL = 'Several environments give the same results with backend="serial"'
    THREAD = 'Several environments give the same results with backend="thread"'
    PROCESS = 'Several environments give the same results with backend="process"'
    COST = "Step and reset times are even"

    @classmethod
    def of_backend(cls, backend: str) -> Question:
        """The question about a backend."""
        return cls[backend.upper()]


_ABOUT_BACKENDS = (Question.SERIAL, Question.THREAD, Question.PROCESS)
BACKENDS = tuple(question.name.lower() for question in _ABOUT_BACKENDS)
"""The backends that can be checked."""


class Finding(NamedTuple):
    """Something that is not as it should be: what was seen and what to do about it, in a sentence each."""

    question: Question
    severity: Severity
    what: str
    advice: str


Trace: TypeAlias = list[tuple[bool, dict[str, str]]]
"""For each reset and step: whether it is a step, and the fingerprints of its values, such as "reward of agent_0"."""


@dataclass
class Examination:
    """What is known of an environment, or what one probe has found.

    Attributes:
        environment: As it was named.
        facts: What it is and what it costs.
        findings: Problems first, then remarks, in the order of the questions.
        checked: The questions that were examined to the end.
        traces: Of runs, by the number of the environment; `AFTER` for what follows the first one's.
    """

    environment: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    checked: set[Question] = field(default_factory=set)
    traces: dict[int, Trace] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Whether there are no problems."""
        return all(finding.severity is not PROBLEM for finding in self.findings)

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings, each once, and sort all."""
        self.findings = sorted(
            dict.fromkeys([*self.findings, *findings]),
            key=lambda finding: (finding.severity is not PROBLEM, list(Question).index(finding.question)),
        )

    def merge(self, other: Examination) -> None:
        """Add everything that another examination has found."""
        tests = sorted({*self.facts.get("tests", ()), *other.facts.get("tests", ())})
        self.facts |= other.facts | ({"tests": tests} if tests else {})
        self.checked |= other.checked
        self.traces |= other.traces
        self.add(other.findings)

    def merged(self) -> list[tuple[Finding, list[str]]]:
        """Each finding with the backends that show it: the same one with several backends is there once."""
        backends: dict[Finding, list[str]] = {}
        for finding in self.findings:
            names = [finding.question.name.lower()] if finding.question in _ABOUT_BACKENDS else []
            alike = (one for one in backends if names and one.question in _ABOUT_BACKENDS and one.what == finding.what)
            backends.setdefault(next(alike, finding), []).extend(names)
        return list(backends.items())

    def answers(self) -> Mapping[Question, str]:
        """By question: "yes", "no", "yes, with a remark" where there are remarks only, or "not checked".

        Example:
            >>> examination = Examination("it", checked={Question.RUNS})
            >>> examination.answers()[Question.RUNS], examination.answers()[Question.API]
            ('yes', 'not checked')
        """
        answers = {}
        for question in Question:
            severities = {finding.severity for finding in self.findings if finding.question is question}
            if PROBLEM in severities:
                answers[question] = "no"
            elif question not in self.checked:
                answers[question] = "not checked"
            else:
                answers[question] = "yes, with a remark" if severities else "yes"
        return answers

    def as_json(self) -> dict[str, Any]:
        """Everything but the traces, in values that JSON knows."""
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


# -- probes in a worker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a probe does.

    Attributes:
        probe: The name of a probe, of `PROBES`.
        environment: As named on the command line; `env_kwargs` too.
        timeout: Seconds that each call of the simulator may take.
        seconds: The most seconds that a run lasts.
        steps: The most steps that a run has.
        seed: Of the first environment.
        global_seed: Seeds the process-wide generators.
        hash_seed: `PYTHONHASHSEED` of the worker: it decides the order of sets of strings.
        backend: Of the `ParallelEnv` that the probe `parallel` makes.
        cycles: How many steps a test of another project takes.
        test: The one test of another project to run; empty for all.
        shares_process: Whether several environments can live in one process.
    """

    probe: str
    environment: str
    env_kwargs: str
    timeout: float
    seconds: float
    steps: int
    seed: int = 42
    global_seed: int = 42
    hash_seed: int = 0
    backend: str = "serial"
    cycles: int = 100
    test: str = ""
    shares_process: bool = True

    @property
    def limit_s(self) -> float:
        """Seconds that each call of the worker may take: a test, or a call of `ParallelEnv`, makes many of its own."""
        longer = {"official": self.timeout + 20 * self.seconds, "parallel": _NUM_ENVS * self.timeout + _STARTUP_S}
        return longer.get(self.probe, self.timeout)

    @property
    def question(self) -> Question:
        """The question that a crash or a hang answers, unless the probe says which."""
        backend = Question.of_backend(self.backend)
        of_probe = {"official": Question.API, "again": Question.DETERMINISM, "parallel": backend}
        return of_probe.get(self.probe, Question.RUNS)

    def doing(self, what: str) -> Doing:
        """A call of the simulator; if a test of another project ends in a crash or a hang, nothing breaks here."""
        return Doing(what, self.question, REMARK if self.probe == "official" else PROBLEM)


class Doing(NamedTuple):
    """What a probe does next, and how a crash or a hang in it counts; with the advice, if it is not the usual one."""

    what: str
    question: Question
    severity: Severity
    advice: str = ""


Steps: TypeAlias = Generator[Doing, None, Any]
"""A probe or a part of one."""

Calling: TypeAlias = Callable[[str, Callable[[], Any]], Steps]
"""Calls a function of the simulator after a `yield` that names it; returns what the function returns."""


class Stopped(Exception):
    """The probe cannot go on; a finding says why."""


class Probe:
    """The environment in a probe's worker: it is never stepped, its `advance` is called.

    What simulators print is not shown.

    Attributes:
        job: What the probe does.
        found: What it has found since the last `advance`.
        took_s: Seconds that the latest call of the simulator took.
    """

    possible_agents = ("nobody",)
    observation_space = action_space = spaces.Dict({"nobody": spaces.Discrete(1)})

    def __init__(self, job: Job) -> None:
        self.job, self.found, self.took_s = job, Examination(job.environment), 0.0
        self._pid, self._kinds = os.getpid(), set[str]()
        self._steps = PROBES[job.probe](self)
        with open(os.devnull, "wb") as null:
            for output in (1, 2):
                os.dup2(null.fileno(), output)
        if sys.platform == "linux":
            descendants.adopt_orphans()  # to see whether the simulator leaves some

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Environments have this; it does nothing."""
        return {}, {}

    def step(self, actions: Any) -> Any:
        """Environments have this; it is never called."""
        raise NotImplementedError

    def advance(self) -> tuple[Examination, Doing | None]:
        """Run the probe to its next `yield`; returns what it has found, and what it does next; None at its end.

        Raises:
            CommandError: There is no such environment, or it cannot be imported.
        """
        doing = None
        try:
            doing = next(self._steps, None)
        except Stopped:
            pass  # a finding says why
        except CommandError:
            raise
        except (Exception, SystemExit) as error:
            what = f"what it returns cannot be looked at: {in_brief(error)}"
            self.find(self.job.question, PROBLEM, what, "return what its spaces say, and plain numbers and dicts")
        found, self.found = self.found, Examination(self.job.environment)
        return found, doing

    def find(self, question: Question, severity: Severity, what: str, advice: str, kind: str = "") -> None:
        """Add a finding, unless there has been one of its kind."""
        if (kind or what) not in self._kinds:
            self._kinds.add(kind or what)
            self.found.add([Finding(question, severity, what, advice)])

    def calling(self, doing: str, function: Callable[[], Any]) -> Steps:
        """Call the simulator; an exception becomes a finding, and ends the probe with `Stopped`."""
        yield self.job.doing(doing)
        try:
            return self.call(function)
        except (Exception, SystemExit, GeneratorExit) as error:
            self._find_raised(doing, error)
            raise Stopped from error

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the simulator, and end this process if the simulator has forked it."""
        begun = time.perf_counter()
        try:
            returned = function()
        except BaseException as error:
            if os.getpid() != self._pid:
                end_forked_copy(error)
            raise
        if os.getpid() != self._pid:
            end_forked_copy(None)
        self.took_s = time.perf_counter() - begun
        return returned

    def _find_raised(self, doing: str, error: BaseException) -> None:
        if isinstance(error, TypeError) and not _place_of(error):
            last = traceback.extract_tb(error.__traceback__)[-1].line or ""
            # An adapter raises it because of what the simulator returned, or, with Python's own error as the cause,
            # because the simulator could not be called.
            returned = last.startswith("raise ") and not isinstance(error.__cause__, TypeError)
            to_do = f"let {doing} return that" if returned else f"let {doing} take what its API says"
            what, question = str(error), Question.API
        else:
            what, question, to_do = _raises(doing, error), self.job.question, "fix that line"
            self.check_exception(error)
        self.find(question, PROBLEM, what, f"{to_do}; not everything can be checked before")

    def check_exception(self, error: BaseException) -> None:
        """Find out whether an exception of the simulator's pickles."""
        if (reason := pickling_error(error)) is not None:
            name = type(error).__name__
            advice = (
                f"let {name}.__init__ pass all of its arguments to super().__init__, and hold plain values only; "
                "else errors arrive as text, without the exception as their __cause__"
            )
            what = f"its exception {name} cannot be pickled and made again ({reason})"
            self.find(Question.PICKLING, REMARK, what, advice)


def _place_of(error: BaseException) -> str:
    return place("".join(traceback.format_exception(error)))


def _raises(doing: str, error: BaseException) -> str:
    where = _place_of(error)
    return f"{doing} raises{f', at {where}' if where else ''}: {in_brief(error)}"


# -- runs --------------------------------------------------------------------------------------------------------------


class Actor:
    """Draws the actions of one environment, by its action masks; the same seed draws the same actions."""

    def __init__(self, action_spaces: Mapping[Any, Space[Any]], seed: int) -> None:
        self._spaces = copy.deepcopy(action_spaces)
        self._rank = {agent: number for number, agent in enumerate(self._spaces)}
        for number, space in enumerate(self._spaces.values()):
            space.seed(seed + number)

    def __call__(self, acting: Sequence[AgentID], observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> Any:
        return self.draw(acting, {agent: mask_of(observations.get(agent), infos.get(agent)) for agent in acting})

    def draw(self, acting: Sequence[AgentID], masks: Mapping[Any, Any]) -> dict[AgentID, Any]:
        """Actions of those who act; a mask that allows nothing, or has another form than the space, is ignored."""
        in_order = sorted(acting, key=lambda agent: self._rank.get(agent, len(self._rank)))
        known = [(agent, space) for agent in in_order if (space := self._spaces.get(agent)) is not None]
        return {agent: space.sample(for_sample(space, masks.get(agent))) for agent, space in known}


class Solo:
    """One environment by itself: an adapted simulator and its `Episode`, as in a worker, without the transport.

    `Episode`, which says who acts and when an episode is over, calls this in place of the adapter, so that what the
    simulator returns is timed, and looked at before anything is added.

    Attributes:
        look: Called with what `reset` or `step` returned.
        took: Seconds of each call, by method.
    """

    look: Callable[[tuple[Any, ...]], None] | None = None

    def __init__(self, env: MultiAgentEnv, calling: Calling) -> None:
        self.env, self._calling = env, calling
        self.took: dict[str, list[float]] = {"reset": [], "step": []}
        as_env: Any = self
        self.episode = Episode(as_env, 0, AutoresetMode.DISABLED, Ledger(bytearray(Ledger.NBYTES)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, **keywords: Any) -> Any:
        return self._timed("reset", lambda: self.env.reset(**keywords))

    def step(self, actions: Any) -> Any:
        return self._timed("step", lambda: self.env.step(actions))

    def _timed(self, method: str, function: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        returned = function()
        self.took[method].append(time.perf_counter() - begun)
        if self.look is not None:
            self.look(returned)
        return returned

    def begin(self, seed: int | None = None) -> Steps:
        """Begin an episode, with the seed if the simulator takes one; returns the `Transition`."""
        keywords = {"seed": seed} if seed is not None and "seed" in self.env.reset_keywords else {}
        return (yield from self._calling("reset", lambda: self.episode.reset(keywords)))

    def act(self, actor: Actor, now: Transition) -> Steps:
        """Step with drawn actions; returns the `Transition`."""
        actions = actor(now.acting, now.observations, now.infos)
        return (yield from self._calling("step", lambda: self.episode.step(actions)))

    def run(self, seed: int, steps: int, seconds: float) -> Steps:
        """Step from a reset with this seed, until there are so many steps or seconds, but once at least.

        Returns:
            The trace, the number of steps, and the trace of a reset without a seed and a step that follow.
        """
        actor, space_of = Actor(self.env.action_spaces, seed), self.env.observation_spaces
        deadline = time.monotonic() + seconds
        now: Transition = yield from self.begin(seed)
        trace, taken = [_at_reset(space_of, now.observations, now.infos)], 0
        while taken < steps and (not taken or time.monotonic() < deadline):
            now = yield from self.act(actor, now)
            taken += 1
            trace.append(_at_step(space_of, *now[:5]))
            if _is_over(now):
                now = yield from self.begin()
                trace.append(_at_reset(space_of, now.observations, now.infos))
        # However slow the simulator is, one reset without a seed can be compared.
        now = yield from self.begin()
        after = [_at_reset(space_of, now.observations, now.infos)]
        now = yield from self.act(actor, now)
        return trace, taken, [*after, _at_step(space_of, *now[:5])]


def _is_over(now: Transition) -> bool:
    return bool(now.terminateds.get(ALL) or now.truncateds.get(ALL))


def _run_parallel(env: ParallelEnv, job: Job, calling: Calling) -> Steps:
    """Step the environments of a `ParallelEnv` with `auto_reset=False`; returns their traces."""
    action_spaces: Mapping[Any, Space[Any]] = env.action_space or {}
    space_of: Mapping[Any, Space[Any]] = env.observation_space or {}
    actors = [Actor(action_spaces, job.seed + env_id) for env_id in range(env.num_envs)]
    deadline = time.monotonic() + job.seconds
    first = yield from calling(".reset", env.reset)
    traces = [[_at_reset(space_of, *own)] for own in zip(*first)]
    for _ in range(job.steps):
        actions = [actor.draw(*known) for actor, known in zip(actors, zip(env.acting, env.action_masks))]
        results = yield from calling(".step", lambda actions=actions: env.step(actions))  # type: ignore[misc]
        over = []
        for env_id, own in enumerate(zip(*results)):
            traces[env_id].append(_at_step(space_of, *own))
            if own[2][ALL] or own[3][ALL]:
                over.append(env_id)
        if over:
            begun = yield from calling(".reset", lambda over=over: env.reset(env_ids=over))  # type: ignore[misc]
            for env_id, observations, infos in zip(over, *begun):
                traces[env_id].append(_at_reset(space_of, observations, infos))
        if time.monotonic() > deadline:
            break
    return traces


def _at_reset(space_of: Mapping[Any, Space[Any]], observations: Any, infos: Any) -> tuple[bool, dict[str, str]]:
    entry = {f"observation of {key}": fingerprint(value, space_of.get(key)) for key, value in observations.items()}
    return False, entry | {f"info of {key}": fingerprint(info) for key, info in infos.items()}


def _at_step(
    space_of: Mapping[Any, Space[Any]], observations: Any, rewards: Any, terminateds: Any, truncateds: Any, infos: Any
) -> tuple[bool, dict[str, str]]:
    _, entry = _at_reset(space_of, observations, infos)
    for part, values in (("reward", rewards), ("termination", terminateds), ("truncation", truncateds)):
        entry |= {f"{part} of {key}": fingerprint(value) for key, value in values.items() if key != ALL}
    return True, entry


class Difference(NamedTuple):
    """The first difference of two runs: in which value, step (0 at a reset) and reset, both counted from 1."""

    what: str
    step: int
    reset: int

    def __str__(self) -> str:
        return f"the {self.what}, in {f'step {self.step}' if self.step else f'reset {self.reset}'}"


def first_difference(one: Trace, other: Trace) -> Difference | None:
    """The first difference of two runs with the same actions; None if they agree as far as the shorter one goes.

    Example:
        >>> first_difference([(True, {"reward of a": "0f"})], [(True, {"reward of a": "0f"}), (False, {})])
        >>> str(first_difference([(True, {"reward of a": "0f"})], [(True, {"reward of a": "1e"})]))
        'the reward of a, in step 1'
    """
    steps = resets = 0
    for (is_step, mine), (_, theirs) in zip(one, other):
        steps, resets = steps + is_step, resets + (not is_step)
        for what in {**mine, **theirs}:
            if mine.get(what) != theirs.get(what):
                return Difference(what, steps if is_step else 0, resets)
    return None


# -- the probe `alone` -------------------------------------------------------------------------------------------------


def alone(probe: Probe) -> Steps:
    """One environment by itself: whether it works, what it returns, what it costs, what it leaves behind."""
    job = probe.job
    constructor = yield from _imported(probe)
    before = _started()
    yield Doing("pickling the constructor", Question.PICKLING, PROBLEM)
    if (reason := probe.call(lambda: pickling_error(constructor))) is not None:
        what = f"the constructor cannot be pickled ({reason}), so no worker process can be given it"
        advice = "create what does not pickle (locks, connections, windows, open files) when the constructor is called"
        probe.find(Question.PICKLING, PROBLEM, what, advice)
    solo: Solo = yield from _made(probe, constructor)
    env = solo.env
    probe.found.facts |= {
        "kind": getattr(type(env), "kind", type(env).__name__),
        "rules": env.rules.value,
        "agents": [str(agent) for agent in env.possible_agents],
        "takes_seed": "seed" in env.reset_keywords,
        "official": _names_of_tests(env),
        "construct_s": probe.took_s,
    }
    _check_action_spaces(probe, env)
    inspector = Inspector(probe, env)
    solo.look = inspector.look
    trace, steps, after = yield from solo.run(job.seed, job.steps, job.seconds)
    solo.look = None
    probe.found.traces |= {0: trace, AFTER: after}
    types = {f"{part}_types": sorted(names) for part, names in inspector.types.items()}
    probe.found.facts |= {"steps": steps, **types}
    probe.found.checked.add(Question.SPACES)
    second_trace, *_ = yield from solo.run(job.seed, min(job.steps, 20), job.seconds)
    where = first_difference(second_trace, trace)
    if where is not None and "seed" in env.reset_keywords:
        what = f"reset(seed={job.seed}) of a used environment gives another episode than of a fresh one: {where}"
        probe.find(Question.DETERMINISM, REMARK, what, "set everything back in `reset`, also counters and generators")
    varied = yield from _count_beginnings(solo, [None] * _RESETS)
    varied_with_seeds = yield from _count_beginnings(solo, range(job.seed, job.seed + _RESETS))
    yield from _measure_cost(probe, solo)
    yield from probe.calling("close", env.close)
    probe.found.checked.add(Question.RUNS)
    _check_nothing_left(probe, _started() - before, "close")
    other: Solo = yield from _made(probe, constructor, 1)
    other_trace, *_ = yield from other.run(job.seed + 1, job.steps, job.seconds)
    probe.found.traces[1] = other_trace
    if varied > 1:
        _check_seed_matters(probe, varied_with_seeds, trace[0] == other_trace[0])
    yield from _check_two_in_one_process(probe, other, constructor)
    yield from _provoke_exceptions(probe, constructor)
    probe.found.checked.add(Question.PICKLING)


def _imported(probe: Probe) -> Steps:
    yield probe.job.doing("the import")
    try:
        return constructor_of(probe.job.environment, probe.job.env_kwargs)
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        raise CommandError(in_brief(error), "--debug shows the whole traceback") from error


def _made(probe: Probe, constructor: Callable[..., Any], env_id: int = 0) -> Steps:
    """Construct an environment; returns a `Solo`."""
    random.seed(probe.job.global_seed + env_id)
    np.random.seed(probe.job.global_seed + env_id)
    seed = probe.job.seed + env_id
    doing = "the constructor"
    simulator = yield from probe.calling(doing, lambda: construct_one(constructor, seed=seed, env_id=env_id))
    construct_s = probe.took_s
    yield probe.job.doing("reading its spaces")
    try:
        env = probe.call(lambda: adapt(simulator))
    except NotAnEnvironment as error:
        what, advice = f"it is no environment: {error}", "return one of the kinds that the README lists"
        probe.find(Question.API, PROBLEM, what, advice)
        raise Stopped from error
    except InvalidAgents as error:
        what, advice = f"its agents cannot be told apart: {error}", "give every agent a name of its own"
        probe.find(Question.API, PROBLEM, what, advice)
        raise Stopped from error
    probe.took_s = construct_s
    return Solo(env, probe.calling)


def _check_action_spaces(probe: Probe, env: MultiAgentEnv) -> None:
    unknown = [agent for agent in env.possible_agents if agent not in env.action_spaces]
    if unknown or not env.action_spaces:
        who = f"agent {unknown[0]!r} declares" if unknown else "its agents declare"
        what = f"{who} no action space, so there are no actions to step it with"
        probe.find(Question.API, PROBLEM, what, "let it have `possible_agents`, and a space for each of them")
        raise Stopped


def _count_beginnings(solo: Solo, seeds: Iterable[int | None]) -> Steps:
    """How many different first observations there are."""
    first = set()
    for seed in seeds:
        now: Transition = yield from solo.begin(seed)
        first.add(fingerprint(now.observations))
    return len(first)


def _check_seed_matters(probe: Probe, varied_with_seeds: int, begin_alike: bool) -> None:
    """Whether episodes, which vary, vary with the seed, and environments with it."""
    if varied_with_seeds == 1:
        what = "the seed is ignored: episodes vary, but all environments begin alike whatever the seed of `reset`"
        advice = "make the generator anew in `reset` where a seed is given (gymnasium.utils.seeding.np_random)"
        probe.find(Question.DETERMINISM, PROBLEM, what, advice)
    elif begin_alike:
        what = "it takes no seed: episodes vary, but those of all environments are alike"
        advice = "let `reset` take a `seed`, and make the generator from it (gymnasium.utils.seeding.np_random)"
        probe.find(Question.DETERMINISM, PROBLEM, what, advice)


def _measure_cost(probe: Probe, solo: Solo) -> Steps:
    """Time steps and resets, many of them in each call of the worker."""
    solo.took = {"step": [], "reset": []}
    actor, episode = Actor(solo.env.action_spaces, probe.job.seed), solo.episode
    now: Transition = yield from solo.begin()
    deadline = time.perf_counter() + probe.job.seconds

    def stretch() -> None:
        nonlocal now
        pause = min(time.perf_counter() + STRETCH_S, deadline)
        while True:
            over = _is_over(now)
            now = episode.reset({}) if over else episode.step(actor(now.acting, now.observations, now.infos))
            if time.perf_counter() > pause:
                return

    while time.perf_counter() < deadline or not solo.took["step"]:
        yield from probe.calling("a step or reset", stretch)
    for method, seconds in solo.took.items():
        median, p99 = (float(np.percentile(seconds, percent)) for percent in (50, 99))
        probe.found.facts[method] = {"count": len(seconds), "median_s": median, "p99_s": p99}
    probe.found.checked.add(Question.COST)


ONE_PER_PROCESS = (
    "one simulation per process: pass envs_per_worker=1 to ParallelEnv, so that each environment has a worker process "
    'of its own; backend="serial" and "thread" have one process for all'
)


def _check_two_in_one_process(probe: Probe, first: Solo, constructor: Callable[..., Any]) -> Steps:
    """Whether a second environment can be made and stepped while the first is open; both are closed.

    If this crashes or hangs, the fact `shares_process` has been sent before.
    """
    probe.found.facts["shares_process"] = False
    seed, doing = probe.job.seed, ""

    def calling(method: str, function: Callable[[], Any]) -> Steps:
        nonlocal doing
        doing = f"with another environment open in the same process, {method}"
        yield Doing(doing, Question.RUNS, REMARK, ONE_PER_PROCESS)
        return probe.call(function)

    try:
        make = functools.partial(construct_one, constructor, seed=seed + 2, env_id=2)
        simulator = yield from calling("the constructor", make)
        both, begun = [Solo(first.env, calling), Solo(adapt(simulator), calling)], []
        for solo in both:
            begun.append((yield from solo.begin(seed)))
        for solo, now in zip(both, begun):
            yield from solo.act(Actor(solo.env.action_spaces, seed), now)
        yield from calling("close", both[1].env.close)
    except (Exception, SystemExit) as error:
        probe.find(Question.RUNS, REMARK, _raises(doing, error), ONE_PER_PROCESS)
    else:
        probe.found.facts["shares_process"] = True
    yield from probe.calling("close", first.env.close)


def _provoke_exceptions(probe: Probe, constructor: Callable[..., Any]) -> Steps:
    """Step an environment before its first reset, and with actions that make no sense, to see what it raises."""
    for doing, reset in (("a step before the first reset", False), ("a step with actions that make no sense", True)):
        solo: Solo = yield from _made(probe, constructor, 2)
        if reset:
            yield from solo.begin(probe.job.seed)
        actions: dict[Any, Any] = dict.fromkeys(solo.env.possible_agents, object())
        yield Doing(doing, Question.API, REMARK)
        try:
            probe.call(functools.partial(solo.env.step, actions))
        except (Exception, SystemExit) as error:
            probe.check_exception(error)
        with contextlib.suppress(Exception):  # such a step may have broken it
            probe.call(solo.env.close)


def _started() -> set[psutil.Process]:
    """The processes that this one has started, and that these have started."""
    return {*psutil.Process().children(recursive=True)}


def _check_nothing_left(probe: Probe, new: set[psutil.Process], after: str) -> None:
    deadline = time.monotonic() + _GONE_WITHIN_S
    while (left := _command_lines(new & _started())) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        what = f"{after}() leaves {len(left)} process{'es' * (len(left) > 1)} behind: {left[0]}"
        advice = "end them in `close`, and wait for them: each restart would leave more of them"
        probe.find(Question.PROCESSES, PROBLEM, what, advice)
    probe.found.checked.add(Question.PROCESSES)


def _command_lines(processes: Iterable[psutil.Process]) -> list[str]:
    """Of those that live and are the simulator's."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()).strip()[:80])
    return [line for line in found if not any(name in line for name in _MULTIPROCESSING)]


# -- the other probes --------------------------------------------------------------------------------------------------


def again(probe: Probe) -> Steps:
    """The first run once more, with as many steps, however long they take."""
    constructor = yield from _imported(probe)
    solo: Solo = yield from _made(probe, constructor)
    trace, _, after = yield from solo.run(probe.job.seed, probe.job.steps, math.inf)
    probe.found.traces |= {0: trace, AFTER: after}


def parallel(probe: Probe) -> Steps:
    """Three environments, two of them in the same worker if a process can have two."""
    job = probe.job
    constructor = yield from _imported(probe)
    before = _started()
    limit = None if job.backend == "serial" else job.timeout
    options: dict[str, Any] = {"num_workers": 2} if job.shares_process else {"envs_per_worker": 1}
    options |= {"step_timeout": limit, "reset_timeout": limit, "start_timeout": limit or START_TIMEOUT_S}

    def calling(method: str, function: Callable[[], Any]) -> Steps:
        yield job.doing(f'ParallelEnv(backend="{job.backend}"){method}')
        return probe.call(function)

    def make() -> ParallelEnv:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of more workers than CPUs
            return ParallelEnv([constructor] * _NUM_ENVS, False, job.seed, backend=job.backend, **options)

    try:
        env: ParallelEnv = yield from calling("", make)
        try:
            traces = yield from _run_parallel(env, job, calling)
            probe.found.traces |= dict(enumerate(traces))
        finally:
            yield from calling(".close", env.close)
    except (ParallelEnvError, TypeError, ValueError, OSError) as error:
        to_do = str(error).partition("What to do: ")[2].partition(".\n")[0]
        what = re.sub(r" at 0x[0-9a-f]+", "", first_line(error))
        advice = to_do or "fix what it says; the error is that of ParallelEnv"
        probe.find(job.question, PROBLEM, f"in a ParallelEnv: {what}", advice)
    else:
        _check_nothing_left(probe, _started() - before, "ParallelEnv.close")


_GYMNASIUMS = "gymnasium.utils.env_checker.check_env"
SEED_TESTS = ("pettingzoo.test.seed_test", "pettingzoo.test.parallel_seed_test")
"""Tests that need two environments in one process."""


def _names_of_tests(env: MultiAgentEnv) -> list[str]:
    """The tests of other projects for this kind of environment; there are none for dict environments."""
    if isinstance(env, GymnasiumEnv) and isinstance(env.source, gymnasium.Env):
        return [_GYMNASIUMS]
    if isinstance(env.source, pettingzoo.AECEnv):
        return ["pettingzoo.test.api_test", SEED_TESTS[0]]
    if isinstance(env.source, pettingzoo.ParallelEnv):
        return ["pettingzoo.test.parallel_api_test", SEED_TESTS[1]]
    return []


def official(probe: Probe) -> Steps:
    """The tests that the environment's own project has for it, or one of them."""
    constructor = yield from _imported(probe)
    solo: Solo = yield from _made(probe, constructor)
    names = [probe.job.test] if probe.job.test else _names_of_tests(solo.env)
    for name in names:
        question = Question.DETERMINISM if name in SEED_TESTS else Question.API
        yield probe.job.doing(f"the import of {name}")
        try:
            test = _test_of(name, solo.env, constructor, probe.job)
        except ImportError as error:
            what, advice = f"{name} cannot be imported: {error}", f"install what {name} needs, if it is wanted"
            probe.find(Question.API, REMARK, what, advice)
            continue
        breaks = f"nothing breaks here; other libraries may rely on what {name} asks for"
        advice = f"{breaks}: run it by itself, with a debugger"
        yield Doing(name, question, REMARK, advice)
        for what in probe.call(functools.partial(_outcome_of, test)):
            probe.find(question, REMARK, f"{name.rpartition('.')[2]} {what}", advice)
    probe.found.facts["tests"] = names
    probe.found.checked.add(Question.API)


def _test_of(name: str, env: MultiAgentEnv, constructor: Callable[..., Any], job: Job) -> Callable[[], object]:
    if name == _GYMNASIUMS:
        return lambda: check_env(env.source.unwrapped, skip_render_check=True)
    from pettingzoo import test  # here: it imports pygame, which catches signals

    run = getattr(test, name.rpartition(".")[2])
    if name in SEED_TESTS:
        return lambda: run(lambda: construct_one(constructor, seed=job.seed, env_id=0), job.cycles)
    return lambda: run(env.source, job.cycles)


def _outcome_of(test: Callable[[], object]) -> list[str]:
    """Run a test: how it fails, and what it warns of."""
    outcome = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            test()
        except AssertionError as error:
            asserted = str(traceback.extract_tb(error.__traceback__)[-1].line)
            outcome = [f"fails: {in_brief(error) if str(error) else asserted}"]
        except (Exception, SystemExit) as error:
            outcome = [_raises("", error).replace(" raises", "fails", 1)]
    texts = dict.fromkeys(str(one.message) for one in warned if issubclass(one.category, UserWarning))
    if texts:  # without Gymnasium's colours
        plain = [re.sub(r"^(\x1b\[33m)?(WARN: )?|\x1b\[0m$", "", text) for text in texts]
        outcome.append(f"warns: {'; '.join(plain)}")
    return outcome


PROBES: dict[str, Callable[[Probe], Steps]] = {
    "alone": alone,
    "again": again,
    "official": official,
    "parallel": parallel,
}


# -- what a simulator returns ------------------------------------------------------------------------------------------


class Inspector:
    """Looks at what the resets and steps of an environment return.

    Attributes:
        types: The names of the types that rewards, and flags, were of.
    """

    def __init__(self, probe: Probe, env: MultiAgentEnv) -> None:
        self._probe, self._env, self._step = probe, env, 0
        self.types: dict[str, set[str]] = {"reward": set(), "flag": set()}

    def look(self, returned: tuple[dict[Any, Any], ...]) -> None:
        """Look at the dicts of one reset or step; findings with the same advice are of one kind."""
        observations, *rest, infos = returned
        self._step += bool(rest)
        when = f"in step {self._step}" if self._step else "at the first reset"
        for question, severity, what, advice in self._oddities(observations, rest, infos):
            self._probe.find(question, severity, f"{what} ({when})", advice, f"{question} {advice}")

    def _oddities(self, observations: Any, rest: list[Any], infos: Any) -> Iterator[Finding]:
        for agent, observation in observations.items():
            yield from self._odd_observation(agent, observation)
        for agent, space in self._env.action_spaces.items():
            mask = mask_of(observations.get(agent), infos.get(agent))
            if not allows_nothing(mask) and for_sample(space, mask) is None:
                what = f"the action mask of {agent} has another form than its action space, {space}"
                advice = "actions are drawn without it: report masks in the form that the space's `sample` takes, or "
                yield Finding(Question.API, REMARK, what, f"{advice}under another key")
        if rest:
            rewards, terminateds, truncateds = rest
            for agent, reward in rewards.items():
                yield from self._odd_reward(agent, reward)
            for name, flags in (("termination", terminateds), ("truncation", truncateds)):
                self.types["flag"] |= {type(flag).__name__ for flag in flags.values()}
                for agent, flag in flags.items():
                    if not is_flag(flag):
                        what = f"the {name} of {agent} is of type {type(flag).__name__}, not bool"
                        severity = REMARK if isinstance(flag, int) else PROBLEM
                        yield Finding(Question.API, severity, what, "return True or False")
            if self._env.rules is Rules.DICT and ALL not in terminateds:
                what = f"terminateds lacks the key {ALL!r}, which says when the episode is over"
                advice = f"set {ALL!r} in every step; without it, the episode counts as going on"
                yield Finding(Question.API, REMARK, what, advice)
        for key, info in infos.items():
            if not is_empty_info(info) and (reason := pickling_error(info)) is not None:
                advice = "put plain numbers, texts and arrays into infos, no objects of the simulator's"
                what = f"the info of {key} cannot be pickled ({reason})"
                yield Finding(Question.PICKLING, PROBLEM, what, advice)

    def _odd_observation(self, agent: Any, observation: Any) -> Iterator[Finding]:
        known, space = self._env.possible_agents, self._env.observation_spaces.get(agent)
        still = "it then works, but travels pickled, which is slower"
        if known and agent not in known:
            what = f"agent {agent!r} is not among possible_agents"
            yield Finding(Question.API, REMARK, what, f"add it there, with its spaces; {still}")
        elif space is None:
            what = f"agent {agent!r} declares no observation space"
            yield Finding(Question.API, REMARK, what, f"declare one; {still}")
        elif (found := misfit(observation, space)) is not None:
            what = _about(f"the observation of {agent}", found)
            yield Finding(Question.SPACES, PROBLEM if found.breaks else REMARK, what, found.advice)

    def _odd_reward(self, agent: Any, reward: Any) -> Iterator[Finding]:
        self.types["reward"].add(type(reward).__name__)
        if (odd := odd_reward(reward)) is not None:
            yield Finding(Question.API, PROBLEM, f"the reward of {agent} {odd.what}", odd.advice)
        elif agent in self._env.reward_spaces:
            found = misfit(reward, self._env.reward_spaces[agent])
            if found is not None and found.breaks:
                advice = f"{found.advice} (reward_space)"
                yield Finding(Question.SPACES, PROBLEM, f"the reward of {agent} {found.what}", advice)
        elif is_vector(reward):
            what = f"the reward of {agent} is of type {type(reward).__name__}, not one number"
            advice = "return a float, or declare `reward_space` if vectors are meant; vectors travel pickled without it"
            yield Finding(Question.API, REMARK, what, advice)


class Misfit(NamedTuple):
    """How a value is not what it should be: the end of a sentence that begins with its name, and the advice."""

    what: str
    advice: str
    breaks: bool = True  # it stops a `ParallelEnv` or ruins training; else the value arrives, cast to its space's dtype


_KNOWN = (spaces.Box, spaces.Dict, spaces.Tuple, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)
_ARRAYS = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)


def misfit(value: Any, space: Space[Any]) -> Misfit | None:
    """How a value does not fit a space; None if it fits.

    Example:
        >>> misfit(np.zeros(3, np.float32), spaces.Box(0, 1, (4,), np.float32)).what
        'has shape (3,), but its space says (4,)'
        >>> misfit({"ammo": 7}, spaces.Dict(ammo=spaces.Discrete(5))).what
        "['ammo'] is 7 (int), which is not in Discrete(5)"
    """
    if type(space) not in _KNOWN and space.contains(value):
        return None  # a simulator's own class of spaces says what is in it
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            return Misfit(f"is {_brief(value)}, but its space says a dict", f"return a dict with {list(space.spaces)}")
        if value.keys() != space.spaces.keys():
            what = f"has the keys {list(value)}, but its space says {list(space.spaces)}"
            return Misfit(what, "return exactly these keys")
        return _first_misfit((f"[{key!r}]", value[key], child) for key, child in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            got = f"{len(value)} values" if isinstance(value, tuple | list) else type(value).__name__
            return Misfit(f"is {got}, but its space says a tuple of {len(space.spaces)}", "return such a tuple")
        return _first_misfit((f"[{n}]", part, child) for n, (part, child) in enumerate(zip(value, space.spaces)))
    if isinstance(space, _ARRAYS):
        return _misfit_of_array(value, space)
    if space.contains(value):
        return None
    return Misfit(f"is {_brief(value)}, which is not in {space}", "return what is in the space, or declare another one")


def _first_misfit(parts: Iterator[tuple[str, Any, Space[Any]]]) -> Misfit | None:
    """The first misfit that breaks something, else the first of all."""
    found = []
    for name, part, space in parts:
        if (one := misfit(part, space)) is not None:
            found.append(one._replace(what=_about(name, one)))
    return next((one for one in found if one.breaks), found[0] if found else None)


def _about(name: str, found: Misfit) -> str:
    return f"{name}{found.what}" if found.what.startswith("[") else f"{name} {found.what}"


def _misfit_of_array(value: Any, space: Space[Any]) -> Misfit | None:
    try:
        array = np.asarray(value)
    except ValueError:
        return Misfit(f"is {_brief(value)}, which is no array", "return an array of one dtype")
    assert space.dtype is not None
    if array.shape != space.shape:
        advice = f"return arrays of shape {space.shape}, or declare a space of shape {array.shape}"
        return Misfit(f"has shape {array.shape}, but its space says {space.shape}", advice)
    if isinstance(value, np.ndarray | np.generic) and not np.can_cast(array.dtype, space.dtype):
        return Misfit(
            f"has dtype {array.dtype}, but its space says {space.dtype}",
            f"return arrays of this dtype, as with .astype(np.{space.dtype}), or declare dtype=np.{array.dtype}",
            breaks=not np.can_cast(array.dtype, space.dtype, "same_kind"),
        )
    if not np.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
        return Misfit(f"is {_brief(value)}, which is not of numbers", f"return arrays of dtype {space.dtype}")
    if np.issubdtype(array.dtype, np.floating) and np.isnan(array).any():
        return Misfit("contains NaN", "find where it comes from, such as a division by zero")
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
    else:
        low = np.broadcast_to(getattr(space, "start", 0), array.shape)
        high = low + (space.nvec - 1 if isinstance(space, spaces.MultiDiscrete) else 1)
    outside = np.argwhere((array < low) | (array > high))
    if not len(outside):
        return None
    first = tuple(map(int, outside[0]))
    what = f"is {array[first]}{f' at {list(first)}' if first else ''}, but its space says {low[first]} to {high[first]}"
    return Misfit(what, "widen the space's bounds, or clip what is returned", breaks=False)


def odd_reward(reward: Any) -> Misfit | None:
    """What is wrong with a reward; None if it is a finite number, or an array of several.

    Example:
        >>> odd_reward(float("nan")).what, odd_reward(np.float32(1.0))
        ('is nan', None)
    """
    if isinstance(reward, Real | np.bool_):
        advice = "find where it comes from: one such number ruins what is trained with it"
        return None if math.isfinite(reward) else Misfit(f"is {reward}", advice)
    if isinstance(reward, np.ndarray | list | tuple) and np.asarray(reward).dtype.kind in "biuf":
        return None
    return Misfit(f"is {_brief(reward)}, which is no number", "return a float for each agent")


def is_flag(flag: Any) -> bool:
    """Whether it is a bool, Python's or NumPy's."""
    return isinstance(flag, bool | np.bool_)


def pickling_error(value: Any) -> str | None:
    """Why a value cannot be pickled and made again; None if it can.

    Example:
        >>> import threading
        >>> pickling_error({"a": 1}), pickling_error(threading.Lock())
        (None, "TypeError: cannot pickle '_thread.lock' object")
    """
    try:
        pickle.loads(dumps(value))
    except Exception as error:  # a simulator's class may raise anything
        return in_brief(error)
    return None


def _brief(value: Any) -> str:
    text, kind = repr(value), type(value).__name__
    return f"{text} ({kind})" if len(text) <= 40 and text[:1] != "<" else f"of type {kind}"


def fingerprint(value: Any, space: Space[Any] | None = None) -> str:
    """A text that is the same for values that are the same to the bit, types included.

    Args:
        value: Of any kind; an object that is no plain data counts by its type and attributes.
        space: An array is compared in this space's dtype, as `ParallelEnv` returns it.

    Example:
        >>> fingerprint(1.0) == fingerprint(1.0), fingerprint(1.0) == fingerprint(np.float64(1.0))
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in _bytes_of(value, space):
        digest.update(part)
    return digest.hexdigest()


def _bytes_of(value: Any, space: Space[Any] | None, above: tuple[int, ...] = ()) -> Iterator[bytes]:
    """The bytes that a fingerprint is made of; `above` has the ids of what the value lies in, to end cycles."""
    if id(value) in above:
        yield f"^{above.index(id(value))}".encode()
        return
    within = (*above, id(value))
    if isinstance(space, _ARRAYS) and space.dtype is not None:
        array = np.asarray(value)
        value = array.astype(space.dtype) if array.dtype.kind in "biuf" else value
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        yield f"{type(value).__name__}{value.dtype.str}{value.shape}".encode()
        yield value.tobytes()
        return
    yield f"{type(value).__name__}(".encode()
    if isinstance(value, Mapping):
        children = space.spaces if isinstance(space, spaces.Dict) else {}
        # The order of keys is the space's if there is one; else it counts.
        for key in dict.fromkeys([*(key for key in children if key in value), *value]):
            yield repr(key).encode()
            yield from _bytes_of(value[key], children.get(key), within)
    elif isinstance(value, list | tuple | np.ndarray):
        fits = isinstance(space, spaces.Tuple) and len(space.spaces) == len(value)
        parts = space.spaces if isinstance(space, spaces.Tuple) and fits else [None] * len(value)
        for part, child in zip(value, parts):
            yield from _bytes_of(part, child, within)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, int | float | str | bytes | complex | None.__class__):
        yield (value.hex() if isinstance(value, float) else repr(value)).encode()
    elif len(above) < 10:
        # An object's own text may show its address in memory.
        yield from _bytes_of(getattr(value, "__dict__", None), None, within)
    yield b")"
