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

`check_findings.py` finds what is wrong with single values, by the errors of the core, and compares runs.
`check_texts.py` has the texts of all findings, and the report.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import math
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import pettingzoo  # type: ignore[import-untyped]
import psutil
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode

from marl_parallel.action_masks import KEY, ActionSampler, mask_of
from marl_parallel.adapters import (
    AdapterMismatch,
    AgentID,
    InvalidAgents,
    LookupFailed,
    MultiAgentEnv,
    NotAnEnvironment,
    adapt,
)
from marl_parallel.adapters.attributes import layers
from marl_parallel.adapters.gymnasium_env import GymnasiumEnv
from marl_parallel.backends import descendants
from marl_parallel.cli.check_findings import Traits, findings_in, first_difference, pickling_error
from marl_parallel.cli.check_texts import (
    AFTER,
    ISOLATED,
    PROBLEM,
    REMARK,
    SEED,
    UNKNOWN_TO_WORKERS,
    Examination,
    Finding,
    Question,
    Trace,
    few,
    make_finding,
)
from marl_parallel.cli.target import DEBUG_HINT, CommandError, constructor_of, in_brief
from marl_parallel.core.backend import usable_cpus
from marl_parallel.core.messages import Lost
from marl_parallel.core.reports.advice import FLAGS, is_of_flags
from marl_parallel.core.reports.reports import code_line, first_line, is_of_a_library, manner_of_death
from marl_parallel.core.spaces import Mismatch
from marl_parallel.core.transition import ALL, Transition
from marl_parallel.core.worker import generators
from marl_parallel.core.worker.constructors import construct_one
from marl_parallel.core.worker.env_runner import EnvRunner, is_over
from marl_parallel.core.worker.forks import end_forked_copy
from marl_parallel.core.worker.loading import imported_for_long
from marl_parallel.core.worker_status import WorkerStatus
from marl_parallel.fingerprints import fingerprint
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.settings import START_TIMEOUT_S
from marl_parallel.types import EnvError, ParallelEnvError, WorkerCrashed, WorkerTimeout

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
_LONG_IMPORT_S = 1.0
_starting = threading.Lock()  # held while a worker starts, with environment variables of its own

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
    where = code_line(error.stack)
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
            self.add(make_finding("unreadable", error=in_brief(error))._replace(question=self.job.question))
        result, self.result = self.result, Examination(self.job.environment)
        return result, doing

    def define(self, name: str, functions: Iterable[Any]) -> None:
        """Add the line where a method of the simulator, or its constructor, begins."""
        if line := line_of(functions):
            self.defined[name] = line
            self.result.facts["defined"] = {**self.defined}

    def find(self, name: str, method: str = "", /, **fields: Any) -> None:
        """Add a finding, about this method of the simulator or its constructor."""
        self.add(make_finding(name, **fields)._replace(where=_method(method, self.defined)))

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
            # The package raises it because of what the simulator returned; or Python, because of how it was called.
            is_call = isinstance(error, AdapterMismatch) and error.__cause__ is not None
            of_results = isinstance(error, AdapterMismatch | Mismatch) and not is_call
            if of_results or (isinstance(error, TypeError) and not _code_line_of(error)):
                to_do = f"let {doing} return that" if of_results else f"let {doing} take what it is called with"
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
            finding = make_finding("unpicklable exception", name=type(error).__name__, reason=reason)
            line = _code_line_of(error)
            self.add(finding._replace(where=line and f"raised at {line}"), finding.what)


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


def _code_line_of(error: BaseException) -> str:
    return code_line("".join(traceback.format_exception(error)))


def _raises(doing: str, error: BaseException) -> str:
    where = _code_line_of(error)
    return f"{doing} raises{f', at {where}' if where else ''}: {in_brief(error)}"


# -- runs --------------------------------------------------------------------------------------------------------------


class RandomActions(ActionSampler):
    """Draws the actions of one environment, by its action masks; the same seed draws the same actions."""

    def __call__(self, acting: Sequence[AgentID], observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> Any:
        """Actions of the acting agents that declare a space, in the order of these."""
        rank = {agent: number for number, agent in enumerate(self.spaces)}
        declared = [agent for agent in acting if self.spaces.get(agent) is not None]  # `in` of a `Dict` is about values
        agents = sorted(declared, key=lambda agent: rank.get(agent, len(rank)))
        return self.sample(agents, {agent: mask_of(observations.get(agent), infos.get(agent)) for agent in agents})


class Solo:
    """One environment by itself: an adapted simulator and its `EnvRunner`, as in a worker, without the transport.

    `EnvRunner`, which decides who acts and when an episode is over, calls this in place of the adapter, so that each
    call is timed, and its results are passed to `inspect` before anything is added to them.
    """

    inspect: Callable[[Sequence[dict[Any, Any]]], None] | None = None

    def __init__(self, env: MultiAgentEnv) -> None:
        self.env, as_env = env, cast(MultiAgentEnv, self)
        self.seconds: dict[str, list[float]] = {"reset": [], "step": []}  # of each call
        self.runner = EnvRunner(as_env, 0, AutoresetMode.DISABLED, WorkerStatus(bytearray(WorkerStatus.NBYTES)))

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
        return self.runner.reset({"seed": seed} if seed is not None and "seed" in self.env.reset_keywords else {})


def _with_masks(infos: Mapping[Any, Any], masks: Mapping[AgentID, Any]) -> dict[Any, Any]:
    """Infos that also have the masks of `env.masks()`, under the key that other environments use."""
    as_infos = {agent: {KEY: np.asarray(mask, np.int8), **infos.get(agent, {})} for agent, mask in masks.items()}
    return {**infos, **as_infos}


def _run_alone(probe: Probe, solo: Solo, seed: int | None, steps: int, seconds: float) -> Steps:
    """Step an environment from a reset with this seed; returns its trace."""
    seeds, actor = itertools.chain([seed], itertools.repeat(None)), RandomActions(solo.env.action_spaces, seed or SEED)
    (trace,) = yield from _run(
        probe.calling,
        lambda _: [solo.begin(next(seeds))],
        lambda actions: [solo.runner.step(*actions)],
        [actor],
        solo.env.observation_spaces,
        steps,
        seconds,
    )
    return trace


def _run(
    calling: Calling,
    begin: Any,
    act: Any,
    actors: Sequence[RandomActions],
    space_of: Spaces,
    steps: int,
    seconds: float,
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
        over = [env_id for env_id, now in latest.items() if is_over(now)]


# -- the probe `alone` -------------------------------------------------------------------------------------------------


def alone(probe: Probe, constructor: Constructor) -> Steps:
    """One environment by itself: whether it works, what it returns, what it costs, which processes it leaves behind."""
    job, before = probe.job, _started()
    yield Finding(Question.PICKLING, PROBLEM, "pickling the constructor", "")
    if (reason := probe.call(lambda: pickling_error(constructor))) is not None:
        finding = make_finding("unpicklable constructor", reason=reason)
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
        traits.add(env, dicts)
        for one in findings_in(env, dicts, types):
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
        probe.find("no last observation", "step", agents=few(sorted(traits.unseen)))
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

    def make() -> Any:
        with generators.seeding_new_torch(of_process):
            return construct_one(constructor, seed=seed, env_id=env_id)

    simulator = yield from probe.calling("the constructor", make)
    construct_s = probe.elapsed_s
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
    actor, now = RandomActions(solo.env.action_spaces, SEED), (yield from probe.calling("reset", solo.begin))
    deadline = time.perf_counter() + probe.job.seconds

    def stretch() -> None:
        nonlocal now
        pause = min(time.perf_counter() + _STRETCH_S, deadline)
        while True:
            now = solo.begin() if is_over(now) else solo.runner.step(actor(now.acting, now.observations, now.infos))
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
        yield make_finding("not alone", what=doing)
        return probe.call(function)

    try:
        make = functools.partial(construct_one, constructor, seed=SEED + 2, env_id=2)
        both = [Solo(first.env), Solo(adapt((yield from calling("the constructor", make))))]
        started = []
        for solo in both:
            started.append((yield from calling("reset", functools.partial(solo.begin, SEED))))
        for solo, now in zip(both, started):
            actions = RandomActions(solo.env.action_spaces, SEED)(now.acting, now.observations, now.infos)
            yield from calling("step", functools.partial(solo.runner.step, actions))
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
        finding, starts = make_finding("processes left", after=after, count=count, first=line), ""
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
        if not env.stepper.schema.mask_spaces:
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
            actors = [RandomActions(env.action_space or {}, SEED + env_id) for env_id in range(_NUM_ENVS)]
            space_of: Spaces = env.observation_space or {}
            traces = yield from _run(calling, begin, act, actors, space_of, job.steps, job.seconds)
            probe.result.traces |= dict(enumerate(traces))
            if job.backend == "process":
                _check_imports(probe, *env.call(imported_for_long, _LONG_IMPORT_S, env_ids=[0]))
        finally:
            yield from calling("close", env.close)
    except (ParallelEnvError, TypeError, ValueError, OSError) as error:
        to_do = str(error).partition("What to do: ")[2].partition(".\n")[0]
        what = re.sub(r" at 0x[0-9a-f]+", "", first_line(error))
        advice = to_do or "fix what it says; ParallelEnv raised this error"
        if isinstance(error, EnvError) and job.backend == "process":  # alone, it did not raise
            advice = f"{advice}. {UNKNOWN_TO_WORKERS[0].upper()}{UNKNOWN_TO_WORKERS[1:]}"
        probe.add(Finding(job.question, PROBLEM, f"in a ParallelEnv: {what}", advice))
    else:
        _check_nothing_left(probe, before, "ParallelEnv.close")


def _check_imports(probe: Probe, seconds: Mapping[str, float]) -> None:
    """Add a finding if a worker process has imported modules for long; by module, the seconds of CPU time."""
    if seconds:
        names = sorted(seconds, key=lambda name: -seconds[name])
        modules = ", ".join(f"{name} {seconds[name]:.1f} s" for name in names)
        probe.find("long imports", modules=modules, names=tuple(names))


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
            finding = make_finding(name, where=where)
            if of_generators:
                finding = finding._replace(advice=f"{ISOLATED}; or {finding.advice}")
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
                finding = make_finding(name, env_id=env_id, where=difference[1])
                if facts.get("generators"):
                    names = " and ".join(facts["generators"])
                    finding = finding._replace(advice=f"it uses {names}: pass isolate_rng=True; {finding.advice}")
                method = "step" if re.search(r", in step \d+$", difference[1]) else "reset"
                result.add([finding._replace(question=question, where=_method(method, defined))])
                break
    if p99_s > max(5 * step_s, 1e-3):
        result.add([make_finding("uneven steps", ratio=p99_s / step_s)])
    if reset_s > max(20 * step_s, 1e-2):
        result.add([make_finding("long resets", ratio=reset_s / step_s)])
    if step_s < 20e-6:
        result.add([make_finding("short steps", us=1e6 * step_s)])
    return result


def _difference(first: dict[int, Trace], again: dict[int, Trace]) -> tuple[int, str] | None:
    """The first difference of two runs with the same number of steps, and of what follows them."""
    return first_difference(first[0] + first[AFTER], again[0] + again.get(AFTER, []))
