"""What `marl-parallel check` looks at: one function for each process that it starts.

`alone`     one copy by itself: construction, spaces, types, pickling, processes left behind, what it costs; then two
            in one process
`again`     the same run in a fresh process, for comparison
`official`  the tests that PettingZoo and Gymnasium have for their environments
`copies`    several copies in a `ParallelEnv`, for comparison

They run where a crash harms nobody (`isolation.py`). What single values should be is in `values.py`; what follows from
comparing runs is in `check.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

import marl_parallel
from marl_parallel.adapters import InvalidAgents, MultiAgentEnv, NotAnEnvironment, adapt
from marl_parallel.backends import descendants
from marl_parallel.cli.findings import Question, Severity
from marl_parallel.cli.inspection import Inspector
from marl_parallel.cli.isolation import ON_LINUX, Job, Notebook, Stopped
from marl_parallel.cli.official import names_of_tests, take, test_of
from marl_parallel.cli.rollout import AFTER, Actor, Solo, Trace, parting, run_alone, run_copies
from marl_parallel.cli.target import constructor_of
from marl_parallel.cli.values import fingerprint, in_brief, pickling_error
from marl_parallel.core.reports import first_line, place
from marl_parallel.core.signatures import construct_one
from marl_parallel.parallel_env import START_TIMEOUT_S
from marl_parallel.types import ParallelEnvError

Constructor = Callable[..., Any]

_PROBLEM, _REMARK = Severity.PROBLEM, Severity.REMARK
_GONE_WITHIN_S = 2.0
_RESETS = 8
_COPIES = 3
_BESIDE_S = 10.0
"""What a `ParallelEnv` may take beside the simulators, as when processes start."""
_STRETCH_S = 0.1
"""So long is timed under one watch: one for each call would show in what short steps cost."""
_ITS_OWN = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
"""Processes that `multiprocessing` keeps until its interpreter ends, whoever used it."""


def alone(job: Job, notebook: Notebook) -> None:
    """One copy by itself: whether it works, what it returns, what it costs, what it leaves behind."""
    constructor = _imported(job, notebook)
    before = {*_started()}
    _check_constructor(constructor, notebook)
    begun = time.perf_counter()
    solo = _solo(constructor, job, notebook)
    notebook.fact(construct_s=time.perf_counter() - begun, **_description(solo.env))
    _check_actions_can_be_drawn(solo.env, notebook)
    inspector = Inspector(solo.env, notebook)
    run = run_alone(solo, job.seed, job.steps, job.seconds, inspector)
    notebook.trace(0, run.trace)
    notebook.trace(AFTER, run.after)
    notebook.fact(steps=run.steps)
    notebook.fact(reward_types=sorted(inspector.reward_types), flag_types=sorted(inspector.flag_types))
    notebook.checked(Question.SPACES)
    _check_second_reset(solo, job, run.trace, notebook)
    beginnings = _beginnings(solo, job)
    _measure_cost(solo, job, notebook)
    with notebook.calling("close"):
        solo.env.close()
    notebook.checked(Question.RUNS)
    _check_nothing_left({*_started()} - before, "close", notebook)
    second = _solo(constructor, job, notebook, 1)
    other = run_alone(second, job.seed + 1, job.steps, job.seconds).trace
    notebook.trace(1, other)
    _check_seed_matters(beginnings, {fingerprint(run.trace[0]), fingerprint(other[0])}, notebook)
    _check_two_in_one_process(second, constructor, job, notebook)
    _provoke(constructor, job, notebook)
    notebook.checked(Question.PICKLING)


def again(job: Job, notebook: Notebook) -> None:
    """The first run once more, with as many steps."""
    solo = _solo(_imported(job, notebook), job, notebook)
    run = run_alone(solo, job.seed, job.steps, math.inf)
    notebook.trace(0, run.trace)
    notebook.trace(AFTER, run.after)


def official(job: Job, notebook: Notebook) -> None:
    """The tests that the environment's own project has for it, or one of them; dict environments have none."""
    constructor = _imported(job, notebook)
    solo = _solo(constructor, job, notebook)
    names = [job.test] if job.test else names_of_tests(solo.env)
    for name in names:
        try:
            with notebook.watch(f"the import of {name}", Question.API):
                test = test_of(name, solo.env, lambda: construct_one(constructor, seed=job.seed, env_id=0), job.cycles)
        except ImportError as error:
            advice = f"install what {name} needs, if it is wanted"
            notebook.find(Question.API, _REMARK, f"{name} cannot be imported: {error}", advice)
        else:
            take(test, notebook, 20 * job.seconds)
    notebook.fact(tests=names)
    notebook.checked(Question.API)


def copies(job: Job, notebook: Notebook) -> None:
    """Three environments, two of them in the same worker where a process can have two."""
    constructor = _imported(job, notebook)
    before = {*_started()}
    question = Question.of_backend(job.backend)

    def calling(what: str) -> AbstractContextManager[None]:
        # One copy after the other; beyond what workers may take: they are to be told of by their own errors.
        return notebook.watch(f'ParallelEnv(backend="{job.backend}"){what}', seconds=_COPIES * job.timeout + _BESIDE_S)

    try:
        with calling(""):
            env = _made(constructor, job)
        try:
            traces = run_copies(env, job.seed, job.steps, job.seconds, lambda method: calling(f".{method}"))
            for env_id, trace in enumerate(traces):
                notebook.trace(env_id, trace)
        finally:
            with calling(".close"):
                env.close()
    except (ParallelEnvError, TypeError, ValueError, OSError) as error:
        _, _, to_do = str(error).partition("What to do: ")
        what = re.sub(r" at 0x[0-9a-f]+", "", first_line(error))
        advice = to_do.partition(".\n")[0] or "mend what it says; the error is that of ParallelEnv"
        notebook.find(question, _PROBLEM, f"in a ParallelEnv: {what}", advice)
    else:
        _check_nothing_left({*_started()} - before, "ParallelEnv.close", notebook)


PROBES: dict[str, Callable[[Job, Notebook], None]] = {
    "alone": alone,
    "again": again,
    "official": official,
    "copies": copies,
}


# -- making a copy -----------------------------------------------------------------------------------------------------


def _imported(job: Job, notebook: Notebook) -> Constructor:
    try:
        with notebook.watch("the import"):
            return constructor_of(job.environment, job.env_kwargs)
    except (Exception, SystemExit) as error:
        notebook.refuse(error)
        raise Stopped from error


def _solo(constructor: Constructor, job: Job, notebook: Notebook, env_id: int = 0) -> Solo:
    random.seed(job.global_seed + env_id)
    np.random.seed(job.global_seed + env_id)
    with notebook.calling("the constructor"):
        simulator = construct_one(constructor, seed=job.seed + env_id, env_id=env_id)
    try:
        with notebook.watch("reading its spaces"):
            return Solo(adapt(simulator), notebook.calling)
    except NotAnEnvironment as error:
        notebook.find(
            Question.API, _PROBLEM, f"it is no environment: {error}", "return one of the kinds that the README lists"
        )
        raise Stopped from error
    except InvalidAgents as error:
        notebook.find(
            Question.API, _PROBLEM, f"its agents cannot be told apart: {error}", "give every agent a name of its own"
        )
        raise Stopped from error


def _description(env: MultiAgentEnv) -> dict[str, Any]:
    return {
        "kind": getattr(type(env), "kind", type(env).__name__),
        "rules": env.rules.value,
        "agents": [str(agent) for agent in env.possible_agents],
        "takes_seed": "seed" in env.reset_keywords,
        "official": names_of_tests(env),
    }


def _made(constructor: Constructor, job: Job) -> marl_parallel.ParallelEnv:
    limit = None if job.backend == "serial" else job.timeout
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        return marl_parallel.ParallelEnv(
            [constructor] * _COPIES,
            False,
            job.seed,
            num_workers=2 if job.shares_process else None,
            envs_per_worker=None if job.shares_process else 1,
            backend=job.backend,
            step_timeout=limit,
            reset_timeout=limit,
            start_timeout=limit or START_TIMEOUT_S,
        )


# -- what is looked at -------------------------------------------------------------------------------------------------


def _check_constructor(constructor: Constructor, notebook: Notebook) -> None:
    with notebook.watch("pickling the constructor", Question.PICKLING):
        reason = pickling_error(constructor)
    if reason is not None:
        notebook.find(
            Question.PICKLING,
            _PROBLEM,
            f"the constructor cannot be pickled ({reason}), so no worker process can be given it",
            "create what does not pickle (locks, connections, windows, open files) when the constructor is called",
        )


def _check_actions_can_be_drawn(env: MultiAgentEnv, notebook: Notebook) -> None:
    unknown = [agent for agent in env.possible_agents if agent not in env.action_spaces]
    if unknown or not env.action_spaces:
        who = f"agent {unknown[0]!r} declares" if unknown else "its agents declare"
        notebook.find(
            Question.API,
            _PROBLEM,
            f"{who} no action space, so there are no actions to step it with",
            "let it have `possible_agents`, and a space for each of them",
        )
        raise Stopped


def _check_second_reset(solo: Solo, job: Job, trace: Trace, notebook: Notebook) -> None:
    """Whether a reset with the same seed begins the same episode again."""
    second = run_alone(solo, job.seed, min(job.steps, 20), job.seconds).trace
    where = parting(second, trace)
    if where is not None and "seed" in solo.env.reset_keywords:
        notebook.find(
            Question.DETERMINISM,
            _REMARK,
            f"reset(seed={job.seed}) on a copy that has been used gives another episode than on a fresh one: {where}",
            "set everything back in `reset`, also counters and generators",
        )


def _check_two_in_one_process(first: Solo, constructor: Constructor, job: Job, notebook: Notebook) -> None:
    """Whether a second environment can be made and stepped beside one that is still open; both are closed.

    A hang ends this process; the fact `shares_process` has been noted before.
    """
    notebook.fact(shares_process=False)
    doing = ""

    @contextlib.contextmanager
    def calling(method: str) -> Iterator[None]:
        nonlocal doing
        doing = f"with another environment open in the same process, {method}"
        with notebook.watch(doing, Question.RUNS, severity=_REMARK, advice=ONE_PER_PROCESS):
            yield

    try:
        with calling("the constructor"):
            simulator = construct_one(constructor, seed=job.seed + 2, env_id=2)
        both = Solo(first.env, calling), Solo(adapt(simulator), calling)
        for solo, latest in [(solo, solo.reset(job.seed)) for solo in both]:
            solo.step(Actor(solo.env.action_spaces, job.seed)(solo.acting, *latest))
        with calling("close"):
            both[1].env.close()
    except (Exception, SystemExit) as error:
        where = place(traceback.format_exc())
        at = f", at {where}" if where else ""
        notebook.find(Question.RUNS, _REMARK, f"{doing} raises{at}: {in_brief(error)}", ONE_PER_PROCESS)
    else:
        notebook.fact(shares_process=True)
    with notebook.calling("close"):
        first.env.close()


ONE_PER_PROCESS = (
    "one simulation per process: pass envs_per_worker=1 to ParallelEnv, so that each environment has a worker process "
    'of its own; backend="serial" and "thread" have one process for all'
)


class _Beginnings(NamedTuple):
    """How many episodes begin differently, of `_RESETS` without seeds and of as many with different ones."""

    without: int
    with_seeds: int


def _beginnings(solo: Solo, job: Job) -> _Beginnings:
    seeds = range(job.seed, job.seed + _RESETS)
    return _Beginnings(
        len({fingerprint(solo.reset()[0]) for _ in seeds}), len({fingerprint(solo.reset(seed)[0]) for seed in seeds})
    )


def _check_seed_matters(beginnings: _Beginnings, copies: set[str], notebook: Notebook) -> None:
    """Whether episodes that vary vary with the seed, and copies with it."""
    if beginnings.without > 1 and beginnings.with_seeds == 1:
        notebook.find(
            Question.DETERMINISM,
            _PROBLEM,
            "the seed is ignored: episodes vary, but begin alike whatever the seed of `reset`, so all copies are alike",
            "make the generator anew in `reset` where a seed is given (gymnasium.utils.seeding.np_random)",
        )
    elif beginnings.without > 1 and len(copies) == 1:
        notebook.find(
            Question.DETERMINISM,
            _PROBLEM,
            "it takes no seed: episodes vary, but those of all copies are alike",
            "let `reset` take a `seed`, and make the generator from it (gymnasium.utils.seeding.np_random)",
        )


def _measure_cost(solo: Solo, job: Job, notebook: Notebook) -> None:
    """Time steps and resets, with nothing else in between."""
    costs: dict[str, list[float]] = {"step": [], "reset": []}
    calls = _timed_calls(solo, job.seed, costs)
    deadline = time.perf_counter() + job.seconds
    while time.perf_counter() < deadline or not costs["step"]:
        with notebook.calling("a step or reset", seconds=_STRETCH_S):
            pause = min(time.perf_counter() + _STRETCH_S, deadline)
            for _ in calls:
                if time.perf_counter() > pause:
                    break
    notebook.fact(**{what: _in_figures(took) for what, took in costs.items()})
    notebook.checked(Question.COST)


def _timed_calls(solo: Solo, seed: int, costs: dict[str, list[float]]) -> Iterator[None]:
    """Episodes without end; what each call has taken is noted, and the caller may stop after it."""
    env, actor = solo.env, Actor(solo.env.action_spaces, seed)
    while True:
        begun = time.perf_counter()
        observations, infos = env.reset()
        costs["reset"].append(time.perf_counter() - begun)
        solo.note(observations)
        over = False
        yield
        while not over:  # after a step at least, as in `run_alone`
            actions = actor(solo.acting, observations, infos)
            begun = time.perf_counter()
            observations, _, terminateds, truncateds, infos = env.step(actions)
            costs["step"].append(time.perf_counter() - begun)
            solo.note(observations, terminateds, truncateds)
            over = solo.over
            yield


def _in_figures(took: list[float]) -> dict[str, float]:
    return {"count": len(took), "median_s": float(np.median(took)), "p99_s": float(np.percentile(took, 99))}


def _provoke(constructor: Constructor, job: Job, notebook: Notebook) -> None:
    """Step a copy that has not been reset, and one with actions that make no sense, to see what it raises."""
    for doing, reset in (("a step before the first reset", False), ("a step with actions that make no sense", True)):
        solo = _solo(constructor, job, notebook, 2)
        actions = dict.fromkeys(solo.env.possible_agents, object())
        if reset:
            solo.reset(job.seed)
        with notebook.watch(doing, Question.API, severity=_REMARK):
            try:
                solo.env.step(actions)
            except (Exception, SystemExit) as error:
                notebook.exception(error)
            with contextlib.suppress(Exception):  # what such a step has broken is not looked at
                solo.env.close()


# -- processes ---------------------------------------------------------------------------------------------------------


def _started() -> list[int]:
    """What this process has started and what these have; orphans are its own."""
    return descendants.below(os.getpid()) if ON_LINUX else []


def _check_nothing_left(new: set[int], after: str, notebook: Notebook) -> None:
    if not ON_LINUX:
        return
    deadline = time.monotonic() + _GONE_WITHIN_S
    while (left := _named(new & {*_started()})) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        first = next(iter(left.values()))
        notebook.find(
            Question.PROCESSES,
            _PROBLEM,
            f"{after}() leaves {len(left)} process{'es' * (len(left) > 1)} behind: {first}",
            "end them in `close`, and wait for them: each restart would leave more of them",
        )
    notebook.checked(Question.PROCESSES)


def _named(pids: set[int]) -> dict[int, str]:
    """Those of them that live, by their command lines."""
    found = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
        except OSError:  # gone
            continue
        if not any(own in command for own in _ITS_OWN):
            found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    return found
