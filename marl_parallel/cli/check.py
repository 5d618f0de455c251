"""`marl-parallel check`: does an environment work with this package, and with others that speak its API?

Here are the order in which probes run, what follows from comparing their runs, and what is shown. Each probe
(`probes.py`) runs in the worker process of a `ParallelEnv` of its own, so that a crash or a hang is a finding.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from marl_parallel.cli.probes import (
    AFTER,
    PROBLEM,
    REMARK,
    SEED_TESTS,
    STRETCH_S,
    Difference,
    Doing,
    Examination,
    Finding,
    Job,
    Probe,
    Question,
    Trace,
    first_difference,
)
from marl_parallel.cli.target import CommandError
from marl_parallel.core.backend import usable_cpus
from marl_parallel.core.messages import Lost
from marl_parallel.core.reports import manner_of_death, place
from marl_parallel.parallel_env import ParallelEnv
from marl_parallel.types import EnvError, WorkerCrashed, WorkerTimeout

_OTHER_GENERATORS = 1_000_003
_HASH_SEED = "PYTHONHASHSEED"
_starting = threading.Lock()
"""Held while a worker starts, since the environment variables that it gets are this whole process's."""


def examine(job: Job, backends: list[str], on_start: Callable[[str], None] = lambda label: None) -> Examination:
    """Run all probes and compare their runs.

    Args:
        job: The first probe; the others do the same in other ways.
        backends: The backends to try.
        on_start: Called with the name of each probe that starts.
    """

    def started(job: Job) -> None:
        on_start(job.backend if job.probe == "parallel" else job.probe)

    found = Examination(job.environment)
    ((_, first),) = run_probes([job], 1, started)
    found.merge(first)
    if Question.RUNS not in found.checked:
        return found
    facts = found.facts
    job = replace(job, shares_process=facts.get("shares_process", True))
    same = replace(job, probe="again", steps=facts["steps"])
    others = [replace(same, global_seed=_OTHER_GENERATORS, hash_seed=1), *_official(job, facts)]
    # Environments that need a process each can only live in workers that are processes.
    possible = [name for name in backends if job.shares_process or Question.of_backend(name) is Question.PROCESS]
    others += [replace(job, probe="parallel", backend=backend) for backend in possible]
    found.checked.add(Question.API)
    traces: dict[str, dict[int, Trace]] = {}
    for done, outcome in run_probes(others, usable_cpus(), started):
        found.merge(outcome)
        if outcome.traces:
            traces[done.backend if done.probe == "parallel" else done.probe] = outcome.traces
    again = traces.pop("again", None)
    if again is not None:
        found.checked.add(Question.DETERMINISM)
        where = _difference(first.traces, again)
        if where is not None:
            # Then remarks on determinism say nothing new, nor does a comparison beyond what can be repeated.
            found.findings = [
                one for one in found.findings if (one.question, one.severity) != (Question.DETERMINISM, REMARK)
            ]
            ((_, once_more),) = run_probes([same], 1, started)
            differs = not once_more.traces or _difference(first.traces, once_more.traces) is not None
            found.add([_not_deterministic(where, differs, facts)])
            first.traces = {env_id: _first_episode(trace) for env_id, trace in first.traces.items()}
            traces = traces if where.reset > 1 and facts["takes_seed"] else {}
    for backend, run in traces.items():
        question = Question.of_backend(backend)
        found.add(_about_backend(question, first.traces, run))
        found.checked.add(question)
    found.add(_about_cost(facts))
    return found


def _official(job: Job, facts: dict[str, Any]) -> list[Job]:
    """The tests of other projects, each by itself, so that the others run if one hangs or crashes.

    They get so many steps that they last about as long as the other probes. Nothing is known of their single calls, so
    their limit is what they should take altogether.
    """
    step_s, reset_s = (facts[method]["median_s"] for method in ("step", "reset"))
    cycles = int(min(max(job.seconds / step_s, 10), 500))
    seconds = max(job.seconds, cycles * step_s + 10 * reset_s + facts["construct_s"])
    names = [name for name in facts.pop("official") if job.shares_process or name not in SEED_TESTS]
    return [replace(job, probe="official", cycles=cycles, seconds=seconds, test=name) for name in names]


# -- running probes ----------------------------------------------------------------------------------------------------


def run_probes(
    jobs: Iterable[Job], at_once: int, on_start: Callable[[Job], None] = lambda job: None
) -> Iterator[tuple[Job, Examination]]:
    """Run probes, at most `at_once` at the same time, and yield what each has found as they end.

    Raises:
        CommandError: There is no such environment, or it cannot be imported.
    """
    running: set[ParallelEnv] = set()
    stopping = threading.Event()

    def run(job: Job) -> Examination:
        on_start(job)
        found, doing = Examination(job.environment), job.doing("starting")
        env = _worker_for(job)
        running.add(env)
        try:
            while doing is not None and not stopping.is_set():
                ((new, doing),) = env.call("advance")
                found.merge(new)
        except (WorkerCrashed, WorkerTimeout) as error:
            assert doing is not None
            found.add([_ended(error, doing, job)])
        except EnvError as error:
            if isinstance(error.__cause__, CommandError):
                raise CommandError(*error.__cause__.args) from error
            raise
        finally:
            running.discard(env)
            env.close(terminate=True)
        return found

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


def _worker_for(job: Job) -> ParallelEnv:
    with _starting:
        before = os.environ.get(_HASH_SEED)
        os.environ[_HASH_SEED] = str(job.hash_seed)
        try:
            limit = job.limit_s + STRETCH_S
            return ParallelEnv([functools.partial(Probe, job)], adapter="dict", step_timeout=limit)
        finally:
            if before is None:
                del os.environ[_HASH_SEED]
            else:
                os.environ[_HASH_SEED] = before


def _ended(error: WorkerCrashed | WorkerTimeout, doing: Doing, job: Job) -> Finding:
    """The finding that a probe's worker has crashed or hung."""
    where = place(error.stack)
    if isinstance(error, WorkerTimeout):
        what = f"{doing.what} has not come to its end within {job.limit_s:g} s" + (f"; it is at {where}" * bool(where))
        advice = "if it needs longer, raise --timeout; else fix what hangs there"
    else:
        manner, _ = manner_of_death(Lost(error.exitcode, ""))
        what = f"{doing.what} ends the process{f', at {where}' if where else ''}: {manner}"
        advice = (
            "find what ends it, native code or os._exit, and fix it; until then, workers in processes with "
            'on_error="restart" survive it'
        )
    return Finding(doing.question, doing.severity, what, doing.advice or advice)


# -- what follows from comparing ---------------------------------------------------------------------------------------


def _not_deterministic(where: Difference, differs_again: bool, facts: dict[str, Any]) -> Finding:
    """The finding that two runs differ; `differs_again` if those with the same process-wide generators do so, too."""
    text = f"two runs with the same seed and actions differ: {where}"
    advice = "draw from a generator that is made in `reset` from its seed (gymnasium.utils.seeding.np_random)"
    if not differs_again:
        advice += ", not from `random` or `np.random`, which belong to the whole process, and sort what is a set"
    elif where.reset > 1 and facts["takes_seed"]:
        text = (
            "an episode that begins with a seed can be repeated, but one that begins without, as after an automatic "
            f"reset, cannot: two runs with the same seed and actions differ from {where} on"
        )
        advice = (
            "in `reset`, make a new generator only if a seed is given, and else go on with the one that is there "
            "(`super().reset(seed=seed)` and `self.np_random` of gymnasium.Env do that)"
        )
    else:
        advice += "; look for default_rng() without a seed, for the time, for threads"
    if not facts["takes_seed"]:
        advice = f"let `reset` take a `seed`; {advice}"
    return Finding(Question.DETERMINISM, PROBLEM, text, advice)


def _difference(first: dict[int, Trace], again: dict[int, Trace]) -> Difference | None:
    """The first difference of two runs with the same number of steps, and of what follows them."""
    return first_difference(first[0] + first[AFTER], again[0] + again.get(AFTER, []))


def _first_episode(trace: Trace) -> Trace:
    """The part of a trace before its second reset."""
    resets = [place for place, (is_step, _) in enumerate(trace) if not is_step]
    return trace[: resets[1]] if len(resets) > 1 else trace


def _about_backend(question: Question, first: dict[int, Trace], run: dict[int, Trace]) -> list[Finding]:
    for env_id in first.keys() & run.keys():
        where = first_difference(first[env_id], run[env_id])
        if where is not None:
            what = f"beside others, environment {env_id} does not do what it does alone: {where}"
            advice = (
                "let environments share nothing: no globals, class attributes that change, files or ports of one "
                "name; or pass envs_per_worker=1, where one process has to have one"
            )
            return [Finding(question, PROBLEM, what, advice)]
    return []


def _about_cost(facts: dict[str, Any]) -> list[Finding]:
    if "step" not in facts:
        return []
    step_s, p99_s, reset_s = facts["step"]["median_s"], facts["step"]["p99_s"], facts["reset"]["median_s"]
    go_on = "send and recv(min_envs=...) go on with the others"
    remarks = []
    if p99_s > max(5 * step_s, 1e-3):
        text = f"step times are uneven: the p99 is {p99_s / step_s:.0f}x the median"
        remarks.append((text, f"with `step`, everyone waits for the slowest environment; {go_on}"))
    if reset_s > max(20 * step_s, 1e-2):
        text = f"a reset takes as long as {reset_s / step_s:.0f} steps"
        remarks.append((text, f"with `step`, everyone waits while an environment is reset; {go_on}"))
    if step_s < 20e-6:
        text = f"a step takes {1e6 * step_s:.0f} µs, about what it costs to hand it to a worker"
        advice = "use many environments in each of a few workers; `marl-parallel tune` finds how many"
        remarks.append((text, advice))
    return [Finding(Question.COST, REMARK, *remark) for remark in remarks]


# -- what is shown -----------------------------------------------------------------------------------------------------


def show(found: Examination) -> None:
    """Print the answers, what steps cost, and each finding with what to do about it."""
    console, facts = Console(highlight=False, soft_wrap=True), found.facts
    title = found.environment
    if "kind" in facts:
        agents = facts["agents"]
        named = f"{len(agents)} agent{'s' * (len(agents) != 1)}" if agents else "agents not known beforehand"
        title += f": {facts['kind'][0].lower()}{facts['kind'][1:]}, {named}"
    console.print(f"[bold]{escape(title)}")
    table = Table(show_header=False)
    colours = {"yes": "green", "no": "red", "not checked": "dim"}
    for question, answer in found.answers().items():
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
    if facts.get("tests"):
        console.print(f"Tests run: {', '.join(facts['tests'])}")
    for one, backends in found.merged():
        colour = "red" if one.severity is PROBLEM else "yellow"
        where = f" (backend: {', '.join(backends)})" if backends else ""
        console.print(f"\n[{colour}]{one.severity.value}[/]: {escape(one.what)}{where}")
        console.print(f"  what to do: {escape(one.advice)}")


def _duration(seconds: float) -> str:
    """Seconds in a unit that fits.

    Example:
        >>> _duration(0.0002134), _duration(0.0213), _duration(3.21)
        ('213 µs', '21.3 ms', '3.21 s')
    """
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
